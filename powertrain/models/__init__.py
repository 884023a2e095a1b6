"""Models: one file each, with its config, presets, Hugging Face names and parallelize()."""

from powertrain.runtime.extras import require

require("train", "powertrain.models")

from powertrain.models.config import ModelConfig  # noqa: E402
from powertrain.models.registry import ARCHITECTURES, architecture, build, configure, presets  # noqa: E402

__all__ = ["ARCHITECTURES", "ModelConfig", "architecture", "build", "configure", "presets"]
