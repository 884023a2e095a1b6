"""DeepSeek-V3 and its like: latent attention, first layers dense, then mixtures of experts with shared ones.

The multi-token prediction layer of the published checkpoints is left out, as transformers leaves it out.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from powertrain.models.config import ModelConfig, Positive
from powertrain.models.hf_config import only, required
from powertrain.models.mixture import MixtureLM
from powertrain.models.rope_scaling import from_hf_rope, scheme, to_hf_rope
from powertrain.nn.attention import Rotary
from powertrain.nn.block import Block
from powertrain.nn.mla import LatentAttention
from powertrain.nn.mlp import GatedMLP
from powertrain.nn.moe import MoE, Router
from powertrain.nn.norm import RMSNorm

Count = Annotated[int, Field(ge=0)]


class Config(ModelConfig):
    """intermediate_size       of the first_dense_layers; moe_intermediate_size: of one expert
    q_lora_rank                None: queries straight from the hidden states
    score, normalize_weights, routed_scaling_factor, num_groups, top_groups   see `moe_route`
    balance_loss               weight of the load balancing loss, per sequence; 0: none
    bias_update_rate           of the correction bias, after every step (`Model.balance`); 0: it stays
    """

    hf_architectures: ClassVar[tuple[str, ...]] = ("DeepseekV3ForCausalLM",)

    architecture: Literal["deepseek"] = "deepseek"
    intermediate_size: Positive
    moe_intermediate_size: Positive
    num_experts: Positive
    experts_per_token: Positive
    num_shared_experts: Count = 1
    first_dense_layers: Count = 1
    score: Literal["sigmoid", "softmax"] = "sigmoid"
    normalize_weights: bool = True
    routed_scaling_factor: Annotated[float, Field(gt=0)] = 1.0
    num_groups: Positive = 1
    top_groups: Positive = 1
    balance_loss: Annotated[float, Field(ge=0)] = 0.0
    bias_update_rate: Annotated[float, Field(ge=0)] = 1e-3
    q_lora_rank: Positive | None = None
    kv_lora_rank: Positive = 512
    qk_nope_head_dim: Positive = 128
    qk_rope_head_dim: Positive = 64
    v_head_dim: Positive = 128
    attention_bias: bool = False
    norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_interleaved: bool = True

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        # an unknown scheme fails here, at the config, and not at the first forward
        scheme(self.rope_scaling, self.rope_theta)
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"model.qk_rope_head_dim must be even, got {self.qk_rope_head_dim}")
        # a group's score is the sum of its two best experts, so it needs two
        if self.num_experts % self.num_groups or (self.num_groups > 1 and self.num_experts // self.num_groups < 2):
            raise ValueError(
                f"model.num_groups must divide num_experts ({self.num_experts}) into groups of two or more, "
                f"got {self.num_groups}"
            )
        if self.top_groups > self.num_groups:
            raise ValueError(f"model.top_groups must be at most num_groups ({self.num_groups}), got {self.top_groups}")
        most = self.num_experts // self.num_groups * self.top_groups
        if self.experts_per_token > most:
            raise ValueError(
                f"model.experts_per_token must be at most {most}, the experts of {self.top_groups} groups, "
                f"got {self.experts_per_token}"
            )
        return self

    @property
    def softmax_scale(self) -> float:
        """YaRN's temperature, where a checkpoint puts it on the scores instead of cos and sin (mscale_all_dim)."""
        scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        scaling = self.rope_scaling or {}
        factor, all_dim = scaling.get("factor", 1.0), scaling.get("mscale_all_dim")
        if not all_dim or factor <= 1:
            return scale
        # squared, since cos and sin would carry it on queries and on keys
        return float(scale * (0.1 * all_dim * math.log(factor) + 1.0) ** 2)


class Model(MixtureLM):
    def __init__(self, config: Config) -> None:
        layers = (_block(config, layer) for layer in range(config.num_layers))
        super().__init__(config, layers, RMSNorm(config.hidden_size, eps=config.norm_eps))

    def init_weights(self, seed: int) -> None:
        super().init_weights(seed)
        for moe in self.moe_layers:
            # a buffer, as `load`
            moe.router.correction_bias.zero_()

    def balance(self, group: Any = None) -> None:
        """After every optimizer step: move the routers' correction biases; `group` as in `MoE.balance`."""
        rate: float = self.config.bias_update_rate  # type: ignore[attr-defined]
        for moe in self.moe_layers if rate else ():
            moe.balance(rate, group)


def _block(config: Config, layer: int) -> Block:
    hidden_size, eps = config.hidden_size, config.norm_eps
    attention = LatentAttention(
        hidden_size,
        config.num_heads,
        kv_lora_rank=config.kv_lora_rank,
        # DeepSeek rotates a part of each head by itself; the other channels carry no position
        q_lora_rank=config.q_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        rotary=Rotary(
            config.qk_rope_head_dim, config.max_position_embeddings, config.rope_theta, scheme(config.rope_scaling)
        ),
        rotary_interleaved=config.rope_interleaved,
        scale=config.softmax_scale,
        bias=config.attention_bias,
        layer=layer,
    )
    mlp = GatedMLP(hidden_size, config.intermediate_size) if layer < config.first_dense_layers else _moe(config)
    return Block(attention, mlp, RMSNorm(hidden_size, eps=eps), RMSNorm(hidden_size, eps=eps))


def _moe(config: Config) -> MoE:
    router = Router(
        config.hidden_size,
        config.num_experts,
        config.experts_per_token,
        score=config.score,
        normalize=config.normalize_weights,
        scaling_factor=config.routed_scaling_factor,
        num_groups=config.num_groups,
        top_groups=config.top_groups,
    )
    shared_size = config.num_shared_experts * config.moe_intermediate_size
    return MoE(router, config.hidden_size, config.moe_intermediate_size, shared_size=shared_size)


# modules that tensor parallelism shards in a layer (parallelize.py); experts run on their token's rank
TENSOR_PLAN = {
    "attention_norm": "replicated",
    "mlp_norm": "replicated",
    "attention.q": "columns",
    "attention.q_down": "replicated",
    # the latents are whole on every rank: only the products out of them have heads to share
    "attention.q_norm": "replicated",
    "attention.q_up": "columns",
    "attention.kv_down": "replicated",
    "attention.kv_norm": "replicated",
    "attention.kv_up": "columns",
    "attention.out": "rows",
    "mlp.gate": "columns",
    "mlp.up": "columns",
    "mlp.down": "rows",
    "mlp.shared.gate": "columns",
    "mlp.shared.up": "columns",
    "mlp.shared.down": "rows",
    # experts are not sharded by tensor ranks: each rank computes the experts of its own tokens
    "mlp.router": "data",
    "mlp.experts": "data",
}


def divided_by_tensor(config: Config) -> dict[str, int]:
    """The sizes that the number of tensor-parallel ranks must divide, by key."""
    if config.balance_loss:
        # the balance loss is per sequence, and a tensor rank has parts of sequences
        raise ValueError(
            "model.balance_loss must be 0 with parallel.tensor above 1, whose ranks see parts of sequences, "
            f"got {config.balance_loss}"
        )
    sizes = {"num_heads": config.num_heads, "moe_intermediate_size": config.moe_intermediate_size}
    return sizes | ({"intermediate_size": config.intermediate_size} if config.first_dense_layers else {})


# sizes as their publishers' config files state them; deepseek-1b is ours, a small one of the same kind
PRESETS: dict[str, dict[str, Any]] = {
    "deepseek-1b": {
        "vocab_size": 102400, "hidden_size": 1024, "num_layers": 12, "num_heads": 8, "intermediate_size": 4096,
        "moe_intermediate_size": 512, "num_experts": 64, "experts_per_token": 6, "num_shared_experts": 2,
        "routed_scaling_factor": 2.5, "max_position_embeddings": 4096,
    },
    "deepseek-v2-lite": {
        "vocab_size": 102400, "hidden_size": 2048, "num_layers": 27, "num_heads": 16, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "num_experts": 64, "experts_per_token": 6, "num_shared_experts": 2,
        "score": "softmax", "normalize_weights": False, "max_position_embeddings": 4096,
    },
    "deepseek-v3": {
        "vocab_size": 129280, "hidden_size": 7168, "num_layers": 61, "num_heads": 128, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_experts": 256, "experts_per_token": 8, "first_dense_layers": 3,
        "routed_scaling_factor": 2.5, "num_groups": 8, "top_groups": 4, "q_lora_rank": 1536,
        "max_position_embeddings": 163840,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    },
}  # fmt: skip

# our field -> that of transformers' DeepseekV3Config
_HF_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
    "intermediate_size": "intermediate_size",
    "moe_intermediate_size": "moe_intermediate_size",
    "num_experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "first_dense_layers": "first_k_dense_replace",
    "normalize_weights": "norm_topk_prob",
    "routed_scaling_factor": "routed_scaling_factor",
    "num_groups": "n_group",
    "top_groups": "topk_group",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "attention_bias": "attention_bias",
    "norm_eps": "rms_norm_eps",
    "rope_interleaved": "rope_interleave",
}


def from_hf_config(values: Mapping[str, Any]) -> Config:
    """The config of a DeepseekV3ForCausalLM's config.json; raises ValueError naming unsupported fields."""
    if values.get("model_type") != "deepseek_v3":
        raise ValueError(f"config.json: model_type must be 'deepseek_v3', got {values.get('model_type')!r}")
    # values that this model has no code for are refused by name
    only(values, hidden_act="silu", attention_dropout=0.0, scoring_func="sigmoid", topk_method="noaux_tc")
    only(values, moe_layer_freq=1, num_key_value_heads=values.get("num_attention_heads"))
    optional = ("tie_word_embeddings", "initializer_range", "q_lora_rank", "attention_bias", "rope_interleave")
    required(values, *(name for name in _HF_FIELDS.values() if name not in optional))
    if "q_lora_rank" not in values:
        # an absent key means the default of transformers, 1536, which a small model does not have
        raise ValueError("config.json: q_lora_rank must be given, or null for queries without a latent, got none")
    fields = {ours: values[theirs] for ours, theirs in _HF_FIELDS.items() if values.get(theirs) is not None}
    rope = from_hf_rope(values)
    return Config(**fields, rope_theta=rope.theta, rope_scaling=rope.scaling)


def to_hf_config(config: Config) -> dict[str, Any]:
    """config.json of a DeepseekV3ForCausalLM; raises ValueError for features that it cannot express."""
    if config.score != "sigmoid" or not config.num_shared_experts:
        raise ValueError(
            "DeepseekV3ForCausalLM must have model.score sigmoid and model.num_shared_experts 1 or more, "
            f"got {config.score} and {config.num_shared_experts}"
        )
    fields = {theirs: getattr(config, ours) for ours, theirs in _HF_FIELDS.items()}
    rope = to_hf_rope(config.rope_theta, config.rope_scaling)
    known = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_act": "silu"}
    # multi-token prediction is left out, so none is announced
    return {**known, **fields, "num_key_value_heads": config.num_heads, **rope, "num_nextn_predict_layers": 0}


# our module -> theirs, within a layer
_HF_ATTENTION = {
    "q": "q_proj", "q_down": "q_a_proj", "q_norm": "q_a_layernorm", "q_up": "q_b_proj", "kv_down": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm", "kv_up": "kv_b_proj", "out": "o_proj",
}  # fmt: skip
_HF_OUTSIDE = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
_HF_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.correction_bias": "mlp.gate.e_score_correction_bias",
    **{f"mlp.{name}.weight": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    **{f"mlp.shared.{name}.weight": f"mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")},
    **{f"attention.{a}.{w}": f"self_attn.{b}.{w}" for a, b in _HF_ATTENTION.items() for w in ("weight", "bias")},
}


# multi-token prediction, a layer more
# {num_layers} is filled in: the layer behind the last one is the prediction layer
HF_LEFT_OUT = r"^model\.layers\.{num_layers}\.|rotary_emb\.inv_freq$"


def hf_parts(config: Config, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """One tensor of ours under the names, and in the layout, of a published DeepseekV3ForCausalLM."""
    if name in _HF_OUTSIDE or name == "head.weight":
        yield _HF_OUTSIDE.get(name, "lm_head.weight"), tensor
        return
    _, layer, inside = name.split(".", 2)
    prefix = f"model.layers.{layer}."
    if inside == "mlp.experts.gate_up":
        for e, expert in enumerate(tensor):
            # one file tensor per expert there, a stack of all here
            for half, part in zip(("gate", "up"), expert.chunk(2), strict=True):
                yield f"{prefix}mlp.experts.{e}.{half}_proj.weight", part
    elif inside == "mlp.experts.down":
        for e, expert in enumerate(tensor):
            yield f"{prefix}mlp.experts.{e}.down_proj.weight", expert
    else:
        # queries have their rotary channels last in published checkpoints, first here
        rotary_last = inside in _QUERIES
        yield prefix + _HF_LAYER[inside], _rolled(tensor, config, -1) if rotary_last else tensor


_QUERIES = ("attention.q.weight", "attention.q_up.weight")


def _rolled(weight: Tensor, config: Config, direction: int) -> Tensor:
    """A query projection with each head's rotary rows moved from the end to the front (1) or in reverse (-1)."""
    heads = weight.unflatten(0, (config.num_heads, -1))
    # roll and not permute: the two parts only change places
    return heads.roll(direction * config.qk_rope_head_dim, 1).flatten(0, 1)


def from_hf_parts(config: Config, name: str, parts: list[Tensor]) -> Tensor:
    """`hf_parts` backwards: one tensor of ours from theirs, in that order."""
    if name.endswith("mlp.experts.gate_up"):
        return torch.stack([torch.cat(pair) for pair in zip(parts[::2], parts[1::2], strict=True)])
    if name.endswith("mlp.experts.down"):
        return torch.stack(parts)
    return _rolled(parts[0], config, 1) if name.endswith(_QUERIES) else parts[0]
