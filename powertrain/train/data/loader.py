"""Batches for one rank, in the order of the run: sample n is the same sample whatever the number of ranks.

A micro-batch of the whole run is `micro_batch_size * dp_size` samples that follow each other; rank r takes the r-th
part of it, so that gradient accumulation walks the global batch in order. That is GPT-NeoX's DistributedBatchSampler.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from powertrain.ops.shapes import document_starts
from powertrain.train.data.packed import Completions, Sample, SampleSource
from powertrain.train.data.workers import WorkerLost, read_ahead


class UnreadableSample(RuntimeError):
    """Samples of the run, by number, that could not be read or did not arrive, and why."""


class CompletionBatch(NamedTuple):
    """`Completions` of a batch: sequence, log_probs [B, S] and values [C]; of pairs, the chosen half comes first."""

    sequence: Tensor
    values: Tensor
    log_probs: Tensor


class Batch(NamedTuple):
    """tokens, labels [B, S] int64, label -100: not counted
    document_ids [B, S] int32, in each row from 0 upwards, or None
    position_ids [B, S] int64, from 0 in each document, or None
    indices      the samples' numbers in the run, for error reports
    completions  of prompts with completions; of pairs, rows alternate between chosen and rejected
    reference    [B, S] float32: the reference's log-probabilities of the labels, where they are known
    document_starts [n] int32: `document_starts` of document_ids, or None
    """

    tokens: Tensor
    labels: Tensor
    document_ids: Tensor | None
    position_ids: Tensor | None
    indices: tuple[int, ...]
    completions: CompletionBatch | None = None
    reference: Tensor | None = None
    document_starts: Tensor | None = None

    @property
    def documents(self) -> dict[str, Tensor | None]:
        """The arguments of a model's forward by which documents in a row do not see each other."""
        return {
            "position_ids": self.position_ids,
            "document_ids": self.document_ids,
            "document_starts": self.document_starts,
        }

    def pin_memory(self) -> "Batch":
        # from pageable memory a copy to the GPU waits, whatever non_blocking says
        return self.each(lambda x: x.pin_memory())

    def to(self, device: torch.device | str) -> "Batch":
        """The batch on a device; the copy does not wait when the batch is pinned."""
        return self.each(lambda x: x.to(device, non_blocking=True))

    @property
    def tensors(self) -> list[Tensor]:
        """All that it has, in one order."""
        return [x for x in (*self, *(self.completions or ())) if isinstance(x, Tensor)]

    def each(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """The batch with `function` of each tensor in its place."""

        def applied(values: Any) -> list[Any]:
            return [function(x) if isinstance(x, Tensor) else x for x in values]

        completions = self.completions
        return Batch(*applied(self))._replace(
            completions=None if completions is None else CompletionBatch(*applied(completions))
        )


def batches(
    source: SampleSource,
    *,
    micro_batch_size: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    start_sample: int = 0,
    limit: int | None = None,
    num_workers: int = 0,
) -> Iterator[Batch]:
    """The micro-batches of rank `dp_rank`, from sample `start_sample` of the run to `limit`, or to the source's end.

    To resume, pass the number of samples that the run has consumed on all ranks; the batches that follow are the same
    as if it had not stopped. A last micro-batch that cannot be full on every rank is left out.
    num_workers: processes that read ahead, 0 to read here. Batches are the same for any number, also where one is
    killed and replaced; they are pinned where there is a GPU. No random state is read or changed.
    Raises ValueError naming the argument; UnreadableSample naming the samples: reading fails, three workers in a row
    die over them, or one hangs.
    """
    end = len(source) if limit is None else limit
    _check(len(source), micro_batch_size, dp_rank, dp_size, start_sample, end, num_workers)
    numbers = _Numbers(micro_batch_size, dp_rank, dp_size, start_sample, end)
    return _read(source, numbers, num_workers)


def _check(length: int, micro: int, rank: int, size: int, start: int, end: int, workers: int) -> None:
    for name, value, least in (("micro_batch_size", micro, 1), ("dp_size", size, 1), ("num_workers", workers, 0)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if not 0 <= rank < size:
        raise ValueError(f"dp_rank must be in [0, dp_size = {size}), got {rank}")
    if not 0 <= end <= length:
        raise ValueError(f"limit must be at most the {length} samples of the source, got {end}")
    if not 0 <= start <= end:
        raise ValueError(f"start_sample must be in [0, {end}], got {start}")


class _Numbers(Sequence[list[int]]):
    """The sample numbers of each micro-batch of a rank."""

    def __init__(self, micro: int, rank: int, size: int, start: int, end: int) -> None:
        self.micro, self.start, self.offset, self.step = micro, start, rank * micro, micro * size
        # whole steps of all ranks: a rank with one batch more would wait for the others
        self._count = (end - start) // self.step

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, batch: Any) -> Any:
        if not 0 <= batch < self._count:
            raise IndexError(batch)
        # a step is all ranks' samples, so ranks read disjoint samples and none talks to another
        first = self.start + batch * self.step + self.offset
        return list(range(first, first + self.micro))


class _Reader:
    """Reads the samples of a batch; returns the reason if they cannot be read."""

    def __init__(self, source: SampleSource) -> None:
        self.source = source

    def __call__(self, numbers: list[int]) -> list[Sample] | str:
        samples = []
        for number in numbers:
            try:
                samples.append(self.source.sample(number))
            except Exception as error:
                # as text, since not every exception can be sent from a worker
                return f"sample {number} cannot be read: {error or type(error).__name__}"
        return samples


def _stacked(samples: list[Sample], numbers: list[int]) -> Batch:
    # a sample is one row [S], or of pairs two rows [2, S]
    ids = [np.atleast_2d(sample.document_ids) for sample in samples if sample.document_ids is not None]
    documents = np.concatenate(ids) if ids else None
    batch = Batch(
        torch.from_numpy(np.concatenate([np.atleast_2d(sample.tokens) for sample in samples])),
        torch.from_numpy(np.concatenate([np.atleast_2d(sample.labels) for sample in samples])),
        None if documents is None else torch.from_numpy(documents),
        None if documents is None else torch.from_numpy(positions(documents)),
        tuple(numbers),
        _stacked_completions([sample.completions for sample in samples if sample.completions is not None]),
        document_starts=None if documents is None else document_starts(torch.from_numpy(documents)),
    )
    # here, not in a worker: workers have no CUDA context
    return batch.pin_memory() if torch.cuda.is_available() else batch


def _stacked_completions(parts: list[Completions]) -> CompletionBatch | None:
    """Completions numbered through the batch: row by row of a sample, so that of pairs all chosen ones come first."""
    if not parts:
        return None
    rows = parts[0].sequence.shape[0]
    counts = [len(part.values) // rows for part in parts]
    total, before, sequences = sum(counts), 0, []
    for part, count in zip(parts, counts, strict=True):
        # within its sample a completion is row * count + place; -1 stays -1 through the where below
        row, place = np.divmod(part.sequence, count)
        sequences.append(np.where(part.sequence < 0, -1, row * total + before + place))
        before += count
    values = np.concatenate([part.values.reshape(rows, -1) for part in parts], axis=1).reshape(-1)
    log_probs = np.concatenate([part.log_probs for part in parts])
    return CompletionBatch(*(torch.from_numpy(x) for x in (np.concatenate(sequences), values, log_probs)))


def positions(document_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """[B, S] int64: the distance of each token from the first token of its document in the row."""
    here = np.broadcast_to(np.arange(document_ids.shape[1]), document_ids.shape)
    # prepend -1, which is no id: the first token of a row always begins a document
    starts = np.where(np.diff(document_ids, axis=1, prepend=-1) != 0, here, 0)
    return here - np.maximum.accumulate(starts, axis=1)


def _read(source: SampleSource, numbers: _Numbers, num_workers: int) -> Iterator[Batch]:
    reader = _Reader(source)
    # keys are fixed in advance, so any number of workers gives the same batches
    arriving = read_ahead(reader, numbers, num_workers) if num_workers else map(reader, numbers)
    try:
        for read, wanted in zip(arriving, numbers, strict=True):
            if isinstance(read, str):
                # raised here and not in the worker: a worker's exception would look like its death
                raise UnreadableSample(read)
            yield _stacked(read, wanted)
    except WorkerLost as lost:
        raise UnreadableSample(
            f"samples {lost.key[0]} to {lost.key[-1]} did not arrive: {lost}; "
            "with num_workers = 0 the samples are read in this process"
        ) from None
