"""`python -m tests.distributed.fork_ranks N MODULE WORDS`: N ranks in this process group, forked, not started anew.

Ends when all have ended, with the largest exit code; ranks that are killed leave the others to find out.
"""

import gc
import os
import sys
import traceback
from collections.abc import Callable

from tests.distributed.launch import clean_environment, free_port, run_module


def fork(size: int, run: Callable[[], None]) -> int:
    """`run` in so many ranks; the largest exit code."""
    gc.freeze()  # garbage collections of the ranks then skip the objects made so far
    port, children = str(free_port()), []
    for rank in range(size):
        if (child := os.fork()) == 0:
            os.environ |= {
                **clean_environment(), "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            }  # fmt: skip
            try:
                run()
            except SystemExit as end:
                os._exit(end.code if isinstance(end.code, int) else bool(end.code))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children)


def main(size: int, *command: str) -> int:
    return fork(size, lambda: run_module(command))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
