"""The plan of a build, made before anything runs: number of parallel compilers, target GPUs, reasons to refuse.

Formats, each as its reader parses it: NVTE_CUDA_ARCHS "75;86" (TransformerEngine's setup.py), CUDAARCHS "75;86"
(CMake), TORCH_CUDA_ARCH_LIST "7.5 8.6" (torch.utils.cpp_extension), FLASH_ATTN_CUDA_ARCHS "80;90", families only
(flash-attention's setup.py). vLLM divides MAX_JOBS by NVCC_THREADS (its issue 20079).
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from powertrain.builder.host import HEADERS, BuildHost
from powertrain.builder.recipes import Recipe, recipe_of
from powertrain.builder.wheels import Wheel
from powertrain.runtime.jobs import SHARE

_GIB = 2**30


@dataclass(frozen=True)
class Variable:
    name: str
    value: str
    why: str
    yours: bool = False  # it was set already, and stays as it is


@dataclass(frozen=True)
class Refusal:
    """Why the build cannot work, and the remedy."""

    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.problem}. Fix: {self.fix}"


@dataclass(frozen=True)
class Estimate:
    """Memory of one job and time of the build, and the source of the figures."""

    bytes: int
    seconds: float | None  # of the whole build, on this machine
    why: str
    time_why: str = "not measured"
    rough: bool = False  # the time is the recipe's, of other machines


@dataclass(frozen=True)
class Plan:
    command: tuple[str, ...]
    recipe: Recipe
    host: BuildHost
    estimate: Estimate
    archs: tuple[int, ...]
    jobs: int
    variables: tuple[Variable, ...]
    refusals: tuple[Refusal, ...]
    notes: tuple[str, ...]
    taken: Wheel | None = None  # a prebuilt wheel that the command takes, so that nothing is compiled

    @property
    def environment(self) -> dict[str, str]:
        """Variables for the command's environment, except those already set."""
        return {variable.name: variable.value for variable in self.variables if not variable.yours}


def make_plan(
    command: Sequence[str],
    environment: Mapping[str, str],
    host: BuildHost,
    measured: Estimate | None = None,
    wheel: Wheel | None = None,
) -> Plan:
    """The plan for `command` on `host`.

    measured  figures of earlier builds of the same (builder/history.py), instead of the recipe's numbers
    wheel     a prebuilt one (builder/wheels.py). Where the command takes it, nothing is compiled, and what only a
              compiler needs may be missing
    """
    recipe = recipe_of(command)
    estimate = measured or Estimate(recipe.bytes, None, recipe.source)
    # a share below 1: the rest of the machine needs memory too, and a job's size is an estimate
    fit = int(host.memory * SHARE // estimate.bytes)
    # one job at least, even where it may not fit: swap may carry it
    slots = max(1, min(host.cores, fit))
    if estimate.seconds is None:
        estimate = replace(estimate, seconds=recipe.seconds(slots), time_why=recipe.time_source, rough=True)
    variables = [
        *_parallelism(slots, fit, host, estimate),
        *_arch_lists(host),
        *_toolkit(host),
        *_headers(recipe, host),
    ]
    kept = [_kept(variable, environment) for variable in variables]
    refusals = [*_refusals(recipe, host), *_arch_refusals(recipe, host)]
    # kept apart: a setup.py that downloads its own wheel still imports torch first, one that pip downloads does not
    before = _torch_refusals(recipe, host, _isolated(command, environment, recipe))
    notes = _notes(recipe, host, estimate, fit, _isolated(command, environment, recipe))
    # a wheel that the command would not take by itself is only mentioned
    taken = wheel if wheel and wheel.automatic else None
    if taken:
        # no compiler runs, so what only a compiler needs is no reason to refuse
        refusals, notes = [], [f"nothing is compiled: this command takes {taken.name}"]
        before = before if taken.by_setup else []
    refusals = [*before, *refusals]
    # the user's number wins; memory is still granted job by job
    asked = environment.get("MAX_JOBS", "")
    jobs = int(asked) if asked.isdigit() and int(asked) else slots
    return Plan(
        tuple(command), recipe, host, estimate, host.archs, jobs, tuple(kept), tuple(refusals), tuple(notes), taken
    )


def _kept(variable: Variable, environment: Mapping[str, str]) -> Variable:
    # a variable that is set but empty is unset to most build scripts
    yours = environment.get(variable.name)
    if not yours:
        return variable
    return Variable(variable.name, yours, f"yours; it would be {variable.value}", yours=True)


def _parallelism(slots: int, fit: int, host: BuildHost, estimate: Estimate) -> list[Variable]:
    why = (
        f"{host.cores} {host.cores_why}; {SHARE} of {_gib(host.memory)} ({host.memory_why}) holds {fit} "
        f"of {_gib(estimate.bytes)}"
    )
    one = "one thread a job, so that MAX_JOBS alone bounds memory (threads multiply it)"
    return [
        Variable("MAX_JOBS", str(slots), why),
        # CMake does not read MAX_JOBS, a variable of torch's extensions and of setup.py files
        Variable("CMAKE_BUILD_PARALLEL_LEVEL", str(slots), "the same for cmake --build"),
        Variable("NVCC_THREADS", "1", one),
        Variable("NVTE_BUILD_THREADS_PER_JOB", "1", one),
    ]


def _arch_lists(host: BuildHost) -> list[Variable]:
    archs = host.archs
    # without a GPU there is nothing to guess from: the project's own default stands
    if not archs:
        return []
    plain = ";".join(map(str, archs))
    why = f"{', '.join(map(str, dict.fromkeys(host.gpus)))} ({host.gpus_why})"
    # torch's spelling; CMake and TransformerEngine write the same archs without a dot
    dotted = " ".join(f"{arch // 10}.{arch % 10}" for arch in archs)
    ptx = "no +PTX: machine code for these GPUs only. +PTX adds text that a newer GPU's driver compiles at first use"
    variables = [
        Variable("TORCH_CUDA_ARCH_LIST", dotted, f"{why}; {ptx}"),
        Variable("NVTE_CUDA_ARCHS", plain, why),
        Variable("CUDAARCHS", plain, f"CMake's own variable; {why}"),
        Variable("CMAKE_CUDA_ARCHITECTURES", plain, "for setup.py files that hand it to CMake"),
    ]
    families = sorted({family for arch in archs if (family := _flash_family(arch))})
    if families:
        families_why = "flash-attn knows families: 80 serves 86, 87 and 89; 100 serves 103; 120 serves 121"
        variables.append(Variable("FLASH_ATTN_CUDA_ARCHS", ";".join(map(str, families)), families_why))
    return variables


def _flash_family(arch: int) -> int | None:
    # flash-attention 2 begins at sm_80; sm_110 is a family by itself there
    return None if arch < 80 else arch if arch == 110 else arch // 10 * 10


def _toolkit(host: BuildHost) -> list[Variable]:
    nvcc = host.nvcc
    if not nvcc:
        return []
    why = f"the toolkit of {nvcc.path}, {_version(nvcc.version)}"
    return [Variable("CUDA_HOME", nvcc.home, why), Variable("CUDA_PATH", nvcc.home, why)]


def _headers(recipe: Recipe, host: BuildHost) -> list[Variable]:
    """Headers that lie in torch's own wheels, where no compiler looks."""
    # headers in /usr/include are found without help, so only those of wheels get a variable
    site = f"{host.python.site}/" if host.python else "none"
    wheels = {name: Path(path) for name in recipe.headers if (path := host.headers.get(name)) and path.startswith(site)}
    if not wheels:
        return []
    why = f"{', '.join(wheels)}: in the wheels that torch came with, where no compiler looks"
    folders = dict.fromkeys(str(path.parent) for path in wheels.values())
    # gcc and nvcc both read CPATH, and no build script has to pass it on
    variables = [Variable("CPATH", ":".join(folders), why)]
    if "cudnn.h" in wheels:
        variables.append(Variable("CUDNN_PATH", str(wheels["cudnn.h"].parent.parent), "the same, for CMake"))
    return variables


def _isolated(command: Sequence[str], environment: Mapping[str, str], recipe: Recipe) -> bool:
    """Whether pip or uv builds in an environment of its own, without the packages that are installed."""
    # by name, since pip is often called with its path
    words = [Path(command[0]).name, *command[1:]]
    pip = re.fullmatch(r"pip[\d.]*", words[0]) or words[:2] == ["uv", "pip"] or words[1:3] == ["-m", "pip"]
    if not pip or not {"install", "wheel"} & set(words):
        return False
    if environment.get("PIP_NO_BUILD_ISOLATION") or environment.get("UV_NO_BUILD_ISOLATION"):
        return False
    # the package follows "=" or is the next word
    names = {word.partition("=")[2] or following for word, following in pairwise([*words, ""])
             if word.startswith("--no-build-isolation-package")}  # fmt: skip
    mine = any(name.lower().replace("_", "-") == recipe.package for name in names)
    return "--no-build-isolation" not in words and not mine


def _torch_refusals(recipe: Recipe, host: BuildHost, isolated: bool) -> list[Refusal]:
    """Refusals about torch that are known before a compiler runs: torch is missing, or has no CUDA."""
    python = host.python
    if not python or not recipe.torch:
        return []
    # in pip's own environment the installed torch is not seen, so whether there is one does not matter
    if isolated:
        # such a project lists torch among its build requirements, and pip downloads one
        if recipe.torch != "yours":
            return []
        problem = f"{recipe.name} imports torch to build, and pip builds in an environment of its own, which has none"
        return [Refusal(problem, "add --no-build-isolation (after pip install torch wheel packaging ninja psutil)")]
    if python.torch is None:
        problem = f"{python.path} has no torch, and {recipe.name} imports it to build"
        return (
            [Refusal(problem, f"{python.path} -m pip install torch, of your driver's CUDA")]
            if recipe.needs_nvcc
            else []
        )
    if not python.torch_cuda and recipe.needs_nvcc:
        problem = f"torch {python.torch} is a build without CUDA, and {recipe.name} compiles for CUDA with it"
        index = "https://download.pytorch.org/whl/cuXXX"
        return [Refusal(problem, f"pip install --force-reinstall torch --index-url {index}, of your driver's CUDA")]
    return []


def _refusals(recipe: Recipe, host: BuildHost) -> list[Refusal]:
    refusals = []
    nvcc, compiler, python = host.nvcc, host.compiler, host.python
    if recipe.needs_nvcc and not nvcc:
        wants = f"CUDA {python.torch_cuda}" if python and python.torch_cuda else "torch's CUDA version"
        fix = f"install the toolkit of {wants} and set CUDA_HOME, or take a wheel: {recipe.wheels or 'none known'}"
        refusals.append(Refusal("no nvcc in CUDA_HOME, on PATH or in /usr/local/cuda", fix))
    if nvcc and python and python.torch_cuda and recipe.needs_nvcc:
        major = int(python.torch_cuda.split(".")[0])
        # only the major version: torch.utils.cpp_extension refuses another one and only warns about another minor
        if major != nvcc.version[0]:
            problem = (
                f"nvcc {_version(nvcc.version)} ({nvcc.path}) cannot build for torch {python.torch}, "
                f"made with CUDA {python.torch_cuda}"
            )
            refusals.append(
                Refusal(
                    problem, f"set CUDA_HOME to a CUDA {major}.x toolkit, or install a torch for cu{nvcc.version[0]}x"
                )
            )
    # nvcc's own host_config.h ends the compile with #error, but only after everything before it was built
    if nvcc and compiler and nvcc.newest_gcc and compiler.gcc and compiler.gcc > nvcc.newest_gcc:
        newest = nvcc.newest_gcc
        problem = (
            f"gcc {compiler.gcc} ({compiler.path}) is newer than nvcc {_version(nvcc.version)} accepts (gcc {newest})"
        )
        refusals.append(Refusal(problem, f"install g++-{newest} and set CC=gcc-{newest} CXX=g++-{newest}"))
    if recipe.needs_nvcc and not compiler:
        refusals.append(Refusal("no C++ compiler on PATH", "install g++, or set CXX"))
    if recipe.needs_nvcc and python and not python.headers:
        version = ".".join(python.version.split(".")[:2])
        refusals.append(
            Refusal(f"{python.path} has no Python.h", f"install python{version}-dev (Debian) or python{version}-devel")
        )
    for header in recipe.headers:
        if host.headers.get(header) is None:
            library = HEADERS[header]
            fix = (
                f"install the {library} development package, or set {library.upper()}_PATH to the folder above include/"
            )
            refusals.append(Refusal(f"{header} is nowhere that {recipe.name} looks", fix))
    if host.disk is None:
        # gcc and Python take /tmp instead, nvcc ends
        refusals.append(
            Refusal(f"TMPDIR {host.tmp} is no folder", f"mkdir -p {shlex.quote(host.tmp)}, or unset TMPDIR")
        )
    # a full disk ends a build after an hour, often with a message about something else
    elif host.disk < recipe.disk * _GIB:
        problem = f"{host.tmp} has {_gib(host.disk)} free; {recipe.name} wants {recipe.disk:g} GiB"
        refusals.append(Refusal(problem, "set TMPDIR to a folder on a larger disk"))
    return refusals


def _arch_refusals(recipe: Recipe, host: BuildHost) -> list[Refusal]:
    refusals, nvcc = [], host.nvcc
    for arch in host.archs:
        if nvcc and nvcc.archs and arch not in nvcc.archs:
            # CUDA 13 has dropped archs before sm_75, so a toolkit can be too new as well
            side = "old" if arch > nvcc.archs[-1] else "new"
            problem = f"nvcc {_version(nvcc.version)} is too {side} for sm_{arch}: it knows {_archs(nvcc.archs)}"
            refusals.append(Refusal(problem, f"install a CUDA toolkit that lists sm_{arch} and set CUDA_HOME"))
        if recipe.archs and arch < recipe.archs[0]:
            problem = f"{recipe.name} has no code for sm_{arch}: its oldest is sm_{recipe.archs[0]}"
            refusals.append(
                Refusal(problem, "build with --arch for another GPU; powertrain.attention runs on this one")
            )
    return refusals


def _notes(recipe: Recipe, host: BuildHost, estimate: Estimate, fit: int, isolated: bool) -> list[str]:
    notes = []
    if not host.archs:
        notes.append(
            f"no GPU to build for ({host.gpus_why}): the project's own list of archs stands, each of which costs "
            "time; --arch 8.6 names yours"
        )
    if fit < 1:
        notes.append(
            f"one job of {_gib(estimate.bytes)} may not fit in {SHARE} of {_gib(host.memory)} "
            f"({host.memory_why}): they run one at a time"
        )
    if isolated and recipe.torch == "any" and recipe.needs_nvcc and host.python and host.python.torch:
        notes.append(
            "without --no-build-isolation it is compiled for a torch that pip chooses, not for your "
            f"{host.python.torch}"
        )
    # /dev/shm is a tmpfs: files in it are charged as memory
    if "memory" in Path(host.tmp).parts or str(host.tmp).startswith("/dev/shm"):
        notes.append(f"TMPDIR {host.tmp} is memory: files there count against the compilers")
    return notes


def _version(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _archs(archs: Sequence[int]) -> str:
    return " ".join(f"sm_{arch}" for arch in archs)


def _gib(size: float) -> str:
    return f"{size / _GIB:.1f} GiB"
