"""What a model is made of: the fields every architecture has, and the table of architectures and presets."""

import importlib
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Init = Literal[
    "normal", "scaled_normal", "small_init", "wang_init", "single_residual_scaled_normal",
    "xavier_normal", "xavier_uniform", "orthogonal",
]  # fmt: skip

# architecture -> the module that holds its config, model, presets and parallelize()
ARCHITECTURES = {
    "gpt_neox": "powertrain.models.gpt_neox",
    "llama": "powertrain.models.llama",
    "deepseek": "powertrain.models.deepseek",
}


class ModelConfig(BaseModel):
    """Fields that every architecture has. Frozen; unknown fields are errors.

    vocab_size               rows of the embedding, padding included; 0: the tokenizer's, padded, once that is known
    max_position_embeddings  longest sequence: the size of rotary tables and of learned position embeddings
    tie_embeddings           the head is the embedding's weight
    init_method, output_init_method   of all matrices, and of those that write into the residual stream
    init_std                 of "normal", and of "scaled_normal" before its division by sqrt(2 * num_layers)
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
    # classes of transformers whose checkpoints it reads and writes
    hf_architectures: ClassVar[tuple[str, ...]] = ()

    architecture: str
    vocab_size: Annotated[int, Field(ge=0)] = 0
    hidden_size: Positive
    num_layers: Positive
    num_heads: Positive
    max_position_embeddings: Positive = 2048
    tie_embeddings: bool = False
    init_method: Init = "normal"
    output_init_method: Init = "normal"
    init_std: Annotated[float, Field(gt=0)] = 0.02


def check_heads(config: ModelConfig, num_kv_heads: int | None, head_dim: int | None = None) -> None:
    """Heads that divide what they must; raises ValueError naming the field."""
    hidden_size, num_heads = config.hidden_size, config.num_heads
    if head_dim is None and hidden_size % num_heads:
        raise ValueError(f"model.hidden_size must be a multiple of num_heads ({num_heads}), got {hidden_size}")
    if num_kv_heads is not None and num_heads % num_kv_heads:
        raise ValueError(f"model.num_kv_heads must divide num_heads ({num_heads}), got {num_kv_heads}")


def build(config: ModelConfig, device: Any = None) -> Any:
    """The model of a config. On the meta device unless another is given: `to_empty` and `init_weights` follow."""
    import torch

    if not config.vocab_size:
        raise ValueError("model.vocab_size must be known to build the model, got 0 (the tokenizer's)")
    with torch.device("meta" if device is None else device):
        return architecture(config.architecture).Model(config)


def architecture(name: str) -> Any:
    """The module of an architecture: Config, Model, PRESETS, divided_by_tensor, and TENSOR_PLAN if that has keys."""
    if name not in ARCHITECTURES:
        raise ValueError(f"model.architecture must be one of {', '.join(ARCHITECTURES)}, got {name!r}")
    return importlib.import_module(ARCHITECTURES[name])


def presets() -> dict[str, tuple[str, dict[str, Any]]]:
    """Preset name -> (architecture, its fields)."""
    return {preset: (name, fields) for name in ARCHITECTURES for preset, fields in architecture(name).PRESETS.items()}


def configure(**fields: Any) -> ModelConfig:
    """The config of `architecture=`, or of `preset=` with the other fields laid over it.

    Raises ValueError (pydantic's ValidationError among them) naming the field, what it must be and what it was.
    """
    preset = fields.pop("preset", None)
    if preset is not None:
        known = presets()
        if preset not in known:
            raise ValueError(f"model.preset must be one of {', '.join(known)}, got {preset!r}")
        name, values = known[preset]
        fields = {"architecture": name, **values, **fields}
    if "architecture" not in fields:
        raise ValueError(f"model must have an architecture ({', '.join(ARCHITECTURES)}) or a preset, got neither")
    return architecture(fields["architecture"]).Config(**fields)
