"""liger_kernel.transformers.group_norm."""

import torch
from torch import Tensor, nn

from powertrain.compat.liger_kernel.transformers.functional import liger_group_norm
from powertrain.compat.missing import unknown
from powertrain.runtime import checks

__all__ = ["LigerGroupNorm"]


class LigerGroupNorm(nn.Module):
    """Group norm of [B, num_channels, ...]; `bias` says whether the shift begins with random values, as theirs."""

    def __init__(
        self, num_channels: int, num_groups: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones"
    ) -> None:
        super().__init__()
        checks.one_of("LigerGroupNorm", "init_fn", init_fn, ("ones", "zeros"))
        self.num_channels, self.num_groups, self.variance_epsilon = num_channels, num_groups, eps
        self.weight = nn.Parameter(getattr(torch, init_fn)(num_channels))
        self.bias = nn.Parameter((torch.randn if bias else torch.zeros)(num_channels))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return liger_group_norm(
            hidden_states, self.weight, self.bias, self.num_channels, self.num_groups, self.variance_epsilon
        )


__getattr__ = unknown(__name__)
