"""Detection of a stalled build and its cause, by CPU time, I/O and output of the process tree, not by time alone."""

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from powertrain.builder.processes import Process, swap_ins

# of one core: a loop that polls a lock file takes about 0.01
_IDLE_CPU = 0.03
_IDLE_IO = 16 << 10  # bytes a second; a shell's polling loop reads some
# seconds without output after which a working compiler is reported
_SLOW = 120
_READS = ("read", "n_tty", "wait_woken")
_THRASH = 100  # pages a second from swap


@dataclass(frozen=True)
class Cause:
    reason: str
    fix: str
    lock: Path | None = None  # a file that --fix would rename

    def __str__(self) -> str:
        return f"{self.reason}. Fix: {self.fix}"


class Stillness:
    """Time since the process tree last made progress."""

    def __init__(self, now: float) -> None:
        self.since = now
        self._at = now
        self._cpu = 0.0
        self._io = 0
        self._swap = swap_ins()
        self.swap_rate = 0.0

    def spoke(self, now: float) -> None:
        """The build wrote output."""
        self.since = now

    def observe(self, processes: Mapping[int, Process], now: float) -> float:
        """Seconds without progress, given the current tree."""
        if now - self._at >= 1:
            cpu = sum(process.cpu for process in processes.values())
            io = sum(process.io for process in processes.values())
            swap, elapsed = swap_ins(), now - self._at
            self.swap_rate = (swap - self._swap) / elapsed
            # lower totals: a process ended, which is progress too
            if cpu < self._cpu or cpu - self._cpu > _IDLE_CPU * elapsed or abs(io - self._io) > _IDLE_IO * elapsed:
                self.since = now
            self._at, self._cpu, self._io, self._swap = now, cpu, io, swap
        return now - self.since


def cause(processes: Mapping[int, Process], folders: Iterable[Path], swap_rate: float = 0.0) -> Cause:
    """Why these processes are idle.

    folders    where torch's extension locks may lie, besides the processes' own
    swap_rate  pages read from swap a second
    """
    stopped = [process for process in processes.values() if process.status == psutil.STATUS_STOPPED]
    if stopped:
        pids = " ".join(str(process.pid) for process in stopped)
        return Cause(f"stopped by a signal: {_names(stopped)}", f"kill -CONT {pids}")
    for lock in find_locks([*folders, *_working_folders(processes)]):
        age = time.time() - lock.stat().st_mtime
        if not owners(lock):
            reason = f"waits for {lock}, {_age(age)} old, which no process owns: its owner was killed"
            return Cause(reason, f"rm {lock} (or --fix, which renames it)", lock)
    if swap_rate > _THRASH:
        return Cause(f"swapping: {swap_rate:.0f} pages a second come back from disk", "fewer jobs: MAX_JOBS=1")
    for process in processes.values():
        if asked := waits_for_input(process.pid):
            reason = f"{process.name} (process {process.pid}) waits for input on {asked}"
            return Cause(reason, "type the answer, or give it beforehand: credentials, -y, or a configuration file")
    asleep = [process for process in processes.values() if process.status == psutil.STATUS_DISK_SLEEP]
    if asleep:
        reason = f"waits for a disk that does not answer: {_names(asleep)}"
        return Cause(reason, "look at dmesg and at network file systems (mount | grep nfs); TMPDIR to a local disk")
    for process in processes.values():
        if peer := _peer(process.pid):
            reason = f"{process.name} (process {process.pid}) waits for {peer} on the network"
            return Cause(reason, "check the connection and the proxy; pip takes --timeout and --retries")
    return Cause(f"the reason why these wait is unknown: {_names(processes.values())}", "look at the end of the log")


def slow_but_working(silent: float, name: str, doing: str, seconds: float) -> str | None:
    """Message for a long silence while a compiler works."""
    if silent < _SLOW:
        return None
    return f"{doing or 'the compiler'} on {name}, {_age(seconds)}: it works, and is slow"


def find_locks(folders: Iterable[Path]) -> list[Path]:
    """Files that look like locks of torch.utils.file_baton.FileBaton in these folders: empty, called `lock`."""
    locks = []
    for folder in dict.fromkeys(folders):
        for pattern in ("lock", "*/lock", "*/*/lock", "*/*/*/lock"):
            try:
                locks += [file for file in folder.glob(pattern) if file.is_file() and not file.stat().st_size]
            except OSError:
                # no permission, or deleted meanwhile
                continue
    return list(dict.fromkeys(file.resolve() for file in locks))


def owners(lock: Path) -> list[int]:
    """The processes that have the file open: only FileBaton's owner does, for as long as it holds the lock."""
    target = str(lock.resolve())
    return [int(name) for name in filter(str.isdigit, os.listdir("/proc")) if target in _opened(name)]


def _opened(pid: str) -> Iterator[str]:
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        # not ours to see, or gone
        return
    for number in numbers:
        try:
            yield os.readlink(f"/proc/{pid}/fd/{number}")
        except OSError:
            # closed meanwhile
            continue


def set_aside(lock: Path) -> Path:
    """Rename the lock, so that waiting processes continue; its new name."""
    aside = lock.with_name(f"{lock.name}.stale-{time.strftime('%Y%m%d-%H%M%S')}")
    lock.rename(aside)
    return aside


def extension_folders(environment: Mapping[str, str]) -> list[Path]:
    """Folder of extensions that torch builds at first use."""
    own = environment.get("TORCH_EXTENSIONS_DIR")
    cache = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return [Path(own)] if own else [Path(cache, "torch_extensions")]


def _working_folders(processes: Mapping[int, Process]) -> list[Path]:
    folders = set()
    for pid in processes:
        try:
            folders.add(Path(os.readlink(f"/proc/{pid}/cwd")))
        except OSError:
            continue
    return sorted(path for path in folders if len(path.parts) > 2)


def waits_for_input(pid: int) -> str | None:
    """The terminal, or the pipe at its standard input, that a process is blocked on."""
    try:
        channel = Path(f"/proc/{pid}/wchan").read_text()
        call = Path(f"/proc/{pid}/syscall").read_text().split()
        # read on x86-64, on aarch64
        if len(call) < 2 or call[0] not in ("0", "63"):
            return None
        number = int(call[1], 16)
        target = os.readlink(f"/proc/{pid}/fd/{number}")
    except OSError:
        return None
    # git and ssh open it anew, whatever their input is
    terminal = target.startswith(("/dev/pts/", "/dev/tty"))
    if any(word in channel for word in _READS) and (terminal or number == 0) and target != "/dev/null":
        return target
    return None


def _peer(pid: int) -> str | None:
    try:
        process = psutil.Process(pid)
        # its name before psutil 6
        ask = getattr(process, "net_connections", None) or process.connections
        connections = ask("inet")
    except (psutil.Error, OSError):
        return None
    waiting = [each for each in connections if each.raddr and each.status in ("ESTABLISHED", "SYN_SENT")]
    return f"{waiting[0].raddr.ip}:{waiting[0].raddr.port} ({waiting[0].status})" if waiting else None


def _names(processes: Iterable[Process]) -> str:
    return (
        ", ".join(f"{process.name} (process {process.pid}, {process.status})" for process in processes) or "no process"
    )


def _age(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
