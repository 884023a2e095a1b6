"""Folders and the log of one build."""

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO


class BuildFiles:
    """Files of one build.

    folder    where shims and logs are kept: the given one, or a temporary one where that cannot be written
    sockets   folder of the socket for launchers
    log       the log's path
    say       receives a line about what is not as asked
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._say = say
        # folders of this build alone
        self._temporary_folders: list[Path] = []
        self._file: IO[bytes] | None = None
        self.folder = self._writable(folder)
        self.log = self.folder / "logs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        self.sockets = self._sockets()

    def open_log(self) -> None:
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.log.open("wb", buffering=0)
        except OSError as error:
            self._stop(error)

    def write(self, part: bytes) -> None:
        """Write to the log; a full disk ends the log, not the build."""
        if not self._file:
            return
        try:
            while part:
                part = part[self._file.write(part) :]
        except OSError as error:
            self._stop(error)

    def _stop(self, error: OSError) -> None:
        if self._file:
            self._file.close()
        self._file = None
        self._say(f"{self.log} cannot be written ({error.strerror}): the build goes on without its log")

    def close(self) -> None:
        if self._file:
            self._file.close()
        for directory in self._temporary_folders:
            # it holds the log, which outlives the build
            if directory != self.folder:
                shutil.rmtree(directory, ignore_errors=True)

    def _writable(self, folder: Path) -> Path:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(b"x" * 4096)
            return folder
        except OSError as error:
            directory = self._temporary(None)
            self._say(f"{folder} cannot be written ({error.strerror}): log and shims are in {directory}")
            return directory

    def _sockets(self) -> Path:
        """Folder of the socket for launchers: constant, so that a build folder which remembers them works; a new one
        where that belongs to another user."""
        usual = Path("/tmp", f"powertrain-build-{os.getuid()}")
        try:
            usual.mkdir(mode=0o700, exist_ok=True)
            facts = usual.lstat()
            if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & stat.S_IWOTH:
                return usual
        except OSError:
            pass
        directory = self._temporary("/tmp" if os.access("/tmp", os.W_OK) else None)
        self._say(f"{usual} is not this user's folder: {directory} is used instead")
        return directory

    def _temporary(self, parent: str | None) -> Path:
        directory = Path(tempfile.mkdtemp(prefix="powertrain-build-", dir=parent))
        self._temporary_folders.append(directory)
        return directory
