"""GPT-NeoX's order of samples, against a slow telling of the published algorithm."""

import errno
import multiprocessing
import resource
from pathlib import Path

import numpy as np
import pytest

from powertrain.train.data.samples import build_order, cached_order, num_epochs, split_bounds


def slow_order(
    sizes: list[int], documents: list[int], seq_length: int, num_samples: int, seed: int
) -> tuple[list[int], list[tuple[int, int]], list[int]]:
    """One document after the other, one token count at a time."""
    tokens = sum(sizes[d] for d in documents)
    epochs = 1
    while (epochs * tokens - 1) // seq_length < num_samples:
        epochs += 1
    random = np.random.RandomState(seed)
    laid = np.array(documents * epochs, dtype=np.int32)
    random.shuffle(laid)
    starts, entry, offset = [(0, 0)], 0, 0
    for _ in range((epochs * tokens - 1) // seq_length):
        wanted = seq_length + 1
        while True:
            here = sizes[laid[entry]] - offset
            if here >= wanted:
                offset += wanted - 1  # the last token is the first of the next sample
                break
            wanted, entry, offset = wanted - here, entry + 1, 0
        starts.append((entry, offset))
    shuffle = np.arange(len(starts) - 1, dtype=np.uint32)
    random.shuffle(shuffle)
    return laid.tolist(), starts, shuffle.tolist()


# ids: what each is for
CASES = {
    "many documents in a sample": ([3, 2, 4, 1, 2, 5], 8, 1),
    "documents of length 1": ([1] * 30, 4, 5),
    "documents longer than a sample": ([100, 57, 1, 230], 16, 10),
    "many epochs": ([7, 3, 5], 4, 60),
    "one document": ([33], 8, 3),
    "one token": ([1], 1, 5),
    "empty documents": ([0, 4, 0, 0, 9, 0], 3, 6),
    "a sample ends where a document does": ([4, 4, 4, 4], 4, 3),
    "seq_length 1": ([2, 3], 1, 7),
}


@pytest.mark.parametrize("seed", [0, 1234])
@pytest.mark.parametrize("case", CASES)
def test_order_is_bit_identical(case: str, seed: int) -> None:
    sizes, seq_length, num_samples = CASES[case]
    laid, starts, shuffle = slow_order(sizes, list(range(len(sizes))), seq_length, num_samples, seed)
    array = np.array(sizes, np.int32)
    order = build_order(array, np.arange(len(sizes)), seq_length=seq_length, num_samples=num_samples, seed=seed)
    assert order.documents.tolist() == laid
    assert [tuple(row) for row in order.starts.tolist()] == starts
    assert order.shuffle.tolist() == shuffle
    assert len(order) >= num_samples
    assert (order.documents.dtype, order.starts.dtype, order.shuffle.dtype) == (np.int32, np.int32, np.uint32)


def test_order_of_random_data_sets() -> None:
    random = np.random.default_rng(0)
    for seed in range(100):
        sizes = random.integers(0, random.integers(2, 40), random.integers(1, 15)).astype(np.int32)
        sizes[0] += 1
        first = int(random.integers(0, len(sizes))) if sizes[-1] else 0
        documents = np.arange(first, len(sizes))
        seq_length, num_samples = int(random.integers(1, 20)), int(random.integers(1, 50))
        laid, starts, shuffle = slow_order(sizes.tolist(), documents.tolist(), seq_length, num_samples, seed)
        order = build_order(sizes, documents, seq_length=seq_length, num_samples=num_samples, seed=seed)
        assert order.documents.tolist() == laid
        assert [tuple(row) for row in order.starts.tolist()] == starts
        assert order.shuffle.tolist() == shuffle


def test_sequential_order_shuffles_nothing() -> None:
    sizes = np.array([5, 5], np.int32)
    order = build_order(sizes, np.arange(2), seq_length=3, num_samples=5, seed=1, order="sequential")
    assert order.documents.tolist() == [0, 1, 0, 1] and order.shuffle.tolist() == list(range(6))


def test_epochs() -> None:
    for tokens in range(1, 12):
        for seq_length in range(1, 8):
            for wanted in range(1, 12):
                epochs = num_epochs(tokens, seq_length, wanted)
                assert (epochs * tokens - 1) // seq_length >= wanted
                assert epochs == 1 or ((epochs - 1) * tokens - 1) // seq_length < wanted
    assert num_epochs(10, 3, 0) == 1


def test_no_tokens() -> None:
    with pytest.raises(ValueError, match="must hold a token, got 2 documents and none in them"):
        build_order(np.zeros(2, np.int32), np.arange(2), seq_length=2, num_samples=1, seed=0)


@pytest.mark.parametrize(
    "split, count, bounds",
    [
        ("969, 30, 1", 1000, (0, 969, 999, 1000)),
        ("969,30,1", 7, (0, 7, 7, 7)),
        ("969, 30, 1", 100, (0, 97, 100, 100)),
        ("1/1/1", 10, (0, 4, 7, 10)),
        ("1,1", 3, (0, 1, 3, 3)),
        ("0, 1, 1", 3, (0, 0, 1, 3)),
        ("1", 5, (0, 5, 5, 5)),
        ("0.5,0.25,0.25", 8, (0, 4, 6, 8)),
    ],
)
def test_splits(split: str, count: int, bounds: tuple[int, ...]) -> None:
    assert split_bounds(split, count) == bounds


@pytest.mark.parametrize("split", ["", "a", "0,0,0", "-1,2", "1,2,3,4", "nan", "inf,1"])
def test_bad_splits(split: str) -> None:
    with pytest.raises(ValueError, match=r"split must be one to three shares such as '969, 30, 1'.* got "):
        split_bounds(split, 10)


def _cached(folder: Path, sizes: np.ndarray, seed: int = 3) -> list[np.ndarray]:  # type: ignore[type-arg]
    return list(cached_order(folder, sizes, range(1, 4), seq_length=4, num_samples=9, seed=seed, order="neox"))


def test_cache_is_kept_by_content(tmp_path: Path) -> None:
    sizes = np.array([9, 5, 7, 3], np.int32)
    built = build_order(sizes, np.arange(1, 4), seq_length=4, num_samples=9, seed=3)
    for _ in range(2):
        cached = _cached(tmp_path, sizes)
        assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(built, cached, strict=True))
        assert all(isinstance(a, np.memmap) for a in cached)
    folders = [p for p in (tmp_path / "order").iterdir() if p.is_dir()]
    assert len(folders) == 1
    _cached(tmp_path, sizes, seed=4)
    _cached(tmp_path, np.array([9, 5, 7, 4], np.int32))
    assert len([p for p in (tmp_path / "order").iterdir() if p.is_dir()]) == 3


def _rank(folder: Path, results: "multiprocessing.SimpleQueue[object]") -> None:
    results.put([a.tolist() for a in _cached(folder, np.full(4, 1000, np.int32))])


def test_ranks_may_ask_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    ranks = [context.Process(target=_rank, args=(tmp_path, results)) for _ in range(6)]
    for rank in ranks:
        rank.start()
    got = [results.get() for _ in ranks]
    for rank in ranks:
        rank.join()
    assert all(each == got[0] for each in got)
    assert len([p for p in (tmp_path / "order").iterdir() if p.suffix != ".lock"]) == 1


def test_an_order_without_room_is_an_error_with_its_number(tmp_path: Path) -> None:
    """numpy's had none, so that open_run_data did not name the folder."""
    sizes, options = np.full(900, 100, np.int32), dict(seq_length=7, num_samples=9000, seed=1, order="neox")
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, unlimited[1]))
    try:
        with pytest.raises(OSError) as caught:
            cached_order(tmp_path, sizes, range(900), **options)  # type: ignore[arg-type]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert caught.value.errno == errno.EFBIG and not list(tmp_path.rglob("*.npy"))
    made = cached_order(tmp_path, sizes, range(900), **options)  # type: ignore[arg-type]
    built = build_order(sizes, np.arange(900, dtype=np.int32), **options)  # type: ignore[arg-type]
    assert all(np.array_equal(x, y) and x.dtype == y.dtype for x, y in zip(made, built, strict=True))
