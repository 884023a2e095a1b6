"""Dense GEMM: the Hopper kernel, also with its hooks and with what follows a product in one, beside cuBLAS."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from powertrain.ops.gemm.gemm import BACKENDS, choose, gemm
from powertrain.ops.gemm.hopper import Gathered, hopper_gemm
from powertrain.ops.gemm.linear_activation import choose as choose_linear
from powertrain.ops.gemm.linear_activation import linear_activation
from powertrain.runtime.dispatch import disable
from powertrain.testing.bench import measure, table

# layout, M, N, K: square; Llama 70B's and 8B's products of 4 tensor ranks, 8192 and 2048 tokens; a narrow, short one
SHAPES = (("nt", 8192, 8192, 8192), *(("nt", M, N, K) for M in (8192, 2048) for N, K in (
    (2560, 8192), (14336, 8192), (1536, 4096), (8192, 2048), (8192, 7168))), ("nt", 8192, 4096, 1024),
    ("nn", 8192, 8192, 2560), ("tn", 8192, 8192, 8192), ("tn", 14336, 8192, 8192))  # fmt: skip
CHUNKS = 4
# kind, M, N, K: layers of Llama 8B, 70B and 1.2B, of GPT-NeoX with hidden 4096 and 2048
LAYERS = (("swiglu", 16384, 14336, 4096), ("swiglu", 8192, 28672, 8192), ("swiglu", 16384, 8192, 2048),
    ("gelu", 16384, 16384, 4096), ("gelu", 16384, 8192, 2048))  # fmt: skip


def _hooks(a: Tensor, b: Tensor, out: Tensor) -> dict[str, Callable[[], object]]:
    """Four chunks that are there, the second in other memory."""
    M = out.shape[0]
    bounds = torch.arange(0, M + 1, M // CHUNKS, dtype=torch.int32, device="cuda")
    order = torch.tensor([1, 2, 3, 0], dtype=torch.int32, device="cuda")
    gathered = Gathered(bounds, order, torch.ones_like(order), a.chunk(CHUNKS)[1].clone(), (1, 2))
    return {"gathered": lambda: hopper_gemm(a, b, out, gathered=gathered)}


def _variants(layout: str, a: Tensor, b: Tensor, out: Tensor) -> dict[str, Callable[[], object]]:
    total = torch.zeros(out.shape, device="cuda")
    plain = {name: partial(gemm, a, b, layout=layout, out=out, backend=name) for name in BACKENDS}
    if layout == "nt":
        return {**plain, **_hooks(a, b, out)}
    add = partial(gemm, a, b, layout=layout, out=total, accumulate=True)
    return {**plain, **{f"{name} +=": partial(add, backend=name) for name in BACKENDS}}


def _layer(kind: str, M: int, N: int, K: int) -> str:
    """A product and its activation, apart and as chosen: without gradients, forward with them, forward and backward."""
    x, weight = (torch.randn(rows, K, device="cuda", dtype=torch.bfloat16) * K**-0.25 for rows in (M, N))
    up = torch.randn_like(weight) * K**-0.25 if kind == "swiglu" else None
    tensors = [t.requires_grad_() for t in (x, weight, up) if t is not None]
    dy = torch.randn(M, N, device="cuda", dtype=torch.bfloat16)
    call = partial(linear_activation, x, weight, kind, up_weight=up)

    def apart(function: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            with disable("linear_activation"):
                return function()

        return run

    ways = {
        "no gradient": torch.no_grad()(call),
        "forward": call,
        "both": lambda: torch.autograd.grad(call(), tensors, dy),
    }
    timings = measure({f"{name}{s}": f for name, way in ways.items() for s, f in ((", apart", apart(way)), ("", way))})
    lines = []
    for name in ways:
        ms, other = timings[name].ms, timings[f"{name}, apart"].ms
        lines.append(f"{kind} M{M} N{N} K{K} bf16 | {name:12} | {ms:.3f} ms, apart {other:.3f} | {other / ms:.3f}x")
    return "\n".join([*lines, f"chosen: {choose_linear(M, N, K, gated=up is not None)}"])


def run() -> Iterator[str]:
    for layout, M, N, K in SHAPES:
        a = torch.randn((K, M) if layout == "tn" else (M, K), device="cuda", dtype=torch.bfloat16)
        b = torch.randn((N, K) if layout == "nt" else (K, N), device="cuda", dtype=torch.bfloat16)
        out = torch.empty(M, N, device="cuda", dtype=torch.bfloat16)
        timings = measure(_variants(layout, a, b, out))
        yield table(f"{layout} M{M} N{N} K{K} bf16", timings, flops=2 * M * N * K) + f"\nchosen: {choose(M, N, K)}"
    for layer in LAYERS:
        yield _layer(*layer)
