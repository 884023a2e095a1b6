"""Grouped GEMM, forward and its two gradients, beside torch's grouped_mm and one dense GEMM of as many operations."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.ops.grouped_gemm import grouped_gemm
from powertrain.testing.bench import measure, table

# experts, features out and in, mean rows an expert: DeepSeek-V2-Lite's two GEMMs with 16384 tokens, DeepSeek-V3's with
# 32 experts on a GPU, and with all 256 on one; few rows each; one row each, as in generating text
SHAPES = ((64, 2816, 2048, 1536), (64, 2048, 1408, 1536), (32, 4096, 7168, 1024), (32, 7168, 2048, 1024),
          (256, 4096, 7168, 256), (64, 2816, 2048, 64), (8, 4096, 14336, 1))  # fmt: skip


def _offsets(E: int, T: int) -> Tensor:
    """Uneven groups: the largest about four times the smallest."""
    sizes = torch.rand(E, generator=torch.Generator().manual_seed(1)) + 0.3
    ends = (sizes.cumsum(0) / sizes.sum() * T).to(torch.int32)
    ends[-1] = T
    return ends.cuda()


def _variants(x: Tensor, w: Tensor, offsets: Tensor) -> dict[str, Callable[[], Tensor]]:
    return {
        "powertrain": lambda: grouped_gemm(x, w, offsets),
        "grouped_mm": lambda: F.grouped_mm(x, w.mT, offs=offsets),
    }


def _rows(E: int, N: int, K: int, rows: int) -> Iterator[str]:
    T = E * rows
    x = torch.randn(T, K, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(E, N, K, device="cuda", dtype=torch.bfloat16) * K**-0.5
    dy, offsets = torch.randn(T, N, device="cuda", dtype=torch.bfloat16), _offsets(E, T)
    variants = {**_variants(x, w, offsets), "one dense GEMM": lambda: F.linear(x, w[0])}
    label, flops = f"E{E} N{N} K{K} T{T} bf16", 2 * T * N * K
    yield table(f"{label} fwd", measure(variants), flops=flops)
    for name, leaf in (("dgrad", x), ("wgrad", w)):
        yield table(f"{label} {name}", measure(_gradients(x, w, offsets, leaf, dy)), flops=flops)
        leaf.requires_grad_(False)


def _gradients(x: Tensor, w: Tensor, offsets: Tensor, leaf: Tensor, dy: Tensor) -> dict[str, Callable[[], object]]:
    """The gradient of one leaf alone: an autograd function in Python makes those of all that want one."""
    leaf.requires_grad_()
    outputs = {name: f() for name, f in _variants(x, w, offsets).items()}
    return {n: lambda y=y: torch.autograd.grad(y, leaf, dy, retain_graph=True) for n, y in outputs.items()}


def run() -> Iterator[str]:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    yield table("dense 8192^3 bf16", measure({"cuBLAS": lambda: a @ b.T}), flops=2 * 8192**3)
    for shape in SHAPES:
        yield from _rows(*shape)
