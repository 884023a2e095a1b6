"""Kernels of the forward of RMSNorm and LayerNorm, their plan and launches; norm.py has the formulas."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.shapes import as_rows, cdiv, next_power_of_2
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
    stride_xm,
    stride_rm,
    eps,
    IS_LAYER: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr,
    RELOAD: tl.constexpr,
    HINTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    lanes = tl.arange(0, BLOCK_N)[None, :]
    sources = (x_ptr, residual_ptr, h_ptr)
    places = (rows * stride_xm + lanes, rows * stride_rm + lanes)
    # what is read again should stay in the L1, and what is not should leave it to the weight
    FIRST: tl.constexpr = "evict_last" if RELOAD and HINTS == 1 else "evict_first" if HINTS == 1 else ""
    LAST: tl.constexpr = "evict_first" if HINTS == 1 else ""

    # a row's loads ahead of its stores, here and below: the compiler does not move a load ahead of a store, which
    # might be to the same place
    chunks = ()
    for i in tl.static_range(CHUNKS):
        mask = _inside(rows, lanes, i, M, N, BLOCK_N, CHUNKS)
        chunks += (_load_chunk(sources, places, i * BLOCK_N, mask, FIRST),)  # type: ignore[assignment]
    affines = ()
    if EARLY:
        for i in tl.static_range(CHUNKS):
            affines += (_load_affine(weight_ptr, bias_ptr, i * BLOCK_N + lanes, N, HINTS),)  # type: ignore[assignment]
    if residual_ptr is not None:
        for i in tl.static_range(CHUNKS):
            mask = _inside(rows, lanes, i, M, N, BLOCK_N, CHUNKS)
            tl.store(h_ptr + rows * N + i * BLOCK_N + lanes, chunks[i], mask=mask)  # [BLOCK_M, BLOCK_N]
    mean = 0.0
    if IS_LAYER:
        # mean first: E[h²] - mean² would lose the digits of a row whose mean is large
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for i in tl.static_range(CHUNKS):
            total += chunks[i].to(tl.float32)
        mean = tl.sum(total, axis=1, keep_dims=True) / N
        tl.store(mean_ptr + rows, mean, mask=rows < M)  # [BLOCK_M, 1]
    squares = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in tl.static_range(CHUNKS):
        mask = _inside(rows, lanes, i, M, N, BLOCK_N, CHUNKS)
        h = _load_chunk(sources, places, i * BLOCK_N, mask, FIRST) if RELOAD and IS_LAYER else chunks[i]
        h = h.to(tl.float32)
        if IS_LAYER:
            h = h - mean if i < CHUNKS - 1 else tl.where(mask, h - mean, 0.0)
        squares += h * h
    rstd = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / N + eps)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)  # [BLOCK_M, 1]

    results = ()
    for i in tl.static_range(CHUNKS):
        mask = _inside(rows, lanes, i, M, N, BLOCK_N, CHUNKS)
        h = _load_chunk(sources, places, i * BLOCK_N, mask, LAST) if RELOAD else chunks[i]
        y = (h.to(tl.float32) - mean) * rstd
        affine = affines[i] if EARLY else _load_affine(weight_ptr, bias_ptr, i * BLOCK_N + lanes, N, HINTS)
        results += (_affine(y, affine, weight_ptr, bias_ptr, y_ptr, ZERO_CENTERED, ROUND_FIRST),)  # type: ignore[assignment]
    for i in tl.static_range(CHUNKS):
        mask = _inside(rows, lanes, i, M, N, BLOCK_N, CHUNKS)
        tl.store(y_ptr + rows * N + i * BLOCK_N + lanes, results[i], mask=mask)  # [BLOCK_M, BLOCK_N]


@triton.jit
def _inside(rows, lanes, i, M, N, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr):
    """Which of a chunk is part of the tensor: only the last one may go beyond the row."""
    if i == CHUNKS - 1:
        return (rows < M) & (i * BLOCK_N + lanes < N)
    else:
        return (rows < M) & (lanes >= 0)


@triton.jit
def _load_chunk(sources, places, start: tl.constexpr, mask, POLICY: tl.constexpr):
    """x, or x + residual rounded to the stream's dtype, from column `start` on: [BLOCK_M, BLOCK_N]."""
    x_ptr, residual_ptr, h_ptr = sources
    h = tl.load(x_ptr + places[0] + start, mask=mask, other=0.0, eviction_policy=POLICY)  # [BLOCK_M, BLOCK_N]
    if residual_ptr is not None:
        # [BLOCK_M, BLOCK_N]
        residual = tl.load(residual_ptr + places[1] + start, mask=mask, other=0.0, eviction_policy=POLICY)
        h = (h.to(tl.float32) + residual.to(tl.float32)).to(h_ptr.dtype.element_ty)
    return h


@triton.jit
def _load_affine(weight_ptr, bias_ptr, cols, N, HINTS: tl.constexpr):
    """Weight and bias in their own dtypes, the shape of cols; whatever one that is absent."""
    POLICY: tl.constexpr = "evict_last" if HINTS else ""
    w, b = cols, cols
    if weight_ptr is not None:
        w = tl.load(weight_ptr + cols, mask=cols < N, other=0.0, eviction_policy=POLICY)  # the shape of cols
    if bias_ptr is not None:
        b = tl.load(bias_ptr + cols, mask=cols < N, other=0.0, eviction_policy=POLICY)  # the shape of cols
    return w, b


@triton.jit
def _affine(
    y, affine, weight_ptr, bias_ptr, y_ptr, ZERO_CENTERED: tl.constexpr, ROUND_FIRST: tl.constexpr
):  # fmt: skip
    """affine: of `_load_affine`."""
    # as Hugging Face's Llama does: the normalized row is rounded to its dtype ahead of the weight
    if ROUND_FIRST:
        y = y.to(y_ptr.dtype.element_ty).to(tl.float32)
    if weight_ptr is not None:
        w = affine[0].to(tl.float32)
        y *= w + 1.0 if ZERO_CENTERED else w
    if bias_ptr is not None:
        y += affine[1].to(tl.float32)
    return y.to(y_ptr.dtype.element_ty)


@triton.jit
def norm_weight(weight_ptr, cols, N, ZERO_CENTERED: tl.constexpr):
    w = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)  # the shape of cols
    if ZERO_CENTERED:
        w += 1.0
    return w


@kernel(aligned=("N",), down_to=2)
def _norm_fwd_looped_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    h_ptr,
    mean_ptr,
    rstd_ptr,
    N,
    stride_xm,
    stride_rm,
    eps,
    IS_LAYER: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HINTS: tl.constexpr,
):
    # one row a program, in blocks; each lane keeps a running mean and sum of squared deviations, combined at the end
    row = tl.program_id(0).to(tl.int64)
    FIRST: tl.constexpr = "evict_last" if HINTS == 1 else ""
    AGAIN: tl.constexpr = "evict_first" if HINTS == 1 else ""
    lanes = tl.arange(0, BLOCK_N)
    mean = tl.zeros([BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_N], tl.float32)
    blocks = 0.0
    for start in range(0, N, BLOCK_N):
        cols = start + lanes
        mask = cols < N
        # [BLOCK_N]
        h = tl.load(x_ptr + row * stride_xm + cols, mask=mask, other=0.0, eviction_policy=FIRST).to(tl.float32)
        if residual_ptr is not None:
            h += tl.load(residual_ptr + row * stride_rm + cols, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_N]
            h = h.to(h_ptr.dtype.element_ty)
            tl.store(h_ptr + row * N + cols, h, mask=mask)  # [BLOCK_N]
            h = h.to(tl.float32)
        if IS_LAYER:
            # Welford's update, lane by lane; the lanes are combined behind the loop by Chan's formula. All lanes in
            # the mask have as many elements, so one division serves the block
            blocks += 1.0
            delta = tl.where(mask, h - mean, 0.0)
            mean += delta * (1.0 / blocks)
            squares += delta * tl.where(mask, h - mean, 0.0)
        else:
            squares += h * h
    row_mean = 0.0
    total = tl.sum(squares, axis=0)
    if IS_LAYER:
        count = tl.maximum((N - lanes + BLOCK_N - 1) // BLOCK_N, 0).to(tl.float32)  # [BLOCK_N]
        row_mean = tl.sum(mean * count, axis=0) / N
        total += tl.sum(count * (mean - row_mean) * (mean - row_mean), axis=0)
        tl.store(mean_ptr + row, row_mean)  # scalar
    rstd = tl.rsqrt(total / N + eps)
    tl.store(rstd_ptr + row, rstd)  # scalar
    for start in range(0, N, BLOCK_N):
        cols = start + lanes
        mask = cols < N
        if residual_ptr is not None:
            # this program wrote h itself, and each lane reads only what it wrote
            h = tl.load(h_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_N]
        else:
            # [BLOCK_N]
            h = tl.load(x_ptr + row * stride_xm + cols, mask=mask, other=0.0, eviction_policy=AGAIN).to(tl.float32)
        affine = _load_affine(weight_ptr, bias_ptr, cols, N, HINTS)
        y = _affine((h - row_mean) * rstd, affine, weight_ptr, bias_ptr, y_ptr, ZERO_CENTERED, ROUND_FIRST)
        tl.store(y_ptr + row * N + cols, y, mask=mask)  # [BLOCK_N]


class _Plan(NamedTuple):
    looped: bool  # the row is read twice, block by block
    block_m: int
    block_n: int
    num_warps: int
    chunks: int = 1  # of block_n columns, that a row has
    reload: bool = False  # a row is read again for each pass over it, from the L1
    programs: int = 0  # that an SM has registers for at least; 0: as the compiler likes
    hints: int = 0  # to the caches: the weight stays, x does not
    early: bool = False


@tunable("NVIDIA H200, 2026-11-21", ("block_m", "num_warps"))
def _plan_fwd(M: int, N: int, is_layer: bool, has_residual: bool, element_size: int, target: Target) -> _Plan:
    # bf16, 16384 rows, ms; a plain copy takes 0.0671 ms at N=4096 and 0.1282 at 8192:
    #   rms    4096: 2 rows 8 warps 0.0697, 1 row 8 warps 0.0696;   8192: 2 rows 8 warps 0.1319, 1 row 8 warps 0.1344
    #   layer  4096: 2 rows 8 warps 0.0696, 1 row 8 warps 0.0713;   8192: 2 rows 8 warps 0.1387, 1 row 8 warps 0.1327
    block_n = next_power_of_2(N)
    if block_n > 32768:
        # 49152 and 65536: blocks of 2048, 4096 and 8192 within 3 % of each other
        return _Plan(True, 1, 4096, 16)
    if N * element_size > 36864 and block_n > 4096:
        return _chunked(N, 16, 2, reload=True)
    if block_n > 4096:
        return _chunked(N, 16, 2) if N * element_size > 16384 else _chunked(N, 8)
    if block_n == 4096:
        return _Plan(False, 2, block_n, 8)
    return _Plan(False, min(16, 4096 // block_n), block_n, 4)


def _chunked(N: int, warps: int, programs: int = 0, reload: bool = False) -> _Plan:
    """A row in chunks of 8 elements a thread."""
    return _Plan(False, 1, 256 * warps, warps, cdiv(N, 256 * warps), reload, programs, 1)


def norm_fwd_outputs(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, is_layer: bool, *_: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    h = None if residual is None else torch.empty_like(residual, memory_format=torch.contiguous_format)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return y, h, torch.empty_like(rstd) if is_layer else None, rstd


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
    rows = as_rows(x)
    residual = None if residual is None else as_rows(residual)
    M, N = rows.shape
    target = Target.of(x.device)
    plan = _plan_fwd(M, N, is_layer, residual is not None, x.element_size(), target)
    tensors = (rows, residual, weight, bias, y, h, mean, rstd)
    strides = (rows.stride(0), 0 if residual is None else residual.stride(0))
    modes = {"IS_LAYER": is_layer, "ZERO_CENTERED": zero_centered, "ROUND_FIRST": round_first}
    if plan.looped:
        _norm_fwd_looped_kernel[(M,)](
            *tensors, N, *strides, eps, **modes, BLOCK_N=plan.block_n, HINTS=plan.hints, num_warps=plan.num_warps
        )
    else:
        # a warp's registers are given out 8 a thread at a time
        registers = target.registers_per_sm // (32 * plan.num_warps * plan.programs) // 8 * 8 if plan.programs else None
        _norm_fwd_kernel[(cdiv(M, plan.block_m),)](
            *tensors, M, N, *strides, eps, **modes, BLOCK_M=plan.block_m, BLOCK_N=plan.block_n,
            CHUNKS=plan.chunks, RELOAD=plan.reload, HINTS=plan.hints, EARLY=plan.early, num_warps=plan.num_warps,
            maxnreg=registers,
        )  # fmt: skip
    return y, h, mean, rstd
