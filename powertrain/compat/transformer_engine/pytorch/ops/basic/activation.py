"""Activations as modules: of each element, or of gates and ups. GELU is the tanh approximation, as theirs.

Results have the input's dtype, under torch.autocast that of it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from powertrain.compat.missing import unknown
from powertrain.compat.transformer_engine.pytorch.glu import halves_of_blocks
from powertrain.compat.transformer_engine.pytorch.module.base import in_autocast
from powertrain.ops.activations import Activation, activation, gated_activation
from powertrain.ops.conversion import unsupported
from powertrain.ops.shapes import acc_dtype
from powertrain.runtime import checks

__all__ = [
    "GEGLU", "GELU", "GLU", "QGEGLU", "QGELU", "ClampedSwiGLU", "ReGLU", "ReLU", "SReGLU", "SReLU", "SiLU", "SiTUGLU",
    "SwiGLU",
]  # fmt: skip


class _Activation(nn.Module):
    """act(x); cache_quantized_input is refused."""

    kind: Activation

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        if cache_quantized_input:
            unsupported(type(self).__name__, "cache_quantized_input", True, "False: the input is kept as it is")

    def forward(self, input: Tensor) -> Tensor:
        return activation(in_autocast(input), self.kind)


class _Gated(_Activation):
    """act(gate) * up of [..., 2N]: all gates first, or blocks of glu_interleave_size gates and ups in turn."""

    gated: Any

    def __init__(self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.glu_interleave_size = glu_interleave_size

    def forward(self, input: Tensor) -> Tensor:
        return self._gated(halves_of_blocks(type(self).__name__, in_autocast(input), self.glu_interleave_size))

    def _gated(self, x: Tensor) -> Tensor:
        return gated_activation(x, self.gated)


def _plain(name: str, kind: Activation) -> type[_Activation]:
    return type(name, (_Activation,), {"kind": kind, "__doc__": f"{kind}(x)", "__module__": __name__})


def _of_gate(name: str, kind: str) -> type[_Gated]:
    text = f"{kind} of [..., 2N], the gate first, or in blocks of glu_interleave_size"
    return type(name, (_Gated,), {"gated": kind, "__doc__": text, "__module__": __name__})


GELU = _plain("GELU", "gelu_tanh")
QGELU = _plain("QGELU", "quick_gelu")
ReLU = _plain("ReLU", "relu")
SReLU = _plain("SReLU", "relu_squared")
SiLU = _plain("SiLU", "silu")
GEGLU = _of_gate("GEGLU", "geglu_tanh")
QGEGLU = _of_gate("QGEGLU", "quick_geglu")
ReGLU = _of_gate("ReGLU", "reglu")
SReGLU = _of_gate("SReGLU", "relu_squared_glu")
SwiGLU = _of_gate("SwiGLU", "swiglu")


class GLU(_Gated):
    """sigmoid(gate) * up of [..., 2N], by PyTorch."""

    def _gated(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return torch.sigmoid(gate) * up


class ClampedSwiGLU(_Gated):
    """g sigmoid(alpha g) (u + glu_linear_offset), g = min(gate, limit), u = up within ±limit, as of OpenAI's gpt-oss.

    Our kernel with an offset of 1, else by PyTorch in float32.
    """

    def __init__(
        self, *, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0,
        cache_quantized_input: bool = False, glu_interleave_size: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size)
        self.limit, self.alpha, self.glu_linear_offset = limit, alpha, glu_linear_offset

    def _gated(self, x: Tensor) -> Tensor:
        return clamped(x, self.limit, self.alpha, self.glu_linear_offset)


class SiTUGLU(_Gated):
    """beta1 tanh(gate / beta1) sigmoid(gate) * beta2 tanh(up / beta2) of [..., 2N], by PyTorch in float32."""

    def __init__(
        self, *, beta1: float = 4.0, beta2: float = 25.0, cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size)
        self.beta1, self.beta2 = beta1, beta2

    def _gated(self, x: Tensor) -> Tensor:
        return situ("SiTUGLU", x, self.beta1, self.beta2)


def clamped(x: Tensor, limit: float, alpha: float, offset: float) -> Tensor:
    """The value of `ClampedSwiGLU`."""
    if offset == 1.0:
        return gated_activation(x, "clamped_swiglu", limit=limit, alpha=alpha)
    gate, up = x.to(acc_dtype(x.dtype)).chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + offset)).to(x.dtype)


def situ(op: str, x: Tensor, beta1: float, beta2: float) -> Tensor:
    """The value of `SiTUGLU`. Raises ValueError for a beta that is not positive."""
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        checks.require(0 < beta < float("inf"), op, name, "be positive and finite", beta)
    gate, up = x.to(acc_dtype(x.dtype)).chunk(2, -1)
    y = beta1 * torch.tanh(gate / beta1) * torch.sigmoid(gate) * beta2 * torch.tanh(up / beta2)
    return y.to(x.dtype)


__getattr__ = unknown(__name__)
