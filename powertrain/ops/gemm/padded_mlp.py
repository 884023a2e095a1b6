"""An MLP whose width is no multiple of 8 elements of 16 bits, padded between its layers (odd_widths.py)."""

from typing import Any

from torch import Tensor

from powertrain.ops.activations import activation, gated_activation
from powertrain.ops.gemm.linear_activation import check_layer
from powertrain.ops.gemm.odd_widths import are_plain, padded_linear, padded_width
from powertrain.runtime import checks
from powertrain.runtime.dispatch import cast_by_autocast, falls_back


def has_odd_width(x: Tensor, weight: Tensor, *others: Tensor | None) -> bool:
    """Whether `padded_mlp` is the faster way for an MLP of this first weight and `others`."""
    return are_plain(*others) and padded_width(x, weight) != weight.shape[0]


@falls_back("linear_activation")
def padded_mlp(
    x: Tensor,
    weight: Tensor,
    kind: Any,
    down_weight: Tensor,
    *,
    bias: Tensor | None = None,
    up_weight: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """`linear_activation` and the linear layer behind it, with inner features of `padded_width`.

    Columns behind the last feature are act(0), times zeros of the padded down_weight.
    Raises ValueError for shapes that do not match, as `linear_activation` does; padding would hide them.
    """
    check_layer(x, weight, kind, bias, up_weight, up_bias)
    N, width = weight.shape[0], padded_width(x, weight)
    checks.last_dim("padded_mlp", "down_weight", down_weight, N)
    checks.shape("padded_mlp", "down_bias", down_bias, down_weight.shape[:1], "rows of down_weight")
    x, weight, bias, up_weight, up_bias, down_weight, down_bias = cast_by_autocast(
        x, weight, bias, up_weight, up_bias, down_weight, down_bias
    )
    inner = padded_linear(x, weight, bias, width)
    if up_weight is None:
        inner = activation(inner, kind)
    else:
        inner = gated_activation(inner, kind, up=padded_linear(x, up_weight, up_bias, width))
    return padded_linear(inner, down_weight, down_bias, down_weight.shape[0])
