"""Experts of a GPT-NeoX config, translated to ours.

Facts from GPT-NeoX (Apache-2.0; no code): megatron/model/moe.py, moe_mlp.py and router.py at ea7aefd8; for the keys of
2024-03 to 2025-05 megatron/model/transformer.py and training.py at 4c9f1081, and MegaBlocks 0.5.1 (Apache-2.0), whose
layers it called then.
"""

import math
from typing import Any

from powertrain.train.config.neox_source import NeoXKeys, given

# keys of the releases that called MegaBlocks' and DeepSpeed's own layers; HEAD knows none of them
_OLD_KEYS = (
    "moe_type", "moe_token_dropping", "expert_interval", "moe_loss_coeff", "moe_aux_loss_coeff", "moe_z_loss_coeff",
    "moe_train_capacity_factor", "moe_eval_capacity_factor", "moe_min_capacity", "moe_use_residual",
    "moe_expert_parallel_size", "moe_glu", "create_moe_param_group", "enable_expert_tensor_parallelism", "use_tutel",
)  # fmt: skip
_NEW_KEYS = ("moe_router_type", "moe_expert_interval")
# of a gated activation the experts compute the function, without a gate
_PLAIN = {"geglu": "gelu", "reglu": "relu", "swiglu": "silu"}
_MULTIPLE = 256
# MegaBlocks' default, for GPT-NeoX has no key of its name
_MEGABLOCKS_WIDTH = 4096


def experts(keys: NeoXKeys, activation: str) -> dict[str, Any]:
    """Fields of layers with experts; `activation` is the model's."""
    count = keys.number("moe_num_experts", 1, least=1)
    if count <= 1:
        return {}
    old = [key for key in _OLD_KEYS if key in keys.values]
    new = [key for key in _NEW_KEYS if key in keys.values]
    if old and new:
        keys.wrong((old[0],), f"must not stand beside {new[0]}: no release of GPT-NeoX knows both")
    _refuse(keys)
    top_k = keys.number("moe_top_k", 1, least=1)
    if top_k > count:
        keys.wrong(("moe_top_k",), f"must be at most moe_num_experts ({count}), got {top_k}")
        top_k = 1
    jitter = keys.number("moe_jitter_eps", 0.0, least=0)
    if jitter >= 1:
        keys.wrong(("moe_jitter_eps",), f"must be below 1, got {given(jitter)}")
        jitter = 0.0
    fields = _of_megablocks(keys, jitter) if old else _of_head(keys, activation, jitter)
    words = f"model.num_experts, dropless, in layers 0, {fields['expert_interval']} ...; router scores in fp32"
    keys.add_row("moe_num_experts", "changes numerics", words)
    keys.add_row("moe_top_k", "honoured", "model.experts_per_token")
    keys.add_row("moe_lbl_in_fp32", "ignored", "no balancing loss reaches the gradients in GPT-NeoX")
    return {"num_experts": count, "experts_per_token": top_k, **fields}


def _refuse(keys: NeoXKeys) -> None:
    if keys.get("mlp_type", "regular") == "llama":
        keys.unsupported("mlp_type", "llama", "leave it out with experts, which have two matrices in GPT-NeoX")
    if keys.get("te_layernorm_mlp"):
        keys.unsupported("te_layernorm_mlp", True, "set it to false: GPT-NeoX leaves out the norm before the experts")


def _of_head(keys: NeoXKeys, activation: str, jitter: float) -> dict[str, Any]:
    """Releases since 2025-05: two products without biases, sinkhorn by default."""
    if keys.get("gpt_j_residual"):
        todo = "set it to false: GPT-NeoX at HEAD leaves attention's result out of layers with experts"
        keys.unsupported("gpt_j_residual", True, todo)
    if activation == "gelu_tanh" and keys.get("bias_gelu_fusion"):
        keys.unsupported(
            "bias_gelu_fusion", True, "set it to false: it fails in GPT-NeoX's experts, which have no bias"
        )
    kind = keys.choice("moe_router_type", "sinkhorn", {"sinkhorn": "sinkhorn", "topk": "topk"})
    how = {"sinkhorn": "over the micro batch while training, top-k otherwise", "topk": "softmax, then top-k"}
    keys.add_row("moe_router_type", "honoured", f"model.router: {how[kind]}", "sinkhorn")
    if kind == "sinkhorn":
        keys.add_row("moe_jitter_eps", "ignored", "the sinkhorn router has no jitter in GPT-NeoX")
    else:
        keys.add_row("moe_jitter_eps", "honoured", "model.router_jitter")
    keys.add_row("moe_expert_interval", "honoured", "model.expert_interval")
    hidden = keys.get("hidden_size") or 1
    width = keys.number("intermediate_size", math.ceil(4 * hidden / _MULTIPLE) * _MULTIPLE, above=0)
    plain = _PLAIN.get(activation, activation)
    if plain != activation:
        words = f"model.expert_activation {plain}: GPT-NeoX's experts have no gate; MLPs of other layers do"
        keys.add_row("activation", "mapped", words)
    return {
        "expert_interval": keys.number("moe_expert_interval", 1, least=1), "router": kind,
        "router_jitter": jitter if kind == "topk" else 0.0, "expert_activation": plain,
        "expert_intermediate_size": int(width),
    }  # fmt: skip


def _of_megablocks(keys: NeoXKeys, jitter: float) -> dict[str, Any]:
    """Releases from 2024-05 to 2025-05: MegaBlocks' dMoE, of which GPT-NeoX set few options."""
    keys.choice("moe_type", "megablocks", {"megablocks": None}, {
        "deepspeed": "use megablocks: DeepSpeed's layers drop tokens, and scale by what is left",
    })  # fmt: skip
    if keys.get("moe_token_dropping"):
        keys.unsupported("moe_token_dropping", True, "set it to false: no token is dropped here")
    keys.add_row("moe_token_dropping", "honoured", "false: no token is dropped")
    words = f"model.expert_intermediate_size {_MEGABLOCKS_WIDTH}, expert_activation gelu_tanh, expert_bias true"
    keys.add_row("moe_type", "mapped", f"{words}: MegaBlocks' defaults, whatever hidden_size and activation are")
    keys.add_row("expert_interval", "honoured", "model.expert_interval", 2)
    keys.add_row("moe_jitter_eps", "honoured", "model.router_jitter")
    keys.add_row("moe_loss_coeff", "ignored", "GPT-NeoX cut its loss off the graph: it has no gradient there either")
    for key in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        keys.add_row(key, "ignored", "not a key of any release of GPT-NeoX")
    for key in ("moe_train_capacity_factor", "moe_eval_capacity_factor", "moe_min_capacity"):
        keys.add_row(key, "ignored", "dropless: experts have no capacity")
    for key in ("moe_use_residual", "moe_glu", "use_tutel"):
        keys.add_row(key, "ignored", "GPT-NeoX did not hand it on to MegaBlocks")
    for key in ("moe_expert_parallel_size", "create_moe_param_group", "enable_expert_tensor_parallelism"):
        keys.add_row(key, "ignored", "FSDP shards the experts' weights; the result is the same")
    return {
        "expert_interval": keys.number("expert_interval", 2, least=1), "router": "topk", "router_jitter": jitter,
        "expert_activation": "gelu_tanh", "expert_bias": True, "expert_intermediate_size": _MEGABLOCKS_WIDTH,
    }  # fmt: skip
