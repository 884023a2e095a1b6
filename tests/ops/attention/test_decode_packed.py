"""decode_attention of packed queries: chunks of prompts beside single tokens, over dense and paged caches."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.ops.attention import decode_schedule, decode_tiles
from powertrain.ops.attention.decode import decode_attention, decode_attention_ref
from powertrain.runtime.recording import record
from powertrain.testing.numerics import check
from tests.cuda_graph import captured
from tests.ops.attention.test_decode import DTYPES, IDS, _problem


def _packed(
    queries: list[int], device: torch.device, before: int = 0, behind: int = 0, **options: Any
) -> dict[str, Any]:
    """`_problem` with so many queries of each sequence, and rows of no sequence around them."""
    problem = _problem(device, **options)
    starts = before + torch.tensor([0, *queries]).cumsum(0)
    total, like = int(starts[-1]) + behind, problem["query"]
    query = torch.randn(total, *like.shape[2:], device=device).to(like.dtype)
    return {**problem, "query": query, "cu_seqlens_q": starts.to(device, torch.int32)}


def _check(problem: dict[str, Any], most: int | None = None, **options: Any) -> None:
    def judged(function: Any, **more: Any) -> Any:
        def run(**tensors: Any) -> Any:
            out, lse = function(**tensors, **options, **more)
            return out, lse.masked_fill(lse == -torch.inf, -1e4)

        return run

    ours = judged(decode_attention, return_lse=True, **({} if most is None else {"max_seqlen_q": most}))
    check(ours, judged(decode_attention_ref, upcast=False), judged(decode_attention_ref), problem, backward=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS.get)
@pytest.mark.parametrize("page_size", [0, 1, 16])
def test_chunks_beside_single_tokens(page_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Sequences without queries, without keys, and with more queries than keys; rows of no sequence."""
    lengths, queries = (40, 7, 0, 33, 5, 20), [1, 3, 2, 30, 9, 0]
    _check(_packed(queries, device, 2, 5, lengths=lengths, page_size=page_size, dtype=dtype))


# 80 x 1: a query's heads are more than one tile; 7: queries and heads share tiles unevenly
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (7, 1), (80, 1), (12, 4)])
def test_heads(heads: int, kv_heads: int, device: torch.device) -> None:
    _check(_packed([5, 1, 20], device, heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize(
    "options",
    [{"is_causal": False}, {"window_size": (6, 0)}, {"is_causal": False, "window_size": (3, 2)}, {"softcap": 3.0}],
)
def test_masks(options: dict[str, Any], device: torch.device) -> None:
    _check(_packed([5, 1, 20], device, page_size=4), **options)


def test_alibi_sinks_padding_and_entries(device: torch.device) -> None:
    problem = _packed([5, 1, 20], device, before=1, behind=1)
    slopes, sinks = torch.rand(3, 4, device=device), torch.randn(4, device=device)
    pads, entries = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 2, 9], [2, 0, 1]))
    problem["cache_seqlens"] = problem["cache_seqlens"][entries.long()].contiguous()
    _check(problem, alibi_slopes=slopes, sinks=sinks, cache_leftpad=pads, cache_batch_idx=entries)


@pytest.mark.parametrize("page_size", [0, 4])
def test_no_sequences_with_everything_that_a_sequence_has(page_size: int, device: torch.device) -> None:
    """Rows that belong to none are 0 and -inf. The kernel read the first of no entries of the cache: of no memory."""
    cache = torch.randn(2, 4, 2, 16, device=device)
    none = torch.empty(0, dtype=torch.int32, device=device)
    table = none.view(0, 1).expand(0, 3) if page_size else None
    out, lse = decode_attention(
        torch.randn(5, 4, 16, device=device), cache, cache, none, page_table=table,
        cache_batch_idx=None if page_size else none, cache_leftpad=none, alibi_slopes=torch.rand(0, 4, device=device),
        sinks=torch.randn(4, device=device), cu_seqlens_q=none.new_zeros(1), return_lse=True,
    )  # fmt: skip
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.kernels
@pytest.mark.parametrize("seed", range(12))
def test_random_problems_whose_keys_are_cut(seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 16 keys or more, so that tiles have several; also more tiles than the schedule reads at a time."""
    for module in (decode_schedule, decode_tiles):
        monkeypatch.setattr(module, "LEAST_KEYS", 16)
    decode_schedule.choose_parts.cache_clear()
    draws = random.Random(seed)
    batch = draws.choice([1, 3, 20])
    lengths = tuple(draws.choice([0, 1, draws.randint(0, 700)]) for _ in range(batch))
    queries = [draws.choice([0, 1, 1, draws.randint(0, 60)]) for _ in range(batch)]
    kv_heads = draws.choice([1, 2])
    problem = _packed(
        queries, device, draws.choice([0, 70]), draws.choice([0, 40]), lengths=lengths, capacity=700,
        heads=kv_heads * draws.choice([1, 3, 8]), kv_heads=kv_heads, head_dims=draws.choice([(16, 16), (40, 24)]),
        page_size=draws.choice([0, 3, 64]), dtype=draws.choice(DTYPES),
    )  # fmt: skip
    if not problem["query"].shape[0]:
        return
    sinks = torch.randn(problem["query"].shape[1], device=device) if draws.random() < 0.3 else None
    _check(problem, sinks=sinks, window_size=draws.choice([(-1, -1), (100, 0)]))


@pytest.mark.kernels
def test_the_same_as_a_batch(device: torch.device) -> None:
    problem = _problem(device, lengths=(9, 40, 30), queries=2)
    query = problem.pop("query")
    starts = torch.arange(4, device=device, dtype=torch.int32) * 2
    out, lse = decode_attention(query.flatten(0, 1), **problem, cu_seqlens_q=starts, max_seqlen_q=2, return_lse=True)
    expected, expected_lse = decode_attention(query, **problem, return_lse=True)
    torch.testing.assert_close(out, expected.flatten(0, 1))
    torch.testing.assert_close(lse, expected_lse.transpose(0, 1).flatten(1))


def test_most_queries_choose_tiles_and_not_results(device: torch.device) -> None:
    """A number that is too small is slow at worst."""
    for most in (1, 2, 100):
        _check(_packed([5, 1, 20], device, page_size=4), most)


def test_memory_of_parts_does_not_grow_with_the_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of parts: of tiles that are cut, however many tiles there are."""
    meta, sizes = torch.device("meta"), []
    monkeypatch.setattr(decode_tiles.TileList, "combine", lambda self, partial, *_: sizes.append(partial.numel()))
    cache = torch.empty(4096, 64, 8, 128, dtype=torch.bfloat16, device=meta)
    starts = torch.empty(33, dtype=torch.int32, device=meta)
    table = torch.empty(32, 512, dtype=torch.int32, device=meta)
    with record("sm_80"):
        for queries in (16384, 65536):
            query = torch.empty(queries, 32, 128, dtype=torch.bfloat16, device=meta)
            decode_attention(query, cache, cache, starts[1:], cu_seqlens_q=starts, page_table=table, max_seqlen_q=1024)
    assert sizes[0] == sizes[1]


def test_what_is_refused(device: torch.device) -> None:
    problem = _packed([5, 1, 20], device)
    query: Tensor = problem["query"]
    for name, given, says in (
        ("query", query[None], "query must have 3 dims"),
        ("cu_seqlens_q", problem["cu_seqlens_q"][1:], "cu_seqlens_q must have shape"),
        ("cu_seqlens_q", problem["cu_seqlens_q"].float(), "cu_seqlens_q.dtype must be one of"),
        ("num_splits", 2, "num_splits must be None with cu_seqlens_q"),
        ("layout", "bhsd", "layout must be 'bshd' with cu_seqlens_q"),
        ("key_new", query[None], "key_new must be None with cu_seqlens_q"),
    ):
        with pytest.raises(ValueError, match=says):
            decode_attention(**{**problem, name: given})
    with pytest.raises(ValueError, match="max_seqlen_q must be given with cu_seqlens_q"):
        decode_attention(**_problem(device), max_seqlen_q=3)


@pytest.mark.gpu
def test_a_graph_follows_starts_and_lengths(device: torch.device) -> None:
    """One capture serves all shares of the rows among the sequences; nothing waits for the host."""
    problem = _packed([5, 1, 20], device, lengths=(300, 700, 40), capacity=700, page_size=16, dtype=torch.bfloat16)
    check_a_graph(problem)


def check_a_graph(problem: dict[str, Any], **options: Any) -> None:
    """Of three sequences, 26 queries, 700 keys at most; the same bits as calls with the lengths of each replay."""
    graph, out = captured(lambda: decode_attention(**problem, **options), warm_ups=2)
    for starts, lengths in (
        ([0, 5, 6, 26], [300, 700, 40]),
        ([0, 0, 24, 26], [16, 650, 3]),
        ([2, 3, 4, 5], [0, 1, 40]),
    ):
        problem["cu_seqlens_q"].copy_(torch.tensor(starts))
        problem["cache_seqlens"].copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(out, decode_attention(**problem, **options))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_size", [0, 4])
def test_whole_numbers_of_any_stride(page_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Columns of wider tables: what lies between their elements is not theirs."""
    problem = _packed([5, 1, 20], device, page_size=page_size)
    given = {"cache_leftpad": torch.tensor([0, 2, 9], device=device)} | (
        {} if page_size else {"cache_batch_idx": torch.tensor([0, 1, 2], device=device)}
    )
    expected = decode_attention(**problem, **{name: x.int() for name, x in given.items()})
    for name in ("cache_seqlens", "cu_seqlens_q", *(["page_table"] if page_size else [])):
        given[name] = problem[name]
    strided = {name: torch.stack([x, x + 1], -1).to(dtype)[..., 0] for name, x in given.items()}
    assert all(x.stride(-1) == 2 for x in strided.values())
    torch.testing.assert_close(decode_attention(**{**problem, **strided}), expected)
