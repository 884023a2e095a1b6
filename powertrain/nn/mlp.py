"""The feed-forward half of a layer, with a gate or without."""

from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from powertrain.nn.attention import Context
from powertrain.nn.tensor_parallel.linear import columns
from powertrain.ops.activations import Activation, Gated, activation, gated_activation
from powertrain.ops.fp8.gated import fp8_gated_activation
from powertrain.ops.gemm.linear_activation import linear_activation
from powertrain.ops.gemm.padded_mlp import has_odd_width, padded_mlp
from powertrain.quant.kept import KeepsGates
from powertrain.runtime import checks
from powertrain.runtime.positional import hinted

# the placeholder in a module that does more when called
_SEEN_BY = (
    "forward", "_compiled_call_impl", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


def _is_plain(*layers: nn.Module) -> bool:
    """Whether the layers are plain nn.Linear: no hooks, and no `forward` set on the instance (as offloading does)."""
    if torch.compiler.is_compiling() or _has_any_global_hook():
        return False
    return all(type(layer) is nn.Linear and not any(map(layer.__dict__.get, _SEEN_BY)) for layer in layers)


class MLP(nn.Module):
    """down(act(up(x))): [..., hidden_size] -> the same."""

    @hinted
    def __init__(
        self, hidden_size: int, intermediate_size: int, *, kind: Activation = "gelu", bias: bool = True
    ) -> None:
        super().__init__()
        checks.sizes("MLP", hidden_size=hidden_size, intermediate_size=intermediate_size)
        checks.one_of("MLP", "kind", kind, get_args(Activation))
        self.kind = kind
        self.up = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor, context: Context = Context()) -> Tensor:  # noqa: B008
        if _is_plain(self.up):
            if has_odd_width(x, self.up.weight, self.down.weight) and _is_plain(self.down):
                return padded_mlp(
                    x, self.up.weight, self.kind, self.down.weight, bias=self.up.bias, down_bias=self.down.bias
                )
            return self.down(linear_activation(x, self.up.weight, self.kind, bias=self.up.bias))
        (up,) = columns(x, self.up, shape=context.shape)
        return self.down(activation(up, self.kind))


class GatedMLP(KeepsGates):
    """down(act(gate(x)) * up(x)): [..., hidden_size] -> the same. gate and up are apart, so each can be sharded.

    With keeps_fp8 gate(x) and up(x) are rounded to FP8, and kept so for backward: half the bytes.
    """

    @hinted
    def __init__(self, hidden_size: int, intermediate_size: int, *, kind: Gated = "swiglu", bias: bool = False) -> None:
        super().__init__()
        checks.sizes("GatedMLP", hidden_size=hidden_size, intermediate_size=intermediate_size)
        checks.one_of("GatedMLP", "kind", kind, get_args(Gated))
        self.kind = kind
        self.gate = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor, context: Context = Context()) -> Tensor:  # noqa: B008
        if not self.keeps_fp8 and _is_plain(self.gate, self.up):
            gate, up, down = self.gate, self.up, self.down
            if has_odd_width(x, gate.weight, up.weight, down.weight) and _is_plain(down):
                return padded_mlp(
                    x, gate.weight, self.kind, down.weight, bias=gate.bias, up_weight=up.weight, up_bias=up.bias,
                    down_bias=down.bias,
                )  # fmt: skip
            return down(
                linear_activation(x, gate.weight, self.kind, bias=gate.bias, up_weight=up.weight, up_bias=up.bias)
            )
        halves = columns(x, self.gate, self.up, shape=context.shape)
        if self.keeps_fp8:
            return self.down(fp8_gated_activation(halves[0], halves[1], self.kind))
        return self.down(gated_activation(halves[0], self.kind, up=halves[1]))
