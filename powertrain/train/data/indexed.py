"""Megatron's and GPT-NeoX's indexed data sets: PREFIX.bin holds the values, PREFIX.idx where each document lies.

    .idx, little endian: 9 bytes "MMIDIDX\\0\\0" | u64 version 1 | u8 dtype code | u64 N | u64 D
                         i32 sizes [N], in values | i64 pointers [N], in bytes | i64 documents [D], in sequences
                         (Megatron-core's multimodal files go on with i8 modes [N]; they are not read)

Dtype codes 1 to 5 and 8 mean the same everywhere: u8, i8, i16, i32, i64, u16. Codes 6 and 7 are f32 and f64 for
GPT-NeoX, f64 and f32 for Megatron-core, and no byte of the file says which: the reader must be told (`flavour`). Tokens
are integers, so it matters only to label and reward files.
PREFIX.sum, which the writer here adds, has both files' sizes and CRC-32; Megatron and GPT-NeoX do not look at it.
Source: the format as GPT-NeoX's megatron/data/indexed_dataset.py and Megatron-LM's core/datasets write it.
"""

import os
import struct
import zlib
from array import array
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from powertrain.runtime.atomic_file import AtomicFile
from powertrain.train.checksums import Damaged, compare, read_sums, shown, write_sums

Flavour = Literal["neox", "megatron-core"]
Values = npt.NDArray[Any]

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_INTEGERS = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_DTYPES: dict[str, dict[int, Any]] = {
    "neox": {**_INTEGERS, 6: np.float32, 7: np.float64},
    "megatron-core": {**_INTEGERS, 6: np.float64, 7: np.float32},
}


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """The dtype that GPT-NeoX gives token files of a vocabulary: uint16 below 65500 tokens, else int32."""
    # 65500 and not 65536, as GPT-NeoX and Megatron-LM have it: another dtype would be another file
    return np.uint16 if vocab_size < 65500 else np.int32


def index_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


def values_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def sums_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.sum")


def verify(prefix: str | Path) -> int:
    """Read a data set whole and compare it with its PREFIX.sum; returns the bytes read.

    Raises ValueError naming the file that is damaged, FileNotFoundError where there is no PREFIX.sum.
    """
    sums = read_sums(sums_path(prefix))
    for path in (index_path(prefix), values_path(prefix)):
        # a file that the sums do not name can never have -1 bytes, so it counts as damaged
        compare(path, *sums.get(path.name, (-1, None)))
    return sum(size for size, _ in sums.values())


def exists(prefix: str | Path) -> bool:
    return index_path(prefix).is_file() and values_path(prefix).is_file()


class IndexedData:
    """The documents of PREFIX.bin/.idx, memory-mapped, read-only.

        len(data)                 number of documents (in Megatron's words, sequences)
        data[i]                   the values of document i, a view of the file
        data.get(i, start, stop)  a part of them
        data.sizes                [N] int32, values in each document
        data.bounds               [D] int64, Megatron's own grouping of sequences to documents; not used here

    Every size and pointer is compared with the length of the files before any value is read, and where there is a
    PREFIX.sum the files with it: .idx whole, .bin by its size (`verify` reads all of it). Damage is a
    ValueError that names it. Pickles as its path, so workers map the files themselves.
    Memory: none to speak of; the operating system pages the files.
    """

    def __init__(self, prefix: str | Path, flavour: Flavour = "neox") -> None:
        self.prefix, self.flavour = str(prefix), flavour
        self._index_path, self._values_path = index_path(prefix), values_path(prefix)
        for path in (self._index_path, self._values_path):
            if not path.is_file():
                raise FileNotFoundError(
                    f"{path}: no such file; a data set {prefix} needs {prefix}.bin and {prefix}.idx"
                )
        # a wrong flavour would read float rewards as numbers of another width
        if flavour not in _DTYPES:
            raise ValueError(f"flavour must be one of {', '.join(map(repr, _DTYPES))}, got {flavour!r}")
        self._read()

    def _read(self) -> None:
        size = self._index_path.stat().st_size
        with self._index_path.open("rb") as file:
            # the header is checked before anything is mapped: sizes in it decide what is read
            head = file.read(_HEAD.size)
        # named apart, because the file is not damaged: it is of an older format
        if head.startswith(b"TNTIDX"):
            self._fail(
                "be of the memory-mapped kind (MMIDIDX)", "fairseq's older TNTIDX kind; preprocess the text again"
            )
        if len(head) < _HEAD.size:
            self._fail(f"be at least {_HEAD.size} bytes long", f"{size} bytes")
        magic, version, code, count, bounds = _HEAD.unpack(head)
        if magic != _MAGIC:
            self._fail(f"start with {_MAGIC!r}", f"{magic!r}")
        if version != 1:
            self._fail("be of version 1", f"version {version}")
        if code not in _DTYPES[self.flavour]:
            self._fail("have a dtype code from 1 to 8", f"{code}")
        # a document takes 4 bytes of size and 8 of pointer
        expected = _HEAD.size + 12 * count + 8 * bounds
        # Megatron's multimodal indexes have one more byte a document
        if size not in (expected, expected + count):
            self._fail(f"be {expected} bytes long for {count} documents and {bounds} bounds", f"{size} bytes")
        self.dtype = np.dtype(_DTYPES[self.flavour][code])
        index = np.memmap(self._index_path, mode="r")
        self.sizes = np.frombuffer(index, np.dtype("<i4"), count, _HEAD.size)
        self._pointers = np.frombuffer(index, np.dtype("<i8"), count, _HEAD.size + 4 * count)
        self.bounds = np.frombuffer(index, np.dtype("<i8"), bounds, _HEAD.size + 12 * count)
        self._check()

    def _compare(self) -> None:
        """The files with PREFIX.sum, if it is there."""
        if not sums_path(self.prefix).is_file():
            return
        sums = read_sums(sums_path(self.prefix))
        # .bin may have hundreds of GB, so a start reads only its size
        for path, whole in ((self._index_path, True), (self._values_path, False)):
            if path.name in sums:
                size, crc = sums[path.name]
                try:
                    compare(path, size, crc if whole else None)
                except Damaged as error:
                    hint = f"remove {sums_path(self.prefix)} if another program made the data set anew"
                    raise ValueError(f"{error} ({hint})") from None

    def _check(self) -> None:
        available, item = self._values_path.stat().st_size, self.dtype.itemsize
        self._each(self.sizes >= 0, "size", "be at least 0", self.sizes)
        self._each(self._pointers >= 0, "pointer", "be at least 0", self._pointers)
        # values are read as one array of the dtype: a pointer between two values cannot be expressed
        self._each(self._pointers % item == 0, "pointer", f"be a multiple of {item}, a value's bytes", self._pointers)
        # without additions of file contents: a damaged pointer could overflow int64 and pass
        fits = (self._pointers <= available) & (self.sizes.astype(np.int64) * item <= available - self._pointers)
        if not fits.all():
            at = int(np.argmin(fits))
            end = int(self._pointers[at]) + int(self.sizes[at]) * item
            raise ValueError(
                f"{self._index_path}: end {at} must be within the {available} bytes of {self._values_path}, got {end}; "
                "one of the two files is damaged, or cut short"
            )
        last = len(self.sizes)
        ordered = (self.bounds >= 0) & (self.bounds <= last)
        ordered[1:] &= self.bounds[1:] >= self.bounds[:-1]
        self._each(ordered, "bound", f"grow from 0 to at most {last}", self.bounds)
        self._values: Values = (
            np.memmap(self._values_path, self.dtype, "r", shape=(available // item,))
            if available >= item  # an empty file cannot be mapped
            else np.empty(0, self.dtype)
        )
        self._compare()

    def _each(self, good: npt.NDArray[np.bool_], name: str, must: str, values: Values) -> None:
        if not good.all():
            # the first False: argmin of booleans
            at = int(np.argmin(good))
            raise ValueError(f"{self._index_path}: {name} {at} must {must}, got {int(values[at])}; the file is damaged")

    def _fail(self, must: str, got: str) -> NoReturn:
        raise ValueError(f"{self._index_path}: must {must}, got {got}")

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, document: int) -> Values:
        return self.get(document)

    def get(self, document: int, start: int = 0, stop: int | None = None) -> Values:
        """Values [start, stop) of a document (to its end without `stop`): a view of the file."""
        size = int(self.sizes[document])
        stop = size if stop is None else stop
        if not 0 <= start <= stop <= size:
            raise IndexError(f"{self.prefix}: document {document} has {size} values, got [{start}, {stop})")
        first = int(self._pointers[document]) // self.dtype.itemsize
        return self._values[first + start : first + stop]

    def __reduce__(self) -> tuple[Any, ...]:
        # pickling a memory map would send the contents of the file
        return IndexedData, (self.prefix, self.flavour)


class DocumentSlice:
    """Tokens [start, stop) of one document, read as a data set of that one document."""

    def __init__(self, data: IndexedData, document: int, start: int, stop: int) -> None:
        self.data, self.document, self.start = data, document, start
        self.prefix, self.dtype = data.prefix, data.dtype
        # one document, so that an order of samples can be made for it as for a whole data set
        self.sizes = np.array([stop - start], np.int32)

    def __len__(self) -> int:
        return 1

    def get(self, index: int, start: int, stop: int) -> npt.NDArray[Any]:
        """Values [start, stop) of the part."""
        return self.data.get(self.document, self.start + start, self.start + stop)


class IndexedWriter:
    """Writes PREFIX.bin and PREFIX.idx, byte for byte as GPT-NeoX's builder does for the same documents.

        with IndexedWriter(prefix, np.uint16) as writer:
            writer.add(ids)        # a document

    Leaving the block publishes the files and their PREFIX.sum, an exception discards them. A kill at any moment leaves
    no half file: .idx is taken away first and appears last, and without it there is no data set. Raises
    FileExistsError when the data set is there and `overwrite` is False.
    """

    def __init__(
        self, prefix: str | Path, dtype: npt.DTypeLike, *, flavour: Flavour = "neox", overwrite: bool = False
    ) -> None:
        self.prefix, self.dtype, self._overwrite = prefix, np.dtype(dtype), overwrite
        codes = {np.dtype(known): code for code, known in _DTYPES[flavour].items()}
        if self.dtype not in codes:
            raise ValueError(f"dtype must be one of {', '.join(map(str, codes))}, got {self.dtype}")
        self._code = codes[self.dtype]
        if not overwrite:
            self._refuse()
        # 4 bytes a document; a list of Python integers would take many times as much
        self._sizes = array("i")
        self._crc, self._bytes = 0, 0
        # a file without a name until it is published, so a kill leaves nothing to remove
        self._values = AtomicFile(values_path(prefix))

    def _refuse(self) -> None:
        for path in (index_path(self.prefix), values_path(self.prefix)):
            if path.exists():
                raise FileExistsError(
                    f"{path}: exists already; choose another output, or overwrite it (--overwrite, overwrite=True)"
                )

    def add(self, document: npt.ArrayLike) -> None:
        """Append a document [n] of integers or floats that the dtype can hold."""
        given = np.asarray(document)
        if given.ndim != 1:
            raise ValueError(f"document must have one dim, got shape {list(given.shape)}")
        values = given.astype(self.dtype)
        # astype wraps around silently: id 65536 would become 0 in uint16
        if given.dtype.kind in "iu" and not np.array_equal(values, given):
            raise ValueError(f"document must hold values that fit {self.dtype}, got {given.min()} to {given.max()}")
        self.add_encoded(values.tobytes(), [len(values)])

    def add_encoded(self, values: bytes, sizes: list[int]) -> None:
        """Append documents whose values are already bytes of the dtype, one size for each document."""
        if sum(sizes) * self.dtype.itemsize != len(values):
            raise ValueError(f"sizes must sum to {len(values) // self.dtype.itemsize}, got {sum(sizes)}")
        self._values.file.write(values)
        # summed while writing: a pass afterwards would read the whole file again
        self._crc, self._bytes = zlib.crc32(values, self._crc), self._bytes + len(values)
        self._sizes.extend(sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is not None:
            self._values.discard()
            return
        index = AtomicFile(index_path(self.prefix))
        try:
            sums = {
                index_path(self.prefix).name: self._write_index(index),
                values_path(self.prefix).name: (self._bytes, shown(self._crc)),
            }
            if self._overwrite:
                index_path(self.prefix).unlink(missing_ok=True)
            else:
                self._refuse()
            # the index is last: without it readers see no data set, so a kill between the two leaves none
            self._values.publish()
            write_sums(sums_path(self.prefix), sums)
            index.publish()
        finally:
            self._values.discard()
            index.discard()

    def _write_index(self, index: AtomicFile) -> tuple[int, str]:
        """Returns its size and CRC-32."""
        sizes = np.frombuffer(self._sizes, np.int32) if self._sizes else np.empty(0, np.int32)
        pointers = np.zeros(len(sizes), "<i8")
        # in 64 bits: sums of 32-bit sizes pass 2^31 in any large corpus
        np.cumsum(sizes[:-1], dtype=np.int64, out=pointers[1:])
        # Megatron's second level groups sentences to documents; here every sequence is one document
        bounds = np.arange(len(sizes) + 1, dtype="<i8")
        size = crc = 0
        head = _HEAD.pack(_MAGIC, 1, self._code, len(sizes), len(bounds))
        for part in (head, sizes.astype("<i4").tobytes(), (pointers * self.dtype.itemsize).tobytes(), bounds.tobytes()):
            index.file.write(part)
            size, crc = size + len(part), zlib.crc32(part, crc)
        return size, shown(crc)


def remove(prefix: str | Path) -> None:
    """Delete a data set: .idx first, so that a kill leaves no data set that opens."""
    for path in (index_path(prefix), values_path(prefix), sums_path(prefix)):
        path.unlink(missing_ok=True)


def folder_of(prefix: str | Path) -> Path:
    """The folder of a prefix, made if need be."""
    folder = Path(os.path.abspath(prefix)).parent
    folder.mkdir(parents=True, exist_ok=True)
    return folder
