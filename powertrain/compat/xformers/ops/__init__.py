"""Attention functions of `xformers.ops`."""

from powertrain.compat.xformers.ops import fmha
from powertrain.compat.xformers.ops.fmha import (
    AttentionBias,
    AttentionOp,
    LowerTriangularMask,
    MemoryEfficientAttentionCutlassOp,
    MemoryEfficientAttentionFlashAttentionOp,
    memory_efficient_attention,
    memory_efficient_attention_backward,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
    memory_efficient_attention_partial,
    merge_attentions,
)

__all__ = [
    "AttentionBias",
    "AttentionOp",
    "LowerTriangularMask",
    "MemoryEfficientAttentionCutlassOp",
    "MemoryEfficientAttentionFlashAttentionOp",
    "fmha",
    "memory_efficient_attention",
    "memory_efficient_attention_backward",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "memory_efficient_attention_partial",
    "merge_attentions",
]
