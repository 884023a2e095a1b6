"""Access to this machine: files, variables, installed packages, programs, GPUs. Tests replace it."""

import ctypes
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import Distribution, distributions
from pathlib import Path

NETWORK_FILE_SYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "lustre", "beegfs", "gpfs", "ceph", "fuse.sshfs", "9p", "afs"}


@dataclass(frozen=True)
class Ran:
    """A program that ran: its exit status (124: ended at the deadline) and its output, stderr last."""

    status: int
    output: str


Run = Callable[[Sequence[str], float], Ran | None]


@dataclass(frozen=True)
class Gpu:
    name: str
    arch: int | None  # 90 for compute capability 9.0; None where the driver is too old to report it
    index: int = 0
    driver: str = ""
    memory_mib: int = 0

    @property
    def is_lost(self) -> bool:
        """nvidia-smi gives "[GPU is lost]" or "[Unknown Error]" for its name."""
        return self.name.startswith("[")

    def __str__(self) -> str:
        return self.name if self.name == f"sm_{self.arch}" else f"{self.name} (sm_{self.arch})"


@dataclass(frozen=True)
class Machine:
    """Access to files under `root`, environment variables of other tools, installed packages and programs.

    run(command, seconds) gives None where there is no such program.
    """

    root: Path = Path("/")
    variables: Mapping[str, str] = field(default_factory=dict)
    packages: tuple[Path, ...] = ()  # folders on sys.path that hold installed packages
    cwd: Path = Path(".")
    home: Path = Path("~")
    python: str = sys.executable
    run: Run = lambda command, seconds: None

    @staticmethod
    def here() -> "Machine":
        paths = [Path(path) for path in sys.path if path and Path(path).is_dir()]
        installed = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
        packages = tuple(path for path in dict.fromkeys([*paths, *sorted(installed)]) if "site-packages" in path.name
                         or "dist-packages" in path.name)  # fmt: skip
        return Machine(Path("/"), dict(os.environ), packages, Path.cwd(), Path.home(), sys.executable, run_program)

    def path(self, absolute: str | Path) -> Path:
        return self.root / str(absolute).lstrip("/")

    def read(self, absolute: str | Path) -> str | None:
        try:
            return self.path(absolute).read_text(errors="replace").strip()
        except OSError:
            return None

    @cached_property
    def installed(self) -> dict[str, Distribution]:
        """Distributions by normalized name; the first on the path wins, as in an import."""
        by_name: dict[str, Distribution] = {}
        for distribution in distributions(path=[str(path) for path in self.packages]):
            name = distribution.metadata["Name"]
            if name:
                by_name.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution)
        return by_name

    def version(self, name: str) -> str | None:
        distribution = self.installed.get(name)
        return distribution.version if distribution else None

    @cached_property
    def torch_cuda(self) -> str | None:
        """CUDA's version that torch was built for, read from its version.py; None: no torch, or a CPU build."""
        for folder in self.packages:
            file = folder / "torch" / "version.py"
            if file.is_file():
                match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", file.read_text(), re.M)
                return match[1] if match else None
        return None

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that nvidia-smi lists; empty without a driver."""
        ran = self.run(_QUERY, 20.0)
        if ran is not None and ran.status and "compute_cap" in ran.output:
            # nvidia-smi before driver 510 refuses the query: another field takes its place
            ran = self.run([word.replace("compute_cap", "pstate") for word in _QUERY], 20.0)
        if ran is None or ran.status:
            return ()
        return tuple(gpu for line in ran.output.splitlines() if (gpu := _gpu(line)))

    @property
    def driver(self) -> str:
        """The driver's version, of the first GPU that tells it; "" where none does."""
        return next((gpu.driver for gpu in self.gpus if gpu.driver[:1].isdigit()), "")

    def file_system(self, path: Path) -> tuple[str, str]:
        """(type, mount point) of the file system that holds `path`."""
        best = ("unknown", "/")
        for line in (self.read("/proc/self/mounts") or "").splitlines():
            parts = line.split()
            point = parts[1].replace("\\040", " ")
            if path.absolute().is_relative_to(point) and len(point) >= len(best[1]):
                best = (parts[2], point)
        return best

    def processes(self) -> Iterator[Path]:
        """/proc/PID of every process that can be seen."""
        yield from (path for path in self.path("/proc").glob("[0-9]*") if path.name.isdigit())


_QUERY = ["nvidia-smi", "--query-gpu=index,name,compute_cap,driver_version,memory.total", "--format=csv,noheader,nounits"]  # fmt: skip  # noqa: E501


def _gpu(line: str) -> Gpu | None:
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != 5 or not parts[0].isdigit():
        return None
    arch = int(parts[2].replace(".", "")) if re.fullmatch(r"\d+\.\d", parts[2]) else None
    return Gpu(parts[1], arch, int(parts[0]), parts[3], int(parts[4]) if parts[4].isdigit() else 0)


def present_gpus() -> tuple[tuple[Gpu, ...], str]:
    """The GPUs that the driver's management library (NVML) lists, and the source, or why there are none."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return (), "no libnvidia-ml.so.1: no NVIDIA driver here"
    status = nvml.nvmlInit_v2()
    if status:
        return (), f"NVML does not start: error {status}"
    try:
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        return tuple(filter(None, (_nvml_gpu(nvml, index) for index in range(count.value)))), "NVML"
    finally:
        nvml.nvmlShutdown()


def _nvml_gpu(nvml: ctypes.CDLL, index: int) -> Gpu | None:
    device, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
    major, minor = ctypes.c_int(), ctypes.c_int()
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
        # lost or not ours
        return None
    nvml.nvmlDeviceGetName(device, name, len(name))
    if nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)):
        return None
    return Gpu(name.value.decode(), major.value * 10 + minor.value)


def run_program(command: Sequence[str], seconds: float) -> Ran | None:
    """Run a program with nothing on stdin; at the deadline its whole process group is ended."""
    # its output is read by us, not on the screen that these speak of
    screen = ("COLUMNS", "LINES", "FORCE_COLOR", "CLICOLOR_FORCE")
    environment = {name: value for name, value in os.environ.items() if name not in screen}
    try:
        process = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True, env=environment,
        )  # fmt: skip
    except (FileNotFoundError, PermissionError):
        return None
    try:
        output, _ = process.communicate(timeout=seconds)
        return Ran(process.returncode, output)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        return Ran(124, output)
