"""A rank of a training that is killed: each survivor says which, in a few lines, and ends."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.launch import ROOT, clean_environment, free_port, run_ranks
from tests.distributed.test_restart import CONFIG


@pytest.mark.parametrize(
    "size, dies, moment", [(2, 1, 0.3), *(pytest.param(3, n, 0.1 * n, marks=pytest.mark.slow) for n in (0, 1, 2))]
)
def test_survivors_name_it(size: int, dies: int, moment: float, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Every rank reads the same words, but not at the same time.\n" * 200)
    config = CONFIG.format(folder=tmp_path).replace("steps: 60", "steps: 100000").replace("every: 5,", "every: 1000,")
    (tmp_path / "run.yml").write_text(config + f"  shard: {size}\n" if config.endswith("\n  ") else config)
    port, ranks = str(free_port()), []
    for rank in range(size):
        environment = {
            **clean_environment(), "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
            "COLUMNS": "200", "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        command = [sys.executable, "-m", "powertrain", "train", str(tmp_path / "run.yml"), f"parallel.shard={size}"]
        said = (tmp_path / f"said{rank}").open("w")
        ranks.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT))
        said.close()
    try:
        deadline = time.monotonic() + 120
        metrics = tmp_path / "run/metrics.jsonl"
        while not metrics.is_file() or '"step": 3' not in metrics.read_text():
            assert time.monotonic() < deadline and ranks[0].poll() is None, (tmp_path / "said0").read_text()
            time.sleep(0.05)
        time.sleep(moment)
        before = {rank: (tmp_path / f"said{rank}").read_text() for rank in range(size)}
        os.kill(ranks[dies].pid, signal.SIGKILL)
        ranks[dies].wait()
        for rank in set(range(size)) - {dies}:
            status = ranks[rank].wait(timeout=60)
            after = (tmp_path / f"said{rank}").read_text()
            new = [line for line in after[len(before[rank]) :].splitlines() if not re.match(r" *step", line)]
            assert "Traceback" not in after and len(new) < 20 and status == 1, (status, after[-4000:])
            assert re.search(
                rf"rank {rank}: training cannot go on: .*rank {dies} \(host .*, process {ranks[dies].pid}\)", after
            )
    finally:
        for process in ranks:
            process.kill()
            process.wait()


@pytest.mark.parametrize("transport", ["pipelined", pytest.param("sequential", marks=pytest.mark.slow)])
def test_sizes_that_differ_are_an_error_on_every_rank(transport: str) -> None:
    """Over gloo, whose own check ends the process with SIGABRT."""
    for process in run_ranks(2, "-m", "tests.faults.mismatch_worker", transport, timeout=120):
        told = [line for line in process.stdout.splitlines() if "rank 0 makes" in line and "rank 1 makes" in line]
        assert process.returncode == 0 and [line.split()[0] for line in told] == ["width", "dtype", "rows", "features"]
