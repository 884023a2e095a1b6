"""Kernels of benchmarks, compiled in parallel before anything is timed: one after another they take longer to compile
than to time."""

import time
import traceback
from collections.abc import Callable, Iterable

import torch

from powertrain.runtime.compile import prebuild
from powertrain.runtime.recording import record
from powertrain.runtime.target import Target


def build(launches: Iterable[Callable[[], None]], target: Target | None = None) -> str:
    """Compile what these functions launch on meta tensors, for `target` (None: the current GPU); how much that was."""
    start = time.perf_counter()
    with record(target or Target.of(torch.device("cuda"))) as wanted:
        for launch in launches:
            try:
                launch()
            except Exception:
                # what it has not launched yet compiles when it is timed
                traceback.print_exc()
    report = prebuild.build(wanted.specs)
    seconds, compiled = time.perf_counter() - start, report.sources.get("compiled", 0)
    lines = [f"{len(wanted)} kernels, {compiled} of them compiled now, in {seconds:.0f} s"]
    return "\n".join(lines + [f"{name}: {error}" for name, error in report.failures.items()])
