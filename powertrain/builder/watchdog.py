"""What outlives a governor that was killed: ends every process of its build, paused or not.

Started as `python -IS watchdog.py` with a pipe from the governor, which says the build's session and, at a normal end,
"over". An end of file before that means that the governor died.
"""

import os
import signal
import sys
import time


def members(session: int) -> list[int]:
    """The processes of a session, without zombies."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat") as stat:
                state, _, _, of = stat.read().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(of) == session and state not in "ZX":
            found.append(int(name))
    return found


def end(session: int, number: int = signal.SIGKILL) -> list[int]:
    """Signal every process of a session, and wake the paused; the processes that were there."""
    found = members(session)
    for pid in found:
        for each in (number, signal.SIGCONT):
            try:
                os.kill(pid, each)
            except ProcessLookupError:
                pass
    return found


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when the governor does
    session = 0
    for line in sys.stdin:
        if line.strip() == "over":
            return
        session = int(line)
    while session and end(session):
        time.sleep(0.05)


if __name__ == "__main__":
    main()
