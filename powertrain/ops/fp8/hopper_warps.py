"""The warps of the Hopper FP8 GEMM that ops/gemm/hopper_warps.py does not have: consumers and the scale loader."""

from typing import Any, NamedTuple

from powertrain.ops.gemm.hopper_warps import EMPTY, TURN, advance, give_back, hand_over, tile_coords
from powertrain.runtime.gluon_compat import (
    async_copy,
    gl,
    gluon,
    hopper,
    mbarrier,
    named_barrier_arrive,
    named_barrier_sync,
    named_barrier_sync_divergent,
)


class ScalePointers(NamedTuple):
    """Scales in memory and their strides in elements; 0 where all are one."""

    a: Any
    b: Any
    a_row: Any
    a_group: Any
    b_row: Any
    b_group: Any


class ScaleStages(NamedTuple):
    """Scales of the stages in shared memory."""

    a: Any  # [STAGES, 2, 64]
    b: Any  # [STAGES * halves, 128], of blocks [STAGES * halves, 1]


class ScaledBuffers(NamedTuple):
    """What a consumer reads and writes in shared memory."""

    a: Any
    b: Any
    c: Any  # [consumers, rows, 128] on their way out
    full: Any
    c_full: Any
    c_empty: Any


@gluon.jit
def _fma(x, y, z):
    """x y + z, which the compiler leaves where it stands."""
    x, y = gl.broadcast(x, y)
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [x, y, z], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _add_part(acc, part, a, b, scales, at, b_at, FORM: gl.constexpr, CONSUMER: gl.constexpr):
    """acc + (a b of 128 of K) * scales: [64, 128]; and the product, whose registers the next one takes."""
    layout: gl.constexpr = acc.type.layout
    # in turns: while the tensor cores work for one consumer, the other adds
    named_barrier_sync(TURN + CONSUMER, 256)
    # over the last product's registers, not over new ones: two products at once would spill
    part = hopper.warpgroup_mma(a, b, part, use_acc=False, is_async=True)
    named_barrier_arrive(TURN + 1 - CONSUMER, 256)
    if FORM == "ends":
        part = hopper.warpgroup_mma_wait(0, deps=[part])
        acc += part
    elif FORM == "block":
        sa = scales.a.index(at).load(gl.SliceLayout(1, layout))  # [64]
        sb = scales.b.index(b_at).load(gl.SliceLayout(0, layout))  # [1]
        scale = gl.expand_dims(sa, 1) * gl.expand_dims(sb, 0)
        part = hopper.warpgroup_mma_wait(0, deps=[part])
        acc = _fma(part, scale, acc)
    else:
        sa = scales.a.index(at).load(gl.SliceLayout(1, layout))  # [64]
        part = hopper.warpgroup_mma_wait(0, deps=[part])
        sb = scales.b.index(b_at).load(gl.SliceLayout(0, layout))  # [128]
        acc = _fma(part, gl.expand_dims(sa, 1) * gl.expand_dims(sb, 0), acc)
    return acc, part


@gluon.jit
def _finish(acc, pointers, bias_ptr, row, col, M, N, FORM: gl.constexpr):
    """The scales of rows and columns, and the bias, on a whole sum."""
    layout: gl.constexpr = acc.type.layout
    cols = col + gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    if FORM == "ends":
        rows = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout))
        sa = gl.load(pointers.a + rows * pointers.a_row, mask=rows < M, other=0.0)  # [64]
        sb = gl.load(pointers.b + cols * pointers.b_row, mask=cols < N, other=0.0)  # [128]
        acc *= gl.expand_dims(sa, 1) * gl.expand_dims(sb, 0)
    if bias_ptr is not None:
        acc += gl.expand_dims(gl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(gl.float32), 0)
    return acc


@gluon.jit
def consume(
    buffers, scales, pointers, bias_ptr, sizes, CONFIG: gl.constexpr, FORM: gl.constexpr, CONSUMER: gl.constexpr
):
    """A consumer: 64 rows of every tile of this CTA."""
    M, N, K, _ = sizes
    a_smem, b_smem, c_smem, full, c_full, c_empty = buffers
    BLOCK_M: gl.constexpr = CONFIG.block_m
    BLOCK_N: gl.constexpr = CONFIG.block_n
    STAGES: gl.constexpr = a_smem.shape[0]
    HALVES: gl.constexpr = CONFIG.split
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    c_phase = gl.to_tensor(1)
    if CONSUMER == 1:
        named_barrier_arrive(TURN, 256)
    part = gl.zeros([64, 128], gl.float32, layout)
    for t in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        left = gl.zeros([64, 128], gl.float32, layout)
        right = gl.zeros([64, 128], gl.float32, layout)
        for _ in range(gl.cdiv(K, 128)):
            mbarrier.wait(full.index(stage), phase)
            a = a_smem.index(stage).slice(CONSUMER * 64, 64, 0)
            b = b_smem.index(stage)
            at = stage * 2 + CONSUMER
            left, part = _add_part(
                left, part, a, b.slice(0, 128, 0).permute((1, 0)), scales, at, stage * HALVES, FORM, CONSUMER
            )
            if HALVES == 2:
                # passes at once: a branch, over which ptxas moves no sum; it would begin the next product before
                # the last one is added, with 64 registers more than there are
                mbarrier.wait(full.index(stage), phase)
                right, part = _add_part(
                    right, part, a, b.slice(128, 128, 0).permute((1, 0)), scales, at, stage * HALVES + 1, FORM,
                    CONSUMER,
                )  # fmt: skip
            stage, phase = advance(stage, phase, STAGES)
            give_back(stage, CONFIG, STAGES)
        tile_m, tile_n = tile_coords(t, tiles_m, tiles_n, CONFIG.group_m)
        row = tile_m * BLOCK_M + CONSUMER * 64
        col = tile_n * BLOCK_N
        c_part = c_smem.index(CONSUMER)
        left = _finish(left, pointers, bias_ptr, row, col, M, N, FORM)
        c_phase = hand_over(left, c_part, c_full.index(CONSUMER), c_empty.index(CONSUMER), c_phase)
        if HALVES == 2:
            right = _finish(right, pointers, bias_ptr, row, col + 128, M, N, FORM)
            c_phase = hand_over(right, c_part, c_full.index(CONSUMER), c_empty.index(CONSUMER), c_phase)
    if CONSUMER == 0:
        named_barrier_sync(TURN, 256)


@gluon.jit
def load_scales(pointers, scales, full, sizes, CONFIG: gl.constexpr, FORM: gl.constexpr):
    """The warp of the scales: those of every stage, copied asynchronously, so that it runs ahead as the loader does."""
    M, N, K, _ = sizes
    HALVES: gl.constexpr = CONFIG.split
    STAGES: gl.constexpr = full.shape[0]
    B_COUNT: gl.constexpr = scales.b.shape[1]
    rows_layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    tiles_m = gl.cdiv(M, CONFIG.block_m)
    tiles_n = gl.cdiv(N, CONFIG.block_n)
    stage = gl.to_tensor(0)
    filled = gl.to_tensor(0)
    for t in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_coords(t, tiles_m, tiles_n, CONFIG.group_m)
        rows = tile_m * CONFIG.block_m + gl.arange(0, 64, rows_layout)
        # columns, or blocks of 128
        cols = tile_n * HALVES * B_COUNT + gl.arange(0, B_COUNT, rows_layout)
        b_end = N if FORM == "group" else gl.cdiv(N, 128)
        a_ptrs = pointers.a + rows * pointers.a_row
        b_ptrs = pointers.b + cols * pointers.b_row
        for _ in range(gl.cdiv(K, 128)):
            if filled >= STAGES:
                named_barrier_sync_divergent(EMPTY + stage, CONFIG.ring)
            filled += 1
            for part in gl.static_range(2):
                there = rows + part * 64 < M
                async_copy.async_copy_global_to_shared(
                    scales.a.index(stage * 2 + part), a_ptrs + part * 64 * pointers.a_row, mask=there
                )  # [64]
            for part in gl.static_range(HALVES):
                there = cols + part * B_COUNT < b_end
                async_copy.async_copy_global_to_shared(
                    scales.b.index(stage * HALVES + part), b_ptrs + part * B_COUNT * pointers.b_row, mask=there
                )  # [128] or [1]
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            a_ptrs += pointers.a_group
            b_ptrs += pointers.b_group
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    for n in range(gl.minimum(filled, STAGES)):
        named_barrier_sync_divergent(EMPTY + (filled - 1 - n) % STAGES, CONFIG.ring)
