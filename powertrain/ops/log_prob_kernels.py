"""Kernels of linear_log_probs.py, on logits in a scratch; its docstring has the formulas.

Rows of the scratch are padded to whole vectors, so no kernel needs edges as cross_entropy.py's do. Each works on a
shard of the vocabulary, words [vocab_start, vocab_start + V) of vocab_size, and reads the totals of the whole.

log p = (z - peak) - log_total, with the largest z and the log of the sum of exp(z - peak): z - lse would be rounded
relative to the size of the logits, so that log p of a token with a probability near 1 would lose its digits.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.column_sums import PartialSums
from powertrain.ops.cross_entropy_kernels import MOST_PARTS, capped_logits, load_parts, row_parts, stats_block
from powertrain.ops.early_start import await_kernel_before, starts_early
from powertrain.ops.shapes import cdiv, next_power_of_2
from powertrain.runtime.launch import kernel
from powertrain.runtime.target import Target

_VEC = 8  # elements that a thread takes at once
_WORD = 64  # the scratch's rows are multiples of so many elements


class Options(NamedTuple):
    """Options of the two distributions; softcap 0: none."""

    ignore_index: int
    temperature: float
    softcap: float
    teacher_softcap: float
    beta: float

    @property
    def kind(self) -> int:
        """0: forward KL, 1: reverse KL, 2: Jensen-Shannon."""
        return int(self.beta) if self.beta in (0.0, 1.0) else 2


@triton.jit
def _load_z(row_ptr, cols, V, padded, softcap, temperature, CAPPED: tl.constexpr):
    """Logits over temperature, -inf outside the vocabulary; whole vectors of the padded row are read."""
    z = tl.load(row_ptr + cols, mask=cols < padded, other=0.0).to(tl.float32)  # the shape of cols
    if CAPPED:
        z = capped_logits(z, softcap)
    return tl.where(cols < V, z / temperature, float("-inf"))


@triton.jit
def _ratio(log_p, log_q):
    """p / q, away from overflow; a log of the mixture itself would be rounded at the size of log p. NaN stays NaN."""
    difference = log_p - log_q
    return tl.exp(tl.where(difference < -80.0, -80.0, tl.where(difference > 80.0, 80.0, difference)))


@triton.jit
def _part(row, V, padded, columns, IS_PART: tl.constexpr):
    """Where this program's results go, the columns [begin, end) that it reads, and the end of those in the vocabulary.
    IS_PART: program (i, j) reads part j of row i, `columns` of it."""
    slot = row
    begin = 0
    end = padded
    if IS_PART:
        slot += tl.program_id(1) * tl.num_programs(0)
        begin = tl.program_id(1) * columns
        end = tl.minimum(begin + columns, padded)
        V = tl.minimum(V, end)
    return slot, begin, end, V


@triton.jit
def _hit(z, target, peak, total, ignore_index, IS_WHOLE: tl.constexpr):
    """The value to store for the target: its z; with IS_WHOLE its log p, or 0 if the target is ignored."""
    if IS_WHOLE:
        # maximum first: their sum would be rounded at the size of the larger one
        z = tl.where(target == ignore_index, 0.0, (z - peak) - tl.log(total))
    return z


@kernel(aligned=("padded", "columns"), unaligned=("target_ptr",))
def _log_prob_stats_kernel(
    logits_ptr,
    target_ptr,
    peak_ptr,
    log_total_ptr,
    hit_ptr,
    entropy_ptr,
    V,
    padded,
    columns,
    vocab_start,
    vocab_size,
    stride_lm,
    ignore_index,
    softcap,
    temperature,
    CAPPED: tl.constexpr,
    IS_PART: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program: peak and log_total, the target's z (0 if it is another shard's), this shard's entropy.
    IS_WHOLE: the shard is the whole vocabulary, and the target's log p is stored in z's place, 0 if it is ignored.
    IS_PART: a part of a row; stored are its peak, total, z and the weighted sum, for `_join_log_prob_stats_kernel`."""
    row = tl.program_id(0).to(tl.int64)
    slot, begin, end, V = _part(row, V, padded, columns, IS_PART)
    base = logits_ptr + row * stride_lm
    vectors = tl.arange(0, BLOCK)[:, None]
    lanes = tl.arange(0, VEC)[None, :]
    # as in cross_entropy_kernels.py each lane keeps its own maximum and sums
    peak = tl.full([BLOCK], -1e38, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    # sum of exp(z - peak) (z - peak): no cancellation, as sum p z has
    weighted = tl.zeros([BLOCK], tl.float32)
    for block in range(begin, end, BLOCK * VEC):
        z = _load_z(base, block + vectors * VEC + lanes, V, end, softcap, temperature, CAPPED)  # [BLOCK, VEC]
        new_peak = tl.maximum(peak, tl.max(z, axis=1))
        shrink = tl.exp(peak - new_peak)
        below = z - new_peak[:, None]
        e = tl.exp(below)
        if entropy_ptr is not None:
            weighted = shrink * (weighted + (peak - new_peak) * total)
            weighted += tl.sum(tl.where(e > 0.0, e * below, 0.0), axis=1)
        total = total * shrink + tl.sum(e, axis=1)
        peak = new_peak
    row_peak = tl.max(peak, axis=0)
    shrink = tl.exp(peak - row_peak)
    row_total = tl.sum(total * shrink, axis=0)
    tl.store(peak_ptr + slot, row_peak)  # scalar
    tl.store(log_total_ptr + slot, row_total if IS_PART else tl.log(row_total))  # scalar
    if entropy_ptr is not None:
        row_weighted = tl.sum(shrink * (weighted + (peak - row_peak) * total), axis=0)
        entropy = row_weighted if IS_PART else tl.log(row_total) - row_weighted / row_total
        tl.store(entropy_ptr + slot, entropy)  # scalar
    if hit_ptr is not None:
        target = tl.load(target_ptr + row).to(tl.int64)  # scalar
        local = target - vocab_start
        here = (target != ignore_index) & (local >= begin) & (local < V)
        z = tl.load(base + local, mask=here, other=0.0).to(tl.float32)  # scalar
        if CAPPED:
            z = capped_logits(z, softcap)
        valid = ((target >= 0) & (target < vocab_size)) | (target == ignore_index)
        result = tl.where(valid, z / temperature, float("nan"))
        tl.store(hit_ptr + slot, _hit(result, target, row_peak, row_total, ignore_index, IS_WHOLE))  # scalar


@kernel(unaligned=("target_ptr", "peak_ptr", "log_total_ptr", "hit_ptr", "entropy_ptr"))
def _join_log_prob_stats_kernel(
    parts_ptr,
    target_ptr,
    peak_ptr,
    log_total_ptr,
    hit_ptr,
    entropy_ptr,
    parts,
    step,
    ignore_index,
    IS_WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    """One row a program: its results from those of its parts."""
    await_kernel_before(STARTS_EARLY)
    row = tl.program_id(0)
    at, exists, peak, total, row_peak = load_parts(parts_ptr, parts, step, BLOCK)
    shrink = tl.exp(peak - row_peak)
    row_total = tl.sum(total * shrink, axis=0)
    tl.store(peak_ptr + row, row_peak)  # scalar
    tl.store(log_total_ptr + row, tl.log(row_total))  # scalar
    if entropy_ptr is not None:
        weighted = tl.load(at + 3 * step, mask=exists, other=0.0)  # [BLOCK]
        row_weighted = tl.sum(shrink * (weighted + (peak - row_peak) * total), axis=0)
        tl.store(entropy_ptr + row, tl.log(row_total) - row_weighted / row_total)  # scalar
    if hit_ptr is not None:
        # 0 in all parts but the target's
        z = tl.sum(tl.load(at + 2 * step, mask=exists, other=0.0), axis=0)
        target = tl.load(target_ptr + row).to(tl.int64)  # scalar
        tl.store(hit_ptr + row, _hit(z, target, row_peak, row_total, ignore_index, IS_WHOLE))  # scalar


@kernel(aligned=("padded", "columns"))
def _divergence_kernel(
    logits_ptr,
    teacher_ptr,
    peak_ptr,
    log_total_ptr,
    teacher_peak_ptr,
    teacher_log_total_ptr,
    divergence_ptr,
    center_ptr,
    V,
    padded,
    stride_lm,
    stride_tm,
    softcap,
    teacher_softcap,
    temperature,
    beta,
    columns,
    CAPPED: tl.constexpr,
    TEACHER_CAPPED: tl.constexpr,
    IS_PART: tl.constexpr,
    KIND: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """This shard's part of a row's divergence, and of the sum that its gradient subtracts (center). IS_PART: those of a
    part of the row, which are added up."""
    row = tl.program_id(0).to(tl.int64)
    slot, begin, end, V = _part(row, V, padded, columns, IS_PART)
    peak = tl.load(peak_ptr + row)  # scalar
    log_total = tl.load(log_total_ptr + row)  # scalar
    teacher_peak = tl.load(teacher_peak_ptr + row)  # scalar
    teacher_log_total = tl.load(teacher_log_total_ptr + row)  # scalar
    lanes = tl.arange(0, BLOCK)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    from_q = tl.zeros([BLOCK], tl.float32)
    from_p = tl.zeros([BLOCK], tl.float32)
    for block in range(begin, end, BLOCK * VEC):
        cols = block + lanes
        z = _load_z(logits_ptr + row * stride_lm, cols, V, end, softcap, temperature, CAPPED)
        y = _load_z(teacher_ptr + row * stride_tm, cols, V, end, teacher_softcap, temperature, TEACHER_CAPPED)
        # in this order: z - (peak + log_total) would round at the size of the sum
        log_p = (z - peak) - log_total
        log_q = (y - teacher_peak) - teacher_log_total
        if KIND == 0:
            q = tl.exp(log_q)
            # 0 * inf of entries that underflow, or lie outside the vocabulary, counts as the limit 0; NaN stays NaN
            from_q += tl.sum(tl.where(q != 0.0, q * (log_q - log_p), 0.0), axis=1)
        elif KIND == 1:
            p = tl.exp(log_p)
            from_p += tl.sum(tl.where(p != 0.0, p * (log_p - log_q), 0.0), axis=1)
        else:
            q = tl.exp(log_q)
            p = tl.exp(log_p)
            ratio = _ratio(log_p, log_q)
            from_q -= tl.sum(tl.where(q != 0.0, q * tl.log(beta + (1.0 - beta) * ratio), 0.0), axis=1)
            from_p -= tl.sum(tl.where(p != 0.0, p * tl.log(1.0 - beta + beta / ratio), 0.0), axis=1)
    center = tl.sum(from_p, axis=0)
    if KIND == 0:
        divergence = tl.sum(from_q, axis=0)
    elif KIND == 1:
        divergence = center
    else:
        divergence = beta * tl.sum(from_q, axis=0) + (1.0 - beta) * center
    tl.store(center_ptr + slot, center)  # scalar
    tl.store(divergence_ptr + slot, divergence)  # scalar


@kernel(aligned=("padded",), unaligned=("target_ptr", "dlog_prob_ptr", "dentropy_ptr", "ddivergence_ptr"))
def _log_prob_grads_kernel(
    logits_ptr,
    teacher_ptr,
    target_ptr,
    peak_ptr,
    log_total_ptr,
    entropy_ptr,
    teacher_peak_ptr,
    teacher_log_total_ptr,
    center_ptr,
    dlog_prob_ptr,
    dentropy_ptr,
    ddivergence_ptr,
    V,
    padded,
    vocab_start,
    vocab_size,
    blocks,
    stride_lm,
    stride_tm,
    step_glog_prob,  # of gradients, often 1; as strides they would be among those that must all be multiples of 16
    step_gentropy,
    step_gdivergence,
    ignore_index,
    softcap,
    teacher_softcap,
    temperature,
    beta,
    CAPPED: tl.constexpr,
    TEACHER_CAPPED: tl.constexpr,
    KIND: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The logits of a tile become their gradient, in place."""
    row = tl.program_id(0).to(tl.int64) // blocks
    block = tl.program_id(0) % blocks
    target = tl.load(target_ptr + row).to(tl.int64)  # scalar
    kept = target != ignore_index
    peak = tl.load(peak_ptr + row)  # scalar
    log_total = tl.load(log_total_ptr + row)  # scalar
    cols = (block * BLOCK + tl.arange(0, BLOCK)[:, None]) * VEC + tl.arange(0, VEC)[None, :]
    z = _load_z(logits_ptr + row * stride_lm, cols, V, padded, softcap, temperature, CAPPED)  # [BLOCK, VEC]
    log_p = (z - peak) - log_total
    p = tl.exp(log_p)
    hit = 0.0
    d = tl.zeros([BLOCK, VEC], tl.float32)
    if dlog_prob_ptr is not None:
        hit = tl.load(dlog_prob_ptr + row * step_glog_prob)  # scalar
        # a target out of range is seen as NaN; a kernel raises no error
        hit = tl.where((target >= 0) & (target < vocab_size), hit, float("nan"))
        d -= hit * p
    if dentropy_ptr is not None:
        grad = tl.load(dentropy_ptr + row * step_gentropy)  # scalar
        entropy = tl.load(entropy_ptr + row)  # scalar
        d -= tl.where(p != 0.0, grad * p * (log_p + entropy), 0.0)
    if ddivergence_ptr is not None:
        grad = tl.load(ddivergence_ptr + row * step_gdivergence)  # scalar
        center = tl.load(center_ptr + row)  # scalar
        y = _load_z(teacher_ptr + row * stride_tm, cols, V, padded, teacher_softcap, temperature, TEACHER_CAPPED)
        log_q = (y - tl.load(teacher_peak_ptr + row)) - tl.load(teacher_log_total_ptr + row)
        if KIND == 0:
            d += grad * (p - tl.exp(log_q))
        elif KIND == 1:
            d += tl.where(p != 0.0, grad * p * (log_p - log_q - center), 0.0)
        else:
            # log p - log m
            above = -tl.log(1.0 - beta + beta / _ratio(log_p, log_q))
            d += tl.where(p != 0.0, grad * (1.0 - beta) * p * (above - center), 0.0)
    slope = 1.0 / temperature + tl.zeros([BLOCK, VEC], tl.float32)
    if CAPPED:
        # z is the capped logit over the temperature, so tanh is known without another exponential
        capped = z * temperature / softcap
        slope *= 1.0 - capped * capped
    out = logits_ptr + row * stride_lm + cols
    dtype = logits_ptr.dtype.element_ty
    tl.store(out, tl.where(kept, d * slope, 0.0).to(dtype), mask=cols < padded)  # [BLOCK, VEC]
    if dlog_prob_ptr is not None:
        # the target's element apart, as in cross_entropy_kernels.py
        local = target - vocab_start
        ahead = local - block * (BLOCK * VEC)
        if kept & (ahead >= 0) & (ahead < BLOCK * VEC) & (local < V):
            at = cols == local
            d_target = tl.sum(tl.sum(tl.where(at, (d + hit) * slope, 0.0), axis=1), axis=0)
            tl.debug_barrier()
            tl.store(logits_ptr + row * stride_lm + local, d_target.to(dtype))  # scalar


def _tile(logits: Tensor, largest: int) -> dict[str, int]:
    """padded columns, and a tile of BLOCK vectors by num_warps."""
    padded = cdiv(logits.shape[1], _WORD) * _WORD
    block = min(largest, next_power_of_2(padded // _VEC))
    return dict(padded=padded, BLOCK=block, num_warps=max(1, block // 64), VEC=_VEC)


def new_stats(like: Tensor, T: int) -> Tensor:
    """[6, T] of a row each: peak, log_total, entropy, the teacher's peak and log_total, center. Every row is aligned:

    of tensors that are not, a kernel is compiled anew, and sums in another order.
    """
    return like.new_empty((6, cdiv(T, 4) * 4))[:, :T]


def launch_stats(
    logits: Tensor,  # [T, V], rows of a scratch
    target: Tensor,  # [T]
    options: Options,
    total: Tensor,  # [2, T] float32, written: peak and log_total
    hit: Tensor | None,  # [T] float32, written: the target's z, or its log p
    entropy: Tensor | None,  # [T] float32, written
    vocab_start: int,
    vocab_size: int,
    is_whole: bool = False,
    batch_invariant: bool = False,
) -> None:
    """Statistics of one shard's logits; `is_whole`: the shard is the whole vocabulary, and hit gets log p;
    `batch_invariant`: a row's bits do not depend on T."""
    T, V = logits.shape
    device = Target.of(logits.device)
    parts = row_parts(T, V, device, batch_invariant)
    # us, one H200, one program a row, this, 256 vectors: 4x231944 22, 44; 64x40408 6.8, 9.6; 256x128256 26, 48
    largest = 256 if batch_invariant else stats_block(T * parts.programs, device)
    tile = _tile(logits, min(largest, next_power_of_2(parts.columns // _VEC)))
    found, into = None, [*total, hit, entropy]
    if parts.programs > 1:
        found, into = parts.results(*total, hit, entropy)
    _log_prob_stats_kernel[(T, parts.programs)](
        logits, target, *into, V, tile.pop("padded"), parts.columns, vocab_start, vocab_size, logits.stride(0),
        options.ignore_index, options.softcap, options.temperature,
        CAPPED=options.softcap != 0.0, IS_PART=found is not None, IS_WHOLE=is_whole and found is None,
        **tile,
    )  # fmt: skip
    if found is not None:
        _join_log_prob_stats_kernel[(T,)](
            found, target, *total, hit, entropy, parts.programs, found.stride(0), options.ignore_index,
            IS_WHOLE=is_whole, BLOCK=MOST_PARTS, STARTS_EARLY=starts_early(device), num_warps=1,
        )  # fmt: skip


def launch_divergence(
    logits: Tensor,
    teacher: Tensor,
    total: Tensor,  # [2, T]
    teacher_total: Tensor,  # [2, T]
    options: Options,
    divergence: Tensor,
    center: Tensor,
    batch_invariant: bool = False,
) -> None:
    """One shard's parts of divergence and center [T], from the totals of the whole vocabulary."""
    T, V = logits.shape
    device = Target.of(logits.device)
    # us, one H200, Jensen-Shannon, by one program of 2 warps a row and by 2, 4, 8, 16, 32: 1 x 32000 68 12 8 6.2 6 5.9;
    # 64 x 128256 268 35 37 36 36 36; 200 x 128256 338 129 113 105 100 99; 264 x 256000 664 260 264 248 244 246
    parts = row_parts(T, V, device, batch_invariant, per_sm=16, pays=16384)
    is_part = parts.programs > 1
    largest = min(stats_block(T * parts.programs, device), next_power_of_2(parts.columns // _VEC)) if is_part else 128
    tile = _tile(logits, largest)
    sums = PartialSums([divergence, center], parts.programs)
    _divergence_kernel[(T, parts.programs)](
        logits, teacher, *total, *teacher_total, *sums.launches[0], V, tile.pop("padded"), logits.stride(0),
        teacher.stride(0), options.softcap, options.teacher_softcap, options.temperature, options.beta, parts.columns,
        CAPPED=options.softcap != 0.0, TEACHER_CAPPED=options.teacher_softcap != 0.0, IS_PART=is_part,
        KIND=options.kind, **tile,
    )  # fmt: skip
    sums.add_up()


def launch_grads(
    logits: Tensor,  # [T, V], overwritten by their gradient
    teacher: Tensor | None,
    target: Tensor,
    stats: Tensor,  # [6, T], of new_stats
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],  # of log_probs, entropy, divergence, each [T]
    options: Options,
    vocab_start: int,
    vocab_size: int,
) -> None:
    tile = _tile(logits, 128)
    padded = tile.pop("padded")
    blocks = cdiv(padded, tile["BLOCK"] * _VEC)
    _log_prob_grads_kernel[(logits.shape[0] * blocks,)](
        logits, teacher, target, *stats, *grads,
        logits.shape[1], padded, vocab_start, vocab_size, blocks, logits.stride(0),
        0 if teacher is None else teacher.stride(0), *(0 if g is None else g.stride(0) for g in grads),
        options.ignore_index, options.softcap, options.teacher_softcap, options.temperature, options.beta,
        CAPPED=options.softcap != 0.0, TEACHER_CAPPED=options.teacher_softcap != 0.0, KIND=options.kind, **tile,
    )  # fmt: skip
