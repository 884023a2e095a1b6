"""Log of kernel choices and compiles, each reported once: kernel, device, compiled or loaded, milliseconds.

`trace()` returns them; POWERTRAIN_LOG=info|debug prints them to stderr, or to POWERTRAIN_LOG_FILE.
"""

import os
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from powertrain.runtime.settings import settings


@dataclass(frozen=True)
class Event:
    kind: str  # "kernel" or "warning"
    text: str
    facts: dict[str, Any] = field(default_factory=dict)


_events: list[Event] = []
_keys: set[object] = set()
_lock = threading.Lock()


def _after_fork() -> None:
    global _lock
    # another thread may have held it
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def trace() -> list[Event]:
    """All events so far, oldest first: for a kernel its op module, arch, constants, source and milliseconds."""
    with _lock:
        return list(_events)


def clear() -> None:
    with _lock:
        _events.clear()
        _keys.clear()


def first(key: object) -> bool:
    """Whether this is the first query of the key since the events were cleared: decisions are noted once each."""
    if key in _keys:
        return False
    _keys.add(key)
    return True


def _print(text: str) -> None:
    line = f"powertrain: {text}\n"
    if log_file := settings().log_file:
        # a full disk is no reason to fail the run that writes the log: stderr has the line then
        with suppress(OSError), open(log_file, "a", encoding="utf-8") as file:
            file.write(line)
            return
    if sys.stderr is not None:
        # a closed pipe or terminal is no reason to fail the run that prints
        with suppress(OSError):
            sys.stderr.write(line)
            sys.stderr.flush()


def event(kind: str, text: str, **facts: Any) -> None:
    """Note a decision."""
    with _lock:
        _events.append(Event(kind, text, facts))
    if settings().log == "debug":
        _print(f"{text} {facts}")
    elif settings().log == "info":
        _print(text)


def warn(text: str) -> None:
    """Print a warning, once for each text."""
    with _lock:
        if any(e.kind == "warning" and e.text == text for e in _events):
            return
        _events.append(Event("warning", text))
    _print(f"warning: {text}")


def progress(text: str) -> None:
    """Print a line about a wait; always shown."""
    _print(text)
