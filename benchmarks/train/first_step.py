"""`python -m benchmarks.train.first_step [--ranks N]`: seconds from a process's start to the end of its first step.

The 1.2B Llama shape, bfloat16, 16k tokens a step. Cold: no kernel is compiled yet. Warm: what the cold run stored.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OVERRIDES = [
    "data.train=quickstart", "data.tokenizer=bytes", "data.document_mask=false", "train.activation_checkpointing=none",
    "model.max_position_embeddings=4096", "train.seq_length=4096", "train.micro_batch_size=4", "train.steps=3",
    "checkpoint.save=false", "evaluation.every=0", "evaluation.at_end=false", "data.num_workers=0",
]  # fmt: skip


def seconds_to_first_step(ranks: int, store: Path, folder: Path) -> float:
    """Until metrics.jsonl holds step 1: its numbers are read while step 2 computes, so this is a step too much."""
    launcher = (
        [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"] if ranks > 1 else [sys.executable]
    )
    command = [*launcher, "-m", "powertrain", "train", "configs/llama-1b.yml", *OVERRIDES, f"logging.folder={folder}"]
    environment = {**os.environ, "POWERTRAIN_STORE": str(store)}
    start = time.monotonic()
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        while not _first_step(folder / "metrics.jsonl"):
            if process.poll() not in (None, 0):
                sys.exit(f"{' '.join(command)} ended with {process.returncode}")
            time.sleep(0.02)
        seconds = time.monotonic() - start
    return seconds


def _first_step(file: Path) -> bool:
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return any(json.loads(line)["kind"] == "step" for line in lines if line.endswith("}\n"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    ranks = parser.parse_args().ranks
    with tempfile.TemporaryDirectory() as temporary:
        for name in ("cold", "warm", "warm again"):
            folder = Path(temporary) / name.replace(" ", "-")
            seconds = seconds_to_first_step(ranks, Path(temporary) / "store", folder)
            print(f"{ranks} ranks, {name:10} {seconds:6.1f} s", flush=True)


if __name__ == "__main__":
    main()
