"""What both kernels of the Hopper backward above head dim 256 share: tiles of queries and keys, and where weights lie.

Queries and keys are cut into tiles of 128. A launch has a *chunk*: some query heads (`units`, counted over the batch),
or a range of the tiles of one. Its weights p and ds lie in one matrix of 16 bits, p above ds; a tile of queries has 128
rows, in which tile n of the keys that it sees stands n tiles from the left.
"""

from typing import Any, NamedTuple

from powertrain.ops.attention.hopper.primitives import int32
from powertrain.ops.attention.triton.sequences import find_sequence, sequence_span
from powertrain.runtime.gluon_compat import gl, gluon

TILE = gl.constexpr(128)


class Config(NamedTuple):
    """The constants of a launch."""

    has_left: bool
    has_right: bool
    bottom_right: bool  # the last query has the position of the last key
    has_softcap: bool
    packed: bool  # sequences lie one behind the other
    ragged_q: bool  # sequences of queries end before their storage does
    ragged_k: bool
    d: int
    starts_early: bool  # jobs wait for the kernel before


class Sizes(NamedTuple):
    batch: Any
    queries: Any
    keys: Any
    kv_heads: Any
    num_q_per_kv: Any  # query heads of each
    left: Any  # keys that a query sees before and after its position
    right: Any


class Chunk(NamedTuple):
    """The query heads and tiles of queries of a launch."""

    unit: Any  # the first head, batch entries * heads
    units: Any
    slot: Any  # the first tile of queries
    slots: Any


class Tile(NamedTuple):
    """A tile of queries or of keys."""

    b: Any
    head: Any
    first: Any  # row of its sequence
    start: Any  # of the sequence in memory
    length: Any
    capacity: Any


@gluon.jit
def sizes_of(batch, queries, keys, kv_heads, num_q_per_kv, left, right):
    return Sizes(
        int32(batch), int32(queries), int32(keys), int32(kv_heads), int32(num_q_per_kv), int32(left), int32(right)
    )


@gluon.jit
def chunk_of(unit, units, slot, slots):
    return Chunk(int32(unit), int32(units), int32(slot), int32(slots))


@gluon.jit
def tile_at(slot, unit, heads, batch, rows, starts_ptr, used_ptr):
    """Tile `slot` of a head of the batch."""
    if starts_ptr is not None:
        b, block = find_sequence(starts_ptr, batch, slot, TILE)
        head = unit + 0
    else:
        b = unit // heads
        block = slot + 0
        head = unit % heads
    start, length, capacity = sequence_span(starts_ptr, used_ptr, b, batch, rows)
    return Tile(b, head, block * TILE, start, length, capacity)


@gluon.jit
def first_seen(first, offset, left, LEFT: gl.constexpr):
    """The first tile of keys that queries from row `first` on see."""
    begin = gl.to_tensor(0)
    if LEFT:
        begin = gl.maximum(first + offset - left, 0) // TILE
    return begin


@gluon.jit
def keys_seen(first, q_len, k_len, sizes, CONFIG: gl.constexpr):
    """(begin, end, position of query 0): tiles of keys that 128 queries from row `first` on see."""
    offset = gl.to_tensor(0)
    if CONFIG.bottom_right:
        offset = k_len - q_len
    begin = first_seen(first, offset, sizes.left, CONFIG.has_left)
    end = k_len + 0
    if CONFIG.has_right:
        end = gl.minimum(k_len, gl.minimum(first + TILE, q_len) + offset + sizes.right)
    end = gl.where(first < q_len, gl.cdiv(gl.maximum(end, 0), TILE), 0)
    return begin, gl.maximum(begin, end), offset


@gluon.jit
def queries_that_see(first, q_len, k_len, sizes, CONFIG: gl.constexpr):
    """(begin, end, position of query 0): tiles of queries that see keys from row `first` on. None that `keys_seen` says
    does not see them: of such a tile no weights are written."""
    offset = gl.to_tensor(0)
    if CONFIG.bottom_right:
        offset = k_len - q_len
    begin = gl.to_tensor(0)
    end = q_len + 0
    if CONFIG.has_right:
        begin = gl.maximum(first - sizes.right - offset, 0)
    if CONFIG.has_left:
        end = gl.minimum(end, gl.minimum(first + TILE, k_len) + sizes.left - offset)
    is_seen = (begin < end) & (first < k_len)
    begin = begin // TILE
    return begin, gl.where(is_seen, gl.cdiv(end, TILE), begin), offset


@gluon.jit
def own_item(index):
    """The item that this CTA computes at step `index`. Odd steps assign items to the CTAs in reverse, so that a CTA
    gets long items and short ones."""
    programs = gl.num_programs(0)
    number = gl.program_id(0)
    return index * programs + gl.where((index & 1) == 1, programs - 1 - number, number)


@gluon.jit
def grouped(index, slots, heads, GROUP: gl.constexpr):
    """(slot, head) of an item: GROUP heads at a time, whose operands fit in the L2."""
    first = index // (GROUP * slots) * GROUP
    size = gl.minimum(heads - first, GROUP)
    within = index - first * slots
    return within // size, first + within % size
