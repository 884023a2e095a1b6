"""transformer_engine.pytorch.fp8: the older path of quantization and of the recipes."""

from powertrain.compat.missing import unknown
from powertrain.compat.transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from powertrain.compat.transformer_engine.pytorch.quantization import (
    fp8_autocast,
    fp8_model_init,
    get_default_fp8_recipe,
)

__all__ = [
    "CustomRecipe", "DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "Format", "MXFP8BlockScaling",
    "NVFP4BlockScaling", "Recipe", "fp8_autocast", "fp8_model_init", "get_default_fp8_recipe",
]  # fmt: skip

__getattr__ = unknown(__name__)
