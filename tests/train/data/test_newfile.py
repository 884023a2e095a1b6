"""Work that one process does while the others wait: waits are said, end, and no lock is no failure."""

import threading
from pathlib import Path

import filelock
import pytest

from powertrain.runtime import tracing
from powertrain.train.data import file_lock
from powertrain.train.data.file_lock import one_at_a_time


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_lock, "_QUIET", 0.01)
    monkeypatch.setattr(file_lock, "_PATIENCE", 30.0)
    tracing.clear()


def test_one_works_while_the_others_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inside, most, lock = 0, 0, threading.Lock()
    released = threading.Event()

    def work() -> None:
        nonlocal inside, most
        with one_at_a_time(tmp_path / "new" / "a.lock", "counting"):
            with lock:
                inside += 1
                most = max(most, inside)
            released.wait(0.1)
            with lock:
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert "waiting for another process that is counting, at most 30 s" in capsys.readouterr().err


def test_past_the_deadline_the_work_is_done_anyway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(file_lock, "_PATIENCE", 0.02)
    with filelock.FileLock(tmp_path / "a.lock"), one_at_a_time(tmp_path / "a.lock", "counting"):
        assert "another process has been counting for 0 s; doing it here too" in capsys.readouterr().err


def test_where_there_are_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def acquire(self: filelock.FileLock, timeout: float) -> None:
        raise OSError("flock is not supported")

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
    with one_at_a_time(tmp_path / "a.lock", "counting"):
        assert "no file locks here (flock is not supported)" in capsys.readouterr().err
