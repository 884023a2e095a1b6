"""Tile tables: the shipped ones are the ops' own plan functions; `powertrain tune` measures this GPU's.

An op decides its tiles in a function `plan(..., target) -> NamedTuple`, marked `@tunable(where it was measured)`.
Faster plans measured by `powertrain tune` are kept in one file per GPU model, as the fields that differ from the
shipped plan, keyed by the plan's arguments with sizes rounded up to a power of two. Nothing is tuned unless asked.
"""

import functools
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from powertrain.runtime import invalidation, tracing
from powertrain.runtime.atomic_file import write_whole
from powertrain.runtime.compile import kernel_store
from powertrain.runtime.target import Target

# seconds to wait for another process that merges its plans, which takes milliseconds
_PATIENCE = 10.0
P = TypeVar("P", bound=Callable[..., Any])
Changes = dict[str, int]

# plan function -> where its shipped values were measured, and the fields that may be changed one by one
shipped: dict[str, tuple[str, tuple[str, ...]]] = {}
# while tuning: plan function -> changes in force, and every call that was met
forced: dict[str, Changes] = {}
met: dict[tuple[str, str], Any] = {}
_tuning = False


def _key(args: tuple[Any, ...]) -> str:
    """Arguments as text, without the target; integers by size class, so that they fit the neighbours' batch sizes."""
    parts = [a for a in args if not isinstance(a, Target)]
    return ",".join(str(1 << (a - 1).bit_length()) if type(a) is int and a > 0 else str(a) for a in parts)


def tunable(measured: str, fields: tuple[str, ...] = ("num_warps",)) -> Callable[[P], P]:
    """Mark a plan function, whose last argument is the target.

    `measured` says on which GPU and when its values were measured, or that they never were; `fields` of the plan can
    be halved or doubled with nothing else depending on them.
    """

    def decorate(plan: P) -> P:
        name = f"{plan.__module__.removeprefix('powertrain.ops.')}.{plan.__name__}"
        shipped[name] = measured, fields

        @functools.wraps(plan)
        def call(*args: Any) -> Any:
            default = plan(*args)
            if _tuning:
                met[name, _key(args)] = default
                return default._replace(**forced.get(name, {}))
            table = tuned(args[-1].name).get(name)
            # the key of every call would cost host time
            changes = table.get(_key(args)) if table else None
            return default._replace(**_of_this_release(default, name, changes)) if changes else default

        return call  # type: ignore[return-value]

    return decorate


def _of_this_release(plan: Any, name: str, changes: Changes) -> Changes:
    """The changes of fields that the plan has; a table outlives releases."""
    known = {field: value for field, value in changes.items() if field in plan._fields}
    if len(known) < len(changes):
        lost = ", ".join(sorted(changes.keys() - known.keys()))
        tracing.warn(f"tuned tiles: {name} has no {lost} in this release; run `powertrain tune` again")
    return known


def table_path(device: str) -> Path:
    """The file of a GPU's tuned plans."""
    return kernel_store.default_root().parent / "tuned" / (re.sub(r"[^A-Za-z0-9]+", "-", device) + ".json")


@functools.cache
def tuned(device: str) -> dict[str, dict[str, Changes]]:
    """Tuned fields for a GPU: plan function -> key -> changed fields. An unreadable file is reported once."""
    path = table_path(device)
    try:
        kept = json.loads(path.read_text())
        of_this_device(kept, device)
        plans = {
            name: {key: _checked(changes) for key, changes in table.items()} for name, table in kept["plans"].items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        tracing.warn(
            f"tuned tiles {path} cannot be read ({error}), so the shipped tiles are used; run `powertrain tune` again"
        )
        return {}
    tracing.event("tuned", f"tuned tiles of {device} from {path}", plans=plans)
    return plans


def of_this_device(table: dict[str, Any], device: str) -> None:
    """Raise ValueError for a table that was measured on another GPU: one that was copied here."""
    if table.get("device", device) != device:
        raise ValueError(f"device must be {device}, got {table['device']!r}")


def _checked(changes: Any) -> Changes:
    if not all(type(value) is int and value > 0 for value in changes.values()):
        raise ValueError(f"a plan's fields must be integers above 0, got {changes}")
    return dict(changes)


def save(device: str, plans: dict[str, dict[str, Changes]], about: dict[str, Any]) -> Path:
    """Merge plans into a GPU's file, whole or not at all."""
    from powertrain.runtime.compile.worker import key_lock

    path = table_path(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    # GPUs of one host that are tuned for the same time end together
    with key_lock(path.with_suffix(".lock"), time.monotonic() + _PATIENCE):
        # read again: another process may have tuned another op meanwhile
        tuned.cache_clear()
        merged = {name: {**tuned(device).get(name, {}), **table} for name, table in {**tuned(device), **plans}.items()}
        write_whole(path, json.dumps({**about, "device": device, "plans": merged}, indent=1, sort_keys=True).encode())
    tuned.cache_clear()
    invalidation.changed()
    return path


def neighbours(plan: Any, fields: tuple[str, ...]) -> list[Changes]:
    """The plan itself, then plans near it: a half or twice of one field, and of rows and warps together."""
    limits = {"num_warps": 16, "pipeline": 4}
    changes: list[Changes] = [{}]
    for factor in (0.5, 2):
        near = {name: int(getattr(plan, name) * factor) for name in fields}
        near = {name: value for name, value in near.items() if 1 <= value <= limits.get(name, value)}
        changes += [{name: value} for name, value in near.items()]
        if {"block_m", "num_warps"} <= near.keys():
            changes.append({name: near[name] for name in ("block_m", "num_warps")})
    return changes


class session:
    """While tuning: plans are the shipped ones, with `forced` changes, and the calls met are noted."""

    def __enter__(self) -> None:
        global _tuning
        met.clear()
        forced.clear()
        _tuning = invalidation.unsettled = True

    def __exit__(self, *error: object) -> None:
        global _tuning
        _tuning = invalidation.unsettled = False
        forced.clear()
