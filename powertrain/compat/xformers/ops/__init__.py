"""xformers.ops: attention, norms, SwiGLU, rotary embedding into a KV cache, indexing."""

from powertrain.compat.missing import unknown
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
from powertrain.compat.xformers.ops.indexing import index_select_cat, scaled_index_add
from powertrain.compat.xformers.ops.rmsnorm import RMSNorm, rms_norm, rms_norm_add
from powertrain.compat.xformers.ops.rope_padded import rope_padded
from powertrain.compat.xformers.ops.swiglu_op import SwiGLU, SwiGLUOp, swiglu
from powertrain.compat.xformers.ops.tiled_matmul import tiled_matmul
from powertrain.compat.xformers.ops.unbind import get_stack_strides, stack_or_none, unbind

AttentionMask = AttentionBias

__all__ = [
    "AttentionBias",
    "AttentionMask",
    "AttentionOp",
    "LowerTriangularMask",
    "MemoryEfficientAttentionCutlassOp",
    "MemoryEfficientAttentionFlashAttentionOp",
    "RMSNorm",
    "SwiGLU",
    "SwiGLUOp",
    "fmha",
    "get_stack_strides",
    "index_select_cat",
    "memory_efficient_attention",
    "memory_efficient_attention_backward",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "memory_efficient_attention_partial",
    "merge_attentions",
    "rms_norm",
    "rms_norm_add",
    "rope_padded",
    "scaled_index_add",
    "stack_or_none",
    "swiglu",
    "tiled_matmul",
    "unbind",
]

__getattr__ = unknown(__name__)
