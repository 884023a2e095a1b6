"""The loader of the Hopper decoding kernel for MLA: one warp, which loads keys by TMA, or four, which copy their rows
from pages that are too small for it."""

from typing import Any, NamedTuple

from powertrain.ops.attention.decode_tiles import ENTRY_FIELDS, LISTED
from powertrain.ops.attention.hopper.decode_mla_tiles import (
    BLOCK_N,
    HALF,
    HALVES_FREE,
    QUERIES_FREE,
    ROWS,
    TAIL,
    TILE_ALONE,
    TILE_B,
    TILE_BEGIN,
    TILE_BLOCKS,
    TILE_FIRST,
    TILE_LAST,
    TILE_LENGTH,
    TILE_PARTIAL,
    TILE_QUERIES,
    TILE_ROW,
)
from powertrain.ops.attention.hopper.forward_producer import copy_piece, page_ids, take_stage
from powertrain.ops.attention.hopper.forward_tiles import KeysOfTile, as_tile, phase_parity
from powertrain.ops.attention.hopper.primitives import write_tile_field
from powertrain.ops.early_start import await_kernel_before
from powertrain.runtime.gluon_compat import (
    async_copy,
    await_next_tile,
    fetch_next_tile_async,
    gl,
    gluon,
    mbarrier,
    named_barrier_sync,
    no_tile_fetched,
    reinterpret,
    tma_load,
)


class Tiles(NamedTuple):
    """Where the loader finds its tiles."""

    list: Any  # of decode_tiles.py; None: each sequence is cut into `num_splits` parts
    counter: Any
    seqlens: Any  # without a list
    num_new: Any
    capacity: Any
    num_splits: Any


@gluon.jit
def _entry_of(tile, tiles, sizes, CONFIG: gl.constexpr):
    """(sequence, -1 of rows of none; tile of it; its first query, queries and keys; part, parts; row of the part's
    results) of a tile."""
    heads = sizes.heads
    if CONFIG.listed:
        # these loads do not wait for one another
        entry = tiles.list + (tile + 1) * ENTRY_FIELDS
        b, block, first, count, length, part, parts = (
            gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3), gl.load(entry + 4),
            gl.load(entry + 5), gl.load(entry + 6),
        )  # fmt: skip
        partial = tile * ROWS
    else:
        count, parts = sizes.queries, tiles.num_splits
        of_each = gl.cdiv(count * heads, ROWS)
        block = tile % of_each
        b = tile // of_each % sizes.batch
        part = tile // (of_each * sizes.batch)
        first = b * count
        length = gl.minimum(gl.load(tiles.seqlens + b).to(gl.int32) + tiles.num_new, tiles.capacity)
        partial = (part * sizes.batch + b) * count * heads + block * ROWS
    return b, block, first, count, length, part, parts, partial


@gluon.jit
def _publish(pair, entry, sync, sizes, CONFIG: gl.constexpr):
    """Write a tile's descriptor. Returns (first row, last key, first block, blocks) of it."""
    b, block, first, count, length, part, parts, partial = entry
    row = block * ROWS
    last = length
    if CONFIG.has_right:
        last_query = gl.minimum((row + ROWS - 1) // sizes.heads, count - 1)
        last = gl.minimum(last, last_query + (length - count) + sizes.right + 1)
    last = gl.maximum(last, 0)
    blocks = gl.cdiv(last, BLOCK_N)
    share = gl.cdiv(blocks, parts)
    begin = part * share
    # a part without keys has one block, wholly masked
    blocks = gl.maximum(gl.minimum(share, blocks - begin), 1)
    write_tile_field(sync.tile, pair, TILE_BLOCKS, blocks)
    write_tile_field(sync.tile, pair, TILE_BEGIN, begin)
    write_tile_field(sync.tile, pair, TILE_LAST, last)
    write_tile_field(sync.tile, pair, TILE_LENGTH, length)
    write_tile_field(sync.tile, pair, TILE_ROW, row)
    write_tile_field(sync.tile, pair, TILE_QUERIES, count)
    write_tile_field(sync.tile, pair, TILE_FIRST, first)
    write_tile_field(sync.tile, pair, TILE_B, b)
    write_tile_field(sync.tile, pair, TILE_ALONE, (parts == 1).to(gl.int32))
    write_tile_field(sync.tile, pair, TILE_PARTIAL, partial)
    mbarrier.arrive(sync.tile_full.index(pair), count=1)
    return row, last, begin, blocks


@gluon.jit
def _load_boxes(desc, entries, rows, column, bar, smem, BOX: gl.constexpr):
    """As many columns from `column` on as `smem` [64, columns] has: of each of the entries BOX rows, from `rows` on."""
    COLS: gl.constexpr = smem.shape[1]
    # TMA's layout: panels of 64 columns, in which 8 rows are swizzled among themselves
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BOX, 64], smem.dtype)
    COUNT: gl.constexpr = smem.shape[0] // BOX
    boxes = reinterpret(smem, smem.dtype, [COLS // 64 * COUNT, BOX, 64], layout)
    mbarrier.expect(bar, smem.shape[0] * COLS * smem.dtype.primitive_bitwidth // 8)
    for panel in gl.static_range(COLS // 64):
        for i in gl.static_range(COUNT):
            where = [entries[i], 0, rows[i], column + panel * 64]
            tma_load(desc, where, bar, as_tile(boxes.index(panel * COUNT + i)))  # [BOX, 64]


@gluon.jit
def _load_queries(q_desc, entry, row, buffers, bars, sizes, CONFIG: gl.constexpr):
    b, first = entry[0], entry[2]
    at = (gl.maximum(b, 0),)
    if CONFIG.packed:
        at, row = (gl.to_tensor(0),), row + first * sizes.heads
    rows = (row,)
    _load_boxes(q_desc, at, rows, 0, bars.index(0), buffers.q.index(0), ROWS)
    _load_boxes(q_desc, at, rows, 2 * HALF, bars.index(2), buffers.q_tail.index(0), ROWS)
    _load_boxes(q_desc, at, rows, HALF, bars.index(1), buffers.q.index(1), ROWS)


@gluon.jit
def _places(keys, position, BOX: gl.constexpr, CONFIG: gl.constexpr):
    """Where a block lies: (entries of the cache, rows) of each BOX keys; where rows are copied (the page of each key,
    the block's position). Behind the keys that are seen ids may be anything: the last seen page stands for those."""
    entries = ()
    rows = ()
    if CONFIG.loader_warps > 1:
        entries += (page_ids(keys, position, BLOCK_N, CONFIG),)  # type: ignore[assignment]
        rows += (position,)  # type: ignore[assignment]
    elif CONFIG.page_size == 0:
        entries += (keys.b,)  # type: ignore[assignment]
        # of a block without keys any rows will do
        rows += (gl.where(position < keys.end, position, 0),)  # type: ignore[assignment]
    else:
        table = keys.pages.table + keys.b.to(gl.int64) * keys.pages.row
        for i in gl.static_range(BLOCK_N // BOX):
            key = position + i * BOX
            seen = gl.maximum(gl.minimum(key, keys.end - 1), 0)
            page = gl.load(table + seen // CONFIG.page_size, mask=keys.end > 0, other=0)
            # coordinates of TMA are int32, page ids may be int64
            entries += (page.to(gl.int32),)  # type: ignore[assignment]
            rows += (key % CONFIG.page_size,)  # type: ignore[assignment]
    return entries, rows


@gluon.jit
def _load_columns(source, places, column, bar, smem, BOX: gl.constexpr, CONFIG: gl.constexpr):
    """As many columns of a block from `column` on as `smem` has."""
    entries, rows = places
    if CONFIG.loader_warps > 1:
        copy_piece(source, smem, 0, rows[0], entries[0], column, 2 * HALF + TAIL, CONFIG)
        async_copy.mbarrier_arrive(bar, increment_count=False)
    else:
        _load_boxes(source, entries, rows, column, bar, smem, BOX)


@gluon.jit
def _load_block(stage, is_used, source, places, buffers, full, BOX: gl.constexpr, CONFIG: gl.constexpr):
    """A block's keys: first the half that its owner's values are in, with the tail. `is_used`: the stage holds another
    block, which consumers give back."""
    own, other = 3 * stage, 1 + stage  # 2 * stage + half
    of_own, of_tail, of_other = full.index(5 * stage), full.index(4 * stage + 2), full.index(1 + 3 * stage)
    if is_used:
        take_stage(HALVES_FREE, own, 1, CONFIG.loader_warps)
    _load_columns(source, places, stage * HALF, of_own, buffers.k.index(own), BOX, CONFIG)
    _load_columns(source, places, 2 * HALF, of_tail, buffers.k_tail.index(stage), BOX, CONFIG)
    if is_used:
        take_stage(HALVES_FREE, other, 1, CONFIG.loader_warps)
    _load_columns(source, places, (1 - stage) * HALF, of_other, buffers.k.index(other), BOX, CONFIG)


@gluon.jit
def _load_tile(
    tile, taken, used_0, used_1, q_desc, k_source, tiles, pages, buffers, sync, sizes, CONFIG: gl.constexpr
):  # fmt: skip
    """Publish the tile's descriptor and load its queries and keys. Returns the number that the next tile's fetch got,
    and how many blocks each stage has held."""
    PAGE: gl.constexpr = CONFIG.page_size
    # so many rows of a block always lie in one page
    BOX: gl.constexpr = min(BLOCK_N.value, PAGE & -PAGE) if PAGE > 0 else BLOCK_N.value
    pair = taken & 1
    entry = _entry_of(tile, tiles, sizes, CONFIG)
    # there are two descriptors: before one is written again, the consumers must have read it
    mbarrier.wait(sync.tile_empty.index(pair), phase_parity(taken, 2) ^ 1)
    row, last, begin, blocks = _publish(pair, entry, sync, sizes, CONFIG)
    keys = KeysOfTile(gl.maximum(entry[0], 0), sizes.batch, 0, 0, 0, last, pages)
    position = begin * BLOCK_N
    places = _places(keys, position, BOX, CONFIG)
    if taken > 0:
        named_barrier_sync(QUERIES_FREE, 256 + 32 * CONFIG.loader_warps)
    _load_queries(q_desc, entry, row, buffers, sync.q_full, sizes, CONFIG)
    fetched = no_tile_fetched()
    for n in range(blocks):
        # late: a tile fetched early would wait for the end of a long one
        if n == blocks - 1:
            fetched = fetch_next_tile_async(tiles.counter)
        position += BLOCK_N
        # a block ahead of its keys
        later = _places(keys, position, BOX, CONFIG)
        stage = n & 1
        is_used = gl.where(stage == 0, used_0, used_1) + n // 2 > 0
        _load_block(stage, is_used, k_source, places, buffers, sync.full, BOX, CONFIG)
        places = later
    return await_next_tile(fetched), used_0 + (blocks + 1) // 2, used_1 + blocks // 2


@gluon.jit
def produce(q_desc, k_source, tiles, pages, buffers, sync, sizes, CONFIG: gl.constexpr):
    """All tiles of this CTA."""
    await_kernel_before(CONFIG.starts_early)
    if CONFIG.listed:
        count = gl.load(tiles.list + LISTED)
    else:
        count = gl.cdiv(sizes.queries * sizes.heads, ROWS) * sizes.batch * tiles.num_splits
    tile = gl.program_id(0)
    taken = gl.to_tensor(0)
    used_0 = gl.to_tensor(0)
    used_1 = gl.to_tensor(0)
    while tile < count:
        fetched, used_0, used_1 = _load_tile(
            tile, taken, used_0, used_1, q_desc, k_source, tiles, pages, buffers, sync, sizes, CONFIG
        )
        taken += 1
        # there are as many fetches as tiles: the CTA that fetches the last resets the counter
        if fetched == count - 1:
            gl.store(tiles.counter, 0)
        # the first tile of each CTA is its own number, so the counter's tiles come behind those
        tile = gl.num_programs(0) + fetched
    pair = taken & 1
    mbarrier.wait(sync.tile_empty.index(pair), phase_parity(taken, 2) ^ 1)
    # the consumers' loops end at a tile without blocks
    write_tile_field(sync.tile, pair, TILE_BLOCKS, 0)
    mbarrier.arrive(sync.tile_full.index(pair), count=1)
