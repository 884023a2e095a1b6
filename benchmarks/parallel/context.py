"""`torchrun --nproc-per-node N -m benchmarks.parallel.context`: attention over N GPUs beside N times one GPU's rate.

In turns, in the same processes: every GPU alone on the whole sequence (they run at once and share power and heat), then
each mode, then "all_gather" with nothing sent, which is what its compute takes. Time is that of the slowest rank, the
median of the rounds; efficiency is one GPU's time / (N * time). A mode is timed once it has passed the judge on a
shorter sequence. Without GPUs it runs on gloo and times the host, which says nothing but that it runs.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from powertrain.ops.attention import attention, varlen_attention
from powertrain.parallel.context.api import ContextParallel, Mode, context_parallel
from powertrain.parallel.context.point_to_point import ContextGroup, Transfer
from powertrain.parallel.context.sharding import Sharding

MODES: tuple[Mode, ...] = ("all_gather", "ring", "all_to_all")
_HEAD_START = 2_000_000  # cycles, about 1 ms: more than a forward and backward of 4 ranks takes to launch


class Silent(ContextGroup):
    """Sends nothing: what is received is what was in memory."""

    def exchange(self, sent: Tensor | None, to: int, received: Tensor | None, source: int) -> Transfer:
        if received is not None:
            received.zero_()
        return Transfer([])


def inputs(args: argparse.Namespace, tokens: int, device: torch.device) -> list[Tensor]:
    """query, key, value and the gradient of out, whole, the same on all ranks."""
    torch.manual_seed(0)
    heads = (args.heads, args.kv_heads, args.kv_heads, args.heads)
    return [torch.randn(1, tokens, h, args.head_dim, device=device, dtype=torch.bfloat16) for h in heads]


def steps(function: Callable[..., Tensor], made: list[Tensor]) -> dict[str, Callable[[], Any]]:
    """Forward without gradients, and backward alone."""
    *leaves, grad = (x.detach() for x in made)
    leaves = [x.requires_grad_() for x in leaves]
    out = function(*leaves)

    def forward() -> Tensor:
        with torch.no_grad():
            return function(*leaves)

    return {"fwd": forward, "bwd": lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)}


def judge(cp: ContextParallel, args: argparse.Namespace, mode: Mode, device: torch.device) -> None:
    """Raise unless a mode is as near to float64 as one GPU is, twice: one sequence, then packed documents."""
    tokens = min(args.tokens, 2000) + 1
    made = inputs(args, tokens, device)
    starts = torch.tensor([0, 1, 1, tokens // 3, tokens])

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attention(q, k, v, is_causal=True)
        return out

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = varlen_attention(q, k, v, starts.to(device), is_causal=True)
        return out

    same = (cp.sharding(tokens), dense, made, 1)
    documents = (cp.sharding(cu_seqlens=starts), packed, [x[0] for x in made], 0)
    for sharding, one_gpu, tensors, dim in (same, documents):
        ours = results(partial(attend, cp, sharding, mode), list(sharding.shard(*tensors, dim=dim)))
        ours = [cp.unshard(x, sharding, dim=dim) for x in ours]
        plain, whole = results(one_gpu, tensors), results(one_gpu, [x.double() for x in tensors])
        for name, x, one, reference in zip(("out", "dq", "dk", "dv"), ours, plain, whole, strict=True):
            error, allowed = (error_of(y, reference) for y in (x, one))
            if not error <= 2 * allowed + 2e-3:
                raise AssertionError(f"{mode} {name}, dim {dim}: relative error {error:.2e}, one GPU's {allowed:.2e}")


def attend(cp: ContextParallel, sharding: Sharding, mode: Mode, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return cp.attention(q, k, v, sharding, is_causal=True, mode=mode)


def results(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """out, dq, dk, dv."""
    *leaves, grad = (x.detach() for x in tensors)
    leaves = [x.requires_grad_() for x in leaves]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def error_of(x: Tensor, reference: Tensor) -> float:
    return float((x.double() - reference).norm() / reference.norm())


def timed(function: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of the slowest rank."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_HEAD_START)
        start.record()
        function()
        end.record()
        end.synchronize()
        elapsed = start.elapsed_time(end)
    else:
        began = time.perf_counter()
        function()
        elapsed = (time.perf_counter() - began) * 1e3
    slowest = torch.tensor([elapsed], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, size in (("tokens", 65536), ("heads", 32), ("kv-heads", 8), ("head-dim", 128), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=size)
    args = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    assert dist.group.WORLD is not None
    cp = context_parallel(dist.group.WORLD)
    compare(cp, args, device)
    dist.destroy_process_group()


def compare(cp: ContextParallel, args: argparse.Namespace, device: torch.device) -> None:
    for mode in MODES:
        judge(cp, args, mode, device)
    made = inputs(args, args.tokens, device)
    sharding = cp.sharding(args.tokens)
    silent = context_parallel(cp.peers.group)
    silent.peers = Silent(cp.peers.group)

    alone = f"one {device.type} alone"
    shards = list(sharding.shard(*made))
    variants = {alone: steps(lambda q, k, v: attention(q, k, v, is_causal=True), made)}
    variants |= {mode: steps(partial(attend, cp, sharding, mode), shards) for mode in MODES}
    variants["nothing sent"] = steps(partial(attend, silent, sharding, "all_gather"), shards)
    samples: dict[tuple[str, str], list[float]] = {(n, p): [] for n, both in variants.items() for p in both}
    for turn in range(args.rounds + 2):
        for (name, part), times in samples.items():
            found = timed(variants[name][part], device)
            if turn >= 2:
                times.append(found)
    if cp.rank == 0:
        query, key, value, _ = shards
        print(cp.explain(query, key, value, sharding, is_causal=True))
        report(samples, args, alone, cp.world_size)


def report(samples: dict[tuple[str, str], list[float]], args: argparse.Namespace, alone: str, world_size: int) -> None:
    label = f"T={args.tokens} H={args.heads}/{args.kv_heads} D={args.head_dim} causal bf16"
    flops = 4 * args.head_dim * args.heads * args.tokens * (args.tokens + 1) / 2
    both = {name: [sum(x) for x in zip(samples[name, "fwd"], samples[name, "bwd"], strict=True)] for name, _ in samples}
    rows = {**samples, **{(name, "fwd+bwd"): times for name, times in both.items()}}
    for part, share in (("fwd", 1.0), ("bwd", 2.5), ("fwd+bwd", 3.5)):
        whole = statistics.median(rows[alone, part])
        for name in both:
            times = rows[name, part]
            ms, spread = statistics.median(times), (max(times) - min(times)) / statistics.median(times)
            gpus = 1 if name == alone else world_size
            print(
                f"{label} {part:7} | {name:14} | {ms:9.3f} ms ±{spread:4.0%} | "
                f"{share * flops / gpus / ms / 1e9:6.1f} TFLOP/s a GPU | {whole / gpus / ms:5.1%} of {gpus}x one"
            )


if __name__ == "__main__":
    main()
