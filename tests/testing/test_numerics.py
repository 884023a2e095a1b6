"""The judge of every other test: what it must not let pass."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from powertrain.testing.numerics import check


@pytest.mark.parametrize(
    "wrong",
    [lambda x: x.sum(1, keepdim=True), lambda x: x[:0].sum(1), lambda x: x.sum()],
)
def test_results_of_another_shape_fail(wrong: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(AssertionError, match="shape"):
        check(wrong, lambda x: x.sum(1), lambda x: x.sum(1), {"x": torch.ones(4, 3)}, backward=False)
