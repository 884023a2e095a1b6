"""GPUs of one host that reach each other's memory over NVLink: torch's symmetric memory, copy engines, our own words.

Every rank has memory that all others have mapped too. Rows are copied by copy engines, one peer at a time in an order
that differs from rank to rank (on four H200s 330 to 370 GB/s from one peer at 32 MiB and more, 276 from three at once).
Words are waited for and written by the streams themselves (powertrain/parallel/protocol.py); no kernel spins, and
nothing that a product could starve stands between a copy and the product that wants it. Any shape, any number of rows
a call: memory grows when a call needs more than any before it, which is the one time that ranks wait for each other
on the host.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from powertrain.ops.poison import poison
from powertrain.ops.sum_parts import sum_parts
from powertrain.parallel.planner import Rates
from powertrain.parallel.protocol import CREDITS, SLOTS, Engine, Kind, Protocol, Word
from powertrain.parallel.transport import CollectiveTransport, Gathering, Lane, Rows, Scattering
from powertrain.parallel.watch import Call, Watch
from powertrain.runtime import tracing
from powertrain.runtime.driver import MemoryOps, copy
from powertrain.runtime.errors import WarmUpFirst

_ALIGNMENT = 256  # bytes: of every part in an inbox, so that any kernel may read or write it in whole vectors
_LINE = 64  # bytes between words
_FLOPS_PER_SM = 5.8e12  # bf16 products, measured on an H200; slower devices hide more than is predicted


class TransportBroken(RuntimeError):
    """Memory shared between GPUs does not hold what was written to it."""


class Span(NamedTuple):
    """A piece of memory: this device's or a peer's."""

    address: int
    nbytes: int


def span(x: Tensor) -> Span:
    """Of a contiguous tensor."""
    return Span(x.data_ptr(), x.numel() * x.element_size())


class _Shared:
    """Memory of which every rank has the like, all of it mapped by all."""

    def __init__(self, nbytes: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.nbytes = nbytes
        self.mine = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
        self.handle = symmetric_memory.rendezvous(self.mine, group.group_name)
        self.addresses = [int(p) for p in self.handle.buffer_ptrs]


class CudaEngine(Engine[int, Span]):
    """Streams are CUDA's, by address."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank, self.size = group.rank(), group.size()
        count = len(Kind) * SLOTS * self.size
        self.words = _Shared(_LINE * count, group, device)
        torch.cuda.synchronize(device)
        self.words.mine.zero_()
        values = self.words.mine.view(torch.int32).view(len(Kind), SLOTS, self.size, _LINE // 4)
        for kind in CREDITS:
            values[kind, :, :, 0] = 1
        torch.cuda.synchronize(device)
        self.values = values[..., 0]
        self._ops: dict[Any, MemoryOps] = {}

    def address(self, rank: int, word: Word) -> int:
        return self.words.addresses[rank] + _LINE * ((word.kind * SLOTS + word.slot) * self.size + word.peer)

    def consume(self, stream: int, words: Sequence[Word]) -> None:
        key = tuple(words)
        ops = self._ops.get(key)
        if ops is None:
            places = [self.address(self.rank, word) for word in words]
            ops = self._ops[key] = MemoryOps(wait=[(p, 1) for p in places], write=[(p, 0) for p in places])
        ops.enqueue(stream)

    def signal(self, stream: int, rank: int, word: Word) -> None:
        key = rank, word
        ops = self._ops.get(key)
        if ops is None:
            ops = self._ops[key] = MemoryOps(write=[(self.address(rank, word), 1)])
        ops.enqueue(stream)

    def copy(self, stream: int, source: Span, target: Span) -> None:
        if source.nbytes:
            copy(target.address, source.address, source.nbytes, stream)


class SymmetricTransport(CollectiveTransport):
    """NCCL for what is taken in sequence, and this file for what overlaps."""

    name = "symmetric"
    link_rate: float  # bytes/s from one peer, of the slowest rank

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, debug: bool = False) -> None:
        super().__init__(group, debug=debug)
        start = time.monotonic()
        self.device = device
        self.engine = CudaEngine(group, device)
        self.steps = Protocol(self.engine)
        self.error = torch.zeros(1, dtype=torch.int32, device=device)
        self.watch = Watch(group, device, self.error, self.engine.values)
        self.pull, self.push, self.side = (torch.cuda.Stream(device, priority=-1) for _ in range(3))
        self.events = [torch.cuda.Event() for _ in range(self.size)]
        self._shared: dict[str, _Shared] = {}
        self._last: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None
        dist.barrier(group)
        if self.rank == 0:
            seconds = time.monotonic() - start
            tracing.progress(f"overlap of {self.size} GPUs over NVLink started in {seconds:.1f} s")

    def memory(self, kind: str, slot_bytes: int) -> _Shared:
        """Two slots of at least so many bytes. Larger than ever before: every rank waits for all others."""
        found = self._shared.get(kind)
        if found is None or found.nbytes < SLOTS * slot_bytes:
            if torch.cuda.is_current_stream_capturing():
                raise WarmUpFirst(
                    f"powertrain.parallel: a call in a captured graph needs {slot_bytes} bytes of shared memory, more "
                    "than any before: run it once before capturing"
                )
            self._wait_for_all()
            self._shared.pop(kind, None)
            self._shared[kind] = found = _Shared(SLOTS * slot_bytes, self.group, self.device)
            self._wait_for_all()
        return found

    def _wait_for_all(self) -> None:
        """Nobody's streams touch the memory any more."""
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group)

    def measure_link(self) -> float:
        """Bytes per second from the next rank's memory, all ranks at once; checks what came, too."""
        nbytes = 32 << 20
        memory = self.memory("gather", nbytes)
        memory.mine[:nbytes].view(torch.int32).copy_(torch.arange(nbytes // 4, device=self.device) + self.rank)
        self._wait_for_all()
        peer, stream = (self.rank + 1) % self.size, torch.cuda.current_stream(self.device)
        target = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        source = Span(memory.addresses[peer], nbytes)
        best = 0.0
        for _ in range(4):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self.engine.copy(stream.cuda_stream, source, span(target))
            end.record()
            end.synchronize()
            best = max(best, nbytes / (start.elapsed_time(end) / 1e3))
        came = target.view(torch.int32)[:: nbytes // 64].cpu()
        expected = torch.arange(nbytes // 4)[:: nbytes // 64] + peer
        if not torch.equal(came.long(), expected):
            raise TransportBroken(f"rank {self.rank} read from rank {peer}'s memory what was not written there")
        self._wait_for_all()
        return best

    def begin(self, call: Call) -> torch.cuda.Stream:
        """A call starts on the current stream, after the one before it, whose slots it may use."""
        self.watch.raise_if_failed()
        main = torch.cuda.current_stream(self.device)
        capturing = torch.cuda.is_current_stream_capturing()
        if self._last is not None and self._last[0] != main and not capturing:
            main.wait_event(self._last[1])
        self.watch.begin(call, main.cuda_stream)
        return main

    def end(self, call: Call, main: torch.cuda.Stream, outputs: Sequence[Tensor]) -> None:
        for y in outputs:
            poison(y, self.error)
        self.watch.end(call, main.cuda_stream)
        if not torch.cuda.is_current_stream_capturing():
            event = self._last[1] if self._last is not None else torch.cuda.Event()
            event.record(main)
            self._last = main, event

    def gather(self, shard: Tensor, rows: Rows, *, keep: bool) -> Gathering:
        return _SymmetricGathering(self, shard.contiguous(), rows, keep)

    def scatter(self, like: Tensor, rows: Rows, width: int) -> Scattering:
        return _SymmetricScattering(self, like, rows, width)

    def rates(self) -> Rates | None:
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        return Rates(sms, _FLOPS_PER_SM * sms, self.link_rate)

    @contextmanager
    def lanes(self, count: int) -> Iterator[Lane]:
        if count == 1:
            yield lambda index: nullcontext()
            return
        main = torch.cuda.current_stream(self.device)
        self.side.wait_stream(main)
        yield lambda index: torch.cuda.stream(self.side) if index % 2 else nullcontext()
        main.wait_stream(self.side)

    def close(self) -> None:
        self.watch.close()
        self._wait_for_all()
        self._shared.clear()


class _SymmetricGathering(Gathering):
    def __init__(self, transport: SymmetricTransport, shard: Tensor, rows: Rows, keep: bool) -> None:
        self.transport, self.shard, self.rows = transport, shard, rows
        steps, self.rank = transport.steps, transport.rank
        row_bytes = shard.shape[1] * shard.element_size()
        slot_bytes = max(rows.counts) * row_bytes
        memory = transport.memory("gather", slot_bytes)
        self.order = [self.rank, *steps.after()]
        self.buffer = shard.new_empty((rows.total, shard.shape[1]))
        slot = steps.next_slot("gather")
        self.call = Call("all-gather", (rows.total, shard.shape[1]), shard.dtype)
        self.main = transport.begin(self.call)
        start = slot * (memory.nbytes // SLOTS)
        steps.publish(self.main.cuda_stream, slot, span(shard), Span(memory.addresses[self.rank] + start, 0))
        pull = transport.pull
        pull.wait_stream(self.main)
        for peer in steps.after():
            source = Span(memory.addresses[peer] + start, rows.counts[peer] * row_bytes)
            steps.fetch(pull.cuda_stream, slot, peer, source, span(self.buffer[rows.of(peer)]))
            transport.events[peer].record(pull)
        if keep:
            transport.engine.copy(pull.cuda_stream, span(shard), span(self.buffer[rows.of(self.rank)]))
        transport.events[self.rank].record(pull)

    @property
    def whole(self) -> Tensor:  # type: ignore[override]
        self._wait_here(self.rank)
        return self.buffer

    def wait(self, rank: int) -> Tensor:
        if rank == self.rank:
            return self.shard
        self._wait_here(rank)
        return self.buffer[self.rows.of(rank)]

    def _wait_here(self, rank: int) -> None:
        torch.cuda.current_stream(self.transport.device).wait_event(self.transport.events[rank])

    def finish(self, outputs: Sequence[Tensor]) -> None:
        self.main.wait_stream(self.transport.pull)
        self.transport.end(self.call, self.main, outputs)


class _SymmetricScattering(Scattering):
    def __init__(self, transport: SymmetricTransport, like: Tensor, rows: Rows, width: int) -> None:
        self.transport, self.rows = transport, rows
        steps, self.rank = transport.steps, transport.rank
        self.order = [*steps.after(), self.rank]
        element = like.element_size()
        # the distance between two sources' parts in each rank's inbox
        self.strides = [-(-count * width * element // _ALIGNMENT) * _ALIGNMENT for count in rows.counts]
        self.memory = transport.memory("scatter", max(self.strides) * transport.size)
        self.slot = steps.next_slot("scatter")
        self.start = self.slot * (self.memory.nbytes // SLOTS)
        self.call = Call("reduce-scatter", (rows.total, width), like.dtype)
        self.main = transport.begin(self.call)
        mine = self.memory.mine[self.start : self.start + self.strides[self.rank] * transport.size].view(like.dtype)
        self.inbox = torch.as_strided(
            mine, (transport.size, rows.counts[self.rank], width), (self.strides[self.rank] // element, width, 1),
            mine.storage_offset(),
        )  # fmt: skip
        self.parts = like.new_empty((rows.total, width))

    def part(self, rank: int) -> Tensor:
        return self.inbox[rank] if rank == self.rank else self.parts[self.rows.of(rank)]

    def send(self, rank: int) -> None:
        if rank == self.rank:
            return
        push = self.transport.push
        push.wait_stream(torch.cuda.current_stream(self.transport.device))
        target = Span(self.memory.addresses[rank] + self.start + self.rank * self.strides[rank], 0)
        self.transport.steps.push(push.cuda_stream, self.slot, rank, span(self.parts[self.rows.of(rank)]), target)

    def reduce(self, bias: Tensor | None = None) -> Tensor:
        steps, stream = self.transport.steps, self.main.cuda_stream
        self.main.wait_stream(self.transport.push)
        steps.collect(stream, self.slot)
        y = sum_parts(self.inbox, bias)
        steps.release(stream, self.slot)
        self.transport.end(self.call, self.main, [y])
        return y
