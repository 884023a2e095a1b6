"""liger_kernel.transformers.poly_norm."""

import torch
from torch import Tensor, nn

from powertrain.compat.liger_kernel.transformers.functional import liger_poly_norm
from powertrain.compat.missing import unknown

__all__ = ["LigerPolyNorm"]


class LigerPolyNorm(nn.Module):
    """`liger_poly_norm` with its weights, 1/3 each, and bias, 1; in_place is a hint."""

    def __init__(self, eps: float = 1e-6, in_place: bool = True) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.full((3,), 1 / 3)), nn.Parameter(torch.tensor(1.0))
        self.variance_epsilon, self.in_place = eps, in_place

    def forward(self, hidden_states: Tensor) -> Tensor:
        return liger_poly_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)


__getattr__ = unknown(__name__)
