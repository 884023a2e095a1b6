"""Kernels of the grouped FP8 products: plans and launches (formulas: ops/fp8/grouped.py).

Groups of rows end where `offsets` say, on the device only. A program of the first kernel adds up the groups' tiles and
walks its share of them, as ops/grouped_gemm.py does; one of the second computes one tile of one group's dweight.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.fp8.formulas import GROUP, Quantized
from powertrain.ops.shapes import cdiv, next_power_of_2
from powertrain.runtime.launch import kernel
from powertrain.runtime.target import Target
from powertrain.runtime.tuning import tunable


class Stacked(NamedTuple):
    """Weights of E groups as one FP8 operand: value (c, d) of group e is in row e * row_step + c, column
    e * col_step + d.

    scale_inv   of rows [rows], of blocks [rows / 128, columns / 128], or None: no scale
    """

    data: Tensor
    scale_inv: Tensor | None
    row_step: int
    col_step: int


@kernel(aligned=("C", "D"), unaligned=("sa_ptr", "sb_ptr", "offsets_ptr"))
def _fp8_grouped_kernel(
    a_ptr,
    b_ptr,
    sa_ptr,
    sb_ptr,
    offsets_ptr,
    out_ptr,
    T,
    E,
    C,
    D,
    rows_b,
    cols_b,
    stride_am,
    stride_bm,
    stride_om,
    row_step,
    col_step,
    step_am,  # of scales; as strides they would be among those that must all be multiples of 16
    step_ag,
    step_bm,
    step_bg,
    BY_BLOCK: tl.constexpr,  # scales of a differ along D, those of b by 128x128; else both by rows
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    # groups [BLOCK_E]: the experts', then the rows that belong to none, then empty ones
    groups = tl.arange(0, BLOCK_E)
    ends = tl.minimum(tl.load(offsets_ptr + groups, mask=groups < E, other=T), T)  # [BLOCK_E]
    starts = tl.load(offsets_ptr + groups - 1, mask=(groups > 0) & (groups <= E), other=0)  # [BLOCK_E]
    starts = tl.minimum(tl.where(groups > E, T, starts), T)
    tiles_n = tl.cdiv(C, BLOCK_N)
    tiles = tl.cdiv(ends - starts, BLOCK_M)
    last_tiles = tl.cumsum(tiles, 0)
    lanes_m, lanes_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    if TMA:
        a_desc = tl.make_tensor_descriptor(a_ptr, [T, D], [stride_am, 1], [BLOCK_M, BLOCK_K])
        b_desc = tl.make_tensor_descriptor(b_ptr, [rows_b, cols_b], [stride_bm, 1], [BLOCK_N, BLOCK_K])

    for tile in range(tl.program_id(0), tl.sum(tiles) * tiles_n, tl.num_programs(0)):
        group = tl.sum((last_tiles * tiles_n <= tile).to(tl.int32))
        mine = groups == group
        start, end = tl.sum(tl.where(mine, starts, 0)), tl.sum(tl.where(mine, ends, 0))
        tiles_m = tl.sum(tl.where(mine, tiles, 0))
        tile -= (tl.sum(tl.where(mine, last_tiles, 0)) - tiles_m) * tiles_n
        # GROUP_M tiles of rows by all columns, rows first: their operands stay in L2
        first_m = tile // (GROUP_M * tiles_n) * GROUP_M
        height = tl.minimum(tiles_m - first_m, GROUP_M)
        tile -= first_m * tiles_n
        row, col = start + (first_m + tile % height) * BLOCK_M, tile // height * BLOCK_N

        in_rows, in_cols = row + lanes_m < end, col + lanes_n < C
        b_row, b_col = group * row_step + col, group * col_step
        # out may have more columns than the transposed weights have rows: those of its padding
        in_b = b_row + lanes_n < rows_b
        # 64 bits for a tile's place, 32 within it
        a_start = a_ptr + row.to(tl.int64) * stride_am
        b_start = b_ptr + b_row.to(tl.int64) * stride_bm + b_col
        sa_at = sa_ptr + row.to(tl.int64) * step_am
        if BY_BLOCK:
            sb_at = sb_ptr + (b_row // 128).to(tl.int64) * step_bm + (b_col // 128).to(tl.int64) * step_bg
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for d in range(0, tl.where(group < E, D, 0), BLOCK_K):
            if TMA:
                # rows and columns beyond the group's are read too, and not stored
                a = a_desc.load([row, d])  # [BLOCK_M, BLOCK_K]
                b = b_desc.load([b_row, b_col + d])  # [BLOCK_N, BLOCK_K]
            else:
                ds = d + tl.arange(0, BLOCK_K)
                in_d = (ds < D)[None, :]
                # [BLOCK_M, BLOCK_K], [BLOCK_N, BLOCK_K]
                a = tl.load(
                    a_start + lanes_m[:, None] * stride_am + ds[None, :], mask=in_rows[:, None] & in_d, other=0.0
                )
                b = tl.load(
                    b_start + lanes_n[:, None] * stride_bm + ds[None, :], mask=in_cols[:, None] & in_d, other=0.0
                )
            # a sum of its own for each block of D: the products' own one keeps too few bits
            part = tl.dot(a, b.T)
            if BY_BLOCK:
                sa = tl.load(sa_at + lanes_m * step_am, mask=in_rows, other=0.0)  # [BLOCK_M]
                sb = tl.load(sb_at + (b_row % 128 + lanes_n) // 128 * step_bm, mask=in_cols, other=0.0)  # [BLOCK_N]
                acc += part * (sa[:, None] * sb[None, :])
                sa_at += step_ag
                sb_at += step_bg
            else:
                acc += part
        if not BY_BLOCK:
            acc *= tl.load(sa_at + lanes_m * step_am, mask=in_rows, other=0.0)[:, None]
            if sb_ptr is not None:
                in_group = in_b & (group < E)
                sb_at = sb_ptr + b_row.to(tl.int64) * step_bm
                acc *= tl.load(sb_at + lanes_n * step_bm, mask=in_group, other=0.0)[None, :]
        if group == E:
            # scales of rows that belong to no group may be anything
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        where = out_ptr + row.to(tl.int64) * stride_om + col + lanes_m[:, None] * stride_om + lanes_n[None, :]
        tl.store(
            where, acc.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_cols[None, :]
        )  # [BLOCK_M, BLOCK_N]


@triton.jit
def _kept(x, inside):
    """FP8 values where `inside`, else 0; by their bytes, as `tl.where` has no FP8."""
    return tl.where(inside, x.to(tl.uint8, bitcast=True), 0).to(x.dtype, bitcast=True)


@kernel(aligned=("K",), unaligned=("sdy_ptr", "sx_ptr", "offsets_ptr"))
def _fp8_grouped_wgrad_kernel(
    dy_ptr,
    x_ptr,
    sdy_ptr,
    sx_ptr,
    offsets_ptr,
    dw_ptr,
    T,
    N,
    K,
    rows_x,
    stride_dyn,
    stride_xk,
    step_dyn,  # of scales; as strides they would be among those that must all be multiples of 16
    step_dyg,
    step_xk,
    step_xg,
    TMA: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP_N: tl.constexpr,
):
    group = tl.program_id(1)
    start = tl.minimum(tl.load(offsets_ptr + group - 1, mask=group > 0, other=0), T)  # scalar
    end = tl.minimum(tl.load(offsets_ptr + group), T)  # scalar
    tiles_n, tiles_k = tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    tile = tl.program_id(0)
    first_n = tile // (GROUP_N * tiles_k) * GROUP_N
    height = tl.minimum(tiles_n - first_n, GROUP_N)
    tile -= first_n * tiles_k
    row, col = (first_n + tile % height) * BLOCK_N, tile // height * BLOCK_K
    lanes_n, lanes_k = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    # dweight may have more columns than the transposed x has rows: those of its padding
    in_rows, in_cols, in_x = row + lanes_n < N, col + lanes_k < K, col + lanes_k < rows_x
    # 64 bits for a tile's place, 32 within it
    sdy_ptr += row.to(tl.int64) * step_dyn
    sx_ptr += col.to(tl.int64) * step_xk
    if TMA:
        dy_desc = tl.make_tensor_descriptor(dy_ptr, [N, T], [stride_dyn, 1], [BLOCK_N, BLOCK_T])
        x_desc = tl.make_tensor_descriptor(x_ptr, [rows_x, T], [stride_xk, 1], [BLOCK_K, BLOCK_T])

    # scales are those of 128 consecutive tokens, whose first is a multiple of 128 whatever the groups are
    whole, last = tl.cdiv(start, BLOCK_T) * BLOCK_T, end // BLOCK_T * BLOCK_T
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    if TMA:
        for t in range(whole, last, BLOCK_T):
            part = tl.dot(dy_desc.load([row, t]), x_desc.load([col, t]).T)
            at = (t // BLOCK_T).to(tl.int64)
            sdy = tl.load(sdy_ptr + at * step_dyg + lanes_n * step_dyn, mask=in_rows, other=0.0)  # [BLOCK_N]
            sx = tl.load(sx_ptr + at * step_xg + lanes_k * step_xk, mask=in_x, other=0.0)  # [BLOCK_K]
            acc += part * (sdy[:, None] * sx[None, :])
    # the parts of blocks at both ends; without TMA all blocks
    blocks = 2 if TMA else tl.cdiv(end, BLOCK_T) - start // BLOCK_T
    for index in range(0, tl.where(start < end, blocks, 0)):
        if TMA:
            low = tl.where(index == 0, start, tl.maximum(last, whole))
            high = tl.where(index == 0, tl.minimum(end, whole), end)
            block = low // BLOCK_T
        else:
            low, high, block = start, end, start // BLOCK_T + index
        if low < high:
            lanes_t = tl.arange(0, BLOCK_T)
            first, at = block * BLOCK_T, block.to(tl.int64)
            inside = ((first + lanes_t >= low) & (first + lanes_t < high))[None, :]
            if TMA:
                # the tokens of other groups become 0 in both, as theirs may be NaN; loads under a mask would be of
                # single bytes
                dy = _kept(dy_desc.load([row, first]), inside)  # [BLOCK_N, BLOCK_T]
                x = _kept(x_desc.load([col, first]), inside)  # [BLOCK_K, BLOCK_T]
            else:
                dy_at = dy_ptr + row.to(tl.int64) * stride_dyn + first
                x_at = x_ptr + col.to(tl.int64) * stride_xk + first
                # [BLOCK_N, BLOCK_T], [BLOCK_K, BLOCK_T]
                dy = tl.load(dy_at + lanes_n[:, None] * stride_dyn + lanes_t, mask=in_rows[:, None] & inside, other=0.0)
                x = tl.load(x_at + lanes_k[:, None] * stride_xk + lanes_t, mask=in_x[:, None] & inside, other=0.0)
            sdy = tl.load(sdy_ptr + at * step_dyg + lanes_n * step_dyn, mask=in_rows, other=0.0)  # [BLOCK_N]
            sx = tl.load(sx_ptr + at * step_xg + lanes_k * step_xk, mask=in_x, other=0.0)  # [BLOCK_K]
            acc += tl.dot(dy, x.T) * (sdy[:, None] * sx[None, :])
    start = dw_ptr + (group.to(tl.int64) * N + row) * K + col
    mask = in_rows[:, None] & in_cols[None, :]
    tl.store(
        start + lanes_n[:, None] * K + lanes_k[None, :], acc.to(dw_ptr.dtype.element_ty), mask=mask
    )  # [BLOCK_N, BLOCK_K]


class _Plan(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False


@tunable("NVIDIA H200, 2026-11-23", ("num_stages",))
def _plan(rows_per_group: int, target: Target) -> _Plan:
    """Tiles of y, dx and dweight, not timed with groups: those of the products of two operands (ops/fp8/gemm.py)."""
    if target.arch == 90:
        return _Plan(128, 128, 8, 4, True) if rows_per_group > 64 else _Plan(64, 128, 4, 5, True)
    if target.arch in (100, 103):
        return _Plan(128, 64, 8, 4, True)
    return _Plan(64, 64, 8, 2)


def launch_product(a: Quantized, b: Stacked, offsets: Tensor, out: Tensor) -> None:
    """out[r] = a[r] b[e]ᵀ for rows r of group e, 0 beyond the last group; out [T, C padded to 16]."""
    (T, C), E, target = out.shape, offsets.shape[0], Target.of(out.device)
    depth = a.data.shape[1]
    plan = _plan(T // E, target)
    by_block = a.scale_inv.dim() == 2
    # a block beyond the depth would read the next group's columns, which times 0 may be NaN
    whole = not b.col_step or depth % GROUP == 0
    step_bm, step_bg = (0, 0) if b.scale_inv is None else (*b.scale_inv.stride(), 0)[:2]
    tiles = (T // plan.block_m + E + 1) * cdiv(C, plan.block_n)
    _fp8_grouped_kernel[(min(tiles, target.num_sms),)](
        a.data, b.data, a.scale_inv, b.scale_inv, offsets, out, T, E, C, depth, *b.data.shape, a.data.stride(0),
        b.data.stride(0), out.stride(0), b.row_step, b.col_step, *(*a.scale_inv.stride(), 0)[:2], step_bm, step_bg,
        BY_BLOCK=by_block, TMA=plan.tma and whole and out.device.type != "cpu",
        BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, BLOCK_K=GROUP, BLOCK_E=next_power_of_2(E + 1), GROUP_M=8,
        num_warps=plan.num_warps, num_stages=plan.num_stages,
    )  # fmt: skip


def launch_wgrad(dy: Quantized, x: Quantized, offsets: Tensor, dw: Tensor, T: int) -> None:
    """dw[e] = Σ over the rows t of group e of dy[:, t] x[:, t]ᵀ, of transposed copies by groups of 128 tokens; dw
    [E, N, K padded to 16]."""
    (E, N, K), target = dw.shape, Target.of(dw.device)
    plan = _plan(T // E, target)
    _fp8_grouped_wgrad_kernel[(cdiv(N, plan.block_m) * cdiv(K, plan.block_n), E)](
        dy.data, x.data, dy.scale_inv, x.scale_inv, offsets, dw, T, N, K, x.data.shape[0], dy.data.stride(0),
        x.data.stride(0),
        *dy.scale_inv.stride(), *x.scale_inv.stride(), TMA=plan.tma and dw.device.type != "cpu",
        BLOCK_N=plan.block_m, BLOCK_K=plan.block_n, BLOCK_T=GROUP, GROUP_N=8,
        num_warps=plan.num_warps, num_stages=plan.num_stages,
    )  # fmt: skip
