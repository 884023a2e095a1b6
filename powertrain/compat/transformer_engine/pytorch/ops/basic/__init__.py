"""transformer_engine.pytorch.ops.basic: single operations as modules, on our ops."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.compat.missing import unknown
from powertrain.compat.transformer_engine.pytorch.module.norms import LayerNorm, RMSNorm
from powertrain.compat.transformer_engine.pytorch.ops.basic.activation import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    ClampedSwiGLU,
    ReGLU,
    ReLU,
    SiLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from powertrain.compat.transformer_engine.pytorch.ops.basic.extra import (
    AddExtraInput,
    MakeExtraOutput,
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
)
from powertrain.compat.transformer_engine.pytorch.ops.basic.linear import BasicLinear, Linear
from powertrain.ops.conversion import unsupported
from powertrain.ops.norm import rms_norm

__all__ = [
    "GEGLU", "GELU", "GLU", "QGEGLU", "QGELU", "AddExtraInput", "BasicLinear", "Bias", "ClampedSwiGLU",
    "ConstantScale", "Dropout", "Identity", "L2Normalization", "LayerNorm", "Linear", "MakeExtraOutput", "RMSNorm",
    "ReGLU", "ReLU", "Reshape", "SReGLU", "SReLU", "ScaledClampedQGeGLU", "ScaledSReLU", "ScaledSiTUGLU",
    "ScaledSwiGLU", "SiLU", "SiTUGLU", "SwiGLU",
]  # fmt: skip


class Bias(nn.Module):
    """x + bias [size], which begins as 0."""

    def __init__(
        self, size: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
        tensor_parallel: bool = False, tensor_parallel_group: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if tensor_parallel:
            unsupported("Bias", "tensor_parallel", True, "powertrain.parallelize_linears")
        self.bias = nn.Parameter(torch.zeros(size, device=device, dtype=dtype))

    def forward(self, input: Tensor) -> Tensor:
        return input + self.bias


class ConstantScale(nn.Module):
    """scale * x."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        return input * self.scale


class Dropout(nn.Dropout):
    """torch.nn.Dropout."""

    def __init__(self, p: float) -> None:
        super().__init__(p)


class Identity(nn.Identity):
    """x."""


class Reshape(nn.Module):
    """x with another shape, of which one size may be -1."""

    def __init__(self, shape: Iterable[int]) -> None:
        super().__init__()
        self._shape = tuple(shape)

    def forward(self, input: Tensor) -> Tensor:
        return input.reshape(*self._shape)


class L2Normalization(nn.Module):
    """x / sqrt(sum of x² + eps) over the last dim, as an RMSNorm without weight; the hints for warm-up do nothing."""

    def __init__(
        self, *, eps: float = 1e-6, seq_length: int | None = None, micro_batch_size: int | None = None
    ) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, input: Tensor) -> Tensor:
        size = input.shape[-1]
        result = rms_norm(input, eps=self.eps / size)  # sqrt(sum / size + eps / size)
        assert isinstance(result, Tensor)
        return result * size**-0.5


__getattr__ = unknown(__name__)
