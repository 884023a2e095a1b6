"""Time and memory of earlier builds, in one SQLite file in the user's data folder."""

import os
import sqlite3
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from powertrain.builder.plan import Estimate
from powertrain.builder.recipes import GENERIC, Recipe
from powertrain.runtime import tracing

T = TypeVar("T")

_VERSION = 1
_SCHEMA = """
create table build(
    id integer primary key, started real, recipe text, command text, archs text, jobs integer,
    seconds real, cpu real, peak integer, code integer, log text);
create table unit(build integer references build(id), name text, seconds real, peak integer);
"""
_MARGIN = 1.2  # over the largest unit of earlier builds
_WAIT = 10  # seconds for another build's write
_LAST_DAY = 2.0**37  # seconds since the epoch: the limit of calendars here
# messages of SQLite where the file may be whole
_ELSEWHERE = ("locked", "readonly", "unable to open", "disk is full", "disk I/O", "interrupted")


@dataclass(frozen=True)
class Record:
    """One build. Sizes in bytes, times in seconds."""

    started: float  # since the epoch
    recipe: str
    command: str
    archs: str
    jobs: int
    seconds: float
    cpu: float
    peak: int
    code: int
    log: str


@dataclass(frozen=True)
class UnitRecord:
    name: str
    seconds: float
    peak: int


class _OtherVersion(Exception):
    """Another version of Powertrain wrote the history: it stays as it is."""


class History:
    def __init__(self, file: Path) -> None:
        self.file = file

    def _with(self, work: Callable[[sqlite3.Connection], T], nothing: T) -> T:
        """The result of `work`; `nothing`, and a line, where the file cannot be read or written. A damaged one is set
        aside: a build is worth more than its history."""
        try:
            if self.file.exists() and not self.file.is_file():
                raise ValueError("it is no regular file")
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.file, timeout=_WAIT)) as connection, connection:
                self._prepare(connection)
                return work(connection)
        except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
            if isinstance(error, sqlite3.OperationalError) and any(word in str(error) for word in _ELSEWHERE):
                tracing.warn(f"build history {self.file}: {error}; this build is not compared with earlier ones")
            else:
                self._set_aside(error)
        except _OtherVersion as error:
            tracing.warn(f"build history {self.file}: {error}; this build is not compared with earlier ones")
        except OSError as error:
            tracing.warn(f"build history {self.file}: {error.strerror}; this build is not compared with earlier ones")
        return nothing

    def _prepare(self, connection: sqlite3.Connection) -> None:
        connection.execute("begin immediate")
        (version,) = connection.execute("pragma user_version").fetchone()
        if version == 0:
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            connection.execute(f"pragma user_version = {_VERSION}")
        elif version != _VERSION:
            raise _OtherVersion(f"must have version {_VERSION}, got {version}")

    def _set_aside(self, error: Exception) -> None:
        aside = self.file.with_name(f"{self.file.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
        try:
            # of the same damage; else they would be played into the next
            for suffix in ("-wal", "-shm", "-journal"):
                self.file.with_name(self.file.name + suffix).unlink(missing_ok=True)
            self.file.rename(aside)
            where = f"renamed to {aside.name}"
        except OSError as reason:
            where = f"and cannot be renamed ({reason.strerror})"
        tracing.warn(f"build history {self.file} is damaged ({error}), {where}; statistics start again from nothing")

    def add(self, record: Record, units: Sequence[UnitRecord]) -> None:
        values = tuple(_plain(value) for value in vars(record).values())

        def work(connection: sqlite3.Connection) -> None:
            marks = ",".join("?" * len(values))
            build = connection.execute(f"insert into build values(null,{marks})", values).lastrowid
            rows = [(build, _plain(unit.name), unit.seconds, unit.peak) for unit in units]
            connection.executemany("insert into unit values(?,?,?,?)", rows)

        self._with(work, None)

    def last(self, count: int = 20) -> list[Record]:
        """The latest builds, newest first."""
        if not os.path.lexists(self.file):
            return []
        columns = ",".join(Record.__dataclass_fields__)

        def work(connection: sqlite3.Connection) -> list[Record]:
            rows = connection.execute(f"select {columns} from build order by id desc limit ?", (count,)).fetchall()
            return [_record(row) for row in rows]

        return self._with(work, [])

    def known(self, recipe: Recipe, command: str) -> dict[str, UnitRecord]:
        """The largest record of each unit in builds of the same command, or else of the same project."""
        return self.units(recipe.name, command) or ({} if recipe == GENERIC else self.units(recipe.name, None))

    def units(self, recipe: str, command: str | None) -> dict[str, UnitRecord]:
        """The largest record of each unit in builds of the same; of any command if that is None."""
        if not os.path.lexists(self.file):
            return {}

        def work(connection: sqlite3.Connection) -> dict[str, UnitRecord]:
            rows = connection.execute(
                "select name, max(unit.seconds), max(unit.peak) from unit join build on build.id = unit.build "
                "where recipe = ?1 and (?2 is null or command = ?2) group by name",
                (_plain(recipe), _plain(command)),
            ).fetchall()
            return {str(name): UnitRecord(str(name), _number(s), int(_number(peak))) for name, s, peak in rows}

        return self._with(work, {})

    def estimate(self, recipe: Recipe, command: str, archs: str) -> Estimate | None:
        """Figures of earlier builds of the same command, or else of the same project; None if there was none."""
        units = self.known(recipe, command)
        if not units:
            return None
        records = [record for record in self.last(200) if record.recipe == recipe.name]
        same = [record for record in records if record.command == command]
        done = [record for record in same or records if record.code == 0]
        largest = max(units.values(), key=lambda unit: unit.peak)
        size = max(2**24, int(largest.peak * _MARGIN))
        why = f"measured here: {largest.name} took the most, {largest.peak / 2**30:.2f} GiB"
        # a failed unit may not have reached its peak
        if not done and size < recipe.bytes:
            size, why = recipe.bytes, f"{recipe.source}; {why} in builds that failed"
        times = [record.seconds for record in done if record.archs == archs]
        return Estimate(size, statistics.median(times) if times else None, why, "measured here")


def _record(row: Sequence[Any]) -> Record:
    started, recipe, command, archs, jobs, seconds, cpu, peak, code, log = row
    numbers = _number(seconds), _number(cpu), int(_number(peak)), int(_number(abs(code)) * (1 if code > 0 else -1))
    return Record(
        _number(started, _LAST_DAY), str(recipe), str(command), str(archs), int(_number(jobs)), *numbers, str(log)
    )


def _number(value: Any, most: float = 2**60) -> float:
    """A size or a time, checked. Raises ValueError."""
    if not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(f"a size or time must be from 0 to {most:.0f}, got {value!r:.40}")
    return value


def _plain(value: Any) -> Any:
    """Text as SQLite takes it: a path may be of any bytes."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else value
