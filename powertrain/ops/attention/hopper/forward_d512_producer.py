"""The loader warps of the Hopper forward for head dims above 256, one for each consumer.

Loader 0 fetches tiles, publishes their descriptors and loads q; loader 1 reads the descriptors, as consumers do.
"""

from powertrain.ops.attention.hopper.forward_d512_tiles import CHUNKS_FREE, TILE_K_START, chunk_index
from powertrain.ops.attention.hopper.forward_producer import take_stage, write_tile
from powertrain.ops.attention.hopper.forward_tiles import (
    TILE_B,
    TILE_FIRST,
    TILE_HEAD,
    TILE_K_LEN,
    TILE_Q_LEN,
    as_tile,
    block_at,
    blocks_of,
    phase_parity,
)
from powertrain.ops.attention.hopper.primitives import read_tile_field, write_tile_field
from powertrain.ops.attention.triton.sequences import find_sequence, sequence_span, tile_coords
from powertrain.ops.early_start import await_kernel_before
from powertrain.runtime.gluon_compat import (
    await_next_tile,
    fetch_next_tile_async,
    gl,
    gluon,
    mbarrier,
    tma_load,
)


@gluon.jit
def _load_chunks(desc, ring, full, at, b, head, row, FIRST: gl.constexpr, COUNT: gl.constexpr, LOADER: gl.constexpr):
    """COUNT chunks of a block's columns, from chunk FIRST on. Returns the number of chunks so far."""
    STAGES: gl.constexpr = ring.shape[0] // 2
    COLS: gl.constexpr = ring.shape[2]
    BYTES: gl.constexpr = ring.shape[1] * COLS * ring.dtype.primitive_bitwidth // 8
    for i in gl.static_range(COUNT):
        if at >= STAGES:
            take_stage(CHUNKS_FREE + LOADER * STAGES, at & (STAGES - 1), 1)
        index = chunk_index(at, ring, LOADER)
        bar = full.index(index)
        # columns behind the tensor's are filled with zeros, which count as bytes
        mbarrier.expect(bar, BYTES)
        tma_load(desc, [b, head, row, (FIRST + i) * COLS], bar, as_tile(ring.index(index)))  # [64, 128]
        at += 1
    return at


@gluon.jit
def _load_blocks(
    at, first, q_len, k_start, k_len, b_at, kv, k_desc, v_desc, buffers, sync, window,
    CONFIG: gl.constexpr, K_CHUNKS: gl.constexpr, V_CHUNKS: gl.constexpr, LOADER: gl.constexpr,
):  # fmt: skip
    """Keys of this consumer's blocks and its columns of the values of all, in the order in which it reads them."""
    ring, full = buffers.ring, sync.full
    BLOCK_N: gl.constexpr = ring.shape[1]
    V_FIRST: gl.constexpr = 2 * LOADER
    ROWS: gl.constexpr = buffers.q.shape[1]
    offset = gl.to_tensor(0)
    if CONFIG.bottom_right:
        offset = k_len - q_len
    begin, end, full_end, at_right, masked = blocks_of(
        first, offset, q_len, k_len, window, None, None, ROWS, BLOCK_N, CONFIG
    )
    count = end - begin
    for n in range(LOADER, count, 2):
        row = k_start + block_at(n, begin, end, full_end, at_right, masked, CONFIG.has_left) * BLOCK_N
        at = _load_chunks(k_desc, ring, full, at, b_at, kv, row, 0, K_CHUNKS, LOADER)
        if n > 0:
            before = k_start + block_at(n - 1, begin, end, full_end, at_right, masked, CONFIG.has_left) * BLOCK_N
            at = _load_chunks(v_desc, ring, full, at, b_at, kv, before, V_FIRST, V_CHUNKS, LOADER)
        at = _load_chunks(v_desc, ring, full, at, b_at, kv, row, V_FIRST, V_CHUNKS, LOADER)
    # the last block is the other consumer's
    if (count & 1) == LOADER:
        row = k_start + block_at(count - 1, begin, end, full_end, at_right, masked, CONFIG.has_left) * BLOCK_N
        at = _load_chunks(v_desc, ring, full, at, b_at, kv, row, V_FIRST, V_CHUNKS, LOADER)
    return at


@gluon.jit
def _load_tile(
    tile, at, taken, counter_ptr, lengths, q_desc, k_desc, v_desc, buffers, sync, sizes, window,
    CONFIG: gl.constexpr, K_CHUNKS: gl.constexpr, V_CHUNKS: gl.constexpr,
):  # fmt: skip
    """By loader 0: publish a tile's descriptor, load its q, and its blocks. Returns the next tile, and the counts of
    chunks and tiles so far."""
    tile_smem, tile_full, tile_empty = sync.tile, sync.tile_full, sync.tile_empty
    batch, num_q_per_kv = sizes.batch, sizes.num_q_per_kv
    ROWS: gl.constexpr = buffers.q.shape[1]
    COLS: gl.constexpr = buffers.q.shape[2]
    Q_BYTES: gl.constexpr = K_CHUNKS * ROWS * COLS * buffers.q.dtype.primitive_bitwidth // 8
    heads = sizes.kv_heads * num_q_per_kv
    if CONFIG.packed:
        slot, head = tile_coords(tile, sizes.blocks, heads, sizes.swizzle)
        b, block = find_sequence(lengths.q_starts, batch, slot, ROWS)
    else:
        block, place = tile_coords(tile, sizes.blocks, batch * heads, sizes.swizzle)
        b = place // heads
        head = place % heads
    q_start, q_len, q_capacity = sequence_span(lengths.q_starts, lengths.q_used, b, batch, sizes.queries)
    k_start, k_len, _ = sequence_span(lengths.k_starts, lengths.k_used, b, batch, sizes.keys)
    first = block * ROWS
    if first < q_capacity:
        pair = taken & 1
        # there are two descriptors: before one is written again, both consumers must have read it
        mbarrier.wait(tile_empty.index(pair), phase_parity(taken, 2) ^ 1)
        write_tile(tile_smem, pair, b, head, first, q_start, q_len, q_capacity, k_len)
        write_tile_field(tile_smem, pair, TILE_K_START, k_start)
        mbarrier.arrive(tile_full.index(pair), count=1)
        b_at = b
        if CONFIG.packed:
            b_at = gl.to_tensor(0)
        # ahead of the keys: consumers are done with the last tile's queries before they are with its values
        mbarrier.wait(sync.q_empty.index(0), (taken & 1) ^ 1)
        bar = sync.q_full.index(0)
        mbarrier.expect(bar, Q_BYTES)
        for i in gl.static_range(K_CHUNKS):
            tma_load(q_desc, [b_at, head, q_start + first, i * COLS], bar, as_tile(buffers.q.index(i)))  # [64, 128]
        at = _load_blocks(
            at, first, q_len, k_start, k_len, b_at, head // num_q_per_kv, k_desc, v_desc, buffers, sync, window,
            CONFIG, K_CHUNKS, V_CHUNKS, 0,
        )  # fmt: skip
        taken += 1
    # late: a tile fetched early would wait for the end of a long one
    tile_idx = await_next_tile(fetch_next_tile_async(counter_ptr))
    # there are as many fetches as tiles: the CTA that fetches the last resets the counter
    if tile_idx == sizes.tiles - 1:
        gl.store(counter_ptr, 0)
    # the first tile of each CTA is its own number, so the counter's tiles come behind those
    return gl.num_programs(0) + tile_idx, at, taken


@gluon.jit
def _follow_tile(
    head, at, taken, k_desc, v_desc, buffers, sync, sizes, window,
    CONFIG: gl.constexpr, K_CHUNKS: gl.constexpr, V_CHUNKS: gl.constexpr,
):  # fmt: skip
    """By loader 1: the blocks of the tile of `head`. Returns the next tile's head, and the counts of chunks and tiles
    so far."""
    tile_smem = sync.tile
    pair = taken & 1
    b_at = gl.to_tensor(0)
    if not CONFIG.packed:
        b_at = read_tile_field(tile_smem, pair, TILE_B)
    first = read_tile_field(tile_smem, pair, TILE_FIRST)
    q_len = read_tile_field(tile_smem, pair, TILE_Q_LEN)
    k_len = read_tile_field(tile_smem, pair, TILE_K_LEN)
    k_start = read_tile_field(tile_smem, pair, TILE_K_START)
    mbarrier.arrive(sync.tile_empty.index(pair), count=1)
    at = _load_blocks(
        at, first, q_len, k_start, k_len, b_at, head // sizes.num_q_per_kv, k_desc, v_desc, buffers, sync, window,
        CONFIG, K_CHUNKS, V_CHUNKS, 1,
    )  # fmt: skip
    taken += 1
    mbarrier.wait(sync.tile_full.index(taken & 1), phase_parity(taken, 2))
    return read_tile_field(tile_smem, taken & 1, TILE_HEAD), at, taken


@gluon.jit
def produce(
    descs, counter_ptr, lengths, buffers, sync, sizes, window,
    CONFIG: gl.constexpr, K_CHUNKS: gl.constexpr, V_CHUNKS: gl.constexpr, LOADER: gl.constexpr,
):  # fmt: skip
    """A loader warp: all tiles of this CTA."""
    q_desc, k_desc, v_desc = descs
    await_kernel_before(CONFIG.starts_early)
    at = gl.to_tensor(0)  # chunks so far
    taken = gl.to_tensor(0)  # tiles so far
    if LOADER == 0:
        tile = gl.program_id(0)
        while tile < sizes.tiles:
            tile, at, taken = _load_tile(
                tile, at, taken, counter_ptr, lengths, q_desc, k_desc, v_desc, buffers, sync, sizes, window,
                CONFIG, K_CHUNKS, V_CHUNKS,
            )  # fmt: skip
        pair = taken & 1
        mbarrier.wait(sync.tile_empty.index(pair), phase_parity(taken, 2) ^ 1)
        # the others' loops end at a head below 0
        write_tile_field(sync.tile, pair, TILE_HEAD, -1)
        mbarrier.arrive(sync.tile_full.index(pair), count=1)
    else:
        mbarrier.wait(sync.tile_full.index(0), 0)
        head = read_tile_field(sync.tile, 0, TILE_HEAD)
        while head >= 0:
            head, at, taken = _follow_tile(
                head, at, taken, k_desc, v_desc, buffers, sync, sizes, window, CONFIG, K_CHUNKS, V_CHUNKS,
            )  # fmt: skip
