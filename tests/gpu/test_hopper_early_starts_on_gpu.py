"""Kernels of the Hopper attention that start before the one before has ended: the bits of those that do not."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from powertrain.ops.attention import attention, combine, varlen_attention
from powertrain.ops.attention.hopper import backward, backward_d512, forward, forward_d512
from powertrain.runtime import driver, invalidation
from tests.gpu.arch import ON_SM90
from tests.ops.attention.attention_launches import any_order

pytestmark = ON_SM90
CUDA = torch.device("cuda")


class Case(NamedTuple):
    batch: int
    queries: int
    heads: tuple[int, int]
    head_dim: int
    keys: int | None = None
    is_packed: bool = False


CASES = {
    "heads-split": Case(1, 128, (32, 8), 128),
    "tiles-of-two-sizes": Case(2, 333, (4, 4), 64),
    "more-tiles-than-sms": Case(16, 300, (16, 16), 64),
    "two-pieces": Case(2, 200, (6, 2), 80),
    "packed": Case(3, 150, (8, 2), 128, is_packed=True),
    "keys-cut": Case(2, 4, (32, 2), 128, keys=1000),  # partial results, combined
    "d192": Case(2, 300, (4, 4), 192),
    "d256": Case(2, 300, (8, 2), 256),
    "d512": Case(2, 200, (4, 2), 512),
}


@pytest.fixture(autouse=True)
def _nothing_is_filled() -> Iterator[None]:
    """The other tests' memory is filled with NaN, by kernels of PyTorch's between ours."""
    with any_order():
        yield


@contextmanager
def _one_after_the_other() -> Iterator[None]:
    with ExitStack() as stack:
        for module in (backward, backward_d512, combine, forward, forward_d512):
            stack.enter_context(mock.patch.object(module, "starts_early", lambda target: False))
        # no recording of a call goes the other way
        invalidation.changed()
        yield
    invalidation.changed()


def _inputs(case: Case) -> list[Tensor]:
    """q, dout, and k and v twice."""
    torch.manual_seed(0)
    keys = case.keys or case.queries
    rows = [case.queries] * 2 + [keys] * 4
    heads = [case.heads[0]] * 2 + [case.heads[1]] * 4
    found = [
        torch.randn(case.batch, s, h, case.head_dim, device=CUDA, dtype=torch.bfloat16)
        for s, h in zip(rows, heads, strict=True)
    ]
    return [x.flatten(0, 1) for x in found] if case.is_packed else found


def _chain(case: Case, inputs: list[Tensor], steps: int, in_turn: bool = True) -> list[Tensor]:
    """Results of the last step. Each step reads the results of the step before, with no PyTorch kernel between the two,
    and the allocator reuses the memory of the step before that."""
    q, dout, *others = inputs
    options: dict[str, Any] = {"is_causal": True, "backend": "hopper", "deterministic": in_turn}
    for step in range(steps):
        leaves = [x.detach().requires_grad_() for x in (q, *others[step % 2 * 2 :][:2])]
        if case.is_packed:
            starts = _starts(case)
            out = varlen_attention(*leaves, starts, **options)
        else:
            out = attention(*leaves, **options)
        grads = torch.autograd.grad(out, leaves, dout)
        q, dout = grads[0], out.detach()
    return [out.detach(), *grads]


_known: dict[Case, Tensor] = {}


def _starts(case: Case) -> Tensor:
    if case not in _known:
        sizes = torch.tensor([0, *([case.queries] * case.batch)], dtype=torch.int32)
        sizes[1] += 37
        sizes[-1] -= 37
        _known[case] = sizes.cumsum(0, dtype=torch.int32).to(CUDA)
    return _known[case]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_same_bits(case: Case) -> None:
    inputs = _inputs(case)
    with _one_after_the_other():
        expected = {steps: _chain(case, inputs, steps) for steps in (1, 20)}
    for _ in range(10):
        for steps, right in expected.items():
            found = _chain(case, inputs, steps)
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, right, strict=True))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_sums_in_any_order(case: Case) -> None:
    """Their last bits differ from call to call, by as much as those of kernels that wait."""
    inputs = _inputs(case)
    with _one_after_the_other():
        expected = _chain(case, inputs, 1, False)
    for _ in range(50):
        found = _chain(case, inputs, 1, False)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-7 * theirs.abs().max().item())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_in_a_graph(case: Case) -> None:
    inputs = _inputs(case)
    expected = _chain(case, inputs, 3)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _chain(case, inputs, 3)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = _chain(case, inputs, 3)
    for _ in range(5):
        for x in found:
            x.zero_()
        graph.replay()
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_they_are_launched_early() -> None:
    """Three kernels of a backward, or more: none is launched as others are."""
    case = CASES["heads-split"]
    inputs = _inputs(case)
    _chain(case, inputs, 2)
    launches: list[bool] = []
    real = driver.LaunchConfig

    def seen(*given: Any) -> driver.LaunchConfig:
        launches.append(given[-1])
        return real(*given)

    driver._config_of.cache_clear()
    invalidation.changed()
    with mock.patch.object(driver, "LaunchConfig", seen):
        _chain(case, inputs, 1)
    assert len(launches) >= 4 and all(launches)
