"""Documents of text files (one per file) and of jsonl files (one per line; plain, .gz or .zst).

A line of jsonl is an object with a string (or a list of strings, joined by blank lines) under a key, or just a string,
as GPT-NeoX's reader takes them; or it has the messages of a chat under the key. A folder is read whole, in the order
of its sorted paths, without hidden files and data sets (.bin/.idx).
"""

import codecs
import csv
import gzip
import hashlib
import io
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from powertrain.runtime import tracing
from powertrain.runtime.reading import one_line

# limit of a decompressed line: a longer one is damage, or a file made to exhaust memory
_MOST_LINE = 256 << 20
_ZST_BLOCK = 1 << 12

# entries of a folder: about two seconds on a local disk
_MANY = 100_000

LINES = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".ndjson")
# records that are not one a line
_RECORDS = (".json", ".csv", ".tsv", ".xlsx", ".arrow", ".feather")
# how files begin that are no text, and texts that are not UTF-8
_BEGINNINGS = {
    b"PAR1": "parquet", b"ARROW1": "arrow", b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstandard", b"BZh": "bzip2",
    b"PK\x03\x04": "zip", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16",
}  # fmt: skip
_PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip", ".7z", ".tar", ".tgz")


# a chat, as `datasets` and transformers have it: {"role": ..., "content": ...}
Messages = list[dict[str, Any]]


class BadDocument(ValueError):
    """A document cannot be read; the message gives file, line, expectation and content."""


class Raw(NamedTuple):
    """A document before it is decoded: `where` is FILE or FILE:LINE, `is_json` whether `data` is a line of jsonl.

    damage   defect of its file there; reading cannot continue
    """

    where: str
    data: bytes
    is_json: bool
    damage: str = ""


def find_files(inputs: Sequence[str | Path]) -> list[Path]:
    """All files of `inputs`, which are files and folders.

    Raises FileNotFoundError for an input that does not exist, ValueError for a folder with no file and for the root of
    all folders, which `$DATA/` is where DATA is not set.
    """
    files: list[Path] = []
    for name in map(Path, inputs):
        if name.is_dir():
            if name.resolve() == Path(name.resolve().anchor):
                raise ValueError(f"{name}: must be a file, a pipe or a folder of texts, got the root of all folders")
            # sorted, because a file system's own order differs between hosts, and the order of documents decides the
            # samples
            paths = [p for p in sorted(_walked(name)) if p.is_file() and not _hidden(p.relative_to(name))]
            inside = _without_tokens(name, paths)
            if not inside:
                got = "data sets alone, which are named by their prefix" if paths else "an empty folder"
                raise ValueError(f"{name}: must hold a file that is not hidden, got {got}")
            files += inside
        elif name.is_file() or name.is_fifo():
            _refuse_tables(name)
            files.append(name)
        elif name.exists():
            raise ValueError(f"{name}: must be a file, a pipe or a folder, got a device or socket")
        else:
            raise FileNotFoundError(f"{name}: no such file or folder")
    return files


def _without_tokens(folder: Path, files: list[Path]) -> list[Path]:
    """The files without .bin/.idx pairs, which an earlier `preprocess books/ --output books/tokens` has written."""
    known = {path for path in files if path.suffix in (".bin", ".idx")}
    prefixes = {path.with_suffix("") for path in known if {path.with_suffix(".bin"), path.with_suffix(".idx")} <= known}
    texts = [p for p in files if p.suffix not in (".bin", ".idx", ".sum") or p.with_suffix("") not in prefixes]
    if len(texts) < len(files):
        names = ", ".join(sorted(str(prefix.relative_to(folder)) for prefix in prefixes))
        tracing.warn(
            f"{folder}: the .bin, .idx and .sum of {one_line(ValueError(names), 100)} are left out: they hold tokens"
        )
    return texts


def _walked(folder: Path) -> Iterator[Path]:
    """All entries of a folder and of those within; a warning if there are so many that it takes seconds and may be a
    mistake."""
    for count, path in enumerate(folder.rglob("*")):
        if count == _MANY:
            tracing.warn(
                f"{folder} holds more than {_MANY} files and folders; all that are not hidden are read as texts"
            )
        yield path


def _refuse_tables(path: Path) -> None:
    """A file of records that would be read as one text, with its braces and commas. In a folder, as of source code, it
    is text like the others."""
    name = path.name.lower()
    ending = next((e for e in _RECORDS if name.removesuffix(".gz").removesuffix(".zst").endswith(e)), None)
    if ending is not None:
        raise ValueError(
            f"{path}: must be text, jsonl or parquet, got {ending[1:]}; with one JSON object a line name it .jsonl, "
            "else convert it (`datasets` writes jsonl by to_json); to train on the file as it is, name it .txt"
        )
    if name.endswith((".bin", ".idx")):
        raise ValueError(f"{path}: must be text, jsonl or parquet, got {path.suffix}, which holds tokens already")
    if name.endswith(_PACKED) and not is_lines(path):
        raise ValueError(f"{path}: must be unpacked first, got {path.suffix}; jsonl alone is read as .gz and .zst too")


def refuse_pipes(files: Iterable[Path], why: str) -> None:
    """Raise ValueError for a pipe, which would be empty when it is read again."""
    for path in files:
        if path.is_fifo():
            raise ValueError(f"{path}: must be a file or a folder, got a pipe, which cannot be read twice: {why}")


def is_lines(path: Path) -> bool:
    """Whether each line of a file is a document."""
    return path.name.lower().endswith(LINES)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def raw_documents(files: Iterable[Path]) -> Iterator[Raw]:
    """Every document, undecoded, in order. Empty lines are skipped; line numbers count from 1, empty lines included."""
    warned = False
    for path in files:
        if is_lines(path):
            with _open(path) as file:
                yield from _lines(path, file)
        else:
            data = path.read_bytes()
            # of a folder the first one: it may hold thousands
            warned = warned or warn_of_records(path, data)
            yield Raw(str(path), data, False)


def warn_of_records(path: Path, start: bytes) -> bool:
    """Say of a file that is read as one text if its lines are JSON objects or rows of a table; whether they are."""
    if begins_with_records(start):
        tracing.warn(
            f"{path}: its lines are JSON objects, and it is read as one text, with its braces; with a document a line "
            "its name must end in .jsonl"
        )
        return True
    columns = _columns(start)
    if columns:
        tracing.warn(
            f"{path}: its lines have {columns} columns each, as CSV's, and it is read as one text, with what separates "
            "them; for a document a row convert it (`datasets` reads CSV and writes jsonl by to_json)"
        )
    return columns > 0


# lines that must be rows of as many columns for a text to be taken for a table, and characters that are looked at
_ROWS, _LOOK = 8, 1 << 16


def _columns(start: bytes) -> int:
    """Columns of a table that a text begins with, separated by commas, semicolons or tabs; 0: it begins with none."""
    lines = start[:_LOOK].decode(errors="replace").lstrip("\ufeff").splitlines()[:_ROWS]
    for separator in ",;\t" if len(lines) == _ROWS else "":
        with suppress(csv.Error):
            widths = {len(row) for row in csv.reader(lines, delimiter=separator)}
            # two may be any text: a verse with a comma in each line, a list of words and their meanings
            if len(widths) == 1 and (width := widths.pop()) > 2:
                return width
    return 0


def begins_with_records(start: bytes) -> bool:
    """Whether two of the first lines are JSON objects: a comment may stand above them."""
    lines = filter(bytes.strip, io.BytesIO(start.removeprefix(codecs.BOM_UTF8)))
    return sum(map(_is_object, itertools.islice(lines, 4))) > 1


def _is_object(line: bytes) -> bool:
    # no text of another kind is parsed
    if not line.lstrip().startswith(b"{") or len(line) > _MOST_LINE:
        return False
    try:
        return bool(json.loads(line))
    except (ValueError, RecursionError):
        return False


def _open(path: Path) -> IO[bytes] | io.BufferedReader | gzip.GzipFile:
    suffix = path.suffix.lower()
    if suffix == ".zst":
        # buffered, for readline would otherwise call the decompressor for every piece of a line
        return io.BufferedReader(_Zst(path), 1 << 20)
    return gzip.open(path, "rb") if suffix == ".gz" else path.open("rb")


class _Zst(io.RawIOBase):
    """The bytes of a .zst file, of all its frames. zstandard's own reader takes a file that ends early for whole."""

    def __init__(self, path: Path) -> None:
        import zstandard

        # files of `zstd --long=31` need a window that the library refuses by default
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._file = path.open("rb")
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        while not self._ready:
            if not self._next():
                return 0
        count = min(len(into), len(self._ready))
        into[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _next(self) -> bool:
        """Decompress the next block: 4 kB expand to about 100 MB at most."""
        # tools that compress in parallel write several frames; the rest of a block belongs to the next one
        block = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
        block = block or self._file.read(_ZST_BLOCK)
        if self._frame is None or (self._frame.eof and block):
            self._frame = self._decompressor.decompressobj() if block else None
        if not block:
            if self._frame is not None and not self._frame.eof:
                raise EOFError("the file ends within a frame")
            return False
        self._ready = memoryview(self._frame.decompress(block))
        return True

    def close(self) -> None:
        self._file.close()
        super().close()


def _lines(path: Path, file: Any) -> Iterator[Raw]:
    """The lines of a file; one that is too long, and the place where it is damaged, as Raw.damage."""
    import zstandard

    number = 0
    try:
        # with a limit, so that a file without line ends cannot exhaust the memory
        while line := file.readline(_MOST_LINE):
            # PowerShell and editors on Windows begin files with a byte order mark, which is no part of the first line
            line = line if number else line.removeprefix(codecs.BOM_UTF8)
            number += 1
            where, damage = f"{path}:{number}", ""
            if len(line) == _MOST_LINE:
                # the rest of it
                while line and not line.endswith(b"\n"):
                    line = file.readline(_MOST_LINE)
                line, damage = b"", f"{where}: a line must have at most {_MOST_LINE >> 20} MiB, got a longer one"
            if damage or line.strip():
                yield Raw(where, line, True, damage)
    except (zstandard.ZstdError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        where = f"{path}:{number + 1}"
        yield Raw(where, b"", True, f"{where}: must be whole {path.suffix} data, got {one_line(error)}")


def texts(files: Iterable[Path], key: str = "text", *, skip_bad: bool = False) -> Iterator[str]:
    """The text of every document, in order. A bad one raises BadDocument, or is left out with `skip_bad`."""
    for raw in raw_documents(files):
        try:
            yield text_of(raw, key)
        except BadDocument:
            if not skip_bad:
                raise


def text_of(raw: Raw, key: str = "text") -> str:
    """The text of a document; of a chat its messages' contents. Raises BadDocument naming file and line."""
    document = document_of(raw, key)
    return document if isinstance(document, str) else "\n\n".join(str(m.get("content") or "") for m in document)


def document_of(raw: Raw, key: str = "text") -> str | Messages:
    """The text of a document, or the messages of a chat. Raises BadDocument naming file and line."""
    if raw.damage:
        raise BadDocument(raw.damage)
    try:
        # editors on Windows begin text files with a byte order mark, which is no part of the text
        text = raw.data.decode("utf-8-sig" if not raw.is_json else "utf-8")
    except UnicodeDecodeError as error:
        at = f"byte 0x{raw.data[error.start]:02x} at {error.start}"
        raise BadDocument(f"{raw.where}: must be UTF-8 text, got {at}{other_kind(raw.data)}") from None
    if not raw.is_json:
        return text
    document = _from_json(raw.where, text, key)
    check_surrogates(raw.where, document)
    return document


def other_kind(start: bytes) -> str:
    """The format of a file that is not UTF-8 text, detected by its first bytes; "" if unknown."""
    return next((f": it is {kind}" for begins, kind in _BEGINNINGS.items() if start.startswith(begins)), "")


def check_surrogates(where: str, value: Any) -> None:
    """JSON may escape half of a surrogate pair, which Python reads and no UTF-8 file can hold."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = f"the lone surrogate U+{ord(text[error.start]):04X} at {error.start}"
        raise BadDocument(f"{where}: must be text that UTF-8 can represent, got {at}") from None


def _from_json(where: str, line: str, key: str) -> str | Messages:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        got = f"{_shortened(line)!r} ({one_line(error, 120)})"
        raise BadDocument(f"{where}: must be a line of JSON, got {got}") from None
    if isinstance(value, dict):
        if key not in value:
            raise BadDocument(f"{where}: must have a key {key!r}, got keys {_shortened(', '.join(value))!r}")
        value = value[key]
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return "\n\n".join(value)
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("role"), str) for part in value):
        return value
    if not isinstance(value, str):
        raise BadDocument(f"{where}: must hold a string under {key!r}, got {_shortened(repr(value))}")
    return value


def _shortened(text: str) -> str:
    text = text.strip()
    return text if len(text) <= 60 else f"{text[:57]}..."


def digest(files: Sequence[Path]) -> str:
    """A hash of the contents and order of the files, at about 1 GB/s. Raises ValueError for a pipe."""
    refuse_pipes(files, "a run looks for its tokens in the cache, then tokenizes it; `powertrain preprocess` takes it")
    total = hashlib.blake2b(digest_size=16)
    for path in files:
        one = hashlib.blake2b(digest_size=32)
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                one.update(block)
        # the same bytes are one document as .txt and many as .jsonl
        total.update(one.digest() + (b"j" if is_lines(path) else b"t"))
    return total.hexdigest()
