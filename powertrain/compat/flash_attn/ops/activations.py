"""flash_attn.ops.activations: activations and their gradients. GELU is the tanh approximation, as theirs."""

from collections.abc import Callable

import torch
from torch import Tensor

from powertrain.compat.missing import unknown
from powertrain.ops.activations import activation, gated_activation

__all__ = [
    "bias_gelu", "bias_gelu_back", "bias_gelu_impl", "fast_gelu_impl", "gelu_bwd", "gelu_fwd", "relu_bwd", "sqrelu_bwd",
    "sqrelu_fwd", "swiglu",
]  # fmt: skip


def gelu_fwd(x: Tensor) -> Tensor:
    """gelu(x), differentiable."""
    # flash-attn's fast_gelu and bias_gelu are the tanh form
    return activation(x, "gelu_tanh")


def bias_gelu(y: Tensor, bias: Tensor) -> Tensor:
    """gelu(y + bias), differentiable."""
    return activation(y, "gelu_tanh", bias)


fast_gelu_impl = gelu_fwd
bias_gelu_impl = bias_gelu


def sqrelu_fwd(x: Tensor) -> Tensor:
    """relu(x)², differentiable."""
    return activation(x, "relu_squared")


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """silu(x) * y, differentiable."""
    return gated_activation(x, "swiglu", up=y)


def gelu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """The gradient of gelu(x) for the gradient g of its result."""
    return _gradient(gelu_fwd, g, x)


def bias_gelu_back(g: Tensor, y: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of y and of bias."""
    # recomputed from y + bias, as theirs: the sum is not saved
    grad = _gradient(gelu_fwd, g, y + bias)
    return grad.to(y.dtype), grad.sum(tuple(range(grad.dim() - 1)), dtype=bias.dtype)


def relu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """g where x is not negative."""
    # at x = 0 theirs passes the gradient, torch's relu does not
    return torch.where(x >= 0, g, 0.0).to(x.dtype)


def sqrelu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """2 g relu(x)."""
    return _gradient(sqrelu_fwd, g, x)


def _gradient(function: Callable[[Tensor], Tensor], g: Tensor, x: Tensor) -> Tensor:
    with torch.enable_grad():
        # detached: the caller asks for one gradient, not for a graph
        x = x.detach().requires_grad_()
        return torch.autograd.grad(function(x), x, g)[0]


__getattr__ = unknown(__name__)
