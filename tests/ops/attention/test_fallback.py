"""A kernel that cannot be compiled sends the call to another backend, where the user has asked for that."""

from collections.abc import Iterator

import pytest
import torch

from powertrain.ops.attention import attention, attention_backend, varlen_attention
from powertrain.ops.attention.triton import backend as triton_backend
from powertrain.runtime import dispatch, settings, tracing
from powertrain.runtime.errors import CompileTimeout

pytestmark = pytest.mark.kernels


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    def refuse(*args: object) -> None:
        raise CompileTimeout("_attention_fwd_kernel for sm_80 did not compile")

    monkeypatch.setattr(triton_backend, "run", refuse)
    monkeypatch.setattr(dispatch, "disabled_ops", ())
    monkeypatch.setattr(dispatch, "_holds", [])
    yield monkeypatch
    monkeypatch.undo()
    settings.reload()


@pytest.mark.parametrize("packed", [False, True], ids=["attention", "varlen_attention"])
def test_once_for_the_process(packed: bool, broken: pytest.MonkeyPatch, device: torch.device) -> None:
    q = torch.randn(9, 2, 16, device=device, requires_grad=True)
    starts = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)

    def call() -> torch.Tensor:
        with attention_backend("triton"):
            out = varlen_attention(q, q, q, starts) if packed else attention(q[None], q[None], q[None])
        return out

    with pytest.raises(CompileTimeout):
        call()
    broken.setenv("POWERTRAIN_ON_COMPILE_FAILURE", "reference")
    settings.reload()
    before = len(tracing.trace())
    for _ in range(2):
        out = call()
        out.sum().backward()
    assert out.grad_fn is not None and "powertrain" not in out.grad_fn.name()
    said = [event.text for event in tracing.trace()[before:] if "is computed by plain PyTorch" in event.text]
    assert len(said) == 1 and ("varlen_attention" in said[0]) == packed


def test_a_backend_that_was_asked_for_by_name_is_not_replaced(broken: pytest.MonkeyPatch, device: torch.device) -> None:
    q = torch.randn(1, 4, 2, 16, device=device)
    broken.setenv("POWERTRAIN_ON_COMPILE_FAILURE", "reference")
    settings.reload()
    with pytest.raises(RuntimeError, match="switched off by powertrain"):
        attention(q, q, q, backend="triton")
