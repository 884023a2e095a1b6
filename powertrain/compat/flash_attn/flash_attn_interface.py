"""flash-attn 2's functions on our attention.

    from powertrain.compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Wider than there: float32 too, every GPU and the CPU, head dims to 512 with a value dim of its own, pages of any size,
dropout together with softcap. Differs: the LSE of a query that sees no key is -inf (there +inf); dropout draws from our
Philox, so the same seed keeps other elements; S_dmask is never written, so its place in the results holds None and
asking for it together with dropout raises.
"""

from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from powertrain.compat.missing import unknown
from powertrain.ops.attention import attention, decode_attention, varlen_attention
from powertrain.ops.attention.arguments import window_bounds
from powertrain.ops.attention.decode import reads_pages
from powertrain.ops.conversion import gather_pages, known, unit_stride, unsupported
from powertrain.ops.rope_table import RopeTable
from powertrain.runtime import checks
from powertrain.runtime.dispatch import wants_grad

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Window = tuple[int, int]
# NumPy's too, and what torch.compile traces
_Integer = Integral | torch.SymInt


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Attention with flash-attn's arguments.

    Shapes: q [b, sq, h, d], k [b, sk, hk, d], v [b, sk, hk, dv], h a multiple of hk; alibi_slopes [h] or [b, h].
    Masks are aligned bottom right: query i sees key j if i + sk - sq - left <= j <= i + sk - sq + right.
    Returns out [b, sq, h, dv]; with return_attn_probs (out, lse [b, h, sq] float32, None).
    """
    # refused ahead of the computation, not after it
    _no_mask_of_dropout("flash_attn_func", return_attn_probs, dropout_p)
    result = attention(
        *unit_stride(q, k, v, "flash_attn_func"), dropout_p=dropout_p, scale=softmax_scale, is_causal=causal,
        window_size=window_size,
        # False there means "not required"; None here follows torch.use_deterministic_algorithms
        softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic or None, return_lse=return_attn_probs,
    )  # fmt: skip
    # the third result is the dropout mask S_dmask, for which flash-attn allocates the score matrix
    return (*result, None) if return_attn_probs else result


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """`flash_attn_func` of k and v in one tensor, kv [b, sk, 2, hk, d]."""
    k, v = _parts("flash_attn_kvpacked_func", "kv", kv, 2, 5)
    # by position: the arguments of both functions stand in one order
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """`flash_attn_func` of q, k and v in one tensor, qkv [b, s, 3, h, d]."""
    q, k, v = _parts("flash_attn_qkvpacked_func", "qkv", qkv, 3, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Attention over packed sequences, sequence n in rows cu_seqlens[n] to cu_seqlens[n + 1].

    max_seqlen_q and max_seqlen_k are upper bounds; a tensor is not read, so nothing waits for the GPU (but for pages).

    Shapes: q [total_q, h, d], k [total_k, hk, d], v [total_k, hk, dv]; with block_table [b, pages] k and v are pages
    [num_pages, page_size, hk, d] of any size, and cu_seqlens_k says how long each sequence is. With a few hundred
    queries a sequence on average, and without gradients, pages are read where they are; otherwise their first
    max_seqlen_k positions are copied together, O(b * max_seqlen_k) memory.
    Returns out [total_q, h, dv]; with return_attn_probs (out, lse [h, total_q] float32, None).
    """
    _no_mask_of_dropout("flash_attn_varlen_func", return_attn_probs, dropout_p)
    used: dict[str, Any] = {}
    if block_table is not None:
        op = "flash_attn_varlen_func"
        _check_dims(op, 3, q=q)
        checks.tensor(op, "cu_seqlens_k", cu_seqlens_k)
        checks.same_device(op, "q", q, k=k, cu_seqlens_k=cu_seqlens_k)
        checks.require(cu_seqlens_k.dim() == 1, op, "cu_seqlens_k", "have 1 dim", list(cu_seqlens_k.shape))
        _check_pages(op, k, v, block_table, "k", "v")
        most = block_table.shape[1] * k.shape[1]
        wanted = wants_grad(q, k, v)
        q, k, v = unit_stride(q, k, v)
        lengths, left = cu_seqlens_k.diff(), window_bounds(op, window_size)[0]
        reads = not wanted and dropout_p == 0 and reads_pages(q, k, v, cu_seqlens_q, lengths, block_table, left)
        # pages are gathered to this size, so there a tensor is read
        capacity = max_seqlen_k.item() if isinstance(max_seqlen_k, Tensor) and not reads else known(max_seqlen_k)
        if not (isinstance(capacity, _Integer) and capacity >= 0) and not (reads and capacity is None):
            checks.fail(op, "max_seqlen_k", "be an integer of at least 0", checks.described(capacity))
        fits = capacity is None or capacity <= most
        checks.require(fits, op, "max_seqlen_k", f"be at most {most}, the pages of block_table", capacity)
        if reads:
            results = decode_attention(
                q, k, v, lengths, page_table=block_table, cu_seqlens_q=cu_seqlens_q,
                max_seqlen_q=known(max_seqlen_q), scale=softmax_scale, is_causal=causal, window_size=window_size,
                softcap=softcap, alibi_slopes=alibi_slopes, return_lse=return_attn_probs,
            )  # fmt: skip
            return (*results, None) if return_attn_probs else results
        assert capacity is not None
        if lengths.shape[0] == block_table.shape[0]:
            checks.pages(op, "block_table", block_table, k.shape[0], k.shape[1], torch.zeros_like(lengths), lengths)
        # rows of the next sequence would be this one's
        checks.indices(op, "lengths of cu_seqlens_k (up to max_seqlen_k)", lengths, capacity + 1)
        # gathered together, for packed sequences have no page table here; O(b * max_seqlen_k) memory
        k, v = (gather_pages(x, block_table, capacity).flatten(0, 1) for x in (k, v))
        # each sequence begins at a multiple of the capacity, beyond which a kernel would read other memory
        starts = torch.arange(block_table.shape[0] + 1, device=k.device, dtype=torch.int32) * capacity
        used = {"cu_seqlens_k_padded": starts, "seqused_k": lengths.clamp(max=capacity)}
    result = varlen_attention(
        *unit_stride(q, k, v, "flash_attn_varlen_func"), cu_seqlens_q, cu_seqlens_k,
        known(max_seqlen_q), known(max_seqlen_k), **used,
        dropout_p=dropout_p, scale=softmax_scale, is_causal=causal, window_size=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, deterministic=deterministic or None, return_lse=return_attn_probs,
    )  # fmt: skip
    return (*result, None) if return_attn_probs else result


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """`flash_attn_varlen_func` of k and v in one tensor, kv [total_k, 2, hk, d]."""
    k, v = _parts("flash_attn_varlen_kvpacked_func", "kv", kv, 2, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """`flash_attn_varlen_func` of q, k and v in one tensor, qkv [total, 3, h, d]."""
    q, k, v = _parts("flash_attn_varlen_qkvpacked_func", "qkv", qkv, 3, 4)
    # self-attention: identity of the two tensors tells the backends that lengths are equal
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries over a KV cache, which takes k and v in place first. No backward.

    Shapes: q [b, sq, h, d]; k_cache [b_cache, s_cache, hk, d], or pages [num_pages, page_size, hk, d] of any size with
    block_table [b, pages]; k, v [b, s_new, hk, d] are written from position cache_seqlens on. cache_seqlens is an int
    or [b] (None: the whole cache). cu_seqlens_q [b + 1], of FlashAttention-3: q is [total_q, h, d], without k.
    Returns out [b, sq, h, dv], or [total_q, h, dv]; with return_softmax_lse (out, lse [b, h, sq] float32).
    """
    op = "flash_attn_with_kvcache"
    checks.require((k is None) == (v is None), op, "v", "be given with k, and only then", "one of the two")
    checks.require(
        (rotary_cos is None) == (rotary_sin is None), op, "rotary_sin", "be given with rotary_cos", "one of the two"
    )
    _check_dims(op, 4 if cu_seqlens_q is None else 3, q=q)
    _check_dims(op, 4, k_cache=k_cache, v_cache=v_cache)
    if cu_seqlens_q is not None:
        _check_dims(op, 1, cu_seqlens_q=cu_seqlens_q)
    if k is not None:
        _check_dims(op, 4, k=k, v=v)
    checks.at_least_16_bits(op, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    if block_table is not None:
        _check_pages(op, k_cache, v_cache, block_table, "k_cache", "v_cache")
    if not (cache_seqlens is None or isinstance(cache_seqlens, Tensor | _Integer)):
        checks.fail(op, "cache_seqlens", "be an int, a tensor or None", checks.described(cache_seqlens))
    # float32, so that 16-bit tables lose nothing more
    rotary = None if rotary_cos is None or rotary_sin is None else RopeTable(rotary_cos.float(), rotary_sin.float())
    # pages of one sequence are as many as the table has columns
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    left = capacity - (0 if k is None else k.shape[1])
    if cache_seqlens is None:
        # without lengths the cache is full once the new keys are in
        cache_seqlens = left
    if not isinstance(cache_seqlens, Tensor):
        if not cache_seqlens <= left:
            taken = "" if left == capacity else f", less {capacity - left} new keys"
            checks.fail(op, "cache_seqlens", f"be at most {left}, the size of the cache{taken}", cache_seqlens)
        # int lengths become a tensor: the kernel reads lengths on the device
        batch = q.shape[0] if cu_seqlens_q is None else max(cu_seqlens_q.shape[0] - 1, 0)
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    # as there: inputs may require gradients, and get none
    with torch.no_grad():
        # not the caches, which may be as large as the GPU
        q, *new = unit_stride(q, q if k is None else k, q if v is None else v)
        k, v = (None, None) if k is None else new
        return decode_attention(
            q, k_cache, v_cache, cache_seqlens, key_new=k, value_new=v, page_table=block_table,
            is_causal=causal, window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, scale=softmax_scale,
            cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, return_lse=return_softmax_lse,
            # 0 means "choose" there, None here
            num_splits=(num_splits or None) if cu_seqlens_q is None else None, rotary=rotary,
            rotary_interleaved=rotary_interleaved, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
        )  # fmt: skip


def _check_dims(op: str, dims: int, **tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            checks.fail(op, name, "be a tensor", checks.described(x))
        if x.is_nested or x.dim() != dims:
            checks.fail(op, name, f"be a tensor of {dims} dims", checks.described(x))


def _check_pages(op: str, k: Tensor, v: Tensor, table: Tensor, name: str, name_v: str) -> None:
    """k and v are pages of one size, [pages, page_size, heads, d], and block_table the numbers of each sequence's."""
    _check_dims(op, 4, **{name: k, name_v: v})
    checks.require(k.shape[1] >= 1, op, name, "have pages of at least 1 row", list(k.shape))
    checks.shape(op, name_v, v, (*k.shape[:3], v.shape[-1]), f"as {name}, but for the head dim")
    checks.tensor(op, "block_table", table)
    checks.require(table.dim() == 2, op, "block_table", "be [batch, pages of a sequence]", list(table.shape))
    checks.one_of(op, "block_table.dtype", table.dtype, (torch.int32, torch.int64))
    checks.same_device(op, name, k, **{name_v: v}, block_table=table)


def _no_mask_of_dropout(op: str, return_attn_probs: bool, dropout_p: float) -> None:
    if return_attn_probs and dropout_p > 0:
        unsupported(
            op, "return_attn_probs with dropout_p", dropout_p,
            "powertrain.ops.attention.attention(return_lse=True, dropout_seed=...); attention_keep returns its mask",
        )  # fmt: skip


def _parts(op: str, argument: str, x: Tensor, parts: int, dims: int) -> tuple[Tensor, ...]:
    """Views of tensors packed in the third dim from last."""
    checks.tensor(op, argument, x)
    ok = x.dim() == dims and x.shape[-3] == parts
    checks.require(ok, op, argument, f"have {dims} dims, the third from last of size {parts}", list(x.shape))
    # views: packed projections are not copied
    return x.unbind(-3)


__getattr__ = unknown(__name__)
