"""Plans of the Hopper forward: tiles, query heads packed into a tile, order of tiles; with the measurements. splits.py
chooses the number of splits over keys."""

import functools
from typing import NamedTuple

from powertrain.ops.attention.hopper.splits import Work, num_splits_for, time_of
from powertrain.ops.attention.hopper.tile_order import best_group
from powertrain.ops.attention.operands import Heads, Operands
from powertrain.ops.shapes import cdiv, next_power_of_2


class Plan(NamedTuple):
    """Tile sizes and schedule for a pair of head dims and numbers of queries and keys."""

    p_qk: tuple[int, ...]  # one or two pieces of the head dim of queries and keys, powers of 2; above 256 three or four
    p_v: tuple[int, ...]  # of that of values
    block_n: int = 128
    stages: int = 2
    consumers: int = 2  # partitions of warps, each with code of its own
    warps: int = 4  # of a consumer, 16 rows each
    store_parts: int = 1  # parts in which results are stored
    q_slots: int = 2  # tiles whose queries are in shared memory at a time
    q_held: bool = True  # queries are read from registers
    takes_turns: bool = True  # consumers issue their products in a fixed order
    heads_per_tile: int = 1  # query heads of a KV head packed into one tile
    partial: bool = False  # the last tile of a KV head has fewer heads: results are stored by ordinary stores
    num_splits: int = 1  # splits over keys, a tile each

    @property
    def splits_columns(self) -> bool:
        """Consumers have the same rows and half of the result's columns each (forward_d512.py)."""
        return len(self.p_v) > 2

    @property
    def block_m(self) -> int:
        return self.rows if self.splits_columns else self.rows * self.consumers

    @property
    def rows(self) -> int:
        """Rows of a consumer."""
        return 16 * self.warps

    @property
    def queries(self) -> int:
        """Queries of a tile: a consumer's rows hold whole queries, with all packed heads."""
        return self.rows // self.heads_per_tile * (self.block_m // self.rows)

    def groups_of(self, heads: Heads) -> int:
        """The number of groups of packed heads, over all KV heads."""
        return heads.kv * cdiv(heads.q_per_kv, self.heads_per_tile)


def pieces_of(head_dim: int) -> tuple[int, ...]:
    """The padded head dim as pieces: a power of 2, or two powers of which the second begins within the tensor."""
    widths = (
        (64,), (64, 16), (64, 32), (128,), (128, 32), (128, 64), (256,),
        (128, 128, 64), (128,) * 3, (128, 128, 128, 64), (128,) * 4,
    )  # fmt: skip
    return next(pieces for pieces in widths if head_dim <= sum(pieces))


def plan_for(d_qk: int, d_v: int, queries: int) -> Plan:
    """The plan for head dims, which TMA pads with zeros, and a number of queries per sequence.

    TFLOP/s, bf16, one H200, causal, H32 D64: 2 consumers 475, 3 consumers 532 (S8192); 405, 384 (S2048)."""
    p_qk, p_v = pieces_of(d_qk), pieces_of(d_v)
    if d_qk <= 64 and d_v <= 64:
        return with_consumers(Plan(p_qk, p_v), 3 if queries > 4096 else 2)
    if d_qk <= 128 and d_v <= 128:
        return Plan(p_qk, p_v)
    if d_qk <= 192 and d_v <= 128:
        return Plan(p_qk, p_v, store_parts=1 if 64 < d_v <= 96 else 2, q_slots=1, q_held=False)
    if d_qk <= 160 and d_v <= 160:
        return Plan(p_qk, p_v, store_parts=2, q_slots=1, q_held=False)
    if d_qk <= 192 and d_v <= 192:
        # ms, one H100, D192 B2 S8192 16/16 causal, full, B4 S3000: with turns 1.219, 2.300, 0.391, without 1.201,
        # 2.288, 0.387. Head dims 160 and 256 the same within 0.2 %
        return Plan(p_qk, p_v, block_n=64, q_slots=1, takes_turns=False)
    if d_qk > 256 and d_v > 256:
        return Plan(p_qk, p_v, block_n=64, stages=4, store_parts=2, q_slots=1, q_held=False)
    p_v = (64,) if d_v <= 64 else (128,) if d_v <= 128 else (256,)
    return Plan((256,), p_v, block_n=64, store_parts=p_v[0] // 64, q_slots=1, q_held=False)


def with_consumers(plan: Plan, consumers: int, warps: int = 4) -> Plan:
    """A plan of head dims to 256 with one consumer or two, or to 64 with three. One of 8 warps has two warpgroups."""
    if max(sum(plan.p_qk), sum(plan.p_v)) <= 64:
        plan = Plan(plan.p_qk, plan.p_v, stages=4)
        if consumers == 3:
            return plan._replace(consumers=3, stages=2, q_slots=1, q_held=False)
    # warpgroups that share their code stay in step without turns: D192 B1 S509 beside 5417 keys H32/8 137 us, 109 with
    takes_turns = warps > 4 or (plan.takes_turns and consumers > 1)
    return plan._replace(consumers=consumers, warps=warps, takes_turns=takes_turns)


def _three_consumers_are_faster(operands: Operands, queries: int) -> bool:
    """Under a full mask, whose tiles all take the same time: reckoned in tiles of 128 queries, one after another on an
    SM. us, one H200, H16 D64, 16k tokens, 2 and 3 consumers: S1024 157, 167; S1025 172, 174; S1500 211, 209; S2048 286,
    283; S2049 276, 270; S3000 384, 372; S4096 543, 531; S8192 1059, 1022."""
    sequences = operands.storage * operands.heads.kv * operands.heads.q_per_kv
    of_two, of_three = (cdiv(sequences * cdiv(queries, rows), operands.target.num_sms) for rows in (128, 192))
    return queries >= 1500 and 1.45 * of_three <= of_two


def _queries_of(block_m: int, heads_per_tile: int) -> int:
    """Queries of a tile: a consumer's 64 rows hold whole queries, with all packed heads."""
    return 64 // heads_per_tile * (block_m // 64)


@functools.lru_cache(maxsize=1024)
def heads_per_tile_for(
    repeats: int, queries: int, block_m: int, ragged: bool = False, whole: bool = False, most: float = 0.875,
    fullest: bool = False,
) -> int:  # fmt: skip
    """How many of `repeats` query heads of a KV head stand in one tile: as many as may, where that makes fewer tiles of
    so many queries, on average if they are `ragged`; `fullest`: as few as make as few tiles. The last tile of a group
    may have fewer, unless all are to be `whole`. `most`: the share of the tiles up to which that is worth it, 0.97 of
    ragged ones.

    ms, bf16, one H200, B8 D128, 32768 keys, alone and packed: H32/8, 16 queries .67 .35, 64 .70 .40, 96 .73 .73; H64/8,
    16 queries 1.30 .36, 64 1.39 .78. Ragged, one H100, 1, 2, 4 and 8 heads a tile: packed causal self-attention H32/8,
    sequences of 10 to 200 .264 .221 .187, 50 to 550 .239 .228 .212, 200 to 1800 .659 .650 .645; H64/8, 10 to 200 .506
    .419 .347 .304, 200 to 1800 1.295 1.301 1.265 1.249; 100 chunks of 20 to 600 beside 2000 keys H32/8 1.423 1.261
    1.200, H64/8 2.727 2.371 2.190 2.129. A consumer's 64 rows hold 63 of 7 heads and 60 of 5. Of equal lengths, under a
    full mask: us, one H200, 1 head and all, share of the tiles: 32 x 196 25/5 D128 59.6, 57.1, 0.90;
    4 x 700 28/4 D64 43.8, 41.1, 0.93; 4 x 700 64/8 D128 116.9, 113.4, 0.92; 4 x 700 25/5 D64 40.1, 41.4, 1. Causal 8 x
    420 28/4 D128 37.8, 39.5, 0.86; 8 x 420 20/4 D64 24.4, 25.9, 0.90; 32 x 196 32/8 D128 58.2, 52.7, 0.875."""

    def tiles(pack: int) -> float:
        each = _queries_of(block_m, pack)
        return cdiv(repeats, pack) * (queries / each + 0.5 if ragged else cdiv(queries, each))

    divisors = {pack for pack in range(1, 33) if repeats % pack == 0}
    packs = divisors if whole else divisors | {pack for pack in (2, 4, 8, 16) if pack < 2 * repeats}
    pack = min(packs, key=lambda pack: (tiles(pack), repeats % pack > 0, pack if fullest else -pack))
    return pack if tiles(pack) <= (0.97 if ragged else most) * tiles(1) else 1


def group_of(operands: Operands, plan: Plan) -> int:
    """The number of heads (or groups of packed heads) whose tiles are interleaved."""
    args, heads = operands.args, operands.heads
    # of all queries together, if packed; keys of the heads whose tiles run together should stay in the L2
    keys_bytes = operands.keys * (operands.d_qk + operands.d_v) * operands.k.tensor.element_size()
    repeats = cdiv(heads.q_per_kv, plan.heads_per_tile)
    if args.right < 0 or not operands.lengths_are_known or plan.num_splits > 1:
        return group_for(keys_bytes, repeats, args.right >= 0)
    offset = operands.keys - operands.queries if args.bottom_right else 0
    return _busy_group_for(
        operands.storage * plan.groups_of(heads), keys_bytes // repeats, operands.target.num_sms,
        operands.queries, operands.keys, plan.queries, plan.block_n, offset, args.left, args.right,
    )  # fmt: skip


# keys and values of a group of heads from which their reads miss the L2 more often, and what as many again cost
_GROUP_BYTES, _GROUP_PENALTY = 33.5e6, 0.02


@functools.lru_cache(maxsize=1024)
def _busy_group_for(
    heads: int, head_bytes: int, num_sms: int,
    queries: int, keys: int, block_m: int, block_n: int, offset: int, left: int, right: int,
) -> int:  # fmt: skip
    """TFLOP/s, bf16, one H200, H16 D128 causal, S8192 (4 MiB of keys and values a head), groups of 2, 4, 8, 16: 732,
    733, 728, 716; S2048 604, 613, 621, 620. tile_order.py has more."""
    # of a head's tiles, in halves of a block of keys; what a tile costs beside is three
    times = []
    for first in range(0, queries, block_m):
        last = min(first + block_m, queries) - 1
        end = max(0, min(keys, last + offset + right + 1))
        begin = max(0, first + offset - left) if left >= 0 else 0
        times.append(2 * max(1, cdiv(end, block_n) - begin // block_n) + 3)
    # the last queries' first
    return best_group(heads, tuple(reversed(times)), num_sms, head_bytes, _GROUP_BYTES, _GROUP_PENALTY)[0]


def group_for(keys_bytes: int, repeats: int, causal: bool) -> int:
    """The same where tiles take equal or unknown times. TFLOP/s, bf16, one H200, H16 D128: causal
    S2048 (1 MiB of keys and values a head) 2 604, 4 613, 8 621, 16 620; S8192 732, 733, 728, 716; full S8192 1 725, 2
    723, 8 710."""
    if not causal:
        return repeats
    return min(8, max(4, next_power_of_2(16 * 2**20 * repeats // max(1, keys_bytes) + 1) // 2))


def plan_of(operands: Operands) -> Plan:
    """The plan of a call. Keys are split only if there are at least four keys per query."""
    sequences = max(1, operands.batch) if operands.is_packed else 1
    # of packed sequences on average
    queries, keys = max(1, operands.queries // sequences), max(1, operands.keys // sequences)
    plan = plan_for(operands.d_qk, operands.d_v, queries)
    if plan.splits_columns:
        return plan
    if 4 * queries <= keys:
        return _fastest_of_few(operands, plan, sequences, queries, keys)
    is_full = operands.args.left < 0 and operands.args.right < 0
    if max(operands.d_qk, operands.d_v) <= 64 and not operands.is_packed and is_full:
        plan = with_consumers(plan, 3 if _three_consumers_are_faster(operands, queries) else 2)
    small = _with_packed_heads(operands, with_consumers(plan, 1), sequences, queries, is_few=False)
    plan = _with_packed_heads(operands, plan, sequences, queries, is_few=False)
    return small if _is_faster_in_small_tiles(operands, small, plan) else plan


def _is_faster_in_small_tiles(operands: Operands, small: Plan, plan: Plan) -> bool:
    """Whether tiles of 64 rows, with one consumer and half of the code, are faster than those of `plan`.

    us, one H200, after other kernels, tiles of 128 rows and of 64: B1 S128 H32/8 D128 full 12.2, 8.6; B1 S335 H16/16
    D256 full 17.5, 13.8; B8 S6 H32/8 D128 full 9.0, 7.5; B1 S823 H16/16 D192 causal 25.0, 20.0; B2 S203 H32/32 D128
    full 15.6, 13.8. But a tile of 128 rows takes less than two of 64: B1 S452 H32/32 D128 full, 128 and 256 tiles,
    behind calls of itself 15.5, 16.9; B1 S1291 H8/8 D128 full, 88 and 168 tiles, 24.0, 29.6; B2 S739 H28/4 D128
    causal, 336 and 672, 26.9, 31.3."""
    tiles = most_tiles(operands, small)
    # under a causal mask tiles differ, so that some end early
    at_once = operands.target.num_sms * (2 if operands.args.right >= 0 else 1)
    return tiles <= at_once or (not operands.is_packed and tiles == most_tiles(operands, plan))


def most_tiles(operands: Operands, plan: Plan) -> int:
    if operands.is_packed:
        # however the queries are distributed among the sequences
        return plan.groups_of(operands.heads) * (operands.queries // plan.queries + operands.batch)
    return operands.storage * plan.groups_of(operands.heads) * cdiv(operands.queries, plan.queries)


def plans_of_few(plan: Plan, rows: int | None = None) -> tuple[Plan, ...]:
    """The plans that few queries may have. `rows`: of packed sequences, queries times query heads of a KV head, on
    average; some may be long, where tiles of 64 rows take 1.3 times as long as those of 128.

    Code that two warpgroups share is fetched once: after other kernels such a call takes 2 to 3 us less than with two
    consumers, long ones as long, 109 and 109, 712 and 712. But at head dim 64 packed sequences take longer: 3 of 5 to
    78 queries beside 4000 to 15816 keys H16/16 73 us, 63."""
    is_narrow = max(sum(plan.p_qk), sum(plan.p_v)) <= 64
    one, both = with_consumers(plan, 1), with_consumers(plan, 1, warps=8)
    if rows is None:
        return (one, both, with_consumers(plan, 3)) if is_narrow else (one, both)
    large = plan if is_narrow else both
    return (one, large) if 2 * rows <= one.block_m else (large,)


def _fastest_of_few(operands: Operands, plan: Plan, sequences: int, queries: int, keys: int) -> Plan:
    """The plan for few queries and many keys, with the consumers and splits that are fastest by the estimate.

    us, one H200, after other kernels, with one consumer, with two that share code and with three: B1 S16 beside 1475
    keys H12/12 D128 12.9, 15.4; B1 S64 beside 32768 H32/8 D128 79.1, 62.7; B1 S1 beside 21372 H28/4 D64 17.0, 19.1,
    24.9; B4 S46 beside 15763 H32/8 D64 86.5, 77.3, 67.9."""
    candidates = []
    for each in plans_of_few(plan, queries * operands.heads.q_per_kv if sequences > 1 else None):
        each = _with_packed_heads(operands, each, sequences, queries, is_few=True)
        work = work_of(operands, each, queries, keys)
        each = each._replace(num_splits=num_splits_for(work))
        time = time_of(work, each.num_splits)
        # of B4 S160 beside 4096 keys H16/16 D64 the estimate is the same, but three take 45.0 us, two 42.8
        candidates.append((time / 0.9 if each.consumers == 3 else time, each))
    return min(candidates, key=lambda each: each[0])[1]


def _with_packed_heads(operands: Operands, plan: Plan, sequences: int, queries: int, is_few: bool) -> Plan:
    """The plan with as many query heads packed into a tile as makes it faster."""
    args, heads = operands.args, operands.heads
    # us, one H200, nothing in the L2, packed sequences whose tiles run at once, heads in tiles of their own and shared
    # ones: 2 tokens 12/1 D88 12.6, 20.6; two of 8 12/1 D192 17.2, 19.7; 31 to 88 28/4 D160 20.8, 24.1; of more tiles:
    # 120 to 241 28/4 D128 21.8, 20.3
    tiles = operands.storage * sequences * cdiv(queries, plan.block_m) * heads.kv * heads.q_per_kv
    at_once = operands.is_packed and not is_few and tiles <= operands.target.num_sms
    # a tile has one ALiBi slope
    if args.slopes is not None or at_once:
        return plan
    # fewer heads in the last tile of a group, by ordinary stores: of few queries alone, others were not timed
    most = 0.95 if args.left < 0 and args.right < 0 and not is_few else 0.875
    ragged = sequences > 1
    # tiles that share keys and have the same work read them at the same time: S37 32/8 beside 18189 keys B4, 2 heads
    # and 4, 129 us, 140
    fullest = is_few and not ragged
    pack = heads_per_tile_for(heads.q_per_kv, queries, plan.block_m, ragged, not is_few, most, fullest)
    return plan._replace(heads_per_tile=pack, partial=heads.q_per_kv % pack > 0)


def work_of(operands: Operands, plan: Plan, queries: int, keys: int) -> Work:
    """The work of a call whose sequences have so many queries and keys on average."""
    args, heads = operands.args, operands.heads
    # the position of the first query
    first = keys - queries if args.bottom_right else 0
    begin = max(0, first - args.left) if args.left >= 0 else 0
    end = min(keys, first + queries + args.right) if args.right >= 0 else keys
    blocks = cdiv(max(1, end - begin), plan.block_n)
    row_bytes = (operands.d_qk + operands.d_v) * operands.k.tensor.element_size()
    return Work(
        plan.block_m, operands.batch * plan.groups_of(heads) * cdiv(queries, plan.queries), blocks, _block_us(plan),
        # in whole blocks, so that `num_splits_for` finds its result when one key more is there
        operands.batch * blocks * plan.block_n * heads.kv * row_bytes * _reads_of_keys(plan, queries),
        operands.batch * queries * heads.kv * heads.q_per_kv * operands.d_v * 4,
        operands.target.num_sms, operands.target.bandwidth,
    )  # fmt: skip


def _reads_of_keys(plan: Plan, queries: int) -> float:
    """How often the keys of a head are read from memory. Its tiles run together, and find in the L2 what one of them
    has read. But the last one is ahead of the others if some of its consumers have no rows: us, one H200, two
    consumers, as it is and with such consumers made to wait: B4 S132 beside 30120 keys H16/16 D256 884, 722; B2 S157
    beside 51916 H8/8 D128 191, 173."""
    last = queries % plan.queries
    return 1.8 if queries > plan.queries and 0 < last <= plan.queries - plan.queries // plan.consumers else 1


def _block_us(plan: Plan) -> float:
    """The time of one block of keys on an H200 whose SMs are all busy. A block of 128 keys: head dim 64 1.07 us, with
    three consumers 1.45, 96 1.31, 128 1.55; a block of 64 keys: 192 1.21, 256 1.50. Of that, fitted to calls of few
    queries: tiles of 64 rows 0.8, above head dim 192 0.65; of 128 0.9, of 192 1.25."""
    us = plan.block_n / 128 * (0.6 + 0.0037 * (sum(plan.p_qk) + sum(plan.p_v)))
    of_one = 0.65 if sum(plan.p_qk) > 192 else 0.8
    return us * (1.2 if plan.block_n == 64 else 1) * {64: of_one, 128: 0.9, 192: 1.25}[plan.block_m]
