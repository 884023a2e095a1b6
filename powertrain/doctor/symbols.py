"""Whether the installed torch defines the symbols that compiled extensions need. Read from files, not imported."""

import re
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from powertrain.doctor.builds import build_folders
from powertrain.doctor.code import LIBRARIES
from powertrain.doctor.elf import opened, symbols
from powertrain.doctor.finding import Check, Finding
from powertrain.runtime.machine import Machine

_OURS = re.compile(rb"_ZNK?(?:3c10|2at|5torch|6caffe2)")  # C++ names of torch's own namespaces


def undefined(machine: Machine) -> Iterator[Finding]:
    """Each extension that wants a symbol of torch that the installed torch does not have."""
    torch = [file for folder in machine.packages for file in sorted((folder / "torch" / "lib").glob("lib*.so"))]
    torch = [file for file in torch if re.match(r"lib(?:c10|torch)", file.name)]
    extensions = {name: files for name in LIBRARIES if name != "torch" and (files := _files(machine, name))}
    built = {folder: files for folder in build_folders(machine) if (files := _wanting(folder.glob("*.so")))}
    if not torch or not (extensions or built):
        yield Finding("ok", "no extension of torch here whose symbols could be missing")
        return
    there = {name for file in torch for name in _names(file, defined=True)}
    version = machine.version("torch")
    for library, files in extensions.items():
        if evidence := _missing(files, there):
            message = f"{library} was compiled for another torch than {version}: its import will fail"
            fix = f"pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps {library}"
            yield Finding("problem", message, evidence, fix)
        else:
            yield Finding("ok", f"{library} finds its symbols in torch {version}")
    for folder, files in built.items():
        if evidence := _missing(files, there):
            message = (
                f"{folder} was built for another torch than {version}; ninja sees its sources unchanged and keeps it"
            )
            aside = partial(_set_aside, folder)
            yield Finding("problem", message, evidence, f"mv {folder} {folder}.stale", aside)


def _missing(files: list[Path], there: set[bytes]) -> tuple[str, ...]:
    lacking = {file: set(_names(file, defined=False)) - there for file in files}
    return tuple(f"{file}: undefined symbol {min(names).decode()}" for file, names in lacking.items() if names)


def _set_aside(folder: Path) -> str:
    if (folder / "lock").exists():
        return f"{folder}: left alone, it is locked"
    aside = folder.with_name(f"{folder.name}.stale-{time.strftime('%Y%m%d-%H%M%S')}")
    folder.rename(aside)
    return f"{folder}: renamed to {aside.name}; it is built anew when it is next loaded"


def _files(machine: Machine, library: str) -> list[Path]:
    return _wanting({file for folder in machine.packages for one in LIBRARIES[library] for file in folder.glob(one)})


def _wanting(files: Iterable[Path]) -> list[Path]:
    """Libraries that need symbols of torch."""
    return sorted(file for file in files if _names(file, defined=False))


def _names(file: Path, defined: bool) -> list[bytes]:
    try:
        with opened(file) as data:
            return [name for name in symbols(data, defined) if _OURS.match(name)] if data is not None else []
    except (ValueError, OSError):
        # cut short: the check `code` says so
        return []


CHECKS = (Check("symbols", "do compiled extensions fit the installed torch?", undefined),)
