"""Hugging Face transformers on our attention.

    from powertrain.compat import huggingface
    huggingface.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="powertrain")

Grouped heads, softcap (Gemma 2), sinks (gpt-oss), sliding windows, position biases, packed batches and caches; values
may have a head dim of their own. transformers builds a mask per forward, bool [b, 1, queries, keys], from which our
attention could only read element by element; so a mask that is causal or a sliding window, padded or
not, is marked with the arguments that say the same, and with these whole blocks of keys are skipped. A mask that lost
its mark (sliced, copied) or never had one is taken as it is.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.compat.layout import known, unit_stride, unsupported
from powertrain.ops.attention import attention, varlen_attention
from powertrain.runtime import checks

_OP = "attention"
_MARK = "_powertrain_mask"


def register(name: str = "powertrain") -> None:
    """Make `attn_implementation=name` a choice of transformers (5; tested with 5.23)."""
    from transformers import AttentionInterface, AttentionMaskInterface, __version__, masking_utils

    if "q_length" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise ImportError(f"transformers {__version__} is too old for {name!r}: pip install 'transformers>=5.23'")
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


def attention_forward(
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
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    output_attentions: bool = False,
    cache: Any = None,
    head_mask: Tensor | None = None,
    **model_arguments: Any,
) -> tuple[Tensor, None]:
    """Called by transformers in each layer: (out [b, queries, h, dv], None).

    Shapes: query [b, h, queries, d], key [b, kv heads, keys, d], value [b, kv heads, keys, dv]; attention_mask [b|1,
    h|1, queries, keys], bool (True sees) or added; position_bias the same, added, with its gradient; s_aux [h].
    Without a mask, is_causal (else the module's) counts from the top left, and sliding_window holds; one query sees
    every key within it. cu_seq_lens_q, [n + 1], are sequences packed in a batch of 1, which see themselves only.
    A model's other keyword arguments pass through here, as transformers has it, and say nothing about attention.
    """
    _refuse(output_attentions, cache, head_mask)
    queries = query.shape[2]
    marked = getattr(attention_mask, _MARK, None)
    options: dict[str, Any] = {"scale": scaling, "dropout_p": dropout, "softcap": softcap or 0.0, "sinks": s_aux}
    if marked is not None:
        options |= marked
        attention_mask = None
    elif attention_mask is None:
        causal = queries > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
        options |= _window(sliding_window, causal, queries)
    bias = _combined(attention_mask, position_bias)
    query, key, value = unit_stride(query, key, value)
    if cu_seq_lens_q is not None and bias is None and marked is None:
        lengths = (cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k)
        return _packed(query, key, value, lengths, known(max_length_q), known(max_length_k), options), None
    if cu_seq_lens_q is not None:
        sizes = ((cu_seq_lens_q, queries), (cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k, key.shape[2]))
        options["document_ids"] = tuple(_documents(ends, size) for ends, size in sizes)
    out = attention(query, key, value, attn_bias=bias, layout="bhsd", **options)
    return out.transpose(1, 2).contiguous(), None


def _refuse(output_attentions: bool, cache: Any, head_mask: Tensor | None) -> None:
    if output_attentions:
        unsupported(_OP, "output_attentions", True, 'attn_implementation="eager"')
    if cache is not None:
        unsupported(_OP, "cache", type(cache).__name__, 'generate() without continuous batching, or "sdpa" with it')
    if head_mask is not None:
        unsupported(_OP, "head_mask", list(head_mask.shape), "scaling the heads' outputs, which is the same")


def _window(sliding_window: int | None, causal: bool, queries: int) -> dict[str, Any]:
    """Meaning of a missing mask: as many keys as queries, or a single query."""
    left = -1 if sliding_window is None else sliding_window - 1
    right = 0 if causal or (queries == 1 and sliding_window is not None) else left
    return {"window_size": (left, right), "causal_align": "bottom_right" if queries == 1 else "top_left"}


def _combined(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    if bias is None or mask is None:
        return mask if bias is None else bias
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else bias + mask


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: tuple[Tensor, Tensor],
    max_queries: int | None,
    max_keys: int | None,
    options: dict[str, Any],
) -> Tensor:
    """A batch of 1 as the sequences in it."""
    checks.require(query.shape[0] == 1, _OP, "query", "have a batch of 1 with cu_seq_lens_q", query.shape[0])
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out: Tensor = varlen_attention(q, k, v, *lengths, max_queries, max_keys, **options)
    return out[None]


def _documents(ends: Tensor, size: int) -> Tensor:
    """[1, size]: which of the sequences each row is in."""
    rows = torch.arange(size, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends, rows, right=True)[None]


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **options: Any,
) -> Tensor | None:
    """Called by transformers for each kind of layer: its mask for sdpa, marked where arguments say the same.

    attention_mask [b, keys so far] is True for tokens; mask_function(batch, head, query, key) is True for visible keys.
    """
    from transformers import masking_utils

    mask_function = masking_utils.causal_mask_function if mask_function is None else mask_function
    mask: Tensor | None = masking_utils.sdpa_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, local_size,
        allow_is_causal_skip=allow_is_causal_skip, use_vmap=use_vmap, **options,
    )  # fmt: skip
    # a function of the caller's, or one about packed sequences, comes with one of these two
    own = use_vmap or not allow_is_causal_skip
    if mask is None or own or isinstance(q_offset, Tensor) or torch.compiler.is_compiling():
        return mask
    if not (q_offset + q_length == kv_offset + kv_length or q_offset == kv_offset == 0):
        return mask
    window = _known(mask_function, local_size, masking_utils.causal_mask_function)
    if window is None:
        return mask
    marks: dict[str, Any] = {"window_size": window}
    marks["causal_align"] = "bottom_right" if q_offset + q_length == kv_offset + kv_length else "top_left"
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        keys = padding[:, kv_offset : kv_offset + kv_length].to(torch.int32) - 1  # 0 for a token, -1 for none
        marks["document_ids"] = (keys.new_zeros(batch_size, q_length), keys.expand(batch_size, -1))
    setattr(mask, _MARK, marks)
    return mask


def _known(function: Any, local_size: int | None, causal: Any) -> tuple[int, int] | None:
    """(left, right) of a mask that is causal, or causal within a window; None for any other."""
    if function is causal:
        return (-1, 0)
    if local_size is None or local_size < 2:
        return None
    # key by key at the window's edges: chunks of that size differ from a window in the second
    w, zero = local_size, torch.tensor(0)
    seen = [bool(function(zero, zero, zero + q, zero + k)) for q, k in ((w, 0), (w, 1), (w, w), (w, w + 1))]
    return (w - 1, 0) if seen == [False, True, True, False] else None
