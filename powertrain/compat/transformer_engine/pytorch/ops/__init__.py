"""transformer_engine.pytorch.ops: operations as modules, and their sequence."""

from torch import nn

from powertrain.compat.missing import unknown
from powertrain.compat.transformer_engine.pytorch.ops.basic import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    Bias,
    ConstantScale,
    Dropout,
    Identity,
    L2Normalization,
    LayerNorm,
    Linear,
    ReGLU,
    ReLU,
    Reshape,
    RMSNorm,
    SiLU,
    SReGLU,
    SReLU,
    SwiGLU,
)

__all__ = [
    "GEGLU", "GELU", "GLU", "QGEGLU", "QGELU", "Bias", "ConstantScale", "Dropout", "Identity", "L2Normalization",
    "LayerNorm", "Linear", "RMSNorm", "ReGLU", "ReLU", "Reshape", "SReGLU", "SReLU", "Sequential", "SiLU", "SwiGLU",
]  # fmt: skip


class Sequential(nn.Sequential):
    """torch.nn.Sequential; each operation is one of our ops already."""


__getattr__ = unknown(__name__)
