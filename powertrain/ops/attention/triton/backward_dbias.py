"""dbias, the sum of ds over everything that the bias was broadcast to: of a stored ds, or one program per tile of the
bias, which computes it.

triton/backward.py has the formulas.
"""

from math import prod
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from powertrain.ops.attention.operands import Operands
from powertrain.ops.attention.triton.plans import plan_dbias
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
    score_scale,
)
from powertrain.ops.attention.triton.sequences import SMALL, sequence_span
from powertrain.ops.attention.triton.tiles import TiledRows, dot_rows, dot_rows_fma, load_tile, to_int64
from powertrain.ops.early_start import await_kernel_before, starts_early
from powertrain.ops.shapes import cdiv
from powertrain.runtime.launch import kernel
from powertrain.runtime.target import Target

# scores that are stored in float32: 256 MiB. Causal, where half of them are zeros that are written first, storing took
# 0.21 to 0.96 of the time of `dbias` for 4 to 512 MiB of them, whole backwards, head dims 64 to 192
_MOST_STORED = 1 << 26
_SUMMED = 8, 128  # rows and columns of a tile


@kernel()
def _sum_ds_kernel(
    ds_ptr, dbias_ptr, batch, heads, bias_batch, bias_heads, rows, cols, row_blocks, col_blocks, stride_row,
    ROWS: tl.constexpr, COLS: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One tile of dbias [bias_batch, bias_heads, rows, cols] from ds [batch, heads, rows, cols]."""
    await_kernel_before(STARTS_EARLY)
    tile = tl.program_id(0)
    i = (tile // col_blocks % row_blocks * ROWS + tl.arange(0, ROWS))[:, None]
    j = (tile % col_blocks * COLS + tl.arange(0, COLS))[None, :]
    own = tile // (col_blocks * row_blocks)
    own_batch, own_head = own // bias_heads, own % bias_heads
    shared = heads // bias_heads
    exists = (i < rows) & (j < cols)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for n in range(0, batch // bias_batch * shared):
        at = (to_int64(own_batch + n // shared) * heads + own_head + n % shared) * rows + i
        total += tl.load(ds_ptr + at * stride_row + j, mask=exists, other=0.0)  # [ROWS, COLS]
    out_ptr = dbias_ptr + (to_int64(own) * rows + i) * cols + j
    tl.store(out_ptr, total.to(dbias_ptr.dtype.element_ty), mask=exists)  # [ROWS, COLS]


def stored_ds(operands: Operands, dbias: Tensor) -> Tensor | None:
    """[b, heads, queries, keys] for the dq kernel to store ds: the bias's gradient itself if nothing is broadcast, else
    in float32 if it is small enough. Zeros where that kernel passes over blocks."""
    args, heads = operands.args, operands.heads.kv * operands.heads.q_per_kv
    bounds = args.left >= 0 or args.right >= 0 or args.chunk or args.query_documents is not None
    passes_over = bounds or args.query_used is not None or args.key_used is not None
    sizes = operands.batch, heads, operands.queries, operands.keys
    if dbias.shape == sizes:
        return dbias.zero_() if passes_over else dbias
    if prod(sizes) > _MOST_STORED:
        return None
    # rows begin 64 bytes or a multiple apart, so that two elements are stored at once
    padded = *sizes[:3], cdiv(operands.keys, 16) * 16
    ds = (dbias.new_zeros if passes_over else dbias.new_empty)(padded, dtype=torch.float32)
    return ds[..., : operands.keys]


def sum_ds(ds: Tensor, dbias: Tensor, target: Target) -> None:
    """dbias = the sum of ds, as `stored_ds` gave it, over the dims that the bias lacks."""
    batch, heads, rows, cols = ds.shape
    if dbias.shape[2] != rows:
        dbias.copy_(ds.sum([dim for dim in range(3) if dbias.shape[dim] != ds.shape[dim]], keepdim=True))
        return
    bias_batch, bias_heads = dbias.shape[:2]
    height, width = _SUMMED
    blocks = cdiv(rows, height), cdiv(cols, width)
    programs = bias_batch * bias_heads * prod(blocks)
    if programs:
        _sum_ds_kernel[(programs,)](
            ds, dbias, batch, heads, bias_batch, bias_heads, rows, cols, *blocks, ds.stride(2), ROWS=height, COLS=width,
            STARTS_EARLY=starts_early(target), num_warps=4,
        )  # fmt: skip


@kernel(aligned=("row_stride",), unaligned=SMALL)
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
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One tile of dbias: the sum of ds over the batch entries, heads and rows that the bias was broadcast over."""
    await_kernel_before(STARTS_EARLY)
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
        # in the caller's order of heads
        index = own_head + n % (heads // bias_heads)
        kv, repeat = index // num_q_per_kv, index % num_q_per_kv
        if head_of_kv == 1:
            kv, repeat = index % (heads // num_q_per_kv), index // (heads // num_q_per_kv)
        b64, kv64, r64 = to_int64(b), to_int64(kv), to_int64(repeat)
        q_len = sequence_span(None, q_used_ptr, b, batch, queries)[1]
        k_len = sequence_span(None, k_used_ptr, b, batch, keys)[1]
        # of a query's position from its index
        offset = q_len * 0
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
            documents = documents_of(qdoc_ptr, kdoc_ptr, b64, i, q_len, queries, keys, k_len)
            mods = ScoreMods(score_factors, limits, bias, documents, dropout, q_len, k_len)
            weights = recomputed_weights(
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


def launch_dbias(operands: Operands, shared: dict[str, Any], use_tma: bool, dbias: Tensor) -> None:
    """`shared`: the arguments that all backward kernels take."""
    bias_batch, bias_heads, bias_rows, _ = dbias.shape
    element = operands.q.tensor.element_size()
    plan = plan_dbias(element, operands.d_qk, operands.d_v, use_tma, shared["FMA"], operands.target)
    q_blocks, k_blocks = cdiv(operands.queries, plan.block_m), cdiv(operands.keys, plan.block_n)
    tiles = k_blocks * bias_batch * bias_heads * (1 if bias_rows == 1 else q_blocks)
    not_packed = {name: value for name, value in shared.items() if name not in ("q_starts_ptr", "k_starts_ptr")}
    _attention_dbias_kernel[(tiles,)](
        **not_packed, **plan.launch_options(), dbias_ptr=dbias, heads=operands.heads.kv * operands.heads.q_per_kv,
        bias_batch=bias_batch, bias_heads=bias_heads, bias_rows=bias_rows, q_blocks=q_blocks, k_blocks=k_blocks,
    )  # fmt: skip
