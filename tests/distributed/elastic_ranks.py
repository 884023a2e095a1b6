"""`python -m tests.distributed.elastic_ranks N FOLDER MODULE WORDS`: N ranks of torchrun's agent, forked.

They are started again once where one ends badly. Each writes its id to FOLDER, a file for each rank.
"""

import os
import sys
from pathlib import Path

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.distributed.launch import run_module


def _rank(folder: str, *command: str) -> None:
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
    run_module(command)


def main(size: int, folder: str, *command: str) -> None:
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=size, run_id="tests", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=1, monitor_interval=0.1, start_method="fork",
    )  # fmt: skip
    elastic_launch(config, _rank)(folder, *command)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
