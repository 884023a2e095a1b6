"""FP8: quantization beside a copy, products of every form beside bf16, a Llama-8B layer of every recipe beside bf16."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.models import configure
from powertrain.models.registry import architecture
from powertrain.nn.attention import Context
from powertrain.ops.fp8.current import fp8_quantize_current, new_states, quantize_current_op
from powertrain.ops.fp8.formulas import Quantized
from powertrain.ops.fp8.gemm import fp8_gemm, why_not_torch
from powertrain.ops.fp8.hopper_gemm import why_not as why_not_hopper
from powertrain.ops.fp8.quantize import fp8_quantize
from powertrain.quant import Block, FP8Linear, Row, quantize_model, update_scales
from powertrain.quant import Tensor as TensorRecipe
from powertrain.testing.bench import host_us, measure, table

TOKENS, HIDDEN, INTERMEDIATE = 16384, 4096, 14336
# M, N, K: square; Llama 8B's products with 16384 tokens; the 1.2B model's; gradients of weights; few tiles
SHAPES = ((8192, 8192, 8192), (16384, 6144, 4096), (16384, 4096, 4096), (16384, 14336, 4096), (16384, 4096, 14336),
    (16384, 8192, 2048), (14336, 4096, 16384), (4096, 4096, 16384), (2048, 4096, 4096), (3072, 3072, 8192))  # fmt: skip
FORMS = (("tensor", "tensor"), ("row", "row"), ("group", "block"), ("group", "group"))
RECIPES: dict[str, Any] = {"bf16": None, "tensor, delayed": TensorRecipe(scale="delayed", history=16),
    "tensor": TensorRecipe(), "tensor, two passes": TensorRecipe(power_of_two=False), "row": Row(),
    "block": Block()}  # fmt: skip


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _quantize(columns: int) -> str:
    x, copy = _randn(TOKENS, columns), torch.empty(TOKENS, columns, device="cuda", dtype=torch.bfloat16)
    scale = torch.ones(1, device="cuda")
    kinds: dict[str, Callable[[], Any]] = {"copy": lambda: copy.copy_(x)}
    kinds["delayed"] = partial(fp8_quantize, x, "tensor", scale=scale, measure=True)
    last, other = new_states(1, x.device)[0], torch.zeros(4, dtype=torch.int32, device="cuda")
    fp8_quantize_current(x, last)
    kinds["tensor, last scale"] = partial(fp8_quantize_current, x, last)
    # without the write of the new state: every call finds another scale than the last
    kinds["tensor, again"] = partial(quantize_current_op, x, other, "e4m3", True, True, True)
    kinds |= {by: partial(fp8_quantize, x, by) for by in ("tensor", "row", "group", "block")}
    kinds |= {f"{by}, rows": partial(fp8_quantize, x, by, columns=False) for by in ("tensor", "row", "group")}
    return table(f"quantize {TOKENS}x{columns}", measure(kinds), num_bytes=4 * x.numel())


def _products(M: int, N: int, K: int) -> str:
    x, weight = _randn(M, K), _randn(N, K)
    variants: dict[str, Callable[[], Any]] = {"bf16": lambda: x @ weight.T}
    for form in FORMS:
        a, b = (fp8_quantize(t, by, columns=False).rows for t, by in zip((x, weight), form, strict=True))
        variants |= _backends("-".join(form), a, b)
    return table(f"M{M} N{N} K{K}", measure(variants), flops=2.0 * M * N * K)


def _backends(name: str, a: Quantized, b: Quantized) -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {f"{name} triton": partial(fp8_gemm, a, b, backend="triton")}
    if why_not_hopper(a, b, torch.bfloat16) is None:
        found[f"{name} hopper"] = partial(fp8_gemm, a, b, backend="hopper")
    if why_not_torch(a, b, torch.bfloat16, False) is None:
        found[f"{name} torch"] = partial(fp8_gemm, a, b, backend="torch")
        if name in ("tensor-tensor", "row-row"):
            found[f"{name} fast"] = partial(fp8_gemm, a, b, backend="torch", fast=True)
    return found


def _linears() -> str:
    """The five linear layers of one layer of Llama 8B, forward and backward, 16384 tokens; no attention, no norms."""
    sizes = ((6144, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))
    inputs = {width: _randn(TOKENS, width).requires_grad_() for width in (HIDDEN, INTERMEDIATE)}
    grads = {N: _randn(TOKENS, N) for N, _ in sizes}

    def step(layers: nn.Sequential) -> None:
        for layer in layers:
            layer(inputs[layer.in_features]).backward(grads[layer.out_features])
        layers.zero_grad()
        for x in inputs.values():
            x.grad = None

    variants: dict[str, Callable[[], Any]] = {}
    for name, recipe in RECIPES.items():
        layers = nn.Sequential(*(nn.Linear(K, N, bias=False, device="cuda", dtype=torch.bfloat16) for N, K in sizes))
        if recipe is not None:
            quantize_model(layers, recipe)
            step(layers)
            update_scales(layers)
        variants[name] = partial(step, layers)
    flops = sum(6.0 * TOKENS * N * K for N, K in sizes)
    return table("Llama-8B linears", measure(variants, seconds=0.5), flops=flops)


def _layer(count: int) -> str:
    """One layer of Llama 8B, 2 sequences of 8192 tokens, forward and backward; every recipe has weights of its own.

    The time of one of `count` passes in a row: alone, the GPU waits for the first launches, in a model it does not.
    """
    config = configure(preset="llama-8b", num_layers=1, vocab_size=256)
    x, dy = _randn(2, 8192, HIDDEN).requires_grad_(), _randn(2, 8192, HIDDEN)

    def step(block: nn.Module) -> None:
        for _ in range(count):
            y, stream = block(x, None, Context())
            torch.autograd.backward([y, stream], [dy, dy])
            block.zero_grad()
            x.grad = None

    variants: dict[str, Callable[[], Any]] = {}
    for name, recipe in RECIPES.items():
        with torch.device("cuda"):
            block: nn.Module = architecture("llama")._block(config, 0).bfloat16()
        for p in block.parameters():
            nn.init.normal_(p, std=0.02) if p.dim() > 1 else nn.init.ones_(p)
        if recipe is not None:
            quantize_model(block, recipe)
            step(block)
            update_scales(block)
        variants[name] = partial(step, block)
    timings = measure(variants, seconds=1.0)
    each = {name: replace(timing, ms=timing.ms / count) for name, timing in timings.items()}
    return table("Llama-8B layer" if count == 1 else f"Llama-8B layer, {count} in a row", each)


def _host() -> str:
    """Host time of one layer at 1024^3, over nn.Linear."""
    x, lines = _randn(1024, 1024).requires_grad_(), []
    for name, recipe in RECIPES.items():
        layer = nn.Sequential(nn.Linear(1024, 1024, bias=False, device="cuda", dtype=torch.bfloat16))
        if recipe is not None:
            FP8Linear.convert(layer[0], recipe)  # quantize_model leaves so narrow a layer in bf16
        dy = layer(x).detach()
        both = host_us(lambda layer=layer, dy=dy: layer(x).backward(dy))
        lines.append(
            f"host, 1024^3 | {name:16} | {host_us(lambda layer=layer: layer(x)):6.1f} us | both {both:6.1f} us"
        )
    return "\n".join(lines)


def run() -> Iterator[str]:
    for columns in (HIDDEN, INTERMEDIATE):
        yield _quantize(columns)
    for shape in SHAPES:
        gc.collect()
        yield _products(*shape)
    yield _linears()
    for count in (1, 4):
        yield _layer(count)
    yield _host()
