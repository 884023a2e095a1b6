"""Text that every machine has: the source files of Python's own standard library, some 12 MB. Nothing is downloaded."""

import hashlib
import sysconfig
from functools import cache
from pathlib import Path
from typing import NamedTuple

# tests are left out since some distributions ship none: so files depend on Python's version only, by and large
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_HELD_OUT = 20  # one file of so many


class Files(NamedTuple):
    train: list[Path]
    validation: list[Path]


@cache
def quickstart_files(folder: Path | None = None) -> Files:
    """The standard library's .py files that are UTF-8, sorted by path; about one in 20 is held out for validation.

    Whether a file is held out depends on its path within the library alone, so it stays so in every run.
    Raises FileNotFoundError where Python has no source files (a zipped or frozen standard library).
    """
    root = folder or Path(sysconfig.get_path("stdlib"))
    train: list[Path] = []
    validation: list[Path] = []
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if _LEFT_OUT.isdisjoint(inside.parts) and _is_text(path):
            digest = hashlib.blake2b(inside.as_posix().encode(), digest_size=4).digest()
            (train if int.from_bytes(digest, "little") % _HELD_OUT else validation).append(path)
    if not train or not validation:
        raise FileNotFoundError(
            f"quickstart: {root} must hold the standard library's .py files, got {len(train) + len(validation)}; "
            "name a text file or folder instead"
        )
    return Files(train, validation)


def _is_text(path: Path) -> bool:
    try:
        path.read_bytes().decode()
    except UnicodeDecodeError:
        return False
    return True
