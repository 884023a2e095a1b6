"""A run whose screen goes away: `| tee` that Ctrl-C ends first, a terminal that hangs up, a full disk below a log."""

import errno
import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from powertrain.runtime import tracing
from powertrain.train import train
from powertrain.train.reporting.screen import screen
from tests.train.tiny_run import write_config


def test_a_run_outlives_the_reader_of_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracing.clear()
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        result = train(write_config(tmp_path), ["train.steps=3", "logging.every=1", "evaluation.at_end=false"])
    assert result.finished and result.checkpoint == tmp_path / "run/checkpoints/step_00000003"
    assert [event.text for event in tracing.trace() if "screen" in event.text] == [
        "the screen cannot be written: Broken pipe; the run continues, and its files are written"
    ]


class _Failing(io.StringIO):
    """Fails like a terminal or a disk until `broken` is None."""

    broken: int | None = None

    def write(self, text: str) -> int:
        if self.broken is not None:
            raise OSError(self.broken, os.strerror(self.broken))
        return super().write(text)


def test_what_is_printed_while_the_disk_is_full_is_lost_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tracing.clear()
    file = _Failing()
    monkeypatch.setattr(sys, "stdout", file)
    console = screen()
    for file.broken, text in ((None, "before"), (errno.ENOSPC, "lost"), (None, "after")):
        console.print(text)
    assert file.getvalue() == "before\nafter\n"
    assert capfd.readouterr().err.count("No space left on device; the run continues") == 1


def test_a_warning_without_a_reader_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    file = _Failing()
    file.broken = errno.EPIPE
    for stderr in (file, None):
        tracing.clear()
        monkeypatch.setattr(sys, "stderr", stderr)
        tracing.warn("nobody reads this")
        assert [event.text for event in tracing.trace()] == ["nobody reads this"]


def test_characters_that_the_locale_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    data = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(data, encoding="ascii", write_through=True))
    screen().print("runs/文")
    assert data.getvalue() == b"runs/\\u6587\n"


def test_a_log_file_that_cannot_be_written_gives_its_lines_to_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tracing.clear()
    log = tmp_path / "folder" / "log"
    monkeypatch.setattr(tracing, "settings", lambda: SimpleNamespace(log_file=str(log)))
    tracing.warn("first")
    log.parent.mkdir()
    tracing.warn("second é")
    assert capfd.readouterr().err == "powertrain: warning: first\n"
    assert log.read_text(encoding="utf-8") == "powertrain: warning: second é\n"


def test_a_process_without_stdout_has_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    screen().print("nowhere")
