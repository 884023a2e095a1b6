"""Which tile of keys has which heads, in which order tiles come, and how sums of split heads become dk and dv."""

import heapq
import random
from typing import Any

import pytest
import torch
import triton.language as tl

from powertrain.ops.attention.hopper import backward, backward_plans, plans, tile_order
from powertrain.ops.attention.operands import OpArguments, Operands
from powertrain.ops.attention.triton.sequences import key_tile_coords
from powertrain.ops.shapes import cdiv
from powertrain.runtime.launch import kernel
from powertrain.runtime.recording import record

SMS = 132


@kernel()
def _coords_kernel(to_ptr, blocks, late_blocks, heads, swizzle):
    tile = tl.program_id(0)
    block, head = key_tile_coords(tile, blocks, late_blocks, heads, swizzle)
    tl.store(to_ptr + 2 * tile, block)
    tl.store(to_ptr + 2 * tile + 1, head)


@pytest.mark.kernels
@pytest.mark.parametrize("seed", range(6))
def test_every_block_of_every_head_has_one_tile(seed: int, device: torch.device) -> None:
    draws = random.Random(seed)
    blocks, heads, swizzle = draws.randint(1, 9), draws.randint(1, 7), draws.randint(1, 9)
    late = draws.randint(0, blocks // 2)
    coords = torch.empty(blocks * heads, 2, dtype=torch.int32, device=device)
    _coords_kernel[(blocks * heads,)](coords, blocks, late, heads, swizzle)
    places = [(int(block), int(head)) for block, head in coords.tolist()]
    assert sorted(places) == [(block, head) for block in range(blocks) for head in range(heads)]
    for head in range(heads):  # tiles that add to dq in turn wait for those of the keys before
        assert [block for block, h in places if h == head] == list(range(blocks))
    assert all(block >= blocks - late for block, _ in places[(blocks - late) * heads :])


def _order_of_threads(x: torch.Tensor) -> torch.Tensor:
    """[64, W] as the threads of a warpgroup hold it: 8 columns, warp, row of 8, 2 columns, which 8 rows, column."""
    return x.view(4, 2, 8, -1, 4, 2).permute(3, 0, 2, 4, 1, 5).flatten()


@pytest.mark.kernels
@pytest.mark.parametrize(
    "width, head_dim, splits, tile", [(64, 64, 2, 128), (96, 72, 3, 128), (128, 128, 1, 128), (192, 168, 2, 64)]
)
def test_sums_of_parts_of_the_heads(width: int, head_dim: int, splits: int, tile: int, device: torch.device) -> None:
    """Two batch entries, two heads, 150 keys: the last tile is cut off, and an entry has 100 of its keys in use. dq of
    two query heads for each, 70 queries; each result that is not wanted leaves the others as they are."""
    torch.manual_seed(0)
    used = torch.tensor([150, 100], dtype=torch.int32, device=device)
    blocks, slots, narrow = cdiv(150, tile), 2, 80  # of dv's sums
    of_dk, of_dv = (torch.randn(2, 2, splits, blocks, tile // 64, 64, w, device=device) for w in (width, narrow))
    of_dq = torch.randn(2, 4, slots, 64, width, device=device)  # entry, head, tile
    sums = [torch.stack([_order_of_threads(x) for x in y.flatten(0, -3)]) for y in (of_dq, of_dk, of_dv)]
    for wanted in ((True, True, True), (False, True, False), (True, False, True), (True, False, False)):
        shapes = (2, 70, 4, head_dim), (2, 150, 2, head_dim), (2, 150, 2, 72)
        results = [torch.full(shape, float("nan"), device=device) for shape in shapes]
        dq, dk, dv = (x if is_wanted else None for x, is_wanted in zip(results, wanted, strict=True))
        k_programs = 2 * 2 * blocks * tile // 64
        strides = [x.stride() for x in results]
        backward._hopper_attention_sums_kernel[(2 * 4 * slots * wanted[0] + k_programs * sum(wanted[1:]),)](
            *(x if is_wanted else None for x, is_wanted in zip(sums, wanted, strict=True)), dq, dk, dv,
            None, None, None, used, 2, 70, 150, slots, blocks, 2, 2, splits, k_programs, 0.5,
            strides[0][0], strides[0][1], 2 * head_dim, head_dim, *strides[1][:3], *strides[2][:3],
            D_QK=head_dim, D_V=72, W_DQ=width, W_QK=width, W_V=narrow, BLOCK_M=64, BLOCK_N=tile,
            SPLIT_HEADS=splits > 1, STARTS_EARLY=False,
        )  # fmt: skip
        if dq is not None:
            expected = 0.5 * of_dq.flatten(2, 3)[:, :, :70, :head_dim].transpose(1, 2)
            torch.testing.assert_close(dq, expected)
        for x, parts, scale in ((dk, of_dk, 0.5), (dv, of_dv, 1.0)):
            if x is not None:
                expected = scale * parts.sum(2).flatten(2, 4)[:, :, :150, : x.shape[-1]].transpose(1, 2)
                expected[1, 100:] = 0
                torch.testing.assert_close(x, expected)
        assert all(x.isnan().all() for x, is_wanted in zip(results, wanted, strict=True) if not is_wanted)


@pytest.mark.kernels
@pytest.mark.parametrize("key_sums", [1, 4096, 30000])
def test_the_first_launch_clears_the_sums(key_sums: int, device: torch.device) -> None:
    """Three programs, of 130 queries; sums of dq of 80 columns; no more of the sums of dk and dv than there are."""
    torch.manual_seed(0)
    out, dout = (torch.randn(1, 130, 1, 80, device=device) for _ in range(2))
    lse = torch.randn(1, 1, 130, device=device)
    rows, sums = (torch.full((size,), float("nan"), device=device) for size in (3 * 128, 3 * 64 * 80))
    of_keys, counter = torch.ones(key_sums + 1, device=device), torch.ones(1, dtype=torch.int32, device=device)
    backward._hopper_attention_bwd_preprocess_kernel[(3,)](
        out, dout, lse, None, rows, sums, None, counter, of_keys, None, None, None, None,
        1, 130, 3, 1, 1, 1, 1, key_sums, 0, *out.stride()[:3], 0, *dout.stride()[:3], 0,
        D_V=80, W_QK=80, W_V=80, BLOCK_M=64, BLOCK_N=128, STARTS_EARLY=False,
    )  # fmt: skip
    assert not of_keys[:-1].any() and of_keys[-1] == 1 and counter.item() == 0
    assert not sums.any()
    delta = rows.view(3, 2, 64)[:, 1].flatten()[:130]
    torch.testing.assert_close(delta, (out * dout).sum(-1).flatten())


def _time(
    batch: int, length: int, heads: int, kv_heads: int, splits: int, late: int, swizzle: int
) -> tuple[float, float]:
    """(time, share of it that SMs are busy) of a causal backward by SMs that take the next tile when they are free, in
    the time of a block of 64 queries; a tile costs three blocks beside its own."""
    blocks, repeats = cdiv(length, 128), heads // kv_heads // splits
    all_heads = batch * kv_heads * splits
    early = blocks - late
    order = [
        n
        for first in range(0, all_heads, swizzle)
        for n in range(early)
        for _ in range(min(swizzle, all_heads - first))
    ]
    order += [n for n in range(early, blocks) for _ in range(all_heads)]
    free = [0.0] * SMS
    spent = [3 + repeats * (cdiv(length, 64) - 2 * n) for n in order]
    for each in spent:
        heapq.heapreplace(free, free[0] + each)
    return max(free), sum(spent) / SMS / max(free)


# batch, length, heads, kv heads; parts of the heads that were the fastest on an H200, or within 1% of it
SPLITS = [
    ((3, 3000, 28, 4), 7),
    ((4, 2048, 32, 8), 1),
    ((1, 2048, 32, 8), 2),
    ((1, 4096, 28, 4), 7),
    ((1, 1000, 32, 8), 4),
    ((8, 1000, 28, 4), 1),
    ((8, 2048, 16, 16), 1),
    ((2, 5000, 32, 8), 1),
    ((2, 8192, 32, 8), 1),
    ((1, 8192, 28, 4), 7),
    ((1, 16384, 28, 4), 7),
    ((1, 16384, 32, 8), 1),
    ((2, 4096, 64, 8), 2),
    ((2, 8192, 64, 8), 2),
    ((1, 32768, 64, 8), 2),
    ((4, 1000, 64, 8), 2),
    ((4, 2048, 64, 8), 2),
    ((2, 2048, 48, 8), 2),
    ((9, 2048, 16, 2), 2),
    ((2, 8192, 64, 4), 4),
    ((2, 3000, 40, 8), 5),
]


def _parts(sizes: tuple[int, int, int, int], is_causal: bool, deterministic: bool = False) -> int:
    batch, length, heads, kv_heads = sizes
    return backward_plans.head_splits_for(
        batch * kv_heads * cdiv(length, 128), cdiv(length, 64), heads // kv_heads, is_causal,
        batch * length * kv_heads * 256 * 4, deterministic, SMS, tile_bytes=128 * 1024,
    )  # fmt: skip


@pytest.mark.parametrize("sizes, splits", SPLITS, ids=lambda x: str(x).replace(" ", ""))
def test_sms_are_busy(sizes: tuple[int, int, int, int], splits: int) -> None:
    batch, length, heads, kv_heads = sizes
    assert _parts(sizes, True) == splits
    blocks = cdiv(length, 128)
    of_heads, repeats = batch * kv_heads * splits, heads // kv_heads // splits
    group, late = backward_plans.causal_order_for(of_heads, blocks, 128, repeats, 4, SMS, repeats * length * 1024)
    assert late <= blocks // 2
    time, busy = _time(*sizes, splits, late, group)
    before, _ = _time(*sizes, 1, 0, 4)
    assert busy > 0.92
    assert time < 1.05 * before


# heads, blocks, query heads a tile; heads scheduled together and late blocks, on one H100 the best or within 4 % of it
@pytest.mark.parametrize(
    "heads, blocks, repeats, order",
    [
        (32, 16, 4, (8, 0)), (64, 8, 4, (16, 0)), (128, 8, 4, (16, 0)), (32, 16, 8, (8, 0)), (16, 64, 4, (4, 0)),
        (128, 16, 1, (4, 2)), (84, 24, 1, (4, 2)), (16, 16, 2, (8, 0)), (28, 32, 1, (4, 12)), (28, 35, 4, (4, 0)),
    ],
)  # fmt: skip
def test_late_blocks_are_fewer_where_they_cost_memory(
    heads: int, blocks: int, repeats: int, order: tuple[int, int]
) -> None:
    head_bytes = repeats * blocks * 128 * 1024
    assert backward_plans.causal_order_for(heads, blocks, 128, repeats, 4, SMS, head_bytes) == order


def test_heads_are_split_only_where_that_saves_more_than_it_costs() -> None:
    assert _parts((3, 3000, 28, 4), False) == 7  # 288 tiles are three waves
    assert _parts((1, 2048, 32, 8), False) == 1  # 128 tiles are one
    assert _parts((1, 128, 32, 8), True) == _parts((1, 128, 32, 8), False) == 4  # 8 tiles for 132 SMs
    assert _parts((1, 128, 32, 8), True, True) == 1  # sums of each part cost more
    few = [backward_plans.head_splits_for(16, 16, 8, False, size, False, SMS) for size in (2**20, 2**34)]
    assert few == [8, 1]  # 16 tiles for 132 SMs; sums of 17 GB
    assert _parts((8, 4096, 32, 32), True) == 1


def test_deterministic_heads_are_split_where_a_tile_is_longer_than_an_sms_share() -> None:
    """Each part has sums of its own there, to be stored and read. Their number decides the order of additions, so it is
    the same on GPUs with fewer SMs."""
    for sms in (1, 50, 114):
        assert backward_plans.head_splits_for(4 * 32, 64, 7, True, 2**24, True, sms) == backward_plans.head_splits_for(
            4 * 32, 64, 7, True, 2**24, True, SMS
        )
    assert [_parts(sizes, True, True) for sizes, _ in SPLITS[:5]] == [1, 1, 2, 7, 4]


def test_tiles_of_64_keys_are_reckoned_in_longer_blocks() -> None:
    """One kv head and 635 tokens are ten tiles: a part for each query head. Launches beside are fewer blocks."""
    assert backward_plans.head_splits_for(12, 10, 12, True, 2**20, False, SMS, 3.1) == 12
    few = [backward_plans.head_splits_for(2, 8, 2, True, 2**23, False, SMS, block_us) for block_us in (2.1, 3.1)]
    assert few == [1, 2]


def test_packed_sequences_are_ordered_where_the_last_tiles_are_many_of_all() -> None:
    def is_ordered(sizes: tuple[int, ...], **given: Any) -> bool:
        operands = _operands(1, *sizes, **given)
        return backward_plans.schedule_of(operands, backward_plans.plan_of(operands)).longest_first

    assert is_ordered((1000, 32, 8, 128, 16)) and is_ordered((1780, 12, 1, 160, 16), right=-1)
    assert not is_ordered((4000, 64, 8, 128, 4))  # few sequences
    assert not is_ordered((1000, 32, 8, 128, 0))  # not packed
    assert not is_ordered((2, 8, 8, 80, 4000))  # 32000 tiles: the last wave is a part in 240
    # a tile waits there for the one before it of the same sequence: groups of heads are chosen for that
    assert not is_ordered((1000, 32, 8, 128, 16), deterministic=True)


def test_one_packed_sequence_is_scheduled_as_one_of_a_batch() -> None:
    """Its length is known. Blocks behind its keys, and behind those of sequences in their order, come last."""
    for length in (137, 600, 4096, 16384):
        for heads in ((32, 8, 128), (28, 4, 128), (12, 12, 64)):
            alone, packed = _operands(1, length, *heads), _operands(1, length, *heads, 1)
            plan = backward_plans.plan_of(alone)
            assert plan == backward_plans.plan_of(packed)
            schedule = backward_plans.schedule_of(alone, plan)
            late = schedule.late_blocks + 2
            assert backward_plans.schedule_of(packed, plan) == schedule._replace(late_blocks=late)
            assert plans.group_of(alone, plans.plan_of(alone)) == plans.group_of(packed, plans.plan_of(alone))
    many = _operands(1, 1000, 32, 8, 128, 16)
    assert backward_plans.schedule_of(many, backward_plans.plan_of(many)).late_blocks == 17


def test_blocks_of_packed_keys_are_reckoned() -> None:
    draw = random.Random(0)
    for count in (1, 2, 8, 64):
        lengths = [draw.randint(20, 300) for _ in range(count)]
        operands = _operands(1, 1, 8, 8, 64, count)._replace(keys=sum(lengths))
        used = sum(cdiv(length, 128) for length in lengths)
        assert abs(operands.likely_key_blocks(128) - used) <= max(1, used // 10)


def _operands(
    batch: int, length: int, heads: int, kv_heads: int, head_dim: int, sequences: int = 0, **given: Any
) -> Any:
    """Of a batch, or of so many packed sequences of that length."""
    rows = (sequences * length,) if sequences else (batch, length)
    q, k = (torch.empty(*rows, n, head_dim, dtype=torch.bfloat16, device="meta") for n in (heads, kv_heads))
    if sequences:
        starts = torch.empty(sequences + 1, dtype=torch.int32, device="meta")
        given |= {"layout": "thd", "query_starts": starts, "key_starts": starts}
    with record("H200"):
        return Operands.of(q, k, k, OpArguments(*(None,) * 11, "bshd", 0.1, 0.0, 0.0, -1, 0, 0, True)._replace(**given))


# (batch, length, heads, kv heads, packed sequences), head dim, whether it is causal, keys of a tile, and parts of the
# heads that share keys: as measured on one H200
@pytest.mark.parametrize(
    "sizes, head_dim, right, keys, parts",
    [
        ((8, 1000, 16, 16, 0), 192, 0, 96, 1), ((2, 8192, 16, 16, 0), 192, 0, 96, 1),
        ((4, 3000, 16, 16, 0), 192, -1, 96, 1), ((1, 904, 8, 8, 0), 192, -1, 64, 1),
        ((1, 417, 16, 16, 0), 192, 0, 64, 1), ((8, 2, 8, 8, 0), 192, 0, 64, 1), ((3, 5550, 12, 1, 0), 192, -1, 96, 3),
        ((1, 26, 8, 8, 3), 192, -1, 64, 1), ((1, 8192, 64, 8, 0), 192, 0, 96, 4), ((2, 2048, 32, 8, 0), 192, 0, 96, 1),
        ((2, 8192, 16, 16, 0), 160, 0, 96, 1), ((8, 1000, 16, 16, 0), 160, 0, 96, 1),
        ((4, 3000, 16, 16, 0), 160, -1, 96, 1), ((1, 900, 8, 8, 0), 160, 0, 64, 1),
        ((2, 417, 16, 16, 0), 160, -1, 64, 1), ((1, 8192, 32, 8, 0), 160, -1, 96, 4),
        ((1, 3640, 28, 4, 0), 160, 0, 96, 7), ((1, 1000, 8, 1, 0), 160, 0, 64, 8), ((1, 4497, 32, 8, 0), 136, 0, 96, 1),
    ],
    ids=str,
)  # fmt: skip
def test_keys_of_a_tile_at_head_dims_to_192(
    sizes: tuple[int, ...], head_dim: int, right: int, keys: int, parts: int
) -> None:
    batch, length, heads, kv_heads, sequences = sizes
    operands = _operands(batch, length, heads, kv_heads, head_dim, sequences, right=right)
    plan = backward_plans.plan_of(operands)
    assert (plan.block_n, backward_plans.schedule_of(operands, plan).num_splits) == (keys, parts)


@pytest.mark.parametrize(
    "sizes, head_dim, right, stores",
    [
        ((2, 8192, 8, 8, 0), 256, 0, True), ((4, 1000, 16, 4, 0), 256, 0, True),
        ((4, 583, 28, 4, 0), 256, 0, True), ((8, 1024, 16, 16, 0), 256, 0, True), ((2, 1500, 32, 8, 0), 224, 0, True),
        ((2, 4096, 16, 4, 0), 256, 0, False), ((1, 5275, 32, 8, 0), 256, 0, False),
        ((1, 8192, 32, 8, 0), 256, 0, False), ((2, 2048, 32, 8, 0), 256, 0, False),
        ((4, 930, 12, 1, 0), 256, 0, False), ((8, 2048, 8, 8, 0), 256, 0, False),
        ((1, 1338, 12, 1, 0), 224, 0, False), ((1, 63, 28, 4, 153), 224, -1, False),
        ((1, 144, 16, 16, 51), 256, 0, False),
    ],
    ids=str,
)  # fmt: skip
def test_weights_in_memory_at_head_dims_to_256(sizes: tuple[int, ...], head_dim: int, right: int, stores: bool) -> None:
    batch, length, heads, kv_heads, sequences = sizes
    operands = _operands(batch, length, heads, kv_heads, head_dim, sequences, right=right)
    assert backward_plans.plan_of(operands).stores_weights is stores


def test_heads_of_packed_sequences_share_no_tile_where_all_tiles_run_at_once() -> None:
    def heads(length: int, heads: int, kv_heads: int, head_dim: int, sequences: int) -> int:
        return plans.plan_of(_operands(1, length, heads, kv_heads, head_dim, sequences)).heads_per_tile

    assert [heads(2, 12, 1, 88, 1), heads(8, 12, 1, 192, 2), heads(53, 28, 4, 160, 3)] == [1, 1, 1]
    assert heads(180, 28, 4, 128, 3) == 7 and heads(100, 32, 8, 128, 64) == 4


# batch, length, heads, kv heads; ms, one H100, of a causal forward of head dim 128 by heads that are taken in turn
FORWARDS = [
    ((1, 4096, 28, 4), {2: 0.1938, 4: 0.1933, 7: 0.1782, 8: 0.1934, 14: 0.1779, 28: 0.1778}),
    ((1, 2048, 28, 4), {2: 0.0631, 4: 0.0606, 7: 0.0540, 8: 0.0582, 14: 0.0527, 28: 0.0532}),
    ((3, 3000, 28, 4), {2: 0.3072, 4: 0.3042, 7: 0.2980, 8: 0.3085, 14: 0.2970, 28: 0.2971}),
    ((2, 2048, 28, 4), {2: 0.1117, 4: 0.1089, 7: 0.1029, 8: 0.1087, 14: 0.1011, 28: 0.1013}),
    ((1, 4096, 32, 8), {2: 0.2188, 4: 0.2023, 7: 0.2191, 8: 0.2042, 14: 0.2188, 28: 0.2203}),
    ((2, 3000, 40, 8), {2: 0.2958, 4: 0.2919, 7: 0.2977, 8: 0.2852, 14: 0.2850, 28: 0.2851}),
    ((1, 4096, 32, 32), {2: 0.2238, 4: 0.2105, 7: 0.2247, 8: 0.2110, 14: 0.2251, 28: 0.2317}),
]


@pytest.mark.parametrize("sizes, measured", FORWARDS, ids=lambda x: str(x).replace(" ", ""))
def test_the_simulated_end_is_the_measured_one(sizes: tuple[int, int, int, int], measured: dict[int, float]) -> None:
    batch, length, heads, _ = sizes
    # in halves of a block; the first tile is that of the last queries
    times = tuple(2 * (cdiv(length, 128) - block) + 3 for block in range(cdiv(length, 128)))
    ends = {group: tile_order.end_of([tile_order.Stretch(batch * heads, group, times)], SMS) for group in measured}
    best = min(ends, key=lambda group: ends[group])
    assert measured[best] <= 1.03 * min(measured.values())
    for group, time in measured.items():
        assert abs(ends[group] / ends[best] * measured[best] / time - 1) < 0.06


def test_groups_end_together_unless_that_costs_memory() -> None:
    times = tuple(range(35, 3, -2))
    size, cost = tile_order.best_group(24, times, SMS, 1, 1e6, 0.02)
    assert size == 12 and cost == pytest.approx(tile_order.end_of([tile_order.Stretch(24, 12, times)], SMS))
    assert tile_order.best_group(24, times, SMS, 1e6, 1e6, 1.0)[0] == 4
    assert tile_order.best_group(2, times, SMS, 1, 1e6, 0.02)[0] == 2
    # many waves are as busy with fewer of them simulated
    many, _ = tile_order.best_group(4096, times, SMS, 1, 1e6, 0.0)
    assert tile_order.end_of([tile_order.Stretch(4096, many, times)], SMS) < 1.01
