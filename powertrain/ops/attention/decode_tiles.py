"""Packed queries beside a KV cache, as many of each sequence as it has: tiles of them, and the combination of parts.

A chunk of a prompt and single new tokens stand in one tensor [T, H, D]. Tiles of BLOCK_M rows (query, query head of a
kv head) never hold two sequences; the host knows only that there are at most cdiv(T * ratio, BLOCK_M) + B + 2 of them.
One kernel finds each tile's sequence and keys, `schedule` then cuts the keys of tiles as it cuts those of sequences,
and results of parts lie by tile: 4 bytes a row and head dim for each part of a tile that is cut.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from powertrain.ops.attention.decode_schedule import TILE_FIELDS, KeysSeen, key_range, lengths_of, schedule
from powertrain.ops.attention.triton.sequences import sequence_span
from powertrain.ops.early_start import starts_early, wait_for_kernel_before
from powertrain.ops.shapes import cdiv, next_power_of_2
from powertrain.runtime.launch import kernel
from powertrain.runtime.target import Target

_BLOCK_T = 128  # tiles that a program finds at a time


@kernel()
def _tiles_kernel(
    starts_ptr, seqlens_ptr, leftpad_ptr, tiles_ptr,
    tiles, batches, queries, ratio, num_new, capacity, left, right, steps,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """tiles [tiles, TILE_FIELDS] int32: sequence, tile of it, blocks of keys that it sees, the sequence's first query,
    how many it has, how many keys. Rows of no sequence are one of -1, without keys. `steps`: of the search. Without
    `starts` each sequence has `queries`, one behind the other."""
    wait_for_kernel_before(STARTS_EARLY)
    slot = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    if starts_ptr is None:
        of_each = tl.cdiv(queries * ratio, BLOCK_M)
        sequence, tile = slot // of_each, slot % of_each
        first_query, count = sequence * queries, tl.zeros_like(slot) + queries
    else:
        # sequence n owns the slots from cdiv(starts[n] * ratio, BLOCK_M) + n + 1 on; those before the first are of none
        low = tl.zeros([BLOCK_T], tl.int32) - 1
        high = low + batches + 1
        for _ in range(steps):
            middle = (low + high + 1) // 2
            searches = low < high
            start = tl.load(starts_ptr + tl.maximum(middle, 0), mask=searches, other=0)
            is_before = tl.cdiv(start * ratio, BLOCK_M) + middle + 1 <= slot
            low = tl.where(searches & is_before, middle, low)
            high = tl.where(searches & (is_before == 0), middle - 1, high)
        before = tl.load(starts_ptr + low, mask=low >= 0, other=0)
        tile = tl.where(low < 0, slot, slot - (tl.cdiv(before * ratio, BLOCK_M) + low + 1))
        # of `sequence_span`: rows behind the last sequence, and before the first
        sequence = tl.where(low < 0, batches + 1, low)
        first_query, _, count = sequence_span(starts_ptr, None, sequence, batches, queries)
    inside = sequence < batches
    length, pad = lengths_of(seqlens_ptr, leftpad_ptr, sequence, inside, num_new, capacity)
    first, last = key_range(length, pad, tile, count, ratio, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_M)
    sees = inside & (tile * BLOCK_M < count * ratio)
    blocks = tl.where(sees, tl.cdiv(last, BLOCK_N) - first // BLOCK_N, 0)
    to, mask = tiles_ptr + slot * TILE_FIELDS, slot < tiles
    tl.store(to, tl.where(inside, sequence, -1), mask=mask)  # [BLOCK_T]
    tl.store(to + 1, tile, mask=mask)  # [BLOCK_T]
    tl.store(to + 2, blocks, mask=mask)  # [BLOCK_T]
    tl.store(to + 3, first_query, mask=mask)  # [BLOCK_T]
    tl.store(to + 4, count, mask=mask)  # [BLOCK_T]
    tl.store(to + 5, tl.where(inside, length, 0), mask=mask)  # [BLOCK_T]


@kernel()
def _combine_tiles_kernel(
    partial_ptr, partial_lse_ptr, sinks_ptr, out_ptr, lse_ptr, tiles_ptr, parts_ptr, firsts_ptr,
    queries, groups, ratio, heads, heads_per_kv, stride, stride_lse,
    EQUAL: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """Some rows of a tile that is cut, and some channels: the parts' results, weighted by exp(lse - max). `ratio` heads
    of the `heads_per_kv` that share keys are one of the `groups`; the last of a kv head may have fewer. Strides: from
    group to group of parts. EQUAL: lse is [B, heads, queries], else [heads, queries]."""
    wait_for_kernel_before(STARTS_EARLY)
    PER_TILE: tl.constexpr = BLOCK_M // BLOCK_R
    number = tl.program_id(0) // (PER_TILE * groups)
    group = tl.program_id(0) // PER_TILE % groups
    num_parts = tl.load(parts_ptr + number * 2 + 1)  # scalar
    # the attention kernel has stored a single part as the result itself
    if num_parts == 1:
        return
    second, first = tl.load(parts_ptr + number * 2), tl.load(firsts_ptr + number)  # scalars
    of_tile = tiles_ptr + number * TILE_FIELDS
    tile, start, count = tl.load(of_tile + 1), tl.load(of_tile + 3), tl.load(of_tile + 4)  # scalars
    local = tl.program_id(0) % PER_TILE * BLOCK_R + tl.arange(0, BLOCK_R)
    rows = tile * BLOCK_M + local
    # of few queries most programs have no row
    if tile * BLOCK_M + tl.program_id(0) % PER_TILE * BLOCK_R >= count * ratio:
        return
    of_kv = tl.cdiv(heads_per_kv, ratio)
    lane = group % of_kv * ratio + rows % ratio
    mask = (rows < count * ratio) & (lane < heads_per_kv)
    query, head = (start + rows // ratio).to(tl.int64), group // of_kv * heads_per_kv + lane
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    wanted = mask[:, None] & (dims < HEAD_DIM_V)
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    if sinks_ptr is not None:
        # one more score of the whole row, counted here once
        top = tl.load(sinks_ptr + head, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_R]
        total += 1.0
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    at = partial_ptr + (group * stride).to(tl.int64) + (local[:, None] * HEAD_DIM_V + dims)
    at_lse = partial_lse_ptr + (group * stride_lse).to(tl.int64) + local
    for begin in range(0, num_parts, UNROLL):
        # their loads do not wait for one another
        for i in tl.static_range(UNROLL):
            part = begin + i
            slot = tl.where(part == 0, first, second + part - 1).to(tl.int64) * groups
            is_part = mask & (part < num_parts)
            lse = tl.load(at_lse + slot * stride_lse, mask=is_part, other=float("-inf"))  # [BLOCK_R]
            is_wanted = is_part[:, None] & (dims < HEAD_DIM_V)
            partial = tl.load(at + slot * stride, mask=is_wanted, other=0.0)  # [BLOCK_R, BLOCK_D]
            new_top = tl.maximum(top, lse)
            safe = tl.where(new_top == float("-inf"), 0.0, new_top)
            kept, weight = tl.exp(top - safe), tl.exp(lse - safe)
            total = total * kept + weight
            # a part that holds no key of a row leaves its result unwritten
            acc = acc * kept[:, None] + tl.where((lse > float("-inf"))[:, None], weight[:, None] * partial, 0.0)
            top = new_top
    seen = total > 0.0
    acc = acc / tl.where(seen, total, 1.0)[:, None]
    to = (query * heads + head) * HEAD_DIM_V
    tl.store(out_ptr + to[:, None] + dims, acc.to(out_ptr.dtype.element_ty), mask=wanted)  # [BLOCK_R, BLOCK_D]
    result = tl.where(seen, top + tl.log(tl.where(seen, total, 1.0)), float("-inf"))
    of_row = head.to(tl.int64) * queries + query
    if EQUAL:
        of_row = (tl.load(of_tile).to(tl.int64) * heads + head) * queries + rows // ratio
    tl.store(lse_ptr + of_row, result, mask=mask)  # [BLOCK_R]


def results_in(memory: Tensor, block_m: int) -> tuple[Tensor, Tensor]:
    """`partial` and `partial_lse` of `combine` in one tensor [slots, G, (E + 1) * BLOCK_M]: of each the LSE, then the
    results."""
    slots, groups, size = memory.shape
    head_dim_v = size // block_m - 1
    # not by views, whose strides of dims of size 1 may be any
    shape, strides = (slots, groups, block_m, head_dim_v), (groups * size, size, head_dim_v, 1)
    return memory.as_strided(shape, strides, block_m), memory.as_strided(shape[:3], (groups * size, size, 1), 0)


class QueryTiles(NamedTuple):
    """Tiles of packed queries, and the parts that their keys are cut into."""

    tiles: Tensor  # [N, TILE_FIELDS] int32, as `_tiles_kernel` writes them
    parts: Tensor  # [1, extra + N, 3] int32: the part of each program (decode_schedule.py)
    of_tiles: Tensor  # [N, 1, 2] int32: slot of the second part's result, number of parts
    firsts: Tensor  # [N] int32: slot of the first part's result, where there are more
    slots: int  # of results of parts

    @staticmethod
    def of(
        starts: Tensor | None, keys: KeysSeen, queries: int, ratio: int, kv_heads: int, seen: int,
        plan: tuple[int, int, int], target: Target, rounds: int = 0, least_keys: int | None = None,
    ) -> "QueryTiles":  # fmt: skip
        """Of `queries` rows in all, or of so many of each sequence if there are no starts. `keys`, `seen`, `plan`,
        `rounds`, `least_keys`: as of `schedule`."""
        batch, (block_m, block_n, _), device = keys.seqlens.shape[0], plan, keys.seqlens.device
        count = cdiv(queries * ratio, block_m)
        # a partly filled tile a sequence, and of the rows before the first and behind the last
        count = count * batch if starts is None else count + batch + 2
        tiles = torch.empty((count, TILE_FIELDS.value), dtype=torch.int32, device=device)
        _tiles_kernel[(cdiv(count, _BLOCK_T),)](
            starts, keys.seqlens, keys.leftpad, tiles, count, batch, queries, ratio, keys.num_new, keys.capacity,
            keys.left, keys.right, (batch + 1).bit_length(), HAS_LEFT=keys.left >= 0, HAS_RIGHT=keys.right >= 0,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_T=_BLOCK_T, STARTS_EARLY=starts_early(target), num_warps=4,
        )  # fmt: skip
        firsts = torch.empty(count, dtype=torch.int32, device=device)
        parts, table = schedule(
            keys, count, 1, 1, kv_heads, seen, plan, target, (tiles, firsts), rounds, least_keys
        )  # fmt: skip
        # each tile that is cut has a part beyond its first
        return QueryTiles(tiles, parts, table.parts, firsts, table.extra + min(table.extra, count))

    def combine(
        self, partial: Tensor, partial_lse: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, kv_heads: int,
        ratio: int | None = None,
    ) -> None:  # fmt: skip
        """Results of parts, weighted by their LSE, into `out` and `lse`, contiguous, of the tiles that are cut: [T, H,
        E] and [H, T] of packed queries, [B, S, H, E] and [B, H, S] of equal ones, B may be 1 in both. `ratio`: heads of
        a tile; None: all that share keys. partial [slots, G, BLOCK_M, E] and partial_lse [slots, G, BLOCK_M], float32,
        of the G groups of so many heads; a slot's groups follow one another."""
        (groups, block_m, head_dim_v), heads = partial.shape[1:], out.shape[-2]
        of_kv = heads // kv_heads
        block_r, block_d = min(8, block_m), min(128, next_power_of_2(head_dim_v))
        grid = self.tiles.shape[0] * groups * (block_m // block_r), cdiv(head_dim_v, block_d)
        _combine_tiles_kernel[grid](
            partial, partial_lse, sinks, out, lse, self.tiles, self.of_tiles, self.firsts,
            lse.shape[-1], groups, ratio or of_kv, heads, of_kv, partial.stride(1), partial_lse.stride(1),
            EQUAL=lse.dim() == 3 and lse.shape[0] > 1, HEAD_DIM_V=head_dim_v, BLOCK_M=block_m, BLOCK_R=block_r,
            BLOCK_D=block_d, UNROLL=4, STARTS_EARLY=starts_early(Target.of(out.device)), num_warps=2,
        )  # fmt: skip
