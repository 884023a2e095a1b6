"""`train(config)`: a run from Python, as `powertrain train` makes it."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from powertrain.train import mesh_shape, ranks
from powertrain.train.checkpoint.store import find
from powertrain.train.config.reader import Run, read_config, run_of
from powertrain.train.config.schema import RunConfig
from powertrain.train.reporting.metrics import EvaluationRecord, PartialSink, Sink, StepRecord
from powertrain.train.reporting.run_summary import about
from powertrain.train.reporting.screen import screen
from powertrain.train.reporting.sinks import check, open_sinks
from powertrain.train.run import start, stop_on_signals
from powertrain.train.trainer import Trainer

_one_run = threading.Lock()


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    steps         optimizer steps of the run so far, those before a resume included
    finished      False: SIGTERM or Ctrl-C ended it early
    loss          of the last step that this call took; None: it took none, or on another rank than the first
    evaluations   name of a held-out set -> its last mean loss; on the first rank
    folder        metrics.jsonl, report.html, config
    checkpoint    the newest; None: none was written
    """

    steps: int
    finished: bool
    loss: float | None
    evaluations: dict[str, float]
    folder: Path
    checkpoint: Path | None


def train(
    config: str | Path | Mapping[str, Any] | RunConfig,
    overrides: Sequence[str] = (),
    *,
    fresh: bool = False,
    quiet: bool = False,
) -> TrainResult:
    """Train on this CPU, this GPU, or as one rank of torchrun, srun or mpiexec; resumes from the run's folder.

    config      a YAML file (ours or GPT-NeoX's), a dictionary with its sections, or a RunConfig
    overrides   "train.steps=100" and the like, laid over a file or dictionary
    fresh       an error where the folder holds a checkpoint
    quiet       nothing on the screen; files are written all the same
    One run at a time in a process; inside torch.no_grad() and inference_mode() too.
    In the main thread SIGTERM and Ctrl-C end the run after the current step, with a checkpoint; `finished` is False.
    Raises ConfigError (a ValueError) for the config, ValueError or OSError for data, TrainingStopped for a loss that
    went bad, NotWritten for a last checkpoint that could not be written, RuntimeError while another run is under way in
    this process.
    """
    # two at once draw from the same random generators, and have ended with a segmentation fault
    if not _one_run.acquire(blocking=False):
        raise RuntimeError("train: another run is under way in this process; a process has one at a time")
    try:
        # a caller's inference mode would make parameters that have no gradients
        with torch.inference_mode(False), torch.enable_grad():
            return _train(config, overrides, fresh, quiet)
    finally:
        _one_run.release()


def _train(
    config: str | Path | Mapping[str, Any] | RunConfig, overrides: Sequence[str], fresh: bool, quiet: bool
) -> TrainResult:
    launch_env = ranks.read_launch_env()
    run = _read(config, overrides, launch_env.world_size)
    mesh_shape.check_parallel(run.config, launch_env.world_size)
    check(run.config)
    last = _Last()
    console = screen(quiet=quiet)

    def sinks(trainer: Trainer) -> Sequence[Sink]:
        return [*open_sinks(trainer.config, about(trainer, run), console), last]

    trainer = start(run, launch_env, sinks, fresh=fresh)
    try:
        with stop_on_signals(trainer, quiet=quiet), ranks.naming_lost_ranks(trainer.ranks):
            progress = trainer.fit()
    finally:
        trainer.close()
    done = trainer.config
    return TrainResult(
        steps=progress.step,
        finished=progress.step >= done.train.steps,
        loss=last.loss,
        evaluations=last.evaluations,
        folder=done.folder(),
        checkpoint=find(done.checkpoint_folder()) if done.checkpoint.save else None,
    )


def _read(config: str | Path | Mapping[str, Any] | RunConfig, overrides: Sequence[str], world_size: int) -> Run:
    if isinstance(config, (str, Path)):
        return read_config([config], overrides, world_size=world_size)
    return run_of(config, overrides)


class _Last(PartialSink):
    """Sink that keeps the last metrics of a run."""

    def __init__(self) -> None:
        self.loss: float | None = None
        self.evaluations: dict[str, float] = {}

    def step(self, record: StepRecord) -> None:
        self.loss = record.loss

    def evaluation(self, record: EvaluationRecord) -> None:
        self.evaluations[record.name] = record.loss
