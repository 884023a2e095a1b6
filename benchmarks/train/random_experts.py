"""`python -m benchmarks.train.random_experts [COUNT] [SEED]`: layers of experts of random sizes beside plain PyTorch.

4 to 256 experts, 1 to 32768 tokens, swiglu and plain activations, with and without shared experts, softmax and sigmoid
scores, groups, even and skewed load; bfloat16. Forward, forward in a CUDA graph up to 128 tokens, and forward with
backward from 128 tokens on. Plain PyTorch sorts tokens for F.grouped_mm, eager and compiled by torch.compile; up to 64
tokens it gathers each token's weights too, compiled. In training ours counts the load and its loss besides.
"""

import math
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import ahead
from benchmarks.peers import set_up_torch_compile
from powertrain.nn.moe import MoE, Router
from powertrain.testing.bench import measure

_HEAD_START = 16_000_000  # cycles, about 8 ms: more than Python takes for a layer's forward and backward
COMPILERS = 6  # processes that run torch.compile before anything is timed; each holds a layer's weights and gradients
MOST_BYTES = 16 << 30  # of a layer's weights
MOST_ROW_BYTES = 8 << 30  # of the rows of all experts and their hidden features
MOST_GATHERED_TOKENS, MOST_GATHERED_BYTES = 64, 8 << 30
FEW = 128  # tokens: up to there in CUDA graphs, from there on with backward
FEATURES = (256, 512, 768, 1024, 1408, 2048, 4096, 14336)
Step = Callable[[], Any]


class Draw(NamedTuple):
    tokens: int
    experts: int
    top_k: int
    hidden: int
    features: int  # of one expert
    shared: int  # features of the shared experts
    kind: Any
    routing: dict[str, Any]
    skewed: bool

    @property
    def label(self) -> str:
        r = self.routing
        load = "skewed" if self.skewed else "even"
        return (
            f"{self.tokens} tokens, {self.top_k} of {self.experts} experts {self.hidden}x{self.features}, shared "
            f"{self.shared}, {self.kind}, {r['score']}, {r['num_groups']} groups, {load}"
        )

    @property
    def weight_bytes(self) -> int:
        """Of one expert."""
        return (3 if self.kind == "swiglu" else 2) * self.features * self.hidden * 2

    @property
    def fits(self) -> bool:
        rows = self.tokens * self.top_k * (2 * self.hidden + 3 * self.features) * 2
        return self.experts * self.weight_bytes <= MOST_BYTES and rows <= MOST_ROW_BYTES

    @property
    def gathers(self) -> bool:
        gathered = self.tokens * self.top_k * self.weight_bytes
        return self.tokens <= MOST_GATHERED_TOKENS and gathered <= MOST_GATHERED_BYTES


def draws(count: int, seed: int) -> list[Draw]:
    source = random.Random(seed)
    return [_draw(source, number) for number in range(count)]


def _draw(source: random.Random, number: int) -> Draw:
    while not (draw := _any_draw(source, number)).fits:
        pass
    return draw


def _any_draw(source: random.Random, number: int) -> Draw:
    few = source.choice((1, 2, 4, 8, 32, 64, 128))
    tokens = few if number % 2 == 0 else round(math.exp(source.uniform(0, math.log(32768))))
    experts, hidden = source.choice((4, 8, 16, 32, 64, 128, 256)), 64 * source.randrange(8, 113)
    groups = source.choice((1, 1, 1, 4)) if experts >= 16 else 1
    routing = dict(
        score=source.choice(("softmax", "sigmoid")), normalize=source.random() < 0.5, num_groups=groups,
        top_groups=max(1, groups // 2),
    )  # fmt: skip
    features, top_k = source.choice(FEATURES), source.randint(1, min(8, experts))
    kind = source.choice(("swiglu", "swiglu", "gelu", "relu_squared"))
    return Draw(tokens, experts, top_k, hidden, features, source.choice((0, 0, features)), kind, routing,
        source.random() < 0.5)  # fmt: skip


def _ours(draw: Draw, device: str) -> MoE:
    with torch.device(device):
        router = Router(draw.hidden, draw.experts, draw.top_k, **draw.routing)
        layer = MoE(router, draw.hidden, draw.features, shared_size=draw.shared, kind=draw.kind).bfloat16()
        for p in layer.parameters():
            torch.nn.init.normal_(p, std=draw.hidden**-0.5)
        if draw.skewed:
            # steps of the scores' own spread, as logits of variance 1 have it
            spread = 1.3 / draw.experts if draw.routing["score"] == "softmax" else 0.2
            router.correction_bias.copy_(-spread * torch.arange(1, draw.experts + 1).log())
    return layer


def _input(draw: Draw, device: str) -> Tensor:
    return torch.randn(1, draw.tokens, draw.hidden, device=device, dtype=torch.bfloat16).requires_grad_()


def _route(layer: MoE, x: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and experts of each token."""
    router, options = layer.router, layer.router.options
    logits = F.linear(x.float(), router.weight.float())
    scores = logits.softmax(-1) if options["score"] == "softmax" else logits.sigmoid()
    choice = scores.detach() + router.correction_bias
    if options["num_groups"] > 1:
        groups = choice.unflatten(-1, (options["num_groups"], -1))
        best = groups.topk(2, -1).values.sum(-1).topk(options["top_groups"], -1).indices
        kept = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, True)
        choice = groups.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    experts = choice.topk(options["top_k"], -1).indices
    weights = scores.gather(-1, experts)
    return weights / weights.sum(-1, keepdim=True) if options["normalize"] else weights, experts


def _activate(kind: str, hidden: Tensor) -> Tensor:
    if kind == "swiglu":
        gate, up = hidden.chunk(2, -1)
        return F.silu(gate) * up
    return F.gelu(hidden) if kind == "gelu" else F.relu(hidden).square()


def _parts(layer: MoE) -> tuple[str, Tensor, Tensor]:
    """Activation, first and second weights."""
    experts = layer.experts
    if hasattr(experts, "gate_up"):
        return "swiglu", experts.gate_up, experts.down
    return experts.kind, experts.up, experts.down


def _with_shared(layer: MoE, x: Tensor, y: Tensor) -> Tensor:
    if layer.shared is None:
        return y
    shared = layer.shared
    return y + shared.down(F.silu(shared.gate(x)) * shared.up(x))


def plain(layer: MoE, x: Tensor) -> Tensor:
    """Sort, gather, F.grouped_mm, weighted index_add."""
    flat = x.flatten(0, -2)
    weights, chosen = _route(layer, flat)
    kind, first, second = _parts(layer)
    sorted_experts, order = chosen.flatten().sort(stable=True)
    every = torch.arange(first.shape[0], device=x.device)
    offsets = torch.searchsorted(sorted_experts, every, right=True, out_int32=True)
    tokens = order // chosen.shape[1]
    hidden = _activate(kind, F.grouped_mm(flat[tokens], first.mT, offs=offsets))
    rows = F.grouped_mm(hidden, second.mT, offs=offsets)
    weighted = (rows * weights.flatten()[order][:, None]).to(x.dtype)
    return _with_shared(layer, x, torch.zeros_like(flat).index_add(0, tokens, weighted).view_as(x))


def gathered(layer: MoE, x: Tensor) -> Tensor:
    """Each token's weights by its experts' numbers, as gpt-fast does."""
    flat = x.flatten(0, -2)
    weights, chosen = _route(layer, flat)
    kind, first, second = _parts(layer)
    hidden = _activate(kind, torch.einsum("th,tkfh->tkf", flat, first[chosen]))
    rows = torch.einsum("tkf,tkhf->tkh", hidden, second[chosen])
    return _with_shared(layer, x, (rows * weights[..., None]).sum(1).to(x.dtype).view_as(x))


def _both(call: Step, layer: MoE, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    # a layer of one token or of few experts may leave a weight of the router without a gradient
    return torch.autograd.grad(call(), [x, *layer.parameters()], dy, allow_unused=True)


def _first(step: Step) -> Any:
    """The gradient of x."""
    return step()[0]


def launch(draw: Draw) -> None:
    """Ours on meta tensors: for `ahead.build`."""
    layer, x = _ours(draw, "meta"), _input(draw, "meta")
    with torch.no_grad():
        layer.eval()(x)
    if draw.tokens >= FEW:
        _both(partial(layer.train(), x), layer, x, torch.empty_like(x))


def _others(draw: Draw, layer: MoE, x: Tensor) -> dict[str, Step]:
    """Compiled forwards."""
    functions = {"torch.compile": plain} | ({"gathered, torch.compile": gathered} if draw.gathers else {})
    return {name: partial(torch.compile(f, dynamic=False), layer, x) for name, f in functions.items()}


def _compile(count: int, seed: int, number: int) -> None:
    """In a process of its own; the compiled code is in PyTorch's cache then."""
    set_up_torch_compile()
    draw = draws(count, seed)[number]
    layer, x = _ours(draw, "cuda").eval(), _input(draw, "cuda")
    others = _others(draw, layer, x)
    with torch.no_grad():
        for call in others.values():
            call()
    if draw.tokens >= FEW:
        _both(others["torch.compile"], layer.train(), x, torch.ones_like(x))
    del layer, x, others
    torch._dynamo.reset()
    torch.cuda.empty_cache()


def _graph(call: Step) -> Step:
    """A replay of `call`, which has run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _check(calls: dict[str, Step]) -> None:
    exact = calls["torch"]().float()
    for name, call in calls.items():
        error = (call().float() - exact).norm() / exact.norm()
        assert error < 3e-2, f"relative error {error:.3f} of {name}"


def _timed(draw: Draw) -> Iterator[tuple[str, dict[str, float]]]:
    """Way, and ms of each variant. AssertionError where values differ."""
    layer, x = _ours(draw, "cuda").eval(), _input(draw, "cuda")
    calls: dict[str, Step] = {
        "powertrain": partial(layer, x),
        "torch": partial(plain, layer, x),
        **_others(draw, layer, x),
    }
    with torch.no_grad():
        _check(calls)
        yield "forward", _ms(calls, 0.06)
        if draw.tokens <= FEW:
            yield "graph", _ms({name: _graph(call) for name, call in calls.items()}, 0.04)
    if draw.tokens >= FEW:
        layer.train()
        dy = torch.randn_like(x)
        steps = {
            name: partial(_both, call, layer, x, dy) for name, call in calls.items() if not name.startswith("gathered")
        }
        _check({name: partial(_first, step) for name, step in steps.items()})
        yield "both", _ms(steps, 0.12)


def _ms(calls: dict[str, Step], seconds: float) -> dict[str, float]:
    return {name: timing.ms for name, timing in measure(calls, seconds=seconds, head_start=_HEAD_START).items()}


def _compile_all(count: int, seed: int) -> Iterator[str]:
    with ProcessPoolExecutor(COMPILERS, mp_context=get_context("spawn")) as pool:
        for number, one in enumerate([pool.submit(_compile, count, seed, number) for number in range(count)]):
            if error := one.exception():
                # it compiles when it is timed
                yield f"draw {number} was not compiled ahead: {error}"


def _lines(draw: Draw) -> Iterator[str]:
    try:
        for way, ms in _timed(draw):
            best = min(other for name, other in ms.items() if name != "powertrain")
            times = ", ".join(f"{name} {value:.4f}" for name, value in ms.items())
            yield f"{best / ms['powertrain']:.2f} {draw.label}, {way}, ms: {times}"
    except Exception as error:
        # the other draws are timed all the same
        yield f"FAILED {draw.label}: {type(error).__name__}: {error}"


def run(count: int = 24, seed: int = 1) -> Iterator[str]:
    set_up_torch_compile()
    chosen = draws(count, seed)
    yield ahead.build([partial(launch, draw) for draw in chosen])
    yield from _compile_all(count, seed)
    for draw in chosen:
        yield from _lines(draw)
        torch._dynamo.reset()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    for line in run(*map(int, sys.argv[1:])):
        print(line, flush=True)
