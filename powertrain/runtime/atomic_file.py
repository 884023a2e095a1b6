"""A file that appears under its name whole, or not at all, whatever ends the process; work that one process does."""

import contextlib
import errno
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import filelock

from powertrain.runtime import tracing

_STALE = 3600.0  # seconds without a write after which a temporary file has no writer left
_QUIET = 2.0  # seconds to wait before saying so
_PATIENCE = 600.0  # seconds to wait for another process's work before doing it too


class NewFile:
    """Bytes for `path`, out of sight until `publish`.

    They go to a file without a name (O_TMPFILE), so that even kill -9 leaves nothing; where the file system has no such
    files (NFS, say) to a hidden temporary file, which the next writer in the folder removes once it is an hour old.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary: Path | None = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
        try:
            os.stat("/proc/self/fd")  # through which the file gets its name
            self.file: IO[bytes] = os.fdopen(os.open(path.parent, os.O_TMPFILE | os.O_RDWR, 0o666), "w+b")
            self._named = False
        except (OSError, AttributeError) as error:
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EROFS, errno.EACCES):
                raise
            _remove_stale(path.parent)
            self.file = self._temporary.open("w+b")
            self._named = True

    def publish(self) -> None:
        """Write to disk, close, and let the file take its name; what had the name before is replaced."""
        assert self._temporary is not None
        self.file.flush()
        os.fsync(self.file.fileno())
        if not self._named:
            descriptor = self.file.fileno()
            # with a descriptor of a folder Python calls linkat, which follows the link in /proc; link would not. The
            # name is absolute, so the descriptor itself plays no part
            os.link(f"/proc/self/fd/{descriptor}", self._temporary, src_dir_fd=descriptor, follow_symlinks=True)
        self.file.close()
        os.replace(self._temporary, self.path)
        self._temporary = None

    def discard(self) -> None:
        """Forget the bytes; nothing happens after `publish`."""
        self.file.close()
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)


def _remove_stale(folder: Path) -> None:
    for stale in folder.glob(".*.tmp"):
        if time.time() - stale.stat().st_mtime > _STALE:
            stale.unlink(missing_ok=True)


@contextlib.contextmanager
def one_at_a_time(path: Path, doing: str) -> Iterator[None]:
    """Hold the file lock `path` (it ends with its process; the file means nothing) while doing what `doing` says.

    It saves ranks from doing the same work; what keeps their results whole is renaming. So after ten minutes, or where
    the file system has no locks, the work is done without it. Waiting is said after two seconds.
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
