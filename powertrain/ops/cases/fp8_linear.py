"""Calls that stand for fp8_linear."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.ops.cases import Case, randn
from powertrain.ops.fp8.formulas import Quantized, dequantized, quantize_ref
from powertrain.ops.fp8.linear import fp8_linear, fp8_linear_ref


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    """Values that bfloat16 has: autocast rounds none of them to another FP8 value."""
    M, N, K = shape
    x, weight = (randn(rows, K, dtype=torch.bfloat16, device=device, grad=False) for rows in (M, N))
    weight = weight * 2.0 ** -(K.bit_length() // 2)
    bias = randn(N, dtype=dtype, device=device)
    return {"x": x.to(dtype).requires_grad_(), "weight": weight.to(dtype).requires_grad_(), "bias": bias}


class _Plain(torch.autograd.Function):
    """As one writes it in PyTorch: every operand of a product rounded to FP8 before it, by the formulas."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, by: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.by = by
        kinds = {"tensor": ("tensor", "tensor"), "row": ("row", "row"), "block": ("group", "block")}[by]
        return F.linear(_rounded(x, kinds[0]), _rounded(weight, kinds[1]))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        kinds, format = {
            "tensor": (("tensor", "tensor", "tensor"), "e5m2"),
            "row": (("row", "row", "group"), "e4m3"),
            "block": (("group", "block", "group"), "e4m3"),
        }[ctx.by]
        dx = _rounded(dy, kinds[0], format) @ _rounded(weight, kinds[1])
        dw = _rounded(dy.T, kinds[2], format) @ _rounded(x.T, kinds[2]).T
        return dx, dw, None


def _rounded(x: Tensor, by: str, format: str = "e4m3") -> Tensor:
    copies = quantize_ref(x.detach(), by, format)
    return dequantized(Quantized(copies.data, copies.scale_inv), x.shape[1]).to(x.dtype)


def _plain(x: Tensor, weight: Tensor, bias: Tensor, by: str) -> Tensor:
    product: Tensor = _Plain.apply(x, weight, by)
    return product + bias


# tiny: a partial tile each way, K of no whole 16 elements; full: the qkv projection of Llama 8B
CASES = [
    Case("fp8_linear", by, partial(fp8_linear, by=by), fp8_linear_ref, partial(_plain, by=by), _inputs, (9, 24, 35),
         (16384, 6144, 4096))
    for by in ("tensor", "row", "block")
]  # fmt: skip
