"""transformer_engine.pytorch.ops: operations as modules, and their sequence."""

from powertrain.compat.missing import unknown
from powertrain.compat.transformer_engine.pytorch.ops.basic import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    AddExtraInput,
    BasicLinear,
    Bias,
    ClampedSwiGLU,
    ConstantScale,
    Dropout,
    Identity,
    L2Normalization,
    LayerNorm,
    Linear,
    MakeExtraOutput,
    ReGLU,
    ReLU,
    Reshape,
    RMSNorm,
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    SiLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from powertrain.compat.transformer_engine.pytorch.ops.sequential import Sequential

__all__ = [
    "GEGLU", "GELU", "GLU", "QGEGLU", "QGELU", "AddExtraInput", "BasicLinear", "Bias", "ClampedSwiGLU",
    "ConstantScale", "Dropout", "Identity", "L2Normalization", "LayerNorm", "Linear", "MakeExtraOutput", "RMSNorm",
    "ReGLU", "ReLU", "Reshape", "SReGLU", "SReLU", "ScaledClampedQGeGLU", "ScaledSReLU", "ScaledSiTUGLU",
    "ScaledSwiGLU", "Sequential", "SiLU", "SiTUGLU", "SwiGLU",
]  # fmt: skip


__getattr__ = unknown(__name__)
