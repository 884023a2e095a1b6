"""State and outcome of a build, and the protocol of the views that show them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from powertrain.builder.ending import Failure
from powertrain.builder.history import UnitRecord
from powertrain.builder.memory_scheduler import CompileJob


@dataclass
class Status:
    """State of a build for a view. Sizes in bytes, times in seconds."""

    phase: str
    done: int
    total: int
    elapsed: float
    eta: float | None
    used: int
    memory: int
    units: list[CompileJob]
    now: float


class View(Protocol):
    def say(self, text: str) -> None: ...
    def show(self, status: Status) -> None: ...


@dataclass
class Outcome:
    """Outcome of a build. Sizes in bytes, times in seconds."""

    code: int  # the command's exit code; 128 + the signal that ended it
    seconds: float
    cpu: float  # of the build
    overhead: float  # CPU of the builder itself
    peak: int
    log: Path
    units: list[UnitRecord]
    wheels: list[str]
    failure: Failure | None
    paused: int  # how often a compiler was paused
    rerun: int  # how often one was killed and run again


def size_text(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
