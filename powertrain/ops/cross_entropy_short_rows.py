"""Cross entropy of short rows: several rows a program, each read once.

`cross_entropy_kernels.py` has a program for each row, which takes longer to start than to read up to about 1000 logits.
Here a program keeps the rows of a tile in registers and adds up the losses of its tiles; a last launch adds up the
programs' sums. cross_entropy.py has the formulas.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.cross_entropy_kernels import Terms, load_logits, other_gradient, row_factors, row_stride
from powertrain.ops.early_start import starts_early, starts_early_if_small, wait_then_let_next_start
from powertrain.ops.shapes import cdiv, next_power_of_2
from powertrain.runtime.launch import kernel
from powertrain.runtime.target import Target
from powertrain.runtime.tuning import tunable

LONGEST_ROW = 1024  # logits
_PROGRAMS = 4096  # at most, whose sums of losses the last launch adds up


@triton.jit
def _load_rows(
    logits_ptr, rows, kept, V, stride_m, softcap, CAPPED: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The rows' logits, -inf behind their end and in rows that are not kept: CHUNKS of [BLOCK_M, BLOCK_N]."""
    zs = ()
    for chunk in tl.static_range(CHUNKS):
        cols = chunk * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        mask = kept[:, None] & (cols < V)
        zs += (load_logits(logits_ptr + rows[:, None] * stride_m + cols, mask, softcap, CAPPED),)  # type: ignore[assignment]
    return zs


@kernel(aligned=("V",), unaligned=("target_ptr",), down_to=2)
def _short_rows_kernel(
    logits_ptr,
    target_ptr,
    lse_ptr,
    losses_ptr,
    loss_sums_ptr,
    kept_sums_ptr,
    T,
    V,
    stride_lm,
    ignore_index,
    label_smoothing,
    z_loss,
    softcap,
    CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    """LSE and loss of every row, or each program's sum of losses and number of kept rows."""
    wait_then_let_next_start(STARTS_EARLY)
    loss_sum = tl.zeros([BLOCK_M], tl.float32)
    kept_sum = tl.zeros([BLOCK_M], tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(T, BLOCK_M), tl.num_programs(0)):
        rows = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        target = tl.load(target_ptr + rows, mask=rows < T, other=ignore_index).to(tl.int64)  # [BLOCK_M]
        kept = target != ignore_index
        in_vocab = (target >= 0) & (target < V)
        zs = _load_rows(logits_ptr, rows, kept, V, stride_lm, softcap, CAPPED, CHUNKS, BLOCK_N)
        z_target = load_logits(logits_ptr + rows * stride_lm + target, kept & in_vocab, softcap, CAPPED)

        # not -inf: exp(-inf - -inf) of rows that are not kept would be NaN
        peak = tl.full([BLOCK_M], -1e38, tl.float32)
        for chunk in tl.static_range(CHUNKS):
            peak = tl.maximum(peak, tl.max(zs[chunk], axis=1))
        total = tl.zeros([BLOCK_M], tl.float32)
        z_sum = tl.zeros([BLOCK_M], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            total += tl.sum(tl.exp(zs[chunk] - peak[:, None]), axis=1)
            if SMOOTHED:
                cols = chunk * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
                z_sum += tl.sum(tl.where(kept[:, None] & (cols < V), zs[chunk], 0.0), axis=1)
        lse = tl.where(kept, peak + tl.log(tl.where(kept, total, 1.0)), 0.0)
        tl.store(lse_ptr + rows, lse, mask=rows < T)  # [BLOCK_M]
        loss = (lse - z_target) * (1.0 - label_smoothing)
        if SMOOTHED:
            loss += (lse - z_sum / V) * label_smoothing
        loss += z_loss * lse * lse
        # a kernel raises no error: a target out of range makes the loss NaN, which is seen
        loss = tl.where(kept, tl.where(in_vocab, loss, float("nan")), 0.0)
        if losses_ptr is not None:
            tl.store(losses_ptr + rows, loss, mask=rows < T)  # [BLOCK_M]
        loss_sum += loss
        kept_sum += kept.to(tl.int32)
    if loss_sums_ptr is not None:
        tl.store(loss_sums_ptr + tl.program_id(0), tl.sum(loss_sum, axis=0))  # scalar
        tl.store(kept_sums_ptr + tl.program_id(0), tl.sum(kept_sum, axis=0))  # scalar


@kernel(unaligned=("scale_ptr",))
def _sum_losses_kernel(
    loss_sums_ptr, kept_sums_ptr, loss_ptr, scale_ptr, programs, BLOCK: tl.constexpr, STARTS_EARLY: tl.constexpr
):
    """The loss from the sums of all programs, and with scale_ptr 1 / number of kept tokens, which it contains then."""
    wait_then_let_next_start(STARTS_EARLY)
    place = tl.arange(0, BLOCK)
    loss = tl.sum(tl.load(loss_sums_ptr + place, mask=place < programs, other=0.0), axis=0)  # [BLOCK]
    if scale_ptr is not None:
        kept = tl.sum(tl.load(kept_sums_ptr + place, mask=place < programs, other=0), axis=0)  # [BLOCK]
        scale = 1.0 / kept.to(tl.float32)
        tl.store(scale_ptr, scale)  # scalar
        loss *= scale
    tl.store(loss_ptr, loss)  # scalar


@kernel(aligned=("V",), unaligned=("target_ptr", "grad_ptr", "scale_ptr"), down_to=2)
def _short_dlogits_kernel(
    logits_ptr,
    target_ptr,
    lse_ptr,
    grad_ptr,
    scale_ptr,
    dlogits_ptr,
    T,
    V,
    stride_lm,
    stride_dm,
    step_grad,
    ignore_index,
    label_smoothing,
    z_loss,
    softcap,
    CAPPED: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    wait_then_let_next_start(STARTS_EARLY)
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    target = tl.load(target_ptr + rows, mask=rows < T, other=ignore_index).to(tl.int64)  # [BLOCK_M]
    zs = _load_rows(logits_ptr, rows, target != ignore_index, V, stride_lm, softcap, CAPPED, CHUNKS, BLOCK_N)
    lse = tl.load(lse_ptr + rows, mask=rows < T, other=0.0)  # [BLOCK_M]
    grad = tl.full([BLOCK_M], 1.0, tl.float32)
    if grad_ptr is not None:
        grad = tl.load(grad_ptr + rows * step_grad, mask=rows < T, other=0.0).to(tl.float32)  # [BLOCK_M]
    if scale_ptr is not None:
        grad *= tl.load(scale_ptr)  # scalar
    slope, offset, hit = row_factors(target, grad, lse, V, ignore_index, label_smoothing, z_loss)
    for chunk in tl.static_range(CHUNKS):
        cols = chunk * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        less = offset[:, None] + tl.where(cols == target[:, None], hit[:, None], 0.0)
        d = other_gradient(zs[chunk], lse[:, None], slope[:, None], less, softcap, CAPPED)
        ptrs = dlogits_ptr + rows[:, None] * stride_dm + cols
        # [BLOCK_M, BLOCK_N]
        tl.store(ptrs, d.to(dlogits_ptr.dtype.element_ty), mask=(rows < T)[:, None] & (cols < V))


class _Plan(NamedTuple):
    block_m: int
    block_n: int
    chunks: int
    num_warps: int


@tunable("NVIDIA H200, 2026-11-28")
def _plan(V: int, target: Target) -> _Plan:
    """The plan depends only on the row's length, so that a row's bits do not depend on the number of rows.

    us, one H200, bf16, forward and both, tiles of 1024 elements on 1 warp, 2048 on 1, 2048 on 2; torch.compile:
    32768x128 13.7 21.2, 13.4 21.4, 12.2 19.5; 23.5 28.9. 32768x600 33.1 57.9, 29.8 54.0, 30.6 53.4; 40.6 65.4.
    65536x159 26.4 45.6, 26.0 46.3, 39.2 62.3; 30.9 47.5. 32768x777 38.1 74.5, 36.1 71.0, 48.4 84.4; 47.3 84.8. The
    rest of the table, and at most 2048 and 4096 programs: benchmarks/results/2026-11-28_h200_short_rows.md."""
    block_n = min(256, next_power_of_2(max(1, V)))
    chunks = cdiv(V, block_n)
    # at most 64 rows: of a few thousand rows of two classes too, most SMs have some
    block_m = max(1, min(64, 1024 // (block_n * next_power_of_2(max(1, chunks)))))
    return _Plan(block_m, block_n, chunks, 1)


def _programs(tiles: int) -> int:
    """The number of programs, which have equal numbers of tiles: 6250 tiles are two for each of 3125 programs."""
    return cdiv(tiles, max(1, cdiv(tiles, _PROGRAMS)))


def launch_short_rows(
    logits: Tensor,  # [T, V], rows
    target: Tensor,  # [T]
    terms: Terms,
    lse: Tensor,  # [T] float32, written
    *,
    losses: Tensor | None = None,  # [T] float32, written
    loss: Tensor | None = None,  # [] float32, written: their sum, times scale
    scale: Tensor | None = None,  # [] float32, written: 1 / number of kept tokens, for the mean
) -> None:
    """The forward."""
    T, V = logits.shape
    gpu = Target.of(logits.device)
    plan = _plan(V, gpu)
    programs = cdiv(T, plan.block_m)
    loss_sums = kept_sums = None
    if loss is not None:
        programs = max(1, _programs(programs))
        loss_sums, kept_sums = lse.new_empty(programs), target.new_empty(programs, dtype=torch.int32)
    _short_rows_kernel[(programs,)](
        logits, target, lse, losses, loss_sums, kept_sums, T, V, logits.stride(0), *terms,
        **terms.modes, SMOOTHED=terms.label_smoothing != 0.0,
        CHUNKS=plan.chunks, BLOCK_M=plan.block_m, BLOCK_N=plan.block_n,
        STARTS_EARLY=starts_early_if_small(gpu, programs, T * V), num_warps=plan.num_warps,
    )  # fmt: skip
    if loss is not None:
        _sum_losses_kernel[(1,)](
            loss_sums, kept_sums, loss, scale, programs, BLOCK=_PROGRAMS, STARTS_EARLY=starts_early(gpu), num_warps=8
        )


def launch_short_dlogits(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    dloss: Tensor | None,  # [T], [], or None for 1
    terms: Terms,
    dlogits: Tensor,  # [T, V], written
    *,
    scale: Tensor | None,
) -> None:
    """The gradient of all logits."""
    T, V = logits.shape
    gpu = Target.of(logits.device)
    plan = _plan(V, gpu)
    programs = cdiv(T, plan.block_m)
    _short_dlogits_kernel[(programs,)](
        logits, target, lse, dloss, scale, dlogits,
        T, V, logits.stride(0), dlogits.stride(0), row_stride(dloss), *terms,
        **terms.modes, CHUNKS=plan.chunks, BLOCK_M=plan.block_m, BLOCK_N=plan.block_n,
        STARTS_EARLY=starts_early_if_small(gpu, programs, T * V), num_warps=plan.num_warps,
    )  # fmt: skip
