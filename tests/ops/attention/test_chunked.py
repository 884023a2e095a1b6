"""The chunked CPU path against the reference: every configuration, with chunks small enough to be several."""

import pytest
import torch

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
