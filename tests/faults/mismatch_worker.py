"""A rank whose calls have other sizes than the other's; prints what it was told."""

import sys

import torch
import torch.distributed as dist

from powertrain.parallel.collective_matmul import all_gather_gemm, gemm_reduce_scatter
from powertrain.parallel.overlap import Overlap
from powertrain.parallel.transport.heartbeat import CollectiveMismatch


def main(transport: str) -> None:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    overlap, other = Overlap(group, transport=transport), dist.get_rank()
    calls = {
        "width": lambda: all_gather_gemm(torch.zeros(4, 8 - 2 * other), torch.zeros(2, 8 - 2 * other), overlap),
        "dtype": lambda: all_gather_gemm(
            torch.zeros(4, 8).to(torch.float64 if other else torch.float32),
            torch.zeros(2, 8).to(torch.float64 if other else torch.float32),
            overlap,
        ),
        "rows": lambda: gemm_reduce_scatter(torch.zeros(4 + 2 * other, 8), torch.zeros(4, 8), overlap),
        "features": lambda: gemm_reduce_scatter(torch.zeros(4, 8), torch.zeros(4 + 2 * other, 8), overlap),
    }
    for name, call in calls.items():
        try:
            call()
        except CollectiveMismatch as error:
            print(name, error, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
