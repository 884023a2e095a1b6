"""Plans of the Hopper backward: which kernel, its tiles, how query heads of a KV head are split, the order of tiles."""

import functools
import math
from typing import NamedTuple

from powertrain.ops.attention.hopper.plans import pieces_of
from powertrain.ops.attention.hopper.tile_order import Stretch, best_group, end_of
from powertrain.ops.attention.operands import OpArguments, Operands
from powertrain.ops.shapes import cdiv, next_power_of_2


class Plan(NamedTuple):
    """Tiles of block_n keys by block_m queries. Scores, dp, dk and dv must fit into a consumer's registers: so tiles
    have 128 keys in backward_kernel.py, 64 in backward_kernel_d256.py, 96 in backward_kernel_d192.py."""

    block_m: int = 64
    block_n: int = 128
    stages: int = 3
    ds_stages: int = 2
    part: int = 32  # columns of dq that the producer computes at a time
    registers: int = 224  # of a consumer's thread; a thread of the producer has 504 - 2 * registers
    group: int = 4  # heads whose tiles are scheduled together
    group_start: int = 2  # deterministic: blocks of queries that a head's tiles should start apart
    stores_weights: bool = False  # p and ds are stored, and later launches multiply them: backward_d512.py
    ahead: bool = False  # the next block's scores are issued behind a block's products for dv and dk
    early: bool = False  # without masks: the wait for queries, and the load of LSE, come before a block's scores


def plan_for(d_qk: int, d_v: int) -> Plan:
    """The plan by head dims, for the kernels that do not store p and ds in memory.

    Measured, ms, bf16, one H200, causal: H32 D64 S8192 2.99 with 128 queries a block, 2.71 with 64, 2.59 with 64
    columns of dq too; H16 D128 S2048 2 heads at a time 0.744, 4 0.737, packed 1.905, 1.855; H8 D256 S8192 64 columns of
    dq and 208 registers 3.08, 32 and 224 3.23; H16 D96 S8192 224 registers 1.833, 208 with `ahead` 1.781; D80 3 stages
    1.597, 4 1.596, full S4096 0.802, 0.798; H16 D192 64 columns of dq 5.226, 32 5.139."""
    if max(d_qk, d_v) > 192:
        return Plan(block_n=64, stages=2, part=64, registers=208, group_start=4)
    if max(d_qk, d_v) > 128:
        return Plan(block_n=64, stages=2, group_start=4)
    if max(d_qk, d_v) <= 64:
        return Plan(stages=4, part=64, registers=208, group_start=8, ahead=True)
    if max(d_qk, d_v) <= 96:
        return Plan(stages=4 if max(d_qk, d_v) <= 80 else 3, part=64, registers=208, ahead=True)
    # dk and dv of different widths are stored through shared memory of their own
    return Plan(stages=2 if 80 < min(d_qk, d_v) <= 96 else 3, early=True)


# three consumers; the producer has 32 registers. Speeds: _prefers_96_keys
PLAN_OF_96_KEYS = Plan(block_n=96, stages=2, registers=160)
PLAN_OF_WEIGHTS = Plan(block_m=128, block_n=128, stores_weights=True)


def why_not_96_keys(d_qk: int, d_v: int, is_plain: bool) -> str | None:
    """Why backward_kernel_d192.py does not take this call, or None. `is_plain`: as `is_plain_call` says."""
    if not 128 < d_qk <= 192 or d_v > 192:
        return f"head dims must be 136 to 192 of query and key and up to 192 of value, are {d_qk} and {d_v}"
    if not is_plain:
        return "it has no deterministic order, no softcap and no ALiBi"
    return None


def is_plain_call(args: OpArguments) -> bool:
    """Neither deterministic nor with a softcap or ALiBi."""
    return not args.deterministic and args.softcap == 0 and args.slopes is None


def why_not_weights(d_qk: int, d_v: int) -> str | None:
    """Why backward_d512.py does not take these head dims, or None."""
    if d_qk != d_v or not 192 < d_qk <= 512 or d_qk % 8:
        return f"head dims must be equal multiples of 8, 200 to 512, are {d_qk} and {d_v}"
    return None


def _queries_of_each(operands: Operands) -> int:
    """Queries of a sequence; of packed sequences their mean."""
    return operands.queries // max(1, operands.batch) if operands.is_packed else operands.queries


def _prefers_weights(operands: Operands) -> bool:
    """Whether backward_d512.py, which stores p and ds, is faster than backward_kernel_d256.py, which serves head dims
    of 200 to 256 as well.

    A tile of the latter costs 10 us in addition to its blocks, so short sequences are slow. The former is slow for long
    sequences with grouped-query attention, for which dk and dv are accumulated in memory from chunk to chunk. ms, one
    H200, causal, weights in memory and not: D256 B4 S583 28/4 0.246, 0.309; B8 0.415, 0.552; B8 S1024 16/16 0.568,
    0.607; B4 S1000 16/4 0.328, 0.319; D224 B2 S1500 32/8 0.583, 0.636; B4 S2048 16/16 1.079, 0.948; B2 S2048 32/8
    1.051, 0.936; B2 S4096 16/4 1.763, 1.685; B1 S5275 32/8 3.25, 2.74; B1 S8192 32/8 6.89, 6.14; B2 S8192 8/8 2.92,
    3.07, full 5.46, 6.10; D224 2.93, 3.20. Few tiles: B4 S930 12/1 0.268, 0.215; D224 S1338 12/1 0.235, 0.144; few
    rows: packed 51 of 144 16/16 0.71, 0.44. In a fixed order of sums backward_kernel_d256.py took 4.18 for B2 S8192
    8/8, so backward_d512.py is taken."""
    args = operands.args
    if why_not_weights(operands.d_qk, operands.d_v):
        return False
    each = _queries_of_each(operands)
    seen = each // 2 if args.right >= 0 else each
    if args.left >= 0 and args.right >= 0:
        seen = min(seen, args.left + args.right + 1)
    if args.deterministic:
        return not operands.is_packed or each >= 512
    if each > 1536 and (operands.heads.q_per_kv > 1 or seen < 3072):
        return False
    tiles = operands.storage * operands.heads.kv * cdiv(operands.keys, 128)
    return operands.heads.q_per_kv * seen >= 500 and tiles >= 64


def _prefers_96_keys(operands: Operands) -> bool:
    """Whether tiles of 96 keys are faster than tiles of 64, at head dims of 136 to 192, by an estimate of the time of
    all tiles on all SMs. A block of queries takes less time for each key of 96, but there are half as many tiles again
    of 64 keys.

    Backward in ms, one H200, 64 keys and 96, query heads of a KV head split as chosen: D192 B2 S8192 16/16 5.07, 4.21;
    B8 S1000 .499, .450; B1 S904 8/8 .059, .067; B2 S417 full .067, .076; B3 S5550 12/1 full 5.13, 4.32 (`repeats`
    splits); B1 S2048 16/2 .210, .242. D160 B2 S8192 4.40, 3.82; B8 S1000 .441, .410; B1 S900 8/8 .052, .061; B1 S8192
    32/8 full 8.91, 7.66; B4 S2048 32/8 1.281, 1.207; B1 S3640 28/4 .870, .823; B1 S1000 8/1 .057, .069."""
    widest = max(operands.d_qk, operands.d_v)
    blocks, heads, sms = cdiv(max(1, _queries_of_each(operands)), 64), operands.heads, operands.target.num_sms

    def us(plan: Plan, splits: int) -> float:
        tiles = operands.storage * heads.kv * splits * operands.likely_key_blocks(plan.block_n)
        longest = heads.q_per_kv // splits * blocks
        if operands.args.right < 0:
            return _block_us(plan, widest) * cdiv(tiles, sms) * longest
        return _block_us(plan, widest) * max(longest, tiles * longest / 2 / sms)

    narrow = plan_for(operands.d_qk, operands.d_v)
    splits = _splits_of(operands, PLAN_OF_96_KEYS)
    # parts of wider tiles add half as much again to the sums of dk and dv
    margin = 5 if splits == 1 else 30
    return us(PLAN_OF_96_KEYS, splits) + margin < us(narrow, _splits_of(operands, narrow))


def plan_of(operands: Operands) -> Plan:
    """The plan of a call."""
    plan, widest = plan_for(operands.d_qk, operands.d_v), max(operands.d_qk, operands.d_v)
    if widest > 256 or (widest > 192 and _prefers_weights(operands)):
        return PLAN_OF_WEIGHTS
    if why_not_96_keys(operands.d_qk, operands.d_v, is_plain_call(operands.args)) is None:
        # the other kernels have one range of head dims for both
        if operands.d_v <= 128 or _prefers_96_keys(operands):
            return PLAN_OF_96_KEYS
    return plan


class Schedule(NamedTuple):
    """How many tiles a block of keys has, and in which order tiles are computed."""

    num_splits: int  # splits of the query heads of a KV head; each split has a tile of its own
    group: int  # heads whose tiles are scheduled together
    late_blocks: int  # the last blocks of keys of each head, whose tiles come after those of all other blocks
    longest_first: bool  # packed sequences are taken in the order of their lengths


def schedule_of(operands: Operands, plan: Plan) -> Schedule:
    blocks = operands.key_blocks(plan.block_n)
    args, heads, num_sms = operands.args, operands.heads, operands.target.num_sms
    queries, is_causal = _queries_of_each(operands), args.right >= 0 and args.left < 0
    num_splits = _splits_of(operands, plan)
    repeats, of_heads = heads.q_per_kv // num_splits, operands.storage * heads.kv * num_splits
    group, late, longest_first = plan.group, 0, False
    if args.deterministic:
        group = deterministic_swizzle(plan, queries, repeats, args, num_sms)
        # with a window nearly all tiles take the same time, and with tiles of 64 keys it is slower: S2048 B8 H8 D256
        # 0.981 without late blocks, 0.995 with them
        if is_causal and not operands.is_packed and plan.block_n == 128:
            late = late_blocks_for(of_heads, blocks, num_sms)
    else:
        if is_causal and operands.lengths_are_known:
            head_bytes = repeats * queries * _query_bytes(operands)
            filled = operands.likely_key_blocks(plan.block_n)
            group, late = causal_order_for(of_heads, filled, plan.block_n, repeats, group, num_sms, head_bytes)
        if operands.is_packed:
            longest_first = operands.batch >= 8 and of_heads * blocks < _TILES_IN_ANY_ORDER
            if longest_first or operands.batch == 1:
                # those without keys come last
                late += operands.batch + 1
    return Schedule(num_splits, group, late, longest_first)


def _query_bytes(operands: Operands) -> int:
    """Bytes of one query of one head: q and do in 16 bits, dq in float32."""
    return 6 * operands.d_qk + 2 * operands.d_v


def _splits_of(operands: Operands, plan: Plan, misses: bool = True) -> int:
    """The number of splits of the query heads of a KV head. Without `misses` the estimate ignores reads that miss the
    L2."""
    args, heads, blocks = operands.args, operands.heads, operands.likely_key_blocks(plan.block_n)
    if heads.q_per_kv == 1:
        return 1
    queries, widest = _queries_of_each(operands), max(operands.d_qk, operands.d_v)
    seen = min(queries, args.left + plan.block_n) if args.left >= 0 else queries
    # whole tiles are added, however few keys they have
    rows = operands.storage * heads.kv * operands.key_blocks(plan.block_n) * plan.block_n
    keys_bytes = rows * (operands.d_qk + operands.d_v) * 4
    return head_splits_for(
        operands.storage * heads.kv * blocks, cdiv(max(1, seen), plan.block_m), heads.q_per_kv,
        args.right >= 0 and args.left < 0, keys_bytes, args.deterministic, operands.target.num_sms,
        _block_us(plan, widest), widest > 128, plan.block_n * _query_bytes(operands) if misses else 0,
    )  # fmt: skip


# of so many, those that run last are few: an order by length changes nothing, and costs the launch before some time.
# ms, one H200, causal, in the order of the sequences and by length; FlashAttention-3: D128 16 of 125 to 1875 32/8
# 1.102 1.056; 1.239. 16/2 0.586 0.545; 0.562. 28/4 of 222 to 3337 3.165 3.053; 3.037. 16/16 0.589 0.576; 0.533. 100 of
# 37 to 562 32/8 1.297 1.288; 1.845. D64 50 of 75 to 1125 32/8 0.854 0.813; 1.276. D160 16 of 222 to 3337 12/1 2.506
# 2.147; 1.755 (in two parts 1.844). Slower: 4 of 500 to 7500 64/8 8.20 8.40
_TILES_IN_ANY_ORDER = 16384
# SMs of the H100 SXM and H200. In a fixed order, dk and dv are sums over the parts, so the number of parts decides how
# they are rounded: it must be the same on every Hopper GPU
_SMS_IF_DETERMINISTIC = 132
# microseconds that a block of 64 queries takes in a tile of 64 keys and in one of 96, by padded head dim; from B2 S8192
# causal (64 keys: 16/16 4.40 ms and 5.07, 8/8 3.08; 96 keys 3.82 and 4.20). Narrower head dims have tiles of 128 keys
_BLOCK_US = {64: {160: 2.2, 192: 2.5, 256: 3.1}, 96: {160: 2.75, 192: 3.0}}


def _block_us(plan: Plan, widest: int) -> float:
    return _BLOCK_US.get(plan.block_n, {}).get(width_of(widest), 2.1)


# what tiles read together from which their reads miss the L2, and what as many again cost
_AT_WORK_BYTES, _MISSES_PENALTY = 70e6, 0.25


@functools.lru_cache(maxsize=1024)
def head_splits_for(
    tiles: int, longest: int, repeats: int, is_causal: bool, keys_bytes: int, deterministic: bool, num_sms: int,
    block_us: float = 2.1, is_wide: bool = False, tile_bytes: int = 0,
) -> int:  # fmt: skip
    """The number of splits, a divisor of `repeats`, of the query heads of a KV head. Each split is a tile of its own.

    tiles       tiles of keys, heads not split
    longest     blocks of queries of one head in the longest tile; under a causal mask a tile has half on average
    repeats     query heads of a KV head
    keys_bytes  bytes of dk and dv in float32: zeroed first, added to by all splits in the L2, read once at the end;
                if deterministic, each split writes its own, which are read at the end
    block_us    microseconds of a block of queries
    is_wide     tiles have 64 keys
    tile_bytes  of q, do and dq of as many queries of a head as a tile has keys

    The least estimated time is chosen, in units of a block of queries. A tile costs three units in addition to its
    blocks. In one unit memory moves 6 MB; the sums of splits cost one unit and the traffic of 3.4 + 1.1 * splits times
    `keys_bytes`, if deterministic ten units and 2 * splits times `keys_bytes`. The longest tile is started first, yet
    SMs that wait for it at the end cost 0.41 of its time, 0.25 if deterministic, a tenth where heads are split. Fitted
    to head dim 128.

    Under a causal mask a tile starts when a shorter one has ended, `2 * repeats` blocks of 64 queries behind the tile
    of the keys before. What all SMs read in that time must stay in the L2, or each tile reads q and do from memory, and
    adds to dq there; not if deterministic, where tiles take the same queries at the same time. ms, D128 where not said,
    with 1, 2, 4 and `repeats` splits; FlashAttention-3; one H100: D112 64/8 B2 S11478 25.2 19.7 18.7 19.2; 18.3. 64/8
    B2 S8192 11.0 9.88 9.44 9.97; 9.62. 28/4 B1 S16384 8.57 - - 7.99; 7.70. 32/8 B1 S16384 9.12 9.12 9.28; 9.06. One
    H200, whose memory is faster: B2 S8192 9.89 9.37 9.61 9.79; 9.44. 28/4 8.00 - - 7.80; 7.71. 32/8 9.04 9.13 9.26;
    8.99. 64/8 B4 S2048 1.61 1.45 1.46 1.51; 1.50. B4 S1000 .533 .492 .492 .528; .531. 40/8 B2 S3000 1.00 - - .950;
    .928. D160 12/1 B16 S1780 1.83 1.56 - 1.64; 1.49.

    Where `is_wide`, fewer problems are split. Forward and backward with 1, 2 and `repeats` splits: D256 16/4 B2 S2048
    0.590, 0.649, 0.684; 8/1 B1 S1000 0.417, 0.247, 0.116; D224 28/4 B1 S3640 2.18, -, 1.60, deterministic 1.96, -,
    2.11; D192 32/8 B4 S512 0.257, 0.296, 0.326. ms, bf16, one H200, causal D128, with 1, 2 and `repeats` splits: 28/4
    B3 S3000 1.078, -, 0.986; B1 S4096 0.947, -, 0.581; B1 S8192 2.089, -, 2.007; B1 S16384 8.26, -, 8.50; 32/8 B1 S2048
    0.304, 0.218, 0.225; B4 S2048 0.781, 0.792, 0.813; B2 S8192 4.47, 4.61, 4.71; 64/8 B2 S4096 2.84, 2.51, 2.53; full
    28/4 B3 S3000 2.07, -, 1.73; 32/8 B1 S2048 0.309, 0.338, 0.351. With all sums in one launch, us: 32/8 B1 S128 32.7,
    -, 22.2; B2 S512 90.9, 70.6, 68.0; B4 S512 110, 122, 132; B8 S256 81, 111, 125; B16 S128 69, 104, 116; B4 S1000 255,
    286, 294; 64/8 B1 S128 49.9, 36.4, 24.9; 28/4 B2 S2048 507, -, 355."""
    if deterministic:
        num_sms = _SMS_IF_DETERMINISTIC
    mean = tiles * repeats * longest / (2 if is_causal else 1) / num_sms

    def excess(heads: int) -> float:
        return 0.0 if deterministic else max(0.0, heads * tile_bytes * num_sms / _AT_WORK_BYTES - 1)

    # nothing is split where the longest tile is no more than this share of the mean work of an SM: where 8 heads or
    # more share keys it is the least, as measured; it is more if deterministic, as each part's sums cost more, and for
    # tiles of 64 keys, of which there are twice as many
    share = 1.0 if deterministic else 0.4 if repeats >= 8 else 0.55
    if is_wide:
        share = 1.3 if deterministic else 1.1
    # D192 32/8 B2 S2048 with 96 keys a tile, an excess of 0.11: 0.694 ms, in two parts 0.745
    if is_causal and repeats * longest <= share * mean and excess(repeats) < 0.2:
        return 1

    def cost(splits: int) -> float:
        tile = repeats // splits * longest + 3
        if is_causal:
            waits = tile * (0.1 if splits > 1 else 0.25 if deterministic else 0.41)
            work = mean * (1 + _MISSES_PENALTY * excess(repeats // splits))
            spent = max(tile, work + 3 * tiles * splits / num_sms + waits)
        else:
            spent = cdiv(tiles * splits, num_sms) * tile
        apart, moved = (10, 2 * splits) if deterministic else (1, 3.4 + 1.1 * splits)
        return spent + ((apart + moved * keys_bytes / 6e6) * 2.1 / block_us if splits > 1 else 0)

    return min((n for n in range(1, repeats + 1) if repeats % n == 0), key=lambda n: (cost(n), n))


def late_blocks_for(heads: int, blocks: int, num_sms: int) -> int:
    """How many of each head's last blocks of keys come after the other blocks of all heads, under a causal mask. Their
    tiles are short, n^2 blocks of queries a head for n of them, and fill the SMs that the longest tiles leave idle."""
    return min(blocks // 2, math.isqrt(num_sms * blocks // max(1, heads)))


# q, do and dq of a group of heads from which their reads miss the L2 more often, and what as many again cost
_GROUP_BYTES, _GROUP_PENALTY = 70e6, 0.15
# what late blocks cost beside the end, which they bring forward
_LATE_PENALTY = 0.2


@functools.lru_cache(maxsize=1024)
def causal_order_for(
    heads: int, blocks: int, block_n: int, repeats: int, group: int, num_sms: int, head_bytes: int
) -> tuple[int, int]:  # fmt: skip
    """(heads whose tiles are scheduled together, late blocks of each), under a causal mask.

    The tiles of late blocks read queries and do, and add to dq, when the L2 holds them no longer. With `repeats` query
    heads a tile that costs up to a quarter of all time on an H100, whose memory has 0.7 of an H200's bandwidth. So
    groups of heads serve whose tiles end on all SMs at nearly the same time (tile_order.py). `head_bytes`: of q, do and
    dq of the `repeats` heads.

    ms, one H100, D128, late blocks in groups of 4, none in groups of 8, 12, 16, 32; FlashAttention-3: B8 S1000 32/8
    .714 .568 .575 .550 .589; .654. B12 S700 32/8 .582 .537 .522 .488 .503; .630. B6 S1200 40/8 .881 .720 .697 .701
    .795; .791. B3 S2500 24/8 .731 .667 .641 .702 .670; .745, in groups of 6 .638. B16 S512 32/8 .545 .485 .476 .465
    .446; .576. B9 S2048 16/2 1.115 1.072 .950 1.122 1.318; .930, in groups of 9 .972. B2 S5000 32/8 2.052 2.115;
    1.944, in groups of 4 1.966. B2 S8192 32/8 4.653 4.672; 4.602. One query head a tile, all late blocks in groups of
    4, two of them, none in groups of 8: B8 S2048 16/16 0.817, 0.785, 0.788; 0.779; B3 S3000 28/4 1.048, 1.038, 1.077;
    1.060. Not timed: an H200, where late blocks gained 1 to 2 %."""
    late = late_blocks_for(heads, blocks, num_sms) if block_n == 128 else 0
    if block_n != 96 and repeats == 1:
        return group, min(late, 2) if heads * blocks >= 8 * num_sms else late
    if blocks * block_n >= 56 * 128:
        return group, 0
    # of the tiles of a head, in blocks of 64 queries; what a tile costs beside is three
    times = tuple(repeats * cdiv((blocks - block) * block_n, 64) + 3 for block in range(blocks))
    size, cost = best_group(heads, times, num_sms, head_bytes, _GROUP_BYTES, _GROUP_PENALTY)
    early, behind = times[: blocks - late], times[blocks - late :]
    with_late = end_of([Stretch(heads, group, early), Stretch(heads, heads, behind)], num_sms)
    return (size, 0) if cost <= with_late + _LATE_PENALTY else (group, late)


def deterministic_swizzle(plan: Plan, queries: int, repeats: int, args: OpArguments, num_sms: int) -> int:
    """The number of heads whose tiles are scheduled together, where tiles add to dq in a fixed order. Each tile waits
    for the tile before it of the same head; with so many heads they start about `group_start` blocks of queries apart.

    ms, bf16, one H200, causal, groups of 4, 8, 16, 32: D128 H16 S2048 1.215, 0.933, 0.905, 0.916; S8192 2.739, 2.747,
    2.793, 2.945; D64 H32 S2048 1.734, 1.257, 1.093, 1.002; S8192 3.486, 3.144, 3.096, 3.124; D256 H8 S8192 4.325,
    4.180, 4.461, 4.438."""
    seen = queries // 2 if args.right >= 0 else queries
    if args.left >= 0:
        seen = min(seen, args.left + 128)
    blocks = max(1, repeats * seen // plan.block_m)
    return min(32, max(4, next_power_of_2(plan.group_start * num_sms // blocks)))


def width_of(head_dim: int) -> int:
    """The padded head dim."""
    return sum(pieces_of(head_dim))
