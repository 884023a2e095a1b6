"""`python -m benchmarks.ops.random_fp8 [COUNT] [SEED]`: FP8 at random sizes, COUNT of each of three kinds.

Quantization of each granularity beside a copy of as many bytes and torch.compile of the formula. Products of each form
as chosen by default beside every backend, torch._scaled_mm itself and the product in bf16. Linear layers of each
recipe, forward with backward, beside nn.Linear in bf16 and a float8 linear of torch._scaled_mm with scales by tensor,
compiled, as torchao has it; each with what quant/cost.py expects of the layer.
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
from torch import Tensor, nn

from benchmarks import ahead
from benchmarks.peers import set_up_torch_compile
from powertrain.ops.fp8.formulas import Quantized
from powertrain.ops.fp8.gemm import fp8_gemm, why_not_torch
from powertrain.ops.fp8.hopper_gemm import why_not as why_not_hopper
from powertrain.ops.fp8.quantize import fp8_quantize
from powertrain.quant import Block, FP8Linear, Row, update_scales
from powertrain.quant import Tensor as TensorRecipe
from powertrain.quant.cost import expected
from powertrain.quant.model import why_not_width
from powertrain.runtime.target import Target
from powertrain.testing.bench import measure

COMPILERS = 12  # processes that run torch.compile before anything is timed
BEHIND = 0.97  # the fastest backend's time divided by the chosen one's: below it a line is marked
FORMS = (("tensor", "tensor"), ("row", "row"), ("group", "block"), ("group", "group"))
RECIPES: dict[str, Any] = {
    "tensor": TensorRecipe(), "tensor, delayed": TensorRecipe(scale="delayed", history=16), "row": Row(),
    "block": Block(),
}  # fmt: skip
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Step = Callable[[], Any]


class Draw(NamedTuple):
    kind: str  # quantize, product or linear
    M: int
    N: int
    K: int
    by: Any  # granularity or form; of a linear None: every recipe

    @property
    def label(self) -> str:
        size = f"{self.M}x{self.K}" if self.kind == "quantize" else f"M{self.M} N{self.N} K{self.K}"
        by = "-".join(self.by) if self.kind == "product" else self.by
        return " ".join(filter(None, (self.kind, size, by)))


def draws(count: int, seed: int) -> list[Draw]:
    source = random.Random(seed)
    return [make(source, number) for number in range(count) for make in (_quantize, _product, _linear)]


def _log(source: random.Random, low: int, high: int, step: int = 1) -> int:
    return max(low, round(math.exp(source.uniform(math.log(low), math.log(high))) / step) * step)


def _quantize(source: random.Random, number: int) -> Draw:
    step = source.choice((1, 8, 16, 64, 128))
    columns = _log(source, 512, 16384, step)
    return Draw("quantize", _log(source, 16, 32768), columns, columns, ("tensor", "row", "group", "block")[number % 4])


def _product(source: random.Random, number: int) -> Draw:
    M, step = _log(source, 16, 32768, source.choice((1, 16, 128))), source.choice((1, 8, 16, 64, 64, 128, 512))
    return Draw("product", M, _log(source, 512, 16384, step), _log(source, 512, 16384, step), FORMS[number % 4])


def _linear(source: random.Random, number: int) -> Draw:
    # torch._scaled_mm takes multiples of 16, of M too in the weight's gradient
    step = (16, 64, 128)[number % 3]
    return Draw("linear", *(_log(source, low, high, step) for low, high in ((128, 32768), (512, 16384), (512, 16384))),
        None)  # fmt: skip


def _randn(*shape: int, device: str) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def _scale(amax: Tensor, most: float) -> Tensor:
    """A power of two, as `fp8_quantize` rounds it."""
    scale = torch.where(amax > 0, most / amax, 1.0)
    return (scale.view(torch.int32) & -(1 << 23)).view(torch.float32)


def _scaled(x: Tensor, by: str) -> tuple[Tensor, Tensor]:
    (R, C), wide = x.shape, by in ("group", "block")
    high, width = 128 if by == "block" else 1 if by != "tensor" else R, 128 if wide else C
    padded = F.pad(x.float(), (0, -C % width, 0, -R % high))
    tiles = padded.unflatten(1, (-1, width)).unflatten(0, (-1, high))
    scale = _scale(tiles.abs().amax((1, 3), keepdim=True), 448.0)
    data = (tiles * scale).clamp(-448.0, 448.0).flatten(2, 3).flatten(0, 1)[:R, :C]
    return data.to(E4M3), scale.reciprocal().flatten(2).flatten(0, 1)


def plain_quantize(x: Tensor, by: str) -> tuple[Tensor, ...]:
    """x and its transpose, which by groups has scales of its own, and their scales."""
    data, scale_inv = _scaled(x, by)
    if by == "group":
        return data, scale_inv, *_scaled(x.T, by)
    return data, scale_inv, data.T.contiguous()


def _cast(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    most = torch.finfo(dtype).max
    scale = most / x.abs().amax().float().clamp(min=1e-12)
    return (x.float() * scale).clamp(-most, most).to(dtype), scale.reciprocal()


def _scaled_mm(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
    """a bᵀ of rows."""
    product: Tensor = torch._scaled_mm(a, b.T, sa, sb, out_dtype=torch.bfloat16, use_fast_accum=False)
    return product


class _PlainLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        (a, sa), (b, sb) = _cast(x, E4M3), _cast(weight, E4M3)
        return _scaled_mm(a, b, sa, sb)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        (d, sd), (a, sa), (b, sb) = _cast(dy, E5M2), _cast(x, E4M3), _cast(weight, E4M3)
        dx = _scaled_mm(d, b.T.contiguous(), sd, sb)
        return dx, _scaled_mm(d.T.contiguous(), a.T.contiguous(), sd, sa)


def plain_linear(x: Tensor, weight: Tensor) -> Tensor:
    y: Tensor = _PlainLinear.apply(x, weight)
    return y


def _both(call: Callable[[Tensor], Tensor], leaves: tuple[Tensor, Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(call(leaves[0]), leaves, dy)


def _layer(draw: Draw, recipe: Any, device: str) -> nn.Linear:
    layer = nn.Linear(draw.K, draw.N, bias=False, device=device, dtype=torch.bfloat16)
    if recipe is not None:
        FP8Linear.convert(layer, recipe)
    return layer


def _operands(draw: Draw, device: str) -> tuple[tuple[Tensor, Tensor], tuple[Quantized, Quantized]]:
    """Of a product: in bf16 and quantized."""
    x, weight = _randn(draw.M, draw.K, device=device), _randn(draw.N, draw.K, device=device)
    a, b = (fp8_quantize(t, by, columns=False).rows for t, by in zip((x, weight), draw.by, strict=True))
    return (x, weight), (a, b)


def _backends(a: Quantized, b: Quantized) -> dict[str, Step]:
    found: dict[str, Step] = {"triton": partial(fp8_gemm, a, b, backend="triton")}
    if why_not_hopper(a, b, torch.bfloat16) is None:
        found["hopper"] = partial(fp8_gemm, a, b, backend="hopper")
    if why_not_torch(a, b, torch.bfloat16, False) is None:
        found["torch"] = partial(fp8_gemm, a, b, backend="torch")
    return found


def launch(draw: Draw) -> None:
    """Ours on meta tensors: for `ahead.build`."""
    if draw.kind == "quantize":
        fp8_quantize(_randn(draw.M, draw.K, device="meta"), draw.by)
    elif draw.kind == "product":
        _, (a, b) = _operands(draw, "meta")
        for call in (partial(fp8_gemm, a, b), *_backends(a, b).values()):
            call()
    else:
        x, dy = _randn(draw.M, draw.K, device="meta").requires_grad_(), _randn(draw.M, draw.N, device="meta")
        for recipe in RECIPES.values():
            layer = _layer(draw, recipe, "meta")
            _both(layer, (x, layer.weight), dy)


def _compiled(draw: Draw) -> Callable[..., Any]:
    return torch.compile(plain_quantize if draw.kind == "quantize" else plain_linear, dynamic=False)


def _compile(count: int, seed: int, number: int) -> None:
    """In a process of its own; the compiled code is in PyTorch's cache then."""
    set_up_torch_compile()
    draw = draws(count, seed)[number]
    x = _randn(draw.M, draw.K, device="cuda")
    if draw.kind == "quantize":
        _compiled(draw)(x, draw.by)
    else:
        weight, dy = _layer(draw, None, "cuda").weight, _randn(draw.M, draw.N, device="cuda")
        call = _compiled(draw)
        _both(lambda x: call(x, weight), (x.requires_grad_(), weight), dy)
    torch.cuda.empty_cache()


def _ms(calls: dict[str, Step], seconds: float = 0.06) -> dict[str, float]:
    return {name: timing.ms for name, timing in measure(calls, seconds=seconds).items()}


def _times(ms: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in ms.items())


def _quantize_line(draw: Draw) -> str:
    x = _randn(draw.M, draw.K, device="cuda")
    copy, compiled = torch.empty_like(x), _compiled(draw)
    ours, other = fp8_quantize(x, draw.by), compiled(x, draw.by)
    # torch.compile's division is not rounded to nearest: an exact power of two may become the one below
    close = ours.data[:, : draw.K].view(torch.uint8) == other[0].view(torch.uint8)
    assert close.float().mean() > 0.95, "its data differ from the formula's"
    ms = _ms({"powertrain": partial(fp8_quantize, x, draw.by), "copy": lambda: copy.copy_(x),
        "torch.compile": partial(compiled, x, draw.by)})  # fmt: skip
    return (
        f"{ms['torch.compile'] / ms['powertrain']:.2f} {draw.label}, of copy {ms['copy'] / ms['powertrain']:.2f}, "
        + (f"ms: {_times(ms)}")
    )


def _product_line(draw: Draw) -> str:
    (x, weight), (a, b) = _operands(draw, "cuda")
    calls: dict[str, Step] = {"powertrain": partial(fp8_gemm, a, b), **_backends(a, b)}
    exact = x.float() @ weight.float().T
    for name, call in calls.items():
        error = (call().float() - exact).norm() / exact.norm()
        assert error < 0.06, f"relative error {error:.3f} of {name}"
    del exact
    if draw.by == ("tensor", "tensor") and draw.N % 16 == 0 and a.data.shape[1] == draw.K:
        calls["_scaled_mm"] = partial(_scaled_mm, a.data, b.data, a.scale_inv, b.scale_inv)
    ms = _ms(calls | {"bf16": lambda: x @ weight.T})
    best = min(value for name, value in ms.items() if name not in ("powertrain", "bf16")) / ms["powertrain"]
    marks = " CHOICE" * (best < BEHIND) + " SLOWER THAN BF16" * (ms["bf16"] < ms["powertrain"])
    return f"{best:.2f} {draw.label}, of bf16 {ms['bf16'] / ms['powertrain']:.2f},{marks} ms: {_times(ms)}"


def _linear_steps(draw: Draw, x: Tensor, dy: Tensor) -> dict[str, Step]:
    layers = {"bf16": _layer(draw, None, "cuda")}
    layers |= {name: _layer(draw, recipe, "cuda") for name, recipe in RECIPES.items()}
    weight, compiled = layers["bf16"].weight, _compiled(draw)
    for layer in layers.values():
        layer.weight.data.copy_(weight.data)
    steps: dict[str, Step] = {name: partial(_both, layer, (x, layer.weight), dy) for name, layer in layers.items()}
    steps["torch.compile, float8"] = partial(_both, lambda x: compiled(x, weight), (x, weight), dy)
    steps["tensor, delayed"]()
    update_scales(layers["tensor, delayed"])
    exact = steps["bf16"]()[0].float()
    for name, step in steps.items():
        error = (step()[0].float() - exact).norm() / exact.norm()
        assert error < 0.1, f"relative error {error:.3f} of dx of {name}"
    return steps


def _verdict(draw: Draw, recipe: Any, gain: float, target: Target) -> str:
    """What the rule of costs expects, with WRONG where the times say otherwise."""
    costs = expected(draw.M, draw.N, draw.K, recipe, target)
    if costs is None:
        return "no rates known"
    wrong = " WRONG" if costs.wins != (gain > 1) else ""
    return f"{gain:.2f} of bf16, expected {costs.bf16 / costs.total:.2f}{wrong}"


def _linear_line(draw: Draw) -> str:
    x, dy = _randn(draw.M, draw.K, device="cuda").requires_grad_(), _randn(draw.M, draw.N, device="cuda")
    ms = _ms(_linear_steps(draw, x, dy), 0.12)
    target = Target.of(x.device)
    kept = " quantize_model leaves it in bf16," if why_not_width(draw.N, draw.K, target) else ""
    verdicts = "; ".join(
        f"{name}: {_verdict(draw, recipe, ms['bf16'] / ms[name], target)}" for name, recipe in RECIPES.items()
    )
    ratio = min(ms["bf16"], ms["torch.compile, float8"]) / min(ms[name] for name in RECIPES)
    return f"{ratio:.2f} {draw.label},{kept} {verdicts}, ms: {_times(ms)}"


LINES = {"quantize": _quantize_line, "product": _product_line, "linear": _linear_line}


def _line(draw: Draw) -> str:
    try:
        return LINES[draw.kind](draw)
    except Exception as error:
        # the other draws are timed all the same
        return f"FAILED {draw.label}: {type(error).__name__}: {error}"


def _compile_all(chosen: list[Draw], count: int, seed: int) -> Iterator[str]:
    with ProcessPoolExecutor(COMPILERS, mp_context=get_context("spawn")) as pool:
        numbers = [number for number, draw in enumerate(chosen) if draw.kind != "product"]
        for number, one in zip(numbers, [pool.submit(_compile, count, seed, n) for n in numbers], strict=True):
            if error := one.exception():
                # it compiles when it is timed
                yield f"{chosen[number].label} was not compiled ahead: {error}"


def run(count: int = 16, seed: int = 1) -> Iterator[str]:
    set_up_torch_compile()
    chosen = draws(count, seed)
    yield ahead.build([partial(launch, draw) for draw in chosen])
    yield from _compile_all(chosen, count, seed)
    for draw in chosen:
        yield _line(draw)
        torch._dynamo.reset()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    for line in run(*map(int, sys.argv[1:])):
        print(line, flush=True)
