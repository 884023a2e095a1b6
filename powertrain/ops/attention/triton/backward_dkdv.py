"""dk and dv: one program per block of keys, over the queries that see them and the query heads that share them.

triton/backward.py has the formulas.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.attention.operands import Operand, Operands
from powertrain.ops.attention.triton.launch_arguments import plan_key, strides, swizzle
from powertrain.ops.attention.triton.plans import dkdv_parts, plan_dkdv
from powertrain.ops.attention.triton.read_mask import visible_ranges
from powertrain.ops.attention.triton.scores import (
    BiasStrides,
    Dropout,
    Limits,
    ScoreMods,
    bias_of,
    documents_of,
    keep_tile,
    prefix_of,
    query_span,
    recomputed_weights,
    row_values,
    score_scale,
)
from powertrain.ops.attention.triton.sequences import (
    SMALL,
    find_sequence,
    next_sequence_with,
    sequence_span,
    tile_coords,
)
from powertrain.ops.attention.triton.tiles import (
    Strides,
    TiledRows,
    add_product,
    dot_rows,
    dot_rows_fma,
    load_tile,
    scale_tile,
    store_tile,
    tiled_rows,
    to_int64,
    zeros_tile,
)
from powertrain.ops.early_start import await_kernel_before
from powertrain.runtime.launch import kernel


class DkdvConfig(NamedTuple):
    """The constants of a launch, by name: the constexpr argument CONFIG of the device functions."""

    features: Any
    d_qk: Any
    d_v: Any
    p_qk: Any  # pieces of the head dims
    p_v: Any
    block_m: Any
    block_n: Any
    tma: Any
    fma: Any
    precision: Any
    shared: Any  # a program adds up all query heads of its KV head
    late: Any  # lse is loaded after the products
    need_dk: Any
    need_dv: Any
    varlen: Any


class QueryTensors(NamedTuple):
    """Of the queries' side. `rows` holds the LSE by head, and delta `size` elements further on."""

    q: Any
    do: Any
    rows: Any
    q_strides: Any  # Strides
    do_strides: Any
    size: Any
    row_stride: Any  # between heads of `rows`


class KeyTensors(NamedTuple):
    k: Any
    v: Any
    k_strides: Any
    v_strides: Any


class Lengths(NamedTuple):
    """Starts of packed sequences, and the positions that they use; None where there are none."""

    q_starts: Any
    k_starts: Any
    q_used: Any
    k_used: Any


class ScoreTensors(NamedTuple):
    """What changes scores beside the window; None where it is not asked for."""

    bias: Any
    bias_strides: Any
    slopes: Any
    slopes_stride_b: Any
    prefix: Any
    qdoc: Any
    kdoc: Any
    krange: Any
    seed: Any


class ScoreNumbers(NamedTuple):
    scale: Any
    softcap: Any
    left: Any
    right: Any
    chunk: Any
    threshold: Any  # of dropout
    keep_scale: Any


class Sizes(NamedTuple):
    """Head `kv * head_of_kv + repeat * head_of_repeat` is query head `repeat` of KV head `kv`."""

    batch: Any
    queries: Any
    keys: Any
    heads: Any
    num_q_per_kv: Any
    head_of_kv: Any
    head_of_repeat: Any


class KeyTile(NamedTuple):
    """A program's keys and values, from key `first` on."""

    k: Any  # tile of [BLOCK_N, D_QK]; without tensor cores its pointer, as below
    v: Any  # tile of [BLOCK_N, D_V]
    k_rows: Any
    v_rows: Any
    first: Any
    j: Any  # [BLOCK_N, 1]


class Sequence(NamedTuple):
    """Where a sequence's queries lie."""

    b: Any
    storage: Any  # the batch entry in memory, int64: packed sequences share one
    q_start: Any  # int64
    q_len: Any
    k_len: Any
    offset: Any  # of a query's position from its index
    begin: Any  # of the queries that see the keys of the tile
    end: Any


@triton.jit
def _add_dkdv(dk, dv, tile, sequence, q_rows, do_rows, rows_ptr, size, mods, keep_scale, CONFIG: tl.constexpr):
    """Add the sequence's queries of one head, in blocks, to dk and dv of the tile's keys."""
    FEATURES: tl.constexpr = CONFIG.features
    D_QK: tl.constexpr = CONFIG.d_qk
    D_V: tl.constexpr = CONFIG.d_v
    P_QK: tl.constexpr = CONFIG.p_qk
    P_V: tl.constexpr = CONFIG.p_v
    BLOCK_M: tl.constexpr = CONFIG.block_m
    BLOCK_N: tl.constexpr = CONFIG.block_n
    FMA: tl.constexpr = CONFIG.fma
    MASKED: tl.constexpr = FEATURES.has_left or FEATURES.has_right or FEATURES.has_chunk or FEATURES.has_ranges
    for start in range(sequence.begin, sequence.end, BLOCK_M):
        i = start + tl.arange(0, BLOCK_M)
        q = load_tile(q_rows, start, D_QK, P_QK, BLOCK_M, CONFIG.tma, True)  # tile of [BLOCK_M, D_QK]
        if not CONFIG.late:
            lse = row_values(rows_ptr, i, mods.q_len, float("inf"), CONFIG.varlen)[None, :]  # [1, BLOCK_M]
        if FMA:
            # [BLOCK_N, BLOCK_M]
            product = dot_rows_fma(tile.k_rows, tile.first, q_rows, start, D_QK, P_QK, BLOCK_N, BLOCK_M)
        else:
            product = dot_rows(tile.k, q, CONFIG.precision)  # [BLOCK_N, BLOCK_M]
        do = load_tile(do_rows, start, D_V, P_V, BLOCK_M, CONFIG.tma, True)  # tile of [BLOCK_M, D_V]
        # both products before the arithmetic, which then runs beside them: 1.85 ms against 1.93 at D128 on an H200
        if CONFIG.need_dk:
            if FMA:
                # [BLOCK_N, BLOCK_M]
                dp = dot_rows_fma(tile.v_rows, tile.first, do_rows, start, D_V, P_V, BLOCK_N, BLOCK_M)
            else:
                dp = dot_rows(tile.v, do, CONFIG.precision)  # [BLOCK_N, BLOCK_M]
        # loaded after the products, lse holds no registers during them
        if CONFIG.late:
            lse = row_values(rows_ptr, i, mods.q_len, float("inf"), CONFIG.varlen)[None, :]  # [1, BLOCK_M]
        delta = row_values(rows_ptr + size, i, mods.q_len, 0.0, CONFIG.varlen)[None, :]  # [1, BLOCK_M]
        i = i[None, :]
        weights, t = recomputed_weights(
            product, start, tile.first, i, tile.j, i + sequence.offset, start + sequence.offset, i, lse, mods,
            FEATURES, MASKED, False, True,
        )  # fmt: skip
        dropped = weights
        if FEATURES.has_dropout:
            keep = keep_tile(mods.dropout, tl.trans(i), tile.first, BLOCK_M, BLOCK_N)
            keep = tl.trans(keep)  # [BLOCK_N, BLOCK_M]
            dropped = tl.where(keep, weights * keep_scale, 0.0)
            if CONFIG.need_dk:
                dp = tl.where(keep, dp * keep_scale, 0.0)
        if CONFIG.need_dv:
            dv = add_product(dv, dropped, do, CONFIG.precision, FMA)  # tile of [BLOCK_N, D_V]
        if CONFIG.need_dk:
            ds = weights * (dp - delta)
            if FEATURES.has_softcap:
                ds *= 1.0 - t * t
            dk = add_product(dk, ds, q, CONFIG.precision, FMA)  # tile of [BLOCK_N, D_QK]
    return dk, dv


@triton.jit
def _add_sequence(
    dk, dv, b, first, kv, first_repeat, of_queries, of_keys, lengths, of_scores, numbers, sizes, CONFIG: tl.constexpr
):
    """Add the queries of sequence b that see its keys from key `first` on to dk and dv."""
    FEATURES: tl.constexpr = CONFIG.features
    BLOCK_M: tl.constexpr = CONFIG.block_m
    BLOCK_N: tl.constexpr = CONFIG.block_n
    k_start, k_len, _ = sequence_span(lengths.k_starts, lengths.k_used, b, sizes.batch, sizes.keys)
    q_start, q_len, _ = sequence_span(lengths.q_starts, lengths.q_used, b, sizes.batch, sizes.queries)
    b64, kv64, q64, k64 = to_int64(b), to_int64(kv), to_int64(q_start), to_int64(k_start)
    storage = b64
    if CONFIG.varlen:
        storage = storage * 0
    r64 = to_int64(first_repeat)
    by_k, by_v = of_keys.k_strides, of_keys.v_strides
    k_base = of_keys.k + storage * by_k.b + k64 * by_k.s + kv64 * by_k.h + r64 * by_k.r
    v_base = of_keys.v + storage * by_v.b + k64 * by_v.s + kv64 * by_v.h + r64 * by_v.r
    k_rows = tiled_rows(k_base, k_len, by_k.s, CONFIG.d_qk, CONFIG.p_qk, BLOCK_N, CONFIG.tma)
    v_rows = tiled_rows(v_base, k_len, by_v.s, CONFIG.d_v, CONFIG.p_v, BLOCK_N, CONFIG.tma)
    k, v = k_rows.handles, v_rows.handles
    if not CONFIG.fma:
        k = load_tile(k_rows, first, CONFIG.d_qk, CONFIG.p_qk, BLOCK_N, CONFIG.tma, True)  # tile of [BLOCK_N, D_QK]
        if CONFIG.need_dk:
            v = load_tile(v_rows, first, CONFIG.d_v, CONFIG.p_v, BLOCK_N, CONFIG.tma, True)  # tile of [BLOCK_N, D_V]

    j = (first + tl.arange(0, BLOCK_N))[:, None]
    offset = q_len * 0
    if FEATURES.bottom_right:
        offset = k_len - q_len
    limits = Limits(numbers.left, numbers.right, numbers.chunk, prefix_of(of_scores.prefix, b, sizes.batch))
    begin, end = query_span(first, tl.minimum(first + BLOCK_N, k_len) - 1, q_len, offset, limits, FEATURES, BLOCK_M)
    documents = documents_of(of_scores.kdoc, of_scores.qdoc, b64, j, k_len, sizes.keys, sizes.queries, q_len)
    if of_scores.krange is not None:
        low, high, _, _ = visible_ranges(of_scores.krange, b64, first, sizes.keys, BLOCK_N)
        end = tl.minimum(end, high)
        begin = tl.minimum(tl.maximum(begin, low // BLOCK_M * BLOCK_M), end)
    # no query sees keys past the sequence: their gradients are zeros
    end = tl.where(first < k_len, end, begin)
    score_factors = score_scale(numbers.scale, numbers.softcap, FEATURES)
    tile = KeyTile(k, v, k_rows, v_rows, first, j)
    sequence = Sequence(b, storage, q64, q_len, k_len, offset, begin, end)
    # without `shared` there is no loop over heads: the compiler makes worse code of a loop of one iteration
    if CONFIG.shared:
        for repeat in range(0, sizes.num_q_per_kv):
            dk, dv = _add_head(
                dk, dv, kv, first_repeat + repeat, tile, sequence, of_queries, of_scores, numbers, sizes, limits,
                score_factors, documents, CONFIG,
            )  # fmt: skip
    else:
        dk, dv = _add_head(
            dk, dv, kv, first_repeat, tile, sequence, of_queries, of_scores, numbers, sizes, limits, score_factors,
            documents, CONFIG,
        )  # fmt: skip
    return dk, dv


@triton.jit
def _add_head(
    dk, dv, kv, repeat, tile, sequence, of_queries, of_scores, numbers, sizes, limits, score_factors, documents,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """Add the sequence's queries of one head to dk and dv."""
    BLOCK_M: tl.constexpr = CONFIG.block_m
    b64, kv64, r64 = to_int64(sequence.b), to_int64(kv), to_int64(repeat)
    storage, q64 = sequence.storage, sequence.q_start
    head = kv * sizes.head_of_kv + repeat * sizes.head_of_repeat
    at = (b64 * sizes.heads + head) * of_queries.row_stride
    if CONFIG.varlen:
        at = to_int64(head) * of_queries.row_stride + q64
    bias = bias_of(
        of_scores.bias, of_scores.slopes, b64, head, of_scores.bias_strides, of_scores.slopes_stride_b, sizes.batch,
        sizes.queries, sizes.keys, CONFIG.features, BLOCK_M, CONFIG.block_n,
    )  # fmt: skip
    dropout = Dropout(of_scores.seed, sequence.b * sizes.heads + head, numbers.threshold)
    mods = ScoreMods(score_factors, limits, bias, documents, dropout, sequence.q_len, sequence.k_len)
    by_q, by_do = of_queries.q_strides, of_queries.do_strides
    q_base = of_queries.q + storage * by_q.b + q64 * by_q.s + kv64 * by_q.h + r64 * by_q.r
    do_base = of_queries.do + storage * by_do.b + q64 * by_do.s + kv64 * by_do.h + r64 * by_do.r
    q_rows = tiled_rows(q_base, sequence.q_len, by_q.s, CONFIG.d_qk, CONFIG.p_qk, BLOCK_M, CONFIG.tma)
    do_rows = tiled_rows(do_base, sequence.q_len, by_do.s, CONFIG.d_v, CONFIG.p_v, BLOCK_M, CONFIG.tma)
    return _add_dkdv(
        dk, dv, tile, sequence, q_rows, do_rows, of_queries.rows + at, of_queries.size, mods, numbers.keep_scale, CONFIG
    )


@kernel(aligned=("row_stride",), unaligned=SMALL)
def _attention_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, rows_ptr, bias_ptr, slopes_ptr, prefix_ptr, qdoc_ptr,
    kdoc_ptr, krange_ptr, q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr, seed_ptr, segments_ptr,
    batch, queries, keys, kv_heads, num_q_per_kv, blocks, swizzle, segments,
    stride_qb, stride_qs, stride_qh, stride_qr, stride_kb, stride_ks, stride_kh, stride_kr,
    stride_vb, stride_vs, stride_vh, stride_vr, stride_dob, stride_dos, stride_doh, stride_dor,
    stride_dkb, stride_dks, stride_dkh, stride_dkr, stride_dvb, stride_dvs, stride_dvh, stride_dvr,
    head_of_kv, head_of_repeat, bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k, slopes_stride_b,
    scale, softcap, left, right, chunk, threshold, keep_scale, size, row_stride,
    FEATURES: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, P_QK: tl.constexpr, P_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, FMA: tl.constexpr, PRECISION: tl.constexpr,
    SHARED: tl.constexpr, LATE: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys. SHARED: of all query heads of a KV head, else of one."""
    await_kernel_before(STARTS_EARLY)
    heads = kv_heads * num_q_per_kv
    outer = 1 if SHARED else num_q_per_kv
    if k_starts_ptr is not None:
        slot, index = tile_coords(tl.program_id(0), blocks, kv_heads * outer, swizzle)
        slot = blocks - 1 - slot
        if segments_ptr is not None:
            b, block = find_sequence(segments_ptr, segments, slot, BLOCK_N)
        else:
            b, block = find_sequence(k_starts_ptr, batch, slot, BLOCK_N)
    else:
        block, index = tile_coords(tl.program_id(0), blocks, batch * kv_heads * outer, swizzle)
        # first keys first: under a causal mask most queries see them
        block = blocks - 1 - block
        b = index // (kv_heads * outer)
        index = index % (kv_heads * outer)
    kv, first_repeat = index // outer, index % outer
    if segments_ptr is not None:
        k_start, _, k_capacity = sequence_span(segments_ptr, None, b, segments, keys)
        k_len = k_capacity
    else:
        k_start, k_len, k_capacity = sequence_span(k_starts_ptr, k_used_ptr, b, batch, keys)
    first = block * BLOCK_N
    if k_starts_ptr is not None:
        if first >= k_capacity:
            return
    CONFIG: tl.constexpr = DkdvConfig(
        FEATURES, D_QK, D_V, P_QK, P_V, BLOCK_M, BLOCK_N, TMA, FMA, PRECISION, SHARED, LATE, dk_ptr is not None,
        dv_ptr is not None, k_starts_ptr is not None,
    )  # fmt: skip
    q_strides = Strides(stride_qb, stride_qs, stride_qh, stride_qr)
    do_strides = Strides(stride_dob, stride_dos, stride_doh, stride_dor)
    k_strides = Strides(stride_kb, stride_ks, stride_kh, stride_kr)
    v_strides = Strides(stride_vb, stride_vs, stride_vh, stride_vr)
    bias_strides = BiasStrides(bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k)
    of_queries = QueryTensors(q_ptr, do_ptr, rows_ptr, q_strides, do_strides, size, row_stride)
    of_keys = KeyTensors(k_ptr, v_ptr, k_strides, v_strides)
    lengths = Lengths(q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr)
    of_scores = ScoreTensors(
        bias_ptr, bias_strides, slopes_ptr, slopes_stride_b, prefix_ptr, qdoc_ptr, kdoc_ptr, krange_ptr, seed_ptr
    )
    numbers = ScoreNumbers(scale, softcap, left, right, chunk, threshold, keep_scale)
    sizes = Sizes(batch, queries, keys, heads, num_q_per_kv, head_of_kv, head_of_repeat)
    dk = zeros_tile(BLOCK_N, P_QK)
    dv = zeros_tile(BLOCK_N, P_V)
    if segments_ptr is None:
        dk, dv = _add_sequence(
            dk, dv, b, first, kv, first_repeat, of_queries, of_keys, lengths, of_scores, numbers, sizes, CONFIG
        )
    else:  # each sequence contains all keys of the segment or none
        row = k_start + first
        n = next_sequence_with(k_starts_ptr, k_used_ptr, row, b * 0, batch, keys)
        while n < batch:
            first_key = row - tl.load(k_starts_ptr + n)  # scalar
            dk, dv = _add_sequence(
                dk, dv, n, first_key, kv, first_repeat, of_queries, of_keys, lengths, of_scores, numbers, sizes, CONFIG
            )
            n = next_sequence_with(k_starts_ptr, k_used_ptr, row, n + 1, batch, keys)
    kv64, k64, r64 = to_int64(kv), to_int64(k_start), to_int64(first_repeat)
    storage = to_int64(b)
    if k_starts_ptr is not None:
        storage = storage * 0
    if dk_ptr is not None:
        base = dk_ptr + storage * stride_dkb + k64 * stride_dks + kv64 * stride_dkh + r64 * stride_dkr
        dk_rows = TiledRows((base,), k_len, stride_dks)
        store_tile(dk_rows, scale_tile(dk, scale), first, k_capacity, D_QK, P_QK, BLOCK_N)  # tile of [BLOCK_N, D_QK]
    if dv_ptr is not None:
        base = dv_ptr + storage * stride_dvb + k64 * stride_dvs + kv64 * stride_dvh + r64 * stride_dvr
        dv_rows = TiledRows((base,), k_len, stride_dvs)
        store_tile(dv_rows, dv, first, k_capacity, D_V, P_V, BLOCK_N)  # tile of [BLOCK_N, D_V]


def launch_dkdv(
    operands: Operands, shared: dict[str, Any], ranges: Tensor | None, use_tma: bool,
    dk: Tensor | None, dv: Tensor | None,
):  # fmt: skip
    """`shared`: the arguments that all backward kernels take."""
    args, heads, target = operands.args, operands.heads, operands.target
    key = operands.k.tensor
    programs = operands.storage * heads.kv * (1 if heads.shared else heads.q_per_kv)
    segments = None
    if args.unordered and operands.batch > 0:
        assert args.key_starts is not None and args.key_used is not None
        segments = _segments(args.key_starts, args.key_used, operands.keys)
        # the keys of one program are those of several sequences, each with its own descriptor
        use_tma = False
    in_blocks = operands if segments is None else operands._replace(batch=segments.shape[0] - 1)
    queries_bytes = operands.queries * (operands.d_qk + operands.d_v) * key.element_size()
    absent = Operand(key, 0, 0, 0, 0)
    for part in dkdv_parts(operands.d_qk, operands.d_v, dk is not None, dv is not None, target):
        plan = plan_dkdv(*plan_key(operands), use_tma, shared["FMA"], part, target)
        blocks = in_blocks.key_blocks(plan.block_n)
        results = {"dk": dk if part != "dv" else None, "dv": dv if part != "dk" else None}
        of_results = strides(**{n: absent if x is None else operands.like_key(x) for n, x in results.items()})
        _attention_dkdv_kernel[(blocks * programs,)](
            **(shared | of_results | {f"{name}_ptr": x for name, x in results.items()}), **plan.launch_options(),
            krange_ptr=ranges, segments_ptr=segments, segments=in_blocks.batch, kv_heads=heads.kv, blocks=blocks,
            swizzle=swizzle(queries_bytes, 1, target), SHARED=heads.shared, LATE=plan.late, TMA=use_tma and plan.tma,
        )  # fmt: skip


def _segments(starts: Tensor, used: Tensor, keys: int) -> Tensor:
    """Rows where sequences of keys, in any order, begin or end, [2 * batch] int32 ascending: between two of these, each
    sequence has all keys or none."""
    return torch.cat([starts[:-1], starts[:-1] + used]).clamp(0, keys).sort().values
