"""GMLP: what its constructor refuses. Values and gradients are in tests/models/test_gmlp.py."""

from typing import Any

import pytest

from powertrain.nn.gmlp import GMLP
from powertrain.nn.norm import RMSNorm


@pytest.mark.parametrize(
    "options, message",
    [
        ({"kind": "swiglu"}, "kind must be one of 'gelu', .* got 'swiglu'"),
        ({"attention_dim": 0}, "attention_dim must be at least 1, got 0"),
        ({"max_length": -1}, "max_length must be at least 0, got -1"),
        ({"intermediate_size": -8}, "intermediate_size must be at least 0, got -8"),
    ],
)
def test_what_it_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"GMLP: {message}"):
        GMLP(**{"hidden_size": 16, "intermediate_size": 8, "make_norm": RMSNorm, "max_length": 4, **options})
