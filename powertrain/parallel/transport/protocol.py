"""Synchronization protocol: when a rank may write to the memory of another.

Every rank keeps a receive buffer for all-gathers and one for reduce-scatters, with two slots each that calls use
alternately, and two buffers of one slot for the two directions of an all-to-all. The others copy their rows there. It
also keeps flags, 0 or 1, each written by one peer and consumed (waited for, then made 0) by their owner:

    READY [use, slot, peer, piece]   that piece of the peer's rows is in my receive buffer
    FREE [use, slot, peer]          my rows may go into the peer's receive buffer

FREE is a credit and starts at 1. A flag is set only after its owner consumed it and signalled the other one, so no
signal is lost and the same steps can be replayed for ever, as a captured graph does. With two alternating slots the
sender never waits for FREE, since a call ends only when every rank has begun it; the credit matters where consecutive
calls use one slot, as in a graph with one call.

There is no deadlock, for two reasons. Each step waits only for steps of the same call or earlier ones on other ranks,
and calls come in the same order everywhere. And only the products and the last sum need an SM, all of which a product
may occupy: the other steps are copies by copy engines, and flags waited for and written by streams.

The same steps drive CUDA streams (symmetric.py), threads (simulate.py) and a model checker (tests/parallel).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

SLOTS = 2  # at most
PIECES = 2  # at most, of one rank's rows


# plain integers, since flags are looked up in every call: kinds of flags, and uses of receive buffers
READY, FREE = KINDS = 0, 1
GATHER, SCATTER, DISPATCH, COMBINE = USES = 0, 1, 2, 3
# one slot for experts: their rows are many and their calls far apart, so a second would cost memory and save no time
SLOTS_OF = SLOTS, SLOTS, 1, 1


class Flag(NamedTuple):
    """One of a rank's flags."""

    kind: int
    use: int
    slot: int
    peer: int
    piece: int = 0


Stream = TypeVar("Stream")
Memory = TypeVar("Memory")


class Engine(ABC, Generic[Stream, Memory]):
    """Operations that can be enqueued on a stream of this rank; Memory is a piece of memory."""

    rank: int
    size: int

    @abstractmethod
    def consume(self, stream: Stream, flags: Sequence[Flag]) -> None:
        """Wait until every one of this rank's flags is 1, then make them 0."""

    @abstractmethod
    def signal(self, stream: Stream, flags: Sequence[tuple[int, Flag]]) -> None:
        """Make flags of other ranks 1, after everything before it on the stream."""

    @abstractmethod
    def copy(self, stream: Stream, source: Memory, target: Memory) -> None:
        """Copy without an SM."""


class Protocol(Generic[Stream, Memory]):
    """The steps of one rank in one call after another."""

    def __init__(self, engine: Engine[Stream, Memory]) -> None:
        self.engine = engine
        self.rank, self.size = engine.rank, engine.size
        self._calls = [0] * len(USES)

    def next_slot(self, use: int) -> int:
        """The slot of the next call of that use."""
        self._calls[use] += 1
        # counted, not sent: all ranks make the same calls in the same order
        return self._calls[use] % SLOTS_OF[use]

    @property
    def receivers(self) -> list[int]:
        """The other ranks as this one sends to them: no two ranks send to the same one at once."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    @property
    def senders(self) -> list[int]:
        """The other ranks in arrival order, if all send at the same time."""
        return [(self.rank - step) % self.size for step in range(1, self.size)]

    def await_free(self, stream: Stream, use: int, slot: int, peers: Sequence[int]) -> None:
        """Wait until the peers have used the rows that this rank sent two calls ago."""
        self.engine.consume(stream, [Flag(FREE, use, slot, peer) for peer in peers])

    def send(self, stream: Stream, use: int, slot: int, peer: int, pieces: Sequence[tuple[Memory, Memory]]) -> None:
        """Copy pieces (from, to) into a peer's receive buffer once its slot is free, and signal READY for each."""
        self.await_free(stream, use, slot, [peer])
        for piece, (source, target) in enumerate(pieces):
            self.engine.copy(stream, source, target)
            # on the same stream, so after the copy: READY before its rows is the fault the model checker looks for
            self.engine.signal(stream, [(peer, Flag(READY, use, slot, self.rank, piece))])

    def receive(self, stream: Stream, use: int, slot: int, peers: Sequence[int], pieces: int = 1) -> None:
        """Wait until all pieces of the peers' rows are here."""
        self.engine.consume(stream, [Flag(READY, use, slot, p, i) for p in peers for i in range(pieces)])

    def release(self, stream: Stream, use: int, slot: int) -> None:
        """Mark the receive buffer's slots as free, after its rows were used."""
        self.engine.signal(stream, [(peer, Flag(FREE, use, slot, self.rank)) for peer in self.receivers])
