"""The trading of transport/symmetric.py, as it is, on CPU memory: ranks are threads, copies are memmove."""

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.parallel.overlap import Overlap
from powertrain.parallel.transport.base import AllToAllHandle, SplitSizes
from powertrain.parallel.transport.protocol import COMBINE, DISPATCH, SLOTS_OF
from powertrain.parallel.transport.simulated import SimulatedTransport, Stream, ThreadEngine, World
from powertrain.parallel.transport.symmetric import Shared, SymmetricAllToAll, _buffer_bytes, _starts
from tests.distributed.experts_worker import check_case, tokens_of


class _Engine(ThreadEngine):
    """Places of a trading are addresses and bytes, as the copy engines take them."""

    def copy(self, stream: Stream | None, source: Any, target: Any) -> None:
        if not isinstance(source, tuple):
            return super().copy(stream, source, target)

        def step() -> None:
            ctypes.memmove(target[0], source[0], source[1])

        self._do(stream, step)


class _Memory:
    """Every rank's receive buffers; all ranks make a larger one together."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.size, self.grown = size, 0
        self.recv_buffers: dict[int, list[Tensor]] = {}

    def recv_buffer(self, rank: int, use: int, slot_bytes: int) -> Shared:
        slots, found = SLOTS_OF[use], self.recv_buffers.get(use)
        if found is None or found[0].numel() < slots * slot_bytes:
            self.barrier.wait()
            if rank == 0:
                nbytes = slots * max(slot_bytes, 256)
                self.recv_buffers[use] = [torch.full((nbytes,), 255, dtype=torch.uint8) for _ in range(self.size)]
                self.grown += 1
            self.barrier.wait()
        shared = object.__new__(Shared)
        shared.mine = self.recv_buffers[use][rank]
        shared.slot_bytes = shared.mine.numel() // slots
        shared.addresses = [t.data_ptr() for t in self.recv_buffers[use]]
        return shared


class _Transport(SimulatedTransport):
    """What SymmetricAllToAll asks of its transport."""

    device = torch.device("cpu")

    def __init__(self, world: World, rank: int, memory: _Memory) -> None:
        super().__init__(world, rank)
        self.memory, self.steps.engine = memory, _Engine(world, rank)

    def recv_buffer(self, use: int, slot_bytes: int) -> Shared:
        return self.memory.recv_buffer(self.rank, use, slot_bytes)

    def all_to_all_async(self, use: int, like: Tensor, splits: SplitSizes, width: int) -> AllToAllHandle:
        return SymmetricAllToAll(self, use, like, splits, width)  # type: ignore[arg-type]

    def begin(self, call: Any) -> Any:
        return SimpleNamespace(cuda_stream=None)

    def end(self, call: Any, main: Any, outputs: Any) -> None:
        assert all(y.isfinite().all() for y in outputs)

    def fork(self, use: int, main: Any) -> Stream:
        return self.outward[use]

    def join(self, use: int, main: Any) -> None:
        self.outward[use].put(lambda: None).result(timeout=60)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_come_and_go_by_their_addresses(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=None))
    world, memory = World(size, seed=size, delay=2e-4), _Memory(size)
    world.overlaps = [Overlap.over(_Transport(world, rank, memory), f"trading {size} {rank}") for rank in range(size)]

    def one(overlap: Overlap) -> None:
        for counts in tokens_of(size):
            for capacity in (None, 3):
                check_case(overlap, counts, 2, 1, capacity, ("overlapped",))
        wide = [40 * (rank + 1) for rank in range(size)]
        check_case(overlap, wide, 2, 0, None, ("overlapped",))
        overlap.close()

    world.run(one)
    assert memory.recv_buffers.keys() == {DISPATCH, COMBINE} and memory.grown > 2


def test_inboxes_are_aligned_leave_out_ones_own_rows_and_grow_seldom() -> None:
    assert _starts([3, 5, 0, 1], 1, 100) == [0, 512, 512, 512, 768]
    for nbytes in (0, 1, 255, 256, 1000, 940 << 20, (940 << 20) + 1):
        assert nbytes <= _buffer_bytes(nbytes) <= nbytes * 5 // 4 + 1
    assert len({_buffer_bytes(nbytes) for nbytes in range(1 << 20, 1 << 21, 1000)}) <= 5
