"""Kernels of the cross entropy of rows of logits, and their launches; cross_entropy.py has the formulas."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.batch_invariance import is_batch_invariant
from powertrain.ops.early_start import await_kernel_before, starts_early
from powertrain.ops.shapes import cdiv, next_power_of_2
from powertrain.runtime.launch import kernel
from powertrain.runtime.target import Target

# longer rows are not in the L2 cache any more when their gradient is made: 8192 x 128256 bf16 took 1.48 to 1.56 ms on
# an H200 with statistics and gradient in one kernel, 1.49 in two; 8192 x 50257 0.55 in one and 0.62 in two
FUSED_ROW_BYTES = 128 << 10

MOST_PARTS = 64  # of a row
_PART = 4096  # a part has a multiple of so many words: whole vectors, and whole blocks where parts are few


@triton.jit
def capped_logits(x, softcap):
    """softcap * tanh(x / softcap), accurate near 0 too (where 1 - 2 / (exp + 1) cancels)."""
    u = x / softcap
    v = u * u
    # minimax polynomial of tanh on ±0.625, as in Cephes
    near = u + u * v * (
        -0.333332819422 + v * (0.133314422036 + v * (-0.0537397155531 + v * (0.0206390887954 - 0.00570498872745 * v)))
    )
    # of |u|, so that exp can overflow to inf only, whose quotient is 0
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(u)) + 1.0)
    return softcap * tl.where(tl.abs(u) < 0.625, near, tl.where(u < 0, -far, far))


@triton.jit
def _vectors(start, end, VEC: tl.constexpr):
    """The whole aligned vectors in [start, end): offset of the first, and how many."""
    first = (start + (VEC - 1)) // VEC * VEC
    last = end // VEC * VEC
    return first, ((last - first) // VEC).to(tl.int32)


@triton.jit
def _edges(start, end, VEC: tl.constexpr):
    """The elements of [start, end) before and after its whole vectors: offsets [2 * VEC] and which of them exist."""
    lanes = tl.arange(0, 2 * VEC)
    head_end = (start + (VEC - 1)) // VEC * VEC
    tail_start = tl.maximum(end // VEC * VEC, head_end)
    is_head = lanes < VEC
    offsets = tl.where(is_head, start + lanes, tail_start + lanes - VEC)
    return offsets, offsets < tl.where(is_head, tl.minimum(head_end, end), end)


@triton.jit
def load_logits(ptr, mask, softcap, CAPPED: tl.constexpr):
    x = tl.load(ptr, mask=mask, other=float("-inf")).to(tl.float32)  # the shape of mask
    if CAPPED:
        x = tl.where(mask, capped_logits(x, softcap), float("-inf"))
    return x


@triton.jit
def other_gradient(z, lse, slope, offset, softcap, CAPPED: tl.constexpr):
    """The gradient of logits that are not the target."""
    d = tl.exp(z - lse) * slope - offset
    if CAPPED:
        # -inf stands for logits that were not read
        d = tl.where(z == float("-inf"), 0.0, d * (1.0 - (z / softcap) * (z / softcap)))
    return d


@triton.jit
def _target_gradient(z, lse, slope, offset, hit, softcap, CAPPED: tl.constexpr):
    d = tl.exp(z - lse) * slope - offset - hit
    if CAPPED:
        d *= 1.0 - (z / softcap) * (z / softcap)
    return d


@triton.jit
def row_factors(target, grad, lse, vocab_size, ignore_index, label_smoothing, z_loss):
    """dlogit = softmax * slope - offset, and hit less at the target. All are 0 where ignored, nan out of range."""
    # a kernel raises no error: a target out of range makes the row NaN, which is seen
    factor = tl.where((target >= 0) & (target < vocab_size), grad, float("nan"))
    factor = tl.where(target == ignore_index, 0.0, factor)
    return (1.0 + 2.0 * z_loss * lse) * factor, label_smoothing / vocab_size * factor, (1.0 - label_smoothing) * factor


@triton.jit
def _edge_gradients(
    logits_ptr, dlogits_ptr, start, shift, V, local_target, kept, lse, slope, offset, hit, softcap,
    CAPPED: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    edge, exists = _edges(start, start + V, VEC)
    z = load_logits(logits_ptr + edge, exists & kept, softcap, CAPPED)
    at_target = edge - start == local_target
    d = tl.where(
        at_target & kept,
        _target_gradient(z, lse, slope, offset, hit, softcap, CAPPED),
        other_gradient(z, lse, slope, offset, softcap, CAPPED),
    )
    tl.store(dlogits_ptr + shift + edge, d.to(dlogits_ptr.dtype.element_ty), mask=exists)  # [2 * VEC]


@triton.jit
def _row_lse(kept, peak, total):
    return tl.where(kept, peak + tl.log(tl.where(kept, total, 1.0)), 0.0)


@kernel(unaligned=("target_ptr", "scale_ptr"))
def _row_stats_kernel(
    logits_ptr,
    target_ptr,
    scale_ptr,
    lse_ptr,
    total_ptr,
    target_logit_ptr,
    sum_ptr,
    dlogits_ptr,
    V,
    vocab_start,
    vocab_size,
    stride_lm,
    stride_dm,
    ignore_index,
    label_smoothing,
    z_loss,
    softcap,
    columns,  # behind the others: ahead of the strides it cost kernels that do not use it 7 of 49 registers
    CAPPED: tl.constexpr,
    EDGES: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program. With dlogits_ptr (which may be logits_ptr) it also makes the gradient, if dloss is 1.
    With total_ptr program (i, j) reads part j of row i, `columns` of it, as if it were a row, and stores its peak, in
    lse's place, and total, for `_join_row_stats_kernel`."""
    row = tl.program_id(0).to(tl.int64)
    slot = row
    target = tl.load(target_ptr + row).to(tl.int64)  # scalar
    kept = target != ignore_index
    local_target = target - vocab_start
    start = row * stride_lm
    if total_ptr is not None:
        slot += tl.program_id(1) * tl.num_programs(0)
        begin = tl.program_id(1) * columns
        local_target -= begin
        start += begin
        V = tl.minimum(V - begin, columns)
    first, count = _vectors(start, start + V, VEC)
    base = logits_ptr + first
    vectors = tl.arange(0, BLOCK)[:, None]
    lanes = tl.arange(0, VEC)[None, :]

    # an ignored row is not read
    here = kept & (local_target >= 0) & (local_target < V)
    # used and stored behind the loop, whose loads would wait for it
    z_target = tl.load(logits_ptr + start + local_target, mask=here, other=0.0).to(tl.float32)  # scalar

    # each lane keeps its own maximum and sum, so that the loop needs no exchange between threads, and takes one
    # exponential an element and 1 / VEC for the rescaling
    # not -inf: exp(-inf - -inf) of lanes that read nothing would be NaN
    peak = tl.full([BLOCK], -1e38, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    z_sum = tl.zeros([BLOCK], tl.float32)
    reads = tl.where(kept, count, 0)
    for block in range(0, reads, BLOCK):
        mask = tl.broadcast_to(block + vectors < reads, (BLOCK, VEC))
        z = load_logits(base + (block + vectors) * VEC + lanes, mask, softcap, CAPPED)
        if sum_ptr is not None:
            # masked lanes hold -inf, which a sum would not survive
            z_sum += tl.sum(tl.where(mask, z, 0.0), axis=1)
        new_peak = tl.maximum(peak, tl.max(z, axis=1))
        total = total * tl.exp(peak - new_peak) + tl.sum(tl.exp(z - new_peak[:, None]), axis=1)
        peak = new_peak
    row_peak = tl.max(peak, axis=0)
    row_total = tl.sum(total * tl.exp(peak - row_peak), axis=0)
    row_sum = tl.sum(z_sum, axis=0)
    if EDGES:
        edge, exists = _edges(start, start + V, VEC)
        edge_z = load_logits(logits_ptr + edge, exists & kept, softcap, CAPPED)
        new_peak = tl.maximum(row_peak, tl.max(edge_z, axis=0))
        row_total = row_total * tl.exp(row_peak - new_peak) + tl.sum(tl.exp(edge_z - new_peak), axis=0)
        row_peak = new_peak
        row_sum += tl.sum(tl.where(exists & kept, edge_z, 0.0), axis=0)
    if CAPPED:
        z_target = capped_logits(z_target, softcap)
    in_vocab = (target >= 0) & (target < vocab_size)
    tl.store(target_logit_ptr + slot, tl.where(in_vocab | (target == ignore_index), z_target, float("nan")))  # scalar
    if total_ptr is not None:
        tl.store(lse_ptr + slot, row_peak)  # scalar
        tl.store(total_ptr + slot, row_total)  # scalar
    else:
        lse = _row_lse(kept, row_peak, row_total)
        tl.store(lse_ptr + slot, lse)  # scalar
    if sum_ptr is not None:
        tl.store(sum_ptr + slot, row_sum)  # scalar

    if dlogits_ptr is not None:
        grad = 1.0
        if scale_ptr is not None:
            grad = tl.load(scale_ptr)  # scalar
        slope, offset, hit = row_factors(target, grad, lse, vocab_size, ignore_index, label_smoothing, z_loss)
        dtype = dlogits_ptr.dtype.element_ty
        shift = row * stride_dm - start
        # first + shift is a multiple of VEC; so written, the compiler knows
        out = dlogits_ptr + (first + shift) // VEC * VEC
        # from the end, where the row's latest blocks are still in the caches
        blocks = tl.cdiv(count, BLOCK)
        for step in range(0, blocks):
            vector = (blocks - 1 - step) * BLOCK + vectors
            mask = tl.broadcast_to(vector < count, (BLOCK, VEC))
            z = load_logits(base + vector * VEC + lanes, mask & kept, softcap, CAPPED)
            d = other_gradient(z, lse, slope, offset, softcap, CAPPED)
            tl.store(out + vector * VEC + lanes, d.to(dtype), mask=mask)  # [BLOCK, VEC]
        if EDGES:
            _edge_gradients(
                logits_ptr, dlogits_ptr, start, shift, V, local_target, kept, lse, slope, offset, hit, softcap,
                CAPPED, VEC,
            )  # fmt: skip
        # the target's element apart: comparing every column with it costs as much as the rest
        if here:
            tl.debug_barrier()
            d_target = _target_gradient(z_target, lse, slope, offset, hit, softcap, CAPPED)
            tl.store(dlogits_ptr + shift + start + local_target, d_target.to(dtype))  # scalar


@triton.jit
def load_parts(ptr, parts, step, BLOCK: tl.constexpr):
    """Of this program's row: addresses of its parts' peaks, behind which each `step` another result follows; which
    parts exist; their peaks and totals; the row's peak."""
    part = tl.arange(0, BLOCK)
    exists = part < parts
    at = ptr + part * tl.num_programs(0) + tl.program_id(0)
    peak = tl.load(at, mask=exists, other=-1e38)  # [BLOCK]
    total = tl.load(at + step, mask=exists, other=0.0)  # [BLOCK]
    return at, exists, peak, total, tl.max(peak, axis=0)


@kernel(unaligned=("target_ptr", "lse_ptr", "target_logit_ptr", "sum_ptr"))
def _join_row_stats_kernel(
    parts_ptr,
    target_ptr,
    lse_ptr,
    target_logit_ptr,
    sum_ptr,
    parts,
    step,
    ignore_index,
    BLOCK: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    """One row a program: its results from those of its parts."""
    await_kernel_before(STARTS_EARLY)
    row = tl.program_id(0)
    at, exists, peak, total, row_peak = load_parts(parts_ptr, parts, step, BLOCK)
    row_total = tl.sum(total * tl.exp(peak - row_peak), axis=0)
    kept = tl.load(target_ptr + row).to(tl.int64) != ignore_index  # scalar
    tl.store(lse_ptr + row, _row_lse(kept, row_peak, row_total))  # scalar
    # 0 in all parts but the target's
    target_logit = tl.load(at + 2 * step, mask=exists, other=0.0)  # [BLOCK]
    tl.store(target_logit_ptr + row, tl.sum(target_logit, axis=0))  # scalar
    if sum_ptr is not None:
        tl.store(sum_ptr + row, tl.sum(tl.load(at + 3 * step, mask=exists, other=0.0), axis=0))  # scalar


@kernel(unaligned=("target_ptr", "grad_ptr", "scale_ptr"))
def _dlogits_kernel(
    logits_ptr,
    target_ptr,
    lse_ptr,
    grad_ptr,
    scale_ptr,
    dlogits_ptr,
    V,
    vocab_start,
    vocab_size,
    blocks,
    stride_lm,
    stride_dm,
    step_grad,  # often 1; as a stride it would be among those that must all be multiples of 16
    ignore_index,
    label_smoothing,
    z_loss,
    softcap,
    CAPPED: tl.constexpr,
    EDGES: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) // blocks
    block = tl.program_id(0) % blocks
    target = tl.load(target_ptr + row).to(tl.int64)  # scalar
    kept = target != ignore_index
    local_target = target - vocab_start
    lse = tl.load(lse_ptr + row)  # scalar
    grad = 1.0
    if grad_ptr is not None:
        grad = tl.load(grad_ptr + row * step_grad)  # scalar
    if scale_ptr is not None:
        grad *= tl.load(scale_ptr)  # scalar
    slope, offset, hit = row_factors(target, grad, lse, vocab_size, ignore_index, label_smoothing, z_loss)
    dtype = dlogits_ptr.dtype.element_ty
    start = row * stride_lm
    shift = row * stride_dm - start
    first, count = _vectors(start, start + V, VEC)

    vectors = block * BLOCK + tl.arange(0, BLOCK)[:, None]
    mask = tl.broadcast_to(vectors < count, (BLOCK, VEC))
    columns = vectors * VEC + tl.arange(0, VEC)[None, :]
    z = load_logits(logits_ptr + first + columns, mask & kept, softcap, CAPPED)
    d = other_gradient(z, lse, slope, offset, softcap, CAPPED)
    # first + shift is a multiple of VEC; so written, the compiler knows
    out = dlogits_ptr + (first + shift) // VEC * VEC
    tl.store(out + columns, d.to(dtype), mask=mask)  # [BLOCK, VEC]
    # the target's element apart: comparing every column with it costs as much as the rest
    target_column = local_target - (first - start)
    ahead = target_column - block * (BLOCK * VEC)
    if kept & (ahead >= 0) & (ahead < BLOCK * VEC) & (target_column < count.to(tl.int64) * VEC):
        z_target = tl.sum(tl.sum(tl.where(columns == target_column, z, 0.0), axis=1), axis=0)
        d_target = _target_gradient(z_target, lse, slope, offset, hit, softcap, CAPPED)
        tl.debug_barrier()
        tl.store(out + target_column, d_target.to(dtype))  # scalar
    if EDGES:
        if block == 0:
            _edge_gradients(
                logits_ptr, dlogits_ptr, start, shift, V, local_target, kept, lse, slope, offset, hit, softcap,
                CAPPED, VEC,
            )  # fmt: skip


@kernel(unaligned=("target_ptr", "scale_ptr"))
def _mean_scale_kernel(target_ptr, scale_ptr, T, ignore_index, BLOCK: tl.constexpr):
    """1 / number of kept tokens. One program: 8 bytes a row are nothing beside the row."""
    kept = tl.zeros([BLOCK], tl.int32)
    for start in range(0, T, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        target = tl.load(target_ptr + rows, mask=rows < T, other=ignore_index)  # [BLOCK]
        # counted as integers: float32 counts are exact to 2^24 only
        kept += (target != ignore_index).to(tl.int32)
    tl.store(scale_ptr, 1.0 / tl.sum(kept, axis=0).to(tl.float32))  # scalar


@kernel(unaligned=("target_ptr", "scale_ptr"))
def _loss_kernel(
    lse_ptr,
    target_logit_ptr,
    sum_ptr,
    target_ptr,
    scale_ptr,
    losses_ptr,
    loss_ptr,
    T,
    vocab_size,
    ignore_index,
    label_smoothing,
    z_loss,
    BLOCK: tl.constexpr,
):
    """Every row's loss, or their sum (one program then), with scale_ptr divided by the number of kept tokens; the
    divisor's reciprocal is written there."""
    total = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(tl.program_id(0) * BLOCK, T, tl.num_programs(0) * BLOCK):
        rows = start + tl.arange(0, BLOCK)
        mask = rows < T
        lse = tl.load(lse_ptr + rows, mask=mask, other=0.0)  # [BLOCK]
        loss = (lse - tl.load(target_logit_ptr + rows, mask=mask, other=0.0)) * (1.0 - label_smoothing)  # [BLOCK]
        if sum_ptr is not None:
            loss += (lse - tl.load(sum_ptr + rows, mask=mask, other=0.0) / vocab_size) * label_smoothing  # [BLOCK]
        loss += z_loss * lse * lse
        target = tl.load(target_ptr + rows, mask=mask, other=ignore_index)  # [BLOCK]
        loss = tl.where(target == ignore_index, 0.0, loss)
        if losses_ptr is not None:
            tl.store(losses_ptr + rows, loss, mask=mask)  # [BLOCK]
        total += loss
        # counted as integers: float32 counts are exact to 2^24 only
        count += (target != ignore_index).to(tl.int32)
    if loss_ptr is not None:
        loss_sum = tl.sum(total, axis=0)
        if scale_ptr is not None:
            scale = 1.0 / tl.sum(count, axis=0).to(tl.float32)
            tl.store(scale_ptr, scale)  # scalar
            loss_sum *= scale
        tl.store(loss_ptr, loss_sum)  # scalar


@kernel(aligned=("N",), unaligned=("grad_ptr", "scale_ptr"), down_to=2)
def _scale_kernel(x_ptr, grad_ptr, scale_ptr, M, N, step_grad, BLOCK: tl.constexpr):
    """x [M, N] times one factor a row (or one for all). A factor of 1 costs nothing: no memory is touched."""
    blocks = tl.cdiv(N, BLOCK)
    for step in range(tl.program_id(0), M * blocks, tl.num_programs(0)):
        tile = step + tl.zeros([], tl.int64)
        row = tile // blocks
        factor = tl.load(grad_ptr + row * step_grad).to(tl.float32)  # scalar
        if scale_ptr is not None:
            factor *= tl.load(scale_ptr)  # scalar
        # a mean's gradient is most often 1 already: the check costs one load a tile, the product a pass over dlogits
        if factor != 1.0:
            cols = tile % blocks * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)  # [BLOCK]
            tl.store(x_ptr + row * N + cols, (x * factor).to(x_ptr.dtype.element_ty), mask=cols < N)  # [BLOCK]


class Terms(NamedTuple):
    """Options of the loss."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float  # 0 for none

    @property
    def modes(self) -> dict[str, Any]:
        return dict(CAPPED=self.softcap != 0.0)


def _vector(logits: Tensor, dlogits: Tensor) -> dict[str, Any]:
    """VEC, how many elements the kernels take as one 16-byte vector, and EDGES, whether a row has others beside."""
    size = logits.element_size()
    vec = 16 // size
    if dlogits.element_size() != size or any(t.data_ptr() % 16 for t in (logits, dlogits)):
        return dict(VEC=1, EDGES=False)
    if (logits.stride(0) - dlogits.stride(0)) % vec and logits.shape[0] > 1:
        return dict(VEC=1, EDGES=False)
    return dict(VEC=vec, EDGES=bool((logits.stride(0) % vec and logits.shape[0] > 1) or logits.shape[1] % vec))


def launch_row_stats(
    logits: Tensor,  # [T, V], rows
    target: Tensor,  # [T]
    terms: Terms,
    lse: Tensor,  # [T] float32, written
    target_logit: Tensor,  # [T] float32, written
    logit_sum: Tensor | None,  # [T] float32, written; only smoothing needs it
    *,
    scale: Tensor | None = None,  # [] float32
    dlogits: Tensor | None = None,  # [T, V], written: the gradient for dloss = scale; may be logits
    vocab_start: int = 0,
    vocab_size: int | None = None,
) -> None:
    """Each row's lse, target logit (0 if it is in another shard, nan if out of range) and sum of logits."""
    T, V = logits.shape
    parts = row_parts(T, V, Target.of(logits.device))
    if dlogits is not None and (parts.programs > 1 or V * logits.element_size() > FUSED_ROW_BYTES):
        where: dict[str, Any] = dict(vocab_start=vocab_start, vocab_size=vocab_size)
        launch_row_stats(logits, target, terms, lse, target_logit, logit_sum, **where)
        launch_dlogits(logits, target, lse, None, terms, dlogits, scale=scale, **where)
        return
    vector = _vector(logits, logits if dlogits is None else dlogits)
    # one H200, 8192 x 128256 bf16, ms (x 50257): 256 vectors by 4 warps 0.481 (0.207), 512 by 8 0.480 (0.215), 1024 by
    # 16 0.489 (0.249); with the gradient, x 50257: 1024 by 16 0.55, 1024 by 32 0.60, 512 by 8 0.60.
    most = 1024 if dlogits is not None else stats_block(T * parts.programs, Target.of(logits.device))
    block = min(most, next_power_of_2(max(1, min(V, parts.columns) // vector["VEC"])))
    found, into = None, [lse, None, target_logit, logit_sum]
    if parts.programs > 1:
        found, into = parts.results(lse, lse, target_logit, logit_sum)
    _row_stats_kernel[(T, parts.programs)](
        logits, target, scale, *into, dlogits,
        V, vocab_start, vocab_size or V, logits.stride(0), 0 if dlogits is None else dlogits.stride(0), *terms,
        parts.columns, **terms.modes, **vector, BLOCK=block, num_warps=1 if block <= 128 else block // 64,
    )  # fmt: skip
    if found is not None:
        _join_row_stats_kernel[(T,)](
            found, target, lse, target_logit, logit_sum, parts.programs, found.stride(0), terms.ignore_index,
            BLOCK=MOST_PARTS, STARTS_EARLY=starts_early(Target.of(logits.device)), num_warps=1,
        )  # fmt: skip


class Parts(NamedTuple):
    """How programs share a row for its statistics: each reads a part of it."""

    programs: int  # of a row
    columns: int  # of a part; the last part may have fewer

    def results(self, like: Tensor, *others: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
        """Uninitialized [4, at least programs * T] for the parts' results in place of four tensors [T]; its rows, None
        for None. Every row is aligned, so that one kernel serves all sizes."""
        found = like.new_empty((4, cdiv(self.programs * like.shape[0], 4) * 4))
        return found, [None if other is None else row for other, row in zip((like, *others), found, strict=True)]


def row_parts(
    T: int, V: int, target: Target, batch_invariant: bool = False, *, per_sm: int = 1, pays: int = 42000
) -> Parts:
    """Several programs read a long row where one for each would leave SMs without work, `per_sm` an SM in all, if each
    then reads at least `pays` words less. The order of sums then depends on T, so with `batch_invariant`, or in its
    context, it is always one."""
    # us, one H200, bf16, by 1, 2, 4, 8, 16, 32 programs a row, the launch that joins them included:
    #  4 x 128256 9.8 8.2 6.5 5.7 5.1 4.8    16 x 50257 6.6 7.2 6.2 5.6 5.4 5.3   16 x 256000 17.0 12.1 8.6 7.1 7.7 7.6
    #   64 x  50257 6.7 7.6 8.2 8.2 7.6 7.4    64 x 128256 10.1 8.9 9.4 9.4 9.4 9.4    132 x 128256 10.4 13.2 12.9 12.8
    most = 1
    if T <= 2 * target.num_sms and not (batch_invariant or is_batch_invariant()):
        most = max(1, min(MOST_PARTS, per_sm * target.num_sms // max(1, T)))
    columns = cdiv(max(1, V), most * _PART) * _PART
    return Parts(cdiv(V, columns), columns) if V - columns >= pays else Parts(1, cdiv(max(1, V), _PART) * _PART)


def stats_block(programs: int, target: Target) -> int:
    """Vectors of a row that a program reads at a time for its statistics, 64 a warp: few programs more, so that an SM
    has 32 warps' loads in flight. 184 rows on 132 SMs were 4 or 8 warps an SM: a third of a copy's speed."""
    if is_batch_invariant():
        return 256
    return min(2048, max(256, next_power_of_2(cdiv(32 * target.num_sms, max(1, programs))) * 64))


def launch_losses(
    lse: Tensor,
    target_logit: Tensor,
    logit_sum: Tensor | None,
    target: Tensor,
    terms: Terms,
    vocab_size: int,
    *,
    losses: Tensor | None = None,  # [T], written
    loss: Tensor | None = None,  # [], written: their sum, times scale
    scale: Tensor | None = None,  # [] float32, written: 1 / number of kept tokens, for the mean
) -> None:
    """The loss from the results of `launch_row_stats` for the whole vocabulary."""
    T = target.shape[0]
    # one program adds up all rows: with many rows it is bound by the latency of its loads, of which this many are ahead
    block = 8192 if losses is None and T > 2048 else 1024
    _loss_kernel[(1 if losses is None else cdiv(T, block),)](
        lse, target_logit, logit_sum, target, scale, losses, loss,
        T, vocab_size, terms.ignore_index, terms.label_smoothing, terms.z_loss, BLOCK=block, num_warps=block // 256,
    )  # fmt: skip


def launch_dlogits(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    dloss: Tensor | None,  # [T], [], or None for 1
    terms: Terms,
    dlogits: Tensor,  # [T, V], written; may be logits
    *,
    scale: Tensor | None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
) -> None:
    """The gradient of this shard's logits."""
    T, V = logits.shape
    vector = _vector(logits, dlogits)
    # one H200, 8192 x 128256 bf16, ms: 256 vectors by 2 warps 1.005, by 4 1.068, 512 by 8 1.091, 1024 by 16 1.064
    block = min(256, next_power_of_2(max(1, V // vector["VEC"])))
    blocks = cdiv(max(1, V // vector["VEC"]), block)
    _dlogits_kernel[(T * blocks,)](
        logits, target, lse, dloss, scale, dlogits,
        V, vocab_start, vocab_size or V, blocks, logits.stride(0), dlogits.stride(0), row_stride(dloss), *terms,
        **terms.modes, **vector, BLOCK=block, num_warps=max(1, block // 128),
    )  # fmt: skip


def row_stride(dloss: Tensor | None) -> int:
    return dloss.stride(0) if dloss is not None and dloss.dim() else 0


def launch_mean_scale(target: Tensor, terms: Terms, scale: Tensor) -> None:
    """scale [] float32 = 1 / number of kept tokens, ahead of a gradient that is made in forward."""
    T = target.shape[0]
    # one program: of 32768 rows 16384 at a time took 4 us less than 4096
    block, warps = (16384, 32) if T > 4096 else (4096, 8)
    _mean_scale_kernel[(1,)](target, scale, T, terms.ignore_index, BLOCK=block, num_warps=warps)


def scale_rows_(x: Tensor, dloss: Tensor, scale: Tensor | None) -> None:
    """x *= dloss * scale, in place, one factor for all or one a row; no synchronization; x is not read if it is 1."""
    M, N = (1, x.numel()) if dloss.dim() == 0 else (dloss.shape[0], x.numel() // max(1, dloss.shape[0]))
    block = min(8192, next_power_of_2(max(1, N)))
    grid = min(M * cdiv(N, block), Target.of(x.device).num_sms * 8)
    _scale_kernel[(grid,)](
        x, dloss, scale, M, N, row_stride(dloss), BLOCK=block, num_warps=max(1, min(8, block // 256))
    )
