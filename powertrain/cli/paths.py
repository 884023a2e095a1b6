"""Checks of paths on a command line: files that must exist or be writable, and the error messages."""

import difflib
import errno
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer

from powertrain.runtime.console import Console
from powertrain.runtime.reading import named


def must_exist(paths: Sequence[str | Path], words: Sequence[str] = ()) -> None:
    """End the command with 2 where a path is not there; one line a path, with the nearest name beside it, or the
    nearest of `words` that the command takes in place of a path."""
    missing = [Path(path) for path in paths if not Path(path).exists()]
    for path in missing:
        if path.is_symlink():
            said = f"{path}: a link to {os.readlink(path)}, which is not there"
            Console(stderr=True, soft_wrap=True).print(said, markup=False, highlight=False)
            continue
        near = difflib.get_close_matches(path.name, [*_names_beside(path), *words], 1)
        meant = near and (near[0] if near[0] in words else path.with_name(near[0]))
        hint = f"; did you mean {meant}?" if near else ""
        Console(stderr=True, soft_wrap=True).print(
            f"{path}: no such file or folder{hint}", markup=False, highlight=False
        )
    if missing:
        raise typer.Exit(2)


def _names_beside(path: Path) -> list[str]:
    try:
        return [other.name for other in path.parent.iterdir()]
    except OSError:
        return []


def must_take_a_file(path: Path, name: str) -> None:
    """End the command with 2 where no new file can appear at `path`: before the work whose result would be lost."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not path.is_file():
            # /dev/stdout and the like, which are written as they are
            return
        # not os.access: it knows nothing of a file system that is read-only to root or has no room for a name
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        end_unwritten(f"{name} {path}", error)


@contextmanager
def one_line(*kinds: type[Exception]) -> Iterator[None]:
    """End the command with 2 and the words of an error of these kinds."""
    try:
        yield
    except kinds as error:
        Console(stderr=True, soft_wrap=True).print(named(error), markup=False, highlight=False)
        raise typer.Exit(2) from None


def unwritten(name: object, error: OSError) -> str:
    """One line that names what could not be written; the error of a full disk names no file."""
    return f"{name} cannot be written: {error.strerror or error}"


def end_unwritten(name: object, error: OSError) -> NoReturn:
    """End the command with 2 and that line."""
    Console(stderr=True, soft_wrap=True).print(unwritten(name, error), markup=False, highlight=False)
    raise typer.Exit(2) from None
