"""Numbers that an op takes: one that is not finite, where none can be meant, is refused by name."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import powertrain as pt
from powertrain.ops.fp8.gated import fp8_gated_activation

X, TARGET = torch.randn(4, 8), torch.zeros(4, dtype=torch.long)
Call = Callable[[float], Tensor]
CALLS: dict[str, list[Call]] = {
    "eps": [lambda v: pt.rms_norm(X, X[0], eps=v), lambda v: pt.layer_norm(X, X[0], eps=v)],
    "z_loss": [
        lambda v: pt.cross_entropy(X, TARGET, z_loss=v), lambda v: pt.linear_cross_entropy(X, X, TARGET, z_loss=v),
    ],
    "alpha": [lambda v: pt.gated_activation(X, "clamped_swiglu", alpha=v)],
    "scale": [
        lambda v: pt.scaled_softmax(X, scale=v), lambda v: pt.attention(*[X.view(1, 2, 2, 8)] * 3, scale=v),
        lambda v: pt.lora_linear(X, X, X, X[:, :4].contiguous(), scale=v),
    ],
}  # fmt: skip


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("argument, call", [(name, call) for name, calls in CALLS.items() for call in calls])
def test_numbers_that_are_not_finite(argument: str, call: Call, value: float) -> None:
    assert call(0.5).isfinite().all()
    with pytest.raises(ValueError, match=rf"{argument} must be .*finite.*, got {value}"):
        call(value)


@pytest.mark.parametrize(
    "call",
    [
        lambda **o: pt.gated_activation(X, "clamped_swiglu", **o),
        lambda **o: pt.linear_activation(X, X, "clamped_swiglu", up_weight=X, **o),
        lambda **o: fp8_gated_activation(X, X, "clamped_swiglu", **o),
    ],
)
def test_a_limit_of_activations(call: Callable[..., Tensor]) -> None:
    assert call(limit=math.inf).isfinite().all()
    for value in (math.nan, -1.0):
        with pytest.raises(ValueError, match="limit must be at least 0"):
            call(limit=value)
    with pytest.raises(ValueError, match="alpha must be finite"):
        call(alpha=math.inf)
