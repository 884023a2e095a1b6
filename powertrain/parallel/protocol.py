"""Who may touch which memory when: the rules by which ranks read and write each other's memory, and nothing else.

Every rank keeps two kinds of memory that the others reach, each with two slots that calls use in turn:

    window [slot]           what it offers in a gathering; the others read it
    inbox [slot, source]    where the others put their parts of a scattering

and words, 0 or 1, each written by one peer and consumed (waited for, then made 0) by their keeper:

    READY [slot, peer]   the peer has published its window             FREE [slot, peer]   the peer has read mine
    FULL [slot, peer]    the peer's part is in my inbox                ROOM [slot, peer]   its inbox has room for mine

FREE and ROOM are credits and start at 1. A word is made 1 only after its keeper made it 0 and passed a credit back, so
it is never made 1 twice, and the same steps can be replayed for ever: a captured graph replays them as they are.

Two things make this free of deadlock. Each step waits only for steps of the same call or earlier ones on the other
ranks, and calls come in the same order everywhere. And no step but the products and the last sum needs an SM, which a
product may have taken all of: they are copies by copy engines and words waited for and written by streams.

The same steps drive CUDA streams (symmetric.py), threads (simulate.py) and a model checker (tests/parallel).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Generic, NamedTuple, TypeVar

SLOTS = 2


class Kind(IntEnum):
    READY = 0
    FREE = 1
    FULL = 2
    ROOM = 3


CREDITS = (Kind.FREE, Kind.ROOM)


class Word(NamedTuple):
    """One of a rank's words."""

    kind: Kind
    slot: int
    peer: int


Stream = TypeVar("Stream")
Place = TypeVar("Place")


class Engine(ABC, Generic[Stream, Place]):
    """What can be enqueued on a stream of this rank; Place is a piece of memory."""

    rank: int
    size: int

    @abstractmethod
    def consume(self, stream: Stream, words: Sequence[Word]) -> None:
        """Wait until every one of this rank's words is 1, then make them 0."""

    @abstractmethod
    def signal(self, stream: Stream, rank: int, word: Word) -> None:
        """Make another rank's word 1, after everything before it on the stream."""

    @abstractmethod
    def copy(self, stream: Stream, source: Place, target: Place) -> None:
        """Copy without an SM."""

    def raise_flag(self, stream: Stream, flag: int) -> None:
        """Make a flag of this device 1, for a kernel that waits for it."""
        raise NotImplementedError


class Protocol(Generic[Stream, Place]):
    """The steps of one rank, in the order in which a gathering or a scattering takes them."""

    def __init__(self, engine: Engine[Stream, Place]) -> None:
        self.engine = engine
        self.rank, self.size = engine.rank, engine.size
        self._calls = {"gather": 0, "scatter": 0}

    def next_slot(self, kind: str) -> int:
        """The slot of the next call of that kind."""
        self._calls[kind] += 1
        return self._calls[kind] % SLOTS

    def after(self) -> list[int]:
        """The other ranks, from the next one on: at every step of a call no two ranks meet at the same one."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    # a gathering

    def publish(self, stream: Stream, slot: int, shard: Place, window: Place) -> None:
        """Offer a shard, once everybody has read what the window held."""
        self.engine.consume(stream, self._words(Kind.FREE, slot, self.after()))
        self.engine.copy(stream, shard, window)
        for peer in reversed(self.after()):  # the one before reads this rank first
            self.engine.signal(stream, peer, Word(Kind.READY, slot, self.rank))

    def fetch(self, stream: Stream, slot: int, peer: int, pieces: Sequence[tuple[Place, Place, int | None]]) -> None:
        """Read what a peer offers, piece by piece: from, to, and the flag that says it is here, if a kernel waits."""
        self.engine.consume(stream, self._words(Kind.READY, slot, [peer]))
        for source, target, flag in pieces:
            self.engine.copy(stream, source, target)
            if flag is not None:
                self.engine.raise_flag(stream, flag)
        self.engine.signal(stream, peer, Word(Kind.FREE, slot, self.rank))

    # a scattering

    def push(self, stream: Stream, slot: int, peer: int, part: Place, inbox: Place) -> None:
        """Put a part into a peer's inbox, once it has used what was there."""
        self.engine.consume(stream, self._words(Kind.ROOM, slot, [peer]))
        self.engine.copy(stream, part, inbox)
        self.engine.signal(stream, peer, Word(Kind.FULL, slot, self.rank))

    def make_room(self, stream: Stream, slot: int) -> None:
        """Wait until every peer's inbox has room: for a kernel that writes into all of them, and makes FULL 1."""
        self.engine.consume(stream, self._words(Kind.ROOM, slot, self.after()))

    def collect(self, stream: Stream, slot: int) -> None:
        """Wait for everybody's part."""
        self.engine.consume(stream, self._words(Kind.FULL, slot, self.after()))

    def release(self, stream: Stream, slot: int) -> None:
        """The parts are used: give the room back."""
        for peer in self.after():
            self.engine.signal(stream, peer, Word(Kind.ROOM, slot, self.rank))

    def _words(self, kind: Kind, slot: int, peers: Iterable[int]) -> list[Word]:
        return [Word(kind, slot, peer) for peer in peers]
