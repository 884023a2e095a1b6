"""Tiles of the Hopper forward: arguments of its device functions by name, descriptor fields, blocks of a tile."""

from typing import Any, Literal, NamedTuple

from powertrain.ops.attention.hopper.primitives import read_tile_field
from powertrain.runtime.gluon_compat import (
    barrier,
    gl,
    gluon,
    hopper,
    named_barrier_arrive,
    reinterpret,
)

# numbered barriers: the first consumer's turn, and the first stage's return of keys and of values, up to 4 each
TURN = gl.constexpr(5)
KEYS_FREE = gl.constexpr(8)
VALUES_FREE = gl.constexpr(12)

# fields of the tile descriptor in shared memory, int32 [2 * TILE_FIELDS, 1]
TILE_FIELDS = gl.constexpr(8)
TILE_B = gl.constexpr(0)
TILE_HEAD = gl.constexpr(1)  # -1: no more tiles
TILE_FIRST = gl.constexpr(2)  # query
TILE_Q_START = gl.constexpr(3)
TILE_Q_LEN = gl.constexpr(4)
TILE_Q_CAPACITY = gl.constexpr(5)
TILE_K_LEN = gl.constexpr(6)
TILE_SPLIT = gl.constexpr(7)
# of a list of parts alone
LISTED_FIELDS = gl.constexpr(10)
TILE_PARTS = gl.constexpr(8)
TILE_SLOT = gl.constexpr(9)  # of a part's results, -1: the tile is whole


class ForwardConfig(NamedTuple):
    """The constants of a launch, by name: the constexpr argument CONFIG of the device functions."""

    has_left: bool  # the window is bounded to the left
    has_right: bool
    bottom_right: bool  # the last query has the position of the last key
    has_softcap: bool
    alibi: Literal["none", "two_sided", "one_sided"]
    # a tile's first block: any, or its only masked one, whose diagonal goes from corner to corner ("diagonal"), or of
    # whose keys no row sees the second half ("half")
    first_block: Literal["any", "diagonal", "half"]
    packed: bool  # sequences lie one behind the other
    ragged: bool  # sequences end before their storage does
    d_qk: int
    d_v: int
    q_held: bool  # queries are read from registers
    consumers: int  # partitions of warps, each with code of its own
    warpgroups: int  # of all consumers, 64 rows each: as many, or two of one consumer
    takes_turns: bool  # warpgroups issue their products in a fixed order
    heads_per_tile: int  # query heads of a KV head in one tile
    page_size: int  # keys of a page, a multiple of 8; 0: keys do not lie in pages
    starts_early: bool  # jobs wait for the kernel before
    keys_packed: bool  # sequences of keys lie one behind the other
    listed: bool  # tiles and the parts of their keys are those of a list
    # 1: keys and values are loaded by TMA; 4: row by row, where a box of TMA would hold fewer than 8 rows of a page
    loader_warps: int = 1


class Results(NamedTuple):
    """Pointers of a consumer: results, and the vectors by head."""

    o: Any
    lse: Any
    slopes: Any
    sinks: Any
    # of a list's parts [slots, groups of heads, size_of_part]: LSE of all rows, then results; None without
    partial: Any


class ResultStrides(NamedTuple):
    """By batch entry, position and head."""

    ob: Any
    os: Any
    oh: Any
    slopes: Any


class ProducerSizes(NamedTuple):
    batch: Any
    queries: Any
    keys: Any
    kv_heads: Any
    num_q_per_kv: Any
    blocks: Any
    swizzle: Any
    tiles: Any
    num_splits: Any  # None: keys are not split
    new_keys: Any  # of a sequence beyond `k_used`


class Pages(NamedTuple):
    """The page table [sequences, pages of each] of keys and values in pages; None without."""

    table: Any
    row: Any  # its stride


class KeysOfTile(NamedTuple):
    """Where the loader finds the keys and values of a tile."""

    b: Any  # the sequence
    batch: Any
    kv: Any  # head
    start: Any  # row of the sequence's first key
    first: Any  # position of the first key that any row of the tile sees
    end: Any  # of the sequence's keys
    pages: Pages


class CacheRows(NamedTuple):
    """Keys or values in pages, as the loader copies their rows."""

    ptr: Any
    page: Any  # strides of pages, rows and heads, in units of 8 elements
    row: Any
    head: Any


class ConsumerSizes(NamedTuple):
    batch: Any
    queries: Any
    heads: Any
    num_splits: Any
    num_q_per_kv: Any  # None without splits and without a list


class ForwardBuffers(NamedTuple):
    """Pipeline stages in shared memory."""

    q: Any  # one [slots, 64, PIECE] per piece of the head dim
    k: Any  # one [STAGES, BLOCK_N, PIECE] per piece
    v: Any  # one [STAGES, BLOCK_N, PIECE] per piece


class ForwardSync(NamedTuple):
    """The tile descriptor and the mbarriers. Stages of k and v are freed at numbered barriers instead."""

    tile: Any  # int32 [2 * FIELDS, 1]
    q_full: Any
    k_full: Any
    v_full: Any
    tile_full: Any
    tile_empty: Any
    k_at: Any  # addresses of k_full and v_full where one consumer has two warpgroups; else None
    v_at: Any


class Scores(NamedTuple):
    """Arguments that turn the products of a consumer's tile into masked scores."""

    positions: Any  # [64], of the rows' queries
    p_first: Any  # position of the first row
    k_len: Any
    window: Any
    factors: Any  # ScoreScale
    factor: Any  # from the running maximum to base 2
    slope: Any  # of ALiBi


@gluon.jit
def blocks_of(
    first, offset, q_len, k_len, window, split, num_splits,
    QUERIES: gl.constexpr, BLOCK_N: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """The blocks of keys of a tile: (first, end, end of the blocks that all rows see, masked blocks at the right,
    masked blocks in all). At least one block, in which nothing may be visible."""
    p_first = first + offset
    p_last = gl.minimum(first + QUERIES, q_len) - 1 + offset
    begin = gl.to_tensor(0)
    full_begin = begin
    end = k_len
    full_end = k_len
    if CONFIG.has_left:
        begin = gl.maximum(p_first - window.left, 0)
        full_begin = gl.maximum(p_last - window.left, 0)
    if CONFIG.has_right:
        end = gl.maximum(gl.minimum(k_len, p_last + window.right + 1), 0)
        full_end = gl.maximum(gl.minimum(k_len, p_first + window.right + 1), 0)
    begin = begin // BLOCK_N
    # one block even where nothing is visible: a tile's first scores are issued before its length is known
    end = gl.maximum(gl.cdiv(end, BLOCK_N), begin + 1)
    # a split past the end gets one fully masked block
    if num_splits is not None:
        share = gl.cdiv(end - begin, num_splits)
        begin = gl.minimum(begin + split * share, end)
        end = gl.maximum(gl.minimum(begin + share, end), begin + 1)
    # clamped, since bounds of the first and of the last row may cross in a narrow window. The right one counts first: a
    # block that reaches behind the keys is its tile's first (`_step` in forward_consumer.py)
    full_end = gl.maximum(gl.minimum(full_end // BLOCK_N, end), begin)
    full_begin = gl.maximum(gl.minimum(gl.cdiv(full_begin, BLOCK_N), full_end), begin)
    return begin, end, full_end, end - full_end, end - full_end + full_begin - begin


@gluon.jit
def keys_of_tile(
    pair, tile_smem, num_splits, window, QUERIES: gl.constexpr, BLOCK_N: gl.constexpr, CONFIG: gl.constexpr
):
    """A tile's first query, the position of query 0, how many keys its sequence has, its blocks of keys."""
    first = read_tile_field(tile_smem, pair, TILE_FIRST)
    q_len = read_tile_field(tile_smem, pair, TILE_Q_LEN)
    k_len = read_tile_field(tile_smem, pair, TILE_K_LEN)
    offset = gl.to_tensor(0)
    if CONFIG.bottom_right:
        offset = k_len - q_len
    split = None
    parts = num_splits
    if num_splits is not None or CONFIG.listed:
        split = read_tile_field(tile_smem, pair, TILE_SPLIT)
    if CONFIG.listed:
        parts = read_tile_field(tile_smem, pair, TILE_PARTS)
    blocks = blocks_of(first, offset, q_len, k_len, window, split, parts, QUERIES, BLOCK_N, CONFIG)
    return first, offset, k_len, blocks


@gluon.jit
def block_at(n, begin, end, full_end, at_right, masked, LEFT: gl.constexpr):
    """The n-th block of a tile: the masked ones at the right, those at the left, then the others from the right."""
    block = end - 1 - n
    if LEFT:
        block = gl.where(n >= at_right, begin + n - at_right, block)
        block = gl.where(n >= masked, full_end - 1 - (n - masked), block)
    return block


@gluon.jit
def as_tile(smem, HEADS_PER_TILE: gl.constexpr = 1):
    """[rows, columns] in shared memory as the tile of a descriptor. Of heads that are no power of 2 the descriptor's
    box is smaller (`packed_maps`)."""
    ROWS: gl.constexpr = smem.shape[0]
    COLS: gl.constexpr = smem.shape[1]
    HEADS: gl.constexpr = 1 << (HEADS_PER_TILE - 1).bit_length()
    box: gl.constexpr = [1, 1, ROWS, COLS] if HEADS_PER_TILE == 1 else [1, ROWS // HEADS, HEADS, COLS]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(box, smem.dtype)
    return reinterpret(smem, smem.dtype, box, layout)


@gluon.jit
def queries_left(count, ROWS: gl.constexpr, HEADS_PER_TILE: gl.constexpr):
    """`count` queries from a tile's first on, or as many as its ROWS hold."""
    if ROWS % HEADS_PER_TILE:
        count = gl.minimum(count, ROWS // HEADS_PER_TILE)
    return count


@gluon.jit
def query_of(row, HEADS_PER_TILE: gl.constexpr):
    """Which of a tile's queries a row is of."""
    if HEADS_PER_TILE > 1:
        if HEADS_PER_TILE & (HEADS_PER_TILE - 1):
            row = row // HEADS_PER_TILE
        else:
            row = row >> (HEADS_PER_TILE.bit_length() - 1)
    return row


@gluon.jit
def phase_parity(count, STAGES: gl.constexpr):
    """The parity of the round in which a ring of STAGES, a power of 2, has its element number `count`."""
    return (count >> (STAGES.bit_length() - 1)) & 1


@gluon.jit
def give_back(first: gl.constexpr, stage, WARPGROUPS: gl.constexpr, LOADER_WARPS: gl.constexpr = 1):
    """By each warp of the consumers, once for each round of a stage: who takes it meets them all."""
    named_barrier_arrive(first + stage, 32 * LOADER_WARPS + 128 * WARPGROUPS)


@gluon.jit
def with_head_of(head, row, HEADS_PER_TILE: gl.constexpr):
    """The head of a row whose tile begins with `head`."""
    if HEADS_PER_TILE > 1:
        if HEADS_PER_TILE & (HEADS_PER_TILE - 1):
            head += row % HEADS_PER_TILE
        else:
            head += row & (HEADS_PER_TILE - 1)
    return head


@gluon.jit
def _piece_of(smem, ROWS: gl.constexpr, panel: gl.constexpr, number):
    """ROWS rows, a multiple of 8, of 64 columns of smem [rows, columns]: those of this number."""
    WIDTH: gl.constexpr = min(smem.shape[1], 64)
    PANELS: gl.constexpr = smem.shape[1] // WIDTH
    PIECES: gl.constexpr = smem.shape[0] // ROWS
    # TMA's layout: panels of 64 columns, in which 8 rows are swizzled among themselves
    swizzle: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], smem.dtype)
    return reinterpret(smem, smem.dtype, [PANELS * PIECES, ROWS, WIDTH], swizzle).index(panel * PIECES + number)


@gluon.jit
def clear_behind(v_smem, count):
    """Zeros in the rows of v [rows, columns] from `count`, less than all, on."""
    GROUPS: gl.constexpr = v_smem.shape[0] // 8
    WIDTH: gl.constexpr = min(v_smem.shape[1], 64)
    layout: gl.constexpr = gl.BlockedLayout([1, WIDTH // 16], [2, 16], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, 8, gl.SliceLayout(1, layout))
    for panel in gl.static_range(v_smem.shape[1] // WIDTH):
        cleared = count // 8
        piece = _piece_of(v_smem, 8, panel, cleared)
        piece.store(gl.where(gl.expand_dims(row < count % 8, 1), piece.load(layout), 0.0).to(v_smem.dtype))
        cleared += 1
        # as few stores as reach the end: Triton sets a barrier ahead of each
        for i in gl.static_range(GROUPS.bit_length() - 1):
            if (cleared >> i) & 1:
                _piece_of(v_smem, 8 << i, panel, cleared >> i).store(gl.zeros([8 << i, WIDTH], v_smem.dtype, layout))
                cleared += 1 << i


@gluon.jit
def clear_values(v_smem, stage, count):
    """Zeros in the rows of a block of v from `count` on: rows past a sequence may hold NaN, and 0 times NaN is NaN."""
    for i in gl.static_range(len(v_smem)):
        clear_behind(v_smem[i].index(stage), count)
    # wgmma of any warp reads the stores of all, by another path to shared memory
    hopper.fence_async_shared()
    barrier()
