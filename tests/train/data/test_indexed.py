"""The .bin/.idx files: the bytes that GPT-NeoX would write, and no damage that goes unnoticed."""

import os
import pickle
import random
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powertrain.train.data.indexed import IndexedData, IndexedWriter, exists, token_dtype

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = [[5, 6, 7], [1], [], [9, 8]]


def write(prefix: Path, documents: list[list[int]], dtype: Any = np.uint16, **kwargs: Any) -> Path:
    with IndexedWriter(prefix, dtype, **kwargs) as writer:
        for document in documents:
            writer.add(document)
    return prefix


def index_bytes(code: int, sizes: list[int], pointers: list[int], bounds: list[int]) -> bytes:
    """The published layout, packed by hand."""
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sizes), len(bounds))
    return head + struct.pack(f"<{len(sizes)}i{len(pointers)}q{len(bounds)}q", *sizes, *pointers, *bounds)


def test_bytes_are_those_of_the_published_format(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", DOCUMENTS)
    assert Path(f"{prefix}.bin").read_bytes() == struct.pack("<6H", 5, 6, 7, 1, 9, 8)
    assert Path(f"{prefix}.idx").read_bytes() == index_bytes(8, [3, 1, 0, 2], [0, 6, 8, 8], [0, 1, 2, 3, 4])


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16])
def test_round_trip(tmp_path: Path, dtype: Any) -> None:
    prefix = write(tmp_path / "d", DOCUMENTS, dtype)
    for data in (IndexedData(prefix), pickle.loads(pickle.dumps(IndexedData(prefix)))):
        assert data.dtype == dtype and len(data) == 4
        assert [document.tolist() for document in data] == DOCUMENTS
        assert data.get(0, 1, 3).tolist() == [6, 7]
        with pytest.raises(IndexError, match="document 1 has 1 values"):
            data.get(1, 0, 2)


def test_no_document_at_all(tmp_path: Path) -> None:
    data = IndexedData(write(tmp_path / "d", []))
    assert len(data) == 0 and data.sizes.tolist() == []


@pytest.mark.parametrize("dtype, neox, core", [(np.float32, 6, 7), (np.float64, 7, 6)])
def test_float_codes_have_two_flavours(tmp_path: Path, dtype: Any, neox: int, core: int) -> None:
    for flavour, code in (("neox", neox), ("megatron-core", core)):
        prefix = tmp_path / flavour
        with IndexedWriter(prefix, dtype, flavour=flavour) as writer:  # type: ignore[arg-type]
            writer.add(np.array([0.5, 2.0]))
        assert Path(f"{prefix}.idx").read_bytes()[17] == code
        assert IndexedData(prefix, flavour)[0].tolist() == [0.5, 2.0]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="flavour must be one of 'neox', 'megatron-core', got 'x'"):
        IndexedData(prefix, "x")  # type: ignore[arg-type]


def test_token_dtype_is_theirs() -> None:
    assert token_dtype(65499) is np.uint16 and token_dtype(65500) is np.int32


def test_values_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fit uint16, got 1 to 70000"):
        write(tmp_path / "d", [[1, 70000]])
    with pytest.raises(ValueError, match=r"dtype must be one of .*uint16.*, got complex64"):
        IndexedWriter(tmp_path / "d", np.complex64)
    assert not list(tmp_path.iterdir())


def test_what_exists_is_replaced_only_on_request(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", DOCUMENTS)
    with pytest.raises(FileExistsError, match=r"d\.idx: exists already"):
        write(prefix, [[1]])
    assert len(IndexedData(write(prefix, [[1]], overwrite=True))) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.bin", "d.idx", "d.sum"]


def test_an_exception_leaves_what_was_there(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", DOCUMENTS)
    with pytest.raises(RuntimeError), IndexedWriter(prefix, np.uint16, overwrite=True) as writer:
        writer.add([1])
        raise RuntimeError
    assert len(IndexedData(prefix)) == 4


def test_without_nameless_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS: hidden temporary files, and old ones of others are removed."""
    monkeypatch.delattr(os, "O_TMPFILE")
    stale, fresh = tmp_path / ".a.bin.1.tmp", tmp_path / ".b.bin.2.tmp"
    for path in (stale, fresh):
        path.touch()
    os.utime(stale, (0, 0))
    prefix = write(tmp_path / "d", DOCUMENTS)
    assert [document.tolist() for document in IndexedData(prefix)] == DOCUMENTS
    assert not stale.exists() and fresh.exists()
    with pytest.raises(ValueError, match="one dim"), IndexedWriter(tmp_path / "e", np.uint16) as writer:
        writer.add([[1]])
    assert sorted(p.name for p in tmp_path.iterdir()) == [fresh.name, "d.bin", "d.idx", "d.sum"]


def test_kill_leaves_nothing(tmp_path: Path) -> None:
    script = (
        "import sys, time, numpy as np\n"
        "from powertrain.train.data.indexed import IndexedWriter\n"
        "with IndexedWriter(sys.argv[1], np.uint16) as writer:\n"
        "    writer.add(np.zeros(1 << 20, np.uint16)); print('writing', flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "d")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
    assert not list(tmp_path.iterdir()) and not exists(tmp_path / "d")


GOOD = index_bytes(8, [3, 1, 0, 2], [0, 6, 8, 8], [0, 1, 2, 3, 4])


@pytest.mark.parametrize(
    "data, words",
    [
        (b"", "at least 34 bytes long, got 0 bytes"),
        (GOOD[:20], "at least 34 bytes"),
        (b"TNTIDX\x00\x00" + GOOD, "older TNTIDX kind"),
        (b"NOTANIDX!" + GOOD[9:], "start with b'MMIDIDX"),
        (GOOD[:9] + b"\2" + GOOD[10:], "version 1, got version 2"),
        (GOOD[:17] + b"\x09" + GOOD[18:], "dtype code from 1 to 8, got 9"),
        (GOOD[:-1], "bytes long for 4 documents and 5 bounds"),
        (GOOD + b"xxxxx", "bytes long for 4 documents"),
        (GOOD[:18] + struct.pack("<Q", 2**63) + GOOD[26:], "bytes long for 9223372036854775808 documents"),
        (index_bytes(8, [3, -1], [0, 6], [0, 2]), "size 1 must be at least 0, got -1"),
        (index_bytes(8, [3, 1], [0, -2], [0, 2]), "pointer 1 must be at least 0, got -2"),
        (index_bytes(8, [3, 1], [0, 5], [0, 2]), "pointer 1 must be a multiple of 2, a value's bytes, got 5"),
        (index_bytes(8, [3, 4], [0, 6], [0, 2]), r"end 1 must be within the 12 bytes of .*d\.bin, got 14; one of"),
        (index_bytes(8, [3, 1], [0, 2**62], [0, 2]), "end 1 must be within"),
        (index_bytes(8, [3, 1], [0, 6], [0, 2, 1]), "bound 2 must grow from 0 to at most 2, got 1"),
        (index_bytes(8, [3, 1], [0, 6], [0, 3]), "bound 1 must grow"),
    ],
)  # fmt: skip
def test_damage_is_named(tmp_path: Path, data: bytes, words: str) -> None:
    prefix = write(tmp_path / "d", DOCUMENTS)
    Path(f"{prefix}.idx").write_bytes(data)
    with pytest.raises(ValueError, match=rf"d\.idx: .*{words}"):
        IndexedData(prefix)


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", DOCUMENTS)
    Path(f"{prefix}.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"d\.bin: no such file"):
        IndexedData(prefix)
    with pytest.raises(FileNotFoundError, match=r"none\.idx: no such file"):
        IndexedData(tmp_path / "none")


def test_a_thousand_damaged_files(tmp_path: Path) -> None:
    """Bytes changed, cut out, put in: a ValueError that names the file, or a data set that can be read whole."""
    prefix = write(tmp_path / "d", [[i] * (i % 5) for i in range(20)])
    index = Path(f"{prefix}.idx")
    good, chance, refused = index.read_bytes(), random.Random(0), 0
    for _ in range(1000):
        index.write_bytes(_damaged(good, chance))
        try:
            data = IndexedData(prefix)
        except ValueError as error:
            refused += 1
            assert str(error).startswith(f"{index}: ") and " must " in str(error) and ", got " in str(error)
        else:
            assert sum(len(data[i]) for i in range(len(data))) == data.sizes.sum()
    assert refused > 700  # the rest are other, but valid: a bound, a smaller size, a pointer to elsewhere in the file


def _damaged(good: bytes, chance: random.Random) -> bytes:
    data = bytearray(good)
    kind = chance.randrange(4)
    if kind == 0:
        return bytes(data[: chance.randrange(len(data))])
    for _ in range(chance.randint(1, 8)):
        at = chance.randrange(len(data))
        if kind == 1:
            data[at] = chance.randrange(256)
        elif kind == 2:
            data[at:at] = chance.randbytes(chance.randint(1, 9))
        else:
            at -= at % 4
            data[at : at + 4] = chance.choice([b"\xff" * 4, b"\0\0\0\x80", chance.randbytes(4)])
    return bytes(data)
