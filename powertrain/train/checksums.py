"""CRC-32 of files, written with them and compared before they are used. zlib: 6 GB/s in memory, 4 from a file."""

import json
import os
import zlib
from pathlib import Path
from typing import Any

from powertrain.runtime.atomic_file import AtomicFile
from powertrain.runtime.reading import read_json

_BLOCK = 1 << 22


class Damaged(ValueError):
    """A file's content differs from the bytes written; the message names it, the expectation and the finding."""


def crc_of(file: Path) -> str:
    """The CRC-32 of a file's bytes, in hex."""
    value = 0
    with file.open("rb") as opened:
        while block := opened.read(_BLOCK):
            value = zlib.crc32(block, value)
    return shown(value)


def crc_of_json(content: Any) -> str:
    """The CRC-32 of JSON content, whatever the order of its keys and its spaces."""
    return shown(zlib.crc32(json.dumps(content, sort_keys=True).encode()))


def shown(value: int) -> str:
    return f"{value & 0xFFFFFFFF:08x}"


def compare(file: Path, size: int, crc: str | None) -> None:
    """Raise Damaged unless the file has this size and, where it is known, this CRC-32."""
    got = file.stat().st_size if file.is_file() else None
    if got != size:
        raise Damaged(f"{file}: must have {size} bytes, got {'no file' if got is None else got}")
    if crc is not None and (actual := crc_of(file)) != crc:
        raise Damaged(f"{file}: must have the CRC-32 {crc} that was written, got {actual}: the file is damaged")


def write_sums(file: Path, sums: dict[str, tuple[int, str]]) -> None:
    """FILE.sum: name beside it -> (bytes, CRC-32). It appears whole or not at all."""
    new = AtomicFile(file)
    try:
        new.write((json.dumps(sums, indent=1) + "\n").encode())
        new.publish()
    finally:
        new.discard()


def read_sums(file: Path) -> dict[str, tuple[int, str]]:
    """Read the file of `write_sums`. Raises OSError, or ValueError naming the file."""
    sums = read_json(file, most_bytes=1 << 20)
    if not isinstance(sums, dict) or not all(
        isinstance(known, list) and len(known) == 2 and isinstance(known[0], int) and isinstance(known[1], str)
        for known in sums.values()
    ):
        raise ValueError(f"{file} must give bytes and CRC-32 of files, got something else")
    return {name: (size, crc) for name, (size, crc) in sums.items()}


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
