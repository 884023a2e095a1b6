"""Do compiled extensions find in the installed torch what they were linked against? Read from files, not imported."""

import re
from collections.abc import Iterator
from pathlib import Path

from powertrain.doctor.code import LIBRARIES
from powertrain.doctor.elf import opened, symbols
from powertrain.doctor.finding import Check, Finding
from powertrain.doctor.machine import Machine

_OURS = re.compile(rb"_ZNK?(?:3c10|2at|5torch|6caffe2)")  # C++ names of torch's own namespaces


def undefined(machine: Machine) -> Iterator[Finding]:
    """Each extension that wants a symbol of torch that the installed torch does not have."""
    torch = [file for folder in machine.packages for file in sorted((folder / "torch" / "lib").glob("lib*.so"))]
    torch = [file for file in torch if re.match(r"lib(?:c10|torch)", file.name)]
    extensions = {name: files for name in LIBRARIES if name != "torch" and (files := _files(machine, name))}
    if not torch or not extensions:
        yield Finding("ok", "no extension of torch here whose symbols could be missing")
        return
    there = {name for file in torch for name in _names(file, defined=True)}
    for library, files in extensions.items():
        missing = {file: lacks for file in files if (lacks := set(_names(file, defined=False)) - there)}
        if missing:
            says = f"{library} was compiled for another torch than {machine.version('torch')}: its import will fail"
            evidence = tuple(f"{file}: undefined symbol {min(lacks).decode()}" for file, lacks in missing.items())
            fix = f"pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps {library}"
            yield Finding("problem", says, evidence, fix)
        else:
            yield Finding("ok", f"{library} finds in torch {machine.version('torch')} what it was linked against")


def _files(machine: Machine, library: str) -> list[Path]:
    found = {file for folder in machine.packages for pattern in LIBRARIES[library] for file in folder.glob(pattern)}
    return sorted(file for file in found if any(_names(file, defined=False)))


def _names(file: Path, defined: bool) -> list[bytes]:
    try:
        with opened(file) as data:
            return [name for name in symbols(data, defined) if _OURS.match(name)] if data is not None else []
    except ValueError:
        return []  # cut short: the check `code` says so


CHECKS = (Check("symbols", "do compiled extensions fit the installed torch?", undefined),)
