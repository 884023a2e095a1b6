"""Tables of cos and sin for rotary position embedding, by every scaling scheme: one builder, one dataclass a scheme.

    θ[p, c] = p * inv_freq[c],   inv_freq[c] = base^(-2c/R) before a scheme changes it,   c < R/2
    cos, sin = attention_factor * cos θ, attention_factor * sin θ

Formulas, names of fields and float32 arithmetic are those of Hugging Face transformers, so that a model trained there
sees the same table.
"""

import math
from dataclasses import dataclass, field
from numbers import Real
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from powertrain.runtime import checks
from powertrain.runtime.positional import hinted


class RopeTable(NamedTuple):
    """cos and sin of every position's angles, times the scheme's attention factor."""

    cos: Tensor  # [max_seqlen, rotary_dim / 2] float32
    sin: Tensor  # [max_seqlen, rotary_dim / 2] float32
    axes: Tensor | None = None  # [rotary_dim / 2] int32: which axis of position_ids turns this pair (M-RoPE)

    def to(self, device: torch.device | str) -> "RopeTable":
        axes = None if self.axes is None else self.axes.to(device)
        return RopeTable(self.cos.to(device), self.sin.to(device), axes)


class Scheme(Protocol):
    """Scaling of a table's frequencies, relative to 1 / base^(2c/R)."""

    def frequencies(self, rotary_dim: int, base: float, seqlen: int) -> tuple[Tensor, float]:
        """inv_freq [rotary_dim / 2] float32, and the factor on cos and sin, for sequences of up to `seqlen`."""


# fields of schemes that divide, or whose logarithm is taken
_ABOVE_0 = (
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
)


def check_scheme(op: str, argument: str, scheme: Scheme) -> None:
    """Raise ValueError naming a field of a scheme that must be above 0 and finite: angles would be NaN."""
    for name in _ABOVE_0:
        value = getattr(scheme, name, 1)
        good = isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < math.inf
        checks.require(good, op, f"{argument}.{name}", "be a number above 0 and finite", checks.described(value))


def _inv_freq(rotary_dim: int, base: float) -> Tensor:
    return 1.0 / base ** (torch.arange(0, rotary_dim, 2, device="cpu").float() / rotary_dim)


@dataclass(frozen=True)
class Unscaled:
    """RoFormer's frequencies. Su et al., arXiv:2104.09864."""

    def frequencies(self, rotary_dim: int, base: float, seqlen: int) -> tuple[Tensor, float]:
        return _inv_freq(rotary_dim, base), 1.0


@dataclass(frozen=True)
class Linear:
    """Position interpolation: positions divided by `factor`. Chen et al., arXiv:2306.15595."""

    factor: float

    def frequencies(self, rotary_dim: int, base: float, seqlen: int) -> tuple[Tensor, float]:
        return _inv_freq(rotary_dim, base) / self.factor, 1.0


def _stretched(rotary_dim: int, base: float, factor: float) -> Tensor:
    """Frequencies of a base that grows so that the slowest pair is interpolated by `factor`; there must be another."""
    checks.require(rotary_dim >= 4, "rope_table", "rotary_dim", "be 4 or more with NTK scaling", rotary_dim)
    return _inv_freq(rotary_dim, base * factor ** (rotary_dim / (rotary_dim - 2)))


@dataclass(frozen=True)
class NTK:
    """NTK-aware scaling: the base grows so that the slowest pair is interpolated by `factor`, the fastest not at all.

    After bloc97; described in Peng et al., arXiv:2309.00071, section 3.1.
    """

    factor: float

    def frequencies(self, rotary_dim: int, base: float, seqlen: int) -> tuple[Tensor, float]:
        return _stretched(rotary_dim, base, self.factor), 1.0


@dataclass(frozen=True)
class DynamicNTK:
    """NTK-aware scaling whose factor grows with the sequence, here the table's `max_seqlen`.

    After emozilla; Peng et al., arXiv:2309.00071, section 3.3.
    """

    factor: float
    original_max_position_embeddings: int

    def frequencies(self, rotary_dim: int, base: float, seqlen: int) -> tuple[Tensor, float]:
        longer = max(seqlen, self.original_max_position_embeddings) / self.original_max_position_embeddings
        stretched = self.factor * longer - (self.factor - 1)
        return _stretched(rotary_dim, base, stretched), 1.0


@dataclass(frozen=True)
class YaRN:
    """Fast pairs keep their frequency, slow ones are interpolated by `factor`, a ramp between; and a temperature.

    The factor on cos and sin is `attention_factor` if given; mscale(mscale) / mscale(mscale_all_dim) if both are
    (DeepSeek); else mscale(1), with mscale(m) = 0.1 m ln(factor) + 1. Peng et al., arXiv:2309.00071.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0  # pairs that turn more often than this over the original length are left alone
    beta_slow: float = 1.0  # those that turn less often are interpolated in full
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # round the ramp's ends to whole pairs

    def frequencies(self, rotary_dim: int, base: float, seqlen: int) -> tuple[Tensor, float]:
        turns = (self.beta_fast, self.beta_slow)
        low, high = (self._pair(n, rotary_dim, base) for n in turns)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        # as transformers does, so that the ramp is not divided by 0
        high = high + 0.001 if low == high else high
        keep = 1 - ((torch.arange(rotary_dim // 2, device="cpu").float() - low) / (high - low)).clamp(0, 1)
        wavelength = base ** (torch.arange(0, rotary_dim, 2, device="cpu").float() / rotary_dim)
        inv_freq = 1.0 / (self.factor * wavelength) * (1 - keep) + 1.0 / wavelength * keep
        return inv_freq, self._attention_factor()

    def _pair(self, turns: float, rotary_dim: int, base: float) -> float:
        """The (fractional) pair that turns `turns` times over the original length."""
        length = self.original_max_position_embeddings
        return rotary_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    def _attention_factor(self) -> float:
        def mscale(m: float) -> float:
            return 0.1 * m * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return mscale(self.mscale) / mscale(self.mscale_all_dim)
        return mscale(1.0)


@dataclass(frozen=True)
class Llama3:
    """Long waves are interpolated by `factor`, short ones not, those between smoothly.

    Grattafiori et al., arXiv:2407.21783.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def frequencies(self, rotary_dim: int, base: float, seqlen: int) -> tuple[Tensor, float]:
        inv_freq = _inv_freq(rotary_dim, base)
        low, high, length = self.low_freq_factor, self.high_freq_factor, self.original_max_position_embeddings
        wavelength = 2 * math.pi / inv_freq
        smooth = (length / wavelength - low) / (high - low)
        between = (1 - smooth) * inv_freq / self.factor + smooth * inv_freq
        scaled = torch.where(wavelength > length / low, inv_freq / self.factor, between)
        return torch.where(wavelength < length / high, inv_freq, scaled), 1.0


@dataclass(frozen=True)
class LongRoPE:
    """A searched factor for each pair, one list up to the original length, another beyond (the table's `max_seqlen`).

    `factor` is the extension, max_position_embeddings / original_max_position_embeddings of the model; the factor on
    cos and sin is sqrt(1 + ln(factor) / ln(original length)) unless given. Ding et al., arXiv:2402.13753.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    factor: float
    attention_factor: float | None = None

    def frequencies(self, rotary_dim: int, base: float, seqlen: int) -> tuple[Tensor, float]:
        name = "long_factor" if seqlen > self.original_max_position_embeddings else "short_factor"
        factors = torch.tensor(getattr(self, name), dtype=torch.float32, device="cpu")
        checks.shape("rope_table", f"scheme.{name}", factors, (rotary_dim // 2,), "rotary_dim / 2")
        inv_freq = 1.0 / (factors * base ** (torch.arange(0, rotary_dim, 2, device="cpu").float() / rotary_dim))
        attention_factor = self.attention_factor
        if attention_factor is None:
            grown = math.log(max(self.factor, 1.0)) / math.log(self.original_max_position_embeddings)
            attention_factor = math.sqrt(1 + grown)
        return inv_freq, attention_factor


@dataclass(frozen=True)
class MRoPE:
    """Multimodal: each pair turns with one of several positions (time, height, width), `sections[i]` with the i-th.

    sections      pairs of each axis, rotary_dim / 2 in all: runs of pairs one after the other (Qwen2-VL)
    interleaved   the axes take turns instead: pair c goes to axis c mod n while that has pairs left, then to axis 0
                  (Qwen3-VL)
    scheme        of the frequencies
    Wang et al., arXiv:2409.12191.
    """

    sections: tuple[int, ...]
    interleaved: bool = False
    scheme: Scheme = field(default_factory=Unscaled)

    def frequencies(self, rotary_dim: int, base: float, seqlen: int) -> tuple[Tensor, float]:
        return self.scheme.frequencies(rotary_dim, base, seqlen)

    def axes(self) -> Tensor:
        """The axis of each pair, [rotary_dim / 2] int32."""
        n = len(self.sections)
        runs = [axis for axis, pairs in enumerate(self.sections) for _ in range(pairs)]
        turns = [c % n if c < n * self.sections[c % n] else 0 for c in range(len(runs))]
        return torch.tensor(turns if self.interleaved else runs, dtype=torch.int32, device="cpu")


@hinted
def rope_table(
    rotary_dim: int,
    max_seqlen: int,
    *,
    base: float = 10000.0,
    scheme: Scheme | None = None,
    device: torch.device | str | None = None,
) -> RopeTable:
    """cos and sin [max_seqlen, rotary_dim / 2] float32 for `rope`, by any scaling scheme.

        rotary_dim   channels that turn: the head dim, or a part of it
        max_seqlen   positions 0 to max_seqlen - 1; DynamicNTK and LongRoPE depend on it
        base         RoPE theta
        scheme       Linear, NTK, DynamicNTK, YaRN, Llama3, LongRoPE or MRoPE; their fields have the names of Hugging
                     Face's rope parameters. None: unscaled.
    Numerics: the formulas and the float32 arithmetic of Hugging Face transformers. Computed on the CPU, so the same
        bits on every device. Made in inference mode, it serves training too.
    Raises ValueError for an odd rotary_dim, a base or field of the scheme that is not above 0, or sections that do not
        add up to rotary_dim / 2.
    """
    checks.require(
        rotary_dim > 0 and rotary_dim % 2 == 0, "rope_table", "rotary_dim", "be even and above 0", rotary_dim
    )
    checks.require(max_seqlen > 0, "rope_table", "max_seqlen", "be above 0", max_seqlen)
    checks.require(0 < base < math.inf, "rope_table", "base", "be above 0 and finite", base)
    if torch.is_inference_mode_enabled():
        # a backward may save the table later
        with torch.inference_mode(False):
            return rope_table(rotary_dim, max_seqlen, base=base, scheme=scheme, device=device)
    scheme = Unscaled() if scheme is None else scheme
    if not callable(getattr(scheme, "frequencies", None)):
        must = "be Linear, NTK, DynamicNTK, YaRN, Llama3, LongRoPE, MRoPE or None"
        checks.fail("rope_table", "scheme", must, checks.described(scheme))
    # torch.get_default_device cannot be traced
    device = torch.empty(0).device if device is None else device
    axes = None
    check_scheme("rope_table", "scheme", scheme.scheme if isinstance(scheme, MRoPE) else scheme)
    if isinstance(scheme, MRoPE):
        axes = scheme.axes().to(device)
        checks.shape("rope_table", "scheme.sections, added up,", axes, (rotary_dim // 2,), "rotary_dim / 2")
    inv_freq, attention_factor = scheme.frequencies(rotary_dim, base, max_seqlen)
    angles = torch.arange(max_seqlen, device="cpu").float()[:, None] * inv_freq
    return RopeTable((angles.cos() * attention_factor).to(device), (angles.sin() * attention_factor).to(device), axes)
