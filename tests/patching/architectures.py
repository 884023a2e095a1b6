"""Tiny models of transformers' architectures, random but for their shapes."""

from typing import Any

import torch
import transformers
from torch import nn

_BASE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 131, "max_position_embeddings": 128, "head_dim": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MOE = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "experts_implementation": "eager",
}  # fmt: skip
_WINDOWS = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
_DEEPSEEK = {
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "head_dim": 8,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1,
    "num_key_value_heads": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "experts_implementation": "eager",
}  # fmt: skip
_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "dropout": 0.0, "attention_dropout": 0.0}

# config class without "Config" -> what differs from _BASE
CAUSAL: dict[str, dict[str, Any]] = {
    "Llama": {}, "Mistral": {"sliding_window": 7}, "Mixtral": _MOE, "Qwen2": {}, "Qwen3": {}, "Qwen2Moe": _MOE,
    "Qwen3Moe": _MOE, "Gemma": {}, "Gemma2": _WINDOWS, "Gemma3Text": _WINDOWS, "Phi": {}, "Phi3": {}, "GPTNeoX": {},
    "GptOss": {**_MOE, **_WINDOWS}, "Olmo": {}, "Olmo2": {}, "Olmo3": _WINDOWS, "Olmoe": _MOE,
    "Granite": {"logits_scaling": 8.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
    "GraniteMoe": {**_MOE, "logits_scaling": 8.0}, "Glm": {}, "Glm4": {}, "DeepseekV3": _DEEPSEEK,
    "Cohere": {"logit_scale": 0.25}, "Cohere2": {**_WINDOWS, "logit_scale": 0.25}, "StableLm": {}, "SmolLM3": {},
    "Llama4Text": {**_MOE, "attention_chunk_size": 8, "intermediate_size_mlp": 96}, "Starcoder2": {},
    "Exaone4": _WINDOWS, "Ernie4_5": {}, "HunYuanDenseV1": {}, "Apertus": {}, "Nemotron": {}, "Persimmon": {},
    "Arcee": {}, "Helium": {}, "Bloom": {"hidden_dropout": 0.0},
    "GPTJ": {"rotary_dim": 8, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, **_NO_DROPOUT},
    "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, **_NO_DROPOUT},
    "OPT": {"ffn_dim": 96, "word_embed_proj_dim": 64, **_NO_DROPOUT},
    "Falcon": {"head_dim": None, "new_decoder_architecture": True, "num_kv_heads": 2},
}  # fmt: skip

# config class -> what differs from _BASE, of models that are no parameter of every test
OTHERS: dict[str, dict[str, Any]] = {
    "BigBirdPegasus": {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "d_model": 64,
                       **_NO_DROPOUT},
    "Gemma4UnifiedText": {**_WINDOWS, "global_head_dim": 32, "pad_token_id": 0},
}  # fmt: skip


def causal(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """A causal language model in training mode; its weights differ from their first values, which are often 1 or 0."""
    options = {k: v for k, v in {**_BASE, **(CAUSAL | OTHERS)[name], **changes}.items() if v is not None}
    config = getattr(transformers, f"{name}Config")(**options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    return shaken(model).to(dtype).train()


def shaken(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model
