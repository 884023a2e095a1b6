"""apex.mlp.mlp on `powertrain.linear_activation`."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from powertrain.compat.missing import unknown
from powertrain.ops.gemm.linear_activation import linear_activation
from powertrain.runtime import checks

__all__ = ["MLP", "mlp_function"]

# their numbers of the activations
_KINDS = ("none", "relu", "sigmoid")


def mlp_function(bias: int, activation: int, *args: Tensor) -> Tensor:
    """Linear layers, each with the activation behind it, the last one too.

    args: the input [..., sizes[0]], the weights [sizes[i + 1], sizes[i]], then with `bias` as many biases.
    activation 0: none, 1: relu, 2: sigmoid. Under autocast in its dtype. Raises ValueError naming the argument.
    """
    checks.one_of("mlp_function", "activation", activation, (0, 1, 2))
    good = len(args) > 1 and not (bias and len(args) % 2 == 0)
    checks.require(good, "mlp_function", "args", "be an input, weights and as many biases", f"{len(args)} tensors")
    layers = (len(args) - 1) // (2 if bias else 1)
    biases: Sequence[Tensor | None] = args[1 + layers :] if bias else [None] * layers
    x = args[0]
    for weight, own in zip(args[1 : 1 + layers], biases, strict=True):
        if activation == 1:
            x = linear_activation(x, weight, "relu", bias=own)
        else:
            x = F.linear(x, weight, own)
            x = torch.sigmoid(x) if activation == 2 else x
    return x


class MLP(nn.Module):
    """`mlp_function` with its parameters, weight_0, bias_0, weight_1, ...: mlp_sizes are all widths, the input's first.

    activation "none", "relu" or "sigmoid". Parameters begin normal: variance 2 / (in + out) of weights, 1 / out of
    biases.
    """

    def __init__(self, mlp_sizes: Sequence[int], bias: bool = True, activation: str = "relu") -> None:
        super().__init__()
        checks.require(len(mlp_sizes) > 1, "MLP", "mlp_sizes", "be two sizes or more", list(mlp_sizes))
        checks.one_of("MLP", "activation", activation, _KINDS)
        self.mlp_sizes, self.num_layers = list(mlp_sizes), len(mlp_sizes) - 1
        self.bias, self.activation = int(bias), _KINDS.index(activation)
        for i in range(self.num_layers):
            self.register_parameter(f"weight_{i}", nn.Parameter(torch.empty(mlp_sizes[i + 1], mlp_sizes[i])))
            if bias:
                self.register_parameter(f"bias_{i}", nn.Parameter(torch.empty(mlp_sizes[i + 1])))
        self.reset_parameters()

    @property
    def weights(self) -> list[Tensor]:
        """weight_0, weight_1, ..."""
        # not get_parameter: FSDP and torch.func.functional_call put plain tensors in their places
        return [getattr(self, f"weight_{i}") for i in range(self.num_layers)]

    @property
    def biases(self) -> list[Tensor]:
        """bias_0, bias_1, ...; none without a bias."""
        return [getattr(self, f"bias_{i}") for i in range(self.num_layers)] if self.bias else []

    def reset_parameters(self) -> None:
        for weight in self.weights:
            nn.init.normal_(weight, 0.0, math.sqrt(2.0 / sum(weight.shape)))
        for own in self.biases:
            nn.init.normal_(own, 0.0, math.sqrt(1.0 / own.shape[0]))

    def forward(self, input: Tensor) -> Tensor:
        return mlp_function(self.bias, self.activation, input, *self.weights, *self.biases)

    def extra_repr(self) -> str:
        return f"MLP sizes: {self.mlp_sizes}, Bias={self.bias}, activation={self.activation}"


__getattr__ = unknown(__name__)
