"""`python -m benchmarks.train.fp8_curves [--device cuda] [--steps 400] [--out FOLDER]`: FP8 recipes beside bf16.

The same data, schedule and clipping; three seeds of bf16, and every recipe with the first seed's weights. A recipe
trains as bf16 does if its mean loss over the last 100 steps lies within the spread of the three seeds, or within 0.5 %
of the first. Text: the Python standard library's source. A model of a 1B model's widths with fewer layers.
"""

import argparse
import csv
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.train.curves import Losses
from powertrain.train.config.schema import RunConfig
from powertrain.train.data.sources import open_tokenizer
from powertrain.train.ranks import Ranks
from powertrain.train.run import open_run_data, with_vocabulary
from powertrain.train.trainer import Trainer

MODEL: dict[str, Any] = {
    "architecture": "llama", "hidden_size": 2048, "num_layers": 8, "num_heads": 16, "num_kv_heads": 4,
    "intermediate_size": 5632, "max_position_embeddings": 1024,
}  # fmt: skip
TINY: dict[str, Any] = {**MODEL, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "intermediate_size": 176}
RECIPES = ("tensor-delayed", "tensor", "row", "block")
SEEDS = (1, 2, 3)
LAST = 100  # steps that are compared


def run_config(seed: int, recipe: str, steps: int, lr: float, tiny: bool) -> RunConfig:
    sections: dict[str, Any] = {
        "model": TINY if tiny else MODEL,
        "data": {"train": "quickstart", "num_workers": 0},
        "train": {
            "steps": steps, "seed": seed, "spike_factor": 0, "precision": "bf16",
            "seq_length": 32 if tiny else 1024, "micro_batch_size": 2 if tiny else 16,
        },
        "optimizer": {"lr": lr},
        "schedule": {"warmup_steps": max(1, steps // 5)},
        "evaluation": {"at_end": False},
        "checkpoint": {"save": False},
        "fp8": {"recipe": recipe, "watch": 0} | ({"history": 16} if recipe == "tensor-delayed" else {}),
    }  # fmt: skip
    config = RunConfig(**sections)
    return with_vocabulary(config, open_tokenizer(config.data).vocab_size)


def run(seed: int, recipe: str, steps: int, lr: float, device: torch.device) -> tuple[list[float], float]:
    """The losses of a run, and its seconds."""
    config = run_config(seed, recipe, steps, lr, tiny=device.type == "cpu")
    losses = Losses()
    trainer = Trainer(config, Ranks(device), open_run_data(config, open_tokenizer(config.data), 1), [losses])
    start = time.perf_counter()
    trainer.fit()
    return list(losses), time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    device, last = torch.device(arguments.device), min(LAST, arguments.steps)
    curves: dict[str, list[float]] = {}
    ends: dict[str, float] = {}
    wanted = [(f"bf16 seed {seed}", seed, "none") for seed in arguments.seeds]
    wanted += [(recipe, arguments.seeds[0], recipe) for recipe in arguments.recipes]
    for name, seed, recipe in wanted:
        curves[name], seconds = run(seed, recipe, arguments.steps, arguments.lr, device)
        ends[name] = statistics.fmean(curves[name][-last:])
        if device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"{name:16} mean loss of the last {last} steps {ends[name]:.4f}, {seconds:.0f} s", flush=True)
        with (arguments.out / "fp8_curves.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["step", *curves])
            writer.writerows([step + 1, *row] for step, row in enumerate(zip(*curves.values(), strict=True)))
    bf16 = [end for name, end in ends.items() if name.startswith("bf16")]
    print(f"bf16 seeds: {min(bf16):.4f} to {max(bf16):.4f}")
    for recipe in arguments.recipes:
        within = min(bf16) <= ends[recipe] <= max(bf16)
        change = ends[recipe] / bf16[0] - 1
        verdict = "within the seeds" if within else "within 0.5 %" if abs(change) < 5e-3 else "OUTSIDE both"
        print(f"{recipe:16} {ends[recipe]:.4f} ({change:+.2%} of bf16 with the same seed): {verdict}")


if __name__ == "__main__":
    main()
