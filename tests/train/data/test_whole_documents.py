"""Samples of whole documents: GPT-NeoX's loops, written out, are the judge."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powertrain.train.config.schema import DataConfig
from powertrain.train.data.indexed import IndexedWriter
from powertrain.train.data.sources import open_data
from powertrain.train.data.whole_documents import whole_document_order


def _unpacked(sizes: Any, labels: list[Any], length: int, samples: int, seed: int, chop: bool) -> list[list[int]]:
    """The documents of each sample, in the order of the run."""
    random = np.random.RandomState(seed)
    shuffle = np.arange(samples)
    random.shuffle(shuffle)
    order: list[int] = []
    number = 0
    while len(order) <= samples:
        if (chop or sizes[number] <= length + 1) and not np.all(labels[number][:length] == -100):
            order.append(number)
        number = (number + 1) % len(sizes)
    return [[order[i], order[i + 1]] for i in shuffle]


def _overflow(sizes: Any, labels: list[Any], length: int, samples: int, seed: int, chop: bool) -> list[list[int]]:
    random = np.random.RandomState(seed)
    shuffle = np.arange(samples)
    random.shuffle(shuffle)
    order = np.arange(len(sizes))
    random.shuffle(order)
    firsts: list[int] = []
    laid: list[int] = []
    running, at = 0, 0
    while len(firsts) < samples:
        size = int(sizes[order[at]])
        if (chop or size <= length + 1) and not np.all(labels[order[at]][: length + 1] == -100):
            if running == 0:
                firsts.append(len(laid))
                running = size
            elif running + size > length + 1:
                running = size
                firsts.append(len(laid))
            else:
                running += size
            laid.append(int(order[at]))
        at += 1
        if at == len(order):
            at = 0
            random.shuffle(order)
    firsts.append(len(laid))

    def sample(number: int) -> list[int]:
        cut = int(shuffle[number])
        if firsts[cut + 1] == len(laid):  # an index out of bounds there: the sample of that number instead
            return sample(cut) if cut != number else [*laid[firsts[cut] :], laid[0]]
        return laid[firsts[cut] : firsts[cut + 1] + 1]

    return [sample(number) for number in range(samples)]


def _written(folder: Path, seed: int) -> tuple[list[Any], list[Any]]:
    """Documents of 1 to 12 tokens, their labels, a third of them without any; both written."""
    random = np.random.default_rng(seed)
    texts = [random.integers(1, 200, random.integers(1, 13)) for _ in range(17)]
    labels = [np.where(random.random(len(text)) < 0.3, -100, text) for text in texts]
    for number in range(0, 17, 3):
        labels[number] = np.full(len(texts[number]), -100)
    for name, documents, dtype in (("text", texts, "uint16"), ("labels", labels, "int32")):
        with IndexedWriter(folder / name, dtype) as writer:
            for document in documents:
                writer.add(document)
    return texts, labels


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("packing", ["unpacked", "until_overflow"])
def test_samples_are_gpt_neoxs(packing: str, seed: int, tmp_path: Path) -> None:
    """Padded with zeros and -100, cut, document for document; more samples than documents, too."""
    texts, labels = _written(tmp_path, seed)
    length, samples, chop = (6, 25, True) if seed % 2 else (9, 40, False)
    config = DataConfig(
        train=[{"path": str(tmp_path / "text"), "labels": str(tmp_path / "labels")}], split="1,0,0", packing=packing,
        allow_chopped=chop, tokenizer="bytes",
    )  # fmt: skip
    data = open_data(config, seq_length=length, num_samples=(samples, 0, 0), seed=seed, cache=tmp_path / "cache")
    judge = _unpacked if packing == "unpacked" else _overflow
    wanted = judge([len(text) for text in texts], labels, length, samples, seed, chop)
    assert len(data.train) == samples
    for number, documents in enumerate(wanted):
        found = data.train.sample(number)

        def joined(parts: list[Any], padding: int, documents: list[int] = documents) -> Any:
            whole = np.concatenate([*(parts[d] for d in documents[:-1]), parts[documents[-1]][:1]])[: length + 1]
            return np.pad(whole, (0, length + 1 - len(whole)), constant_values=padding)

        assert np.array_equal(found.tokens, joined(texts, 0)[:-1])
        assert np.array_equal(found.labels, joined(labels, -100)[1:])


def test_a_mask_keeps_documents_apart_and_padding_too(tmp_path: Path) -> None:
    _written(tmp_path, 1)
    config = DataConfig(
        train=[{"path": str(tmp_path / "text")}], split="1,0,0", packing="until_overflow", document_mask=True,
        tokenizer="bytes",
    )  # fmt: skip
    data = open_data(config, seq_length=20, num_samples=(9, 0, 0), seed=1, cache=tmp_path / "cache")
    for number in range(9):
        sample = data.train.sample(number)
        assert sample.document_ids is not None and sample.document_ids.shape == (20,)
        assert (np.diff(sample.document_ids) >= 0).all()
        padding = sample.tokens == 0
        assert len(set(sample.document_ids[padding].tolist())) <= 1
        assert not set(sample.document_ids[padding]) & set(sample.document_ids[~padding])


def test_nothing_to_take_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.packing unpacked: a document must fit and have labels, got none of 3"):
        whole_document_order(np.array([9, 9, 9]), range(3), packing="unpacked", seq_length=4, num_samples=2, seed=0,
                             allow_chopped=False)  # fmt: skip
    _written(tmp_path, 1)
    config = DataConfig(train=[{"path": str(tmp_path / "text")}], split="1,0,0", packing="unpacked", tokenizer="bytes")
    with pytest.raises(ValueError, match=r"data.packing must be packed or until_overflow without label data"):
        open_data(config, seq_length=8, num_samples=(4, 0, 0), seed=1, cache=tmp_path / "cache")
    with pytest.raises(ValueError, match=r"data.order must be neox where data.packing is unpacked, got sequential"):
        DataConfig(train=["x"], packing="unpacked", order="sequential")
