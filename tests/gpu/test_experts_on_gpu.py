"""Experts over several GPUs: overlapped as in sequence, the same bits whoever is late, and as a graph."""

import json
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def test_every_transport_gives_the_same_bits_whoever_is_late(tmp_path: Path) -> None:
    size = min(torch.cuda.device_count(), 4)
    for process in run_ranks(size, "-m", "tests.gpu.experts_worker", str(tmp_path), timeout=180):
        assert process.returncode == 0, process.stdout
    found = [json.loads(file.read_text()) for file in tmp_path.glob("*.json")]
    assert len(found) == size and all(f["wrong"] == 0 and "pipelined" in f["transports"] for f in found)
