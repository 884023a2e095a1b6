"""flash_attn.modules.mlp: feed-forward layers with its parameter names."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powertrain.compat.missing import unknown
from powertrain.ops.activations import gated_activation

__all__ = ["GatedMlp", "Mlp"]
Activation = Callable[[Tensor], Tensor]


class Mlp(nn.Module):
    """fc2(activation(fc1(x))); hidden_features is 4 * in_features unless given; with return_residual also x."""

    def __init__(
        self, in_features: int, hidden_features: int | None = None, out_features: int | None = None,
        activation: Activation = F.gelu, bias1: bool = True, bias2: bool = True, return_residual: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        # the rounding and defaults are flash-attn's, so that its checkpoints load
        hidden = 4 * in_features if hidden_features is None else hidden_features
        out = in_features if out_features is None else out_features
        self.return_residual, self.activation = return_residual, activation
        self.fc1 = nn.Linear(in_features, hidden, bias=bias1, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, out, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        y = self.fc2(self.activation(self.fc1(x)))
        return (y, x) if self.return_residual else y


class GatedMlp(nn.Module):
    """fc2(a * activation(b)), [a, b] = fc1(x); hidden_features, 8/3 of in_features, rounded up to `multiple_of`."""

    def __init__(
        self, in_features: int, hidden_features: int | None = None, out_features: int | None = None,
        activation: Activation = F.sigmoid, bias1: bool = True, bias2: bool = True, multiple_of: int = 128,
        return_residual: bool = False, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        # 8/3 instead of 4: a gated layer has three matrices, and so keeps the number of weights
        hidden = int(8 * in_features / 3) if hidden_features is None else hidden_features
        hidden = -(-hidden // multiple_of) * multiple_of
        out = in_features if out_features is None else out_features
        self.return_residual, self.activation = return_residual, activation
        self.fc1 = nn.Linear(in_features, 2 * hidden, bias=bias1, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, out, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = self.fc1(x)
        if self.activation is F.silu:
            # the fused op computes SwiGLU; any other callable runs as given
            h = gated_activation(h, "swiglu", order="up_first")
        else:
            up, gate = h.chunk(2, -1)
            h = up * self.activation(gate)
        y = self.fc2(h)
        return (y, x) if self.return_residual else y


__getattr__ = unknown(__name__)
