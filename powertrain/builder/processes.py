"""Samples of the state and memory of a build's process tree."""

import ctypes
import os
import re
import resource
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

_COMPILERS = re.compile(r"(cicc|ptxas|fatbinary|cudafe\+\+|nvcc|cc1|cc1plus|lto1|clang(\+\+)?(-\d+)?|rustc)$")
_PR_SET_CHILD_SUBREAPER = 36
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LINKERS = re.compile(r"(ld|ld\.\w+|collect2|lld|mold|nvlink)$")


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    name: str
    status: str  # as psutil names it: running, sleeping, disk-sleep, stopped
    memory: int  # private bytes; file pages are left out, because the kernel drops them when memory is short
    cpu: float  # seconds, of its own and of the children it has waited for
    io: int  # bytes read and written

    @property
    def compiles(self) -> bool:
        return bool(_COMPILERS.match(self.name))

    @property
    def links(self) -> bool:
        return bool(_LINKERS.match(self.name))


NOBODY = Process(0, 0, "", "", 0, 0.0, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ended, so that the process tree stays complete."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def tree(root: int, without: Iterable[int] = ()) -> dict[int, Process]:
    """The descendants of `root` by process id, but not those in `without`."""
    skipped = set(without)
    try:
        processes = psutil.Process(root).children(recursive=True)
    except psutil.NoSuchProcess:
        return {}
    return {each.pid: read for each in processes if each.pid not in skipped and (read := _read(each))}


def _read(process: psutil.Process) -> Process | None:
    try:
        with process.oneshot():
            status = process.status()
            if status == psutil.STATUS_ZOMBIE:
                return None
            times = process.cpu_times()
            cpu = times.user + times.system + times.children_user + times.children_system
            return Process(
                process.pid, process.ppid(), process.name(), status, own_memory(process.pid), cpu, _io(process)
            )
    except psutil.Error:
        # it ended, or belongs to another user
        return None


def own_memory(pid: int) -> int:
    """Private bytes of a process; 0 if it is gone."""
    # not RSS: a setup.py that imports torch holds 220 MiB of library pages, which the kernel can drop
    try:
        with open(f"/proc/{pid}/statm") as pages:
            resident, shared = map(int, pages.read().split()[1:3])
    except OSError:
        return 0
    return (resident - shared) * _PAGE


def _io(process: psutil.Process) -> int:
    try:
        counters = process.io_counters()
    except (psutil.Error, AttributeError, OSError, NotImplementedError):
        # no permission, or not counted by this kernel
        return 0
    return int(counters.read_chars + counters.write_chars) if hasattr(counters, "read_chars") else 0


def below(pid: int, processes: dict[int, Process]) -> list[Process]:
    """`pid` and its descendants."""
    children: dict[int, list[Process]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process)
    descendants, queue = [], [processes[pid]] if pid in processes else []
    while queue:
        process = queue.pop()
        descendants.append(process)
        queue += children.get(process.pid, [])
    return descendants


def unmanaged_compilers(processes: dict[int, Process], launched: Iterable[int]) -> list[Process]:
    """Compilers that no launcher of ours started: the topmost of each chain."""
    ours = set(launched)
    return [
        process
        for process in processes.values()
        if process.compiles
        and not any(pid in ours or (processes[pid].compiles and pid != process.pid) for pid in _up(process, processes))
    ]


def _up(process: Process, processes: dict[int, Process]) -> list[int]:
    """The process and its ancestors, as far as they are known."""
    line, pid = [], process.pid
    while pid in processes and pid not in line:
        line.append(pid)
        pid = processes[pid].parent
    return line


def called_by_compiler(pid: int, launched: Iterable[int]) -> bool:
    """A process descends from a compiler: one in `launched`, or any by its name.

    That compiler waits for the process, so making the process wait for memory would be a deadlock.
    """
    callers = set(launched)
    try:
        while pid > 1:
            with open(f"/proc/{pid}/stat") as stat:
                # the name is in parentheses and may hold some itself; the parent's pid is the second field after it
                head, _, fields = stat.read().rpartition(")")
            if pid in callers or _COMPILERS.match(head.partition("(")[2]):
                return True
            pid = int(fields.split()[1])
    except OSError:
        pass
    return False


def oom_kills() -> int:
    """Number of out-of-memory kills by the kernel since boot."""
    total = 0
    for file, key in (("/proc/vmstat", "oom_kill"), ("/sys/fs/cgroup/memory.events", "oom_kill")):
        try:
            with open(file) as lines:
                total += sum(int(line.split()[1]) for line in lines if line.split()[0] == key)
        except (OSError, IndexError, ValueError):
            continue
    return total


def swap_ins() -> int:
    """Pages read back from swap since boot."""
    try:
        return psutil.swap_memory().sin // os.sysconf("SC_PAGE_SIZE")
    except (OSError, RuntimeError):
        return 0


def cpu_since(who: int, before: resource.struct_rusage) -> float:
    now = resource.getrusage(who)
    return now.ru_utime + now.ru_stime - before.ru_utime - before.ru_stime


def send_signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def reap(*but: int) -> None:
    """Collect orphans that ended in our care."""
    for child in psutil.Process().children():
        try:
            if child.pid not in but and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)
        except (psutil.Error, ChildProcessError):
            continue


class Pace:
    """Interval between samples of a build, so that sampling costs 0.5% of its CPU time."""

    def __init__(self, least: float = 0.25, most: float = 2.0) -> None:
        self.least, self.most = least, most
        self.pause = least

    def took(self, spent: float, work: float) -> None:
        """CPU seconds so far: ours, and the build's."""
        self.pause = min(self.most, 1.3 * self.pause) if spent > 0.005 * work else max(self.least, self.pause / 1.3)
