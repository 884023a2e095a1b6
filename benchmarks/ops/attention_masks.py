"""attention with masks, biases and changed scores beside FlexAttention, compiled for each size, and what else takes the
problem: FlashAttention-3 (softcap), PyTorch's kernels (dense masks and biases, dropout).

Random problems; forward, and forward with backward. FlexAttention's block masks are made before the clock starts. No
timing of an opponent whose values differ.
"""

import math
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks import peers
from benchmarks.ops.attention_choice import WAYS, Variants, behind, beside, differs, times
from benchmarks.ops.random_sizes import COMPILERS
from powertrain.ops.attention import attention
from powertrain.runtime.errors import PowertrainError

COUNT, SEED = 26, 0
MOST_TOKENS = 16384
HEADS = ((8, 8), (16, 16), (32, 32), (32, 8), (28, 4), (64, 8))
HEAD_DIMS = (64, 64, 80, 96, 128, 128, 128, 192, 256)
Score = Callable[..., Tensor]


class Problem(NamedTuple):
    kind: str
    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    seed: int

    @property
    def label(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        return f"{self.kind} B{self.batch} S{self.length} H{heads} D{self.head_dim}"


class Setup(NamedTuple):
    """A problem's arguments for ours and for FlexAttention, and what PyTorch's kernels take."""

    options: dict[str, Any]
    score: Score | None = None
    sees: Score | None = None
    bias: Tensor | None = None  # for PyTorch's kernels; bool or of q's dtype
    leaves: tuple[Tensor, ...] = ()  # besides query, key and value
    sinks: Tensor | None = None


def _causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return j <= i


def _softcap(problem: Problem, device: str) -> Setup:
    cap = 50.0
    return Setup({"is_causal": True, "softcap": cap}, lambda s, *_: cap * torch.tanh(s / cap), _causal)


def _alibi(problem: Problem, device: str) -> Setup:
    slopes = torch.exp2(torch.linspace(-0.5, -8, problem.heads, device="cpu")).to(device)
    return Setup(
        {"is_causal": True, "alibi_slopes": slopes}, lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(), _causal
    )


def _window(problem: Problem, device: str) -> Setup:
    return Setup({"is_causal": True, "window_size": (511, 0)}, None, lambda b, h, i, j: (j <= i) & (i - j < 512))


def _both_ways(problem: Problem, device: str) -> Setup:
    """A window to both sides, as ModernBERT's."""
    return Setup({"window_size": (64, 64)}, None, lambda b, h, i, j: (i - j).abs() <= 64)


def _sinks(problem: Problem, device: str) -> Setup:
    """As gpt-oss: a window of 128 and a sink a head."""
    sinks = torch.randn(problem.heads, device=device, requires_grad=True)
    options = {"is_causal": True, "window_size": (127, 0), "sinks": sinks}
    return Setup(options, None, lambda b, h, i, j: (j <= i) & (i - j < 128), leaves=(sinks,), sinks=sinks)


def _prefix(problem: Problem, device: str) -> Setup:
    source = random.Random(problem.seed)
    lengths = [source.randint(1, problem.length) for _ in range(problem.batch)]
    prefix = torch.tensor(lengths, dtype=torch.int32, device="cpu").to(device)
    return Setup({"is_causal": True, "prefix_lengths": prefix}, None, lambda b, h, i, j: (j <= i) | (j < prefix[b]))


def _documents(problem: Problem, device: str) -> Setup:
    source = random.Random(problem.seed)
    rows = [
        sorted(source.choices(range(max(1, problem.length // 700)), k=problem.length)) for _ in range(problem.batch)
    ]
    ids = torch.tensor(rows, dtype=torch.int32, device="cpu").to(device)
    return Setup({"is_causal": True, "document_ids": ids}, None, lambda b, h, i, j: (j <= i) & (ids[b, i] == ids[b, j]))


def _chunks(problem: Problem, device: str) -> Setup:
    size = 1024
    return Setup({"is_causal": True, "chunk_size": size}, None, lambda b, h, i, j: (j <= i) & (i // size == j // size))


def _bias(problem: Problem, device: str, *, grad: bool = False) -> Setup:
    """One bias for all sequences, as T5's."""
    shape = (1, problem.heads, problem.length, problem.length)
    bias = torch.randn(*shape, device=device, dtype=torch.bfloat16, requires_grad=grad)
    return Setup({"attn_bias": bias}, lambda s, b, h, i, j: s + bias[0, h, i, j], None, bias, (bias,) if grad else ())


def _seen(problem: Problem, device: str) -> Setup:
    """A dense mask a sequence: random blocks of 64 x 64 and the diagonal."""
    n = math.ceil(problem.length / 64)
    blocks = torch.rand(problem.batch, 1, n, n, device=device) < 0.4
    blocks |= torch.eye(n, dtype=torch.bool, device=device)
    mask = blocks.repeat_interleave(64, 2).repeat_interleave(64, 3)[..., : problem.length, : problem.length]
    mask = mask.contiguous()
    return Setup({"attn_bias": mask}, None, lambda b, h, i, j: mask[b, 0, i, j], mask)


def _padding(problem: Problem, device: str) -> Setup:
    """Keys behind each sequence's end are not seen, as a tokenizer's attention_mask."""
    source = random.Random(problem.seed)
    ends = [source.randint(problem.length // 8 + 1, problem.length) for _ in range(problem.batch)]
    lengths = torch.tensor(ends, dtype=torch.int32, device="cpu").to(device)
    mask = (torch.arange(problem.length, device=device) < lengths[:, None])[:, None, None]
    return Setup({"attn_bias": mask}, None, lambda b, h, i, j: j < lengths[b], mask)


def _dropout(problem: Problem, device: str) -> Setup:
    return Setup({"is_causal": True, "dropout_p": 0.1})


KINDS: dict[str, Callable[[Problem, str], Setup]] = {
    "softcap": _softcap, "ALiBi": _alibi, "window 512": _window, "window of 64 both ways": _both_ways,
    "window 128, sinks": _sinks, "prefix": _prefix, "documents": _documents, "chunks of 1024": _chunks, "bias": _bias,
    "bias with gradient": partial(_bias, grad=True), "dense mask": _seen, "padding": _padding, "dropout": _dropout,
}  # fmt: skip


def _draws(count: int, seed: int) -> list[Problem]:
    source = random.Random(seed)
    names = list(KINDS)
    found = []
    for n in range(count):
        kind = names[n % len(names)]
        length = round(math.exp(source.uniform(math.log(256), math.log(8192))))
        # dense biases of 64 heads are large
        length = min(length, 4096) if "bias" in kind else length
        batch = min(source.choice((1, 2, 4, 8)), MOST_TOKENS // length)
        heads = source.choice(HEADS[:4] if "bias" in kind else HEADS)
        found.append(Problem(kind, batch, length, *heads, source.choice(HEAD_DIMS), n))
    return found


def _leaves(problem: Problem, device: str) -> list[Tensor]:
    sizes = ((h, problem.head_dim) for h in (problem.heads, problem.kv_heads, problem.kv_heads))
    made = (torch.randn(problem.batch, problem.length, *s, device=device, dtype=torch.bfloat16) for s in sizes)
    return [x.requires_grad_() for x in made]


def launch_draws(draws: list[Problem]) -> None:
    for problem in draws:
        leaves, setup = _leaves(problem, "meta"), KINDS[problem.kind](problem, "meta")
        with suppress(PowertrainError):
            out = attention(*leaves, **setup.options)
            torch.autograd.grad(out, [*leaves, *setup.leaves], torch.empty_like(out))
            with torch.no_grad():
                attention(*leaves, **setup.options)


def launch() -> None:
    launch_draws(_draws(COUNT, SEED))


def _flex(problem: Problem, setup: Setup) -> Callable[..., Tensor]:
    n = problem.length
    blocks = None
    if setup.sees is not None:
        whole = setup.options.keys() & {"prefix_lengths", "document_ids", "attn_bias"}
        blocks = create_block_mask(setup.sees, problem.batch if whole else None, None, n, n, device="cuda")

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (q, k, v))
        # its overloads want literals
        attend: Any = flex_attention
        found = attend(
            query, key, value, setup.score, blocks, enable_gqa=problem.heads != problem.kv_heads,
            return_lse=setup.sinks is not None,
        )  # fmt: skip
        if setup.sinks is not None:
            out, lse = found
            return (out * torch.sigmoid(lse - setup.sinks[:, None])[..., None].to(out.dtype)).transpose(1, 2)
        return found.transpose(1, 2)

    return torch.compile(call, dynamic=False)


def _sdpa(problem: Problem, setup: Setup, backend: SDPBackend) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                query, key, value, setup.bias, setup.options.get("dropout_p", 0.0),
                setup.options.get("is_causal", False), enable_gqa=problem.heads != problem.kv_heads,
            ).transpose(1, 2)  # fmt: skip

    return call


def _opponents(problem: Problem, setup: Setup) -> dict[str, Callable[..., Tensor]]:
    found: dict[str, Callable[..., Tensor]] = {}
    if setup.score is not None or setup.sees is not None:
        found["flex"] = _flex(problem, setup)
    if setup.bias is not None or problem.kind == "dropout":
        found |= {
            f"torch {name.lower()}": _sdpa(problem, setup, getattr(SDPBackend, f"{name}_ATTENTION"))
            for name in ("EFFICIENT", "CUDNN", "FLASH")
        }
    if problem.kind == "softcap" and peers.flash_3() is not None:
        scale, cap = problem.head_dim**-0.5, setup.options["softcap"]
        found["FlashAttention-3"] = lambda q, k, v: peers.Flash3.apply(q, k, v, scale, True, -1, None, None, cap)
    return found


def _compile_flex(count: int, seed: int, i: int) -> None:
    """FlexAttention's kernels of a problem into torch.compile's cache on disk, in a process of its own."""
    peers.set_up_torch_compile()
    problem = _draws(count, seed)[i]
    leaves, setup = _leaves(problem, "cuda"), KINDS[problem.kind](problem, "cuda")
    flex = _opponents(problem, setup).get("flex")
    if flex is not None:
        with suppress(Exception):
            torch.autograd.grad(flex(*leaves), [*leaves, *setup.leaves], torch.randn_like(leaves[0]))
            with torch.no_grad():
                flex(*leaves)
    torch.cuda.empty_cache()


def _ways(problem: Problem) -> Iterator[tuple[str, Variants, list[str]]]:
    """Way, the calls that agree with ours, and a line for each that does not or cannot."""
    leaves, setup = _leaves(problem, "cuda"), KINDS[problem.kind](problem, "cuda")
    calls = {"ours": lambda q, k, v: attention(q, k, v, **setup.options)} | _opponents(problem, setup)
    dout, wanted = torch.randn_like(leaves[0]), [*leaves, *setup.leaves]

    def forward(call: Callable[..., Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return [call(*leaves)]

    def training(call: Callable[..., Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(call(*leaves), wanted, dout))

    for way, run in (("forward", forward), ("training", training)):
        variants: Variants = {}
        expected: list[Tensor] = []
        said = []
        for name, call in calls.items():
            try:
                found = run(call)
            except Exception as error:
                said.append(f"{problem.label} {way} {name}: {str(error).strip().splitlines()[0][:150]}")
                continue
            expected = expected or found
            if problem.kind == "dropout" or not any(map(differs, found, expected)):
                variants[name] = partial(run, call)
            else:
                said.append(f"{problem.label} {way} {name}: other values, not timed")
        yield way, variants, said


def run(count: int = COUNT, seed: int = SEED) -> Iterator[str]:
    """A line for each way of each problem; then those that are slower than the best opponent."""
    draws = _draws(count, seed)
    with ProcessPoolExecutor(COMPILERS, mp_context=get_context("spawn")) as pool:
        list(pool.map(partial(_compile_flex, count, seed), range(count)))
    rows = []
    for problem in draws:
        torch._dynamo.reset()
        for way, variants, said in _ways(problem):
            yield from said
            ms = times(variants, WAYS[way])
            rows.append(beside(f"{problem.label} {way}", ms.pop("ours"), ms))
            yield rows[-1][1]
        torch.cuda.empty_cache()
    yield behind(rows)
