"""Fine-tune a small model with each objective, on sums such as "7+1=": `python examples/fine_tune.py --steps 20`.

SFT starts from random weights. DPO with LoRA, KTO, the reward model and the policy start from the weights of SFT, which
are also the teacher of the distilled model. For a model and data of your own set checkpoint.load to a Hugging Face
folder and data.train to jsonl, parquet or hf:ORG/NAME (docs/fine-tuning.md has the keys of a record).
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
    # completions as a sampler and advantages as a reward function would give them
    "policy": [{"prompt": f"{n}+1=", "completion": str(n + 1 - n % 2), "advantage": (-1.0) ** n} for n in NUMBERS],
    "distill": [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in NUMBERS],
}


def run(objective: str, load: str | None = None, **settings: Any) -> str:
    """Train with one objective, from the weights at `load`. Returns the checkpoint's path."""
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
    if result.loss is None:  # a second start of the same command
        print(f"{objective}: no step was left, or the first rank has the loss; {folder}/report.html")
    else:
        validation = result.evaluations["validation"]
        print(f"{objective}: loss {result.loss:.3f}, validation {validation:.3f}; {folder}/report.html")
    return str(result.checkpoint)


tuned = run("sft")
run("dpo", tuned, lora={"rank": 8, "alpha": 16})
run("kto", tuned)
run("reward", tuned)
run("policy", tuned, policy={"kl_weight": 0.01})
run("distill", distill={"teacher": tuned})
