"""Pretrain a small Llama on Python's own source, from Python: `python examples/pretrain.py --steps 200`."""

import argparse

from powertrain.train import train

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--folder", default="runs/pretrain")
options = parser.parse_args()

result = train(
    {
        "model": {
            "architecture": "llama",
            "hidden_size": 128,
            "num_layers": 4,
            "num_heads": 4,
            "intermediate_size": 384,
            "max_position_embeddings": 128,
        },
        "data": {"train": "quickstart", "tokenizer": "bytes", "num_workers": 0},
        "train": {"steps": options.steps, "seq_length": 128, "micro_batch_size": 8, "precision": "fp32"},
        "optimizer": {"lr": 3e-3},
        "evaluation": {"steps": 4},
        "logging": {"folder": options.folder},
    }
)
if result.loss is not None:  # None: all steps were taken before, or another rank prints it
    print(f"loss {result.loss:.3f}, held out {result.evaluations['validation']:.3f}; {result.checkpoint}")
