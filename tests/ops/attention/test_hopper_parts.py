"""The list of tiles and parts of the Hopper forward over caches: what each CTA would take from it, step by step on the
host, and the combination of its results, beside the specification. The tiles' kernel itself runs on sm_90 alone."""

import heapq
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from powertrain.ops.attention import decode_tiles
from powertrain.ops.attention.decode import decode_attention, decode_attention_ref
from powertrain.ops.attention.decode_op import why_not_many
from powertrain.ops.attention.decode_schedule import KeysSeen
from powertrain.ops.attention.decode_tiles import ENTRY_FIELDS, LISTED, TileList, results_in, size_of_part
from powertrain.ops.attention.hopper.forward_pages import PagedCall, launch_pages, why_not_cache
from powertrain.ops.shapes import cdiv
from powertrain.runtime.compile import prebuild
from powertrain.runtime.recording import record
from powertrain.runtime.settings import settings
from powertrain.runtime.target import Target
from tests.torch_setup import HAS_GPU, INTERPRET

runs_kernels = pytest.mark.skipif(not (HAS_GPU or INTERPRET), reason="kernels run on a GPU or in the interpreter")
CARD = Target.parse("H200")
META = torch.device("meta")


def _parts_of(listed: TileList) -> list[tuple[int, int, int, list[int]]]:
    """(where it is, part, parts, the tile's fields) of every entry."""
    header, *entries = listed.entries.tolist()
    assert listed.entries.shape[1] == ENTRY_FIELDS.value and header[LISTED.value] <= len(entries)
    return [(at, part, parts, tile) for at, (*tile, part, parts, _) in enumerate(entries[: header[LISTED.value]])]


def _blocks_of_part(
    tile: list[int], part: int, parts: int, queries: int, block_n: int, right: int, left: int = -1
) -> tuple[int, int]:
    """As `blocks_of` (hopper/forward_tiles.py) has them."""
    _, block, _, count, length = tile
    first, last = (n + length - count for n in (block * queries, min((block + 1) * queries, count) - 1))
    begin = max(first - left, 0) // block_n if left >= 0 else 0
    end = max(min(length, last + right + 1), 0) if right >= 0 else length
    end = max(cdiv(end, block_n), begin + 1)
    share = cdiv(end - begin, parts)
    begin = min(begin + part * share, end)
    return begin, max(min(begin + share, end), begin + 1)


class _Problem:
    """Random sequences over a dense cache; packed queries, or `equal` ones of each sequence."""

    def __init__(self, seed: int, device: torch.device) -> None:
        draws = random.Random(seed)
        torch.manual_seed(seed)
        batch, most = draws.choice([1, 3, 20]), draws.choice([40, 700])
        self.lengths = [draws.choice([0, 1, draws.randint(0, most), most]) for _ in range(batch)]
        self.equal = draws.choice([0, 0, 1, 7, 30])
        counts = [self.equal or draws.choice([0, 1, 1, draws.randint(0, 60)]) for _ in range(batch)]
        before, behind = (0, 0) if self.equal else (draws.choice([0, 19]), draws.choice([0, 40]))
        self.kv_heads, self.ratio = draws.choice([1, 2]), draws.choice([1, 3, 4, 7])
        # heads of a tile: the last tile of a kv head may have fewer
        self.pack = draws.choice([1, 2, 3, 4, 5, 7, 8]) if self.ratio > 1 else 1
        self.right, self.rounds, self.least = draws.choice([-1, 0, 2]), draws.choice([1, 3, 50]), draws.choice([16, 96])
        self.result_keys, self.by_waves = draws.choice([0, 40]), draws.random() < 0.3
        self.left = draws.choice([-1, -1, 0, 3, 20, 150])
        # most queries, as callers say, who may be wrong
        self.said = draws.choice([0, 1, max(counts)])
        self.sms, self.most, dim = draws.choice([1, 9, 132]), most, 16
        starts = before + torch.tensor([0, *counts]).cumsum(0)
        self.queries = self.equal or max(1, int(starts[-1]) + behind)
        shape = (batch, self.equal) if self.equal else (self.queries,)
        heads = self.kv_heads * self.ratio
        self.query = torch.randn(*shape, heads, dim, device=device)
        self.keys, self.values = (torch.randn(batch, most, self.kv_heads, dim, device=device) for _ in range(2))
        self.seqlens = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        self.starts = None if self.equal else starts.int().to(device)
        self.sinks = torch.randn(heads, device=device) if draws.random() < 0.3 else None

    def tiles(self, block_m: int, block_n: int) -> TileList:
        keys = KeysSeen(self.seqlens, None, 0, self.most, self.left, self.right)
        seen = min(self.most, self.left + max(1, self.said)) if self.left >= 0 else self.most
        groups = self.kv_heads * cdiv(self.ratio, self.pack)
        return TileList.of(
            self.starts, keys, self.queries, self.pack, groups, seen, (block_m, block_n, 1),
            replace(CARD, num_sms=self.sms), self.rounds, self.least, self.result_keys, self.by_waves,
        )  # fmt: skip

    def expected(self) -> tuple[Tensor, Tensor]:
        window, causal = (self.left, self.right), self.right == 0
        return decode_attention_ref(
            self.query, self.keys, self.values, self.seqlens, is_causal=causal, window_size=window, sinks=self.sinks,
            cu_seqlens_q=self.starts,
        )  # fmt: skip

    def attended(self, tiles: TileList, block_m: int, block_n: int) -> tuple[Tensor, Tensor]:
        """Results where every tile is whole, and NaN elsewhere, then combined."""
        queries, heads, dim = block_m // self.pack, self.query.shape[-2], self.query.shape[-1]
        of_kv = cdiv(self.ratio, self.pack)
        groups = self.kv_heads * of_kv
        rows = self.query.reshape(-1, heads, dim)
        out = torch.full_like(rows, torch.nan)
        lse = rows.new_full((heads, rows.shape[0]), torch.nan)
        partial = rows.new_full((tiles.slots, groups, size_of_part(block_m, dim)), torch.nan)
        for at, part, parts, tile in _parts_of(tiles):
            sequence, block, start, count, _ = tile
            for group in range(groups):
                kv, lane = group // of_kv, group % of_kv * self.pack
                mine = list(range(kv * self.ratio + lane, kv * self.ratio + min(lane + self.pack, self.ratio)))
                assert block * queries < count
                local = torch.arange(block * queries, min((block + 1) * queries, count))
                o, its_lse = self._block(tile, local, mine, kv, part, parts, queries, block_n)
                if parts == 1:
                    if self.sinks is not None and sequence >= 0:
                        sink = self.sinks[mine][None, :]
                        o, its_lse = (
                            o * torch.exp(its_lse - torch.logaddexp(its_lse, sink))[..., None],
                            torch.logaddexp(its_lse, sink),
                        )
                    for n, head in enumerate(mine):
                        out[start + local, head], lse[head, start + local] = o[:, n], its_lse[:, n]
                    continue
                assert at < tiles.slots
                of_part = partial[at, group]
                for n in range(len(mine)):
                    place = (local - block * queries) * self.pack + n
                    of_part[place] = its_lse[:, n]
                    of_part[-block_m * dim :].view(block_m, dim)[place] = o[:, n]
        if self.equal:
            out, lse = out.view_as(self.query), lse.view(heads, -1, self.equal).transpose(0, 1).contiguous()
        tiles.combine(*results_in(partial, block_m, dim), self.sinks, out, lse, self.kv_heads, self.said, self.pack)
        return out, lse

    def _block(
        self, tile: list[int], local: Tensor, heads: list[int], kv: int, part: int, parts: int, queries: int,
        block_n: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(o, lse) of some queries and heads over a part's keys, without the sink."""
        sequence, _, start, count, length = tile
        shape = len(local), len(heads)
        if sequence < 0:
            return self.keys.new_zeros(*shape, self.keys.shape[-1]), self.keys.new_full(shape, -torch.inf)
        begin, end = (n * block_n for n in _blocks_of_part(tile, part, parts, queries, block_n, self.right, self.left))
        columns = torch.arange(begin, max(begin, min(end, length)))
        q = self.query.reshape(-1, *self.query.shape[-2:])[start + local][:, heads]
        k, v = (x[sequence, columns, kv] for x in (self.keys, self.values))
        s = torch.einsum("qhd,nd->qhn", q, k) * q.shape[-1] ** -0.5
        distance = columns[None] - (local + length - count)[:, None]
        hidden = (distance > self.right) & (self.right >= 0) | (distance < -self.left) & (self.left >= 0)
        s = s.masked_fill(hidden[:, None].to(s.device), -torch.inf)
        lse = torch.logsumexp(s, -1) if len(columns) else s.new_full(shape, -torch.inf)
        weights = torch.exp(s - lse.clamp(min=-1e30)[..., None])
        return torch.einsum("qhn,nd->qhd", weights, v), lse


@runs_kernels
@pytest.mark.kernels
@pytest.mark.parametrize("seed", range(30))
def test_random_problems(seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed % 2:
        # as if there were too many tiles for one program
        monkeypatch.setattr(decode_tiles, "_MOST_IN_ONE", 0)
    problem, block_n = _Problem(seed, device), 16
    block_m = 16 // problem.pack * problem.pack  # rows that are of a query
    out, lse = problem.attended(problem.tiles(block_m, block_n), block_m, block_n)
    expected, expected_lse = problem.expected()
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)


@runs_kernels
@pytest.mark.kernels
@pytest.mark.parametrize("seed", range(6))
def test_one_program_lists_what_two_kernels_list(
    seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = _Problem(seed, device)
    # so that not all parts run at once; two kernels do not count waves
    problem.sms, problem.by_waves = 1, False
    lists = []
    for most in (2048, 0):
        monkeypatch.setattr(decode_tiles, "_MOST_IN_ONE", most)
        lists.append(_parts_of(problem.tiles(16 // problem.pack * problem.pack, 16)))
    assert lists[0] and lists[0] == lists[1]


@runs_kernels
@pytest.mark.kernels
@pytest.mark.parametrize("batch", [130, 500, 1900])
def test_long_lists(batch: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of the levels are fields of two integers; one program lists what two kernels list."""
    draws = random.Random(batch)
    counts, lengths = ([draws.choice(sizes) for _ in range(batch)] for sizes in ([0, 1, 40], [0, 700, 30000]))
    starts = torch.tensor([7, *counts], device=device).cumsum(0).int()
    keys = KeysSeen(torch.tensor(lengths, dtype=torch.int32, device=device), None, 0, 30000, -1, 0)
    lists = []
    for most in (2048, 0):
        monkeypatch.setattr(decode_tiles, "_MOST_IN_ONE", most)
        lists.append(_parts_of(TileList.of(starts, keys, int(starts[-1]), 1, 2, 30000, (64, 128, 1), CARD, 3, 128, 90)))
    assert lists[0] == lists[1]
    firsts = [(tile[0], tile[1]) for _, part, _, tile in lists[0] if part == 0 and tile[0] >= 0]
    assert sorted(firsts) == [(n, 0) for n in range(batch) if counts[n]]


def _end_of(blocks: Sequence[int], is_cut: Sequence[bool], at_once: int, result_blocks: float) -> float:
    """When the last of `at_once` programs ends that take entries from a counter, in blocks of keys."""
    free = [0.0] * at_once
    for n, cut in zip(blocks, is_cut, strict=True):
        heapq.heapreplace(free, free[0] + n + 1 + (result_blocks if cut else 0))
    return max(free) + (4 if any(is_cut) else 0)


def _batch(seed: int) -> tuple[list[int], list[int]]:
    """(queries, keys) of each sequence: tokens, drafts and chunks of prompts."""
    draws = random.Random(seed)
    count, chunk = draws.choice([4, 12, 32, 64]), draws.choice([64, 256, 512, 1024])
    chunks, token = draws.choice([0, 1, 3, count]), draws.choice([1, 1, 6])
    queries = [chunk if n < chunks else token for n in range(count)]
    least, most = sorted(draws.uniform(7, 13.5) for _ in range(2))
    return queries, [max(n, int(2 ** draws.uniform(least, most))) for n in queries]


@runs_kernels
@pytest.mark.parametrize("by_waves", [False, True], ids=["", "waves"])
@pytest.mark.parametrize("seed", range(12))
def test_the_longest_come_first_and_the_list_ends_about_as_soon_as_the_best(
    seed: int, by_waves: bool, device: torch.device
) -> None:
    """Blocks are those that a tile sees: of a chunk's first queries a part of the keys. The best: of the shares of all
    sizes that all tiles are cut into, or none."""
    counts, lengths = _batch(seed)
    groups = 2 if by_waves else 8
    at_once, cost = 132 // groups, 320
    starts = torch.tensor([0, *counts], device=device).cumsum(0).int()
    keys = KeysSeen(torch.tensor(lengths, dtype=torch.int32, device=device), None, 0, 32768, -1, 0)
    tiles = TileList.of(starts, keys, int(starts[-1]), 4, groups, 32768, (128, 128, 1), CARD, 3, 256, cost, by_waves)
    blocks, is_cut, seen = [], [], []
    for _, part, parts, tile in _parts_of(tiles):
        begin, end = _blocks_of_part(tile, part, parts, 32, 128, 0)
        if part == 0:
            seen.append(_blocks_of_part(tile, 0, 1, 32, 128, 0)[1])
        blocks.append(end - begin)
        is_cut.append(parts > 1)
    cut = sum(is_cut)
    assert is_cut == [True] * cut + [False] * (len(is_cut) - cut)
    # whole tiles by eighths of the longest, and cut ones are not longer than 1.25 of a share
    assert all(later <= sooner + 1.25 * max(seen) / 8 + 1 for sooner, later in pairwise(blocks[cut:]))
    ends = []
    for share in range(2, max(seen) + 4):
        parts = [max(1, cdiv(n - share // 4, share)) for n in seen]
        each = ((n > 1, cdiv(of, n)) for of, n in zip(seen, parts, strict=True) for _ in range(n))
        are_cut, sizes = zip(*sorted(each, reverse=True), strict=True)
        ends.append(_end_of(sizes, are_cut, at_once, cost / 128))
    assert _end_of(blocks, is_cut, at_once, cost / 128) <= 1.25 * min(ends)


def _call(queries: int, page: int, value_dim: int = 128) -> PagedCall:
    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    lengths = empty(4, dtype=torch.int32)
    caches = empty(64, page or 4096, 8, 128), empty(64, page or 4096, 8, value_dim)
    table = empty(4, 64, dtype=torch.int32) if page else None
    return PagedCall(
        empty(4, queries, 32, 128), *caches, None, lengths, table, None, None, None, -1, 0, 0.0, 0.09
    )  # fmt: skip


@pytest.mark.skipif(settings().interpret, reason="Gluon has no interpreter")
def test_why_not() -> None:
    call, target = _call(8, 64), Target.parse("H200")
    assert why_not_cache(call, None, target) is None
    assert why_not_cache(_call(8, 0), None, target) is why_not_cache(call._replace(left=5), None, target) is None
    assert why_not_cache(_call(8, 20), None, target) is None
    # offsets in it are counted in 32 bits
    cache = torch.empty(1 << 22, 4, 8, 128, dtype=torch.bfloat16, device=META)
    large = call._replace(key_cache=cache, value_cache=cache)
    for changed, reason in (
        (call._replace(value_cache=None), "it does not read values out of the keys (value_cache=None)"),
        (call._replace(leftpad=call.seqlens), "it does not take cache_leftpad"),
        (call._replace(page_table=torch.empty(4, 0, dtype=torch.int32, device=META)), "it takes no empty tensors"),
        (large, "with pages of 4 keys it takes caches of up to 2^34 elements, got 17179869184"),
        (_call(8, 0, 264), "head dims must be multiples of 8 up to 256, got 128 and 264"),
    ):
        assert why_not_cache(changed, None, target) == reason
    assert why_not_cache(call, call.seqlens, target) == "it does not take cache_batch_idx"
    assert why_not_cache(call, None, Target.parse("A100")) == "it runs on sm_90 only"


@pytest.mark.skipif(settings().interpret, reason="Gluon has no interpreter")
def test_equal_queries_come_here() -> None:
    target = Target.parse("H200")

    def why_not(batch: int, heads: int, kv_heads: int, queries: int = 1) -> str | None:
        call = _call(queries, 64)
        cache = torch.empty(64, 64, kv_heads, 128, dtype=torch.bfloat16, device=META)
        query = torch.empty(batch, queries, heads, 128, dtype=torch.bfloat16, device=META)
        lengths, table = (torch.empty(batch, *more, dtype=torch.int32, device=META) for more in ((), (64,)))
        call = call._replace(query=query, key_cache=cache, value_cache=cache, seqlens=lengths, page_table=table)
        return why_not_many(call, target)

    assert why_not(1, 32, 8) is why_not(2, 28, 4) is why_not(30, 16, 16) is why_not(40000, 32, 8, queries=4) is None
    said = "it needs at least 16 query rows per sequence and KV head, got 160000 in 40000 sequences"
    assert why_not(40000, 32, 8) == said


@pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")
@pytest.mark.parametrize("page", [0, 64])
def test_what_one_call_launches(page: int) -> None:
    with record("H200") as wanted:
        out, lse = launch_pages(_call(8, page), 8, Target.parse("H200"))
    names = [spec.kernel.name for spec in wanted.specs]
    assert names == ["_few_tiles_kernel", "_hopper_attention_fwd_kernel", "_combine_tiles_kernel"]
    assert (out.shape, lse.shape) == ((4, 8, 32, 128), (4, 32, 8)) and out.is_contiguous() and lse.is_contiguous()


@pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")
def test_one_packed_sequence_needs_no_list() -> None:
    call = _call(1, 64)
    call = call._replace(
        query=torch.empty(1024, 32, 128, dtype=torch.bfloat16, device=META), seqlens=call.seqlens[:1],
        query_starts=torch.empty(2, dtype=torch.int32, device=META), page_table=torch.empty(1, 64).int().to(META),
    )  # fmt: skip
    with record("H200") as wanted:
        out, lse = launch_pages(call, 1024, Target.parse("H200"))
    assert {spec.kernel.name for spec in wanted.specs} <= {"_hopper_attention_fwd_kernel", "_combine_kernel"}
    assert (out.shape, lse.shape) == ((1024, 32, 128), (32, 1024))


@pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")
@pytest.mark.parametrize("kind", ["equal", "packed", "one packed sequence", "dense", "MLA"])
def test_lengths_and_page_ids_may_be_int64(kind: str) -> None:
    """The coordinates of a TMA load are int32: of int64 ones the kernel does not compile."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    batch = 1 if kind == "one packed sequence" else 32
    lengths, table = empty(batch, dtype=torch.int64), empty(batch, 64, dtype=torch.int64)
    with record("H100") as wanted:
        if kind == "MLA":
            query, cache = empty(batch, 1, 128, 576), empty(2048, 64, 1, 576)
            decode_attention(query, cache, None, lengths, page_table=table, head_dim_v=512)
        elif kind == "dense":
            cache = empty(batch, 4096, 8, 128)
            decode_attention(empty(batch, 8, 32, 128), cache, cache, lengths)
        else:
            cache, packed = empty(2048, 64, 8, 128), kind != "equal"
            query = empty(500, 32, 128) if packed else empty(batch, 8, 32, 128)
            starts = empty(batch + 1, dtype=torch.int64) if packed else None
            decode_attention(
                query,
                cache,
                cache,
                lengths,
                page_table=table,
                cu_seqlens_q=starts,
                max_seqlen_q=400 if packed else None,
            )
    assert any(spec.kernel.name.startswith("_hopper") for spec in wanted.specs)
    assert not prebuild.build(wanted.specs).failures
