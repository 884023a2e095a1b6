"""Shims: small scripts named like the compilers, first on a build's PATH, that start launcher.py with the real ones.

They stay where they are after the build, in a folder named after their content: CMake writes the compiler's path into
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

from powertrain.builder import launcher
from powertrain.builder.host import Nvcc

_NAMES = (
    *("cc", "c++", "gcc", "g++", "clang", "clang++"),
    *(f"x86_64-linux-gnu-{name}" for name in ("gcc", "g++")),
    *(f"aarch64-linux-gnu-{name}" for name in ("gcc", "g++")),
)
_LANGUAGES = {"C": "CC", "CXX": "CXX", "CUDA": "CUDACXX"}
_NAMED = (*_LANGUAGES.values(), "PYTORCH_NVCC")  # variables in which a user names a compiler


@dataclass(frozen=True)
class Shims:
    bin: Path  # goes first on PATH
    launch: Path  # a compiler launcher in CMake's sense
    sockets: Path
    named: Mapping[str, str]  # for CC, CXX and the like, where the user named a compiler in them


def make_shims(folder: Path, sockets: Path, environment: Mapping[str, str], nvcc: Nvcc | None) -> Shims:
    """Shims for every compiler on PATH, for those that CC, CXX and the like name, and for this nvcc.

    folder       where they are kept
    sockets      where launchers find their builder
    environment  the build's
    """
    path = environment.get("PATH", os.defpath)
    known = [name for name in os.listdir("/usr/bin") if name.startswith(("gcc-", "g++-", "clang-", "clang++-"))]
    versioned = [name for name in known if name.rpartition("-")[2].isdigit()]
    real = {name: program for name in (*_NAMES, *sorted(versioned)) if (program := shutil.which(name, path=path))}
    if nvcc:
        real["nvcc"] = nvcc.path
    start = f"{shlex.quote(sys.executable)} -IS {shlex.quote(launcher.__file__)} {shlex.quote(str(sockets))}"
    guard = f"[ -x {shlex.quote(sys.executable)} ] && [ -f {shlex.quote(launcher.__file__)} ]"
    files = {f"bin/{name}": _script(guard, start, shlex.quote(program)) for name, program in real.items()}
    files["launch"] = _script(guard, start, "")
    chosen = {name: program for name in _NAMED if (program := shutil.which(environment.get(name, ""), path=path))}
    named = {name: f"{name}/{os.path.basename(program)}" for name, program in chosen.items()}
    files |= {named[name]: _script(guard, start, shlex.quote(program)) for name, program in chosen.items()}
    # named by content: a CMake cache that holds these paths stays valid, and other contents get another folder
    target = folder / hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:12]
    if not target.is_dir():
        _write(target, files)
    ours = {name: str(target / file) for name, file in named.items()}
    return Shims(target / "bin", target / "launch", sockets, ours)


def _script(guard: str, start: str, real: str) -> str:
    return f'#!/bin/sh\n{guard} && exec {start} {real} "$@"\nexec {real} "$@"\n'


def _write(target: Path, files: Mapping[str, str]) -> None:
    """Write the folder under a temporary name, then rename it: it exists complete or not at all."""
    aside = target.with_name(f"{target.name}.{os.getpid()}")
    for name, text in files.items():
        file = aside / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    try:
        aside.rename(target)
    except OSError:
        # another build has made the same folder meanwhile
        shutil.rmtree(aside)


def shimmed(environment: Mapping[str, str], shims: Shims, nvcc: Nvcc | None) -> dict[str, str]:
    """Variables for an environment in which compilers are reached through the shims.

    A compiler that the user named stays the one that runs. torch's extensions take nvcc from PYTORCH_NVCC. CMake finds
    compilers on PATH or in CC, CXX and CUDACXX, hence shims; its launcher variables serve compilers of other names:
    TransformerEngine hands CMake the path of nvcc itself, and "ccache g++" is no program.
    """
    added = {"PATH": f"{shims.bin}:{environment.get('PATH', os.defpath)}", **shims.named}
    if nvcc:
        added |= {name: str(shims.bin / "nvcc") for name in ("PYTORCH_NVCC", "CUDACXX") if not environment.get(name)}
    for language, variable in _LANGUAGES.items():
        launcher = f"CMAKE_{language}_COMPILER_LAUNCHER"
        elsewhere = language == "CUDA" or (environment.get(variable) and variable not in shims.named)
        if elsewhere and not environment.get(launcher):
            added[launcher] = str(shims.launch)
    return added
