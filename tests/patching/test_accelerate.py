"""A loop of accelerate with a patched model, our AdamW and accelerate's clipping, against one with neither."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import powertrain

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 64,
}


class Loop:
    """Model, optimizer, data and schedule as accelerate prepares them; a step is two batches."""

    def __init__(self, ours: bool, precision: str, scaler: bool) -> None:
        from accelerate.state import AcceleratorState

        # accelerate's settings are the process's
        AcceleratorState._reset_state(True)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**CONFIG))
        if ours:
            powertrain.patch(model)
        kind: Any = powertrain.AdamW if ours else torch.optim.AdamW
        optimizer = kind(model.parameters(), lr=1e-2, **({} if ours else {"fused": True}))
        schedule = transformers.get_scheduler("cosine", optimizer, num_warmup_steps=1, num_training_steps=6)
        self.accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
        if scaler:
            # as with fp16 on a GPU; the second step overflows
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=1)
        batches = DataLoader(torch.randint(0, 64, (48, 16)).tolist(), batch_size=4, collate_fn=torch.tensor)
        prepared = self.accelerator.prepare(model, optimizer, batches, schedule)
        self.model, self.optimizer, self.batches, self.schedule = prepared

    def run(self, batches: int) -> list[tuple[float, ...]]:
        """Loss, norm of the gradients and learning rate of each batch."""
        seen, norm = [], 0.0
        for batch, _ in zip(self.batches, range(batches), strict=False):
            with self.accelerator.accumulate(self.model):
                loss = self.model(input_ids=batch, labels=batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = float(self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5))
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            seen.append((float(loss), norm, self.schedule.get_last_lr()[0]))
        return seen


@pytest.mark.parametrize("precision, scaler", [("no", False), ("bf16", False), ("no", True)])
def test_a_loop_is_that_of_torch_and_resumes(precision: str, scaler: bool, tmp_path: Path) -> None:
    ours, theirs = Loop(True, precision, scaler), Loop(False, precision, scaler)
    expected = torch.tensor(theirs.run(8))
    torch.testing.assert_close(torch.tensor(ours.run(8)), expected, rtol=1e-3, atol=1e-4, equal_nan=True)
    ours.accelerator.save_state(tmp_path)
    again = Loop(True, precision, scaler)
    again.accelerator.load_state(tmp_path)
    # as text, in which nan is nan
    assert str(ours.run(4)) == str(again.run(4))
