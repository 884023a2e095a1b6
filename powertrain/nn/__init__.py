"""Layers with parameters, on ops."""

from powertrain.runtime.lazy_exports import resolve

# public name -> module; resolved on first use, as powertrain's own are
_PUBLIC = {
    "SelfAttention": "powertrain.nn.attention",
    "Block": "powertrain.nn.block",
    "CacheRow": "powertrain.nn.cache",
    "KVCache": "powertrain.nn.cache",
    "GMLP": "powertrain.nn.gmlp",
    "LatentAttention": "powertrain.nn.mla",
    "MLP": "powertrain.nn.mlp",
    "GatedMLP": "powertrain.nn.mlp",
    "Router": "powertrain.nn.moe",
    "Experts": "powertrain.nn.moe",
    "MoE": "powertrain.nn.moe",
    "RMSNorm": "powertrain.nn.norm",
    "LayerNorm": "powertrain.nn.norm",
    "ColumnParallelLinear": "powertrain.nn.tensor_parallel.linear",
    "RowParallelLinear": "powertrain.nn.tensor_parallel.linear",
    "VocabParallelEmbedding": "powertrain.nn.tensor_parallel.vocab",
    "VocabParallelHead": "powertrain.nn.tensor_parallel.vocab",
    "parallelize_linears": "powertrain.nn.tensor_parallel.parallelize_linears",
}

__all__ = [*_PUBLIC]


def __getattr__(name: str) -> object:
    return resolve(__name__, name, _PUBLIC)


def __dir__() -> list[str]:
    return sorted(__all__)
