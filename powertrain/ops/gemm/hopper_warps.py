"""The warps of the Hopper GEMM: loader, consumers, storers, and their arguments by name (docs/hopper.md)."""

from typing import Any, NamedTuple

from powertrain.runtime.gluon_compat import (
    fence_proxy_async,
    gl,
    gluon,
    hopper,
    kept,
    load_acquire,
    mbarrier,
    named_barrier_arrive,
    named_barrier_sync,
    stores_landed,
    tma,
    tma_load,
    tma_store,
    tma_store_add,
)


class GemmOperands(NamedTuple):
    """Pointers of the loader."""

    a: Any
    local: Any  # the local chunks' rows of a, or None
    b: Any
    up: Any  # second half of a gated product's weight, or None


class OperandStages(NamedTuple):
    """Pipeline stages of a and b in shared memory, and their mbarriers."""

    a: Any  # [STAGES, BLOCK_M, BLOCK_K], transposed for layout "tn"
    b: Any  # [STAGES, BLOCK_N, BLOCK_K], transposed but for layout "nt"
    full: Any


class ConsumerBuffers(NamedTuple):
    a: Any
    b: Any
    c: Any  # [parts, rows, columns] on their way out
    full: Any
    c_full: Any
    c_empty: Any


class Chunks(NamedTuple):
    """Chunks of a's rows (`Gathered`); None without."""

    bounds: Any
    order: Any
    flags: Any


class GemmSizes(NamedTuple):
    m: Any
    n: Any
    k: Any
    chunks: Any


class GemmStrides(NamedTuple):
    """Between rows."""

    a: Any
    b: Any
    up: Any
    local: Any


class Arrival(NamedTuple):
    """Which chunks are local, and when another one has arrived."""

    flag_step: Any
    ready: Any
    local_first: Any
    local_end: Any


class GemmConfig(NamedTuple):
    """The constants of a launch: the constexpr argument CONFIG of the device functions."""

    a_transposed: bool
    b_transposed: bool
    block_m: int
    block_n: int
    block_k: int
    group_m: int
    consumers: int
    split: int  # parts in which a consumer hands over its half
    at_once: bool  # both halves of the columns are handed over together
    tile_n: int  # columns of the result in a tile
    ring: int = 288  # threads at a stage's barrier: the consumers', the loader's, and those of a warp for scales


@gluon.jit
def _chunk(bounds_ptr, order_ptr, position, M, CHUNKED: gl.constexpr):
    """The chunk at `position` of the order: its index, first row and end."""
    chunk = gl.to_tensor(0)
    start = gl.to_tensor(0)
    end = gl.to_tensor(0) + M
    if CHUNKED:
        chunk = gl.load(order_ptr + position)  # scalar
        start = gl.load(bounds_ptr + chunk)  # scalar
        end = gl.load(bounds_ptr + chunk + 1)  # scalar
    return chunk, start, end


@gluon.jit
def tile_coords(tile, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    """Tile number to (row, column): GROUP_M rows of tiles by all columns, so that their operands stay in L2."""
    first = tile // (GROUP_M * tiles_n) * GROUP_M
    height = gl.minimum(tiles_m - first, GROUP_M)
    tile -= first * tiles_n
    return first + tile % height, tile // height


@gluon.jit
def _behind(tile, tiles):
    """This CTA's next tile after a chunk of `tiles`, relative to the next chunk's first tile."""
    step = gl.num_programs(0)
    return kept(tile + gl.maximum(gl.cdiv(tiles - tile, step), 0) * step - tiles)


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    stage += 1
    wraps = stage == STAGES
    return gl.where(wraps, 0, stage), gl.where(wraps, phase ^ 1, phase)


# Barriers by number, since a consumer comes to them without waiting for its other warps, as it would in Triton 3.6 to
# come to an mbarrier: one for each stage, at which its 8 warps and the loader meet, and one for each consumer's turn
EMPTY = gl.constexpr(8)
TURN = gl.constexpr(14)


@gluon.jit
def give_back(stage, CONFIG: gl.constexpr, STAGES: gl.constexpr):
    """The stage before `stage` may be filled again."""
    named_barrier_arrive(EMPTY + gl.where(stage == 0, STAGES, stage) - 1, CONFIG.ring)


@gluon.jit
def _wait_for_chunk(flag_ptr, ready):
    """Until a chunk has arrived."""
    seen = load_acquire(flag_ptr)
    # at least, not equal: later calls only raise the flag, and the watchdog ends a wait with a large value
    while seen < ready:
        seen = load_acquire(flag_ptr)
    # TMA reads through the async proxy, which the acquire of an ordinary load does not order
    fence_proxy_async(seen)


@gluon.jit
def _load_a(desc, local_desc, block, bar, row, local_start, k, is_local, TRANSPOSED: gl.constexpr):
    """A block of a, from row `row` and column `k` on: [BLOCK_M, BLOCK_K], or transposed."""
    if local_desc is not None:
        if is_local:
            tma_load(local_desc, [row - local_start, k], bar, block)
        else:
            tma_load(desc, [row, k], bar, block)
    elif TRANSPOSED:
        tma_load(desc, [k, row], bar, block)
    else:
        tma_load(desc, [row, k], bar, block)


@gluon.jit
def _load_b(desc, up_desc, block, bar, col, k, TRANSPOSED: gl.constexpr):
    """A block of b: [BLOCK_N, BLOCK_K], the second half of the rows from `up` if there is one; or transposed."""
    if TRANSPOSED:
        tma_load(desc, [k, col], bar, block)
    elif up_desc is not None:
        HALF: gl.constexpr = block.shape[0] // 2
        tma_load(desc, [col, k], bar, block.slice(0, HALF, 0))
        tma_load(up_desc, [col, k], bar, block.slice(HALF, HALF, 0))
    else:
        tma_load(desc, [col, k], bar, block)


@gluon.jit
def load(operands, stages, chunked, sizes, strides, arrival, CONFIG: gl.constexpr):
    """The loader warp: the blocks of a and b of all tiles of this CTA."""
    M, N, K, chunks = sizes
    a_smem, b_smem, full = stages
    bounds_ptr, order_ptr, flags_ptr = chunked
    flag_step, ready, local_first, local_end = arrival
    CHUNKED: gl.constexpr = chunked.order is not None
    GATHERED: gl.constexpr = chunked.flags is not None
    LOCAL: gl.constexpr = operands.local is not None
    A_T: gl.constexpr = CONFIG.a_transposed
    B_T: gl.constexpr = CONFIG.b_transposed
    BLOCK_M: gl.constexpr = CONFIG.block_m
    BLOCK_N: gl.constexpr = CONFIG.block_n
    BLOCK_K: gl.constexpr = CONFIG.block_k
    GROUP_M: gl.constexpr = CONFIG.group_m
    STAGES: gl.constexpr = a_smem.shape[0]
    BYTES: gl.constexpr = (BLOCK_M + BLOCK_N) * BLOCK_K * a_smem.dtype.primitive_bitwidth // 8
    # made by the warp that uses them: acquiring a descriptor is a thread's own affair
    a_layout: gl.constexpr = a_smem.layout
    b_layout: gl.constexpr = b_smem.layout
    if A_T:
        a_desc = tma.make_tensor_descriptor(operands.a, [K, M], [strides.a, 1], [BLOCK_K, BLOCK_M], a_layout)
    else:
        a_desc = tma.make_tensor_descriptor(operands.a, [M, K], [strides.a, 1], [BLOCK_M, BLOCK_K], a_layout)
    # of a gated product half a block's columns are of b, half of up
    B_COLS: gl.constexpr = BLOCK_N if operands.up is None else BLOCK_N // 2
    if B_T:
        b_desc = tma.make_tensor_descriptor(operands.b, [K, N], [strides.b, 1], [BLOCK_K, BLOCK_N], b_layout)
    else:
        b_desc = tma.make_tensor_descriptor(operands.b, [N, K], [strides.b, 1], [B_COLS, BLOCK_K], b_layout)
    up_desc: gl.constexpr = None
    if operands.up is not None:
        up_desc = tma.make_tensor_descriptor(operands.up, [N, K], [strides.up, 1], [B_COLS, BLOCK_K], b_layout)
    local_start = gl.to_tensor(0)
    local_desc: gl.constexpr = None
    if LOCAL:
        local_start = gl.load(bounds_ptr + local_first)  # scalar
        rows = gl.load(bounds_ptr + local_end) - local_start  # scalar
        local_desc = tma.make_tensor_descriptor(
            operands.local, [rows, K], [strides.local, 1], [BLOCK_M, BLOCK_K], a_layout
        )
    tiles_n = gl.cdiv(N, B_COLS)
    tile = gl.program_id(0)
    stage = gl.to_tensor(0)
    filled = gl.to_tensor(0)
    chunk, start, end = _chunk(bounds_ptr, order_ptr, 0, M, CHUNKED)
    for position in range(chunks):
        # asked for now, used after this chunk's tiles
        next_chunk, next_start, next_end = _chunk(
            bounds_ptr, order_ptr, gl.minimum(position + 1, chunks - 1), M, CHUNKED
        )
        tiles_m = gl.cdiv(end - start, BLOCK_M)
        tiles = tiles_m * tiles_n
        is_local = (chunk >= local_first) & (chunk < local_end)
        if GATHERED:
            # a CTA without a tile of this chunk does not wait for it
            if (tile < tiles) & (is_local == 0):
                _wait_for_chunk(flags_ptr + chunk * flag_step, ready)
        for t in range(tile, tiles, gl.num_programs(0)):
            tile_m, tile_n = tile_coords(t, tiles_m, tiles_n, GROUP_M)
            row = start + tile_m * BLOCK_M
            col = tile_n * B_COLS
            for k in range(0, K, BLOCK_K):
                # the first round finds all stages empty, and nobody has arrived for them
                if filled >= STAGES:
                    named_barrier_sync(EMPTY + stage, CONFIG.ring)
                filled += 1
                bar = full.index(stage)
                # ahead of the loads: all bytes of a and b end one phase, also where TMA fills with zeros
                mbarrier.expect(bar, BYTES)
                _load_a(a_desc, local_desc, a_smem.index(stage), bar, row, local_start, k, is_local, A_T)
                _load_b(b_desc, up_desc, b_smem.index(stage), bar, col, k, B_T)
                stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        tile = _behind(tile, tiles)
        chunk, start, end = next_chunk, next_start, next_end
    # every barrier ends as it began: each arrival is met
    for n in range(gl.minimum(filled, STAGES)):
        named_barrier_sync(EMPTY + (filled - 1 - n) % STAGES, CONFIG.ring)


@gluon.jit
def _plus_bias(x, bias_ptr, col, N):
    if bias_ptr is not None:
        cols = col + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
        # bias: [columns of x]
        x += gl.expand_dims(gl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(gl.float32), 0)
    return x


@gluon.jit
def hand_over(x, c_smem, c_full, c_empty, phase):
    """A part of the result to the storer."""
    # the storer has read the part of the tile before
    mbarrier.wait(c_empty, phase)
    c_smem.store(x.to(c_smem.dtype))
    hopper.fence_async_shared()
    mbarrier.arrive(c_full, count=1)
    return phase ^ 1


@gluon.jit
def _halves(x, layout: gl.constexpr):
    ROWS: gl.constexpr = x.shape[0]
    COLS: gl.constexpr = x.shape[1]
    left, right = x.reshape([ROWS, 2, COLS // 2]).permute(0, 2, 1).split()
    return gl.convert_layout(left, layout), gl.convert_layout(right, layout)


@gluon.jit
def _multiply(acc, buffers, blocks, stage, phase, CONFIG: gl.constexpr, CONSUMER: gl.constexpr):
    """acc [ROWS, BLOCK_N] plus the products of all `blocks` of K, the last one under way; the next stage, its phase."""
    STAGES: gl.constexpr = buffers.a.shape[0]
    ROWS: gl.constexpr = CONFIG.block_m // CONFIG.consumers
    for k in range(blocks):
        mbarrier.wait(buffers.full.index(stage), phase)
        a_block = buffers.a.index(stage)
        if CONFIG.a_transposed:
            a_block = a_block.slice(CONSUMER * ROWS, ROWS, 1).permute((1, 0))
        else:
            a_block = a_block.slice(CONSUMER * ROWS, ROWS, 0)
        b_block = buffers.b.index(stage)
        if not CONFIG.b_transposed:
            b_block = b_block.permute((1, 0))
        # in turns, so that one's products are computed beside the other's end of a tile
        if CONFIG.consumers == 2:
            named_barrier_sync(TURN + CONSUMER, 256)
        acc = hopper.warpgroup_mma(a_block, b_block, acc, is_async=True)  # [ROWS, BLOCK_N]
        if CONFIG.consumers == 2:
            named_barrier_arrive(TURN + 1 - CONSUMER, 256)
        # the one before has finished, and its stage is free
        acc = hopper.warpgroup_mma_wait(1, deps=[acc])
        if k > 0:
            give_back(stage, CONFIG, STAGES)
        stage, phase = advance(stage, phase, STAGES)
    return acc, stage, phase


@gluon.jit
def _leave(acc, buffers, bias_ptr, up_bias_ptr, col, N, c_phase, CONFIG: gl.constexpr, CONSUMER: gl.constexpr):
    """Hand a tile's sums over, with their bias, whole or in halves of the columns; returns the next phase."""
    BLOCK_N: gl.constexpr = CONFIG.block_n
    SPLIT: gl.constexpr = CONFIG.split
    part_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N // SPLIT, 16])
    c_smem = buffers.c
    c_part = c_smem.index(CONSUMER)
    c_full = buffers.c_full.index(CONSUMER)
    c_empty = buffers.c_empty.index(CONSUMER)
    if CONFIG.at_once:
        left, right = _halves(acc, part_layout)
        left = _plus_bias(left, bias_ptr, col, N)
        right = _plus_bias(right, up_bias_ptr, col + CONFIG.tile_n - BLOCK_N // 2, N)
        mbarrier.wait(c_empty, c_phase)
        c_smem.index(2 * CONSUMER).store(left.to(c_smem.dtype))
        c_smem.index(2 * CONSUMER + 1).store(right.to(c_smem.dtype))
        hopper.fence_async_shared()
        mbarrier.arrive(c_full, count=1)
        c_phase ^= 1
    elif SPLIT == 1:
        acc = _plus_bias(acc, bias_ptr, col, N)
        c_phase = hand_over(acc, c_part, c_full, c_empty, c_phase)
    else:
        left, right = _halves(acc, part_layout)
        left = _plus_bias(left, bias_ptr, col, N)
        c_phase = hand_over(left, c_part, c_full, c_empty, c_phase)
        right = _plus_bias(right, bias_ptr, col + BLOCK_N // SPLIT, N)
        c_phase = hand_over(right, c_part, c_full, c_empty, c_phase)
    return c_phase


@gluon.jit
def consume(buffers, bias_ptr, up_bias_ptr, bounds_ptr, order_ptr, sizes, CONFIG: gl.constexpr, CONSUMER: gl.constexpr):
    """A consumer: its rows of every tile of this CTA, accumulated in registers."""
    M, N, K, chunks = sizes
    CHUNKED: gl.constexpr = order_ptr is not None
    BLOCK_M: gl.constexpr = CONFIG.block_m
    BLOCK_N: gl.constexpr = CONFIG.block_n
    GROUP_M: gl.constexpr = CONFIG.group_m
    CONSUMERS: gl.constexpr = CONFIG.consumers
    TILE_N: gl.constexpr = CONFIG.tile_n
    STAGES: gl.constexpr = buffers.a.shape[0]
    ROWS: gl.constexpr = BLOCK_M // CONSUMERS
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    tiles_n = gl.cdiv(N, TILE_N)
    blocks = gl.cdiv(K, CONFIG.block_k)
    tile = gl.program_id(0)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    # of a barrier whose first phase has not ended, the wait for parity 1 passes: the first part waits for nobody
    c_phase = gl.to_tensor(1)
    if CONSUMER == 1:
        # the first turn is consumer 0's
        named_barrier_arrive(TURN, 256)
    _, start, end = _chunk(bounds_ptr, order_ptr, 0, M, CHUNKED)
    for position in range(chunks):
        # asked for now, used after this chunk's tiles
        _, next_start, next_end = _chunk(bounds_ptr, order_ptr, gl.minimum(position + 1, chunks - 1), M, CHUNKED)
        tiles_m = gl.cdiv(end - start, BLOCK_M)
        tiles = tiles_m * tiles_n
        for t in range(tile, tiles, gl.num_programs(0)):
            acc = gl.zeros([ROWS, BLOCK_N], gl.float32, acc_layout)
            acc, stage, phase = _multiply(acc, buffers, blocks, stage, phase, CONFIG, CONSUMER)
            # the accumulators leave registers now, so nothing may be under way
            acc = hopper.warpgroup_mma_wait(0, deps=[acc])
            give_back(stage, CONFIG, STAGES)
            col = gl.to_tensor(0)
            if bias_ptr is not None:
                _, tile_n = tile_coords(t, tiles_m, tiles_n, GROUP_M)
                col = tile_n * TILE_N
            c_phase = _leave(acc, buffers, bias_ptr, up_bias_ptr, col, N, c_phase, CONFIG, CONSUMER)
        tile = _behind(tile, tiles)
        start, end = next_start, next_end
    if CONSUMERS == 2:
        # meets the last arrival of consumer 1: a named barrier must be as it was when the CTA ends
        if CONSUMER == 0:
            named_barrier_sync(TURN, 256)


@gluon.jit
def store(
    c_ptr, c_smem, c_full, c_empty, bounds_ptr, order_ptr, M, N, chunks, stride_cm,
    ADD: gl.constexpr, CONFIG: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """A storer warp: the results of one consumer, from shared memory to memory."""
    CHUNKED: gl.constexpr = order_ptr is not None
    BLOCK_M: gl.constexpr = CONFIG.block_m
    BLOCK_N: gl.constexpr = CONFIG.block_n
    GROUP_M: gl.constexpr = CONFIG.group_m
    CONSUMERS: gl.constexpr = CONFIG.consumers
    SPLIT: gl.constexpr = CONFIG.split
    ROWS: gl.constexpr = BLOCK_M // CONSUMERS
    COLS: gl.constexpr = BLOCK_N // SPLIT
    dtype: gl.constexpr = c_smem.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLS], dtype)
    tiles_n = gl.cdiv(N, BLOCK_N)
    tile = gl.program_id(0)
    phase = gl.to_tensor(0)
    chunk, start, end = _chunk(bounds_ptr, order_ptr, 0, M, CHUNKED)
    for position in range(chunks):
        # asked for now, used after this chunk's tiles
        next_chunk, next_start, next_end = _chunk(
            bounds_ptr, order_ptr, gl.minimum(position + 1, chunks - 1), M, CHUNKED
        )
        tiles_m = gl.cdiv(end - start, BLOCK_M)
        tiles = tiles_m * tiles_n
        # a descriptor that ends where the chunk ends: a tile that reaches beyond writes nothing there
        base = c_ptr + start.to(gl.int64) * stride_cm
        if CHUNKED:
            # the one before may still be read by stores under way
            stores_landed(chunk)
        desc = tma.make_tensor_descriptor(base, [end - start, N], [stride_cm, 1], [ROWS, COLS], layout)
        for t in range(tile, tiles, gl.num_programs(0)):
            tile_m, tile_n = tile_coords(t, tiles_m, tiles_n, GROUP_M)
            row = tile_m * BLOCK_M + CONSUMER * ROWS
            for part in gl.static_range(SPLIT):
                mbarrier.wait(c_full.index(CONSUMER), phase)
                if ADD:
                    tma_store_add(desc, [row, tile_n * BLOCK_N + part * COLS], c_smem.index(CONSUMER))  # [ROWS, COLS]
                else:
                    tma_store(desc, [row, tile_n * BLOCK_N + part * COLS], c_smem.index(CONSUMER))  # [ROWS, COLS]
                # until TMA has read shared memory, not until the rows are in memory
                tma.store_wait(0)
                mbarrier.arrive(c_empty.index(CONSUMER), count=1)
                phase ^= 1
        tile = _behind(tile, tiles)
        chunk, start, end = next_chunk, next_start, next_end
    stores_landed(tile)
