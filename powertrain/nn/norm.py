"""RMSNorm and LayerNorm as modules, over `powertrain.rms_norm` and `layer_norm`.

Weights that are DTensors, the same on every rank of a mesh, serve a rank's own tokens or heads: gradients are summed.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from powertrain.nn.tensor_parallel.linear import all_reduce_grad
from powertrain.ops.norm import layer_norm, rms_norm
from powertrain.runtime import checks
from powertrain.runtime.positional import hinted


class RMSNorm(nn.Module):
    """[..., hidden_size] -> the same; with a residual (norm(x + residual), x + residual), in one kernel.

    The weight is multiplied in float32, before the result is rounded (as TransformerEngine, Apex and GPT-NeoX do).
    """

    @hinted
    def __init__(self, hidden_size: int, *, eps: float = 1e-6, bias: bool = False) -> None:
        super().__init__()
        checks.sizes(type(self).__name__, hidden_size=hidden_size)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        return rms_norm(x, _own(self.weight, x), _own(self.bias, x), residual=residual, eps=self.eps)


class LayerNorm(nn.Module):
    """[..., hidden_size] -> the same; with a residual (norm(x + residual), x + residual), in one kernel."""

    @hinted
    def __init__(self, hidden_size: int, *, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        checks.sizes(type(self).__name__, hidden_size=hidden_size)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        return layer_norm(x, _own(self.weight, x), _own(self.bias, x), residual=residual, eps=self.eps)


def _own(weight: Tensor | None, x: Tensor) -> Tensor | None:
    """The weight, its gradient all-reduced if x is one rank's shard. If x is a DTensor, PyTorch does that."""
    return weight if weight is None or isinstance(x, DTensor) else all_reduce_grad(weight)
