"""What all sides of the Hopper decoding kernel for MLA share: barriers' numbers, tile descriptors, buffers."""

from typing import Any, NamedTuple

from powertrain.runtime.gluon_compat import gl

# numbered barriers (Triton takes 0 to 4): both consumers' sums are stored; weights of consumer 0 or 1 are stored; the
# return of a half of the columns of a stage, 2 * stage + half; no consumer reads the queries any more
SUMS_FULL = gl.constexpr(5)
WEIGHTS_FULL = gl.constexpr(6)
HALVES_FREE = gl.constexpr(8)
QUERIES_FREE = gl.constexpr(12)

ROWS = gl.constexpr(64)  # queries times heads of a tile
BLOCK_N = gl.constexpr(64)  # keys of a block
HALF = gl.constexpr(256)  # columns of the values that a consumer has
TAIL = gl.constexpr(64)  # columns of the keys that are no values

# fields of a tile's descriptor in shared memory, int32 [2 * TILE_FIELDS, 1]
TILE_FIELDS = gl.constexpr(10)
TILE_BLOCKS = gl.constexpr(0)  # of keys, of this part: 1 at least; 0: there are no more tiles
TILE_BEGIN = gl.constexpr(1)  # the first of them
TILE_LAST = gl.constexpr(2)  # keys that any row sees end here
TILE_LENGTH = gl.constexpr(3)  # of the sequence
TILE_ROW = gl.constexpr(4)  # the first, of the sequence's queries times heads
TILE_QUERIES = gl.constexpr(5)  # of the sequence
TILE_FIRST = gl.constexpr(6)  # the sequence's first query among all
TILE_B = gl.constexpr(7)  # the sequence
TILE_ALONE = gl.constexpr(8)  # 1: there is no other part
TILE_PARTIAL = gl.constexpr(9)  # row of the part's results


class MlaConfig(NamedTuple):
    """The constants of a launch: the constexpr argument CONFIG of the device functions."""

    has_right: bool
    page_size: int  # 0: no pages
    packed: bool  # sequences of queries lie one behind the other
    listed: bool  # tiles and the parts of their keys are those of a list
    loader_warps: int  # 1: keys are loaded by TMA, 4: their rows are copied
    starts_early: bool


class Buffers(NamedTuple):
    """Shared memory."""

    q: Any  # [2, 64, 256]
    q_tail: Any  # [1, 64, 64]
    k: Any  # [4, 64, 256]: halves of two stages
    k_tail: Any  # [2, 64, 64]
    p: Any  # [64, 64]: weights of the last block
    m: Any  # float32 [2, 64]: the running maximum with a consumer's weights
    l: Any  # float32 [4, 64]: a consumer's sums, of two tiles  # noqa: E741


class Sync(NamedTuple):
    """Tile descriptors and mbarriers. Halves and queries are given back at numbered barriers instead."""

    tile: Any
    tile_full: Any
    tile_empty: Any
    q_full: Any  # halves 0 and 1, the tail
    full: Any  # so too of each stage, 4 * stage on
    full_at: Any  # their address


class Sizes(NamedTuple):
    batch: Any
    queries: Any  # of each sequence, or packed ones in all
    heads: Any
    right: Any


class Results(NamedTuple):
    """Pointers of a consumer; of a part that is not alone the partial ones are written."""

    out: Any
    lse: Any
    partial: Any
    partial_lse: Any
    sinks: Any
