"""Attention of a few new queries over a KV cache, dense or in pages, and the append of new keys and values before it.

    s = scale * q k^T,  masked;   o = softmax(s) v;   lse = log sum exp(s)     one sequence of a batch, its cache so far

Decoding reads every key and value once and computes little, so memory bandwidth limits it. One program computes one
KV head of one sequence and one split of its keys. The rows of its tile are the new tokens times the query heads of the
KV head. Splits exist only to fill the GPU; they produce float32 partial results, which a second kernel combines. The
host chooses the number of splits from shapes (cache size, heads, SMs): for a single sequence, or for each sequence with
num_splits. For a batch it chooses the total, which a small kernel distributes over the sequences by their lengths
(decode_schedule.py; for packed queries decode_tiles.py). The host never reads the lengths, and one CUDA graph is valid
for all lengths.

On Hopper other kernels compute most calls in float16 and bfloat16 (decode_op.py): hopper/decode_mla.py computes MLA
caches with at least 16 rows (queries times heads) per sequence; hopper/forward_pages.py, the attention forward over
caches, computes packed queries and equal numbers of queries per sequence, from one query on.

page_table[batch, token // page_size] is the page id of a key: one is read per block of keys if blocks do not cross
pages, else one per key. Head dims are divided into power-of-two pieces (192 = 128 + 64), never padded to the next one.

B sequences of n keys, K KV heads, head dims d and e: 2 * B * n * K * (d + e) bytes in 16 bits (d alone where the values
are the keys' first e channels), and splits * B * H * e * 8 bytes of partial results.

Sources: flash-decoding (Dao et al. 2023, pytorch.org/blog/flash-decoding); paged KV cache: Kwon et al.,
arXiv:2309.06180; semantics of appending, rotary positions and leftpad: flash_attn_with_kvcache of flash-attn 2.8.
"""

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from powertrain.ops.attention.arguments import as_int32, window_bounds
from powertrain.ops.attention.backend_preferences import preference_or_none
from powertrain.ops.attention.backends.reference import attention_ref
from powertrain.ops.attention.cache_append import append_op, rotate_append_op
from powertrain.ops.attention.decode_op import Shared, decode_op, why_not_many
from powertrain.ops.attention.hopper.forward_pages import PagedCall
from powertrain.ops.attention.mask import MaskSpec, MaskTensors
from powertrain.ops.attention.step_schedule import DecodeSchedule, shared, shares_lists
from powertrain.ops.batch_invariance import refuse_invariant
from powertrain.ops.rope import rope, rope_qkv
from powertrain.ops.rope_table import RopeTable
from powertrain.ops.shapes import acc_dtype
from powertrain.runtime import checks
from powertrain.runtime.dispatch import (
    Op,
    falls_back,
    has_kernels,
    in_functorch,
    is_disabled,
    is_traced,
    refuse_vmap,
    use_kernel,
    without_autocast,
)
from powertrain.runtime.float32_products import allows_tf32
from powertrain.runtime.target import Target

MAX_HEAD_DIM_QK, MAX_HEAD_DIM_V = 576, 512
MAX_SPLITS = 65535


Layout = Literal["bshd", "bhsd"]


_OP = "decode_attention"
_NO_INVARIANT = "compute whole sequences, without a KV cache"


def decode_attention_ref(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor | None,
    cache_seqlens: Tensor,
    *,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    is_causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    head_dim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    upcast: bool = True,
) -> tuple[Tensor, Tensor]:
    """The specification of `decode_attention` on a cache that holds everything, layout "bshd", or packed queries, in
    plain PyTorch: each sequence's keys gathered, then `attention_ref`. Reads the lengths on the host. Returns (out,
    lse)."""
    value_cache = key_cache[..., :head_dim_v] if value_cache is None else value_cache
    starts = None if cu_seqlens_q is None else cu_seqlens_q.tolist()
    left, right = window_size
    mask = MaskSpec(
        max(left, -1), 0 if is_causal else max(right, -1), True, alibi=alibi_slopes is not None, softcap=softcap,
        sinks=sinks is not None,
    )  # fmt: skip
    tensors = MaskTensors(alibi_slopes=alibi_slopes, sinks=sinks)
    outs, lses = [], []
    for n, length in enumerate(cache_seqlens.tolist()):
        first = 0 if cache_leftpad is None else int(cache_leftpad[n])
        of_sequence = query[n : n + 1] if starts is None else query[None, starts[n] : starts[n + 1]]
        if left >= 0:
            # positions count from the end. Pages ahead of the window may have been given away, and hold anything
            first = max(first, length - of_sequence.shape[1] - left)
        k, v = (_rows(x, n, page_table, cache_batch_idx)[None, first:length] for x in (key_cache, value_cache))
        out, lse = attention_ref(of_sequence, k, v, mask=mask, tensors=tensors.of_batch(n), scale=scale, upcast=upcast)
        outs.append(out)
        lses.append(lse)
    if starts is not None:
        return _packed_rows(query, outs, lses, starts, value_cache.shape[-1])
    if not outs:
        b, sq, h, _ = query.shape
        empty = query.new_empty((b, h, sq), dtype=acc_dtype(query.dtype))
        return query.new_empty(b, sq, h, value_cache.shape[-1]), empty
    return torch.cat(outs), torch.cat(lses)


def reads_pages(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, cu_seqlens_q: Tensor, lengths: Tensor, page_table: Tensor,
    left: int = -1, leftpad: Tensor | None = None,
) -> bool:  # fmt: skip
    """Whether packed queries beside a paged cache take less time here than `varlen_attention` takes with a copy of all
    pages: the copy costs as much for one query as for hundreds, products of the universal kernel take twice as long."""
    call = PagedCall(
        query, key_cache, value_cache, cu_seqlens_q, lengths, page_table, leftpad, None, None, left, -1, 0.0, 1.0
    )
    if query.shape[0] * query.shape[1] <= 256 * lengths.shape[0] * key_cache.shape[2]:
        return True
    # a traced tensor has no address, which TMA wants aligned
    is_known = not is_traced(query) and use_kernel(_OP, query)
    return is_known and why_not_many(call, Target.of(query.device)) is None


def _packed_rows(
    query: Tensor, outs: list[Tensor], lses: list[Tensor], starts: list[int], head_dim_v: int
) -> tuple[Tensor, Tensor]:
    """out [T, H, E] and lse [H, T] of each sequence's; rows of no sequence are 0 and -inf."""
    total, heads, _ = query.shape
    out = query.new_zeros(total, heads, head_dim_v, dtype=outs[0].dtype if outs else query.dtype)
    lse = query.new_full((heads, total), -torch.inf, dtype=acc_dtype(query.dtype))
    for n, (of_sequence, its_lse) in enumerate(zip(outs, lses, strict=True)):
        out[starts[n] : starts[n + 1]] = of_sequence[0]
        lse[:, starts[n] : starts[n + 1]] = its_lse[0]
    return out, lse


def _rows(cache: Tensor, n: int, page_table: Tensor | None, cache_batch_idx: Tensor | None) -> Tensor:
    """All rows a sequence may have, [capacity, KV heads, d]. Page ids beyond its length may be anything."""
    if page_table is None:
        return cache[n if cache_batch_idx is None else int(cache_batch_idx[n])]
    if not cache.shape[0]:
        # no id names a page, and no sequence has rows
        return cache.flatten(0, 1)
    return cache[page_table[n].long().clamp(0, cache.shape[0] - 1)].flatten(0, 1)


def _append_ref(
    key_new: Tensor,
    value_new: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | None,
    cache_seqlens: Tensor,
    page_table: Tensor | None,
    cache_batch_idx: Tensor | None,
) -> None:
    page_size = key_cache.shape[1]
    capacity = page_size * (1 if page_table is None else page_table.shape[1])
    batch = torch.arange(key_new.shape[0], device=key_new.device)[:, None]
    position = cache_seqlens.long()[:, None] + torch.arange(key_new.shape[1], device=key_new.device)
    batch, fits = batch.expand_as(position), position < capacity
    batch, position = batch[fits], position[fits]
    if page_table is None:
        entry = batch if cache_batch_idx is None else cache_batch_idx.long()[batch]
    else:
        entry, position = page_table[batch, position // page_size].long(), position % page_size
    key_cache[entry, position] = key_new[fits]
    if value_new is not None and value_cache is not None:
        value_cache[entry, position] = value_new[fits]


@shares_lists
@falls_back(_OP, preference_or_none)
def decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor | None,
    cache_seqlens: Tensor,
    *,
    key_new: Tensor | None = None,
    value_new: Tensor | None = None,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary: RopeTable | None = None,
    rotary_interleaved: bool = False,
    is_causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    head_dim_v: int | None = None,
    layout: Layout = "bshd",
    num_splits: int | None = None,
    return_lse: bool = False,
    backend: Literal["triton", "reference"] | None = None,
    schedule: DecodeSchedule | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a few new queries over a KV cache, after new keys and values were appended to it in place.

    Shapes: B batch, S new queries, N new keys, H query heads (a multiple of the K KV heads), D and E head dims.
        query          [B, S, H, D]  float32, float16 or bfloat16 (float64 on the CPU); D up to 576
        key_cache      [C, L, K, D]  C >= B entries of up to L rows; with a page table [pages, page size >= 1, K, D]
        value_cache    [C, L, K, E]  E up to 512; None: the first head_dim_v channels of the keys (MLA), read once
        cache_seqlens  [B] int32     rows of each sequence before the append, on the same device; the host reads them on
                       the CPU only. A length above the capacity raises there, and counts as the capacity elsewhere
        key_new, value_new   [B, N, K, D], [B, N, K, E], written after the last row; dropped beyond the capacity
        page_table     [B, max pages] int32: page p of a sequence is its rows [p * page size, (p + 1) * page size)
        cache_batch_idx  [B] int32   the entry of the cache for each sequence (not with pages)
        cache_leftpad    [B] int32   a sequence's first row; its length still counts from row 0
        cu_seqlens_q   [B + 1] int32  query is [T, H, D]: sequence n's are rows cu_seqlens_q[n] to cu_seqlens_q[n + 1],
                       any number per sequence, such as chunks of prompts and single new tokens. The keys must be in
                       the cache already; key_new, rotary and num_splits are not supported
        max_seqlen_q   the most queries of a sequence, with cu_seqlens_q; None: T. It affects tiles, never results
        rotary         table from `rope_table`; key_new and query are rotated before use, the first of each by
                       position cache_seqlens, the next ones by the next positions (without causal and window: all
                       queries by the first position). With a table of axes (M-RoPE) call `rope` before instead
        is_causal      the last query is at the position of the last key (bottom right)
        window_size    (left, right) keys seen before and after a query's own position; -1: all
        softcap, alibi_slopes [H] or [B, H], sinks [H]: as in `attention`; scale: default D^-0.5
        layout         "bshd" as above, or "bhsd": query and out [B, H, S, D], caches [C, K, L, D], new [B, K, N, D]
        num_splits     the number of splits of each sequence's keys, 65535 at most; None: as many as fill the GPU,
                       distributed by the lengths
        backend        "triton", "reference" (plain PyTorch, reads lengths on the host) or None: reference on a
                       CPU, else triton
        schedule       DecodeSchedule of these cache_seqlens: calls in one CUDA graph, such as those of a model's
                       layers, split the keys once for all. The same bits
    Integer tensors are int32 or int64. All strides are allowed, except that the last dim of queries, keys and values
        has stride 1.
    Returns out in query's layout and dtype, with E; with return_lse also the log-sum-exp, float32 (float64 for float64)
        [B, H, S] or [H, T], in nats. A query that sees no key gives 0 and -inf (the sink's score with a sink).
    Numerics: products and sums in float32; probabilities are rounded to the cache's dtype. float32 products are
        full precision unless PyTorch is set to allow TF32. Rows beyond a sequence's length are never read.
        Deterministic. Where a sequence's keys are split, and so the rounding, depends on shapes and the lengths of the
        whole batch; with num_splits on shapes alone.
    Memory: out, and if keys are split splits * S * H * (E + 1) * 4 bytes for B * num_splits splits, or for B and as
        many more as fill the GPU eight times. For packed queries, and on Hopper for others too, (E + 1) * 4 bytes for
        each row of a tile and each split of it. On Hopper (except for a single sequence) tiles have 64 to 192 rows, and
        memory for the largest possible number of splits is allocated: 17 to 65 MiB for E = 128 on an H200.
    Raises ValueError with the argument's name, requirement and value, before anything is written; NotImplementedError
        where a gradient is wanted: this is for inference.
    Source: flash-decoding (Dao et al. 2023); semantics of flash_attn_with_kvcache.
    """
    checks.one_of(_OP, "layout", layout, ("bshd", "bhsd"))
    checks.one_of(_OP, "backend", backend, (None, "triton", "reference"))
    is_packed = cu_seqlens_q is not None
    if is_packed:
        _check_packed(query, cu_seqlens_q, cache_seqlens, max_seqlen_q, layout, key_new, rotary, num_splits)
        query = query[None]
    else:
        checks.require(max_seqlen_q is None, _OP, "max_seqlen_q", "be given with cu_seqlens_q", max_seqlen_q)
    query, keys, values, key_new, value_new = _in_bshd(layout, query, key_cache, value_cache, key_new, value_new)
    head_dim_v = _check_cache(query, keys, values, head_dim_v)
    _check_new(query.shape[0], keys, values, key_new, value_new)
    cache = _Cache(keys, values, cache_seqlens, page_table, cache_batch_idx, cache_leftpad)
    _check_vectors(query, cache_seqlens.numel() if is_packed else query.shape[0], cache, alibi_slopes, sinks)
    cache = cache.as_kernels_read_it()
    listed_by = {"cache_leftpad": cache_leftpad, "cu_seqlens_q": cu_seqlens_q}
    cu_seqlens_q = as_int32(_OP, "cu_seqlens_q", cu_seqlens_q)
    softcap = 0.0 if softcap is None else float(softcap)
    checks.require(softcap >= 0, _OP, "softcap", "be at least 0, or None", softcap)
    # splits are a dim of the grid
    is_possible = num_splits is None or 1 <= num_splits <= MAX_SPLITS
    checks.require(is_possible, _OP, "num_splits", f"be from 1 to {MAX_SPLITS}, or None", num_splits)
    _refuse_gradients(query, keys, values, key_new, value_new, sinks, alibi_slopes)
    if in_functorch():
        # ahead of the append
        given = (query, keys, values, cache_seqlens, key_new, value_new, page_table, cache_batch_idx, cache_leftpad)
        refuse_vmap(_OP, *(x for x in given if x is not None), instead="plain PyTorch reads lengths here too")
    refuse_invariant("decode_attention", _NO_INVARIANT)
    runs_kernel = backend != "reference" and use_kernel(_OP, query)
    checks.require(runs_kernel or backend != "triton", _OP, "query", "be on a GPU for backend 'triton'", query.device)
    left, right = window_bounds(_OP, window_size)
    right = 0 if is_causal else right
    # ahead of the append: nothing is written where an argument is wrong
    scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
    checks.require(-inf < scale < inf, _OP, "scale", "be a finite number or None", scale)
    scores = _Scores(left, right, softcap, scale, alibi_slopes, sinks)
    num_new = 0 if key_new is None else key_new.shape[1]
    _check_values(query, cache, cu_seqlens_q, num_new, left)

    if rotary is not None:
        query, key_new = _rotate(query, key_new, rotary, rotary_interleaved, cache.seqlens, left >= 0 or right >= 0)
    if key_new is not None:
        append = append_op if runs_kernel else _append_ref
        append(key_new, value_new, keys, values, cache.seqlens, cache.page_table, cache.batch_idx)
    if runs_kernel:
        share = None if schedule is None else partial(shared, schedule, listed_by)
        out, lse = _by_kernel(query, cache, scores, head_dim_v, num_new, num_splits, cu_seqlens_q, max_seqlen_q, share)
    else:
        out, lse = _by_reference(query, cache, scores, head_dim_v, num_new, cu_seqlens_q)
    out = out.transpose(1, 2) if layout == "bhsd" else out
    return (out, lse) if return_lse else out


def decode_projected(
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_seqlens: Tensor,
    *,
    table: RopeTable,
    num_kv_heads: int,
    window_size: tuple[int, int] = (-1, -1),
    schedule: DecodeSchedule | None = None,
) -> Tensor:
    """`rope_qkv` of a packed projection [B, S, H + 2 * K, D], "grouped", at the positions behind the cached ones, then
    `decode_attention` over a dense cache with its queries, new keys and values. The same bits, by one launch less.

    The kernel that rotates writes keys and values to the cache. Calls that it cannot compute, and wrong ones, go to the
    two functions."""
    # on a CPU straight to them: each skips its checks in repeated calls, but not inside of another function
    function = _decode_projected if has_kernels(qkv) else _decode_rotated
    return function(
        qkv, key_cache, value_cache, cache_seqlens, table=table, num_kv_heads=num_kv_heads, window_size=window_size,
        schedule=schedule,
    )  # fmt: skip


def _decode_rotated(
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_seqlens: Tensor,
    *,
    table: RopeTable,
    num_kv_heads: int,
    window_size: tuple[int, int],
    schedule: DecodeSchedule | None,
) -> Tensor:
    q, k, v = rope_qkv(
        qkv, table=table, num_heads=qkv.shape[-2] - 2 * num_kv_heads, num_kv_heads=num_kv_heads, packing="grouped",
        offset=cache_seqlens,
    )  # fmt: skip
    out = decode_attention(
        q, key_cache, value_cache, cache_seqlens, key_new=k, value_new=v, window_size=window_size, schedule=schedule
    )
    assert isinstance(out, Tensor)
    return out


@shares_lists
@falls_back(_OP, preference_or_none)
def _decode_projected(
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_seqlens: Tensor,
    *,
    table: RopeTable,
    num_kv_heads: int,
    window_size: tuple[int, int],
    schedule: DecodeSchedule | None = None,
) -> Tensor:
    apart = partial(
        _decode_rotated, qkv, key_cache, value_cache, cache_seqlens, table=table, num_kv_heads=num_kv_heads,
        window_size=window_size, schedule=schedule,
    )  # fmt: skip
    if not _appends_directly(qkv, key_cache, value_cache, cache_seqlens, table, num_kv_heads):
        return apart()
    refuse_invariant("decode_attention", _NO_INVARIANT)
    left, _ = window_bounds(_OP, window_size)
    cache = _Cache(key_cache, value_cache, cache_seqlens, None, None, None)
    _check_values(qkv, cache, None, qkv.shape[1], left)
    num_heads = qkv.shape[2] - 2 * num_kv_heads
    query = _rotate_append(qkv, num_heads, key_cache, value_cache, cache_seqlens, table.cos, table.sin)
    if query is None:
        return apart()
    scores = _Scores(left, 0, 0.0, float(qkv.shape[-1] ** -0.5), None, None)
    share = None if schedule is None else partial(shared, schedule, {})
    out, _ = _by_kernel(query, cache, scores, value_cache.shape[-1], qkv.shape[1], None, None, None, share)
    return out


@falls_back("rope_qkv")
def _rotate_append(*arguments: Any) -> Tensor | None:
    """`rotate_append_op`; None where its kernel does not compile, for which rope_qkv is disabled and not attention."""
    return None if is_disabled("rope_qkv") else rotate_append_op(*arguments)


def _appends_directly(
    qkv: Tensor, key_cache: Tensor, value_cache: Tensor, cache_seqlens: Tensor, table: RopeTable, num_kv_heads: int
) -> bool:
    """Whether the kernel that rotates takes the call of `decode_projected`, and it is right."""
    if not (use_kernel("rope_qkv", qkv) and use_kernel(_OP, qkv)) or is_traced(qkv) or table.axes is not None:
        return False
    tensors = qkv, key_cache, value_cache
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    # of one kind that kernels take, or the two functions say what is wrong
    if qkv.dtype not in checks.FLOATS:
        return False
    if any(x.dtype is not qkv.dtype or x.device != qkv.device or x.dim() != 4 for x in tensors):
        return False
    batch, _, heads, head_dim = qkv.shape
    fits = num_kv_heads > 0 and heads % num_kv_heads == 0 and heads > 2 * num_kv_heads
    fits = fits and key_cache.shape[2] == num_kv_heads
    fits = fits and key_cache.shape[0] >= batch and key_cache.shape[3] == head_dim <= MAX_HEAD_DIM_V
    fits = fits and 2 * table.cos.shape[-1] <= head_dim and table.cos.device == qkv.device
    fits = fits and cache_seqlens.shape == (batch,) and cache_seqlens.device == qkv.device
    # the kernel has one set of strides for both caches
    return (
        fits
        and cache_seqlens.dtype is torch.int32
        and cache_seqlens.stride(0) == 1
        and key_cache.shape == value_cache.shape
        and key_cache.stride() == value_cache.stride()
        and key_cache.stride(3) == 1
    )


class _Cache(NamedTuple):
    """Keys and values that a call attends to, layout "bshd", and where each sequence finds its own."""

    keys: Tensor  # [C, L, K, D]
    values: Tensor | None  # [C, L, K, E]
    seqlens: Tensor  # [B], before the append
    page_table: Tensor | None
    batch_idx: Tensor | None
    leftpad: Tensor | None

    def as_kernels_read_it(self) -> "_Cache":
        """Whole numbers without strides, int32 but for page ids, whose table may be large."""
        table = self.page_table
        return self._replace(
            seqlens=as_int32(_OP, "cache_seqlens", self.seqlens),
            batch_idx=as_int32(_OP, "cache_batch_idx", self.batch_idx),
            leftpad=as_int32(_OP, "cache_leftpad", self.leftpad),
            page_table=table if table is None or table.stride(-1) == 1 else table.contiguous(),
        )

    @property
    def capacity(self) -> int:
        """The most rows that a sequence may have."""
        return self.keys.shape[1] * (1 if self.page_table is None else self.page_table.shape[1])


class _Scores(NamedTuple):
    """What makes scores of q kᵀ; bounds of the window as `window_bounds` returns them, 0 on the right if causal."""

    left: int
    right: int
    softcap: float
    scale: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None


def _by_kernel(
    query: Tensor,
    cache: _Cache,
    scores: _Scores,
    head_dim_v: int,
    num_new: int,
    num_splits: int | None,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int | None,
    share: Callable[[tuple[Any, ...]], Shared] | None,
) -> tuple[Tensor, Tensor]:
    """`share`: of the arguments of `decode_op`; None: the call shares nothing with others."""
    slopes = None if scores.alibi_slopes is None else scores.alibi_slopes.float().contiguous()
    if slopes is not None and not slopes.numel():
        # of no sequences: rows that belong to none read the first one's
        slopes = slopes.new_zeros(slopes.shape[-1])
    sinks = None if scores.sinks is None else scores.sinks.contiguous()
    # of no sequences: the kernel reads an entry ahead of the keys, whether there are any or not
    batch_idx = None if cache.batch_idx is None or not cache.batch_idx.numel() else cache.batch_idx
    arguments = (
        query, cache.keys, cache.values, head_dim_v, cache.seqlens, cache.page_table, batch_idx, cache.leftpad,
        slopes, sinks, num_new, scores.left, scores.right, scores.softcap, scores.scale, num_splits or 0,
        allows_tf32(), cu_seqlens_q, query.shape[1] if max_seqlen_q is None else max_seqlen_q,
    )  # fmt: skip
    out, lse = decode_op(*arguments, *(() if share is None else share(arguments)))
    return (out, lse) if cu_seqlens_q is None else (out[0], lse[0])


def _by_reference(
    query: Tensor, cache: _Cache, scores: _Scores, head_dim_v: int, num_new: int, cu_seqlens_q: Tensor | None
) -> tuple[Tensor, Tensor]:
    # no graph holds loops over lengths: it has them as one op
    function = _reference_op if is_traced(query) else _reference
    result: tuple[Tensor, Tensor] = function(
        query if cu_seqlens_q is None else query[0], cache.keys, cache.values, head_dim_v,
        (cache.seqlens + num_new).clamp(max=cache.capacity), cache.page_table, cache.batch_idx, cache.leftpad,
        scores.alibi_slopes, scores.sinks, scores.left, scores.right, scores.softcap, scores.scale, cu_seqlens_q,
    )  # fmt: skip
    return result


def _reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor | None,
    head_dim_v: int,
    lengths: Tensor,
    page_table: Tensor | None,
    batch_idx: Tensor | None,
    leftpad: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    left: int,
    right: int,
    softcap: float,
    scale: float,
    cu_seqlens_q: Tensor | None,
) -> tuple[Tensor, Tensor]:
    with without_autocast(query.device):
        return decode_attention_ref(
            query, keys, values, lengths, page_table=page_table, cache_batch_idx=batch_idx, cache_leftpad=leftpad,
            is_causal=False, window_size=(left, right), softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
            scale=scale, head_dim_v=head_dim_v, cu_seqlens_q=cu_seqlens_q,
        )  # fmt: skip


def _reference_outputs(query: Tensor, keys: Tensor, values: Tensor | None, head_dim_v: int, *_: object) -> Any:
    *batch, tokens, heads, _qk = query.shape
    return query.new_empty(*batch, tokens, heads, head_dim_v), query.new_empty(
        *batch, heads, tokens, dtype=acc_dtype(query.dtype)
    )


_reference_op = Op(
    "decode_attention_ref(Tensor query, Tensor key_cache, Tensor? value_cache, int head_dim_v, Tensor lengths, "
    "Tensor? page_table, Tensor? cache_batch_idx, Tensor? cache_leftpad, Tensor? alibi_slopes, Tensor? sinks, "
    "SymInt left, SymInt right, float softcap, float scale, Tensor? query_starts) -> (Tensor, Tensor)",
    _reference,
    _reference_outputs,
    replays=False,
)


def _in_bshd(
    layout: Layout,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor | None,
    key_new: Tensor | None,
    value_new: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The tensors, checked to have four dims, as views in layout "bshd"."""
    tensors = (query, key_cache, value_cache, key_new, value_new)
    for name, x in zip(("query", "key_cache", "value_cache", "key_new", "value_new"), tensors, strict=True):
        checks.require(x is None or x.dim() == 4, _OP, name, f"have 4 dims ({layout})", x if x is None else [*x.shape])
    if layout == "bshd":
        return tensors
    rest = (x if x is None else x.transpose(1, 2) for x in tensors[2:])
    return query.transpose(1, 2), key_cache.transpose(1, 2), *rest  # type: ignore[return-value]


def _refuse_gradients(*tensors: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise NotImplementedError(
            f"{_OP} has no gradients: call it under torch.no_grad(), or use powertrain.attention for training"
        )


def _check_values(query: Tensor, cache: _Cache, cu_seqlens_q: Tensor | None, num_new: int, left: int) -> None:
    """Lengths, entries and pages on the CPU are those of a sequence and of the cache; those on a GPU are never read.
    `left`: of the window."""
    seqlens, capacity = cache.seqlens, cache.capacity
    if seqlens.device.type != "cpu" or is_traced(seqlens):
        return
    lengths = seqlens.tolist()
    if not all(0 <= n <= capacity for n in lengths):
        negative = min(lengths) < 0
        must = "be at least 0" if negative else f"be at most {capacity}, the cache's capacity"
        checks.fail(_OP, "cache_seqlens", must, min(lengths) if negative else max(lengths))
    checks.indices(_OP, "cache_batch_idx", cache.batch_idx, cache.keys.shape[0])
    checks.indices(_OP, "cache_leftpad", cache.leftpad, inf)
    if cu_seqlens_q is not None:
        ends = [0, *cu_seqlens_q.tolist(), query.shape[1]]
        if ends != sorted(ends):
            checks.fail(_OP, "cu_seqlens_q", f"ascend from 0 to at most {ends[-1]} (rows of query)", ends[1:-1])
    if cache.page_table is not None:
        # only pages that are read, or written with new rows, are checked: the cache may have given other sequences the
        # pages ahead of the padding or of the window
        last = (seqlens + num_new).clamp(max=capacity)
        first = torch.zeros_like(last) if cache.leftpad is None else cache.leftpad
        if left >= 0:
            queries = query.shape[1] if cu_seqlens_q is None else cu_seqlens_q.diff()
            first = torch.maximum(first, last - queries - left)
        if num_new:
            first = torch.minimum(first, seqlens)
        pages, page_size = cache.keys.shape[:2]
        checks.pages(_OP, "page_table", cache.page_table, pages, page_size, first, last)


def _rotate(
    query: Tensor, key_new: Tensor | None, table: RopeTable, interleaved: bool, offset: Tensor, positional: bool
) -> tuple[Tensor, Tensor]:
    if key_new is None:
        checks.fail(_OP, "key_new", "be given with rotary (keys in a cache are rotated already)", None)
    checks.require(
        table.axes is None, _OP, "rotary", "have no axes (apply rope to query and key_new before the call)", "axes"
    )
    if positional and query.shape[1] == key_new.shape[1]:
        return rope(query, key_new, table=table, interleaved=interleaved, offset=offset)  # type: ignore[return-value]
    # not positional: every query stands where the first does, so its tokens are turned as if they were heads
    tokens = query if positional else query.flatten(1, 2)[:, None]
    turned, key = (rope(x, table=table, interleaved=interleaved, offset=offset) for x in (tokens, key_new))
    return turned.view(query.shape), key  # type: ignore[union-attr, return-value]


def _check_cache(query: Tensor, key_cache: Tensor, value_cache: Tensor | None, head_dim_v: int | None) -> int:
    """Check query and caches, [B, S, H, D] all; the value's head dim."""
    checks.floating(_OP, query=query, key_cache=key_cache, value_cache=value_cache)
    checks.same_device(_OP, "query", query, key_cache=key_cache, value_cache=value_cache)
    for name, x in (("query", query), ("key_cache", key_cache), ("value_cache", value_cache)):
        if x is None:
            continue
        checks.require(x.dtype is query.dtype, _OP, name, f"have query's dtype {checks.name(query.dtype)}", x.dtype)
        if x.layout is not torch.strided or (x.stride(-1) != 1 and x.numel() and x.shape[-1] > 1):
            checks.fail_stride(_OP, name, x)
    head_dim, heads, kv_heads = query.shape[3], query.shape[2], key_cache.shape[2]
    checks.require(1 <= head_dim <= MAX_HEAD_DIM_QK, _OP, "query", "have a head dim of 1 to 576", head_dim)
    checks.require(
        key_cache.shape[3] == head_dim, _OP, "key_cache", f"have query's head dim {head_dim}", key_cache.shape[3]
    )
    if kv_heads == 0 or heads % kv_heads:
        checks.fail(_OP, "query", f"have a multiple of key_cache's {kv_heads} heads", heads)
    if value_cache is None:
        if head_dim_v is None or not 1 <= head_dim_v <= min(head_dim, MAX_HEAD_DIM_V):
            must = f"be given without a value_cache, 1 to {min(head_dim, MAX_HEAD_DIM_V)}"
            checks.fail(_OP, "head_dim_v", must, head_dim_v)
        return head_dim_v
    dv = value_cache.shape[3]
    checks.require(head_dim_v in (None, dv), _OP, "head_dim_v", f"be value_cache's {dv} or None", head_dim_v)
    checks.require(1 <= dv <= MAX_HEAD_DIM_V, _OP, "value_cache", "have a head dim of 1 to 512", dv)
    checks.shape(_OP, "value_cache", value_cache, (*key_cache.shape[:3], dv), "as key_cache, but for the head dim")
    return dv


def _check_new(
    batch: int, key_cache: Tensor, value_cache: Tensor | None, key_new: Tensor | None, value_new: Tensor | None
) -> None:
    if key_new is None:
        checks.require(value_new is None, _OP, "value_new", "be None without key_new", "a tensor")
        return
    if (value_new is None) != (value_cache is None):
        checks.fail(_OP, "value_new", "be given as value_cache is", checks.described(value_new))
    for name, new, cache in (("key_new", key_new, key_cache), ("value_new", value_new, value_cache)):
        if new is None or cache is None:
            continue
        checks.same_device(_OP, "key_cache", key_cache, **{name: new})
        checks.require(
            new.dtype is cache.dtype, _OP, name, f"have the cache's dtype {checks.name(cache.dtype)}", new.dtype
        )
        expected = (batch, key_new.shape[1], *cache.shape[2:])
        checks.shape(_OP, name, new, expected, "batch, new tokens, kv heads, head dim")
        if new.layout is not torch.strided or (new.stride(-1) != 1 and new.numel() and new.shape[-1] > 1):
            checks.fail_stride(_OP, name, new)


def _check_packed(
    query: Tensor,
    cu_seqlens_q: Tensor | None,
    cache_seqlens: Tensor,
    max_seqlen_q: int | None,
    layout: Layout,
    key_new: Tensor | None,
    rotary: RopeTable | None,
    num_splits: int | None,
) -> None:
    assert cu_seqlens_q is not None
    checks.require(query.dim() == 3, _OP, "query", "have 3 dims [T, H, D] with cu_seqlens_q", list(query.shape))
    checks.same_device(_OP, "query", query, cu_seqlens_q=cu_seqlens_q)
    checks.one_of(_OP, "cu_seqlens_q.dtype", cu_seqlens_q.dtype, (torch.int32, torch.int64))
    checks.shape(_OP, "cu_seqlens_q", cu_seqlens_q, (cache_seqlens.numel() + 1,), "one more than cache_seqlens")
    is_possible = max_seqlen_q is None or 0 <= max_seqlen_q < 2**31
    checks.require(is_possible, _OP, "max_seqlen_q", "be from 0 to 2^31 - 1, or None", max_seqlen_q)
    checks.require(layout == "bshd", _OP, "layout", "be 'bshd' with cu_seqlens_q", layout)
    checks.require(key_new is None, _OP, "key_new", "be None with cu_seqlens_q (write the cache before)", "a tensor")
    checks.require(rotary is None, _OP, "rotary", "be None with cu_seqlens_q (apply rope before)", "a table")
    checks.require(num_splits is None, _OP, "num_splits", "be None with cu_seqlens_q", num_splits)


def _check_vectors(
    query: Tensor,
    batch: int,
    cache: _Cache,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> None:
    heads, page_table = query.shape[2], cache.page_table
    vectors = {"cache_seqlens": cache.seqlens, "cache_batch_idx": cache.batch_idx, "cache_leftpad": cache.leftpad}
    checks.same_device(_OP, "query", query, **vectors, page_table=page_table, alibi_slopes=alibi_slopes, sinks=sinks)
    for name, x in {**vectors, "page_table": page_table}.items():
        if x is None:
            continue
        checks.one_of(_OP, f"{name}.dtype", x.dtype, (torch.int32, torch.int64))
        if name != "page_table":
            checks.shape(_OP, name, x, (batch,), "batch")
    if page_table is not None:
        if page_table.dim() != 2 or page_table.shape[0] != batch:
            checks.fail(_OP, "page_table", f"have shape [{batch}, max pages]", list(page_table.shape))
        checks.require(cache.batch_idx is None, _OP, "cache_batch_idx", "be None with a page_table", "a tensor")
        checks.require(cache.keys.shape[1] >= 1, _OP, "key_cache", "have pages of at least 1 row", 0)
    elif cache.batch_idx is None:
        entries = cache.keys.shape[0]
        if entries < batch:
            checks.fail(_OP, "key_cache", f"have {batch} entries (batch)", entries)
    if alibi_slopes is not None:
        expected = (heads,) if alibi_slopes.dim() == 1 else (batch, heads)
        checks.shape(_OP, "alibi_slopes", alibi_slopes, expected, "heads, or batch and heads")
    checks.shape(_OP, "sinks", sinks, (heads,), "heads")
    for name, vector in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if vector is not None and not vector.is_floating_point():
            checks.fail(_OP, name, "be floating point", checks.name(vector.dtype))
        if vector is not None and vector.layout is not torch.strided:
            checks.fail_stride(_OP, name, vector)
