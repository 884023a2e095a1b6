"""A kernel's test on its device: in which state it runs, and how often."""

import pytest
import torch

from powertrain.runtime import self_test
from powertrain.runtime.errors import LaunchError
from powertrain.runtime.settings import settings

pytestmark = pytest.mark.skipif(settings().interpret, reason="another reason comes first")
CPU = torch.device("cpu", 0)


@pytest.fixture(autouse=True)
def _no_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def test_autocast_and_gradients_of_the_caller_are_not_the_tests() -> None:
    def multiplies(device: torch.device) -> str | None:
        assert not torch.is_grad_enabled()
        a = torch.full((1, 1), 257.0, device=device)
        wrong = (a @ torch.ones(1, 1, device=device)).item() != 257.0  # bfloat16 has no 257
        return "wrong" if wrong else None

    found: dict[int | None, str | None] = {}
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
        assert self_test.failure(found, CPU, multiplies, "a: b serves") is None
    assert found == {0: None}


def test_it_runs_once_and_a_kernel_that_cannot_be_launched_has_failed(capfd: pytest.CaptureFixture[str]) -> None:
    ran = []

    def fails(device: torch.device) -> str | None:
        ran.append(device)
        raise LaunchError("no such kernel")

    found: dict[int | None, str | None] = {}
    for _ in range(2):
        assert "no such kernel" in str(self_test.failure(found, CPU, fails, "a: b serves"))
    assert ran == [CPU]
    assert capfd.readouterr().err.count("a: b serves cpu:0 although the Hopper kernel is for it") == 1
