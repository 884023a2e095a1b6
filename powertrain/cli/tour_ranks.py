"""One rank of `powertrain tour overlap`: `python -m powertrain.cli.tour_ranks`, started as any launcher starts ranks.

A gated MLP, tensor and sequence parallel over gloo: forward and backward beside one process, in float64. Then rank 0
makes one more call, and the others never come.
"""

import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from powertrain.parallel.collective_matmul import all_gather_gemm, gemm_reduce_scatter
from powertrain.parallel.overlap import Overlap
from powertrain.parallel.transport.heartbeat import PeerTimeout
from powertrain.parallel.transport.select import TransportUnavailable

HIDDEN, INTERMEDIATE = 256, 1024
# tokens by rank: neither alike on the ranks nor twice the same
FIRST, SECOND = (256, 200), (31, 64)
ABSENT_SECONDS = 60  # a rank that was not killed exits after this time


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, overlap: Overlap, rows: tuple[int, ...]) -> Tensor:
    """x [rows here, HIDDEN] and this rank's features of the weights; the same rows of the result."""
    g, u = all_gather_gemm(x, [gate, up], overlap, rows=rows)
    return gemm_reduce_scatter(F.silu(g) * u, down, overlap, rows=rows)


def largest_difference(overlap: Overlap, rows: tuple[int, ...]) -> float:
    """Largest difference of results and gradients from one process's, relative to each tensor's largest value."""
    torch.manual_seed(sum(rows))
    shapes = (sum(rows), HIDDEN), (INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)
    whole = [torch.randn(*shape, dtype=torch.float64) * shape[1] ** -0.5 for shape in shapes]
    start = sum(rows[: overlap.rank])
    tokens = slice(start, start + rows[overlap.rank])
    width = INTERMEDIATE // overlap.size
    features = slice(overlap.rank * width, overlap.rank * width + width)
    here = [(tokens,), (features,), (features,), (slice(None), features)]

    one = [t.clone().requires_grad_() for t in whole]
    x, gate, up, down = one
    y = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    y.square().sum().backward()
    spread = [t[part].clone().requires_grad_() for t, part in zip(whole, here, strict=True)]
    x, gate, up, down = spread
    sharded = mlp(x, gate, up, down, overlap, rows)
    sharded.square().sum().backward()

    pairs = [(sharded, y[tokens]), *((a.grad, b.grad[part]) for a, b, part in zip(spread, one, here, strict=True))]
    worst = torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs]).max().detach()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=overlap.group)
    return float(worst)


def compare(overlap: Overlap, rows: tuple[int, ...]) -> None:
    difference = largest_difference(overlap, rows)
    say(f"{rows[0]} and {rows[1]} tokens: result and gradients within {difference:.0e} of one process, in float64")


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def open_overlap_logged(mesh: DeviceMesh) -> Overlap:
    """The transport that serves here, and why not the one above it."""
    say("transports, best first: symmetric (NVLink), pipelined (NCCL's or gloo's sends), sequential")
    try:
        Overlap(mesh, transport="symmetric")
    except TransportUnavailable as error:
        say(f"symmetric: {error}")
    overlap = Overlap(mesh)
    say(f"taken: {overlap.transport.name}, over {dist.get_backend(overlap.group)}\n")
    return overlap


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    overlap = open_overlap_logged(mesh["tp"])
    compare(overlap, FIRST)
    say(f"\noverlap.explain():\n{overlap.explain()}\n")
    compare(overlap, SECOND)
    if overlap.rank:
        time.sleep(ABSENT_SECONDS)
        return
    say("rank 0 makes one more call; rank 1 does not come")
    start = time.monotonic()
    try:
        gemm_reduce_scatter(torch.zeros(2, 8), torch.zeros(8, 8), overlap)
    except PeerTimeout as error:
        say(f"PeerTimeout after {time.monotonic() - start:.1f} s: {error}")
    # a group that lost a rank cannot be left in order
    os._exit(0)


if __name__ == "__main__":
    main()
