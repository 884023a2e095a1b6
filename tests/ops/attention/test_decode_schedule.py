"""The schedule of decoding, read back: every part of every sequence once, in order, within the table."""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.ops.attention import decode_schedule
from powertrain.ops.attention.combine import PartTable, combine
from powertrain.ops.attention.decode import decode_attention
from powertrain.ops.attention.decode_schedule import KeysSeen, schedule
from powertrain.runtime.compile.triton_compat import lower
from powertrain.runtime.recording import record
from powertrain.runtime.settings import settings
from powertrain.runtime.target import Target
from tests.torch_setup import HAS_GPU, INTERPRET

runs_kernels = pytest.mark.skipif(not (HAS_GPU or INTERPRET), reason="kernels run on a GPU or in the interpreter")
CARD = Target.parse("H200")
GUARD = 1 << 12  # elements before and behind each table


def _guarded(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Tables lie between other values; whether those are as before."""
    held: list[tuple[Tensor, int]] = []

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def empty(self, shape: tuple[int, ...], **options: Any) -> Tensor:
            count = int(torch.Size(shape).numel())
            memory = torch.full((count + 2 * GUARD,), -7, **options)
            held.append((memory, count))
            return memory[GUARD : GUARD + count].view(shape)

    monkeypatch.setattr(decode_schedule, "torch", Torch())
    return lambda: all(bool((m[:GUARD] == -7).all() and (m[GUARD + n :] == -7).all()) for m, n in held)


def _counts(parts: Tensor, of_sequences: Tensor, extra: int) -> list[int]:
    """How many parts each sequence has, of one tile's table [parts, 3] that holds each of them once, and in order."""
    counts = [count for _, count in of_sequences.tolist()]
    batch, rows = len(counts), parts.tolist()
    used = sum(counts) - batch
    assert min(counts) >= 1 and used <= extra
    # the extra parts of a sequence are neighbours, at the place that the combination looks for them
    assert [row for row in rows[:used] if not 1 <= row[1] < row[2]] == []
    for sequence, (begin, count) in enumerate(of_sequences.tolist()):
        assert rows[begin : begin + count - 1] == [[sequence, n, count] for n in range(1, count)]
    # whole sequences last: the first part of one that is cut may be longer than all of them
    by_cut = sorted(range(batch), key=lambda sequence: counts[sequence] == 1)
    assert rows[used : used + batch] == [[sequence, 0, counts[sequence]] for sequence in by_cut]
    assert all(row[0] == batch for row in rows[used + batch :])
    return counts


def _lengths(draws: random.Random, batch: int, most: int) -> list[int]:
    kind = draws.choice(["empty", "equal", "random", "one long"])
    if kind in ("empty", "equal"):
        return [0 if kind == "empty" else most] * batch
    lengths = [draws.choice([0, 1, draws.randint(0, most), most]) for _ in range(batch)]
    return lengths if kind == "random" else [min(n, 500) for n in lengths[1:]] + [most]


# 257, 300: more sequences than the schedule reads at a time; 1 SM: one part at a time; 400: 300 sequences at once
@runs_kernels
@pytest.mark.parametrize("seed", range(40))
def test_every_part_once(seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    draws, is_whole = random.Random(seed), _guarded(monkeypatch)
    batch, sms, per_sm = draws.choice([1, 2, 17, 256, 257, 300]), draws.choice([1, 9, 132, 400]), draws.choice([1, 3])
    ratio, queries, block_m = draws.choice([(1, 1, 16), (7, 1, 16), (4, 5, 16), (3, 11, 64)])
    block_n, most, left = draws.choice([16, 64, 256]), draws.choice([1, 3000, 131072]), draws.choice([-1, -1, 0, 900])
    lengths = _lengths(draws, batch, most)
    leftpad = [draws.randint(0, n) for n in lengths] if draws.random() < 0.3 else None
    seqlens, pads = (None if x is None else torch.tensor(x, device=device) for x in (lengths, leftpad))
    assert seqlens is not None
    keys = KeysSeen(seqlens, pads, draws.choice([0, 2]), most, left, draws.choice([-1, 1]) if queries > 1 else -1)
    tiles = -(-queries * ratio // block_m)
    programs, seen = tiles * draws.choice([1, 8]), most if left < 0 else min(most, left + queries)
    plan, card = (block_m, block_n, per_sm), replace(CARD, num_sms=sms)
    parts, table = schedule(keys, batch, queries, ratio, programs, seen, plan, card)
    assert is_whole()
    for tile in range(tiles):
        counts = _counts(parts[tile].cpu(), table.parts[:, tile].cpu(), table.extra)
        assert all(count <= max(1, -(-min(n + 2, most) // block_n)) for count, n in zip(counts, lengths, strict=True))


@runs_kernels
def test_more_sequences_than_a_block_at_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """188 SMs run 564 programs at once, twice 282: the 26 long sequences behind the first 256 count too."""
    is_whole = _guarded(monkeypatch)
    keys = KeysSeen(torch.tensor([100] * 256 + [131072] * 26, device=device), None, 0, 131072, -1, -1)
    parts, table = schedule(keys, 282, 1, 1, 1, 131072, (16, 64, 3), replace(CARD, num_sms=188))
    assert is_whole()
    counts = _counts(parts[0].cpu(), table.parts[:, 0].cpu(), table.extra)
    assert max(counts[:256]) == 1 and min(counts[256:]) > 1


@runs_kernels
def test_block_counts_beyond_int32(device: torch.device) -> None:
    """One of 2^30 keys among 299 of 16: 300 times its blocks, and blocks times the least of a part, pass 2^31."""
    keys = KeysSeen(torch.tensor([16] * 299 + [2**30], device=device), None, 0, 2**30, -1, -1)
    parts, table = schedule(keys, 300, 1, 1, 1, 2**30, (16, 16, 1), replace(CARD, num_sms=1))
    assert _counts(parts[0].cpu(), table.parts[:, 0].cpu(), table.extra)[-1] > 1


@pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")
def test_more_sequences_than_a_grid_has() -> None:
    """Parts are the second dim of a grid, which ends at 65535."""

    def kernels(batch: int, card: str) -> set[str]:
        with record(card) as wanted:
            cache = torch.empty(batch, 64, 1, 64, device="meta", dtype=torch.bfloat16)
            query = torch.empty(batch, 1, 4, 64, device="meta", dtype=torch.bfloat16)
            decode_attention(query, cache, cache, torch.empty(batch, device="meta", dtype=torch.int32))
        return {spec.kernel.name for spec in wanted.specs}

    assert "_schedule_kernel" in kernels(2, "A100")
    assert kernels(70000, "A100") == kernels(70000, "H200") == {"_decode_kernel"}


@pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")
def test_few_splits_are_combined_by_a_warp_a_head_and_many_by_several_warps() -> None:
    """4 sequences of 28 heads have 112 rows, 64 of 32 heads 2048."""

    def tile(splits: int, batch: int, heads: int) -> tuple[int, ...]:
        with record("sm_90") as wanted:
            partial, lse = (
                torch.empty(splits, batch, 1, heads, 128, device="meta"),
                torch.empty(splits, batch, heads, 1, device="meta"),
            )
            combine(partial, lse, None, partial[0], lse[0], partial[0].stride()[:3])
        [spec] = wanted.specs
        return *(spec.constants[name] for name in ("BLOCK_H", "BLOCK_S", "AHEAD")), int(spec.options["num_warps"])

    few = [(4, 1, 4, 4), (4, 1, 8, 4), (1, 16, 1, 2), (1, 32, 1, 4), (1, 32, 1, 4)]
    assert [tile(splits, 4, 28) for splits in (4, 8, 16, 32, 64)] == few
    assert [tile(splits, 64, 32) for splits in (2, 16)] == [(4, 1, 2, 4), (4, 1, 4, 4)]


@pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")
@pytest.mark.parametrize("with_table", [False, True])
def test_places_of_partial_results_are_int64(with_table: bool) -> None:
    """More than 2^31 elements: rows times a head dim of 96, a number that nothing else is, never in int32."""
    with record("sm_90") as wanted:
        partial, lse = torch.empty(4, 2, 3, 8, 96, device="meta"), torch.empty(4, 2, 8, 3, device="meta")
        table = None
        if with_table:
            partial, lse = partial[:, 0], lse[:, 0]
            table = PartTable(torch.empty(2, 3, 2, dtype=torch.int32, device="meta"), 4, 16, 2)
        out = torch.empty(2, 3, 8, 96, device="meta")
        combine(partial, lse, None, out, torch.empty(2, 8, 3, device="meta"), out.stride()[:3], table)
    [spec] = wanted.specs
    text = lower(spec.kernel.jit, spec.signature, spec.constants, spec.aligned, spec.options, spec.arch)
    products = [line for line in text.splitlines() if "arith.muli" in line]
    names = re.findall(r"(%\w+) = arith.constant dense<96> : tensor<\S*xi32", text)
    assert products and not [line for line in products if any(re.search(rf"{name}\b", line) for name in names)]
