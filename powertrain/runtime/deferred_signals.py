"""Deferral of signal handlers to the end of an import."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_active = False


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Handlers in Python, that of Ctrl-C among them, run when this block ends, on the main thread.

    A module that an exception interrupts cannot be imported again in its process, ours or one of torch's: its ops are
    registered already. Nor can a handler use one that is there by half. A second Ctrl-C does not wait.
    """
    global _active
    if _active or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def defer(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in came:
            handlers[number](number, frame)
        came.append(number)

    found = {number: signal.getsignal(number) for number in signal.valid_signals()}
    handlers: dict[int, Any] = {number: handler for number, handler in found.items() if callable(handler)}
    _active = True
    try:
        for number in handlers:
            signal.signal(number, defer)
        yield
    finally:
        _active = False
        for number, handler in handlers.items():
            # else a module has taken it for itself
            if signal.getsignal(number) is defer:
                signal.signal(number, handler)
        # an exception of Ctrl-C would hold up the others
        for late in sorted(set(came), key=lambda number: number == signal.SIGINT):
            signal.raise_signal(late)
