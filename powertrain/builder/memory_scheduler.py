"""Scheduling of compilers by memory. Decisions only; run.py executes them.

In this order: a compiler starts when its expected memory fits beside the expected growth of the running ones. If
memory still runs short, the youngest running one is paused; if only one runs, the youngest paused one is killed, to be
run again by its launcher; if none is paused, the running one is killed once, to run again in less memory if it can
(gcc, launcher.py). That mode is slower, so only a unit that did not fit before starts in it. One always runs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

State = Literal["waiting", "running", "paused", "killed"]
Act = Literal["go", "go low_memory", "pause", "resume", "kill", "alone"]
_RESERVE = 0.05  # share of the initial memory that stays free
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
    tries: int = 0  # number of starts
    launched: bool = True  # by our launcher, which can run it again
    seen: bool = False  # `expected` was measured on this very file, not estimated from others
    has_low_memory_mode: bool = False  # its compiler can take less memory, in more time
    low_memory: bool = False  # it runs in that mode
    doing: str = ""  # the program at work: cicc, ptxas, cc1plus
    pids: list[int] = field(default_factory=list)
    reported_alone: bool = False

    @property
    def growth(self) -> int:
        """Its expected further growth."""
        return max(0, self.expected - self.memory)


def reserve(memory: int) -> int:
    return min(_MOST_RESERVE, int(memory * _RESERVE))


def decide(units: Sequence[CompileJob], available: int, memory: int, jobs: int) -> Iterator[tuple[Act, CompileJob]]:
    """The next action.

    units      in order of arrival
    available  bytes free now
    memory     bytes that the build may use in all
    jobs       how many may run at once
    """
    running = [unit for unit in units if unit.state == "running"]
    paused = [unit for unit in units if unit.state == "paused"]
    left = available - reserve(memory)
    if any(unit.state == "killed" for unit in units):
        # its memory is not free yet, and soon will be
        return
    if left < 0 and running:
        yield from _shrink(running, [unit for unit in paused if unit.launched])
        return
    left -= sum(unit.growth for unit in running)
    busy = len(running)
    for unit in sorted(paused, key=lambda unit: unit.since) + [unit for unit in units if unit.state == "waiting"]:
        if busy and (left < unit.growth or busy >= jobs):
            # in order: a large one is not overtaken for ever
            return
        # for files measured before only: for every file that might not fit it cost 1.7 times the CPU time
        start: Act = "go low_memory" if unit.has_low_memory_mode and unit.seen and left < unit.growth else "go"
        yield ("resume" if unit.state == "paused" else start), unit
        left -= unit.growth
        busy += 1


def _shrink(running: list[CompileJob], paused: list[CompileJob]) -> Iterator[tuple[Act, CompileJob]]:
    if len(running) > 1:
        yield "pause", max(running, key=lambda unit: unit.since)
    elif paused:
        yield "kill", max(paused, key=lambda unit: unit.since)
    elif running[0].has_low_memory_mode and not running[0].low_memory:
        yield "kill", running[0]
    elif not running[0].reported_alone:
        yield "alone", running[0]
