"""xformers.ops.rmsnorm on `powertrain.rms_norm`; with gradients, which xFormers' functions lack."""

import torch
from torch import Tensor, nn

from powertrain.compat.missing import unknown
from powertrain.ops import norm

__all__ = ["RMSNorm", "rms_norm", "rms_norm_add"]


def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, in x's dtype."""
    y = norm.rms_norm(x, weight, eps=eps)
    assert isinstance(y, Tensor)
    return y


def rms_norm_add(x: Tensor, y: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    """x += y, in place; returns the norm of the sum.

    A leaf that wants a gradient cannot be written to, as in PyTorch.
    """
    # in x's dtype, for x is where the sum is written
    z, total = norm.rms_norm(y.to(x.dtype), weight, residual=x, eps=eps)
    x.copy_(total)
    return z


class RMSNorm(nn.Module):
    """`rms_norm` with its weight."""

    def __init__(self, dim: int, include_weight: bool = True, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim)) if include_weight else None

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def increment_and_forward_(self, x: Tensor, y: Tensor) -> Tensor:
        """`rms_norm_add`."""
        return rms_norm_add(x, y, self.weight, self.eps)


__getattr__ = unknown(__name__)
