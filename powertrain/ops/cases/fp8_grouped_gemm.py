"""Calls that stand for fp8_grouped_gemm."""

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from powertrain.ops.cases import Case, randn
from powertrain.ops.fp8.formulas import Quantized, dequantized, quantize_ref
from powertrain.ops.fp8.grouped import fp8_grouped_gemm, fp8_grouped_gemm_ref


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    """Groups of uneven sizes, the second empty, a sixteenth of the rows in none; values that bfloat16 has, so that
    autocast rounds none of them to another FP8 value."""
    T, E, N, K = shape
    parts = torch.arange(1, E + 1, device=device, dtype=torch.float64)
    ends = (parts / E) ** 1.2 * (T - T // 16)
    offsets = torch.where(parts == 2, ends[0], ends).to(torch.int32)
    x = randn(T, K, dtype=torch.bfloat16, device=device, grad=False)
    weight = randn(E, N, K, dtype=torch.bfloat16, device=device, grad=False) * 2.0 ** -(K.bit_length() // 2)
    return {"x": x.to(dtype).requires_grad_(), "weight": weight.to(dtype).requires_grad_(), "offsets": offsets}


class _Plain(torch.autograd.Function):
    """As one writes it in PyTorch: a loop over the groups, every operand rounded to FP8 before, by the formulas."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor, by: str) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        ctx.by = by
        rows, weights = _rounded(x, "group" if by == "block" else by), [_rounded(w, by) for w in weight]
        return _rows(x, offsets, lambda e, part: rows[part] @ weights[e].T, weight.shape[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, offsets = ctx.saved_tensors
        rows, weights = _rounded(dy, "group" if ctx.by == "block" else ctx.by), [_rounded(w, ctx.by) for w in weight]
        dx = _rows(dy, offsets, lambda e, part: rows[part] @ weights[e], weight.shape[2])
        used = torch.arange(dy.shape[0], device=dy.device)[:, None] < offsets[-1]
        dy_t, x_t = (_rounded(torch.where(used, t, 0.0).T, "group") for t in (dy, x))
        dw = torch.stack([dy_t[:, part] @ x_t[:, part].T for part in _parts(offsets)])
        return dx, dw, None, None


def _parts(offsets: Tensor) -> list[slice]:
    return [slice(start, end) for start, end in pairwise([0, *offsets.tolist()])]


def _rows(x: Tensor, offsets: Tensor, product: Any, width: int) -> Tensor:
    y = x.new_zeros((x.shape[0], width))
    for e, part in enumerate(_parts(offsets)):
        y[part] = product(e, part)
    return y


def _rounded(x: Tensor, by: str) -> Tensor:
    copies = quantize_ref(x.detach(), by, "e4m3")
    return dequantized(Quantized(copies.data, copies.scale_inv), x.shape[1]).to(x.dtype)


def _plain(x: Tensor, weight: Tensor, offsets: Tensor, by: str) -> Tensor:
    product: Tensor = _Plain.apply(x, weight, offsets, by)
    return product


# tiny: groups that begin within a tile; full: experts of which FP8 products are faster
CASES = [
    Case("fp8_grouped_gemm", by, partial(fp8_grouped_gemm, by=by), fp8_grouped_gemm_ref, partial(_plain, by=by),
         _inputs, (19, 3, 17, 35), (32768, 32, 4096, 7168))
    for by in ("row", "block")
]  # fmt: skip
