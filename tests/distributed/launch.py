"""Start ranks as a launcher would, in processes of their own."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "MPI_", "SLURM_", "TORCHELASTIC_")


def clean_environment() -> dict[str, str]:
    """Ours without what a launcher may have put there; one thread a process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run_ranks(world_size: int, *command: str, timeout: float = 240) -> list[subprocess.CompletedProcess[str]]:
    """`python COMMAND` as so many ranks on this host; every rank is ended with the last, or at the timeout."""
    port = str(free_port())
    ranks = []
    for rank in range(world_size):
        environment = {
            **clean_environment(), "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        ranks.append(
            subprocess.Popen(
                [sys.executable, *command],
                env=environment,
                cwd=ROOT,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    try:
        said = [process.communicate(timeout=timeout)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    return [subprocess.CompletedProcess(p.args, p.returncode, out) for p, out in zip(ranks, said, strict=True)]
