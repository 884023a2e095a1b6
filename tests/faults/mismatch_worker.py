"""A rank whose calls have other sizes than the others'; prints what it was told."""

import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from powertrain.models.parallelize import parallelize
from powertrain.ops.moe import moe_permute
from powertrain.parallel.collective_matmul import all_gather_gemm, gemm_reduce_scatter
from powertrain.parallel.context.api import context_parallel
from powertrain.parallel.experts import combine, dispatch, spread_experts
from powertrain.parallel.overlap import Overlap
from powertrain.parallel.transport.base import SplitSizes
from powertrain.parallel.transport.heartbeat import CollectiveMismatch

Calls = dict[str, Callable[[], Any]]


def products(overlap: Overlap, other: int) -> Calls:
    dtype = torch.float64 if other else torch.float32
    return {
        "width": lambda: all_gather_gemm(torch.zeros(4, 8 - 2 * other), torch.zeros(2, 8 - 2 * other), overlap),
        "dtype": lambda: all_gather_gemm(torch.zeros(4, 8, dtype=dtype), torch.zeros(2, 8, dtype=dtype), overlap),
        "rows": lambda: gemm_reduce_scatter(torch.zeros((1 + other) * overlap.size, 8), torch.zeros(4, 8), overlap),
        "features": lambda: gemm_reduce_scatter(torch.zeros(overlap.size, 8), torch.zeros(4 + 2 * other, 8), overlap),
    }


def experts(overlap: Overlap, other: int) -> Calls:
    """other: 0, or 1 on the rank whose call differs."""
    size = overlap.size

    def sent(
        *, hidden: int = 8, dtype: torch.dtype = torch.float32, per_rank: int = 2, capacity: int | None = None
    ) -> Any:
        chosen = torch.arange(6)[:, None] % (per_rank * size)
        return dispatch(torch.zeros(6, hidden, dtype=dtype), chosen, per_rank * size, overlap, capacity=capacity)

    def returned() -> Any:
        found = sent()
        return combine(found.rows.new_zeros(len(found.rows), 8 - 2 * other), found, None, overlap)

    def whole(way: Any, intermediate: int = 4, hidden: int = 8) -> Any:
        rows, offsets, _ = moe_permute(torch.zeros(6, hidden), torch.arange(6)[:, None] % size, size)
        gate_up, down = torch.zeros(1, 2 * intermediate, hidden), torch.zeros(1, hidden, intermediate)
        return spread_experts(rows, offsets, gate_up, down, overlap, way=way)

    return {
        "experts.width": lambda: sent(hidden=8 - 2 * other),
        "experts.dtype": lambda: sent(dtype=torch.float64 if other else torch.float32),
        "experts.number": lambda: sent(per_rank=2 + other),
        "experts.capacity": lambda: sent(capacity=3 + other),
        "experts.capacity_or_none": lambda: sent(capacity=None if other else 4),
        "experts.combine": returned,
        "experts.way": lambda: whole("overlapped" if other else "sequential"),
        "experts.overlapped_width": lambda: whole("overlapped", hidden=8 + 2 * other),
    }  # fmt: skip


def splits(overlap: Overlap, differs: bool, seed: int) -> Calls:
    """Random splits, one entry of which another rank sees otherwise: both ways to send them."""
    chance, size = random.Random(seed), overlap.size
    matrix = [[chance.randrange(5) for _ in range(size)] for _ in range(size)]
    row, column, more = chance.randrange(size), chance.randrange(size), chance.randrange(1, 4)
    if differs:
        matrix[row][column] += more
    made = SplitSizes(tuple(map(tuple, matrix)))
    rows = torch.zeros(sum(made.sent(overlap.rank)), 3)
    return {
        f"splits{seed}": lambda: overlap.transport.all_to_all(rows, made),
        f"splits{seed}.async": lambda: overlap.transport.all_to_all_async(0, rows, made, 3),
    }


def context(other: int) -> Calls:
    assert dist.group.WORLD is not None
    cp = context_parallel(dist.group.WORLD)

    def attend(
        mode: Any, *, heads: int = 6, dim: int = 8, documents: Any = (9, 0, 5), dtype: Any = torch.float32,
        **options: Any,
    ) -> Any:  # fmt: skip
        sharding = cp.sharding(cu_seqlens=torch.tensor([0, *documents]).cumsum(0))
        x = torch.zeros(sharding.length(), heads, dim, dtype=dtype)
        return cp.attention(x, x, x, sharding, mode=mode, **options)

    def gather(width: int, dtype: torch.dtype) -> Any:
        sharding = cp.sharding(9)
        return cp.unshard(torch.zeros(1, sharding.length(), width, dtype=dtype), sharding)

    many, dtype = [1] * 40, torch.float64 if other else torch.float32
    differences: dict[str, dict[str, Any]] = {
        "heads": dict(heads=6 + 6 * other), "dim": dict(dim=8 + 2 * other), "documents": dict(documents=(9, other, 5)),
        "late_document": dict(documents=[*many, 1 + other]), "dtype": dict(dtype=dtype),
        "causal": dict(is_causal=bool(other)), "scale": dict(scale=1.0 + other), "softcap": dict(softcap=1.0 + other),
        "sinks": dict(sinks=torch.zeros(6) if other else None),
    }  # fmt: skip
    calls: Calls = {
        f"context.{mode}.{name}": partial(attend, mode, **options)
        for mode in ("ring", "all_gather", "all_to_all")
        for name, options in differences.items()
    }
    return {
        **calls, "context.mode": lambda: attend("ring" if other else "all_gather"),
        "context.unshard.width": lambda: gather(4 + other, torch.float32),
        "context.unshard.dtype": lambda: gather(4, dtype),
    }  # fmt: skip


def models(other: int) -> None:
    """A model over a mesh whose axes this rank divides otherwise."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor" if other else "shard",))
    parallelize(torch.nn.Module(), mesh, param_dtype=torch.float32, reduce_dtype=torch.float32)  # type: ignore[arg-type]


def main(transport: str, seeds: int) -> None:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    overlap, other = Overlap(group, transport=transport), int(dist.get_rank() == dist.get_world_size() - 1)
    calls = {**products(overlap, other), **experts(overlap, other), **context(other)}
    # a group of its own: an overlap that is open stays as it is
    another, way = dist.new_group(), "sequential" if other else "pipelined"
    calls["overlap.transport"] = lambda: Overlap(another, transport=way)
    calls["models.mesh"] = lambda: models(other)
    for seed in range(seeds):
        calls |= splits(overlap, seed % overlap.size == overlap.rank, seed)
    for name, call in calls.items():
        try:
            call()
        except CollectiveMismatch as error:
            print(name, error, flush=True)
        else:
            print(name, "no error", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
