"""Watchdog of a build: if the supervisor is killed, it ends every process of the build, paused or not.

Started as `python -IS watchdog.py` with a pipe from the builder, which writes

    mark TEXT        in the environment of its processes; written before the first one starts
    session N        the build's first process leads this session
    seen PID START   a process of the build: identifies one that left the session and cleared its environment

and, at a normal end, "over". End of file before that means that the builder died. A process belongs to the build by
one of the three, or because its parent does; its start time distinguishes it from a later process with that pid.
"""

import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

# seconds that a process takes at most from its fork to its own environment
_STARTING = 1.0
# seconds after which a process that survives SIGKILL (it waits for a disk) is left
GIVE_UP = 10.0


class Seen:
    """A process as /proc shows it."""

    __slots__ = ("parent", "pid", "session", "start")

    def __init__(self, pid: int, parent: int, session: int, start: int) -> None:
        self.pid, self.parent, self.session, self.start = pid, parent, session, start


def running() -> "dict[int, Seen]":
    """All processes but zombies."""
    seen = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:
                fields = stat.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if len(fields) > 19 and fields[0] not in (b"Z", b"X"):
            seen[int(name)] = Seen(int(name), int(fields[1]), int(fields[3]), int(fields[19]))
    return seen


def with_descendants(roots: "Iterable[int]", processes: "dict[int, Seen]") -> "list[Seen]":
    children: dict[int, list[int]] = {}
    for each in processes.values():
        children.setdefault(each.parent, []).append(each.pid)
    family: dict[int, Seen] = {}
    queue = [pid for pid in roots if pid in processes]
    while queue:
        pid = queue.pop()
        if pid not in family:
            family[pid] = processes[pid]
            queue += children.get(pid, [])
    return list(family.values())


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
        # not ours to read
        return False


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # it ends when the builder does
        signal.signal(number, signal.SIG_IGN)
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
    # repeatedly: a process may fork between the listing and its signal
    while (signal_all(of_build(session, mark, seen)) or time.monotonic() < least) and time.monotonic() < deadline:
        time.sleep(0.05)


if __name__ == "__main__":
    main()
