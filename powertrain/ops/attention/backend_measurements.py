"""Measured times of attention backends as data, and the time of any problem estimated from the measured ones around it.

A table is a JSON file: measured/sm_90.json in the package, or the file that `powertrain tune attention` wrote for a GPU
into the user's cache, whose rows weigh more than the shipped ones around them.

    device   the GPU
    sources  name -> file, date, commit, versions
    rows     source; case: dtype (half, tf32, float32), mask (causal, full), features (alibi, softcap, deterministic,
             window, packed), batch, queries, keys, heads, kv_heads, head_dim_qk, head_dim_v, and where there is any
             `window`; ms: backend -> [forward, backward], null where it was not measured. Packed sequences are given
             as the batch of equal ones that `Lengths` takes them for

    time = nominal(problem) * exp(f(problem))

nominal: what attention would take if all kernels were alike: a launch, tiles in waves over the SMs, bytes. It carries
most of the way from one problem to another. f, for each backend: log(time / nominal) of the measured problems, fitted
linearly around the problem that is asked for, with weights exp(-distance^2 / 2). Distance: the facts on the scales of
`_coordinates`. A backend is unknown where nothing near was measured, and where a feature of neither mask nor lengths
was not (alibi, softcap, deterministic, the dtype): these are never compared with one another.

scripts/attention_times.py makes the rows of random problems from what the benchmark attention_choice measured.
"""

import functools
import json
import math
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from powertrain.ops.attention.problem import size_class
from powertrain.runtime import tracing, tuning
from powertrain.runtime.atomic_file import write_whole

Array = NDArray[np.float64]
_SMS = 132  # of an H200; another number shifts all estimates alike
# a kernel computes a head dim in the width of its tile
_WIDTHS = (64, 80, 96, 128, 160, 192, 256, 320, 384, 448, 512)
_PLACED = ("packed", "window")  # features that are coordinates; of the others each combination has rows of its own
_RIDGE = 0.1  # of the slopes: two rows have no say in twelve of them
_NEAR = 0.05  # least sum of weights: one row at a distance of 2.4
# weight of a user's row: of shipped ones up to 30 stand around a case, and where all are of another opinion the row's
# own problem must still be estimated as it was measured (2.0 ms by 10: 1.1, by 300: 1.9)
_OWN = 300.0


class Kind(NamedTuple):
    """What two measurements must have in common to be compared."""

    dtype: str  # half, tf32 or float32
    features: tuple[str, ...]  # without those that are coordinates

    def __str__(self) -> str:
        return ", ".join([*([] if self.dtype == "half" else [self.dtype]), *self.features]) or "plain"


class Case(NamedTuple):
    """A problem as it is compared with measured ones: sizes are classes."""

    causal: bool
    window: int  # keys that a query sees at most; 0: no window
    packed: bool
    sequences: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim_qk: int
    head_dim_v: int

    def __str__(self) -> str:
        keys = "" if self.keys == self.queries else f" keys {self.keys}"
        dims = f"{self.head_dim_qk}" + ("" if self.head_dim_qk == self.head_dim_v else f"/{self.head_dim_v}")
        mask = f"window {self.window}" if self.window else "causal" if self.causal else "full"
        words = f"B{self.sequences} S{self.queries}{keys} H{self.heads}/{self.kv_heads} D{dims} {mask}"
        return words + (" packed" if self.packed else "")


class Estimate(NamedTuple):
    """Estimated milliseconds of a backend; None: not known."""

    forward: float | None
    backward: float | None

    def cost(self, needs_grad: bool) -> float | None:
        # half an estimate would compare a forward with a forward and backward
        if self.forward is None or (needs_grad and self.backward is None):
            return None
        return self.forward + (self.backward if needs_grad and self.backward is not None else 0.0)


class Points(NamedTuple):
    """The measured cases of one kind, a row each."""

    cases: tuple[Case, ...]
    places: Array  # coordinates
    weights: Array
    nominal: Array  # ms of forward and of a training step
    ms: Mapping[str, Array]  # by backend, forward and training step; nan: not measured
    files: tuple[str, ...]  # of each row's source


def kind_of_case(case: Mapping[str, Any]) -> Kind:
    # sorted, for a case is written by hand or by the tuner in any order
    return Kind(case["dtype"], tuple(sorted(set(case.get("features", ())) - {*_PLACED})))


def case_of(case: Mapping[str, Any]) -> Case:
    """From a row of a table."""
    return Case(
        case["mask"] == "causal", case.get("window", 0), "packed" in case.get("features", ()),
        size_class(case["batch"]), size_class(case["queries"]), size_class(case["keys"]), case["heads"],
        case["kv_heads"], case["head_dim_qk"], case["head_dim_v"],
    )  # fmt: skip


def _coordinates(case: Case) -> tuple[float, ...]:
    """Where a case stands: a distance of 1 weighs 0.6, of 2 0.14, of 3 0.01."""
    repeats = case.heads // case.kv_heads
    head_dim = max(case.head_dim_qk, case.head_dim_v)
    return (
        0.7 * math.log2(case.sequences * case.heads),
        math.log2(case.queries),
        0.7 * math.log2(case.keys / case.queries),
        # kernels splitting keys, and packing heads into tiles, begin at a ratio
        1.4 * (4 * case.queries <= case.keys),
        3 * math.log2(head_dim),
        # others than those of narrower heads
        2.0 * (head_dim > 256),
        4.0 * (case.head_dim_qk != case.head_dim_v),
        0.4 * math.log2(repeats) + 2.0 * (repeats > 1),
        1.0 * case.causal,
        1.0 * (case.window > 0) + 1.4 * (0 < case.window < case.keys),
        2.0 * case.packed,
    )


def _nominal(case: Case) -> tuple[float, float]:
    """Milliseconds of forward and training step, by one rule for all backends. Its constants are those of usual
    kernels; the measured cases correct their errors."""
    width = next(w for w in _WIDTHS if max(case.head_dim_qk, case.head_dim_v) <= w)
    tiles = math.ceil(case.queries / 128)
    seen = [_keys_seen(case, (n + 0.5) * tiles / 16) for n in range(16)] if tiles > 16 else None
    seen = seen or [_keys_seen(case, n + 1) for n in range(tiles)]
    waves = case.sequences * case.heads * tiles / _SMS
    # in units of 10^4 elements of keys an SM; the longest tile at the least
    products = max(sum(seen) / len(seen) * waves, max(seen)) * width / 1e4
    moved = 2 * case.sequences * (case.head_dim_qk + case.head_dim_v)
    micros = moved * (case.queries * case.heads + case.keys * case.kv_heads) / 4e6
    forward = 9 + 0.8 * max(1, waves) + 0.35 * products + micros
    return forward / 1e3, (35 + 3 * max(1, waves) + 1.4 * products + 3 * micros) / 1e3


def _keys_seen(case: Case, tile: float) -> float:
    """Keys that a tile of 128 queries has to do with, in blocks of 64; `tile`: its number, from 1."""
    last = min(case.queries, tile * 128) + case.keys - case.queries
    end = min(case.keys, last) if case.causal else case.keys
    begin = max(0, last - min(case.queries, 128) - case.window) if case.window else 0
    return 64 * max(1, math.ceil((end - begin) / 64))


def points_of(rows: Iterable[tuple[Mapping[str, Any], float]], sources: Mapping[str, Any]) -> dict[Kind, Points]:
    """The points of every kind, from rows and their weights."""
    kinds: dict[Kind, list[tuple[Case, float, Mapping[str, list[float | None]], str]]] = {}
    for row, weight in rows:
        file = sources[row["source"]]["file"]
        kinds.setdefault(kind_of_case(row["case"]), []).append((case_of(row["case"]), weight, row["ms"], file))
    return {kind: _points(found) for kind, found in kinds.items()}


def _points(rows: list[tuple[Case, float, Mapping[str, list[float | None]], str]]) -> Points:
    backends = dict.fromkeys(name for _, _, ms, _ in rows for name in ms)
    ms = {name: np.array([_steps(times.get(name, [None, None])) for _, _, times, _ in rows]) for name in backends}
    cases = tuple(case for case, *_ in rows)
    return Points(
        cases,
        np.array([_coordinates(case) for case in cases]),
        np.array([weight for _, weight, _, _ in rows]),
        np.array([_nominal(case) for case in cases]),
        ms,
        tuple(file for *_, file in rows),
    )


def _steps(times: list[float | None]) -> tuple[float, float]:
    """Forward, and forward with backward; a backward alone is some other forward's."""
    forward, backward = (math.nan if ms is None else ms for ms in times)
    return forward, forward + backward


def estimates_at(points: Points, case: Case) -> dict[str, Estimate]:
    """Of every backend that was measured near the case."""
    apart = points.places - np.array(_coordinates(case))
    weights = points.weights * np.exp(-(apart**2).sum(1) / 2)
    nominal = _nominal(case)
    estimates = {}
    for name, ms in points.ms.items():
        forward, step = (_fitted(apart, weights, ms[:, n] / points.nominal[:, n], nominal[n]) for n in (0, 1))
        # each is fitted by itself, so the difference may come out too small
        backward = None if forward is None or step is None else max(step - forward, forward / 2)
        if forward is not None:
            estimates[name] = Estimate(forward, backward)
    return estimates


def _fitted(apart: Array, weights: Array, ratios: Array, nominal: float) -> float | None:
    known = np.isfinite(ratios) & (weights > 1e-6)
    weights, apart = weights[known], apart[known]
    if weights.sum() < _NEAR:
        return None
    logs = np.log(ratios[known])
    design = np.hstack([np.ones((len(logs), 1)), apart])
    weighted = design * weights[:, None]
    ridge = np.full(design.shape[1], _RIDGE * weights.sum())
    # the mean is free, and slopes are small where few rows have a say
    ridge[0] = 0
    log = np.linalg.solve(weighted.T @ design + np.diag(ridge), weighted.T @ logs)[0]
    # not beyond what was measured
    return nominal * math.exp(min(max(log, logs.min()), logs.max()))


def near(points: Points, case: Case) -> tuple[Case, tuple[str, ...]]:
    """The measured case nearest to this one, and the files of those that count most."""
    weights = points.weights * np.exp(-((points.places - np.array(_coordinates(case))) ** 2).sum(1) / 2)
    order = [int(n) for n in np.argsort(-weights, kind="stable")[:10]]
    return points.cases[order[0]], tuple(dict.fromkeys(points.files[n] for n in order))


# cached for the process: the tables are read once, and `save` clears it
@functools.cache
def measured(arch: int, device: str) -> Mapping[Kind, Points]:
    """All measurements of a GPU: the shipped table of its arch, and this user's of the same device."""
    shipped, own = _shipped(arch), _tuned(device)
    rows = [*((row, 1.0) for row in shipped["rows"]), *((row, _OWN) for row in own["rows"])]
    return points_of(rows, {**shipped["sources"], **own["sources"]})


_NOTHING: dict[str, Any] = {"sources": {}, "rows": []}


# importlib.resources finds the table wherever the package is installed
def _shipped(arch: int) -> dict[str, Any]:
    file = resources.files(__package__) / "measured" / f"sm_{arch}.json"
    return json.loads(file.read_text()) if file.is_file() else _NOTHING


def _tuned(device: str) -> dict[str, Any]:
    path = table_path(device)
    try:
        table: dict[str, Any] = json.loads(path.read_text())
        tuning.of_this_device(table, device)
        # rows that are none are found here, and not in a choice
        points_of(((row, 1.0) for row in table["rows"]), table["sources"])
        return table
    except FileNotFoundError:
        return _NOTHING
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration, RecursionError) as error:
        tracing.warn(
            # a damaged cache must not stop training
            f"measured attention backends {path} cannot be read ({error}), so the shipped table is used; run "
            "`powertrain tune attention` again"
        )
        return _NOTHING


def save(device: str, rows: list[dict[str, Any]], sources: Mapping[str, Mapping[str, str]]) -> Path:
    """Write a GPU's table, whole or not at all."""
    path = table_path(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    # a process that reads meanwhile sees the old table or the new one
    write_whole(path, json.dumps({"device": device, "sources": sources, "rows": rows}, indent=1).encode())
    measured.cache_clear()
    return path


def table_path(device: str) -> Path:
    """The file that `powertrain tune attention` writes for a GPU."""
    path = tuning.table_path(device)
    return path.with_name(f"attention-{path.name}")
