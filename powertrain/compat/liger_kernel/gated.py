"""A gated MLP: gate and up in one GEMM if both are plain nn.Linear, else each layer by its own forward."""

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from powertrain.ops.activations import Gated, gated_activation
from powertrain.ops.gemm.linear_activation import linear_activation
from powertrain.ops.gemm.padded_mlp import has_odd_width, padded_mlp
from powertrain.patching.replace import is_plain_linear


def gated_mlp(x: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module, kind: Gated) -> Tensor:
    """down(act(gate(x)) * up(x)); layers that PEFT or a quantizer has put in their places, and hooks, are called."""
    if _has_any_global_hook() or not (is_plain_linear(gate) and is_plain_linear(up)):
        result: Tensor = down(gated_activation(gate(x), kind, up=up(x)))
        return result
    assert isinstance(gate, nn.Linear) and isinstance(up, nn.Linear)
    if is_plain_linear(down) and has_odd_width(x, gate.weight):
        assert isinstance(down, nn.Linear)
        return padded_mlp(
            x, gate.weight, kind, down.weight, bias=gate.bias, up_weight=up.weight, up_bias=up.bias, down_bias=down.bias
        )
    result = down(linear_activation(x, gate.weight, kind, bias=gate.bias, up_weight=up.weight, up_bias=up.bias))
    return result
