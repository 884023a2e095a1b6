"""Disabling of garbage collection while many long-lived objects are created."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Modules and Triton's code generator make objects by the ten thousand. Collections among them go over all that
    torch holds too and find nothing: one of the whole heap takes 0.1 s, a fifth of the import of attention."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
