"""Facts that a CUDA build depends on, collected without importing torch and without creating a CUDA context."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from powertrain.runtime.jobs import available_memory, usable_cores
from powertrain.runtime.machine import Gpu, present_gpus
from powertrain.runtime.target import Target

HEADERS = {"cudnn.h": "cudnn", "nccl.h": "nccl", "cublasLt.h": "cublas"}  # and the library each belongs to
_SECONDS = 30  # deadline of a program that prints its version

# run by the Python that the build will use, which need not be ours
_ASK_PYTHON = """
import importlib.util, json, os, platform, sysconfig
spec = importlib.util.find_spec("torch")
roots = list(spec.submodule_search_locations) if spec else []
paths = sysconfig.get_paths()
headers = os.path.exists(os.path.join(paths["include"], "Python.h"))
print(json.dumps({"version": platform.python_version(), "headers": headers,
                  "site": paths["purelib"], "torch": roots[0] if roots else None}))
"""


@dataclass(frozen=True)
class Nvcc:
    path: str
    home: str  # the toolkit's folder
    version: tuple[int, int]
    archs: tuple[int, ...]  # those it can compile for, ascending
    newest_gcc: int | None  # the last major version that its headers accept


@dataclass(frozen=True)
class Compiler:
    path: str
    version: str
    gcc: int | None  # its major version, if it is gcc


@dataclass(frozen=True)
class Python:
    path: str
    version: str
    headers: bool
    site: str
    torch: str | None  # version
    torch_cuda: str | None  # "13.0"; None for a build without CUDA, or no torch


@dataclass(frozen=True)
class BuildHost:
    """The machine as one build command would see it. Sizes in bytes."""

    cores: int
    cores_why: str
    memory: int
    memory_why: str
    tmp: str
    disk: int | None  # free in `tmp`; None: there is no such folder
    gpus: tuple[Gpu, ...]
    gpus_why: str
    nvcc: Nvcc | None
    compiler: Compiler | None
    python: Python | None
    headers: Mapping[str, str | None]  # those of HEADERS: where found

    @property
    def archs(self) -> tuple[int, ...]:
        """Archs of the GPUs, ascending, each once."""
        return tuple(sorted({gpu.arch for gpu in self.gpus if gpu.arch}))


def look(
    command: Sequence[str], environment: Mapping[str, str], archs: Sequence[str] = (), memory: int | None = None
) -> BuildHost:
    """This host, as `command` would meet it.

    environment  the variables that the command will be given
    archs        names of GPUs to build for ("8.6", "sm_90", "RTX 3090") instead of those present
    memory       bytes the build may use instead of all that is available
    """
    path = environment.get("PATH", "")
    # affinity and cgroup limits, not the machine's cores: a container may have four of a hundred
    cores, cores_why = usable_cores()
    available, memory_why = available_memory()
    if memory is not None and memory < available:
        available, memory_why = memory, "--memory"
    # of the command's environment, which may differ from this process's
    tmp = environment.get("TMPDIR") or tempfile.gettempdir()
    gpus, gpus_why = _named(archs) if archs else present_gpus()
    nvcc = _nvcc(environment)
    python = _python(python_of(command, environment))
    return BuildHost(
        cores,
        cores_why,
        available,
        memory_why,
        tmp,
        shutil.disk_usage(tmp).free if Path(tmp).is_dir() else None,
        gpus,
        gpus_why,
        nvcc,
        _compiler(environment.get("CXX"), path),
        python,
        {name: _header(name, nvcc, python, environment) for name in HEADERS},
    )


def _named(archs: Sequence[str]) -> tuple[tuple[Gpu, ...], str]:
    targets = [Target.parse(name) for text in archs for name in re.split(r"[;,]", text) if name.strip()]
    return tuple(Gpu(target.name, target.arch) for target in targets), "--arch"


def _nvcc(environment: Mapping[str, str]) -> Nvcc | None:
    """The nvcc that torch's extensions would take: of CUDA_HOME or CUDA_PATH, on PATH, or in /usr/local/cuda."""
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    # the order of torch.utils.cpp_extension, so that the plan speaks of the nvcc that will run
    on_path = shutil.which("nvcc", path=environment.get("PATH", ""))
    for path in [f"{home}/bin/nvcc"] if home else [on_path, "/usr/local/cuda/bin/nvcc"]:
        if path and Path(path).is_file():
            return nvcc_at(path)
    return None


def nvcc_at(path: str) -> Nvcc | None:
    """Facts of this nvcc; None if it does not answer."""
    # asked, not read from a file name: /usr/local/cuda is often a link to something else
    version = re.search(r"release (\d+)\.(\d+)", _ask(path, "--version"))
    if not version:
        return None
    # the compiler lists its targets; a table of ours would be out of date with each release
    archs = sorted(int(arch) for arch in re.findall(r"compute_(\d+)$", _ask(path, "--list-gpu-arch"), re.MULTILINE))
    # a script in front of nvcc would mislead; nvcc itself says where its toolkit is
    top = re.search(r"_HERE_=(\S+)", _ask(path, "-dryrun", "-x", "cu", "-E", "/dev/null"))
    home = Path(top.group(1)).parent if top else Path(path).resolve().parent.parent
    if (home / "bin/nvcc").is_file():
        path = str(home / "bin/nvcc")
    return Nvcc(path, str(home), (int(version[1]), int(version[2])), tuple(archs), _newest_gcc(home))


def _newest_gcc(home: Path) -> int | None:
    # conda keeps headers under targets/
    for header in [home / "include/crt/host_config.h", *home.glob("targets/*/include/crt/host_config.h")]:
        if header.is_file():
            # the text of the #error that nvcc would stop with
            limit = re.search(r"gcc versions later than (\d+)", header.read_text(errors="replace"))
            return int(limit[1]) if limit else None
    return None


def _compiler(cxx: str | None, path: str) -> Compiler | None:
    # CXX may hold a launcher's options too, such as "g++ -m64"
    names = [cxx.split()[0]] if cxx else ["c++", "g++", "clang++"]
    compiler = next(filter(None, (shutil.which(name, path=path) for name in names)), None)
    if not compiler:
        return None
    text = _ask(compiler, "--version")
    number = re.search(r"(\d+)\.\d+\.\d+", text)
    # c++ may be gcc or clang; only gcc has a limit in nvcc's headers that is checked here
    is_gcc = "Free Software Foundation" in text
    return Compiler(compiler, (text.splitlines() or ["?"])[0], int(number[1]) if number and is_gcc else None)


def python_of(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """The Python that `command` builds for: itself, pip's own, the active environment's, or ours."""
    path = environment.get("PATH", "")
    program = Path(shutil.which(command[0], path=path) or command[0])
    if re.fullmatch(r"python[\d.]*", program.name) and program.is_file():
        return str(program)
    # pip's script lies beside the Python whose packages it installs
    if program.name.startswith("pip"):
        beside = program.parent / "python"
        if beside.is_file():
            return str(beside)
    active = environment.get("VIRTUAL_ENV")
    if active and Path(active, "bin/python").is_file():
        return str(Path(active, "bin/python"))
    return sys.executable


def _python(path: str) -> Python | None:
    try:
        facts = json.loads(_ask(path, "-c", _ASK_PYTHON))
    except ValueError:
        return None
    torch, cuda = None, None
    if facts["torch"]:
        # importing torch takes seconds; its version file has all that is asked here
        file = Path(facts["torch"], "version.py")
        text = file.read_text() if file.is_file() else ""
        torch, cuda = _assigned("__version__", text), _assigned("cuda", text)
    return Python(path, facts["version"], facts["headers"], facts["site"], torch, cuda)


def _assigned(name: str, text: str) -> str | None:
    assignment = re.search(rf"^{name}\b[^=\n]*= *'([^']+)'", text, re.MULTILINE)
    return assignment[1] if assignment else None


def _header(name: str, nvcc: Nvcc | None, python: Python | None, environment: Mapping[str, str]) -> str | None:
    library = HEADERS[name]
    homes = [environment.get(f"{library.upper()}_{end}") for end in ("PATH", "HOME", "ROOT", "ROOT_DIR")]
    folders = [f"{home}/include" for home in homes if home]
    folders += [environment.get("CPATH", ""), environment.get(f"{library.upper()}_INCLUDE_DIR", "")]
    folders += [f"{nvcc.home}/include"] if nvcc else []
    # wheels for CUDA 12 have a folder for each library, those for CUDA 13 one for all
    folders += [f"{python.site}/nvidia/{part}/include" for part in (library, "cu13")] if python else []
    folders += ["/usr/include", "/usr/local/include", "/usr/include/x86_64-linux-gnu", "/usr/include/aarch64-linux-gnu"]
    candidates = (Path(part, name) for folder in folders for part in folder.split(":") if part)
    return next((str(candidate) for candidate in candidates if candidate.is_file()), None)


def _ask(*command: str) -> str:
    """Output of a program, both streams; empty if it cannot be run."""
    try:
        # a deadline and no input, for a wrapper named nvcc may ask or hang
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr
