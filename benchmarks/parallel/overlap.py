"""`torchrun --nproc-per-node N -m benchmarks.parallel.overlap [--rounds R] [CASE...]`: products that travel, bf16.

Beside each other, in turns: the product alone, the collective alone, one after the other (NCCL, cuBLAS), torch's
async-TP operators, and ours, forced to each way and as the planner chooses. All ranks start a shot together: a sleep on
every GPU, then a small all-reduce, then the shot. Medians, of the slowest rank. The last column is the host's time.
"""

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from powertrain.parallel.collective_matmul import all_gather_gemm, gemm_reduce_scatter
from powertrain.parallel.overlap import Overlap
from powertrain.parallel.transport.base import Choice


class Case(NamedTuple):
    name: str
    kind: str
    width: int  # of the whole weight
    depth: int


CASES = [
    Case("Llama-70B qkv", "gather", 10240, 8192),
    Case("Llama-70B fc1", "gather", 57344, 8192),
    Case("Llama-8B qkv", "gather", 6144, 4096),
    Case("hidden 8192 fc1", "gather", 32768, 8192),
    Case("hidden 4096 fc1", "gather", 16384, 4096),
    Case("Llama-70B proj", "scatter", 8192, 8192),
    Case("Llama-70B fc2", "scatter", 8192, 28672),
    Case("Llama-8B proj", "scatter", 4096, 4096),
    Case("hidden 8192 fc2", "scatter", 8192, 32768),
    Case("hidden 4096 fc2", "scatter", 4096, 16384),
]
Variants = dict[str, Callable[[], Any]]


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def forced(overlap: Overlap, choice: Choice | None, call: Callable[[], Any]) -> Callable[[], Any]:
    """The call, with the planner's choices replaced for its time."""

    def run() -> Any:
        planner, chosen = overlap.planner, overlap.planner._chosen
        if choice is None:
            return call()
        planner.choices.clear()
        planner._chosen = lambda product: choice  # type: ignore[method-assign]
        try:
            return call()
        finally:
            planner._chosen = chosen  # type: ignore[method-assign]
            planner.choices.clear()

    return run


WAYS = {
    "ours, chunked": Choice("chunked", "forced"),
    "ours, fused": Choice("fused", "forced"),
    "ours, planned": None,
}


def gather_variants(case: Case, rows: int, overlap: Overlap) -> Variants:
    size, group = overlap.size, overlap.group
    x, weight = randn(rows // size, case.depth), randn(case.width // size, case.depth, scale=case.depth**-0.5)
    whole, y = randn(rows, case.depth), torch.empty(rows, case.width // size, device="cuda", dtype=torch.bfloat16)
    gathered = torch.empty_like(whole)

    def sequential() -> Tensor:
        dist.all_gather_into_tensor(gathered, x, group=group)
        return torch.mm(gathered, weight.T)

    def ours() -> Tensor:
        found: Tensor = all_gather_gemm(x, weight, overlap)
        return found

    return {
        "product": lambda: torch.mm(whole, weight.T, out=y),
        "collective": lambda: dist.all_gather_into_tensor(gathered, x, group=group),
        "sequential": sequential,
        "torch async-TP": lambda: torch.ops.symm_mem.fused_all_gather_matmul(x, [weight.T], 0, group.group_name)[1][0],
        **{name: forced(overlap, choice, ours) for name, choice in WAYS.items()},
    }


def scatter_variants(case: Case, rows: int, overlap: Overlap) -> Variants:
    size, group = overlap.size, overlap.group
    x, weight = randn(rows, case.depth // size), randn(case.width, case.depth // size, scale=case.depth**-0.5)
    y = torch.empty(rows, case.width, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(rows // size, case.width, device="cuda", dtype=torch.bfloat16)

    def sequential() -> Tensor:
        dist.reduce_scatter_tensor(out, torch.mm(x, weight.T), group=group)
        return out

    def ours() -> Tensor:
        return gemm_reduce_scatter(x, weight, overlap)

    return {
        "product": lambda: torch.mm(x, weight.T, out=y),
        "collective": lambda: dist.reduce_scatter_tensor(out, y, group=group),
        "sequential": sequential,
        "torch async-TP": lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(
            x, weight.T, "sum", 0, group.group_name
        ),
        **{name: forced(overlap, choice, ours) for name, choice in WAYS.items()},
    }


def check(variants: Variants) -> None:
    """Ours against the sequential result."""
    expected = variants["sequential"]().float()
    for name in WAYS:
        error = (variants[name]().float() - expected).norm() / expected.norm()
        assert error < 1e-2, f"{name}: relative error {error}"


_small: list[Tensor] = []


def shot(call: Callable[[], Any], group: Any, milliseconds: float) -> float:
    if not _small:
        _small.append(torch.zeros(1, device="cuda"))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(int(milliseconds * 1.8e6))
    dist.all_reduce(_small[0], group=group)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def measure(variants: Variants, overlap: Overlap, rounds: int) -> dict[str, tuple[float, float]]:
    """(milliseconds of the slowest rank, host microseconds) of each variant."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for call in variants.values():
        for _ in range(2):
            call()
    for _ in range(rounds):
        for name, call in variants.items():
            time.sleep(0.005)
            samples[name].append(shot(call, overlap.group, 1.0))
    host = {}
    for name, call in variants.items():
        torch.cuda.synchronize()
        torch.cuda._sleep(int(20e6))
        begin = time.perf_counter()
        for _ in range(8):
            call()
        host[name] = (time.perf_counter() - begin) / 8 * 1e6
        torch.cuda.synchronize()
    found = torch.tensor([[statistics.median(samples[name]), host[name]] for name in variants], device="cuda")
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=overlap.group)
    return {name: (ms, us) for name, (ms, us) in zip(variants, found.tolist(), strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="parts of case names; all if none")
    parser.add_argument("--rows", type=int, nargs="*", default=[8192])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    group = dist.group.WORLD
    assert group is not None
    overlap = Overlap(group)
    torch.manual_seed(rank)
    with torch.no_grad():
        for rows in options.rows:
            for case in CASES:
                if options.cases and not any(part in case.name for part in options.cases):
                    continue
                make = gather_variants if case.kind == "gather" else scatter_variants
                variants = make(case, rows, overlap)
                check(variants)
                found = measure(variants, overlap, options.rounds)
                if rank == 0:
                    print(_line(case, rows, found), flush=True)
        if rank == 0:
            print(overlap.explain())
    overlap.close()
    dist.destroy_process_group()


def _line(case: Case, rows: int, found: dict[str, tuple[float, float]]) -> str:
    ms = {name: value for name, (value, _) in found.items()}
    ours = ms["ours, planned"]
    exposed = (ours - ms["product"]) / ms["collective"]
    times = "  ".join(f"{name} {value:.3f}" for name, value in ms.items())
    host = "/".join(f"{us:.0f}" for _, us in found.values())
    return (
        f"{case.name:16} {case.kind:8} M {rows}: {times}  | {ms['sequential'] / ours:.2f}x sequential, "
        f"{ms['torch async-TP'] / ours:.2f}x async-TP, exposed {exposed:.0%}, host {host} us"
    )


if __name__ == "__main__":
    main()
