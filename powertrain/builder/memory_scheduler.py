"""Room: which compilers may run in the memory there is. Decisions only; run.py carries them out.

In this order: a compiler starts when its expected memory fits beside the expected growth of the running ones. If
memory runs short all the same, the youngest is paused; if only one runs and it still does, the youngest paused one is
killed, which its launcher will run again; if none is paused, the one that runs, once, to run again in less memory if it
can (gcc, launcher.py). That is slower, so only a unit that did not fit before begins that way. One always runs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

State = Literal["waiting", "running", "paused", "killed"]
Act = Literal["go", "go low_memory", "pause", "resume", "kill", "alone"]
_RESERVE = 0.05  # of the memory at the start stays free
_MOST_RESERVE = 2**30


@dataclass(eq=False)
class CompileJob:
    """One compiler at work on one source file. Sizes in bytes, times in seconds."""

    name: str
    expected: int
    pid: int = 0  # of the compiler's process group, once it runs
    state: State = "waiting"
    since: float = 0.0  # when it last started
    memory: int = 0
    peak: int = 0
    cpu: float = 0.0
    tries: int = 0  # how often it was begun
    launched: bool = True  # by our launcher, which can run it again
    seen: bool = False  # `expected` is of this very file, not of others like it
    thrifty: bool = False  # its compiler can do with less memory, in more time
    low_memory: bool = False  # it does
    doing: str = ""  # the program at work: cicc, ptxas, cc1plus
    pids: list[int] = field(default_factory=list)
    told_alone: bool = False

    @property
    def growth(self) -> int:
        """Its expected further growth."""
        return max(0, self.expected - self.memory)


def reserve(memory: int) -> int:
    return min(_MOST_RESERVE, int(memory * _RESERVE))


def decide(units: Sequence[CompileJob], available: int, memory: int, jobs: int) -> Iterator[tuple[Act, CompileJob]]:
    """The next action.

    units      in the order in which they came
    available  bytes free now
    memory     bytes that the build may use in all
    jobs       how many may run at once
    """
    running = [unit for unit in units if unit.state == "running"]
    paused = [unit for unit in units if unit.state == "paused"]
    left = available - reserve(memory)
    if any(unit.state == "killed" for unit in units):
        return  # its memory is not free yet, and soon will be
    if left < 0 and running:
        yield from _shrink(running, [unit for unit in paused if unit.launched])
        return
    left -= sum(unit.growth for unit in running)
    busy = len(running)
    for unit in sorted(paused, key=lambda unit: unit.since) + [unit for unit in units if unit.state == "waiting"]:
        if busy and (left < unit.growth or busy >= jobs):
            return  # in order: a large one is not overtaken for ever
        start: Act = "go low_memory" if unit.thrifty and unit.seen and left < unit.growth else "go"
        yield ("resume" if unit.state == "paused" else start), unit
        left -= unit.growth
        busy += 1


def _shrink(running: list[CompileJob], paused: list[CompileJob]) -> Iterator[tuple[Act, CompileJob]]:
    if len(running) > 1:
        yield "pause", max(running, key=lambda unit: unit.since)
    elif paused:
        yield "kill", max(paused, key=lambda unit: unit.since)
    elif running[0].thrifty and not running[0].low_memory:
        yield "kill", running[0]
    elif not running[0].told_alone:
        yield "alone", running[0]
