"""torchrun starts a run again whose rank was killed, and the run goes on from its last checkpoint."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.distributed.launch import ROOT, clean_environment

CONFIG = """
model: {{architecture: llama, hidden_size: 32, num_layers: 1, num_heads: 2, intermediate_size: 32}}
data: {{train: {folder}/text.txt, tokenizer: bytes, num_workers: 0, split: "1,0,0"}}
train: {{steps: 60, seq_length: 16, micro_batch_size: 1, precision: fp32, spike_factor: 0}}
checkpoint: {{folder: {folder}/run, every: 5, keep_last: 2}}
logging: {{folder: {folder}/run, every: 1, tensorboard: false, report: false}}
parallel: {{timeout_minutes: 1}}
"""


def _rank(torchrun: subprocess.Popen[str], rank: int) -> psutil.Process:
    for child in psutil.Process(torchrun.pid).children(recursive=True):
        if child.environ().get("RANK") == str(rank):
            return child
    raise AssertionError(f"torchrun has no child of rank {rank}")


# a process of the trainer takes five seconds to start, and each rank starts twice
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_rank_restarts_the_run(ranks: int, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Every rank reads the same words, but not at the same time.\n" * 200)
    (tmp_path / "run.yml").write_text(CONFIG.format(folder=tmp_path))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
        "--max-restarts", "1", "--monitor-interval", "0.1", "-m", "powertrain", "train", str(tmp_path / "run.yml"),
    ]  # fmt: skip
    with open(tmp_path / "said", "w") as said:
        torchrun = subprocess.Popen(command, env=clean_environment(), cwd=ROOT, text=True, stdout=said, stderr=said)
        try:
            deadline = time.monotonic() + 120
            while not (tmp_path / "run/step_00000010/checkpoint.json").exists():
                assert torchrun.poll() is None and time.monotonic() < deadline, (tmp_path / "said").read_text()[-3000:]
                time.sleep(0.02)
            _rank(torchrun, ranks - 1).kill()
            assert torchrun.wait(timeout=120) == 0, (tmp_path / "said").read_text()[-3000:]
        finally:
            torchrun.kill()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, 61))
    resumed = re.findall(r"goes on after step (\d+)", (tmp_path / "said").read_text())
    assert len(resumed) == 1 and int(resumed[0]) >= 10
