"""megatron.core.fusions.fused_bias_geglu: GELU of the tanh form, and its quick form x * sigmoid(1.702 x)."""

import torch
from torch import Tensor

from powertrain.compat.missing import unknown
from powertrain.ops import activations
from powertrain.ops.conversion import cat, unsupported
from powertrain.runtime import checks

__all__ = [
    "bias_geglu",
    "bias_geglu_impl",
    "geglu",
    "quick_geglu",
    "quick_gelu",
    "weighted_bias_quick_geglu",
    "weighted_bias_quick_geglu_impl",
    "weighted_quick_geglu",
]


def geglu(y: Tensor) -> Tensor:
    """gelu of the first half of the last dim, times the second."""
    # Megatron's geglu is the tanh form, torch's default the exact one
    return activations.geglu(y, approximate="tanh")


def bias_geglu(bias: Tensor | None, y: Tensor) -> Tensor:
    """`geglu` of y + bias."""
    return activations.geglu(y, bias=bias, approximate="tanh")


def bias_geglu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """`geglu` of input + bias."""
    return bias_geglu(bias, input)


def quick_gelu(y: Tensor) -> Tensor:
    """y * sigmoid(1.702 y)."""
    return activations.quick_gelu(y)


def quick_geglu(y: Tensor, linear_offset: float = 0.0) -> Tensor:
    """`quick_gelu` of the first half of the last dim, times the second plus linear_offset."""
    # gpt-oss adds 1 to the linear half; without an offset the fused op suffices
    if linear_offset == 0.0:
        return activations.gated_activation(y, "quick_geglu")
    gate, up = y.chunk(2, -1)
    return activations.gated_activation(gate, "quick_geglu", up=up + linear_offset)


def weighted_quick_geglu(y: Tensor, weights: Tensor, linear_offset: float = 0.0) -> Tensor:
    """`quick_geglu` times weights [tokens, 1], in y's dtype."""
    # router probabilities, one a token
    return (quick_geglu(y, linear_offset) * weights).to(y.dtype)


def weighted_bias_quick_geglu(y: Tensor, bias: Tensor, weights: Tensor, linear_offset: float = 0.0) -> Tensor:
    """`weighted_quick_geglu` of y + bias."""
    return weighted_quick_geglu(torch.add(y, bias), weights, linear_offset)


def weighted_bias_quick_geglu_impl(
    input: Tensor,
    bias: Tensor | None,
    weights: Tensor,
    fp8_input_store: bool = False,
    linear_offset: float = 0.0,
    clamp_value: float | None = None,
) -> Tensor:
    """`weighted_bias_quick_geglu` of two or three dims; weights [tokens, 1].

    clamp_value: the gate is at most it, the other half within ±clamp_value, before the bias. fp8_input_store rounds
    the saved tensors in Megatron, so it is refused.
    """
    op = "weighted_bias_quick_geglu_impl"
    if fp8_input_store:
        unsupported(op, "fp8_input_store", True, "fp8_input_store=False")
    checks.require(input.dim() in (2, 3), op, "input", "have two or three dims", list(input.shape))
    rows = input.reshape(-1, input.shape[-1])
    if clamp_value is not None:
        gate, up = rows.chunk(2, -1)
        rows = cat((gate.clamp(max=clamp_value), up.clamp(-clamp_value, clamp_value)), -1)
    rows = rows if bias is None else rows + bias
    y = weighted_quick_geglu(rows, weights, linear_offset)
    # -1 is no size of a tensor without elements: an expert may have no tokens
    return y.view(*input.shape[:-1], y.shape[-1])


__getattr__ = unknown(__name__)
