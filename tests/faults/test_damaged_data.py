"""Damaged .idx, .bin, jsonl, tokenizers and caches: an error of a few lines, or what was written; never other data."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from powertrain.train.config.schema import DataConfig
from powertrain.train.data import corpus
from powertrain.train.data.corpus import BadDocument, raw_documents, texts
from powertrain.train.data.encode import Encoding
from powertrain.train.data.indexed import IndexedData, IndexedWriter, exists, verify
from powertrain.train.data.sources import open_data
from powertrain.train.data.tokenizer import load_tokenizer, train_tokenizer
from tests.faults.damage import answered, damaged

DOCUMENTS = [[n % 251 for n in range(length)] for length in (5, 0, 40, 1, 300, 7)]
MANY = pytest.param(1000, marks=pytest.mark.slow)


@pytest.mark.parametrize("count", [40, MANY])
@pytest.mark.parametrize("ending", ["idx", "bin", "sum"])
def test_a_data_set(tmp_path: Path, ending: str, count: int) -> None:
    """`verify` and opening together see every change of .idx and .bin."""
    with IndexedWriter(tmp_path / "d", np.uint16) as writer:
        for document in DOCUMENTS:
            writer.add(document)
    file, chance = tmp_path / f"d.{ending}", random.Random(1)
    good = file.read_bytes()

    def read() -> None:
        data = IndexedData(tmp_path / "d")
        verify(tmp_path / "d")
        assert [document.tolist() for document in data] == DOCUMENTS

    for _ in range(count):
        bad = damaged(good, chance)
        file.write_bytes(bad)
        error = answered(read, ValueError, FileNotFoundError)
        assert error is None or str(tmp_path / "d") in str(error)
        assert error is not None or bad == good or ending == "sum"


LINE_TEXTS = [f"document {n} of the text, and more of it" * (n % 4 + 1) for n in range(60)]


def _packed(ending: str) -> bytes:
    plain = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in LINE_TEXTS)
    pack: dict[str, Any] = {
        "jsonl": lambda data: data, "jsonl.gz": gzip.compress,
        "jsonl.zst": lambda data: zstandard.compress(data[:2000]) + zstandard.compress(data[2000:]),
    }  # fmt: skip
    return bytes(pack[ending](plain))


@pytest.mark.parametrize("count", [60, MANY])
@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_jsonl(tmp_path: Path, ending: str, count: int) -> None:
    """Strictly: an error that names the line, or text. With skip_bad: always an end, and text that UTF-8 has."""
    file, chance = tmp_path / f"t.{ending}", random.Random(2)
    good = _packed(ending)
    file.write_bytes(good)
    assert list(texts([file])) == LINE_TEXTS
    for _ in range(count):
        file.write_bytes(damaged(good, chance))
        error = answered(lambda: list(texts([file])), BadDocument)
        assert error is None or str(error).startswith(f"{file}:")
        for text in texts([file], skip_bad=True):
            text.encode()


@pytest.mark.parametrize("ending", ["jsonl.gz", "jsonl.zst"])
def test_a_packed_file_that_ends_early_is_damaged(tmp_path: Path, ending: str) -> None:
    """zstandard's own reader takes any cut for the end."""
    file, good = tmp_path / f"t.{ending}", _packed(ending)
    whole_frame = len(zstandard.compress(b"".join(json.dumps({"text": t}).encode() + b"\n" for t in LINE_TEXTS)[:2000]))
    for cut in range(1, len(good), max(1, len(good) // 40)):
        if ending.endswith("zst") and cut == whole_frame:
            continue
        file.write_bytes(good[:cut])
        with pytest.raises(BadDocument, match="must be whole"):
            list(texts([file]))
        found = list(texts([file], skip_bad=True))
        assert found == LINE_TEXTS[: len(found)]


def test_a_lone_surrogate_is_a_bad_line(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"text": "a"}\n{"text": "\\ud83d"}\n["b", "\\udc00x"]\n"\\ud83d\\ude00"\n')
    with pytest.raises(BadDocument, match=r"t\.jsonl:2: must be text .* represent, got the lone surrogate U\+D83D"):
        list(texts([file]))
    assert list(texts([file], skip_bad=True)) == ["a", "\U0001f600"]


def test_a_line_that_fills_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a few kB of zst: it is not held whole."""
    monkeypatch.setattr(corpus, "_MOST_LINE", 1 << 20)
    file = tmp_path / "t.jsonl.zst"
    file.write_bytes(zstandard.compress(b'{"text": "a"}\n' + b" " * (64 << 20) + b'\n{"text": "b"}\n'))
    held = [len(raw.data) for raw in raw_documents([file])]
    assert max(held) <= 1 << 20 and list(texts([file], skip_bad=True)) == ["a", "b"]
    with pytest.raises(BadDocument, match=r"zst:2: a line must have at most 1 MiB"):
        list(texts([file]))


@pytest.mark.parametrize("count", [40, MANY])
def test_a_tokenizer(tmp_path: Path, count: int) -> None:
    file, chance = tmp_path / "tokenizer.json", random.Random(3)
    train_tokenizer(LINE_TEXTS, 300).save(file)
    good = file.read_bytes()

    def use() -> None:
        tokenizer = load_tokenizer(str(file))
        block = [raw for raw in raw_documents([tmp_path / "t.jsonl"])]
        Encoding(tokenizer, np.uint16, append_eod=False)(block, skip_bad=False, all_cores=True)
        tokenizer.decode(tokenizer.encode("some text"))

    (tmp_path / "t.jsonl").write_bytes(_packed("jsonl"))
    for _ in range(count):
        file.write_bytes(damaged(good, chance))
        answered(use, ValueError)


@pytest.mark.parametrize("count", [30, pytest.param(500, marks=pytest.mark.slow)])
def test_any_damage_of_a_cache_is_mended(tmp_path: Path, count: int, capfd: pytest.CaptureFixture[str]) -> None:
    """The order of samples, tokens and tokenizers: what is read afterwards is what was read before."""
    (tmp_path / "t.jsonl").write_bytes(_packed("jsonl"))
    config = DataConfig(train=str(tmp_path / "t.jsonl"), tokenizer="train:280", split="1,0,0")  # type: ignore[arg-type]

    def samples() -> list[list[int]]:
        data = open_data(config, seq_length=16, num_samples=(50, 0, 0), seed=1, cache=tmp_path / "cache")
        return [data.train.sample(n).tokens.tolist() for n in range(50)]

    wanted, chance = samples(), random.Random(4)
    for n in range(count):
        files = sorted(f for f in (tmp_path / "cache").rglob("*") if f.is_file() and f.suffix != ".lock")
        file = files[n % len(files)]
        bad = b"" if n % 7 == 0 else damaged(file.read_bytes(), chance)
        file.write_bytes(bad)
        assert samples() == wanted, file
    assert len(files) == 9 and "again:" in capfd.readouterr().err


def test_a_zero_length_order(tmp_path: Path) -> None:
    """After a power cut; it printed Aborted at every start."""
    from powertrain.train.data.samples import cached_arrays

    made: list[int] = []

    def build() -> list[Any]:
        made.append(1)
        return [np.arange(100)]

    cached_arrays(tmp_path, b"x", build)
    (file,) = tmp_path.rglob("0.npy")
    file.write_bytes(b"")
    (again,) = cached_arrays(tmp_path, b"x", build)
    assert again.tolist() == list(range(100)) and len(made) == 2
    assert len(list((tmp_path / "order").iterdir())) == 2  # the arrays and the lock


def test_a_data_set_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    for name in ("bin", "idx", "sum"):
        with IndexedWriter(tmp_path / "d", np.uint16, overwrite=True) as writer:
            writer.add([1, 2])
        (tmp_path / f"d.{name}").unlink()
        assert exists(tmp_path / "d") is (name == "sum")
