"""`powertrain preprocess` that is killed or interrupted leaves no process and no half data set."""

import json
import random
import signal
import time
from pathlib import Path

import pytest

from powertrain.train.data.indexed import IndexedData, exists, verify
from tests.faults.processes import end, left_of, said, start, wait_for


def corpus(folder: Path) -> Path:
    file = folder / "text.jsonl"
    line = json.dumps({"text": "some words of a document that is read, and cut into tokens " * 200})
    file.write_text("\n".join([line] * 3000))
    return file


def command(folder: Path) -> tuple[str, ...]:
    return (
        "powertrain", "preprocess", str(folder / "text.jsonl"), "--output", str(folder / "out/data"),
        "--tokenizer", "bytes", "--workers", "2", "--append-eod", "--overwrite",
    )  # fmt: skip


SIGNALS = ["SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"]


@pytest.mark.parametrize("count", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment(tmp_path: Path, count: int) -> None:
    """The parent alone or the whole group, from its start to its end."""
    corpus(tmp_path)
    chance = random.Random(5)
    for n in range(count):
        process = start(tmp_path, *command(tmp_path), fresh=True)
        if n % 3 != 2:  # once workers are there; else at any moment of the start
            wait_for(lambda p=process: len(left_of(p.pid)) >= 4 or p.poll() is not None, tmp_path)
        time.sleep(chance.random() * 0.5)
        number = getattr(signal, SIGNALS[n % len(SIGNALS)])
        end(process, number, group=n % 2 == 1)
        wait_for(lambda p=process: not left_of(p.pid), tmp_path)
        if exists(tmp_path / "out/data"):
            verify(tmp_path / "out/data")
            assert len(IndexedData(tmp_path / "out/data")) == 3000
        left = {p.name for p in (tmp_path / "out").iterdir()} if (tmp_path / "out").is_dir() else set()
        assert left <= {"data.bin", "data.idx", "data.sum"}
    # Python itself prints one where it is interrupted before it runs anything of ours
    assert not [text for text in said(tmp_path).split("Traceback")[1:] if ", in main\n" in text], said(tmp_path)[-3000:]
