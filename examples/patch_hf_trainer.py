"""A Hugging Face model under transformers' Trainer, on our kernels: one line more, `powertrain.patch(model)`."""

import argparse

from text import rows
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

import powertrain

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()

config = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config)  # yours: AutoModelForCausalLM.from_pretrained(...)
report = powertrain.patch(model, explain=True)

arguments = TrainingArguments(
    "runs/patched", max_steps=options.steps, per_device_train_batch_size=4, learning_rate=2e-3, logging_steps=1,
    report_to=[], save_strategy="no", disable_tqdm=True,
)  # fmt: skip
data = [{"input_ids": row, "labels": row} for row in rows(64)]
result = Trainer(model, arguments, train_dataset=data).train()
powertrain.unpatch(model)
print(
    f"loss {result.training_loss:.3f} over {result.global_step} steps; {len(report.replaced)} kinds of parts replaced"
)
