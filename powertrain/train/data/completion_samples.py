"""Samples of completions: whole examples packed into rows, in an order that depends on the seed.

A row has `seq_length` inputs; an example of n tokens takes n - 1 of them, since the last token is only predicted. Rows
are filled in the shuffled order until the next example does not fit (GPT-NeoX's pack_until_overflow), or hold one
example each (unpacked). What is left of a row is padding without labels, a document of its own. Of pairs a sample has
two rows, chosen above rejected, with the same examples in the same order. Attention sees one document at a time.

The order of N examples over as many epochs as are needed: each epoch shuffled anew by numpy's RandomState(seed).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from powertrain.runtime import tracing
from powertrain.train.data.completions import CompletionData, check_log_probs
from powertrain.train.data.packed import IGNORED, Completions, Sample

Integers = npt.NDArray[np.int64]


class NoExample(ValueError):
    """None of a data set's examples can be used; the message gives their number and the causes."""


class CompletionSamples:
    """Samples of `sides`, one data set or two of pairs, in `num_samples` rows or more.

    examples   [E] the documents to use
    packed     False: one example a row
    truncate   cut an example that is too long at its end, where GPT-NeoX's allow_chopped does; else leave it out
    Examples without a label that counts are left out. Raises NoExample where none is left.
    """

    def __init__(
        self, sides: Sequence[CompletionData], examples: Integers, *, seq_length: int, num_samples: int, seed: int,
        vocab_size: int, packed: bool = True, truncate: bool = False,
    ) -> None:  # fmt: skip
        # a pair is the same document number on both sides
        if len({len(side) for side in sides}) != 1:
            raise ValueError(
                f"{sides[1].files.tokens}: must have as many documents as {sides[0].files.tokens} ({len(sides[0])}), "
                f"got {len(sides[1])}"
            )
        self.sides, self.seq_length, self.vocab_size = tuple(sides), seq_length, vocab_size
        kept = self._usable(examples, truncate)
        # both rows of a pair are filled alike, so the longer side decides whether an example fits
        lengths = np.max([np.minimum(side.sizes[kept] - 1, seq_length) for side in sides], axis=0).astype(np.int64)
        self.starts, self.order = _rows(kept, lengths, seq_length if packed else 0, num_samples, seed)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def _usable(self, examples: Integers, truncate: bool) -> Integers:
        # an example of one token predicts nothing; without truncation a side may be too long
        sizes = np.stack([side.sizes[examples] for side in self.sides])
        short = (sizes < 2).any(0)
        long = ~short & (sizes > self.seq_length + 1).any(0) & (not truncate)
        fits = examples[~short & ~long]
        kept = np.array([e for e in fits if self._counts(int(e))], np.int64)
        causes = _causes(int(long.sum()), int(short.sum()), len(fits) - len(kept), self.seq_length)
        files, count = self.sides[0].files, len(examples)
        name = files.source or files.tokens
        if not len(kept):
            raise NoExample(f"{name}: must hold an example that can be used, got none of {count}: {causes}")
        if causes:
            tracing.warn(f"{name}: of {count} examples {count - len(kept)} are left out: {causes}")
        return kept

    def _counts(self, example: int) -> bool:
        """Every side has a label that counts within the row."""
        for side in self.sides:
            if side.labels is not None:
                labels = side.labels.get(example, 1, min(int(side.sizes[example]), self.seq_length + 1))
                if not (labels >= 0).any():
                    return False
        return True

    def sample(self, index: int) -> Sample:
        """Sample number `index` of the run: arrays [R, S], R rows."""
        examples = self.order[self.starts[index] : self.starts[index + 1]]
        shape = (len(self.sides), self.seq_length)
        # what no example fills stays padding: token 0 without a label
        tokens, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        # padding gets the number after the last example: attention treats it as one more document
        documents, sequence = np.full(shape, len(examples), np.int32), np.full(shape, -1, np.int64)
        # nan means not known; 0 would be a probability of 1
        log_probs = np.full(shape, np.nan, np.float32)
        values = np.zeros(shape[0] * len(examples), np.float32)
        for row, side in enumerate(self.sides):
            at = 0
            for place, example in enumerate(examples):
                ids, mine, value, known = side.get(int(example))
                self._check(ids, side, int(example))
                if known is not None:
                    check_log_probs(f"{side.files.log_probs}: document {example}", known)
                stop = at + min(len(ids) - 1, self.seq_length - at)
                here, count, number = slice(at, stop), stop - at, row * len(examples) + place
                # labels are shifted by one: position t predicts token t + 1
                tokens[row, here], labels[row, here] = ids[:count], mine[1 : count + 1]
                documents[row, here], values[number] = place, value
                # prompt tokens belong to no completion, so that sums by completion leave them out
                sequence[row, here] = np.where(labels[row, here] == IGNORED, -1, number)
                if known is not None:
                    log_probs[row, here] = known[1 : count + 1]
                at = stop
        return Sample(tokens, labels, documents, Completions(sequence, values, log_probs))

    def _check(self, ids: Integers, side: CompletionData, example: int) -> None:
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            bad = ids[(ids < 0) | (ids >= self.vocab_size)][0]
            raise ValueError(
                f"{side.files.tokens}: tokens must be in [0, {self.vocab_size}), the tokenizer's vocabulary, got {bad} "
                f"in document {example}; was it made with another tokenizer?"
            )


def _causes(long: int, short: int, empty: int, seq_length: int) -> str:
    """Text of the reasons why examples cannot be used, with counts; "" for none."""
    causes = {
        f"longer than train.seq_length {seq_length} (data.allow_chopped: true cuts them)": long,
        "of a single token, which predicts nothing": short,
        f"without a label that counts in the first {seq_length + 1} tokens (train.seq_length {seq_length})": empty,
    }
    return ", ".join(f"{count} {'is' if count == 1 else 'are'} {cause}" for cause, count in causes.items() if count)


def _rows(examples: Integers, lengths: Integers, width: int, num_samples: int, seed: int) -> tuple[Integers, Integers]:
    """(starts [N + 1], order): row n holds the examples order[starts[n] : starts[n + 1]]; width 0: one each."""
    random = np.random.RandomState(seed)
    starts: list[int] = [0]
    order: list[int] = []
    used = 0
    while len(starts) <= num_samples:
        # a row may continue over the end of an epoch, so an epoch never ends with a row that is mostly padding
        for at in random.permutation(len(examples)):
            # `used` first: the first example of a row is taken whatever its length
            if used and (not width or used + lengths[at] > width):
                starts.append(len(order))
                used = 0
            order.append(examples[at])
            used += int(lengths[at])
    starts.append(len(order))
    return np.array(starts, np.int64), np.array(order, np.int64)
