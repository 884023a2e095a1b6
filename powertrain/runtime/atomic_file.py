"""Atomic file writes: a file appears complete under its name or not at all, however the process ends."""

import errno
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

# seconds without a write after which a temporary file has no writer left
_STALE = 3600.0
# no other way of writing would help
_HOPELESS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)


# folders that become a result when they are whole; a Ctrl-C that ends the process at once removes them (__main__.py)
unfinished: set[Path] = set()


def is_still_at(file: IO[Any], path: Path) -> bool:
    """Whether an open file is still the one at `path`: false after it, or a parent folder, was removed or replaced.

    A file system that does not answer counts as one on which nothing has moved.
    """
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR)


class AtomicFile:
    """Bytes for `path`, invisible until `publish`.

    They go to a file without a name (O_TMPFILE), so that even kill -9 leaves nothing; where the file system does not
    support that (NFS) to a hidden temporary file, which the next writer in the folder removes once it is an hour old.
    """

    def __init__(self, path: Path, mode: int = 0o666, *, nameless: bool = True) -> None:
        self.path = path
        with _naming(path):
            self._open(path, mode, nameless)

    def _open(self, path: Path, mode: int, nameless: bool) -> None:
        self._temporary: Path | None = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
        try:
            if not nameless:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            os.stat("/proc/self/fd")  # through which the file gets its name
            self.file: IO[bytes] = os.fdopen(os.open(path.parent, os.O_TMPFILE | os.O_RDWR, mode), "w+b")
            self._named = False
        except (OSError, AttributeError) as error:
            if getattr(error, "errno", None) in _HOPELESS:
                raise
            _remove_stale(path.parent)
            self.file = os.fdopen(os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode), "w+b")
            self._named = True

    def write(self, data: bytes) -> None:
        """As `file.write`; its error, of a full disk, names the file."""
        with _naming(self.path):
            self.file.write(data)
            self.file.flush()

    def publish(self) -> None:
        """Write to disk, close, and rename the file to its name; an existing file is replaced."""
        with _naming(self.path):
            self._publish()

    def _publish(self) -> None:
        assert self._temporary is not None
        self.file.flush()
        # before the rename: after a power failure the name must not point to missing data
        os.fsync(self.file.fileno())
        if not self._named and self._link(self.path):
            self.file.close()
        else:
            if not self._named:
                self._link(self._temporary)
            self.file.close()
            os.replace(self._temporary, self.path)
        self._temporary = None

    def _link(self, path: Path) -> bool:
        """Link the nameless file to `path`; False if the name exists."""
        descriptor = self.file.fileno()
        try:
            # with a descriptor of a folder Python calls linkat, which follows the link in /proc; link would not. The
            # name is absolute, so the descriptor itself plays no part
            os.link(f"/proc/self/fd/{descriptor}", path.absolute(), src_dir_fd=descriptor, follow_symlinks=True)
        except FileExistsError:
            return False
        return True

    def discard(self) -> None:
        """Drop the temporary file; no effect after `publish`."""
        # `close` flushes the buffer, which fails on a full disk as it did before, and closes the file all the same
        with suppress(OSError):
            self.file.close()
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors name the file that was to be written, not its temporary name, which no user has seen."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from None


def write_whole(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file atomically; an existing file is replaced."""
    try:
        _write(path, data, mode, nameless=True)
    except OSError as error:
        if error.errno in _HOPELESS:
            raise
        # a file system that makes nameless files and does not link them
        _write(path, data, mode, nameless=False)


def _write(path: Path, data: bytes, mode: int, nameless: bool) -> None:
    new = AtomicFile(path, mode, nameless=nameless)
    try:
        new.write(data)
        new.publish()
    finally:
        new.discard()


def _remove_stale(folder: Path) -> None:
    for stale in folder.glob(".*.tmp"):
        try:
            if time.time() - stale.stat().st_mtime > _STALE:
                stale.unlink()
        except OSError:
            # its writer has just renamed or removed it; or it is not ours to remove
            continue
