"""transformer_engine.pytorch.attention."""

from powertrain.compat.missing import unknown
from powertrain.compat.transformer_engine.pytorch.attention.dot_product_attention import DotProductAttention
from powertrain.compat.transformer_engine.pytorch.attention.inference import InferenceParams
from powertrain.compat.transformer_engine.pytorch.attention.multi_head_attention import MultiheadAttention
from powertrain.compat.transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb

__all__ = [
    "DotProductAttention",
    "InferenceParams",
    "MultiheadAttention",
    "RotaryPositionEmbedding",
    "apply_rotary_pos_emb",
]

__getattr__ = unknown(__name__)
