"""torchrun starts a run again whose rank was killed, and the run goes on from its last checkpoint."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.distributed.launch import Started, clean_environment, start

CONFIG = """
model: {{architecture: llama, hidden_size: 32, num_layers: 1, num_heads: 2, intermediate_size: 32}}
data: {{train: {folder}/text.txt, tokenizer: bytes, num_workers: 0, split: "1,0,0"}}
train: {{steps: 60, seq_length: 16, micro_batch_size: 1, precision: fp32, spike_factor: 0}}
checkpoint: {{folder: {folder}/run, every: 5, keep_last: 2}}
logging: {{folder: {folder}/run, every: 1, tensorboard: false, report: false}}
parallel: {{timeout_minutes: 1}}
"""


def _rank(torchrun: int, rank: int) -> psutil.Process:
    for child in psutil.Process(torchrun).children(recursive=True):
        if child.environ().get("RANK") == str(rank):
            return child
    raise AssertionError(f"torchrun has no child of rank {rank}")


def _check(launcher: Started, killed: Callable[[], psutil.Process], folder: Path) -> None:
    """A rank is killed once there is a checkpoint."""
    try:
        deadline = time.monotonic() + 120
        while not (folder / "run/step_00000010/checkpoint.json").exists():
            assert launcher.poll() is None and time.monotonic() < deadline, (folder / "said").read_text()[-3000:]
            time.sleep(0.02)
        killed().kill()
        assert launcher.wait(timeout=120) == 0, (folder / "said").read_text()[-3000:]
    finally:
        launcher.kill()
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, 61))
    resumed = re.findall(r"goes on after step (\d+)", (folder / "said").read_text())
    assert len(resumed) == 1 and int(resumed[0]) >= 10


def _train(folder: Path) -> tuple[str, ...]:
    (folder / "text.txt").write_text("Every rank reads the same words, but not at the same time.\n" * 200)
    (folder / "run.yml").write_text(CONFIG.format(folder=folder))
    return "powertrain", "train", str(folder / "run.yml")


def test_a_killed_rank_restarts_the_run(tmp_path: Path) -> None:
    """By torchrun's agent with ranks that fork: a process of the trainer takes five seconds to start."""
    (tmp_path / "ids").mkdir()
    command = ("-m", "tests.distributed.elastic_ranks", "1", str(tmp_path / "ids"), *_train(tmp_path))
    launcher = start(command, clean_environment(), tmp_path / "said")
    _check(launcher, lambda: psutil.Process(int((tmp_path / "ids/0").read_text())), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_torchrun_restarts_the_run(ranks: int, tmp_path: Path) -> None:
    command = (
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "1",
        "--monitor-interval", "0.1", "-m", *_train(tmp_path),
    )  # fmt: skip
    launcher = start(command, clean_environment(), tmp_path / "said")
    _check(launcher, lambda: _rank(launcher.pid, ranks - 1), tmp_path)
