"""Gate and up projections of an MLP: one GEMM if both are plain nn.Linear, else each by its own forward."""

from torch import Tensor, nn

from powertrain.ops.activations import Gated, gated_activation
from powertrain.ops.gemm.linear_activation import linear_activation
from powertrain.patching.replace import is_plain_linear


def gated(x: Tensor, gate: nn.Module, up: nn.Module, kind: Gated) -> Tensor:
    """act(gate(x)) * up(x); layers that PEFT or a quantizer has put in their places, and hooks, are called."""
    if is_plain_linear(gate) and is_plain_linear(up):
        assert isinstance(gate, nn.Linear) and isinstance(up, nn.Linear)
        return linear_activation(x, gate.weight, kind, bias=gate.bias, up_weight=up.weight, up_bias=up.bias)
    return gated_activation(gate(x), kind, up=up(x))
