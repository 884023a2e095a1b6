"""Ops bound by memory at the sizes of generating text, 1 to 512 rows, and their backward at the sizes of training with
little memory, 16 to 8192 rows, in CUDA graphs beside torch.compile.

A graph holds many calls, one after another, on the same tensors, which stay in the L2 if they fit: so a time is that of
a kernel in the middle of others, its start included.
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
COUNT, SEED = 60, 0  # of forwards, and as many backwards


def _few(source: random.Random, widest: int) -> tuple[int, int]:
    width = source.choice((1, 1, 1.5, 1.25, 1.75)) * 2 ** source.randint(9, widest.bit_length() - 1)
    return source.choice((1, 2, 4, 8, 16, 32, 64, 128, 256, 512)), min(int(width), widest)


def _some(source: random.Random, widest: int) -> tuple[int, int]:
    """At most 2^24 elements; the width a multiple of 8, or, in one of four cases, any number."""
    width = source.choice((1, 8, 8, 8)) * int(2 ** source.uniform(4, widest.bit_length() - 4))
    return min(round(2 ** source.uniform(4, 13)), (1 << 24) // width), width


KINDS = (_norm, _norm, _activation, _dropout)


def _draws(count: int, seed: int, backward: bool) -> list[Draw]:
    source = random.Random(seed)
    return [KINDS[i % len(KINDS)](source, _some if backward else _few) for i in range(count)]


def _way(draw: Draw, backward: bool, *, compiled: bool) -> Callable[[], Any]:
    """The forward, or the backward alone."""
    ours, leaves = draw.build("cuda")
    assert draw.plain is not None
    plain = torch.compile(draw.plain, dynamic=False)
    call = (lambda: plain(*leaves)) if compiled else ours
    if not backward:
        return torch.no_grad()(call)
    outs = random_sizes.results(call())
    grads = [torch.randn_like(out) for out in outs]
    return lambda: torch.autograd.grad(outs, leaves, grads, retain_graph=True)


def _compile_plain(count: int, seed: int, backward: bool, i: int) -> None:
    """torch.compile's kernels of a size into its cache on disk, in a process of its own."""
    set_up_torch_compile()
    _way(_draws(count, seed, backward)[i], backward, compiled=True)()


def _graph(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(CALLS):
            call()
    return graph


def launch() -> None:
    for backward in (False, True):
        for draw in _draws(COUNT, SEED, backward):
            random_sizes.launch(draw)


def _timed(draw: Draw, backward: bool) -> tuple[float, str]:
    label = f"{draw.op} {draw.size}{', backward' * backward}, in a graph"
    # a backward runs on the stream of its forward, and the default one takes no captures
    with torch.cuda.stream(torch.cuda.Stream()):
        graphs = {name: _graph(_way(draw, backward, compiled=name != "ours")) for name in ("ours", "torch.compile")}
    timings = measure({name: graph.replay for name, graph in graphs.items()}, seconds=0.05)
    timings = {name: replace(timing, ms=timing.ms / CALLS) for name, timing in timings.items()}
    for name, timing in timings.items():
        note(label, name, timing)
    ours, other = (timing.ms * 1e3 for timing in timings.values())
    torch._dynamo.reset()
    return other / ours, f"{label}: {ours:.2f} us, torch.compile {other:.2f}"


def run(count: int = COUNT, seed: int = SEED) -> Iterator[str]:
    """A line for each of `count` sizes of each way, those that are slower than torch.compile first."""
    set_up_torch_compile()
    with ProcessPoolExecutor(COMPILERS, mp_context=get_context("spawn")) as pool:
        for backward in (False, True):
            list(pool.map(partial(_compile_plain, count, seed, backward), range(count)))
    for backward in (False, True):
        found = [_timed(draw, backward) for draw in _draws(count, seed, backward)]
        yield "\n".join(f"{ratio:.2f} {line}" for ratio, line in sorted(found))
