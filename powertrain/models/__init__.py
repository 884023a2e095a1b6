"""Models: one file each, with its config, presets, Hugging Face names and parallelize()."""

from powertrain.models.config import ModelConfig
from powertrain.models.registry import ARCHITECTURES, architecture, build, configure, presets

__all__ = ["ARCHITECTURES", "ModelConfig", "architecture", "build", "configure", "presets"]
