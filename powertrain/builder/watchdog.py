"""Watchdog of a killed supervisor: ends every process of its build, paused or not.

Started as `python -IS watchdog.py` with a pipe from the builder, which says as the build goes on

    mark TEXT        in the environment of its processes; said before the first one starts
    session N        the build's first process leads this session
    seen PID START   a process that it has: one that left the session and cleared its environment is known by this

and, at a normal end, "over". An end of file before that means that the builder died. A process is the build's
by one of the three, or because its parent is; its start tells it from a later one of that number.
"""

import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_STARTING = 1.0  # seconds that a process takes at most from its fork to its own environment
GIVE_UP = 10.0  # seconds after which a process that SIGKILL does not end (it waits for a disk) is left


class Seen:
    """A process as /proc shows it."""

    __slots__ = ("parent", "pid", "session", "start")

    def __init__(self, pid: int, parent: int, session: int, start: int) -> None:
        self.pid, self.parent, self.session, self.start = pid, parent, session, start


def running() -> "dict[int, Seen]":
    """All processes but zombies."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:
                fields = stat.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if len(fields) > 19 and fields[0] not in (b"Z", b"X"):
            found[int(name)] = Seen(int(name), int(fields[1]), int(fields[3]), int(fields[19]))
    return found


def with_descendants(roots: "Iterable[int]", processes: "dict[int, Seen]") -> "list[Seen]":
    children: dict[int, list[int]] = {}
    for each in processes.values():
        children.setdefault(each.parent, []).append(each.pid)
    found: dict[int, Seen] = {}
    queue = [pid for pid in roots if pid in processes]
    while queue:
        pid = queue.pop()
        if pid not in found:
            found[pid] = processes[pid]
            queue += children.get(pid, [])
    return list(found.values())


def signal_all(processes: "Iterable[Seen]", number: int = signal.SIGKILL) -> "list[Seen]":
    """Signal each, and wake the paused; those that could be signalled: other users' cannot."""
    reached = []
    for each in processes:
        try:
            for one in (number, signal.SIGCONT):
                os.kill(each.pid, one)
            reached.append(each)
        except ProcessLookupError:
            pass
        except PermissionError:
            continue
    return reached


def of_build(session: int, mark: str, seen: "dict[int, int]") -> "list[Seen]":
    processes = running()
    ours = [
        each.pid
        for each in processes.values()
        if (session and each.session == session) or seen.get(each.pid) == each.start or (mark and _has(each.pid, mark))
    ]
    return [each for each in with_descendants(ours, processes) if each.pid != os.getpid()]


def _has(pid: int, mark: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as environment:
            return mark.encode() in environment.read()
    except OSError:
        return False  # not ours to read


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when the builder does
    session, mark = 0, ""
    seen: dict[int, int] = {}
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "over":
            return
        if word == "session":
            session = int(rest[0])
        elif word == "mark":
            mark = rest[0]
        elif word == "seen":
            seen[int(rest[0])] = int(rest[1])
    if not mark:
        return
    now = time.monotonic()
    deadline, least = now + GIVE_UP, now + (0.0 if session else _STARTING)
    while (signal_all(of_build(session, mark, seen)) or time.monotonic() < least) and time.monotonic() < deadline:
        time.sleep(0.05)


if __name__ == "__main__":
    main()
