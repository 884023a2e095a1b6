"""Shims: small scripts named like the compilers, first on a build's PATH, that start launcher.py with the real ones.

They stay where they are after the build, in a folder named after what they hold: CMake writes the compiler's path into
its cache, and that build folder must go on working, with or without us.
"""

import hashlib
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from powertrain.governor import launcher
from powertrain.governor.machine import Nvcc

_NAMES = (
    *("cc", "c++", "gcc", "g++", "clang", "clang++"),
    *(f"x86_64-linux-gnu-{name}" for name in ("gcc", "g++")),
    *(f"aarch64-linux-gnu-{name}" for name in ("gcc", "g++")),
)
_LANGUAGES = {"C": "CC", "CXX": "CXX", "CUDA": "CUDACXX"}


@dataclass(frozen=True)
class Shims:
    bin: Path  # goes first on PATH
    launch: Path  # a compiler launcher in CMake's sense
    sockets: Path


def make_shims(folder: Path, sockets: Path, path: str, nvcc: Nvcc | None) -> Shims:
    """Shims for every compiler on `path`, and for this nvcc.

    folder   where they are kept
    sockets  where launchers find their governor
    """
    known = [name for name in os.listdir("/usr/bin") if name.startswith(("gcc-", "g++-", "clang-", "clang++-"))]
    versioned = [name for name in known if name.rpartition("-")[2].isdigit()]
    real = {name: found for name in (*_NAMES, *sorted(versioned)) if (found := shutil.which(name, path=path))}
    if nvcc:
        real["nvcc"] = nvcc.path
    start = f"{shlex.quote(sys.executable)} -IS {shlex.quote(launcher.__file__)} {shlex.quote(str(sockets))}"
    guard = f"[ -x {shlex.quote(sys.executable)} ] && [ -f {shlex.quote(launcher.__file__)} ]"
    files = {f"bin/{name}": _script(guard, start, shlex.quote(found)) for name, found in real.items()}
    files["launch"] = _script(guard, start, "")
    place = folder / hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:12]
    if not place.is_dir():
        _write(place, files)
    return Shims(place / "bin", place / "launch", sockets)


def _script(guard: str, start: str, real: str) -> str:
    return f'#!/bin/sh\n{guard} && exec {start} {real} "$@"\nexec {real} "$@"\n'


def _write(place: Path, files: Mapping[str, str]) -> None:
    """All of it or nothing: written aside, then renamed."""
    aside = place.with_name(f"{place.name}.{os.getpid()}")
    for name, text in files.items():
        file = aside / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    try:
        aside.rename(place)
    except OSError:  # another build made the same meanwhile
        shutil.rmtree(aside)


def shimmed(environment: Mapping[str, str], shims: Shims, nvcc: Nvcc | None) -> dict[str, str]:
    """What to add to an environment so that compilers are reached through the shims; nothing that was set stays unset.

    torch's extensions take nvcc from PYTORCH_NVCC. CMake finds compilers on PATH, hence shims; one that the user named
    is reached through CMake's launcher variable.
    """
    added = {"PATH": f"{shims.bin}:{environment.get('PATH', os.defpath)}"}
    if nvcc:
        added["PYTORCH_NVCC"] = str(shims.bin / "nvcc")
        added["CUDACXX"] = str(shims.bin / "nvcc")
    for language, variable in _LANGUAGES.items():
        if environment.get(variable):
            added[f"CMAKE_{language}_COMPILER_LAUNCHER"] = str(shims.launch)
    return {name: value for name, value in added.items() if name == "PATH" or not environment.get(name)}
