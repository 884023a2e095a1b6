"""The universal kernel of attention over a KV cache; decode.py has the algorithm."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from powertrain.ops.attention.cache_append import (
    cache_entry,
    row_of_entry,
)
from powertrain.ops.attention.decode_schedule import (
    key_range,
    lengths_of,
)
from powertrain.ops.attention.decode_tiles import ENTRY_FIELDS, LISTED
from powertrain.ops.attention.triton.scores import tanh
from powertrain.ops.attention.triton.sequences import SMALL
from powertrain.ops.attention.triton.tiles import LN2, LOG2E, piece_start, scale_tile, zeros_tile
from powertrain.ops.early_start import wait_for_kernel_before
from powertrain.runtime.launch import kernel


@triton.jit
def _load_rows(x_ptr, rows, mask, HEAD_DIM: tl.constexpr, PIECES: tl.constexpr, FMA: tl.constexpr):
    """The tile of rows given by their offsets, a piece [rows, PIECES[i]] each; 0 where masked."""
    tile = ()
    for i in tl.static_range(len(PIECES)):
        tile += (_load_piece(x_ptr, rows, mask, HEAD_DIM, piece_start(PIECES, i), PIECES[i], FMA),)  # type: ignore[assignment]
    return tile


@triton.jit
def _load_piece(x_ptr, rows, mask, HEAD_DIM: tl.constexpr, START: tl.constexpr, PIECE: tl.constexpr, FMA: tl.constexpr):
    dims = START + tl.arange(0, PIECE)[None, :]
    if HEAD_DIM % 16 == 0:
        x = tl.load(x_ptr + rows[:, None] + dims, mask=mask[:, None], other=0.0)  # [rows, PIECE]
    else:
        x = tl.load(x_ptr + rows[:, None] + dims, mask=mask[:, None] & (dims < HEAD_DIM), other=0.0)  # [rows, PIECE]
    if FMA:
        x = x.to(tl.float32)
    return x


# In float32 each piece, and each block of keys, is summed for itself first: one long chain of additions would err more
# than PyTorch does. It is an fma that adds them, since Triton folds a plain sum back into the dot.
@triton.jit
def _products(q, k, FMA: tl.constexpr, PRECISION: tl.constexpr):
    """q k^T over the pieces of the head dim."""
    s = tl.dot(q[0], tl.trans(k[0]), input_precision=PRECISION)  # [rows of q, rows of k]
    for i in tl.static_range(1, len(q)):
        if FMA:
            s = tl.fma(tl.dot(q[i], tl.trans(k[i]), input_precision=PRECISION), 1.0, s)  # [rows of q, rows of k]
        else:
            s = tl.dot(q[i], tl.trans(k[i]), s, input_precision=PRECISION)  # [rows of q, rows of k]
    return s


@triton.jit
def _update(acc, alpha, p, v, FMA: tl.constexpr, PRECISION: tl.constexpr):
    """acc * alpha + p v, piece by piece; v may have more pieces than are wanted."""
    tile = ()
    for i in tl.static_range(len(acc)):
        if FMA:
            product = tl.dot(p, v[i], input_precision=PRECISION)  # [rows of p, piece]
            tile += (tl.fma(acc[i], tl.broadcast_to(alpha[:, None], acc[i].shape), product),)  # type: ignore[assignment]
        else:
            scaled = acc[i] * alpha[:, None]
            # [rows of p, piece]
            tile += (tl.dot(p.to(v[i].dtype), v[i], scaled, input_precision=PRECISION),)  # type: ignore[assignment]
    return tile


@triton.jit
def _store_rows(x_ptr, tile, rows, mask, HEAD_DIM: tl.constexpr, PIECES: tl.constexpr):
    for i in tl.static_range(len(PIECES)):
        _store_piece(x_ptr, tile[i], rows, mask, HEAD_DIM, piece_start(PIECES, i), PIECES[i])


@triton.jit
def _store_piece(x_ptr, piece, rows, mask, HEAD_DIM: tl.constexpr, START: tl.constexpr, PIECE: tl.constexpr):
    dims = START + tl.arange(0, PIECE)[None, :]
    # [rows, PIECE]
    tl.store(x_ptr + rows[:, None] + dims, piece.to(x_ptr.dtype.element_ty), mask=mask[:, None] & (dims < HEAD_DIM))


@triton.jit
def _entry_of_block(
    page_table_ptr,
    batch_idx_ptr,
    batch,
    block,
    first,
    last,
    page_row,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """`cache_entry` of a block of keys: one where it lies in one page, or nothing is paged, else one a key."""
    if PAGE_SIZE % BLOCK_N == 0:
        start = block * BLOCK_N + tl.zeros([], tl.int32)
        return cache_entry(page_table_ptr, batch_idx_ptr, batch, start, start < last, page_row, PAGE_SIZE)
    else:
        cols = block * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = (cols >= first) & (cols < last)
        return cache_entry(page_table_ptr, batch_idx_ptr, batch, cols, inside, page_row, PAGE_SIZE)


@triton.jit
def _offset_of_block(block, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows of a block's keys in their entries: [BLOCK_N]."""
    if PAGE_SIZE % BLOCK_N == 0:
        return row_of_entry(block * BLOCK_N + tl.zeros([], tl.int32), PAGE_SIZE) + tl.arange(0, BLOCK_N)
    else:
        return row_of_entry(block * BLOCK_N + tl.arange(0, BLOCK_N), PAGE_SIZE)


@triton.jit
def _load_part(parts_ptr, at):
    """(sequence, which of its splits, how many it has) of an entry of decode_schedule.py's table."""
    of_part = parts_ptr + at * 3
    return tl.load(of_part), tl.load(of_part + 1), tl.load(of_part + 2)  # scalars


@triton.jit
def _load_entry(list_ptr, at):
    """(sequence, tile of it, its first query, how many it has, split, splits) of an entry of decode_tiles.py's list;
    sequence -1: none."""
    entry = list_ptr + (at + 1) * ENTRY_FIELDS
    sequence, tile = tl.load(entry), tl.load(entry + 1)  # scalars
    first_query, count = tl.load(entry + 2).to(tl.int64), tl.load(entry + 3)  # scalars
    return sequence, tile, first_query, count, tl.load(entry + 5), tl.load(entry + 6)  # scalars


@triton.jit
def _blocks_of_part(first, last, split, parts, BLOCK_N: tl.constexpr):
    """(begin, end) of the blocks of a split of the keys first to last."""
    blocks = tl.cdiv(last, BLOCK_N) - first // BLOCK_N
    share = tl.cdiv(blocks, parts)
    begin = first // BLOCK_N + split * share
    return begin, tl.minimum(begin + share, first // BLOCK_N + blocks)


class _ScoreMods(NamedTuple):
    """What turns q k^T into masked scores."""

    scale: Any
    softcap: Any
    slope: Any  # ALiBi's, in units of log 2, [BLOCK_M]
    left: Any
    right: Any


@triton.jit
def _masked_scores(
    product, position, cols, inside, mods, HAS_SLOPES: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Scores in units of log 2 of queries at these positions and keys `cols`; -inf where a key is not seen."""
    if HAS_SOFTCAP:
        s = (mods.softcap * LOG2E) * tanh(product * (mods.scale / mods.softcap), False)
    else:
        s = product * (mods.scale * LOG2E)
    if HAS_SLOPES:
        s -= mods.slope[:, None] * tl.abs(position[:, None] - cols[None, :]).to(tl.float32)
    visible = inside[None, :]
    if HAS_LEFT:
        visible = visible & (cols[None, :] >= position[:, None] - mods.left)
    if HAS_RIGHT:
        visible = visible & (cols[None, :] <= position[:, None] + mods.right)
    return tl.where(visible, s, float("-inf"))


@triton.jit
def _online_softmax(s, top, total):
    """(weights, factor of earlier sums, new maximum, new sum) of a block of scores."""
    new_top = tl.maximum(top, tl.max(s, axis=1))
    # a row that has seen nothing has the maximum -inf; less 0 its weights are 0, not NaN
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(s - safe[:, None])
    alpha = tl.exp2(top - safe)
    return p, alpha, new_top, total * alpha + tl.sum(p, axis=1)


@triton.jit
def _add_sink(sink, top, total):
    """(factor of earlier sums, new maximum, new sum) of one more score a row, which has no value."""
    new_top = tl.maximum(top, sink)
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    alpha = tl.exp2(top - safe)
    return alpha, new_top, total * alpha + tl.exp2(sink - safe)


@triton.jit
def _normalized(acc, alpha, top, total):
    """(output, LSE in nats) of sums, which lack the last factor alpha; 0 and -inf of rows that see no key."""
    # not total > 0: of NaN an LSE of -inf would make the other parts the result
    seen = total != 0.0
    factor = tl.where(seen, alpha / tl.where(seen, total, 1.0), 0.0)
    tile_out = scale_tile(acc, factor[:, None])
    return tile_out, tl.where(seen, (top + tl.log2(total)) * LN2, float("-inf"))


class _Rows(NamedTuple):
    """The rows of a tile: (query, head) pairs, [BLOCK_M]."""

    batch: Any  # entry of queries and results; of packed ones 0
    first_query: Any
    query: Any  # from the first on
    kv_head: Any
    head: Any
    mask: Any


@triton.jit
def _store_results(
    tile_out, lse, rows, slot, parts, has_keys, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, num_queries, kv_heads,
    ratio, LISTED: tl.constexpr, HEAD_DIM_V: tl.constexpr, PIECES_V: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """To the call's results, or one of several splits to `slot` of the partial ones. LISTED: splits are those of a
    list."""
    heads = kv_heads * ratio
    if parts == 1:
        row = (rows.batch * num_queries + rows.first_query + rows.query) * heads + rows.head
        of_lse = (rows.batch * heads + rows.head) * num_queries + rows.first_query + rows.query
        tl.store(lse_ptr + of_lse, lse, mask=rows.mask)  # [BLOCK_M]
        _store_rows(out_ptr, tile_out, row * HEAD_DIM_V, rows.mask, HEAD_DIM_V, PIECES_V)
    elif partial_ptr is not None:
        if LISTED:
            # by entry: results of `num_queries` rows a slot would be many times those of its own
            row = (slot * kv_heads + rows.kv_head) * BLOCK_M + tl.arange(0, BLOCK_M)
            of_lse = row
        else:
            row = (slot * num_queries + rows.query) * heads + rows.head
            of_lse = (slot * heads + rows.head) * num_queries + rows.query
        tl.store(partial_lse_ptr + of_lse, lse, mask=rows.mask)  # [BLOCK_M]
        # a split without keys leaves nothing: the combination does not read it
        _store_rows(partial_ptr, tile_out, row * HEAD_DIM_V, rows.mask & has_keys, HEAD_DIM_V, PIECES_V)


@kernel(unaligned=SMALL)
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, seqlens_ptr, page_table_ptr, batch_idx_ptr, leftpad_ptr, slopes_ptr, sinks_ptr,
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, parts_ptr, list_ptr,
    batches, num_queries, kv_heads, ratio, num_new, capacity, num_parts, left, right, page_row, slopes_row,
    scale, softcap,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    HEAD_DIM_QK: tl.constexpr, HEAD_DIM_V: tl.constexpr, PIECES_QK: tl.constexpr, PIECES_V: tl.constexpr,
    SHARES_KEYS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    PAGE_SIZE: tl.constexpr, FMA: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One tile of queries, one KV head, one sequence, one split of its keys. Scores are in units of log 2, strides of
    UNIT. With `parts` a sequence has as many as `_schedule_kernel` says, `num_parts` in all, else so many each. With
    `list` (decode_tiles.py) queries are packed, `num_queries` in all."""
    wait_for_kernel_before(STARTS_EARLY)
    if list_ptr is not None:
        kv_head = (tl.program_id(0) % kv_heads).to(tl.int64)
        part = tl.program_id(0) // kv_heads
        if part >= tl.load(list_ptr + LISTED):
            return
        sequence, tile, first_query, count, split, parts = _load_entry(list_ptr, part)
        # rows of no sequence have no keys; addresses by the first one's are safe
        is_sequence, batch, row_batch = sequence >= 0, tl.maximum(sequence, 0).to(tl.int64), kv_head * 0
        slot = part.to(tl.int64)
    else:
        tiles = tl.cdiv(num_queries * ratio, BLOCK_M)
        tile = tl.program_id(0) % tiles
        kv_head = (tl.program_id(0) // tiles % kv_heads).to(tl.int64)
        if parts_ptr is not None:
            part = tl.program_id(1)
            number, split, parts = _load_part(parts_ptr, tile * num_parts + part)
            if number >= batches:
                return
            # results of first splits lie behind those of all others, where the combination finds them
            batch, slot = number.to(tl.int64), tl.where(split == 0, num_parts - batches + number, part).to(tl.int64)
        else:
            batch = (tl.program_id(0) // tiles // kv_heads).to(tl.int64)
            split, parts = tl.program_id(1), num_parts
            slot = split.to(tl.int64) * batches + batch
        is_sequence, row_batch, first_query, count = True, batch, 0, num_queries

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < count * ratio
    query = rows // ratio
    head = kv_head * ratio + rows % ratio
    length, pad = lengths_of(seqlens_ptr, leftpad_ptr, batch, is_sequence, num_new, capacity)
    position = query + (length - count)
    first, last = key_range(length, pad, tile, count, ratio, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_M)
    begin, end = _blocks_of_part(first, last, split, parts, BLOCK_N)

    q_rows = (row_batch * stride_qb + (first_query + query).to(tl.int64) * stride_qs + head * stride_qh) * UNIT
    q = _load_rows(q_ptr, q_rows, row_mask, HEAD_DIM_QK, PIECES_QK, FMA)  # tile of [BLOCK_M, HEAD_DIM_QK]
    acc = zeros_tile(BLOCK_M, PIECES_V)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    slope = tl.zeros([BLOCK_M], tl.float32)
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + batch * slopes_row + head, mask=row_mask, other=0.0) * LOG2E  # [BLOCK_M]
    mods = _ScoreMods(scale, softcap, slope, left, right)

    entry = _entry_of_block(
        page_table_ptr, batch_idx_ptr, batch, begin, first, last, page_row, PAGE_SIZE, BLOCK_N
    )  # fmt: skip
    for block in range(begin, end):
        cols = block * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = (cols >= first) & (cols < last)
        offset = _offset_of_block(block, PAGE_SIZE, BLOCK_N)
        k_rows = (entry * stride_kb + kv_head * stride_kh + offset * stride_ks) * UNIT
        v_rows = (entry * stride_vb + kv_head * stride_vh + offset * stride_vs) * UNIT

        k = _load_rows(k_ptr, k_rows, inside, HEAD_DIM_QK, PIECES_QK, FMA)  # tile of [BLOCK_N, HEAD_DIM_QK]
        s = _products(q, k, FMA, PRECISION)  # [BLOCK_M, BLOCK_N]
        s = _masked_scores(s, position, cols, inside, mods, slopes_ptr is not None, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP)
        p, alpha, top, total = _online_softmax(s, top, total)
        if SHARES_KEYS:
            v = k
        else:
            v = _load_rows(v_ptr, v_rows, inside, HEAD_DIM_V, PIECES_V, FMA)  # tile of [BLOCK_N, HEAD_DIM_V]
        # a block ahead of its keys: keys that wait for a page's id within a step would take stages for it
        if PAGE_SIZE > 0:
            entry = _entry_of_block(
                page_table_ptr, batch_idx_ptr, batch, block + 1, first, last, page_row, PAGE_SIZE, BLOCK_N
            )  # fmt: skip
        acc = _update(acc, alpha, p, v, FMA, PRECISION)  # tile of [BLOCK_M, HEAD_DIM_V]

    alpha = tl.full([BLOCK_M], 1.0, tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=row_mask, other=0.0).to(tl.float32) * LOG2E  # [BLOCK_M]
        # else the combination adds it
        sink = tl.where(is_sequence & (parts == 1), sink, float("-inf"))
        alpha, top, total = _add_sink(sink, top, total)
    tile_out, lse = _normalized(acc, alpha, top, total)
    _store_results(
        tile_out, lse, _Rows(row_batch, first_query, query, kv_head, head, row_mask), slot, parts, begin < end,
        out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, num_queries, kv_heads, ratio,
        list_ptr is not None, HEAD_DIM_V, PIECES_V, BLOCK_M,
    )  # fmt: skip
