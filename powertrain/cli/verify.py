"""`powertrain verify`: read checkpoints and data sets completely, and compare them with their stored checksums."""

from pathlib import Path
from typing import Annotated

import typer

from powertrain.runtime.console import Console
from powertrain.runtime.reading import named


def _nothing(path: Path) -> str:
    # a Hugging Face folder is a checkpoint too, without anything to compare it with
    got = "nothing that has checksums" if path.exists() else "no such path"
    return f"{path} must be a run of Powertrain, a checkpoint of one or a data set (.bin, .idx), got {got}"


def verify(
    paths: Annotated[list[Path], typer.Argument(help="runs, checkpoints, and prefixes of .bin/.idx data sets")],
) -> None:
    """Read checkpoints and data sets completely and compare them with their checksums.

    The exit code is 1 if one is damaged, else 2 if a path has nothing to compare.

    A start of a run compares a checkpoint it resumes, and of a data set all but the .bin's contents.

    \b
    powertrain verify runs/quickstart data/corpus
    """
    console, errors = (Console(soft_wrap=True, highlight=False, stderr=stderr) for stderr in (False, True))
    damaged, unknown = 0, 0
    if not any(Path(f"{path}{ending}").exists() for path in paths for ending in ("", ".bin", ".idx")):
        for path in paths:
            errors.print(_nothing(path), markup=False)
        raise typer.Exit(2)
    from powertrain.train.checkpoint import store as checkpoint_store
    from powertrain.train.data import indexed

    for path in paths:
        prefix = path.with_suffix("") if path.suffix in (".bin", ".idx", ".sum") else path
        folders = [path] if (path / "checkpoint.json").is_file() else []
        folders = folders or [
            *checkpoint_store.checkpoints_in(path),
            *checkpoint_store.checkpoints_in(path / "checkpoints"),
        ]
        is_data = indexed.index_path(prefix).exists() or indexed.values_path(prefix).exists()
        if not folders and not is_data:
            errors.print(_nothing(path), markup=False)
            unknown += 1
        for one in [*folders, *([prefix] if is_data else [])]:
            try:
                if one in folders:
                    checkpoint_store.verify(one, checkpoint_store.read_facts(one))
                else:
                    indexed.IndexedData(one)
                    indexed.verify(one)
            except (ValueError, OSError) as error:
                console.print(named(error), markup=False)
                damaged += 1
            else:
                console.print(f"{one}: whole", markup=False)
    if damaged or unknown:
        raise typer.Exit(1 if damaged else 2)
