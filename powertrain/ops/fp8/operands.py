"""Operands of the three FP8 products of a linear layer, and the products; for ops of one layer and of several.

ops/fp8/linear.py says which elements share a scale, and what is saved.
"""

from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from powertrain.ops.fp8.formulas import DTYPES, GROUP, Copies, Quantized, padded
from powertrain.ops.fp8.gemm import fp8_gemm_into_op, fp8_gemm_op
from powertrain.ops.fp8.quantize import block_scales, quantize_op
from powertrain.ops.fp8.transpose import transpose_op
from powertrain.ops.shapes import cdiv
from powertrain.runtime.dispatch import Op

By = Literal["tensor", "row", "block"]
# by -> granularities of x, W, dy for dgrad, and of dyᵀ and xᵀ
GRANULARITIES = {
    "tensor": ("tensor", "tensor", "tensor", "tensor"),
    "row": ("row", "row", "row", "group"),
    "block": ("group", "block", "group", "group"),
}
INPUT, WEIGHT, GRAD = range(3)  # roles: places in `scales` and `amaxes`


class Layer(NamedTuple):
    """One linear layer as an op's arguments have it; the fields of `fp8_linear`'s arguments."""

    weight: Tensor
    scales: Tensor | None
    w: Tensor | None  # of weight_copies: data, scale_inv, and both of the transposed copy
    w_inv: Tensor | None
    wt: Tensor | None
    wt_inv: Tensor | None
    main_grad: Tensor | None
    amaxes: Tensor | None


class Options(NamedTuple):
    by: str
    grad_format: str
    power_of_two: bool
    fast: bool
    kernel: bool


def parts(copies: Copies | None) -> tuple[Tensor | None, ...]:
    """(w, w_inv, wt, wt_inv) of a layer; the transposed ones None where there is no such copy."""
    if copies is None:
        return (None,) * 4
    return (*copies.rows, *copies.columns) if copies.data_t.dim() == 2 else (*copies.rows, None, None)


def quantized(
    x: Tensor, by: str, format: str, options: Options, *, scale: Tensor | None = None, fold: Tensor | None = None,
    rows: bool = False, columns: bool = False, measure: bool = False,
) -> Copies:  # fmt: skip
    """`fp8_quantize`, of arguments that an op has checked."""
    power_of_two, kernel = options.power_of_two, options.kernel
    return Copies(*quantize_op(x, scale, fold, None, by, format, power_of_two, rows, columns, measure, kernel))


def product(
    a: Quantized, b: Quantized, dtype: torch.dtype, fast: bool, options: Options, bias: Tensor | None = None
) -> Tensor:
    found: Tensor = fp8_gemm_op(*a, *b, bias, dtype, fast, None, options.kernel)
    return found


def role(scales: Tensor | None, index: int) -> Tensor | None:
    return None if scales is None else scales[index : index + 1]


def columns_outputs(x: Tensor, by: str, keep: bool) -> tuple[Tensor, Tensor]:
    """Memory for what `input_operands` keeps of x [..., K]: xᵀ and its scales, empty where nothing is kept."""
    (*lead, K) = x.shape
    M = prod(lead)
    none = x.new_empty(0, dtype=torch.float32)
    x_t = x.new_empty((K, padded(M)) if keep else 0, dtype=DTYPES["e4m3"])
    groups = none.new_empty((cdiv(M, GROUP), K)).T
    return x_t, (none.new_empty(1) if by == "tensor" else groups) if keep else none


def weight_scale_outputs(layer: Layer, by: str, keep: bool) -> Tensor:
    """Memory for the scales of W that `weight_operand` keeps."""
    size = {"tensor": 1, "row": layer.weight.shape[0]}.get(by, 0) if keep and layer.w is None else 0
    return layer.weight.new_empty(size, dtype=torch.float32)


def input_operands(
    x: Tensor, scale: Tensor | None, options: Options, keep: bool, measure: bool
) -> tuple[Copies, Quantized]:
    """x [M, K] by rows, and xᵀ, which backward needs (keep; else it is empty)."""
    in_x, _, _, in_wgrad = GRANULARITIES[options.by]
    # one pass over x for both copies, where their scales are the same
    both = keep and in_x == in_wgrad
    ours = quantized(x, in_x, "e4m3", options, scale=scale, rows=True, columns=both, measure=measure)
    if not keep:
        return ours, Quantized(x.new_empty(0, dtype=DTYPES["e4m3"]), x.new_empty(0, dtype=torch.float32))
    return ours, (ours if both else quantized(x, in_wgrad, "e4m3", options, columns=True)).columns


def weight_operand(layer: Layer, options: Options, keep: bool) -> tuple[Quantized, Tensor, Tensor]:
    """W by rows; the scales that backward quantizes Wᵀ by (keep; else empty); the largest magnitude if W was read."""
    measure, none = layer.amaxes is not None, layer.weight.new_empty(0, dtype=torch.float32)
    if layer.w is not None and layer.w_inv is not None:
        return Quantized(layer.w, layer.w_inv), none, none.new_zeros(1) if measure else none
    scale = role(layer.scales, WEIGHT)
    in_w = GRANULARITIES[options.by][WEIGHT]
    made = quantized(layer.weight, in_w, "e4m3", options, scale=scale, rows=True, measure=measure)
    return made.rows, made.scale if keep else none, made.amax


def dgrad_fold(layer: Layer, w_scale: Tensor, by: str) -> Tensor | None:
    """By row, the inverse scales of W: they are of columns of Wᵀ, along the sum of dgrad, where no product takes
    scales, so dy takes them."""
    if by != "row":
        return None
    return w_scale.reciprocal() if layer.w_inv is None else layer.w_inv


def grad_operands(
    dy: Tensor, scale: Tensor | None, fold: Tensor | None, options: Options, rows: bool, columns: bool, measure: bool
) -> tuple[Quantized, Quantized, Tensor]:
    """dy by rows for dgrad, dyᵀ for wgrad, and the largest magnitude; empty where they are not wanted."""
    _, _, in_dgrad, in_wgrad = GRANULARITIES[options.by]
    if in_dgrad == in_wgrad:
        both = quantized(
            dy, in_dgrad, options.grad_format, options, scale=scale, rows=rows, columns=columns, measure=measure
        )
        return both.rows, both.columns, both.amax
    none = dy.new_empty(0, dtype=torch.float32)
    by_rows = by_columns = Quantized(none.new_empty(0, dtype=DTYPES[options.grad_format]), none)
    if rows:
        by_rows = quantized(dy, in_dgrad, options.grad_format, options, fold=fold, rows=True).rows
    if columns:
        by_columns = quantized(dy, in_wgrad, options.grad_format, options, columns=True).columns
    return by_rows, by_columns, none


def dgrad(dy: Quantized, layer: Layer, w_scale: Tensor, fold: Tensor | None, options: Options) -> Tensor:
    """dy W [M, K]."""
    K = layer.weight.shape[1]
    if layer.wt is not None and layer.wt_inv is not None:
        transposed = Quantized(layer.wt, layer.wt_inv)
    elif layer.w is not None and layer.w_inv is not None:
        transposed = _transposed_data(layer.w, layer.w_inv, K, options)
    else:
        # a block's scale is the same for both copies, and costs less to find again than to save
        scale = None if options.by == "block" else w_scale
        in_w = GRANULARITIES[options.by][WEIGHT]
        transposed = quantized(layer.weight, in_w, "e4m3", options, scale=scale, columns=True).columns
    if fold is not None:
        # W's are in dy
        transposed = transposed._replace(scale_inv=fold.new_ones(K))
    return product(dy, transposed, layer.weight.dtype, False, options)


def wgrad(dy: Quantized, x: Quantized, layer: Layer, options: Options) -> Tensor | None:
    """dyᵀ x [N, K]; None where it was added to main_grad."""
    # never with fast accumulation: gradients keep float32 sums
    if layer.main_grad is None:
        return product(dy, x, layer.weight.dtype, False, options)
    fp8_gemm_into_op(*dy, *x, None, layer.main_grad, True, False, None, options.kernel)
    return None


def _transposed_data(w: Tensor, w_inv: Tensor, columns: int, options: Options) -> Quantized:
    """Wᵀ, of W that is quantized already: its bytes, and by block its scales, transposed."""
    if w_inv.dim() == 2:
        w_inv = block_scales(w, columns, w.shape[0]).copy_(w_inv.T)
    return Quantized(transpose_op(w, columns, options.kernel), w_inv)


def _raise(amaxes: Tensor, amax: Tensor, first: int) -> None:
    part = amaxes[first : first + amax.shape[0]]
    torch.maximum(part, amax, out=part)


raise_op = Op("fp8_raise(Tensor(a!) amaxes, Tensor amax, int first) -> ()", _raise, lambda amaxes, amax, first: None)
