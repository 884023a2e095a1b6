"""`python -m benchmarks.train.random_layers [COUNT] [SEED]`: layers of random sizes beside the same in plain PyTorch.

Llama and GPT-NeoX layers, hidden 512 to 6144, head dims 64 to 256, 64 to 16384 tokens, every third with an MLP whose
width is no multiple of 8; bfloat16, forward, and forward with backward: time of the GPU, and the host's of both. Plain
PyTorch is eager and compiled by torch.compile, and compiled with FlashAttention-3 where FLASH_3_LIBRARY names its
library and a sequence has 256 tokens. Ours is eager, and compiled by torch.compile too.
"""

import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import ahead
from benchmarks.peers import flash_3, flash_3_op, set_up_torch_compile
from benchmarks.train import twin
from powertrain.models import gpt_neox, llama
from powertrain.nn.attention import Context
from powertrain.testing.bench import Timing, measure, measure_host

_HEAD_START = 16_000_000  # cycles, about 8 ms: more than Python takes for a layer's forward and backward
COMPILERS = 12  # processes that run torch.compile before anything is timed
_LEAST_FOR_FLASH = 256  # tokens of a sequence
Step = Callable[[], Any]


class Draw(NamedTuple):
    config: Any  # of one layer
    batch: int
    length: int

    @property
    def label(self) -> str:
        c = self.config
        head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_heads
        return (
            f"{c.architecture} {c.hidden_size}, H{c.num_heads}/{c.num_kv_heads or c.num_heads} D{head_dim}, "
            f"{c.intermediate_size} features, B{self.batch} S{self.length}"
        )

    @property
    def takes_flash(self) -> bool:
        return self.length >= _LEAST_FOR_FLASH and flash_3() is not None


def draws(count: int, seed: int) -> list[Draw]:
    source = random.Random(seed)
    return [_draw(source, number) for number in range(count)]


def _draw(source: random.Random, number: int) -> Draw:
    head_dim = source.choice((64, 80, 96, 128, 128, 256))
    heads = source.choice([n for n in (8, 12, 14, 16, 20, 25, 32, 40, 64) if 512 <= n * head_dim <= 6144])
    hidden = heads * head_dim
    width = int(hidden * source.choice((1.4, 8 / 3, 3.5, 4)))
    # of the odd ones one half is even
    width = width | 1 if number % 6 == 2 else width // 8 * 8 + (2 if number % 6 == 5 else 0)
    tokens = source.choice((64, 128, 512, 2048, 4096, 8192, 16384))
    batch = source.choice([n for n in (1, 2, 3, 4, 8) if n <= tokens // 64])
    length = tokens // batch - source.choice((0, 0, source.randrange(1, 40)))
    sizes: dict[str, Any] = dict(
        vocab_size=256, hidden_size=hidden, num_layers=1, num_heads=heads, intermediate_size=width,
        max_position_embeddings=length,
    )  # fmt: skip
    if number % 2:
        options: dict[str, Any] = dict(
            parallel_residual=source.random() < 0.5, rotary_pct=source.choice((0.25, 1.0)), attention_bias=True,
            mlp_bias=True, activation=source.choice(("gelu", "gelu_tanh")),
        )  # fmt: skip
        return Draw(gpt_neox.Config(**sizes, **options), batch, length)
    kv_heads = source.choice([n for n in (1, 2, 4, 5, 7, 8, heads) if heads % n == 0])
    return Draw(llama.Config(**sizes, num_kv_heads=kv_heads), batch, length)


def _ours(draw: Draw, device: str) -> nn.Module:
    make = llama._block if isinstance(draw.config, llama.Config) else gpt_neox._layer
    with torch.device(device):
        return make(draw.config, 0).bfloat16()


def _tensors(draw: Draw, device: str) -> tuple[Tensor, Tensor]:
    """The layer's input and its result's gradient."""
    x, dy = (torch.randn(draw.batch, draw.length, draw.config.hidden_size, device=device).bfloat16() for _ in range(2))
    return x.requires_grad_(), dy


def _call(layer: nn.Module, x: Tensor) -> Tensor:
    y, residual = layer(x, None, Context())
    return y if residual is None else y + residual


def _plain(draw: Draw, x: Tensor, *, compiled: bool, by_flash: bool = False) -> tuple[nn.Module, Step]:
    """The layer in plain PyTorch, and its forward."""
    with torch.device(x.device):
        model = twin.Twin(draw.config, flash_3_op() if by_flash else None).bfloat16()
    layer = model.layers[0]
    call = torch.compile(layer, dynamic=False) if compiled else layer
    return layer, partial(call, x, model.cos[: draw.length], model.sin[: draw.length])


def _both(call: Step, layer: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(call(), [x, *layer.parameters()], dy)


def launch(draw: Draw) -> None:
    """Ours on meta tensors: for `ahead.build`."""
    layer, (x, dy) = _ours(draw, "meta"), _tensors(draw, "meta")
    with torch.no_grad():
        _call(layer, x)
    _both(partial(_call, layer, x), layer, x, dy)


def _compiled(draw: Draw, x: Tensor) -> Iterator[tuple[str, Callable[[], tuple[nn.Module, Step]]]]:
    """What torch.compile compiles: name, and what makes the layer and its forward."""
    yield "powertrain, torch.compile", lambda: _ours_compiled(draw, x)
    yield "torch.compile", lambda: _plain(draw, x, compiled=True)
    if draw.takes_flash:
        yield "torch.compile, flash-attn-3", lambda: _plain(draw, x, compiled=True, by_flash=True)


def _ours_compiled(draw: Draw, x: Tensor) -> tuple[nn.Module, Step]:
    layer = _ours(draw, str(x.device))
    return layer, torch.compile(partial(_call, layer, x), dynamic=False, fullgraph=True)


def _compile(count: int, seed: int, number: int, name: str) -> None:
    """In a process of its own; the compiled code is in PyTorch's cache then."""
    set_up_torch_compile()
    draw = draws(count, seed)[number]
    x, dy = _tensors(draw, "cuda")
    layer, call = dict(_compiled(draw, x))[name]()
    with torch.no_grad():
        call()
    _both(call, layer, x, dy)


def _timed(draw: Draw) -> dict[str, dict[str, Timing]]:
    """Way -> the time of each variant. AssertionError where the gradients of x differ."""
    ours, (x, dy) = _ours(draw, "cuda"), _tensors(draw, "cuda")
    layers = {"powertrain": (ours, partial(_call, ours, x)), "torch": _plain(draw, x, compiled=False)}
    layers |= {name: make() for name, make in _compiled(draw, x)}
    for layer, _ in layers.values():
        layer.load_state_dict(ours.state_dict())
    steps = {name: partial(_both, call, layer, x, dy) for name, (layer, call) in layers.items()}
    exact = steps["torch"]()[0].float()
    error = (steps["powertrain"]()[0].float() - exact).norm() / exact.norm()
    assert error < 3e-2, f"{draw.label}: relative error of dx {error}"
    with torch.no_grad():
        forwards = measure({name: call for name, (_, call) in layers.items()}, seconds=0.06)
    both = measure(steps, seconds=0.2, head_start=_HEAD_START)
    return {"forward": forwards, "both": both, "host of both": measure_host(steps, calls=4, rounds=12)}


def run(count: int = 16, seed: int = 1) -> Iterator[str]:
    set_up_torch_compile()
    chosen = draws(count, seed)
    yield ahead.build([partial(launch, draw) for draw in chosen])
    with ProcessPoolExecutor(COMPILERS, mp_context=get_context("spawn")) as pool:
        waiting = [
            pool.submit(_compile, count, seed, number, name)
            for number, draw in enumerate(chosen)
            for name, _ in _compiled(draw, torch.empty(0))
        ]
        for one in waiting:
            one.result()
    for draw in chosen:
        for way, timings in _timed(draw).items():
            best = min(timing.ms for name, timing in timings.items() if not name.startswith("powertrain"))
            times = ", ".join(f"{name} {timing.ms:.3f}" for name, timing in timings.items())
            yield f"{best / timings['powertrain'].ms:.2f} {draw.label}, {way}, ms: {times}"
        torch._dynamo.reset()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    for line in run(*map(int, sys.argv[1:])):
        print(line, flush=True)
