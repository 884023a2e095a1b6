"""The console of a run, whose failure does not end the run: a closed pipe, a lost terminal, a full disk."""

import errno
import os
import sys
from contextlib import suppress
from typing import Any, TextIO

from powertrain.runtime import tracing
from powertrain.runtime.console import Console


def screen(*, quiet: bool = False, stderr: bool = False) -> Console:
    """A console on stdout or stderr. A write error is reported once on stderr; later output may be lost. Characters
    that its encoding lacks are escaped.

    Without it Ctrl-C in `powertrain train run.yml | tee log` would lose the run's last checkpoint: tee ends first, and
    rich answers the closed pipe with SystemExit.
    """
    file = sys.stderr if stderr else sys.stdout
    # None: a process whose stdout was closed when it started
    return Console(file=None if file is None else _Lasting(file), quiet=quiet, stderr=stderr)


class _Lasting:
    """A text file whose `write` and `flush` never fail; all else is the file's."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        try:
            try:
                return self._file.write(text)
            except UnicodeEncodeError as error:
                # a path or a text that the locale has no characters for
                self._file.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
                return len(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            self._lose(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _lose(self, error: OSError) -> None:
        tracing.warn(f"the screen cannot be written: {error.strerror}; the run continues, and its files are written")
        if error.errno not in (errno.EPIPE, errno.EIO):
            # a full disk may have room again
            return
        # its reader is gone; buffered text would fail again when the interpreter ends, with exit code 120
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._file.fileno())
            os.close(null)
