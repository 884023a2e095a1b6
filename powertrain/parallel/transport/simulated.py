"""Ranks that are threads of one process: the same protocol, on CPU tensors, with delays as wild as one likes.

    world = World(4, seed=0)
    results = world.run(lambda overlap: all_gather_gemm(x[overlap.rank], w[overlap.rank], overlap))
    world.close()

Every stream of every rank is a thread that takes its steps one by one; before each it may sleep for a moment. So code
over an Overlap can be tried on any number of ranks without a launcher or a GPU, under orders of events that hardware
seldom shows.
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
from powertrain.parallel.transport.base import Gathering, Rows, Scattering, Trading, Traffic, Transport
from powertrain.parallel.transport.collective import gather_all, scatter_all, trade_all
from powertrain.parallel.transport.heartbeat import PeerTimeout
from powertrain.parallel.transport.kernels import sum_parts
from powertrain.parallel.transport.protocol import (
    GATHER,
    KINDS,
    PIECES,
    ROOM,
    SCATTER,
    SLOTS,
    USES,
    Engine,
    Protocol,
    Word,
)

T = TypeVar("T")
_worlds = itertools.count()


class Place:
    """A piece of memory: the value last written to it."""

    def __init__(self, value: Tensor | None = None) -> None:
        self.value = value

    def take(self, value: Tensor) -> None:
        self.value = value.clone()


class Stream:
    """Takes its steps in order on a thread of its own."""

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
                done.set_exception(error)


class World:
    """`size` ranks in this process. delay: the longest sleep before a step, in seconds; 0: none."""

    def __init__(self, size: int, *, seed: int = 0, delay: float = 0.0, timeout: float = 60.0) -> None:
        self.size, self.delay, self.timeout = size, delay, timeout
        self.random = random.Random(seed)
        self.changed = threading.Condition()
        self.words = {
            (rank, Word(kind, use, slot, peer, piece)): int(kind == ROOM)
            for rank in range(size)
            for kind in KINDS
            for use in USES
            for slot in range(SLOTS)
            for peer in range(size)
            for piece in range(PIECES)
        }
        # [rank][use][slot][source]
        self.inboxes = [[[[Place() for _ in range(size)] for _ in range(SLOTS)] for _ in USES] for _ in range(size)]
        self.lost: set[int] = set()
        name = f"simulated {next(_worlds)}"
        self.overlaps = [Overlap.over(SimulatedTransport(self, rank), f"{name} rank {rank}") for rank in range(size)]

    def run(self, function: Callable[[Overlap], T]) -> list[T]:
        """function(overlap) on every rank at once; all results. Raises the error of the first rank that failed."""
        results: list[Any] = [None] * self.size
        errors: list[tuple[int, BaseException]] = []

        def one(rank: int) -> None:
            try:
                results[rank] = function(self.overlaps[rank])
            except BaseException as error:
                errors.append((rank, error))
                self.lose(rank)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0][1]
        return results

    def close(self) -> None:
        """End every rank's overlap, and with it its threads."""
        for overlap in self.overlaps:
            overlap.close()

    def lose(self, rank: int) -> None:
        """The rank is gone: whoever waits for it raises PeerTimeout."""
        with self.changed:
            self.lost.add(rank)
            self.changed.notify_all()

    def pause(self) -> None:
        if self.delay:
            time.sleep(self.random.random() * self.delay)


class ThreadEngine(Engine[Stream | None, Place]):
    """On a Stream, or at once where it is None."""

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

    def consume(self, stream: Stream | None, words: Sequence[Word]) -> None:
        mine = [(self.rank, word) for word in words]
        world = self.world

        def step() -> None:
            with world.changed:
                there = world.changed.wait_for(
                    lambda: all(world.words[word] for word in mine) or bool(world.lost), world.timeout
                )
                missing = [word.peer for word in words if not world.words[self.rank, word]]
                if missing:
                    lost = sorted(world.lost & set(missing))
                    why = f"rank {lost[0]} is gone" if lost else f"ranks {missing} did not come" if not there else ""
                    why = why or f"rank {min(world.lost)} is gone, and with it ranks {missing} wait"
                    raise PeerTimeout(
                        f"rank {self.rank} waits for {('FULL', 'ROOM')[words[0].kind]} of ranks {missing}: {why}"
                    )
                for word in mine:
                    world.words[word] = 0

        self._do(stream, step)

    def signal(self, stream: Stream | None, words: Sequence[tuple[int, Word]]) -> None:
        world = self.world

        def step() -> None:
            with world.changed:
                world.words.update(dict.fromkeys(words, 1))
                world.changed.notify_all()

        self._do(stream, step)

    def copy(self, stream: Stream | None, source: Place, target: Place) -> None:
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

    def gather(self, shard: Tensor, rows: Rows, *, keep: bool) -> Gathering:
        return _SimulatedGathering(self, shard, rows)

    def scatter(self, like: Tensor, rows: Rows, width: int) -> Scattering:
        return _SimulatedScattering(self, like, rows, width)

    def all_gather(self, shard: Tensor, rows: Rows) -> Tensor:
        return gather_all(self, shard, rows)

    def reduce_scatter(self, parts: Tensor, rows: Rows) -> Tensor:
        return scatter_all(self, parts, rows)

    def trade(self, use: int, like: Tensor, traffic: Traffic, width: int) -> Trading:
        return _SimulatedTrading(self, use, like, traffic, width)

    def all_to_all(self, rows: Tensor, traffic: Traffic) -> Tensor:
        return trade_all(self, rows, traffic)

    def drain(self, use: int) -> None:
        """Wait until this rank's sends are complete: their memory may be written again."""
        self.outward[use].put(lambda: None).result()

    def close(self) -> None:
        for stream in self.outward.values():
            stream.end()


class _SimulatedGathering(Gathering):
    def __init__(self, transport: SimulatedTransport, shard: Tensor, rows: Rows) -> None:
        self.transport, self.shard, self.rows, self.rank = transport, shard, rows, transport.rank
        steps, self.inboxes = transport.steps, transport.world.inboxes
        self.order = [self.rank, *steps.senders]
        self.whole = shard.new_empty((rows.total, *shard.shape[1:]))
        self.whole[rows.of(self.rank)] = shard
        self.slot = steps.next_slot(GATHER)
        for peer in steps.receivers:
            piece = Place(shard), self.inboxes[peer][GATHER][self.slot][self.rank]
            steps.send(transport.outward[GATHER], GATHER, self.slot, peer, [piece])

    def wait(self, rank: int) -> Tensor:
        if rank == self.rank:
            return self.shard
        self.transport.steps.receive(None, GATHER, self.slot, [rank])
        found = self.inboxes[self.rank][GATHER][self.slot][rank].value
        assert found is not None
        self.whole[self.rows.of(rank)] = found
        return found

    def finish(self, outputs: Sequence[Tensor]) -> None:
        self.transport.drain(GATHER)
        self.transport.steps.release(None, GATHER, self.slot)


class _SimulatedScattering(Scattering):
    def __init__(self, transport: SimulatedTransport, like: Tensor, rows: Rows, width: int) -> None:
        self.transport, self.rows, self.rank = transport, rows, transport.rank
        self.order = [*transport.steps.receivers, self.rank]
        self.parts = like.new_empty((rows.total, width))
        self.slot = transport.steps.next_slot(SCATTER)
        self.inboxes = transport.world.inboxes

    def part(self, rank: int) -> Tensor:
        return self.parts[self.rows.of(rank)]

    def send(self, rank: int) -> None:
        if rank == self.rank:
            return
        piece = Place(self.part(rank)), self.inboxes[rank][SCATTER][self.slot][self.rank]
        self.transport.steps.send(self.transport.outward[SCATTER], SCATTER, self.slot, rank, [piece])

    def reduce(self, bias: Tensor | None = None) -> Tensor:
        steps = self.transport.steps
        steps.receive(None, SCATTER, self.slot, steps.senders)
        inbox = self.inboxes[self.rank][SCATTER][self.slot]
        inbox[self.rank].take(self.part(self.rank))
        y = sum_parts(torch.stack([place.value for place in inbox if place.value is not None]), bias)
        steps.release(None, SCATTER, self.slot)
        return y


class _SimulatedTrading(Trading):
    def __init__(self, transport: SimulatedTransport, use: int, like: Tensor, traffic: Traffic, width: int) -> None:
        self.transport, self.use, self.rank = transport, use, transport.rank
        self.order = [self.rank, *transport.inwards()]
        received = traffic.received(self.rank)
        self.whole = like.new_empty((sum(received), width))
        self.parts = self.whole.split(received)
        self.slot = transport.steps.next_slot(use)

    def _place(self, rank: int, source: int) -> Place:
        return self.transport.world.inboxes[rank][self.use][self.slot][source]

    def send(self, rank: int, rows: Tensor) -> None:
        if rank == self.rank:
            self.parts[rank].copy_(rows)
            return
        piece = Place(rows), self._place(rank, self.rank)
        self.transport.steps.send(self.transport.outward[self.use], self.use, self.slot, rank, [piece])

    def wait(self, rank: int) -> Tensor:
        if rank != self.rank:
            self.transport.steps.receive(None, self.use, self.slot, [rank])
            found = self._place(self.rank, rank).value
            assert found is not None
            self.parts[rank].copy_(found)
        return self.parts[rank]

    def finish(self, outputs: Sequence[Tensor]) -> None:
        self.transport.drain(self.use)
        self.transport.steps.release(None, self.use, self.slot)
