"""Device time of steps and their parts, measured without synchronization."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Spans = list[tuple[str, "Moment", "Moment"]]


class Moment:
    """Completion of all work queued until now: an event on a GPU, the time on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._time = time.perf_counter()
        self._event: Any = None
        if device.type == "cuda":
            # an event is recorded in the stream's order, so the host need not wait for the work before it
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def is_over(self) -> bool:
        """Whether it has come, without waiting."""
        return self._event is None or bool(self._event.query())

    def since(self, earlier: "Moment") -> float:
        """Seconds from an earlier moment of the same device to this one, which was waited for."""
        if self._event is None:
            return self._time - earlier._time
        # elapsed_time is in milliseconds
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class PhaseTimers:
    """Times the parts of a step by name; nothing at all unless `wanted`."""

    def __init__(self, device: torch.device, *, wanted: bool) -> None:
        self.device, self.wanted = device, wanted
        self._spans: Spans = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Around a part of the step; parts of one name add up."""
        if not self.wanted:
            yield
            return
        # phases are off by default: two events a phase cost host time in small models
        start = Moment(self.device)
        yield
        self._spans.append((name, start, Moment(self.device)))

    def take(self) -> Spans:
        """Events since the last call, to be read with `seconds` when the device has passed them."""
        taken, self._spans = self._spans, []
        return taken


def seconds(spans: Spans) -> dict[str, float]:
    """Name -> seconds of the parts of that name together."""
    totals: dict[str, float] = {}
    for name, start, end in spans:
        totals[name] = totals.get(name, 0.0) + end.since(start)
    return totals
