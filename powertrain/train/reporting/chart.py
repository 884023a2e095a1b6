"""Line charts as inline SVG, with colours from the page's style sheet."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

MOST_POINTS = 400
# the page shows a unit as about a pixel, so that letters are of one size in all charts
WIDE, NARROW = 1090, 530
_HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 240, 52, 10, 10, 26


@dataclass(frozen=True)
class Point:
    """The mean of the values of neighbouring steps, and their range."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Series:
    """A curve. style: "a", "b" ..., a colour of the page; dots: mark each point (few of them)."""

    name: str
    points: tuple[Point, ...]
    style: str = "a"
    dots: bool = False


def series(
    name: str, values: Sequence[tuple[float, float]], *, style: str = "a", dots: bool = False, most: int = MOST_POINTS
) -> Series:
    """A curve of (x, y) pairs in order of x, of at most `most` points; values that are not finite are left out."""
    # one inf (the gradient norm of a skipped fp16 step) would flatten the whole curve
    finite = [(x, y) for x, y in values if math.isfinite(y)]
    # whole groups of steps, so that each point stands for as many
    size = math.ceil(len(finite) / most) or 1
    groups = [finite[i : i + size] for i in range(0, len(finite), size)]
    return Series(name, tuple(_mean(group) for group in groups), style, dots)


def _mean(group: Sequence[tuple[float, float]]) -> Point:
    ys = [y for _, y in group]
    # the range is kept: a mean alone would hide a single spike
    return Point(group[-1][0], sum(ys) / len(ys), min(ys), max(ys))


def line_chart(
    curves: Sequence[Series], *, width: int = NARROW, marks: Sequence[float] = (), log: bool = False, zero: bool = False
) -> Markup:
    """An SVG of the curves over steps; "" where no curve has a point.

    marks  steps with a vertical line: where the run was resumed
    log    a logarithmic axis, if all values are positive and the largest is over 50 times the smallest
    zero   the axis begins at 0
    """
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return Markup("")
    points = [point for curve in curves for point in curve.points]
    low, high = min(p.low for p in points), max(p.high for p in points)
    # a gradient norm of 0 has no logarithm; a narrow range is easier to read on a linear axis
    log = log and low > 0 and high > 50 * low
    if not log:
        low, high = _padded(0.0 if zero else low, high)
    x = _Axis(min(p.x for p in points), max(p.x for p in points), _LEFT, width - _RIGHT)
    # from the bottom to the top: in SVG y grows downwards
    y = _Axis(low, high, _HEIGHT - _BOTTOM, _TOP, log)
    parts = [*_grid(x, y), *(_mark(x, at) for at in marks if x.low <= at <= x.high)]
    for curve in curves:
        parts += _curve(curve, x, y)
    data = [{"name": c.name, "points": [[p.x, p.y] for p in c.points]} for c in curves]
    facts = json.dumps({"left": x.start, "right": x.end, "x": [x.low, x.high], "curves": data})
    return Markup(
        f'<svg class="chart" viewBox="0 0 {width} {_HEIGHT}" role="img" data-chart="{escape(facts)}">'
        f'{"".join(parts)}<line class="cursor" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/></svg>'
    )


def _padded(low: float, high: float) -> tuple[float, float]:
    # a constant curve has no height to take a share of, and a curve of zeros no value either
    margin = 0.04 * (high - low) or 0.04 * abs(high) or 1.0
    return (0.0 if 0 <= low <= margin else low - margin), high + margin


class _Axis:
    """From values to pixels."""

    def __init__(self, low: float, high: float, start: float, end: float, log: bool = False) -> None:
        # a single point: the axis needs a length to divide by
        if high <= low:
            high = low * 1.1 if log else low + 1
        self.low, self.high, self.start, self.end, self.log = low, high, start, end, log

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values within, about five; powers of ten (and 2, 5 between them) where it is logarithmic."""
        if not self.log:
            step = _round_step((self.high - self.low) / 5)
            # multiples and not sums: adding a step repeatedly would show 0.30000000000000004
            return [n * step for n in range(math.ceil(self.low / step), math.floor(self.high / step + 1e-9) + 1)]
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        digits = (1, 2, 5) if last - first <= 3 else (1,)
        values = [digit * 10.0**power for power in range(first, last + 1) for digit in digits]
        return [value for value in values if self.low <= value <= self.high]


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= step * 0.999)


def _grid(x: _Axis, y: _Axis) -> list[str]:
    bottom = _HEIGHT - _BOTTOM
    parts = [
        f'<line class="grid" x1="{_LEFT}" x2="{x.end}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
        f'<text class="tick" x="{_LEFT - 8}" y="{y(v) + 4:.1f}" text-anchor="end">{tick(v)}</text>'
        for v in y.ticks()
    ]
    parts += [
        f'<text class="tick" x="{x(v):.1f}" y="{bottom + 18}" text-anchor="middle">{tick(v)}</text>'
        for v in x.ticks()
        if v == int(v)
    ]
    return [*parts, f'<line class="axis" x1="{_LEFT}" x2="{x.end}" y1="{bottom}" y2="{bottom}"/>']


def _mark(x: _Axis, at: float) -> str:
    return f'<line class="mark" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'


def _curve(curve: Series, x: _Axis, y: _Axis) -> list[str]:
    points, parts = curve.points, []
    if any(p.low < p.high for p in points):
        above = [f"{x(p.x):.1f},{y(p.high):.1f}" for p in points]
        below = [f"{x(p.x):.1f},{y(p.low):.1f}" for p in reversed(points)]
        parts.append(f'<polygon class="band {curve.style}" points="{" ".join(above + below)}"/>')
    line = " ".join(f"{x(p.x):.1f},{y(p.y):.1f}" for p in points)
    parts.append(f'<polyline class="line {curve.style}" points="{line}"/>')
    if curve.dots or len(points) == 1:
        parts += [f'<circle class="dot {curve.style}" cx="{x(p.x):.1f}" cy="{y(p.y):.1f}" r="3.5"/>' for p in points]
    return parts


def tick(value: float) -> str:
    """A value on an axis: 0.003, 1.5, 20k, 3M."""
    # rounds away what multiplication of floats leaves behind
    value = float(f"{value:.4g}")
    if value and abs(value) < 1e-2:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    for size, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= size:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"
