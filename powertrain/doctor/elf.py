"""The sections and dynamic symbols of an ELF file. 64-bit little-endian only: every platform that CUDA has."""

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

_HEADER = struct.Struct("<IIQQQQII8xQ")  # name, type, flags, address, offset, size, link, info, entry size
_SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size
_DYNSYM, _WEAK = 11, 2


class Section(NamedTuple):
    name: bytes
    type: int
    offset: int
    size: int
    link: int  # the section that belongs to it: a symbol table's names


@contextmanager
def opened(path: Path) -> Iterator[mmap.mmap | None]:
    """The file's bytes, or None: it is no ELF file of ours. A file cut short raises ValueError naming it."""
    with path.open("rb") as file:
        if file.read(6) != b"\x7fELF\x02\x01":
            yield None
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                yield data
            except struct.error:
                raise ValueError(f"{path}: must be a whole ELF file, is cut short at {len(data)} bytes") from None


def sections(data: mmap.mmap) -> list[Section]:
    table, entry, count, names = struct.unpack_from("<Q10xHHH", data, 0x28)
    if not table:
        return []
    rows = [_HEADER.unpack_from(data, table + index * entry) for index in range(count)]
    names_at = rows[names][4]
    return [Section(_text(data, names_at + row[0]), row[1], row[4], row[5], row[6]) for row in rows]


def symbols(data: mmap.mmap, defined: bool) -> Iterator[bytes]:
    """Names of the dynamic symbols that the file defines, or that it must find elsewhere (weak ones need not be)."""
    all_of_them = sections(data)
    for section in all_of_them:
        if section.type != _DYNSYM:
            continue
        names_at = all_of_them[section.link].offset
        for name, info, _, where, _, _ in _SYMBOL.iter_unpack(data[section.offset : section.offset + section.size]):
            if name and (where != 0 if defined else where == 0 and info >> 4 != _WEAK):
                yield _text(data, names_at + name)


def _text(data: mmap.mmap, at: int) -> bytes:
    return data[at : data.find(b"\0", at)]
