"""dq: one program per block of queries, over the keys that they see, as in the forward.

triton/backward.py has the formulas.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.attention.operands import Operands
from powertrain.ops.attention.triton.launch_arguments import plan_key, strides, swizzle
from powertrain.ops.attention.triton.plans import plan_dq
from powertrain.ops.attention.triton.scores import (
    BiasStrides,
    Dropout,
    Limits,
    ScoreMods,
    bias_of,
    documents_of,
    keep_tile,
    key_span,
    prefix_of,
    recomputed_weights,
    row_values,
    score_scale,
    visible_keys,
)
from powertrain.ops.attention.triton.sequences import SMALL, query_tile, sequence_span
from powertrain.ops.attention.triton.tiles import (
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
def _add_dq(
    dq, begin, end, q, do, q_rows, do_rows, k_rows, v_rows, first, i, p, p_first, lse, delta, mods, keep_scale,
    ds_ptr, ds_stride,
    FEATURES: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, P_QK: tl.constexpr, P_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, FMA: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add keys begin to end, in blocks, to dq of the queries i [BLOCK_M, 1] from `first` on, and store ds of the
    head."""
    for start in range(begin, end, BLOCK_N):
        k = load_tile(k_rows, start, D_QK, P_QK, BLOCK_N, TMA, MASKED)  # tile of [BLOCK_N, D_QK]
        if FMA:
            product = dot_rows_fma(q_rows, first, k_rows, start, D_QK, P_QK, BLOCK_M, BLOCK_N)  # [BLOCK_M, BLOCK_N]
            dp = dot_rows_fma(do_rows, first, v_rows, start, D_V, P_V, BLOCK_M, BLOCK_N)  # [BLOCK_M, BLOCK_N]
        else:
            product = dot_rows(q, k, PRECISION)  # [BLOCK_M, BLOCK_N]
            v = load_tile(v_rows, start, D_V, P_V, BLOCK_N, TMA, MASKED)  # tile of [BLOCK_N, D_V]
            dp = dot_rows(do, v, PRECISION)  # [BLOCK_M, BLOCK_N]
        j = start + tl.arange(0, BLOCK_N)[None, :]
        weights, t = recomputed_weights(
            product, first, start, i, j, p, p_first, j, lse, mods, FEATURES, MASKED, True, False
        )
        if FEATURES.has_dropout:
            dp = tl.where(keep_tile(mods.dropout, i, start, BLOCK_M, BLOCK_N), dp * keep_scale, 0.0)
        ds = weights * (dp - delta)
        if ds_ptr is not None:
            at = ds_ptr + to_int64(i) * ds_stride + j  # [BLOCK_M, BLOCK_N]
            tl.store(at, ds.to(ds_ptr.dtype.element_ty), mask=(i < mods.q_len) & (j < mods.k_len))
        if FEATURES.has_softcap:
            ds *= 1.0 - t * t
        dq = add_product(dq, ds, k, PRECISION, FMA)  # tile of [BLOCK_M, D_QK]
    return dq


@kernel(aligned=("row_stride",), unaligned=SMALL)
def _attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, rows_ptr, bias_ptr, slopes_ptr, prefix_ptr, qdoc_ptr, kdoc_ptr,
    qrange_ptr, q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr, seed_ptr, ds_ptr,
    batch, queries, keys, kv_heads, num_q_per_kv, blocks, swizzle, ds_stride,
    stride_qb, stride_qs, stride_qh, stride_qr, stride_kb, stride_ks, stride_kh, stride_kr,
    stride_vb, stride_vs, stride_vh, stride_vr, stride_dob, stride_dos, stride_doh, stride_dor,
    stride_dqb, stride_dqs, stride_dqh, stride_dqr,
    head_of_kv, head_of_repeat, bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k, slopes_stride_b,
    scale, softcap, left, right, chunk, threshold, keep_scale, size, row_stride,
    FEATURES: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, P_QK: tl.constexpr, P_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, FMA: tl.constexpr, PRECISION: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_M queries of one head, and ds of all their keys if ds_ptr is given."""
    await_kernel_before(STARTS_EARLY)
    heads = kv_heads * num_q_per_kv
    b, index, block = query_tile(q_starts_ptr, batch, blocks, heads, swizzle, BLOCK_M)
    kv, repeat = index // num_q_per_kv, index % num_q_per_kv
    head = kv * head_of_kv + repeat * head_of_repeat
    q_start, q_len, q_capacity = sequence_span(q_starts_ptr, q_used_ptr, b, batch, queries)
    k_start, k_len, _ = sequence_span(k_starts_ptr, k_used_ptr, b, batch, keys)
    first = block * BLOCK_M
    if q_starts_ptr is not None:
        if first >= q_capacity:
            return
    b64, kv64, r64, q64, k64 = to_int64(b), to_int64(kv), to_int64(repeat), to_int64(q_start), to_int64(k_start)
    # the batch entry in memory: packed sequences share one
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
    # of a query's position from its index
    offset = q_len * 0
    if FEATURES.bottom_right:
        offset = k_len - q_len
    limits = Limits(left, right, chunk, prefix_of(prefix_ptr, b, batch))
    p_last = tl.minimum(first + BLOCK_M, q_len) - 1 + offset
    span = key_span(first + offset, p_last, k_len, limits, FEATURES, BLOCK_N)
    lse = row_values(rows_ptr + at, i, q_len, float("inf"), q_starts_ptr is not None)[:, None]  # [BLOCK_M, 1]
    delta = row_values(rows_ptr + size + at, i, q_len, 0.0, q_starts_ptr is not None)[:, None]  # [BLOCK_M, 1]
    i = i[:, None]
    documents = documents_of(qdoc_ptr, kdoc_ptr, b64, i, q_len, queries, keys, k_len)
    begin, full_begin, full_end, end = visible_keys(span, first, q_len, b64, queries, qrange_ptr, BLOCK_M, BLOCK_N)
    bias_strides = BiasStrides(bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k)
    bias = bias_of(
        bias_ptr, slopes_ptr, b64, head, bias_strides, slopes_stride_b, batch, queries, keys, FEATURES, BLOCK_M, BLOCK_N
    )
    mods = ScoreMods(
        score_scale(scale, softcap, FEATURES), limits, bias, documents,
        Dropout(seed_ptr, b * heads + head, threshold), q_len, k_len,
    )  # fmt: skip

    q_rows = tiled_rows(q_base, q_len, stride_qs, D_QK, P_QK, BLOCK_M, TMA)
    do_rows = tiled_rows(do_base, q_len, stride_dos, D_V, P_V, BLOCK_M, TMA)
    k_rows = tiled_rows(k_base, k_len, stride_ks, D_QK, P_QK, BLOCK_N, TMA)
    v_rows = tiled_rows(v_base, k_len, stride_vs, D_V, P_V, BLOCK_N, TMA)
    q, do = q_rows.handles, do_rows.handles
    if not FMA:
        q = load_tile(q_rows, first, D_QK, P_QK, BLOCK_M, TMA, True)  # tile of [BLOCK_M, D_QK]
        do = load_tile(do_rows, first, D_V, P_V, BLOCK_M, TMA, True)  # tile of [BLOCK_M, D_V]
    own_ds_ptr = ds_ptr
    if ds_ptr is not None:
        own_ds_ptr = ds_ptr + (b64 * heads + head) * queries * ds_stride
    dq = zeros_tile(BLOCK_M, P_QK)
    if FEATURES.has_left or FEATURES.has_chunk or FEATURES.has_ranges:
        dq = _add_dq(
            dq, begin, full_begin, q, do, q_rows, do_rows, k_rows, v_rows, first, i, i + offset, first + offset, lse,
            delta, mods, keep_scale, own_ds_ptr, ds_stride, FEATURES, D_QK, D_V, P_QK, P_V, BLOCK_M, BLOCK_N, TMA,
            FMA, PRECISION, True,
        )  # fmt: skip
    dq = _add_dq(
        dq, full_begin, full_end, q, do, q_rows, do_rows, k_rows, v_rows, first, i, i + offset, first + offset, lse,
        delta, mods, keep_scale, own_ds_ptr, ds_stride, FEATURES, D_QK, D_V, P_QK, P_V, BLOCK_M, BLOCK_N, TMA, FMA,
        PRECISION, False,
    )  # fmt: skip
    dq = _add_dq(
        dq, full_end, end, q, do, q_rows, do_rows, k_rows, v_rows, first, i, i + offset, first + offset, lse, delta,
        mods, keep_scale, own_ds_ptr, ds_stride, FEATURES, D_QK, D_V, P_QK, P_V, BLOCK_M, BLOCK_N, TMA, FMA, PRECISION,
        True,
    )  # fmt: skip
    dq_rows = TiledRows((dq_base,), q_len, stride_dqs)
    store_tile(dq_rows, scale_tile(dq, scale), first, q_capacity, D_QK, P_QK, BLOCK_M)  # tile of [BLOCK_M, D_QK]


def launch_dq(
    operands: Operands, shared: dict[str, Any], ranges: Tensor | None, use_tma: bool, dq: Tensor, ds: Tensor | None
) -> None:
    """`shared`: the arguments that all backward kernels take. `ds`: from `stored_ds`."""
    heads, target = operands.heads, operands.target
    plan = plan_dq(*plan_key(operands), use_tma, shared["FMA"], target)
    blocks = operands.query_blocks(plan.block_m)
    keys_bytes = operands.keys * (operands.d_qk + operands.d_v) * operands.k.tensor.element_size()
    _attention_dq_kernel[(blocks * operands.num_heads,)](
        **shared, **strides(dq=operands.like_query(dq)), **plan.launch_options(), TMA=use_tma and plan.tma,
        ds_ptr=ds, ds_stride=0 if ds is None else ds.stride(2), qrange_ptr=ranges, kv_heads=heads.kv, blocks=blocks,
        swizzle=swizzle(keys_bytes, heads.q_per_kv, target),
    )  # fmt: skip
