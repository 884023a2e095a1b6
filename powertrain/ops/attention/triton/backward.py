"""The universal backward kernels: two passes without atomics, hence the same bits every time.

    p     = 2^(s - lse)                       recomputed as in forward
    dv_j  = sum_i keep_ij p_ij do_i / (1 - dropout)
    dp_ij = keep_ij do_i v_j / (1 - dropout)
    ds_ij = p_ij (dp_ij - delta_i) (1 - tanh_ij^2 with a softcap)      delta_i = o_i do_i - dlse_i
    dq_i  = scale sum_j ds_ij k_j;   dk_j = scale sum_i ds_ij q_i
    dbias = ds before the softcap's factor, summed over the dims that were broadcast

`preprocess`: LSE in base 2 and delta per row. `dkdv`: one program per block of keys, which runs over the queries that
see them and over the query heads that share them. `dq`: one program per block of queries, over keys as in forward.
`dbias`: one program per tile of the bias. Rows before and after a sequence get zeros. Where sequences of keys lie in
any order and may share keys, the keys are divided into segments, at every row where a sequence begins or ends; `dkdv`
has a program per block of a segment, which runs over all sequences that contain it.

Source: Dao 2023, arXiv:2307.08691; the tiles were measured here (triton/plans.py). Reference: `attention_bwd_ref`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.attention.triton.forward import tile_coords
from powertrain.ops.attention.triton.tiles import (
    LOG2E,
    BiasStrides,
    Dropout,
    Limits,
    ScoreMods,
    Strides,
    TiledRows,
    add_bias,
    add_product,
    apply_softcap,
    bias_of,
    documents_of,
    dot_rows,
    dot_rows_fma,
    find_sequence,
    is_visible,
    keep_tile,
    key_span,
    load_tile,
    next_sequence_with,
    prefix_of,
    query_span,
    same_document,
    scale_tile,
    score_scale,
    sequence_span,
    store_tile,
    tiled_rows,
    to_int64,
    zeros_tile,
)
from powertrain.ops.shapes import acc_dtype
from powertrain.runtime.launch import kernel


def attention_bwd_ref(
    dout: Tensor,  # [b, h, sq, dv]
    query: Tensor,  # [b, h, sq, dqk]
    key: Tensor,  # [b, kv heads, sk, dqk]
    value: Tensor,  # [b, kv heads, sk, dv]
    *,
    scale: float,
    visible: Tensor | None = None,  # bool, broadcasts to [b, h, sq, sk]
    bias: Tensor | None = None,  # [b, h, sq, sk]
    softcap: float = 0.0,
    keep: Tensor | None = None,  # bool [b, h, sq, sk]: the weights that dropout keeps
    dropout_p: float = 0.0,
    dlse: Tensor | None = None,  # [b, h, sq]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The specification of the backward in plain PyTorch: (dq, dk, dv, dbias), in float32 or the inputs' float64."""
    q, k, v, do = (x.to(acc_dtype(x.dtype)) for x in (query, key, value, dout))
    ratio = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(ratio, 1) for x in (k, v))
    raw = q @ k.mT * scale  # [b, h, sq, sk]
    t = torch.tanh(raw / softcap) if softcap else torch.zeros_like(raw)
    s = (softcap * t if softcap else raw) + (0.0 if bias is None else bias)
    s = s if visible is None else s.masked_fill(~visible, -torch.inf)
    lse = s.logsumexp(-1, keepdim=True)
    p = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0))  # rows that see nothing have weights 0
    kept = torch.ones_like(p) if keep is None else keep / (1 - dropout_p)
    dv = (kept * p).mT @ do
    dp = kept * (do @ v.mT)
    delta = (p * dp).sum(-1, keepdim=True)  # = sum(out * dout, -1)
    ds = p * (dp - delta + (0.0 if dlse is None else dlse[..., None]))
    dbias, ds = ds, ds * (1 - t * t) * scale
    dq, dk = ds @ k, ds.mT @ q
    dk, dv = (x.unflatten(1, (-1, ratio)).sum(2) for x in (dk, dv))
    return dq, dk, dv, dbias


@kernel(aligned=("row_stride",))
def _attention_bwd_preprocess_kernel(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, rows_ptr, batch, queries, kv_heads, num_q_per_kv, head_of_kv, head_of_repeat,
    size, row_stride, stride_ob, stride_os, stride_oh, stride_or, stride_dob, stride_dos, stride_doh, stride_dor,
    D_V: tl.constexpr, P_V: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """LSE in base 2 and delta of BLOCK_M rows, padded to a multiple of 128 rows.

    Rows that see nothing and rows past the end get inf and 0: their weights are then 2^-inf = 0 in the kernels that
    follow, whatever ALiBi makes of their positions."""
    blocks = row_stride // BLOCK_M
    block, index = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    heads = kv_heads * num_q_per_kv
    b, kv, repeat = to_int64(index // heads), to_int64(index % heads // num_q_per_kv), to_int64(index % num_q_per_kv)
    first = block * BLOCK_M
    o_base = o_ptr + b * stride_ob + kv * stride_oh + repeat * stride_or
    do_base = do_ptr + b * stride_dob + kv * stride_doh + repeat * stride_dor
    o_rows = TiledRows((o_base,), queries, stride_os)
    do_rows = TiledRows((do_base,), queries, stride_dos)
    o = load_tile(o_rows, first, D_V, P_V, BLOCK_M, False, True)  # tile of [BLOCK_M, D_V]
    do = load_tile(do_rows, first, D_V, P_V, BLOCK_M, False, True)  # tile of [BLOCK_M, D_V]
    delta = tl.zeros([BLOCK_M], tl.float32)
    for n in tl.static_range(len(P_V)):
        delta += tl.sum(o[n].to(tl.float32) * do[n].to(tl.float32), 1)
    i = first + tl.arange(0, BLOCK_M)
    head = b * heads + kv * head_of_kv + repeat * head_of_repeat
    lse = tl.load(lse_ptr + head * queries + i, mask=i < queries, other=float("-inf"))  # [BLOCK_M]
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + head * queries + i, mask=i < queries, other=0.0)  # [BLOCK_M]
    sees_nothing = lse == float("-inf")
    at = head * row_stride + i
    tl.store(rows_ptr + at, tl.where(sees_nothing, float("inf"), lse * LOG2E))  # [BLOCK_M]
    tl.store(rows_ptr + size + at, tl.where(sees_nothing, 0.0, delta))  # [BLOCK_M]


@triton.jit
def _row_values(base, i, length, other: tl.constexpr, VARLEN: tl.constexpr):
    """Values of rows i [BLOCK_M]. Packed sequences need a mask, with `other` past the end; dense layouts are padded."""
    if VARLEN:
        values = tl.load(base + i, mask=i < length, other=other)
    else:
        values = tl.load(base + i)
    return values


@triton.jit
def _weights(
    product, i_first, j_first, i, j, p, p_first, others, lse, mods,
    FEATURES: tl.constexpr, MASKED: tl.constexpr, BOUNDED: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """(p, tanh with a softcap) of a tile of q k^T, [BLOCK_M, BLOCK_N] or with KEYS_FIRST [BLOCK_N, BLOCK_M]. `others`:
    the indices that mods.documents.own is compared with.

    Rows past the sequence need no mask, because their q and do are 0 and their lse and delta finite. Without BOUNDED
    keys past the end need none either: their gradients are not stored."""
    s, t = apply_softcap(product, mods.scale, FEATURES)
    s, visible = add_bias(s, i_first, j_first, i, j, p, p_first, mods, FEATURES, KEYS_FIRST)
    if FEATURES.alibi == "one_sided":
        lse += mods.bias.slope * (p - p_first).to(tl.float32)  # the part of ALiBi that add_bias left out
    weights = tl.exp2(s - lse)
    if MASKED or FEATURES.bias != "none":
        if MASKED:
            visible = visible & is_visible(p, j, mods.k_len, mods.limits, FEATURES, BOUNDED)
        visible = visible & same_document(mods.documents, others, FEATURES)
        weights = tl.where(visible, weights, 0.0)
    return weights, t


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
            lse = _row_values(rows_ptr, i, mods.q_len, float("inf"), VARLEN)[None, :]  # [1, BLOCK_M]
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
            lse = _row_values(rows_ptr, i, mods.q_len, float("inf"), VARLEN)[None, :]  # [1, BLOCK_M]
        delta = _row_values(rows_ptr + size, i, mods.q_len, 0.0, VARLEN)[None, :]  # [1, BLOCK_M]
        i = i[None, :]
        weights, t = _weights(
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


@triton.jit
def _add_dq(
    dq, begin, end, q, do, q_rows, do_rows, k_rows, v_rows, first, i, p, p_first, lse, delta, mods, keep_scale,
    FEATURES: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, P_QK: tl.constexpr, P_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, FMA: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add keys begin to end, in blocks, to dq of the queries i [BLOCK_M, 1] from `first` on."""
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
        weights, t = _weights(product, first, start, i, j, p, p_first, j, lse, mods, FEATURES, MASKED, True, False)
        if FEATURES.has_dropout:
            dp = tl.where(keep_tile(mods.dropout, i, start, BLOCK_M, BLOCK_N), dp * keep_scale, 0.0)
        ds = weights * (dp - delta)
        if FEATURES.has_softcap:
            ds *= 1.0 - t * t
        dq = add_product(dq, ds, k, PRECISION, FMA)  # tile of [BLOCK_M, D_QK]
    return dq


@kernel(aligned=("row_stride",))
def _attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, rows_ptr, bias_ptr, slopes_ptr, prefix_ptr, qdoc_ptr, kdoc_ptr,
    qrange_ptr, q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr, seed_ptr,
    batch, queries, keys, kv_heads, num_q_per_kv, blocks, swizzle,
    stride_qb, stride_qs, stride_qh, stride_qr, stride_kb, stride_ks, stride_kh, stride_kr,
    stride_vb, stride_vs, stride_vh, stride_vr, stride_dob, stride_dos, stride_doh, stride_dor,
    stride_dqb, stride_dqs, stride_dqh, stride_dqr,
    head_of_kv, head_of_repeat, bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k, slopes_stride_b,
    scale, softcap, left, right, chunk, threshold, keep_scale, size, row_stride,
    FEATURES: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, P_QK: tl.constexpr, P_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, FMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_M queries of one head."""
    heads = kv_heads * num_q_per_kv
    if q_starts_ptr is not None:
        slot, index = tile_coords(tl.program_id(0), blocks, heads, swizzle)
        b, block = find_sequence(q_starts_ptr, batch, slot, BLOCK_M)
    else:
        block, index = tile_coords(tl.program_id(0), blocks, batch * heads, swizzle)
        b = index // heads
        index = index % heads
    kv, repeat = index // num_q_per_kv, index % num_q_per_kv
    head = kv * head_of_kv + repeat * head_of_repeat
    q_start, q_len, q_capacity = sequence_span(q_starts_ptr, q_used_ptr, b, batch, queries)
    k_start, k_len, _ = sequence_span(k_starts_ptr, k_used_ptr, b, batch, keys)
    first = block * BLOCK_M
    if q_starts_ptr is not None:
        if first >= q_capacity:
            return
    b64, kv64, r64, q64, k64 = to_int64(b), to_int64(kv), to_int64(repeat), to_int64(q_start), to_int64(k_start)
    storage = b64  # the batch entry in memory: packed sequences share one
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
    offset = q_len * 0  # of a query's position from its index
    if FEATURES.bottom_right:
        offset = k_len - q_len
    limits = Limits(left, right, chunk, prefix_of(prefix_ptr, b, batch))
    p_last = tl.minimum(first + BLOCK_M, q_len) - 1 + offset
    begin, full_begin, full_end, end = key_span(first + offset, p_last, k_len, limits, FEATURES, BLOCK_N)
    lse = _row_values(rows_ptr + at, i, q_len, float("inf"), q_starts_ptr is not None)[:, None]  # [BLOCK_M, 1]
    delta = _row_values(rows_ptr + size + at, i, q_len, 0.0, q_starts_ptr is not None)[:, None]  # [BLOCK_M, 1]
    i = i[:, None]
    documents, low, high = documents_of(qdoc_ptr, kdoc_ptr, qrange_ptr, b64, i, q_len, queries, keys, k_len)
    if qdoc_ptr is not None:
        end = tl.minimum(end, high)
        begin = tl.minimum(tl.maximum(begin, low // BLOCK_N * BLOCK_N), end)
        full_begin, full_end = begin, begin  # every block is masked
    end = tl.where(first < q_len, end, full_end)  # a block past the sequence sees nothing: its dq is zeros
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
    dq = zeros_tile(BLOCK_M, P_QK)
    if FEATURES.has_left or FEATURES.has_chunk:
        dq = _add_dq(
            dq, begin, full_begin, q, do, q_rows, do_rows, k_rows, v_rows, first, i, i + offset, first + offset, lse,
            delta, mods, keep_scale, FEATURES, D_QK, D_V, P_QK, P_V, BLOCK_M, BLOCK_N, TMA, FMA, PRECISION, True,
        )  # fmt: skip
    if qdoc_ptr is None:
        dq = _add_dq(
            dq, full_begin, full_end, q, do, q_rows, do_rows, k_rows, v_rows, first, i, i + offset, first + offset,
            lse, delta, mods, keep_scale, FEATURES, D_QK, D_V, P_QK, P_V, BLOCK_M, BLOCK_N, TMA, FMA, PRECISION, False,
        )  # fmt: skip
    dq = _add_dq(
        dq, full_end, end, q, do, q_rows, do_rows, k_rows, v_rows, first, i, i + offset, first + offset, lse, delta,
        mods, keep_scale, FEATURES, D_QK, D_V, P_QK, P_V, BLOCK_M, BLOCK_N, TMA, FMA, PRECISION, True,
    )  # fmt: skip
    dq_rows = TiledRows((dq_base,), q_len, stride_dqs)
    store_tile(dq_rows, scale_tile(dq, scale), first, q_capacity, D_QK, P_QK, BLOCK_M)  # tile of [BLOCK_M, D_QK]


@kernel(aligned=("row_stride",))
def _attention_dbias_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dbias_ptr, rows_ptr, bias_ptr, slopes_ptr, prefix_ptr, qdoc_ptr, kdoc_ptr,
    q_used_ptr, k_used_ptr, seed_ptr,
    batch, queries, keys, heads, num_q_per_kv, bias_batch, bias_heads, bias_rows, q_blocks, k_blocks,
    stride_qb, stride_qs, stride_qh, stride_qr, stride_kb, stride_ks, stride_kh, stride_kr,
    stride_vb, stride_vs, stride_vh, stride_vr, stride_dob, stride_dos, stride_doh, stride_dor,
    head_of_kv, head_of_repeat, bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k, slopes_stride_b,
    scale, softcap, left, right, chunk, threshold, keep_scale, size, row_stride,
    FEATURES: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, P_QK: tl.constexpr, P_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of dbias: the sum of ds over the batch entries, heads and rows that the bias was broadcast over."""
    pid = tl.program_id(0)
    j_first = pid % k_blocks * BLOCK_N
    pid = pid // k_blocks
    own_rows = tl.where(bias_rows == 1, 1, q_blocks)
    own_block = pid % own_rows
    pid = pid // own_rows
    own_head, own_batch = pid % bias_heads, pid // bias_heads
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    j = j_first + tl.arange(0, BLOCK_N)[None, :]
    score_factors = score_scale(scale, softcap, FEATURES)
    bias_strides = BiasStrides(bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k)
    for n in range(0, (batch // bias_batch) * (heads // bias_heads)):
        b = own_batch + n // (heads // bias_heads)
        index = own_head + n % (heads // bias_heads)  # in the caller's order of heads
        kv, repeat = index // num_q_per_kv, index % num_q_per_kv
        if head_of_kv == 1:
            kv, repeat = index % (heads // num_q_per_kv), index // (heads // num_q_per_kv)
        b64, kv64, r64 = to_int64(b), to_int64(kv), to_int64(repeat)
        q_len = sequence_span(None, q_used_ptr, b, batch, queries)[1]
        k_len = sequence_span(None, k_used_ptr, b, batch, keys)[1]
        offset = q_len * 0  # of a query's position from its index
        if FEATURES.bottom_right:
            offset = k_len - q_len
        limits = Limits(left, right, chunk, prefix_of(prefix_ptr, b, batch))
        q_base = q_ptr + b64 * stride_qb + kv64 * stride_qh + r64 * stride_qr
        k_base = k_ptr + b64 * stride_kb + kv64 * stride_kh + r64 * stride_kr
        v_base = v_ptr + b64 * stride_vb + kv64 * stride_vh + r64 * stride_vr
        do_base = do_ptr + b64 * stride_dob + kv64 * stride_doh + r64 * stride_dor
        at = (b64 * heads + index) * row_stride
        bias = bias_of(
            bias_ptr, slopes_ptr, b64, index, bias_strides, slopes_stride_b, batch, queries, keys, FEATURES, BLOCK_M,
            BLOCK_N,
        )  # fmt: skip
        dropout = Dropout(seed_ptr, b * heads + index, threshold)
        q_rows = TiledRows((q_base,), q_len, stride_qs)
        do_rows = TiledRows((do_base,), q_len, stride_dos)
        k_rows = TiledRows((k_base,), k_len, stride_ks)
        v_rows = TiledRows((v_base,), k_len, stride_vs)
        low, high = query_span(
            j_first, tl.minimum(j_first + BLOCK_N, k_len) - 1, q_len, offset, limits, FEATURES, BLOCK_M
        )
        high = tl.where(j_first < k_len, high, low)
        if bias_rows != 1:
            low = tl.maximum(low, own_block * BLOCK_M)
            high = tl.minimum(high, (own_block + 1) * BLOCK_M)
        for start in range(low, high, BLOCK_M):
            i = (start + tl.arange(0, BLOCK_M))[:, None]
            if FMA:
                product = dot_rows_fma(
                    q_rows, start, k_rows, j_first, D_QK, P_QK, BLOCK_M, BLOCK_N
                )  # [BLOCK_M, BLOCK_N]
                dp = dot_rows_fma(do_rows, start, v_rows, j_first, D_V, P_V, BLOCK_M, BLOCK_N)  # [BLOCK_M, BLOCK_N]
            else:
                q = load_tile(q_rows, start, D_QK, P_QK, BLOCK_M, False, True)  # tile of [BLOCK_M, D_QK]
                k = load_tile(k_rows, j_first, D_QK, P_QK, BLOCK_N, False, True)  # tile of [BLOCK_N, D_QK]
                product = dot_rows(q, k, PRECISION)  # [BLOCK_M, BLOCK_N]
                do = load_tile(do_rows, start, D_V, P_V, BLOCK_M, False, True)  # tile of [BLOCK_M, D_V]
                v = load_tile(v_rows, j_first, D_V, P_V, BLOCK_N, False, True)  # tile of [BLOCK_N, D_V]
                dp = dot_rows(do, v, PRECISION)  # [BLOCK_M, BLOCK_N]
            inside = i < q_len
            lse = tl.load(rows_ptr + at + i, mask=inside, other=float("inf"))  # [BLOCK_M, 1]
            documents = documents_of(qdoc_ptr, kdoc_ptr, None, b64, i, q_len, queries, keys, k_len)[0]
            mods = ScoreMods(score_factors, limits, bias, documents, dropout, q_len, k_len)
            weights = _weights(
                product, start, j_first, i, j, i + offset, start + offset, j, lse, mods, FEATURES, True, True, False
            )[0]  # fmt: skip
            if FEATURES.has_dropout:
                dp = tl.where(keep_tile(dropout, i, j_first, BLOCK_M, BLOCK_N), dp * keep_scale, 0.0)
            # without the softcap's factor: the bias is added after it
            delta = tl.load(rows_ptr + size + at + i, mask=inside, other=0.0)  # [BLOCK_M, 1]
            total += weights * (dp - delta)
    out_ptr = dbias_ptr + (to_int64(own_batch) * bias_heads + own_head) * bias_rows * keys
    if bias_rows == 1:
        row = tl.sum(total, 0, keep_dims=True).to(dbias_ptr.dtype.element_ty)
        tl.store(out_ptr + j, row, mask=j < keys)  # [1, BLOCK_N]
    else:
        i = (own_block * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        tl.store(
            out_ptr + to_int64(i) * keys + j, total.to(dbias_ptr.dtype.element_ty), mask=(i < bias_rows) & (j < keys)
        )  # [BLOCK_M, BLOCK_N]
