"""Bias, dropout and residual addition in one kernel, with no stored mask.

    y  = residual + keep * (x + bias) / (1 - p)          keep = 1 with probability 1 - p
    dx = keep * dy / (1 - p);   dbias = sum over rows of dx;   dresidual = dy

Saved: a seed of 16 bytes; backward draws the same `keep` again. It is a function of the seed, the row and the column
alone, not of tiles, strides or device, so CPU and GPU give the same bits. Computed in float32. M rows of N elements of
e bytes: forward moves 3*M*N*e bytes, backward 2*M*N*e, plus partial bias gradients [programs, N] float32. Philox costs
about 14 integer operations an element.

Random numbers: Philox 4x32-7 of key seed[0] and counter (n, seed[1]), both 64 bits. The four words of one call serve
columns 256 apart, so that no lane needs another's: column c of row r has word c // 256 % 4 of counter
n = (r * G + c // 1024) * 256 + c % 256, where G = ceil(N / 1024). Rows of up to 512 columns would leave words over: up
to 256, four rows share a call, word r % 4 of n = r // 4 * 256 + c; up to 512, two rows, word r % 2 * 2 + c // 256 of
n = r // 2 * 256 + c % 256. An element is dropped when its word, shifted right by one, is below p * 2^31. Seven rounds
are the fewest that pass BigCrush; ten took 5% longer forward and 14% backward at 16384x4096 bf16 on an H200.

Sources: Srivastava et al. 2014; Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import dropout

from powertrain.ops.column_sums import PartialSums, column_sums, store_sum
from powertrain.ops.early_start import starts_early_if_small, wait_then_let_next_start
from powertrain.ops.flat_elements import (
    BLOCK,
    REST,
    WARPS,
    flat_places,
    goes_flat,
    whole_vectors,
)
from powertrain.ops.philox import dropout_seed, halves, philox, threshold
from powertrain.ops.shapes import acc_dtype, as_rows, cdiv, empty, next_power_of_2, wanted
from powertrain.runtime import checks
from powertrain.runtime.dispatch import Op, apart_from_autocast, falls_back, use_kernel, without_autocast
from powertrain.runtime.launch import kernel
from powertrain.runtime.plain_calls import plain
from powertrain.runtime.sharding import leading_dims, placements
from powertrain.runtime.target import Target
from powertrain.runtime.tuning import tunable

GROUP, LANES = 1024, 256  # columns of one counter's four words, and how far apart they are
_FEW = 1024  # elements for each SM


def bias_dropout_add_ref(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, *, seed: Tensor | None = None
) -> Tensor:
    """The specification of `bias_dropout_add` in training, in plain PyTorch; the seed must be given if p > 0."""
    y = x.to(acc_dtype(x.dtype))
    y = y if bias is None else y + bias
    if p > 0:
        assert seed is not None
        y = torch.where(dropout_keep(seed, x.shape, p), y / (1 - p), 0.0)
    return y.to(x.dtype) if residual is None else (y + residual).to(residual.dtype)


def dropout_keep(seed: Tensor, shape: torch.Size | tuple[int, ...], p: float) -> Tensor:
    """The elements of `shape` that dropout keeps for this seed, bool: the mask of the kernels, in plain PyTorch."""
    N = shape[-1]
    M, groups, lanes = math.prod(shape[:-1]), -(-N // GROUP), min(N, LANES)
    rows, words = _of_a_call(N)
    calls = -(-M // rows)
    n = torch.arange(calls * groups, device=seed.device)[:, None] * LANES + torch.arange(lanes, device=seed.device)
    drawn = torch.stack(philox(seed[0], (*halves(n), *halves(seed[1])))[: rows * words], 1)  # [n / lanes, words, lanes]
    return (drawn.view(calls * rows, groups * words * lanes)[:M, :N] >> 1 >= threshold(p)).view(shape)


def _of_a_call(N: int) -> tuple[int, int]:
    """How many rows of N columns the words of a call serve, and how many columns of each."""
    words = max(1, min(4, cdiv(N, LANES)))
    return (4 // words if words <= 2 else 1), words


@kernel(aligned=("N",), unaligned=("seed_ptr",), down_to=2)
def _bias_dropout_add_fwd_kernel(
    x_ptr,
    bias_ptr,
    residual_ptr,
    seed_ptr,
    y_ptr,
    M,
    N,
    groups,
    stride_xm,
    stride_rm,
    threshold,
    scale,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    """A call's words serve ROWS rows, WORDS columns of each; a program has BLOCK_M times as many rows."""
    wait_then_let_next_start(STARTS_EARLY)
    # PARTS programs share a group of columns: one for each word, or one for all
    part = tl.program_id(0) % PARTS
    program = tl.program_id(0) // PARTS
    group = program % groups
    calls = (program // groups * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    lanes = tl.arange(0, BLOCK_N)[None, :]
    # all loads ahead of the first store, past which the compiler moves none: it might be to the same place
    xs, biases, residuals = (), (), ()
    for word in tl.static_range(ROWS * WORDS // PARTS):
        rows, cols = _place(calls, group, lanes, part + word, ROWS, WORDS)
        mask = (rows < M) & (cols < N)
        xs += (tl.load(x_ptr + rows * stride_xm + cols, mask=mask, other=0.0),)  # type: ignore[assignment]  # [BLOCK_M, BLOCK_N]
        if bias_ptr is not None:
            biases += (tl.load(bias_ptr + cols, mask=cols < N, other=0.0),)  # type: ignore[assignment]  # [1, BLOCK_N]
        if residual_ptr is not None:
            # [BLOCK_M, BLOCK_N]
            residuals += (tl.load(residual_ptr + rows * stride_rm + cols, mask=mask, other=0.0),)  # type: ignore[assignment]
    drawn = _draw(seed_ptr, calls * groups + group, lanes)
    for word in tl.static_range(ROWS * WORDS // PARTS):
        rows, cols = _place(calls, group, lanes, part + word, ROWS, WORDS)
        y = xs[word].to(tl.float32)  # type: ignore[var-annotated]
        if bias_ptr is not None:
            y += biases[word].to(tl.float32)
        if drawn is not None:
            if PARTS > 1:
                keep = _keep_of_part(drawn, part, threshold, PARTS)
            else:
                keep = _keep(drawn, word, threshold)
            y = tl.where(keep, y * scale, 0.0)
        if residual_ptr is not None:
            y += residuals[word].to(tl.float32)
        # [BLOCK_M, BLOCK_N]
        tl.store(y_ptr + rows * N + cols, y.to(y_ptr.dtype.element_ty), mask=(rows < M) & (cols < N))


@triton.jit
def _place(calls, group, lanes, word, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Rows and columns of a word of these calls."""
    return calls * ROWS + word // WORDS, group * 1024 + word % WORDS * 256 + lanes


@kernel()
def _bias_add_flat_kernel(x_ptr, bias_ptr, residual_ptr, y_ptr, size, N, inverse, BLOCK: tl.constexpr):
    """Without dropout, dense rows that flat_elements.py says are better taken flat."""
    base = tl.program_id(0).to(tl.int64) * BLOCK
    whole = whole_vectors(size)
    _bias_add_flat(x_ptr, bias_ptr, residual_ptr, y_ptr, base, whole, N, inverse, BLOCK)
    if (base == 0) & (whole < size):
        _bias_add_flat(x_ptr, bias_ptr, residual_ptr, y_ptr, base + whole, size, N, inverse, REST)


@triton.jit
def _bias_add_flat(x_ptr, bias_ptr, residual_ptr, y_ptr, base, end, N, inverse, BLOCK: tl.constexpr):
    places, _, behind, rows = flat_places(base, N, inverse, BLOCK)
    mask = places < end
    y = tl.load(x_ptr + places, mask=mask, other=0.0).to(tl.float32)  # [BLOCK]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + behind - rows * N, mask=mask, other=0.0).to(tl.float32)  # [BLOCK]
    if residual_ptr is not None:
        y += tl.load(residual_ptr + places, mask=mask, other=0.0).to(tl.float32)  # [BLOCK]
    tl.store(y_ptr + places, y.to(y_ptr.dtype.element_ty), mask=mask)  # [BLOCK]


@triton.jit
def _draw(seed_ptr, group, lanes):
    """The four words of these counters of a group of columns of each row; None if nothing is dropped."""
    if seed_ptr is not None:
        high = tl.load(seed_ptr + 1)
        # by position in the tensor, not by program: backward, with other tiles, draws the same mask again
        counter = group * 256 + lanes
        c0, c1 = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
        c2, c3 = high.to(tl.uint32), (high >> 32).to(tl.uint32)
        drawn = tl.philox(tl.load(seed_ptr), c0, c1, c2, c3, 7)
    else:
        drawn = None
    return drawn


@triton.jit
def _keep(drawn, word: tl.constexpr, threshold):
    # 31 bits, so that the comparison is one of signed integers
    return (drawn[word] >> 1).to(tl.int32) >= threshold


@triton.jit
def _keep_of_part(drawn, part, threshold, PARTS: tl.constexpr):
    keep = _keep(drawn, 0, threshold)
    for word in tl.static_range(1, PARTS):
        keep = tl.where(part == word, _keep(drawn, word, threshold), keep)
    return keep


@kernel(aligned=("N",), unaligned=("seed_ptr",), down_to=2)
def _bias_dropout_add_bwd_kernel(
    dy_ptr,
    seed_ptr,
    dx_ptr,
    dbias_partial_ptr,
    M,
    N,
    groups,
    programs,
    stride_dym,
    threshold,
    scale,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    LANE_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    wait_then_let_next_start(STARTS_EARLY)
    lanes = tl.program_id(0) % LANE_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    group = tl.program_id(0) // LANE_BLOCKS % groups
    program = tl.program_id(0) // LANE_BLOCKS // groups
    db0 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    db1 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    db2 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    db3 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # 16384x4096 bf16, ten rounds, H200: 0.116 ms with num_stages=2, 0.134 with 1
    for block in tl.range(program, tl.cdiv(M, ROWS * BLOCK_M), programs, num_stages=2):
        calls = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        # all loads come before the first store, because the compiler moves no load past a store. Loads of 2 bytes, at
        # odd widths, are not pipelined: with stores between them each load waited for the one before
        dys = ()
        for word in tl.static_range(ROWS * WORDS):
            rows, cols = _place(calls, group, lanes, word, ROWS, WORDS)
            ptrs, mask = dy_ptr + rows * stride_dym + cols, (rows < M) & (cols < N)
            dys += (tl.load(ptrs, mask=mask, other=0.0),)  # type: ignore[assignment]  # [BLOCK_M, BLOCK_N]
        drawn = _draw(seed_ptr, calls * groups + group, lanes)
        places = calls, group, lanes
        db0 += _dx(dys[0], dx_ptr, drawn, 0, places, M, N, threshold, scale, ROWS, WORDS)  # type: ignore[misc]
        if ROWS * WORDS > 1:
            db1 += _dx(dys[1], dx_ptr, drawn, 1, places, M, N, threshold, scale, ROWS, WORDS)  # type: ignore[misc]
        if ROWS * WORDS > 2:
            db2 += _dx(dys[2], dx_ptr, drawn, 2, places, M, N, threshold, scale, ROWS, WORDS)  # type: ignore[misc]
        if ROWS * WORDS > 3:
            db3 += _dx(dys[3], dx_ptr, drawn, 3, places, M, N, threshold, scale, ROWS, WORDS)  # type: ignore[misc]
    if dbias_partial_ptr is not None:
        if ROWS == 4:
            db0 += db1 + db2 + db3
        elif ROWS == 2:
            db0 += db2
            db1 += db3
        cols = group * 1024 + lanes
        partial_ptr = dbias_partial_ptr + program.to(tl.int64) * N + cols
        store_sum(partial_ptr, db0, cols < N)
        if WORDS > 1:
            store_sum(partial_ptr + 256, db1, cols + 256 < N)
        if WORDS > 2:
            store_sum(partial_ptr + 512, db2, cols + 512 < N)
        if WORDS > 3:
            store_sum(partial_ptr + 768, db3, cols + 768 < N)


@triton.jit
def _dx(
    dy, dx_ptr, drawn, word: tl.constexpr, places, M, N, threshold, scale, ROWS: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    dx = dy.to(tl.float32)
    if drawn is not None:
        dx = tl.where(_keep(drawn, word, threshold), dx * scale, 0.0)
    if dx_ptr is not None:
        rows, cols = _place(*places, word, ROWS, WORDS)
        # [BLOCK_M, BLOCK_N]
        tl.store(dx_ptr + rows * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=(rows < M) & (cols < N))
    return dx


class _Plan(NamedTuple):
    groups: int
    rows: int  # of a call's words
    words: int  # of a row
    block_m: int  # calls
    block_n: int
    num_warps: int
    parts: int  # programs of a group of columns, in forward
    programs: int  # that share the rows in backward with a bias
    lane_blocks: int = 1  # programs of a group's lanes, in backward


@tunable("NVIDIA H200, 2026-11-28")
def _plan(M: int, N: int, drops: bool, target: Target) -> _Plan:
    """drops: p is above 0."""
    # us, one H200, bf16, 2^26 elements, p = 0.1 forward, backward (torch.compile): 96 columns 122, 126 (225, 140); 128
    # 101, 100 (220, 121); 256 101, 95 (221, 121); 384 117, 117 (225, 127); 1594 149, 151; with 256 columns a warp, not
    # 1024, 147, 190
    groups, (rows, words) = cdiv(N, GROUP), _of_a_call(N)
    calls = cdiv(M, rows)
    block_n = min(LANES, next_power_of_2(N))
    block_m, warps, per_sm = 1, 1, 16
    parts = 1
    if M * N <= _FEW * target.num_sms:
        # nothing hides the time of a load: one vector a thread. us, one H200, in a graph, p = 0, this, four words a
        # program: 65536 elements 0.94, 1.01; 131072 1.02, 1.16; 262144 1.60, 1.20
        block_m, parts = max(1, 256 // block_n), rows * words
        if drops:
            # nor the latency of Philox, 70 dependent instructions a counter. us, with the kernel that draws the seed,
            # p = 0.1, a word on 1 and 4 warps, all words on 8; torch.compile: 2x768 4.05 3.57 3.72; 3.48. 2x14336 4.16
            # 3.74 3.86; 3.69. 64x1024 4.25 3.95 3.95; 3.85. 32x4096 4.37 4.12 3.99; 4.03. 100x159 4.17 3.77 3.76; 3.71
            parts, warps = (rows * words, 4) if 4 * M * N <= _FEW * target.num_sms else (1, 8)
    elif words == 1:
        block_m, per_sm = 256 // block_n, 32
    elif N % 8:
        # loads of few bytes: more warps
        block_m, warps, per_sm = 4, 4, 8
    programs = min(cdiv(calls, block_m), cdiv(target.num_sms * per_sm, max(1, groups)))
    return _Plan(groups, rows, words, block_m, block_n, warps, parts, max(1, programs))


# rows of which one program sums the bias's gradient: no partial sums, no second launch
_FEW_SUMMED = 64
_MOST = 1 << 25  # elements of rows of whole vectors for which fewer partial sums are worth narrow tiles


@tunable("NVIDIA H200, 2026-11-28")
def _plan_bwd(M: int, N: int, drops: bool, target: Target) -> _Plan:
    plan = _plan(M, N, drops, target)
    lanes = min(N, LANES)
    if M <= _FEW_SUMMED:
        # us, one H200, p = 0.1, in a graph, this, two launches; torch.compile, which has stored the mask: 2x4928 1.4,
        # 3.1; 2.7. 16x4928 2.4, 2.9; 1.8
        # 24x11096 3.1, 4.1; 40x2424 2.6, 2.8; 56x768 2.3, 2.6; 56x11096 4.0, 5.8
        block_n = min(32 if M <= 16 else 16 if M <= 32 else 8, plan.block_n)
        lane_blocks = max(1, cdiv(lanes, block_n))
        return plan._replace(
            block_m=next_power_of_2(cdiv(M, plan.rows)),
            block_n=block_n,
            num_warps=4,
            programs=1,
            lane_blocks=lane_blocks,
        )
    if M * N <= _FEW * target.num_sms or (M * N > _MOST and N % 8 == 0):
        return plan
    # us as above, this, rows of 1024 columns: 256x4928 6.9, 7.5; 6.1. 798x11096 15.9, 17.7; 14.9. 4096x768 9.8, 11.9;
    # 9.6. Not in a graph: 2048x4096 19.8, 20.6; 24.3. 4136x4056 31.9, 32.0; 40.5. 16384x4096 95, 93; 121. Odd rows:
    # 32752x2049 157, 175; 135. 422068x159 274, 308; 146
    block_n = min(64, plan.block_n)
    lane_blocks = cdiv(lanes, block_n)
    block_m = max(1, 256 // block_n)
    programs = min(cdiv(cdiv(M, plan.rows), block_m), cdiv(target.num_sms * 16, plan.groups * lane_blocks))
    return plan._replace(block_m=block_m, block_n=block_n, num_warps=1, programs=programs, lane_blocks=lane_blocks)


def _bda_fwd_outputs(x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, p: float) -> Tensor:
    return torch.empty_like(x if residual is None else residual, memory_format=torch.contiguous_format)


def _bda_fwd(x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, p: float) -> Tensor:
    y = _bda_fwd_outputs(x, bias, residual, seed, p)
    rows, residual = as_rows(x), None if residual is None else as_rows(residual)
    M, N = rows.shape
    target = Target.of(x.device)
    is_dense = rows.is_contiguous() and (residual is None or residual.is_contiguous())
    if seed is None and is_dense and M * N > _FEW * target.num_sms and goes_flat(N, x.element_size()):
        _bias_add_flat_kernel[(cdiv(M * N, BLOCK),)](
            rows, bias, residual, y, M * N, N, 1 / N, BLOCK=BLOCK, num_warps=WARPS
        )
        return y
    plan = _plan(M, N, seed is not None, target)
    programs = cdiv(M, plan.rows * plan.block_m) * plan.groups * plan.parts
    _bias_dropout_add_fwd_kernel[(programs,)](
        rows, bias, residual, seed, y, M, N, plan.groups, rows.stride(0), 0 if residual is None else residual.stride(0),
        threshold(p), 1 / (1 - p),
        ROWS=plan.rows, WORDS=plan.words, PARTS=plan.parts, BLOCK_M=plan.block_m, BLOCK_N=plan.block_n,
        # behind the kernel that draws a seed, which lets none start, an early start takes 0.2 us longer
        STARTS_EARLY=seed is None and starts_early_if_small(target, programs, M * N), num_warps=plan.num_warps,
    )  # fmt: skip
    return y


def _bda_bwd_outputs(
    dy: Tensor,
    seed: Tensor | None,
    p: float,
    x_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    need_dx: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor]:
    dx = dy.new_empty(dy.shape, dtype=x_dtype) if need_dx else empty(dy)
    return dx, dy.new_empty(dy.shape[-1:], dtype=bias_dtype) if need_dbias else empty(dy)


def _bda_bwd(
    dy: Tensor,
    seed: Tensor | None,
    p: float,
    x_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    need_dx: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor]:
    dx, dbias = _bda_bwd_outputs(dy, seed, p, x_dtype, bias_dtype, need_dx, need_dbias)
    rows = as_rows(dy)
    M, N = rows.shape
    target = Target.of(dy.device)
    if seed is None and not need_dx:
        column_sums(rows, dbias)
        return dx, dbias
    plan = _plan_bwd(M, N, seed is not None, target)
    programs = plan.programs if need_dbias else cdiv(M, plan.rows * plan.block_m)
    sums = PartialSums([dbias if need_dbias else None], programs)
    grid = programs * plan.groups * plan.lane_blocks
    _bias_dropout_add_bwd_kernel[(grid,)](
        rows, seed, dx if need_dx else None, *sums.launches[0],
        M, N, plan.groups, programs, rows.stride(0),
        threshold(p), 1 / (1 - p),
        ROWS=plan.rows, WORDS=plan.words, LANE_BLOCKS=plan.lane_blocks, BLOCK_M=plan.block_m, BLOCK_N=plan.block_n,
        STARTS_EARLY=starts_early_if_small(target, grid, M * N), num_warps=plan.num_warps,
    )  # fmt: skip
    sums.add_up()
    return dx, dbias


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, _, seed, ctx.p = inputs
    ctx.save_for_backward(seed)
    ctx.x_dtype, ctx.bias_dtype = x.dtype, x.dtype if bias is None else bias.dtype
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    need_x, need_bias, need_residual = ctx.needs_input_grad[:3]
    (seed,) = ctx.saved_tensors
    dx = dbias = None
    if dy is not None:
        # nothing is dropped: dx is dy
        dx_is_dy = seed is None and dy.dtype is ctx.x_dtype
        if need_bias or (need_x and not dx_is_dy):
            dx, dbias = _bda_bwd_op(dy, seed, ctx.p, ctx.x_dtype, ctx.bias_dtype, need_x and not dx_is_dy, need_bias)
        if dx_is_dy:
            dx = dy
    return wanted(dx, need_x), wanted(dbias, need_bias), dy if need_residual else None, None, None


def _fwd_sharding(x: Any, seed: Any, **_: Any) -> Any:
    R, _P, S = placements()
    for at in [R, *map(S, leading_dims(x) if seed is None else ())]:
        yield [at], {"x": at, "residual": at}


def _bwd_sharding(**_: Any) -> Any:
    R, _P, _S = placements()
    yield [R, R], {}


_bda_op = Op(
    "bias_dropout_add(Tensor x, Tensor? bias, Tensor? residual, Tensor? seed, float p) -> Tensor",
    _bda_fwd,
    _bda_fwd_outputs,
    backward=_backward,
    setup_context=_setup_context,
    sharding=_fwd_sharding,
)
_bda_bwd_op = Op(
    "bias_dropout_add_bwd(Tensor dy, Tensor? seed, float p, ScalarType x_dtype, ScalarType bias_dtype, bool need_dx, "
    "bool need_dbias) -> (Tensor, Tensor)",
    _bda_bwd,
    _bda_bwd_outputs,
    sharding=_bwd_sharding,
)


@falls_back("bias_dropout_add")
def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    p: float,
    *,
    training: bool = True,
    seed: Tensor | None = None,
) -> Tensor:
    """`residual + dropout(x + bias)`, dropping with probability p and scaling kept elements by 1 / (1 - p).

    Shapes: N hidden size, any leading dims.
        x         [..., N]  float32, float16 or bfloat16 (float64 on the CPU); any strides
        bias      [N]       any of these dtypes, or None
        residual  [..., N]  x's shape, or None; may be float32 beside a bfloat16 x
        p                   in [0, 1)
        training            False: nothing is dropped
        seed      [2]       int64 on x's device: the same seed drops the same elements, on CPU and GPU. None: drawn from
                            torch's generator, so that torch.manual_seed, checkpointing and CUDA graphs act as on
                            F.dropout, which draws the elements itself where no kernel serves (CPU)
    Returns y [..., N] in the residual's dtype, else x's.
    Numerics: float32, rounded once. Deterministic, the bias gradient included.
    Memory: saves the seed, 16 bytes; nothing else.
    Raises ValueError naming the argument, the expected value and the given one. Double backward and vmap are not
        implemented and say so.
    Source: Srivastava et al. 2014; Philox after Salmon et al. 2011.
    """
    checks.require(x.dim() > 0, "bias_dropout_add", "x", "have at least one dim", "a scalar")
    checks.floating("bias_dropout_add", x=x, bias=bias, residual=residual)
    checks.same_device("bias_dropout_add", "x", x, bias=bias, residual=residual, seed=seed)
    checks.shape("bias_dropout_add", "bias", bias, x.shape[-1:], "last dim of x")
    checks.shape("bias_dropout_add", "residual", residual, x.shape, "shape of x")
    checks.require(0 <= p < 1, "bias_dropout_add", "p", "be in [0, 1)", p)
    if seed is not None:
        checks.shape("bias_dropout_add", "seed", seed, (2,), "seed and offset")
        checks.require(seed.dtype is torch.int64, "bias_dropout_add", "seed", "be int64", checks.name(seed.dtype))
    p = float(p) if training else 0.0
    if not use_kernel("bias_dropout_add", x):
        add = apart_from_autocast(_bda_torch(x, residual, p), x.device)
        return plain(add, x, bias, residual, seed if p > 0 else None)
    seed = None if p == 0 else dropout_seed(x.device) if seed is None else seed.contiguous()
    # without dropout Inductor fuses the additions with the surrounding operations
    if seed is None and torch.compiler.is_compiling():
        with without_autocast(x.device):
            return bias_dropout_add_ref(x, bias, residual, p)
    return _bda_op(x, bias if bias is None else bias.contiguous(), residual, seed, p)


def _bda_torch(x: Tensor, residual: Tensor | None, p: float) -> Callable[..., Tensor]:
    """`bias_dropout_add` of such tensors, (x, bias, residual, seed), in plain PyTorch."""
    acc, to = acc_dtype(x.dtype), x.dtype if residual is None else residual.dtype

    def add(x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None) -> Tensor:
        # without a seed any elements may be dropped: PyTorch's dropout takes a tenth of the time of Philox here
        if seed is not None:
            return bias_dropout_add_ref(x, bias, residual, p, seed=seed)
        y = x if x.dtype is acc else x.to(acc)
        y = y if bias is None else y + bias
        y = dropout(y, p) if p > 0 else y
        y = y if residual is None else y + residual
        y = y if y.dtype is to else y.to(to)
        # where nothing is added or dropped: to be written to without a change of x, as a kernel's result
        return y.clone() if y is x else y

    return add
