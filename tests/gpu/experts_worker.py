"""`python -m tests.gpu.experts_worker OUT`, one rank: experts over several GPUs, every transport, delays, graphs."""

import json
import os
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.parallel.experts import Case, Operands, check, open_overlaps, replayed
from powertrain.parallel.overlap import Overlap

CASE = Case("small", 700, 512, 256, 16, 4)


def late(o: Operands, overlap: Overlap) -> int:
    """How many of 30 calls give other bits when ranks are late at random."""
    first, wrong, rng = o.both(overlap, way="overlapped"), 0, random.Random(overlap.rank)
    for _ in range(30):
        torch.cuda._sleep(rng.choice([0, 0, 300_000, 2_000_000]))
        found = o.both(overlap, way="overlapped")
        wrong += not all(torch.equal(f, e) for f, e in zip(found, first, strict=True))
    return wrong


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    overlaps = open_overlaps()
    first = next(iter(overlaps.values()))
    torch.manual_seed(first.rank)
    o = Operands(CASE, first.size, "cuda")
    check(o, overlaps)
    found = {"wrong": sum(late(o, overlap) for overlap in overlaps.values()), "transports": list(overlaps)}
    # more rows than ever before: memory grows between calls
    larger = Operands(CASE._replace(tokens=3000), first.size, "cuda")
    check(larger, overlaps)
    found["replayed"] = replayed(larger, first)
    (Path(sys.argv[1]) / f"{first.rank}.json").write_text(json.dumps(found))
    for overlap in overlaps.values():
        overlap.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
