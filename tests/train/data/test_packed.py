"""Samples and batches: the right tokens in the right order, for any number of ranks and workers, from any sample on."""

import os
import signal
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from powertrain.ops.shapes import document_starts
from powertrain.train.data.indexed import IndexedData, IndexedWriter
from powertrain.train.data.loader import Batch, batches, positions
from powertrain.train.data.packed import PackedSamples, Sample
from powertrain.train.data.samples import build_order

SIZES = [5, 1, 9, 0, 30, 2]
EOD = 99


def data_set(prefix: Path, documents: list[list[int]], dtype: Any = np.int32) -> IndexedData:
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add(document)
    return IndexedData(prefix)


def documents() -> list[list[int]]:
    """Document d holds 10 d, 10 d + 1 ...; each ends with EOD."""
    return [[*(10 * d + i for i in range(size - 1)), EOD][:size] for d, size in enumerate(SIZES)]


def packed(tmp_path: Path, seq_length: int = 4, **kwargs: Any) -> PackedSamples:
    data = data_set(tmp_path / "d", documents())
    order = build_order(data.sizes, np.arange(len(data)), seq_length=seq_length, num_samples=30, seed=7)
    return PackedSamples(data, order, seq_length, 100, **kwargs)


@pytest.mark.parametrize("seq_length", [1, 4, 13])
def test_samples_are_cuts_of_the_laid_documents(tmp_path: Path, seq_length: int) -> None:
    source = packed(tmp_path, seq_length, document_ids=True)
    texts = documents()
    stream = [token for d in source.order.documents for token in texts[d]]
    owners = [entry for entry, d in enumerate(source.order.documents) for _ in texts[d]]
    seen = set()
    for n in range(len(source)):
        cut = int(source.order.shuffle[n])
        first = cut * seq_length
        tokens, labels, ids, _ = source.sample(n)
        assert tokens.tolist() == stream[first : first + seq_length]
        assert labels.tolist() == stream[first + 1 : first + seq_length + 1]
        assert ids is not None and ids[0] == 0
        same = np.array(owners[first : first + seq_length])
        assert np.array_equal(ids[1:] != ids[:-1], same[1:] != same[:-1])
        assert (tokens.dtype, labels.dtype, ids.dtype) == (np.int64, np.int64, np.int32)
        seen.add(cut)
    assert seen == set(range(len(source)))
    with pytest.raises(IndexError):
        source.sample(len(source))


def test_no_loss_where_the_input_ends_a_document(tmp_path: Path) -> None:
    plain, masked = packed(tmp_path), PackedSamples
    masked_source = masked(plain.data, plain.order, 4, 100, eod=EOD)
    dropped = 0
    for n in range(len(plain)):
        tokens, labels, *_ = masked_source.sample(n)
        expected = np.where(tokens == EOD, -100, plain.sample(n).labels)
        assert labels.tolist() == expected.tolist()
        dropped += int((labels == -100).sum())
    assert dropped > 5


def test_labels_of_their_own(tmp_path: Path) -> None:
    wanted = [[-100 if i % 3 == 0 else token + 1 for i, token in enumerate(text)] for text in documents()]
    labels = data_set(tmp_path / "labels", wanted)
    plain = packed(tmp_path)
    source = PackedSamples(plain.data, plain.order, 4, 101, labels=labels)
    rows = [source.sample(n) for n in range(len(source))]
    kept = [
        (int(b), int(a))
        for n, row in enumerate(rows)
        for a, b in zip(plain.sample(n).labels, row.labels, strict=True)
        if b >= 0
    ]
    assert kept and all(label == token + 1 for label, token in kept)
    assert any((row.labels == -100).any() for row in rows)
    short = data_set(tmp_path / "short", wanted[:-1])
    with pytest.raises(ValueError, match=r"labels .*short: must have the document lengths of .*d \(6 documents, 47"):
        PackedSamples(plain.data, plain.order, 4, 101, labels=short)


def test_a_token_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    plain = packed(tmp_path)
    source = PackedSamples(plain.data, plain.order, 4, EOD)
    with pytest.raises(ValueError, match=r"d: tokens must be in \[0, 99\), .* got 99 in document (\d) \(sample \d+\)"):
        for n in range(len(source)):
            source.sample(n)


def test_floats_are_no_tokens(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must hold integers to be tokens or labels, got float32"):
        PackedSamples(data_set(tmp_path / "f", [[1, 2]], np.float32), packed(tmp_path).order, 4, 100)


def test_positions_restart_in_each_document() -> None:
    ids = np.array([[0, 0, 0, 1, 1, 3], [0, 1, 2, 2, 2, 2], [0, 0, 0, 0, 0, 0]], np.int32)
    assert positions(ids).tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("seed", range(5))
def test_starts_of_documents(seed: int) -> None:
    draws = np.random.default_rng(seed)
    rows, length = draws.integers(1, 6), draws.integers(1, 60)
    ids = np.sort(draws.integers(0, 9, (rows, length)), axis=1).astype(np.int32)
    starts = document_starts(torch.from_numpy(ids)).tolist()
    expected = [r * length + s for r in range(rows) for s in range(length) if s == 0 or ids[r, s] != ids[r, s - 1]]
    assert starts[: len(expected)] == expected and len(starts) in (16, 32, 64)
    assert len(starts) > len(expected) and set(starts[len(expected) :]) == {ids.size}


class Numbers:
    """Sample n holds n everywhere."""

    def __init__(self, length: int, broken: int | None = None, fatal: bool = False) -> None:
        self.length, self.broken, self.fatal = length, broken, fatal

    def __len__(self) -> int:
        return self.length

    def sample(self, index: int) -> Sample:
        if index == self.broken:
            if self.fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the disk is gone")
        row = np.full(3, index, np.int64)
        return Sample(row, row + 1, None)


def rows(found: list[Batch]) -> list[list[int]]:
    for batch in found:
        assert batch.tokens[:, 0].tolist() == list(batch.indices) == (batch.labels[:, 0] - 1).tolist()
        assert batch.document_ids is None and batch.position_ids is None
    return [list(batch.indices) for batch in found]


def test_ranks_share_each_micro_batch_in_order() -> None:
    source = Numbers(50)
    for size in (1, 2, 4):
        micro = 8 // size
        ranks = [
            rows(list(batches(source, micro_batch_size=micro, dp_rank=r, dp_size=size, start_sample=3)))
            for r in range(size)
        ]
        run = [number for step in zip(*ranks, strict=True) for part in step for number in part]
        assert run == list(range(3, 43))  # 43 to 49 fill no micro-batch


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_at_any_sample(workers: int) -> None:
    source = Numbers(24)
    whole = rows(list(batches(source, micro_batch_size=2, num_workers=workers)))
    assert whole == [[n, n + 1] for n in range(0, 24, 2)]
    resumed = rows(list(batches(source, micro_batch_size=2, num_workers=workers, start_sample=10, limit=21)))
    assert resumed == whole[5:10]
    assert list(batches(source, micro_batch_size=2, start_sample=24)) == []


def test_batches_of_packed_documents(tmp_path: Path) -> None:
    source = packed(tmp_path, document_ids=True)
    (batch,) = islice(batches(source, micro_batch_size=3, num_workers=1, start_sample=2), 1)
    assert batch.indices == (2, 3, 4)
    for row, n in enumerate(batch.indices):
        assert batch.tokens[row].tolist() == source.sample(n).tokens.tolist()
    assert batch.document_ids is not None and batch.document_ids.dtype == torch.int32
    assert batch.position_ids is not None and batch.position_ids.dtype == torch.int64
    assert batch.document_starts is not None and batch.document_starts.dtype == torch.int32
    assert batch.to("cpu").indices == batch.indices


def test_no_random_state_is_touched() -> None:
    before = torch.get_rng_state()
    list(batches(Numbers(4), micro_batch_size=1))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_read_is_named(workers: int) -> None:
    with pytest.raises(RuntimeError, match="sample 5 cannot be read: the disk is gone"):
        list(batches(Numbers(9, broken=5), micro_batch_size=2, num_workers=workers))


def test_a_worker_that_dies_is_reported() -> None:
    with pytest.raises(RuntimeError, match=r"samples \d to \d did not arrive: .*killed.*num_workers = 0"):
        list(batches(Numbers(9, broken=5, fatal=True), micro_batch_size=2, num_workers=1))


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"micro_batch_size": 0}, "micro_batch_size must be at least 1, got 0"),
        ({"dp_size": 0}, "dp_size must be at least 1, got 0"),
        ({"num_workers": -1}, "num_workers must be at least 0, got -1"),
        ({"dp_rank": 2, "dp_size": 2}, r"dp_rank must be in \[0, dp_size = 2\), got 2"),
        ({"limit": 11}, "limit must be at most the 10 samples of the source, got 11"),
        ({"start_sample": 9, "limit": 8}, r"start_sample must be in \[0, 8\], got 9"),
    ],
)
def test_wrong_arguments(wrong: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        batches(Numbers(10), **{"micro_batch_size": 1, **wrong})
