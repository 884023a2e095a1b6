"""History: what earlier builds took, in one SQLite file in the user's data folder."""

import sqlite3
import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from powertrain.governor.plan import Estimate

_VERSION = 1
_SCHEMA = """
create table build(
    id integer primary key, started real, recipe text, command text, archs text, jobs integer,
    seconds real, cpu real, peak integer, code integer, log text);
create table unit(build integer references build(id), name text, seconds real, peak integer);
"""
_MARGIN = 1.2  # over the largest unit of earlier builds
_WAIT = 10  # seconds for another build's write


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


class History:
    def __init__(self, file: Path) -> None:
        self.file = file

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(self.file, timeout=_WAIT)) as connection, connection:
            connection.execute("begin immediate")
            (version,) = connection.execute("pragma user_version").fetchone()
            if version == 0:
                for statement in _SCHEMA.split(";"):
                    connection.execute(statement)
                connection.execute(f"pragma user_version = {_VERSION}")
            elif version != _VERSION:
                raise ValueError(f"{self.file} must have version {_VERSION}, got {version}: move it away")
            yield connection

    def add(self, record: Record, units: Sequence[UnitRecord]) -> None:
        values = tuple(vars(record).values())
        with self._open() as connection:
            marks = ",".join("?" * len(values))
            build = connection.execute(f"insert into build values(null,{marks})", values).lastrowid
            rows = [(build, unit.name, unit.seconds, unit.peak) for unit in units]
            connection.executemany("insert into unit values(?,?,?,?)", rows)

    def last(self, count: int = 20) -> list[Record]:
        """The latest builds, newest first."""
        if not self.file.exists():
            return []
        columns = ",".join(Record.__dataclass_fields__)
        with self._open() as connection:
            rows = connection.execute(f"select {columns} from build order by id desc limit ?", (count,)).fetchall()
        return [Record(*row) for row in rows]

    def units(self, recipe: str, command: str) -> dict[str, UnitRecord]:
        """The largest record of each unit in builds of the same."""
        if not self.file.exists():
            return {}
        with self._open() as connection:
            rows = connection.execute(
                "select name, max(unit.seconds), max(unit.peak) from unit join build on build.id = unit.build "
                "where recipe = ? and command = ? group by name",
                (recipe, command),
            ).fetchall()
        return {row[0]: UnitRecord(*row) for row in rows}

    def estimate(self, recipe: str, command: str, archs: str) -> Estimate | None:
        """What a job takes by builds of the same recipe and command here; None if there was none."""
        units = self.units(recipe, command)
        if not units:
            return None
        done = [r for r in self.last(200) if (r.recipe, r.command, r.archs, r.code) == (recipe, command, archs, 0)]
        largest = max(units.values(), key=lambda unit: unit.peak)
        seconds = statistics.median(record.seconds for record in done) if done else None
        why = f"measured here: {largest.name} took the most, {largest.peak / 2**30:.2f} GiB"
        return Estimate(max(2**24, int(largest.peak * _MARGIN)), seconds, why)
