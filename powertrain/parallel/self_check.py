"""Check of a group of ranks: which transport they have, and whether its products are right.

    python -m powertrain.parallel.self_check BACKEND RANK RANKS PORT SECONDS

is one rank of it, started by `powertrain doctor --overlap`.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from powertrain.parallel.collective_matmul import all_gather_gemm, gemm_reduce_scatter
from powertrain.parallel.overlap import Overlap
from powertrain.parallel.transport.base import Choice
from powertrain.parallel.transport.select import TransportUnavailable

DONE = "products are right over"


def products_are_right(overlap: Overlap, device: torch.device) -> bool:
    """One layer of small whole numbers, which every dtype holds exactly, in chunks."""
    rank, size = overlap.rank, overlap.size
    # small whole numbers are exact in every dtype, so equality is the test
    # sequential calls would test nothing of the transport, and the planner takes products this small in sequence
    overlap.planner.choices.clear()
    overlap.planner._chosen = lambda product: Choice("chunked", "tried")  # type: ignore[method-assign]

    def whole(rows: int, columns: int) -> Tensor:
        return (torch.arange(rows * columns, device=device) % 5).view(rows, columns).to(torch.bfloat16)

    x, up, down = whole(4 * size, 8), whole(8 * size, 8), whole(8, 8 * size)
    local_rows, part = slice(4 * rank, 4 * rank + 4), slice(8 * rank, 8 * rank + 8)
    y = gemm_reduce_scatter(all_gather_gemm(x[local_rows], up[part], overlap), down[:, part], overlap)
    # the reference rounds where the ranks do: after the first product, and each rank's part of the second
    h = (x.double() @ up.double().T).bfloat16().double()
    parts = [h[:, 8 * r : 8 * r + 8] @ down[:, 8 * r : 8 * r + 8].double().T for r in range(size)]
    expected = sum((p.bfloat16().float() for p in parts), torch.zeros_like(parts[0], dtype=torch.float32))
    return torch.equal(y, expected.bfloat16()[local_rows])


def main() -> None:
    backend, rank, size, port, seconds = sys.argv[1], *map(int, sys.argv[2:6])
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
    )
    group = dist.group.WORLD
    assert group is not None
    why = ""
    try:
        overlap = Overlap(group, transport="symmetric")
    except TransportUnavailable as error:
        why = f"; {error}"
        overlap = Overlap(group)
    if not products_are_right(overlap, device):
        raise SystemExit(f"rank {rank}: products over {overlap.transport.name} are wrong")
    rate = getattr(overlap.transport, "link_rate", None)
    print(f"{DONE} {overlap.transport.name}{f', {rate / 1e9:.0f} GB/s' if rate else ''}{why}", flush=True)
    overlap.close()
    dist.destroy_process_group()
    # errors of library threads at interpreter exit are not part of the check
    os._exit(0)


if __name__ == "__main__":
    main()
