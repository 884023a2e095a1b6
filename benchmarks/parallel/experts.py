"""`torchrun --nproc-per-node N -m benchmarks.parallel.experts [--rounds R] [--graph] [CASE...]`: experts, bf16.

Beside each other, in turns: the products alone, the two all-to-alls alone (NCCL), one after the other (the twin), and
overlapped over each transport there is, exact and with a capacity a quarter above the mean; then with backward. All
ranks start a shot together. Medians, of the slowest rank; the host's wait for counts is inside where there is one.
--graph captures the forward with a capacity in a CUDA graph, replays it and compares.
"""

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.parallel.overlap import shot
from powertrain.ops.activations import gated_activation
from powertrain.ops.grouped_gemm import grouped_gemm
from powertrain.ops.moe import moe_route
from powertrain.parallel.experts import dispatch, moe_experts
from powertrain.parallel.overlap import Overlap
from powertrain.quant import Row


class Case(NamedTuple):
    name: str
    tokens: int  # of each rank
    hidden: int
    intermediate: int
    experts: int
    top_k: int


CASES = [
    Case("hidden 7168", 8192, 7168, 2048, 64, 8),
    Case("hidden 2048", 8192, 2048, 1408, 64, 8),
]
Variants = dict[str, Callable[[], Any]]


class Operands:
    """One rank's; experts are chosen at random, so loads are almost even."""

    def __init__(self, case: Case, size: int, device: str) -> None:
        def randn(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, device=device) * scale).bfloat16()

        each = case.experts // size
        self.x, self.dy = randn(case.tokens, case.hidden), randn(case.tokens, case.hidden)
        self.gate_up = randn(each, 2 * case.intermediate, case.hidden, scale=case.hidden**-0.5)
        self.down = randn(each, case.hidden, case.intermediate, scale=case.intermediate**-0.5)
        logits = torch.randn(case.tokens, case.experts, device=device)
        self.weights, self.experts = moe_route(logits, top_k=case.top_k, normalize=True)
        self.leaves = [self.x, self.weights, self.gate_up, self.down]
        self.capacity = case.tokens * case.top_k * 5 // (4 * size)

    def forward(self, overlap: Overlap, **options: Any) -> Tensor:
        return moe_experts(self.x, self.weights, self.experts, self.gate_up, self.down, overlap, **options)

    def both(self, overlap: Overlap, **options: Any) -> list[Tensor]:
        for t in self.leaves:
            t.requires_grad_()
        y = self.forward(overlap, **options)
        grads = torch.autograd.grad(y, self.leaves, self.dy)
        for t in self.leaves:
            t.requires_grad_(False)
        return [y.detach(), *grads]


def forward_variants(o: Operands, case: Case, overlaps: dict[str, Overlap]) -> Variants:
    first = next(iter(overlaps.values()))
    found = dispatch(o.x, o.experts, case.experts, first)
    rows, splits = found.rows.contiguous(), found.route.splits

    def products() -> Tensor:
        z = grouped_gemm(rows, o.gate_up, found.offsets)
        return grouped_gemm(gated_activation(z, "swiglu"), o.down, found.offsets)

    def collectives() -> None:
        sent = first.transport.all_to_all(rows, splits.back)
        first.transport.all_to_all(sent, splits)

    variants: Variants = {"products": products, "all-to-alls": collectives}
    for suffix, options in (("", {}), (", capacity", {"capacity": o.capacity})):
        variants[f"sequential{suffix}"] = partial(o.forward, first, way="sequential", **options)
        for name, overlap in overlaps.items():
            variants[f"{name}{suffix}"] = partial(o.forward, overlap, way="overlapped", **options)
    return variants | fp8_rows(o.forward, overlaps)


def fp8_rows(call: Callable[..., Any], overlaps: dict[str, Overlap]) -> Variants:
    """Rows to the experts in FP8; results, and gradients, in bfloat16."""
    first = next(iter(overlaps.values()))
    variants: Variants = {"sequential, FP8 rows": partial(call, first, way="sequential", wire=Row())}
    for name, overlap in overlaps.items():
        variants[f"{name}, FP8 rows"] = partial(call, overlap, way="overlapped", wire=Row())
    return variants


def both_variants(o: Operands, overlaps: dict[str, Overlap]) -> Variants:
    first = next(iter(overlaps.values()))
    variants: Variants = {"sequential": partial(o.both, first, way="sequential")}
    variants |= {name: partial(o.both, overlap, way="overlapped") for name, overlap in overlaps.items()}
    return variants | fp8_rows(o.both, overlaps)


def check(o: Operands, overlaps: dict[str, Overlap]) -> None:
    """Overlapped against sequential, and against itself."""
    first = next(iter(overlaps.values()))
    for options in ({}, {"capacity": o.capacity}):
        expected = o.both(first, way="sequential", **options)
        for name, overlap in overlaps.items():
            found, again = (o.both(overlap, way="overlapped", **options) for _ in range(2))
            for what, f, a, e in zip(("y", "dx", "dweights", "dgate_up", "ddown"), found, again, expected, strict=True):
                error = ((f.float() - e.float()).norm() / e.float().norm()).item()
                assert error < 1e-2, f"{name} {options}: {what}: relative error {error}"
                assert torch.equal(f, a), f"{name} {options}: {what} differs from call to call"


def measure(variants: Variants, group: Any, rounds: int) -> dict[str, float]:
    """Milliseconds of the slowest rank."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(rounds + 1):
        for name, call in variants.items():
            time.sleep(0.005)
            milliseconds = shot(call, group, 1.0)
            if round_:
                samples[name].append(milliseconds)
    found = torch.tensor([statistics.median(samples[name]) for name in variants], device="cuda")
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return dict(zip(variants, found.tolist(), strict=True))


def line(case: Case, what: str, ms: dict[str, float]) -> str:
    sequential = ms["sequential"]
    times = "  ".join(
        f"{name} {value:.3f}" + (f" ({sequential / value:.2f}x)" if name in OVERLAPPED else "")
        for name, value in ms.items()
    )
    exposed = ""
    if "products" in ms:
        shares = [(ms[name] - ms["products"]) / ms["all-to-alls"] for name in OVERLAPPED if name in ms]
        exposed = "  | exposed " + ", ".join(f"{share:.0%}" for share in shares)
    return f"{case.name}, {case.experts} experts, top {case.top_k}, {what}, ms: {times}{exposed}"


OVERLAPPED = ("symmetric", "pipelined")


def open_overlaps() -> dict[str, Overlap]:
    """One for each transport; a group has one, so the second has a group of its own."""
    world = dist.group.WORLD
    assert world is not None
    best = Overlap(world)
    if best.transport.name == "pipelined":
        return {"pipelined": best}
    return {best.transport.name: best, "pipelined": Overlap(dist.new_group(), transport="pipelined")}


def replayed(o: Operands, overlap: Overlap) -> str:
    """The forward with a capacity as a graph: the same bits as without, for other values too."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(2):
            o.forward(overlap, way="overlapped", capacity=o.capacity)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = o.forward(overlap, way="overlapped", capacity=o.capacity)
    for _ in range(3):
        o.x.copy_(torch.randn_like(o.x))
        graph.replay()
        found = y.clone()
        torch.cuda.synchronize()
        with torch.no_grad():
            expected = o.forward(overlap, way="overlapped", capacity=o.capacity)
        assert torch.equal(found, expected), "a replay differs from the call"
    return "3 replays of a graph: the same bits as the calls"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="parts of case names; all if none")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--graph", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    overlaps = open_overlaps()
    first = next(iter(overlaps.values()))
    torch.manual_seed(rank)
    for case in CASES:
        if options.cases and not any(part in case.name for part in options.cases):
            continue
        o = Operands(case, first.size, "cuda")
        check(o, overlaps)
        with torch.no_grad():
            forward = measure(forward_variants(o, case, overlaps), first.group, options.rounds)
        if rank == 0:
            print(line(case, "forward", forward), flush=True)
        both = measure(both_variants(o, overlaps), first.group, options.rounds)
        if rank == 0:
            print(line(case, "forward and backward", both), flush=True)
        if options.graph:
            said = replayed(o, first)
            if rank == 0:
                print(f"{case.name}: {said}", flush=True)
        del o
        torch.cuda.empty_cache()
    for overlap in overlaps.values():
        overlap.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
