"""Calls that stand for rms_norm and layer_norm."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.ops.cases import Case, randn
from powertrain.ops.norm import layer_norm, layer_norm_ref, rms_norm, rms_norm_ref


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    x, weight = randn(*shape, dtype=dtype, device=device), randn(shape[-1], dtype=dtype, device=device)
    return {"x": x, "weight": weight}


def _inputs_residual(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    return {**_inputs(shape, dtype, device), "residual": randn(*shape, dtype=dtype, device=device)}


def _inputs_bias(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    return {**_inputs(shape, dtype, device), "bias": randn(shape[-1], dtype=dtype, device=device)}


def _plain_rms(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Any:
    h = x if residual is None else x + residual
    y = F.rms_norm(h, h.shape[-1:], weight, 1e-6)
    return y if residual is None else (y, h)


def _plain_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


TINY, FULL = (7, 120), (16384, 4096)
CASES = [
    Case("rms_norm", "", rms_norm, rms_norm_ref, _plain_rms, _inputs, TINY, FULL),
    Case("rms_norm", "residual", rms_norm, rms_norm_ref, _plain_rms, _inputs_residual, TINY, FULL),
    Case("layer_norm", "", layer_norm, layer_norm_ref, _plain_layer, _inputs_bias, TINY, FULL),
]
