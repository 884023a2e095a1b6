"""The scheduler of tiles of queries over a KV cache: a list of the tiles, and of the splits over keys of long tiles;
and the kernel that combines the results of splits.

Queries are packed [T, H, D], with any number per sequence (for example a chunk of a prompt and single new tokens), or
[B, S, H, D], with the same number for each. A tile has BLOCK_M rows of one sequence; a row is a query and one of the
query heads of a KV head. With packed queries the host knows only that there are at most cdiv(T * ratio, BLOCK_M) + B +
2 tiles. The device finds the sequence and the keys of each tile, splits the keys of long tiles, as decode_schedule.py
does for sequences, and writes a list of splits and unsplit tiles, the longest first. One kernel with one program does
this for up to 2048 tiles (_few_tiles_kernel), two kernels for more (_tiles_kernel, _list_kernel).

No other kernel runs at the same time as the list's. A call with few sequences takes little longer than the SMs need to
fetch its kernels' code, so _few_tiles_kernel is written to be short. The float32 results of a split are stored at the
index of its entry in the list: 4 bytes per row and channel, for each split.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.attention.combine import add_parts, rows_of
from powertrain.ops.attention.decode_schedule import (
    LEAST_KEYS,
    KeysSeen,
    choose_parts,
    extra_parts,
    key_range,
    lengths_of,
    safe_share,
    share_of,
    smallest_share,
)
from powertrain.ops.attention.decode_waves import share_by_waves
from powertrain.ops.attention.triton.sequences import SMALL, sequence_span
from powertrain.ops.attention.triton.tiles import LN2, LOG2E
from powertrain.ops.early_start import starts_early, wait_for_kernel_before
from powertrain.ops.shapes import cdiv, next_power_of_2
from powertrain.runtime.launch import kernel
from powertrain.runtime.target import Target

# fields of a tile: sequence (-1: none, the rows are 0), index of the tile in it, the sequence's first query, number of
# queries and number of keys; then the blocks of keys that the tile sees, -1 for a tile without rows
TILE_FIELDS = tl.constexpr(6)
_BLOCKS = tl.constexpr(5)
# fields of a list entry: the first five of its tile, index of the split, number of splits, entry of the second split
ENTRY_FIELDS = tl.constexpr(8)
# fields of the list's first row: the number of entries; how many of them are splits beyond a tile's first, which come
# first; how many are the first splits of split tiles, which come next
LISTED, EXTRA, CUT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_BLOCK_T = 128  # tiles per program of _tiles_kernel
_MOST_LISTED = 1024  # tiles that _list_kernel handles at a time
_COMBINING = 8  # programs per SM of the kernel that combines
_MOST_IN_ONE = 2048  # tiles that _few_tiles_kernel handles


@triton.jit
def _count_up_to(value, ascending, COUNT: tl.constexpr):
    """How many numbers of `ascending` [COUNT], a power of 2, are at most `value`; fewer than all. A binary search."""
    found = tl.zeros_like(value)
    for i in tl.static_range(COUNT.bit_length() - 1):
        half = COUNT >> (i + 1)
        found += tl.where(tl.gather(ascending, found + (half - 1), 0) <= value, half, 0)
    return found


@triton.jit
def _sequences_of(slot, starts_ptr, batches, ratio, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr):
    """The sequence of each slot: -1 before the first, `batches` beyond the last. Sequence n owns the slots from
    cdiv(starts[n] * ratio, BLOCK_M) + n + 1 on. There are fewer starts than BLOCK_T slots, so all are read at once:
    dependent reads would take longer than the search."""
    n = tl.arange(0, BLOCK_T)
    start = tl.load(starts_ptr + n, mask=n <= batches, other=0)  # [BLOCK_T]
    first = tl.where(n <= batches, tl.cdiv(start * ratio, BLOCK_M) + n + 1, 1 << 30)
    return _count_up_to(slot, first, BLOCK_T) - 1


@triton.jit
def _searched_sequences(slot, starts_ptr, batches, ratio, steps, BLOCK_M: tl.constexpr):
    """The same by a binary search of `steps` steps in memory."""
    low = tl.zeros_like(slot) - 1
    high = low + batches + 1
    for _ in range(steps):
        middle = (low + high + 1) // 2
        searches = low < high
        start = tl.load(starts_ptr + tl.maximum(middle, 0), mask=searches, other=0)
        is_before = tl.cdiv(start * ratio, BLOCK_M) + middle + 1 <= slot
        low = tl.where(searches & is_before, middle, low)
        high = tl.where(searches & (is_before == 0), middle - 1, high)
    return low


@triton.jit
def _tiles_at(
    slot, starts_ptr, seqlens_ptr, leftpad_ptr, batches, queries, ratio, num_new, capacity, left, right, steps,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The tile of each slot: sequence (-1: none, without keys), index of the tile in it, the sequence's first query,
    its number of queries and of keys, and the blocks of keys that the tile sees (-1: the tile has no rows). Without
    starts each sequence has `queries` queries, stored one sequence after another. `steps`: of the binary search for a
    tile's sequence; None: all starts are read."""
    if starts_ptr is None:
        of_each = tl.cdiv(queries * ratio, BLOCK_M)
        sequence, tile = slot // of_each, slot % of_each
        first_query, count = sequence * queries, tl.zeros_like(slot) + queries
    else:
        if steps is None:
            found = _sequences_of(slot, starts_ptr, batches, ratio, BLOCK_M, BLOCK_T)
        else:
            found = _searched_sequences(slot, starts_ptr, batches, ratio, steps, BLOCK_M)
        # of `sequence_span`: rows behind the last sequence, and before the first
        sequence = tl.where(found < 0, batches + 1, found)
        first_query, _, count = sequence_span(starts_ptr, None, sequence, batches, queries)
        tile = slot - tl.where(found < 0, 0, tl.cdiv(first_query * ratio, BLOCK_M) + found + 1)
    inside = sequence < batches
    length, pad = lengths_of(seqlens_ptr, leftpad_ptr, sequence, inside, num_new, capacity)
    first, last = key_range(length, pad, tile, count, ratio, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_M)
    blocks = tl.where(inside, tl.cdiv(last, BLOCK_N) - first // BLOCK_N, 0)
    blocks = tl.where(tile * BLOCK_M < count * ratio, blocks, -1)
    return tl.where(inside, sequence, -1), tile, first_query, count, tl.where(inside, length, 0), blocks


@kernel(unaligned=SMALL)
def _tiles_kernel(
    starts_ptr, seqlens_ptr, leftpad_ptr, tiles_ptr,
    tiles, batches, queries, ratio, num_new, capacity, left, right, steps,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """tiles [tiles, TILE_FIELDS] int32, of `_tiles_at`."""
    wait_for_kernel_before(STARTS_EARLY)
    slot = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    sequence, tile, first_query, count, length, blocks = _tiles_at(
        slot, starts_ptr, seqlens_ptr, leftpad_ptr, batches, queries, ratio, num_new, capacity, left, right, steps,
        HAS_LEFT, HAS_RIGHT, BLOCK_M, BLOCK_N, BLOCK_T,
    )  # fmt: skip
    to, mask = tiles_ptr + slot * TILE_FIELDS, slot < tiles
    tl.store(to, sequence, mask=mask)  # [BLOCK_T]
    tl.store(to + 1, tile, mask=mask)  # [BLOCK_T]
    tl.store(to + 2, first_query, mask=mask)  # [BLOCK_T]
    tl.store(to + 3, count, mask=mask)  # [BLOCK_T]
    tl.store(to + 4, length, mask=mask)  # [BLOCK_T]
    tl.store(to + _BLOCKS, blocks, mask=mask)  # [BLOCK_T]


@triton.jit
def _shares_of_rounds(total, longest, at_once, least, ROUNDS: tl.constexpr):
    """The candidate sizes of splits, in blocks of keys, for `_first_to_end`: the work of a program divided by 1, 2, ...
    ROUNDS, or multiplied by 1.25, 1.5, ..., and the size of the longest tile, with which no tile is split."""
    COUNT: tl.constexpr = 2 << ROUNDS.bit_length()
    n = tl.arange(0, COUNT)
    of_each = tl.cdiv(total, at_once)
    share = tl.where(n < ROUNDS, of_each // (n + 1), (of_each * (5 + n - ROUNDS) + 2) // 4)
    return tl.maximum(tl.where(n < COUNT - 1, tl.minimum(tl.maximum(share, least), longest), longest), 1)


@triton.jit
def _parts_by_share(blocks, share):
    """For each size `share` of splits: the number of splits beyond each tile's first, and the number of split tiles. As
    `extra_parts`, except for the rounding of a quotient."""
    share = share[:, None].to(tl.float32)
    more = tl.maximum(tl.ceil((blocks[None, :] - 0.25 * share) / share), 1.0).to(tl.int32) - 1
    return tl.sum(more, 1), tl.sum((more > 0).to(tl.int32), 1)


@triton.jit
def _first_to_end(share, extra, cut, total, longest, some, at_once, of_results):
    """The size `share` with which the last program ends first; programs take entries from a counter, the longest first.

    The time of the last program is estimated in blocks of keys. An entry costs its blocks and two more; the results of
    a split cost `of_results` blocks; the kernel that combines them costs one block, and a sixth of a block for each
    split of the longest tile. If there are more entries than run at once, the last program ends later than the mean, by
    a fraction of the longest and of the mean entry. `extra`, `cut`: of `_parts_by_share`."""
    entries = some + extra
    is_cut = (extra > 0).to(tl.float32)
    parts = tl.cdiv(longest - share // 4, share)
    longest = tl.minimum(share + share // 4, longest)
    end = (total + 2 * entries + of_results * (extra + cut)) / at_once
    end += tl.where(entries > at_once, 0.15 * longest + 0.6 * total / tl.maximum(entries, 1), 0.0)
    end = tl.maximum(end, longest + 2 + of_results * is_cut) + is_cut * (1 + parts / 6)
    return tl.max(tl.where(end <= tl.min(end), share, 0))


_LEVELS = tl.constexpr(8)  # classes of lengths by which unsplit tiles are sorted


@triton.jit
def _level_of(blocks, is_whole, share):
    """The length class of each unsplit tile, in eighths of the longest unsplit length, the longest first: a one in that
    column of [BLOCK_T, _LEVELS]; a row of zeros for a split tile."""
    longest = share + share // 4 + 1
    level = _LEVELS - 1 - tl.minimum(blocks * _LEVELS // longest, _LEVELS - 1)
    return ((level[:, None] == tl.arange(0, _LEVELS)[None, :]) & is_whole[:, None]).to(tl.int32)


@triton.jit
def _store_entries(
    list_ptr, at, sequence, tile, first_query, count, length, part, parts, second, mask, COUNT: tl.constexpr
):  # fmt: skip
    """Store entries `at` of the list, from integers [COUNT]. All fields of an entry are stored by one instruction: with
    one store per field, whose addresses are 32 bytes apart, 430 more entries took 8 us more on one H200."""
    # the dim that is joined last is the lowest bit of a field's number
    even = tl.join(tl.join(sequence, length), tl.join(first_query, parts))
    odd = tl.join(tl.join(tile, part), tl.join(count, second))
    fields = tl.reshape(tl.join(even, odd), (COUNT, ENTRY_FIELDS))
    to = list_ptr + ((at + 1) * ENTRY_FIELDS)[:, None] + tl.arange(0, ENTRY_FIELDS)[None, :]
    tl.store(to, fields, mask=mask[:, None])  # [COUNT, ENTRY_FIELDS]


@triton.jit
def _store_parts(list_ptr, sequence, tile, first_query, count, length, more, before, BLOCK_T: tl.constexpr):
    """Store the entries of splits beyond the first, `more` for each tile, from entry `before` on."""
    ends, used = tl.cumsum(more), tl.sum(more)
    for start in range(0, used, BLOCK_T):
        at = start + tl.arange(0, BLOCK_T)
        # the entry's tile: the number of tiles whose splits end at this entry or before it
        of = _count_up_to(at, ends, BLOCK_T)
        parts = tl.gather(more, of, 0)
        second = tl.gather(ends, of, 0) - parts
        _store_entries(
            list_ptr, before + at, tl.gather(sequence, of, 0), tl.gather(tile, of, 0), tl.gather(first_query, of, 0),
            tl.gather(count, of, 0), tl.gather(length, of, 0), at - second + 1, parts + 1, before + second, at < used,
            BLOCK_T,
        )  # fmt: skip


@triton.jit
def _counts(blocks, share):
    """(splits beyond a tile's first, tiles that are split, unsplit tiles of each level) of some tiles."""
    more = extra_parts(blocks, share, share // 4)
    whole = _level_of(blocks, (more == 0) & (blocks >= 0), share)  # [tiles, _LEVELS]
    return tl.sum(more), tl.sum((more > 0).to(tl.int32)), tl.sum(whole, 0)


@triton.jit
def _store_header(list_ptr, used, cut, of_levels):
    """Store the list's first row, from the counts of all tiles; returns the place of each level's first unsplit
    tile."""
    tl.store(list_ptr + LISTED, used + cut + tl.sum(of_levels))
    tl.store(list_ptr + EXTRA, used)
    tl.store(list_ptr + CUT, cut)
    return tl.cumsum(of_levels) - of_levels


@triton.jit
def _store_tiles(
    list_ptr, sequence, tile, first_query, count, length, blocks, share, used, cut, before, cut_before, levels_before,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Store the entries of some tiles. `used`, `cut`: counts of all tiles; the last three arguments: of the tiles
    before."""
    more = extra_parts(blocks, share, share // 4)
    is_cut = (more > 0).to(tl.int32)
    second = before + tl.cumsum(more) - more
    rank = cut_before + tl.cumsum(is_cut) - is_cut
    level = _level_of(blocks, (more == 0) & (blocks >= 0), share)  # [tiles, _LEVELS]
    place = tl.sum(level * (levels_before[None, :] + tl.cumsum(level, 0) - 1), 1)
    # the first splits of split tiles are as long as the extra ones: they come before unsplit tiles
    at = used + tl.where(is_cut > 0, rank, cut + place)
    _store_entries(
        list_ptr, at, sequence, tile, first_query, count, length, tl.zeros_like(tile), more + 1, second, blocks >= 0,
        BLOCK_T,
    )  # fmt: skip
    _store_parts(list_ptr, sequence, tile, first_query, count, length, more, before, BLOCK_T)


@triton.jit
def _places(blocks, is_cut, share, BLOCK_T: tl.constexpr):
    """Places of the tiles that have rows: first the split tiles, then the unsplit ones by levels as in `_level_of`. The
    counts of several groups are bit fields of one 64-bit integer, so that one scan adds them all. This keeps the code
    short: a program that runs alone waits for its code to be fetched."""
    GROUPS: tl.constexpr = 1 + _LEVELS
    BITS: tl.constexpr = BLOCK_T.bit_length()
    FIELDS: tl.constexpr = min(GROUPS, 63 // BITS)
    level = _LEVELS - tl.minimum(blocks * _LEVELS // (share + share // 4 + 1), _LEVELS - 1)
    group = tl.where(is_cut, 0, level)
    place = tl.zeros_like(blocks)
    before = 0  # tiles of the groups of earlier integers
    for i in tl.static_range((GROUPS + FIELDS - 1) // FIELDS):
        is_here = (blocks >= 0) & (group >= i * FIELDS) & (group < (i + 1) * FIELDS)
        shift = tl.where(is_here, group - i * FIELDS, 0) * BITS
        one = is_here.to(tl.int64) << shift
        total = tl.sum(one)
        # of all groups before: sums of the counts below
        ahead = tl.zeros_like(total)
        for field in tl.static_range(1, FIELDS):
            ahead += total << (BITS * field)
        count = ((ahead + tl.cumsum(one)) >> shift) & ((1 << BITS) - 1)
        place += tl.where(is_here, before + count.to(tl.int32) - 1, 0)
        before += (((ahead + total) >> (BITS * (FIELDS - 1))) & ((1 << BITS) - 1)).to(tl.int32)
    return place


@kernel(unaligned=SMALL)
def _few_tiles_kernel(
    starts_ptr, seqlens_ptr, leftpad_ptr, list_ptr,
    tiles, batches, queries, ratio, num_new, capacity, left, right, extra, at_once, least, of_results,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    FILLS_ONCE: tl.constexpr, ROUNDS: tl.constexpr, BY_WAVES: tl.constexpr, BLOCK_T: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """`_tiles_kernel` and `_list_kernel` in one program, which holds all tiles. FILLS_ONCE, with ROUNDS 0: all splits
    run at once, so there are at most `at_once`."""
    wait_for_kernel_before(STARTS_EARLY)
    slot = tl.arange(0, BLOCK_T)
    sequence, tile, first_query, count, length, blocks = _tiles_at(
        slot, starts_ptr, seqlens_ptr, leftpad_ptr, batches, queries, ratio, num_new, capacity, left, right, None,
        HAS_LEFT, HAS_RIGHT, BLOCK_M, BLOCK_N, BLOCK_T,
    )  # fmt: skip
    blocks = tl.where(slot < tiles, blocks, -1)
    total, longest = tl.sum(tl.maximum(blocks, 0)), tl.maximum(tl.max(blocks), 1)
    some = tl.sum((blocks > 0).to(tl.int32))
    if BY_WAVES:
        share, slack = share_by_waves(blocks, total, longest, some, extra, at_once, least, of_results, ROUNDS)
    elif FILLS_ONCE:
        rows = tl.sum((blocks >= 0).to(tl.int32))
        share = smallest_share(blocks, total, rows, at_once - rows, least)
        slack = share * 0
    else:
        if ROUNDS > 0:
            shares = _shares_of_rounds(total, longest, at_once, least, ROUNDS)
            more, tiles_cut = _parts_by_share(blocks, shares)
            share = _first_to_end(shares, more, tiles_cut, total, longest, some, at_once, of_results)
        else:
            share = share_of(total, longest, some, at_once, least)
        share = tl.maximum(share, safe_share(total, extra, least))
        slack = share // 4
    # levels are eighths of it
    share = tl.minimum(share, longest)

    more = extra_parts(blocks, share, slack)
    ends = tl.cumsum(more)
    used = tl.sum(more)
    tl.store(list_ptr + LISTED, used + tl.sum((blocks >= 0).to(tl.int32)))
    tl.store(list_ptr + EXTRA, used)
    tl.store(list_ptr + CUT, tl.sum((more > 0).to(tl.int32)))
    # the first splits of split tiles are as long as the extra ones: they come before unsplit tiles
    at = used + _places(blocks, more > 0, share, BLOCK_T)
    _store_entries(
        list_ptr, at, sequence, tile, first_query, count, length, tl.zeros_like(tile), more + 1, ends - more,
        blocks >= 0, BLOCK_T,
    )  # fmt: skip
    _store_parts(list_ptr, sequence, tile, first_query, count, length, more, 0, BLOCK_T)


@triton.jit
def _blocks_at(tiles_ptr, tile, tiles):
    return tl.load(tiles_ptr + tile * TILE_FIELDS + _BLOCKS, mask=tile < tiles, other=-1)  # the shape of tile


@triton.jit
def _field_at(tiles_ptr, tile, tiles, FIELD: tl.constexpr):
    return tl.load(tiles_ptr + tile * TILE_FIELDS + FIELD, mask=tile < tiles, other=0)  # the shape of tile


@kernel()
def _list_kernel(
    tiles_ptr, list_ptr, tiles, extra, at_once, least, of_results,
    ROUNDS: tl.constexpr, BLOCK_T: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """Write list [1 + extra + tiles, ENTRY_FIELDS] int32, in one program: at most `extra` splits beyond a tile's first,
    then the first splits of those tiles, then unsplit tiles, by eighths of the longest. Tiles without rows have no
    entry. Splits have about the same size. `at_once`: splits that run at the same time; `least`: blocks of the smallest
    split; `of_results`: the cost of a split's results, in blocks. ROUNDS 0: programs do not take splits from a
    counter."""
    wait_for_kernel_before(STARTS_EARLY)
    total = 0
    longest = 1
    some = 0
    for start in range(0, tiles, BLOCK_T):
        blocks = _blocks_at(tiles_ptr, start + tl.arange(0, BLOCK_T), tiles)
        total += tl.sum(tl.maximum(blocks, 0))
        longest = tl.maximum(longest, tl.max(blocks))
        some += tl.sum((blocks > 0).to(tl.int32))
    if ROUNDS > 0:
        shares = _shares_of_rounds(total, longest, at_once, least, ROUNDS)
        more = tl.zeros_like(shares)
        tiles_cut = tl.zeros_like(shares)
        for start in range(0, tiles, BLOCK_T):
            blocks = _blocks_at(tiles_ptr, start + tl.arange(0, BLOCK_T), tiles)
            its_more, its_cut = _parts_by_share(blocks, shares)
            more += its_more
            tiles_cut += its_cut
        share = _first_to_end(shares, more, tiles_cut, total, longest, some, at_once, of_results)
    else:
        share = share_of(total, longest, some, at_once, least)
    # levels are eighths of it
    share = tl.minimum(tl.maximum(share, safe_share(total, extra, least)), longest)

    used = 0
    cut = 0
    of_levels = tl.zeros([_LEVELS], tl.int32)
    for start in range(0, tiles, BLOCK_T):
        blocks = _blocks_at(tiles_ptr, start + tl.arange(0, BLOCK_T), tiles)
        its_used, its_cut, its_levels = _counts(blocks, share)
        used += its_used
        cut += its_cut
        of_levels += its_levels
    levels_before = _store_header(list_ptr, used, cut, of_levels)

    before = 0
    cut_before = 0
    for start in range(0, tiles, BLOCK_T):
        at = start + tl.arange(0, BLOCK_T)
        blocks = _blocks_at(tiles_ptr, at, tiles)
        _store_tiles(
            list_ptr, _field_at(tiles_ptr, at, tiles, 0), _field_at(tiles_ptr, at, tiles, 1),
            _field_at(tiles_ptr, at, tiles, 2), _field_at(tiles_ptr, at, tiles, 3), _field_at(tiles_ptr, at, tiles, 4),
            blocks, share, used, cut, before, cut_before, levels_before, BLOCK_T,
        )  # fmt: skip
        its_used, its_cut, its_levels = _counts(blocks, share)
        before += its_used
        cut_before += its_cut
        levels_before += its_levels


@kernel(unaligned=SMALL)
def _combine_tiles_kernel(
    partial_ptr, partial_lse_ptr, sinks_ptr, out_ptr, lse_ptr, list_ptr,
    queries, groups, ratio, heads, heads_per_kv, per_tile, stride, stride_lse,
    EQUAL: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
    AHEAD: tl.constexpr, BLOCK_D: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """For BLOCK_R rows of a split tile and some channels: the sum of the splits' results, weighted by exp(lse - max).
    AHEAD blocks of BLOCK_S splits are loaded at a time. `per_tile` programs share the rows of a tile. A KV head has
    `heads_per_kv` query heads; each of the `groups` has `ratio` of them, the last one of a KV head maybe fewer.
    Strides: from group to group of results. EQUAL: lse is [B, heads, queries], else [heads, queries]."""
    wait_for_kernel_before(STARTS_EARLY)
    extra = tl.load(list_ptr + EXTRA)  # scalar
    of_kv = tl.cdiv(heads_per_kv, ratio)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM_V
    # unsplit tiles need no combination
    for item in range(tl.program_id(0), tl.load(list_ptr + CUT) * groups * per_tile, tl.num_programs(0)):
        pair = item // per_tile
        number = pair // groups
        group, block = pair - number * groups, item - pair * per_tile
        first = extra + number
        entry = list_ptr + (first + 1) * ENTRY_FIELDS
        sequence, tile = tl.load(entry), tl.load(entry + 1)  # scalars
        start, count = tl.load(entry + 2), tl.load(entry + 3)  # scalars
        num_parts, second = tl.load(entry + _BLOCKS + 1), tl.load(entry + _BLOCKS + 2)  # scalars
        end = tl.minimum(count * ratio - tile * BLOCK_M, BLOCK_M)  # of the tile's rows
        for row in range(block * BLOCK_R, end, per_tile * BLOCK_R):
            # rows beyond the end read the last row
            local = row + tl.arange(0, BLOCK_R)
            near = tl.minimum(local, end - 1)
            lane = group % of_kv * ratio + (tile * BLOCK_M + near) % ratio
            query, head = (tile * BLOCK_M + near) // ratio, group // of_kv * heads_per_kv + lane
            is_row = (local < end) & (lane < heads_per_kv)
            top = tl.full([BLOCK_R], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_R], tl.float32)
            if sinks_ptr is not None:
                # the sink is one more score of the row, added once
                top = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32) * LOG2E  # [BLOCK_R]
                total = tl.where(top > float("-inf"), 1.0, 0.0)
            acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
            for begin in range(0, num_parts, BLOCK_S * AHEAD):
                lses = ()
                parts = ()
                # all loads are issued before the first is used
                for i in tl.static_range(AHEAD):
                    part = begin + i * BLOCK_S + tl.arange(0, BLOCK_S)
                    is_part = part < num_parts
                    # splits beyond the last read the first one's results
                    slot = tl.where((part == 0) | (is_part == 0), first, second + part - 1) * groups + group
                    lse = tl.load(partial_lse_ptr + (slot * stride_lse)[:, None] + near[None, :])  # [BLOCK_S, BLOCK_R]
                    lses += (tl.where(is_part[:, None], lse * LOG2E, float("-inf")),)  # type: ignore[assignment]
                    of_rows = near[:, None] * HEAD_DIM_V + dims[None, :]
                    at = partial_ptr + (slot * stride)[:, None, None] + of_rows[None, :, :]
                    if HEAD_DIM_V % BLOCK_D == 0:
                        parts += (tl.load(at),)  # type: ignore[assignment]
                    else:
                        parts += (tl.load(at, mask=is_dim[None, None, :], other=0.0),)  # type: ignore[assignment]
                acc, total, top = add_parts(acc, total, top, lses, parts, AHEAD)
            # a row that no split saw has total 0 and gives 0
            divisor = tl.where(total != 0.0, total, 1.0)
            acc = acc * (1.0 / divisor)[:, None]
            to = out_ptr + ((start + query).to(tl.int64) * heads + head)[:, None] * HEAD_DIM_V + dims[None, :]
            tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_dim[None, :])  # [BLOCK_R, BLOCK_D]
            result = tl.where(total != 0.0, (top + tl.log2(divisor)) * LN2, float("-inf"))
            if EQUAL:
                of_row = (sequence.to(tl.int64) * heads + head) * queries + query
            else:
                of_row = head.to(tl.int64) * queries + (start + query)
            tl.store(lse_ptr + of_row, result, mask=is_row)  # [BLOCK_R]


def size_of_part(rows: int, head_dim_v: int) -> int:
    """Elements of a split's LSE, padded to a multiple of 4 rows to align what follows, and of its results."""
    return cdiv(rows, 4) * 4 + rows * head_dim_v


def results_in(memory: Tensor, rows: int, head_dim_v: int) -> tuple[Tensor, Tensor]:
    """`partial` and `partial_lse` of `combine` in one tensor [slots, G, size_of_part]."""
    slots, groups, size = memory.shape
    # as_strided, because views may give dims of size 1 any stride
    shape, strides = (slots, groups, rows, head_dim_v), (groups * size, size, head_dim_v, 1)
    results = memory.as_strided(shape, strides, size - rows * head_dim_v)
    return results, memory.as_strided(shape[:3], (groups * size, size, 1), 0)


class TileList(NamedTuple):
    """Tiles of queries and splits over their keys, in the order in which programs take them."""

    entries: Tensor  # [1 + N, ENTRY_FIELDS] int32: a row of counts (LISTED, EXTRA, CUT), then N entries
    slots: int  # the number of first entries that have memory for a split's results
    cut: int  # the most tiles that are split
    sequences: int

    @property
    def most(self) -> int:
        """The most entries."""
        return self.entries.shape[0] - 1

    @staticmethod
    def of(
        starts: Tensor | None, keys: KeysSeen, queries: int, ratio: int, groups: int, seen: int,
        plan: tuple[int, int, int], target: Target, rounds: int = 0, least_keys: int | None = None,
        result_keys: int = 0, by_waves: bool = False, entries: Tensor | None = None,
    ) -> "TileList":  # fmt: skip
        """The list for packed queries (`starts` given, `queries` in all), or for `queries` of each sequence.

        ratio       heads of each query in a tile
        groups      groups of `ratio` heads: each entry is computed once for each group
        seen, plan  as in `schedule`
        rounds      if programs take entries from a counter: the most splits that a program's work is divided into
        least_keys  keys of the smallest split
        result_keys with rounds: keys that take as long as storing and combining the results of a split
        by_waves    with rounds: the tensor cores are the limit, not memory (decode_waves.py)
        entries     of an earlier call with these arguments; None: they are made
        """
        batch, (block_m, block_n, per_sm), device = keys.seqlens.shape[0], plan, keys.seqlens.device
        count = cdiv(queries * ratio, block_m)
        # one partly filled tile per sequence, one before the first row and one beyond the last
        count = count * batch if starts is None else count + batch + 2
        least = cdiv(least_keys or LEAST_KEYS, block_n)
        if rounds:
            at_once, fills_once = max(1, target.num_sms * per_sm // groups), False
            # one round more, because sizes are rounded down
            extra = max(1, min(count * cdiv(seen, least * block_n), (rounds + 1) * at_once))
        else:
            extra, at_once, fills_once = choose_parts(count, groups, seen, per_sm, target)
        # each split tile has at least one split beyond its first
        cut = min(extra, count)
        slots = extra + count if fills_once else extra + cut
        if entries is not None:
            return TileList(entries, slots, cut, batch)
        of_tiles = batch, queries, ratio, keys.num_new, keys.capacity, keys.left, keys.right
        of_parts = extra, at_once, least, result_keys / block_n
        masks = {
            "HAS_LEFT": keys.left >= 0, "HAS_RIGHT": keys.right >= 0, "BLOCK_M": block_m, "BLOCK_N": block_n,
            "STARTS_EARLY": starts_early(target),
        }  # fmt: skip
        entries = torch.empty((1 + extra + count, ENTRY_FIELDS.value), dtype=torch.int32, device=device)
        if count <= _MOST_IN_ONE:
            block_t = max(32, next_power_of_2(count))
            _few_tiles_kernel[(1,)](
                starts, keys.seqlens, keys.leftpad, entries, count, *of_tiles, *of_parts, **masks,
                FILLS_ONCE=fills_once, ROUNDS=rounds, BY_WAVES=by_waves, BLOCK_T=block_t,
                num_warps=1 if block_t <= 64 else min(32, block_t // 32),
            )  # fmt: skip
        else:
            tiles = torch.empty((count, TILE_FIELDS.value), dtype=torch.int32, device=device)
            _tiles_kernel[(cdiv(count, _BLOCK_T),)](
                starts, keys.seqlens, keys.leftpad, tiles, count, *of_tiles, (batch + 1).bit_length(), **masks,
                BLOCK_T=_BLOCK_T, num_warps=4,
            )  # fmt: skip
            _list_kernel[(1,)](
                tiles, entries, count, *of_parts, ROUNDS=rounds, BLOCK_T=min(_MOST_LISTED, next_power_of_2(count)),
                STARTS_EARLY=starts_early(target), num_warps=32,
            )  # fmt: skip
        return TileList(entries, slots, cut, batch)

    def combine(
        self, partial: Tensor, partial_lse: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, kv_heads: int,
        most: int, ratio: int | None = None,
    ) -> None:  # fmt: skip
        """Combine the results of splits, weighted by their LSE, into `out` and `lse`, contiguous, for split tiles: [T,
        H, E] and [H, T] for packed queries, else [B, S, H, E] and [B, H, S]; B may be 1 in both. `ratio`: heads of each
        query in a tile; None: all query heads of a KV head. partial [slots, G, BLOCK_M, E] and partial_lse [slots, G,
        BLOCK_M], float32, of the G groups of `ratio` heads. `most`: the most queries of a sequence; the grid depends on
        it, results do not."""
        (groups, block_m, head_dim_v), heads = partial.shape[1:], out.shape[-2]
        of_kv = heads // kv_heads
        ratio = ratio or of_kv
        target = Target.of(out.device)
        rows = max(1, most) * ratio
        rows_of_tile, cut = min(block_m, rows), min(self.cut, self.sequences * cdiv(rows, block_m))
        each = rows_of(cut * groups * rows_of_tile, None)
        per_tile, block_d = cdiv(rows_of_tile, each.heads), min(128, next_power_of_2(head_dim_v))
        programs = min(cut * groups * per_tile, _COMBINING * target.num_sms)
        _combine_tiles_kernel[(programs, cdiv(head_dim_v, block_d))](
            partial, partial_lse, sinks, out, lse, self.entries,
            lse.shape[-1], groups, ratio, heads, of_kv, per_tile, partial.stride(1), partial_lse.stride(1),
            EQUAL=lse.dim() == 3 and lse.shape[0] > 1, HEAD_DIM_V=head_dim_v, BLOCK_M=block_m, BLOCK_R=each.heads,
            BLOCK_S=each.splits, AHEAD=each.ahead, BLOCK_D=block_d,
            STARTS_EARLY=starts_early(target), num_warps=each.warps,
        )  # fmt: skip
