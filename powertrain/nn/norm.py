"""RMSNorm and LayerNorm as modules, over `powertrain.rms_norm` and `layer_norm`."""

from typing import Any

import torch
from torch import Tensor, nn

from powertrain.ops.norm import layer_norm, rms_norm


class RMSNorm(nn.Module):
    """[..., hidden_size] -> the same; with a residual (norm(x + residual), x + residual), in one kernel.

    The weight is multiplied in float32, before the result is rounded (as TransformerEngine, Apex and GPT-NeoX do).
    """

    def __init__(self, hidden_size: int, *, eps: float = 1e-6, bias: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        return rms_norm(x, _local(self.weight), _local(self.bias), residual=residual, eps=self.eps)


class LayerNorm(nn.Module):
    """[..., hidden_size] -> the same; with a residual (norm(x + residual), x + residual), in one kernel."""

    def __init__(self, hidden_size: int, *, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        return layer_norm(x, _local(self.weight), _local(self.bias), residual=residual, eps=self.eps)


def _local(weight: Tensor | None) -> Any:
    """A DTensor weight as a plain one: x is then this rank's part of the rows, and the gradient is summed over all."""
    if weight is None or not hasattr(weight, "to_local"):
        return weight
    from torch.distributed.tensor import Partial

    return weight.to_local(grad_placements=[Partial()])
