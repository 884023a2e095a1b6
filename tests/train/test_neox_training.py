"""Going on from DeepSpeed's checkpoints: the same bits as a run that was not interrupted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.models.pickles import load_pickle
from powertrain.train.checkpoint.load import open_weights
from powertrain.train.trainer import Trainer
from tests.train.deepspeed_files import Engine, write
from tests.train.tiny_run import At, open_trainer

STEPS, AT = 9, 5
MODEL = ("model.architecture=gpt_neox", "train.steps=9", "evaluation.every=0", "evaluation.at_end=false",
         "schedule.kind=cosine", "schedule.warmup_steps=3", "schedule.clamp=neox")  # fmt: skip
PARALLEL = ("model.parallel_residual=true",)
TIED = ("model.tie_embeddings=true",)
ENGINES: dict[str, tuple[Engine, tuple[str, ...]]] = {
    "fp32": (Engine("fp32", "fp32"), ()),
    "fp32-stages": (Engine("fp32", "fp32", pipe=2), TIED),
    "fp16-fused": (Engine("fused", "fp16", tp=2), PARALLEL),
    "fp16-fused-stages": (Engine("fused", "fp16", tp=2, pipe=2), TIED),
    "fp16-unfused-stages": (Engine("unfused", "fp16", pipe=2), ()),
    "fp16-zero": (Engine("zero", "fp16", dp=3), TIED),
    "fp16-zero-stages": (Engine("zero", "fp16", dp=2, tp=2, pipe=2), (*TIED, *PARALLEL)),
    "fp16-elastic": (Engine("elastic", "fp16", dp=2, pipe=1, param_shapes=False), ()),
    "fp16-stage1": (Engine("stage1", "fp16", dp=3, tp=2, pipe=2, param_shapes=False), PARALLEL),
    "bf16": (Engine("bf16", "bf16", dp=2, tp=2, pipe=1), PARALLEL),
    "bf16-stages": (Engine("bf16", "bf16", dp=3, pipe=2), TIED),
    "bf16-zero": (Engine("zero", "bf16", dp=2), ()),
}  # fmt: skip


def _trainer(folder: Path, *overrides: str, sink: At | None = None) -> Trainer:
    folder.mkdir(exist_ok=True)
    return open_trainer(folder, *MODEL, *overrides, sinks=lambda trainer: [sink] if sink else [])


def _whole(folder: Path, *overrides: str) -> tuple[dict[str, Tensor], dict[str, Tensor], Trainer]:
    """(tensors after step AT, tensors at the end, trainer) of a run that is not interrupted."""
    stopped = _trainer(folder / "first", *overrides)
    stopped.should_stop = False
    sink = At(AT - 1, lambda: setattr(stopped, "should_stop", True))
    stopped.sinks = [sink]
    stopped.fit()
    stopped.close()
    assert stopped.progress.step == AT
    middle = {name: t.detach().clone() for name, t in stopped.optimizer.tensors().items()}
    whole = _trainer(folder / "whole", *overrides)
    whole.fit()
    whole.close()
    return middle, whole.optimizer.tensors(), stopped


def _scaler(tensors: dict[str, Tensor], fused: bool) -> dict[str, Any] | None:
    """DeepSpeed's counters of the same state."""
    if "scaler.scale" not in tensors:
        return None
    scale, good, patience = (tensors[f"scaler.{name}"].item() for name in ("scale", "good", "patience"))
    last = AT - 1 - int(good) - fused  # cur_iter counts steps; the fused one grows a step later
    found = {"cur_scale": scale, "cur_iter": AT, "last_overflow_iter": last, "scale_factor": 2.0, "scale_window": 1000}
    return found | ({} if fused else {"cur_hysteresis": int(patience), "delayed_shift": 2, "dtype": torch.float16})


def _write(folder: Path, trainer: Trainer, tensors: dict[str, Tensor], engine: Engine, **client_state: Any) -> Path:
    adam_step = int(tensors["step.embed.weight"].item())
    schedule = {"start_lr": 3e-4, "min_lr": 0.0, "warmup_iter": 3.0, "end_iter": STEPS, "decay_style": "cosine",
                "num_iters": AT - trainer.progress.skipped}  # fmt: skip
    state = {"lr_scheduler": schedule, "global_samples": AT * 4, **client_state}
    scaler = _scaler(tensors, engine.kind in ("fused", "unfused"))
    return write(
        folder, trainer.config.model, tensors, engine, step=AT, adam_step=adam_step, scaler=scaler, **state
    )


@pytest.mark.parametrize("name", ENGINES)
def test_the_same_bits_as_without_an_interruption(name: str, tmp_path: Path) -> None:
    engine, model = ENGINES[name]
    precision = (f"train.precision={engine.precision}", *model)
    if engine.precision == "fp16":
        # the first steps overflow: schedule and Adam are behind the steps
        precision += ("train.loss_scale.initial_power=17", "train.loss_scale.hysteresis=1")
    middle, end, first = _whole(tmp_path, *precision)
    if engine.precision == "fp16":
        assert 0 < first.progress.skipped < AT
    _write(tmp_path / "neox", first, middle, engine)
    again = _trainer(tmp_path / "again", *precision, f"checkpoint.load={tmp_path}/neox")
    assert again.progress == first.progress
    assert "with other settings" not in again.resumed_from, again.resumed_from
    for tensor_name, tensor in again.optimizer.tensors().items():
        assert torch.equal(tensor, middle[tensor_name]), tensor_name
    again.fit()
    again.close()
    for tensor_name, tensor in again.optimizer.tensors().items():
        assert torch.equal(tensor, end[tensor_name]), tensor_name
