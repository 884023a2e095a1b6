"""liger_kernel.transformers.mlp on `powertrain.linear_activation`."""

from typing import Any

from powertrain.compat.liger_kernel.transformers.swiglu import LigerFalconH1SwiGLUMLP, LigerSwiGLUMLP
from powertrain.compat.missing import unknown
from powertrain.runtime import checks

__all__ = ["LigerFalconH1MLP", "LigerMLP"]


class LigerMLP(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP`: there another kernel of the same function."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)


class LigerFalconH1MLP(LigerFalconH1SwiGLUMLP):
    """`LigerFalconH1SwiGLUMLP` without biases."""

    def __init__(self, config: Any) -> None:
        bias = getattr(config, "mlp_bias", False)
        checks.require(
            not bias, "LigerFalconH1MLP", "config.mlp_bias", "be False (LigerFalconH1SwiGLUMLP has it)", bias
        )
        super().__init__(config)


__getattr__ = unknown(__name__)
