"""A model's config as the keys of a GPT-NeoX YAML; facts as in neox.py."""

import math
from typing import Any, get_args

from powertrain.models import ModelConfig
from powertrain.models.config import as_yaml
from powertrain.models.gpt_neox import Config
from powertrain.ops.activations import Gated


def as_gpt_neox(config: ModelConfig) -> Config:
    """The same model as a gpt_neox config, tensors alike; raises ValueError naming features it lacks."""
    if isinstance(config, Config):
        return config
    values: dict[str, Any] = config.model_dump()
    if config.architecture != "llama":
        raise ValueError(f"model.architecture must be gpt_neox or llama for GPT-NeoX, got {config.architecture}")
    needs = {
        "rope_scaling": None, "qk_norm": False, "out_bias": values["qkv_bias"],
        "head_dim": values["head_dim"] and values["hidden_size"] // values["num_heads"],
    }  # fmt: skip
    for name, must in needs.items():
        if values[name] != must:
            raise ValueError(f"model.{name} must be {as_yaml(must)} for GPT-NeoX, got {as_yaml(values[name])}")
    kept = values.keys() & Config.model_fields.keys() - {"architecture"}
    return Config(
        **{name: values[name] for name in kept}, norm="rms_norm", norm_bias=False, attention_bias=values["qkv_bias"]
    )


def _attention_config(config: Config, sparse: str) -> list[Any]:
    """The kinds of layers. Raises ValueError for gMLP layers of another width than GPT-NeoX's."""
    if config.has_gmlp and config.ffn != 4 * config.hidden_size:
        wanted = 4 * config.hidden_size
        raise ValueError(f"model.intermediate_size must be {wanted} with gmlp layers for GPT-NeoX, got {config.ffn}")
    kinds = [{"attention": "flash", "sparse": sparse}.get(kind, kind) for kind in config.layer_types]
    return [[kinds, config.num_layers // len(kinds)]]


_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu", "relu": "relu", "silu": "silu", "swiglu": "swiglu",
                "geglu": "geglu", "reglu": "reglu"}  # fmt: skip


def to_neox_config(config: Config, pipe_parallel_size: int = 1, model_parallel_size: int = 1) -> dict[str, Any]:
    """The model's keys of a GPT-NeoX YAML. Raises ValueError naming features that GPT-NeoX lacks."""
    if config.activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ValueError(f"model.activation must be one of {known} for GPT-NeoX, got {config.activation}")
    if config.norm == "rms_norm" and config.norm_bias:
        raise ValueError("model.norm_bias must be false with rms_norm for GPT-NeoX, got true")
    if config.norm == "layer_norm" and not config.norm_bias:
        raise ValueError(
            "model.norm_bias must be true with layer_norm for GPT-NeoX, whose layer norms have one, got false"
        )
    gated = config.activation in get_args(Gated)
    sparse, inner = _sparsity(config)
    values = {
        "pipe_parallel_size": pipe_parallel_size,
        "model_parallel_size": model_parallel_size,
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "seq_length": config.max_position_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "padded_vocab_size": config.vocab_size,
        "make_vocab_size_divisible_by": math.gcd(config.vocab_size // model_parallel_size, 128),
        "norm": "layernorm" if config.norm == "layer_norm" else "rmsnorm",
        "layernorm_epsilon" if config.norm == "layer_norm" else "rms_norm_epsilon": config.norm_eps,
        "use_bias_in_norms": config.norm_bias,
        "use_bias_in_attn_linear": config.attention_bias,
        "use_bias_in_mlp": config.mlp_bias,
        "pos_emb": config.position_embedding,
        "rotary_pct": config.rotary_pct,
        # an integer, as its converter to Hugging Face wants it
        "rotary_emb_base": int(config.rope_theta) if config.rope_theta == int(config.rope_theta) else config.rope_theta,
        "no_weight_tying": not config.tie_embeddings,
        "gpt_j_residual": config.parallel_residual,
        "gpt_j_tied": config.shared_norm,
        "activation": _ACTIVATIONS[config.activation],
        "bias_gelu_fusion": config.activation == "gelu_tanh",
        "intermediate_size": config.ffn,
        "hidden_dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
        "init_method": config.init_method,
        "output_layer_init_method": config.output_init_method,
        "init_method_std": config.init_std,
        "attention_config": _attention_config(config, sparse),
        **inner,
        **_experts(config),
    }
    if gated and config.num_experts == 1:
        # both of its roundings then give ffn, which its converter to Hugging Face reads as the width
        values["mlp_multiple_of"] = config.ffn
    if config.has_gmlp:
        values["gmlp_attn_dim"] = config.gmlp_attention_dim
    if config.num_kv_heads is not None:
        values["num_kv_heads"] = config.num_kv_heads
    if config.sliding_window is not None:
        values["sliding_window_width"] = config.sliding_window - 1
    return values


def _experts(config: Config) -> dict[str, Any]:
    """Keys of layers with experts. Raises ValueError for those that GPT-NeoX at HEAD cannot compute."""
    if config.num_experts == 1:
        return {}
    activation = config.expert_activation or config.activation
    has_dense = config.expert_interval > 1 and config.num_layers > 1
    for name, value, wanted in (
        ("expert_bias", config.expert_bias, False),
        ("parallel_residual", config.parallel_residual, False),
        # no fused GELU: it wants a bias
        ("expert_activation", "gelu_tanh" if activation == "gelu_tanh" else "", ""),
        ("balance_loss", config.balance_loss, 0),
        ("expert_activation", activation if has_dense else config.activation, config.activation),
        ("expert_intermediate_size", config.expert_ffn if has_dense else config.ffn, config.ffn),
    ):
        if value != wanted:
            words = as_yaml(wanted) if wanted != "" else "another"
            raise ValueError(f"model.{name} must be {words} with experts for GPT-NeoX, got {as_yaml(value)}")
    keys: dict[str, Any] = {
        "moe_num_experts": config.num_experts, "moe_top_k": config.experts_per_token,
        "moe_router_type": config.router, "moe_expert_interval": config.expert_interval,
        "intermediate_size": config.expert_ffn, "activation": _ACTIVATIONS[activation], "bias_gelu_fusion": False,
    }  # fmt: skip
    return keys | ({"moe_jitter_eps": config.router_jitter} if config.router_jitter else {})


def _sparsity(config: Config) -> tuple[str, dict[str, Any]]:
    """The kind of sparse layers in GPT-NeoX, and the key sparsity_config; ValueError if it has none like them."""
    rules = config.sparsity
    if rules is None:
        return "local", {}
    section: dict[str, Any] = {"block": rules.block}
    ranges: dict[str, Any] = {}
    more: dict[str, Any]
    if rules.global_blocks:
        firsts, ends = zip(*rules.global_blocks, strict=True)
        ranges = {"global_block_indices": list(firsts), "global_block_end_indices": list(ends)}
    if rules.windows and rules.last_of_window and not rules.global_blocks:
        kind, more = "sparse_fixed", {"num_local_blocks": rules.windows[0], "num_global_blocks": rules.last_of_window}
    elif rules.windows and rules.global_blocks and not (rules.last_of_window or rules.global_rows):
        kind, more = "sparse_variable", {"local_window_blocks": list(rules.windows), **ranges}
    elif rules.before is not None and rules.global_blocks and rules.global_rows:
        kind, more = "bslongformer", {"num_sliding_window_blocks": 2 * rules.before + 1, **ranges}
    elif rules.before is not None and len(rules.global_blocks) == 1 and rules.global_blocks[0][0] == 0:
        kind = "bigbird"
        more = {"num_sliding_window_blocks": 2 * rules.before + 1, "num_global_blocks": rules.global_blocks[0][1]}
        more["num_random_blocks"] = 0
    elif rules.before is not None and not rules.global_blocks:
        # 0 blocks would be the default there; 1 has no block before its own either
        kind, more = "local", {"num_local_blocks": max(2 * rules.before, 1)}
    else:
        raise ValueError(f"model.sparsity must be one of GPT-NeoX's layouts, got {rules}")
    return kind, {"sparsity_config": section | more}
