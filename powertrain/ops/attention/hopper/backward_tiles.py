"""Tiles of keys of the Hopper backward: which one is next, where it lies, and which blocks of queries see it."""

from powertrain.ops.attention.triton.sequences import find_sequence, key_tile_coords, sequence_span
from powertrain.runtime.gluon_compat import gl, gluon


@gluon.jit
def place_of(start, length, row, rows, RAGGED: gl.constexpr):
    """(end, row) of row `row` of a sequence of `length` rows from row `start` of a tensor of `rows` on."""
    end = gl.to_tensor(0)
    if RAGGED:
        end = start + length
        row += rows - length
    return end, row


@gluon.jit
def place_of_keys(start, length, first, keys, RAGGED: gl.constexpr):
    """The same of a tile of keys; where there is nothing to load, the first rows of all."""
    end, row = place_of(start, length, first, keys, RAGGED)
    if RAGGED:
        end = gl.where(first < length, end, keys)
        row = gl.where(first < length, row, 0)
    return end, row


@gluon.jit
def keys_of(tile, lengths, sizes, BLOCK_N: gl.constexpr):
    """A tile of keys: (batch entry, head, its slot of the head's, first key), then start, length and capacity of its
    sequence's keys, and start and length of its queries."""
    kv_heads = sizes.kv_heads
    heads = kv_heads
    if lengths.k_starts is None:
        heads = kv_heads * sizes.batch
    slot, kv = key_tile_coords(tile, sizes.blocks, sizes.late_blocks, heads, sizes.swizzle)
    block = slot
    if lengths.k_slots is not None:
        # not all are written where starts decrease, or pass the tensor's end
        slot = gl.maximum(gl.minimum(gl.load(lengths.k_slots + slot), sizes.blocks - 1), 0)
        block = slot
    if lengths.k_starts is not None:
        b, block = find_sequence(lengths.k_starts, sizes.batch, slot, BLOCK_N)
    else:
        b = kv // kv_heads
        kv = kv % kv_heads
    k_start, k_len, k_capacity = sequence_span(lengths.k_starts, lengths.k_used, b, sizes.batch, sizes.keys)
    q_start, q_len, _ = sequence_span(lengths.q_starts, lengths.q_used, b, sizes.batch, sizes.queries)
    return b, kv, slot, block * BLOCK_N, k_start, k_len, k_capacity, q_start, q_len


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
def sums_of(b, kv, q_start, sizes, PACKED: gl.constexpr, BLOCK_M: gl.constexpr):
    """The tile of the sums of dq to which a sequence's first block of queries adds, of the first of the query heads
    of a KV head of head `kv`; those of later blocks follow, those of later heads `sizes.slots` behind."""
    tile = kv * sizes.num_q_per_kv * sizes.slots
    if PACKED:
        tile += gl.cdiv(q_start, BLOCK_M) + b
    else:
        tile += b * sizes.kv_heads * sizes.num_q_per_kv * sizes.slots
    return tile


@gluon.jit
def fetch_next_tile(counter_ptr, DETERMINISTIC: gl.constexpr):
    """The index of a tile that no other CTA has. The first tile of each CTA has the CTA's own number, except with
    DETERMINISTIC: there a tile may only wait for one whose CTA is certain to run."""
    first = gl.num_programs(0)
    if DETERMINISTIC:
        first = 0
    return first + gl.atomic_add(counter_ptr, 1, sem="relaxed")
