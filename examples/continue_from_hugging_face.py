"""Continue the training of a Hugging Face checkpoint, and write one again.

`python examples/continue_from_hugging_face.py --model FOLDER --data book.txt`; without --model a tiny one is made.
"""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from powertrain.train import train
from powertrain.train.checkpoint.convert import convert
from powertrain.train.checkpoint.load import open_weights

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", type=Path, help="a folder with config.json and safetensors")
parser.add_argument("--data", default="quickstart")
parser.add_argument("--tokenizer", default="bytes")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--folder", type=Path, default=Path("runs/continued"))
options = parser.parse_args()

if options.model is None:
    torch.manual_seed(0)
    options.model = options.folder / "start"
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256,
        max_position_embeddings=128,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(options.model)

model = open_weights(options.model).config  # the architecture's fields, from config.json
result = train(
    {
        "model": model.model_dump(),
        "data": {"train": options.data, "tokenizer": options.tokenizer, "num_workers": 0},
        "train": {"steps": options.steps, "seq_length": 64, "micro_batch_size": 4, "precision": "fp32"},
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"load": str(options.model), "finetune": True},
        "logging": {"folder": str(options.folder)},
    }
)
exported = options.folder / "hugging-face"
shutil.rmtree(exported, ignore_errors=True)  # of an earlier start; `convert` replaces nothing
convert(open_weights(options.folder), exported, "hf")
trained = AutoModelForCausalLM.from_pretrained(exported)
loss = "no step was left" if result.loss is None else f"loss {result.loss:.3f}"
print(f"{loss} after {result.steps} steps; {type(trained).__name__} in {exported}")
