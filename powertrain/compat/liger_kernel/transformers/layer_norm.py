"""liger_kernel.transformers.layer_norm."""

import torch
from torch import Tensor, nn

from powertrain.compat.liger_kernel.transformers.functional import liger_layer_norm
from powertrain.compat.missing import unknown
from powertrain.runtime import checks

__all__ = ["LigerLayerNorm"]


class LigerLayerNorm(nn.Module):
    """`liger_layer_norm` with weight and bias, as there.

    The bias is a parameter either way, at random with bias=True.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones") -> None:
        super().__init__()
        checks.one_of("LigerLayerNorm", "init_fn", init_fn, ("ones", "zeros"))
        # Liger has both names
        self.hidden_size, self.eps, self.variance_epsilon = hidden_size, eps, eps
        self.weight = nn.Parameter((torch.ones if init_fn == "ones" else torch.zeros)(hidden_size))
        self.bias = nn.Parameter((torch.randn if bias else torch.zeros)(hidden_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return liger_layer_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)


__getattr__ = unknown(__name__)
