"""Text as files hold it: one document a text file, or one a line of jsonl (plain, .gz or .zst).

A line of jsonl is an object with a string (or a list of strings, joined by blank lines) under a key, or just a string,
as GPT-NeoX's reader takes them. A folder is read whole, in the order of its sorted paths, hidden files left out.
"""

import gzip
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

LINES = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".ndjson")


class BadDocument(ValueError):
    """A document cannot be read; the message says file, line, what was expected and what was there."""


class Raw(NamedTuple):
    """A document before it is decoded: `where` is FILE or FILE:LINE, `is_json` whether `data` is a line of jsonl."""

    where: str
    data: bytes
    is_json: bool


def find_files(inputs: Sequence[str | Path]) -> list[Path]:
    """The files that `inputs`, files and folders, stand for.

    Raises FileNotFoundError for an input that does not exist, ValueError for a folder with no file.
    """
    files: list[Path] = []
    for name in map(Path, inputs):
        if name.is_dir():
            inside = [p for p in sorted(name.rglob("*")) if p.is_file() and not _hidden(p.relative_to(name))]
            if not inside:
                raise ValueError(f"{name}: must hold a file that is not hidden, got an empty folder")
            files += inside
        elif name.exists():
            files.append(name)
        else:
            raise FileNotFoundError(f"{name}: no such file or folder")
    return files


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def raw_documents(files: Iterable[Path]) -> Iterator[Raw]:
    """Every document, undecoded, in order. Empty lines are skipped; line numbers count from 1, empty lines included."""
    for path in files:
        if path.name.endswith(LINES):
            with _open(path) as lines:
                for number, line in enumerate(_lines(path, lines), 1):
                    if line.strip():
                        yield Raw(f"{path}:{number}", line, True)
        else:
            yield Raw(str(path), path.read_bytes(), False)


def _open(path: Path) -> IO[bytes] | io.BufferedReader | gzip.GzipFile:
    if path.suffix == ".zst":
        import zstandard

        reader = zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True, closefd=True)
        return io.BufferedReader(reader, 1 << 20)
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _lines(path: Path, file: Iterable[bytes]) -> Iterator[bytes]:
    import zstandard

    read = 0
    try:
        for line in file:
            read += 1
            yield line
    except (zstandard.ZstdError, EOFError, gzip.BadGzipFile) as error:
        raise BadDocument(f"{path}:{read + 1}: must be whole {path.suffix} data, got {error}") from None


def texts(files: Iterable[Path], key: str = "text", *, skip_bad: bool = False) -> Iterator[str]:
    """The text of every document, in order. A bad one raises BadDocument, or is left out with `skip_bad`."""
    for raw in raw_documents(files):
        try:
            yield text_of(raw, key)
        except BadDocument:
            if not skip_bad:
                raise


def text_of(raw: Raw, key: str = "text") -> str:
    """The text of a document. Raises BadDocument naming file and line."""
    try:
        text = raw.data.decode("utf-8-sig" if not raw.is_json else "utf-8")
    except UnicodeDecodeError as error:
        at = f"byte 0x{raw.data[error.start]:02x} at {error.start}"
        raise BadDocument(f"{raw.where}: must be UTF-8 text, got {at}") from None
    return _from_json(raw.where, text, key) if raw.is_json else text


def _from_json(where: str, line: str, key: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadDocument(f"{where}: must be a line of JSON, got {_shortened(line)!r} ({error})") from None
    if isinstance(value, dict):
        if key not in value:
            raise BadDocument(f"{where}: must have a key {key!r}, got keys {_shortened(', '.join(value))!r}")
        value = value[key]
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return "\n\n".join(value)
    if not isinstance(value, str):
        raise BadDocument(f"{where}: must hold a string under {key!r}, got {_shortened(repr(value))}")
    return value


def _shortened(text: str) -> str:
    text = text.strip()
    return text if len(text) <= 60 else f"{text[:57]}..."


def digest(files: Sequence[Path]) -> str:
    """A hash of the contents and order of the files, at about 1 GB/s."""
    total = hashlib.blake2b(digest_size=16)
    for path in files:
        one = hashlib.blake2b(digest_size=32)
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                one.update(block)
        total.update(one.digest() + (b"j" if path.name.endswith(LINES) else b"t"))
    return total.hexdigest()
