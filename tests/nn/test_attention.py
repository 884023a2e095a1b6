"""SelfAttention: what heads and sizes it refuses; its slopes."""

from typing import Any

import pytest
import torch
from torch import nn

from powertrain.nn.attention import Context, Rotary, SelfAttention, alibi_slopes
from powertrain.nn.block import Block
from powertrain.nn.block_sparsity import BlockSparsity
from powertrain.nn.cache import CacheRow, KVCache
from powertrain.nn.mla import LatentAttention


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


@pytest.mark.parametrize(
    "options, message",
    [
        # a window of 0 keys was none at all: every earlier key was seen
        ({"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
        ({"num_kv_heads": 0}, "num_kv_heads must be at least 1, got 0"),
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"hidden_size": -12}, "hidden_size must be at least 1, got -12"),
        # said in a forward before, or in training alone
        ({"rotary": Rotary(8, 16)}, "rotary must turn at most the 6 channels of a head, got 8"),
        ({"dropout": 2.0}, r"dropout must be in \[0, 1\), got 2.0"),
        # training took them, decoding did not
        ({"sparsity": BlockSparsity(4, before=1), "alibi": True}, "alibi must be False with sparsity, got True"),
        ({"sparsity": BlockSparsity(4, before=1), "sliding_window": 2}, "sliding_window must be None .* got 2"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"SelfAttention: {message}"):
        SelfAttention(**{"hidden_size": 12, "num_heads": 2, **options})


def test_dropout_of_layers_is_looked_at_before_training() -> None:
    with pytest.raises(ValueError, match=r"Block: dropout must be in \[0, 1\), got 1.5"):
        Block(nn.Identity(), nn.Identity(), nn.Identity(), nn.Identity(), dropout=1.5)


_SIZES: dict[str, Any] = {"qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}


@pytest.mark.parametrize(
    "layer", [SelfAttention(16, 2), LatentAttention(16, 2, kv_lora_rank=8, rotary=Rotary(4, 16), **_SIZES)]
)
def test_what_cannot_be_beside_a_cache(layer: Any) -> None:
    """Documents and positions were left out without a word, and a cache for more sequences took the one for all."""
    x = torch.randn(2, 3, 16)

    def attend(sequences: int, rows: int, **facts: Any) -> None:
        cache = KVCache(
            [CacheRow(*layer.cache_shape)], sequences, rows, device=torch.device("cpu"), dtype=torch.float32
        )
        layer(x, Context(cache=cache, **facts))

    attend(2, 3)
    for name in ("position_ids", "document_ids", "document_starts"):
        with pytest.raises(NotImplementedError, match=f"Attention: {name} must be None with a KV cache"):
            attend(2, 3, **{name: torch.zeros(2, 3, dtype=torch.int32)})
    with pytest.raises(ValueError, match="cache must be made for the 2 sequences of tokens, got one for 4"):
        attend(4, 3)
    with pytest.raises(ValueError, match="cache must have rows for the 3 tokens of each sequence, got 2"):
        attend(2, 2)
