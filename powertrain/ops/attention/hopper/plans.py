"""Tiles of the Hopper forward, heads that share one, splits of the keys, order of tiles; with the measurements."""

import functools
from typing import NamedTuple

from powertrain.ops.attention.operands import Heads, Operands
from powertrain.ops.shapes import cdiv, next_power_of_2


class Plan(NamedTuple):
    """The tiles of a pair of head dims, and of so many queries beside so many keys."""

    p_qk: tuple[int, ...]  # one or two pieces of the head dim of queries and keys, powers of 2; above 256 three or four
    p_v: tuple[int, ...]  # of that of values
    block_n: int = 128
    stages: int = 2
    consumers: int = 2  # warpgroups, 64 rows each
    store_parts: int = 1  # parts in which results leave
    q_slots: int = 2  # tiles whose queries are in shared memory at a time
    q_held: bool = True  # queries are read from registers
    takes_turns: bool = True  # consumers issue their products in a fixed order
    heads_per_tile: int = 1  # heads that share keys in one tile, a power of 2
    partial: bool = False  # the last tile of a group has fewer: results leave as those of splits
    num_splits: int = 1  # parts of the keys, a tile each

    @property
    def splits_columns(self) -> bool:
        """Consumers have the same rows and half of the result's columns each (forward_d512.py)."""
        return len(self.p_v) > 2

    @property
    def block_m(self) -> int:
        return 64 if self.splits_columns else 64 * self.consumers

    @property
    def leaves_parts(self) -> bool:
        return self.num_splits > 1 or self.partial

    @property
    def queries(self) -> int:
        """Of a tile."""
        return self.block_m // self.heads_per_tile

    def groups_of(self, heads: Heads) -> int:
        """Heads that share tiles, of all kv heads."""
        return heads.kv * cdiv(heads.q_per_kv, self.heads_per_tile)


def pieces_of(head_dim: int) -> tuple[int, ...]:
    """The padded head dim: a power of 2, or two of which the second begins within the tensor."""
    widths = (
        (64,), (64, 16), (64, 32), (128,), (128, 32), (128, 64), (256,),
        (128, 128, 64), (128,) * 3, (128, 128, 128, 64), (128,) * 4,
    )  # fmt: skip
    return next(pieces for pieces in widths if head_dim <= sum(pieces))


def plan_for(d_qk: int, d_v: int, queries: int) -> Plan:
    """For head dims, padded with zeros, which TMA fills in, and so many queries a sequence.

    TFLOP/s, bf16, one H200, causal, H32 D64: 2 consumers 475, 3 consumers 532 (S8192); 405, 384 (S2048)."""
    p_qk, p_v = pieces_of(d_qk), pieces_of(d_v)
    if d_qk <= 64 and d_v <= 64:
        if queries > 4096:
            return Plan(p_qk, p_v, consumers=3, q_slots=1, q_held=False)
        return Plan(p_qk, p_v, stages=4)
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


@functools.lru_cache(maxsize=1024)
def heads_per_tile_for(repeats: int, queries: int, block_m: int) -> int:
    """How many of `repeats` heads that share keys stand in one tile: as many as may, where that makes fewer tiles.
    The last tile of a group may have fewer.

    ms, bf16, one H200, B8 D128, 32768 keys, alone and packed: H32/8, 16 queries .67 .35, 64 .70 .40, 96 .73 .73; H64/8,
    16 queries 1.30 .36, 64 1.39 .78."""

    def tiles(pack: int) -> int:
        return cdiv(repeats, pack) * cdiv(queries * pack, block_m)

    packs = [pack for pack in (16, 8, 4, 2, 1) if pack < 2 * repeats]
    pack = min(packs, key=lambda pack: (tiles(pack), repeats % pack > 0))
    return pack if 8 * tiles(pack) <= 7 * tiles(1) else 1


@functools.lru_cache(maxsize=1024)
def num_splits_for(tiles: int, blocks: int, result_bytes: int, sms: int) -> int:
    """Into how many parts the keys of so many tiles, `blocks` each, are cut to fill the SMs; `result_bytes`: of all
    results in float32.

    Reckoned in the time of a block, 1.3 us: a tile costs two beside its own, a second kernel four, and results written
    and read again cost their bytes. Cut where that saves a tenth. ms, bf16, one H200, B1 H32/8 D128, 32768 keys,
    packed, whole, in as many parts as this says, twice and half of that: 16 queries .337, 16 .051, .056 .061; 64 .345,
    8 .067, .072 .104; 128 .338, 4 .115, .121 .191; B8, 16 queries .348, 2 .258, .262."""

    def cost(cuts: int) -> float:
        beside = 4 + 2 * cuts * result_bytes / 5e6 if cuts > 1 else 0
        return cdiv(tiles * cuts, sms) * (cdiv(blocks, cuts) + 2) + beside

    most = min(blocks // 2, 4 * sms // max(1, tiles))
    cuts = min(range(1, max(1, most) + 1), key=cost)
    return cuts if 10 * cost(cuts) <= 9 * cost(1) else 1


def group_for(keys_bytes: int, repeats: int, causal: bool) -> int:
    """Heads whose tiles are taken in turn. TFLOP/s, bf16, one H200, H16 D128: causal S2048 (1 MiB of keys and values a
    head) 2 604, 4 613, 8 621, 16 620; S8192 732, 733, 728, 716; full S8192 1 725, 2 723, 8 710."""
    if not causal:
        return repeats
    return min(8, max(4, next_power_of_2(16 * 2**20 * repeats // max(1, keys_bytes) + 1) // 2))


def plan_of(operands: Operands) -> Plan:
    """The plan of a call. Heads share tiles and keys are split only beside four keys or more a query."""
    args, heads = operands.args, operands.heads
    sequences = max(1, operands.batch) if operands.is_packed else 1
    # of packed sequences on average
    queries, keys = max(1, operands.queries // sequences), max(1, operands.keys // sequences)
    plan = plan_for(operands.d_qk, operands.d_v, queries)
    if 4 * queries > keys or plan.splits_columns:
        return plan
    # a tile has one slope
    if args.slopes is None:
        pack = heads_per_tile_for(heads.q_per_kv, queries, plan.block_m)
        plan = plan._replace(heads_per_tile=pack, partial=heads.q_per_kv % pack > 0)
    tiles = operands.batch * heads.kv * cdiv(heads.q_per_kv, plan.heads_per_tile) * cdiv(queries, plan.queries)
    # the position of the first query
    first = keys - queries if args.bottom_right else 0
    begin = max(0, first - args.left) if args.left >= 0 else 0
    end = min(keys, first + queries + args.right) if args.right >= 0 else keys
    blocks = cdiv(max(1, end - begin), plan.block_n)
    result_bytes = operands.batch * queries * heads.kv * heads.q_per_kv * operands.d_v * 4
    return plan._replace(num_splits=num_splits_for(tiles, blocks, result_bytes, operands.target.num_sms))
