"""liger_kernel.transformers.dyt."""

import torch
from torch import Tensor, nn

from powertrain.compat.liger_kernel.transformers.functional import liger_dyt
from powertrain.compat.missing import unknown

__all__ = ["LigerDyT"]


class LigerDyT(nn.Module):
    """`liger_dyt` with its parameters: alpha [1], gamma and beta [hidden_size]."""

    def __init__(self, hidden_size: int, beta: bool = True, init_alpha: float = 0.5) -> None:
        super().__init__()
        self.hidden_size, self.init_alpha = hidden_size, init_alpha
        # one scalar, shape [1], as in Liger's state dict
        self.alpha = nn.Parameter(torch.full((1,), init_alpha))
        self.gamma = nn.Parameter(torch.ones(hidden_size))
        self.beta = nn.Parameter(torch.zeros(hidden_size)) if beta else None

    def forward(self, x: Tensor) -> Tensor:
        return liger_dyt(x, self.alpha, self.gamma, self.beta)


__getattr__ = unknown(__name__)
