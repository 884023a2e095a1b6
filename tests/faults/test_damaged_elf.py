"""ELF files of any bytes: what they hold, or a ValueError that names the file; in bounded time and memory."""

import os
import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from powertrain.doctor import elf as reader
from powertrain.doctor.fatbin import codes, fatbins
from powertrain.doctor.symbols import _names
from tests.doctor.test_fatbin import elf, entry

_ENTRIES = [entry(2, 75, 0x11), entry(1, 80, 0x8011), entry(2, 90, 0x100011)]


def _read(file: Path) -> None:
    """All that `doctor` reads of a library."""
    for read in (fatbins, lambda path: _names(path, True), lambda path: _names(path, False)):
        try:
            read(file)
        except ValueError as error:
            assert str(file) in str(error) and len(str(error)) < 400, error


def _with_symbols() -> bytes:
    """A file with a dynamic symbol table, by hand."""
    names = b"\0_ZN3c104fineEv\0_ZN2at7missingEv\0.dynsym\0.dynstr\0"
    symbols = bytes(24) + struct.pack("<IBBHQQ", 1, 0x12, 0, 3, 0, 0) + struct.pack("<IBBHQQ", 16, 0x12, 0, 0, 0, 0)
    table = 64 + len(names) + len(symbols)
    header = (b"\x7fELF\x02\x01\x01" + bytes(33) + struct.pack("<Q10xHHH", table, 64, 3, 2)).ljust(64, b"\0")
    row = struct.Struct("<IIQQQQII8xQ")
    rows = [
        bytes(64),
        row.pack(33, 11, 0, 0, 64 + len(names), len(symbols), 2, 0, 24),
        row.pack(41, 3, 0, 0, 64, len(names), 0, 0, 0),
    ]
    return header + names + symbols + b"".join(each.ljust(64, b"\0") for each in rows)


def _huge(data: bytearray, chance: random.Random) -> None:
    """A field as large as it can be, or such that a sum of two overflows."""
    size = chance.choice([2, 4, 8])
    at = chance.randrange(0, len(data) - 8)
    data[at : at + size] = chance.choice([0, 1, (1 << 8 * size) - 1, 1 << (8 * size - 1), len(data)]).to_bytes(
        size, "little"
    )


def _bits(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.randint(1, 30)):
        data[chance.randrange(6, len(data))] ^= 1 << chance.randrange(8)


def _cut(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(6, len(data)) :]


_WAYS: list[Callable[[bytearray, random.Random], None]] = [_huge, _bits, _cut]


@pytest.mark.parametrize("count", [1500, pytest.param(20_000, marks=pytest.mark.slow)])
def test_damaged_files(count: int, tmp_path: Path) -> None:
    chance, file = random.Random(14), tmp_path / "x.so"
    wholes = [elf(_ENTRIES, _ENTRIES[:1]), elf(_ENTRIES * 20, section=b"__nv_relfatbin"), _with_symbols()]
    file.write_bytes(wholes[2])
    assert _names(file, True) == [b"_ZN3c104fineEv"] and _names(file, False) == [b"_ZN2at7missingEv"]
    tracemalloc.start()
    try:
        for _ in range(count):
            data = bytearray(chance.choice(wholes))
            for _ in range(chance.randint(1, 3)):
                if len(data) > 64:
                    chance.choice(_WAYS)(data, chance)
            file.write_bytes(data)
            _read(file)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_fatbin_of_no_size(tmp_path: Path) -> None:
    """Its header said that it ends where it begins: reading it went on until memory was gone."""
    file = tmp_path / "x.so"
    data = bytearray(elf([_ENTRIES[0]]))
    at = data.index(struct.pack("<I", 0xBA55ED50))
    data[at + 6 : at + 16] = bytes(10)
    file.write_bytes(data)
    assert fatbins(file) == []


@pytest.mark.parametrize("sections", [2000, pytest.param(65_000, marks=pytest.mark.slow)])
def test_sections_over_each_other(sections: int, tmp_path: Path) -> None:
    """Each the whole file: a library of a megabyte would be read as often as it has sections."""
    body, names = bytes(1 << 20), b"\0.nv_fatbin\0"
    table = 64 + len(body) + len(names)
    header = (b"\x7fELF\x02\x01\x01" + bytes(33) + struct.pack("<Q10xHHH", table, 64, sections, 0)).ljust(64, b"\0")
    row = struct.Struct("<IIQQQQII8xQ")
    first = row.pack(0, 3, 0, 0, 64 + len(body), len(names), 0, 0, 0)
    rows = first.ljust(64, b"\0") + row.pack(1, 1, 0, 0, 0, table, 0, 0, 0).ljust(64, b"\0") * (sections - 1)
    file = tmp_path / "x.so"
    file.write_bytes(header + body + names + rows)
    start = time.process_time()
    with pytest.raises(ValueError, match=r"x\.so: must be a whole ELF file, got sections over each other"):
        codes(file)
    assert time.process_time() - start < 10


def test_names_without_an_end(tmp_path: Path) -> None:
    file = tmp_path / "x.so"
    data = _with_symbols().replace(b"\0.dynsym\0.dynstr\0", b"x.dynsymx.dynstrx")
    file.write_bytes(data.rstrip(b"\0") + b"x" * 200)
    _read(file)


def test_what_is_no_file(tmp_path: Path) -> None:
    pipe, folder = tmp_path / "a.so", tmp_path / "b.so"
    os.mkfifo(pipe)
    folder.mkdir()
    assert fatbins(pipe) == []
    with reader.opened(pipe) as data:
        assert data is None
    assert _names(folder, True) == []
