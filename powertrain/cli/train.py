"""`powertrain train`: train a model from a config."""

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from powertrain.cli.lint import CONFIG_WORDS, missing_files, read_run
from powertrain.cli.paths import must_exist
from powertrain.runtime.reading import named

if TYPE_CHECKING:
    from powertrain.runtime.console import Console
    from powertrain.train.config.reader import Files, Run
    from powertrain.train.reporting.metrics import Sink
    from powertrain.train.trainer import Trainer


def train(
    files: Annotated[list[str], typer.Argument(help="config files, ours or GPT-NeoX's, and key=value overrides")],
    strict: Annotated[bool, typer.Option("--strict", help="a key that would be ignored is an error")] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="two real steps at the real shapes, with a checkpoint and a resume between")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="an error, instead of a resume, where the folder holds a checkpoint")
    ] = False,
    format: Annotated[str | None, typer.Option(help="powertrain or gpt_neox; default: recognized by content")] = None,
) -> None:
    """Train, from a Powertrain or a GPT-NeoX YAML, on this CPU, this GPU, or every rank of torchrun, srun or mpiexec.

    A run whose folder holds a checkpoint resumes from it. SIGTERM and Ctrl-C end it after the current step, with a
    checkpoint. The exit code is 0 when all steps are done or one of these ended it, 1 when the run stopped before (a
    bad loss, data that cannot be read, no last checkpoint, a lost rank), 2 when it cannot start.

    \b
    powertrain train quickstart
    powertrain train run.yml train.steps=1000
    powertrain train configs/neox/125M.yml configs/neox/local_setup.yml train_iters=100
    torchrun --nproc-per-node 8 -m powertrain train run.yml parallel.shard=8
    """
    must_exist(missing_files(files), words=CONFIG_WORDS)
    from powertrain.train import mesh_shape, ranks
    from powertrain.train.reporting.screen import screen

    console = screen()
    try:
        launch_env = ranks.read_launch_env()
        # of several ranks one alone may lack a file, which they say together once they are connected
        named: Files = "data" if launch_env.world_size == 1 else "any"
        run = read_run(files, world_size=launch_env.world_size, strict=strict, format=format, named=named)
        mesh_shape.check_parallel(run.config, launch_env.world_size)
    except (ValueError, NotImplementedError) as error:
        raise typer.BadParameter(str(error)) from None
    if launch_env.rank == 0:
        _show(run, console)
    if smoke:
        _smoke(run, launch_env, console)
        return
    _fit(run, launch_env, console, fresh=fresh)


def _fit(run: "Run", launch_env: Any, console: "Console", *, quiet: bool = False, fresh: bool = False) -> "Trainer":
    from powertrain.parallel.transport.heartbeat import PeerTimeout
    from powertrain.train.agreement import is_on_all
    from powertrain.train.checkpoint.store import NotWritten
    from powertrain.train.data.loader import UnreadableSample
    from powertrain.train.ranks import RendezvousError, naming_lost_ranks
    from powertrain.train.reporting.kernel_profile import LateCompile
    from powertrain.train.reporting.progress import closing, opening
    from powertrain.train.reporting.run_summary import About, about
    from powertrain.train.reporting.screen import screen
    from powertrain.train.reporting.sinks import check, open_sinks
    from powertrain.train.run import start, stop_on_signals
    from powertrain.train.trainer import TrainingStopped

    known: list[About] = []
    errors = screen(stderr=True)

    def sinks(trainer: "Trainer") -> Sequence["Sink"]:
        if quiet:
            return []
        known.append(about(trainer, run))
        console.print(opening(known[0]))
        return open_sinks(trainer.config, known[0], console)

    try:
        check(run.config)
    except ModuleNotFoundError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        with _naming_memory():
            trainer = start(run, launch_env, sinks, fresh=fresh)
    except OutOfMemory as error:
        # of this rank alone, maybe
        errors.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except (RendezvousError, PeerTimeout, ValueError, OSError) as error:
        if launch_env.rank == 0 or not is_on_all(error):
            errors.print(named(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    stopped: Exception | None = None
    is_reporter = launch_env.rank == 0
    with stop_on_signals(trainer, is_last=not quiet, quiet=quiet):
        try:
            with naming_lost_ranks(trainer.ranks), _naming_memory():
                trainer.fit()
        except (TrainingStopped, LateCompile, NotWritten) as error:
            stopped = error
        except (UnreadableSample, OSError, PeerTimeout, OutOfMemory) as error:
            # the other ranks know nothing of it
            stopped, is_reporter = error, True
        finally:
            trainer.close()
    # of a bad loss the trainer's note is on the screen
    is_said = isinstance(stopped, TrainingStopped) and not quiet
    if stopped and is_reporter and not is_said:
        errors.print(named(stopped), markup=False, highlight=False, soft_wrap=True)
    for one in known:
        for line in closing(one, report=run.config.logging.report):
            console.print(line, highlight=False, soft_wrap=True)
    if stopped:
        raise typer.Exit(1)
    return trainer


class OutOfMemory(Exception):
    """An allocation that failed, and what makes a run smaller."""


@contextmanager
def _naming_memory() -> Iterator[None]:
    """Raises OutOfMemory for a failed allocation on a GPU or a CPU."""
    import torch

    try:
        yield
    except (RuntimeError, MemoryError) as error:
        of_torch = isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
        if not of_torch and not isinstance(error, MemoryError):
            raise
        words = " ".join(str(error).split())[:300] or "no memory is left"
        raise OutOfMemory(
            f"out of memory: {words}\n`powertrain lint` estimates the memory of a config. To use less: a smaller "
            "train.micro_batch_size, train.activation_checkpointing or parallel.shard"
        ) from None


def _smoke(run: "Run", launch_env: Any, console: "Console") -> None:
    """One step, a checkpoint, another process's view of it: a trainer that resumes and takes the second step."""
    with _smoke_folder(run, launch_env) as folder:
        started = time.monotonic()
        for steps in (1, 2):
            short = _shortened(run, folder, steps)
            trainer = _fit(short, launch_env, console, quiet=True)
            if trainer.should_stop or trainer.progress.step < steps:
                reason = trainer.stop_reason or "a signal to another rank"
                console.print(f"[red]the smoke test did not finish[/]: {reason} ended it")
                raise typer.Exit(1)
            if launch_env.rank == 0:
                outcome = "trained, checkpoint written" if steps == 1 else "resumed and trained"
                console.print(f"step {steps}: {outcome}, {time.monotonic() - started:.1f} s since the start")
    if launch_env.rank == 0:
        console.print("[green]smoke test passed[/]")


@contextmanager
def _smoke_folder(run: "Run", launch_env: Any) -> Iterator[Path]:
    """A new folder; for several ranks, which may be on several hosts, one beside the run. The first rank clears it."""
    if launch_env.world_size == 1:
        with tempfile.TemporaryDirectory(prefix="powertrain-smoke-") as name:
            yield Path(name)
        return
    folder = run.config.folder() / "powertrain-smoke"
    if launch_env.rank == 0:
        _clear_smoke(folder)
    yield folder
    if launch_env.rank == 0:
        shutil.rmtree(folder)


def _clear_smoke(folder: Path) -> None:
    """Make it anew; files of an earlier smoke test are removed, anything else is an error."""
    mark = folder / ".made-by-powertrain"
    if mark.is_file():
        shutil.rmtree(folder)
    if folder.exists():
        raise typer.BadParameter(f"{folder} must not exist, the smoke test writes there", param_hint="--smoke")
    folder.mkdir(parents=True)
    mark.touch()


def _shortened(run: "Run", folder: Path, steps: int) -> "Run":
    import dataclasses

    config = run.config
    sections = {
        "train": config.train.model_copy(update={"steps": steps}),
        "checkpoint": config.checkpoint.model_copy(
            update={
                "save": True,
                "folder": str(folder / "checkpoints"),
                "load": None,
                "every": 1,
                "asynchronous": False,
            }
        ),
        "evaluation": config.evaluation.model_copy(update={"every": 0, "at_end": False}),
        "logging": config.logging.model_copy(update={"folder": str(folder)}),
    }
    return dataclasses.replace(run, config=config.model_copy(update=sections))


def _show(run: "Run", console: "Console") -> None:
    from powertrain.train.config.table import render

    console.print(run.note, highlight=False)
    render(run.table, console)
