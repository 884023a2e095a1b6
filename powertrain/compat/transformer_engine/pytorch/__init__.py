"""transformer_engine.pytorch."""

from powertrain.compat.missing import unknown
from powertrain.compat.transformer_engine.pytorch import ops, optimizers
from powertrain.compat.transformer_engine.pytorch.attention import DotProductAttention, RotaryPositionEmbedding
from powertrain.compat.transformer_engine.pytorch.cross_entropy import parallel_cross_entropy
from powertrain.compat.transformer_engine.pytorch.distributed import CudaRNGStatesTracker, checkpoint
from powertrain.compat.transformer_engine.pytorch.module import LayerNorm, RMSNorm
from powertrain.compat.transformer_engine.pytorch.permutation import (
    moe_permute,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from powertrain.compat.userbuffers import destroy_ub, initialize_ub

__all__ = [
    "CudaRNGStatesTracker",
    "DotProductAttention",
    "LayerNorm",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "checkpoint",
    "destroy_ub",
    "initialize_ub",
    "moe_permute",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "ops",
    "optimizers",
    "parallel_cross_entropy",
]


__getattr__ = unknown(__name__)
