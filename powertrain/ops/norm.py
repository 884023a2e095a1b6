"""RMSNorm and LayerNorm, with the residual addition before them, in one kernel.

    h  = x + residual                                     (h = x without a residual), rounded to its dtype
    x̂  = (h - mean) * rstd                                (mean = 0 for RMSNorm)
    y  = x̂ * w + b                                        (w = 1 + weight if zero-centred)

    wdy = dy * w
    dh  = rstd * (wdy - mean(wdy) - x̂ * mean(wdy * x̂)) + dh_out     (without mean(wdy) for RMSNorm)
    dw  = sum over rows of dy * x̂;   db = sum over rows of dy

Saved: h (x itself without a residual), rstd [rows] float32, mean [rows] float32 for LayerNorm. Everything is computed
in float32. M rows of N elements of e bytes: forward moves 2*M*N*e bytes (4*M*N*e with a residual), backward 3*M*N*e,
plus the partial weight gradients [programs, N] float32; about 8 and 16 operations an element.

dw is summed per program over rows strided by the number of programs, then over programs by a second kernel: no atomics,
so the same bits every time. Rows beyond 16384 elements do not fit in registers and are read twice, in blocks.

Sources: Zhang and Sennrich, arXiv:1910.07467; Ba et al., arXiv:1607.06450; chunked variance after Chan et al. 1979.
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.shapes import acc_dtype, as_rows, cdiv, next_power_of_2
from powertrain.runtime import checks
from powertrain.runtime.dispatch import Op, falls_back, use_kernel, without_autocast
from powertrain.runtime.launch import kernel
from powertrain.runtime.sharding import leading_dims, placements, saved_dims
from powertrain.runtime.target import Target
from powertrain.runtime.tuning import tunable

Casting = Literal["llama", "gemma", "te"]


def rms_norm_ref(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered: bool = False,
    casting: Casting = "te",
) -> Tensor | tuple[Tensor, Tensor]:
    """The specification of `rms_norm`, in plain PyTorch."""
    h = x if residual is None else (x.to(acc_dtype(x.dtype)) + residual).to(residual.dtype)
    z = h.to(acc_dtype(h.dtype))
    y = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
    y = _affine_ref(y, weight, bias, zero_centered, casting, x.dtype)
    return y if residual is None else (y, h)


def layer_norm_ref(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    zero_centered: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The specification of `layer_norm`, in plain PyTorch."""
    h = x if residual is None else (x.to(acc_dtype(x.dtype)) + residual).to(residual.dtype)
    z = h.to(acc_dtype(h.dtype))
    z = z - z.mean(-1, keepdim=True)
    y = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
    y = _affine_ref(y, weight, bias, zero_centered, "te", x.dtype)
    return y if residual is None else (y, h)


def _affine_ref(
    y: Tensor, weight: Tensor | None, bias: Tensor | None, zero_centered: bool, casting: str, dtype: torch.dtype
) -> Tensor:
    if casting == "llama":
        y = y.to(dtype).to(y.dtype)
    if weight is not None:
        y = y * (weight.to(y.dtype) + 1 if zero_centered else weight.to(y.dtype))
    if bias is not None:
        y = y + bias
    return y.to(dtype)


def rms_norm_bwd_ref(
    dy: Tensor, h: Tensor, weight: Tensor, *, eps: float = 1e-6, zero_centered: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The specification of the backward of `rms_norm`: (dh, dweight, dbias); h, the normalized input, is [..., N]."""
    g, z, w = (x.to(acc_dtype(x.dtype)) for x in (dy, h, weight))
    rstd = torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
    y = z * rstd
    wdy = g * (w + 1 if zero_centered else w)
    dh = rstd * (wdy - y * (wdy * y).mean(-1, keepdim=True))
    return dh, (g * y).flatten(0, -2).sum(0), g.flatten(0, -2).sum(0)


def layer_norm_bwd_ref(
    dy: Tensor, h: Tensor, weight: Tensor, *, eps: float = 1e-5, zero_centered: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The specification of the backward of `layer_norm`: (dh, dweight, dbias)."""
    z = h.to(acc_dtype(h.dtype))
    z = z - z.mean(-1, keepdim=True)
    dz, dweight, dbias = rms_norm_bwd_ref(dy, z, weight, eps=eps, zero_centered=zero_centered)
    return dz - dz.mean(-1, keepdim=True), dweight, dbias


@kernel(aligned=("N",))
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
):
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < N)

    h = tl.load(x_ptr + rows * stride_xm + cols, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_N]
    if residual_ptr is not None:
        h += tl.load(residual_ptr + rows * stride_rm + cols, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_N]
        h = h.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + rows * N + cols, h, mask=mask)  # [BLOCK_M, BLOCK_N]
        h = h.to(tl.float32)
    if IS_LAYER:
        mean = tl.sum(h, axis=1, keep_dims=True) / N
        h = tl.where(mask, h - mean, 0.0)
        tl.store(mean_ptr + rows, mean, mask=rows < M)  # [BLOCK_M, 1]
    rstd = tl.rsqrt(tl.sum(h * h, axis=1, keep_dims=True) / N + eps)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)  # [BLOCK_M, 1]
    y = _affine(h * rstd, weight_ptr, bias_ptr, y_ptr, cols, N, ZERO_CENTERED, ROUND_FIRST)
    tl.store(y_ptr + rows * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)  # [BLOCK_M, BLOCK_N]


@triton.jit
def _affine(y, weight_ptr, bias_ptr, y_ptr, cols, N, ZERO_CENTERED: tl.constexpr, ROUND_FIRST: tl.constexpr):
    if ROUND_FIRST:
        y = y.to(y_ptr.dtype.element_ty).to(tl.float32)
    if weight_ptr is not None:
        y *= _weight(weight_ptr, cols, N, ZERO_CENTERED)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)  # the shape of cols
    return y


@triton.jit
def _weight(weight_ptr, cols, N, ZERO_CENTERED: tl.constexpr):
    w = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)  # the shape of cols
    if ZERO_CENTERED:
        w += 1.0
    return w


@kernel(aligned=("N",))
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
    count = tl.zeros([BLOCK_N], tl.float32)
    mean = tl.zeros([BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_N], tl.float32)
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
            count += tl.where(mask, 1.0, 0.0)
            delta = tl.where(mask, h - mean, 0.0)
            mean += delta / tl.maximum(count, 1.0)
            squares += delta * tl.where(mask, h - mean, 0.0)
        else:
            squares += h * h
    row_mean = 0.0
    total = tl.sum(squares, axis=0)
    if IS_LAYER:
        row_mean = tl.sum(mean * count, axis=0) / N
        total += tl.sum(count * (mean - row_mean) * (mean - row_mean), axis=0)
        tl.store(mean_ptr + row, row_mean)  # scalar
    rstd = tl.rsqrt(total / N + eps)
    tl.store(rstd_ptr + row, rstd)  # scalar
    for start in range(0, N, BLOCK_N):
        cols = start + lanes
        mask = cols < N
        if residual_ptr is not None:
            h = tl.load(h_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_N]
        else:
            h = tl.load(x_ptr + row * stride_xm + cols, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_N]
        y = _affine((h - row_mean) * rstd, weight_ptr, bias_ptr, y_ptr, cols, N, ZERO_CENTERED, ROUND_FIRST)
        tl.store(y_ptr + row * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)  # [BLOCK_N]


@kernel(aligned=("N",))
def _norm_bwd_kernel(
    dy_ptr,
    dh_ptr,
    h_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dresidual_ptr,
    dw_partial_ptr,
    db_partial_ptr,
    M,
    N,
    stride_dym,
    stride_dhm,
    stride_hm,
    IS_LAYER: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIPELINE: tl.constexpr,
):
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK_N)[None, :]
    if weight_ptr is not None:
        w = _weight(weight_ptr, cols, N, ZERO_CENTERED)
    dw = tl.zeros([1, BLOCK_N], tl.float32)
    db = tl.zeros([1, BLOCK_N], tl.float32)
    # strided rows, pipelined: with num_stages=1 this took 0.125 to 0.134 ms at 16384x4096 on an H200, with 3 0.107
    for block in tl.range(program, tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=PIPELINE):
        rows = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        mask = (rows < M) & (cols < N)
        h = tl.load(h_ptr + rows * stride_hm + cols, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_N]
        dy = tl.load(dy_ptr + rows * stride_dym + cols, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_N]
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)  # [BLOCK_M, 1]
        if IS_LAYER:
            h = tl.where(mask, h - tl.load(mean_ptr + rows, mask=rows < M, other=0.0), 0.0)  # [BLOCK_M, 1]
        xhat = h * rstd
        if dw_partial_ptr is not None:
            dw += tl.sum(dy * xhat, axis=0, keep_dims=True)
        if db_partial_ptr is not None:
            db += tl.sum(dy, axis=0, keep_dims=True)
        if dx_ptr is not None:
            wdy = dy
            if weight_ptr is not None:
                wdy = dy * w
            dx = wdy - xhat * (tl.sum(wdy * xhat, axis=1, keep_dims=True) / N)
            if IS_LAYER:
                dx -= tl.sum(wdy, axis=1, keep_dims=True) / N
            dx *= rstd
            if dh_ptr is not None:
                # [BLOCK_M, BLOCK_N]
                dx += tl.load(dh_ptr + rows * stride_dhm + cols, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx_ptr + rows * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)  # [BLOCK_M, BLOCK_N]
            if dresidual_ptr is not None:
                # [BLOCK_M, BLOCK_N]
                tl.store(dresidual_ptr + rows * N + cols, dx.to(dresidual_ptr.dtype.element_ty), mask=mask)
    partial = program.to(tl.int64) * N + cols
    if dw_partial_ptr is not None:
        tl.store(dw_partial_ptr + partial, dw, mask=cols < N)  # [1, BLOCK_N]
    if db_partial_ptr is not None:
        tl.store(db_partial_ptr + partial, db, mask=cols < N)  # [1, BLOCK_N]


@kernel(aligned=("N",))
def _norm_bwd_looped_kernel(
    dy_ptr,
    dh_ptr,
    h_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dresidual_ptr,
    N,
    stride_dym,
    stride_dhm,
    stride_hm,
    IS_LAYER: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_N)
    rstd = tl.load(rstd_ptr + row)  # scalar
    mean = 0.0
    if IS_LAYER:
        mean = tl.load(mean_ptr + row)  # scalar
    sum_wdy = tl.zeros([BLOCK_N], tl.float32)
    sum_wdy_xhat = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + lanes
        wdy, xhat = _wdy_xhat(
            dy_ptr + row * stride_dym, h_ptr + row * stride_hm, weight_ptr, mean, rstd, cols, N, ZERO_CENTERED
        )
        sum_wdy += wdy
        sum_wdy_xhat += wdy * xhat
    mean_wdy_xhat = tl.sum(sum_wdy_xhat, axis=0) / N
    mean_wdy = 0.0
    if IS_LAYER:
        mean_wdy = tl.sum(sum_wdy, axis=0) / N
    for start in range(0, N, BLOCK_N):
        cols = start + lanes
        wdy, xhat = _wdy_xhat(
            dy_ptr + row * stride_dym, h_ptr + row * stride_hm, weight_ptr, mean, rstd, cols, N, ZERO_CENTERED
        )
        dx = (wdy - mean_wdy - xhat * mean_wdy_xhat) * rstd
        if dh_ptr is not None:
            dx += tl.load(dh_ptr + row * stride_dhm + cols, mask=cols < N, other=0.0).to(tl.float32)  # [BLOCK_N]
        tl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)  # [BLOCK_N]
        if dresidual_ptr is not None:
            tl.store(dresidual_ptr + row * N + cols, dx.to(dresidual_ptr.dtype.element_ty), mask=cols < N)  # [BLOCK_N]


@triton.jit
def _wdy_xhat(dy_ptr, h_ptr, weight_ptr, mean, rstd, cols, N, ZERO_CENTERED: tl.constexpr):
    mask = cols < N
    h = tl.load(h_ptr + cols, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_N]
    wdy = tl.load(dy_ptr + cols, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_N]
    if weight_ptr is not None:
        wdy *= _weight(weight_ptr, cols, N, ZERO_CENTERED)
    return wdy, tl.where(mask, (h - mean) * rstd, 0.0)


@kernel(aligned=("N",))
def _norm_dw_looped_kernel(
    dy_ptr,
    h_ptr,
    mean_ptr,
    rstd_ptr,
    dw_partial_ptr,
    db_partial_ptr,
    M,
    N,
    stride_dym,
    stride_hm,
    IS_LAYER: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < N
    dw = tl.zeros([BLOCK_N], tl.float32)
    db = tl.zeros([BLOCK_N], tl.float32)
    for step in range(tl.program_id(1), M, tl.num_programs(1)):
        row = step + tl.zeros([], tl.int64)
        dy = tl.load(dy_ptr + row * stride_dym + cols, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_N]
        h = tl.load(h_ptr + row * stride_hm + cols, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_N]
        if IS_LAYER:
            h -= tl.load(mean_ptr + row)  # scalar
        dw += dy * h * tl.load(rstd_ptr + row)  # rstd: scalar
        db += dy
    partial = tl.program_id(1).to(tl.int64) * N + cols
    if dw_partial_ptr is not None:
        tl.store(dw_partial_ptr + partial, dw, mask=mask)  # [BLOCK_N]
    if db_partial_ptr is not None:
        tl.store(db_partial_ptr + partial, db, mask=mask)  # [BLOCK_N]


@kernel(aligned=("N",))
def _norm_sum_partials_kernel(
    dw_partial_ptr, db_partial_ptr, dw_ptr, db_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if dw_ptr is not None:
        _sum_rows(dw_partial_ptr, dw_ptr, cols, P, N, BLOCK_P, BLOCK_N)
    if db_ptr is not None:
        _sum_rows(db_partial_ptr, db_ptr, cols, P, N, BLOCK_P, BLOCK_N)


@triton.jit
def _sum_rows(partial_ptr, out_ptr, cols, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    total = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    for start in range(0, P, BLOCK_P):
        rows = start + tl.arange(0, BLOCK_P)
        mask = (rows < P)[:, None] & (cols < N)[None, :]
        # [BLOCK_P, BLOCK_N]
        total += tl.load(partial_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=cols < N)  # [BLOCK_N]


class _Plan(NamedTuple):
    looped: bool  # the row does not fit in one block
    block_m: int
    block_n: int
    num_warps: int
    programs: int  # that share the rows in backward
    pipeline: int = 1  # stages in flight in backward


@tunable("NVIDIA H200, 2026-11-21", ("block_m", "num_warps"))
def _plan_fwd(M: int, N: int, is_layer: bool, target: Target) -> _Plan:
    # bf16, 16384 rows, ms; a plain copy takes 0.0671 ms at N=4096 and 0.1282 at 8192:
    #   rms    4096: 2 rows 8 warps 0.0697, 1 row 8 warps 0.0696;   8192: 2 rows 8 warps 0.1319, 1 row 8 warps 0.1344
    #   layer  4096: 2 rows 8 warps 0.0696, 1 row 8 warps 0.0713;   8192: 2 rows 8 warps 0.1387, 1 row 8 warps 0.1327
    # a persistent grid, cache hints on loads and on stores: no gain
    block_n = next_power_of_2(N)
    if block_n > 16384:
        return _Plan(True, 1, 4096, 8, M)
    if block_n > 8192 or (is_layer and block_n > 4096):
        return _Plan(False, 1, block_n, 8, M)
    if block_n >= 4096:
        return _Plan(False, 2, block_n, 8, M)
    return _Plan(False, min(16, 4096 // block_n), block_n, 4, M)


@tunable("NVIDIA H200, 2026-11-21", ("block_m", "num_warps", "programs", "pipeline"))
def _plan_bwd(M: int, N: int, is_layer: bool, stage_bytes: int, target: Target) -> _Plan:
    # measured as above; 1 program an SM, strided rows, 3 or 4 loads in flight:
    #   rms    4096: 2 rows 8 warps 3 stages 0.1071 (16 warps 0.1076, 1 row 0.110);   8192: 1 row 8 warps 0.2028
    #   layer  4096: 2 rows 16 warps 4 stages 0.1129 (8 warps 0.1136);                8192: 1 row 16 warps 0.2144
    # 32768 rows, ms rms / layer (8192 elements and one program an SM, 8 / 16 warps):
    #   768: 4 rows 4 warps, 2 programs an SM 0.0628 / 0.0690 (0.1044 / 0.3905);  1024: 0.0794 / 0.0863 (.1092 / .3940)
    #   2048: 4 rows 8 warps 0.1375 / 0.1432 (0.1375 / 0.4508);  2560, layer: 1 row 4 warps, 2 programs 0.1866 (0.2225)
    block_n = next_power_of_2(N)
    if block_n > 16384:
        return _Plan(True, 1, 4096, 8, min(M, 64))
    if block_n <= 1024:
        block_m, warps, stages, per_sm = max(4, min(16, 2048 // block_n)), 4 if block_n > 512 else 2, 3, 2
    elif block_n == 2048:
        block_m, warps, stages, per_sm = 4, 8, 3, 1
    elif is_layer and N <= 3072:
        block_m, warps, stages, per_sm = 1, 4, 3, 2
    else:
        warps, stages = 16 if is_layer or block_n > 8192 else 8, 4 if is_layer else 3
        block_m, per_sm = max(1, 8192 // block_n), 1
    # pipelining keeps all stages but one in shared memory
    room = (target.shared_per_block // per_sm - 4096) // (block_m * block_n * stage_bytes)
    programs = min(cdiv(M, block_m), per_sm * target.num_sms)
    return _Plan(False, block_m, block_n, warps, programs, min(stages, max(1, room + 1)))


def _norm_fwd_outputs(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, is_layer: bool, *_: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    h = None if residual is None else torch.empty_like(residual, memory_format=torch.contiguous_format)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return y, h, torch.empty_like(rstd) if is_layer else None, rstd


def _norm_fwd(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    is_layer: bool,
    zero_centered: bool,
    round_first: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    y, h, mean, rstd = _norm_fwd_outputs(x, residual, weight, bias, eps, is_layer, zero_centered, round_first)
    rows = as_rows(x)
    residual = None if residual is None else as_rows(residual)
    M, N = rows.shape
    plan = _plan_fwd(M, N, is_layer, Target.of(x.device))
    tensors = (rows, residual, weight, bias, y, h, mean, rstd)
    strides = (rows.stride(0), 0 if residual is None else residual.stride(0))
    modes = {"IS_LAYER": is_layer, "ZERO_CENTERED": zero_centered, "ROUND_FIRST": round_first}
    if plan.looped:
        _norm_fwd_looped_kernel[(M,)](
            *tensors, N, *strides, eps, **modes, BLOCK_N=plan.block_n, num_warps=plan.num_warps
        )
    else:
        _norm_fwd_kernel[(cdiv(M, plan.block_m),)](
            *tensors, M, N, *strides, eps, **modes,
            BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, num_warps=plan.num_warps,
        )  # fmt: skip
    return y, h, mean, rstd


def _norm_bwd_outputs(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    is_layer: bool,
    zero_centered: bool,
    x_dtype: torch.dtype,
    *need: bool,  # dx, dw, db
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    need_dx, need_dw, need_db = need
    dx = h.new_empty(h.shape, dtype=x_dtype) if need_dx else None
    dresidual = h.new_empty(h.shape) if need_dx and h.dtype != x_dtype else None
    dw = torch.empty_like(weight) if need_dw and weight is not None else None
    db = torch.empty_like(bias) if need_db and bias is not None else None
    return dx, dresidual, dw, db


def _norm_bwd(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    is_layer: bool,
    zero_centered: bool,
    x_dtype: torch.dtype,
    *need: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    dx, dresidual, dw, db = _norm_bwd_outputs(
        dy, dh, h, weight, bias, mean, rstd, is_layer, zero_centered, x_dtype, *need
    )
    dy, h, dh = as_rows(dy), as_rows(h), None if dh is None else as_rows(dh)
    mean = mean if is_layer else None
    M, N = h.shape
    stage_bytes = dy.element_size() + h.element_size() + (0 if dh is None else dh.element_size())
    plan = _plan_bwd(M, N, is_layer, stage_bytes, Target.of(h.device))
    dw_partial = None if dw is None else h.new_empty((plan.programs, N), dtype=torch.float32)
    db_partial = None if db is None else h.new_empty((plan.programs, N), dtype=torch.float32)
    strides = (dy.stride(0), 0 if dh is None else dh.stride(0), h.stride(0))
    modes = {"IS_LAYER": is_layer, "ZERO_CENTERED": zero_centered}
    if not plan.looped:
        _norm_bwd_kernel[(plan.programs,)](
            dy, dh, h, weight, mean, rstd, dx, dresidual, dw_partial, db_partial, M, N, *strides,
            **modes, BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, PIPELINE=plan.pipeline, num_warps=plan.num_warps,
        )  # fmt: skip
    elif dx is not None:
        _norm_bwd_looped_kernel[(M,)](
            dy, dh, h, weight, mean, rstd, dx, dresidual, N, *strides,
            **modes, BLOCK_N=plan.block_n, num_warps=plan.num_warps,
        )  # fmt: skip
    if dw is not None or db is not None:
        if plan.looped:
            _norm_dw_looped_kernel[(cdiv(N, plan.block_n), plan.programs)](
                dy, h, mean, rstd, dw_partial, db_partial, M, N, dy.stride(0), h.stride(0),
                IS_LAYER=is_layer, BLOCK_N=plan.block_n, num_warps=plan.num_warps,
            )  # fmt: skip
        _norm_sum_partials_kernel[(cdiv(N, 64),)](
            dw_partial, db_partial, dw, db, plan.programs, N, BLOCK_P=32, BLOCK_N=64
        )
    return dx, dresidual, dw, db


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    x, residual, weight, bias, _, is_layer, zero_centered, _ = inputs
    _, h, mean, rstd = output
    ctx.save_for_backward(x if residual is None else h, weight, bias, mean, rstd)
    ctx.is_layer, ctx.zero_centered, ctx.x_dtype = is_layer, zero_centered, x.dtype
    ctx.has_residual = residual is not None
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, dh: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    h, weight, bias, mean, rstd = ctx.saved_tensors
    need_x, need_residual, need_dw, need_db = ctx.needs_input_grad[:4]
    dh = dh if ctx.has_residual else None
    if dy is None and dh is None:
        return (None,) * 8
    if dy is None:
        dy = torch.zeros_like(h, dtype=ctx.x_dtype)
    dx, dresidual, dw, db = _norm_bwd_op(
        dy, dh, h, weight, bias, mean, rstd, ctx.is_layer, ctx.zero_centered, ctx.x_dtype,
        need_x or need_residual, need_dw, need_db,
    )  # fmt: skip
    if ctx.has_residual and h.dtype == ctx.x_dtype:
        dresidual = dx
    needed = ((need_x, dx), (need_residual, dresidual), (need_dw, dw), (need_db, db))
    return (*(grad if need else None for need, grad in needed), None, None, None, None)


def _norm_fwd_sharding(x: Any, residual: Any, is_layer: bool, **_: Any) -> Any:
    R, _P, S = placements()
    for at in [R, *map(S, leading_dims(x))]:
        rows = R if at is R else S(0)
        yield [at, R if residual is None else at, rows if is_layer else R, rows], {"x": at, "residual": at}


def _norm_bwd_sharding(h: Any, weight: Any, bias: Any, is_layer: bool, x_dtype: torch.dtype, **rest: Any) -> Any:
    R, P, S = placements()
    need_dx, need_dw, need_db = (rest[f"need_{name}"] for name in ("dx", "dw", "db"))
    for at in [S(dim) for dim in saved_dims(h)] or [R, S(0)]:
        rows, total = (R, R) if at is R else (S(0), P)
        dx = at if need_dx else R
        dresidual = at if need_dx and h.tensor_meta.dtype != x_dtype else R
        results = [dx, dresidual, total if need_dw and weight else R, total if need_db and bias else R]
        # a norm without mean, or without bias, saved an empty tensor
        yield results, {"dy": at, "dh": at, "h": at, "mean": rows if is_layer else R, "rstd": rows}


_norm_op = Op(
    "norm_fwd(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool is_layer, bool zero_centered, "
    "bool round_first) -> (Tensor, Tensor, Tensor, Tensor)",
    _norm_fwd,
    _norm_fwd_outputs,
    backward=_backward,
    setup_context=_setup_context,
    num_results=2,
    sharding=_norm_fwd_sharding,
)
_norm_bwd_op = Op(
    "norm_bwd(Tensor dy, Tensor? dh, Tensor h, Tensor? weight, Tensor? bias, Tensor? mean, Tensor rstd, bool is_layer, "
    "bool zero_centered, ScalarType x_dtype, bool need_dx, bool need_dw, bool need_db) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _norm_bwd,
    _norm_bwd_outputs,
    sharding=_norm_bwd_sharding,
)


@falls_back("rms_norm")
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered: bool = False,
    casting: Casting = "te",
) -> Tensor | tuple[Tensor, Tensor]:
    """Root-mean-square norm over the last dim of `x`, or of `x + residual`, which is then returned too.

    Shapes: N hidden size, any leading dims.
        x         [..., N]  float32, float16 or bfloat16 (float64 on the CPU); any strides
        weight    [N]       any of these dtypes, or None
        bias      [N]       likewise
        residual  [..., N]  x's shape; may be float32 beside a bfloat16 x
        eps                 added to the mean square
        zero_centered       multiply by 1 + weight (Gemma)
        casting             "te" and "gemma": multiply by the weight in float32, round once;
                            "llama": round to x's dtype before the weight
    Returns y [..., N] in x's dtype; with a residual (y, x + residual), the sum in the residual's dtype.
    Numerics: float32 throughout; the sum is rounded to its dtype before it is normalized. Deterministic.
    Memory: saves x (or the sum), weight and 4 bytes a row; nothing when no gradient is wanted.
    Raises ValueError naming the argument, the expected value and the given one. Double backward and vmap are not
        implemented and say so.
    Source: Zhang and Sennrich, arXiv:1910.07467.
    """
    checks.one_of("rms_norm", "casting", casting, ("llama", "gemma", "te"))
    return _norm("rms_norm", x, weight, bias, residual, eps, False, zero_centered, casting == "llama")


@falls_back("layer_norm")
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    zero_centered: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Layer norm over the last dim of `x`, or of `x + residual`, which is then returned too.

    Shapes, dtypes, results, memory and errors are those of `rms_norm`; 8 bytes a row are saved.
        zero_centered       multiply by 1 + weight (GPT-NeoX's and TransformerEngine's "1p")
    Numerics: float32 throughout; mean first, then the variance of the differences (rows beyond 16384 elements by
        Chan's one-pass update). Deterministic.
    Source: Ba et al., arXiv:1607.06450.
    """
    return _norm("layer_norm", x, weight, bias, residual, eps, True, zero_centered, False)


def _norm(
    op: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    is_layer: bool,
    zero_centered: bool,
    round_first: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    checks.require(x.dim() > 0, op, "x", "have at least one dim", "a scalar")
    checks.floating(op, x=x, weight=weight, bias=bias, residual=residual)
    checks.same_device(op, "x", x, weight=weight, bias=bias, residual=residual)
    if weight is not None:
        checks.shape(op, "weight", weight, x.shape[-1:], "last dim of x")
    if bias is not None:
        checks.shape(op, "bias", bias, x.shape[-1:], "last dim of x")
    if residual is not None:
        checks.shape(op, "residual", residual, x.shape, "shape of x")
    if not use_kernel(op, x):
        return _norm_torch(x, weight, bias, residual, eps, is_layer, zero_centered, round_first)
    weight = weight if weight is None else weight.contiguous()
    bias = bias if bias is None else bias.contiguous()
    y, h, *_ = _norm_op(x, residual, weight, bias, float(eps), is_layer, zero_centered, round_first)
    return y if residual is None else (y, h)


def _norm_torch(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    is_layer: bool,
    zero_centered: bool,
    round_first: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    with without_autocast(x.device):
        h = x if residual is None else (x + residual).to(residual.dtype)
        one_dtype = all(t is None or t.dtype == x.dtype for t in (h, weight, bias))
        if one_dtype and not zero_centered and not round_first and (is_layer or bias is None):
            # PyTorch's own compute in float32 inside; casting up first takes up to twice as long on a CPU
            y = (
                F.layer_norm(h, x.shape[-1:], weight, bias, eps)
                if is_layer
                else F.rms_norm(h, x.shape[-1:], weight, eps)
            )
            return y if residual is None else (y, h)
        acc = acc_dtype(x.dtype)
        w, b = (None if t is None else t.to(acc) for t in (weight, bias))
        if w is not None and zero_centered:
            w = w + 1
        if is_layer:
            y = F.layer_norm(h.to(acc), x.shape[-1:], w, b, eps)
        else:
            y = F.rms_norm(h.to(acc), x.shape[-1:], None if round_first else w, eps)
            if round_first:
                y = y.to(x.dtype) if w is None else y.to(x.dtype) * w
            y = y if b is None else y + b
        y = y.to(x.dtype)
    return y if residual is None else (y, h)
