"""Attention of Hugging Face models: an implementation beside "sdpa" and "flash_attention_2" in their registry.

Masks keep their short form where it says all: None (causal, a window or full, no padding), or the [B] lengths of
right-padded sequences. Others (left padding, packed positions, chunks, image blocks) are Hugging Face's dense ones.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.ops.attention import attention
from powertrain.testing import numerics

KIND = "attention"
NAME = "powertrain"
# what modules hand on to every implementation and what changes nothing in it
_IGNORED = {
    "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "return_dict",
    "num_items_in_batch", "position_embeddings", "deterministic", "layer_idx", "token_type_ids", "labels",
    "output_router_logits", "head_mask",
}  # fmt: skip


def register() -> None:
    """Make "powertrain" an attention implementation of the imported transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if NAME not in AttentionInterface.valid_keys(AttentionInterface()):
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, make_mask)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [B, H, Sq, D], key and value [B, K, Sk, D or E] -> [B, Sq, H, E]; as the registry's functions.

    attention_mask  what `make_mask` made, or the caller's own [B or 1, H or 1, Sq, Sk], bool or added
    """
    Sq, Sk = query.shape[2], key.shape[2]
    known = all(name in _IGNORED or value is None for name, value in others.items())
    if not known or (Sq == 1 and softcap is None and s_aux is None):
        # one query a sequence: PyTorch's own call takes less host time, which is all that counts there
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        sinks: dict[str, Any] = {"s_aux": s_aux} if s_aux is not None else {}
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal,
            softcap=softcap, sliding_window=sliding_window, **sinks, **others,
        )  # fmt: skip
    options: dict[str, Any] = {}
    if attention_mask is None or attention_mask.ndim == 1:
        causal = Sq > 1 and (is_causal if is_causal is not None else getattr(module, "is_causal", True))
        if causal and Sk > Sq:  # a static cache, filled up to Sq: the rest is not there yet
            key, value = key[:, :, :Sq], value[:, :, :Sq]
        options = {"is_causal": causal, "causal_align": "top_left", "key_lengths": attention_mask}
        if sliding_window is not None and causal:
            options["window_size"] = (sliding_window - 1, -1)
    else:
        options["attn_bias"] = attention_mask[..., :Sk]
    out = attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale=scaling, softcap=softcap or 0.0,
        sinks=s_aux, dropout_p=dropout, **options,
    )  # fmt: skip
    return out, None


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **others: Any,
) -> Tensor | None:
    """None, [B] lengths (int32), or Hugging Face's dense mask; the arguments are their `sdpa_mask`'s."""
    from transformers import masking_utils

    skip = allow_is_causal_skip or allow_is_bidirectional_skip
    whole = isinstance(q_offset, int) and q_offset == 0 and kv_offset == 0 and q_length == kv_length
    if skip and whole and _is_window(mask_function, local_size, kv_length):
        if attention_mask is None:
            return None
        if not torch.compiler.is_compiling() and attention_mask.shape[-1] == kv_length:
            lengths = attention_mask.sum(-1, dtype=torch.int32)
            # one read by the host for all layers: padding on the right leaves no step up
            padded, other = torch.stack([(lengths < kv_length).any(), attention_mask.diff(dim=-1).gt(0).any()]).tolist()
            if not padded:
                return None
            if not other:
                return lengths
    return masking_utils.sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function or masking_utils.causal_mask_function, attention_mask=attention_mask,
        local_size=local_size, allow_is_causal_skip=allow_is_causal_skip,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip, **others,
    )  # fmt: skip


def _is_window(mask_function: Any, local_size: int | None, kv_length: int) -> bool:
    """No local attention, or a causal sliding window of `local_size` keys, which modules name again in their call."""
    if local_size is None or kv_length <= local_size:
        return True
    index = torch.tensor
    try:  # a window moves on key by key, a chunk does not
        sees = [bool(mask_function(index(0), index(0), index(local_size), index(k))) for k in (0, 1, local_size + 1)]
    except Exception:  # it asks for more than indices
        return False
    return sees == [False, True, False]


def find(module: nn.Module, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> str | None:
    """Why `attend` cannot stand for this module's own attention, or None: both run on random q, k and v."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        return "its class has no eager_attention_forward to compare with"
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator(device).manual_seed(0)
    shapes = {"query": num_heads, "key": num_kv_heads, "value": num_kv_heads}
    tensors = {
        name: torch.randn((2, h, 9, head_dim), generator=generator, device=device).to(dtype).requires_grad_()
        for name, h in shapes.items()
    }
    scaling = getattr(module, "scaling", None) or head_dim**-0.5
    causal = bool(getattr(module, "is_causal", True))
    mask = torch.zeros(9, 9, device=device)
    if causal:
        mask = torch.full_like(mask, -1e30).triu(1)
    options = {"scaling": scaling, **_extras(module, device, dtype)}

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(module, query, key, value, None, is_causal=causal, **options)[0]

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return eager(module, query, key, value, mask.to(query.dtype).expand(2, 1, 9, 9), **options)[0]

    try:
        found = numerics.errors(ours, plain, plain, tensors)
    except Exception as error:  # theirs takes other arguments than the registry's functions
        return f"its eager attention takes other arguments: {str(error).splitlines()[0][:80]}"
    bad = [f"{e.name} by {e.ours:.2g}, allowed {e.allowed:.2g}" for e in found if not e.ok]
    return f"its attention computes another function: {'; '.join(bad[:2])}" if bad else None


def _extras(module: nn.Module, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Softcap and sinks as this module hands them on."""
    extras: dict[str, Any] = {}
    for name in ("attn_logit_softcapping", "logit_cap", "softcap"):
        if isinstance(getattr(module, name, None), float):
            extras["softcap"] = getattr(module, name)
    if isinstance(sinks := getattr(module, "sinks", None), Tensor) and sinks.ndim == 1 and not sinks.is_meta:
        extras["s_aux"] = sinks.detach().to(device)
    return extras
