"""The loader warp of the Hopper forward: fetches tiles, publishes their descriptors, loads q, k and v by TMA. Of pages
too small for TMA four warps copy k and v row by row."""

from powertrain.ops.attention.decode_tiles import ENTRY_FIELDS, LISTED
from powertrain.ops.attention.hopper.forward_tiles import (
    KEYS_FREE,
    TILE_B,
    TILE_FIRST,
    TILE_HEAD,
    TILE_K_LEN,
    TILE_PARTS,
    TILE_Q_CAPACITY,
    TILE_Q_LEN,
    TILE_Q_START,
    TILE_SLOT,
    TILE_SPLIT,
    VALUES_FREE,
    KeysOfTile,
    as_tile,
    block_at,
    blocks_of,
    phase_parity,
)
from powertrain.ops.attention.hopper.primitives import write_tile_field
from powertrain.ops.attention.triton.sequences import find_sequence, sequence_span, slots_with_rows, tile_coords
from powertrain.ops.early_start import await_kernel_before
from powertrain.runtime.gluon_compat import (
    async_copy,
    await_next_tile,
    fetch_next_tile_async,
    gl,
    gluon,
    kept,
    mbarrier,
    named_barrier_sync,
    no_tile_fetched,
    prefetch,
    reinterpret,
    tma_load,
)


@gluon.jit
def take_stage(first: gl.constexpr, stage, WARPGROUPS: gl.constexpr, LOADER_WARPS: gl.constexpr = 1):
    """By the loader, once for each round of a stage but the first."""
    named_barrier_sync(first + stage, 32 * LOADER_WARPS + 128 * WARPGROUPS)


@gluon.jit
def _load_queries(
    q_desc, q_smem, q_full, batch, head, row, first_slot, CONSUMERS: gl.constexpr, HEADS_PER_TILE: gl.constexpr
):  # fmt: skip
    ROWS: gl.constexpr = q_smem[0].shape[1]
    CHANNELS: gl.constexpr = q_smem[0].shape[2] + (q_smem[1].shape[2] if len(q_smem) > 1 else 0)
    # the last rows are of no query where HEADS_PER_TILE is no power of 2
    FILLED: gl.constexpr = ROWS // HEADS_PER_TILE * HEADS_PER_TILE
    BYTES: gl.constexpr = FILLED * CHANNELS * q_smem[0].dtype.primitive_bitwidth // 8
    for c in gl.static_range(CONSUMERS):
        bar = q_full.index(first_slot + c)
        mbarrier.expect(bar, BYTES)
        for i in gl.static_range(len(q_smem)):
            if HEADS_PER_TILE == 1:
                where = [batch, head, row + c * ROWS, i * q_smem[0].shape[2]]
            else:
                where = [batch, row + c * (ROWS // HEADS_PER_TILE), head, i * q_smem[0].shape[2]]
            tma_load(q_desc[i], where, bar, as_tile(q_smem[i].index(first_slot + c), HEADS_PER_TILE))  # [64, PIECE]


@gluon.jit
def _load_rows(source, smem, bar, stage, keys, row, ids, DIM: gl.constexpr, CONFIG: gl.constexpr):
    """A block of keys or values from `row` on: [BLOCK_N, PIECE] each. `source`: maps of them, or CacheRows, for which
    `ids` are its pages."""
    if CONFIG.loader_warps > 1:
        _copy_rows(source, smem, bar, stage, keys.kv, row, ids, DIM, CONFIG)
    elif CONFIG.page_size > 0:
        _load_pages(source, smem, bar, stage, keys, row, CONFIG)
    else:
        b = keys.b
        if CONFIG.keys_packed:
            # a sequence is a coordinate of descriptors of whole tensors, so packed ones need no descriptor of their own
            b = gl.to_tensor(0)
        elif CONFIG.packed:
            # of rows of no sequence there are no keys
            b = gl.minimum(b, keys.batch - 1)
        for i in gl.static_range(len(smem)):
            tma_load(source[i], [b, keys.kv, row, i * smem[0].shape[2]], bar, as_tile(smem[i].index(stage)))


@gluon.jit
def _pages_of(keys):
    """The page ids of a tile's sequence; of rows of no sequence those of the last one."""
    return keys.pages.table + gl.minimum(keys.b, keys.batch - 1) * keys.pages.row


@gluon.jit
def _load_pages(descs, smem, bar, stage, keys, row, CONFIG: gl.constexpr):
    """The same of a cache [pages, rows of a page, heads, dim], by parts of a page and of 64 columns."""
    PAGE: gl.constexpr = CONFIG.page_size
    ROWS: gl.constexpr = smem[0].shape[1]
    # so many rows of a block, or fewer, always lie in one page
    BOX: gl.constexpr = min(ROWS, PAGE & -PAGE)
    of_sequence = _pages_of(keys)
    for j in gl.static_range(ROWS // BOX):
        position = row + j * BOX
        # past the last key the table's page ids are undefined: the first page is read instead, and masked
        # coordinates of TMA are int32, page ids may be int64
        page = gl.load(of_sequence + gl.where(position < keys.end, position, 0) // PAGE).to(gl.int32)
        if CONFIG.has_left:
            # pages ahead of a window may be other sequences' by now: TMA gives zeros for a page that there is not
            page = gl.where(position + BOX > keys.first, page, -1)
        for i in gl.static_range(len(smem)):
            where = (page, keys.kv, position % PAGE)
            _load_part(descs[i], smem[i].index(stage), bar, where, i * smem[0].shape[2], j, BOX)


@gluon.jit
def _load_part(desc, smem, bar, where, column, part: gl.constexpr, BOX: gl.constexpr):
    """Rows part * BOX and on of a stage [rows, columns]. TMA's layout: panels of 64 columns."""
    PARTS: gl.constexpr = smem.shape[0] // BOX
    WIDTH: gl.constexpr = min(smem.shape[1], 64)
    PANELS: gl.constexpr = smem.shape[1] // WIDTH
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BOX, WIDTH], smem.dtype)
    boxes = reinterpret(smem, smem.dtype, [PANELS * PARTS, BOX, WIDTH], layout)
    for panel in gl.static_range(PANELS):
        place = [where[0], where[1], where[2], column + panel * WIDTH]
        tma_load(desc, place, bar, as_tile(boxes.index(panel * PARTS + part)))


@gluon.jit
def page_ids(keys, row, ROWS: gl.constexpr, CONFIG: gl.constexpr):
    """Where rows are copied: the pages of ROWS positions from `row` on, -1 for one that is not seen. One id a thread:
    loaded where a thread copies eight rows, each load would wait for the one before, for want of registers."""
    if CONFIG.loader_warps > 1:
        position = row + gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        # the table's other entries are undefined
        is_seen = (position >= keys.first) & (position < keys.end)
        ids = gl.load(_pages_of(keys) + gl.where(is_seen, position, 0) // CONFIG.page_size)  # [ROWS]
        return gl.where(is_seen, ids.to(gl.int32), -1)
    else:
        return gl.to_tensor(0)


@gluon.jit
def _copy_rows(cache, smem, bar, stage, kv, row, ids, DIM: gl.constexpr, CONFIG: gl.constexpr):
    """A block of keys or values row by row, from the pages of `page_ids`; zeros for rows that are not seen."""
    for i in gl.static_range(len(smem)):
        copy_piece(cache, smem[i].index(stage), kv, row, ids, i * smem[0].shape[2], DIM, CONFIG)
    async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def copy_piece(cache, smem, kv, row, ids, first, DIM: gl.constexpr, CONFIG: gl.constexpr):
    """As many columns from `first` on as `smem` [rows, columns] has: each thread 16 bytes of each 64 columns, of every
    16th row."""
    COLS: gl.constexpr = smem.shape[1]
    THREADS: gl.constexpr = min(COLS, 64) // 8  # of a row
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // THREADS, THREADS], [gl.num_warps(), 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    page = gl.convert_layout(ids, rows)
    within = (row + gl.arange(0, smem.shape[0], rows)) % CONFIG.page_size
    # int32 in units of 16 bytes: with 64 bits addresses take three times the instructions, which consumers wait for
    at = page * cache.page + within * cache.row + kv * cache.head
    column = first + gl.arange(0, COLS, gl.SliceLayout(0, layout))
    ptrs = gl.expand_dims(cache.ptr + column, 0) + gl.expand_dims(at.to(gl.int64) * 8, 1)
    mask = gl.expand_dims(page >= 0, 1) & gl.expand_dims(column < DIM, 0)
    async_copy.async_copy_global_to_shared(smem, ptrs, mask=mask)  # [rows, columns]


@gluon.jit
def _load_values(source, v_smem, v_full, at, keys, row, ids, CONFIG: gl.constexpr):
    """The values, from `row` on, of the block before number `at`."""
    STAGES: gl.constexpr = v_smem[0].shape[0]
    COLS: gl.constexpr = v_smem[0].shape[2] + (v_smem[1].shape[2] if len(v_smem) > 1 else 0)
    BYTES: gl.constexpr = v_smem[0].shape[1] * COLS * v_smem[0].dtype.primitive_bitwidth // 8
    stage = (at - 1) & (STAGES - 1)
    if at > STAGES:
        take_stage(VALUES_FREE, stage, CONFIG.warpgroups, CONFIG.loader_warps)
    bar = v_full.index(stage)
    if CONFIG.loader_warps == 1:
        mbarrier.expect(bar, BYTES)
    _load_rows(source, v_smem, bar, stage, keys, row, ids, CONFIG.d_v, CONFIG)


@gluon.jit
def _entry_of(tile, tiles, head_groups, swizzle):
    """(entry of the list, group of heads) of a tile. `swizzle` groups of heads at a time run together."""
    entries = tiles // head_groups
    turn = tile // (entries * swizzle)
    within = tile - turn * entries * swizzle
    return within // swizzle, turn * swizzle + within % swizzle


@gluon.jit
def _listed_tile(tile, tiles, list_ptr, sizes, head_groups, CONFIG: gl.constexpr):
    """An entry of a list: (sequence, tile of it, group of heads, its first query, queries, rows, keys, part, parts,
    where its results are, -1 if those of the tile)."""
    at, group = _entry_of(tile, tiles, head_groups, sizes.swizzle)
    # these loads do not wait for one another
    entry = list_ptr + (at + 1) * ENTRY_FIELDS
    sequence, block, first, capacity, k_len = (
        gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3), gl.load(entry + 4),
    )  # fmt: skip
    split, parts = gl.load(entry + 5), gl.load(entry + 6)
    if not CONFIG.packed:
        first = gl.to_tensor(0)
    q_len = gl.where(sequence >= 0, capacity, 0)
    slot = gl.where(parts > 1, at * head_groups + group, -1)
    # the rows of no sequence, as `find_sequence` numbers them
    b = gl.where(sequence >= 0, sequence, sizes.batch)
    return b, block, group, first, q_len, capacity, k_len, split, parts, slot


@gluon.jit
def write_tile(tile_smem, pair, b, head, first, q_start, q_len, q_capacity, k_len):
    """Write the fields that every tile's descriptor has. Consumers read them where they need them, which keeps
    registers free over their loops."""
    write_tile_field(tile_smem, pair, TILE_B, b)
    write_tile_field(tile_smem, pair, TILE_HEAD, head)
    write_tile_field(tile_smem, pair, TILE_FIRST, first)
    write_tile_field(tile_smem, pair, TILE_Q_START, q_start)
    write_tile_field(tile_smem, pair, TILE_Q_LEN, q_len)
    write_tile_field(tile_smem, pair, TILE_Q_CAPACITY, q_capacity)
    write_tile_field(tile_smem, pair, TILE_K_LEN, k_len)


@gluon.jit
def _load_blocks(
    blocks, visited, emptied, keys, b_at, head, q_row, counter_ptr, sources, buffers, sync, CONFIG: gl.constexpr
):  # fmt: skip
    """Load a tile's blocks of keys, each block's values one block later, and its queries behind the first where they
    have one place. Returns the row and the page ids of the last block's values, which are yet to be loaded, the fetch
    of the next tile where that is pending, and the count of free stages of keys."""
    q_desc, k_source, v_source = sources
    begin, end, full_end, at_right, masked = blocks
    q_smem, k_smem, v_smem = buffers.q, buffers.k, buffers.v
    q_full, k_full, v_full = sync.q_full, sync.k_full, sync.v_full
    CONSUMERS: gl.constexpr = CONFIG.consumers
    HEADS_PER_TILE: gl.constexpr = CONFIG.heads_per_tile
    STAGES: gl.constexpr = v_smem[0].shape[0]
    BLOCK_N: gl.constexpr = v_smem[0].shape[1]
    PIECES: gl.constexpr = len(q_smem)
    Q_SLOTS: gl.constexpr = q_smem[0].shape[0] // CONSUMERS
    BYTES: gl.constexpr = v_smem[0].dtype.primitive_bitwidth // 8
    K_BYTES: gl.constexpr = BLOCK_N * (q_smem[0].shape[2] + (q_smem[1].shape[2] if PIECES > 1 else 0)) * BYTES
    before = gl.to_tensor(0)
    first_row = (
        keys.start + block_at(gl.to_tensor(0), begin, end, full_end, at_right, masked, CONFIG.has_left) * BLOCK_N
    )
    ids = page_ids(keys, first_row, BLOCK_N, CONFIG)
    ids_before = ids
    tile_idx = no_tile_fetched()
    # the order in which consumers visit blocks; both sides compute it from the same four numbers
    for n in range(end - begin):
        if CONFIG.listed:
            # a block earlier than elsewhere, for the entry of the tile is to be read too
            if n == end - begin - 1:
                tile_idx = fetch_next_tile_async(counter_ptr)
        row = keys.start + block_at(n, begin, end, full_end, at_right, masked, CONFIG.has_left) * BLOCK_N
        # a block ahead; behind the last one the ids are of no block, and not used
        later = keys.start + block_at(n + 1, begin, end, full_end, at_right, masked, CONFIG.has_left) * BLOCK_N
        ids_later = page_ids(keys, later, BLOCK_N, CONFIG)
        at = visited + n
        stage = at & (STAGES - 1)
        # k's stage: the consumers gave it back at a numbered barrier, for in Triton 3.6 an arrival at an mbarrier
        # is a barrier of the whole warpgroup
        if emptied <= at:
            take_stage(KEYS_FREE, stage, CONFIG.warpgroups, CONFIG.loader_warps)
            emptied += 1
        bar = k_full.index(stage)
        if CONFIG.loader_warps == 1:
            mbarrier.expect(bar, K_BYTES)
        _load_rows(k_source, k_smem, bar, stage, keys, row, ids, CONFIG.d_qk, CONFIG)
        if n == 0:
            if Q_SLOTS == 1:
                # who has given back the last block of keys has done with the queries
                while emptied < at + STAGES:
                    take_stage(KEYS_FREE, emptied & (STAGES - 1), CONFIG.warpgroups, CONFIG.loader_warps)
                    emptied += 1
                _load_queries(q_desc, q_smem, q_full, b_at, head, q_row, 0, CONSUMERS, HEADS_PER_TILE)
        else:
            # v of a block is needed one block later than its k: o += p v trails s = q kᵀ by one block
            _load_values(v_source, v_smem, v_full, at, keys, before, ids_before, CONFIG)
        before = row
        if CONFIG.loader_warps > 1:
            # Triton 3.6 takes a value that is carried over two rounds for one that never changes
            ids_before = kept(ids)
            ids = ids_later
    return before, ids_before, tile_idx, emptied


@gluon.jit
def _load_tile(
    tile, tiles, slots, visited, taken, emptied, counter_ptr, lengths, pages, list_ptr, sources, buffers, sync, sizes,
    head_groups, window, CONFIG: gl.constexpr,
):  # fmt: skip
    """Publish the tile descriptor and issue its TMA loads. Returns the next tile, and the counts of blocks, tiles and
    free stages of keys so far."""
    q_smem, v_smem = buffers.q, buffers.v
    tile_smem, q_full, v_full = sync.tile, sync.q_full, sync.v_full
    tile_full, tile_empty = sync.tile_full, sync.tile_empty
    batch, num_splits, num_q_per_kv = sizes.batch, sizes.num_splits, sizes.num_q_per_kv
    CONSUMERS: gl.constexpr = CONFIG.consumers
    HEADS_PER_TILE: gl.constexpr = CONFIG.heads_per_tile
    BLOCK_N: gl.constexpr = v_smem[0].shape[1]
    ROWS: gl.constexpr = q_smem[0].shape[1]
    QUERIES: gl.constexpr = ROWS // HEADS_PER_TILE * CONSUMERS
    Q_SLOTS: gl.constexpr = q_smem[0].shape[0] // CONSUMERS
    slot = None
    if CONFIG.listed:
        b, block, head, q_start, q_len, q_capacity, k_len, split, num_splits, slot = _listed_tile(
            tile, tiles, list_ptr, sizes, head_groups, CONFIG
        )
        k_start = gl.to_tensor(0)
    elif CONFIG.packed:
        slot, head = tile_coords(tile, slots, head_groups, sizes.swizzle)
        # searched by this warp, ahead of the consumers, who have no time to spare
        b, block = find_sequence(lengths.q_starts, batch, slot, QUERIES)
    else:
        block, at = tile_coords(tile, slots, batch * head_groups, sizes.swizzle)
        b = at // head_groups
        head = at % head_groups
    if not CONFIG.listed:
        split = None
        if num_splits is not None:
            split = head % num_splits
            head = head // num_splits
    if HEADS_PER_TILE > 1:
        parts = gl.cdiv(num_q_per_kv, HEADS_PER_TILE)
        head = head // parts * num_q_per_kv + head % parts * HEADS_PER_TILE
    if not CONFIG.listed:
        q_start, q_len, q_capacity = sequence_span(lengths.q_starts, lengths.q_used, b, batch, sizes.queries)
        k_start, k_len, _ = sequence_span(lengths.k_starts, lengths.k_used, b, batch, sizes.keys)
        if lengths.k_used is not None and not CONFIG.packed:
            k_len += sizes.new_keys
    first = block * QUERIES
    if first < q_capacity:
        pair = taken & 1
        # there are two descriptors: before one is written again, the consumers must have read it
        mbarrier.wait(tile_empty.index(pair), phase_parity(taken, 2) ^ 1)
        write_tile(tile_smem, pair, b, head, first, q_start, q_len, q_capacity, k_len)
        if num_splits is not None:
            write_tile_field(tile_smem, pair, TILE_SPLIT, split)
        if CONFIG.listed:
            write_tile_field(tile_smem, pair, TILE_PARTS, num_splits)
            write_tile_field(tile_smem, pair, TILE_SLOT, slot)
        mbarrier.arrive(tile_full.index(pair), count=1)
        offset = gl.to_tensor(0)
        if CONFIG.bottom_right:
            offset = k_len - q_len
        blocks = blocks_of(first, offset, q_len, k_len, window, split, num_splits, QUERIES, BLOCK_N, CONFIG)
        begin, end = blocks[0], blocks[1]
        first_seen = gl.maximum(first + offset - window.left, 0) if CONFIG.has_left else 0
        keys = KeysOfTile(b, batch, head // num_q_per_kv, k_start, first_seen, k_len, pages)
        b_at = b
        if CONFIG.packed:
            b_at = gl.to_tensor(0)
        # the tile before the last, which had this slot, is done: its place in tile_smem was free
        if Q_SLOTS == 2:
            _load_queries(
                sources[0], q_smem, q_full, b_at, head, q_start + first, pair * CONSUMERS, CONSUMERS, HEADS_PER_TILE
            )
        before, ids, tile_idx, emptied = _load_blocks(
            blocks, visited, emptied, keys, b_at, head, q_start + first, counter_ptr, sources, buffers, sync, CONFIG
        )  # fmt: skip
        visited += end - begin
        if CONFIG.listed:
            # for the tile after this one
            tile_idx = await_next_tile(tile_idx)
            at, _ = _entry_of(gl.num_programs(0) + tile_idx, tiles, head_groups, sizes.swizzle)
            # an address behind the list is ignored
            prefetch(list_ptr + (at + 1) * ENTRY_FIELDS)
        else:
            # late: a tile fetched early would wait for the end of a long one; not last: the answer takes a microsecond
            tile_idx = fetch_next_tile_async(counter_ptr)
        _load_values(sources[2], v_smem, v_full, visited, keys, before, ids, CONFIG)
        taken += 1
    else:
        tile_idx = fetch_next_tile_async(counter_ptr)
        if CONFIG.listed:
            tile_idx = await_next_tile(tile_idx)
    if not CONFIG.listed:
        # the loads above are pending while the answer is waited for
        tile_idx = await_next_tile(tile_idx)
    # there are as many fetches as tiles: the CTA that fetches the last resets the counter
    if tile_idx == tiles - 1:
        gl.store(counter_ptr, 0)
    # the first tile of each CTA is its own number, so the counter's tiles come behind those
    return gl.num_programs(0) + tile_idx, visited, taken, emptied


@gluon.jit
def produce(sources, counter_ptr, lengths, pages, list_ptr, buffers, sync, sizes, window, CONFIG: gl.constexpr):
    """The loader warp: all tiles of this CTA."""
    await_kernel_before(CONFIG.starts_early)
    v_smem = buffers.v
    tile_smem, tile_full, tile_empty = sync.tile, sync.tile_full, sync.tile_empty
    HEADS_PER_TILE: gl.constexpr = CONFIG.heads_per_tile
    head_groups = sizes.kv_heads * sizes.num_q_per_kv
    if HEADS_PER_TILE > 1:
        head_groups = sizes.kv_heads * gl.cdiv(sizes.num_q_per_kv, HEADS_PER_TILE)
    if sizes.num_splits is not None:
        head_groups = head_groups * sizes.num_splits
    tiles, slots = sizes.tiles, sizes.blocks
    if CONFIG.listed:
        tiles = gl.load(list_ptr + LISTED) * head_groups
    elif CONFIG.packed:
        # else SMs would begin with tiles that hold nothing
        slots = slots_with_rows(lengths.q_starts, sizes.batch, sizes.queries, slots)
        tiles = slots * head_groups
    # tiles have 1 to 64 blocks under a causal mask: a counter balances them, a fixed share would not
    tile = gl.program_id(0)
    visited = gl.to_tensor(0)  # blocks so far
    taken = gl.to_tensor(0)  # tiles so far
    emptied = gl.to_tensor(v_smem[0].shape[0])  # blocks of keys whose stage is free, counted from the first
    while tile < tiles:
        tile, visited, taken, emptied = _load_tile(
            tile, tiles, slots, visited, taken, emptied, counter_ptr, lengths, pages, list_ptr, sources, buffers, sync,
            sizes, head_groups, window, CONFIG,
        )  # fmt: skip
    pair = taken & 1
    mbarrier.wait(tile_empty.index(pair), phase_parity(taken, 2) ^ 1)
    # the consumers' loops end at a head below 0
    write_tile_field(tile_smem, pair, TILE_HEAD, -1)
    mbarrier.arrive(tile_full.index(pair), count=1)
