"""Kernels of decoding over a KV cache: attention, and the append before it; decode.py has the algorithm."""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.attention.cache_append import (
    cache_entry,
    row_of_entry,
)
from powertrain.ops.attention.combine import PartTable, combine
from powertrain.ops.attention.decode_schedule import (
    LEAST_KEYS,
    KeysSeen,
    key_range,
    lengths_of,
    schedule,
)
from powertrain.ops.attention.decode_tiles import ENTRY_FIELDS, LISTED, TileList
from powertrain.ops.attention.hopper.decode_mla import PLAN as MLA_PLAN
from powertrain.ops.attention.hopper.decode_mla import MlaCall, launch_mla, why_not_mla
from powertrain.ops.attention.hopper.forward_pages import PagedCall, launch_pages, why_not_cache
from powertrain.ops.attention.triton.scores import tanh
from powertrain.ops.attention.triton.sequences import SMALL
from powertrain.ops.attention.triton.tiles import LN2, LOG2E, piece_start, pieces, scale_tile, zeros_tile
from powertrain.ops.early_start import starts_early, wait_for_kernel_before
from powertrain.ops.shapes import cdiv, next_power_of_2
from powertrain.runtime.dispatch import Op
from powertrain.runtime.launch import kernel
from powertrain.runtime.target import Target
from powertrain.runtime.tuning import tunable


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
    """(sequence, which of its parts, how many it has) of an entry of decode_schedule.py's table."""
    of_part = parts_ptr + at * 3
    return tl.load(of_part), tl.load(of_part + 1), tl.load(of_part + 2)  # scalars


@triton.jit
def _load_entry(list_ptr, at):
    """(sequence, tile of it, its first query, how many it has, part, parts) of an entry of decode_tiles.py's list;
    sequence -1: none."""
    entry = list_ptr + (at + 1) * ENTRY_FIELDS
    sequence, tile = tl.load(entry), tl.load(entry + 1)  # scalars
    first_query, count = tl.load(entry + 2).to(tl.int64), tl.load(entry + 3)  # scalars
    return sequence, tile, first_query, count, tl.load(entry + 5), tl.load(entry + 6)  # scalars


@triton.jit
def _blocks_of_part(first, last, split, parts, BLOCK_N: tl.constexpr):
    """(begin, end) of the blocks of a part of the keys first to last."""
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
    seen = total > 0.0
    factor = tl.where(seen, alpha / tl.where(seen, total, 1.0), 0.0)
    tile_out = scale_tile(acc, factor[:, None])
    return tile_out, tl.where(seen, (top + tl.log2(total)) * LN2, float("-inf"))


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
    """One tile of queries, one kv head, one sequence, one part of its keys. Scores are in units of log 2, strides of
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
            # results of first parts lie behind those of all others, where the combination finds them
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
    heads = kv_heads * ratio
    if parts == 1:
        row = (row_batch * num_queries + first_query + query) * heads + head
        of_lse = (row_batch * heads + head) * num_queries + first_query + query
        tl.store(lse_ptr + of_lse, lse, mask=row_mask)  # [BLOCK_M]
        _store_rows(out_ptr, tile_out, row * HEAD_DIM_V, row_mask, HEAD_DIM_V, PIECES_V)
    elif partial_ptr is not None:
        if list_ptr is not None:
            # by entry: results of `num_queries` rows a slot would be many times those of its own
            row = (slot * kv_heads + kv_head) * BLOCK_M + tl.arange(0, BLOCK_M)
            of_lse = row
        else:
            row = (slot * num_queries + query) * heads + head
            of_lse = (slot * heads + head) * num_queries + query
        tl.store(partial_lse_ptr + of_lse, lse, mask=row_mask)  # [BLOCK_M]
        # a part without keys leaves nothing: the combination does not read it
        _store_rows(partial_ptr, tile_out, row * HEAD_DIM_V, row_mask & (begin < end), HEAD_DIM_V, PIECES_V)


class _Plan(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    per_sm: int  # programs that run on one SM at a time
    registers: int = 0  # of a thread at most, for 4 warps, where ptxas would take more than let `per_sm` programs run


@tunable("NVIDIA H200, 2026-11-24")
def _plan(
    rows: int,
    width_qk: int,
    width_v: int,
    shares: bool,
    itemsize: int,
    page_size: int,
    is_short: bool,
    aligned: bool,
    fma: bool,
    target: Target,
) -> _Plan:
    """`rows` of queries a kv head has; widths: of the head dims in pieces; `is_short`: parts of the fewest keys do not
    fill the GPU, however full the cache is; `aligned`: 16-byte loads."""
    # batch 64, 32/8 heads, 8192 keys, bf16, D128 unless said, ms; copying as many bytes takes 0.505 (D64 half, ...):
    #   dense            128 keys 4 warps 3 stages 0.471; 64 keys 0.474 to 0.549; 8 warps the same
    #                    64 keys 4 stages 0.494 (128: 0.491), 16 sequences 0.142 (0.149), 1 long among 31 0.070 (0.079)
    #     4 of 3000      128 keys 3 stages 0.0194; 64 keys 3 stages 0.023: few blocks a part, so many keys at once
    #     D64, D256      256 keys 3 stages 0.244 (128 keys 0.278);  64 keys 3 stages 0.929 of 1.010
    #   pages of 64      64 keys 2 stages 0.498, 3 stages 0.509, 4 stages 0.495; 31 of 500, one of 32768 0.068, 0.067,
    #                    0.070; 32 of 500 to 32k, 28/4 heads 0.181, 0.177, 0.197;   D64 3 stages 0.329, 6 stages 0.340
    #   of 1, 16         32 of 500 to 32k: 64 keys 3 stages 0.350, 0.344; 2 stages 0.364, 0.369; 32 keys 0.355, 0.348;
    #                    D64 64 keys 3 stages 0.334, 4 stages 0.338, 128 keys 0.347
    #   8 or 16 queries  64 keys 4 warps 3 stages 0.473, 0.480; 128 keys 0.500, 0.508; 8 warps 0.53 to 0.66
    #     32 of 500 to 32k, 32 rows, pages of 64   64 keys 4 stages 0.371, 3 stages 0.377; as 64 rows 0.378
    #                       64 rows, pages of 16   32 keys 3 stages, 3 an SM 0.423; 64 keys 0.447; dense 0.381, 0.383
    #   MLA, 128 heads   64 x 64 8 warps 2 stages 0.565, 64 x 32 3 stages 0.658, 32 x 32 0.80 (2 * 73 GFLOP)
    #     16 heads         32 keys 3 stages 0.185, 64 keys 0.187, 8 warps 0.184; 32 of 500 to 32k, pages of 64 and 1:
    #                      0.131, 0.140; 64 keys 0.176, 0.175, 8 warps 0.139, 0.155
    #   float32, 4096 keys   4 rows 64 keys 3 stages 0.93 of 0.505; 16 rows 32 keys 1.65
    key_bytes = (width_qk + (0 if shares else width_v)) * itemsize
    rows = next_power_of_2(rows)
    if fma:
        # float32 products on the CUDA cores: every row counts
        narrow = key_bytes <= 256 * itemsize
        block_m = min(16 if narrow else 4, rows)
        block_n = 16 if not narrow else 64 if block_m <= 4 and target.shared_per_block > 128 << 10 else 32
        stages = max(1, min(3, 1 + (target.shared_per_block - (16 << 10)) // (block_n * key_bytes)))
        return _Plan(block_m, block_n, 4, stages if target.has_async_copy else 1, 2)

    is_wide = width_v > 256
    # 64 rows take wgmma on Hopper, which errs there where values come in by single elements (Triton 3.6, dv of 7 or 16)
    most = 64 if aligned and not (is_wide and not (shares and target.has_wgmma)) else 32
    block_m = max(16, min(most, rows))
    # blocks of keys lie in a page each
    in_pages = page_size > 0 and page_size % 64 == 0
    by_wgmma = block_m == 64 and target.has_wgmma
    # two or three programs on an SM: one begins while the others read
    roomy = target.shared_per_sm > 128 << 10
    if page_size == 0 or is_wide:
        block_n = max(16, min(256 if key_bytes >= 256 else 128, 1 << ((72 << 10) // key_bytes).bit_length() - 1))
        block_n = block_n if block_m == 16 or is_wide else min(block_n, 64)
        stages = 3 if block_m == 16 or not is_wide else 2
        if is_wide and block_m == 16:
            block_n = min(block_n, 32)
        elif key_bytes == 512 and itemsize == 2 and (block_m == 32 or (block_m == 16 and not is_short)):
            block_n, stages = 64, 4
    elif block_m == 16:
        # 64 keys of head dim 256 spill 120 bytes
        fits = key_bytes < 1024 if in_pages else key_bytes < 512 or (key_bytes == 512 and roomy)
        block_n = 64 if fits else 32
        stages = 2 if in_pages and block_n == 64 and key_bytes >= 512 else 3
    else:
        block_n = 32 if by_wgmma and not in_pages and key_bytes >= 512 else 64
        stages = 4 if block_m == 32 and key_bytes <= 512 and roomy else 3

    def shared() -> int:
        # wgmma reads a tile while the next one arrives; other products pass weights from warp to warp
        tiles = max(1, stages - 1 + by_wgmma)
        return block_m * width_qk * itemsize + tiles * block_n * key_bytes + (1024 if by_wgmma else 4096)

    while shared() > target.shared_per_block and stages > 2:
        stages -= 1
    while shared() > target.shared_per_block and block_n > 16:
        block_n //= 2
    num_warps = 8 if block_m * width_v * itemsize >= 1 << 15 else 4
    per_sm = max(1, min(3 if page_size else 2, target.shared_per_sm // shared()))
    # an SM has 65536: pages of 64, one query, 128: 0.482 ms, 184: 0.545; 8 queries, 32 rows, 168: 0.390, 128: 0.406
    registers = 0
    if per_sm >= 3:
        # head dims of several pieces would spill 56 to 270 bytes at 128
        registers = 128 if block_m == 16 and key_bytes in (256, 512) and (in_pages or key_bytes == 256) else 168
    return _Plan(block_m, block_n, num_warps, stages, per_sm, registers)


@functools.lru_cache(maxsize=1024)
def _choose_splits(programs: int, keys: int, per_sm: int, target: Target) -> int:
    """The fewest splits, of 256 keys or more, that fill the last wave of programs nearly as well as any would."""
    slots = target.num_sms * per_sm
    if programs == 0 or (per_sm > 1 and programs >= slots):
        # programs that share an SM hide the last wave
        return 1
    choices = range(1, max(1, min(cdiv(keys, 256), cdiv(2 * slots, programs), 128)) + 1)
    filled = [programs * splits / (cdiv(programs * splits, slots) * slots) for splits in choices]
    return next(splits for splits, share in zip(choices, filled, strict=True) if share >= 0.95 * max(filled))


# queries times heads from which the Hopper kernel for MLA serves. us, one H200, 16 heads, this kernel and the universal
# one: 32 of 500 to 32k keys 127, 131; 64 of 8192 171, 186; fewer were not measured
MLA_LEAST_ROWS = 16


def why_not_hopper(call: MlaCall, target: Target) -> str | None:
    """Why the universal kernel serves a call of decode_attention and not the Hopper kernel for MLA, or None."""
    rows = call.query.shape[1] * call.query.shape[2]
    if rows < MLA_LEAST_ROWS:
        return f"it is for {MLA_LEAST_ROWS} rows (queries times heads) or more, got {rows}"
    return why_not_mla(call, target)


# rows (queries times heads of a kv head) of a sequence, on average, from which the Hopper forward serves: of packed
# queries, and of as many of each sequence, where sequences times kv heads are more than half of the SMs; where they are
# fewer. Below, the universal kernel is as fast or has more parts for the SMs. us, one H100, universal and Hopper: 32
# sequences of 500 to 32k keys in pages H32/8, 1 query 487, 482; 4 508, 491; 8 518, 495; 32 650, 516; 64 1149, 604;
# packed single tokens 507, 496; chunks of 1 to 16 529, 505; H16/16 D64, 8 queries 502, 533; 16 of 8192, 8 queries 200,
# 203; 4 of 3000 H28/4 28, 37; 1 of 131072 203, 215
PACKED_LEAST_ROWS, EQUAL_LEAST_ROWS, FEW_LEAST_ROWS = 1, 16, 128


def why_not_many(call: PagedCall, target: Target, cache_batch_idx: Tensor | None = None) -> str | None:
    """Why the universal kernel serves and not the Hopper forward, or None."""
    kv_heads, batch = max(1, call.key_cache.shape[2]), call.seqlens.shape[0]
    rows = call.query.shape[:-1].numel() // kv_heads
    least = PACKED_LEAST_ROWS if call.query_starts is not None else EQUAL_LEAST_ROWS
    if 2 * batch * kv_heads <= target.num_sms:
        least = FEW_LEAST_ROWS
    if rows < least * batch:
        return f"it is for {least} rows or more a sequence, got {rows} of {batch} sequences"
    return why_not_cache(call, cache_batch_idx, target)


def _decode_outputs(
    query: Tensor, key_cache: Tensor, value_cache: Tensor | None, head_dim_v: int, *_: Any
) -> tuple[Tensor, Tensor]:
    b, sq, h = query.shape[:3]
    return query.new_empty(b, sq, h, head_dim_v), query.new_empty((b, h, sq), dtype=torch.float32)


class _Call(NamedTuple):
    """The arguments of `decode_op`, in the order of its schema."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor | None
    head_dim_v: int
    cache_seqlens: Tensor
    page_table: Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    num_new: int
    left: int
    right: int
    softcap: float
    scale: float
    num_splits: int
    allow_tf32: bool
    query_starts: Tensor | None
    max_queries: int

    @property
    def kv_heads(self) -> int:
        return self.key_cache.shape[2]

    @property
    def ratio(self) -> int:
        """Query heads of a kv head."""
        return self.query.shape[2] // self.kv_heads if self.kv_heads else 1

    @property
    def page_size(self) -> int:
        """0: no pages."""
        return 0 if self.page_table is None else self.key_cache.shape[1]

    @property
    def capacity(self) -> int:
        """The most keys that a sequence may have."""
        return self.key_cache.shape[1] * (1 if self.page_table is None else self.page_table.shape[1])

    @property
    def queries(self) -> int:
        """The most queries of a sequence."""
        return self.query.shape[1] if self.query_starts is None else self.max_queries

    @property
    def seen(self) -> int:
        """The most keys of a sequence that are read: queries are its last positions, so of a window those before."""
        return min(self.capacity, self.left + self.queries) if self.left >= 0 else self.capacity

    @property
    def sees_right(self) -> int:
        """The right bound, or -1 where it bounds nothing: one query a sequence stands at the last key. Packed queries
        keep it, since results must not depend on `max_queries`."""
        return self.right if self.query.shape[1] > 1 else -1

    def keys(self) -> KeysSeen:
        return KeysSeen(
            self.cache_seqlens, self.cache_leftpad, self.num_new, self.capacity, self.left, self.sees_right
        )  # fmt: skip

    def of_mla(self) -> MlaCall:
        return MlaCall(
            self.query, self.key_cache, self.value_cache, self.head_dim_v, self.page_table, self.cache_batch_idx,
            self.cache_leftpad, self.alibi_slopes, self.left, self.softcap, self.scale,
        )  # fmt: skip

    def of_pages(self) -> PagedCall:
        query = self.query if self.query_starts is None else self.query[0]
        return PagedCall(
            query, self.key_cache, self.value_cache, self.query_starts, self.cache_seqlens, self.page_table,
            self.cache_leftpad, self.alibi_slopes, self.sinks, self.left, self.right, self.softcap, self.scale,
            self.num_new,
        )  # fmt: skip


class _Operands(NamedTuple):
    """Queries, keys and values as the universal kernel reads them."""

    value: Tensor
    fma: bool  # products on the CUDA cores, in float32
    pieces_qk: tuple[int, ...]  # powers of 2 that a head dim is the sum of
    pieces_v: tuple[int, ...]
    shares_keys: bool  # the values are the first pieces of the keys
    strides: list[int]  # of query, keys, values, three each
    unit: int  # of the strides

    @staticmethod
    def of(call: _Call, target: Target) -> "_Operands":
        fma = not target.has_tensor_core_dot or (call.query.dtype is torch.float32 and not call.allow_tf32)
        wide, narrow = (pieces(d, 64 if fma else 512) for d in (call.query.shape[-1], call.head_dim_v))
        shares = call.value_cache is None and narrow == wide[: len(narrow)]
        value = call.key_cache if call.value_cache is None else call.value_cache
        strides = [t.stride(dim) for t in (call.query, call.key_cache, value) for dim in range(3)]
        unit = 8 if all(s % 8 == 0 for s in strides) else 1
        return _Operands(value, fma, wide, narrow, shares, [s // unit for s in strides], unit)


def _plan_of(call: _Call, operands: _Operands, target: Target) -> _Plan:
    is_short = call.cache_seqlens.shape[0] * call.kv_heads * cdiv(call.seen, LEAST_KEYS) <= target.num_sms
    return _plan(
        call.queries * call.ratio, sum(operands.pieces_qk), sum(operands.pieces_v), operands.shares_keys,
        call.query.element_size(), call.page_size, is_short, operands.unit == 8, operands.fma, target,
    )  # fmt: skip


class _Work(NamedTuple):
    """The attention kernel's programs, and memory for results of parts."""

    grid: tuple[int, int]
    sequences: int
    slots: int  # parts in all, or of each sequence
    parts: Tensor | None = None
    table: PartTable | None = None
    listed: TileList | None = None
    partial: Tensor | None = None
    partial_lse: Tensor | None = None


def _work_of(call: _Call, out: Tensor, lse: Tensor, tile: tuple[int, int, int], target: Target) -> _Work:
    """`tile`: rows, keys of a block, programs on an SM."""
    query, kv_heads, ratio, keys, seen = call.query, call.kv_heads, call.ratio, call.keys(), call.seen
    b, sq = query.shape[:2]
    programs = kv_heads * cdiv(sq * ratio, tile[0])
    if call.query_starts is not None:
        listed = TileList.of(call.query_starts, keys, sq, ratio, kv_heads, seen, tile, target)
        partial = query.new_empty((listed.slots, kv_heads, tile[0], out.shape[-1]), dtype=torch.float32)
        partial_lse = query.new_empty(partial.shape[:-1], dtype=torch.float32)
        return _Work((kv_heads * listed.most, 1), b, listed.most, None, None, listed, partial, partial_lse)
    parts = table = None
    # parts are the grid's second dim, of 65535 at most; so many sequences fill a GPU whole
    if call.num_splits == 0 and 1 < b <= 1 << 15:
        parts, table = schedule(keys, b, sq, ratio, programs, seen, tile, target)
        shape: tuple[int, ...] = (parts.shape[1],)
        grid = programs, parts.shape[1]
    else:
        num_splits = call.num_splits or _choose_splits(b * programs, seen, tile[2], target)
        grid, shape = (b * programs, num_splits), (num_splits, b)
        if num_splits == 1:
            return _Work(grid, b, 1)
    partial = query.new_empty((*shape, *out.shape[1:]), dtype=torch.float32)
    partial_lse = query.new_empty((*shape, *lse.shape[1:]), dtype=torch.float32)
    return _Work(grid, b, shape[0], parts, table, None, partial, partial_lse)


def _launch_universal(
    call: _Call, operands: _Operands, plan: _Plan, work: _Work, out: Tensor, lse: Tensor, target: Target
) -> None:
    table, slopes = call.page_table, call.alibi_slopes
    sq, h, head_dim_qk = call.query.shape[1:]
    _decode_kernel[work.grid](
        call.query, call.key_cache, operands.value, call.cache_seqlens, table, call.cache_batch_idx,
        call.cache_leftpad, slopes, call.sinks, out, lse, work.partial, work.partial_lse, work.parts,
        work.listed and work.listed.entries, work.sequences, sq, call.kv_heads, call.ratio, call.num_new, call.capacity,
        work.slots, call.left, call.right, 0 if table is None else table.stride(0),
        h if slopes is not None and slopes.dim() == 2 else 0, call.scale, call.softcap, *operands.strides,
        HEAD_DIM_QK=head_dim_qk, HEAD_DIM_V=call.head_dim_v, PIECES_QK=operands.pieces_qk,
        PIECES_V=operands.pieces_v, SHARES_KEYS=operands.shares_keys, HAS_LEFT=call.left >= 0,
        HAS_RIGHT=call.sees_right >= 0, HAS_SOFTCAP=call.softcap > 0, PAGE_SIZE=call.page_size, FMA=operands.fma,
        PRECISION="tf32" if call.allow_tf32 else "ieee", UNIT=operands.unit, BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n, STARTS_EARLY=starts_early(target), num_warps=plan.num_warps, num_stages=plan.num_stages,
        maxnreg=plan.registers if plan.registers and plan.num_warps == 4 else None,
    )  # fmt: skip


def _decode(*arguments: Any) -> tuple[Tensor, Tensor]:
    """(out [B, S, H, E], lse [B, H, S]) of a `_Call`; of packed queries B is 1."""
    call = _Call(*arguments)
    target = Target.of(call.query.device)
    many = call.of_pages()
    if call.num_splits == 0 and why_not_many(many, target, call.cache_batch_idx) is None:
        out, lse = launch_pages(many, call.queries, target)
        return (out, lse) if call.query_starts is None else (out[None], lse[None])
    out, lse = _decode_outputs(*call)
    mla = call.of_mla()
    if call.query_starts is None and why_not_hopper(mla, target) is None:
        work = _work_of(call, out, lse, MLA_PLAN, target)
        launch_mla(
            mla, call.cache_seqlens, call.sinks, out, lse, work.partial, work.partial_lse, work.parts, work.grid,
            work.slots, call.num_new, call.sees_right, target,
        )  # fmt: skip
    else:
        operands = _Operands.of(call, target)
        plan = _plan_of(call, operands, target)
        work = _work_of(call, out, lse, (plan.block_m, plan.block_n, plan.per_sm), target)
        _launch_universal(call, operands, plan, work, out, lse, target)
    if work.partial is not None and work.partial_lse is not None:
        if work.listed is not None:
            work.listed.combine(work.partial, work.partial_lse, call.sinks, out, lse, call.kv_heads)
        else:
            combine(work.partial, work.partial_lse, call.sinks, out, lse, out.stride()[:3], work.table)
    return out, lse


decode_op = Op(
    "decode_attention(Tensor query, Tensor key_cache, Tensor? value_cache, int head_dim_v, Tensor cache_seqlens, "
    "Tensor? page_table, Tensor? cache_batch_idx, Tensor? cache_leftpad, Tensor? alibi_slopes, Tensor? sinks, "
    "SymInt num_new, SymInt left, SymInt right, float softcap, float scale, int num_splits, bool allow_tf32, "
    "Tensor? query_starts, SymInt max_queries) "
    "-> (Tensor, Tensor)",
    _decode,
    _decode_outputs,
)
