"""megatron.core.fusions.fused_bias_gelu: GELU of the tanh form."""

from torch import Tensor

from powertrain.compat.missing import unknown
from powertrain.ops import activations

__all__ = ["bias_gelu", "bias_gelu_impl"]


def bias_gelu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """gelu(input + bias)."""
    return activations.activation(input, "gelu_tanh", bias)


def bias_gelu(bias: Tensor | None, y: Tensor) -> Tensor:
    """gelu(y + bias)."""
    return bias_gelu_impl(y, bias)


__getattr__ = unknown(__name__)
