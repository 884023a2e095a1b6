"""Tiles of the Hopper backward: the keys and queries of a tile, the next tile, its descriptor in shared memory."""

from powertrain.ops.attention.hopper.primitives import (
    TILE_B,
    TILE_COUNT,
    TILE_DISTANCE,
    TILE_DK_END,
    TILE_DK_LEFT,
    TILE_DK_ROW,
    TILE_FIRST,
    TILE_K_END,
    TILE_K_LEFT,
    TILE_K_ROW,
    TILE_KV,
    TILE_Q_END,
    TILE_Q_ROW,
    TILE_SUMS,
    TILE_UNSEEN,
    write_tile_field,
)
from powertrain.ops.attention.triton.sequences import find_sequence, sequence_span
from powertrain.runtime.gluon_compat import (
    gl,
    gluon,
    mbarrier,
)


@gluon.jit
def _place(start, length, row, rows, RAGGED: gl.constexpr):
    """(end, row) of row `row` of a sequence of `length` rows from row `start` of a tensor of `rows` on."""
    end = gl.to_tensor(0)
    if RAGGED:
        end = start + length
        # a coordinate that passes the tensor's end with the sequence's: TMA fills what follows with zeros, NaN or not
        row += rows - length
    return end, row


@gluon.jit
def keys_of(tile, lengths, sizes, BLOCK_N: gl.constexpr):
    """A tile of keys: (batch entry, head, first key), then start, length and capacity of its sequence's keys, and start
    and length of its queries. `swizzle` heads at a time share the L2; of each the first keys, which most queries see,
    come first."""
    kv_heads, blocks, swizzle = sizes.kv_heads, sizes.blocks, sizes.swizzle
    heads = kv_heads
    if lengths.k_starts is None:
        heads = kv_heads * sizes.batch
    first_head = tile // (swizzle * blocks) * swizzle
    size = gl.minimum(heads - first_head, swizzle)
    within = tile - first_head * blocks
    block = within // size
    kv = first_head + within % size
    if lengths.k_starts is not None:
        b, block = find_sequence(lengths.k_starts, sizes.batch, block, BLOCK_N)
    else:
        b = kv // kv_heads
        kv = kv % kv_heads
    k_start, k_len, k_capacity = sequence_span(lengths.k_starts, lengths.k_used, b, sizes.batch, sizes.keys)
    q_start, q_len, _ = sequence_span(lengths.q_starts, lengths.q_used, b, sizes.batch, sizes.queries)
    return b, kv, block * BLOCK_N, k_start, k_len, k_capacity, q_start, q_len


@gluon.jit
def queries_of(first, k_len, q_len, window, CONFIG: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """(first block, number) of the blocks of queries that see keys of the tile from key `first` on, and the position
    of query 0."""
    offset = gl.to_tensor(0)
    if CONFIG.bottom_right:
        offset = k_len - q_len
    begin = gl.to_tensor(0)
    end = q_len
    if CONFIG.has_right:
        begin = gl.maximum(first - window.right - offset, 0)
    if CONFIG.has_left:
        end = gl.minimum(end, gl.minimum(first + BLOCK_N, k_len) + window.left - offset)
    begin = begin // BLOCK_M
    return begin, gl.where(first < k_len, gl.maximum(gl.cdiv(end, BLOCK_M) - begin, 0), 0), offset


@gluon.jit
def fetch_next_tile(counter_ptr, DETERMINISTIC: gl.constexpr):
    """The index of a tile that no other CTA has. The first tile of each CTA has the CTA's own number, except with
    DETERMINISTIC: there a tile may only wait for one whose CTA is certain to run."""
    first = gl.num_programs(0)
    if DETERMINISTIC:
        first = 0
    return first + gl.atomic_add(counter_ptr, 1, sem="relaxed")


@gluon.jit
def publish_tile(
    tile, taken, tile_smem, tile_full, tile_empty, counter_ptr, lengths, sizes, window,
    CONFIG: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Publish the tile descriptor of `tile`, or of the next fetched tile that has keys, or that none is left."""
    slot = taken & 1
    mbarrier.wait(tile_empty.index(slot), (taken >> 1) & 1 ^ 1)
    num_q_per_kv, slots, tiles = sizes.num_q_per_kv, sizes.slots, sizes.tiles
    RAGGED_Q: gl.constexpr = CONFIG.ragged_q
    RAGGED_K: gl.constexpr = CONFIG.ragged_k
    DETERMINISTIC: gl.constexpr = CONFIG.deterministic
    looks = tile < tiles
    if not looks:
        write_tile_field(tile_smem, slot, TILE_KV, -1)
    while looks:
        b, kv, first, k_start, k_len, k_capacity, q_start, q_len = keys_of(tile, lengths, sizes, BLOCK_N)
        if first < k_capacity:
            begin, count, offset = queries_of(first, k_len, q_len, window, CONFIG, BLOCK_M, BLOCK_N)
            start = begin
            if DETERMINISTIC:
                start = begin + count - 1
            at = kv * num_q_per_kv * slots + start
            if CONFIG.packed:
                # slots of whole blocks, which no two sequences share, whatever their lengths are
                at += gl.cdiv(q_start, BLOCK_M) + b
            else:
                at += b * sizes.kv_heads * num_q_per_kv * slots
            # consumers read a field where they need it, which keeps registers free over their loop
            write_tile_field(tile_smem, slot, TILE_KV, kv)
            write_tile_field(tile_smem, slot, TILE_B, b)
            write_tile_field(tile_smem, slot, TILE_COUNT, count)
            write_tile_field(tile_smem, slot, TILE_FIRST, first)
            write_tile_field(tile_smem, slot, TILE_SUMS, at)
            write_tile_field(tile_smem, slot, TILE_DISTANCE, start * BLOCK_M + offset - first)
            write_tile_field(tile_smem, slot, TILE_K_LEFT, k_len - first)
            end, row = _place(q_start, q_len, start * BLOCK_M, sizes.queries, RAGGED_Q)
            write_tile_field(tile_smem, slot, TILE_Q_END, end)
            write_tile_field(tile_smem, slot, TILE_Q_ROW, row)
            end, row = _place(k_start, k_len, first, sizes.keys, RAGGED_K)
            # where there is nothing to load, the first rows of all
            if RAGGED_K:
                end = gl.where(count > 0, end, sizes.keys)
                row = gl.where(count > 0, row, 0)
            write_tile_field(tile_smem, slot, TILE_K_END, end)
            write_tile_field(tile_smem, slot, TILE_K_ROW, row)
            end, row = _place(k_start, k_capacity, first, sizes.keys, CONFIG.packed)
            write_tile_field(tile_smem, slot, TILE_DK_END, end)
            write_tile_field(tile_smem, slot, TILE_DK_ROW, row)
            write_tile_field(tile_smem, slot, TILE_DK_LEFT, k_capacity - first)
            if DETERMINISTIC:
                before, size, _ = queries_of(first - BLOCK_N, k_len, q_len, window, CONFIG, BLOCK_M, BLOCK_N)
                write_tile_field(tile_smem, slot, TILE_UNSEEN, (begin + count - before - size) * num_q_per_kv)
            # no longer
            looks = tile < 0
        else:
            tile = fetch_next_tile(counter_ptr, DETERMINISTIC)
            looks = tile < tiles
            if not looks:
                write_tile_field(tile_smem, slot, TILE_KV, -1)
    mbarrier.arrive(tile_full.index(slot), count=1)
    # this warpgroup reads the descriptor too, and any of its threads may have written last
    mbarrier.wait(tile_full.index(slot), (taken >> 1) & 1)
