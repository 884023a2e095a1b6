"""Timing on a GPU: variants interleaved, L2 flushed, median and spread, peak memory, share of the copy bandwidth."""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch

# cycles, about 2 ms: more than a forward and backward takes to launch
_HEAD_START = 4_000_000
Variants = Mapping[str, Callable[[], Any]]


@dataclass(frozen=True)
class Timing:
    ms: float  # median
    spread: float  # (90th - 10th percentile) / median
    peak_mib: float  # allocated beyond the memory before the call


_recording: list[dict[str, Any]] | None = None


@contextmanager
def recorded() -> Iterator[list[dict[str, Any]]]:
    """Every row of the tables made inside: label, variant, ms, spread, peak_mib."""
    global _recording
    before, _recording = _recording, []
    try:
        yield _recording
    finally:
        _recording = before


def note(label: str, variant: str, timing: Timing) -> None:
    """Add a row to `recorded`, for a figure that is in no table."""
    if _recording is not None:
        _recording.append({"label": label, "variant": variant, **asdict(timing)})


@cache
def _flush_buffer() -> torch.Tensor:
    return torch.empty(256 << 20, dtype=torch.int8, device="cuda")


def timed_once(function: Callable[[], Any], head_start: int = _HEAD_START) -> float:
    """Milliseconds of one call on the GPU, which waits `head_start` cycles while Python launches."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    _flush_buffer().zero_()
    # host time is not measured
    torch.cuda._sleep(head_start)
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _peak_mib(function: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = function()
    torch.cuda.synchronize()
    del kept
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(
    variants: Variants, *, seconds: float = 0.25, rounds: int = 200, head_start: int = _HEAD_START
) -> dict[str, Timing]:
    """Time each variant, in turns, for about `seconds` of the clock each; 10 rounds at least, `rounds` at most.

    head_start   cycles that the GPU waits in each call: more than Python takes to launch, or the host is timed
    Each round has an order of its own: one plan timed under two names differed by 2 to 3 % by what ran before it."""
    peaks = {}
    for name, function in variants.items():
        for _ in range(3):
            function()
        peaks[name] = _peak_mib(function)
    start = time.perf_counter()
    for function in variants.values():
        timed_once(function, head_start)
    # not the GPU's time alone: a call of 0.1 ms waits 2 ms for its launch
    one_round = time.perf_counter() - start
    samples: dict[str, list[float]] = {name: [] for name in variants}
    names, orders = list(variants), random.Random(0)
    for _ in range(max(10, min(rounds, int(seconds * len(variants) / one_round)))):
        orders.shuffle(names)
        for name in names:
            samples[name].append(timed_once(variants[name], head_start))
    return {name: _timing(times, peaks[name]) for name, times in samples.items()}


def _timing(times: list[float], peak: float) -> Timing:
    tenths = statistics.quantiles(times, n=10)
    median = statistics.median(times)
    return Timing(median, (tenths[-1] - tenths[0]) / median, peak)


@cache
def copy_bandwidth() -> float:
    """Bytes per second, read plus written, of a 2 GiB device copy here."""
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    return 4 * source.numel() / (measure({"copy": lambda: target.copy_(source)})["copy"].ms / 1e3)


def host_us(function: Callable[[], Any], calls: int = 300) -> float:
    """Microseconds the host spends in one call: the median over batches short enough not to fill the launch queue."""
    batches = []
    for _ in range(calls // 20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            function()
        batches.append((time.perf_counter() - start) / 20 * 1e6)
    return statistics.median(batches)


def measure_host(variants: Variants, *, calls: int = 20, rounds: int = 25) -> dict[str, Timing]:
    """Time that the host spends in one call of each variant, in a new order each round: other work on the machine makes
    a host half as fast for a while. Batches are short enough not to fill the launch queue."""
    for function in variants.values():
        # from the third call on a call of ours is replayed
        for _ in range(5):
            function()
    samples: dict[str, list[float]] = {name: [] for name in variants}
    names, orders = list(variants), random.Random(0)
    for _ in range(rounds):
        orders.shuffle(names)
        for name in names:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                variants[name]()
            samples[name].append((time.perf_counter() - start) / calls * 1e3)
    return {name: _timing(times, 0.0) for name, times in samples.items()}


def table(
    label: str, timings: Mapping[str, Timing], *, num_bytes: float | None = None, flops: float | None = None
) -> str:
    """One line per variant: time, rate, share of the copy bandwidth, ratio to the best other, peak memory."""
    lines = []
    for name, timing in timings.items():
        note(label, name, timing)
        others = [t.ms for n, t in timings.items() if n != name]
        parts = [f"{label:34}", f"{name:14}", f"{timing.ms:8.4f} ms ±{timing.spread:4.0%}"]
        if num_bytes is not None:
            rate = num_bytes / timing.ms * 1e3
            parts.append(f"{rate / 1e12:5.2f} TB/s {rate / copy_bandwidth():4.0%} of copy")
        if flops is not None:
            parts.append(f"{flops / timing.ms / 1e9:6.0f} TFLOP/s")
        parts.append(f"{min(others) / timing.ms:5.2f}x best other" if others else "")
        parts.append(f"{timing.peak_mib:8.0f} MiB")
        lines.append(" | ".join(parts))
    return "\n".join(lines)
