"""SelfAttention: what heads and sizes it refuses; its slopes."""

import pytest
import torch

from powertrain.nn.attention import SelfAttention, alibi_slopes


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"SelfAttention: hidden_size must be a multiple of num_heads 3 .* got 10"):
        SelfAttention(10, 3)
    assert SelfAttention(10, 3, head_dim=4).qkv.out_features == 36
    with pytest.raises(ValueError, match="SelfAttention: num_heads must be a multiple of num_kv_heads 3, got 4"):
        SelfAttention(12, 4, num_kv_heads=3)


def test_slopes_are_float32_whatever_the_default_dtype() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert alibi_slopes(11, torch.device("cpu")).dtype is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
