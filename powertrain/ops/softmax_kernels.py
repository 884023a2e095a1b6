"""Kernels of the scaled, masked softmax, their plan and launches; softmax.py has the formulas."""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.shapes import as_rows, cdiv, next_power_of_2
from powertrain.runtime.launch import kernel
from powertrain.runtime.target import Target
from powertrain.runtime.tuning import tunable

# stands for a scale of 0, which would turn the -inf of masked elements into NaN; times the largest number still near 0
_SMALLEST = 2.0**-149


@kernel(aligned=("N",), down_to=2)
def _softmax_fwd_kernel(
    x_ptr,
    mask_ptr,
    y_ptr,
    keyless_ptr,
    num_queries,
    N,
    num_heads,
    stride_xm,
    stride_mb,
    stride_mh,
    stride_mq,
    scale,
    CAUSAL: tl.constexpr,
    UNIFORM: tl.constexpr,
    NEGATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
):
    matrix, queries, rows = _rows(num_queries, BLOCK_M)
    x_ptr += rows * stride_xm
    y_ptr += rows * N
    if mask_ptr is not None:
        mask_ptr += _mask_row(matrix, queries, num_heads, stride_mb, stride_mh, stride_mq)
    cols = tl.arange(0, BLOCK_N)[None, :]
    inside = (queries < num_queries) & (cols < N)
    keep, read = inside, inside
    if CAUSAL:
        keep, read = _below_diagonal(queries, num_queries, cols, N, inside)
    x = _scores(x_ptr, mask_ptr, cols, keep, read, NEGATIVE)
    top = tl.max(x, axis=1, keep_dims=True)
    if BLOCK_TAIL > 0:
        # a row is BLOCK_N columns, and BLOCK_TAIL after them: fewer idle lanes than the next power of 2
        tail_cols = BLOCK_N + tl.arange(0, BLOCK_TAIL)[None, :]
        tail_inside = (queries < num_queries) & (tail_cols < N)
        tail_keep, tail_read = tail_inside, tail_inside
        if CAUSAL:
            tail_keep, tail_read = _below_diagonal(queries, num_queries, tail_cols, N, tail_inside)
        tail = _scores(x_ptr, mask_ptr, tail_cols, tail_keep, tail_read, NEGATIVE)
        top = tl.maximum(top, tl.max(tail, axis=1, keep_dims=True))
    # exp2 is one instruction; log2(e) is part of `scale`, which the host multiplied
    e = tl.exp2((x - _shift(top)) * scale)
    total = tl.sum(e, axis=1, keep_dims=True)
    if BLOCK_TAIL > 0:
        tail_e = tl.exp2((tail - _shift(top)) * scale)
        total += tl.sum(tail_e, axis=1, keep_dims=True)
        tail_y = _normalized(tail_e, total, N, UNIFORM)
        tl.store(y_ptr + tail_cols, tail_y.to(y_ptr.dtype.element_ty), mask=tail_inside)
    y = _normalized(e, total, N, UNIFORM)
    tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=inside)
    if UNIFORM:
        tl.store(keyless_ptr + rows, (total == 0.0).to(tl.uint8), mask=queries < num_queries)


@triton.jit
def _shift(top):
    """The offset of the exponent: the maximum, or 0 where there is none."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _scores(x_ptr, mask_ptr, cols, keep, read, NEGATIVE: tl.constexpr):
    """x, or -x for a negative scale: -inf where masked out."""
    x = tl.load(x_ptr + cols, mask=read, other=0.0).to(tl.float32)
    if mask_ptr is not None:
        keep &= tl.load(mask_ptr + cols, mask=read, other=1) == 0
    if NEGATIVE:
        # the largest exponent belongs to the smallest x then; -x lets one maximum serve both signs
        x = -x
    return tl.where(keep, x, float("-inf"))


@triton.jit
def _rows(num_queries, BLOCK_M: tl.constexpr):
    """The matrix this program is in, and the queries and rows it takes; a tile never crosses matrices."""
    blocks = tl.cdiv(num_queries, BLOCK_M)
    matrix = tl.program_id(0) // blocks
    queries = (tl.program_id(0) % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    return matrix, queries, matrix.to(tl.int64) * num_queries + queries


@triton.jit
def _below_diagonal(queries, num_queries, cols, N, inside):
    """The keys a causal query sees, and those to read: the same rounded up to 16, since a mask that may change at any
    element makes every load a scalar one (64x2048x2048 bf16 on an H200: forward 0.231 instead of 0.220 ms, backward
    0.287 instead of 0.267)."""
    end = queries + (N - num_queries) + 1
    return inside & (cols < end), inside & _read(cols, end, N)


@triton.jit
def _read(cols, end, N):
    return (cols < N) & (cols < (end + 15) // 16 * 16)


@triton.jit
def _mask_row(matrix, queries, num_heads, stride_mb, stride_mh, stride_mq):
    batch, head = (matrix // num_heads).to(tl.int64), (matrix % num_heads).to(tl.int64)
    return batch * stride_mb + head * stride_mh + queries.to(tl.int64) * stride_mq


@triton.jit
def _normalized(e, total, N, UNIFORM: tl.constexpr):
    """e / total; a total of 0 is a row without a key, and all its e are 0."""
    y = e * tl.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.where(total == 0.0, 1.0, total))
    if UNIFORM:
        y = tl.where(total == 0.0, 1.0 / N, y)
    return y


@kernel(aligned=("N",), down_to=2)
def _softmax_fwd_looped_kernel(
    x_ptr,
    mask_ptr,
    y_ptr,
    keyless_ptr,
    num_queries,
    N,
    num_heads,
    stride_xm,
    stride_mb,
    stride_mh,
    stride_mq,
    scale,
    CAUSAL: tl.constexpr,
    UNIFORM: tl.constexpr,
    NEGATIVE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    matrix = tl.program_id(0) // num_queries
    query = tl.program_id(0) % num_queries
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    if mask_ptr is not None:
        mask_ptr += _mask_row(matrix, query, num_heads, stride_mb, stride_mh, stride_mq)
    end = N
    if CAUSAL:
        end = tl.minimum(tl.maximum(query + (N - num_queries) + 1, 0), N)
    lanes = tl.arange(0, BLOCK_N)
    top = tl.full([BLOCK_N], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, end, BLOCK_N):
        cols = start + lanes
        x = _scores(x_ptr, mask_ptr, cols, cols < end, _read(cols, end, N), NEGATIVE)
        # a maximum and a sum a lane: the lanes meet once, behind the loop
        higher = tl.maximum(top, x)
        total = total * tl.exp2((top - _shift(higher)) * scale) + tl.exp2((x - _shift(higher)) * scale)
        top = higher
    shift = _shift(tl.max(top, axis=0))
    row_total = tl.sum(total * tl.exp2((top - shift) * scale), axis=0)
    for start in range(0, N, BLOCK_N):
        cols = start + lanes
        x = _scores(x_ptr, mask_ptr, cols, cols < end, _read(cols, end, N), NEGATIVE)
        y = _normalized(tl.exp2((x - shift) * scale), row_total, N, UNIFORM)
        tl.store(y_ptr + row * N + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)
    if UNIFORM:
        tl.store(keyless_ptr + row, (row_total == 0.0).to(tl.uint8))


@kernel(aligned=("N",), down_to=2)
def _softmax_bwd_kernel(
    dy_ptr,
    y_ptr,
    keyless_ptr,
    dx_ptr,
    num_queries,
    N,
    stride_dym,
    scale,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
):
    _, queries, rows = _rows(num_queries, BLOCK_M)
    y_ptr += rows * N
    dx_ptr += rows * N
    dy_ptr += rows * stride_dym
    cols = tl.arange(0, BLOCK_N)[None, :]
    y, dy = _row_y_dy(y_ptr, dy_ptr, queries, num_queries, cols, N, CAUSAL)
    total = tl.sum(dy * y, axis=1, keep_dims=True)
    if BLOCK_TAIL > 0:
        tail_cols = BLOCK_N + tl.arange(0, BLOCK_TAIL)[None, :]
        tail_y, tail_dy = _row_y_dy(y_ptr, dy_ptr, queries, num_queries, tail_cols, N, CAUSAL)
        total += tl.sum(tail_dy * tail_y, axis=1, keep_dims=True)
        _store_dx(scale * tail_y * (tail_dy - total), dx_ptr, keyless_ptr, rows, queries < num_queries, tail_cols, N)
    _store_dx(scale * y * (dy - total), dx_ptr, keyless_ptr, rows, queries < num_queries, cols, N)


@triton.jit
def _row_y_dy(y_ptr, dy_ptr, queries, num_queries, cols, N, CAUSAL: tl.constexpr):
    """y and dy of columns of each row."""
    read = (queries < num_queries) & (cols < N)
    keep = read
    if CAUSAL:
        keep, read = _below_diagonal(queries, num_queries, cols, N, read)
    y = tl.load(y_ptr + cols, mask=read, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + cols, mask=read, other=0.0).to(tl.float32)
    if CAUSAL:
        # read up to a multiple of 16, so keys past the diagonal came in too; y is 0 there, dy may be NaN
        dy = tl.where(keep, dy, 0.0)
    return y, dy


@triton.jit
def _store_dx(dx, dx_ptr, keyless_ptr, rows, inside, cols, N):
    dx = _without_keyless(dx, keyless_ptr, rows, inside)
    tl.store(dx_ptr + cols, dx.to(dx_ptr.dtype.element_ty), mask=inside & (cols < N))


@triton.jit
def _without_keyless(dx, keyless_ptr, rows, inside):
    """dx, 0 in rows without a key: their 1/N are constants, which y alone does not show."""
    if keyless_ptr is not None:
        dx = tl.where(tl.load(keyless_ptr + rows, mask=inside, other=1) == 0, dx, 0.0)
    return dx


@kernel(aligned=("N",), down_to=2)
def _softmax_bwd_looped_kernel(
    dy_ptr,
    y_ptr,
    keyless_ptr,
    dx_ptr,
    num_queries,
    N,
    stride_dym,
    scale,
    CAUSAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    query = tl.program_id(0) % num_queries
    row = tl.program_id(0).to(tl.int64)
    end = N
    if CAUSAL:
        end = tl.minimum(tl.maximum(query + (N - num_queries) + 1, 0), N)
    lanes = tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, end, BLOCK_N):
        cols = start + lanes
        y, dy = _y_dy(y_ptr + row * N, dy_ptr + row * stride_dym, cols, end, N)
        total += y * dy
    row_total = tl.sum(total, axis=0)
    for start in range(0, N, BLOCK_N):
        cols = start + lanes
        y, dy = _y_dy(y_ptr + row * N, dy_ptr + row * stride_dym, cols, end, N)
        dx = _without_keyless(scale * y * (dy - row_total), keyless_ptr, row, True)
        tl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)


@triton.jit
def _y_dy(y_ptr, dy_ptr, cols, end, N):
    read = _read(cols, end, N)
    dy = tl.load(dy_ptr + cols, mask=read, other=0.0).to(tl.float32)
    return tl.load(y_ptr + cols, mask=read, other=0.0).to(tl.float32), tl.where(cols < end, dy, 0.0)


class _Plan(NamedTuple):
    looped: bool  # the row does not fit in one block
    block_m: int
    block_n: int
    num_warps: int
    tail: int = 0  # columns behind block_n, a power of 2


@tunable("NVIDIA H200, 2026-11-21", ("block_m", "num_warps"))
def _plan(num_queries: int, N: int, rows: int, target: Target) -> _Plan:
    block_n = next_power_of_2(N)
    if block_n > 32768:
        return _Plan(True, 1, 4096, 8)
    # a warp for 1024 elements: 64x2048x2048 bf16, upper triangle, on an H200: one warp a row 0.238 ms, two 0.220, four
    # 0.247, two rows on four 0.229 (all four before exp2 and one reciprocal a row took it to 0.204 to 0.218)
    # of few elements fewer a warp, as nothing hides the time of a load. us, in a graph, 1024, 512, 256 a warp: 948 rows
    # of 79, causal 3.5, 2.6, 2.2; 256 of 300 2.2, 2.2, 2.0; 4096 of 68 3.7, 2.5, 2.9; 27648 of 108 5.8, 6.2, 10.1
    of_an_sm = rows * block_n // target.num_sms
    of_a_warp = 256 if of_an_sm <= 1024 else 512 if of_an_sm <= 4096 else 1024
    block_m = min(next_power_of_2(num_queries), max(1, of_a_warp // block_n), 16)
    tail = 0
    # loads of single elements are bound by instructions, and each lane costs them: 583 as 512 + 128
    if N % 8 and N > 256 and block_n // 2 < N <= 3 * block_n // 4:
        block_n //= 2
        tail = max(32, next_power_of_2(N - block_n))
    # a power of 2: 2048 columns and a tail of 1024 take four
    num_warps = next_power_of_2(cdiv(block_m * (block_n + tail), 1024))
    return _Plan(False, block_m, block_n, min(16, num_warps), tail)


class _Matrices(NamedTuple):
    """Scores as matrices of queries by keys, and where each finds its mask."""

    num_matrices: int
    num_queries: int
    num_heads: int  # matrices that share one step of the mask's batch
    mask: Tensor | None  # uint8
    mask_strides: tuple[int, ...]  # batch, head, query


def _as_matrices(x: Tensor, mask: Tensor | None, causal: bool) -> _Matrices:
    *lead, sq, _ = (1, 1, *x.shape)
    if mask is None:
        rows = x.shape[:-1].numel()
        return _Matrices(rows // sq if causal and sq else 1, sq if causal else rows, 1, None, (0, 0, 0))
    # [any leading dims, head, query, key]: a view of the mask unless its leading dims broadcast unevenly
    # Triton has no pointers to bool
    mask = mask.expand(x.shape).view(torch.uint8)
    if x.dim() > 3:
        mask = mask.reshape(torch.Size(lead[:-1]).numel(), lead[-1], sq, x.shape[-1])
    else:
        mask = mask[(None,) * (4 - x.dim())]
    return _Matrices(torch.Size(lead).numel(), sq, lead[-1], mask, mask.stride()[:3])


def _launch(
    looped_kernel: Any, block_kernel: Any, tensors: tuple[Tensor | None, ...], rows: _Matrices, sizes: tuple[Any, ...],
    N: int, **modes: bool,
) -> None:  # fmt: skip
    device = next(tensor.device for tensor in tensors if tensor is not None)
    plan = _plan(rows.num_queries, N, rows.num_matrices * rows.num_queries, Target.of(device))
    if plan.looped:
        grid = (rows.num_matrices * rows.num_queries,)
        looped_kernel[grid](
            *tensors, rows.num_queries, N, *sizes, **modes, BLOCK_N=plan.block_n, num_warps=plan.num_warps
        )
    else:
        grid = (rows.num_matrices * cdiv(rows.num_queries, plan.block_m),)
        blocks = dict(BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, BLOCK_TAIL=plan.tail, num_warps=plan.num_warps)
        block_kernel[grid](*tensors, rows.num_queries, N, *sizes, **modes, **blocks)


def softmax_fwd_outputs(
    x: Tensor, mask: Tensor | None, scale: float, causal: bool, uniform: bool
) -> tuple[Tensor, Tensor | None]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, torch.empty(x.shape[:-1], dtype=torch.uint8, device=x.device) if uniform else None


def softmax_fwd(
    x: Tensor, mask: Tensor | None, scale: float, causal: bool, uniform: bool
) -> tuple[Tensor, Tensor | None]:
    """y and, for "uniform", which rows have no key."""
    y, keyless = softmax_fwd_outputs(x, mask, scale, causal, uniform)
    rows, flat = _as_matrices(x, mask, causal), as_rows(x)
    # never 0: -inf * 0 is NaN, and masked scores are -inf
    factor = max(abs(scale), _SMALLEST) * math.log2(math.e)
    _launch(
        _softmax_fwd_looped_kernel, _softmax_fwd_kernel, (flat, rows.mask, y, keyless), rows,
        (rows.num_heads, flat.stride(0), *rows.mask_strides, factor), flat.shape[1],
        CAUSAL=causal, UNIFORM=uniform, NEGATIVE=scale < 0,
    )  # fmt: skip
    return y, keyless


def softmax_bwd_outputs(dy: Tensor, y: Tensor, keyless: Tensor | None, scale: float, causal: bool) -> Tensor:
    return torch.empty_like(y, memory_format=torch.contiguous_format)


def softmax_bwd(dy: Tensor, y: Tensor, keyless: Tensor | None, scale: float, causal: bool) -> Tensor:
    dx = softmax_bwd_outputs(dy, y, keyless, scale, causal)
    rows, flat, y = _as_matrices(y, None, causal), as_rows(dy), as_rows(y)
    keyless = None if keyless is None else keyless.contiguous()
    _launch(
        _softmax_bwd_looped_kernel, _softmax_bwd_kernel, (flat, y, keyless, dx), rows,
        (flat.stride(0), scale), flat.shape[1], CAUSAL=causal,
    )  # fmt: skip
    return dx
