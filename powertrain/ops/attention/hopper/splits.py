"""The number of splits over keys for few queries, by an estimate of the time with each number."""

import functools
from typing import NamedTuple

from powertrain.ops.shapes import cdiv

# us, fitted to times of calls that followed other kernels (`python -m benchmarks.ops.few_queries`). By the rows of a
# tile: the launch, and the additional cost of splits. Then a tile's time without its blocks; the latency of the first
# keys; the cost of each split in the kernel that combines them
_LAUNCH, _SPLITTING = {64: 3.0, 128: 5.5, 192: 5.5}, {64: 3.0, 128: 4.9, 192: 4.9}
_TILE, _FIRST_KEYS, _EACH_SPLIT = 2.0, 1.6, 0.04
# gained by a split without keys: of 157 pairs of calls that differ in nothing else, 114 are faster with such a split,
# by up to 3.2 us. Not because it executes a tile's last instructions first: a program that does only that gained 0.15
_EMPTY_SPLIT = 1.0
_RESULTS_PER_US = 2.15e6  # bytes of results of splits, written and read again
# the share of a datasheet's bandwidth at which few SMs read keys and values, and how much longer all SMs take
_BANDWIDTH, _SPREAD = 0.875, 0.14


class Work(NamedTuple):
    """The tiles of a call, whose keys may be split."""

    rows: int  # of a tile
    tiles: int
    blocks: int  # of keys, of each tile
    block_us: float  # time of one block
    keys_bytes: float  # keys and values that are read from memory
    result_bytes: int  # in float32
    sms: int
    bandwidth: float  # of the memory, bytes a second, by its datasheet


@functools.lru_cache(maxsize=1024)
def num_splits_for(work: Work) -> int:
    """The number of splits of each tile's keys that fill the SMs; 1 unless splitting saves 3 %.

    us, bf16, one H200, by splits: B1 S4 beside 32768 keys H32/8 D128 8 49, 10 45, 16 46; B2 S6 beside 16384 12/1 D112
    32 18, 64 17.6; B1 S42 beside 1639 H64/8 D128 1 27.9, 4 18.1; B1 S271 beside 1882 H28/4 D128 1 31.0, 2 26.8, 3 33.0.
    In 60 calls this choice, with that of the tile, takes 1.9 % longer than the best on average, 9 % at most
    (benchmarks/results/2026-11-30_h200_shared_code.md)."""
    most = max(1, min(work.blocks // 2, 4 * work.sms // max(1, work.tiles)))
    splits = min(range(1, most + 1), key=lambda splits: time_of(work, splits))
    return splits if time_of(work, splits) <= 0.97 * time_of(work, 1) else 1


def time_of(work: Work, splits: int) -> float:
    """Estimated us: the SMs compute rounds of tiles while the memory delivers the keys, then a kernel combines."""
    tiles = work.tiles * splits
    share = cdiv(work.blocks, splits)
    products = cdiv(tiles, work.sms) * (share * work.block_us + _TILE)
    busy = 1 + _SPREAD * min(1.0, tiles / work.sms)
    reads = work.keys_bytes / (_BANDWIDTH * work.bandwidth) * 1e6 * busy + _FIRST_KEYS
    time = _LAUNCH[work.rows] + max(products, reads)
    if splits > 1:
        time += _SPLITTING[work.rows] + splits * (_EACH_SPLIT + work.result_bytes / _RESULTS_PER_US)
        if (splits - 1) * share >= work.blocks:
            time -= _EMPTY_SPLIT
    return time
