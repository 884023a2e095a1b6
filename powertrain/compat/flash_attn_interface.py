"""flash-attn 3's functions (the top-level module flash_attn_interface) on our attention.

Differs from flash-attn 2: no dropout, no ALiBi; attention_chunk, seqused_q and seqused_k; with return_attn_probs
(out, lse). num_splits, pack_gqa, sm_margin and scheduler_metadata are hints that change no result: num_splits is
honoured over a KV cache, the others are not needed.
"""

import torch
from torch import Tensor

from powertrain.compat.flash_attn import flash_attn_interface as flash2
from powertrain.compat.missing import unknown
from powertrain.ops.attention import attention, merge_attentions, varlen_attention
from powertrain.ops.conversion import known, unit_stride, unsupported
from powertrain.runtime import checks

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

Window = tuple[int, int]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """q [b, sq, h, d], k [b, sk, hk, d], v [b, sk, hk, dv]: out [b, sq, h, dv].

    With return_attn_probs (out, lse [b, h, sq]).
    """
    # FP8 attention and qv of MLA are inputs that no kernel of ours reads
    _refuse("flash_attn_func", qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    return attention(
        *unit_stride(q, k, v, "flash_attn_func"), scale=softmax_scale, is_causal=causal, window_size=window_size,
        # False means "not required" there, and None "as PyTorch's setting" here
        chunk_size=attention_chunk, softcap=softcap, deterministic=deterministic or None, return_lse=return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """qkv [b, s, 3, h, d], or with num_heads_q [b, s, num_heads_q + 2 * heads of k, d]."""
    op = "flash_attn_qkvpacked_func"
    checks.tensor(op, "qkv", qkv)
    if num_heads_q is None:
        checks.require(qkv.dim() == 5 and qkv.shape[2] == 3, op, "qkv", "be [b, s, 3, h, d]", list(qkv.shape))
        q, k, v = qkv.unbind(2)
    else:
        # key and value have equal head counts, so the rest is split in halves
        heads = (qkv.shape[-2] - num_heads_q) // 2
        fits = qkv.dim() == 4 and heads > 0 and num_heads_q + 2 * heads == qkv.shape[2]
        if not fits:
            checks.fail(op, "qkv", f"be [b, s, {num_heads_q} + 2 * heads of k, d]", list(qkv.shape))
        q, k, v = qkv.split((num_heads_q, heads, heads), 2)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        deterministic=deterministic, sm_margin=sm_margin, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Packed sequences: q [total_q, h, d], k and v [total_k, hk, d]; seqused_q and seqused_k [b] rows of each count."""
    # the positions of the arguments are those of flash-attn 3, which differ from 2
    _refuse("flash_attn_varlen_func", qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    return varlen_attention(
        # known(): lengths may come as tensors, and reading one would wait for the GPU
        *unit_stride(q, k, v, "flash_attn_varlen_func"), cu_seqlens_q, cu_seqlens_k,
        known(max_seqlen_q), known(max_seqlen_k),
        seqused_q=seqused_q, seqused_k=seqused_k, scale=softmax_scale, is_causal=causal, window_size=window_size,
        chunk_size=attention_chunk, softcap=softcap, deterministic=deterministic or None, return_lse=return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`powertrain.compat.flash_attn.flash_attn_with_kvcache`; its block_table is page_table here."""
    op = "flash_attn_with_kvcache"
    _refuse(
        op, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, cu_seqlens_k_new=cu_seqlens_k_new,
        rotary_seqlens=rotary_seqlens,
    )  # fmt: skip
    if attention_chunk:
        # decode_attention has no chunks
        unsupported(op, "attention_chunk", attention_chunk, "chunk_size of powertrain.attention")
    return flash2.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, page_table,
        softmax_scale, causal, window_size, softcap, rotary_interleaved, None, num_splits, return_softmax_lse,
        cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q if cu_seqlens_q is not None else None,
    )  # fmt: skip


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Partial results over disjoint keys into one: out_partial [splits, b, s, h, d], lse_partial [splits, b, s, h].

    Returns (out [b, s, h, d] in out_dtype, None: that of out_partial; lse [b, s, h] float32).
    """
    op = "flash_attn_combine"
    checks.tensor(op, "out_partial", out_partial)
    checks.tensor(op, "lse_partial", lse_partial)
    checks.require(out_partial.dim() == 5, op, "out_partial", "be [splits, b, s, h, d]", list(out_partial.shape))
    checks.shape(op, "lse_partial", lse_partial, out_partial.shape[:-1], "that of out_partial without d")
    checks.shape(op, "out", out, out_partial.shape[1:], "that of a part")
    # there LSE is [b, s, h], ours [b, h, s]
    lses = [lse.transpose(1, 2).contiguous() for lse in lse_partial]
    whole, lse = merge_attentions(list(out_partial), lses)
    whole = whole if out_dtype is None else whole.to(out_dtype)
    return (whole if out is None else out.copy_(whole)), lse.transpose(1, 2)


def get_scheduler_metadata(*args: object, **kwargs: object) -> None:
    """None: our kernels plan from shapes. flash_attn_with_kvcache takes it as scheduler_metadata."""


def _refuse(op: str, **given: Tensor | None) -> None:
    nearest = {
        "qv": "q and qv concatenated, as k and v are in the cache (head dims to 576, a value dim of its own)",
        "cu_seqlens_k_new": "new keys of one length",
        "rotary_seqlens": "powertrain.rope with offset= before the call",
    }
    for name, value in given.items():
        if value is not None:
            unsupported(op, name, list(value.shape), nearest.get(name, "keys and values in 16 bits"))


# a name that is missing says why, instead of a plain AttributeError
__getattr__ = unknown(__name__)
