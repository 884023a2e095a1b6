"""Simulation of ranks as threads of one process: the same protocol, on CPU tensors, with random delays.

    world = World(4, seed=0)
    results = world.run(lambda overlap: all_gather_gemm(x[overlap.rank], w[overlap.rank], overlap))
    world.close()

Every stream of every rank is a thread that executes its steps one by one and may sleep before each. So code over an
Overlap can be tried on any number of ranks without a launcher or a GPU, under orders of events that are rare on
hardware.
"""

import itertools
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import Tensor

from powertrain.parallel.overlap import Overlap
from powertrain.parallel.transport.base import (
    AllGatherHandle,
    AllToAllHandle,
    ReduceScatterHandle,
    RowCounts,
    SplitSizes,
    Transport,
)
from powertrain.parallel.transport.collective import (
    all_gather_by_handle,
    all_to_all_by_handle,
    reduce_scatter_by_handle,
)
from powertrain.parallel.transport.heartbeat import PeerTimeout
from powertrain.parallel.transport.kernels import sum_parts
from powertrain.parallel.transport.protocol import (
    FREE,
    GATHER,
    KINDS,
    PIECES,
    SCATTER,
    SLOTS,
    USES,
    Engine,
    Flag,
    Protocol,
)

T = TypeVar("T")
_worlds = itertools.count()


class Buffer:
    """A piece of memory: the value last written to it."""

    def __init__(self, value: Tensor | None = None) -> None:
        self.value = value

    def take(self, value: Tensor) -> None:
        # a copy, as on a link: the sender may overwrite its memory as soon as the step is done
        self.value = value.clone()


class Stream:
    """Executes its steps in order on its own thread."""

    def __init__(self) -> None:
        self._steps: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, step: Callable[[], None]) -> "Future[None]":
        done: Future[None] = Future()
        self._steps.put((step, done))
        return done

    def end(self) -> None:
        self._steps.put(None)

    def _run(self) -> None:
        while (item := self._steps.get()) is not None:
            step, done = item
            try:
                step()
                done.set_result(None)
            except Exception as error:
                # kept for the thread that waits: an error in a daemon thread would end that thread alone
                done.set_exception(error)


class World:
    """`size` ranks in this process. delay: the longest sleep before a step, in seconds; 0: none."""

    def __init__(self, size: int, *, seed: int = 0, delay: float = 0.0, timeout: float = 60.0) -> None:
        self.size, self.delay, self.timeout = size, delay, timeout
        self.random = random.Random(seed)
        self.changed = threading.Condition()
        self.flags = {
            (rank, Flag(kind, use, slot, peer, piece)): int(kind == FREE)
            for rank in range(size)
            for kind in KINDS
            for use in USES
            for slot in range(SLOTS)
            for peer in range(size)
            for piece in range(PIECES)
        }
        # [rank][use][slot][source]
        self.recv_buffers = [
            [[[Buffer() for _ in range(size)] for _ in range(SLOTS)] for _ in USES] for _ in range(size)
        ]
        self.lost: set[int] = set()
        name = f"simulated {next(_worlds)}"
        self.overlaps = [Overlap.over(SimulatedTransport(self, rank), f"{name} rank {rank}") for rank in range(size)]

    def run(self, function: Callable[[Overlap], T]) -> list[T]:
        """function(overlap) on every rank at once; all results. Raises the error of the first rank that failed."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            try:
                results[rank] = function(self.overlaps[rank])
            except BaseException as error:
                errors.append(error)
                # so that the other ranks' threads end too; they wait for this one
                self.lose(rank)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def close(self) -> None:
        """End every rank's overlap, and with it its threads."""
        for overlap in self.overlaps:
            overlap.close()

    def lose(self, rank: int) -> None:
        """Simulate the loss of a rank: ranks that wait for it raise PeerTimeout."""
        with self.changed:
            self.lost.add(rank)
            self.changed.notify_all()

    def pause(self) -> None:
        if self.delay:
            time.sleep(self.random.random() * self.delay)


class ThreadEngine(Engine[Stream | None, Buffer]):
    """Engine that enqueues operations on a Stream, or executes them at once if there is none."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size

    def _do(self, stream: Stream | None, step: Callable[[], None]) -> "Future[None] | None":
        def paused() -> None:
            self.world.pause()
            step()

        if stream is not None:
            return stream.put(paused)
        paused()
        return None

    def consume(self, stream: Stream | None, flags: Sequence[Flag]) -> None:
        own_flags = [(self.rank, flag) for flag in flags]
        world = self.world

        def step() -> None:
            with world.changed:
                signalled = world.changed.wait_for(
                    lambda: all(world.flags[flag] for flag in own_flags) or bool(world.lost), world.timeout
                )
                # only what is missing counts: a rank may have signalled before it was lost
                missing = [flag.peer for flag in flags if not world.flags[self.rank, flag]]
                if missing:
                    lost = sorted(world.lost & set(missing))
                    why = (
                        f"rank {lost[0]} is gone"
                        if lost
                        else f"ranks {missing} did not signal in time"
                        if not signalled
                        else ""
                    )
                    why = why or f"rank {min(world.lost)} is gone, and with it ranks {missing} wait"
                    raise PeerTimeout(
                        f"rank {self.rank} waits for {('READY', 'FREE')[flags[0].kind]} of ranks {missing}: {why}"
                    )
                for flag in own_flags:
                    world.flags[flag] = 0

        self._do(stream, step)

    def signal(self, stream: Stream | None, flags: Sequence[tuple[int, Flag]]) -> None:
        world = self.world

        def step() -> None:
            with world.changed:
                world.flags.update(dict.fromkeys(flags, 1))
                world.changed.notify_all()

        self._do(stream, step)

    def copy(self, stream: Stream | None, source: Buffer, target: Buffer) -> None:
        def step() -> None:
            assert source.value is not None
            target.take(source.value)

        self._do(stream, step)


class SimulatedTransport(Transport):
    """One rank of a World."""

    name = "simulated"

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size
        self.engine = ThreadEngine(world, rank)
        self.steps = Protocol(self.engine)
        self.outward = {use: Stream() for use in USES}

    def gather(self, shard: Tensor, rows: RowCounts, *, keep: bool) -> AllGatherHandle:
        return _SimulatedAllGather(self, shard, rows)

    def scatter(self, like: Tensor, rows: RowCounts, width: int) -> ReduceScatterHandle:
        return _SimulatedReduceScatter(self, like, rows, width)

    def all_gather(self, shard: Tensor, rows: RowCounts) -> Tensor:
        return all_gather_by_handle(self, shard, rows)

    def reduce_scatter(self, parts: Tensor, rows: RowCounts) -> Tensor:
        return reduce_scatter_by_handle(self, parts, rows)

    def all_to_all_async(self, use: int, like: Tensor, splits: SplitSizes, width: int) -> AllToAllHandle:
        return _SimulatedAllToAll(self, use, like, splits, width)

    def all_to_all(self, rows: Tensor, splits: SplitSizes) -> Tensor:
        return all_to_all_by_handle(self, rows, splits)

    def drain(self, use: int) -> None:
        """Wait until this rank's sends are complete: their memory may be written again."""
        self.outward[use].put(lambda: None).result()

    def close(self) -> None:
        for stream in self.outward.values():
            stream.end()


class _SimulatedAllGather(AllGatherHandle):
    def __init__(self, transport: SimulatedTransport, shard: Tensor, rows: RowCounts) -> None:
        self.transport, self.shard, self.rows, self.rank = transport, shard, rows, transport.rank
        steps, self.recv_buffers = transport.steps, transport.world.recv_buffers
        self.order = [self.rank, *steps.senders]
        self.whole = shard.new_empty((rows.total, *shard.shape[1:]))
        self.whole[rows.of(self.rank)] = shard
        self.slot = steps.next_slot(GATHER)
        for peer in steps.receivers:
            piece = Buffer(shard), self.recv_buffers[peer][GATHER][self.slot][self.rank]
            steps.send(transport.outward[GATHER], GATHER, self.slot, peer, [piece])

    def wait(self, rank: int) -> Tensor:
        if rank == self.rank:
            return self.shard
        self.transport.steps.receive(None, GATHER, self.slot, [rank])
        received = self.recv_buffers[self.rank][GATHER][self.slot][rank].value
        assert received is not None
        self.whole[self.rows.of(rank)] = received
        return received

    def finish(self, outputs: Sequence[Tensor]) -> None:
        # the caller owns x again after the call, and sends read it
        self.transport.drain(GATHER)
        self.transport.steps.release(None, GATHER, self.slot)


class _SimulatedReduceScatter(ReduceScatterHandle):
    def __init__(self, transport: SimulatedTransport, like: Tensor, rows: RowCounts, width: int) -> None:
        self.transport, self.rows, self.rank = transport, rows, transport.rank
        self.order = [*transport.steps.receivers, self.rank]
        self.parts = like.new_empty((rows.total, width))
        self.slot = transport.steps.next_slot(SCATTER)
        self.recv_buffers = transport.world.recv_buffers

    def part(self, rank: int) -> Tensor:
        return self.parts[self.rows.of(rank)]

    def send(self, rank: int) -> None:
        if rank == self.rank:
            return
        piece = Buffer(self.part(rank)), self.recv_buffers[rank][SCATTER][self.slot][self.rank]
        self.transport.steps.send(self.transport.outward[SCATTER], SCATTER, self.slot, rank, [piece])

    def reduce(self, bias: Tensor | None = None) -> Tensor:
        steps = self.transport.steps
        steps.receive(None, SCATTER, self.slot, steps.senders)
        recv_buffer = self.recv_buffers[self.rank][SCATTER][self.slot]
        recv_buffer[self.rank].take(self.part(self.rank))
        y = sum_parts(torch.stack([buffer.value for buffer in recv_buffer if buffer.value is not None]), bias)
        steps.release(None, SCATTER, self.slot)
        return y


class _SimulatedAllToAll(AllToAllHandle):
    def __init__(self, transport: SimulatedTransport, use: int, like: Tensor, splits: SplitSizes, width: int) -> None:
        self.transport, self.use, self.rank = transport, use, transport.rank
        self.order = [self.rank, *transport.receive_order()]
        received = splits.received(self.rank)
        self.whole = like.new_empty((sum(received), width))
        self.parts = self.whole.split(received)
        self.slot = transport.steps.next_slot(use)

    def _buffer(self, rank: int, source: int) -> Buffer:
        return self.transport.world.recv_buffers[rank][self.use][self.slot][source]

    def send(self, rank: int, rows: Tensor) -> None:
        if rank == self.rank:
            self.parts[rank].copy_(rows)
            return
        piece = Buffer(rows), self._buffer(rank, self.rank)
        self.transport.steps.send(self.transport.outward[self.use], self.use, self.slot, rank, [piece])

    def wait(self, rank: int) -> Tensor:
        if rank != self.rank:
            self.transport.steps.receive(None, self.use, self.slot, [rank])
            received = self._buffer(self.rank, rank).value
            assert received is not None
            self.parts[rank].copy_(received)
        return self.parts[rank]

    def finish(self, outputs: Sequence[Tensor]) -> None:
        self.transport.drain(self.use)
        self.transport.steps.release(None, self.use, self.slot)
