"""A LightningModule of our layers' functions and optimizer: `python examples/lightning_module.py`."""

import argparse

import lightning
import torch
from text import rows
from torch import Tensor
from torch.utils.data import DataLoader

import powertrain
from powertrain.models import build, configure


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = build(configure(preset="pythia-70m", vocab_size=256, num_layers=2, hidden_size=64), device="cpu")
        self.model.init_weights(seed=0)
        self.losses: list[float] = []

    def training_step(self, batch: Tensor) -> Tensor:
        loss = self.model(batch[:, :-1], batch[:, 1:])
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return powertrain.AdamW(self.parameters(), lr=2e-3)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()
module = Model()
trainer = lightning.Trainer(
    max_steps=options.steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, gradient_clip_val=1.0,
)  # fmt: skip
trainer.fit(module, DataLoader(list(rows(4 * options.steps)), batch_size=4))
print(f"loss {module.losses[0]:.3f} to {module.losses[-1]:.3f} over {trainer.global_step} steps")
