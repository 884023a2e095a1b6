"""Extension builds that wait for a stale lock of torch.utils.cpp_extension, a common cause of hangs.

torch.utils.cpp_extension.load guards a build folder with a file `lock` (torch/utils/file_baton.py): whoever makes it
builds, everybody else waits until it is gone, for ever and in silence. A builder that is killed leaves it behind.
While it lives it keeps the file open, so the question "is there an owner?" has an answer: /proc/PID/fd.
"""

import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from powertrain.doctor.finding import Check, Finding
from powertrain.runtime.machine import NETWORK_FILE_SYSTEMS, Machine

_GPT_NEOX = ("megatron/fused_kernels/build", "megatron/legacy/fused_kernels/build", "megatron_util/fused_kernels/build")


@dataclass(frozen=True)
class Lock:
    path: Path
    inode: int
    age: float  # seconds
    owners: tuple[int, ...]  # processes that have it open
    unseen: bool  # there are processes whose open files this user may not see, and one may be its owner
    network: str | None  # the network file system it lies on: its owner may run on another host


def builds(machine: Machine) -> Iterator[Finding]:
    folders = build_folders(machine)
    locks = [lock for folder in folders if (lock := read_lock(machine, folder / "lock"))]
    for lock in locks:
        yield _verdict(lock)
    if not locks:
        yield Finding("ok", f"no build is locked; {len(folders)} extension builds here", tuple(map(str, folders)))


def build_folders(machine: Machine) -> list[Path]:
    """Folders that torch's loader builds in: its own, GPT-NeoX's and Megatron's of this folder, of the installed
    packages, and of the folders that running Python processes work in."""
    chosen = machine.variables.get("TORCH_EXTENSIONS_DIR")
    cache = machine.variables.get("XDG_CACHE_HOME") or str(machine.home / ".cache")
    roots = [Path(chosen) if chosen else Path(cache) / "torch_extensions"]
    folders = [folder for root in roots for depth in ("*", "*/*") for folder in root.glob(depth) if _is_build(folder)]
    candidates = dict.fromkeys([machine.cwd, *machine.packages, *_working_folders(machine)])
    folders += [folder for candidate in candidates for name in _GPT_NEOX if _is_build(folder := candidate / name)]
    return sorted({folder.resolve() for folder in folders})


def _is_build(folder: Path) -> bool:
    try:
        return folder.is_dir() and any((folder / name).exists() for name in ("lock", "build.ninja"))
    except OSError:
        return False


def _working_folders(machine: Machine) -> Iterator[Path]:
    for process in machine.processes():
        try:
            if "python" in (process / "comm").read_text():
                yield Path(os.readlink(process / "cwd"))
        except OSError:
            continue


def read_lock(machine: Machine, path: Path) -> Lock | None:
    """The lock and who holds it; None: there is none."""
    try:
        facts = path.stat()
    except OSError:
        return None
    owners, unseen = _owners(machine, path, facts.st_uid)
    kind, _ = machine.file_system(path)
    network = kind if kind in NETWORK_FILE_SYSTEMS else None
    return Lock(path, facts.st_ino, time.time() - facts.st_mtime, owners, unseen, network)


def _owners(machine: Machine, path: Path, user: int) -> tuple[tuple[int, ...], bool]:
    target, owners, unseen = str(path.resolve()), [], False
    for process in machine.processes():
        try:
            if any(_link(file) == target for file in (process / "fd").iterdir()):
                owners.append(int(process.name))
        except PermissionError:
            unseen = unseen or _user(process) in (user, None)
        except OSError:
            continue
    return tuple(owners), unseen


def _link(file: Path) -> str | None:
    try:
        return os.readlink(file)
    except OSError:
        return None


def _user(process: Path) -> int | None:
    try:
        return process.stat().st_uid
    except OSError:
        return None


def _verdict(lock: Lock) -> Finding:
    age = _age(lock.age)
    evidence = (f"{lock.path}, {age} old",)
    if lock.owners:
        pids = ", ".join(map(str, lock.owners))
        return Finding("ok", f"{lock.path.parent} is being built by process {pids} since {age}", evidence)
    rename = f"mv {lock.path} {lock.path}.stale"
    if lock.network:
        message = f"{lock.path.parent} is locked, by nobody on this host; on {lock.network} the owner may be elsewhere"
        fix = f"if no other host builds it: {rename}"
        return Finding("warning", message, (*evidence, f"this host is {socket.gethostname()}"), fix)
    if lock.unseen:
        message = f"{lock.path.parent} is locked by a process that this user may not see, or by nobody"
        return Finding("warning", message, evidence, f"sudo fuser -v {lock.path}; if nobody holds it: {rename}")
    message = (
        f"{lock.path.parent} is locked by nobody: its builder died, and every load of the extension waits for ever"
    )
    return Finding("problem", message, evidence, rename, lambda: release(lock))


def release(lock: Lock) -> str:
    """Rename a stale lock, unless it was replaced meanwhile; waiting processes continue."""
    now = read_lock(Machine.here(), lock.path)
    if now is None:
        return f"{lock.path}: is gone already"
    if now.inode != lock.inode or now.owners:
        return f"{lock.path}: was taken by a live process since; left alone"
    aside = lock.path.with_name(f"lock.stale-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    lock.path.rename(aside)
    return f"{lock.path}: renamed to {aside.name}"


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


CHECKS = (Check("builds", "does an extension build wait for a stale lock?", builds),)
