"""GPT-NeoX's blends, against a slow telling of the published algorithm."""

import math
from itertools import pairwise

import numpy as np
import pytest

from powertrain.train.data.blend import BlendedSamples, blend_indices, samples_wanted, weights_by_documents
from powertrain.train.data.packed import Sample


def slow_blend(weights: list[float], count: int) -> list[tuple[int, int]]:
    shares = np.array(weights, np.float64)
    shares /= np.sum(shares)
    taken, found = np.zeros(len(shares), np.int64), []
    for n in range(count):
        best, best_error = 0, -math.inf
        for number, share in enumerate(shares):
            error = share * max(float(n), 1.0) - float(taken[number])
            if error > best_error:
                best, best_error = number, error
        found.append((best, int(taken[best])))
        taken[best] += 1
    return found


@pytest.mark.parametrize(
    "weights", [[1.0], [1, 1], [0.6, 0.3, 0.1], [0.5, 0.25, 0.25], [0, 3, 0, 1], [1e-9, 1], [0.1] * 10, [3, 1, 4, 1.5]]
)
def test_blend_is_bit_identical(weights: list[float]) -> None:
    chosen, within = blend_indices(weights, 700)
    assert list(zip(chosen.tolist(), within.tolist(), strict=True)) == slow_blend(weights, 700)
    assert (chosen.dtype, within.dtype) == (np.uint8, np.int64)


@pytest.mark.parametrize("weights", [[], [0, 0], [-1, 2], [float("nan")], [1.0] * 255])
def test_bad_weights(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights must be 1 to 254 numbers of at least 0, not all 0, got"):
        blend_indices(weights, 3)


def test_samples_wanted_suffice() -> None:
    assert samples_wanted([3, 1], 100) == [76, 26]
    random = np.random.default_rng(0)
    # of [0, 1] the source of weight 0 has the second sample, in GPT-NeoX too
    drawn = [[0.0, 1.0], [0.0, 0.0, 2.0], *(random.random(random.integers(1, 6)).tolist() for _ in range(30))]
    for weights in drawn:
        count = int(random.integers(2, 300))
        used = np.bincount(blend_indices(weights, count)[0], minlength=len(weights))
        assert (used <= samples_wanted(weights, count)).all()


def test_weights_by_documents() -> None:
    assert weights_by_documents([7], 0.3) == [1.0]
    counts, alpha = [100, 300, 600], 0.3
    p = [(c / 1000) ** alpha for c in counts]
    p = [x / sum(p) for x in p]
    w = [x * (1 - c / 1000) for x, c in zip(p, counts, strict=True)]
    assert weights_by_documents(counts, alpha) == pytest.approx([x / sum(w) for x in w], rel=1e-15)
    by_alpha = [weights_by_documents(counts, a)[2] for a in (0.0, 0.5, 1.0)]
    assert all(a < b for a, b in pairwise(by_alpha))


class Constant:
    def __init__(self, value: int, length: int) -> None:
        self.value, self.length = value, length

    def __len__(self) -> int:
        return self.length

    def sample(self, index: int) -> Sample:
        return Sample(np.array([self.value, index]), np.array([0, 0]), None)


def test_blended_samples() -> None:
    blend = BlendedSamples([Constant(0, 8), Constant(1, 3)], *blend_indices([3, 1], 10))
    assert len(blend) == 10
    assert [tuple(blend.sample(n).tokens.tolist()) for n in range(10)] == slow_blend([3, 1], 10)
    with pytest.raises(ValueError, match=r"sources\[1\] must have 3 samples, got 2"):
        BlendedSamples([Constant(0, 8), Constant(1, 2)], *blend_indices([3, 1], 10))
