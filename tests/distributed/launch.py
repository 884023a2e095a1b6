"""Start ranks as a launcher would, in processes of their own.

On a CPU they fork from a server that has imported torch and the trainer, which takes a process 5 s of its own. Under
CUDA, or where a variable must be set before an import, they start anew.
"""

import atexit
import gc
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Protocol

import torch

ROOT = Path(__file__).resolve().parents[2]
_OF_LAUNCHERS = (
    "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "MV2_", "PMI", "MPI_", "FLUX_", "JSM_", "SLURM_", "PALS_",
    "TORCHELASTIC_",
)  # fmt: skip
_IMPORTED = [
    "tests.few_collections",
    "pytest",
    "torch.distributed.fsdp",
    "powertrain.train.run",
    "powertrain.train.reporting.sinks",
]


class Started(Protocol):
    """What these tests need of a process; a Popen has it too."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int) -> None: ...
    def kill(self) -> None: ...


class _Forked:
    """A process that the server forked, with Popen's methods."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid = process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def clean_environment() -> dict[str, str]:
    """Ours without what a launcher may have put there; one thread a process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def start(
    command: tuple[str, ...], environment: dict[str, str], said: Path, *, new_session: bool = False, fresh: bool = False
) -> Started:
    """`python COMMAND` in the repository; stdout and stderr are appended to a file. fresh: never from the server."""
    if fresh or command[0] != "-m" or command[1].startswith("torch.") or torch.cuda.is_available():
        with said.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, *command], env=environment, cwd=ROOT, stdout=file, stderr=file,
                start_new_session=new_session,
            )  # fmt: skip
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)  # type: ignore[attr-defined]
    process = context.Process(target=_run, args=(command[1:], environment, str(said), new_session))
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # for the server's import of torch
    try:
        process.start()
    finally:
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = threads
    return _Forked(process)


def _run(command: tuple[str, ...], environment: dict[str, str], said: str, new_session: bool) -> None:
    """In the new process: a module as `python -m` runs it, exit functions included."""
    gc.freeze()  # garbage collections of a rank then skip the server's objects, and do not copy their pages
    multiprocessing.set_start_method(None, force=True)  # the default, not the server
    if new_session:
        os.setsid()
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    file = os.open(said, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    try:
        run_module(command)
    finally:
        atexit._run_exitfuncs()


def run_module(command: tuple[str, ...]) -> None:
    """`python -m COMMAND` in this process."""
    module, *sys.argv[1:] = command
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def run_ranks(
    world_size: int, *command: str, timeout: float = 240, fresh: bool = False
) -> list[subprocess.CompletedProcess[str]]:
    """`python COMMAND` as so many ranks on this host; every rank is ended with the last, or at the timeout."""
    port = str(free_port())
    with tempfile.TemporaryDirectory() as folder:
        ranks: list[Started] = []
        files = [Path(folder) / str(rank) for rank in range(world_size)]
        try:
            for rank, file in enumerate(files):
                environment = {
                    **clean_environment(), "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                }  # fmt: skip
                ranks.append(start(command, environment, file, fresh=fresh))
            deadline = time.monotonic() + timeout
            codes = [rank.wait(timeout=max(0.0, deadline - time.monotonic())) for rank in ranks]
        finally:
            for rank_process in ranks:
                rank_process.kill()
        return [
            subprocess.CompletedProcess(command, code, file.read_text(errors="replace"))
            for code, file in zip(codes, files, strict=True)
        ]
