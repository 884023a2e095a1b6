"""Tokens of sample n of a run: GPT-NeoX's order, bit for bit, in numpy alone.

The documents of a data set, repeated for as many epochs as the wanted samples need, are shuffled and laid end to end;
sample i takes the `seq_length + 1` tokens from position i * seq_length (its last token is the next one's first); the
samples are shuffled again. Both shuffles are numpy's RandomState(seed), whose streams numpy has frozen.

GPT-NeoX cuts the samples in a C++ loop over documents. Here the position of every sample is looked up in the running
sum of document lengths, all at once.
Source: EleutherAI/gpt-neox, megatron/data/gpt2_dataset.py, data_utils.py and helpers.cpp, as facts.
"""

import contextlib
import hashlib
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from powertrain.runtime import tracing
from powertrain.runtime.jobs import available_memory
from powertrain.runtime.reading import one_line
from powertrain.train.checksums import compare, crc_of, read_sums, sync, write_sums
from powertrain.train.config.split import shares_of
from powertrain.train.data.file_lock import one_at_a_time

_SUMS = "checksums.json"
# seconds without a write after which a temporary folder has no writer left
_STALE = 3600.0
Order = Literal["neox", "sequential"]
Integers = npt.NDArray[Any]

_VERSION = 2


class SampleOrder(NamedTuple):
    """documents [E * D] int32: the documents of E epochs, in the order they are laid end to end
    starts [N + 1, 2] int32 or int64: for each sample its entry in `documents` and the offset of its first token there
    shuffle [N] uint32 or int64: sample n of the run is cut number shuffle[n]
    """

    documents: Integers
    starts: Integers
    shuffle: Integers

    def __len__(self) -> int:
        return len(self.shuffle)


def split_bounds(split: str, count: int) -> tuple[int, int, int, int]:
    """Bounds b of train [b0, b1), validation [b1, b2) and test [b2, b3) among `count` documents.

    split: up to three shares such as "969, 30, 1" or "8/1/1"; a part may be empty. Shares are rounded as there: the
    difference that rounding makes is taken from every bound.
    """
    shares = shares_of(split)
    total, bounds = sum(shares), [0]
    for share in shares:
        bounds.append(bounds[-1] + round(share / total * float(count)))
    excess = bounds[3] - count
    # with very few documents the correction can fall below 0: an empty part, as in GPT-NeoX
    return 0, *(max(0, bound - excess) for bound in bounds[1:])  # type: ignore[return-value]


def num_epochs(tokens: int, seq_length: int, num_samples: int) -> int:
    """The fewest passes over `tokens` tokens that hold `num_samples` samples, at least 1."""
    return max(1, -(-(num_samples * seq_length + 1) // tokens))


def build_order(
    sizes: Integers, documents: Integers, *, seq_length: int, num_samples: int, seed: int, order: Order = "neox"
) -> SampleOrder:
    """The order of at least `num_samples` samples of `seq_length` + 1 tokens.

    sizes [all documents] lengths in tokens; documents [D] those to use.
    order "sequential" shuffles nothing: documents as they lie in the file, epoch after epoch.
    Memory: about 20 bytes for each document of each epoch while building, 12 for each sample to keep.
    Raises ValueError if the documents hold no token.
    """
    tokens = int(sizes[documents].sum(dtype=np.int64))
    if tokens == 0:
        raise ValueError(f"the data set must hold a token, got {len(documents)} documents and none in them")
    epochs = num_epochs(tokens, seq_length, num_samples)
    needed = 20 * epochs * len(documents) + 24 * max(num_samples, epochs * tokens // seq_length)
    # not psutil: it reads the host's memory, not the limit of a container
    if needed > (free := available_memory()[0]):
        raise ValueError(
            f"train.steps (of a held-out set evaluation.steps): the order of {num_samples} samples over {epochs} "
            f"epochs of {len(documents)} documents must fit into memory, got {needed / 2**30:,.0f} GiB where "
            f"{free / 2**30:,.0f} GiB are free"
        )
    # the legacy generator, whose numbers GPT-NeoX's orders are made of; NumPy keeps them for ever
    random = np.random.RandomState(seed)
    laid = np.tile(documents.astype(np.int32), epochs)
    if order == "neox":
        random.shuffle(laid)
    cuts = (epochs * tokens - 1) // seq_length
    starts = _starts(sizes, laid, seq_length, cuts)
    # GPT-NeoX's dtypes: the shuffle draws by them
    shuffle = np.arange(cuts, dtype=np.uint32 if cuts < np.iinfo(np.uint32).max - 1 else np.int64)
    if order == "neox":
        random.shuffle(shuffle)
    return SampleOrder(laid, starts, shuffle)


def _starts(sizes: Integers, laid: Integers, seq_length: int, cuts: int) -> Integers:
    ends = np.cumsum(sizes[laid], dtype=np.int64)
    positions = np.arange(cuts + 1, dtype=np.int64) * seq_length
    entries = np.searchsorted(ends, positions, side="right")
    offsets = positions - (ends[entries] - sizes[laid[entries]])
    # there the first sample starts at the first document, be it an empty one
    entries[0] = 0
    dtype = np.int32 if 2 * (cuts + 1) < np.iinfo(np.int32).max else np.int64
    return np.stack([entries, offsets], axis=1).astype(dtype)


def cached_order(
    folder: Path, sizes: Integers, documents: range, *, seq_length: int, num_samples: int, seed: int, order: Order
) -> SampleOrder:
    """`build_order` of the documents in a range, by way of `cached_arrays`; a changed data set gets a new order."""

    def build() -> SampleOrder:
        span = np.arange(documents.start, documents.stop, dtype=np.int32)
        return build_order(sizes, span, seq_length=seq_length, num_samples=num_samples, seed=seed, order=order)

    about = f"order {documents.start} {documents.stop} {seq_length} {num_samples} {seed} {order}"
    arrays = cached_arrays(folder, about.encode() + np.ascontiguousarray(sizes).tobytes(), build)
    return SampleOrder(*arrays)


def cached_arrays(folder: Path, about: bytes, build: Callable[[], Sequence[Integers]]) -> list[Integers]:
    """The arrays that `build` returns, memory-mapped from `folder`, where they are made if they are not there yet.

    about: everything they depend on; its hash is their name.
    Ranks and runs may ask at once: one builds while the others wait, and arrays appear whole, by renaming. Their CRC-32
    is compared at every start; damaged ones are built anew, which is said.
    """
    entry = folder / "order" / hashlib.blake2b(b"%d " % _VERSION + about, digest_size=16).hexdigest()
    if not _is_whole(entry):
        with one_at_a_time(Path(f"{entry}.lock"), "building the order of samples"):
            if not _is_whole(entry):
                _publish(entry, build())
    # mapped: all ranks and workers of a host share the pages
    return [np.load(path, mmap_mode="r") for path in sorted(entry.glob("*.npy"))]


def _is_whole(entry: Path) -> bool:
    """Whether the cached arrays exist and are valid; damaged ones are removed."""
    if not entry.is_dir():
        return False
    try:
        sums = read_sums(entry / _SUMS)
        for name, (size, crc) in sums.items():
            compare(entry / name, size, crc)
    except (OSError, ValueError) as error:
        tracing.warn(f"the order of samples is computed again: {one_line(error)}")
        aside = _aside(entry)
        # another rank did the same
        with contextlib.suppress(OSError):
            entry.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
        return False
    return True


def _aside(entry: Path) -> Path:
    return entry.parent / f".{uuid.uuid4().hex}.tmp"


def _save(file: Path, values: Integers) -> None:
    """As np.save, whose error on a full disk has no number: "42262 requested and 224 written"."""
    with file.open("wb") as opened:
        np.lib.format.write_array_header_1_0(opened, np.lib.format.header_data_from_array_1_0(values))
        opened.write(values.data)


def _publish(entry: Path, arrays: Sequence[Integers]) -> None:
    aside, sums = _aside(entry), {}
    aside.mkdir()
    try:
        for number, values in enumerate(arrays):
            file = aside / f"{number}.npy"
            _save(file, np.ascontiguousarray(values))
            sync(file)
            sums[file.name] = (file.stat().st_size, crc_of(file))
        write_sums(aside / _SUMS, sums)
        # a folder appears whole or not at all; its checksums were written last
        aside.rename(entry)
        sync(entry.parent)
    except OSError:
        # otherwise another process published the same
        if not entry.is_dir():
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        for left in entry.parent.glob(".*.tmp"):
            with contextlib.suppress(OSError):
                # of a process that was killed; a young one may be another rank's
                if time.time() - left.stat().st_mtime > _STALE:
                    shutil.rmtree(left)
