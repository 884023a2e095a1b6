"""A command under a memory limit that holds for it and all its descendants together, as a container's does.

Where no cgroup can be made, this watches instead: five times a second it adds up the anonymous pages of the whole tree,
each shared page once (Pss_Anon and Pss_Shmem: what a cgroup charges and the kernel cannot drop), and sends SIGKILL to
the largest process while the sum is over the limit, which is what the kernel's own killer does.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_EVERY = 0.2  # seconds


@dataclass(frozen=True)
class Ended:
    code: int
    output: str = field(repr=False)
    seconds: float
    cpu: float  # of the whole tree
    peak: int  # bytes
    killed: list[str]  # names of the processes that were over the limit, in order


def under_limit(
    command: Sequence[str], limit: int, log: Path, *, cwd: Path, env: Mapping[str, str], timeout: float
) -> Ended:
    """Run a command with no more than `limit` bytes for it and what it starts; its output goes to `log`."""
    start, cpu, peak, killed = time.monotonic(), os.times(), 0, []
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
        try:
            while process.poll() is None:
                assert time.monotonic() - start < timeout, f"not done after {timeout:.0f} s: see {log}"
                sizes = _sizes(process.pid)
                peak = max(peak, sum(sizes.values()))
                if sum(sizes.values()) > limit:
                    largest = max(sizes, key=lambda each: sizes[each])
                    killed.append(_kill(largest))
                time.sleep(_EVERY)
        finally:
            for each in _tree(process.pid):
                _kill(each)
            process.wait()
    spent = sum(os.times()[2:4]) - sum(cpu[2:4])
    return Ended(process.returncode, log.read_text(errors="replace"), time.monotonic() - start, spent, peak, killed)


def _tree(root: int) -> list[int]:
    try:
        top = psutil.Process(root)
        return [top.pid, *(each.pid for each in top.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def _sizes(root: int) -> dict[int, int]:
    sizes = {}
    for pid in _tree(root):
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue  # gone, or going
        sizes[pid] = 1024 * sum(int(size) for size in re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB", text, re.M))
    return sizes


def _kill(pid: int) -> str:
    try:
        name = psutil.Process(pid).name()
        os.kill(pid, signal.SIGKILL)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return ""
    return name
