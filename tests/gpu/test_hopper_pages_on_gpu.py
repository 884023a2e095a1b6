"""The Hopper forward over caches: packed and equal queries, pages of every size, ends, and what lies behind them."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.ops.attention import decode_op
from powertrain.ops.attention.decode import decode_attention, decode_attention_ref
from powertrain.ops.attention.hopper import forward_pages
from powertrain.ops.attention.hopper.forward_pages import Cut, PagedCall, launch_pages, why_not_cache
from powertrain.runtime.target import Target
from tests.gpu.arch import ON_SM90
from tests.gpu.packed_pages import CUDA, check, problem_of
from tests.ops.attention.test_decode_packed import check_a_graph

pytestmark = ON_SM90


@pytest.fixture(autouse=True)
def _serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few the rows are; and never the universal kernel."""
    monkeypatch.setattr(decode_op, "LEAST_ROWS", 0)
    monkeypatch.setattr(decode_op, "MANY_LEAST_ROWS", 0)
    monkeypatch.setattr(decode_op, "_work_of", None)


SIZES = [(1, 700), (130, 700), (3, 3), (0, 90), (1, 0), (300, 300), (9, 1000), (40, 20)]


@pytest.mark.parametrize("page", [1, 4, 8, 12, 16, 24, 32, 64, 128, 192, 256])
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (80, 80), (192, 128), (256, 256)], ids=str)
def test_pages(dims: tuple[int, int], page: int) -> None:
    check(problem_of(SIZES, page, dims=dims, around=(2, 70)))


@pytest.mark.parametrize("heads", [(8, 1), (12, 2), (40, 8), (28, 4), (16, 16)], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_tokens_and_drafts(dims: tuple[int, int], heads: tuple[int, int]) -> None:
    """A tile of 64 rows holds all of a sequence."""
    drafts = [(1, 700), (8, 5000), (1, 3), (4, 130), (0, 50), (1, 0)]
    for sizes in (drafts, [(1, 3000 + n) for n in range(40)], [(3, 9000)]):
        for page in (1, 16):
            check(problem_of(sizes, page, heads, dims, around=(1, 2)))


_CUT = -(1 << 20)  # keys that results of a part take: less than none, so that the smallest parts seem best


# as many parts as there are blocks, at most four, and as few as the keys of one CTA allow
@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (10, 2), (16, 2), (24, 2), (28, 4), (32, 32), (37, 1)], ids=str)
@pytest.mark.parametrize("rounds, least", [(64, 64), (3, 512), (1, 1 << 20)])
def test_heads_and_parts(rounds: int, least: int, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_pages, "cut_for", lambda rows: Cut(rounds, least, _CUT, 8))
    for sizes in (SIZES, [(1, n) for n in (5, 4000, 1, 77)], [(512, 4096)]):
        for sinks in (None, torch.randn(heads[0], device=CUDA)):
            check(problem_of(sizes, 64, heads), sinks=sinks)


def test_more_tiles_than_the_schedule_reads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 chunks of 300 queries are 240 tiles and 82 beside them; one sequence is long."""
    monkeypatch.setattr(forward_pages, "cut_for", lambda rows: Cut(3, 128, _CUT, 2))
    check(problem_of([(300, 300 + n) for n in range(79)] + [(1, 30000)], 64, (2, 2), (64, 64)))


@pytest.mark.parametrize(
    "options", [{"is_causal": False}, {"softcap": 5.0}, {"is_causal": False, "window_size": (-1, 3)}, {"scale": 0.3}]
)
def test_masks(options: dict[str, Any]) -> None:
    check(problem_of(SIZES, 16), **options)


def _without_pages_ahead(problem: dict[str, Any], left: int, queries: list[int]) -> dict[str, Any]:
    """`problem` with NaN in pages ahead of each sequence's window; their ids are wild."""
    page, table = problem["key_cache"].shape[1], problem["page_table"].clone()
    caches = {name: problem[name].clone() for name in ("key_cache", "value_cache")}
    for n, (count, length) in enumerate(zip(queries, problem["cache_seqlens"].tolist(), strict=True)):
        gone = min(max(0, length - count - left) // page, -(-length // page))
        for cache in caches.values():
            cache[table[n, :gone].long()] = torch.nan
        table[n, :gone] = 2**30 if n % 2 else -(2**31)
    return {**problem, **caches, "page_table": table}


@pytest.mark.parametrize("page", [1, 16, 64, 256])
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (80, 80), (192, 128), (256, 256)], ids=str)
def test_windows(dims: tuple[int, int], page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for least in (128, 1 << 20):
        monkeypatch.setattr(forward_pages, "cut_for", lambda rows, least=least: Cut(64, least, _CUT, 8))
        for sizes in (SIZES, [(1, n) for n in (5, 4000, 1, 77)], [(33, 5000)], [(512, 4096)]):
            problem = problem_of(sizes, page, dims=dims, around=(2, 70))
            for left in (0, 5, 127, 400, 100_000):
                seen = _without_pages_ahead(problem, left, [n for n, _ in sizes])
                check(seen, window_size=(left, 0))
            check(_without_pages_ahead(problem, 30, [n for n, _ in sizes]), window_size=(30, 3), is_causal=False)


def test_sinks_and_alibi() -> None:
    slopes, sinks = torch.rand(len(SIZES), 8, device=CUDA), torch.randn(8, device=CUDA)
    check(problem_of(SIZES, 64), sinks=sinks)
    check(problem_of(SIZES, 32, dtype=torch.float16), alibi_slopes=slopes)


# 40 problems; the kernels of one take seconds to compile, so seeds are tests of their own
@pytest.mark.parametrize("seed", range(10))
def test_random_problems(seed: int) -> None:
    draws = random.Random(seed)
    for _ in range(4):
        sizes = [
            (draws.choice([0, 1, 1, draws.randint(1, 400)]), draws.choice([0, 1, draws.randint(1, 5000)]))
            for _ in range(draws.randint(1, 20))
        ]
        if sum(n for n, _ in sizes) == 0:
            continue
        kv_heads = draws.choice([1, 2, 4])
        heads = kv_heads * draws.choice([1, 3, 4, 5, 7, 8]), kv_heads
        dim = draws.choice([64, 72, 128, 192])
        around = draws.choice([(0, 0), (5, 130)])
        problem = problem_of(sizes, draws.choice([1, 5, 8, 16, 32, 48, 64, 128, 384]), heads, (dim, dim), around)
        check(problem)
        left = int(2 ** draws.uniform(0, 12))
        check(_without_pages_ahead(problem, left, [n for n, _ in sizes]), window_size=(left, 0))


def test_a_graph_follows_starts_and_lengths() -> None:
    check_a_graph(problem_of([(5, 300), (1, 700), (20, 40)], 16), max_seqlen_q=26)
    check_a_graph(problem_of([(5, 300), (1, 700), (20, 40)], 16), max_seqlen_q=26, window_size=(50, 0))


def _dense(sizes: list[tuple[int, int]], capacity: int, **options: Any) -> dict[str, Any]:
    """`_problem` over dense caches with more entries than sequences; NaN behind every end."""
    problem = problem_of(sizes, 16, **options)
    table = problem.pop("page_table")
    for name in ("key_cache", "value_cache"):
        pages = problem[name]
        dense = torch.full((len(sizes) + 2, capacity, *pages.shape[2:]), torch.nan, device=CUDA, dtype=pages.dtype)
        for n, (_, length) in enumerate(sizes):
            dense[n, :length] = pages[table[n, : -(-length // 16)].long()].flatten(0, 1)[:length]
        problem[name] = dense
    return problem


def _call(
    problem: dict[str, Any], right: int = 0, num_new: int = 0, sinks: Tensor | None = None, left: int = -1
) -> PagedCall:
    query = problem["query"]
    lengths = problem["cache_seqlens"] - num_new
    return PagedCall(
        query, problem["key_cache"], problem["value_cache"], problem.get("cu_seqlens_q"), lengths,
        problem.get("page_table"), None, None, sinks, left, right, 0.0, query.shape[-1] ** -0.5, num_new,
    )  # fmt: skip


def _check_call(problem: dict[str, Any], most: int, **options: Any) -> None:
    """By the kernel's own functions, wherever decode_attention sends such a call."""
    call, target = _call(problem, **options), Target.of(CUDA)
    assert why_not_cache(call, None, target) is None
    out, lse = launch_pages(call, most, target)
    wide = {n: x.double() if x.is_floating_point() else x for n, x in problem.items()}
    expected, expected_lse = decode_attention_ref(
        **wide, sinks=options.get("sinks"), is_causal=call.right == 0, window_size=(call.left, call.right)
    )
    torch.testing.assert_close(out.double(), expected, rtol=2**-6, atol=2**-7)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-3, atol=1e-3)
    for _ in range(3):
        assert all(torch.equal(*pair) for pair in zip(launch_pages(call, most, target), (out, lse), strict=True))


@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (192, 128), (256, 256)], ids=str)
def test_packed_queries_over_dense_caches(dims: tuple[int, int]) -> None:
    _check_call(_dense(SIZES, 1003, dims=dims, around=(2, 70)), 300)
    _check_call(_dense(SIZES, 1003, dims=dims, around=(2, 70)), 300, left=100)
    _check_call(_dense(SIZES, 1024, heads=(28, 4), dims=dims), 300, sinks=torch.randn(28, device=CUDA))


@pytest.mark.parametrize("page", [0, 64])
@pytest.mark.parametrize("queries", [1, 2, 8, 33, 200])
@pytest.mark.parametrize("heads", [(8, 2), (7, 1), (5, 1), (32, 32)], ids=str)
def test_equal_queries(heads: tuple[int, int], queries: int, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also more than there are keys, and sequences without any."""
    for least in (128, 3072):
        monkeypatch.setattr(forward_pages, "cut_for", lambda rows, least=least: Cut(3, least, 0, 8))
        for lengths in ((700, 3000, 5, 0, 64), (130, 2000) * 10):
            sizes = [(queries, length) for length in lengths]
            problem = problem_of(sizes, page, heads) if page else _dense(sizes, max(lengths) + 3, heads=heads)
            problem.pop("cu_seqlens_q")
            problem["query"] = problem["query"].unflatten(0, (len(sizes), queries))
            _check_call(problem, queries)
            _check_call(problem, queries, right=-1, sinks=torch.randn(heads[0], device=CUDA))
            _check_call(problem, queries, left=130)


@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (80, 80), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("page", [0, 1, 16, 64])
def test_one_sequence(page: int, dims: tuple[int, int]) -> None:
    """By equal parts of its keys, of which a cache's capacity makes more than the sequence may fill."""
    for length, capacity, queries, heads in (
        (0, 3000, 1, (8, 2)), (1, 60000, 2, (7, 1)), (4000, 4000, 1, (32, 8)), (700, 20000, 33, (5, 1)),
        (3000, 3001, 200, (32, 32)), (50, 130, 100, (12, 2)),
    ):  # fmt: skip
        sizes = [(queries, length)]
        problem = problem_of(sizes, page, heads, dims) if page else _dense(sizes, capacity, heads=heads, dims=dims)
        if page:
            # ids behind the last key are undefined
            more = torch.full((1, capacity // page), 1 << 30, device=CUDA, dtype=torch.int32)
            problem["page_table"] = torch.cat([problem["page_table"], more], 1)
        problem.pop("cu_seqlens_q")
        problem["query"] = problem["query"][None]
        _check_call(problem, queries)
        _check_call(problem, queries, right=-1, sinks=torch.randn(heads[0], device=CUDA))
        _check_call(problem, queries, left=150)
        if length >= 3:
            _check_call(problem, queries, num_new=3)
            _check_call(problem, queries, num_new=3, left=1)


def test_new_keys_count() -> None:
    problem = _dense([(2, 700), (2, 30), (2, 2)], 800)
    problem.pop("cu_seqlens_q")
    problem["query"] = problem["query"].unflatten(0, (3, 2))
    _check_call(problem, 2, num_new=2)


@pytest.mark.parametrize("sizes", [[(8, 700), (8, 3000), (8, 8)], [(1, 3000)]], ids=str)
@pytest.mark.parametrize("page", [0, 16])
def test_equal_queries_whose_keys_are_appended(page: int, sizes: list[tuple[int, int]]) -> None:
    queries = sizes[0][0]
    problem = problem_of(sizes, page) if page else _dense(sizes, 3003)
    problem.pop("cu_seqlens_q")
    problem["query"] = problem["query"].unflatten(0, (len(sizes), queries))
    key_new, value_new = (torch.randn(len(sizes), queries, 2, 128, device=CUDA).bfloat16() for _ in range(2))
    before = {**problem, "cache_seqlens": problem["cache_seqlens"] - queries}
    out, lse = decode_attention(**before, key_new=key_new, value_new=value_new, return_lse=True)
    wide = {n: x.double() if x.is_floating_point() else x for n, x in problem.items()}
    expected, expected_lse = decode_attention_ref(**wide)
    torch.testing.assert_close(out.double(), expected, rtol=2**-6, atol=2**-7)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-3, atol=1e-3)


def test_packed_queries_over_dense_caches_are_sent_here() -> None:
    check(_dense(SIZES, 1003))
