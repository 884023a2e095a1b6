"""A file lock for work that one process does for all processes."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import filelock

from powertrain.runtime import tracing

_QUIET = 2.0  # seconds to wait before saying so
# seconds to wait for another process's work before doing it too
_PATIENCE = 600.0


@contextlib.contextmanager
def one_at_a_time(path: Path, doing: str) -> Iterator[None]:
    """Hold the file lock `path` (it ends with its process; the file means nothing) during the work named by `doing`.

    It only saves repeated work: results are renamed into place, so they are complete even without the lock. So after
    ten minutes, or where the file system has no locks, the work is done without it. Waiting is logged after 2 s.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path)
    try:
        try:
            lock.acquire(timeout=_QUIET)
        except filelock.Timeout:
            tracing.progress(f"waiting for another process that is {doing}, at most {_PATIENCE:.0f} s")
            lock.acquire(timeout=_PATIENCE)
    except filelock.Timeout:
        tracing.warn(f"another process has been {doing} for {_PATIENCE:.0f} s; doing it here too ({path})")
    except (OSError, NotImplementedError) as error:
        tracing.warn(f"no file locks here ({error}); every rank is {doing}")
    try:
        yield
    finally:
        lock.release()
