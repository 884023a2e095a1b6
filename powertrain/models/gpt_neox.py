"""GPT-NeoX: decoders that a GPT-NeoX YAML can ask for: like GPT-2 and GPT-3, Pythia, gMLP layers, experts, attention to
some blocks only."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, model_validator
from torch import Tensor, nn

from powertrain.models import llama
from powertrain.models.config import Fraction, Init, ModelConfig, Positive, Probability, as_yaml, check_heads
from powertrain.models.hf_config import chosen, required
from powertrain.models.mixture import MixtureLM
from powertrain.models.rope_scaling import from_hf_rope, to_hf_rope
from powertrain.nn.attention import Rotary, SelfAttention
from powertrain.nn.block import Block, Layer
from powertrain.nn.block_sparsity import BlockSparsity
from powertrain.nn.gmlp import GMLP
from powertrain.nn.mlp import MLP, GatedMLP
from powertrain.nn.moe import MoE
from powertrain.nn.norm import LayerNorm, RMSNorm
from powertrain.nn.token_choice import Routing, TokenChoiceRouter
from powertrain.ops.activations import Activation, Gated

LayerType = Literal["attention", "sparse", "gmlp", "amlp"]


class Config(ModelConfig):
    """num_kv_heads            None: num_heads
    intermediate_size          columns of the MLP inside; None: 4 * hidden_size
    activation                 "swiglu", "geglu" ... make the MLP a gated one
    rotary_pct                 share of a head's channels that turn, rounded down to an even number
    parallel_residual          x + attention(norm(x)) + mlp(norm'(x)); with shared_norm both read the same norm
    attention_bias, mlp_bias, norm_bias   whether they have one
    layer_types                kinds of the layers, repeated over all of them; gmlp, amlp: without attention, or with a
                               single head of gmlp_attention_dim channels (powertrain/nn/gmlp.py); sparse: attention to
                               the blocks that `sparsity` says, without ALiBi or a sliding window, dropout behind it
    num_experts                1: no experts. Layers 0, expert_interval, 2 * expert_interval ... have them,
                               gMLP layers excepted
    experts_per_token, router, router_jitter   see TokenChoiceRouter
    expert_intermediate_size   columns inside an expert; None: as of an MLP
    expert_activation          without a gate; None: activation, if that has none
    expert_bias                a bias behind the experts' sum; without it there is no hidden_dropout behind them either
    balance_loss               weight of the load balancing loss, per sequence; 0: none, as in GPT-NeoX
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
    layer_types: Annotated[tuple[LayerType, ...], Field(min_length=1)] = ("attention",)
    gmlp_attention_dim: Positive = 64
    sparsity: BlockSparsity | None = None
    num_experts: Positive = 1
    experts_per_token: Positive = 1
    expert_interval: Positive = 1
    expert_intermediate_size: Positive | None = None
    expert_activation: Activation | None = None
    expert_bias: bool = False
    router: Routing = "topk"
    router_jitter: Annotated[float, Field(ge=0, lt=1)] = 0.0
    balance_loss: Annotated[float, Field(ge=0)] = 0.0

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        check_heads(self, self.num_kv_heads)
        # one norm for both halves makes sense only where both read the same input
        if self.shared_norm and not self.parallel_residual:
            raise ValueError("model.shared_norm must be false without model.parallel_residual, got true")
        if self.num_layers % len(self.layer_types):
            raise ValueError(
                f"model.layer_types must have a number of kinds that divides num_layers ({self.num_layers}), "
                f"got {len(self.layer_types)}"
            )
        # a gMLP layer has a gate of its own
        if self.has_gmlp and self.activation in get_args(Gated):
            raise ValueError(f"model.activation must have no gate with gmlp layers, got {self.activation}")
        if ("sparse" in self.layer_types) != (self.sparsity is not None):
            there = "given with sparse layers (layer_types)" if self.sparsity is None else "null without sparse layers"
            raise ValueError(f"model.sparsity must be {there}, got {as_yaml(self.sparsity)}")
        self._check_experts()
        return self

    def _check_experts(self) -> None:
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"model.experts_per_token must be at most num_experts ({self.num_experts}), "
                f"got {self.experts_per_token}"
            )
        if self.num_experts > 1 and self.expert_activation is None and self.activation in get_args(Gated):
            raise ValueError(
                f"model.expert_activation must be given where activation ({self.activation}) has a gate, got null"
            )
        if self.balance_loss and not any(map(self.has_experts, range(self.num_layers))):
            raise ValueError(
                "model.balance_loss must be 0 without layers of experts (num_experts, expert_interval, layer_types), "
                f"got {self.balance_loss}"
            )

    @property
    def ffn(self) -> int:
        return self.intermediate_size or 4 * self.hidden_size

    @property
    def turned(self) -> int:
        """Channels of a head that rotary_pct turns. They turn in pairs, so an odd number is rounded down."""
        return int(self.hidden_size // self.num_heads * self.rotary_pct) // 2 * 2

    @property
    def has_gmlp(self) -> bool:
        """Whether some layers mix positions without attention."""
        return any(kind in ("gmlp", "amlp") for kind in self.layer_types)

    def layer_type(self, layer: int) -> LayerType:
        return self.layer_types[layer % len(self.layer_types)]

    def has_experts(self, layer: int) -> bool:
        is_gmlp = self.layer_type(layer) in ("gmlp", "amlp")
        return self.num_experts > 1 and layer % self.expert_interval == 0 and not is_gmlp

    @property
    def expert_ffn(self) -> int:
        return self.expert_intermediate_size or self.ffn


class Model(MixtureLM):
    def __init__(self, config: Config) -> None:
        super().__init__(
            config,
            (_layer(config, layer) for layer in range(config.num_layers)),
            _norm(config),
            learned_positions=config.position_embedding == "learned",
            dropout=config.hidden_dropout,
        )


def _layer(config: Config, layer: int) -> Layer:
    kind = config.layer_type(layer)
    if kind in ("gmlp", "amlp"):
        return _gmlp(config, layer, config.gmlp_attention_dim if kind == "amlp" else None)
    has_experts = config.has_experts(layer)
    return Block(
        _attention(config, layer),
        _experts(config) if has_experts else _mlp(config),
        _norm(config),
        None if config.shared_norm else _norm(config),
        parallel=config.parallel_residual,
        dropout=config.hidden_dropout,
        # GPT-NeoX drops out with the addition of the bias, which experts have not
        mlp_dropout=config.expert_bias or not has_experts,
    )


def _attention(config: Config, layer: int) -> SelfAttention:
    rotary = None
    if config.position_embedding == "rotary" and config.turned:
        rotary = Rotary(config.turned, config.max_position_embeddings, config.rope_theta)
    sparsity = config.sparsity if config.layer_type(layer) == "sparse" else None
    return SelfAttention(
        config.hidden_size,
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        rotary=rotary,
        # DeepSpeed's sparse attention has neither
        alibi=config.position_embedding == "alibi" and sparsity is None,
        sliding_window=config.sliding_window if sparsity is None else None,
        sparsity=sparsity,
        dropout=config.attention_dropout,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        layer=layer,
    )


def _mlp(config: Config) -> nn.Module:
    kind: Any = config.activation
    # the config names the activation, gated ones make another module
    mlp = GatedMLP if kind in get_args(Gated) else MLP
    return mlp(config.hidden_size, config.ffn, kind=kind, bias=config.mlp_bias)


def _experts(config: Config) -> MoE:
    router = TokenChoiceRouter(
        config.hidden_size, config.num_experts, config.experts_per_token, routing=config.router,
        jitter=config.router_jitter,
    )  # fmt: skip
    kind: Any = config.expert_activation or config.activation
    return MoE(router, config.hidden_size, config.expert_ffn, kind=kind, bias=config.expert_bias)


def _gmlp(config: Config, layer: int, attention_dim: int | None) -> GMLP:
    kind: Any = config.activation
    return GMLP(
        config.hidden_size,
        config.ffn,
        partial(_norm, config),
        max_length=config.max_position_embeddings,
        kind=kind,
        attention_dim=attention_dim,
        dropout=config.hidden_dropout,
        layer=layer,
    )


def _norm(config: Config, size: int | None = None) -> nn.Module:
    norm = LayerNorm if config.norm == "layer_norm" else RMSNorm
    return norm(size or config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)


# modules that tensor parallelism shards in a layer (parallelize.py)
TENSOR_PLAN = {
    "attention_norm": "replicated",
    "mlp_norm": "replicated",
    "attention.qkv": "columns",
    "attention.out": "rows",
    "mlp.gate": "columns",
    "mlp.up": "columns",
    "mlp.down": "rows",
    # experts are not sharded by tensor ranks: each rank computes the experts of its own tokens
    "mlp.router": "data",
    "mlp.experts": "data",
}


def divided_by_tensor(config: Config) -> dict[str, int]:
    """The sizes that the number of tensor-parallel ranks must divide, by key."""
    check_whole_sequences(config, "parallel.tensor")
    if config.expert_bias:
        # a parameter of the layer that no rank's share of tokens or columns owns
        raise ValueError("model.expert_bias must be false with parallel.tensor above 1, got true")
    return {"num_kv_heads": config.num_kv_heads or config.num_heads, "intermediate_size": config.ffn}


def check_whole_sequences(config: Config, key: str) -> None:
    """Raise ValueError if a layer must see all tokens of a micro batch, or of a sequence; `key` divides them."""
    for name, value, wanted in (("router", config.num_experts > 1 and config.router, "topk"),
                                ("balance_loss", config.balance_loss, 0)):  # fmt: skip
        if value and value != wanted:
            raise ValueError(f"model.{name} must be {wanted} with {key} above 1, whose ranks have some tokens each, "
                             f"got {value}")  # fmt: skip


def _gpt3(hidden_size: int, num_layers: int, num_heads: int) -> dict[str, Any]:
    return {"hidden_size": hidden_size, "num_layers": num_layers, "num_heads": num_heads, "vocab_size": 50304}


def _pythia(hidden_size: int, num_layers: int, num_heads: int) -> dict[str, Any]:
    sizes = _gpt3(hidden_size, num_layers, num_heads)
    # Pythia rotates a quarter of the channels and adds attention and MLP in parallel
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
    "pythia-6.9b": {**_pythia(4096, 32, 32), "vocab_size": 50432},
}


# hidden_act -> our activation
_HF_ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu", "silu": "silu", "swish": "silu", "relu": "relu", "relu2": "relu_squared",
}  # fmt: skip


def from_hf_config(values: Mapping[str, Any]) -> Config:
    """The config of a GPTNeoXForCausalLM's config.json; raises ValueError naming unsupported fields."""
    # GPTNeoXConfig's own default fraction is 0.25
    rope = from_hf_rope(values, fraction=0.25)
    if rope.scaling is not None:
        raise ValueError(f"config.json: rope_scaling must be null for gpt_neox, got {rope.scaling}")
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    vocab, hidden, ffn, layers, heads = required(values, *names)
    channels = int(hidden // heads * rope.fraction)
    if channels % 2:
        raise ValueError(
            f"config.json: rotary_pct must turn an even number of a head's {hidden // heads} channels, since they turn "
            f"in pairs, got {rope.fraction:g}, which is {channels}"
        )
    parallel, attention_bias = values.get("use_parallel_residual"), values.get("attention_bias")
    return Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=ffn, num_layers=layers, num_heads=heads,
        max_position_embeddings=required(values, "max_position_embeddings")[0],
        norm_eps=values.get("layer_norm_eps") or 1e-5, tie_embeddings=bool(values.get("tie_word_embeddings")),
        activation=chosen(values, "hidden_act", "gelu", _HF_ACTIVATIONS),
        rotary_pct=rope.fraction, rope_theta=rope.theta,
        # transformers' default is parallel, GPT-NeoX's is not
        parallel_residual=True if parallel is None else parallel,
        attention_bias=True if attention_bias is None else attention_bias,
        hidden_dropout=values.get("hidden_dropout") or 0.0, attention_dropout=values.get("attention_dropout") or 0.0,
        init_method="normal", output_init_method="normal", init_std=values.get("initializer_range") or 0.02,
    )  # fmt: skip


def to_hf_config(config: Config) -> dict[str, Any]:
    """config.json of a GPTNeoXForCausalLM, or of a Llama, Mistral or Qwen 2 if it is one of those.

    Raises ValueError naming the field that neither has.
    """
    equivalent = hf_equivalent(config)
    if isinstance(equivalent, llama.Config):
        return llama.to_hf_config(equivalent)
    fraction = _hf_fraction(config)
    # reversed: of several names of one activation the first is written
    acts = {ours: theirs for theirs, ours in reversed(_HF_ACTIVATIONS.items())}
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "layer_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": acts[config.activation],
        "use_parallel_residual": config.parallel_residual,
        "attention_bias": config.attention_bias,
        "hidden_dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
        "initializer_range": config.init_std,
        "rotary_pct": fraction,
        "rotary_emb_base": config.rope_theta,
        **to_hf_rope(config.rope_theta, None, fraction),
        # 1.0 must be said: a quarter is the default there
        "partial_rotary_factor": fraction,
    }


def _hf_fraction(config: Config) -> float:
    """rotary_pct; of one that gives an odd number of channels the share that turns, since transformers rounds to no
    pair."""
    head_dim = config.hidden_size // config.num_heads
    if int(head_dim * config.rotary_pct) == config.turned:
        return config.rotary_pct
    # half a channel more, so that no rounding gives one less
    return (config.turned + 0.5) / head_dim


def hf_equivalent(config: Config) -> Config | llama.Config:
    """The config itself if GPTNeoXForCausalLM computes it, or the same model as a Llama; ValueError if neither."""
    # the features that GPTNeoXForCausalLM has, as values that they must have
    neox = _lacks(config, {
        "norm": ("layer_norm",), "norm_bias": (True,), "activation": tuple(_HF_ACTIVATIONS.values()),
        "position_embedding": ("rotary",), "num_kv_heads": (None, config.num_heads), "mlp_bias": (True,),
        "sliding_window": (None,), "layer_types": (("attention",),), "num_experts": (1,),
    })  # fmt: skip
    if neox is None:
        return config
    as_llama = _lacks(config, {
        "norm": ("rms_norm",), "norm_bias": (False,), "activation": get_args(Gated), "position_embedding": ("rotary",),
        "rotary_pct": (1.0,), "parallel_residual": (False,), "hidden_dropout": (0.0,), "attention_dropout": (0.0,),
        "layer_types": (("attention",),), "num_experts": (1,),
    })  # fmt: skip
    if as_llama is not None:
        raise ValueError(
            f"model.{neox} for a GPTNeoXForCausalLM, or model.{as_llama} for a LlamaForCausalLM: "
            "transformers has no class for both"
        )
    head_dim = config.hidden_size // config.num_heads
    if config.turned != head_dim:
        raise ValueError(
            "model.hidden_size / num_heads must be even for a LlamaForCausalLM, which turns all channels of a head, "
            f"got {head_dim}"
        )
    return llama.Config(
        **{name: getattr(config, name) for name in config.__class__.model_fields.keys() & llama.Config.model_fields}
        | {"architecture": "llama", "intermediate_size": config.ffn},
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
    )


def _lacks(config: Config, needs: dict[str, tuple[Any, ...]]) -> str | None:
    """The first field whose value is not among those needed, as words for an error."""
    for name, values in needs.items():
        if getattr(config, name) not in values:
            wanted = " or ".join(map(as_yaml, dict.fromkeys(values)))
            return f"{name} must be {wanted}, got {as_yaml(getattr(config, name))}"
    return None


HF_LEFT_OUT = r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$"
_HF_OUTSIDE = {"embed": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "embed_out"}
_HF_MODULES = {
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "mlp.up": "mlp.dense_h_to_4h",
    "attention.qkv": "attention.query_key_value", "attention.out": "attention.dense", "mlp.down": "mlp.dense_4h_to_h",
}  # fmt: skip


def hf_parts(config: Config, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """One tensor of ours under the names of a GPTNeoXForCausalLM, which packs queries, keys and values as we do."""
    module, kind = name.rsplit(".", 1)
    if module in _HF_OUTSIDE:
        yield f"{_HF_OUTSIDE[module]}.{kind}", tensor
        return
    _, layer, inside = module.split(".", 2)
    prefix = f"gpt_neox.layers.{layer}."
    yield f"{prefix}{_HF_MODULES[inside]}.{kind}", tensor
    if inside == "attention_norm" and config.shared_norm:
        # both halves read this norm; there each has one
        # a copy: safetensors refuses two names for one memory
        yield f"{prefix}post_attention_layernorm.{kind}", tensor.clone()


def from_hf_parts(config: Config, name: str, parts: list[Tensor]) -> Tensor:
    """`hf_parts` backwards: one tensor of ours from theirs."""
    return parts[0]
