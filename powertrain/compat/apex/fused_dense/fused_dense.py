"""apex.fused_dense.fused_dense on `powertrain.linear_activation` and torch's linear.

The activation is the tanh form of GELU, as cuBLAS's epilogue has it. Parameters begin as nn.Linear's (Apex leaves them
without values).
"""

from torch import Tensor, nn
from torch.nn import functional as F

from powertrain.compat.missing import unknown
from powertrain.ops.conversion import unsupported
from powertrain.ops.gemm.linear_activation import linear_activation
from powertrain.runtime.dispatch import cast_by_autocast

__all__ = ["FusedDense", "FusedDenseGeluDense", "fused_dense_function"]


def fused_dense_function(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input @ weight.T + bias."""
    return F.linear(input, weight, bias)


class FusedDense(nn.Linear):
    """nn.Linear under Apex's name."""

    # Apex's signature has no device and dtype
    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)


class FusedDenseGeluDense(nn.Module):
    """gelu(x W1^T + b1) W2^T + b2."""

    def __init__(self, in_features: int, intermediate_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        # Apex asserts a bias too
        if not bias:
            unsupported("FusedDenseGeluDense", "bias", bias, "powertrain.nn.MLP")
        self.in_features, self.intermediate_features, self.out_features = (
            in_features,
            intermediate_features,
            out_features,
        )
        # built as nn.Linear for its initialization; Apex leaves the parameters uninitialized
        first, second = nn.Linear(in_features, intermediate_features), nn.Linear(intermediate_features, out_features)
        assert first.bias is not None and second.bias is not None
        self.weight1, self.bias1, self.weight2, self.bias2 = first.weight, first.bias, second.weight, second.bias

    def forward(self, input: Tensor) -> Tensor:
        (x,) = cast_by_autocast(input)
        # the dtype of the product decides that of the result; F.linear below casts by itself
        hidden = linear_activation(x, self.weight1.to(x.dtype), "gelu_tanh", bias=self.bias1.to(x.dtype))
        return F.linear(hidden, self.weight2, self.bias2)


__getattr__ = unknown(__name__)
