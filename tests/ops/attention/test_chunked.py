"""The chunked CPU path against the reference: every configuration, with chunks small enough to be several."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from powertrain.ops.attention import attention
from powertrain.ops.attention.backends import chunked
from powertrain.runtime.settings import settings
from tests.ops.attention.problems import CONFIGS, Config, errors

pytestmark = pytest.mark.skipif(settings().interpret, reason="no kernel of ours in it")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_values_and_gradients(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 4096)
    number = CONFIGS.index(config)
    dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
    bad = [e for e in errors(config, number, torch.device("cpu"), dtype, 40, backend="chunked") if not e.ok]
    assert not bad


def test_float64_and_memory() -> None:
    """Peak memory does not grow with the square of the length: the largest intermediate is one chunk's scores."""
    q = torch.randn(1, 700, 2, 8, dtype=torch.float64, requires_grad=True)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    before = chunked.CHUNK_BYTES
    chunked.CHUNK_BYTES = 64 << 10
    try:
        with Watch():
            attention(q, q, q, is_causal=True, backend="chunked").sum().backward()
    finally:
        chunked.CHUNK_BYTES = before
    assert largest <= 64 << 10


def test_the_lse_of_frozen_keys_asks_nothing_of_value() -> None:
    q, k, v = torch.randn(2, 5, 1, 8), torch.randn(2, 7, 1, 8), torch.randn(2, 7, 1, 8, requires_grad=True)
    out, lse = attention(q, k, v, return_lse=True, backend="chunked")
    (dv,) = torch.autograd.grad([out, lse], v, [torch.ones_like(out), torch.ones_like(lse)])
    (expected,) = torch.autograd.grad(attention(q, k, v, backend="reference").sum(), v)
    torch.testing.assert_close(dv, expected)
    (dv,) = torch.autograd.grad(attention(q, k, v, return_lse=True, backend="chunked")[1].sum(), v)
    assert not dv.any()


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_an_empty_batch_with_lengths(layout: Any, backend: str) -> None:
    shape = (0, 5, 2, 8) if layout == "bshd" else (5, 0, 2, 8)
    q, used = torch.randn(shape, requires_grad=True), torch.zeros(0, dtype=torch.int32)
    out = attention(q, q, q, layout=layout, seqused_q=used, seqused_k=used, is_causal=True, backend=backend)
    out.sum().backward()
    assert out.shape == shape and q.grad is not None and q.grad.shape == shape


def test_a_backward_inside_autocast_rounds_nothing() -> None:
    q, k, v = (torch.randn(1, 6, 2, 8, requires_grad=True) for _ in range(3))
    out = attention(q, k, v, backend="chunked")
    exact = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        ours = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(ours, exact, strict=True))


def test_saved_tensors_are_read_once_where_a_graph_is_made() -> None:
    """torch.utils.checkpoint raises at the second reading."""
    q = torch.randn(1, 6, 2, 8, requires_grad=True)
    out = checkpoint(lambda q: attention(q, q, q, backend="chunked"), q, use_reentrant=False)
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    (exact,) = torch.autograd.grad(attention(q, q, q, backend="chunked").sum(), q)
    torch.testing.assert_close(grad, exact)


class _Stopped(torch.autograd.Function):
    """The same, behind which no gradient comes back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        return None


def test_a_node_behind_may_give_no_gradient() -> None:
    q = torch.randn(1, 6, 2, 8, requires_grad=True)
    other = torch.ones((), requires_grad=True)
    (_Stopped.apply(attention(q, q, q, backend="chunked")).sum() * other).backward()
    assert q.grad is None and other.grad is not None


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"sinks": torch.zeros(2)}], ids=["", "causal", "sinks"])
def test_a_query_of_nan_has_a_result_of_nan(options: dict[str, Any], backend: str) -> None:
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    q[0, 3, 0, 2] = float("nan")
    out, lse = attention(q, k, v, backend=backend, return_lse=True, **options)
    where = torch.zeros(1, 5, 2, dtype=torch.bool)
    where[0, 3, 0] = True
    assert torch.equal(out.isnan().all(-1), where) and torch.equal(out.isnan().any(-1), where)
    assert torch.equal(lse.isnan(), where.mT)
