"""The architectures and presets, by name."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from powertrain.models.config import ModelConfig

if TYPE_CHECKING:  # names and presets are read without torch
    import torch

    from powertrain.models.causal_lm import CausalLM

# architecture -> the module that holds its config, model, presets and parallelize()
ARCHITECTURES = {
    "gpt_neox": "powertrain.models.gpt_neox",
    "llama": "powertrain.models.llama",
    "deepseek": "powertrain.models.deepseek",
}


def build(config: ModelConfig, device: "torch.device | str | None" = None) -> "CausalLM":
    """The model of a config. On the meta device unless another is given: `to_empty` and `init_weights` follow.

    Raises ValueError if the vocabulary size is 0, which stands for the tokenizer's.
    """
    # here: names and presets are listed without torch
    import torch

    if not isinstance(config, ModelConfig):
        raise TypeError(f"build: config must be a ModelConfig (powertrain.models.configure), got {config!r:.60}")
    if not config.vocab_size:
        raise ValueError("model.vocab_size must be known to build the model, got 0 (the tokenizer's)")
    with torch.device("meta" if device is None else device):
        model: CausalLM = architecture(config.architecture).Model(config)
        return model


def architecture(name: str) -> ModuleType:
    """The module of an architecture: Config, Model, PRESETS, divided_by_tensor, and TENSOR_PLAN if that has keys.

    Raises ValueError for a name that is not in ARCHITECTURES.
    """
    if name not in [*ARCHITECTURES]:
        raise ValueError(f"model.architecture must be one of {', '.join(ARCHITECTURES)}, got {name!r}")
    # imported when asked for: listing presets must not build classes of all models
    return importlib.import_module(ARCHITECTURES[name])


def presets() -> dict[str, tuple[str, dict[str, Any]]]:
    """Preset name -> (architecture, its fields)."""
    return {preset: (name, fields) for name in ARCHITECTURES for preset, fields in architecture(name).PRESETS.items()}


def configure(**fields: Any) -> ModelConfig:
    """The config of `architecture=`, or of `preset=` with the other fields overriding its own.

    Raises ValueError (pydantic's ValidationError among them) naming the field, the expected value and the given one.
    """
    preset = fields.pop("preset", None)
    if preset is not None:
        known = presets()
        if preset not in [*known]:
            raise ValueError(f"model.preset must be one of {', '.join(known)}, got {preset!r}")
        name, values = known[preset]
        # its other fields mean nothing there, and would be refused by names that the user did not write
        if fields.get("architecture", name) != name:
            got = fields["architecture"]
            raise ValueError(f"model.architecture must be {name} with the preset {preset}, or left out, got {got!r}")
        # fields given by the caller win over the preset
        fields = {"architecture": name, **values, **fields}
    if "architecture" not in fields:
        raise ValueError(f"model must have an architecture ({', '.join(ARCHITECTURES)}) or a preset, got neither")
    return architecture(fields["architecture"]).Config(**fields)
