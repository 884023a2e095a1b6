"""History: what earlier builds took, in one SQLite file in the user's data folder."""

import sqlite3
import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from powertrain.builder.plan import Estimate
from powertrain.builder.recipes import GENERIC, Recipe

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

    def known(self, recipe: Recipe, command: str) -> dict[str, UnitRecord]:
        """The largest record of each unit in builds of the same command, or else of the same project."""
        return self.units(recipe.name, command) or ({} if recipe == GENERIC else self.units(recipe.name, None))

    def units(self, recipe: str, command: str | None) -> dict[str, UnitRecord]:
        """The largest record of each unit in builds of the same; of any command if that is None."""
        if not self.file.exists():
            return {}
        with self._open() as connection:
            rows = connection.execute(
                "select name, max(unit.seconds), max(unit.peak) from unit join build on build.id = unit.build "
                "where recipe = ?1 and (?2 is null or command = ?2) group by name",
                (recipe, command),
            ).fetchall()
        return {row[0]: UnitRecord(*row) for row in rows}

    def estimate(self, recipe: Recipe, command: str, archs: str) -> Estimate | None:
        """What builds of the same command took here, or else of the same project; None if there was none."""
        units = self.known(recipe, command)
        if not units:
            return None
        records = [record for record in self.last(200) if record.recipe == recipe.name]
        same = [record for record in records if record.command == command]
        done = [record for record in same or records if record.code == 0]
        largest = max(units.values(), key=lambda unit: unit.peak)
        size = max(2**24, int(largest.peak * _MARGIN))
        why = f"measured here: {largest.name} took the most, {largest.peak / 2**30:.2f} GiB"
        if not done and size < recipe.bytes:  # what failed may not have come to its largest
            size, why = recipe.bytes, f"{recipe.source}; {why} in builds that failed"
        times = [record.seconds for record in done if record.archs == archs]
        return Estimate(size, statistics.median(times) if times else None, why, "measured here")
