"""Signals that ask a process to end, and child processes that ignore them, because the parent handles them."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

# from a person, timeout, Kubernetes, systemd, torchrun; a terminal that closed; Slurm's --signal; ulimit -t
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)


@contextmanager
def children_without_signals() -> Iterator[None]:
    """A process started in this block ignores signals that ask to end, those to its process group too.

    The mask is the starting thread's and is inherited by fork and exec, so there is no moment at which the child has
    another. Signals to this process meanwhile are delivered at the end. The child must end with its parent by itself.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Ended(SystemExit):
    """A signal asked the process to end; its exit code is 128 plus the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.name = signal.Signals(number).name


@contextmanager
def exits_on_signals() -> Iterator[None]:
    """In this block signals that ask to end raise `Ended`, so that `finally` removes half-written files. A signal that
    already has a handler, or is ignored (SIGHUP under nohup), is not changed; Ctrl-C has one, which raises
    KeyboardInterrupt. Main thread only."""

    def end(number: int, _: object) -> None:
        raise Ended(number)

    taken = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
