"""Memory that ranks share: what outlives a call is not in it, and what a captured call uses outlives it."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from powertrain.parallel.collective_matmul import all_gather_gemm
from powertrain.parallel.overlap import Overlap
from powertrain.parallel.transport import symmetric
from powertrain.parallel.transport.base import AllGatherHandle, RowCounts
from powertrain.parallel.transport.collective import all_gather_by_handle
from powertrain.parallel.transport.protocol import GATHER
from powertrain.parallel.transport.simulated import World
from powertrain.parallel.transport.symmetric import SymmetricAllGather, SymmetricTransport
from powertrain.parallel.transport.symmetric_fused import Fused
from powertrain.parallel.transport.watchdog import Call
from tests.parallel.test_all_to_all import _Memory, _Transport


class _Gathers(_Transport):
    def gather(self, shard: Tensor, rows: RowCounts, *, keep: bool) -> AllGatherHandle:
        return SymmetricAllGather(self, shard.contiguous(), rows, keep)  # type: ignore[arg-type]


def test_gathered_rows_stay_when_their_slot_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=None))
    world, memory, rows = World(3, delay=2e-4), _Memory(3), RowCounts((2, 0, 3))
    world.close()
    world.overlaps = [Overlap.over(_Gathers(world, rank, memory), f"gathers {rank}") for rank in range(3)]
    whole = [torch.full((5, 4), float(call)) + torch.arange(5.0)[:, None] for call in range(5)]

    def one(overlap: Overlap) -> list[Tensor]:
        return [all_gather_by_handle(overlap.transport, x[rows.of(overlap.rank)], rows) for x in whole]

    for found in world.run(one):
        for y, expected in zip(found, whole, strict=True):
            assert torch.equal(y, expected)
    world.close()


def _transport(**attributes: Any) -> SymmetricTransport:
    transport = object.__new__(SymmetricTransport)
    transport.__dict__.update(attributes)
    return transport


def _capturing(monkeypatch: pytest.MonkeyPatch, is_so: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_so)


class _Slots:
    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes


@pytest.mark.parametrize("captured", [True, False])
def test_inboxes_that_a_graph_was_captured_with_are_kept(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "Shared", lambda nbytes, *_: _Slots(nbytes))
    monkeypatch.setattr(SymmetricTransport, "_wait_for_all", lambda self: None)
    transport = _transport(group=None, device=None, _shared={}, _captured=set())
    _capturing(monkeypatch, False)
    transport.recv_buffer(GATHER, 100)
    _capturing(monkeypatch, captured)
    used = weakref.ref(transport.recv_buffer(GATHER, 100))
    _capturing(monkeypatch, False)
    larger = transport.recv_buffer(GATHER, 200)
    gc.collect()
    assert (used() is not None) == captured
    assert transport.recv_buffer(GATHER, 100) is larger


@pytest.mark.parametrize("captured", [True, False])
def test_what_a_captured_kernel_reads_is_kept(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = Fused(SimpleNamespace(size=2, device=torch.device("cpu")))  # type: ignore[arg-type]
    _capturing(monkeypatch, captured)
    read = weakref.ref(fused.integers((0, 4, 8), torch.int32))
    _capturing(monkeypatch, False)
    for rows in range(300):
        fused.integers((0, rows), torch.int32)
    assert (read() is not None) == captured


def test_results_in_any_layout_are_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    _capturing(monkeypatch, True)
    watch = SimpleNamespace(end=lambda call, stream: None)
    for error in (0, 1):
        transport = _transport(error=torch.tensor([error], dtype=torch.int32), watch=watch)
        memory = torch.zeros(4, 6)
        transport.end(None, SimpleNamespace(cuda_stream=0), [memory[:, 1:3]])  # type: ignore[arg-type]
        assert memory[:, 1:3].isnan().all() == bool(error) and not memory[:, 3:].isnan().any()
        assert not memory[:, 0].isnan().any()


@pytest.mark.parametrize("failure", [None, RuntimeError("rank 1 is gone")])
def test_closing_waits_for_nobody_once_somebody_is_gone(
    failure: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append("streams"))
    monkeypatch.setattr(dist, "barrier", lambda group: waited.append("ranks"))
    closes = SimpleNamespace(close=lambda: None, failure=failure)
    transport = _transport(peers=closes, watch=closes, device=None, group=None, _shared={0: None}, _captured=set())
    transport.close()
    assert waited == (["streams", "ranks"] if failure is None else []) and not transport._shared


def test_after_a_call_that_failed_half_way_none_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call("all-gather", (8, 4), torch.bfloat16)
    here = SimpleNamespace(global_rank=3)
    inside: list[Call] = []
    watch = SimpleNamespace(inside=lambda: inside[-1] if inside else None, raise_if_failed=lambda: None)
    transport = _transport(watch=watch, peers=SimpleNamespace(here=here), _broken="")
    transport.mark_broken(MemoryError("before it began"))
    assert transport._broken == ""
    inside.append(call)
    transport.mark_broken(MemoryError("a product found no memory"))
    with pytest.raises(symmetric.TransportBroken, match=r"all-gather of \[8, 4\] bfloat16 failed half-way on rank 3"):
        transport.begin(call)


def test_a_failing_product_abandons_its_call() -> None:
    world = World(2)
    told: list[Exception] = []

    def one(overlap: Overlap) -> None:
        overlap.transport.mark_broken = told.append  # type: ignore[method-assign, assignment]
        all_gather_gemm(torch.ones(2, 4), torch.ones(3, 4), overlap, rows=[2, 2])

    world.run(one)
    assert not told
    for overlap in world.overlaps:
        overlap.transport.gather = _fails  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        world.run(one)
    assert len(told) == 2
    world.close()


def _fails(*args: Any, **options: Any) -> Any:
    raise MemoryError("no memory")
