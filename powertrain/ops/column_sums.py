"""Sums over the rows of a matrix: gradients of biases, and the last step of other gradients of weights and biases.

    out[n] = sum over m of x[m, n]

Accumulated in float32, in an order that sizes and the device's number of SMs decide: the same bits every time.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.early_start import starts_early, starts_early_if_small, wait_then_let_next_start
from powertrain.ops.flat_elements import goes_by_eights, rows_of_eight
from powertrain.ops.shapes import cdiv, next_power_of_2
from powertrain.runtime.launch import kernel
from powertrain.runtime.target import Target
from powertrain.runtime.tuning import tunable


@kernel(aligned=("N",), unaligned=("out_ptr", "other_out_ptr"), down_to=2)
def _column_sums_kernel(
    x_ptr,
    other_ptr,
    out_ptr,
    other_out_ptr,
    M,
    N,
    programs,
    stride_xm,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STREAMS: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    """`programs` share the rows; each writes a row of `out`. Of `other`, which has x's sizes and strides, the second
    half of the grid sums. STREAMS: x does not fit in the L2."""
    wait_then_let_next_start(STARTS_EARLY)
    col_blocks = tl.cdiv(N, BLOCK_N)
    program, col_block = tl.program_id(0) // col_blocks, tl.program_id(0) % col_blocks
    if other_ptr is None:
        _sum_rows(x_ptr, out_ptr, program, col_block, M, N, programs, stride_xm, BLOCK_M, BLOCK_N, STREAMS)
    elif program < programs:
        _sum_rows(x_ptr, out_ptr, program, col_block, M, N, programs, stride_xm, BLOCK_M, BLOCK_N, STREAMS)
    else:
        program -= programs
        _sum_rows(other_ptr, other_out_ptr, program, col_block, M, N, programs, stride_xm, BLOCK_M, BLOCK_N, STREAMS)


@triton.jit
def _sum_rows(
    x_ptr,
    out_ptr,
    program,
    col_block,
    M,
    N,
    programs,
    stride_xm,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STREAMS: tl.constexpr,
):
    # the L2 evicts x's cache lines before those of other tensors; `_plan` has the times
    POLICY: tl.constexpr = "evict_first" if STREAMS else ""
    cols = col_block * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in range(program, tl.cdiv(M, BLOCK_M), programs):
        rows = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        ptrs, mask = x_ptr + rows * stride_xm + cols, (rows < M) & (cols < N)
        total += tl.load(ptrs, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)  # [BLOCK_M, BLOCK_N]
    store_sum(out_ptr + program.to(tl.int64) * N + cols, total, cols < N)


@triton.jit
def store_sum(ptrs, x, mask):
    """Store the sum over the rows of a block, as a program's row of `PartialSums`."""
    tl.store(ptrs, tl.sum(x, axis=0, keep_dims=True).to(ptrs.dtype.element_ty), mask=mask)  # [1, BLOCK_N]


class PartialSums:
    """Buffers to which the programs of a kernel write their sums of columns for `outs`, tensors [N] of any dtype or
    None: float32 [programs, N] for each, or the tensors themselves if one program sums all rows.

    rows         the number of programs of each launch
    launches     for each launch its part of each buffer, [programs, N]; None for an output that is None"""

    def __init__(self, outs: Sequence[Tensor | None], *rows: int) -> None:
        self._outs = [out for out in outs if out is not None]
        self._partials = [
            out[None] if sum(rows) == 1 else out.new_empty((sum(rows), len(out)), dtype=torch.float32)
            for out in self._outs
        ]
        of_outs = iter(self._partials)
        split = [[None] * len(rows) if out is None else next(of_outs).split(rows) for out in outs]
        self.launches = list(zip(*split, strict=True))

    def add_up(self) -> None:
        """Sum into `outs` in one launch, which starts early."""
        if self._outs and len(self._partials[0]) != 1:
            _sum(*(x for pair in zip(self._partials, self._outs, strict=True) for x in pair))


def _sum(x: Tensor, out: Tensor, other: Tensor | None = None, other_out: Tensor | None = None) -> None:
    M, N = x.shape
    block_m, block_n, warps = _tile(M, N)
    _column_sums_kernel[(cdiv(N, block_n) * (1 if other is None else 2),)](
        x, other, out, other_out, M, N, 1, x.stride(0), BLOCK_M=block_m, BLOCK_N=block_n, STREAMS=False,
        STARTS_EARLY=starts_early(Target.of(x.device)), num_warps=warps,
    )  # fmt: skip


def _tile(M: int, N: int) -> tuple[int, int, int]:
    """Rows, columns and warps of a tile where one program sums all rows."""
    # us, one H200, float32, in a graph, tiles of 128 x 16 on 4 warps, 256 x 8 on 4, 256 x 16 on 8, 512 x 8 on 8:
    #   98 rows, 85 columns 1.24 1.16 1.22 1.20; 944 1.35 1.34 1.49 1.49; 2048 1.45 1.63 1.67 1.98    264, 176 1.89 1.54
    #   1.66 1.51; 2048 2.11 1.99 1.95 1.96; 4096 2.30 2.59 2.28 3.33    1056, 360 4.55 2.95 3.22 2.32; 2048 4.64
    #   3.72 3.40 3.53
    # bf16, 64 x 32 on 4, 128 x 16: 64 rows, 4096 columns 1.79, 1.94; 1024, 16384 7.5, 10.3
    if N <= 1024:
        return (256, 8, 4) if M <= 192 else (512, 8, 8)
    if M <= 64 or N > 8192:
        return 64, 32, 4
    return (128, 16, 4) if M <= 192 else (256, 16, 8)


class _Plan(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    programs: int  # that share the rows


@tunable("NVIDIA H200, 2026-11-28")
def _plan(M: int, N: int, target: Target) -> _Plan:
    """Many programs of one warp, each with four vectors a thread."""
    # us, one H200, bf16, this (torch.compile): 16384 x 4096 42.0 (45.5); with two stages instead of "evict_first" 46.5,
    # 4 warps a program 55.4. 4096 x 16384 42.0 (40.0), 2^20 x 64 42.9 (43.6), 8192 x 768 10.7 (11.0)
    block_n = min(256, next_power_of_2(N))
    block_m, warps, per_sm = 1024 // block_n, 1, 16
    if N % 8:
        # loads of few bytes: 26000 x 159 9.8 (10.1), as above 11.9; 1500 x 1001 8.2 (8.6), 10.0
        block_m, warps, per_sm = 4096 // block_n, 4, 4
    programs = min(cdiv(M, block_m), cdiv(target.num_sms * per_sm, max(1, cdiv(N, block_n))))
    return _Plan(block_m, block_n, warps, max(1, programs))


# rows that one launch sums. us, one H200, bf16, in a graph, one launch and two: 1024 rows of 1024 2.7, 4.0; of 16384
# 7.5, 9.1; 2048 of 256 3.0, 3.4; of 16384 25, 22
_FEW = 1024


def column_sums(x: Tensor, out: Tensor) -> None:
    """Sum x [M, N], whose last stride is 1, into `out` [N] of any dtype."""
    M, N = x.shape
    if M <= _FEW:
        _sum(x, out)
        return
    by_eights = x.is_contiguous() and goes_by_eights(M, N, x.element_size())
    parts = [part for (part,) in (rows_of_eight(x) if by_eights else [[x]])]
    target = Target.of(x.device)
    plans = [_plan(part.shape[0], part.shape[1], target) for part in parts]
    # a row of a part may stand for several
    rows = [plan.programs * part.shape[1] // max(1, N) for part, plan in zip(parts, plans, strict=True)]
    sums = PartialSums([out], *rows)
    for part, plan, (partial,) in zip(parts, plans, sums.launches, strict=True):
        programs = plan.programs * cdiv(part.shape[1], plan.block_n)
        _column_sums_kernel[(programs,)](
            part, None, partial, None, *part.shape, plan.programs, part.stride(0),
            BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, STREAMS=x.numel() * x.element_size() > target.l2_bytes,
            STARTS_EARLY=starts_early_if_small(target, programs, M * N), num_warps=plan.num_warps,
        )  # fmt: skip
    sums.add_up()
