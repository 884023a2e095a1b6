"""Calls that stand for bias_dropout_add. The seed is given, so that kernel, reference and plain drop the same."""

from typing import Any

import torch
from torch import Tensor

from powertrain.ops.bias_dropout_add import bias_dropout_add, bias_dropout_add_ref, dropout_keep
from powertrain.ops.cases import Case, randn

P = 0.25


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    x, residual = (randn(*shape, dtype=dtype, device=device) for _ in range(2))
    return {"x": x, "bias": randn(shape[-1], dtype=dtype, device=device), "residual": residual}


def _inputs_seed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    seed = torch.tensor([-(3**38), 5**25], dtype=torch.int64, device=device)
    return {**_inputs(shape, dtype, device), "seed": seed}


def _call(function: Any, p: float) -> Any:
    return lambda x, bias, residual, seed=None: function(x, bias, residual, p, seed=seed)


def _plain(x: Tensor, bias: Tensor, residual: Tensor, seed: Tensor | None = None) -> Tensor:
    """As models write it, but for the mask."""
    h = x + bias
    return residual + (h if seed is None else h * dropout_keep(seed, x.shape, P) / (1 - P))


TINY, FULL = (3, 2, 1100), (16384, 4096)
CASES = [
    Case(
        "bias_dropout_add", "", _call(bias_dropout_add, P), _call(bias_dropout_add_ref, P), _plain,
        _inputs_seed, TINY, FULL,
    ),
    Case(
        "bias_dropout_add", "p0", _call(bias_dropout_add, 0.0), _call(bias_dropout_add_ref, 0.0), _plain,
        _inputs, (3, 2, 40), FULL,
    ),
    Case(
        "bias_dropout_add", "p0-odd", _call(bias_dropout_add, 0.0), _call(bias_dropout_add_ref, 0.0), _plain,
        _inputs, (3, 2, 41), (16384, 1727),
    ),
]  # fmt: skip
