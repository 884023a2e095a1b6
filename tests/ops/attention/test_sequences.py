"""The order in which the blocks of packed sequences are taken, and which of their slots hold rows."""

import random
from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl

from powertrain.ops.attention.triton.sequences import longest_first, slots_with_rows
from powertrain.runtime.launch import kernel
from powertrain.runtime.settings import settings

pytestmark = pytest.mark.skipif(not settings().interpret, reason="a kernel that runs on the CPU is interpreted")


@kernel()
def _order_kernel(starts_ptr, slots_ptr, batch, BLOCK: tl.constexpr):
    slot = tl.program_id(0)
    tl.store(slots_ptr + longest_first(starts_ptr, batch, slot, BLOCK), slot)


@kernel()
def _place_kernel(starts_ptr, places_ptr, batch, BLOCK: tl.constexpr):
    slot = tl.program_id(0)
    tl.store(places_ptr + slot, longest_first(starts_ptr, batch, slot, BLOCK))


@kernel()
def _filled_kernel(starts_ptr, slots_ptr, batch, size, slots):
    tl.store(slots_ptr, slots_with_rows(starts_ptr, batch, size, slots))


def _expected(starts: list[int], slots: int, block: int) -> list[int]:
    """Slots in their order. Sequence n owns those from cdiv(starts[n], block) + n on."""
    lengths = [end - start for start, end in pairwise(starts)]
    ordered = []
    for n in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        first = triton.cdiv(starts[n], block) + n
        ordered += range(first, first + triton.cdiv(lengths[n], block))
    return ordered + [slot for slot in range(slots) if slot not in set(ordered)]


# the first twelve have every block size, and from one sequence to more than two steps of the sums read, 260
@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(n, marks=pytest.mark.slow) for n in range(12, 24))])
def test_blocks_of_the_longest_sequences_come_first(seed: int) -> None:
    draw = random.Random(seed)
    block, count = draw.choice((64, 96, 128)), draw.choice((1, 2, 3, 7, 40, 130, 260))
    lengths = [draw.choice((0, 1, 63, 64, 96, 127, 128, 129, 300, draw.randint(0, 700))) for _ in range(count)]
    # rows may lie before the first sequence and behind the last
    starts = [draw.choice((0, 0, 5, 200))]
    for length in lengths:
        starts.append(starts[-1] + length)
    slots = triton.cdiv(starts[-1] + draw.choice((0, 0, 3, 500)), block) + count + 1
    found = torch.full((slots,), -1, dtype=torch.int32)
    _order_kernel[(slots,)](torch.tensor(starts, dtype=torch.int32), found, count, BLOCK=block)
    assert found.tolist() == _expected(starts, slots, block)


@pytest.mark.parametrize("starts", [[0, 900, 300, 1000], [0, 2000, 4000], [0, 0, 0, 5000]], ids=str)
def test_starts_that_cannot_be_have_a_place_for_each_block_all_the_same(starts: list[int]) -> None:
    """Places may be outside, which the caller leaves out, and no loop runs on."""
    slots = triton.cdiv(1000, 128) + len(starts)
    found = torch.full((slots, 1), -1, dtype=torch.int32)
    _place_kernel[(slots,)](torch.tensor(starts, dtype=torch.int32), found, len(starts) - 1, BLOCK=128)
    assert found.abs().max() < 200


@pytest.mark.parametrize("seed", range(12))
def test_slots_left_out_hold_no_rows(seed: int) -> None:
    """Neither of a sequence nor of the tensor's rows before the first and behind the last, which get zeros."""
    draw = random.Random(seed)
    block, count, left_out = draw.choice((32, 60, 128)), (1, 1, 2, 5)[seed % 4], 0
    for before, behind in ((0, 0), (draw.randint(1, 300), 0), (0, draw.randint(1, 300))):
        starts = [before]
        for _ in range(count):
            starts.append(starts[-1] + draw.choice((0, 1, block, block + 1, draw.randint(0, 700))))
        size = starts[-1] + behind
        slots = triton.cdiv(size, block) + count + 1
        filled = torch.empty(1, dtype=torch.int32)
        _filled_kernel[(1,)](torch.tensor(starts, dtype=torch.int32), filled, count, size, slots)
        # of each run of rows: where its slots begin, and how many rows it has
        runs = [(triton.cdiv(start, block) + n, end - start) for n, (start, end) in enumerate(pairwise(starts))]
        runs += [(0, before), (triton.cdiv(starts[-1], block) + count, behind)]
        used = {first + n for first, rows in runs for n in range(triton.cdiv(rows, block))}
        assert used <= set(range(filled.item())), (starts, size)
        left_out += slots - filled.item()
    assert left_out == (2 if count == 1 else 1)
