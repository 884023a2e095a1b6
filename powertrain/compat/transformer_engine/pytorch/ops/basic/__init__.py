"""transformer_engine.pytorch.ops.basic: single operations as modules, on our ops.

GELU is the tanh approximation, as theirs; gated ones take [..., 2N], the gate first. Options of FP8 are refused.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.compat.missing import unknown
from powertrain.compat.transformer_engine.pytorch.module.norms import LayerNorm, RMSNorm
from powertrain.ops.activations import Activation, activation, gated_activation
from powertrain.ops.conversion import unsupported
from powertrain.ops.norm import rms_norm

__all__ = [
    "GEGLU", "GELU", "GLU", "QGEGLU", "QGELU", "BasicLinear", "Bias", "ConstantScale", "Dropout", "Identity",
    "L2Normalization", "LayerNorm", "Linear", "RMSNorm", "ReGLU", "ReLU", "Reshape", "SReGLU", "SReLU", "SiLU",
    "SwiGLU",
]  # fmt: skip


class _Activation(nn.Module):
    """Of each element of x, or of [..., 2N] as act(gate) * up."""

    compute: Callable[[Tensor], Tensor]

    def __init__(self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None) -> None:
        super().__init__()
        if cache_quantized_input:
            unsupported(type(self).__name__, "cache_quantized_input", True, "False: the input is kept as it is")
        if glu_interleave_size is not None:
            unsupported(type(self).__name__, "glu_interleave_size", glu_interleave_size, "None: gate, then up")

    def forward(self, input: Tensor) -> Tensor:
        return type(self).compute(input)


def _plain(name: str, kind: Activation) -> type[_Activation]:
    return type(name, (_Activation,), {"compute": staticmethod(lambda x: activation(x, kind)), "__doc__": f"{kind}(x)"})


def _gated(name: str, kind: Any) -> type[_Activation]:
    compute = staticmethod(lambda x: gated_activation(x, kind))
    return type(name, (_Activation,), {"compute": compute, "__doc__": f"{kind} of [..., 2N], the gate first"})


GELU = _plain("GELU", "gelu_tanh")
QGELU = _plain("QGELU", "quick_gelu")
ReLU = _plain("ReLU", "relu")
SReLU = _plain("SReLU", "relu_squared")
SiLU = _plain("SiLU", "silu")
GEGLU = _gated("GEGLU", "geglu_tanh")
QGEGLU = _gated("QGEGLU", "quick_geglu")
ReGLU = _gated("ReGLU", "reglu")
SReGLU = _gated("SReGLU", "relu_squared_glu")
SwiGLU = _gated("SwiGLU", "swiglu")


class GLU(_Activation):
    """sigmoid(gate) * up of [..., 2N], by PyTorch."""

    @staticmethod
    def compute(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return torch.sigmoid(gate) * up


class BasicLinear(nn.Linear):
    """x @ weight.T, without bias. Tensor parallelism and FP8 are refused: parallelize_linears, quantize_model."""

    def __init__(
        self, in_features: int, out_features: int, *, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None, tensor_parallel_mode: str | None = None, **options: Any,
    ) -> None:  # fmt: skip
        _refuse_parallel(self, tensor_parallel_mode, options)
        super().__init__(in_features, out_features, bias=False, device=device, dtype=dtype)


class Linear(nn.Linear):
    """torch.nn.Linear. Tensor parallelism and FP8 are refused: parallelize_linears, quantize_model."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = True, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None, tensor_parallel_mode: str | None = None, **options: Any,
    ) -> None:  # fmt: skip
        _refuse_parallel(self, tensor_parallel_mode, options)
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)


def _refuse_parallel(layer: nn.Module, mode: str | None, options: dict[str, Any]) -> None:
    if mode is not None:
        unsupported(type(layer).__name__, "tensor_parallel_mode", mode, "powertrain.parallelize_linears")
    for name, value in options.items():
        # options with their neutral value are taken
        if value not in (None, False):
            unsupported(type(layer).__name__, name, value, "None")


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
        # sum = size * mean: one kernel for both norms
        result = rms_norm(input, eps=self.eps / size)  # sqrt(sum / size + eps / size)
        assert isinstance(result, Tensor)
        return result * size**-0.5


__getattr__ = unknown(__name__)
