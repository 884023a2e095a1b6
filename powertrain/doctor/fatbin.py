"""Which GPUs a shared library has code for, read from its ELF sections: no cuobjdump, no driver, no decompression.

nvcc puts a fatbin for each source file into the section .nv_fatbin. With relocatable device code (-rdc) the files'
fatbins are in __nv_relfatbin, and one linked from them in .nv_fatbin: that alone is run. A fatbin is a header and a
chain of entries, each the PTX or the machine code (SASS) for one arch. Only the headers are read, so a library of a
gigabyte takes a moment. NVIDIA documents no layout; this one was compared with cuobjdump, on libraries of CUDA
11.8 to 13.2 and in tests/doctor/test_fatbin.py.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from powertrain.doctor.elf import in_turn, opened, sections

_MAGIC = struct.pack("<I", 0xBA55ED50)
_FATBIN = struct.Struct("<IHHQ")  # magic, version, size of this header, size of the data after it
_ENTRY = struct.Struct("<HHIQ12xI8xQ")  # kind, version, size of this header, size of the code, ..., arch, ..., flags
_KINDS: dict[int, Literal["ptx", "sass"]] = {1: "ptx", 2: "sass"}
_SPECIFIC, _FAMILY = 0x100000, 0x200000  # sm_90a; sm_100f
_LINKED, _RELOCATABLE = b".nv_fatbin", b"__nv_relfatbin"


@dataclass(frozen=True, order=True)
class Code:
    """Code for one arch: 90 for sm_90 or compute_90; suffix "a" for that arch only, "f" for its family only."""

    arch: int
    suffix: str = ""
    kind: Literal["ptx", "sass"] = "sass"

    def __str__(self) -> str:
        return f"{'sm' if self.kind == 'sass' else 'compute'}_{self.arch}{self.suffix}"

    def runs_on(self, arch: int) -> bool:
        """SASS runs on its own major version from its minor on; PTX on anything as new. Suffixes narrow both.

        Source: CUDA C++ Programming Guide, "Compute Capability and Streaming Multiprocessor Versions".
        """
        same_major = arch // 10 == self.arch // 10
        if self.suffix == "a":
            return arch == self.arch
        if self.kind == "sass" or self.suffix == "f":
            return same_major and arch >= self.arch
        return arch >= self.arch


def fatbins(path: Path) -> list[frozenset[Code]]:
    """Contents of each fatbin of a library, one for each source file; empty: no ELF file, or no GPU code.

    Raises ValueError naming the file if it is an ELF file cut short or damaged.
    """
    with opened(path) as data:
        if data is None:
            return []
        by_name: dict[bytes, list[frozenset[Code]]] = {_LINKED: [], _RELOCATABLE: []}
        for section in in_turn(data, (one for one in sections(data) if one.name in by_name)):
            by_name[section.name] += _in_section(data, section.offset, section.offset + section.size)
        return by_name[_LINKED] or by_name[_RELOCATABLE]


def codes(path: Path) -> frozenset[Code]:
    """All the code of a library."""
    return frozenset().union(*fatbins(path))


def _in_section(data: mmap.mmap, at: int, end: int) -> Iterator[frozenset[Code]]:
    while 0 <= (at := data.find(_MAGIC, at, end)) <= end - _FATBIN.size:
        _, version, header, size = _FATBIN.unpack_from(data, at)
        if version != 1 or header < _FATBIN.size or at + header + size > end:
            at += 4
            continue
        yield frozenset(_entries(data, at + header, at + header + size))
        at += header + size


def _entries(data: mmap.mmap, at: int, end: int) -> Iterator[Code]:
    while at + _ENTRY.size <= end:
        kind, _, header, size, arch, flags = _ENTRY.unpack_from(data, at)
        if header < _ENTRY.size:
            return
        if kind in _KINDS:
            yield Code(arch, "a" if flags & _SPECIFIC else "f" if flags & _FAMILY else "", _KINDS[kind])
        at += header + size
