"""Dense GEMM: the Hopper kernel, also with its hooks, beside cuBLAS."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from powertrain.ops.gemm import BACKENDS, choose, gemm
from powertrain.ops.hopper_gemm import Gathered, Scattered, hopper_gemm
from powertrain.testing.bench import measure, table

# layout, M, N, K: square; Llama 70B's and 8B's products of 4 tensor ranks, 8192 and 2048 tokens; a narrow, short one
SHAPES = (("nt", 8192, 8192, 8192), *(("nt", M, N, K) for M in (8192, 2048) for N, K in (
    (2560, 8192), (14336, 8192), (1536, 4096), (8192, 2048), (8192, 7168))), ("nt", 8192, 4096, 1024),
    ("nn", 8192, 8192, 2560), ("tn", 8192, 8192, 8192), ("tn", 14336, 8192, 8192))  # fmt: skip
CHUNKS = 4


def _hooks(a: Tensor, b: Tensor, out: Tensor) -> dict[str, Callable[[], object]]:
    """Four chunks that are there, the second elsewhere; and four that go to where they would go anyway."""
    M, N = out.shape
    bounds = torch.arange(0, M + 1, M // CHUNKS, dtype=torch.int32, device="cuda")
    order = torch.tensor([1, 2, 3, 0], dtype=torch.int32, device="cuda")
    counters, signals = torch.zeros(2, CHUNKS, dtype=torch.int32, device="cuda").unbind()
    targets = torch.tensor([part.data_ptr() for part in out.chunk(CHUNKS)], device="cuda")
    places = torch.tensor([signal.data_ptr() for signal in signals], device="cuda")
    gathered = Gathered(bounds, order, torch.ones_like(order), a.chunk(CHUNKS)[1].clone(), (1, 2))
    scattered = Scattered(bounds, order, targets, places, counters, N)
    return {
        "gathered": lambda: hopper_gemm(a, b, out, gathered=gathered),
        "scattered": lambda: (hopper_gemm(a, b, None, scattered=scattered), signals),
    }


def _variants(layout: str, a: Tensor, b: Tensor, out: Tensor) -> dict[str, Callable[[], object]]:
    total = torch.zeros(out.shape, device="cuda")
    plain = {name: partial(gemm, a, b, layout=layout, out=out, backend=name) for name in BACKENDS}
    if layout == "nt":
        return {**plain, **_hooks(a, b, out)}
    add = partial(gemm, a, b, layout=layout, out=total, accumulate=True)
    return {**plain, **{f"{name} +=": partial(add, backend=name) for name in BACKENDS}}


def run() -> Iterator[str]:
    for layout, M, N, K in SHAPES:
        a = torch.randn((K, M) if layout == "tn" else (M, K), device="cuda", dtype=torch.bfloat16)
        b = torch.randn((N, K) if layout == "nt" else (K, N), device="cuda", dtype=torch.bfloat16)
        out = torch.empty(M, N, device="cuda", dtype=torch.bfloat16)
        timings = measure(_variants(layout, a, b, out))
        yield table(f"{layout} M{M} N{N} K{K} bf16", timings, flops=2 * M * N * K) + f"\nchosen: {choose(M, N, K)}"
