"""Results of the Hopper forward from registers to memory: by TMA, or by ordinary stores where a tile is cut off."""

from powertrain.ops.attention.hopper.forward_tiles import as_tile, queries_left, query_of, with_head_of
from powertrain.runtime.gluon_compat import barrier, gl, gluon, hopper, reinterpret, tma, tma_store


@gluon.jit
def store_result(
    parts, PART: gl.constexpr, o_desc, o_smem, CONSUMER: gl.constexpr, o_ptr, batch, head, row, q_start, q_capacity,
    strides, CONFIG: gl.constexpr, FIRST: gl.constexpr = 0,
):  # fmt: skip
    """Part PART of the parts of each piece of results, from column FIRST on, through shared memory to memory."""
    HEADS_PER_TILE: gl.constexpr = CONFIG.heads_per_tile
    QUERIES: gl.constexpr = o_smem[0].shape[1] // HEADS_PER_TILE
    PIECE: gl.constexpr = len(parts[0]) * o_smem[0].shape[2]  # columns of the first piece
    # the part before may still be on its way out of the same shared memory
    tma.store_wait(0)
    barrier()
    for i in gl.static_range(len(o_smem)):
        o_smem[i].index(CONSUMER).store(parts[i][PART].to(o_smem[i].dtype))  # [64, COLS]
    # TMA reads shared memory by another path than the stores above
    hopper.fence_async_shared()
    barrier()
    if not CONFIG.packed:
        _store_tiles(o_desc, o_smem, PIECE, PART, CONSUMER, batch, head, row, HEADS_PER_TILE, FIRST)
    elif row + QUERIES <= q_capacity:
        _store_tiles(o_desc, o_smem, PIECE, PART, CONSUMER, batch, head, q_start + row, HEADS_PER_TILE, FIRST)
    else:  # the rows behind are another sequence's
        base = o_ptr + (q_start + row).to(gl.int64) * strides.os + head.to(gl.int64) * strides.oh
        for i in gl.static_range(len(o_smem)):
            column = gl.to_tensor(FIRST + i * PIECE + PART * o_smem[i].shape[2])
            o_tile = o_smem[i].index(CONSUMER)
            count = queries_left(q_capacity - row, o_smem[i].shape[1], HEADS_PER_TILE)
            _copy_out(o_tile, base, count, column, strides.os, strides.oh, CONFIG.d_v, HEADS_PER_TILE)


@gluon.jit
def _store_tiles(
    o_desc, o_smem, PIECE: gl.constexpr, PART: gl.constexpr, CONSUMER: gl.constexpr, batch, head, row,
    HEADS_PER_TILE: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    for i in gl.static_range(len(o_smem)):
        column = FIRST + i * PIECE + PART * o_smem[i].shape[2]
        if HEADS_PER_TILE == 1:
            tma_store(o_desc[i], [batch, head, row, column], as_tile(o_smem[i].index(CONSUMER)))
        else:
            tma_store(o_desc[i], [batch, row, head, column], as_tile(o_smem[i].index(CONSUMER), HEADS_PER_TILE))


@gluon.jit
def store_split(
    o, first: gl.constexpr, base, rows, heads, stride, stride_h, D: gl.constexpr, HEADS_PER_TILE: gl.constexpr
):
    """The first `rows` queries and `heads` heads of `o` [rows, columns] to columns `first` on of [rows, heads, D] at
    `base`, in its dtype."""
    r = gl.arange(0, o.shape[0], gl.SliceLayout(1, o.type.layout))
    c = first + gl.arange(0, o.shape[1], gl.SliceLayout(0, o.type.layout))
    query = query_of(r, HEADS_PER_TILE)
    offset = query * stride.to(gl.int64)
    is_row = query < rows
    if HEADS_PER_TILE > 1:
        lane = with_head_of(0, r, HEADS_PER_TILE)
        offset += lane * stride_h.to(gl.int64)
        is_row = is_row & (lane < heads)
    # results of split keys leave in float32, by ordinary stores from registers
    place = base + gl.expand_dims(offset, 1) + gl.expand_dims(c, 0)
    gl.store(place, o.to(base.dtype.element_ty), mask=gl.expand_dims(is_row, 1) & gl.expand_dims(c < D, 0))  # [64, D_V]


@gluon.jit
def _copy_out(o_smem, base, rows, first, stride, stride_h, D: gl.constexpr, HEADS_PER_TILE: gl.constexpr):
    """The first `rows` queries of a tile in shared memory to columns `first` on of [rows, heads, D] at `base`, by
    ordinary stores."""
    ROWS: gl.constexpr = o_smem.shape[0]
    COLS: gl.constexpr = o_smem.shape[1]
    WIDTH: gl.constexpr = min(COLS, 64)
    HEIGHT: gl.constexpr = 16
    # TMA's layout: panels of 64 columns, in which 8 rows are swizzled among themselves
    swizzle: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEIGHT, WIDTH], o_smem.dtype)
    pieces = reinterpret(o_smem, o_smem.dtype, [COLS // WIDTH * ROWS // HEIGHT, HEIGHT, WIDTH], swizzle)
    for panel in gl.static_range(COLS // WIDTH):
        for piece in range(ROWS // HEIGHT):
            _copy_piece(
                pieces,
                gl.to_tensor(panel * (ROWS // HEIGHT)),
                piece,
                base,
                rows,
                first + panel * WIDTH,
                stride,
                stride_h,
                D,
                HEADS_PER_TILE,
            )


@gluon.jit
def _copy_piece(
    pieces, first, piece, base, rows, column, stride, stride_h, D: gl.constexpr, HEADS_PER_TILE: gl.constexpr
):  # fmt: skip
    HEIGHT: gl.constexpr = pieces.shape[1]
    WIDTH: gl.constexpr = pieces.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    r = piece * HEIGHT + gl.arange(0, HEIGHT, gl.SliceLayout(1, layout))
    c = column + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    query = query_of(r, HEADS_PER_TILE)
    offset = query.to(gl.int64) * stride
    if HEADS_PER_TILE > 1:
        offset += with_head_of(0, r, HEADS_PER_TILE).to(gl.int64) * stride_h
    place = base + gl.expand_dims(offset, 1) + gl.expand_dims(c, 0)
    mask = gl.expand_dims(query < rows, 1) & gl.expand_dims(c < D, 0)
    gl.store(
        # the compiler cannot prove it: rows begin at 16-byte addresses, so 8 elements leave in one store
        gl.multiple_of(gl.max_contiguous(place, [1, 8]), [1, 16]),
        pieces.index(first + piece).load(layout),
        mask=gl.max_constancy(mask, [1, 8]),
    )
