"""Llama, Mistral (sliding window), Qwen 2 (biases of q, k, v), Qwen 3 (qk-norm): RMSNorm, SwiGLU, grouped queries."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from powertrain.models.causal_lm import CausalLM
from powertrain.models.config import ModelConfig, Positive, check_heads
from powertrain.models.rope_scaling import scheme
from powertrain.nn.attention import Rotary, SelfAttention
from powertrain.nn.block import Block
from powertrain.nn.mlp import GatedMLP
from powertrain.nn.norm import RMSNorm


class Config(ModelConfig):
    """num_kv_heads    None: num_heads
    head_dim           None: hidden_size / num_heads
    sliding_window     keys each query sees, itself included (Mistral)
    qkv_bias           Qwen 2;  qk_norm: Qwen 3
    """

    hf_architectures: ClassVar[tuple[str, ...]] = (
        "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
    )  # fmt: skip

    architecture: Literal["llama"] = "llama"
    intermediate_size: Positive
    num_kv_heads: Positive | None = None
    head_dim: Positive | None = None
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    rope_scaling: dict[str, Any] | None = None
    sliding_window: Positive | None = None
    qkv_bias: bool = False
    qk_norm: bool = False

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        check_heads(self, self.num_kv_heads, self.head_dim)
        scheme(self.rope_scaling)
        return self


class Model(CausalLM):
    def __init__(self, config: Config) -> None:
        layers = (_block(config, layer) for layer in range(config.num_layers))
        super().__init__(config, layers, RMSNorm(config.hidden_size, eps=config.norm_eps))


def _block(config: Config, layer: int) -> Block:
    hidden_size, eps = config.hidden_size, config.norm_eps
    head_dim = config.head_dim or hidden_size // config.num_heads
    attention = SelfAttention(
        hidden_size,
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=head_dim,
        rotary=Rotary(head_dim, config.max_position_embeddings, config.rope_theta, scheme(config.rope_scaling)),
        sliding_window=config.sliding_window,
        qk_norm_eps=eps if config.qk_norm else None,
        qkv_bias=config.qkv_bias,
        layer=layer,
    )
    mlp = GatedMLP(hidden_size, config.intermediate_size)
    return Block(attention, mlp, RMSNorm(hidden_size, eps=eps), RMSNorm(hidden_size, eps=eps))


# what tensor parallelism spreads in a layer (parallelize.py)
TENSOR_PLAN = {
    "attention.qkv": "columns",
    "attention.q_norm": "heads_norm",
    "attention.k_norm": "heads_norm",
    "attention.out": "rows",
    "mlp": "input",
    "mlp.gate": "columns",
    "mlp.up": "columns",
    "mlp.down": "rows",
}


def divided_by_tensor(config: Config) -> dict[str, int]:
    """The sizes that the number of tensor-parallel ranks must divide, by key."""
    return {"num_kv_heads": config.num_kv_heads or config.num_heads, "intermediate_size": config.intermediate_size}


_LLAMA3 = {"vocab_size": 128256, "rope_theta": 500000.0, "num_kv_heads": 8, "max_position_embeddings": 8192}

# sizes as their publishers' config files state them; llama-1b is Llama 3.2 1B without its tied embeddings
PRESETS: dict[str, dict[str, Any]] = {
    "llama-1b": {**_LLAMA3, "hidden_size": 2048, "num_layers": 16, "num_heads": 32, "intermediate_size": 8192},
    "llama-3b": {**_LLAMA3, "hidden_size": 3072, "num_layers": 28, "num_heads": 24, "intermediate_size": 8192},
    "llama-8b": {**_LLAMA3, "hidden_size": 4096, "num_layers": 32, "num_heads": 32, "intermediate_size": 14336},
    "llama-70b": {**_LLAMA3, "hidden_size": 8192, "num_layers": 80, "num_heads": 64, "intermediate_size": 28672},
    "mistral-7b": {
        "vocab_size": 32000, "hidden_size": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8,
        "intermediate_size": 14336, "sliding_window": 4096, "max_position_embeddings": 32768,
    },
    "qwen3-0.6b": {
        "vocab_size": 151936, "hidden_size": 1024, "num_layers": 28, "num_heads": 16, "num_kv_heads": 8,
        "head_dim": 128, "intermediate_size": 3072, "rope_theta": 1e6, "norm_eps": 1e-6, "qk_norm": True,
        "tie_embeddings": True, "max_position_embeddings": 40960,
    },
}  # fmt: skip
