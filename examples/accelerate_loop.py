"""A loop of one's own with accelerate: patch first, then prepare. `accelerate launch examples/accelerate_loop.py`."""

import argparse

from accelerate import Accelerator
from text import rows
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

import powertrain

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()

config = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config)
powertrain.patch(model)
optimizer = powertrain.AdamW(model.parameters(), lr=2e-3)

accelerator = Accelerator()
loader = DataLoader(list(rows(4 * options.steps)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for batch in loader:
    loss = model(input_ids=batch, labels=batch).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
accelerator.print(f"loss {losses[0]:.3f} to {losses[-1]:.3f} over {len(losses)} steps")
