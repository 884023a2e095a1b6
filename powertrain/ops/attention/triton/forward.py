"""The universal forward kernel: every mask, head dim and layout, online softmax, O(sequence) memory.

A program computes BLOCK_M queries of one head against blocks of BLOCK_N keys, in up to three loops: keys that only some
of its queries see, keys that all of them see (without masks), and again keys that some see. Running maximum m and sum
l per query, in float32 and base 2:

    m' = max(m, max_j s_j);  p = 2^(s - m');  l = l 2^(m - m') + sum_j p;  o = o 2^(m - m') + p v

A sink starts the row with m = sink, l = 1. Products take the inputs' dtype and accumulate in float32.

Sources: Milakov and Gimelshein 2018 (online softmax); Dao 2023, arXiv:2307.08691 (FlashAttention-2).
"""

import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.attention.operands import Operands
from powertrain.ops.attention.triton.launch_arguments import (
    plan_key,
    shared_arguments,
    strides,
    swizzle,
    uses_tma,
)
from powertrain.ops.attention.triton.plans import plan_fwd
from powertrain.ops.attention.triton.read_mask import ranges_of_queries, read_mask
from powertrain.ops.attention.triton.scores import (
    BiasStrides,
    Dropout,
    Limits,
    ScoreMods,
    add_bias,
    apply_softcap,
    bias_of,
    documents_of,
    is_visible,
    keep_tile,
    key_span,
    prefix_of,
    same_document,
    score_scale,
    visible_keys,
)
from powertrain.ops.attention.triton.sequences import SMALL, query_tile, sequence_span
from powertrain.ops.attention.triton.tiles import (
    LN2,
    LOG2E,
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


@triton.jit
def _attend(
    state, begin, end, q, q_rows, k_rows, v_rows, first, i, p, p_first, mods,
    FEATURES: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, P_QK: tl.constexpr, P_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, FMA: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add keys begin to end, in blocks, to the state (acc, m, l) of the queries i [BLOCK_M, 1], at positions p, the
    first of which are `first` and `p_first`."""
    # a block that all see needs no look at the mask
    READS_BIAS: tl.constexpr = FEATURES.bias != "none" and (MASKED or not FEATURES.mask_has_ranges)
    acc, m, l = state  # noqa: E741 # acc: tile of [BLOCK_M, D_V], m and l: [BLOCK_M]
    for start in range(begin, end, BLOCK_N):
        if FMA:
            product = dot_rows_fma(q_rows, first, k_rows, start, D_QK, P_QK, BLOCK_M, BLOCK_N)  # [BLOCK_M, BLOCK_N]
        else:
            k = load_tile(k_rows, start, D_QK, P_QK, BLOCK_N, TMA, MASKED)  # tile of [BLOCK_N, D_QK]
            product = dot_rows(q, k, PRECISION)  # [BLOCK_M, BLOCK_N]
        s, _ = apply_softcap(product, mods.scale, FEATURES)
        j = start + tl.arange(0, BLOCK_N)[None, :]
        s, visible = add_bias(s, first, start, i, j, p, p_first, mods, FEATURES, READS_BIAS, False)
        if MASKED or READS_BIAS:
            if MASKED:
                visible = visible & is_visible(p, j, mods.k_len, mods.limits, FEATURES, True)
            visible = visible & same_document(mods.documents, j, FEATURES)
            s = tl.where(visible, s, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
            # a row that has seen nothing yet has m = -inf; shifted by 0 its weights are 2^-inf = 0, not NaN
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        else:
            m_new = tl.maximum(m, tl.max(s, 1))
            shift = m_new
        weights = tl.exp2(s - shift[:, None])  # [BLOCK_M, BLOCK_N]
        alpha = tl.exp2(m - shift)
        m = m_new
        l = l * alpha + tl.sum(weights, 1)  # noqa: E741
        # ahead of the product, so that it adds to scaled sums in place
        acc = scale_tile(acc, alpha[:, None])
        if FEATURES.has_dropout:
            # after the sum: dropout acts on the normalized weights
            weights = tl.where(keep_tile(mods.dropout, i, start, BLOCK_M, BLOCK_N), weights, 0.0)
        v = load_tile(v_rows, start, D_V, P_V, BLOCK_N, TMA, MASKED)  # tile of [BLOCK_N, D_V]
        acc = add_product(acc, weights, v, PRECISION, FMA)  # tile of [BLOCK_M, D_V]
    return acc, m, l


@kernel(unaligned=SMALL)
def _attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, bias_ptr, slopes_ptr, sinks_ptr, prefix_ptr, qdoc_ptr, kdoc_ptr, qrange_ptr,
    q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr, seed_ptr,
    batch, queries, keys, kv_heads, num_q_per_kv, blocks, swizzle,
    stride_qb, stride_qs, stride_qh, stride_qr, stride_kb, stride_ks, stride_kh, stride_kr,
    stride_vb, stride_vs, stride_vh, stride_vr, stride_ob, stride_os, stride_oh, stride_or,
    head_of_kv, head_of_repeat, bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k, slopes_stride_b,
    scale, softcap, left, right, chunk, threshold, keep_scale,
    FEATURES: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, P_QK: tl.constexpr, P_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, FMA: tl.constexpr, PRECISION: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    await_kernel_before(STARTS_EARLY)
    heads = kv_heads * num_q_per_kv
    b, head_index, block = query_tile(q_starts_ptr, batch, blocks, heads, swizzle, BLOCK_M)
    kv, repeat = head_index // num_q_per_kv, head_index % num_q_per_kv
    # in the caller's order of heads
    head = kv * head_of_kv + repeat * head_of_repeat
    q_start, q_len, q_capacity = sequence_span(q_starts_ptr, q_used_ptr, b, batch, queries)
    k_start, k_len, _ = sequence_span(k_starts_ptr, k_used_ptr, b, batch, keys)
    first = block * BLOCK_M
    if q_starts_ptr is not None:
        # slots are enough for any lengths, so some have no block
        if first >= q_capacity:
            return
    b64, kv64, repeat64, q64, k64 = to_int64(b), to_int64(kv), to_int64(repeat), to_int64(q_start), to_int64(k_start)
    # the batch entry in memory: packed sequences share one
    storage = b64
    if q_starts_ptr is not None:
        storage = storage * 0
    q_base = q_ptr + storage * stride_qb + q64 * stride_qs + kv64 * stride_qh + repeat64 * stride_qr
    k_base = k_ptr + storage * stride_kb + k64 * stride_ks + kv64 * stride_kh + repeat64 * stride_kr
    v_base = v_ptr + storage * stride_vb + k64 * stride_vs + kv64 * stride_vh + repeat64 * stride_vr
    o_base = o_ptr + storage * stride_ob + q64 * stride_os + kv64 * stride_oh + repeat64 * stride_or

    i = first + tl.arange(0, BLOCK_M)
    # of a query's position from its index
    offset = q_len * 0
    if FEATURES.bottom_right:
        offset = k_len - q_len
    p = i[:, None] + offset
    limits = Limits(left, right, chunk, prefix_of(prefix_ptr, b, batch))
    p_last = tl.minimum(first + BLOCK_M, q_len) - 1 + offset
    span = key_span(first + offset, p_last, k_len, limits, FEATURES, BLOCK_N)
    documents = documents_of(qdoc_ptr, kdoc_ptr, b64, i[:, None], q_len, queries, keys, k_len)
    begin, full_begin, full_end, end = visible_keys(span, first, q_len, b64, queries, qrange_ptr, BLOCK_M, BLOCK_N)

    bias_strides = BiasStrides(bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k)
    bias = bias_of(
        bias_ptr, slopes_ptr, b64, head, bias_strides, slopes_stride_b, batch, queries, keys, FEATURES, BLOCK_M, BLOCK_N
    )
    mods = ScoreMods(
        score_scale(scale, softcap, FEATURES), limits, bias, documents,
        Dropout(seed_ptr, b * heads + head, threshold), q_len, k_len,
    )  # fmt: skip

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    if sinks_ptr is not None:
        # a sink is one more key with this score and no value
        m = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        if FEATURES.alibi == "one_sided":
            m += bias.slope * (i * 1.0 - first)
        # the sink's own weight, exp2(m - m)
        l += 1.0  # noqa: E741
    state = (zeros_tile(BLOCK_M, P_V), m, l)
    q_rows = tiled_rows(q_base, q_len, stride_qs, D_QK, P_QK, BLOCK_M, TMA)
    k_rows = tiled_rows(k_base, k_len, stride_ks, D_QK, P_QK, BLOCK_N, TMA)
    v_rows = tiled_rows(v_base, k_len, stride_vs, D_V, P_V, BLOCK_N, TMA)
    # without tensor cores q is loaded piece by piece with each block of keys: held, it would fill the registers
    q = q_rows.handles
    if not FMA:
        q = load_tile(q_rows, first, D_QK, P_QK, BLOCK_M, TMA, True)  # tile of [BLOCK_M, D_QK]
    if FEATURES.has_left or FEATURES.has_chunk or FEATURES.has_ranges:
        state = _attend(
            state, begin, full_begin, q, q_rows, k_rows, v_rows, first, i[:, None], p, first + offset, mods,
            FEATURES, D_QK, D_V, P_QK, P_V, BLOCK_M, BLOCK_N, TMA, FMA, PRECISION, True,
        )  # fmt: skip
    state = _attend(
        state, full_begin, full_end, q, q_rows, k_rows, v_rows, first, i[:, None], p, first + offset, mods,
        FEATURES, D_QK, D_V, P_QK, P_V, BLOCK_M, BLOCK_N, TMA, FMA, PRECISION, False,
    )  # fmt: skip
    acc, m, l = _attend(  # noqa: E741
        state, full_end, end, q, q_rows, k_rows, v_rows, first, i[:, None], p, first + offset, mods,
        FEATURES, D_QK, D_V, P_QK, P_V, BLOCK_M, BLOCK_N, TMA, FMA, PRECISION, True,
    )  # fmt: skip

    if FEATURES.alibi == "one_sided":
        # the part of ALiBi that add_bias left out
        m -= bias.slope * (i * 1.0 - first)
    # not l > 0: NaN is no row that sees nothing, which the backward would leave out
    lse = tl.where(l != 0, m + tl.log2(tl.where(l != 0, l, 1.0)), float("-inf"))  # [BLOCK_M]
    # dropout's 1 / (1 - p) once a row instead of once a weight
    inverse = tl.where(l != 0, keep_scale / tl.where(l != 0, l, 1.0), 0.0)
    o_rows = TiledRows((o_base,), q_len, stride_os)
    store_tile(o_rows, scale_tile(acc, inverse[:, None]), first, q_capacity, D_V, P_V, BLOCK_M)
    lse_base = lse_ptr + (b64 * heads + head) * queries
    if q_starts_ptr is not None:
        lse_base = lse_ptr + to_int64(head) * queries + q64
    tl.store(lse_base + i, tl.where(i < q_len, lse * LN2, float("-inf")), mask=i < q_capacity)  # [BLOCK_M]


def attention_forward(operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse)."""
    args, heads, target = operands.args, operands.heads, operands.target
    q, k, v = operands.q, operands.k, operands.v
    out, lse = operands.outputs()
    mask = read_mask(operands.args.bias, target)
    shared = shared_arguments(operands, mask)
    use_tma = uses_tma(shared["FMA"], target, q, k, v)
    tiles = operands.query_blocks(128) * operands.num_heads
    plan = plan_fwd(*plan_key(operands), use_tma, shared["FMA"], tiles, target)
    blocks = operands.query_blocks(plan.block_m)
    keys_bytes = operands.keys * (operands.d_qk + operands.d_v) * k.tensor.element_size()
    _attention_fwd_kernel[(blocks * operands.num_heads,)](
        **shared, **strides(o=operands.like_query(out)), **plan.launch_options(), TMA=use_tma and plan.tma,
        lse_ptr=lse, sinks_ptr=args.sinks, qrange_ptr=ranges_of_queries(operands, mask),
        kv_heads=heads.kv, blocks=blocks, swizzle=swizzle(keys_bytes, heads.q_per_kv, target),
    )  # fmt: skip
    return out, lse
