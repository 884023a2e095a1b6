"""Public names of a package, imported on first use, so that importing the package stays cheap."""

import importlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

from powertrain.runtime.deferred_signals import deferred_signals
from powertrain.runtime.gc_disabled import gc_disabled

_interrupted = ""  # the module whose import was
_importing = threading.RLock()
_PATIENCE = 60.0  # seconds to wait for another thread's import; torch, Triton and all ops import in a few


def _imported(name: str) -> ModuleType:
    """The module. Raises ImportError for one that cannot be imported after an import that was interrupted."""
    global _interrupted
    try:
        return importlib.import_module(name)
    except Exception as error:
        if not _interrupted:
            raise
        raise ImportError(
            f"{name} cannot be imported, since the import of {_interrupted} was interrupted before: start a new "
            f"process (in a notebook: restart the kernel) [{type(error).__name__}: {error}]"
        ) from error
    except BaseException:  # a second Ctrl-C, or sys.exit in a handler
        _interrupted = name
        raise


@contextmanager
def _one_thread_at_a_time() -> Iterator[None]:
    """Python breaks the deadlock of two threads whose modules import one another by giving one of them a module that
    is there by half: first uses in several threads failed in Triton's modules."""
    # with a deadline: a thread that imports our modules by statements does not take this lock, and could wait for us
    lock = _importing
    held = lock.acquire(timeout=_PATIENCE)
    try:
        yield
    finally:
        if held:
            lock.release()


def _forget_other_threads() -> None:
    """In a forked process, which does not have the thread that holds the lock."""
    global _importing
    _importing = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)


def resolve(package: str, name: str, public: Mapping[str, str]) -> object:
    """The value of a package's public name. A package's `__getattr__` calls this once for each name.

    public  name -> module that defines it; a name that maps to `package.name` itself is that module
    Raises AttributeError for other names, as a module does.
    """
    if name not in public:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    with _one_thread_at_a_time(), deferred_signals(), gc_disabled():
        module = _imported(public[name])
    value = module if public[name] == f"{package}.{name}" else getattr(module, name)
    setattr(sys.modules[package], name, value)
    return value
