"""Fine-tune a small model by every objective, on records of a made-up task: `python examples/fine_tune.py --steps 20`.

SFT first; on its weights DPO with LoRA, KTO, a reward model and a policy with advantages; then a student that learns
from them. For your own: name a Hugging Face folder in checkpoint.load, and jsonl, parquet or hf:ORG/NAME in data.train
(docs/fine-tuning.md has each record's keys).
"""

import argparse
import json
from pathlib import Path
from typing import Any

from powertrain.train import train

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--folder", type=Path, default=Path("runs/fine_tune"))
options = parser.parse_args()

NUMBERS = range(2, 50)
RECORDS: dict[str, list[dict[str, Any]]] = {
    "sft": [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in NUMBERS],
    "dpo": [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n - 1)} for n in NUMBERS],
    "kto": [{"prompt": f"{n}+1=", "completion": str(n + 1 - n % 2), "label": n % 2 == 0} for n in NUMBERS],
    "reward": [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n - 1)} for n in NUMBERS],
    # what a sampler and a judge would give
    "policy": [{"prompt": f"{n}+1=", "completion": str(n + 1 - n % 2), "advantage": (-1.0) ** n} for n in NUMBERS],
    "distill": [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in NUMBERS],
}


def run(objective: str, load: str | None = None, **settings: Any) -> str:
    """Train by one objective, from the weights at `load`; the checkpoint's path."""
    folder = options.folder / objective
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "records.jsonl"
    data.write_text("\n".join(map(json.dumps, RECORDS[objective])))
    result = train(
        {
            "model": {
                "architecture": "llama", "hidden_size": 64, "num_layers": 2, "num_heads": 4, "intermediate_size": 128,
                "max_position_embeddings": 64,
            },
            "data": {"train": str(data), "split": "90, 10, 0", "num_workers": 0, "cache_folder": str(folder / "cache")},
            "train": {
                "objective": objective, "steps": options.steps, "seq_length": 64, "micro_batch_size": 4,
                "precision": "fp32", "spike_factor": 0, **settings,
            },
            "optimizer": {"lr": 3e-3},
            "checkpoint": {"load": load, "finetune": load is not None},
            "evaluation": {"steps": 2},
            "logging": {"folder": str(folder), "tensorboard": False},
        }
    )  # fmt: skip
    print(f"{objective}: loss {result.loss:.3f}, held out {result.evaluations['validation']:.3f}; {folder}/report.html")
    return str(result.checkpoint)


tuned = run("sft")
run("dpo", tuned, lora={"rank": 8, "alpha": 16})
run("kto", tuned)
run("reward", tuned)
run("policy", tuned, policy={"kl_weight": 0.01})
run("distill", distill={"teacher": tuned})
