"""What `trace()` and the log say."""

from pathlib import Path

import pytest
import torch

import powertrain
from powertrain.runtime import dispatch, settings, tracing


def test_the_way_of_an_op_is_traced_once() -> None:
    tracing.clear()
    for _ in range(2):
        with powertrain.disable("rms_norm"):
            powertrain.rms_norm(torch.ones(2, 8))
    (event,) = [event for event in tracing.trace() if event.kind == "dispatch"]
    assert event.text in (
        "rms_norm: plain PyTorch, because its tensors are on cpu",
        "rms_norm: plain PyTorch, because it is disabled",
    )


def test_warnings_are_said_once_and_the_log_goes_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POWERTRAIN_LOG", "debug")
    monkeypatch.setenv("POWERTRAIN_LOG_FILE", str(tmp_path / "log"))
    settings.reload()
    tracing.clear()
    try:
        tracing.warn("the disk is full")
        tracing.warn("the disk is full")
        tracing.event("example", "_k for sm_80: compiled", arch=80)
    finally:
        monkeypatch.undo()
        settings.reload()
    text = (tmp_path / "log").read_text()
    assert text.count("the disk is full") == 1 and "_k for sm_80: compiled {'arch': 80}" in text
    assert capsys.readouterr().err == ""
    assert [event.kind for event in tracing.trace()] == ["warning", "example"]


def test_a_decision_is_noted_again_after_clear() -> None:
    x = torch.zeros(1, dtype=torch.float64)
    for _ in range(2):
        tracing.clear()
        dispatch.use_kernel("rms_norm", x)
        dispatch.use_kernel("rms_norm", x)
        assert [e.facts["op"] for e in tracing.trace() if e.kind == "dispatch"] == ["rms_norm"]
