"""Traces of torch.profiler and snapshots of the allocator's memory, of the steps that train.profile names."""

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from powertrain.runtime.atomic_file import write_whole
from powertrain.runtime.reading import one_line
from powertrain.train.config.schema import ProfileConfig

_MOST_EVENTS = 100_000  # of the allocator, kept in memory


class StepTrace:
    """Traces steps [start, start + steps) into files of this rank; a run that ends earlier keeps what there is.

    A trace that cannot be written is reported through `note`, and the training goes on.
    """

    def __init__(
        self, config: ProfileConfig, folder: Path, device: torch.device, rank: int, note: Callable[[str], None]
    ) -> None:
        self.config, self.folder, self.device, self.rank, self.note = config, folder, device, rank, note
        self._profiler: Any = None
        self._first = self._last = 0

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around step `number` of the run."""
        begin, end = self.config.start, self.config.start + self.config.steps
        # not `number == begin`: a resumed run may start within the range, and then traces the rest of it
        if self._profiler is None and begin <= number < end:
            self._start(number)
        yield
        if self._profiler is None:
            return
        self._last = number
        # marks the step in the trace, so that a viewer can tell the steps apart
        self._profiler.step()
        if number >= end - 1:
            self.close()

    def _start(self, number: int) -> None:
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            if self.config.memory:
                # before the first traced step: blocks that were allocated earlier appear without the place that
                # allocated them
                torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)
        self._first = self._last = number
        self._profiler = profile(activities=activities, record_shapes=True, profile_memory=self.config.memory)
        self._profiler.start()

    def close(self) -> None:
        """End a trace under way and write it."""
        # first, so that a second call, at the end of a run that fails here, does nothing
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        profiler.stop()
        name = f"steps_{self._first}-{self._last}_rank_{self.rank}"
        trace = self.folder / f"{name}.json.gz"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(trace))
            if self.device.type == "cuda" and self.config.memory:
                self._write_memory(self.folder / f"{name}_memory.pickle")
        except (OSError, RuntimeError) as error:
            self.note(f"train.profile: no trace: {one_line(error)}")
        else:
            self.note(f"trace of steps {self._first} to {self._last} in {trace}")

    def _write_memory(self, path: Path) -> None:
        # the functions have underscores in PyTorch and are the documented way to a snapshot all the same
        snapshot = torch.cuda.memory._snapshot(self.device)
        torch.cuda.memory._record_memory_history(enabled=None)
        write_whole(path, pickle.dumps(snapshot))
