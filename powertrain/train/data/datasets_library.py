"""Documents of the `datasets` library: the Hub, folders that it saved, parquet; extra `powertrain[data]`.

hf:ORG/NAME           of the Hub; subset, split, revision and streaming as `datasets.load_dataset` takes them
a folder              written by `save_to_disk`, or with parquet files in it, laid out as on the Hub
FILE.parquet
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from powertrain.runtime import tracing
from powertrain.runtime.extras import require
from powertrain.runtime.reading import one_line
from powertrain.train.config.schema import DataSource
from powertrain.train.data.corpus import Raw, digest, find_files

HUB = "hf:"
# builders of the library, by the endings of their files
_BUILDERS = {".parquet": "parquet", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv", ".txt": "text"}
_SAVED = ("state.json", "dataset_dict.json", "dataset_info.json")


def reads(path: str) -> bool:
    """Whether `path` is read through the `datasets` library."""
    folder = Path(path)
    if path.startswith(HUB) or path.lower().endswith(".parquet"):
        return True
    return folder.is_dir() and (_is_saved(folder) or next(folder.rglob("*.parquet"), None) is not None)


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _SAVED)


def unused(source: DataSource, *, is_tokens: bool) -> str:
    """The error for an option that this kind of source ignores; "" if there is none.

    is_tokens   it is a .bin/.idx prefix
    """
    path, hub = Path(source.path), "data sets of the Hub (hf:ORG/NAME)"
    if source.path.startswith(HUB):
        return ""
    known = {
        "revision": hub,
        "subset": f"{hub} and folders with parquet files",
        "split": f"{hub} and folders of splits",
    }
    if is_tokens:
        known["documents"] = "text and rows"
    elif path.is_dir() and reads(source.path):
        # one that `save_to_disk` wrote has splits if it is a DatasetDict
        has_splits = not _is_saved(path) or (path / "dataset_dict.json").is_file()
        for name in [*(["split"] if has_splits else []), *([] if _is_saved(path) else ["subset"])]:
            del known[name]
    for name, having in known.items():
        given = getattr(source, name)
        if given != DataSource.model_fields[name].default:
            return f"{name} must be left out, which only {having} have, got {given}"
    return ""


def identity(source: DataSource) -> str:
    """What decides the documents, for names of cached files: the files' contents, or names and revision on the Hub."""
    # contents of a Hub data set would have to be downloaded to be hashed
    where = source.path if source.path.startswith(HUB) else digest(find_files([source.path]))
    return f"{where} {source.subset} {source.split} {source.revision} {source.documents}"


def rows(source: DataSource, key: str | None) -> Iterator[Raw]:
    """Documents of a source, each as a line of jsonl with its `key` alone, or with all keys for None.

    Raises MissingExtra where `datasets` is not installed, ValueError naming the source.
    """
    require("data", f"data {source.path}")
    try:
        for number, row in enumerate(itertools.islice(_open(source), source.documents), 1):
            # a row without the key keeps the names of its own, for the error
            kept = row if key is None else {key: row[key]} if key in row else dict.fromkeys(row)
            yield Raw(f"{source.path}:{number}", json.dumps(kept, default=str).encode(), True)
    except Exception as error:  # the library's readers raise what theirs do: pyarrow, requests, huggingface_hub
        raise ValueError(f"data {source.path}: cannot be read: {one_line(error)}") from error


def _open(source: DataSource) -> Any:
    import datasets

    path = source.path
    if path == HUB:
        raise ValueError(f"must be {HUB}ORG/NAME")
    if path.startswith(HUB):
        return datasets.load_dataset(
            path.removeprefix(HUB), source.subset, split=source.split, revision=source.revision,
            streaming=source.streaming,
        )  # fmt: skip
    # streaming, because our own cache keeps the tokens: a second copy as Arrow files would only fill the disk
    if Path(path).is_file():
        return datasets.load_dataset("parquet", data_files=path, split="train", streaming=True)
    if not _is_saved(Path(path)):
        rows = datasets.load_dataset(path, source.subset, split=source.split, streaming=True)
        _warn_of_others(Path(path), rows.info.builder_name)
        return rows
    # load_dataset refuses folders of save_to_disk and asks for this call
    saved = datasets.load_from_disk(path)
    if not isinstance(saved, datasets.DatasetDict):
        return saved
    if source.split not in saved:
        raise ValueError(f"split must be one of {', '.join(saved)}, got {source.split!r}")
    return saved[source.split]


def _warn_of_others(folder: Path, builder: str | None) -> None:
    """The library reads the files of one kind, the most frequent one or that of a README.md, and none of the others."""
    files = [(path, path.name.lower().removesuffix(".gz").removesuffix(".zst")) for path in sorted(folder.rglob("*"))]
    kinds = {path: _BUILDERS.get(Path(name).suffix) for path, name in files if path.is_file()}
    others = [path for path, kind in kinds.items() if kind not in (None, builder)]
    if others and builder in kinds.values():
        words = "file is" if len(others) == 1 else "files are"
        tracing.warn(
            f"data {folder}: its {builder} files alone are read; {len(others)} other {words} left out, the first: "
            f"{others[0].relative_to(folder)}"
        )
