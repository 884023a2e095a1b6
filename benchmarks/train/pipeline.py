"""`torchrun --nproc-per-node N -m benchmarks.train.pipeline [CASE...]`: pipeline stages beside FSDP2.

In turns, in the same processes: FSDP2 over all ranks, then as many pipeline stages by each schedule. Every variant
takes the same micro-batches in a step: their losses are compared. The bubble is what the schedule predicts,
(p - 1) / (v m + p - 1) with p ranks, v stages a rank and m micro-batches.
"""

import itertools
import statistics
import sys
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.train.throughput import CASES, RandomTokens, _Data, run_config
from powertrain.train.config.schema import ParallelConfig
from powertrain.train.ranks import arrange, connect, disconnect, read_launch_env
from powertrain.train.trainer import Trainer

MICRO_BATCHES = 16  # of the pipeline, in a step
MICRO_BATCH = 2  # samples


def measure(name: str, rounds: int = 3, steps: int = 1) -> list[str]:
    here, case = read_launch_env(), replace(CASES[name], batch=MICRO_BATCH)
    size = here.world_size
    if here.device.type == "cuda":
        torch.cuda.set_device(here.device)
    variants = {
        f"FSDP2, {size} GPUs": ParallelConfig(),
        "1f1b": ParallelConfig(pipeline=size),
        "1f1b, 2 virtual": ParallelConfig(pipeline=size, virtual_stages=2),
        "1f1b, 4 virtual": ParallelConfig(pipeline=size, virtual_stages=4),
    }
    first = connect(here, run_config(case))
    made, facts = {}, {}
    for variant, parallel in variants.items():
        count = MICRO_BATCHES if parallel.pipeline > 1 else MICRO_BATCHES // size
        config = run_config(case, gradient_accumulation_steps=count).model_copy(update={"parallel": parallel})
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        data: Any = _Data(RandomTokens(config.model.vocab_size, case.seq_length))
        trainer = Trainer(config, arrange(here, config), data)
        stream = trainer._stream()
        batches = [batch.to(here.device) for batch in itertools.islice(stream, count)]
        made[variant] = trainer, batches
        losses = [float(_step(*made[variant])) for _ in range(3)]
        peak = torch.tensor((torch.cuda.max_memory_allocated() - before) / 2**30, device=here.device)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        bubble = (parallel.pipeline - 1) / (parallel.virtual_stages * MICRO_BATCHES + parallel.pipeline - 1)
        facts[variant] = f"{float(peak):6.1f} GiB  bubble {bubble:5.1%}  losses {', '.join(f'{x:.4f}' for x in losses)}"
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    for _ in range(rounds):
        for variant in variants:
            times[variant].append(_seconds(made[variant], steps, here.device))
    tokens = MICRO_BATCHES * MICRO_BATCH * case.seq_length
    best = statistics.median(next(iter(times.values())))
    lines = []
    for variant, values in times.items():
        seconds = statistics.median(values)
        lines.append(
            f"{name:12} {variant:16} {seconds * 1e3:8.1f} ms  {tokens / seconds:8.0f} tokens/s  "
            f"{best / seconds:5.3f} of FSDP2  {facts[variant]}"
        )
    disconnect(first)
    return lines if here.rank == 0 else []


def _step(trainer: Trainer, batches: list[Any]) -> torch.Tensor:
    loss = trainer._forward_backward(batches)
    trainer.optimizer.step(1e-4)
    return loss[0]


def _seconds(made: tuple[Trainer, list[Any]], steps: int, device: torch.device) -> float:
    """Of a step on the slowest rank."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    start.record()
    for _ in range(steps):
        _step(*made)
    end.record()
    torch.cuda.synchronize()
    seconds = torch.tensor(start.elapsed_time(end) / 1e3 / steps, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or ["llama-1.2b"]:
        for line in measure(chosen):
            print(line, flush=True)
