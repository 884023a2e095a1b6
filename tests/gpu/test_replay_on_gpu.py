"""Replayed calls where only a GPU shows them: streams, graphs, threads, memory pools."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import powertrain
from powertrain.runtime import invalidation, replay

_CALLS = 7


@pytest.fixture(autouse=True)
def _fresh() -> None:
    invalidation.changed()


def _inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator("cuda").manual_seed(seed)
    shapes = (2, 300, 8, 128), (2, 300, 2, 128), (2, 300, 2, 128)
    q, k, v = (torch.randn(s, device="cuda", generator=draws).bfloat16() for s in shapes)
    return q, k, v


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = powertrain.attention(q, k, v, is_causal=True)
    return out


def _whole(function: Callable[..., Any], *args: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "signature_of", lambda values: None)
        return function(*args)


def test_streams_at_once() -> None:
    """Each stream has its own recordings: kernels keep a counter for each stream."""
    inputs = [_inputs(seed) for seed in range(3)]
    exact = [_whole(_attend, *x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[] for _ in inputs]
    for _ in range(30):
        for stream, x, kept in zip(streams, inputs, results, strict=True):
            with torch.cuda.stream(stream):
                kept.append(_attend(*x))
    torch.cuda.synchronize()
    for kept, wanted in zip(results, exact, strict=True):
        assert all(torch.equal(out, wanted) for out in kept)


def test_a_graph_captured_after_replays() -> None:
    x = _inputs(0)
    exact = _whole(_attend, *x)
    for _ in range(_CALLS):
        _attend(*x)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        _attend(*x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _attend(*x)
    eager = [_attend(*x) for _ in range(3)]
    captured.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, exact) and all(torch.equal(out, exact) for out in eager)


def test_threads() -> None:
    """New threads have no CUDA context of their own at first."""
    inputs = [_inputs(seed) for seed in range(4)]
    exact = [_whole(_attend, *x) for x in inputs]
    for _ in range(_CALLS):
        _attend(*inputs[0])
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(50):
            if not torch.equal(_attend(*inputs[index]), exact[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_results_lie_in_the_callers_memory_pool() -> None:
    x = _inputs(0)
    for _ in range(_CALLS):
        _attend(*x)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        out = _attend(*x)
    addresses = [(s["address"], s["address"] + s["total_size"]) for s in pool.snapshot()]
    assert any(first <= out.data_ptr() < last for first, last in addresses)


def test_gradients_accumulate_alike() -> None:
    x = [t.requires_grad_() for t in _inputs(0)]
    grad = torch.randn_like(x[0])

    def grads() -> list[Tensor]:
        return list(torch.autograd.grad(powertrain.attention(*x, is_causal=True, deterministic=True), x, grad))

    exact = _whole(grads)
    for _ in range(_CALLS):
        assert all(torch.equal(a, b) for a, b in zip(grads(), exact, strict=True))
