"""flash_attn.ops.fused_dense: a linear layer and a feed-forward layer with its parameter names, on ours."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powertrain.compat.missing import unknown
from powertrain.ops.conversion import unsupported
from powertrain.ops.gemm.linear_activation import linear_activation
from powertrain.ops.gemm.padded_mlp import has_odd_width, padded_mlp
from powertrain.runtime import checks

__all__ = ["FusedDense", "FusedMLP", "fused_dense_func", "fused_mlp_func"]
_KINDS = {"gelu_approx": "gelu_tanh", "relu": "relu", "sqrelu": "relu_squared"}


def fused_dense_func(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, return_residual: bool = False, process_group: Any = None,
    sequence_parallel: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """x @ weight.T + bias, by PyTorch; with return_residual also x."""
    # tensor parallelism is another module here
    _alone("fused_dense_func", process_group)
    y = F.linear(x, weight, bias)
    return (y, x) if return_residual else y


def fused_mlp_func(
    x: Tensor, weight1: Tensor, weight2: Tensor, bias1: Tensor | None = None, bias2: Tensor | None = None,
    activation: str = "gelu_approx", save_pre_act: bool = True, return_residual: bool = False,
    checkpoint_lvl: int = 0, heuristic: int = 0, process_group: Any = None, sequence_parallel: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """activation(x @ weight1.T + bias1) @ weight2.T + bias2; save_pre_act, checkpoint_lvl and heuristic are hints."""
    _alone("fused_mlp_func", process_group)
    checks.one_of("fused_mlp_func", "activation", activation, tuple(_KINDS))
    kind = _KINDS[activation]
    if has_odd_width(x, weight1, weight2, bias1, bias2):
        y = padded_mlp(x, weight1, kind, weight2, bias=bias1, down_bias=bias2)
    else:
        # the activation is fused into the first product where a kernel for it is chosen
        y = F.linear(linear_activation(x, weight1, kind, bias=bias1), weight2, bias2)
    return (y, x) if return_residual else y


def _alone(op: str, process_group: Any) -> None:
    if process_group is not None:
        unsupported(op, "process_group", "a group", "powertrain.parallelize_linears")


class FusedDense(nn.Linear):
    """torch.nn.Linear; with return_residual forward also returns its input."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, return_residual: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.return_residual = return_residual

    def forward(self, x: Tensor, process_group: Any = None) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
        # the group is refused there
        return fused_dense_func(x, self.weight, self.bias, self.return_residual, process_group)


class FusedMLP(nn.Module):
    """`fused_mlp_func` with fc1 and fc2; hidden_features is 4 * in_features unless given."""

    def __init__(
        self, in_features: int, hidden_features: int | None = None, out_features: int | None = None, bias1: bool = True,
        bias2: bool = True, activation: str = "gelu_approx", return_residual: bool = False, checkpoint_lvl: int = 0,
        heuristic: int | str = "auto", device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        checks.one_of("FusedMLP", "activation", activation, tuple(_KINDS))
        hidden = 4 * in_features if hidden_features is None else hidden_features
        out = in_features if out_features is None else out_features
        self.activation, self.return_residual = activation, return_residual
        self.fc1 = nn.Linear(in_features, hidden, bias=bias1, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, out, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: Tensor, process_group: Any = None) -> Tensor | tuple[Tensor, Tensor]:
        return fused_mlp_func(
            x, self.fc1.weight, self.fc2.weight, self.fc1.bias, self.fc2.bias, self.activation,
            return_residual=self.return_residual, process_group=process_group,
        )  # fmt: skip


__getattr__ = unknown(__name__)
