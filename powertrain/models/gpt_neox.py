"""GPT-NeoX: everything a GPT-NeoX YAML can ask of a dense decoder, GPT-2 and GPT-3 like ones and Pythia among them."""

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, model_validator
from torch import nn

from powertrain.models.causal_lm import CausalLM
from powertrain.models.config import Fraction, Init, ModelConfig, Positive, Probability, check_heads
from powertrain.nn.attention import Rotary, SelfAttention
from powertrain.nn.block import Block
from powertrain.nn.mlp import MLP, GatedMLP
from powertrain.nn.norm import LayerNorm, RMSNorm
from powertrain.ops.activations import Activation, Gated


class Config(ModelConfig):
    """num_kv_heads            None: num_heads
    intermediate_size          columns of the MLP inside; None: 4 * hidden_size
    activation                 "swiglu", "geglu" ... make the MLP a gated one
    rotary_pct                 share of a head's channels that turn, rounded down to an even number
    parallel_residual          x + attention(norm(x)) + mlp(norm'(x)); with shared_norm both read the same norm
    attention_bias, mlp_bias, norm_bias   whether they have one
    """

    hf_architectures: ClassVar[tuple[str, ...]] = ("GPTNeoXForCausalLM",)

    architecture: Literal["gpt_neox"] = "gpt_neox"
    num_kv_heads: Positive | None = None
    intermediate_size: Positive | None = None
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    norm_bias: bool = True
    activation: Activation | Gated = "gelu"
    position_embedding: Literal["rotary", "learned", "alibi", "none"] = "rotary"
    rotary_pct: Fraction = 1.0
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    parallel_residual: bool = False
    shared_norm: bool = False
    attention_bias: bool = True
    mlp_bias: bool = True
    sliding_window: Positive | None = None
    hidden_dropout: Probability = 0.0
    attention_dropout: Probability = 0.0
    init_method: Init = "small_init"
    output_init_method: Init = "wang_init"

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        check_heads(self, self.num_kv_heads)
        if self.shared_norm and not self.parallel_residual:
            raise ValueError("model.shared_norm must be false without model.parallel_residual, got true")
        return self

    @property
    def ffn(self) -> int:
        return self.intermediate_size or 4 * self.hidden_size


class Model(CausalLM):
    def __init__(self, config: Config) -> None:
        super().__init__(
            config,
            (_block(config, layer) for layer in range(config.num_layers)),
            _norm(config),
            learned_positions=config.position_embedding == "learned",
            dropout=config.hidden_dropout,
        )


def _block(config: Config, layer: int) -> Block:
    return Block(
        _attention(config, layer),
        _mlp(config),
        _norm(config),
        None if config.shared_norm else _norm(config),
        parallel=config.parallel_residual,
        dropout=config.hidden_dropout,
    )


def _attention(config: Config, layer: int) -> SelfAttention:
    head_dim = config.hidden_size // config.num_heads
    turned = int(head_dim * config.rotary_pct) // 2 * 2
    rotary = None
    if config.position_embedding == "rotary" and turned:
        rotary = Rotary(turned, config.max_position_embeddings, config.rope_theta)
    return SelfAttention(
        config.hidden_size,
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        rotary=rotary,
        alibi=config.position_embedding == "alibi",
        sliding_window=config.sliding_window,
        dropout=config.attention_dropout,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        layer=layer,
    )


def _mlp(config: Config) -> nn.Module:
    kind: Any = config.activation
    mlp = GatedMLP if kind in get_args(Gated) else MLP
    return mlp(config.hidden_size, config.ffn, kind=kind, bias=config.mlp_bias)


def _norm(config: Config) -> nn.Module:
    norm = LayerNorm if config.norm == "layer_norm" else RMSNorm
    return norm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)


# what tensor parallelism spreads in a layer (parallelize.py)
TENSOR_PLAN = {
    "attention.qkv": "columns",
    "attention.out": "rows",
    "mlp": "input",
    "mlp.gate": "columns",
    "mlp.up": "columns",
    "mlp.down": "rows",
}


def divided_by_tensor(config: Config) -> dict[str, int]:
    """The sizes that the number of tensor-parallel ranks must divide, by key."""
    return {"num_kv_heads": config.num_kv_heads or config.num_heads, "intermediate_size": config.ffn}


def _gpt3(hidden_size: int, num_layers: int, num_heads: int) -> dict[str, Any]:
    return {"hidden_size": hidden_size, "num_layers": num_layers, "num_heads": num_heads, "vocab_size": 50304}


def _pythia(hidden_size: int, num_layers: int, num_heads: int) -> dict[str, Any]:
    sizes = _gpt3(hidden_size, num_layers, num_heads)
    return {**sizes, "rotary_pct": 0.25, "parallel_residual": True}


# sizes: Brown et al., arXiv:2005.14165, table 2.1; Biderman et al., arXiv:2304.01373, table 1
PRESETS: dict[str, dict[str, Any]] = {
    "gpt-neox-19m": _gpt3(512, 6, 8),
    "gpt-neox-125m": _gpt3(768, 12, 12),
    "gpt-neox-350m": _gpt3(1024, 24, 16),
    "gpt-neox-760m": _gpt3(1536, 24, 16),
    "gpt-neox-1.3b": _gpt3(2048, 24, 16),
    "gpt-neox-2.7b": _gpt3(2560, 32, 32),
    "gpt-neox-6.7b": _gpt3(4096, 32, 32),
    "pythia-70m": _pythia(512, 6, 8),
    "pythia-160m": _pythia(768, 12, 12),
    "pythia-410m": _pythia(1024, 24, 16),
    "pythia-1.4b": _pythia(2048, 24, 16),
    "pythia-6.9b": _pythia(4096, 32, 32),
}
