"""LigerORPOTrainer around a stand-in for TRL's trainer, against ORPO from all logits."""

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.compat import orpo_stand_in as stand_in
from tests.distributed.launch import run_ranks

pytestmark = pytest.mark.usefixtures("on_cpu")
# log-probabilities are float32 for any model
CLOSE = {"rtol": 1e-5, "atol": 1e-6, "check_dtype": False}


@pytest.fixture(scope="module")
def orpo() -> ModuleType:
    return stand_in.loaded(orpo=SimpleNamespace(ORPOTrainer=stand_in.Trainer))


@pytest.mark.parametrize("options", [{}, {"pad": -7}, {"encoder_decoder": True}, {"aux": True}], ids=str)
@pytest.mark.parametrize("train_eval", ["train", "eval"])
def test_loss_gradients_and_metrics(orpo: ModuleType, options: dict[str, Any], train_eval: str) -> None:
    pad = options.get("pad", -100)
    model, batch = stand_in.Model().double(), stand_in.made(pad)
    trainer = orpo.LigerORPOTrainer(**options)
    expected, metrics = stand_in.plain(trainer, model, batch, pad)
    loss, found = trainer.get_batch_loss_metrics(model, batch, train_eval)
    torch.testing.assert_close(loss, expected, **CLOSE)
    grads = (torch.autograd.grad(value, list(model.parameters())) for value in (loss, expected))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    prefix = "eval_" if train_eval == "eval" else ""
    assert found.keys() == {prefix + name for name in metrics}
    for name, value in metrics.items():
        torch.testing.assert_close(torch.tensor(found[prefix + name]), value.mean(), **CLOSE)


def test_no_logits_are_made_and_the_model_stays_as_it_was(orpo: ModuleType) -> None:
    model = stand_in.Model()
    seen: list[torch.Size] = []
    model.head.register_forward_hook(lambda _, __, out: seen.append(out.shape))
    loss, _ = orpo.LigerORPOTrainer().get_batch_loss_metrics(nn.DataParallel(model), stand_in.made())
    assert seen == [(1, 1, 1)] and loss.shape == () and "forward" not in vars(model.head)
    with pytest.raises(IndexError):
        orpo.LigerORPOTrainer().get_batch_loss_metrics(model, {**stand_in.made(), "input_ids": torch.full((6, 6), 99)})
    assert "forward" not in vars(model.head)


class Adapted(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base


def test_models_whose_loss_would_be_another_are_refused(orpo: ModuleType) -> None:
    trainer = orpo.LigerORPOTrainer()
    with pytest.raises(NotImplementedError, match="logits changed behind the output layer"):
        trainer.get_batch_loss_metrics(stand_in.Model(cap=5.0), stand_in.made())
    model = stand_in.Model()
    model.head = Adapted(model.head)
    with pytest.raises(NotImplementedError, match="model's output layer = 'Adapted' is not supported"):
        trainer.get_batch_loss_metrics(model, stand_in.made())


def test_either_place_in_trl_and_none() -> None:
    older = stand_in.loaded(trainer=SimpleNamespace(ORPOTrainer=stand_in.Trainer))
    assert issubclass(older.LigerORPOTrainer, stand_in.Trainer)
    with pytest.raises(ImportError, match=r"subclass of TRL's ORPOTrainer: pip install trl \(.*trl"):
        stand_in.loaded().LigerORPOTrainer(model=None)


@pytest.mark.slow
def test_under_ddp_and_both_fsdps(tmp_path: Path) -> None:
    for process in run_ranks(2, "-m", "tests.compat.orpo_worker", str(tmp_path)):
        assert process.returncode == 0, process.stdout
    assert len(list(tmp_path.glob("*.done"))) == 2
