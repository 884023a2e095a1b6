"""The universal backward kernels: two passes without atomics, and so with the same bits every time.

    p     = 2^(s - lse)                       recomputed, as forward has it
    dv_j  = sum_i keep_ij p_ij do_i / (1 - dropout)
    dp_ij = keep_ij do_i v_j / (1 - dropout)
    ds_ij = p_ij (dp_ij - delta_i) (1 - tanh_ij^2 with a softcap)      delta_i = o_i do_i - dlse_i
    dq_i  = scale sum_j ds_ij k_j;   dk_j = scale sum_i ds_ij q_i
    dbias = ds before the softcap's factor, summed over the dims that were broadcast

`dkdv`: a program per block of keys runs over the queries that see it, and over the query heads that share it. `dq`: a
program per block of queries, over keys as in forward. `dbias`: a program per tile of the bias. Rows ahead of and behind
a sequence get zeros. Where sequences of keys lie in any order and may share keys, `dkdv` has a program per block of a
segment, which runs over all sequences that have it; segments are cut where a sequence begins or ends.

Source: Dao 2023, arXiv:2307.08691; the tiles were measured here (triton/backend.py).
"""

import triton
import triton.language as tl

from powertrain.ops.attention.triton.forward import place
from powertrain.ops.attention.triton.tiles import (
    LOG2E,
    add_bias,
    add_product,
    bias_of,
    capped,
    documents_of,
    dot_rows,
    dot_rows_fma,
    factors,
    find_sequence,
    is_visible,
    keep_tile,
    key_span,
    load_tile,
    next_over,
    prefix_of,
    query_span,
    same_document,
    scale_tile,
    source,
    span_of,
    store_tile,
    to_int64,
    zeros_tile,
)
from powertrain.runtime.launch import kernel


@kernel(aligned=("row_stride",))
def _attention_rows_kernel(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, rows_ptr, batch, queries, kv_heads, repeats, head_of_kv, head_of_repeat, size,
    row_stride, stride_ob, stride_os, stride_oh, stride_or, stride_dob, stride_dos, stride_doh, stride_dor,
    D: tl.constexpr, P_V: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Two numbers a row for the kernels that follow: LSE in base 2 and delta, inf and 0 where a row sees nothing and
    behind the rows, up to a multiple of 128: weights there are 0, whatever ALiBi makes of their places."""
    blocks = row_stride // BLOCK_M
    block, index = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    heads = kv_heads * repeats
    b, kv, repeat = to_int64(index // heads), to_int64(index % heads // repeats), to_int64(index % repeats)
    first = block * BLOCK_M
    o_base = o_ptr + b * stride_ob + kv * stride_oh + repeat * stride_or
    do_base = do_ptr + b * stride_dob + kv * stride_doh + repeat * stride_dor
    o_src = source(o_base, queries, stride_os, D, P_V, BLOCK_M, False)
    do_src = source(do_base, queries, stride_dos, D, P_V, BLOCK_M, False)
    o = load_tile(o_src, first, queries, stride_os, D, P_V, BLOCK_M, False, True)
    do = load_tile(do_src, first, queries, stride_dos, D, P_V, BLOCK_M, False, True)
    delta = tl.zeros([BLOCK_M], tl.float32)
    for n in tl.static_range(len(P_V)):
        delta += tl.sum(o[n].to(tl.float32) * do[n].to(tl.float32), 1)
    i = first + tl.arange(0, BLOCK_M)
    head = b * heads + kv * head_of_kv + repeat * head_of_repeat
    lse = tl.load(lse_ptr + head * queries + i, mask=i < queries, other=float("-inf"))
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + head * queries + i, mask=i < queries, other=0.0)
    blind = lse == float("-inf")
    at = head * row_stride + i
    tl.store(rows_ptr + at, tl.where(blind, float("inf"), lse * LOG2E))
    tl.store(rows_ptr + size + at, tl.where(blind, 0.0, delta))


@triton.jit
def _row_values(base, i, length, behind: tl.constexpr, VARLEN: tl.constexpr):
    """Values of rows i, `behind` the sequence, where those of dense layouts are padded."""
    if VARLEN:
        values = tl.load(base + i, mask=i < length, other=behind)
    else:
        values = tl.load(base + i)
    return values


@triton.jit
def _weights(
    product, i_first, j_first, i, j, p, p_first, others, lse, rows, limits, factor, bias, documents,
    HAS: tl.constexpr, ADDS: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr, BOUNDED: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """(p, tanh with a softcap) of a tile of q k^T, either way round; rows = (queries, keys, positions of `others`).

    Rows behind the sequence need no mask: their q and do are 0 and their lse and delta finite. Nor do keys there, where
    BOUNDED is not set: what they get is not stored."""
    s, t = capped(product, factor, CAP[0], CAP[1])
    s, seen = add_bias(s, i_first, j_first, i, j, p, p_first, rows[0], rows[1], bias, ADDS, KEYS_FIRST)
    if ADDS[0] == 2:
        lse += bias[3] * (p - p_first).to(tl.float32)
    weights = tl.exp2(s - lse)
    if MASKED or ADDS[1]:
        if MASKED:
            seen = seen & is_visible(p, j, rows[1], limits, HAS, BOUNDED)
        seen = seen & same_document(documents, others, rows[2], ADDS)
        weights = tl.where(seen, weights, 0.0)
    return weights, t


@triton.jit
def _add_dkdv(
    dk, dv, begin, end, k_src, v_src, k, v, q_src, do_src, first, j, rows, offset, rows_ptr, size, limits, factor,
    bias, documents, dropout, strides, keep_scale, HAS: tl.constexpr, ADDS: tl.constexpr, CAP: tl.constexpr,
    D: tl.constexpr, P_QK: tl.constexpr, P_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TMA: tl.constexpr, FMA: tl.constexpr, PRECISION: tl.constexpr, NEED: tl.constexpr, MASKED: tl.constexpr,
    VARLEN: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """The queries begin to end of one head, in blocks, into dk and dv."""
    q_len, k_len, _ = rows
    for start in range(begin, end, BLOCK_M):
        i = start + tl.arange(0, BLOCK_M)
        q = load_tile(q_src, start, q_len, strides[0], D[0], P_QK, BLOCK_M, TMA, True)
        if not LATE:
            lse = _row_values(rows_ptr, i, q_len, float("inf"), VARLEN)[None, :]
        if FMA:
            product = dot_rows_fma(
                k_src, first, k_len, strides[1], q_src, start, q_len, strides[0], D[0], P_QK, BLOCK_N, BLOCK_M
            )
        else:
            product = dot_rows(k, q, PRECISION)
        do = load_tile(do_src, start, q_len, strides[3], D[1], P_V, BLOCK_M, TMA, True)
        if NEED[0]:  # both products before the arithmetic: 1.85 ms against 1.93 at D128 on an H200
            if FMA:
                dp = dot_rows_fma(
                    v_src, first, k_len, strides[2], do_src, start, q_len, strides[3], D[1], P_V, BLOCK_N, BLOCK_M
                )
            else:
                dp = dot_rows(v, do, PRECISION)
        if LATE:  # for registers
            lse = _row_values(rows_ptr, i, q_len, float("inf"), VARLEN)[None, :]
        delta = _row_values(rows_ptr + size, i, q_len, 0.0, VARLEN)[None, :]
        i = i[None, :]
        weights, t = _weights(
            product, start, first, i, j, i + offset, start + offset, i, lse, rows, limits, factor, bias, documents, HAS,
            ADDS, CAP, MASKED, False, True,
        )  # fmt: skip
        dropped = weights
        if ADDS[3]:
            keep = tl.trans(keep_tile(dropout, tl.trans(i), first, BLOCK_M, BLOCK_N))
            dropped = tl.where(keep, weights * keep_scale, 0.0)
            if NEED[0]:
                dp = tl.where(keep, dp * keep_scale, 0.0)
        if NEED[1]:
            dv = add_product(dv, dropped, do, PRECISION, FMA)
        if NEED[0]:
            ds = weights * (dp - delta)
            if CAP[0]:
                ds *= 1.0 - t * t
            dk = add_product(dk, ds, q, PRECISION, FMA)
    return dk, dv


@triton.jit
def _add_sequence(
    dk, dv, b, first, kv, first_repeat, q_ptr, k_ptr, v_ptr, do_ptr, rows_ptr, bias_ptr, slopes_ptr, prefix_ptr,
    qdoc_ptr, kdoc_ptr, krange_ptr, q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr, seed_ptr,
    batch, queries, keys, heads, repeats, q_strides, k_strides, v_strides, do_strides,
    head_of_kv, head_of_repeat, bias_strides, slopes_stride_b,
    scale, softcap, left, right, chunk, threshold, keep_scale, size, row_stride,
    HAS: tl.constexpr, ADDS: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, CAP: tl.constexpr, D: tl.constexpr,
    P_QK: tl.constexpr, P_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
    FMA: tl.constexpr, PRECISION: tl.constexpr, SHARED: tl.constexpr, LATE: tl.constexpr, NEED: tl.constexpr,
):  # fmt: skip
    """The queries of sequence b that see its keys from key `first` on, into dk and dv."""
    k_start, k_len, _ = span_of(k_starts_ptr, k_used_ptr, b, batch, keys)
    q_start, q_len, _ = span_of(q_starts_ptr, q_used_ptr, b, batch, queries)
    b64, kv64, q64, k64 = to_int64(b), to_int64(kv), to_int64(q_start), to_int64(k_start)
    storage = b64
    if k_starts_ptr is not None:
        storage = storage * 0
    r64 = to_int64(first_repeat)
    k_base = k_ptr + storage * k_strides[0] + k64 * k_strides[1] + kv64 * k_strides[2] + r64 * k_strides[3]
    v_base = v_ptr + storage * v_strides[0] + k64 * v_strides[1] + kv64 * v_strides[2] + r64 * v_strides[3]
    k_src = source(k_base, k_len, k_strides[1], D[0], P_QK, BLOCK_N, TMA)
    v_src = source(v_base, k_len, v_strides[1], D[1], P_V, BLOCK_N, TMA)
    k, v = k_src, v_src
    if not FMA:
        k = load_tile(k_src, first, k_len, k_strides[1], D[0], P_QK, BLOCK_N, TMA, True)
        if NEED[0]:
            v = load_tile(v_src, first, k_len, v_strides[1], D[1], P_V, BLOCK_N, TMA, True)

    j = (first + tl.arange(0, BLOCK_N))[:, None]
    offset = q_len * 0
    if BOTTOM_RIGHT:
        offset = k_len - q_len
    limits = (left, right, chunk, prefix_of(prefix_ptr, b, batch))
    begin, end = query_span(first, tl.minimum(first + BLOCK_N, k_len) - 1, q_len, offset, limits, HAS, BLOCK_M)
    documents, low, high = documents_of(kdoc_ptr, qdoc_ptr, krange_ptr, b64, j, k_len, keys, queries)
    if kdoc_ptr is not None:
        end = tl.minimum(end, high)
        begin = tl.minimum(tl.maximum(begin, low // BLOCK_M * BLOCK_M), end)
    end = tl.where(first < k_len, end, begin)  # behind the sequence: zeros
    factor = factors(scale, softcap, CAP[0])
    rows = (q_len, k_len, q_len)
    MASKED: tl.constexpr = HAS[0] or HAS[1] or HAS[2] or ADDS[2]
    strides = (q_strides[1], k_strides[1], v_strides[1], do_strides[1])
    # a loop of one turn would cost what the compiler knows of a single one
    if SHARED:
        for turn in range(0, repeats):
            dk, dv = _add_head(
                dk, dv, begin, end, k_src, v_src, k, v, first, j, rows, offset, b, b64, kv, kv64, first_repeat + turn,
                q64, storage, q_ptr, do_ptr, rows_ptr, bias_ptr, slopes_ptr, seed_ptr, batch, queries, keys, heads,
                q_strides, do_strides, head_of_kv, head_of_repeat, bias_strides, slopes_stride_b, size, row_stride,
                limits, factor, documents, threshold, strides, keep_scale, HAS, ADDS, CAP, D, P_QK, P_V, BLOCK_M,
                BLOCK_N, TMA, FMA, PRECISION, NEED, MASKED, k_starts_ptr is not None, LATE,
            )  # fmt: skip
    else:
        dk, dv = _add_head(
            dk, dv, begin, end, k_src, v_src, k, v, first, j, rows, offset, b, b64, kv, kv64, first_repeat,
            q64, storage, q_ptr, do_ptr, rows_ptr, bias_ptr, slopes_ptr, seed_ptr, batch, queries, keys, heads,
            q_strides, do_strides, head_of_kv, head_of_repeat, bias_strides, slopes_stride_b, size, row_stride,
            limits, factor, documents, threshold, strides, keep_scale, HAS, ADDS, CAP, D, P_QK, P_V, BLOCK_M,
            BLOCK_N, TMA, FMA, PRECISION, NEED, MASKED, k_starts_ptr is not None, LATE,
        )  # fmt: skip
    return dk, dv


@triton.jit
def _add_head(
    dk, dv, begin, end, k_src, v_src, k, v, first, j, rows, offset, b, b64, kv, kv64, repeat, q64, storage,
    q_ptr, do_ptr, rows_ptr, bias_ptr, slopes_ptr, seed_ptr, batch, queries, keys, heads, q_strides, do_strides,
    head_of_kv, head_of_repeat, bias_strides, slopes_stride_b, size, row_stride, limits, factor, documents, threshold,
    strides, keep_scale, HAS: tl.constexpr, ADDS: tl.constexpr, CAP: tl.constexpr, D: tl.constexpr, P_QK: tl.constexpr,
    P_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, FMA: tl.constexpr,
    PRECISION: tl.constexpr, NEED: tl.constexpr, MASKED: tl.constexpr, VARLEN: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """Blocks of queries begin to end of one head."""
    r64 = to_int64(repeat)
    head = kv * head_of_kv + repeat * head_of_repeat
    at = (b64 * heads + head) * row_stride
    if VARLEN:
        at = to_int64(head) * row_stride + q64
    bias = bias_of(
        bias_ptr, slopes_ptr, b64, head, bias_strides, slopes_stride_b, batch, queries, keys, ADDS, BLOCK_M, BLOCK_N
    )
    dropout = (begin, b, threshold)
    if ADDS[3]:
        dropout = (seed_ptr, b * heads + head, threshold)
    q_base = q_ptr + storage * q_strides[0] + q64 * q_strides[1] + kv64 * q_strides[2] + r64 * q_strides[3]
    do_base = do_ptr + storage * do_strides[0] + q64 * do_strides[1] + kv64 * do_strides[2] + r64 * do_strides[3]
    q_src = source(q_base, rows[0], q_strides[1], D[0], P_QK, BLOCK_M, TMA)
    do_src = source(do_base, rows[0], do_strides[1], D[1], P_V, BLOCK_M, TMA)
    return _add_dkdv(
        dk, dv, begin, end, k_src, v_src, k, v, q_src, do_src, first, j, rows, offset, rows_ptr + at, size,
        limits, factor, bias, documents, dropout, strides, keep_scale, HAS, ADDS, CAP, D, P_QK, P_V, BLOCK_M,
        BLOCK_N, TMA, FMA, PRECISION, NEED, MASKED, VARLEN, LATE,
    )  # fmt: skip


@kernel(aligned=("row_stride",))
def _attention_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, rows_ptr, bias_ptr, slopes_ptr, prefix_ptr, qdoc_ptr,
    kdoc_ptr, krange_ptr, q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr, seed_ptr, segments_ptr,
    batch, queries, keys, kv_heads, repeats, blocks, group, segments,
    stride_qb, stride_qs, stride_qh, stride_qr, stride_kb, stride_ks, stride_kh, stride_kr,
    stride_vb, stride_vs, stride_vh, stride_vr, stride_dob, stride_dos, stride_doh, stride_dor,
    stride_dkb, stride_dks, stride_dkh, stride_dkr, stride_dvb, stride_dvs, stride_dvh, stride_dvr,
    head_of_kv, head_of_repeat, bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k, slopes_stride_b,
    scale, softcap, left, right, chunk, threshold, keep_scale, size, row_stride,
    HAS: tl.constexpr, ADDS: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, CAP: tl.constexpr, D: tl.constexpr,
    P_QK: tl.constexpr, P_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
    FMA: tl.constexpr, PRECISION: tl.constexpr, SHARED: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    heads = kv_heads * repeats
    outer = 1 if SHARED else repeats
    if k_starts_ptr is not None:
        slot, index = place(tl.program_id(0), blocks, kv_heads * outer, group)
        slot = blocks - 1 - slot
        if segments_ptr is not None:
            b, block = find_sequence(segments_ptr, segments, slot, BLOCK_N)
        else:
            b, block = find_sequence(k_starts_ptr, batch, slot, BLOCK_N)
    else:
        block, index = place(tl.program_id(0), blocks, batch * kv_heads * outer, group)
        block = blocks - 1 - block  # the first keys are seen by most queries
        b = index // (kv_heads * outer)
        index = index % (kv_heads * outer)
    kv, first_repeat = index // outer, index % outer
    if segments_ptr is not None:
        k_start, _, k_room = span_of(segments_ptr, None, b, segments, keys)
        k_len = k_room
    else:
        k_start, k_len, k_room = span_of(k_starts_ptr, k_used_ptr, b, batch, keys)
    first = block * BLOCK_N
    if k_starts_ptr is not None:
        if first >= k_room:
            return
    q_strides = (stride_qb, stride_qs, stride_qh, stride_qr)
    k_strides = (stride_kb, stride_ks, stride_kh, stride_kr)
    v_strides = (stride_vb, stride_vs, stride_vh, stride_vr)
    do_strides = (stride_dob, stride_dos, stride_doh, stride_dor)
    bias_strides = (bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k)
    NEED: tl.constexpr = (dk_ptr is not None, dv_ptr is not None)
    dk = zeros_tile(BLOCK_N, P_QK)
    dv = zeros_tile(BLOCK_N, P_V)
    if segments_ptr is None:
        dk, dv = _add_sequence(
            dk, dv, b, first, kv, first_repeat, q_ptr, k_ptr, v_ptr, do_ptr, rows_ptr, bias_ptr, slopes_ptr, prefix_ptr,
            qdoc_ptr, kdoc_ptr, krange_ptr, q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr, seed_ptr,
            batch, queries, keys, heads, repeats, q_strides, k_strides, v_strides, do_strides,
            head_of_kv, head_of_repeat, bias_strides, slopes_stride_b,
            scale, softcap, left, right, chunk, threshold, keep_scale, size, row_stride, HAS, ADDS, BOTTOM_RIGHT, CAP,
            D, P_QK, P_V, BLOCK_M, BLOCK_N, TMA, FMA, PRECISION, SHARED, LATE, NEED,
        )  # fmt: skip
    else:  # each sequence that has the segment has all of it
        row = k_start + first
        n = next_over(k_starts_ptr, k_used_ptr, row, b * 0, batch, keys)
        while n < batch:
            dk, dv = _add_sequence(
                dk, dv, n, row - tl.load(k_starts_ptr + n), kv, first_repeat, q_ptr, k_ptr, v_ptr, do_ptr, rows_ptr,
                bias_ptr, slopes_ptr, prefix_ptr, qdoc_ptr, kdoc_ptr, krange_ptr, q_starts_ptr, k_starts_ptr,
                q_used_ptr, k_used_ptr, seed_ptr, batch, queries, keys, heads, repeats, q_strides, k_strides, v_strides,
                do_strides, head_of_kv, head_of_repeat, bias_strides, slopes_stride_b,
                scale, softcap, left, right, chunk, threshold, keep_scale, size, row_stride, HAS, ADDS, BOTTOM_RIGHT,
                CAP, D, P_QK, P_V, BLOCK_M, BLOCK_N, TMA, FMA, PRECISION, SHARED, LATE, NEED,
            )  # fmt: skip
            n = next_over(k_starts_ptr, k_used_ptr, row, n + 1, batch, keys)
    kv64, k64, r64 = to_int64(kv), to_int64(k_start), to_int64(first_repeat)
    storage = to_int64(b)
    if k_starts_ptr is not None:
        storage = storage * 0
    if dk_ptr is not None:
        base = dk_ptr + storage * stride_dkb + k64 * stride_dks + kv64 * stride_dkh + r64 * stride_dkr
        store_tile(base, scale_tile(dk, scale), first, k_len, k_room, stride_dks, D[0], P_QK, BLOCK_N)
    if dv_ptr is not None:
        base = dv_ptr + storage * stride_dvb + k64 * stride_dvs + kv64 * stride_dvh + r64 * stride_dvr
        store_tile(base, dv, first, k_len, k_room, stride_dvs, D[1], P_V, BLOCK_N)


@triton.jit
def _add_dq(
    dq, begin, end, q, do, k_src, v_src, i, p, rows, lse, delta, limits, factor, bias, documents, dropout, strides,
    keep_scale, HAS: tl.constexpr, ADDS: tl.constexpr, CAP: tl.constexpr, D: tl.constexpr, P_QK: tl.constexpr,
    P_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, FMA: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys begin to end, in blocks, into dq."""
    for start in range(begin, end, BLOCK_N):
        k = load_tile(k_src, start, rows[1], strides[0], D[0], P_QK, BLOCK_N, TMA, MASKED)
        if FMA:
            product = dot_rows_fma(
                q[0], q[1], rows[0], q[2], k_src, start, rows[1], strides[0], D[0], P_QK, BLOCK_M, BLOCK_N
            )
            dp = dot_rows_fma(
                do[0], do[1], rows[0], do[2], v_src, start, rows[1], strides[1], D[1], P_V, BLOCK_M, BLOCK_N
            )
        else:
            product = dot_rows(q, k, PRECISION)
            v = load_tile(v_src, start, rows[1], strides[1], D[1], P_V, BLOCK_N, TMA, MASKED)
            dp = dot_rows(do, v, PRECISION)
        j = start + tl.arange(0, BLOCK_N)[None, :]
        weights, t = _weights(
            product, rows[3], start, i, j, p, rows[4], j, lse, rows, limits, factor, bias, documents, HAS, ADDS, CAP,
            MASKED, True, False,
        )  # fmt: skip
        if ADDS[3]:
            dp = tl.where(keep_tile(dropout, i, start, BLOCK_M, BLOCK_N), dp * keep_scale, 0.0)
        ds = weights * (dp - delta)
        if CAP[0]:
            ds *= 1.0 - t * t
        dq = add_product(dq, ds, k, PRECISION, FMA)
    return dq


@kernel(aligned=("row_stride",))
def _attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, rows_ptr, bias_ptr, slopes_ptr, prefix_ptr, qdoc_ptr, kdoc_ptr,
    qrange_ptr, q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr, seed_ptr,
    batch, queries, keys, kv_heads, repeats, blocks, group,
    stride_qb, stride_qs, stride_qh, stride_qr, stride_kb, stride_ks, stride_kh, stride_kr,
    stride_vb, stride_vs, stride_vh, stride_vr, stride_dob, stride_dos, stride_doh, stride_dor,
    stride_dqb, stride_dqs, stride_dqh, stride_dqr,
    head_of_kv, head_of_repeat, bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k, slopes_stride_b,
    scale, softcap, left, right, chunk, threshold, keep_scale, size, row_stride,
    HAS: tl.constexpr, ADDS: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, CAP: tl.constexpr, D: tl.constexpr,
    P_QK: tl.constexpr, P_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
    FMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    heads = kv_heads * repeats
    if q_starts_ptr is not None:
        slot, index = place(tl.program_id(0), blocks, heads, group)
        b, block = find_sequence(q_starts_ptr, batch, slot, BLOCK_M)
    else:
        block, index = place(tl.program_id(0), blocks, batch * heads, group)
        b = index // heads
        index = index % heads
    kv, repeat = index // repeats, index % repeats
    head = kv * head_of_kv + repeat * head_of_repeat
    q_start, q_len, q_room = span_of(q_starts_ptr, q_used_ptr, b, batch, queries)
    k_start, k_len, _ = span_of(k_starts_ptr, k_used_ptr, b, batch, keys)
    first = block * BLOCK_M
    if q_starts_ptr is not None:
        if first >= q_room:
            return
    b64, kv64, r64, q64, k64 = to_int64(b), to_int64(kv), to_int64(repeat), to_int64(q_start), to_int64(k_start)
    storage = b64
    at = (b64 * heads + head) * row_stride
    if q_starts_ptr is not None:
        storage = storage * 0
        at = to_int64(head) * row_stride + q64
    q_base = q_ptr + storage * stride_qb + q64 * stride_qs + kv64 * stride_qh + r64 * stride_qr
    k_base = k_ptr + storage * stride_kb + k64 * stride_ks + kv64 * stride_kh + r64 * stride_kr
    v_base = v_ptr + storage * stride_vb + k64 * stride_vs + kv64 * stride_vh + r64 * stride_vr
    do_base = do_ptr + storage * stride_dob + q64 * stride_dos + kv64 * stride_doh + r64 * stride_dor
    dq_base = dq_ptr + storage * stride_dqb + q64 * stride_dqs + kv64 * stride_dqh + r64 * stride_dqr

    i = first + tl.arange(0, BLOCK_M)
    offset = q_len * 0
    if BOTTOM_RIGHT:
        offset = k_len - q_len
    limits = (left, right, chunk, prefix_of(prefix_ptr, b, batch))
    p_last = tl.minimum(first + BLOCK_M, q_len) - 1 + offset
    begin, full_begin, full_end, end = key_span(first + offset, p_last, k_len, limits, HAS, BLOCK_N)
    lse = _row_values(rows_ptr + at, i, q_len, float("inf"), q_starts_ptr is not None)[:, None]
    delta = _row_values(rows_ptr + size + at, i, q_len, 0.0, q_starts_ptr is not None)[:, None]
    i = i[:, None]
    documents, low, high = documents_of(qdoc_ptr, kdoc_ptr, qrange_ptr, b64, i, q_len, queries, keys)
    if qdoc_ptr is not None:
        end = tl.minimum(end, high)
        begin = tl.minimum(tl.maximum(begin, low // BLOCK_N * BLOCK_N), end)
        full_begin, full_end = begin, begin  # every block is masked
    end = tl.where(first < q_len, end, full_end)  # behind the sequence: zeros
    bias_strides = (bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k)
    bias = bias_of(
        bias_ptr, slopes_ptr, b64, head, bias_strides, slopes_stride_b, batch, queries, keys, ADDS, BLOCK_M, BLOCK_N
    )
    factor = factors(scale, softcap, CAP[0])
    dropout = (i, b, threshold)
    if ADDS[3]:
        dropout = (seed_ptr, b * heads + head, threshold)

    q_src = source(q_base, q_len, stride_qs, D[0], P_QK, BLOCK_M, TMA)
    do_src = source(do_base, q_len, stride_dos, D[1], P_V, BLOCK_M, TMA)
    k_src = source(k_base, k_len, stride_ks, D[0], P_QK, BLOCK_N, TMA)
    v_src = source(v_base, k_len, stride_vs, D[1], P_V, BLOCK_N, TMA)
    if FMA:
        q = (q_src, first, stride_qs)
        do = (do_src, first, stride_dos)
    else:
        q = load_tile(q_src, first, q_len, stride_qs, D[0], P_QK, BLOCK_M, TMA, True)
        do = load_tile(do_src, first, q_len, stride_dos, D[1], P_V, BLOCK_M, TMA, True)
    rows = (q_len, k_len, k_len, first, first + offset)
    strides = (stride_ks, stride_vs)
    dq = zeros_tile(BLOCK_M, P_QK)
    if HAS[0] or HAS[2]:
        dq = _add_dq(
            dq, begin, full_begin, q, do, k_src, v_src, i, i + offset, rows, lse, delta, limits, factor, bias,
            documents, dropout, strides, keep_scale, HAS, ADDS, CAP, D, P_QK, P_V, BLOCK_M, BLOCK_N, TMA, FMA,
            PRECISION, True,
        )  # fmt: skip
    if qdoc_ptr is None:
        dq = _add_dq(
            dq, full_begin, full_end, q, do, k_src, v_src, i, i + offset, rows, lse, delta, limits, factor, bias,
            documents, dropout, strides, keep_scale, HAS, ADDS, CAP, D, P_QK, P_V, BLOCK_M, BLOCK_N, TMA, FMA,
            PRECISION, False,
        )  # fmt: skip
    dq = _add_dq(
        dq, full_end, end, q, do, k_src, v_src, i, i + offset, rows, lse, delta, limits, factor, bias, documents,
        dropout, strides, keep_scale, HAS, ADDS, CAP, D, P_QK, P_V, BLOCK_M, BLOCK_N, TMA, FMA, PRECISION, True,
    )  # fmt: skip
    store_tile(dq_base, scale_tile(dq, scale), first, q_len, q_room, stride_dqs, D[0], P_QK, BLOCK_M)


@kernel(aligned=("row_stride",))
def _attention_dbias_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dbias_ptr, rows_ptr, bias_ptr, slopes_ptr, prefix_ptr, qdoc_ptr, kdoc_ptr,
    q_used_ptr, k_used_ptr, seed_ptr,
    batch, queries, keys, heads, repeats, bias_batch, bias_heads, bias_rows, q_blocks, k_blocks,
    stride_qb, stride_qs, stride_qh, stride_qr, stride_kb, stride_ks, stride_kh, stride_kr,
    stride_vb, stride_vs, stride_vh, stride_vr, stride_dob, stride_dos, stride_doh, stride_dor,
    head_of_kv, head_of_repeat, bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k, slopes_stride_b,
    scale, softcap, left, right, chunk, threshold, keep_scale, size, row_stride,
    HAS: tl.constexpr, ADDS: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, CAP: tl.constexpr, D: tl.constexpr,
    P_QK: tl.constexpr, P_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    FMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # a program sums one tile over the batches, heads and rows that the bias was broadcast over
    pid = tl.program_id(0)
    j_first = pid % k_blocks * BLOCK_N
    pid = pid // k_blocks
    own_rows = tl.where(bias_rows == 1, 1, q_blocks)
    own_block = pid % own_rows
    pid = pid // own_rows
    own_head, own_batch = pid % bias_heads, pid // bias_heads
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    j = j_first + tl.arange(0, BLOCK_N)[None, :]
    factor = factors(scale, softcap, CAP[0])
    bias_strides = (bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k)
    for turn in range(0, (batch // bias_batch) * (heads // bias_heads)):
        b = own_batch + turn // (heads // bias_heads)
        index = own_head + turn % (heads // bias_heads)  # in the caller's count
        kv, repeat = index // repeats, index % repeats
        if head_of_kv == 1:
            kv, repeat = index % (heads // repeats), index // (heads // repeats)
        b64, kv64, r64 = to_int64(b), to_int64(kv), to_int64(repeat)
        q_len = span_of(None, q_used_ptr, b, batch, queries)[1]
        k_len = span_of(None, k_used_ptr, b, batch, keys)[1]
        offset = q_len * 0
        if BOTTOM_RIGHT:
            offset = k_len - q_len
        limits = (left, right, chunk, prefix_of(prefix_ptr, b, batch))
        q_base = q_ptr + b64 * stride_qb + kv64 * stride_qh + r64 * stride_qr
        k_base = k_ptr + b64 * stride_kb + kv64 * stride_kh + r64 * stride_kr
        v_base = v_ptr + b64 * stride_vb + kv64 * stride_vh + r64 * stride_vr
        do_base = do_ptr + b64 * stride_dob + kv64 * stride_doh + r64 * stride_dor
        at = (b64 * heads + index) * row_stride
        bias = bias_of(
            bias_ptr,
            slopes_ptr,
            b64,
            index,
            bias_strides,
            slopes_stride_b,
            batch,
            queries,
            keys,
            ADDS,
            BLOCK_M,
            BLOCK_N,
        )
        dropout = (j, b, threshold)
        if ADDS[3]:
            dropout = (seed_ptr, b * heads + index, threshold)
        q_src = source(q_base, q_len, stride_qs, D[0], P_QK, BLOCK_M, False)
        do_src = source(do_base, q_len, stride_dos, D[1], P_V, BLOCK_M, False)
        k_src = source(k_base, k_len, stride_ks, D[0], P_QK, BLOCK_N, False)
        v_src = source(v_base, k_len, stride_vs, D[1], P_V, BLOCK_N, False)
        low, high = query_span(j_first, tl.minimum(j_first + BLOCK_N, k_len) - 1, q_len, offset, limits, HAS, BLOCK_M)
        high = tl.where(j_first < k_len, high, low)
        if bias_rows != 1:
            low = tl.maximum(low, own_block * BLOCK_M)
            high = tl.minimum(high, (own_block + 1) * BLOCK_M)
        for start in range(low, high, BLOCK_M):
            i = (start + tl.arange(0, BLOCK_M))[:, None]
            if FMA:
                product = dot_rows_fma(
                    q_src, start, q_len, stride_qs, k_src, j_first, k_len, stride_ks, D[0], P_QK, BLOCK_M, BLOCK_N
                )
                dp = dot_rows_fma(
                    do_src, start, q_len, stride_dos, v_src, j_first, k_len, stride_vs, D[1], P_V, BLOCK_M, BLOCK_N
                )
            else:
                q = load_tile(q_src, start, q_len, stride_qs, D[0], P_QK, BLOCK_M, False, True)
                k = load_tile(k_src, j_first, k_len, stride_ks, D[0], P_QK, BLOCK_N, False, True)
                product = dot_rows(q, k, PRECISION)
                do = load_tile(do_src, start, q_len, stride_dos, D[1], P_V, BLOCK_M, False, True)
                v = load_tile(v_src, j_first, k_len, stride_vs, D[1], P_V, BLOCK_N, False, True)
                dp = dot_rows(do, v, PRECISION)
            inside = i < q_len
            lse = tl.load(rows_ptr + at + i, mask=inside, other=float("inf"))
            documents = documents_of(qdoc_ptr, kdoc_ptr, None, b64, i, q_len, queries, keys)[0]
            weights = _weights(
                product, start, j_first, i, j, i + offset, start + offset, j, lse, (q_len, k_len, k_len), limits,
                factor, bias, documents, HAS, ADDS, CAP, True, True, False,
            )[0]  # fmt: skip
            if ADDS[3]:
                dp = tl.where(keep_tile(dropout, i, j_first, BLOCK_M, BLOCK_N), dp * keep_scale, 0.0)
            total += weights * (dp - tl.load(rows_ptr + size + at + i, mask=inside, other=0.0))
    out_ptr = dbias_ptr + (to_int64(own_batch) * bias_heads + own_head) * bias_rows * keys
    if bias_rows == 1:
        row = tl.sum(total, 0, keep_dims=True).to(dbias_ptr.dtype.element_ty)
        tl.store(out_ptr + j, row, mask=j < keys)
    else:
        i = (own_block * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        tl.store(
            out_ptr + to_int64(i) * keys + j, total.to(dbias_ptr.dtype.element_ty), mask=(i < bias_rows) & (j < keys)
        )
