"""`python -m tests.distributed.objective_worker FOLDER OBJECTIVE OUT OVERRIDES...`: metrics of a tiny run."""

import sys
from pathlib import Path

import torch

from powertrain.train import ranks
from powertrain.train.reporting import kernel_profile
from powertrain.train.run import start
from tests.train.test_objectives import Recorder, read_run


def main(folder: Path, objective: str, out: Path, *overrides: str) -> None:
    kernel_profile.PROFILED = 0  # takes as long as ten steps
    recorder = Recorder()
    run = read_run(folder, objective, *overrides)
    trainer = start(run, ranks.read_launch_env(), lambda _: [recorder])
    trainer.fit()
    if trainer.ranks.is_first:
        torch.save([(r.loss, r.grad_norm, r.objective) for r in recorder.steps], out)
    trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
