"""powertrain.parallel over NVLink: results of every way, bits, graphs, and what is said of slow and lost ranks."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import ROOT, clean_environment, run_ranks
from tests.gpu.overlap_worker import TIMEOUT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs that reach each other's memory"),
]


def _run(what: str, out: Path, *, dies: bool = False) -> tuple[dict[int, Any], str]:
    size = min(torch.cuda.device_count(), 4)
    ended = run_ranks(size, "-m", "tests.gpu.overlap_worker", what, str(out), timeout=120)
    for rank, process in enumerate(ended):
        assert (process.returncode == 0) == (not dies or rank != size - 1), process.stdout
    found = {int(file.stem): json.loads(file.read_text()) for file in out.glob("*.json")}
    return found, "\n".join(process.stdout for process in ended)


def test_every_way_of_every_function(tmp_path: Path) -> None:
    found, _ = _run("functions", tmp_path)
    assert {f["transport"] for f in found.values()} == {"symmetric"}


@pytest.mark.parametrize("what", ["bitwise", "graphs"])
def test_no_bit_differs(what: str, tmp_path: Path) -> None:
    found, _ = _run(what, tmp_path)
    assert all(f["wrong"] == 0 for f in found.values())


def test_a_slow_rank_is_named_and_waited_for(tmp_path: Path) -> None:
    found, said = _run("slow", tmp_path)
    assert all(f["finite"] for f in found.values())
    assert "has waited 5 s for rank 1 (host" in said and "alive but not yet in this call" in said


def test_a_killed_rank_poisons_and_is_named(tmp_path: Path) -> None:
    found, _ = _run("killed", tmp_path, dies=True)
    last = min(torch.cuda.device_count(), 4) - 1
    assert sorted(found) == list(range(last))
    for f in found.values():
        assert f["poisoned"] and f["seconds"] < 30
        assert f"rank {last} (host" in f["said"] and "gone" in f["said"]
        assert " in mlp.up (call" in f["said"] or " in mlp.down (call" in f["said"]


def test_a_call_not_made_ends_at_the_groups_time_out(tmp_path: Path) -> None:
    found, _ = _run("skipped", tmp_path)
    for rank, f in found.items():
        if f["said"] != "slept":
            assert f["poisoned"] and f["seconds"] < TIMEOUT + 20
            assert "time-out" in f["said"] and f"rank {len(found) - 1} (host" in f["said"], rank


def test_torchrun_starts_all_ranks_again(tmp_path: Path) -> None:
    """One rank is killed between two calls; after the restart memory is shared anew and results are right."""
    size = min(torch.cuda.device_count(), 4)
    command = ["--standalone", f"--nproc-per-node={size}", "--max-restarts=1", "-m", "tests.gpu.overlap_worker"]
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command, "restarted", str(tmp_path)],
        env=clean_environment(), cwd=ROOT, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = [json.loads(file.read_text()) for file in tmp_path.glob("*.json")]
    assert len(found) == size
    for f in found:
        assert f["transport"] == "symmetric" and f["error"] < 1e-2
