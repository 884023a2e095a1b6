"""Names on a command line that must be there, looked at before anything slow is imported."""

import difflib
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console


def must_exist(paths: Sequence[str | Path], code: int = 2) -> None:
    """End the command with `code` where a path is not there; one line a path, with the nearest name beside it."""
    missing = [Path(path) for path in paths if not Path(path).exists()]
    for path in missing:
        near = difflib.get_close_matches(path.name, _names_beside(path), 1)
        hint = f"; did you mean {path.with_name(near[0])}?" if near else ""
        Console(stderr=True, soft_wrap=True).print(
            f"{path}: no such file or folder{hint}", markup=False, highlight=False
        )
    if missing:
        raise typer.Exit(code)


def _names_beside(path: Path) -> list[str]:
    try:
        return [other.name for other in path.parent.iterdir()]
    except OSError:
        return []
