"""GPUs of one host that reach each other's memory over NVLink: torch's symmetric memory, copy engines, our own flags.

Every rank has memory that all others have mapped too. Rows are copied by copy engines, one peer at a time in an order
that differs from rank to rank (on four H200s 310 to 370 GB/s to one peer from 16 MiB on, 276 to three at once).
Flags are waited for and written by the streams themselves (protocol.py); no kernel spins, so no product can starve a
transfer of SMs. Rows are pushed by their owner, not pulled: a reader would first wait for the flag that the rows are
ready (Llama-8B qkv: pulled 0.246 ms, pushed 0.223). Any shape and any number of rows per call: the memory grows when a
call needs more than any call before, and only then do ranks wait for each other on the host.
"""

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from powertrain.parallel.transport.base import (
    AllGatherHandle,
    AllToAllHandle,
    Choice,
    Rates,
    ReduceScatterHandle,
    RowCounts,
    SplitSizes,
)
from powertrain.parallel.transport.collective import CollectiveTransport
from powertrain.parallel.transport.kernels import poison_kernel, sum_parts
from powertrain.parallel.transport.protocol import (
    COMBINE,
    DISPATCH,
    FREE,
    GATHER,
    KINDS,
    PIECES,
    SCATTER,
    SLOTS,
    SLOTS_OF,
    USES,
    Engine,
    Flag,
    Protocol,
)
from powertrain.parallel.transport.watchdog import Call, Watch
from powertrain.runtime import tracing
from powertrain.runtime.driver import MemoryOps, copy
from powertrain.runtime.errors import WarmUpFirst

# bytes: of every part in a receive buffer, so that any kernel may read or write it in whole vectors
_ALIGNMENT = 256
_LINE = 64  # bytes between flags
# bf16 products, measured on an H200; slower devices hide more than is predicted
_FLOPS_PER_SM = 5.8e12


class TransportBroken(RuntimeError):
    """Memory shared between GPUs does not hold the values written to it."""


_EXCHANGE_NAMES = {DISPATCH: "dispatch to experts", COMBINE: "results of experts"}

Span = tuple[int, int]  # a piece of memory, this device's or a peer's: address and bytes


class Shared:
    """Symmetric memory: every rank allocates the same slots and maps those of all others."""

    def __init__(self, slot_bytes: int, slots: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.slot_bytes = max(1, -(-slot_bytes // _ALIGNMENT)) * _ALIGNMENT
        self.mine = symmetric_memory.empty(slots * self.slot_bytes, dtype=torch.uint8, device=device)
        self.handle = symmetric_memory.rendezvous(self.mine, group.group_name)
        self.addresses = [int(p) for p in self.handle.buffer_ptrs]

    def tensor(self, slot: int, shape: tuple[int, int], dtype: torch.dtype, start: int = 0) -> Tensor:
        """Elements of one of this rank's own slots, from a byte on."""
        elements = self.mine.view(dtype)
        offset = elements.storage_offset() + (slot * self.slot_bytes + start) // dtype.itemsize
        return elements.as_strided(shape, (shape[1], 1), offset)

    def slot(self, rank: int, slot: int) -> int:
        """The address of a rank's slot."""
        return self.addresses[rank] + slot * self.slot_bytes


class CudaEngine(Engine[int, Span]):
    """Engine on CUDA streams; memory is given by address."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank, self.size = group.rank(), group.size()
        shape = (len(KINDS), len(USES), SLOTS, self.size, PIECES)
        nbytes = _LINE * math.prod(shape)
        self.flags = Shared(nbytes, 1, group, device)
        torch.cuda.synchronize(device)
        self.flags.mine.zero_()
        self.block = self.flags.mine[:nbytes].view(torch.int32)
        self.values = self.block.view(*shape, _LINE // 4)[..., 0]
        # every slot is free at first; all other flags are 0
        self.values[FREE] = 1
        torch.cuda.synchronize(device)
        self._ops: dict[Any, MemoryOps] = {}

    def address(self, rank: int, flag: Flag) -> int:
        # a line each: peers set neighbours' flags at the same time
        index = ((flag.kind * len(USES) + flag.use) * SLOTS + flag.slot) * self.size + flag.peer
        return self.flags.addresses[rank] + _LINE * (index * PIECES + flag.piece)

    def consume(self, stream: int, flags: Sequence[Flag]) -> None:
        key = tuple(flags)
        ops = self._ops.get(key)
        if ops is None:
            addresses = [self.address(self.rank, flag) for flag in flags]
            ops = self._ops[key] = MemoryOps(wait=[(p, 1) for p in addresses], write=[(p, 0) for p in addresses])
        ops.enqueue(stream)

    def signal(self, stream: int, flags: Sequence[tuple[int, Flag]]) -> None:
        key = tuple(flags)
        ops = self._ops.get(key)
        if ops is None:
            ops = self._ops[key] = MemoryOps(write=[(self.address(rank, flag), 1) for rank, flag in flags])
        ops.enqueue(stream)

    def copy(self, stream: int, source: Span, target: Span) -> None:
        address, nbytes = source
        if nbytes:
            copy(target[0], address, nbytes, stream)


class _LastCall(NamedTuple):
    """The stream of the last eager call, and the event at its end."""

    stream: torch.cuda.Stream
    end: torch.cuda.Event


class SymmetricTransport(CollectiveTransport):
    """Transport over symmetric memory: NCCL for sequential calls, copy engines for overlapped ones."""

    name = "symmetric"
    link_rate: float  # bytes/s from one peer, of the slowest rank

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        fused: Callable[["SymmetricTransport"], Any],
        debug: bool = False,
    ) -> None:
        super().__init__(group, debug=debug)
        self._open_fused = fused
        start = time.monotonic()
        self.device = device
        self.engine = CudaEngine(group, device)
        self.steps = Protocol(self.engine)
        self.error = torch.zeros(1, dtype=torch.int32, device=device)
        self.watch = Watch(self.peers, group, device, self.error, self.engine.block, self.engine.values.numel())
        # one stream per use: copies to two peers at once get less bandwidth than one after the other, and halves of
        # one copy on two streams were slower at every size
        self.outward = {use: torch.cuda.Stream(device, priority=-1) for use in USES}
        self._fork, self._join = torch.cuda.Event(), torch.cuda.Event()
        self._shared: dict[int, Shared] = {}
        self._captured: set[Shared] = set()
        self._fused: Any = None
        self._broken = ""
        self._last: _LastCall | None = None
        dist.barrier(group)
        if self.rank == 0:
            seconds = time.monotonic() - start
            tracing.progress(f"overlap of {self.size} GPUs over NVLink started in {seconds:.1f} s")

    def recv_buffer(self, use: int, slot_bytes: int) -> Shared:
        """Slots of at least that many bytes. If they must grow, every rank waits for all others."""
        shared, capturing = self._shared.get(use), torch.cuda.is_current_stream_capturing()
        if shared is None or shared.slot_bytes < slot_bytes:
            if capturing:
                raise WarmUpFirst(
                    f"powertrain.parallel: a call in a captured graph needs {slot_bytes} bytes of shared memory, more "
                    "than any before: run it once before capturing"
                )
            # streams of any rank may still use the old memory
            self._wait_for_all()
            self._shared.pop(use, None)
            self._shared[use] = shared = Shared(slot_bytes, SLOTS_OF[use], self.group, self.device)
            self._wait_for_all()
        if capturing:
            # replays go on there, whatever later calls need
            self._captured.add(shared)
        return shared

    def _wait_for_all(self) -> None:
        """Until no rank's stream uses the shared memory."""
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group)

    def measure_link(self) -> float:
        """Bytes per second from the next rank's memory, all ranks at once; the data are checked too."""
        nbytes = 32 << 20
        memory = self.recv_buffer(GATHER, nbytes)
        memory.mine[:nbytes].view(torch.int32).copy_(torch.arange(nbytes // 4, device=self.device) + self.rank)
        self._wait_for_all()
        peer, stream = (self.rank + 1) % self.size, torch.cuda.current_stream(self.device)
        target = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        best = 0.0
        for _ in range(4):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self.engine.copy(stream.cuda_stream, (memory.addresses[peer], nbytes), (target.data_ptr(), nbytes))
            end.record()
            end.synchronize()
            best = max(best, nbytes / (start.elapsed_time(end) / 1e3))
        # 64 values of the 32 MiB: a mapping that is wrong is wrong everywhere
        received = target.view(torch.int32)[:: nbytes // 64].cpu()
        expected = torch.arange(nbytes // 4, device="cpu")[:: nbytes // 64] + peer
        self._wait_for_all()
        if not torch.equal(received.long(), expected):
            raise TransportBroken(f"rank {self.rank} read other values from rank {peer}'s memory than were written")
        return best

    def rates(self) -> Rates | None:
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        return Rates(sms, _FLOPS_PER_SM * sms, self.link_rate)

    def fused(self, choice: Choice, x: Tensor, weights: Sequence[Tensor], outputs: Sequence[Tensor | None]) -> Any:
        if choice.way != "fused" or not x.is_cuda:
            return None
        if self._fused is None:
            self._fused = self._open_fused(self)
        return self._fused if self._fused.serves(x, weights, outputs) else None

    def fork(self, use: int, main: torch.cuda.Stream) -> int:
        """The stream for copies that follow the work queued on the main stream."""
        stream = self.outward[use]
        self._fork.record(main)
        stream.wait_event(self._fork)
        return stream.cuda_stream

    def join(self, use: int, main: torch.cuda.Stream) -> None:
        """Make the main stream wait for the copies."""
        self._join.record(self.outward[use])
        main.wait_event(self._join)

    def begin(self, call: Call) -> torch.cuda.Stream:
        """A call starts on the current stream, after the one before it, whose slots it may use."""
        self.watch.raise_if_failed()
        if self._broken:
            raise TransportBroken(f"{self._broken}; close this Overlap on every rank and create a new one")
        main = torch.cuda.current_stream(self.device)
        # calls share slots, so a call on another stream waits for the one before; a capture orders its own calls
        if self._last is not None and self._last.stream != main and not torch.cuda.is_current_stream_capturing():
            main.wait_event(self._last.end)
        self.peers.calls += 1
        self.watch.begin(call, self.peers.calls, main.cuda_stream)
        return main

    def end(self, call: Call, main: torch.cuda.Stream, outputs: Sequence[Tensor]) -> None:
        for y in outputs:
            if y.is_contiguous():
                poison_kernel(y, self.error)
            else:  # a main_grad may have any strides
                y.masked_fill_(self.error != 0, torch.nan)
        self.watch.end(call, main.cuda_stream)
        if not torch.cuda.is_current_stream_capturing():
            event = self._last.end if self._last is not None else torch.cuda.Event()
            event.record(main)
            self._last = _LastCall(main, event)

    def mark_broken(self, error: Exception) -> None:
        call = self.watch.inside()
        if call is not None:
            # peers hold rows of the unfinished call: the next call would read them as its own
            self._broken = f"{call} failed half-way on rank {self.peers.here.global_rank} ({error!r})"

    def gather(self, shard: Tensor, rows: RowCounts, *, keep: bool) -> AllGatherHandle:
        if not shard.is_cuda:
            return super().gather(shard, rows, keep=keep)
        return SymmetricAllGather(self, shard.contiguous(), rows, keep)

    def scatter(self, like: Tensor, rows: RowCounts, width: int) -> ReduceScatterHandle:
        if not like.is_cuda:
            return super().scatter(like, rows, width)
        return SymmetricReduceScatter(self, like, rows, width)

    def all_to_all_async(self, use: int, like: Tensor, splits: SplitSizes, width: int) -> AllToAllHandle:
        if not like.is_cuda:
            return super().all_to_all_async(use, like, splits, width)
        return SymmetricAllToAll(self, use, like, splits, width)

    def detach(self) -> None:
        self.watch.close()
        super().detach()

    def close(self) -> None:
        """The watchdog closes last: until every rank's streams are idle, it ends waits for lost ranks."""
        try:
            if self.watch.failure is None:
                torch.cuda.synchronize(self.device)
            # else a rank is lost
            if self.watch.failure is None:
                dist.barrier(self.group)
        finally:
            self.watch.close()
            super().close()
            self._shared.clear()
            self._captured.clear()


class SymmetricAllGather(AllGatherHandle):
    """Each rank copies its rows to where they belong in the others' receive buffers, which are the gathered tensors."""

    pieces = 1

    def __init__(self, transport: SymmetricTransport, shard: Tensor, rows: RowCounts, keep: bool) -> None:
        self.transport, self.shard, self.rows = transport, shard, rows
        self.rank, steps = transport.rank, transport.steps
        row_bytes = shard.shape[1] * shard.element_size()
        recv_buffer = transport.recv_buffer(GATHER, rows.total * row_bytes)
        self.order = [self.rank, *steps.senders]
        self.call = Call("all-gather", (rows.total, shard.shape[1]), shard.dtype, transport.layer)
        self.main = transport.begin(self.call)
        self.slot = steps.next_slot(GATHER)
        self.buffer = recv_buffer.tensor(self.slot, (rows.total, shard.shape[1]), shard.dtype)
        self.parts = rows.split(self.buffer)
        stream = transport.fork(GATHER, self.main)
        source, first = shard.data_ptr(), rows.of(self.rank).start * row_bytes
        pieces = [(a * row_bytes, (b - a) * row_bytes) for a, b in pairwise(self.piece_bounds(self.rank))]
        for peer in steps.receivers:
            base = recv_buffer.slot(peer, self.slot)
            steps.send(
                stream, GATHER, self.slot, peer, [((source + at - first, n), (base + at, n)) for at, n in pieces]
            )
        if keep:
            own = recv_buffer.slot(self.rank, self.slot) + first
            transport.engine.copy(stream, (source, shard.numel() * shard.element_size()), (own, 0))

    def piece_bounds(self, rank: int) -> list[int]:
        """Start rows of a rank's pieces in the whole, and the end of the last."""
        start, count = self.rows.of(rank).start, self.rows.counts[rank]
        return [start + count * i // self.pieces for i in range(self.pieces + 1)]

    @property
    def whole(self) -> Tensor:  # type: ignore[override]
        self.transport.join(GATHER, self.main)
        return self.buffer

    def wait(self, rank: int) -> Tensor:
        if rank == self.rank:
            # its own rows need no copy: the product reads them where they are
            return self.shard
        stream = torch.cuda.current_stream(self.transport.device).cuda_stream
        self.transport.steps.receive(stream, GATHER, self.slot, [rank])
        return self.parts[rank]

    def finish(self, outputs: Sequence[Tensor]) -> None:
        self.transport.join(GATHER, self.main)
        self.transport.steps.release(self.main.cuda_stream, GATHER, self.slot)
        self.transport.end(self.call, self.main, outputs)


class SymmetricReduceScatter(ReduceScatterHandle):
    """Each part is copied to the receive buffer of the rank that owns its rows."""

    def __init__(self, transport: SymmetricTransport, like: Tensor, rows: RowCounts, width: int) -> None:
        self.transport, self.rows, self.width = transport, rows, width
        self.rank = transport.rank
        self.order = [*transport.steps.receivers, self.rank]
        element = like.element_size()
        # the distance between two sources' parts in each rank's receive buffer
        self.strides = [-(-count * width * element // _ALIGNMENT) * _ALIGNMENT for count in rows.counts]
        self.memory = transport.recv_buffer(SCATTER, max(self.strides) * transport.size)
        self.call = Call("reduce-scatter", (rows.total, width), like.dtype, transport.layer)
        self.main = transport.begin(self.call)
        self.slot = transport.steps.next_slot(SCATTER)
        source_stride = self.strides[self.rank] // element
        local_buffer = self.memory.tensor(self.slot, (transport.size, source_stride), like.dtype)
        self.recv_buffer = local_buffer.as_strided(
            (transport.size, rows.counts[self.rank], width), (source_stride, width, 1)
        )
        self.parts = rows.split(like.new_empty((rows.total, width)))

    def target_address(self, rank: int) -> int:
        """The address of this rank's part in another's receive buffer."""
        return self.memory.slot(rank, self.slot) + self.rank * self.strides[rank]

    def part(self, rank: int) -> Tensor:
        return self.recv_buffer[rank] if rank == self.rank else self.parts[rank]

    def send(self, rank: int) -> None:
        if rank == self.rank:
            return
        stream = self.transport.fork(SCATTER, torch.cuda.current_stream(self.transport.device))
        part = self.parts[rank]
        source = part.data_ptr(), part.numel() * part.element_size()
        self.transport.steps.send(stream, SCATTER, self.slot, rank, [(source, (self.target_address(rank), 0))])

    def reduce(self, bias: Tensor | None = None) -> Tensor:
        steps, stream = self.transport.steps, self.main.cuda_stream
        self.transport.join(SCATTER, self.main)
        steps.receive(stream, SCATTER, self.slot, steps.senders)
        y = sum_parts(self.recv_buffer, bias)
        steps.release(stream, SCATTER, self.slot)
        self.transport.end(self.call, self.main, [y])
        return y


class SymmetricAllToAll(AllToAllHandle):
    """Rows are copied into their target's receive buffer, each source's behind those of the ranks before it."""

    def __init__(self, transport: SymmetricTransport, use: int, like: Tensor, splits: SplitSizes, width: int) -> None:
        self.transport, self.use, self.rank = transport, use, transport.rank
        self.order = [self.rank, *transport.receive_order()]
        row_bytes = width * like.element_size()
        # [target][source]: byte offset of those rows in the target's receive buffer; a rank's own rows take no space
        self.starts = [_starts(splits.received(rank), rank, row_bytes) for rank in range(transport.size)]
        self.memory = transport.recv_buffer(use, _buffer_bytes(max(starts[-1] for starts in self.starts)))
        received = splits.received(self.rank)
        self.call = Call(_EXCHANGE_NAMES[use], (sum(received), width), like.dtype, transport.layer)
        self.main = transport.begin(self.call)
        self.slot = transport.steps.next_slot(use)
        self.whole = like.new_empty((sum(received), width))
        self.parts = self.whole.split(received)
        self.sent: list[Tensor] = []

    def send(self, rank: int, rows: Tensor) -> None:
        if rank == self.rank:
            self.parts[rank].copy_(rows)
            return
        stream = self.transport.fork(self.use, torch.cuda.current_stream(self.transport.device))
        source = rows.data_ptr(), rows.numel() * rows.element_size()
        target = self.memory.slot(rank, self.slot) + self.starts[rank][self.rank]
        self.transport.steps.send(stream, self.use, self.slot, rank, [(source, (target, 0))])
        # kept until the copies have read them: their streams are not PyTorch's to know of
        self.sent.append(rows)

    def wait(self, rank: int) -> Tensor:
        part = self.parts[rank]
        if rank != self.rank:
            stream = torch.cuda.current_stream(self.transport.device).cuda_stream
            self.transport.steps.receive(stream, self.use, self.slot, [rank])
            shape = (part.shape[0], part.shape[1])
            part.copy_(self.memory.tensor(self.slot, shape, part.dtype, self.starts[self.rank][rank]))
        return part

    def finish(self, outputs: Sequence[Tensor]) -> None:
        self.transport.join(self.use, self.main)
        self.transport.steps.release(self.main.cuda_stream, self.use, self.slot)
        self.transport.end(self.call, self.main, outputs)


def _starts(counts: Sequence[int], own: int, row_bytes: int) -> list[int]:
    """Byte offset of each source's rows in a receive buffer, and the end of the last."""
    starts = [0]
    for rank, count in enumerate(counts):
        nbytes = 0 if rank == own else -(-count * row_bytes // _ALIGNMENT) * _ALIGNMENT
        starts.append(starts[-1] + nbytes)
    return starts


def _buffer_bytes(nbytes: int) -> int:
    """nbytes rounded up by at most a quarter, so that the buffer grows rarely where counts change in every call."""
    step = 1 << max(0, nbytes.bit_length() - 3)
    return -(-nbytes // step) * step
