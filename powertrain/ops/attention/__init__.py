"""Attention: one op for every mask, layout and head dim, and the backends that compute it."""

from powertrain.ops.attention.api import attention, varlen_attention
from powertrain.ops.attention.backend_preferences import attention_backend
from powertrain.ops.attention.decode import decode_attention
from powertrain.ops.attention.explain import explain_attention
from powertrain.ops.attention.explain_decode import explain_decode_attention
from powertrain.ops.attention.mask import MaskSpec, MaskTensors
from powertrain.ops.attention.merge import merge_attentions
from powertrain.ops.attention.partial_backward import attention_backward
from powertrain.ops.attention.select import NoBackendError

# a FlopCounterMode counts ops that were registered before it was made
from powertrain.ops.attention.triton import backend as _registers_flops  # noqa: F401

__all__ = [
    "MaskSpec",
    "MaskTensors",
    "NoBackendError",
    "attention",
    "attention_backend",
    "attention_backward",
    "decode_attention",
    "explain_attention",
    "explain_decode_attention",
    "merge_attentions",
    "varlen_attention",
]
