"""The loader warp of the Hopper decoding kernel for MLA."""

from powertrain.ops.attention.hopper.decode_mla_tiles import BLOCK_N, HALF, HALVES_FREE, TAIL
from powertrain.ops.attention.hopper.forward_producer import take_stage
from powertrain.ops.attention.hopper.forward_tiles import as_tile
from powertrain.runtime.gluon_compat import gl, gluon, mbarrier, reinterpret, tma_load


@gluon.jit
def _load_columns(desc, entries, row, column, bars, first, smem, BOX: gl.constexpr, PIECE: gl.constexpr):
    """Rows of each of the entries, BOX of each, and as many columns from `column` on as `smem` [64, columns] has: each
    PIECE columns complete a barrier, from `first` on."""
    COLS: gl.constexpr = smem.shape[1]
    # TMA's layout: panels of 64 columns, in which 8 rows are swizzled among themselves
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BOX, 64], smem.dtype)
    COUNT: gl.constexpr = smem.shape[0] // BOX
    pieces = reinterpret(smem, smem.dtype, [COLS // 64 * COUNT, BOX, 64], layout)
    for panel in gl.static_range(COLS // 64):
        bar = bars.index(first + panel * 64 // PIECE)
        if panel * 64 % PIECE == 0:
            mbarrier.expect(bar, PIECE * smem.shape[0] * smem.dtype.primitive_bitwidth // 8)
        for i in gl.static_range(COUNT):
            piece = as_tile(pieces.index(panel * COUNT + i))
            tma_load(desc, [entries[i], 0, row, column + panel * 64], bar, piece)  # [BOX, 64]


@gluon.jit
def _entries(page_row, part, n, PAGE_SIZE: gl.constexpr, BOX: gl.constexpr):
    """Where the n-th block lies: an entry of the cache for each BOX keys. Behind the keys that are seen ids may be
    anything: the last seen page stands for those."""
    entries = ()
    for i in gl.static_range(BLOCK_N // BOX):
        if PAGE_SIZE == 0:
            entries += (part.batch,)  # type: ignore[assignment]
        else:
            key = gl.minimum((part.begin + n) * BLOCK_N + i * BOX, part.last - 1)
            page = gl.load(page_row + key // PAGE_SIZE, mask=(key >= 0) & (n < part.count), other=0)
            # coordinates of TMA are int32, page ids may be int64
            entries += (page.to(gl.int32),)  # type: ignore[assignment]
    return entries


@gluon.jit
def produce(
    q_desc, k_desc, page_table, page_stride, buffers, sync, part, PAGE_SIZE: gl.constexpr, BOX: gl.constexpr,
    PIECE: gl.constexpr,
):  # fmt: skip
    """The queries, and the blocks' keys: of each first the half that its owner's values are in, with the tail."""
    PIECES: gl.constexpr = HALF // PIECE
    page_row = page_table
    if PAGE_SIZE > 0:
        page_row = page_table + part.batch.to(gl.int64) * page_stride
    entries = _entries(page_row, part, 0, PAGE_SIZE, BOX)
    of_query = (part.batch,)
    _load_columns(q_desc, of_query, part.row, 0, sync.q_full, 0, buffers.q.index(0), 64, HALF)
    _load_columns(q_desc, of_query, part.row, 2 * HALF, sync.q_full, 1, buffers.q_tail.index(0), 64, TAIL)
    _load_columns(q_desc, of_query, part.row, HALF, sync.q_full, 2, buffers.q.index(1), 64, HALF)
    for n in range(part.count):
        # a part without keys has one block, wholly masked: any rows will do
        row = gl.where((part.begin + n) * BLOCK_N < part.last, (part.begin + n) * BLOCK_N, 0)
        if PAGE_SIZE > 0:
            row = row % PAGE_SIZE
            if BOX < BLOCK_N:
                row = row * 0
        # a block ahead of its keys
        later = _entries(page_row, part, n + 1, PAGE_SIZE, BOX)
        stage = n & 1
        own = 2 * stage + stage
        if n >= 2:
            take_stage(HALVES_FREE, own, 1)
        first = stage * (2 * PIECES + 1)
        of_own, of_other, of_tail = first + stage * PIECES, first + (1 - stage) * PIECES, first + 2 * PIECES
        _load_columns(k_desc, entries, row, stage * HALF, sync.full, of_own, buffers.k.index(own), BOX, PIECE)
        _load_columns(k_desc, entries, row, 2 * HALF, sync.full, of_tail, buffers.k_tail.index(stage), BOX, TAIL)
        other = 2 * stage + 1 - stage
        if n >= 2:
            take_stage(HALVES_FREE, other, 1)
        _load_columns(k_desc, entries, row, (1 - stage) * HALF, sync.full, of_other, buffers.k.index(other), BOX, PIECE)
        entries = later
