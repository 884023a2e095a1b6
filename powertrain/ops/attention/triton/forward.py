"""The universal forward kernel: every mask, head dim and layout, online softmax, O(sequence) memory.

A program computes BLOCK_M queries of one head against blocks of BLOCK_N keys, in up to three loops: keys that only some
of its queries see, keys that all see (no masks there), and some again. Running maximum m and sum l per query, in
float32 and base 2:

    m' = max(m, max_j s_j);  p = 2^(s - m');  l = l 2^(m - m') + sum_j p;  o = o 2^(m - m') + p v

A sink starts the row with m = sink, l = 1. Products take the inputs' dtype and accumulate in float32.

Sources: Milakov and Gimelshein 2018 (online softmax); Dao 2023, arXiv:2307.08691 (FlashAttention-2).
"""

import triton
import triton.language as tl

from powertrain.ops.attention.triton.tiles import (
    LN2,
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
    prefix_of,
    same_document,
    scale_tile,
    source,
    span_of,
    store_tile,
    to_int64,
    zeros_tile,
)
from powertrain.runtime.launch import kernel


@triton.jit
def place(pid, blocks, heads, group):
    """(block counted from the last, head) of a program: `group` heads at a time share the L2, and in each the last
    blocks, which see the most keys under a causal mask, go first."""
    first = pid // (group * blocks) * group
    size = tl.minimum(heads - first, group)
    within = pid - first * blocks
    return blocks - 1 - within // size, first + within % size


@triton.jit
def _attend(
    state, begin, end, q, k_src, v_src, rows, limits, factor, bias, documents, dropout, strides,
    HAS: tl.constexpr, ADDS: tl.constexpr, CAP: tl.constexpr, D: tl.constexpr, P_QK: tl.constexpr, P_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, FMA: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Keys begin to end, in blocks, into the state (acc, m, l) of a block of queries."""
    acc, m, l = state  # noqa: E741
    i, p, queries, keys = rows[0], rows[1], rows[2], rows[3]
    for start in range(begin, end, BLOCK_N):
        if FMA:
            product = dot_rows_fma(
                q[0], q[1], queries, q[2], k_src, start, keys, strides[0], D[0], P_QK, BLOCK_M, BLOCK_N
            )
        else:
            k = load_tile(k_src, start, keys, strides[0], D[0], P_QK, BLOCK_N, TMA, MASKED)
            product = dot_rows(q, k, PRECISION)
        s, _ = capped(product, factor, CAP[0], CAP[1])
        j = start + tl.arange(0, BLOCK_N)[None, :]
        s, seen = add_bias(s, rows[4], start, i, j, p, rows[5], queries, keys, bias, ADDS, False)
        if MASKED or ADDS[1]:
            if MASKED:
                seen = seen & is_visible(p, j, keys, limits, HAS, True)
            seen = seen & same_document(documents, j, keys, ADDS)
            s = tl.where(seen, s, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen so far: 2^-inf is 0, not NaN
        else:
            m_new = tl.maximum(m, tl.max(s, 1))
            shift = m_new
        weights = tl.exp2(s - shift[:, None])
        alpha = tl.exp2(m - shift)
        m = m_new
        l = l * alpha + tl.sum(weights, 1)  # noqa: E741
        acc = scale_tile(acc, alpha[:, None])
        if ADDS[3]:
            weights = tl.where(keep_tile(dropout, i, start, BLOCK_M, BLOCK_N), weights, 0.0)
        v = load_tile(v_src, start, keys, strides[1], D[1], P_V, BLOCK_N, TMA, MASKED)
        acc = add_product(acc, weights, v, PRECISION, FMA)
    return acc, m, l


@kernel()
def _attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, bias_ptr, slopes_ptr, sinks_ptr, prefix_ptr, qdoc_ptr, kdoc_ptr, qrange_ptr,
    q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr, seed_ptr,
    batch, queries, keys, kv_heads, repeats, blocks, group,
    stride_qb, stride_qs, stride_qh, stride_qr, stride_kb, stride_ks, stride_kh, stride_kr,
    stride_vb, stride_vs, stride_vh, stride_vr, stride_ob, stride_os, stride_oh, stride_or,
    head_of_kv, head_of_repeat, bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k, slopes_stride_b,
    scale, softcap, left, right, chunk, threshold, keep_scale,
    HAS: tl.constexpr, ADDS: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, CAP: tl.constexpr, D: tl.constexpr,
    P_QK: tl.constexpr, P_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, FMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    heads = kv_heads * repeats
    if q_starts_ptr is not None:
        slot, head_index = place(tl.program_id(0), blocks, heads, group)
        b, block = find_sequence(q_starts_ptr, batch, slot, BLOCK_M)
    else:
        block, head_index = place(tl.program_id(0), blocks, batch * heads, group)
        b = head_index // heads
        head_index = head_index % heads
    kv, repeat = head_index // repeats, head_index % repeats
    head = kv * head_of_kv + repeat * head_of_repeat  # as the caller counts them
    q_start, q_len, q_room = span_of(q_starts_ptr, q_used_ptr, b, batch, queries)
    k_start, k_len, _ = span_of(k_starts_ptr, k_used_ptr, b, batch, keys)
    first = block * BLOCK_M
    if q_starts_ptr is not None:
        if first >= q_room:
            return
    b64, kv64, repeat64, q64, k64 = to_int64(b), to_int64(kv), to_int64(repeat), to_int64(q_start), to_int64(k_start)
    storage = b64
    if q_starts_ptr is not None:
        storage = storage * 0
    q_base = q_ptr + storage * stride_qb + q64 * stride_qs + kv64 * stride_qh + repeat64 * stride_qr
    k_base = k_ptr + storage * stride_kb + k64 * stride_ks + kv64 * stride_kh + repeat64 * stride_kr
    v_base = v_ptr + storage * stride_vb + k64 * stride_vs + kv64 * stride_vh + repeat64 * stride_vr
    o_base = o_ptr + storage * stride_ob + q64 * stride_os + kv64 * stride_oh + repeat64 * stride_or

    i = first + tl.arange(0, BLOCK_M)
    offset = q_len * 0
    if BOTTOM_RIGHT:
        offset = k_len - q_len
    p = i[:, None] + offset
    limits = (left, right, chunk, prefix_of(prefix_ptr, b, batch))
    p_last = tl.minimum(first + BLOCK_M, q_len) - 1 + offset
    begin, full_begin, full_end, end = key_span(first + offset, p_last, k_len, limits, HAS, BLOCK_N)
    documents, low, high = documents_of(qdoc_ptr, kdoc_ptr, qrange_ptr, b64, i[:, None], q_len, queries, keys)
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

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    if sinks_ptr is not None:
        m = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        if ADDS[0] == 2:
            m += bias[3] * (i * 1.0 - first)
        l += 1.0  # noqa: E741
    state = (zeros_tile(BLOCK_M, P_V), m, l)
    q_src = source(q_base, q_len, stride_qs, D[0], P_QK, BLOCK_M, TMA)
    k_src = source(k_base, k_len, stride_ks, D[0], P_QK, BLOCK_N, TMA)
    v_src = source(v_base, k_len, stride_vs, D[1], P_V, BLOCK_N, TMA)
    if FMA:
        q = (q_src, first, stride_qs)
    else:
        q = load_tile(q_src, first, q_len, stride_qs, D[0], P_QK, BLOCK_M, TMA, True)
    rows = (i[:, None], p, q_len, k_len, first, first + offset)
    strides = (stride_ks, stride_vs)
    if HAS[0] or HAS[2]:
        state = _attend(
            state, begin, full_begin, q, k_src, v_src, rows, limits, factor, bias, documents, dropout, strides,
            HAS, ADDS, CAP, D, P_QK, P_V, BLOCK_M, BLOCK_N, TMA, FMA, PRECISION, True,
        )  # fmt: skip
    if qdoc_ptr is None:
        state = _attend(
            state, full_begin, full_end, q, k_src, v_src, rows, limits, factor, bias, documents, dropout, strides,
            HAS, ADDS, CAP, D, P_QK, P_V, BLOCK_M, BLOCK_N, TMA, FMA, PRECISION, False,
        )  # fmt: skip
    acc, m, l = _attend(  # noqa: E741
        state, full_end, end, q, k_src, v_src, rows, limits, factor, bias, documents, dropout, strides,
        HAS, ADDS, CAP, D, P_QK, P_V, BLOCK_M, BLOCK_N, TMA, FMA, PRECISION, True,
    )  # fmt: skip

    if ADDS[0] == 2:
        m -= bias[3] * (i * 1.0 - first)
    lse = tl.where(l > 0, m + tl.log2(tl.where(l > 0, l, 1.0)), float("-inf"))
    inverse = tl.where(l > 0, keep_scale / tl.where(l > 0, l, 1.0), 0.0)
    store_tile(o_base, scale_tile(acc, inverse[:, None]), first, q_len, q_room, stride_os, D[1], P_V, BLOCK_M)
    lse_base = lse_ptr + (b64 * heads + head) * queries
    if q_starts_ptr is not None:
        lse_base = lse_ptr + to_int64(head) * queries + q64
    tl.store(lse_base + i, tl.where(i < q_len, lse * LN2, float("-inf")), mask=i < q_room)
