"""The config fields that every architecture has."""

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Init = Literal[
    "normal", "scaled_normal", "small_init", "wang_init", "single_residual_scaled_normal",
    "xavier_normal", "xavier_uniform", "orthogonal",
]  # fmt: skip


# each far above any model's; of the other sizes 2**22 is
_LARGEST = {"num_layers": 4096, "vocab_size": 1 << 28, "max_position_embeddings": 1 << 24}


class ModelConfig(BaseModel):
    """Fields that every architecture has. Frozen; unknown fields are errors.

    vocab_size               rows of the embedding, padding included; 0: the tokenizer's, padded, once that is known
    max_position_embeddings  longest sequence: the size of rotary tables and of learned position embeddings
    tie_embeddings           the head is the embedding's weight
    init_method, output_init_method   of all matrices, and of those that write into the residual stream
    init_std                 of "normal", and of "scaled_normal" before its division by sqrt(2 * num_layers)
    """

    # frozen: a config is part of checkpoints and of cache keys; unknown fields are typing errors
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)
    # classes of transformers whose checkpoints it reads and writes
    hf_architectures: ClassVar[tuple[str, ...]] = ()

    architecture: str
    # 0 until the tokenizer is read, since the config may leave the vocabulary to it
    vocab_size: Annotated[int, Field(ge=0)] = 0
    hidden_size: Positive
    num_layers: Positive
    num_heads: Positive
    max_position_embeddings: Positive = 2048
    tie_embeddings: bool = False
    init_method: Init = "normal"
    output_init_method: Init = "normal"
    init_std: Annotated[float, Field(gt=0)] = 0.02

    @model_validator(mode="after")
    def _sizes_are_possible(self) -> "ModelConfig":
        """Refuse sizes so large that building layers would take hours, or overflow a tensor's size (typing errors)."""
        for name, value in self:
            most = _LARGEST.get(name, 1 << 22)
            if isinstance(value, int) and value > most:
                raise ValueError(f"model.{name} must be at most {most}, got {value}")
        return self


def as_yaml(value: object) -> str:
    """A value as configs and JSON write it (true, null, [1, 2]), for error messages; a text without quotes."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {as_yaml(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_yaml, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def check_heads(config: ModelConfig, num_kv_heads: int | None, head_dim: int | None = None) -> None:
    """Check that head counts divide their dims; raises ValueError naming the field."""
    hidden_size, num_heads = config.hidden_size, config.num_heads
    # with a head_dim of its own the product may differ from hidden_size (Qwen 3)
    if head_dim is None and hidden_size % num_heads:
        raise ValueError(f"model.hidden_size must be a multiple of num_heads ({num_heads}), got {hidden_size}")
    if num_kv_heads is not None and num_heads % num_kv_heads:
        raise ValueError(f"model.num_kv_heads must divide num_heads ({num_heads}), got {num_kv_heads}")
