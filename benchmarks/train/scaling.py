"""`torchrun --nproc-per-node N -m benchmarks.train.scaling [CASE...]`: weak scaling, a GPU's batch the same on 1 and N.

In turns, in the same processes: every GPU alone (the trainer without process groups), FSDP over all, tensor parallel
over pairs. The efficiency is tokens/s a GPU beside that of the GPUs alone, which run at once and share power and heat.
"""

import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.train.throughput import CASES, Case, RandomTokens, _Data, run_config
from powertrain.models.flops import flops_per_token
from powertrain.train.config.schema import ParallelConfig
from powertrain.train.ranks import Ranks, arrange, connect, disconnect, read_launch_env
from powertrain.train.reporting.peak_flops import peak_tflops
from powertrain.train.trainer import Trainer

Step = Callable[[], torch.Tensor]


def trainer(case: Case, ranks: Ranks, parallel: ParallelConfig) -> tuple[Trainer, Step]:
    """One step of the trainer, on a batch that is on the device already."""
    config = run_config(case).model_copy(update={"parallel": parallel})
    data: Any = _Data(RandomTokens(config.model.vocab_size, case.seq_length))
    made = Trainer(config, ranks, data)
    batch = next(made._stream()).to(ranks.device)

    def step() -> torch.Tensor:
        loss = made._forward_backward([batch])
        made.optimizer.step(1e-4)
        return loss[0]

    return made, step


def measure(name: str, rounds: int = 5, steps: int = 4) -> list[str]:
    here, case = read_launch_env(), CASES[name]
    torch.cuda.set_device(here.device)
    sharded = ParallelConfig()
    ranks = connect(here, run_config(case))
    variants = {
        "each GPU alone": (case, Ranks(here.device), sharded),
        f"FSDP, {here.world_size} GPUs": (case, ranks, sharded),
    }
    if here.world_size % 2 == 0:
        # the pair shares a batch twice as large: as many tokens a GPU
        pairs = ParallelConfig(tensor=2)
        double = replace(case, batch=2 * case.batch)
        shape = run_config(double).model_copy(update={"parallel": pairs})
        variants["tensor 2"] = (double, arrange(here, shape), pairs)
    made: dict[str, tuple[Trainer, Step]] = {}
    facts: dict[str, str] = {}
    for variant, (shaped, whose, parallel) in variants.items():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        made[variant] = trainer(shaped, whose, parallel)
        losses = [float(made[variant][1]()) for _ in range(3)]
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        facts[variant] = f"{peak:6.1f} GiB  losses {', '.join(f'{loss:.4f}' for loss in losses)}"
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    for _ in range(rounds):
        for variant in variants:
            times[variant].append(_seconds(made[variant][1], steps, here.device))
    flops = flops_per_token(made["each GPU alone"][0].model, case.seq_length)
    best = peak_tflops(torch.cuda.get_device_name()) or float("nan")
    tokens = case.batch * case.seq_length
    alone = statistics.median(times["each GPU alone"])
    lines = []
    for variant, values in times.items():
        seconds = statistics.median(values)
        mfu = tokens / seconds * flops / best / 1e12
        lines.append(
            f"{name:14} {variant:16} {seconds * 1e3:8.1f} ms ±{(max(values) - min(values)) / seconds:4.1%}  "
            f"{tokens / seconds:8.0f} tokens/s a GPU  MFU {mfu:5.1%}  efficiency {alone / seconds:6.1%}  "
            f"{facts[variant]}"
        )
    disconnect(ranks)
    return lines if here.rank == 0 else []


def _seconds(step: Step, steps: int, device: torch.device) -> float:
    """Of a step on the slowest rank."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    start.record()
    for _ in range(steps):
        step()
    end.record()
    torch.cuda.synchronize()
    seconds = torch.tensor(start.elapsed_time(end) / 1e3 / steps, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or ["llama-1.2b"]:
        for line in measure(chosen):
            print(line, flush=True)
