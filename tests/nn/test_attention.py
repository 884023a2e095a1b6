"""SelfAttention: what heads and sizes it refuses."""

import pytest

from powertrain.nn.attention import SelfAttention


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"SelfAttention: hidden_size must be a multiple of num_heads 3 .* got 10"):
        SelfAttention(10, 3)
    assert SelfAttention(10, 3, head_dim=4).qkv.out_features == 36
    with pytest.raises(ValueError, match="SelfAttention: num_heads must be a multiple of num_kv_heads 3, got 4"):
        SelfAttention(12, 4, num_kv_heads=3)
