"""decode_attention against its specification: caches dense and paged, appends, masks, splits; promises and errors."""

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.ops.attention import cache_append, combine, decode_kernels, decode_op, decode_plans, decode_schedule
from powertrain.ops.attention.decode import decode_attention, decode_attention_ref
from powertrain.ops.attention.merge import merge_attentions
from powertrain.ops.attention.triton.tiles import pieces
from powertrain.ops.rope import rope
from powertrain.ops.rope_table import rope_table
from powertrain.runtime.compile.service import entry_for
from powertrain.runtime.launch import Kernel
from powertrain.runtime.recording import record
from powertrain.runtime.settings import settings
from powertrain.runtime.target import Target
from powertrain.testing.numerics import check
from tests.ops.attention.decode_launches import launch_decode_kernels
from tests.torch_setup import HAS_GPU, INTERPRET, SLOW_IN_INTERPRETER

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
IDS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
# none; one that ends within a block; full
LENGTHS = (0, 7, 40)


def _problem(
    device: torch.device,
    *,
    lengths: tuple[int, ...] = LENGTHS,
    queries: int = 1,
    heads: int = 4,
    kv_heads: int = 2,
    head_dims: tuple[int, int] = (24, 24),
    capacity: int = 40,
    page_size: int = 0,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """A query and a cache that is NaN wherever no sequence has a row; pages lie in any order, unused ids are wild."""
    b = len(lengths)
    caches = [torch.randn(b, capacity, kv_heads, d, device=device).to(dtype) for d in head_dims]
    for cache in caches:
        for n, length in enumerate(lengths):
            cache[n, length:] = torch.nan
    tensors = {
        "query": torch.randn(b, queries, heads, head_dims[0], device=device).to(dtype),
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device=device),
    }
    if page_size:
        pages = -(-capacity // page_size)
        table = torch.randperm(b * pages + 3, device=device)[: b * pages].view(b, pages).int()
        caches = [_paged(cache, table, page_size) for cache in caches]
        for n, length in enumerate(lengths):
            table[n, -(-length // page_size) :] = 2**30
        tensors["page_table"] = table
    return {**tensors, "key_cache": caches[0], "value_cache": caches[1]}


def _paged(cache: Tensor, table: Tensor, page_size: int) -> Tensor:
    b, pages = table.shape
    padded = cache.new_full((b, pages * page_size, *cache.shape[2:]), torch.nan)
    padded[:, : cache.shape[1]] = cache
    paged = cache.new_full((b * pages + 3, page_size, *cache.shape[2:]), torch.nan)
    paged[table.long()] = padded.unflatten(1, (pages, page_size))
    return paged


def _check(problem: dict[str, Any], num_splits: int | None = None, **options: Any) -> None:
    """Values and LSE within the judge's bound."""

    def judged(function: Any, **more: Any) -> Any:
        def run(**tensors: Any) -> Any:
            out, lse = function(**tensors, **options, **more)
            return out, lse.masked_fill(lse == -torch.inf, -1e4)  # the judge subtracts

        return run

    ours = judged(decode_attention, num_splits=num_splits, return_lse=True)
    check(ours, judged(decode_attention_ref, upcast=False), judged(decode_attention_ref), problem, backward=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS.get)
# 0: one dense cache; 1, 3, 16: pages within a block of keys, an odd size too; 256: blocks within a page
@pytest.mark.parametrize("page_size", [0, 1, 3, 16, 256], ids=lambda p: f"page{p}")
def test_caches(page_size: int, dtype: torch.dtype, device: torch.device) -> None:
    capacity = 300 if page_size == 256 else 40
    lengths = (0, 7, capacity)
    _check(_problem(device, lengths=lengths, capacity=capacity, page_size=page_size, dtype=dtype))


# 1: one padded piece; 40: 32 + 16; 192/128: two pieces and one; 80/96: other pieces each; 576/512: the widest
@pytest.mark.parametrize("head_dims", [(1, 1), (40, 40), (192, 128), (80, 96), (576, 512)], ids=str)
def test_head_dims(head_dims: tuple[int, int], device: torch.device) -> None:
    _check(_problem(device, head_dims=head_dims, page_size=4), num_splits=2)


# 1 x 1: MHA; 4 x 3: rows of a tile are heads and queries; 40 x 2: more than one tile of rows
@pytest.mark.parametrize("heads, kv_heads, queries", [(2, 2, 1), (8, 2, 3), (8, 1, 17), (80, 1, 2)])
def test_rows_of_a_tile(heads: int, kv_heads: int, queries: int, device: torch.device) -> None:
    _check(_problem(device, lengths=(3, 29), heads=heads, kv_heads=kv_heads, queries=queries))


# more splits than blocks of keys: the last ones find nothing
@pytest.mark.parametrize("num_splits", [None, 1, 2, 3, 24])
def test_splits(num_splits: int | None, device: torch.device) -> None:
    problem = _problem(device, lengths=(0, 5, 129, 600), capacity=600, queries=2, head_dims=(16, 16))
    _check(problem, num_splits=num_splits, sinks=torch.randn(4, device=device))


_MASKS: dict[str, dict[str, Any]] = {
    "full": {"is_causal": False},
    "window": {"window_size": (9, 0)},
    "window-ahead": {"is_causal": False, "window_size": (5, 1)},
    "right-only": {"is_causal": False, "window_size": (-1, 2)},
    "window-empty": {"is_causal": False, "window_size": (0, 0)},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 0.7},
}


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("mask", _MASKS)
def test_masks(mask: str, num_splits: int, device: torch.device) -> None:
    # 2 keys for 5 queries: with a causal mask three of them see nothing
    problem = _problem(device, lengths=(0, 2, 140), capacity=150, queries=5, head_dims=(16, 16))
    _check(problem, num_splits=num_splits, **_MASKS[mask])


@pytest.mark.parametrize("per_batch", [False, True])
def test_alibi(per_batch: bool, device: torch.device) -> None:
    slopes = torch.rand(*((3, 4) if per_batch else (4,)), device=device)
    _check(_problem(device, queries=2), alibi_slopes=slopes, num_splits=2)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_sinks(num_splits: int, device: torch.device) -> None:
    sinks = torch.tensor([0.3, -1.0, 4.0, -torch.inf], device=device)
    _check(_problem(device, queries=2), sinks=sinks, num_splits=num_splits)


def test_batch_index(device: torch.device) -> None:
    problem = _problem(device, lengths=(40, 7, 40, 3))
    rows = torch.tensor([2, 0, 1], device=device, dtype=torch.int32)
    problem |= {"query": problem["query"][:3], "cache_seqlens": problem["cache_seqlens"][rows]}
    _check(problem, cache_batch_idx=rows)


@pytest.mark.parametrize("page_size", [0, 8])
def test_leftpad(page_size: int, device: torch.device) -> None:
    problem = _problem(device, lengths=(5, 30, 40), page_size=page_size, queries=2)
    leftpad = torch.tensor([5, 0, 17], device=device, dtype=torch.int32)
    slopes = torch.rand(4, device=device)
    _check(problem, cache_leftpad=leftpad, window_size=(20, -1), alibi_slopes=slopes, num_splits=2)


def test_what_lies_before_leftpad_is_not_read(device: torch.device) -> None:
    problem = _problem(device, lengths=(30, 40))
    leftpad = torch.tensor([9, 17], device=device, dtype=torch.int32)
    expected = decode_attention(**problem, cache_leftpad=leftpad)
    for name in ("key_cache", "value_cache"):
        problem[name][0, :9] = torch.nan
    assert torch.equal(decode_attention(**problem, cache_leftpad=leftpad), expected)


@pytest.mark.parametrize("page_size", [0, 4])
def test_values_in_the_keys(page_size: int, device: torch.device) -> None:
    """MLA: no value cache; the values are the first channels of the keys. Three ways to say it."""
    problem = _problem(device, heads=8, kv_heads=1, head_dims=(48, 32), page_size=page_size)
    problem["value_cache"] = problem["key_cache"][..., :32]
    expected = decode_attention(**problem)
    shared = decode_attention(**{**problem, "value_cache": None}, head_dim_v=32)
    torch.testing.assert_close(shared, expected)
    # 24 channels are other pieces than the keys' first: loaded for themselves
    odd = decode_attention(**{**problem, "value_cache": None}, head_dim_v=24)
    torch.testing.assert_close(odd, expected[..., :24])
    _check(problem)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("page_size", [0, 4])
def test_layouts_and_strides(page_size: int, layout: str, device: torch.device) -> None:
    problem = _problem(device, page_size=page_size, queries=2)
    expected = decode_attention(**problem)
    packed = torch.stack([problem["key_cache"], problem["value_cache"]], 3).flatten(3)
    wide = torch.randn(*problem["query"].shape[:3], 29, device=device)
    wide[..., :24] = problem["query"]
    strided = {**problem, "query": wide[..., :24], "key_cache": packed[..., :24], "value_cache": packed[..., 24:]}
    if layout == "bhsd":
        for name in ("query", "key_cache", "value_cache"):
            strided[name] = strided[name].transpose(1, 2)
        expected = expected.transpose(1, 2)
    torch.testing.assert_close(decode_attention(**strided, layout=layout), expected)


def _appended(device: torch.device, page_size: int, num_new: int, **options: Any) -> tuple[dict[str, Any], Any, Any]:
    """(arguments with new tokens, keys and values of each sequence as they should then be)."""
    problem = _problem(device, lengths=(0, 7, 30), page_size=page_size, **options)
    new = [torch.randn(3, num_new, 2, 24, device=device) for _ in range(2)]
    if page_size:  # pages for the new tokens
        free = problem["page_table"] == 2**30
        problem["page_table"][free] = _free_pages(problem["page_table"], problem["key_cache"].shape[0])[: free.sum()]
    expected = []
    for cache, tokens in zip((problem["key_cache"], problem["value_cache"]), new, strict=True):
        table = problem.get("page_table")
        rows = cache if table is None else cache[table.long()].flatten(1, 2)
        expected.append([torch.cat([rows[n, :length], tokens[n]]) for n, length in enumerate((0, 7, 30))])
    return {**problem, "key_new": new[0], "value_new": new[1]}, *expected


def _free_pages(table: Tensor, pages: int) -> Tensor:
    used = set(table.flatten().tolist())
    return torch.tensor([p for p in range(pages) if p not in used], dtype=torch.int32, device=table.device)


@pytest.mark.parametrize("num_new", [1, 3])
@pytest.mark.parametrize("page_size", [0, 1, 3, 16])
def test_append(page_size: int, num_new: int, device: torch.device) -> None:
    problem, keys, values = _appended(device, page_size, num_new, queries=num_new)
    out, lse = decode_attention(**problem, return_lse=True)
    for n, (k, v) in enumerate(zip(keys, values, strict=True)):
        one = {"query": problem["query"][n : n + 1], "cache_seqlens": torch.tensor([k.shape[0]], device=device)}
        expected = decode_attention_ref(key_cache=k[None], value_cache=v[None], **one)
        torch.testing.assert_close((out[n : n + 1], lse[n : n + 1]), expected)
        table = problem.get("page_table")
        for cache, rows in ((problem["key_cache"], k), (problem["value_cache"], v)):
            stored = cache[n] if table is None else cache[table[n].long()].flatten(0, 1)
            assert torch.equal(stored[: rows.shape[0]], rows)
            assert stored[rows.shape[0] :].isnan().all()  # nothing else was written


def test_append_beyond_the_capacity_is_dropped(device: torch.device) -> None:
    problem = _problem(device, lengths=(39, 40))
    before = problem["key_cache"].clone()
    new = torch.randn(2, 3, 2, 24, device=device)
    out = decode_attention(**problem, key_new=new, value_new=new)
    assert torch.equal(problem["key_cache"][0, 39], new[0, 0])
    assert torch.equal(problem["key_cache"][1], before[1])
    assert out.isfinite().all()


def test_append_with_batch_index_and_shared_values(device: torch.device) -> None:
    cache = torch.full((4, 10, 1, 48), torch.nan, device=device)
    new = torch.randn(2, 1, 1, 48, device=device)
    index = torch.tensor([3, 1], dtype=torch.int32, device=device)
    lengths = torch.zeros(2, dtype=torch.int32, device=device)
    query = torch.randn(2, 1, 4, 48, device=device)
    out = decode_attention(query, cache, None, lengths, key_new=new, cache_batch_idx=index, head_dim_v=32)
    assert torch.equal(cache[3, 0], new[0, 0]) and torch.equal(cache[1, 0], new[1, 0])
    assert cache[:, 1:].isnan().all() and cache[::2].isnan().all()
    torch.testing.assert_close(out, new[..., :32].expand(2, 1, 4, 32))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("is_causal, queries", [(True, 3), (True, 2), (False, 3)])
def test_rotary(is_causal: bool, queries: int, interleaved: bool, device: torch.device) -> None:
    problem, _, _ = _appended(device, 4, 3, queries=queries)
    table = rope_table(16, 64, device=device)
    positions = problem["cache_seqlens"].long()[:, None] + torch.arange(queries, device=device) * is_causal
    turned = dict(table=table, interleaved=interleaved)
    query = rope(problem["query"], position_ids=positions, **turned)
    key = rope(problem["key_new"], offset=problem["cache_seqlens"], **turned)
    apart = {**problem, **{n: problem[n].clone() for n in ("key_cache", "value_cache")}}
    expected = decode_attention(**{**apart, "query": query, "key_new": key}, is_causal=is_causal)
    actual = decode_attention(**problem, rotary=table, rotary_interleaved=interleaved, is_causal=is_causal)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(problem["key_cache"], apart["key_cache"], equal_nan=True)


def test_rotary_in_a_window(device: torch.device) -> None:
    """flash-attn: without causal and window every query stands where the first new key does; with a window not."""
    problem, _, _ = _appended(device, 0, 3, queries=3)
    table = rope_table(24, 64, device=device)
    query, key = rope(problem["query"], problem["key_new"], table=table, offset=problem["cache_seqlens"])
    apart = {**problem, **{n: problem[n].clone() for n in ("key_cache", "value_cache")}}
    options: dict[str, Any] = {"is_causal": False, "window_size": (8, 2)}
    expected = decode_attention(**{**apart, "query": query, "key_new": key}, **options)
    torch.testing.assert_close(decode_attention(**problem, rotary=table, **options), expected)


@pytest.mark.parametrize("empty", ["batch", "queries", "cache", "pages"])
def test_empty(empty: str, device: torch.device) -> None:
    b, sq, n = (0 if empty == "batch" else 2), (0 if empty == "queries" else 1), (0 if empty == "cache" else 4)
    query, cache = torch.randn(b, sq, 4, 16, device=device), torch.randn(2, n, 2, 16, device=device)
    table = torch.zeros(b, 0, dtype=torch.int32, device=device) if empty == "pages" else None
    lengths = torch.full((b,), 0 if empty in ("cache", "pages") else 3, dtype=torch.int32, device=device)
    out, lse = decode_attention(query, cache, cache, lengths, page_table=table, return_lse=True)
    assert out.shape == (b, sq, 4, 16) and lse.shape == (b, 4, sq)
    if empty in ("cache", "pages"):
        assert not out.any() and (lse == -torch.inf).all()


def test_shared_prefix(device: torch.device) -> None:
    """A prefix in common is attended to once, as one long sequence, and merged with each request's own keys."""
    problem = _problem(device, lengths=(4, 7, 40), queries=2)
    q, lengths = problem["query"], problem["cache_seqlens"]
    prefix = [torch.randn(1, 33, 2, 24, device=device) for _ in range(2)]
    whole = [torch.cat([p.expand(3, -1, -1, -1), problem[n]], 1) for p, n in
             zip(prefix, ("key_cache", "value_cache"), strict=True)]  # fmt: skip
    expected = decode_attention(q, *whole, lengths + 33, return_lse=True)

    everything = torch.tensor([33], dtype=torch.int32, device=device)
    out, lse = decode_attention(q.flatten(0, 1)[None], *prefix, everything, is_causal=False, return_lse=True)
    shared = out.view_as(q), lse.unflatten(2, q.shape[:2])[0].transpose(0, 1)
    own = decode_attention(**problem, return_lse=True)
    merged = merge_attentions(*zip(shared, own, strict=True))
    torch.testing.assert_close(merged, expected)


# plain PyTorch on a CPU: each option once
@pytest.mark.parametrize(
    "page_size, dynamic",
    [
        (0, True),
        (4, False),
        *(
            pytest.param(*values, marks=() if HAS_GPU or INTERPRET else pytest.mark.slow)
            for values in ((0, False), (4, True))
        ),
    ],
)
def test_compiles(page_size: int, dynamic: bool, device: torch.device) -> None:
    problem, _, _ = _appended(device, page_size, 1)
    apart = {n: t.clone() for n, t in problem.items()}

    def run(**tensors: Any) -> Any:
        return decode_attention(**tensors, rotary=table, return_lse=True)

    table = rope_table(24, 64, device=device)
    expected = run(**apart)
    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    torch.testing.assert_close(compiled(**problem), expected)
    for name in ("key_cache", "value_cache"):  # the append is seen through the compiler
        torch.testing.assert_close(problem[name], apart[name], equal_nan=True)


def test_reference_backend(device: torch.device) -> None:
    problem = _problem(device, page_size=4)
    torch.testing.assert_close(decode_attention(**problem, backend="reference"), decode_attention(**problem))


def test_deterministic(device: torch.device) -> None:
    problem = _problem(device, lengths=(600, 33, 2), capacity=600, head_dims=(16, 16))
    runs = [decode_attention(**problem, num_splits=5) for _ in range(3)]
    assert all(torch.equal(runs[0], run) for run in runs[1:])


@pytest.mark.parametrize(
    "wrong",
    [{"cache_seqlens": [5, -1]}, {"cache_batch_idx": [0, 2]}, {"cache_batch_idx": [-1, 0]}, {"cache_leftpad": [-1, 0]},
     {"cu_seqlens_q": [0, 2, 5]}, {"cu_seqlens_q": [0, 3, 2]}],
    ids=str,
)  # fmt: skip
def test_values_are_checked_where_the_host_reads_them(wrong: dict[str, list[int]]) -> None:
    """On a CPU, for kernels in the interpreter too: they would read other memory."""
    cache, (name,) = torch.randn(2, 8, 2, 16), wrong
    query = torch.randn(3, 2, 16) if name == "cu_seqlens_q" else torch.randn(2, 1, 2, 16)
    numbers = {n: torch.tensor(v, dtype=torch.int32) for n, v in ({"cache_seqlens": [5, 3]} | wrong).items()}
    with pytest.raises(ValueError, match=f"decode_attention: {name} must .*, got"):
        decode_attention(query, cache, cache, **numbers)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("wrong", [-1, 6])
def test_pages_are_checked_where_the_host_reads_them(wrong: int, packed: bool) -> None:
    """Another page's rows were taken. Pages that no row of the sequence lies in may have any number."""
    pages, lengths = torch.randn(6, 4, 2, 16), torch.tensor([9, 0], dtype=torch.int32)
    query = torch.randn(2, 1, 2, 16)
    more = {"cu_seqlens_q": torch.arange(3, dtype=torch.int32)} if packed else {}

    def decode(*first: int, **options: Any) -> Tensor:
        table = torch.tensor([first, [wrong] * 4], dtype=torch.int32)
        found = decode_attention(
            query[:, 0] if packed else query, pages, pages, lengths, page_table=table, **more, **options
        )
        assert isinstance(found, Tensor)
        return found

    for place in range(3):
        with pytest.raises(ValueError, match=rf"page_table must be in \[0, 6\), got {wrong}"):
            decode(*(wrong if n == place else n for n in range(3)), wrong)
    pads = torch.tensor([4, 0], dtype=torch.int32)
    torch.testing.assert_close(
        decode(wrong, 1, 2, wrong, cache_leftpad=pads), decode(0, 1, 2, 3, cache_leftpad=pads), rtol=0, atol=0
    )
    near = {"window_size": (2, 0)}
    torch.testing.assert_close(decode(wrong, 1, 2, wrong, **near), decode(0, 1, 2, 3, **near), rtol=0, atol=0)
    if not packed:
        # new rows go to the last page and the one behind it
        new = torch.randn(2, 4, 2, 16)
        with pytest.raises(ValueError, match="page_table must be in"):
            decode(0, 1, 2, wrong, key_new=new, value_new=new)


_WRITTEN: dict[str, dict[str, Any]] = {
    "scale": {"scale": 10**400}, "softcap": {"softcap": 10**400}, "num_splits": {"num_splits": 10**20},
    "sinks": {"sinks": torch.ones(2).to_sparse()}, "alibi_slopes": {"alibi_slopes": torch.ones(2).to_sparse()},
    "value_cache": {"value_cache": torch.zeros(2, 8, 2, 1).to_sparse()},
}  # fmt: skip


@pytest.mark.parametrize("name", _WRITTEN)
def test_an_error_leaves_the_cache(name: str, device: torch.device) -> None:
    """These were found after new rows had been written."""
    cache, new = torch.zeros(2, 8, 2, 1, device=device), torch.ones(2, 1, 2, 1, device=device)
    options = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in _WRITTEN[name].items()}
    problem = {"value_cache": cache, "cache_seqlens": torch.tensor([3, 5], device=device), **options}
    with pytest.raises((ValueError, TypeError), match=f"decode_attention: {name} must be"):
        decode_attention(cache[:, :1], cache, key_new=new, value_new=new, **problem)
    assert not cache.any()


def test_vmap_is_refused_ahead_of_the_append(device: torch.device) -> None:
    """On a CPU new rows were written before, and the error named another op and a way out that there is not."""
    caches, new = torch.zeros(3, 2, 8, 2, 4, device=device), torch.ones(3, 2, 1, 2, 4, device=device)
    lengths = torch.tensor([3, 5], device=device)

    def step(cache: Tensor, x: Tensor) -> Any:
        return decode_attention(x, cache, cache, lengths, key_new=x, value_new=x)

    with pytest.raises(NotImplementedError, match="decode_attention: vmap is not implemented; add the batch dim"):
        torch.vmap(step)(caches, new)
    assert not caches.any()


# of one sequence: it was written for the first, and the others counted rows that nobody wrote; of more, kernels read
# lengths behind the last one
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_new_rows_are_those_of_every_sequence(batch: int, device: torch.device) -> None:
    cache, new = torch.zeros(2, 8, 2, 16, device=device), torch.ones(batch, 1, 2, 16, device=device)
    lengths = torch.tensor([3, 5], device=device)
    match = rf"key_new must have shape \[2, 1, 2, 16\] \(batch, .*\), got \[{batch}, 1, 2, 16\]"
    with pytest.raises(ValueError, match=match):
        decode_attention(cache[:, :1], cache, cache, lengths, key_new=new, value_new=new)
    assert not cache.any()


def test_the_error_of_values_that_are_too_many_is_short(device: torch.device) -> None:
    """It had all numbers of the tensor."""
    cache, new = torch.zeros(1, 8, 2, 16, device=device), torch.ones(1, 1, 2, 16, device=device)
    lengths = torch.tensor([3], device=device)
    with pytest.raises(ValueError, match=r"value_cache is, got a float32 tensor of shape \[1, 1, 2, 16\]$"):
        decode_attention(new, cache, None, lengths, key_new=new, value_new=new, head_dim_v=16)


@pytest.mark.parametrize("page_size", [0, 4])
@pytest.mark.parametrize("queries", [1, 3])
def test_keys_ahead_of_the_window_may_hold_anything(queries: int, page_size: int, device: torch.device) -> None:
    """Their pages may have been given away. On a CPU a NaN in one of them made the whole result NaN."""
    problem = _problem(device, lengths=(40, 21, 3), queries=queries, page_size=page_size)
    options: dict[str, Any] = {"window_size": (5, 0), "return_lse": True}
    expected = decode_attention(**problem, **options)
    for name in ("key_cache", "value_cache"):
        for n, length in enumerate((40, 21, 3)):
            for row in range(max(0, length - queries - 5)):
                entry, at = (n, row)
                if page_size:
                    entry, at = int(problem["page_table"][n, row // page_size]), row % page_size
                problem[name][entry, at] = torch.nan
    torch.testing.assert_close(decode_attention(**problem, **options), expected)


def test_errors(device: torch.device) -> None:
    problem = _problem(device)

    def fails(match: str, error: type[Exception] = ValueError, **changed: Any) -> None:
        with pytest.raises(error, match=match):
            decode_attention(**{**problem, **changed})

    query, cache, table = problem["query"], problem["key_cache"], torch.zeros(3, 2, dtype=torch.int32, device=device)
    fails(r"decode_attention: key_cache must have query's head dim 16, got 24", query=query[..., :16])
    fails("query must have a multiple of key_cache's 2 heads, got 3", query=query[:, :, :3])
    fails("key_cache must have query's dtype float32", key_cache=cache.half())
    fails("head_dim_v must be given without a value_cache", value_cache=None)
    fails("head_dim_v must be value_cache's 24 or None, got 8", head_dim_v=8)
    fails(r"cache_seqlens must have shape \[3\] \(batch\), got \[2\]", cache_seqlens=problem["cache_seqlens"][:2])
    fails("cache_batch_idx must be None with a page_table", page_table=table, cache_batch_idx=table[:, 0].contiguous())
    fails(r"page_table must have shape \[3, max pages\]", page_table=table[:2])
    fails("value_new must be given as value_cache is", key_new=cache[:, :1])
    fails("key_new must be given with rotary", rotary=rope_table(16, 64, device=device))
    fails("num_splits must be from 1 to 65535, or None, got 0", num_splits=0)
    fails("scale must be finite, got nan", scale=float("nan"))
    fails("layout must be one of 'bshd', 'bhsd', got 'thd'", layout="thd")
    fails("decode_attention has no gradients", NotImplementedError, query=query.clone().requires_grad_())
    if device.type == "cpu" and not settings().interpret:
        fails("query must be on a GPU for backend 'triton'", backend="triton")


@pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")
def test_wide_strides_take_int64(device: torch.device) -> None:
    """Rows 2^31 elements apart: only addresses, so a GPU and virtual memory are not needed."""
    with record("sm_90") as wanted:
        cache = torch.empty_strided((3, 40, 2, 24), (2**34, 2**31, 24, 1), device="meta")
        query = torch.empty(3, 1, 4, 24, device="meta")
        decode_attention(query, cache, cache, torch.empty(3, dtype=torch.int32, device="meta"))
    decoding = next(spec for spec in wanted.specs if spec.kernel.name == "_decode_kernel")
    assert all(t in ("i64", "fp32", "constexpr") or t[0] == "*" for t in decoding.signature.values())


@pytest.mark.gpu
@pytest.mark.usefixtures("most_gpu_memory")
def test_more_than_2_31_elements(device: torch.device) -> None:
    cache = torch.empty(70, 2**15, 8, 128, device=device, dtype=torch.bfloat16).normal_()
    query = torch.randn(70, 1, 16, 128, device=device, dtype=torch.bfloat16)
    lengths = torch.full((70,), 2**15, dtype=torch.int32, device=device)
    out = decode_attention(query, cache, cache, lengths)
    tail = decode_attention(query[-1:], cache[-1:], cache[-1:], lengths[-1:])
    torch.testing.assert_close(out[-1:], tail, rtol=2e-2, atol=2e-3)


@pytest.mark.gpu
def test_graph_follows_the_lengths(device: torch.device) -> None:
    """One capture serves all lengths: the cache grows, and nothing waits for the host."""
    problem, _, _ = _appended(device, 4, 1)
    fresh = {n: t.clone() for n, t in problem.items()}
    decode_attention(**{**problem, **{n: problem[n].clone() for n in ("key_cache", "value_cache")}})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(**problem)
        problem["cache_seqlens"] += 1
    for _ in range(3):
        expected = decode_attention(**fresh)
        fresh["cache_seqlens"] += 1
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, 200, 10))
def test_random_problems(first: int, device: torch.device) -> None:
    for seed in range(first, first + 10):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        kv_heads, capacity = draw.choice([1, 2, 3, 8]), draw.choice([1, 40, 300, 1000])
        head_dims = draw.choice([(8, 8), (40, 40), (64, 64), (80, 80), (128, 128), (192, 128), (111, 7), (256, 256)])
        options: dict[str, Any] = {"is_causal": draw.random() < 0.7}
        options |= {"window_size": (draw.randrange(50), draw.randrange(4))} if draw.random() < 0.4 else {}
        options |= {"softcap": 15.0} if draw.random() < 0.3 else {}
        heads = kv_heads * draw.choice([1, 2, 4, 7])
        options |= {"sinks": torch.randn(heads, device=device)} if draw.random() < 0.3 else {}
        options |= {"alibi_slopes": torch.rand(heads, device=device)} if draw.random() < 0.3 else {}
        problem = _problem(
            device, lengths=tuple(draw.randint(0, capacity) for _ in range(draw.choice([1, 3, 20]))), heads=heads,
            queries=draw.choice([1, 1, 2, 5, 16]), kv_heads=kv_heads, head_dims=head_dims, capacity=capacity,
            page_size=draw.choice([0, 0, 1, 3, 16, 64, 256]), dtype=draw.choice(DTYPES),
        )  # fmt: skip
        try:
            _check(problem, num_splits=draw.choice([None, None, 1, 3]), **options)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")
def test_every_kernel_is_recorded() -> None:
    with record("sm_90") as wanted:
        launch_decode_kernels(torch.bfloat16)
    kernels = [*vars(decode_kernels).values(), *vars(cache_append).values(), *vars(combine).values()]
    every = {value.name for value in kernels if isinstance(value, Kernel)}
    assert {spec.kernel.name for spec in wanted.specs} >= every


# every card's arch, and shapes far from those that were measured
@pytest.mark.parametrize("card", ["T4", "A100", "RTX 3090", "L4", "H200", "B200", "RTX 5090"])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_plans_fit(itemsize: int, card: str) -> None:
    """Keys and values in flight fit into shared memory, blocks of keys are powers of two, splits fill no more than two
    waves."""
    target = Target.parse(card)
    fma = itemsize == 4 or not target.has_tensor_core_dot
    for dqk, dv in [(1, 1), (64, 64), (111, 7), (128, 128), (192, 128), (256, 256), (512, 512), (576, 512)]:
        yes_or_no = [True, False]
        options = itertools.product([1, 4, 16, 30, 100], [0, 1, 16, 48, 64, 256], yes_or_no, yes_or_no)
        for rows, page_size, is_short, aligned in options:
            shares = dqk == 576
            wide, narrow = (sum(pieces(d, 64 if fma else 512)) for d in (dqk, dv))
            plan = decode_plans.plan_for(
                rows, wide, narrow, shares, itemsize, page_size, is_short, aligned, fma, target
            )
            one_stage = plan.block_n * (wide + (0 if shares else narrow)) * itemsize
            assert plan.block_n & (plan.block_n - 1) == 0 and plan.block_n >= 16
            # page ids come a block ahead, so keys and values have all stages but the one that is computed
            held = plan.block_m * wide * itemsize + max(1, plan.num_stages - 1) * one_stage
            assert plan.num_stages == 1 or held <= target.shared_per_block
            assert plan.per_sm == 1 or fma or plan.per_sm * held <= target.shared_per_sm
            for programs, keys in [(1, 1), (8, 131072), (512, 8192), (10**6, 300)]:
                splits = decode_plans.choose_splits(programs, keys, plan.per_sm, target)
                assert 1 <= splits <= 128 and (splits - 1) * programs <= 2 * target.num_sms * plan.per_sm


# 64: one page id a block; 16: one a key
@pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")
@pytest.mark.parametrize("page_size, queries", [(0, 1), (64, 1), (16, 1), (64, 8), (16, 8)])
def test_keys_have_all_stages(page_size: int, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page ids that keys wait for within a step would leave fewer blocks of keys on their way."""
    # never the Hopper forward
    monkeypatch.setattr(decode_op, "LEAST_ROWS", 1 << 30)
    with record("H200") as wanted:
        rows = (64 * 8192 // page_size, page_size) if page_size else (64, 8192)
        cache = torch.empty(*rows, 8, 128, device="meta", dtype=torch.bfloat16)
        query = torch.empty(64, queries, 32, 128, device="meta", dtype=torch.bfloat16)
        lengths = torch.empty(64, device="meta", dtype=torch.int32)
        pages = torch.empty(64, 8192 // page_size, device="meta", dtype=torch.int32) if page_size else None
        decode_attention(query, cache, cache, lengths, page_table=pages)
    (spec,) = (spec for spec in wanted.specs if spec.kernel.name == "_decode_kernel")
    block = 2 * spec.constants["BLOCK_N"] * 128 * 2
    assert entry_for(spec)[0].manifest["launch"]["shared"] >= (spec.options["num_stages"] - 1) * block


@pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")
def test_splits_follow_from_what_a_window_reads() -> None:
    """One sequence of up to 131072 keys is split to fill the GPU; with a window of 256 there is nothing to split."""

    def kernels(window: int) -> set[str]:
        with record("A100") as wanted:
            cache = torch.empty(1, 131072, 8, 128, device="meta", dtype=torch.bfloat16)
            query = torch.empty(1, 1, 32, 128, device="meta", dtype=torch.bfloat16)
            length = torch.empty(1, device="meta", dtype=torch.int32)
            decode_attention(query, cache, cache, length, window_size=(window, 0))
        return {spec.kernel.name for spec in wanted.specs}

    assert kernels(-1) == {"_decode_kernel", "_combine_kernel"}
    assert kernels(255) == {"_decode_kernel"}


# one to three seconds each in the interpreter; the others have pages of both sizes and none, few and many sequences,
# long and short and empty ones, windows, sinks and left padding
_LIKE_OTHERS = (0, 1, 6, 8, 10, 11)


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=SLOW_IN_INTERPRETER if n in _LIKE_OTHERS else ()) for n in range(12)]
)
def test_lengths_far_apart(seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences are cut into parts by their lengths: one long among short, equal ones, empty ones, few and many."""
    draws = random.Random(seed)
    batch = draws.choice([2, 3, 9, 25])
    target = Target.parse("sm_90")
    target = replace(target, num_sms=draws.choice([2, 9, 64]))
    monkeypatch.setattr(decode_op.Target, "of", lambda device: target)
    page = draws.choice([None, 4, 16])
    # a part has 512 keys or more elsewhere
    monkeypatch.setattr(decode_schedule, "LEAST_KEYS", 32)
    decode_schedule.choose_parts.cache_clear()
    longest = draws.choice([40, 170])
    lengths = [draws.choice([0, 1, draws.randint(1, 40), longest]) for _ in range(batch)]
    lengths[draws.randrange(batch)] = longest
    queries, heads, kv_heads = draws.choice([1, 3]), 4, draws.choice([1, 2])
    query = torch.randn(batch, queries, heads, 16, device=device)
    seqlens = torch.tensor(lengths, dtype=draws.choice([torch.int32, torch.int64]), device=device)
    options: dict[str, Any] = {"window_size": draws.choice([(-1, -1), (50, 0)])}
    if draws.random() < 0.5:
        options["sinks"] = torch.randn(heads, device=device)
    if page is None:
        keys, values = (torch.randn(batch, longest, kv_heads, 16, device=device) for _ in range(2))
        if draws.random() < 0.5:
            options["cache_leftpad"] = torch.tensor([draws.randint(0, n) for n in lengths], device=device)
    else:
        per_sequence = -(-longest // page)
        keys, values = (torch.randn(batch * per_sequence, page, kv_heads, 16, device=device) for _ in range(2))
        order = torch.randperm(batch * per_sequence, device=device)
        options["page_table"] = order.view(batch, per_sequence).int()
    expected, expected_lse = decode_attention_ref(query, keys, values, seqlens, **options)
    out, lse = decode_attention(query, keys, values, seqlens, return_lse=True, **options)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)
    assert torch.equal(out, decode_attention(query, keys, values, seqlens, **options))


@pytest.mark.kernels
@pytest.mark.parametrize("of", ["key", "query", "sinks"])
@pytest.mark.parametrize("splits", [1, 2, 3, None])
def test_nan_in_one_split_is_in_the_result(splits: int | None, of: str, device: torch.device) -> None:
    """Its LSE was -inf, so that the other splits were the result."""
    torch.manual_seed(0)
    tensors = {"query": torch.randn(2, 1, 2, 16), "key": torch.randn(2, 256, 1, 16), "sinks": torch.randn(2)}
    if of == "sinks":
        tensors["sinks"][:] = torch.nan
    else:
        tensors[of][0, 0] = torch.nan
    query, key, sinks = (x.to(device) for x in tensors.values())
    lengths = torch.tensor([200, 90], dtype=torch.int32, device=device)
    sinks = {"sinks": sinks} if of == "sinks" else {}
    out, lse = decode_attention(query, key, key, lengths, num_splits=splits, return_lse=True, backend="triton", **sinks)
    expected = [True, of == "sinks"]
    assert out.isnan().flatten(1).all(1).tolist() == out.isnan().flatten(1).any(1).tolist() == expected
    assert lse.isnan().flatten(1).all(1).tolist() == lse.isnan().flatten(1).any(1).tolist() == expected
