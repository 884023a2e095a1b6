"""Kernels of the forward of RMSNorm and LayerNorm, their plan and launches; norm.py has the formulas."""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.early_start import starts_early_if_small, wait_then_let_next_start
from powertrain.ops.row_groups import row_groups, row_places
from powertrain.ops.shapes import cdiv, next_power_of_2
from powertrain.runtime.launch import kernel
from powertrain.runtime.target import Target
from powertrain.runtime.tuning import tunable


@kernel(aligned=("N",), down_to=2)
def _norm_fwd_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    h_ptr,
    mean_ptr,
    rstd_ptr,
    M,
    N,
    inner,
    middle,
    stride_xm,
    stride_xg,
    stride_xo,
    stride_rm,
    stride_rg,
    stride_ro,
    eps,
    LEVELS: tl.constexpr,
    IS_LAYER: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    wait_then_let_next_start(STARTS_EARLY)
    pointers = (x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, h_ptr, mean_ptr, rstd_ptr)
    block = tl.program_id(0)
    rows = (block * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    x_rows = x_ptr + row_places(rows, (stride_xm, stride_xg, stride_xo), (inner, middle), LEVELS)
    residual_rows = None
    if residual_ptr is not None:
        residual_rows = residual_ptr + row_places(rows, (stride_rm, stride_rg, stride_ro), (inner, middle), LEVELS)
    loaded = _load_rows(x_rows, residual_rows, rows < M, N, BLOCK_N, BLOCK_TAIL)
    _norm_rows(
        pointers, loaded, block, M, N, eps, IS_LAYER, ZERO_CENTERED, ROUND_FIRST, WEIGHTS_FIRST,
        BLOCK_M, BLOCK_N, BLOCK_TAIL,
    )  # fmt: skip


@triton.jit
def _load_rows(x_rows, residual_rows, are_rows, N, BLOCK_N: tl.constexpr, BLOCK_TAIL: tl.constexpr):
    """x and residual, from pointers to rows [BLOCK_M, 1], as BLOCK_N columns and the BLOCK_TAIL behind them, in their
    own dtypes."""
    cols = tl.arange(0, BLOCK_N)[None, :]
    x = tl.load(x_rows + cols, mask=are_rows & (cols < N), other=0.0)  # [BLOCK_M, BLOCK_N]
    residual, tail, residual_tail = x, x, x
    if residual_rows is not None:
        residual = tl.load(residual_rows + cols, mask=are_rows & (cols < N), other=0.0)  # [BLOCK_M, BLOCK_N]
    if BLOCK_TAIL > 0:
        cols = BLOCK_N + tl.arange(0, BLOCK_TAIL)[None, :]
        tail = tl.load(x_rows + cols, mask=are_rows & (cols < N), other=0.0)  # [BLOCK_M, BLOCK_TAIL]
        residual_tail = tail
        if residual_rows is not None:
            residual_tail = tl.load(residual_rows + cols, mask=are_rows & (cols < N), other=0.0)  # like tail
    return x, residual, tail, residual_tail


@triton.jit
def _norm_rows(
    pointers,
    loaded,
    block,
    M,
    N,
    eps,
    IS_LAYER: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
):
    _, residual_ptr, weight_ptr, bias_ptr, y_ptr, h_ptr, mean_ptr, rstd_ptr = pointers
    x, residual, tail, residual_tail = loaded
    # a row is BLOCK_N columns, and BLOCK_TAIL after them: 18432 as one power of 2 would leave half of the lanes idle
    rows = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < N)
    tail_cols = BLOCK_N + tl.arange(0, BLOCK_TAIL if BLOCK_TAIL > 0 else 1)[None, :]
    tail_mask = (rows < M) & (tail_cols < N)
    if WEIGHTS_FIRST:
        # the compiler moves no load ahead of a store, which might be to the same place
        weight = _load_columns(weight_ptr, cols, N, "")
        bias = _load_columns(bias_ptr, cols, N, "")
        if BLOCK_TAIL > 0:
            tail_weight = _load_columns(weight_ptr, tail_cols, N, "")
            tail_bias = _load_columns(bias_ptr, tail_cols, N, "")
    h = _sum(x, residual, residual_ptr, h_ptr, rows * N + cols, mask)
    if BLOCK_TAIL > 0:
        tail = _sum(tail, residual_tail, residual_ptr, h_ptr, rows * N + tail_cols, tail_mask)
    if IS_LAYER:
        # two passes over registers: E[h²] - mean² would lose the digits of a row whose mean is large
        total = tl.sum(h, axis=1, keep_dims=True)
        if BLOCK_TAIL > 0:
            total += tl.sum(tail, axis=1, keep_dims=True)
        mean = total / N
        h = tl.where(mask, h - mean, 0.0)
        if BLOCK_TAIL > 0:
            tail = tl.where(tail_mask, tail - mean, 0.0)
        tl.store(mean_ptr + rows, mean, mask=rows < M)  # [BLOCK_M, 1]
    squares = tl.sum(h * h, axis=1, keep_dims=True)
    if BLOCK_TAIL > 0:
        squares += tl.sum(tail * tail, axis=1, keep_dims=True)
    rstd = tl.rsqrt(squares / N + eps)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)  # [BLOCK_M, 1]
    if not WEIGHTS_FIRST:
        weight = _load_columns(weight_ptr, cols, N, "")
        bias = _load_columns(bias_ptr, cols, N, "")
    y = _affine(h * rstd, weight, bias, y_ptr, ZERO_CENTERED, ROUND_FIRST)
    tl.store(y_ptr + rows * N + cols, y, mask=mask)  # [BLOCK_M, BLOCK_N]
    if BLOCK_TAIL > 0:
        if not WEIGHTS_FIRST:
            tail_weight = _load_columns(weight_ptr, tail_cols, N, "")
            tail_bias = _load_columns(bias_ptr, tail_cols, N, "")
        y = _affine(tail * rstd, tail_weight, tail_bias, y_ptr, ZERO_CENTERED, ROUND_FIRST)
        tl.store(y_ptr + rows * N + tail_cols, y, mask=tail_mask)  # [BLOCK_M, BLOCK_TAIL]


@triton.jit
def _sum(x, residual, residual_ptr, h_ptr, places, mask):
    """x, or x + residual rounded to the stream's dtype, which is stored too; in float32."""
    h = x.to(tl.float32)
    if residual_ptr is not None:
        h = (h + residual.to(tl.float32)).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + places, h, mask=mask)  # the shape of x
        h = h.to(tl.float32)
    return h


@triton.jit
def _load_columns(ptr, cols, N, POLICY: tl.constexpr):
    """Of weight or bias, the shape of cols, in its own dtype; None without one."""
    if ptr is not None:
        values = tl.load(ptr + cols, mask=cols < N, other=0.0, eviction_policy=POLICY)
    else:
        values = None
    return values


@triton.jit
def _affine(y, weight, bias, y_ptr, ZERO_CENTERED: tl.constexpr, ROUND_FIRST: tl.constexpr):
    # as Hugging Face's Llama does: the normalized row is rounded to its dtype ahead of the weight
    if ROUND_FIRST:
        y = y.to(y_ptr.dtype.element_ty).to(tl.float32)
    if weight is not None:
        w = weight.to(tl.float32)
        y *= w + 1.0 if ZERO_CENTERED else w
    if bias is not None:
        y += bias.to(tl.float32)
    return y.to(y_ptr.dtype.element_ty)


@kernel(aligned=("N",), down_to=2)
def _norm_fwd_wide_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    h_ptr,
    mean_ptr,
    rstd_ptr,
    N,
    inner,
    middle,
    stride_xm,
    stride_xg,
    stride_xo,
    stride_rm,
    stride_rg,
    stride_ro,
    eps,
    LEVELS: tl.constexpr,
    IS_LAYER: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr,
    LOOPED: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    wait_then_let_next_start(STARTS_EARLY)
    # one row a program, read for each pass over it, after the first time from the L1: a row kept in registers would
    # leave an SM too few programs. All loads of a step are ahead of its stores: the compiler moves none past a store,
    # which might be to the same place
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_N)
    sources = (x_ptr, residual_ptr, h_ptr)
    sizes = (inner, middle)
    places = (
        row_places(tl.program_id(0), (stride_xm, stride_xg, stride_xo), sizes, LEVELS),
        row_places(tl.program_id(0), (stride_rm, stride_rg, stride_ro), sizes, LEVELS),
    )
    # a row of one step has no loop at all
    end = N if LOOPED else 1
    total = tl.zeros([BLOCK_N], tl.float32)
    weights, biases = (), ()
    if WEIGHTS_FIRST:
        for i in tl.static_range(CHUNKS):
            if weight_ptr is not None:
                weights += (_load_columns(weight_ptr, i * BLOCK_N + lanes, N, "evict_last"),)  # type: ignore[assignment]
            if bias_ptr is not None:
                biases += (_load_columns(bias_ptr, i * BLOCK_N + lanes, N, "evict_last"),)  # type: ignore[assignment]
    for start in range(0, end, CHUNKS * BLOCK_N):
        chunks = _load_chunks(sources, places, start, lanes, N, BLOCK_N, CHUNKS, LOOPED, "evict_last")
        if residual_ptr is not None:
            for i in tl.static_range(CHUNKS):
                cols = start + i * BLOCK_N + lanes
                tl.store(h_ptr + row * N + cols, chunks[i], mask=_inside(cols, N, i, CHUNKS, LOOPED))  # [BLOCK_N]
        for i in tl.static_range(CHUNKS):
            h = chunks[i].to(tl.float32)
            total += h if IS_LAYER else h * h
    mean = 0.0
    if IS_LAYER:
        # mean first: E[h²] - mean² would lose the digits of a row whose mean is large
        mean = tl.sum(total, axis=0) / N
        tl.store(mean_ptr + row, mean)  # scalar
        total = tl.zeros([BLOCK_N], tl.float32)
        for start in range(0, end, CHUNKS * BLOCK_N):
            chunks = _load_chunks(sources, places, start, lanes, N, BLOCK_N, CHUNKS, LOOPED, "evict_last")
            for i in tl.static_range(CHUNKS):
                h = chunks[i].to(tl.float32) - mean
                total += tl.where(_inside(start + i * BLOCK_N + lanes, N, i, CHUNKS, LOOPED), h * h, 0.0)
    rstd = tl.rsqrt(tl.sum(total, axis=0) / N + eps)
    tl.store(rstd_ptr + row, rstd)  # scalar
    for start in range(0, end, CHUNKS * BLOCK_N):
        chunks = _load_chunks(sources, places, start, lanes, N, BLOCK_N, CHUNKS, LOOPED, "evict_first")
        results = ()
        for i in tl.static_range(CHUNKS):
            y = (chunks[i].to(tl.float32) - mean) * rstd
            weight = _chunk_of(weights, i, weight_ptr, start + i * BLOCK_N + lanes, N, WEIGHTS_FIRST)
            bias = _chunk_of(biases, i, bias_ptr, start + i * BLOCK_N + lanes, N, WEIGHTS_FIRST)
            y = _affine(y, weight, bias, y_ptr, ZERO_CENTERED, ROUND_FIRST)
            results += (y,)  # type: ignore[assignment]
        for i in tl.static_range(CHUNKS):
            cols = start + i * BLOCK_N + lanes
            tl.store(y_ptr + row * N + cols, results[i], mask=_inside(cols, N, i, CHUNKS, LOOPED))  # [BLOCK_N]


@triton.jit
def _chunk_of(chunks, i: tl.constexpr, ptr, cols, N, WEIGHTS_FIRST: tl.constexpr):
    """Chunk i of weight or bias, which is loaded now if it was not first; None without one."""
    if WEIGHTS_FIRST and ptr is not None:
        values = chunks[i]
    else:
        values = _load_columns(ptr, cols, N, "evict_last")
    return values


@triton.jit
def _load_chunks(
    sources, places, start, lanes, N, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, LOOPED: tl.constexpr,
    POLICY: tl.constexpr,
):  # fmt: skip
    """x, or x + residual rounded to the stream's dtype, from column `start` on, as CHUNKS blocks of [BLOCK_N]."""
    x_ptr, residual_ptr, h_ptr = sources
    chunks = ()
    for i in tl.static_range(CHUNKS):
        cols = start + i * BLOCK_N + lanes
        mask = _inside(cols, N, i, CHUNKS, LOOPED)
        h = tl.load(x_ptr + places[0] + cols, mask=mask, other=0.0, eviction_policy=POLICY)  # [BLOCK_N]
        if residual_ptr is not None:
            # [BLOCK_N]
            residual = tl.load(residual_ptr + places[1] + cols, mask=mask, other=0.0, eviction_policy=POLICY)
            h = (h.to(tl.float32) + residual.to(tl.float32)).to(h_ptr.dtype.element_ty)
        chunks += (h,)  # type: ignore[assignment]
    return chunks


@triton.jit
def _inside(cols, N, i, CHUNKS: tl.constexpr, LOOPED: tl.constexpr):
    """Which columns of a chunk the row has: of a row in one step all but the last chunk are whole."""
    return cols < N if i == CHUNKS - 1 or LOOPED else cols >= 0


class _Plan(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    tail: int = 0  # columns behind block_n, a power of 2
    programs: int = 0  # on an SM, of a row that is read again, that registers suffice for (0: as the compiler likes)
    chunks: int = 0  # of block_n columns, of a row that is read again for each pass; 0: it stays in registers
    looped: bool = False  # it has more chunks than that
    weights_first: bool = False  # loaded ahead of the sums, which takes registers


# for each SM; of more rows other programs hide the time of a load
_FEW_ROWS = 2


@tunable("NVIDIA H200, 2026-11-24", ("block_m", "num_warps"))
def _plan_fwd(M: int, N: int, is_layer: bool, has_residual: bool, element_size: int, target: Target) -> _Plan:
    plan = _plan_of_many(N, is_layer, has_residual, element_size)
    return _plan_of_few(plan, N, element_size) if M <= _FEW_ROWS * target.num_sms else plan


@lru_cache
def _plan_of_few(plan: _Plan, N: int, element_size: int) -> _Plan:
    """All is loaded at once, and registers are free.

    A row has the same threads as among many, so that its sums have the same bits: not fewer rows than threads of whole
    vectors are there for, nor one where there were several, whose tensors would take the weight's layout."""
    rows = max(2, 32 * plan.num_warps * 16 // (element_size * plan.block_n))
    return plan._replace(
        block_m=plan.block_m if plan.tail else min(plan.block_m, rows),
        # wide rows of float32 spill
        weights_first=not plan.looped and plan.chunks <= 8 and (element_size == 2 or N <= 8192),
    )


@lru_cache
def _plan_of_many(N: int, is_layer: bool, has_residual: bool, element_size: int) -> _Plan:
    # bf16, 16384 rows, ms, in registers / read again (a copy; benchmarks/results/2026-11-24_h200_norms.md has all):
    #   rms 4096 0.0677 / 0.0672 (0.0631); 6144 0.0986 / 0.0988 (0.0947); layer 4096 0.0682 / 0.0766
    #   layer 5120 0.0844 / 0.0950
    # float32, 2^25 elements, us: rms 8294 87 / 84; 10242 97 / 83; 12288 82 / 69, with a residual 155 / 140; 13001 123 /
    #   116; 18441 127 / 117; layer 8576 98 / 72; 10001 105 / 126; 13000 95 / 75, with a residual 196 / 150; 18441 156 /
    #   132; with a residual rms 16384 211 / 134, 20480 169 / 139, 10242 186 / 150, 12001 168 / 204, 20001 203 / 222;
    #   layer 8294 193 / 156, 10001 201 / 221, 13001 209 / 262, 20001 203 / 264
    reads_again = N > 6144
    if element_size == 4:
        # without whole vectors of 16 bytes
        in_registers = range(9217 if is_layer else 11265, 24577 if has_residual else 10241)
        reads_again = N > 8192 and (N % 4 == 0 or N not in in_registers)
    if reads_again:
        return _wide_plan(N, is_layer, has_residual, element_size)
    if N <= 2048:
        return _narrow_plan(N, is_layer, has_residual, element_size)
    block_n = next_power_of_2(N)
    whole = block_n // 2
    tail = max(256, next_power_of_2(N - whole)) if N > whole else 0
    if N in range(4097, 6145):
        return _Plan(1, whole, 8 if tail <= 1024 and not is_layer else 4, tail)
    if N in range(8193, 14337):
        return _Plan(1, whole, 4 if tail == 4096 else 16 if tail <= 2048 and not is_layer else 8, tail)
    if block_n > 16384:
        return _Plan(1, 16384, 16, tail)
    if block_n > 8192 or (is_layer and block_n > 4096):
        return _Plan(1, block_n, 8)
    return _Plan(2, block_n, 8)


def _narrow_plan(N: int, is_layer: bool, has_residual: bool, element_size: int) -> _Plan:
    block_n = next_power_of_2(N)
    vectors = N * element_size % 16 == 0
    if block_n <= 512 and not (has_residual and vectors):
        # one warp a row: sums across warps are barriers. us, one H200, 2^26 elements, this, 4 warps: rms 113 91, 137;
        # 201 87, 117; 443 86, 94; layer with bias 75 151, 305; 192 73, 86; 280 83, 122; 384 72, 92; 448 71, 82
        tail = 16 if N in range(65, 81) else 0
        block_n = 64 if tail else block_n
        # 257 with a residual 177, one warp 234
        return _Plan(min(64, 1024 // block_n), block_n, 2 if has_residual and block_n == 512 else 1, tail)
    if block_n == 1024 and not vectors:
        # layer with bias 713 120 (4 rows of 1024, 4 warps: 144), with a residual 184 (217); rms 933 87 (90)
        return _Plan(2, 512, 1 + has_residual, 256) if N <= 768 else _Plan(2, 1024, 2 + 2 * has_residual)
    if is_layer and vectors and element_size == 2 and not has_residual and N in range(1025, 1537):
        # 1280 69 (2 rows of 2048, 4 warps: 79); 1536 70 (73)
        return _Plan(1, 1024, 1, max(256, next_power_of_2(N - 1024)))
    return _Plan(min(16, 4096 // block_n), block_n, 4)


def _wide_plan(N: int, is_layer: bool, has_residual: bool, element_size: int) -> _Plan:
    # bf16, 16384 rows, one H200, ms: 8 warps / 16 with registers for 2 programs an SM / for 3 / 32 warps (a copy)
    #   rms   8192 0.1308 / 0.1285 / - / - (0.1263)   18432 0.2961 / 0.2938 / 0.2852 / 0.3253 (0.2841)
    #         24576 0.3874 / 0.3775 / 0.4440 / 0.3831 (0.3788)
    #   layer 8192 0.1330 / 0.1589 / - / - (0.1263)   18432 0.3008 / 0.3293 / 0.3171 / 0.3865 (0.2841)
    #         24576 0.4259 / 0.4205 / 0.4133 / 0.4322 (0.3788)   32768 0.5793 / 0.6371 / 0.8431 / 0.5903 (0.5050)
    #   18432 with a residual: rms 0.6162 / 0.5785 / 0.7329 / 0.6505, layer 0.6881 / 0.5787 / 0.7754 / 0.6409 (0.5681)
    #   49152: 16 warps / 32: rms 0.7914 / 0.7717, layer 1.0156 / 0.9804 (0.7575)
    # one H100: registers as the compiler likes / for 2 / for 3 (a copy 0.4001)
    #   16 warps, rms 18432 0.4004 / 0.4001 / 0.4167 (it spills); 9216 rows of 32768 0.4048 / 0.4414 (it spills) / -
    #   8 warps, layer 18432 0.4067 / 0.4016 / 0.4411; 9216 rows of 32768 0.4215 / 0.4559 / -
    #   odd widths, rms: 8 warps, 16: 10001 0.6350 / 0.6944; 20001 0.6305 / 0.6627; 30001 0.6585 / 0.7094
    #   8 warps, layer 20001 0.9718 / 0.9928 / -; 30001 1.1659 / 1.0068 / -
    # float32 on it, 16 warps with registers for 2 / 32 warps: 9216 rows of 16384 rms 0.4014 / 0.4026, layer 0.4061 /
    #   0.4111; 8192 of 18432 0.4046 / 0.4060, 0.4122 / 0.4049; 6144 of 24576 0.4274 / 0.4015, 0.4675 / 0.4033
    # float32 on one H200, 2^25 elements, us, 16 warps with 4 elements a thread / 32 with 8: with a residual rms 12288
    #   140 / 135, 13000 152 / 141, 16384 159 / 134, 20480 178 / 139, layer 12288 142 / 144, 14336 157 / 143; without
    #   rms 12288 69 / 86, 13001 116 / 139, 18434 89 / 106, layer 14338 88 / 117, 20001 131 / 170
    vectors = N * element_size % 16 == 0
    warps, programs = _wide_warps(N, is_layer, has_residual, element_size, vectors)
    # elements of a chunk that a thread has
    width = 4 if element_size == 4 and (warps == 16 or (vectors and not has_residual)) else 8
    chunks = cdiv(N, 32 * warps * width)
    # as many loads at once as spill at most 64 bytes on sm_90; without whole vectors a load is as many as elements
    if element_size == 4 and (warps == 16 or not has_residual):
        most, step = (10, 8) if vectors or warps == 16 else (5, 1)
    elif has_residual:
        most, step = (5, 4) if vectors else (2, 1)
    else:
        most, step = 192 // warps, 4 if vectors else 1
    looped = chunks > most
    if looped:
        chunks = cdiv(chunks, cdiv(chunks, step))
    return _Plan(1, 32 * warps * width, warps, programs=programs, chunks=chunks, looped=looped)


def _wide_warps(N: int, is_layer: bool, has_residual: bool, element_size: int, vectors: bool) -> tuple[int, int]:
    """Warps of a program, and how many programs an SM's registers must suffice for (0: as the compiler likes)."""
    if element_size == 4:
        return (16, 2) if N <= (12288 if has_residual else 16384 if vectors else 24576) else (32, 0)
    if N > 32768:
        return 32, 0
    if has_residual:
        return 16, 2
    if not vectors and N % 2:
        return 8, 2 if is_layer and N > 24576 else 0
    # us, bf16, 2^26 elements, one H200, 8 warps with registers as the compiler likes / for 2 / 16 warps for 2
    #   layer 7168 73.0 / 85.5 / 103.8   8192 69.9 / 80.2 / 96.8   12288 71.0 / 84.9 / 86.6   18432 75.1 / 77.7 / 83.1
    #         20480 80.5 / 77.8 / 81.5   24576 82.0 / 77.0 / 79.2
    #   rms   7168 68.4 / 66.3 / 67.0   8192 68.8 / 67.7 / 67.3   10240 68.9 / 67.9 / 81.1   12288 70.0 / 67.1 / 74.0
    #         14336 69.0 / 67.4 / 71.9   16384 70.6 / 70.4 / 69.1   18432 69.3 / 68.7 / 72.9   24576 72.2 / 69.9 / 68.9
    if is_layer:
        return 8, 2 if N in range(18433, 24577) else 0
    if vectors and N <= 20480:
        return 8, 2
    return 16, 2 if N <= 24576 else 0


def norm_fwd_outputs(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, is_layer: bool, *_: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    h = None if residual is None else torch.empty_like(residual, memory_format=torch.contiguous_format)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return y, h, rstd.new_empty(rstd.shape) if is_layer else None, rstd


def norm_fwd(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    is_layer: bool,
    zero_centered: bool,
    round_first: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    y, h, mean, rstd = norm_fwd_outputs(x, residual, weight, bias, eps, is_layer, zero_centered, round_first)
    M, N = x.shape[:-1].numel(), x.shape[-1]
    (x, residual), groups = row_groups(x, residual)  # type: ignore[assignment]
    target = Target.of(x.device)
    plan = _plan_fwd(M, N, is_layer, residual is not None, x.element_size(), target)
    tensors = (x, residual, weight, bias, y, h, mean, rstd)
    places = (*groups.sizes, *groups.strides[0], *groups.strides[1])
    modes = {"LEVELS": groups.levels, "IS_LAYER": is_layer, "ZERO_CENTERED": zero_centered, "ROUND_FIRST": round_first}
    if plan.chunks:
        # a warp's registers are given out 8 a thread at a time
        registers = target.registers_per_sm // (32 * plan.num_warps * plan.programs) // 8 * 8 if plan.programs else None
        _norm_fwd_wide_kernel[(M,)](
            *tensors, N, *places, eps, **modes, BLOCK_N=plan.block_n, CHUNKS=plan.chunks, LOOPED=plan.looped,
            WEIGHTS_FIRST=plan.weights_first, STARTS_EARLY=starts_early_if_small(target, M, M * N),
            num_warps=plan.num_warps, maxnreg=registers,
        )  # fmt: skip
    else:
        blocks = cdiv(M, plan.block_m)
        _norm_fwd_kernel[(blocks,)](
            *tensors, M, N, *places, eps, **modes, BLOCK_M=plan.block_m, BLOCK_N=plan.block_n,
            BLOCK_TAIL=plan.tail, WEIGHTS_FIRST=plan.weights_first,
            STARTS_EARLY=starts_early_if_small(target, blocks, M * N), num_warps=plan.num_warps,
        )  # fmt: skip
    return y, h, mean, rstd
