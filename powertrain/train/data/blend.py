"""Blends of data sets: which data set, and which of its samples, is sample n of the run; as GPT-NeoX builds them.

At every n the data set that is furthest behind its share takes the sample: the first with the greatest
weight * max(n, 1) - taken, in float64.
Source: EleutherAI/gpt-neox, megatron/data/helpers.cpp (build_blending_indices) and data_utils.py, as facts.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from powertrain.train.data.packed import Sample, SampleSource

_MOST_SAMPLES = 1 << 36  # a day's work


def blend_indices(weights: Sequence[float], count: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """(data set [count], sample within it [count]) of the first `count` samples of a blend of up to 254 data sets.

    weights: at least 0, not all 0; they are normalised.
    """
    shares = np.array(weights, np.float64)
    if not 1 <= len(shares) < 255 or not (np.isfinite(shares) & (shares >= 0)).all() or not shares.sum() > 0:
        raise ValueError(f"weights must be 1 to 254 numbers of at least 0, not all 0, got {list(weights)}")
    if count > _MOST_SAMPLES:
        raise ValueError(
            f"a blend must have at most {_MOST_SAMPLES} samples, got {count}: about {count // 10**6} s of work"
        )
    # one choice shifts all that follow, so whole blocks cannot be computed at once: guessing a block and correcting it
    # until it obeys the rule gains one right choice a round. This loop makes a million choices in about a second
    each = (shares / np.sum(shares)).tolist()
    # one byte for the set (hence at most 254 of them): the arrays are as long as the run
    chosen, within = np.zeros(count, np.uint8), np.zeros(count, np.int64)
    taken = [0] * len(each)
    for n in range(count):
        x = float(n) if n else 1.0
        # the same operations in the same order as the C++ code: one rounding more could choose another set
        behind = [share * x - had for share, had in zip(each, taken, strict=True)]
        # index gives the first of equal ones, as the strict comparison of the C++ loop does
        first = behind.index(max(behind))
        chosen[n], within[n] = first, taken[first]
        taken[first] += 1
    return chosen, within


def normalized(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]


def samples_wanted(weights: Sequence[float], num_samples: int) -> list[int]:
    """Samples each data set is prepared for: its share of `num_samples` and half a percent, rounded up, as there."""
    # GPT-NeoX's own reserve: the order of a source depends on how many samples it is asked for, so it must be the same.
    # One at least: a source of weight 0 has the second sample where it comes before one that has the first
    return [max(1, math.ceil(num_samples * weight * 1.005)) for weight in normalized(weights)]


def weights_by_documents(counts: Sequence[int], alpha: float) -> list[float]:
    """GPT-NeoX's weights from document counts: (share ** alpha, normalised) * (1 - share), normalised.

    alpha 1 keeps shares before the second factor, 0 makes them equal. Source: arXiv:1911.02116; data_utils.py there.
    """
    # the formula below gives a single set the weight 1 * (1 - 1) = 0
    if len(counts) == 1:
        return [1.0]
    shares = normalized(counts)
    flattened = normalized([share**alpha for share in shares])
    return normalized([p * (1 - share) for p, share in zip(flattened, shares, strict=True)])


class BlendedSamples:
    """Samples of several sources: number n is sample `within[n]` of source `chosen[n]` (blend_indices)."""

    def __init__(
        self, sources: Sequence[SampleSource], chosen: npt.NDArray[np.uint8], within: npt.NDArray[np.int64]
    ) -> None:
        self.sources, self.chosen, self.within = list(sources), chosen, within
        for number, source in enumerate(sources):
            # found here, and not at the step of the run that would read past the end
            used = int(np.count_nonzero(chosen == number))
            if used > len(source):
                raise ValueError(f"sources[{number}] must have {used} samples, got {len(source)}")

    def __len__(self) -> int:
        return len(self.chosen)

    def sample(self, index: int) -> Sample:
        return self.sources[self.chosen[index]].sample(int(self.within[index]))
