"""The sections and dynamic symbols of an ELF file. 64-bit little-endian only: every platform that CUDA has."""

import mmap
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

_HEADER = struct.Struct("<IIQQQQII8xQ")  # name, type, flags, address, offset, size, link, info, entry size
_SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size
_DYNSYM, _WEAK = 11, 2
_NOTHING, _NO_BITS = 0, 8  # types of sections without bytes in the file
_LONGEST = 1 << 16  # bytes of a name; C++ names of a few thousand exist


class Section(NamedTuple):
    name: bytes
    type: int
    offset: int
    size: int
    link: int  # the section that belongs to it: a symbol table's names


@contextmanager
def opened(path: Path) -> Iterator[mmap.mmap | None]:
    """The file's bytes, or None: it is no ELF file of ours. One cut short or damaged raises ValueError naming it."""
    # a pipe is not waited for
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode) or file.read(6) != b"\x7fELF\x02\x01":
            yield None
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                yield data
            except struct.error:
                raise ValueError(f"{path}: must be a whole ELF file, is cut short at {len(data)} bytes") from None
            except _Damaged as error:
                raise ValueError(f"{path}: must be a whole ELF file, {error}") from None


class _Damaged(ValueError):
    pass


def sections(data: mmap.mmap) -> list[Section]:
    """In the file's order; each lies in the file, but for those that take no room in it."""
    table, entry, count, names = struct.unpack_from("<Q10xHHH", data, 0x28)
    if not table or not count:
        return []
    if entry < _HEADER.size or names >= count:
        raise _Damaged(f"got sections of {entry} bytes, their names in {names} of {count}, at byte {0x28 + 18}")
    if table + entry * count > len(data):
        # where a file was cut, most often
        raise struct.error
    rows = [_HEADER.unpack_from(data, table + index * entry) for index in range(count)]
    names_at = rows[names][4]
    for index, row in enumerate(rows):
        if row[1] not in (_NOTHING, _NO_BITS) and row[4] + row[5] > len(data):
            raise _Damaged(f"got a section that ends behind its {len(data)} bytes, at byte {table + index * entry}")
    everything = [Section(_text(data, names_at + row[0]), row[1], row[4], row[5], row[6]) for row in rows]
    return [section for section in everything if section.type not in (_NOTHING, _NO_BITS)]


def in_turn(data: mmap.mmap, wanted: Iterable[Section]) -> Iterator[Section]:
    """The sections; more bytes in all than the file has are damage, not work."""
    left = len(data)
    for section in wanted:
        left -= section.size
        if left < 0:
            raise _Damaged(f"got sections over each other, at byte {section.offset}")
        yield section


def symbols(data: mmap.mmap, defined: bool) -> Iterator[bytes]:
    """Names of the dynamic symbols that the file defines, or that it must find elsewhere (weak ones need not be)."""
    all_of_them = sections(data)
    for section in in_turn(data, (one for one in all_of_them if one.type == _DYNSYM)):
        names_at = _names_of(data, section)
        for name, info, _, where, _, _ in _SYMBOL.iter_unpack(data[section.offset : section.offset + section.size]):
            if name and (where != 0 if defined else where == 0 and info >> 4 != _WEAK):
                yield _text(data, names_at + name)


def _names_of(data: mmap.mmap, section: Section) -> int:
    """Offset of a symbol table's names."""
    table, entry, count = struct.unpack_from("<Q10xHH", data, 0x28)
    if section.link >= count:
        raise _Damaged(f"got symbols whose names are in section {section.link} of {count}, at byte {section.offset}")
    return int(_HEADER.unpack_from(data, table + section.link * entry)[4])


def _text(data: mmap.mmap, at: int) -> bytes:
    end = data.find(b"\0", at, at + _LONGEST) if at < len(data) else -1
    if end < 0:
        raise _Damaged(f"got a name that does not end, at byte {at}")
    return data[at:end]
