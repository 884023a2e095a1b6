"""`python -m tests.distributed.check_ranks N MODULE TABLE OUT`: N ranks on CPUs do the checks of a module's table.

They fork from a process that has imported the module and called its `prepare()`, so that is done once, not by every
rank. OUT is as of layers_worker.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.distributed.fork_ranks import fork
from tests.distributed.launch import clean_environment, start


def failures(
    size: int, module: str, out: Path, *, table: str = "CHECKS", timeout: float = 120, interpret: bool = False
) -> dict[str, str]:
    """What failed, check by check; empty texts where nothing did."""
    environment = {**clean_environment(), "CUDA_VISIBLE_DEVICES": ""}
    if interpret:
        environment |= {"POWERTRAIN_INTERPRET": "1", "TRITON_INTERPRET": "1"}  # whichever of the two is imported first
    command = ("-m", "tests.distributed.check_ranks", str(size), module, table, str(out))
    said = out.with_suffix(".txt")
    ranks = start(command, environment, said, new_session=True, fresh=interpret)
    with suppress(subprocess.TimeoutExpired):
        ranks.wait(timeout)
    with suppress(ProcessLookupError):
        os.killpg(ranks.pid, signal.SIGKILL)
    assert out.is_file(), said.read_text(errors="replace")[-6000:]
    found: dict[str, str] = json.loads(out.read_text())
    return found


def main(size: int, module: str, table: str, out: str) -> int:
    from tests.distributed.layers_worker import run_checks

    worker = importlib.import_module(module)
    getattr(worker, "prepare", lambda: None)()
    return fork(size, lambda: run_checks(getattr(worker, table), out))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
