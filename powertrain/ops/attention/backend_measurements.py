"""Measured times of attention backends as data, and a small cost model of them.

A table is a JSON file: measured/sm_90.json in the package, or the file that `powertrain tune attention` wrote for a GPU
into the user's cache, which takes the place of the shipped one for the cases that it has.

    device   the GPU
    sources  name -> file, date, commit, versions
    rows     source; case: dtype (half, tf32, float32), mask (causal, full), features (alibi, softcap, window, packed),
             batch, queries, keys, heads, kv_heads, head_dim_qk, head_dim_v, and where there are any `window` and the
             `lengths` of packed sequences; ms: backend -> [forward, backward], null where it was not measured

    time = work / rate

Work: the FLOPs of the pairs that the mask lets see. Rate: of one backend, kind of mask and class of head dims, the mean
of the rows with as many queries, linear in the logarithm of the queries between them, and unknown beyond half and twice
of the measured cases.
"""

import functools
import json
import math
import os
import uuid
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from powertrain.runtime import tracing, tuning

# a kernel computes a head dim in the width of its tile, so the time per FLOP jumps between two widths
_DIMS = (64, 80, 96, 128, 160, 192, 256, 512)  # as the tiles of the kernels that were measured
Points = Mapping[int, float]  # queries -> FLOPs per millisecond
# beyond twice the measured lengths the fixed order stands instead of an extrapolation
_BEYOND = 2.0  # how many times as many or as few queries as measured a rate holds for


class Kind(NamedTuple):
    """Facts that two measurements of one curve have in common."""

    dtype: str  # half, tf32 or float32
    mask: str  # causal or full
    features: tuple[str, ...]
    # two kinds of shapes behave unlike: square attention, and few queries beside long keys, where only kernels that
    # split keys fill the GPU
    keys: str  # "many": about as many as queries; "beside": four times as many or more
    dims: tuple[int, int]  # head dims, rounded up to a class

    def __str__(self) -> str:
        words = [self.mask, *self.features, f"head dims to {self.dims[0]}/{self.dims[1]}"]
        return ", ".join([*words, "few queries beside long keys"] if self.keys == "beside" else words)


class Curves(NamedTuple):
    """The measured rates of one kind."""

    forward: Mapping[str, Points]  # by backend
    backward: Mapping[str, Points]
    head_dims: frozenset[tuple[int, int]]
    sources: tuple[str, ...]


class Estimate(NamedTuple):
    """Estimated rates of a backend at one number of queries, in FLOPs per millisecond; None: not measured."""

    forward: float | None
    backward: float | None

    def cost(self, needs_grad: bool) -> float | None:
        """Milliseconds per FLOP of the forward, or of it and a backward of 2.5 times its work; None: not known."""
        # half an estimate would compare a forward with a forward and backward
        if self.forward is None or (needs_grad and self.backward is None):
            return None
        # the backward has five products to the forward's two
        return 1 / self.forward + (2.5 / self.backward if needs_grad and self.backward else 0.0)


def dims_class(head_dim_qk: int, head_dim_v: int) -> tuple[int, int]:
    # the first class that is wide enough: head dims are limited to 512, the last class
    qk, v = (next(width for width in _DIMS if dim <= width) for dim in (head_dim_qk, head_dim_v))
    return qk, v


def kind_of_case(case: Mapping[str, Any]) -> Kind:
    # the same threshold as `Lengths.few`
    keys = "beside" if case["keys"] >= 4 * case["queries"] else "many"
    # sorted, for a case is written by hand or by the tuner in any order
    features = tuple(sorted(case.get("features", ())))
    return Kind(case["dtype"], case["mask"], features, keys, dims_class(case["head_dim_qk"], case["head_dim_v"]))


def pairs(case: Mapping[str, Any]) -> float:
    """(query, key) pairs of all heads that the mask lets see."""
    # packed: the lengths count every sequence, a batch size none
    batch = case["heads"] * (1 if "lengths" in case else case["batch"])
    total = 0.0
    for queries, keys in [(n, n) for n in case.get("lengths", ())] or [(case["queries"], case["keys"])]:
        if case.get("window"):
            # an upper bound: the first rows of a window see fewer keys, a relative error of half of window / queries
            total += queries * min(keys, case["window"])
        elif case["mask"] == "causal" and queries == keys:
            total += queries * (queries + 1) / 2
        else:
            total += queries * keys
    return batch * total


def work(case: Mapping[str, Any]) -> tuple[float, float]:
    """FLOPs of forward and backward: two products, and five."""
    d_qk, d_v = case["head_dim_qk"], case["head_dim_v"]
    return 2 * pairs(case) * (d_qk + d_v), 2 * pairs(case) * (3 * d_qk + 2 * d_v)


def rate_at(points: Points, queries: int) -> float | None:
    """Linear in the logarithm between the measured numbers of queries, constant a little beyond them."""
    # None makes the fixed order stand, which is safer than a guess
    if not points or not min(points) / _BEYOND <= queries <= max(points) * _BEYOND:
        return None
    below = max((n for n in points if n <= queries), default=min(points))
    above = min((n for n in points if n >= queries), default=max(points))
    # at or outside the ends of the curve: constant
    if below == above:
        return points[below]
    share = math.log(queries / below) / math.log(above / below)
    return points[below] + share * (points[above] - points[below])


def curves_of(rows: Iterable[Mapping[str, Any]], sources: Mapping[str, Mapping[str, str]]) -> dict[Kind, Curves]:
    """The rates of every kind that the rows have."""
    rates: dict[Kind, tuple[dict[str, dict[int, list[float]]], ...]] = {}
    about: dict[Kind, tuple[set[tuple[int, int]], dict[str, None]]] = {}
    for row in rows:
        case, kind = row["case"], kind_of_case(row["case"])
        # a dict keeps the order of first appearance, which explain prints; a set would not
        head_dims, names = about.setdefault(kind, (set(), {}))
        head_dims.add((case["head_dim_qk"], case["head_dim_v"]))
        names[sources[row["source"]]["file"]] = None
        for backend, times in row["ms"].items():
            for direction, (flops, ms) in enumerate(zip(work(case), times, strict=True)):
                if ms is not None:
                    points = rates.setdefault(kind, ({}, {}))[direction].setdefault(backend, {})
                    points.setdefault(case["queries"], []).append(flops / ms)
    made = {}
    for kind, directions in rates.items():
        forward, backward = (
            {name: {n: _mean(values) for n, values in points.items()} for name, points in direction.items()}
            for direction in directions
        )
        made[kind] = Curves(forward, backward, frozenset(about[kind][0]), tuple(about[kind][1]))
    return made


def _mean(values: list[float]) -> float:
    # geometric: a case that is twice as fast and one half as fast cancel
    return math.exp(sum(map(math.log, values)) / len(values))


# cached for the process: the tables are read once, and `save` clears it
@functools.cache
def measured(arch: int, device: str) -> Mapping[Kind, Curves]:
    """All measurements of a GPU: the shipped table of its arch, and this user's of the same device before it."""
    # the user's own rows win kind by kind, and kinds that were not tuned keep the shipped curve
    return {**_shipped(arch), **_tuned(device)}


# importlib.resources finds the table wherever the package is installed
def _shipped(arch: int) -> dict[Kind, Curves]:
    file = resources.files(__package__) / "measured" / f"sm_{arch}.json"
    if not file.is_file():
        return {}
    table = json.loads(file.read_text())
    return curves_of(table["rows"], table["sources"])


def _tuned(device: str) -> dict[Kind, Curves]:
    path = table_path(device)
    try:
        table = json.loads(path.read_text())
        return curves_of(table["rows"], table["sources"])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        tracing.warn(
            # a damaged cache must not stop training
            f"measured attention backends {path} cannot be read ({error}), so the shipped table is used; run "
            "`powertrain tune attention` again"
        )
        return {}


def save(device: str, rows: list[dict[str, Any]], sources: Mapping[str, Mapping[str, str]]) -> Path:
    """Write a GPU's table, whole or not at all."""
    path = table_path(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    # renamed into place, so that a process that reads meanwhile sees the old table or the new one
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    temporary.write_text(json.dumps({"device": device, "sources": sources, "rows": rows}, indent=1))
    os.replace(temporary, path)
    measured.cache_clear()
    return path


def table_path(device: str) -> Path:
    """The file that `powertrain tune attention` writes for a GPU."""
    path = tuning.table_path(device)
    return path.with_name(f"attention-{path.name}")
