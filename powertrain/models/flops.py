"""Floating-point operations of a training step, as model FLOPs: without recomputation.

6 per token and weight of every matrix that a token meets, the head included, the embedding's lookup not
6 per token, head and channel (query/key and value) of every key that a query sees: causal, so half of S on average
6 per token and channel of every position that a gMLP layer's gate reads, half of S as well
"""

from typing import Any

from torch import nn

from powertrain.nn.gmlp import SpatialGating, TinyAttention


def flops_per_token(model: nn.Module, seq_length: int) -> float:
    """Forward and backward of one token in a sequence of `seq_length`. Experts count as often as a token meets them."""
    config: Any = model.config
    # by modules and not by a formula per architecture: a new architecture counts itself
    products = sum(_weights_met(module) for module in model.modules())
    # a tied head is no module of its own
    if config.tie_embeddings:
        products += config.vocab_size * config.hidden_size
    scores = sum(_score_channels(module, seq_length) for module in model.modules())
    return 6.0 * (products + scores)


def _weights_met(module: nn.Module) -> float:
    if isinstance(module, nn.Linear):
        return module.in_features * module.out_features
    # a layer of experts says itself how many of its weights a token meets
    return float(getattr(module, "expert_weights_per_token", 0))


def _score_channels(module: Any, seq_length: int) -> float:
    """Multiply-adds of one query's scores and of their product with the values."""
    if isinstance(module, SpatialGating):
        # causal: position i reads i gates, half of S on average
        return module.channels * seq_length / 2
    if isinstance(module, TinyAttention):
        return sum(module.head_dims) * seq_length / 2
    if not hasattr(module, "cache_shape"):
        return 0.0
    sparsity = getattr(module, "sparsity", None)
    keys = _keys_seen(seq_length, module.window[0]) if sparsity is None else sparsity.keys_seen(seq_length)
    # both products: scores over the query dim, the sum over the value dim
    return module.num_heads * sum(module.head_dims) * keys


def _keys_seen(seq_length: int, left: int) -> float:
    """Keys that a query sees on average: S / 2, or fewer with a window of `left` keys before its own."""
    if left < 0 or left >= seq_length:
        return seq_length / 2
    # the first `left` queries see fewer keys than the window
    return left - left * left / (2 * seq_length)
