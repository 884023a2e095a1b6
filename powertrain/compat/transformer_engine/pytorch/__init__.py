"""transformer_engine.pytorch."""

from powertrain.compat.missing import unknown
from powertrain.compat.transformer_engine.pytorch.attention import DotProductAttention
from powertrain.compat.userbuffers import destroy_ub, initialize_ub

__all__ = ["DotProductAttention", "destroy_ub", "initialize_ub"]

__getattr__ = unknown(__name__)
