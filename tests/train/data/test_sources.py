"""From configuration to samples."""

import errno
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from powertrain.runtime import tracing
from powertrain.train.config.schema import DataConfig
from powertrain.train.data.blend import blend_indices, weights_by_documents
from powertrain.train.data.indexed import IndexedData, IndexedWriter
from powertrain.train.data.packed import SampleSource
from powertrain.train.data.quickstart import quickstart_files
from powertrain.train.data.samples import build_order
from powertrain.train.data.sources import Data, open_data, open_tokenizer
from powertrain.train.run import open_run_data
from tests.train.tiny_run import read


def data_set(prefix: Path, sizes: list[int], first: int = 0) -> str:
    with IndexedWriter(prefix, np.uint16) as writer:
        for number, size in enumerate(sizes):
            writer.add(np.full(size, (first + number) % 256))
    return str(prefix)


def opened(tmp_path: Path, num_samples: tuple[int, int, int] = (20, 4, 2), **config: Any) -> Data:
    return open_data(DataConfig(**config), seq_length=8, num_samples=num_samples, seed=5, cache=tmp_path / "cache")


def tokens(source: SampleSource | None, count: int) -> list[list[int]]:
    assert source is not None
    return [source.sample(n).tokens.tolist() for n in range(count)]


def expected(prefix: str, documents: range, num_samples: int, count: int) -> list[list[int]]:
    """Samples by the order alone."""
    data = IndexedData(prefix)
    order = build_order(data.sizes, np.array(documents), seq_length=8, num_samples=num_samples, seed=5)
    stream = np.concatenate([data[d] for d in order.documents])
    return [stream[8 * cut : 8 * cut + 8].tolist() for cut in order.shuffle[:count].tolist()]


def test_one_data_set_is_split(tmp_path: Path) -> None:
    """GPT-NeoX's data_path: no half percent on top."""
    prefix = data_set(tmp_path / "d", [13] * 40)
    data = opened(tmp_path, train=prefix, split="8,1,1")
    assert tokens(data.train, 20) == expected(prefix, range(0, 32), 20, 20)
    assert tokens(data.validation, 4) == expected(prefix, range(32, 36), 4, 4)
    assert tokens(data.test, 2) == expected(prefix, range(36, 40), 2, 2)
    assert data.vocab_size == 256


def test_data_sets_of_their_own_are_blended(tmp_path: Path) -> None:
    """GPT-NeoX's train_data_paths with weights: even a single one is prepared for half a percent more."""
    a, b = data_set(tmp_path / "a", [9] * 30), data_set(tmp_path / "b", [21, 30, 4], 100)
    data = opened(
        tmp_path,
        (1000, 200, 200),
        train=[{"path": a, "weight": 3}, {"path": f"{b}.bin", "weight": 1}],
        validation=[b],
        test=[f"{a}.idx"],
    )
    by_source = [expected(a, range(30), 754, 754), expected(b, range(3), 252, 252)]
    wanted = [by_source[c][w] for c, w in zip(*blend_indices([3, 1], 1000), strict=True)]
    assert tokens(data.train, 1000) == wanted and len(data.train) == 1000
    assert tokens(data.validation, 200) == expected(b, range(3), 201, 200)
    assert tokens(data.test, 200) == expected(a, range(30), 201, 200)


def test_weights_by_document_counts(tmp_path: Path) -> None:
    a, b = data_set(tmp_path / "a", [9] * 30), data_set(tmp_path / "b", [9] * 10, 100)
    both = {"train": [a, b], "validation": [b], "weight_by_num_documents": True, "weighted_sampler_alpha": 0.3}
    data = opened(tmp_path, (300, 3, 0), **both)
    chosen, _ = blend_indices(weights_by_documents([30, 10], 0.3), 300)
    assert [int(row[0] >= 100) for row in tokens(data.train, 300)] == chosen.tolist()
    assert data.test is None


def test_several_data_sets_are_split_each(tmp_path: Path) -> None:
    a, b = data_set(tmp_path / "a", [9] * 30), data_set(tmp_path / "b", [9] * 30, 100)
    data = opened(tmp_path, (60, 20, 0), train=[a, b], split="9,1")
    trained = {token for row in tokens(data.train, 60) for token in row}
    held_out = {token for row in tokens(data.validation, 20) for token in row}
    assert held_out == {27, 28, 29, 127, 128, 129} and not trained & held_out


def test_text_is_tokenized_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"body": f"document {n} ends here"}) + "\n" for n in range(50)))
    config = {"train": str(path), "text_key": "body", "document_mask": True, "eod_mask_loss": True}
    data = opened(tmp_path, **config)
    sample = data.train.sample(3)
    text = data.tokenizer.decode([*sample.tokens, int(max(sample.labels[-1], 0))])
    assert any(text in f"document {n} ends here\0document {m} ends here" for n in range(50) for m in range(50))
    assert (sample.labels == -100).tolist() == (sample.tokens == 0).tolist()
    assert sample.document_ids is not None
    with monkeypatch.context() as patched:
        patched.setattr("powertrain.train.data.sources.encode", None)
        moved = path.rename(tmp_path / "moved.jsonl")
        again = opened(tmp_path, **{**config, "train": str(moved)})
        assert tokens(again.train, 20) == tokens(data.train, 20)
    moved.write_text(moved.read_text() + '{"body": "one more"}\n')
    assert len(opened(tmp_path, **{**config, "train": str(moved)}).train) >= 20
    assert len(list((tmp_path / "cache" / "tokens").glob("*.idx"))) == 2


def test_a_tokenizer_is_trained_once(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a rose is a rose is a rose " * 40)
    config = DataConfig(train=str(path), tokenizer="train:270")
    first, second = (open_tokenizer(config, tmp_path / "cache") for _ in range(2))
    assert first.identity == second.identity and 257 < first.vocab_size <= 270
    assert len(list((tmp_path / "cache" / "tokenizers").glob("*.json"))) == 1
    data = opened(tmp_path, train=str(path), tokenizer="train:270")
    assert data.vocab_size == first.vocab_size and "rose" in data.tokenizer.decode(data.train.sample(0).tokens.tolist())


def test_quickstart(tmp_path: Path) -> None:
    data = open_data(
        DataConfig(train="quickstart"), seq_length=64, num_samples=(50, 5, 0), seed=1, cache=tmp_path / "cache"
    )
    assert len(data.train) > 100_000 and data.validation is not None and len(data.validation) > 1000
    library = "".join(path.read_bytes().decode() for path in quickstart_files().train)
    # windows that cross no end of a document
    windows = [data.tokenizer.decode(row) for row in tokens(data.train, 50) if 0 not in row]
    assert len(windows) > 40 and all(window.strip("\ufffd") in library for window in windows)


def test_a_part_without_documents_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracing.clear()
    data = opened(tmp_path, train=data_set(tmp_path / "d", [50, 50]))
    assert data.validation is None and data.test is None
    assert "no document is left for validation (split '969, 30, 1')" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"data\.train must hold documents .*, got none in .*/d \(split '0, 1, 1'\)"):
        opened(tmp_path, train=str(tmp_path / "d"), split="0, 1, 1")


def test_an_empty_source_beside_others_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its share of the blend went to the others without a word."""
    tracing.clear()
    full, empty = data_set(tmp_path / "d", [50, 50]), data_set(tmp_path / "empty", [])
    opened(tmp_path, train=[full, {"path": empty, "weight": 0}], validation=[full])
    assert not capsys.readouterr().err
    opened(tmp_path, train=[full, empty], validation=[full])
    said = f"data.train: {empty} has no document with tokens; its share goes to the other sources"
    assert said in capsys.readouterr().err


def test_a_held_out_part_of_sources_of_weight_0_is_none(tmp_path: Path) -> None:
    few, many = data_set(tmp_path / "few", [9] * 3), data_set(tmp_path / "many", [9] * 40)
    data = opened(tmp_path, train=[few, {"path": many, "weight": 0}], split="9, 1, 0")
    assert data.validation is None and len(data.train)


def test_an_empty_validation_or_test_is_named_and_no_split_blamed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, empty = data_set(tmp_path / "d", [50, 50]), tmp_path / "empty.txt"
    empty.touch()
    named = f"no document with tokens in {empty}; there will be no"
    alone = "no document is left for validation (data.test alone is given)"
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"validation": str(empty)}, [f"data.validation: {named} validation"]),
        ({"test": str(empty)}, [f"data.test: {named} test", alone]),
    ]
    for given, words in cases:
        tracing.clear()
        data = opened(tmp_path, train=train, **given)
        said = capsys.readouterr().err
        assert data.validation is None and data.test is None
        assert all(each in said for each in words) and "split" not in said, said


@pytest.mark.parametrize(
    "config, words",
    [
        ({"train": "nowhere"}, "nowhere: no such file or folder"),
        ({"train": "nowhere.bin"}, r"nowhere\.bin\.idx: no such file"),
        ({"train": "half"}, r"half\.idx: no such file"),
        ({"train": "d", "tokenizer": "train:x"}, r"data\.tokenizer must be train:SIZE with 257 to 999999999 ids"),
        ({"train": "d", "tokenizer": "train:300"}, "needs text to train on, got tokens in d"),
        ({"train": {"path": "t.txt", "labels": "d"}}, r"data labels d: need tokens in \.bin/\.idx beside them, got t"),
        ({"train": [{"path": "d", "weight": 0}], "validation": "d"}, r"data\.train: weights must not all be 0"),
        ({"train": [{"path": "d", "weight": 0}]}, r"data\.train: weights must not all be 0"),
        ({"train": [{"path": "d", "weight": 0}, "empty"]}, r"data\.train: weights must not all be 0"),
        (
            {"train": [{"path": "d", "weight": 1e308}] * 2},
            r"weights must .* have a finite sum, got \[1e\+308, 1e\+308\]",
        ),
        ({"train": "d", "tokenizer": "nowhere"}, "tokenizer: no such file nowhere"),
        ({"train": {"path": "d", "documents": 3}}, "data d: documents must be left out, which only text and rows have"),
        ({"train": {"path": "t.txt", "subset": "x"}}, r"data t\.txt: subset must be left out, which only .*, got x"),
        ({"train": {"path": "t.txt", "split": "test"}}, r"data t\.txt: split must be left out, which only .* got test"),
        ({"train": {"path": "quickstart", "revision": "a"}}, "data quickstart: revision must be left out, which only"),
        ({"train": "empty"}, r"data\.train must hold documents with tokens to train on, got none in empty"),
        ({"train": ["empty", "hollow"]}, r"data\.train must hold documents with tokens .* none in empty, hollow"),
    ],
)
def test_wrong_configurations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    data_set(Path("d"), [9] * 30)
    data_set(Path("empty"), [])
    data_set(Path("hollow"), [0] * 30)
    Path("t.txt").write_text("text")
    Path("half.bin").touch()
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        opened(tmp_path, **config)


def test_the_first_documents_of_text(tmp_path: Path) -> None:
    lines = tmp_path / "t.jsonl"
    lines.write_text("".join(f'"line {n}"\n' for n in range(9)))
    every, first = (opened(tmp_path, train={"path": str(lines), **more}) for more in ({}, {"documents": 4}))
    shown = ["".join(chr(i) for row in tokens(data.train, len(data.train)) for i in row) for data in (every, first)]
    assert "line 6" in shown[0] and "line 3" in shown[1] and "line 4" not in shown[1]


def test_a_full_disk_below_the_cache_names_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a write names no file."""
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("powertrain.train.data.samples._save", Mock(side_effect=full))
    run = read(tmp_path).config
    with pytest.raises(ValueError, match=r"data\.cache_folder must .*, got .*/cache \(No space left on device\)$"):
        open_run_data(run, open_tokenizer(run.data), 1)


def test_a_cache_that_cannot_be_made_names_the_key(tmp_path: Path) -> None:
    """A home that is read-only, as in containers, ends in the key that moves the cache."""
    (tmp_path / "text.txt").write_text("one two three " * 20)
    (tmp_path / "file").write_text("")
    config = DataConfig(train=str(tmp_path / "text.txt"), cache_folder=str(tmp_path / "file" / "cache"))  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"data\.cache_folder must name a folder that can be written, got .*/file/cache"
    ):
        open_data(config, seq_length=8, num_samples=(1, 0, 0), seed=0)
