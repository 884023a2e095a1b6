"""`powertrain demo`: train a small GPT on real text, kill it, resume it, generate from it."""

import importlib.resources
import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from powertrain.runtime.console import Console

VOCABULARY = 256  # bytes
PROMPT = "def "
_MARK = ".made-by-powertrain-demo"  # a file in the folders that a demo may remove


def demo(
    folder: Annotated[Path, typer.Option(help="folder of the run; an earlier demo's is replaced")] = Path("runs/demo"),
) -> None:
    """Train a small GPT on the Python standard library's own source; kill -9 it and resume it; generate from it.

    About a minute of training on two quiet CPU cores, nothing to download. Ends with 1 if the held-out loss does not
    fall by more than half of ln(vocabulary).
    """
    from powertrain.train.signals import exits_on_signals

    _clear(folder)
    # so that the training does not go on without its demo
    with exits_on_signals():
        _show(folder, Console())


def _show(folder: Path, console: Console) -> None:
    console.rule("[bold]train[/]: a GPT of 2.7 M parameters, 369,000 bytes of Python's standard library", align="left")
    train = _Train(folder)
    killed_at = train.until_killed()
    # a progress bar that was killed leaves the terminal's cursor hidden
    console.show_cursor()
    if killed_at is None:
        console.print("[red]the training ended before it could be killed[/]")
        raise typer.Exit(1)
    console.print()
    console.rule(f"[bold]kill -9[/] after step {killed_at}; the same command again resumes", align="left")
    if train.to_the_end():
        raise typer.Exit(1)
    console.print()
    console.rule(f"[bold]generate[/] from the checkpoint: --prompt {PROMPT!r}", align="left")
    options = ["--prompt", PROMPT, "--max-new-tokens", "160", "--temperature", "0.7"]
    if subprocess.call([*_POWERTRAIN, "generate", str(folder), *options]):
        raise typer.Exit(1)
    console.print()
    _compare_ranks(folder, console)


_POWERTRAIN = [sys.executable, "-m", "powertrain"]


class _Train:
    """The training, as a process of its own, so that it can be killed."""

    def __init__(self, folder: Path) -> None:
        config = importlib.resources.files("powertrain.train") / "quickstart.yml"
        # python -m, because the command may not be on PATH in a checkout
        self.command = [*_POWERTRAIN, "train", str(config), f"logging.folder={folder}"]
        self.folder = folder

    def until_killed(self) -> int | None:
        """Run, and SIGKILL it a few steps after its first checkpoint; the step, or None if it ended by itself."""
        process = subprocess.Popen(self.command)
        try:
            while process.poll() is None:
                # a checkpoint's folder gets this name when it is complete, so the file is there whole
                checkpoint = min(self.folder.glob("checkpoints/step_*/checkpoint.json"), default=None)
                step = max((record["step"] for record in _records(self.folder) if record["kind"] == "step"), default=0)
                # a few steps later, so that the resumed run repeats steps that were lost
                if checkpoint is not None and step > json.loads(checkpoint.read_text())["step"] + 2:
                    return int(step)
                time.sleep(0.1)
            return None
        finally:
            process.kill()
            process.wait()

    def to_the_end(self) -> int:
        return subprocess.call(self.command)


def _records(folder: Path) -> list[dict[str, Any]]:
    """Whole lines of the run's metrics.jsonl."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    # a killed trainer leaves half a line at the end
    return [json.loads(line) for line in lines if line.endswith("}\n")]


def _clear(folder: Path) -> None:
    """An empty folder with the demo's mark: an earlier demo in it is removed; anything else in the way is an error, a
    run of the user too."""
    # a process that is in it, or a link to it, keeps its folder
    files = [*folder.iterdir()] if folder.exists() else []
    if files and not (folder / _MARK).is_file():
        raise typer.BadParameter(f"{folder} must be new or an earlier demo's, got other files", param_hint="--folder")
    for path in files:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != _MARK:
            path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).touch()


def _compare_ranks(folder: Path, console: Console) -> None:
    losses = [record["loss"] for record in _records(folder) if record["kind"] == "evaluation"]
    start, end = math.log(VOCABULARY), losses[-1]
    fell = start - end
    console.print(
        f"held-out loss {end:.2f} nats a byte; a model that knows nothing has ln({VOCABULARY}) = {start:.2f}. "
        f"It fell by {fell / start:.0%}.",
        highlight=False,
    )
    console.print(f"the report: {folder / 'report.html'}", highlight=False)
    if not fell > start / 2:
        console.print(f"[red]the held-out loss must fall by more than half of {start:.2f}, it fell by {fell:.2f}[/]")
        raise typer.Exit(1)
