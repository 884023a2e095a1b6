"""Views of a running build: a live table in a terminal, a line now and then elsewhere."""

import time

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from powertrain.builder.memory_scheduler import CompileJob
from powertrain.builder.stall import slow_but_working
from powertrain.builder.status import Status

_EVERY = 15  # seconds between plain lines
_REDRAW = 1  # seconds; drawing takes more than watching
_SHOWN = 12  # units
_SLOW = 300  # seconds after which a unit is named as slow but working


def printable(text: str) -> str:
    """Names of files may be of any bytes."""
    return text.encode(errors="replace").decode()


class PlainView:
    """Lines for logs and CI."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.last = time.time()
        self.named: set[str] = set()

    def say(self, text: str) -> None:
        # file names may contain brackets, which rich would read as markup
        self.console.print(f"[powertrain] {printable(text)}", markup=False, soft_wrap=True)

    def show(self, status: Status) -> None:
        for unit in status.units:
            seconds = status.now - unit.since
            # named once: to somebody who waits, a file of ten minutes looks like a hang
            if unit.state == "running" and seconds > _SLOW and unit.name not in self.named:
                self.named.add(unit.name)
                self.say(slow_but_working(seconds, unit.name, unit.doing, seconds) or "")
        if status.now - self.last < _EVERY:
            return
        self.last = status.now
        units = "; ".join(_unit(unit, status.now) for unit in status.units if unit.state == "running")
        self.say(f"{summary(status)}{': ' if units else ''}{units}")


class LiveView:
    """A table that is redrawn in place; messages stay above it."""

    def __init__(self, console: Console) -> None:
        # no thread of its own: the loop that watches the build redraws
        self.live = Live(console=console, auto_refresh=False, transient=True)
        self.live.start()
        self.drawn = 0.0

    def say(self, text: str) -> None:
        self.live.console.print(escape(printable(text)))

    def show(self, status: Status) -> None:
        if status.now - self.drawn < _REDRAW:
            return
        self.drawn = status.now
        table = Table.grid(padding=(0, 2))
        # a table longer than the terminal would scroll instead of being redrawn in place
        for unit in status.units[:_SHOWN]:
            style = {"running": "", "paused": "yellow", "waiting": "dim", "killed": "red"}[unit.state]
            table.add_row(unit.name, *_cells(unit, status.now), style=style)
        if len(status.units) > _SHOWN:
            table.add_row(f"and {len(status.units) - _SHOWN} more")
        # before the builder has counted its files there is no total, so the bar only moves
        bar = ProgressBar(total=status.total or None, completed=status.done, width=40, pulse=not status.total)
        self.live.update(Group(Text(summary(status)), bar, table), refresh=True)

    def close(self) -> None:
        self.live.stop()


def summary(status: Status) -> str:
    """Phase, counts, time, memory: one line."""
    counts = f" {status.done}/{status.total}" if status.total else ""
    left = f", about {duration(status.eta)} left" if status.eta is not None else ""
    memory = f"{status.used / 2**30:.1f} of {status.memory / 2**30:.1f} GiB"
    states = [unit.state for unit in status.units]
    many = ", ".join(f"{states.count(s)} {s}" for s in ("running", "paused", "waiting") if s in states)
    return f"{status.phase}{counts}, {duration(status.elapsed)}{left}, {memory}{', ' if many else ''}{many}"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _cells(unit: CompileJob, now: float) -> tuple[str, ...]:
    if unit.state == "waiting":
        return "waits for memory", "", f"{unit.expected / 2**30:.1f} GiB expected"
    return duration(now - unit.since), unit.doing or unit.state, f"{unit.memory / 2**30:.2f} GiB"


def _unit(unit: CompileJob, now: float) -> str:
    return f"{unit.name} {' '.join(_cells(unit, now))}"
