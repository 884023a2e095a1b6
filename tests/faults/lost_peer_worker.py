"""`python -m tests.faults.lost_peer_worker CALL`, one rank of two: the other ends, or is late, before a call."""

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from powertrain.parallel.context.api import context_parallel
from powertrain.parallel.overlap import Overlap
from powertrain.parallel.transport.heartbeat import PeerTimeout


def leave(call: str) -> None:
    """Only rank 1 does. No destructors, as when a process is killed."""
    if dist.get_rank() == 1 and call == "late":
        time.sleep(7)
    elif dist.get_rank() == 1:
        os._exit(7)


def attend(call: str) -> None:
    assert dist.group.WORLD is not None
    cp = context_parallel(dist.group.WORLD)
    sharding = cp.sharding(9)
    mode: Any = call if call in ("all_gather", "all_to_all") else "ring"

    def once() -> torch.Tensor:
        x = torch.zeros(1, sharding.length(), 2, 4, requires_grad=True)
        return cp.attention(x, x, x, sharding, is_causal=True, mode=mode)

    out = once()  # in the first call ranks come to know each other
    leave(call)
    (out if call == "backward" else once()).sum().backward()


def main(call: str) -> None:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    try:
        if call == "overlap":
            # or a slow rank is still connecting, which gloo ends with an error of its own
            dist.barrier()
            leave(call)
            Overlap(group)
        elif call == "rows":
            overlap = Overlap(group)
            leave(call)
            overlap.exchange_rows(3)
        else:
            attend(call)
    except PeerTimeout as error:
        print(error, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
