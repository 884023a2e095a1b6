"""megatron.core.fusions.fused_weighted_squared_relu."""

from torch import Tensor

from powertrain.compat.missing import unknown
from powertrain.ops.activations import activation
from powertrain.runtime import checks

__all__ = ["weighted_squared_relu", "weighted_squared_relu_back", "weighted_squared_relu_impl"]


def weighted_squared_relu(x: Tensor, weights: Tensor) -> Tensor:
    """relu(x)² times weights [tokens, 1], in x's dtype."""
    return (activation(x, "relu_squared") * weights).to(x.dtype)


def weighted_squared_relu_back(g: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of weights, in their dtypes."""
    positive = x.relu()
    dweights = (positive.square() * g.to(weights.dtype)).sum(-1, keepdim=True)
    return (g * weights * 2 * positive).to(x.dtype), dweights.to(weights.dtype)


def weighted_squared_relu_impl(input: Tensor, weights: Tensor) -> Tensor:
    """`weighted_squared_relu` of two or three dims; weights [tokens, 1]."""
    checks.require(
        input.dim() in (2, 3), "weighted_squared_relu_impl", "input", "have two or three dims", list(input.shape)
    )
    return weighted_squared_relu(input.reshape(-1, input.shape[-1]), weights).view(input.shape)


__getattr__ = unknown(__name__)
