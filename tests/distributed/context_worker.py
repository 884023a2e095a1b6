"""`python -m tests.distributed.context_worker CASES OUT`, one rank of test_context: every case against the whole.

Each rank draws the same whole tensors, computes its own tokens' attention and gradients, and writes to OUT.RANK how
far they are from those of one rank in float64.
"""

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from powertrain.ops.attention import attention, varlen_attention
from powertrain.parallel.context.api import context_parallel
from powertrain.parallel.context.sharding import Sharding

DQK, DV = 12, 8


def tensors(case: dict[str, Any], num_tokens: int, heads: int, kv_heads: int) -> dict[str, Tensor]:
    torch.manual_seed(5)
    batch = [] if "documents" in case else [case.get("batch", 1)]
    sizes = {"query": (heads, DQK), "key": (kv_heads, DQK), "value": (kv_heads, DV), "grad": (heads, DV)}
    return {name: torch.randn(*batch, num_tokens, *size, dtype=torch.float64) for name, size in sizes.items()}


def options_of(case: dict[str, Any], heads: int) -> dict[str, Any]:
    options = dict(case.get("options", {}))
    if case.get("alibi"):
        options["alibi_slopes"] = torch.linspace(0.1, 0.9, heads)
    if case.get("sinks"):
        options["sinks"] = torch.linspace(-1, 2, heads, dtype=torch.float64).requires_grad_()
    if "prefix_lengths" in options:
        options["prefix_lengths"] = torch.tensor(options["prefix_lengths"])
    if "window_size" in options:
        options["window_size"] = tuple(options["window_size"])
    return options


def reference(case: dict[str, Any], made: dict[str, Tensor], options: dict[str, Any]) -> list[Tensor]:
    """out and the gradients of query, key, value and, if there are any, sinks; of one rank."""
    query, key, value = leaves = [made[name].detach().requires_grad_() for name in ("query", "key", "value")]
    if "documents" in case:
        starts = torch.tensor([0, *case["documents"]]).cumsum(0)
        out = varlen_attention(query, key, value, starts, **options)
    else:
        out = attention(query, key, value, **options)
    wanted = [*leaves, *([options["sinks"]] if "sinks" in options else [])]
    return [out.detach(), *torch.autograd.grad(out, wanted, made["grad"])]


def of_ranks(cp: Any, case: dict[str, Any], sharding: Sharding, made: dict[str, Tensor], options: Any) -> list[Tensor]:
    """The same of this rank's tokens, made whole again."""
    dim = 0 if sharding.is_packed else 1
    layout = case.get("layout")
    orders: dict[Any, tuple[int, ...]] = {"bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3)}
    order = orders.get(layout, tuple(range(made["query"].dim())))
    parts = sharding.shard(*made.values(), dim=dim)
    *leaves, grad = (x.permute(order).contiguous() for x in parts)
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = cp.attention(*leaves, sharding, **options, mode=case["mode"], layout=layout)
    wanted = [*leaves, *([options["sinks"]] if "sinks" in options else [])]
    results = [out.detach(), *torch.autograd.grad(out, wanted, grad)]
    if "sinks" in options:
        dist.all_reduce(results[4])
    whole = [cp.unshard(x.permute(order), sharding, dim=dim) for x in results[:4]]
    return whole + results[4:]


def error_of(cp: Any, case: dict[str, Any]) -> list[float]:
    heads, kv_heads = case.get("heads", [4, 2])
    lengths = case.get("documents") or [case["length"]]
    made = tensors(case, sum(lengths), heads, kv_heads)
    if "documents" in case:
        sharding = cp.sharding(cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))
    else:
        sharding = cp.sharding(case["length"])
    options = options_of(case, heads)
    ours = of_ranks(cp, case, sharding, made, options)
    whole = reference(case, made, options)
    return [(x - y).abs().max().item() if x.numel() else 0.0 for x, y in zip(ours, whole, strict=True)]


def main(cases: list[dict[str, Any]], out: str) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # and memory that nobody has written is NaN
    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    cp = context_parallel(mesh["cp"])
    results = [error_of(cp, case) for case in cases]
    torch.save(results, f"{out}.{dist.get_rank()}")
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads now and then abort a process that ends while they let go of tensors


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2])
