"""transformer_engine.pytorch.module."""

from powertrain.compat.missing import unknown
from powertrain.compat.transformer_engine.pytorch.module.grouped_linear import Fp8Padding, Fp8Unpadding, GroupedLinear
from powertrain.compat.transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP
from powertrain.compat.transformer_engine.pytorch.module.linear import LayerNormLinear, Linear
from powertrain.compat.transformer_engine.pytorch.module.norms import LayerNorm, RMSNorm
from powertrain.compat.userbuffers import destroy_ub, initialize_ub

__all__ = [
    "Fp8Padding", "Fp8Unpadding", "GroupedLinear", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "RMSNorm",
    "destroy_ub", "initialize_ub",
]  # fmt: skip

__getattr__ = unknown(__name__)
