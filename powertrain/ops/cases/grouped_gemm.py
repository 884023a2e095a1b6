"""Calls that stand for grouped_gemm."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.ops.cases import Case, randn
from powertrain.ops.grouped_gemm import grouped_gemm, grouped_gemm_ref


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    """Groups of uneven sizes, the second empty, a sixteenth of the rows in none."""
    T, E, N, K = shape
    parts = torch.arange(1, E + 1, device=device, dtype=torch.float64)
    ends = (parts / E) ** 1.2 * (T - T // 16)
    offsets = torch.where(parts == 2, ends[0], ends).to(torch.int32)
    weight = (randn(E, N, K, dtype=torch.float32, device=device, grad=False) * K**-0.5).to(dtype).requires_grad_()
    return {"x": randn(T, K, dtype=dtype, device=device), "weight": weight, "offsets": offsets}


def _plain(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """As one writes it in PyTorch: a loop over the groups."""
    ends = [0, *offsets.tolist(), x.shape[0]]
    groups = [x[start:end] for start, end in pairwise(ends)]
    products = [F.linear(rows, w) for rows, w in zip(groups, weight, strict=False)]
    return torch.cat([*products, x.new_zeros((groups[-1].shape[0], weight.shape[1]))])


# full: the experts of DeepSeek-V2-Lite, 6 of 64 for 16384 tokens; odd: rows that neither TMA nor CUTLASS can read
CASES = [
    Case("grouped_gemm", "", grouped_gemm, grouped_gemm_ref, _plain, _inputs, (37, 3, 24, 40), (98304, 64, 2816, 2048)),
    Case("grouped_gemm", "odd", grouped_gemm, grouped_gemm_ref, _plain, _inputs, (37, 5, 19, 21), (8192, 8, 1003, 515)),
]
