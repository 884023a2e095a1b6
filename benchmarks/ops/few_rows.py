"""Ops bound by memory at the sizes of generating text, 1 to 512 rows, in CUDA graphs beside torch.compile.

A graph holds many calls, one after another, on the same tensors, which stay in the L2: so a time is that of a kernel
in the middle of others, its start included.
"""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.ops import random_sizes
from benchmarks.ops.random_sizes import COMPILERS, Draw, _activation, _dropout, _norm
from benchmarks.peers import set_up_torch_compile
from powertrain.testing.bench import measure, note

CALLS = 32  # of one graph
COUNT, SEED = 60, 0


def _few(source: random.Random, widest: int) -> tuple[int, int]:
    width = source.choice((1, 1, 1.5, 1.25, 1.75)) * 2 ** source.randint(9, widest.bit_length() - 1)
    return source.choice((1, 2, 4, 8, 16, 32, 64, 128, 256, 512)), min(int(width), widest)


KINDS = (_norm, _norm, _activation, _dropout)


def _draws(count: int, seed: int) -> list[Draw]:
    source = random.Random(seed)
    return [KINDS[i % len(KINDS)](source, _few) for i in range(count)]


def _compiled(draw: Draw) -> Callable[[], Any]:
    _, leaves = draw.build("cuda")
    assert draw.plain is not None
    compiled = torch.compile(draw.plain, dynamic=False)
    return lambda: compiled(*leaves)


def _compile_plain(count: int, seed: int, i: int) -> None:
    """torch.compile's kernels of a size into its cache on disk, in a process of its own."""
    set_up_torch_compile()
    with torch.no_grad():
        _compiled(_draws(count, seed)[i])()


def _graph(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph


def launch() -> None:
    for draw in _draws(COUNT, SEED):
        random_sizes.launch(draw)


def run(count: int = COUNT, seed: int = SEED) -> Iterator[str]:
    """A line for each of `count` sizes, those that are slower than torch.compile first."""
    set_up_torch_compile()
    with ProcessPoolExecutor(COMPILERS, mp_context=get_context("spawn")) as pool:
        list(pool.map(partial(_compile_plain, count, seed), range(count)))
    found = []
    with torch.no_grad():
        for draw in _draws(count, seed):
            label = f"{draw.op} {draw.size}, in a graph"
            graphs = {"ours": _graph(draw.build("cuda")[0]), "torch.compile": _graph(_compiled(draw))}
            timings = measure({name: graph.replay for name, graph in graphs.items()}, seconds=0.05)
            timings = {name: replace(timing, ms=timing.ms / CALLS) for name, timing in timings.items()}
            for name, timing in timings.items():
                note(label, name, timing)
            ours, other = (timing.ms * 1e3 for timing in timings.values())
            found.append((other / ours, f"{label}: {ours:.2f} us, torch.compile {other:.2f}"))
            torch._dynamo.reset()
    yield "\n".join(f"{ratio:.2f} {line}" for ratio, line in sorted(found))
