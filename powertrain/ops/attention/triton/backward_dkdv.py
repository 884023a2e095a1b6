"""dk and dv: one program per block of keys, over the queries that see them and the query heads that share them.

triton/backward.py has the formulas.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.attention.operands import Operand, Operands
from powertrain.ops.attention.triton.launch_arguments import document_ranges, plan_key, strides, swizzle
from powertrain.ops.attention.triton.plans import dkdv_parts, plan_dkdv
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
from powertrain.ops.attention.triton.sequences import find_sequence, next_sequence_with, sequence_span, tile_coords
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
from powertrain.runtime.launch import kernel


@triton.jit
def _add_dkdv(
    dk, dv, begin, end, k, v, q_rows, do_rows, k_rows, v_rows, first, j, offset, rows_ptr, size, mods, keep_scale,
    FEATURES: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, P_QK: tl.constexpr, P_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, FMA: tl.constexpr, PRECISION: tl.constexpr,
    NEED_DK: tl.constexpr, NEED_DV: tl.constexpr, MASKED: tl.constexpr, VARLEN: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """Add queries begin to end of one head, in blocks, to dk and dv of the keys j [BLOCK_N, 1] from `first` on."""
    for start in range(begin, end, BLOCK_M):
        i = start + tl.arange(0, BLOCK_M)
        q = load_tile(q_rows, start, D_QK, P_QK, BLOCK_M, TMA, True)  # tile of [BLOCK_M, D_QK]
        if not LATE:
            lse = row_values(rows_ptr, i, mods.q_len, float("inf"), VARLEN)[None, :]  # [1, BLOCK_M]
        if FMA:
            product = dot_rows_fma(k_rows, first, q_rows, start, D_QK, P_QK, BLOCK_N, BLOCK_M)  # [BLOCK_N, BLOCK_M]
        else:
            product = dot_rows(k, q, PRECISION)  # [BLOCK_N, BLOCK_M]
        do = load_tile(do_rows, start, D_V, P_V, BLOCK_M, TMA, True)  # tile of [BLOCK_M, D_V]
        # both products before the arithmetic, which then runs beside them: 1.85 ms against 1.93 at D128 on an H200
        if NEED_DK:
            if FMA:
                dp = dot_rows_fma(v_rows, first, do_rows, start, D_V, P_V, BLOCK_N, BLOCK_M)  # [BLOCK_N, BLOCK_M]
            else:
                dp = dot_rows(v, do, PRECISION)  # [BLOCK_N, BLOCK_M]
        if LATE:  # loaded after the products, lse holds no registers during them
            lse = row_values(rows_ptr, i, mods.q_len, float("inf"), VARLEN)[None, :]  # [1, BLOCK_M]
        delta = row_values(rows_ptr + size, i, mods.q_len, 0.0, VARLEN)[None, :]  # [1, BLOCK_M]
        i = i[None, :]
        weights, t = recomputed_weights(
            product, start, first, i, j, i + offset, start + offset, i, lse, mods, FEATURES, MASKED, False, True
        )  # fmt: skip
        dropped = weights
        if FEATURES.has_dropout:
            keep = tl.trans(keep_tile(mods.dropout, tl.trans(i), first, BLOCK_M, BLOCK_N))  # [BLOCK_N, BLOCK_M]
            dropped = tl.where(keep, weights * keep_scale, 0.0)
            if NEED_DK:
                dp = tl.where(keep, dp * keep_scale, 0.0)
        if NEED_DV:
            dv = add_product(dv, dropped, do, PRECISION, FMA)  # tile of [BLOCK_N, D_V]
        if NEED_DK:
            ds = weights * (dp - delta)
            if FEATURES.has_softcap:
                ds *= 1.0 - t * t
            dk = add_product(dk, ds, q, PRECISION, FMA)  # tile of [BLOCK_N, D_QK]
    return dk, dv


@triton.jit
def _add_sequence(
    dk, dv, b, first, kv, first_repeat, q_ptr, k_ptr, v_ptr, do_ptr, rows_ptr, bias_ptr, slopes_ptr, prefix_ptr,
    qdoc_ptr, kdoc_ptr, krange_ptr, q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr, seed_ptr,
    batch, queries, keys, heads, num_q_per_kv, q_strides, k_strides, v_strides, do_strides,
    head_of_kv, head_of_repeat, bias_strides, slopes_stride_b,
    scale, softcap, left, right, chunk, threshold, keep_scale, size, row_stride,
    FEATURES: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, P_QK: tl.constexpr, P_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, FMA: tl.constexpr, PRECISION: tl.constexpr,
    SHARED: tl.constexpr, LATE: tl.constexpr, NEED_DK: tl.constexpr, NEED_DV: tl.constexpr,
):  # fmt: skip
    """Add the queries of sequence b that see its keys from key `first` on to dk and dv."""
    k_start, k_len, _ = sequence_span(k_starts_ptr, k_used_ptr, b, batch, keys)
    q_start, q_len, _ = sequence_span(q_starts_ptr, q_used_ptr, b, batch, queries)
    b64, kv64, q64, k64 = to_int64(b), to_int64(kv), to_int64(q_start), to_int64(k_start)
    storage = b64  # the batch entry in memory: packed sequences share one
    if k_starts_ptr is not None:
        storage = storage * 0
    r64 = to_int64(first_repeat)
    k_base = k_ptr + storage * k_strides.b + k64 * k_strides.s + kv64 * k_strides.h + r64 * k_strides.r
    v_base = v_ptr + storage * v_strides.b + k64 * v_strides.s + kv64 * v_strides.h + r64 * v_strides.r
    k_rows = tiled_rows(k_base, k_len, k_strides.s, D_QK, P_QK, BLOCK_N, TMA)
    v_rows = tiled_rows(v_base, k_len, v_strides.s, D_V, P_V, BLOCK_N, TMA)
    k, v = k_rows.handles, v_rows.handles
    if not FMA:
        k = load_tile(k_rows, first, D_QK, P_QK, BLOCK_N, TMA, True)  # tile of [BLOCK_N, D_QK]
        if NEED_DK:
            v = load_tile(v_rows, first, D_V, P_V, BLOCK_N, TMA, True)  # tile of [BLOCK_N, D_V]

    j = (first + tl.arange(0, BLOCK_N))[:, None]
    offset = q_len * 0  # of a query's position from its index
    if FEATURES.bottom_right:
        offset = k_len - q_len
    limits = Limits(left, right, chunk, prefix_of(prefix_ptr, b, batch))
    begin, end = query_span(first, tl.minimum(first + BLOCK_N, k_len) - 1, q_len, offset, limits, FEATURES, BLOCK_M)
    documents, low, high = documents_of(kdoc_ptr, qdoc_ptr, krange_ptr, b64, j, k_len, keys, queries, q_len)
    if kdoc_ptr is not None:
        end = tl.minimum(end, high)
        begin = tl.minimum(tl.maximum(begin, low // BLOCK_M * BLOCK_M), end)
    end = tl.where(first < k_len, end, begin)  # no query sees keys past the sequence: their gradients are zeros
    score_factors = score_scale(scale, softcap, FEATURES)
    MASKED: tl.constexpr = FEATURES.has_left or FEATURES.has_right or FEATURES.has_chunk or FEATURES.has_documents
    # without SHARED there is no loop over heads: the compiler makes worse code of a loop of one iteration
    if SHARED:
        for repeat in range(0, num_q_per_kv):
            dk, dv = _add_head(
                dk, dv, begin, end, k, v, k_rows, v_rows, first, j, q_len, k_len, offset, b, b64, kv, kv64,
                first_repeat + repeat, q64, storage, q_ptr, do_ptr, rows_ptr, bias_ptr, slopes_ptr, seed_ptr, batch,
                queries, keys, heads, q_strides, do_strides, head_of_kv, head_of_repeat, bias_strides, slopes_stride_b,
                size, row_stride, limits, score_factors, documents, threshold, keep_scale, FEATURES, D_QK, D_V, P_QK,
                P_V, BLOCK_M, BLOCK_N, TMA, FMA, PRECISION, NEED_DK, NEED_DV, MASKED, k_starts_ptr is not None, LATE,
            )  # fmt: skip
    else:
        dk, dv = _add_head(
            dk, dv, begin, end, k, v, k_rows, v_rows, first, j, q_len, k_len, offset, b, b64, kv, kv64,
            first_repeat, q64, storage, q_ptr, do_ptr, rows_ptr, bias_ptr, slopes_ptr, seed_ptr, batch,
            queries, keys, heads, q_strides, do_strides, head_of_kv, head_of_repeat, bias_strides, slopes_stride_b,
            size, row_stride, limits, score_factors, documents, threshold, keep_scale, FEATURES, D_QK, D_V, P_QK,
            P_V, BLOCK_M, BLOCK_N, TMA, FMA, PRECISION, NEED_DK, NEED_DV, MASKED, k_starts_ptr is not None, LATE,
        )  # fmt: skip
    return dk, dv


@triton.jit
def _add_head(
    dk, dv, begin, end, k, v, k_rows, v_rows, first, j, q_len, k_len, offset, b, b64, kv, kv64, repeat, q64, storage,
    q_ptr, do_ptr, rows_ptr, bias_ptr, slopes_ptr, seed_ptr, batch, queries, keys, heads, q_strides, do_strides,
    head_of_kv, head_of_repeat, bias_strides, slopes_stride_b, size, row_stride, limits, score_factors, documents,
    threshold, keep_scale, FEATURES: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, P_QK: tl.constexpr,
    P_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, FMA: tl.constexpr,
    PRECISION: tl.constexpr, NEED_DK: tl.constexpr, NEED_DV: tl.constexpr, MASKED: tl.constexpr, VARLEN: tl.constexpr,
    LATE: tl.constexpr,
):  # fmt: skip
    """Add blocks of queries begin to end of one head to dk and dv."""
    r64 = to_int64(repeat)
    head = kv * head_of_kv + repeat * head_of_repeat
    at = (b64 * heads + head) * row_stride
    if VARLEN:
        at = to_int64(head) * row_stride + q64
    bias = bias_of(
        bias_ptr, slopes_ptr, b64, head, bias_strides, slopes_stride_b, batch, queries, keys, FEATURES, BLOCK_M, BLOCK_N
    )
    dropout = Dropout(seed_ptr, b * heads + head, threshold)
    mods = ScoreMods(score_factors, limits, bias, documents, dropout, q_len, k_len)
    q_base = q_ptr + storage * q_strides.b + q64 * q_strides.s + kv64 * q_strides.h + r64 * q_strides.r
    do_base = do_ptr + storage * do_strides.b + q64 * do_strides.s + kv64 * do_strides.h + r64 * do_strides.r
    q_rows = tiled_rows(q_base, q_len, q_strides.s, D_QK, P_QK, BLOCK_M, TMA)
    do_rows = tiled_rows(do_base, q_len, do_strides.s, D_V, P_V, BLOCK_M, TMA)
    return _add_dkdv(
        dk, dv, begin, end, k, v, q_rows, do_rows, k_rows, v_rows, first, j, offset, rows_ptr + at, size, mods,
        keep_scale, FEATURES, D_QK, D_V, P_QK, P_V, BLOCK_M, BLOCK_N, TMA, FMA, PRECISION, NEED_DK, NEED_DV, MASKED,
        VARLEN, LATE,
    )  # fmt: skip


@kernel(aligned=("row_stride",))
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
    SHARED: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys. SHARED: of all query heads of a kv head, else of one. LATE: see _add_dkdv."""
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
        block = blocks - 1 - block  # first keys first: under a causal mask most queries see them
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
    q_strides = Strides(stride_qb, stride_qs, stride_qh, stride_qr)
    k_strides = Strides(stride_kb, stride_ks, stride_kh, stride_kr)
    v_strides = Strides(stride_vb, stride_vs, stride_vh, stride_vr)
    do_strides = Strides(stride_dob, stride_dos, stride_doh, stride_dor)
    bias_strides = BiasStrides(bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k)
    NEED_DK: tl.constexpr = dk_ptr is not None
    NEED_DV: tl.constexpr = dv_ptr is not None
    dk = zeros_tile(BLOCK_N, P_QK)
    dv = zeros_tile(BLOCK_N, P_V)
    if segments_ptr is None:
        dk, dv = _add_sequence(
            dk, dv, b, first, kv, first_repeat, q_ptr, k_ptr, v_ptr, do_ptr, rows_ptr, bias_ptr, slopes_ptr, prefix_ptr,
            qdoc_ptr, kdoc_ptr, krange_ptr, q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr, seed_ptr,
            batch, queries, keys, heads, num_q_per_kv, q_strides, k_strides, v_strides, do_strides,
            head_of_kv, head_of_repeat, bias_strides, slopes_stride_b,
            scale, softcap, left, right, chunk, threshold, keep_scale, size, row_stride, FEATURES, D_QK, D_V, P_QK, P_V,
            BLOCK_M, BLOCK_N, TMA, FMA, PRECISION, SHARED, LATE, NEED_DK, NEED_DV,
        )  # fmt: skip
    else:  # each sequence contains all keys of the segment or none
        row = k_start + first
        n = next_sequence_with(k_starts_ptr, k_used_ptr, row, b * 0, batch, keys)
        while n < batch:
            dk, dv = _add_sequence(
                dk, dv, n, row - tl.load(k_starts_ptr + n), kv, first_repeat, q_ptr, k_ptr, v_ptr, do_ptr, rows_ptr,
                bias_ptr, slopes_ptr, prefix_ptr, qdoc_ptr, kdoc_ptr, krange_ptr, q_starts_ptr, k_starts_ptr,
                q_used_ptr, k_used_ptr, seed_ptr, batch, queries, keys, heads, num_q_per_kv, q_strides, k_strides,
                v_strides, do_strides, head_of_kv, head_of_repeat, bias_strides, slopes_stride_b,
                scale, softcap, left, right, chunk, threshold, keep_scale, size, row_stride, FEATURES, D_QK, D_V, P_QK,
                P_V, BLOCK_M, BLOCK_N, TMA, FMA, PRECISION, SHARED, LATE, NEED_DK, NEED_DV,
            )  # fmt: skip
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
    operands: Operands, shared: dict[str, Any], use_tma: bool, dk: Tensor | None, dv: Tensor | None
) -> None:
    """`shared`: the arguments that all backward kernels take."""
    args, heads, target = operands.args, operands.heads, operands.target
    key = operands.k.tensor
    programs = operands.storage * heads.kv * (1 if heads.shared else heads.q_per_kv)
    segments = None
    if args.unordered and operands.batch > 0:
        assert args.key_starts is not None and args.key_used is not None
        segments = _segments(args.key_starts, args.key_used, operands.keys)
        use_tma = False  # the keys of one program are those of several sequences, each with its own descriptor
    in_blocks = operands if segments is None else operands._replace(batch=segments.shape[0] - 1)
    queries_bytes = operands.queries * (operands.d_qk + operands.d_v) * key.element_size()
    ranges, absent = document_ranges(args.key_documents, args.query_documents), Operand(key, 0, 0, 0, 0)
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
