"""Operands of FP8 products of layers that are sharded over tensor ranks: their scales, copies and gradients.

An element's scale is that of the whole tensor, whatever the number of ranks is:

    tensor   the largest magnitudes of all ranks are exchanged first, 16 bytes a rank
    row      a rank has whole rows of x, or of w; where it has some of their columns, scales are of those columns
    block    likewise: 1x128, and 128x128 of w, which are whole if a rank's features are a multiple of 128
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from powertrain.ops.fp8.formulas import DTYPES, Copies, Quantized
from powertrain.ops.fp8.gemm import fp8_gemm
from powertrain.ops.fp8.linear import GRANULARITIES, fp8_linear
from powertrain.ops.fp8.quantize import fp8_quantize
from powertrain.ops.shapes import acc_dtype
from powertrain.parallel.fp8_parts import whole_scales
from powertrain.parallel.overlap import Overlap
from powertrain.parallel.overlapped_products import (
    Maybe,
)
from powertrain.quant.recipe import Recipe, grad_format
from powertrain.runtime import checks

E4M3 = DTYPES["e4m3"]
X, W, DY, COLUMNS = range(4)  # roles: places in a recipe's granularities
# of an op's schema: rows of each rank, key of the overlap, and `How`
HOW_SCHEMA = "SymInt[] counts, str key, str by, str grad_format, bool power_of_two, bool fast"


class Scaling(NamedTuple):
    """The fields of a recipe that ops take as arguments."""

    by: str
    grad_format: str
    power_of_two: bool
    fast: bool

    @property
    def granularities(self) -> tuple[str, str, str, str]:
        """Granularities of x, w, dy for dgrad, and of dyᵀ and xᵀ."""
        return GRANULARITIES[self.by]

    def quantized(self, x: Tensor, role: int, scale: Tensor | None = None, **options: Any) -> Copies:
        """x by the granularity of a role, with a scale that is given by tensor."""
        format = self.grad_format if options.pop("gradient", False) else "e4m3"
        by = self.granularities[role]
        copies = fp8_quantize(x, by, format, power_of_two=self.power_of_two, scale=scale, **options)
        if scale is not None and by == "tensor" and not x.numel():
            # a rank that has nothing of a tensor reads the others' parts by its scale
            copies = copies._replace(scale=scale, scale_inv=1.0 / scale)
        return copies


def scales_of(
    overlap: Overlap, scaling: Scaling, tensors: Sequence[Tensor], format: str = "e4m3"
) -> list[Tensor | None]:
    """Per-tensor scales of tensors that are sharded over the ranks; None for other granularities."""
    if scaling.by != "tensor":
        return [None] * len(tensors)
    return list(whole_scales(overlap, list(tensors), [format] * len(tensors), scaling.power_of_two))


def weight_rows(w: Tensor, scaling: Scaling, scale: Tensor | None) -> tuple[Quantized, Tensor]:
    """The weight quantized for fprop, and the scale that backward needs (none by block)."""
    copies = scaling.quantized(w, W, scale, columns=False)
    return copies.rows, copies.scale


def weight_columns(w: Tensor, scaling: Scaling, scale: Tensor) -> Quantized:
    """The weight quantized for dgrad; by row, w's scales are folded into dy."""
    columns = scaling.quantized(w, W, None if scaling.by == "block" else scale, rows=False).columns
    return columns._replace(scale_inv=scale.new_ones(w.shape[1])) if scaling.by == "row" else columns


def fold_of(scaling: Scaling, scale: Tensor) -> Maybe:
    return scale.reciprocal() if scaling.by == "row" else None


class GradCopies:
    """Quantized copies of a complete dy [M, N]: row-wise in parts, column-wise at once."""

    def __init__(self, dy: Tensor, scaling: Scaling, scale: Tensor | None, fold: Maybe) -> None:
        self.dy, self.scaling, self.fold = dy, scaling, fold
        # one pass for both copies, where their scales are the same
        self.both = scaling.quantized(dy, DY, scale, gradient=True) if scaling.by == "tensor" else None

    def rows(self, part: slice) -> Quantized:
        if self.both is not None:
            return Quantized(self.both.data[part], self.both.scale_inv)
        return self.scaling.quantized(self.dy[part], DY, gradient=True, fold=self.fold, columns=False).rows

    def columns(self) -> Quantized:
        if self.both is not None:
            return self.both.columns
        return self.scaling.quantized(self.dy, COLUMNS, gradient=True, rows=False).columns


def weight_grad(dy_t: Quantized, x_t: Quantized, weight: Tensor, into_main: bool) -> Maybe:
    """dyᵀ x; or, where the weight has a main_grad, None: it is added there."""
    main = getattr(weight, "main_grad", None)
    if main is None or not into_main:
        return fp8_gemm(dy_t, x_t, out_dtype=weight.dtype)
    if main.dtype is torch.float32 and main.is_contiguous():
        fp8_gemm(dy_t, x_t, out=main, accumulate=True)
    else:
        main.add_(fp8_gemm(dy_t, x_t, out_dtype=torch.float32))
    return None


def bias_grad(dy: Tensor) -> Tensor:
    # of dy as it is: quantizing would lose digits for nothing
    return dy.sum(0, dtype=acc_dtype(dy.dtype)).to(dy.dtype)


def scaling_of(op: str, recipe: Recipe) -> Scaling:
    is_recipe = isinstance(recipe, Recipe)
    good = is_recipe and not recipe.is_delayed
    got = str(recipe) if is_recipe else repr(recipe)
    checks.require(good, op, "recipe", "be Tensor() with the current scale, Row() or Block()", got)
    return Scaling(recipe.by, grad_format(recipe), recipe.power_of_two, recipe.fast)


def product_alone(x: Tensor, weight: Tensor, bias: Maybe, scaling: Scaling) -> Tensor:
    """The GEMM of a group of one rank."""
    return fp8_linear(
        x, weight, bias, by=scaling.by, grad_format=scaling.grad_format,  # type: ignore[arg-type]
        power_of_two=scaling.power_of_two, fast=scaling.fast, main_grad=getattr(weight, "main_grad", None),
    )  # fmt: skip
