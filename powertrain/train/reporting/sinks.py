"""Sinks of a run's metrics: the screen, metrics.jsonl, TensorBoard, W&B, the report."""

import importlib.util
from pathlib import Path
from typing import Any

from rich.console import Console

from powertrain.train.config.schema import RunConfig
from powertrain.train.reporting.kernel_profile import KernelTable
from powertrain.train.reporting.metrics import METRICS, EvaluationRecord, JsonLines, Sink, StepRecord, TaskRecord
from powertrain.train.reporting.progress import Lines, Live
from powertrain.train.reporting.report import ReportFile
from powertrain.train.reporting.run_summary import About


def open_sinks(config: RunConfig, about: About, console: Console) -> list[Sink]:
    """The sinks that config.logging asks for; call it on the first rank. `about` is kept in the folder for the report.

    Raises ModuleNotFoundError where logging.wandb is set and wandb is not installed.
    """
    logging, folder = config.logging, config.folder()
    # before any file is made, so that a run without its sink leaves nothing behind
    check(config)
    sinks: list[Sink] = [JsonLines(folder / METRICS, resumed_at=about.resumed_at)]
    # before the first sink may draw a report from it
    about.write()
    if console.is_terminal:
        sinks.append(Live(console, about.steps, about.resumed_at))
    else:
        sinks.append(Lines(console, about.steps, logging.every))
    if logging.tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard", resumed_at=about.resumed_at))
    if logging.wandb is not None:
        sinks.append(WandB(logging.wandb, config, folder))
    if logging.report:
        # the last: it reads files of the others
        sinks.append(ReportFile(folder))
    if about.resumed_at:
        for sink in sinks:
            sink.note(f"resumed after step {about.resumed_at} from {about.resumed_from}")
    return sinks


def check(config: RunConfig) -> None:
    """Raise ModuleNotFoundError if a sink that is asked for is not installed: better now than after the data."""
    if config.logging.wandb is not None and importlib.util.find_spec("wandb") is None:
        raise ModuleNotFoundError(
            f"logging.wandb must be null where wandb is not installed, got {config.logging.wandb}; pip install wandb"
        )


def scalars(record: StepRecord) -> dict[str, float]:
    """A step's numbers by the names that TensorBoard and W&B show them under."""
    values = {
        "train/loss": record.loss,
        "train/grad_norm": record.grad_norm,
        "train/lr": record.lr,
        "train/tokens": float(record.tokens),
        "speed/tokens_per_second": record.tokens_per_second,
        "speed/seconds_per_step": record.seconds,
        "memory/gib": record.memory_bytes / 2**30,
    }
    if record.mfu is not None:
        values["speed/mfu"] = record.mfu
    values |= {f"phases/{name}_ms": 1e3 * spent for name, spent in (record.phases or {}).items()}
    if record.loss_scale != 1.0:
        values["train/loss_scale"] = record.loss_scale
    return values


class TensorBoard:
    """TensorBoard's events in `folder`; those behind a resumed step are marked void."""

    def __init__(self, folder: Path, *, resumed_at: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and not always wanted

        # TensorBoard then hides points of steps that the resumed run computes again
        self._writer: Any = SummaryWriter(str(folder), purge_step=resumed_at + 1 if resumed_at else None)
        self._step = resumed_at

    def step(self, record: StepRecord) -> None:
        self._step = record.step
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record.step)

    def evaluation(self, record: EvaluationRecord) -> None:
        self._writer.add_scalar(f"{record.name}/loss", record.loss, record.step)
        self._writer.flush()

    def task(self, record: TaskRecord) -> None:
        for name, value in record.metrics.items():
            self._writer.add_scalar(f"{record.task}/{name}", value, record.step)
        self._writer.flush()

    def kernels(self, table: KernelTable) -> None:
        rows = "\n".join(
            f"| {row.op} | {row.backend} | {row.milliseconds:.3f} | {row.share:.1%} |" for row in table.rows
        )
        self._writer.add_text("kernels", f"| op | backend | ms | share |\n|---|---|---|---|\n{rows}", table.step)

    def note(self, text: str) -> None:
        self._writer.add_text("notes", text, self._step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A W&B run. arguments: those of `wandb.init` (project, entity, group, name ...); a resumed run goes on there."""

    def __init__(self, arguments: dict[str, Any], config: RunConfig, folder: Path) -> None:
        import wandb

        id_file = folder / "wandb_id"
        known = {"id": id_file.read_text()} if id_file.is_file() else {}
        fixed = {"dir": str(folder), "config": config.model_dump(mode="json"), "resume": "allow"}
        # the user's arguments last, so that they win; "allow" continues a known id and begins with an unknown one
        self._run: Any = wandb.init(**{**fixed, **known, **arguments})
        id_file.write_text(str(self._run.id))

    def step(self, record: StepRecord) -> None:
        self._run.log(scalars(record), step=record.step)

    def evaluation(self, record: EvaluationRecord) -> None:
        # W&B accepts steps in ascending order only; values of the same step are merged
        self._run.log({f"{record.name}/loss": record.loss}, step=record.step)

    def task(self, record: TaskRecord) -> None:
        self._run.log({f"{record.task}/{name}": value for name, value in record.metrics.items()}, step=record.step)

    def kernels(self, table: KernelTable) -> None:
        for row in table.rows:
            self._run.summary[f"kernels/{row.op} ({row.backend})"] = row.share

    def note(self, text: str) -> None:
        self._run.summary["last note"] = text

    def close(self) -> None:
        self._run.finish()
