"""The protocol under every order of events: a model checker runs its steps, and its steps with faults put in.

Ranks' streams are queues of steps. A scheduler takes one step of one stream at a time, at random; copies take two, so
that others come between their begin and end. Memory is what was last copied there. Whoever uses rows checks that they
are this call's. A fault must be seen as stale rows, as rows overwritten while they are read, or as a standstill.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from powertrain.parallel.transport.protocol import (
    COMBINE,
    DISPATCH,
    FREE,
    GATHER,
    KINDS,
    PIECES,
    READY,
    SCATTER,
    SLOTS,
    USES,
    Engine,
    Flag,
    Protocol,
)

Buffer = tuple[Any, ...]


class Wrong(Exception):
    """What a fault must come to."""


@dataclass
class Step:
    """ready() says whether it can be taken; run() takes it."""

    name: str
    run: Callable[[], None]
    ready: Callable[[], Any] = lambda: True


@dataclass
class Model:
    """All ranks' streams, flags and memory."""

    size: int
    streams: dict[tuple[int, str], deque[Step]] = field(default_factory=dict)
    flags: dict[tuple[int, Flag], int] = field(default_factory=dict)
    memory: dict[Buffer, Any] = field(default_factory=dict)
    reading: dict[Buffer, int] = field(default_factory=dict)
    writing: set[Buffer] = field(default_factory=set)
    passed: set[Any] = field(default_factory=set)

    def __post_init__(self) -> None:
        for rank in range(self.size):
            for kind in KINDS:
                for use in USES:
                    for slot in range(SLOTS):
                        for peer in range(self.size):
                            for piece in range(PIECES):
                                flag = Flag(kind, use, slot, peer, piece)
                                self.flags[rank, flag] = int(kind == FREE)

    def put(self, rank: int, stream: str, step: Step) -> None:
        self.streams.setdefault((rank, stream), deque()).append(step)

    def begin_read(self, place: Buffer) -> None:
        if place in self.writing:
            raise Wrong(f"{place} is read while it is written")
        self.reading[place] = self.reading.get(place, 0) + 1

    def end_read(self, place: Buffer) -> None:
        self.reading[place] -= 1

    def begin_write(self, place: Buffer) -> None:
        if place in self.writing or self.reading.get(place):
            raise Wrong(f"{place} is overwritten while it is used")
        self.writing.add(place)

    def end_write(self, place: Buffer, value: Any) -> None:
        self.writing.remove(place)
        self.memory[place] = value

    def run(self, rng: random.Random) -> None:
        """Until every stream is empty; each is fast or slow, for a while. Raises Wrong for a standstill, too."""
        waiting = [key for key, steps in self.streams.items() if steps]
        while waiting:
            speeds = {key: 10 ** rng.uniform(-3, 0) for key in waiting}
            for _ in range(30):
                ready = [key for key in waiting if self.streams[key][0].ready()]
                if not ready:
                    raise Wrong(f"standstill: {[(key, self.streams[key][0].name) for key in waiting]}")
                (key,) = rng.choices(ready, [speeds[key] for key in ready])
                self.streams[key].popleft().run()
                if not self.streams[key]:
                    waiting.remove(key)
                    if not waiting:
                        return


class ModelEngine(Engine[str, Buffer]):
    def __init__(self, model: Model, rank: int) -> None:
        self.model, self.rank, self.size = model, rank, model.size

    def consume(self, stream: str, flags: Sequence[Flag]) -> None:
        keys = [(self.rank, flag) for flag in flags]

        def run() -> None:
            for key in keys:
                self.model.flags[key] = 0

        ready = lambda: all(self.model.flags[key] for key in keys)  # noqa: E731
        self.model.put(self.rank, stream, Step(f"consume {flags}", run, ready))

    def signal(self, stream: str, flags: Sequence[tuple[int, Flag]]) -> None:
        def run() -> None:
            for key in flags:
                if self.model.flags[key]:
                    raise Wrong(f"{key} is made 1 twice")
                self.model.flags[key] = 1

        self.model.put(self.rank, stream, Step(f"signal {flags}", run))

    def copy(self, stream: str, source: Buffer, target: Buffer) -> None:
        model, value = self.model, source[-1]

        def begin() -> None:
            model.begin_write(target)

        self.model.put(self.rank, stream, Step("copy begins", begin))
        self.model.put(self.rank, stream, Step("copy ends", lambda: model.end_write(target, value)))

    def use(self, stream: str, place: Buffer, expected: Any) -> None:
        """A product reads rows."""
        model = self.model

        def begin() -> None:
            model.begin_read(place)
            if model.memory.get(place) != expected:
                raise Wrong(f"{place} holds {model.memory.get(place)}, not {expected}")

        def end() -> None:
            model.end_read(place)
            if model.memory.get(place) != expected:
                raise Wrong(f"{place} changed while it was used")

        model.put(self.rank, stream, Step("product begins", begin))
        model.put(self.rank, stream, Step("product ends", end))

    def mark(self, stream: str, key: Any) -> None:
        self.model.put(self.rank, stream, Step(f"mark {key}", lambda: self.model.passed.add(key)))

    def follow(self, stream: str, key: Any) -> None:
        self.model.put(self.rank, stream, Step(f"follow {key}", lambda: None, lambda: key in self.model.passed))


class Rank:
    """Makes the calls of powertrain/parallel/transport/symmetric.py, as it makes them, on a model."""

    def __init__(self, model: Model, rank: int) -> None:
        self.engine = ModelEngine(model, rank)
        self.steps = Protocol(self.engine)
        self.rank, self.call = rank, 0

    def _fork(self, stream: str, key: Any) -> None:
        self.engine.mark("main", key)
        self.engine.follow(stream, key)

    def _join(self, stream: str, key: Any) -> None:
        self.engine.mark(stream, key)
        self.engine.follow("main", key)

    def gather(self, pieces: int, *, fused: bool = False, before_finish: Callable[[], None] = lambda: None) -> None:
        self.call += 1
        call, steps = self.call, self.steps
        slot = steps.next_slot(GATHER)
        self._fork("gather", (self.rank, call, "begin"))
        for peer in steps.receivers:
            parts = [((call, self.rank, i), (peer, GATHER, slot, self.rank, i)) for i in range(pieces)]
            steps.send("gather", GATHER, slot, peer, [(((value,)), place) for value, place in parts])
        if fused:
            for peer in steps.senders:
                for i in range(pieces):
                    # a kernel waits for the flag without consuming it
                    flag = self.rank, Flag(READY, GATHER, slot, peer, i)
                    flags = self.engine.model.flags
                    seen = partial(flags.get, flag)
                    self.engine.model.put(self.rank, "main", Step(f"sees {flag}", lambda: None, seen))
                    self.engine.use("main", (self.rank, GATHER, slot, peer, i), (call, peer, i))
            steps.receive("main", GATHER, slot, steps.senders, pieces)
        else:
            for peer in steps.senders:
                steps.receive("main", GATHER, slot, [peer], pieces)
                for i in range(pieces):
                    self.engine.use("main", (self.rank, GATHER, slot, peer, i), (call, peer, i))
        before_finish()
        self._join("gather", (self.rank, call, "sent"))
        steps.release("main", GATHER, slot)

    def scatter(self, *, fused: bool = False) -> None:
        self.call += 1
        call, steps = self.call, self.steps
        slot = steps.next_slot(SCATTER)
        if fused:
            steps.await_free("main", SCATTER, slot, steps.receivers)
        for peer in steps.receivers:
            value, place = (call, self.rank), (peer, SCATTER, slot, self.rank)
            if fused:
                self.engine.copy("main", (value,), place)
                self.engine.signal("main", [(peer, Flag(READY, SCATTER, slot, self.rank))])
            else:
                self._fork("scatter", (self.rank, call, peer))
                steps.send("scatter", SCATTER, slot, peer, [((value,), place)])
        if not fused:
            self._join("scatter", (self.rank, call, "sent"))
        steps.receive("main", SCATTER, slot, steps.senders)
        for peer in steps.senders:
            self.engine.use("main", (self.rank, SCATTER, slot, peer), (call, peer))
        steps.release("main", SCATTER, slot)

    def all_to_all_async(self) -> None:
        """Rows to experts on other ranks, and each source's results back while the next one's are made."""
        self.call += 1
        call, steps, receive = self.call, self.steps, self.steps.receive
        there, back = steps.next_slot(DISPATCH), steps.next_slot(COMBINE)
        for peer in steps.receivers:
            self._fork("dispatch", (self.rank, call, "to", peer))
            steps.send("dispatch", DISPATCH, there, peer, [(((call, peer),), (peer, DISPATCH, there, self.rank))])
        for peer in steps.senders:
            receive("main", DISPATCH, there, [peer])
            self.engine.use("main", (self.rank, DISPATCH, there, peer), (call, self.rank))
            self._fork("combine", (self.rank, call, "back", peer))
            steps.send("combine", COMBINE, back, peer, [(((call, peer),), (peer, COMBINE, back, self.rank))])
        self._join("dispatch", (self.rank, call, "sent"))
        steps.release("main", DISPATCH, there)
        for peer in steps.senders:
            receive("main", COMBINE, back, [peer])
            self.engine.use("main", (self.rank, COMBINE, back, peer), (call, self.rank))
        self._join("combine", (self.rank, call, "returned"))
        steps.release("main", COMBINE, back)


def build(size: int, calls: Sequence[tuple[str, int]], *, replayed: bool = False) -> Model:
    """Every rank makes the same calls: "gather" or "scatter", fused or not, "both" as backward, "trade".

    replayed: each as a graph of its own would make it, always in the same slot.
    """
    model = Model(size)
    for number in range(size):
        rank = Rank(model, number)
        for kind, pieces in calls:
            if replayed:
                rank.steps = Protocol(rank.engine)
            if kind == "both":
                rank.gather(pieces, before_finish=rank.scatter)
            elif kind == "trade":
                rank.all_to_all_async()
            elif kind.endswith("gather"):
                rank.gather(pieces, fused=kind.startswith("fused"))
            else:
                rank.scatter(fused=kind.startswith("fused"))
    return model


KINDS_OF_CALLS = ("gather", "fused gather", "scatter", "fused scatter", "both", "trade")


def some_calls(rng: random.Random, count: int) -> list[tuple[str, int]]:
    return [(rng.choice(KINDS_OF_CALLS), rng.randint(1, PIECES)) for _ in range(count)]


@pytest.mark.parametrize("orders", [60, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_order_of_events_gives_each_product_its_rows(size: int, replayed: bool, orders: int) -> None:
    for seed in range(orders):
        rng = random.Random(seed)
        model = build(size, some_calls(rng, 5), replayed=replayed)
        model.run(rng)
        assert not any(model.reading.values()) and not model.writing
        for (_, flag), value in model.flags.items():
            assert value == int(flag.kind == FREE), "every credit is back where it was"


def _steps(model: Model, beginning: str) -> list[tuple[tuple[int, str], int]]:
    return [(key, i) for key, s in model.streams.items() for i, step in enumerate(s) if step.name.startswith(beginning)]


def _drop(model: Model, rng: random.Random, beginning: str) -> None:
    key, index = rng.choice(_steps(model, beginning))
    del model.streams[key][index]


def _dropped_signal(model: Model, rng: random.Random) -> None:
    _drop(model, rng, "signal")


def _missing_wait(model: Model, rng: random.Random) -> None:
    """Whatever the flags say, a stream goes on; it consumes them all the same."""
    key, index = rng.choice(_steps(model, "consume"))
    model.streams[key][index].ready = lambda: True


def _signal_before_copy(model: Model, rng: random.Random) -> None:
    """The flag is written before the rows are."""
    places = [(key, i) for key, i in _steps(model, "signal") if i and model.streams[key][i - 1].name == "copy ends"]
    key, index = rng.choice(places)
    steps = model.streams[key]
    steps[index - 2], steps[index - 1], steps[index] = steps[index], steps[index - 2], steps[index - 1]


def _release_before_use(model: Model, rng: random.Random) -> None:
    """Room is given back while the rows are still wanted."""
    places = []
    for key, i in _steps(model, "signal"):
        uses = [j for j in range(i) if key[1] == "main" and model.streams[key][j].name == "product begins"]
        if uses:
            places.append((key, uses[-1], i))
    key, use, index = rng.choice(places)
    steps = model.streams[key]
    step = steps[index]
    del steps[index]
    steps.insert(use, step)


@pytest.mark.parametrize("fault", [_dropped_signal, _missing_wait, _signal_before_copy, _release_before_use])
def test_a_fault_is_seen(fault: Callable[[Model, random.Random], None]) -> None:
    """Not in every order of events does a fault show; of 150 orders of 8 calls, in more than three."""
    seen = 0
    for seed in range(150):
        rng = random.Random(seed)
        calls = [(rng.choice(("gather", "scatter", "both")), 1) for _ in range(8)]
        model = build(3, calls, replayed=True)
        fault(model, rng)
        try:
            model.run(rng)
        except Wrong:
            seen += 1
        if seen > 3:
            break
    assert seen > 3, f"{fault.__name__}: seen in {seen} of 150"


def test_ranks_that_differ_in_their_calls_come_to_a_standstill() -> None:
    model = Model(2)
    first, second = Rank(model, 0), Rank(model, 1)
    first.gather(1)
    first.scatter()
    second.scatter()
    with pytest.raises(Wrong, match="standstill"):
        model.run(random.Random(0))
