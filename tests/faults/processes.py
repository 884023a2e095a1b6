"""Processes of these tests: a training in a group of its own, and what is left of it."""

import os
import signal
import time
from pathlib import Path

import psutil
from safetensors.torch import load_file
from torch import Tensor

from powertrain.train.checkpoint.store import checkpoints_in
from tests.distributed import launch
from tests.distributed.launch import Started, clean_environment

DEADLINE = 120.0


def start(folder: Path, *command: str, fresh: bool = False) -> Started:
    """`python -m COMMAND` in a process group of its own; what it says goes to FOLDER/said. See launch.start."""
    return launch.start(("-m", *command), clean_environment(), folder / "said", new_session=True, fresh=fresh)


def said(folder: Path) -> str:
    return (folder / "said").read_text(errors="replace")


def wait_for(done: "object", folder: Path, process: Started | None = None) -> None:
    """Until `done()`; fails at a generous deadline, or when the process ended before."""
    deadline = time.monotonic() + DEADLINE
    while not done():  # type: ignore[operator]
        assert time.monotonic() < deadline, said(folder)[-3000:]
        assert process is None or process.poll() is None, said(folder)[-3000:]
        time.sleep(0.01)


def end(process: Started, number: int = signal.SIGKILL, *, group: bool = True) -> int:
    """Send a signal, and wait."""
    try:
        os.killpg(process.pid, number) if group else process.send_signal(number)
    except ProcessLookupError:
        pass
    return process.wait(timeout=DEADLINE)


def left_of(group: int) -> list[psutil.Process]:
    """Living processes of a process group."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.Error):
            pass
    return found


def weights(checkpoints: Path) -> dict[str, Tensor]:
    """Every tensor of the newest checkpoint, by its file and name."""
    newest = checkpoints_in(checkpoints)[-1]
    return {
        f"{file.name} {name}": tensor
        for file in newest.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
