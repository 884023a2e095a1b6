"""Every environment variable of Powertrain: name, meaning, default. They are read here and nowhere else.

Values are read when they are first needed and again after `reload()`, so that a test or a launcher may set them.
"""

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from powertrain.runtime import invalidation
from powertrain.runtime.op_names import op_names

# eleven days: no wait is meant to be longer, and the waits of threads and pipes take no infinite one
_MOST_SECONDS = 1e6
# set by builder/run.py: the variable by which the watchdog knows a build's processes
BUILD_MARK = "POWERTRAIN_BUILD"


class SettingsError(ValueError):
    """An environment variable has a wrong value; the message is one line that names it."""


def _flag(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("", "0", "false", "no", "off"):
        return False
    raise ValueError(f"must be 0 or 1, got {text!r}")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= _MOST_SECONDS:
        raise ValueError(f"must be a number of seconds above 0 and at most {_MOST_SECONDS:.0f}, got {text!r}")
    return value


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ValueError(f"must be an integer of at least 1, got {text!r}")
    return value


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _ops(text: str) -> tuple[str, ...]:
    return op_names(_names(text))


def _path(text: str) -> str:
    # a ~ is as it was written where no shell has read it: ENV of a Dockerfile, a service, a notebook's os.environ
    return os.path.expanduser(text)


def _paths(text: str) -> tuple[str, ...]:
    return tuple(_path(path) for path in text.split(os.pathsep) if path)


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, got {text!r}")
        return text

    return parse


@dataclass(frozen=True)
class Variable:
    name: str
    parse: Callable[[str], Any]
    default: Any
    meaning: str


VARIABLES = {
    "interpret": Variable(
        "POWERTRAIN_INTERPRET", _flag, False, "run kernels on CPU tensors through Triton's interpreter (for tests)"
    ),
    "disable": Variable(
        "POWERTRAIN_DISABLE", _ops, (), "comma-separated ops that take plain PyTorch instead of our kernel; or 'all'"
    ),
    "log": Variable("POWERTRAIN_LOG", _one_of("info", "debug"), None, "info or debug: print every decision once"),
    "log_file": Variable("POWERTRAIN_LOG_FILE", _path, None, "write the log to this file instead of stderr"),
    "store": Variable(
        "POWERTRAIN_STORE", _path, None, "directory of compiled kernels (default: the user's cache folder)"
    ),
    "packs": Variable("POWERTRAIN_PACKS", _paths, (), "kernel packs to read, separated as in PATH"),
    "compile_timeout": Variable("POWERTRAIN_COMPILE_TIMEOUT", _seconds, 300.0, "seconds one kernel may compile"),
    "lock_timeout": Variable(
        "POWERTRAIN_LOCK_TIMEOUT", _seconds, 60.0, "seconds to wait for another process that compiles the same kernel"
    ),
    "on_compile_failure": Variable(
        "POWERTRAIN_ON_COMPILE_FAILURE",
        _one_of("raise", "reference"),
        "raise",
        "raise, or reference: send the op to plain PyTorch with a warning",
    ),
    "attention": Variable(
        "POWERTRAIN_ATTENTION",
        _names,
        (),
        "comma-separated attention backends to try first, -name for one never to take: triton,cudnn,-flash",
    ),
    "jobs": Variable("POWERTRAIN_JOBS", _count, None, "parallel compiles (default: as memory and cores allow)"),
}


@dataclass(frozen=True)
class Settings:
    interpret: bool
    disable: tuple[str, ...]
    log: Literal["info", "debug"] | None
    log_file: str | None
    store: str | None
    packs: tuple[str, ...]
    compile_timeout: float
    lock_timeout: float
    on_compile_failure: Literal["raise", "reference"]
    attention: tuple[str, ...]
    jobs: int | None


def _read() -> Settings:
    values = {}
    for field in fields(Settings):
        variable = VARIABLES[field.name]
        text = os.environ.get(variable.name)
        try:
            values[field.name] = variable.default if not text else variable.parse(text)
        except ValueError as error:
            raise SettingsError(f"environment variable {variable.name} {error}") from None
    return Settings(**values)


def unknown_variables() -> dict[str, str]:
    """Variables of the environment with our prefix that nothing reads -> the nearest name that is read, or nothing."""
    known = {variable.name for variable in VARIABLES.values()} | {BUILD_MARK}
    strange = (name for name in os.environ if name.startswith("POWERTRAIN_") and name not in known)
    return {name: next(iter(difflib.get_close_matches(name, known)), "") for name in sorted(strange)}


_current: Settings | None = None


def settings() -> Settings:
    """The settings now in force. Raises SettingsError for a variable whose value is wrong."""
    global _current
    if _current is None:
        _current = _read()
    return _current


def reload() -> Settings:
    """Read the environment again."""
    global _current
    _current = None
    invalidation.changed()
    return settings()


def forget_no_columns() -> None:
    """Unset COLUMNS=0, which rich takes for the width of the screen: it would print nothing at all."""
    if os.environ.get("COLUMNS") == "0":
        del os.environ["COLUMNS"]


def width_is_asked_for() -> bool:
    """Whether the environment variable COLUMNS sets the width of the output, also in a pipe."""
    return "COLUMNS" in os.environ
