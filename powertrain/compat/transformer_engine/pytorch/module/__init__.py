"""transformer_engine.pytorch.module."""

from powertrain.compat.missing import unknown
from powertrain.compat.transformer_engine.pytorch.module.norms import LayerNorm, RMSNorm
from powertrain.compat.userbuffers import destroy_ub, initialize_ub

__all__ = ["LayerNorm", "RMSNorm", "destroy_ub", "initialize_ub"]

__getattr__ = unknown(__name__)
