"""Calls that stand for linear_cross_entropy."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.ops.cases import Case, randn
from powertrain.ops.cases.cross_entropy import plain_loss, tokens
from powertrain.ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_ref


def linear_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    T, D, V = shape
    weight = (randn(V, D, dtype=torch.float32, device=device, grad=False) * D**-0.5).to(dtype).requires_grad_()
    return {"x": randn(T, D, dtype=dtype, device=device), "weight": weight, "target": tokens(T, V, device)}


def linear_inputs_bias(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    return {**linear_inputs(shape, dtype, device), "bias": randn(shape[-1], dtype=dtype, device=device)}


def plain(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    return plain_loss(F.linear(x, weight, bias), target, **options)


def _case(label: str, inputs: Any, **options: Any) -> Case:
    run, reference, usual = (partial(f, **options) for f in (linear_cross_entropy, linear_cross_entropy_ref, plain))
    return Case("linear_cross_entropy", label, run, reference, usual, inputs, (7, 40, 301), (8192, 4096, 128256))


CASES = [
    _case("", linear_inputs),
    _case("sum-bias", linear_inputs_bias, reduction="sum", softcap=3.0),
    _case("none", linear_inputs_bias, reduction="none", label_smoothing=0.1),
]
