"""Results and LSE of the Hopper forward from registers to memory.

Results of a whole tile leave by TMA, or by ordinary stores where it is cut off; those of a part of its keys in float32,
by ordinary stores, for the kernel that combines parts.
"""

from typing import Any, NamedTuple

from powertrain.ops.attention.hopper.forward_tiles import as_tile, queries_left, query_of, with_head_of
from powertrain.ops.attention.hopper.softmax import by_row
from powertrain.runtime.gluon_compat import barrier, gl, gluon, hopper, reinterpret, tma, tma_store


class Rows(NamedTuple):
    """A consumer's rows of a tile, for their results: fields of the tile's descriptor."""

    b: Any  # batch entry
    head: Any
    row: Any  # the first query
    q_start: Any
    q_len: Any
    q_capacity: Any
    split: Any  # of the keys; None: they are not split
    slot_of_part: Any  # of a list, None without; negative: a whole tile


@gluon.jit
def store_lse(lse, i, lane, rows, results, sizes, storage, CONFIG: gl.constexpr, CONSUMER: gl.constexpr):
    """The LSE of queries `i` and heads `lane` behind the first."""
    _, queries, heads, num_splits, num_q_per_kv = sizes
    b, head, row, q_start, _, q_capacity, split, slot_of_part = rows
    HEADS_PER_TILE: gl.constexpr = CONFIG.heads_per_tile
    ROWS: gl.constexpr = lse.shape[0]
    if CONFIG.packed:
        # int64: batch * heads * queries passes 2^31 where one sequence's queries do not
        base = results.lse + head.to(gl.int64) * queries + q_start
    else:
        base = results.lse + (b.to(gl.int64) * heads + head) * queries
    if num_splits is not None:
        base += (split * storage).to(gl.int64) * heads * queries
    if HEADS_PER_TILE > 1:
        base += lane * queries
    is_row = _is_row(i, row, lane, head, q_capacity, num_q_per_kv, HEADS_PER_TILE)
    if CONFIG.listed:
        # a part's LSE lies ahead of its results. By masks: with a branch softcap spilled 8 bytes
        is_cut = slot_of_part >= 0
        FILLED: gl.constexpr = ROWS // HEADS_PER_TILE * HEADS_PER_TILE
        of_part = _place_of_part(results.partial, slot_of_part, FILLED * CONFIG.consumers, CONFIG) + CONSUMER * FILLED
        gl.store(of_part + gl.arange(0, ROWS, lse.type.layout), lse, mask=is_row & is_cut)  # [64]
        gl.store(base + i, lse, mask=is_row & (slot_of_part < 0))  # [64]
    else:
        gl.store(base + i, lse, mask=is_row)  # [64]


@gluon.jit
def _is_row(i, row, lane, head, q_capacity, num_q_per_kv, HEADS_PER_TILE: gl.constexpr):
    """Which of a consumer's rows, of queries `i` from `row` on and heads `lane` from `head` on, are any of the call."""
    ROWS: gl.constexpr = i.shape[0]
    is_row = i < q_capacity
    if ROWS % HEADS_PER_TILE:
        is_row = is_row & (i < row + ROWS // HEADS_PER_TILE)
    # the last tile of a group may have fewer heads
    if HEADS_PER_TILE > 1 and num_q_per_kv is not None:
        is_row = is_row & (lane < num_q_per_kv - head % num_q_per_kv)
    return is_row


@gluon.jit
def _place_of_part(partial, slot, ROWS: gl.constexpr, CONFIG: gl.constexpr):
    """Of a part's LSE, in a multiple of 4 rows, so that the results behind it are aligned."""
    return partial + slot.to(gl.int64) * ((ROWS + 3) // 4 * 4 + ROWS * CONFIG.d_v)


@gluon.jit
def store_rows(
    o, inverse, i, rows, o_desc, o_smem, results, sizes, storage, strides, CONFIG: gl.constexpr, CONSUMER: gl.constexpr
):  # fmt: skip
    """The results of a tile, or of a part of its keys."""
    _, _, _, num_splits, num_q_per_kv = sizes
    b, head, row, q_start, q_len, q_capacity, split, slot_of_part = rows
    HEADS_PER_TILE: gl.constexpr = CONFIG.heads_per_tile
    STORE_PARTS: gl.constexpr = o[0].shape[1] // o_smem[0].shape[2]
    ROWS: gl.constexpr = o[0].shape[0]
    b_at = b
    if CONFIG.packed:
        b_at = gl.to_tensor(0)
    if num_splits is not None:
        base = results.o + (split * storage + b_at).to(gl.int64) * strides.ob
        base += (q_start + row).to(gl.int64) * strides.os
        base += head.to(gl.int64) * strides.oh
        for n in gl.static_range(len(o)):
            _store_split(
                o[n] * by_row(inverse, o[n]),
                n * o[0].shape[1],
                base,
                queries_left(q_capacity - row, ROWS, HEADS_PER_TILE),
                num_q_per_kv - head % num_q_per_kv,
                strides.os,
                strides.oh,
                CONFIG.d_v,
                HEADS_PER_TILE,
            )
    elif CONFIG.listed:
        if slot_of_part >= 0:
            _store_listed_part(
                o, inverse, results.partial, slot_of_part, head, queries_left(q_capacity - row, ROWS, HEADS_PER_TILE),
                num_q_per_kv, CONFIG, CONSUMER,
            )  # fmt: skip
        else:
            _store_whole(
                o, inverse, i, o_desc, o_smem, results.o, b_at, head, row, q_start, q_len, q_capacity, num_q_per_kv,
                strides, STORE_PARTS, CONFIG, CONSUMER,
            )  # fmt: skip
    else:
        _store_whole(
            o, inverse, i, o_desc, o_smem, results.o, b_at, head, row, q_start, q_len, q_capacity, num_q_per_kv,
            strides, STORE_PARTS, CONFIG, CONSUMER,
        )  # fmt: skip


@gluon.jit
def _store_whole(
    o, inverse, i, o_desc, o_smem, o_ptr, b_at, head, row, q_start, q_len, q_capacity, num_q_per_kv, strides,
    STORE_PARTS: gl.constexpr, CONFIG: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """The results of a tile, divided by their sums."""
    pieces = ()
    for n in gl.static_range(len(o)):
        piece = o[n] * by_row(inverse, o[n])
        if CONFIG.ragged:  # rows of no sequence may hold NaN
            piece = gl.where(by_row(i, o[n]) < q_len, piece, 0.0)
        pieces += (piece,)  # type: ignore[assignment]
    if o_desc is None:
        # there is no map where the last tile of a group has fewer heads: those behind are another KV head's
        base = o_ptr + b_at.to(gl.int64) * strides.ob + (q_start + row).to(gl.int64) * strides.os
        base += head.to(gl.int64) * strides.oh
        members = num_q_per_kv - head % num_q_per_kv
        count = queries_left(q_capacity - row, o[0].shape[0], CONFIG.heads_per_tile)
        for n in gl.static_range(len(o)):
            _store_split(
                pieces[n], n * o[0].shape[1], base, count, members, strides.os, strides.oh, CONFIG.d_v,
                CONFIG.heads_per_tile,
            )  # fmt: skip
    else:
        parts = ()
        for n in gl.static_range(len(o)):
            parts += (parts_of(pieces[n], STORE_PARTS),)  # type: ignore[assignment]
        for part in gl.static_range(STORE_PARTS):
            store_result(
                parts, part, o_desc, o_smem, CONSUMER, o_ptr, b_at, head, row, q_start, q_capacity, strides, CONFIG,
            )  # fmt: skip


@gluon.jit
def _store_listed_part(
    o, inverse, partial, slot, head, rows, num_q_per_kv, CONFIG: gl.constexpr, CONSUMER: gl.constexpr
):
    """The results of a part of a list, behind the LSE of its rows."""
    HEADS_PER_TILE: gl.constexpr = CONFIG.heads_per_tile
    ROWS: gl.constexpr = o[0].shape[0] // HEADS_PER_TILE * HEADS_PER_TILE  # that are of a query
    stride = gl.to_tensor(HEADS_PER_TILE * CONFIG.d_v)
    stride_h = gl.to_tensor(CONFIG.d_v)
    base = _place_of_part(partial, slot, ROWS * CONFIG.consumers, CONFIG)
    base += (ROWS * CONFIG.consumers + 3) // 4 * 4 + ROWS * CONSUMER * CONFIG.d_v
    members = num_q_per_kv - head % num_q_per_kv
    for n in gl.static_range(len(o)):
        _store_split(
            o[n] * by_row(inverse, o[n]), n * o[0].shape[1], base, rows, members, stride, stride_h, CONFIG.d_v,
            HEADS_PER_TILE,
        )  # fmt: skip


@gluon.jit
def parts_of(o, STORE_PARTS: gl.constexpr):
    """`o` [rows, columns] in STORE_PARTS parts of its columns."""
    if STORE_PARTS == 1:
        parts = (o,)
    else:
        ROWS: gl.constexpr = o.shape[0]
        COLS: gl.constexpr = o.shape[1]
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, COLS // 2, 16])
        left, right = o.reshape([ROWS, 2, COLS // 2]).permute(0, 2, 1).split()
        parts = parts_of(gl.convert_layout(left, layout), STORE_PARTS // 2)
        parts += parts_of(gl.convert_layout(right, layout), STORE_PARTS // 2)
    return parts


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
def _store_split(
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
    HEIGHT: gl.constexpr = 4 * gl.num_warps()
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
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
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
