"""The scheduler of splits over keys for a batch of sequences of different lengths; it runs on the device.

With the same number of splits for each sequence, the programs of the longest sequence finish last while the others are
idle. 32 sequences of 500 to 32768 keys took 438 us on one H200, and 338 split by their lengths; one of 131072 among 63
of 1000 took 3465 and 225 (benchmarks/results/2026-11-23_h200_host_and_decode.md). The host knows only shapes, so it
chooses the total number of splits. One program for each tile of queries reads the lengths and writes which split of
which sequence each program of the decoding kernel computes. The host does not synchronize, so one CUDA graph is valid
for all lengths. The result is deterministic.

Source: a scheduler on the device is the idea of FlashAttention-3's `get_scheduler_metadata`.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.attention.combine import PartTable
from powertrain.ops.attention.triton.sequences import SMALL
from powertrain.ops.early_start import starts_early, wait_for_kernel_before
from powertrain.ops.shapes import cdiv, next_power_of_2
from powertrain.runtime.launch import kernel
from powertrain.runtime.target import Target


@triton.jit
def key_range(
    length,
    leftpad,
    tile,
    num_queries,
    ratio,
    left,
    right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The keys [first, last) that any row of a tile of queries sees, of one sequence or of several."""
    first, last = leftpad, length
    if HAS_LEFT:
        first = tl.maximum(first, tile * BLOCK_M // ratio + (length - num_queries) - left)
    if HAS_RIGHT:
        last_query = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // ratio, num_queries - 1)
        last = tl.minimum(last, last_query + (length - num_queries) + right + 1)
    first = tl.maximum(first, 0)
    return first, tl.maximum(last, first)


@triton.jit
def lengths_of(seqlens_ptr, leftpad_ptr, batch, inside, num_new, capacity):
    """(length, first row that holds a key) of sequences."""
    length = tl.load(seqlens_ptr + batch, mask=inside, other=0).to(tl.int32) + num_new  # the shape of batch
    leftpad = tl.zeros_like(length)
    if leftpad_ptr is not None:
        leftpad = tl.load(leftpad_ptr + batch, mask=inside, other=0).to(tl.int32)  # the shape of batch
    return tl.minimum(length, capacity), leftpad


@triton.jit
def _blocks_of(
    batch,
    seqlens_ptr,
    leftpad_ptr,
    batches,
    num_new,
    capacity,
    tile,
    num_queries,
    ratio,
    left,
    right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The number of blocks of keys that a tile of queries sees, for these sequences; 0 beyond the last sequence."""
    length, pad = lengths_of(seqlens_ptr, leftpad_ptr, batch, batch < batches, num_new, capacity)
    first, last = key_range(length, pad, tile, num_queries, ratio, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_M)
    return tl.where(batch < batches, tl.cdiv(last, BLOCK_N) - first // BLOCK_N, 0)  # the shape of batch


@triton.jit
def extra_parts(blocks, share, slack):
    """The number of splits beyond a sequence's first, with splits of about `share` blocks of keys; 0 for no blocks. Up
    to `slack` blocks more are not split: a quarter of `share`, so that equal lengths are not split; 0 if all splits run
    at once, where the longest one decides."""
    return tl.maximum(tl.cdiv(blocks - slack, share), 1) - 1


@triton.jit
def safe_share(total, extra, least):
    """A size of splits, in blocks of keys, with which there are at most `extra` splits beyond the first ones."""
    # sum of floor(blocks / share) <= total / share <= extra
    return tl.maximum(tl.cdiv(total, extra), least)


@triton.jit
def smallest_share(blocks, total, count, extra, least):
    """Nearly the smallest size with which `count` sequences have at most `extra` further splits, so that all run at
    once."""
    share = tl.maximum(tl.cdiv(total, extra + count), least)
    needed = tl.sum(extra_parts(blocks, share, 0))
    rounds = 0
    # a loop whose end depends on the lengths is not unrolled: a kernel that runs alone waits for its code to be read
    while (needed > extra) & (rounds < 6):
        share = tl.maximum(share + 1, tl.cdiv(share * (needed + count), extra + count))
        needed = tl.sum(extra_parts(blocks, share, 0))
        rounds += 1
    return tl.where(needed > extra, safe_share(total, extra, least), share)


@triton.jit
def is_best_whole(longest, count, at_each, share, at_once):
    """Whether `count` unsplit sequences, as waves of the longest one, cost no more than splits of `share` blocks."""
    # int64: many sequences, one of them very long
    return longest.to(tl.int64) * tl.cdiv(count, at_once) <= at_each + at_each // share + share // 2


@triton.jit
def share_of(total, longest, count, at_once, least):
    """The size of splits, in blocks of keys, where more splits exist than run at once; at least `least`.

    Small splits end at about the same time, but each begins with an empty pipeline, as long as two blocks of 64 keys.
    us on one H200, 32/8 heads, head dim 128, with splits as large as the share of keys of each running program (in
    brackets), and 1/2, 1/4, 1/8 of it: 64 sequences of 500 to 32768 (18000) 612, 597, 571, 574; 32 of them (10000) 353,
    340, 338, 341; one of 32768 among 31 of 500 (1460) 70, 74, 74, -. 64 of 8192 are fastest unsplit: 490, 491, 502,
    514."""
    at_each = tl.cdiv(total, at_once)
    root = tl.sqrt(at_each.to(tl.float32) * least * 0.5).to(tl.int32)
    share = tl.maximum(tl.minimum(tl.maximum(root, 3 * least), at_each), 1)
    return tl.where(is_best_whole(longest, count, at_each, share, at_once), longest, share)


@triton.jit
def _write_parts(
    parts_ptr,
    of_sequences_ptr,
    batch,
    blocks,
    batches,
    share,
    used,
    cut,
    before,
    cut_before,
    tile,
    tiles,
    FILLS_ONCE: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Write the splits of some sequences. `before`, `cut_before`: the numbers of extra splits and of split sequences
    among the sequences before; returned with those of these sequences added."""
    more = extra_parts(blocks, share, 0 if FILLS_ONCE else share // 4)
    is_cut = (more > 0).to(tl.int32)
    begin = before + tl.cumsum(more) - more
    rank = cut_before + tl.cumsum(is_cut) - is_cut
    of_sequence = of_sequences_ptr + (batch * tiles + tile) * 2
    tl.store(of_sequence, begin, mask=batch < batches)  # [BLOCK_B]
    tl.store(of_sequence + 1, more + 1, mask=batch < batches)  # [BLOCK_B]
    # the first splits of split sequences are as long as the extra ones: they come before unsplit sequences
    first = parts_ptr + (used + tl.where(is_cut > 0, rank, cut + batch - rank)) * 3
    tl.store(first, batch, mask=batch < batches)  # [BLOCK_B]
    tl.store(first + 1, tl.zeros_like(batch), mask=batch < batches)  # [BLOCK_B]
    tl.store(first + 2, more + 1, mask=batch < batches)  # [BLOCK_B]
    for start in range(0, tl.max(more), BLOCK_E):
        part = start + tl.arange(0, BLOCK_E)[None, :]
        extra = parts_ptr + (begin[:, None] + part) * 3
        mask = part < more[:, None]
        tl.store(extra, tl.broadcast_to(batch[:, None], mask.shape), mask=mask)  # [BLOCK_B, BLOCK_E]
        tl.store(extra + 1, tl.broadcast_to(part + 1, mask.shape), mask=mask)  # [BLOCK_B, BLOCK_E]
        tl.store(extra + 2, tl.broadcast_to(more[:, None] + 1, mask.shape), mask=mask)  # [BLOCK_B, BLOCK_E]
    return before + tl.sum(more), cut_before + tl.sum(is_cut)


@kernel(unaligned=SMALL)
def _schedule_kernel(
    seqlens_ptr,
    leftpad_ptr,
    parts_ptr,
    of_sequences_ptr,
    batches,
    num_queries,
    ratio,
    num_new,
    capacity,
    extra,
    at_once,
    least,
    left,
    right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    FILLS_ONCE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_E: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    """For one tile of queries, divides every sequence's keys into splits of about the same size: one per sequence and
    at most `extra` more. `at_once`: splits that run at the same time; `least`: blocks of the smallest split.

    parts [tiles, extra + batches, 3] int32: (sequence, index of the split, number of its splits), in the order in which
    programs take them: first the extra splits, then the first split of each split sequence, then unsplit sequences,
    then entries of sequence `batches`, which are no splits.
    of_sequences [batches, tiles, 2]: (the first of the sequence's extra splits, the number of its splits).
    """
    wait_for_kernel_before(STARTS_EARLY)
    tile = tl.program_id(0)
    tiles = tl.num_programs(0)
    parts_ptr += tile * (extra + batches) * 3
    total = 0
    used = 0
    cut = 0
    before = 0
    cut_before = 0
    if ONE_BLOCK:
        batch = tl.arange(0, BLOCK_B)
        # read once
        blocks = _blocks_of(
            batch, seqlens_ptr, leftpad_ptr, batches, num_new, capacity, tile, num_queries, ratio, left, right,
            HAS_LEFT, HAS_RIGHT, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        total = tl.sum(blocks)
        if FILLS_ONCE:
            share = smallest_share(blocks, total, batches, extra, least)
        else:
            share = share_of(total, tl.max(blocks), batches, at_once, least)
            share = tl.maximum(share, safe_share(total, extra, least))
        more = extra_parts(blocks, share, 0 if FILLS_ONCE else share // 4)
        used = tl.sum(more)
        cut = tl.sum((more > 0).to(tl.int32))
        before, cut_before = _write_parts(
            parts_ptr, of_sequences_ptr, batch, blocks, batches, share, used, cut, before, cut_before, tile, tiles,
            FILLS_ONCE, BLOCK_E,
        )  # fmt: skip
    else:
        longest = 0
        for start in range(0, batches, BLOCK_B):
            blocks = _blocks_of(
                start + tl.arange(0, BLOCK_B), seqlens_ptr, leftpad_ptr, batches, num_new, capacity, tile, num_queries,
                ratio, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            total += tl.sum(blocks)
            longest = tl.maximum(longest, tl.max(blocks))
        share = share_of(total, longest, batches, at_once, least)
        share = tl.maximum(share, safe_share(total, extra, least))
        for start in range(0, batches, BLOCK_B):
            batch = start + tl.arange(0, BLOCK_B)
            blocks = _blocks_of(
                batch, seqlens_ptr, leftpad_ptr, batches, num_new, capacity, tile, num_queries, ratio, left, right,
                HAS_LEFT, HAS_RIGHT, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            more = extra_parts(blocks, share, share // 4)
            used += tl.sum(more)
            cut += tl.sum((more > 0).to(tl.int32))
        for start in range(0, batches, BLOCK_B):
            batch = start + tl.arange(0, BLOCK_B)
            blocks = _blocks_of(
                batch, seqlens_ptr, leftpad_ptr, batches, num_new, capacity, tile, num_queries, ratio, left, right,
                HAS_LEFT, HAS_RIGHT, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            before, cut_before = _write_parts(
                parts_ptr, of_sequences_ptr, batch, blocks, batches, share, used, cut, before, cut_before, tile, tiles,
                False, BLOCK_E,
            )  # fmt: skip
    for start in range(used + batches, extra + batches, 128):
        part = start + tl.arange(0, 128)
        # programs look at the sequence alone
        tl.store(parts_ptr + part * 3, tl.zeros_like(part) + batches, mask=part < extra + batches)  # [128]


# where splits cannot all run at once there are at most so many for each program that can
_WAVES = 8
LEAST_KEYS = 512  # the smallest size of a split
MOST_AT_ONCE = 256  # sequences that the schedule reads at a time


@functools.lru_cache(maxsize=1024)
def choose_parts(sequences: int, tiles: int, keys: int, per_sm: int, target: Target) -> tuple[int, int, bool]:
    """(most splits beyond one per sequence, splits that run at once, whether all do), with `tiles` programs per
    split."""
    at_once = max(1, target.num_sms * per_sm // max(1, tiles))
    # where all run at once the schedule takes the sequences as one block
    if at_once >= 2 * sequences and sequences <= MOST_AT_ONCE:
        return at_once - sequences, at_once, True
    most = cdiv(_WAVES * target.num_sms * per_sm, max(1, tiles))
    return max(1, min(sequences * cdiv(keys, LEAST_KEYS), most)), at_once, False


class KeysSeen(NamedTuple):
    """Which keys of its KV cache a sequence's queries see."""

    seqlens: Tensor  # [B], before the append
    leftpad: Tensor | None  # [B]
    num_new: int
    capacity: int
    left: int  # -1: all
    right: int  # -1: all


def schedule(
    keys: KeysSeen,
    batch: int,
    queries: int,
    ratio: int,
    programs: int,
    seen: int,
    plan: tuple[int, int, int],
    target: Target,
    made: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, PartTable]:
    """(parts [tiles, number of splits, 3] as `_schedule_kernel` writes them, the table for `combine`).

    ratio     query heads per KV head
    programs  programs per split: KV heads times tiles of queries
    seen      the most keys that the queries of a sequence see
    plan      rows of a tile of queries, keys of a block, programs that run on one SM at a time
    made      parts and the table's tensor, of an earlier call with these arguments; None: they are made
    """
    block_m, block_n, per_sm = plan
    tiles = cdiv(queries * ratio, block_m)
    extra, at_once, fills_once = choose_parts(batch, programs, seen, per_sm, target)
    device = keys.seqlens.device
    if made is not None:
        return made[0], PartTable(made[1], ratio, block_m, extra)
    parts = torch.empty((tiles, extra + batch, 3), dtype=torch.int32, device=device)
    table = PartTable(torch.empty((batch, tiles, 2), dtype=torch.int32, device=device), ratio, block_m, extra)
    block_b = min(MOST_AT_ONCE, next_power_of_2(batch))
    # one warp adds without waiting for others
    _schedule_kernel[(tiles,)](
        keys.seqlens, keys.leftpad, parts, table.parts, batch, queries, ratio, keys.num_new, keys.capacity, extra,
        at_once, cdiv(LEAST_KEYS, block_n), keys.left, keys.right, HAS_LEFT=keys.left >= 0,
        HAS_RIGHT=keys.right >= 0, ONE_BLOCK=batch <= MOST_AT_ONCE, FILLS_ONCE=fills_once, BLOCK_M=block_m,
        BLOCK_N=block_n, BLOCK_B=block_b, BLOCK_E=8, STARTS_EARLY=starts_early(target),
        num_warps=1 if block_b <= 64 else 4,
    )  # fmt: skip
    return parts, table
