"""Chooses how many heads' tiles are interleaved in a persistent launch, by simulating the end of the launch.

CTAs take tiles from a counter: first those of one group of heads, its longest tiles first, then those of the next
group. With few heads a group, SMs wait at the end for the last group's long tiles; with many, the keys or queries of a
group do not stay in the L2. Under a causal mask tiles of 1 to 64 blocks differ so much that the number of heads
decides: 28 heads in groups of 8 leave a last one of 4, whose long tiles start when there is nothing else to do.

ms, one H100, D128 causal, forward, groups of 4, 7, 8, 14, 28 heads, and the simulated end (1: no SM waits):
H28/4 B1 S2048 .0606 .0540 .0582 .0527 .0532, 1.24 1.05 1.15 1.05 1.03; B1 S4096 .193 .178 .193 .178 .178, 1.11 1.02
1.11 1.02 1.01; H32/8 B1 S4096 .202 .219 .204 .219 .220, 1.00 1.10 1.00 1.10 1.10.
"""

import heapq
from typing import NamedTuple

from powertrain.ops.shapes import cdiv

_LAST_WAVES = 8  # waves that are simulated; earlier ones keep all SMs busy in any order


class Stretch(NamedTuple):
    """Consecutive tiles of a launch that have the same order."""

    heads: int
    group: int  # heads whose tiles are interleaved
    times: tuple[int, ...]  # of each tile of a head, in launch order


def end_of(stretches: list[Stretch], num_sms: int) -> float:
    """The time when the last SM ends, divided by the time with equal work on all SMs."""
    free, total = [0] * num_sms, 0  # free: a heap of the times when SMs become free
    for heads, group, times in stretches:
        for first in range(0, heads, group):
            for time in times:
                for _ in range(min(group, heads - first)):
                    heapq.heapreplace(free, free[0] + time)
        total += heads * sum(times)
    return max(free) * num_sms / max(1, total)


def best_group(
    heads: int, times: tuple[int, ...], num_sms: int, head_bytes: float, most_bytes: float, penalty: float
) -> tuple[int, float]:
    """(heads per group, cost) of the cheapest group of 4 to 32 heads, or of all heads. The cost is the simulated end,
    and `penalty` for each `most_bytes` beyond the first that the group's heads read repeatedly, `head_bytes` each."""

    def cost(size: int) -> float:
        groups = cdiv(heads, size)
        last = min(groups, cdiv(_LAST_WAVES * num_sms, size * len(times)))
        simulated = heads - (groups - last) * size
        late = (end_of([Stretch(simulated, size, times)], num_sms) - 1) * simulated / heads
        return 1 + late + penalty * max(0.0, size * head_bytes / most_bytes - 1)

    # the smallest size for each number of groups, so that the last group is not much smaller than the others
    sizes = (size for size in range(4, min(heads, 32) + 1) if size == cdiv(heads, cdiv(heads, size)))
    best = min(sizes, key=cost, default=heads)
    return best, cost(best)
