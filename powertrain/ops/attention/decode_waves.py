"""Size of the splits over keys where the tensor cores are the limit, so that a program's time is proportional to its
blocks of keys. decode_tiles.py makes the list of tiles and splits, and chooses the size where memory is the limit.

The time of the last program is estimated in blocks of keys. An entry of the list costs its blocks and two more; the
results of a split cost `of_results` blocks; the kernel that combines them costs one block, and a sixth of a block for
each split of the longest tile. Two candidates are compared: the best of some sizes, with which splits run in waves
(tiles up to a quarter longer than that size are not split); and the smallest size with which all splits run at once.

In a simulation of 390 random batches the chosen size costs 1.8 % more than the best on average; the estimate for memory
costs 4.0 % more. On one H200, MLA with 16 to 64 heads over 32 sequences of 500 to 32k keys takes 6 to 8 % less time
with splits that all run at once, and 64 sequences of 8192 keys with two queries take 12 % less with waves.
"""

import triton
import triton.language as tl

from powertrain.ops.attention.decode_schedule import extra_parts, safe_share, smallest_share


@triton.jit
def _shares(total, longest, at_once, least, ROUNDS: tl.constexpr):
    """Candidate sizes of splits, in blocks of keys: from 1.2 / ROUNDS to 1.75 times a program's work, in equal ratios,
    and the size of the longest tile, with which no tile is split."""
    COUNT: tl.constexpr = 2 << ROUNDS.bit_length()
    n = tl.arange(0, COUNT)
    of_each = total.to(tl.float32) / at_once
    step = tl.log2(tl.full([], 1.75 / 1.2 * ROUNDS, tl.float32)) / (COUNT - 2)
    share = (of_each * (1.2 / ROUNDS) * tl.exp2(n * step) + 0.5).to(tl.int32)
    return tl.maximum(tl.where(n < COUNT - 1, tl.minimum(tl.maximum(share, least), longest), longest), 1)


@triton.jit
def _parts_of(blocks, share):
    """For each size `share` of splits, in float32: the number of splits beyond each tile's first, the number of split
    tiles, the blocks of unsplit tiles, and the blocks of the longest entry. As `extra_parts`, except for the rounding
    of quotients."""
    share, blocks = share[:, None].to(tl.float32), tl.maximum(blocks, 0)[None, :]
    parts = tl.maximum(tl.ceil((blocks - 0.25 * share) / share), 1.0)
    more = parts.to(tl.int32) - 1
    # one instruction adds int32 of a warp
    extra, cut = tl.sum(more, 1), tl.sum((more > 0).to(tl.int32), 1)
    whole = tl.sum(tl.where(more == 0, blocks, 0), 1)
    longest = tl.max(tl.ceil(blocks / parts).to(tl.int32), 1)
    return extra.to(tl.float32), cut.to(tl.float32), whole.to(tl.float32), longest.to(tl.float32)


@triton.jit
def _first_to_end(blocks, share, total, longest, some, at_once, of_results):
    """The size `share` with which the last program ends first, and the time of that end. Splits run first, then unsplit
    tiles, the longest first; `some` is the number of tiles that have blocks.

    If there are more entries than run at once, the last program ends later than the mean, by a fraction of the longest
    entry and of the mean unsplit tile; but not later than that many waves of the longest entry, and not earlier than
    the waves of splits."""
    extra, cut, whole, longest_entry = _parts_of(blocks, share)
    parts, entries = extra + cut, some + extra
    is_cut = tl.where(extra > 0.0, 1.0, 0.0)
    one = longest_entry + 2 + of_results * is_cut
    mean = (total + 2 * entries + of_results * parts) / at_once
    uneven = tl.where(entries > parts, 0.4 * (whole / tl.maximum(entries - parts, 1.0) + 2), 0.2 * one)
    end = tl.minimum(mean + 0.1 * one + uneven, tl.ceil(entries / at_once) * one)
    waves = tl.ceil(parts / at_once) * (share + 2 + of_results)
    end = tl.maximum(tl.where(entries > at_once, end, mean), tl.where(parts > at_once, waves, one))
    end += is_cut * (1 + longest / share / 6)
    first = tl.min(end)
    return tl.max(tl.where(end <= first, share, 0)), first


@triton.jit
def _end_at_once(blocks, share, longest, rows, at_once, of_results):
    """When the last split ends, with splits of at most `share` blocks; infinite if they do not all run at once. `rows`:
    the number of tiles that have rows."""
    more = extra_parts(blocks, share, 0)
    extra = tl.sum(more)
    is_cut = (extra > 0).to(tl.float32)
    of_longest = tl.max(tl.ceil(blocks / (more + 1.0)))
    end = of_longest + 2 + is_cut * (of_results + 1 + longest / share / 6)
    return tl.where(rows + extra <= at_once, end, float("inf"))


@triton.jit
def share_by_waves(blocks, total, longest, some, extra, at_once, least, of_results, ROUNDS: tl.constexpr):
    """(share, slack) for `extra_parts`, of tiles that see `blocks` blocks of keys (-1: the tile has no rows). `extra`:
    the most splits beyond the tiles' first ones; the others are arguments of `_few_tiles_kernel`."""
    shares = _shares(total, longest, at_once, least, ROUNDS)
    share, end = _first_to_end(blocks, shares, total, longest, some, at_once, of_results)
    share = tl.maximum(share, safe_share(total, extra, least))
    rows = tl.sum((blocks >= 0).to(tl.int32))
    of_once = smallest_share(blocks, total, rows, tl.maximum(at_once - rows, 1), least)
    is_once = _end_at_once(blocks, of_once, longest, rows, at_once, of_results) < end
    return tl.where(is_once, of_once, share), tl.where(is_once, 0, share // 4)
