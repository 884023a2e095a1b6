"""A rank of a training that is killed: each survivor says which, in a few lines, and ends."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from powertrain.train.config.reader import read_config
from powertrain.train.data.indexed import IndexedWriter
from powertrain.train.data.sources import open_tokenizer
from powertrain.train.run import open_run_data, with_vocabulary
from tests.distributed.launch import Started, clean_environment, free_port, run_ranks, start
from tests.distributed.test_restart import CONFIG

# of the worker's calls
NAMES = [
    "width", "dtype", "rows", "features",
    *(f"experts.{name}" for name in ("width", "dtype", "number", "capacity", "capacity_or_none", "combine", "way",
                                     "overlapped_width")),
    *(f"context.{mode}.{name}" for mode in ("ring", "all_gather", "all_to_all")
      for name in ("heads", "dim", "documents", "late_document", "dtype", "causal", "scale", "softcap", "sinks")),
    "context.mode", "context.unshard.width", "context.unshard.dtype", "overlap.transport", "models.mesh",
]  # fmt: skip


@pytest.mark.parametrize(
    "size, dies, moment, stages",
    [
        (2, 1, 0.3, 1),
        *(pytest.param(3, n, 0.1 * n, 1, marks=pytest.mark.slow) for n in (0, 1, 2)),
        *(pytest.param(2, n, 0.1 * n, 2, marks=pytest.mark.slow) for n in (0, 1)),
    ],
)
def test_survivors_name_it(size: int, dies: int, moment: float, stages: int, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Every rank reads the same words, but not at the same time.\n" * 200)
    config = CONFIG.format(folder=tmp_path).replace("steps: 60", "steps: 100000").replace("every: 5,", "every: 1000,")
    (tmp_path / "run.yml").write_text(config + f"  shard: {size}\n" if config.endswith("\n  ") else config)
    in_stages = "parallel.pipeline=2", "parallel.shard=1", "train.gradient_accumulation_steps=2", "model.num_layers=2"
    ranks = _started(size, tmp_path / "run.yml", *(in_stages if stages > 1 else ()))
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


def _started(size: int, config: Path, *more: str) -> list[Started]:
    """Ranks of `powertrain train`; what rank R says goes to `saidR` beside the config."""
    port, ranks = str(free_port()), []
    for rank in range(size):
        environment = {
            **clean_environment(), "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
            "COLUMNS": "200", "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        command = ("-m", "powertrain", "train", str(config), f"parallel.shard={size}", *more)
        ranks.append(start(command, environment, config.parent / f"said{rank}"))
    return ranks


@pytest.mark.parametrize(
    "size, bad, workers",
    [(2, 1, 0), *(pytest.param(3, n, w, marks=pytest.mark.slow) for n in (0, 1, 2) for w in (0, 2))],
)
def test_a_sample_that_one_rank_cannot_read_is_named_by_all(size: int, bad: int, workers: int, tmp_path: Path) -> None:
    """Rank `bad` meets a token beyond the vocabulary; the others are in the step's first collective by then."""
    text = b"Every rank reads other words. " * 20
    with IndexedWriter(tmp_path / "data", np.dtype(np.uint16)) as data:
        for document in range(3):
            data.add([9999] * 16 if document == 1 else list(text))
    (tmp_path / "run.yml").write_text(CONFIG.format(folder=tmp_path).replace("text.txt", "data"))
    seed, sample = next(_seeds(tmp_path / "run.yml", size, bad))
    ranks = _started(size, tmp_path / "run.yml", f"data.num_workers={workers}", f"train.seed={seed}")
    for rank, process in enumerate(ranks):
        status = process.wait(timeout=120)
        said = (tmp_path / f"said{rank}").read_text()
        assert status == 1 and "Traceback" not in said and said.count("\n") < 30, said[-3000:]
        why = rf"sample {sample} cannot be read: {tmp_path}/data: tokens must be .* got 9999 in document 1 "
        who = "" if rank == bad else rf"rank {rank}: training cannot go on: rank {bad} \(host .*\) gave up: "
        assert re.search(rf"^{who}{why}", said, re.MULTILINE), said[-3000:]


def _seeds(config: Path, size: int, bad: int) -> Iterator[tuple[int, int]]:
    """(seed, sample): seeds under which rank `bad` is the one that reads the first bad sample, in its first steps."""
    for seed in range(1000):
        run = with_vocabulary(read_config([config], [f"train.seed={seed}"]).config, 256)
        source = open_run_data(run, open_tokenizer(run.data), size).train
        for sample in range(size, 4 * size):
            try:
                source.sample(sample)
            except ValueError:
                if sample % size == bad and sample > size:
                    yield seed, sample
                break


@pytest.mark.parametrize(
    "transport, size, seeds",
    [("pipelined", 2, 8), *(pytest.param(t, 3, 100, marks=pytest.mark.slow) for t in ("pipelined", "sequential"))],
)
def test_sizes_that_differ_are_an_error_on_every_rank(transport: str, size: int, seeds: int) -> None:
    """Over gloo, whose own check ends the process with SIGABRT: products, experts, context, and any split sizes."""
    ranks = run_ranks(size, "-m", "tests.faults.mismatch_worker", transport, str(seeds), timeout=240)
    for process in ranks:
        told = [
            line for line in process.stdout.splitlines() if line.split(" ")[0] in NAMES or line.startswith("splits")
        ]
        assert process.returncode == 0 and len(told) == len(NAMES) + 2 * seeds, process.stdout[-3000:]
        silent = [line for line in told if not re.search(r"rank 0 makes .*; rank \d makes ", line)]
        assert not silent, "\n".join(silent)


@pytest.mark.parametrize("call", ["overlap", "rows", "ring", "all_gather", "all_to_all", "backward", "late"])
def test_calls_name_a_rank_that_is_gone(call: str) -> None:
    survivor, _ = run_ranks(2, "-m", "tests.faults.lost_peer_worker", call, timeout=60)
    named = r"rank 1 \(host .*, process \d+\) is gone"
    words = {"overlap": "Overlap cannot begin: a rank of its group is gone or did not start it",
             "rows": rf"exchange of row counts of \[1\] cannot end: {named}",
             "backward": f"attention's backward by ring cannot end: {named}",
             "late": r"attention by ring has waited 5 s for rank 1 \(host "}  # fmt: skip
    assert re.search(rf"rank 0: {words.get(call, f'attention by {call} cannot end: {named}')}", survivor.stdout), (
        survivor.stdout[-3000:]
    )
