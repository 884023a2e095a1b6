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
    BLOCK_TAIL: tl.constexpr,
    PERSISTENT: tl.constexpr,
):
    pointers = (x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, h_ptr, mean_ptr, rstd_ptr)
    block = tl.program_id(0)
    strides = (stride_xm, stride_rm)
    loaded = _load_rows(x_ptr, residual_ptr, block, M, N, strides, BLOCK_M, BLOCK_N, BLOCK_TAIL)
    if PERSISTENT:
        # so wide a row leaves an SM one or two programs: each loads its next rows while it computes
        for block in range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
            after = block + tl.num_programs(0)
            ahead = _load_rows(x_ptr, residual_ptr, after, M, N, strides, BLOCK_M, BLOCK_N, BLOCK_TAIL)
            _norm_rows(
                pointers, loaded, block, M, N, eps, IS_LAYER, ZERO_CENTERED, ROUND_FIRST, BLOCK_M, BLOCK_N, BLOCK_TAIL
            )
            loaded = ahead
    else:
        _norm_rows(
            pointers, loaded, block, M, N, eps, IS_LAYER, ZERO_CENTERED, ROUND_FIRST, BLOCK_M, BLOCK_N, BLOCK_TAIL
        )


@triton.jit
def _load_rows(
    x_ptr,
    residual_ptr,
    block,
    M,
    N,
    strides,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
):
    """x and residual of BLOCK_M rows, each as BLOCK_N columns and the BLOCK_TAIL behind them, in their own dtypes."""
    rows = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    x = tl.load(x_ptr + rows * strides[0] + cols, mask=(rows < M) & (cols < N), other=0.0)  # [BLOCK_M, BLOCK_N]
    residual, tail, residual_tail = x, x, x
    if residual_ptr is not None:
        # [BLOCK_M, BLOCK_N]
        residual = tl.load(residual_ptr + rows * strides[1] + cols, mask=(rows < M) & (cols < N), other=0.0)
    if BLOCK_TAIL > 0:
        cols = BLOCK_N + tl.arange(0, BLOCK_TAIL)[None, :]
        tail = tl.load(
            x_ptr + rows * strides[0] + cols, mask=(rows < M) & (cols < N), other=0.0
        )  # [BLOCK_M, BLOCK_TAIL]
        residual_tail = tail
        if residual_ptr is not None:
            # [BLOCK_M, BLOCK_TAIL]
            residual_tail = tl.load(residual_ptr + rows * strides[1] + cols, mask=(rows < M) & (cols < N), other=0.0)
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
    h = _sum(x, residual, residual_ptr, h_ptr, rows * N + cols, mask)
    if BLOCK_TAIL > 0:
        tail_cols = BLOCK_N + tl.arange(0, BLOCK_TAIL)[None, :]
        tail_mask = (rows < M) & (tail_cols < N)
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
    y = _affine(h * rstd, weight_ptr, bias_ptr, y_ptr, cols, N, ZERO_CENTERED, ROUND_FIRST)
    tl.store(y_ptr + rows * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)  # [BLOCK_M, BLOCK_N]
    if BLOCK_TAIL > 0:
        y = _affine(tail * rstd, weight_ptr, bias_ptr, y_ptr, tail_cols, N, ZERO_CENTERED, ROUND_FIRST)
        tl.store(y_ptr + rows * N + tail_cols, y.to(y_ptr.dtype.element_ty), mask=tail_mask)  # [BLOCK_M, BLOCK_TAIL]


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
def _affine(y, weight_ptr, bias_ptr, y_ptr, cols, N, ZERO_CENTERED: tl.constexpr, ROUND_FIRST: tl.constexpr):
    # as Hugging Face's Llama does: the normalized row is rounded to its dtype ahead of the weight
    if ROUND_FIRST:
        y = y.to(y_ptr.dtype.element_ty).to(tl.float32)
    if weight_ptr is not None:
        y *= norm_weight(weight_ptr, cols, N, ZERO_CENTERED)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)  # the shape of cols
    return y


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
):
    # one row a program, in blocks; each lane keeps a running mean and sum of squared deviations, combined at the end
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_N)
    mean = tl.zeros([BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_N], tl.float32)
    blocks = 0.0
    for start in range(0, N, BLOCK_N):
        cols = start + lanes
        mask = cols < N
        h = tl.load(x_ptr + row * stride_xm + cols, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_N]
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
            h = tl.load(x_ptr + row * stride_xm + cols, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_N]
        y = _affine((h - row_mean) * rstd, weight_ptr, bias_ptr, y_ptr, cols, N, ZERO_CENTERED, ROUND_FIRST)
        tl.store(y_ptr + row * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)  # [BLOCK_N]


class _Plan(NamedTuple):
    looped: bool  # the row does not fit in one block
    block_m: int
    block_n: int
    num_warps: int
    tail: int = 0  # columns behind block_n, a power of 2
    programs: int = 0  # on an SM, which loop over blocks of rows; 0: a program for each


@tunable("NVIDIA H200, 2026-11-21", ("block_m", "num_warps"))
def _plan_fwd(M: int, N: int, is_layer: bool, has_residual: bool, element_size: int, target: Target) -> _Plan:
    # bf16, 16384 rows, ms; a plain copy takes 0.0671 ms at N=4096 and 0.1282 at 8192:
    #   rms    4096: 2 rows 8 warps 0.0697, 1 row 8 warps 0.0696;   8192: 2 rows 8 warps 0.1319, 1 row 8 warps 0.1344
    #   layer  4096: 2 rows 8 warps 0.0696, 1 row 8 warps 0.0713;   8192: 2 rows 8 warps 0.1387, 1 row 8 warps 0.1327
    # a persistent grid, cache hints on loads and on stores: no gain
    # between the powers of 2 a block and a tail, warps, beside one block; in brackets torch.compile:
    #   rms    5120 8 warps 0.083 / 0.084 (0.091)    6144 4 warps 0.098 / 0.099 (0.099)
    #   rms    10240 16 warps 0.161 / 0.175 (0.160)  12288 4 warps 0.202 / 0.205 (0.192)
    #   rms    14336 8 warps 0.225 / 0.231 (0.224)
    #   layer  5120 4 warps 0.084 / 0.103 (0.152)    6144 4 warps 0.100 / 0.112 (0.127)
    #   layer  10240 8 warps 0.175 / 0.220 (0.179)   14336 8 warps 0.250 / 0.254 (0.237)
    #   layer  12288 8 warps, 2 programs an SM 0.216 / 4 warps, a program a row 0.232 (0.207)
    block_n = next_power_of_2(N)
    whole = block_n // 2
    tail = max(256, next_power_of_2(N - whole)) if N > whole else 0
    if N in range(4097, 6145):
        return _Plan(False, 1, whole, 8 if tail <= 1024 and not is_layer else 4, tail)
    if is_layer and not has_residual and element_size == 2 and N in range(10241, 12289):
        return _Plan(False, 1, whole, 8, tail, programs=2)
    if N in range(8193, 14337):
        warps = 4 if tail == 4096 else 16 if tail <= 2048 and not is_layer else 8
        return _Plan(False, 1, whole, warps, tail)
    if block_n > 32768:
        # 49152 and 65536: blocks of 2048, 4096 and 8192 within 3 % of each other
        return _Plan(True, 1, 4096, 16)
    if block_n > 16384:
        return _wide_plan(16384, tail, is_layer, has_residual, element_size)
    if block_n > 8192 or (is_layer and block_n > 4096):
        return _Plan(False, 1, block_n, 8)
    if block_n >= 4096:
        return _Plan(False, 2, block_n, 8)
    return _Plan(False, min(16, 4096 // block_n), block_n, 4)


def _wide_plan(block: int, tail: int, is_layer: bool, has_residual: bool, element_size: int) -> _Plan:
    # bf16, 16384 rows, ms: programs that loop, 8 / 16 / 32 warps; a program a row; 4096 columns a step (torch.compile)
    #   rms    18432 .310 / .304 / .309; .345; .316 (.291)   20480 .346 / .339 / .345; -; .358 (.314)
    #   rms    24576 - / .407 / .414; -; .463 (.376)         28672 - / .474 / .477; .487; .594 (.483)
    #   rms    32768 - / .567 / .538; .548; .721 (.511)      20480 with a residual - / .671 / .676; .640; .652 (.660)
    #   layer  18432 .325 / .414 / -; -; .382 (.306)         20480 .355 / .473 / -; -; .403 (.343)
    #   layer  24576 - / .428 / .412; .546; .506 (.430)      28672 spills; .601; .627 (.538)
    #   layer  32768 spills; .646; .748 (.641)               20480 with a residual .690 / .693 / -; .650; .669 (.677)
    #   layer  18432 of float32 .642 / .621 / -; .672; .752 (.621)
    if has_residual or (is_layer and tail > 8192):
        return _Plan(False, 1, block, 16, tail)
    if is_layer:
        warps = 16 if element_size == 4 else 8 if tail <= 4096 else 32
    else:
        warps = 16 if tail <= 8192 else 32
    return _Plan(False, 1, block, warps, tail, programs=1)


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
            *tensors, N, *strides, eps, **modes, BLOCK_N=plan.block_n, num_warps=plan.num_warps
        )
    else:
        blocks = cdiv(M, plan.block_m)
        if plan.programs:
            blocks = min(blocks, plan.programs * target.num_sms)
        _norm_fwd_kernel[(blocks,)](
            *tensors, M, N, *strides, eps, **modes, BLOCK_M=plan.block_m, BLOCK_N=plan.block_n,
            BLOCK_TAIL=plan.tail, PERSISTENT=plan.programs > 0, num_warps=plan.num_warps,
        )  # fmt: skip
    return y, h, mean, rstd
