"""Samples of packed documents: the tokens of an order's cut, their labels, and which document each belongs to."""

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from powertrain.train.data.indexed import DocumentSlice, IndexedData
from powertrain.train.data.samples import SampleOrder

IGNORED = -100  # the label that counts in no loss, as in PyTorch


class Completions(NamedTuple):
    """Fields of a sample of completions beside tokens and labels, for rows [R, S] with C completions.

    sequence   [R, S] int64: the completion whose token is predicted here, from 0 to C - 1, or -1 where no label counts.
               Of pairs the chosen ones come first
    values     [C] float32: label, advantage or 0
    log_probs  [R, S] float32: the sampler's log-probability of the token predicted here, nan where it is not known
    """

    sequence: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]
    log_probs: npt.NDArray[np.float32]


class Sample(NamedTuple):
    """tokens, labels [S] int64 (label IGNORED: not counted); document_ids [S] int32, growing from 0, or None.

    completions   of a sample of prompts with completions, whose arrays are [R, S]
    """

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    document_ids: npt.NDArray[np.int32] | None
    completions: Completions | None = None


class SampleSource(Protocol):
    """Samples by their number in the run. Read from several processes: it must pickle, and keep no position."""

    def __len__(self) -> int: ...

    def sample(self, index: int) -> Sample: ...


class PackedSamples:
    """The documents of a data set, cut into samples of `seq_length` tokens by an order.

    A sample of whole documents (whole_documents.py) that is shorter is padded with token 0, and with labels that count
    in no loss where there is a data set of labels; without, its labels are those zeros, as in GPT-NeoX.

    vocab_size     a token that is not below it is an error that names file and document
    labels         a data set beside `data`, document for document: labels, negative where nothing is
    document_ids   tell the documents of a sample apart
    eod            no loss where the input is this token, GPT-NeoX's eod_mask_loss: nothing is learnt of which document
                   follows another
    """

    def __init__(
        self,
        data: IndexedData | DocumentSlice,
        order: SampleOrder,
        seq_length: int,
        vocab_size: int,
        *,
        labels: IndexedData | None = None,
        document_ids: bool = False,
        eod: int | None = None,
    ) -> None:
        # reward files are floats in the same format; read as tokens they would be nonsense ids
        for each in (data, labels):
            if each is not None and each.dtype.kind not in "iu":
                raise ValueError(f"{each.prefix}: must hold integers to be tokens or labels, got {each.dtype}")
        if labels is not None and not np.array_equal(labels.sizes, data.sizes):
            raise ValueError(
                f"labels {labels.prefix}: must have the document lengths of {data.prefix} ({len(data)} documents, "
                f"{data.sizes.sum(dtype=np.int64)} tokens), got {len(labels)} documents, "
                f"{labels.sizes.sum(dtype=np.int64)} labels"
            )
        self.data, self.order, self.labels = data, order, labels
        self.seq_length, self.vocab_size = seq_length, vocab_size
        self._document_ids, self._eod = document_ids, eod

    def __len__(self) -> int:
        return len(self.order)

    def sample(self, index: int) -> Sample:
        """Sample number `index` of the run."""
        # cuts are in document order on disk; the shuffle says which one is sample `index`
        pieces = self._pieces(int(self.order.shuffle[index]))
        read = self._read(self.data, pieces)
        self._check(read, pieces, index)
        text = self._fitted(read, 0)
        tokens = text[:-1]
        # a copy, for tokens and labels are views of one array and labels are changed
        labels = text[1:].copy()
        if self.labels is not None:
            labels = self._fitted(self._read(self.labels, pieces), IGNORED)[1:].copy()
        labels[labels < 0] = IGNORED
        if self._eod is not None:
            labels[tokens == self._eod] = IGNORED
        ids = None
        if self._document_ids:
            lengths = [stop - start for _, start, stop in pieces]
            # padding becomes a document of its own, so that it attends to no text
            ids = self._fitted(np.repeat(np.arange(len(pieces), dtype=np.int32), lengths), len(pieces))[:-1]
            # the first piece may be an empty document
            ids -= ids[0]
        return Sample(tokens, labels, ids)

    def _pieces(self, cut: int) -> list[tuple[int, int, int]]:
        """(document, start, stop) of each piece of a cut."""
        documents, sizes = self.order.documents, self.data.sizes
        # a cut ends where the next begins, plus one token, which is only a label
        (first, start), (last, stop) = self.order.starts[cut].tolist(), self.order.starts[cut + 1].tolist()
        if first == last:
            # one token more than the cut: the label of the last one
            return [(int(documents[first]), start, stop + 1)]
        inner = documents[first:last].tolist()
        # whole documents, but the first from `start` on
        starts = [start] + [0] * (len(inner) - 1)
        pieces = [(document, at, int(sizes[document])) for document, at in zip(inner, starts, strict=True)]
        return [*pieces, (int(documents[last]), 0, stop + 1)]

    def _fitted(self, values: npt.NDArray[Any], padding: int) -> npt.NDArray[Any]:
        """A sample and the token after it; one of whole documents may be shorter, or longer."""
        wanted = self.seq_length + 1
        if len(values) == wanted:
            return values
        return np.pad(values[:wanted], (0, max(0, wanted - len(values))), constant_values=padding)

    def _read(self, data: IndexedData | DocumentSlice, pieces: list[tuple[int, int, int]]) -> npt.NDArray[np.int64]:
        return np.concatenate([data.get(*piece) for piece in pieces]).astype(np.int64, copy=False)

    def _check(self, text: npt.NDArray[np.int64], pieces: list[tuple[int, int, int]], index: int) -> None:
        if text.min() >= 0 and text.max() < self.vocab_size:
            return
        # an id outside would index past the embedding: on a GPU an assertion that names no document
        bad = int(np.argmax((text < 0) | (text >= self.vocab_size)))
        ends = np.cumsum([stop - start for _, start, stop in pieces])
        document = pieces[int(np.searchsorted(ends, bad, side="right"))][0]
        raise ValueError(
            f"{self.data.prefix}: tokens must be in [0, {self.vocab_size}), the tokenizer's vocabulary, got "
            f"{text[bad]} in document {document} (sample {index}); was it made with another tokenizer?"
        )
