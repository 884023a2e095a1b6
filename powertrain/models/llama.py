"""Llama, Mistral (sliding window), Qwen 2 (biases of q, k, v), Qwen 3 (qk-norm): RMSNorm, SwiGLU, grouped queries."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from powertrain.models.causal_lm import CausalLM
from powertrain.models.config import ModelConfig, Positive, check_heads
from powertrain.models.hf_config import chosen, only, required
from powertrain.models.rope_scaling import from_hf_rope, scheme, to_hf_rope
from powertrain.nn.attention import Rotary, SelfAttention
from powertrain.nn.block import Block
from powertrain.nn.mlp import GatedMLP
from powertrain.nn.norm import RMSNorm
from powertrain.ops.activations import Gated


class Config(ModelConfig):
    """num_kv_heads    None: num_heads
    head_dim           None: hidden_size / num_heads
    sliding_window     keys each query sees, itself included (Mistral)
    qkv_bias           Qwen 2;  qk_norm: Qwen 3;  qkv_bias with out_bias: Llama's and Qwen 3's attention_bias
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
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: Gated = "swiglu"

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        check_heads(self, self.num_kv_heads, self.head_dim)
        head_dim = self.head_dim or self.hidden_size // self.num_heads
        if head_dim % 2:
            name = "hidden_size / num_heads" if self.head_dim is None else "head_dim"
            raise ValueError(f"model.{name} must be even, since channels turn in pairs, got {head_dim}")
        scheme(self.rope_scaling, self.rope_theta)
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
        out_bias=config.out_bias,
        layer=layer,
    )
    mlp = GatedMLP(hidden_size, config.intermediate_size, kind=config.activation, bias=config.mlp_bias)
    return Block(attention, mlp, RMSNorm(hidden_size, eps=eps), RMSNorm(hidden_size, eps=eps))


# modules that tensor parallelism shards in a layer (parallelize.py)
TENSOR_PLAN = {
    # every rank normalizes its own tokens
    "attention_norm": "replicated",
    "mlp_norm": "replicated",
    # by heads: a rank has whole heads of q, k and v
    "attention.qkv": "columns",
    "attention.q_norm": "replicated",
    "attention.k_norm": "replicated",
    "attention.out": "rows",
    "mlp.gate": "columns",
    "mlp.up": "columns",
    "mlp.down": "rows",
}


def divided_by_tensor(config: Config) -> dict[str, int]:
    """The sizes that the number of tensor-parallel ranks must divide, by key."""
    # key heads are the smaller number: each rank needs at least one
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

# defaults of Qwen's config classes in transformers
_QWEN = {"num_key_value_heads": 32, "max_window_layers": 28, "sliding_window": 4096}
# model_type -> class, fixed features, and defaults of config.json
_HF_CLASSES: dict[str, tuple[str, dict[str, bool], dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"qk_norm": False}, {}),
    "mistral": (
        "MistralForCausalLM",
        {"qkv_bias": False, "out_bias": False, "mlp_bias": False, "qk_norm": False},
        {"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": ("Qwen2ForCausalLM", {"qkv_bias": True, "out_bias": False, "mlp_bias": False, "qk_norm": False}, _QWEN),
    "qwen3": ("Qwen3ForCausalLM", {"mlp_bias": False, "qk_norm": True}, {**_QWEN, "head_dim": 128}),
}
# hidden_act -> our activation
_HF_ACTIVATIONS = {
    "silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "gelu_new": "geglu_tanh",
    "relu": "reglu",
}  # fmt: skip


def from_hf_config(values: Mapping[str, Any]) -> Config:
    """The config of a Llama's, Mistral's, Qwen 2's or Qwen 3's config.json; raises ValueError naming the key."""
    kind = chosen(values, "model_type", None, {name: name for name in _HF_CLASSES})
    _, always, defaults = _HF_CLASSES[kind]
    # config.json leaves out what is its class's default
    values = {**defaults, **values}
    only(values, attention_dropout=0.0, pretraining_tp=1, use_mrope=False)
    rope = from_hf_rope(values)
    only({"partial_rotary_factor": rope.fraction}, partial_rotary_factor=1.0)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    vocab, hidden, ffn, layers, heads = required(values, *names)
    length, eps = required(values, "max_position_embeddings", "rms_norm_eps")
    has_bias = bool(values.get("attention_bias"))
    switches: dict[str, Any] = {
        "qkv_bias": has_bias,
        "out_bias": has_bias,
        "mlp_bias": bool(values.get("mlp_bias")),
        **always,
    }
    return Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=ffn, num_layers=layers, num_heads=heads,
        # older configs have no head_dim
        num_kv_heads=values.get("num_key_value_heads") or heads, head_dim=values.get("head_dim") or hidden // heads,
        max_position_embeddings=length, norm_eps=eps, tie_embeddings=bool(values.get("tie_word_embeddings")),
        init_std=values.get("initializer_range") or 0.02, rope_theta=rope.theta, rope_scaling=rope.scaling,
        sliding_window=_hf_window(kind, values, layers), **switches,
        activation=chosen(values, "hidden_act", "silu", _HF_ACTIVATIONS),
    )  # fmt: skip


def _hf_window(kind: str, values: Mapping[str, Any], layers: int) -> int | None:
    """The window of all layers, or None; raises ValueError where layers differ."""
    window = values.get("sliding_window")
    if kind == "llama":
        # Llama's class has no window; a config that sets one would be computed differently there
        only(values, sliding_window=None)
        types = values.get("layer_types")
    elif kind == "mistral":
        types = values.get("layer_types") or ["full_attention" if window is None else "sliding_attention"]
    else:
        first = values["max_window_layers"]
        # Qwen has a window in its config that is off unless use_sliding_window
        window = window if values.get("use_sliding_window") else None
        types = values.get("layer_types") or [
            "sliding_attention" if window is not None and layer >= first else "full_attention"
            for layer in range(layers)
        ]
    kinds = set(types or ["full_attention"])
    if kinds == {"full_attention"}:
        return None
    # our layers share one window; a model of both kinds would compute something else
    if kinds != {"sliding_attention"} or window is None:
        raise ValueError(
            "config.json: layer_types (or max_window_layers) must give all layers full_attention, or all "
            f"sliding_attention and a sliding_window, got {sorted(kinds)}"
        )
    return int(window)


def to_hf_config(config: Config) -> dict[str, Any]:
    """config.json of the class with this model's features; raises ValueError if none has them."""
    kind = _hf_kind(config)
    # several of their names are one activation: the first of them is written
    acts = {ours: theirs for theirs, ours in reversed(_HF_ACTIVATIONS.items())}
    if config.activation not in acts:
        raise ValueError(f"model.activation must be one of {', '.join(acts)} to be written, got {config.activation}")
    values = {
        "architectures": [_HF_CLASSES[kind][0]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads or config.num_heads,
        "head_dim": config.head_dim or config.hidden_size // config.num_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
        "hidden_act": acts[config.activation],
        "sliding_window": config.sliding_window,
        "attention_bias": config.qkv_bias and config.out_bias,
        "mlp_bias": config.mlp_bias,
        "attention_dropout": 0.0,
        **to_hf_rope(config.rope_theta, config.rope_scaling),
    }
    if kind.startswith("qwen"):
        values |= {"use_sliding_window": config.sliding_window is not None, "max_window_layers": 0}
    return values


def _hf_kind(config: Config) -> str:
    """The model_type whose class computes this: Mistral's for windows, Qwen's for its biases and norms."""
    for kind, (_, always, _) in _HF_CLASSES.items():
        fits = all(getattr(config, field) == value for field, value in always.items())
        # only Qwen 2 has biases on q, k and v but not on the output
        fits &= kind == "qwen2" or config.qkv_bias == config.out_bias
        fits &= config.sliding_window is None or kind != "llama"
        # Qwen 2's class takes no head_dim
        fits &= kind != "qwen2" or config.head_dim in (None, config.hidden_size // config.num_heads)
        if fits:
            return kind
    raise ValueError(
        "model.qkv_bias, out_bias, mlp_bias, qk_norm and sliding_window must be as Llama, Mistral, Qwen 2 or Qwen 3 "
        f"have them to be written, got {config.qkv_bias}, {config.out_bias}, {config.mlp_bias}, {config.qk_norm} and "
        f"{config.sliding_window}"
    )


HF_LEFT_OUT = r"rotary_emb\.inv_freq$"
_HF_OUTSIDE = {
    "embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "head.weight": "lm_head.weight",
}  # fmt: skip
_HF_MODULES = {
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "attention.out": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm", "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip


def hf_parts(config: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """One tensor of ours under Hugging Face's names; the packed projection as its queries, keys and values."""
    if name in _HF_OUTSIDE:
        yield _HF_OUTSIDE[name], tensor
        return
    _, layer, inside = name.split(".", 2)
    module, kind = inside.rsplit(".", 1)
    prefix = f"model.layers.{layer}."
    if module == "attention.qkv":
        for letter, part in zip("qkv", split_qkv(tensor, config.num_heads, config.num_kv_heads), strict=True):
            yield f"{prefix}self_attn.{letter}_proj.{kind}", part
    else:
        yield f"{prefix}{_HF_MODULES[module]}.{kind}", tensor


def from_hf_parts(config: Any, name: str, parts: list[Tensor]) -> Tensor:
    """`hf_parts` backwards: one tensor of ours from theirs, in that order."""
    return join_qkv(parts, config.num_heads, config.num_kv_heads) if ".attention.qkv." in name else parts[0]


def split_qkv(packed: Tensor, num_heads: int, num_kv_heads: int | None) -> list[Tensor]:
    """Rows packed by kv head as all queries' rows, all keys', all values'."""
    kv_heads = num_kv_heads or num_heads
    group = num_heads // kv_heads
    # packed by kv head: its queries, then its key, its value, so that tensor ranks cut between kv heads
    groups = packed.unflatten(0, (kv_heads, group + 2, -1))
    return [part.flatten(0, 2) for part in groups.split((group, 1, 1), 1)]


def join_qkv(parts: Sequence[Tensor], num_heads: int, num_kv_heads: int | None) -> Tensor:
    """`split_qkv` backwards."""
    kv_heads = num_kv_heads or num_heads
    sizes = (num_heads // kv_heads, 1, 1)
    groups = [part.unflatten(0, (kv_heads, size, -1)) for part, size in zip(parts, sizes, strict=True)]
    return torch.cat(groups, 1).flatten(0, 2)
