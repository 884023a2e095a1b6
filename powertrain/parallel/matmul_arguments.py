"""Checks of the operands of products with collectives, and their dtype under autocast."""

from collections.abc import Sequence

import torch
from torch import Tensor

from powertrain.parallel.overlap import Overlap
from powertrain.parallel.overlapped_products import MAX_WEIGHTS, Maybe, Tensors
from powertrain.runtime import checks
from powertrain.runtime.dispatch import autocast_dtype


def checked_operands(op: str, x: Tensor, weights: Tensors, biases: Sequence[Maybe]) -> tuple[Tensor, list[Maybe]]:
    """x in the weights' dtype under autocast, and weights and biases padded to MAX_WEIGHTS each."""
    checks.require(x.dim() == 2, op, "x", "be [rows, features]", list(x.shape))
    checks.require(0 < len(weights) <= MAX_WEIGHTS, op, "weight", f"be 1 to {MAX_WEIGHTS} tensors", len(weights))
    checks.require(len(biases) == len(weights), op, "bias", f"have an entry per weight ({len(weights)})", len(biases))
    if (dtype := autocast_dtype(x)) is not None:
        x, weights = x.to(dtype), [_cast(w, dtype) for w in weights]
        biases = [None if bias is None else bias.to(dtype) for bias in biases]
    checks.floating(op, x=x)
    for w, bias in zip(weights, biases, strict=True):
        if not _fits(x, w, bias):
            _refuse(op, x, w, bias)
    pad = [None] * (MAX_WEIGHTS - len(weights))
    return x.contiguous(), [*weights, *pad, *biases, *pad]


def checked_shares(op: str, x: Tensor, rows: Sequence[int] | None, overlap: Overlap) -> Sequence[int]:
    """Every rank's rows of a result that has x's rows in all; None: the same number each."""
    if rows is None:
        good = x.shape[0] % overlap.size == 0
        # uneven shares are legal, but only the caller knows how
        checks.require(good, op, "x", f"have rows that {overlap.size} ranks divide, or rows be given", list(x.shape))
        rows = [x.shape[0] // overlap.size] * overlap.size
    good = len(rows) == overlap.size and sum(rows) == x.shape[0] and min(rows) >= 0
    checks.require(good, op, "rows", f"have {overlap.size} entries that sum to x's rows, {x.shape[0]}", list(rows))
    return rows


def _fits(x: Tensor, w: Tensor, bias: Maybe) -> bool:
    # cheap tests first: this runs in every call
    if w.dim() != 2 or w.shape[1] != x.shape[1] or w.dtype is not x.dtype or w.device != x.device:
        return False
    return bias is None or (bias.shape == w.shape[:1] and bias.dtype is x.dtype and bias.device == x.device)


def _refuse(op: str, x: Tensor, w: Tensor, bias: Maybe) -> None:
    checks.require(w.dim() == 2, op, "weight", "be [features out, features in]", list(w.shape))
    checks.shape(op, "weight", w, (w.shape[0], x.shape[1]), "features out, x's features")
    checks.shape(op, "bias", bias, (w.shape[0],), "the weight's first dim")
    checks.same_device(op, "x", x, weight=w, bias=bias)
    checks.same_dtype(op, "x", x, weight=w, bias=bias)


def _cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight in autocast's dtype, with the `main_grad` that it may have."""
    cast, main = weight.to(dtype), getattr(weight, "main_grad", None)
    if main is not None:
        cast.main_grad = main  # type: ignore[attr-defined]
    return cast
