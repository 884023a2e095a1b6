"""The feed-forward half of a layer, with a gate or without."""

from torch import Tensor, nn

from powertrain.nn.attention import Context
from powertrain.nn.parallel import columns
from powertrain.ops.activations import Activation, Gated, activation, gated_activation


class MLP(nn.Module):
    """down(act(up(x))): [..., hidden_size] -> the same."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, kind: Activation = "gelu", bias: bool = True
    ) -> None:
        super().__init__()
        self.kind = kind
        self.up = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor, context: Context = Context()) -> Tensor:  # noqa: B008
        (up,) = columns(x, self.up, shape=context.shape)
        return self.down(activation(up, self.kind))


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)): [..., hidden_size] -> the same. gate and up are apart, so each can be sharded."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, kind: Gated = "swiglu", bias: bool = False) -> None:
        super().__init__()
        self.kind = kind
        self.gate = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor, context: Context = Context()) -> Tensor:  # noqa: B008
        gate, up = columns(x, self.gate, self.up, shape=context.shape)
        return self.down(gated_activation(gate, self.kind, up=up))
