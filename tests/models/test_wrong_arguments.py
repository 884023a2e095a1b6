"""Functions of models: the error for a wrong argument names the argument and says what it must be."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from powertrain.models import architecture, build, configure
from powertrain.models.causal_lm import CausalLM
from powertrain.models.generate import complete, generate
from powertrain.nn import CacheRow, ColumnParallelLinear, KVCache, RowParallelLinear, VocabParallelEmbedding

SIZES = {"hidden_size": 8, "num_heads": 2, "intermediate_size": 8, "vocab_size": 9, "max_position_embeddings": 8}
TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def _model(layers: int = 2, **fields: Any) -> CausalLM:
    model = build(configure(architecture="llama", num_layers=layers, **SIZES | fields), "cpu")
    model.init_weights(0)
    return model


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda m: m([[1]]), "tokens must be a tensor"),
        (lambda m: m(TOKENS.float()), "tokens must be int32 or int64, got float32"),
        (lambda m: m(TOKENS[0]), r"tokens must be \[B, S\], got \[3\]"),
        (lambda m: m(TOKENS + 5), r"tokens must be in \[0, 9\), got 11"),
        # one position would be every row's
        (lambda m: m(TOKENS, logits_at=torch.tensor([1])), r"logits_at must have shape \[2\].*got \[1\]"),
        (lambda m: m(TOKENS, logits_at=torch.tensor([0, 3])), r"logits_at must be in \[-3, 3\), got 3"),
        (lambda m: m(TOKENS, TOKENS, logits_at=torch.tensor([0, 1])), "logits_at must be None with labels"),
        (lambda m: m(TOKENS, cache="x"), "cache must be a KVCache .*got 'x'"),
        (lambda m: m(TOKENS, cache=_model(3).new_cache(2, 4)), "cache must be this model's"),
        (lambda m: m(TOKENS, cache=_model(num_kv_heads=1).new_cache(2, 4)), "cache must be this model's"),
        (lambda m: m.new_cache(1.5, 4), "batch must be an integer, got 1.5"),
        (lambda m: m.init_weights("x"), "seed must be an integer, got 'x'"),
        (lambda m: generate(m, [[1]], max_new_tokens=1, eod=9), r"eod and stop_tokens must be in \[0, 9\).*got 9"),
        (lambda m: complete(m, [[1]], max_new_tokens=1, stop_tokens=[-1]), r"must be in \[0, 9\).*got -1"),
        (lambda m: build("llama"), "config must be a ModelConfig .*got 'llama'"),
        (lambda m: architecture(["llama"]), "model.architecture must be one of .*got \\['llama'\\]"),
        (lambda m: configure(preset=[]), "model.preset must be one of"),
        (lambda m: _cache(batch="x"), "KVCache: batch must be an integer, got 'x'"),
        (lambda m: _cache(rows=[1]), "KVCache: rows must be a sequence of CacheRows"),
        (lambda m: _cache(rows=[CacheRow(1, -1, 4)]), "KVCache: rows must hold sizes of at least 0"),
        (lambda m: _cache(dtype=torch.int64), "KVCache: dtype must be a floating dtype, got int64"),
        # before its ranks are looked at
        (lambda m: ColumnParallelLinear("x", 4, None), "ColumnParallelLinear: in_features must be an integer, got 'x'"),
        (lambda m: RowParallelLinear(4, -1, None), "RowParallelLinear: out_features must be at least 0, got -1"),
        (lambda m: VocabParallelEmbedding(4, 4, None, sequence_parallel="no"), "sequence_parallel must be True or"),
    ],
)
def test_a_wrong_argument_is_named(call: Callable[[CausalLM], Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        call(_model())


def _cache(**fields: Any) -> KVCache:
    given = {"rows": [CacheRow(1, 4, 4)], "batch": 1, "max_length": 2, "dtype": torch.float32} | fields
    return KVCache(device=torch.device("cpu"), **given)
