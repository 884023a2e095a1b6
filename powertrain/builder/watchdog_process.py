"""The builder's end of watchdog.py, the process that ends a build whose builder was killed."""

import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress

from powertrain.builder import watchdog


class WatchdogProcess:
    """A running watchdog, which knows the build's processes by the variable `mark` in their environment."""

    def __init__(self, mark: str) -> None:
        # a session of its own: Ctrl-C in the terminal must not reach it
        self._process = subprocess.Popen(
            [sys.executable, "-IS", watchdog.__file__], stdin=subprocess.PIPE, start_new_session=True
        )
        self.pid = self._process.pid
        self._reported: set[int] = set()
        self.tell(f"mark {mark}")

    def tell(self, line: str) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        except OSError:
            # another process ended it; we are still here
            pass

    def report(self, pids: Iterable[int]) -> None:
        """Name the processes of a sample that it has not been told of."""
        pids = set(pids)
        new = pids - self._reported
        # their start times tell them from later processes with the same ids
        starts = watchdog.running() if new else {}
        for pid in new & starts.keys():
            self.tell(f"seen {pid} {starts[pid].start}")
        self._reported = pids

    def end(self) -> None:
        self.tell("over")
        self._process.wait()
        assert self._process.stdin
        with suppress(OSError):
            # of what could not be told
            self._process.stdin.close()
