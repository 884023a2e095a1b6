"""Calls of decode_attention that share lists of work: one list for each kind of call, and the same bits."""

import copy
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain import DecodeSchedule
from powertrain.ops.attention import decode_op, decode_schedule, decode_tiles, step_schedule
from powertrain.ops.attention.decode import decode_attention
from powertrain.ops.attention.explain_decode import explain_decode_attention
from powertrain.ops.attention.hopper import decode_mla, forward
from powertrain.runtime.recording import record
from powertrain.runtime.settings import settings
from powertrain.runtime.target import Target
from tests.cuda_graph import captured
from tests.torch_setup import INTERPRET


class Counted:
    """A kernel, and the number of its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid: Any) -> Any:
        self.launches += 1
        return self.kernel[grid]


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch) -> list[Counted]:
    """Kernels that make lists. Every call counts as one that is captured in the same CUDA graph."""
    monkeypatch.setattr(step_schedule, "_capture", lambda x: (0, 1))
    made = []
    for module, name in ((decode_schedule, "_schedule_kernel"), (decode_tiles, "_few_tiles_kernel")):
        made.append(Counted(getattr(module, name)))
        monkeypatch.setattr(module, name, made[-1])
    return made


def _call(draws: random.Random, lengths: Tensor, most: int, queries: int, left: int, packed: bool) -> dict[str, Any]:
    """A layer's: tensors of its own."""
    batch, heads, kv_heads = len(lengths), 4, draws.choice([1, 2])
    new: dict[str, Any] = {"window_size": (left, 0)}
    shape = (batch * queries, heads, 16) if packed else (batch, queries, heads, 16)
    if packed:
        new |= {"cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32) * queries, "max_seqlen_q": queries}
    else:
        new |= {
            "key_new": torch.randn(batch, queries, kv_heads, 16),
            "value_new": torch.randn(batch, queries, kv_heads, 16),
        }
    page = draws.choice([None, 16])
    rows = most if page is None else page
    keys, values = (torch.randn(batch * most // rows, rows, kv_heads, 16) for _ in range(2))
    if page is not None:
        new["page_table"] = torch.randperm(len(keys)).view(batch, -1).int()
    return {"query": torch.randn(shape), "key_cache": keys, "value_cache": values, **new}


@pytest.mark.kernels
@pytest.mark.skipif(not INTERPRET, reason="its tensors are on the CPU, where the interpreter alone launches kernels")
@pytest.mark.parametrize("seed", range(8))
def test_the_same_bits(seed: int, lists: list[Counted], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of two layers of each of two kinds; the second kind has another window, or other heads."""
    draws = random.Random(seed)
    monkeypatch.setattr(decode_op.Target, "of", lambda device: replace(Target.parse("sm_90"), num_sms=9))
    monkeypatch.setattr(decode_schedule, "LEAST_KEYS", 32)
    decode_schedule.choose_parts.cache_clear()
    batch, queries, packed = draws.choice([1, 3, 5]), draws.choice([1, 2]), seed % 3 == 0
    lengths = torch.tensor([draws.choice([2, 40, draws.randint(2, 150)]) for _ in range(batch)], dtype=torch.int32)
    kinds = [_call(draws, lengths, 160, queries, left, packed) for left in (-1, draws.choice([-1, 20]))]
    for _ in range(2):
        schedule = DecodeSchedule(lengths)
        for call in kinds * 2:
            expected = decode_attention(cache_seqlens=lengths, return_lse=True, **_copy(call))
            found = decode_attention(cache_seqlens=lengths, return_lse=True, schedule=schedule, **_copy(call))
            assert all(map(torch.equal, found, expected))
        lengths += queries
    of_each = sum(kernel.launches for kernel in lists)
    # of a single sequence there is no list; elsewhere four calls a step without a schedule, and two kinds with it
    assert of_each in ({0} if batch == 1 and not packed else {10, 12}), of_each


def _copy(call: dict[str, Any]) -> dict[str, Any]:
    """With caches of its own to write to."""
    return {name: x.clone() if name in ("key_cache", "value_cache") else x for name, x in call.items()}


META = torch.device("meta")


def _latent(batch: int) -> dict[str, Any]:
    cache = torch.empty(batch, 4096, 1, 576, dtype=torch.bfloat16, device=META)
    query = torch.empty(batch, 1, 64, 576, dtype=torch.bfloat16, device=META)
    return {"query": query, "key_cache": cache, "value_cache": None, "head_dim_v": 512}


def _grouped(batch: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    cache = torch.empty(batch, 4096, 8, 128, dtype=dtype, device=META)
    return {
        "query": torch.empty(batch, 1, 32, 128, dtype=dtype, device=META),
        "key_cache": cache,
        "value_cache": cache,
    }


@pytest.mark.skipif(settings().interpret, reason="nothing is compiled under the interpreter")
@pytest.mark.parametrize("call", [_latent(32), _grouped(32), _grouped(1), _grouped(32, torch.float32)])
def test_launches_on_hopper(call: dict[str, Any], lists: list[Counted], monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention kernel is launched as without a schedule, with one counter for all layers."""
    counters: list[Tensor] = []
    for module in (decode_mla, forward):
        monkeypatch.setattr(module, "counter_of", lambda x: counters.append(x) or x.new_zeros(1, dtype=torch.int32))
    lengths = torch.empty(call["query"].shape[0], dtype=torch.int32, device=META)
    schedule, specs = DecodeSchedule(lengths), []
    for options in ({}, {"schedule": schedule}):
        with record("H200") as wanted:
            for _ in range(3):
                decode_attention(cache_seqlens=lengths, **call, **options)
        specs.append([spec.key for spec in wanted.specs])
    assert specs[0] == specs[1]
    has_list, is_hopper = call["query"].shape[0] > 1, call["query"].dtype is torch.bfloat16
    # three without the schedule, one with it
    assert sum(kernel.launches for kernel in lists) == (4 if has_list else 0)
    assert len(counters) == (3 if is_hopper else 0)


def test_a_capture_has_its_own(lists: list[Counted], monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that another graph makes, or another stream, may not be there yet; and outside of a capture none is
    taken."""
    call, lengths = _grouped(32), torch.empty(32, dtype=torch.int32, device=META)
    schedule = DecodeSchedule(lengths)
    for place, count in ((None, 1), ((0, 1), 2), ((0, 1), 2), ((0, 2), 3), ((5, 2), 4), (None, 5)):
        monkeypatch.setattr(step_schedule, "_capture", lambda x, place=place: place)
        with record("H200"):
            decode_attention(cache_seqlens=lengths, **call, schedule=schedule)
        assert sum(kernel.launches for kernel in lists) == count


def _small(**changed: Any) -> dict[str, Any]:
    cache = torch.randn(2, 8, 1, 16)
    return {"query": torch.randn(2, 1, 2, 16), "key_cache": cache, "value_cache": cache, **changed}


def test_no_schedule_of_other_lengths() -> None:
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    schedule = DecodeSchedule(lengths)
    expected = decode_attention(cache_seqlens=lengths, **(call := _small()))
    # a view of all of it has the same values
    assert torch.equal(decode_attention(cache_seqlens=lengths[:], schedule=schedule, **call), expected)
    with pytest.raises(ValueError, match="schedule must be of the call's cache_seqlens, got one of another tensor"):
        decode_attention(cache_seqlens=lengths.clone(), schedule=schedule, **call)
    lengths += 1
    match = "schedule must be made after the last write to cache_seqlens .one for each step., got one from before it"
    with pytest.raises(ValueError, match=match):
        decode_attention(cache_seqlens=lengths, schedule=schedule, **call)
    with pytest.raises(ValueError, match="schedule must be a DecodeSchedule or None, got"):
        decode_attention(cache_seqlens=lengths, schedule=lengths, **call)
    with torch.inference_mode():
        uncounted = lengths.clone()
        with pytest.raises(ValueError, match=r"cache_seqlens must be made outside of torch\.inference_mode"):
            DecodeSchedule(uncounted)
        with pytest.raises(ValueError, match=r"cache_seqlens must be made outside of torch\.inference_mode"):
            decode_attention(cache_seqlens=uncounted, schedule=schedule, **call)
    with pytest.raises(ValueError, match="cache_seqlens must be a tensor"):
        DecodeSchedule(3)  # type: ignore[arg-type]


def test_a_copied_schedule_is_of_its_copied_lengths() -> None:
    """Not of the first ones, which it does not keep: behind their end other lengths may be at their address."""
    lengths, call = torch.tensor([3, 5], dtype=torch.int32), _small()
    copied = copy.deepcopy(DecodeSchedule(lengths))
    with pytest.raises(ValueError, match="schedule must be of the call's cache_seqlens, got one of another tensor"):
        decode_attention(cache_seqlens=lengths, schedule=copied, **call)


def test_nothing_is_shared_where_another_gpu_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of a capture replays write to lengths, and PyTorch counts none of these writes."""
    lengths = SimpleNamespace(is_cuda=True, get_device=lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    for number, place in ((0, None), (3, (7, 3))):
        monkeypatch.setattr(step_schedule.driver, "capture_id", lambda stream, number=number: number)
        assert step_schedule._capture(lengths) == place  # type: ignore[arg-type]


def test_explained_calls_refuse_a_schedule_as_the_call_does() -> None:
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    for schedule, match in ((3, "be a DecodeSchedule or None, got"), (DecodeSchedule(lengths.clone()), "another")):
        with pytest.raises(ValueError, match=match):
            explain_decode_attention(cache_seqlens=lengths, schedule=schedule, **_small())


def test_explained_and_compiled_calls_take_it() -> None:
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    call, schedule = _small(), DecodeSchedule(lengths)
    assert explain_decode_attention(cache_seqlens=lengths, schedule=schedule, **call).kernel == "reference"

    def step(lengths: Tensor) -> Tensor:
        return decode_attention(cache_seqlens=lengths, schedule=DecodeSchedule(lengths), **call)

    expected = step(lengths)
    assert torch.equal(torch.compile(step, backend="eager", fullgraph=True)(lengths), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["latent", "grouped", "alone", "float32"])
def test_in_a_cuda_graph(kind: str) -> None:
    """Replays after other lengths: the same bits as eager calls, which make lists of their own."""
    meta = {"latent": _latent(32), "grouped": _grouped(32), "alone": _grouped(1), "float32": _grouped(4, torch.float32)}
    call = {n: torch.randn(x.shape, dtype=x.dtype, device="cuda") if isinstance(x, Tensor) else x
            for n, x in meta[kind].items()}  # fmt: skip
    lengths = torch.full((len(call["query"]),), 7, dtype=torch.int32, device="cuda")
    query = call.pop("query")
    queries = [query * n for n in (1, 2, 3)]
    outside = DecodeSchedule(lengths)

    def step(**options: Any) -> list[Tensor]:
        return [decode_attention(query, cache_seqlens=lengths, **call, **options) for query in queries]

    graph, found = captured(lambda: step(schedule=DecodeSchedule(lengths)))
    # made before the capture, whose own list it has nevertheless
    other, again = captured(lambda: step(schedule=outside))
    for most in (9, 4096, 600):
        lengths.copy_(torch.randint(1, most + 1, lengths.shape))
        graph.replay()
        other.replay()
        for each in (found, again):
            assert all(map(torch.equal, each, step()))
