"""A trained model out of a checkpoint, without its optimizer."""

from pathlib import Path

import torch

from powertrain.models import build
from powertrain.models.causal_lm import CausalLM
from powertrain.train import checkpoint
from powertrain.train.config import RunConfig
from powertrain.train.optim import DTYPES


def load_model(path: Path, *, device: torch.device, dtype: torch.dtype | None = None) -> tuple[CausalLM, RunConfig]:
    """The model of a checkpoint, or of the newest in a run's folder, in evaluation mode, and the run's config.

    dtype   None: what the run computed in, float32 on a CPU
    Raises FileNotFoundError where there is no checkpoint, CheckpointError for a damaged one.
    """
    found = checkpoint.find(path) or checkpoint.find(path / "checkpoints")
    if found is None:
        raise FileNotFoundError(f"{path} must be a checkpoint or a folder of checkpoints (step_…), got none")
    config = RunConfig.model_validate(checkpoint.read_facts(found)["config"])
    dtype = dtype or (DTYPES[config.train.precision] if device.type == "cuda" else torch.float32)
    model = build(config.model).to(dtype)
    model.to_empty(device=device)
    checkpoint.load(found, {f"model.{name}": tensor for name, tensor in model.state_dict().items()})
    return model.eval(), config
