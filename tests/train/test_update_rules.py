"""Lion, SGD and 8-bit AdamW: the formulas in float64, masters, skipped steps, and a resume with the same bits."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from powertrain.runtime.extras import MissingExtra
from powertrain.train.config.schema import OptimizerConfig, TrainConfig
from powertrain.train.optim import Optimizer, state_bytes
from powertrain.train.update_rules import Lion, make_rule
from tests.distributed.launch import run_ranks
from tests.train.tiny_run import At, open_trainer, write_config

LION = ("optimizer.kind=lion", "optimizer.betas=[0.9,0.99]", "optimizer.lr=1e-4")
SGD = ("optimizer.kind=sgd", "optimizer.momentum=0.9", "optimizer.lr=0.05", "optimizer.weight_decay=0.01")
PLAIN_SGD = ("optimizer.kind=sgd", "optimizer.lr=0.05", "optimizer.weight_decay=0")
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


def _lion64(
    p: Tensor, m: Tensor, g: Tensor, lr: float, betas: tuple[float, float], decay: float
) -> tuple[Tensor, Tensor]:
    u = (betas[0] * m + (1 - betas[0]) * g).sign()
    return p * (1 - lr * decay) - lr * u, betas[1] * m + (1 - betas[1]) * g


@pytest.mark.parametrize("shape", [(3, 5), (1,), (7, 1, 2), (0, 4)])
def test_lion_is_its_paper(shape: tuple[int, ...]) -> None:
    p, without = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(2))
    expected, m = p.detach().double(), torch.zeros(shape, dtype=torch.float64)
    optimizer = Lion([{"params": [p, without], "weight_decay": 0.3}], lr=0.01, betas=(0.8, 0.95))
    before = without.detach().clone()
    for _ in range(4):
        p.grad = torch.randn(shape)
        expected, m = _lion64(expected, m, p.grad.double(), 0.01, (0.8, 0.95), 0.3)
        optimizer.step()
    torch.testing.assert_close(p.detach().double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(without, before)


class _Model(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6))
        self.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_torchs_over_masters(dtype: torch.dtype, momentum: float) -> None:
    """Clipped, with float32 masters and undecayed biases; nothing moves where a gradient is not finite."""
    model = _Model(dtype)
    config = OptimizerConfig(kind="sgd", momentum=momentum, lr=0.1, weight_decay=0.5)
    optimizer = Optimizer(model, config, TrainConfig(steps=1, seq_length=1, gradient_clipping=1.0))
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    groups = [{"params": masters[:1], "weight_decay": 0.5}, {"params": masters[1:], "weight_decay": 0.0}]
    twin = torch.optim.SGD(groups, 0.1, momentum=momentum)
    for number in range(4):
        for p, master in zip(model.parameters(), masters, strict=True):
            p.grad = torch.randn_like(p) * 3
            master.grad = p.grad.float()
        if number == 2:
            before = [p.detach().clone() for p in model.parameters()]
            model.bias.grad[0] = torch.inf
            assert optimizer.step(0.1).skipped
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            continue
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        twin.step()
        optimizer.step(0.1)
    for p, master in zip(model.parameters(), masters, strict=True):
        torch.testing.assert_close(
            p.detach(), master.detach().to(dtype), rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=1e-5
        )


def test_state_that_is_made_ahead_of_the_first_step_is_zero() -> None:
    """As each run in 16 bits makes it: SGD's momentum began with the decayed weights."""
    model = _Model(torch.bfloat16)
    config = OptimizerConfig(kind="sgd", momentum=0.9, lr=0.1, weight_decay=0.5)
    optimizer = Optimizer(model, config, TrainConfig(steps=1, seq_length=1))
    tensors = optimizer.tensors()
    assert not any(t.any() for name, t in tensors.items() if name.startswith("momentum_buffer."))
    assert [group["weight_decay"] for group in optimizer.rule.param_groups] == [0.5, 0.0]


def _run(folder: Path, *overrides: str, stop: int = 0) -> tuple[Any, list[float]]:
    folder.mkdir(exist_ok=True)
    losses: list[float] = []
    sink = At(-1, lambda: None)
    sink.step = lambda record: losses.append(record.loss)  # type: ignore[method-assign]
    trainer = open_trainer(folder, *overrides, "evaluation.every=0", sinks=lambda t: [sink])
    if stop:
        trainer.sinks = [At(stop, lambda: setattr(trainer, "should_stop", True))]
    trainer.fit()
    trainer.close()
    return trainer, losses


RUNS = {
    "lion-bf16": (*LION, "train.precision=bf16"),
    "lion-fp16": (*LION, "train.precision=fp16", "train.loss_scale.initial_power=17", "train.loss_scale.hysteresis=1"),
    "sgd-fp32": (*SGD, "train.precision=fp32"),
    "plain-sgd-bf16": (*PLAIN_SGD, "train.precision=bf16"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_has_the_same_bits(name: str, tmp_path: Path) -> None:
    whole, losses = _run(tmp_path / "whole", *RUNS[name])
    assert losses[-1] < losses[0] and losses[0] == pytest.approx(5.5, abs=0.3)
    _run(tmp_path / "parts", *RUNS[name], stop=4)
    resumed, rest = _run(tmp_path / "parts", *RUNS[name])
    assert 0 < len(rest) < 12 and rest == losses[-len(rest) :]
    for tensor_name, tensor in whole.optimizer.tensors().items():
        assert torch.equal(tensor, resumed.optimizer.tensors()[tensor_name]), tensor_name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lion-bf16", "sgd-fp32"])
def test_two_ranks_take_the_steps_of_one(name: str, tmp_path: Path) -> None:
    options = [word for word in RUNS[name] if "precision" not in word] + ["train.precision=fp32", "train.steps=4"]
    alone, _ = _run(tmp_path / "alone", *options)
    (tmp_path / "two").mkdir()
    config = write_config(tmp_path / "two")
    ranks = run_ranks(
        2, "-m", "powertrain", "train", str(config), *options, "train.micro_batch_size=2", "evaluation.every=0"
    )
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(rank.stdout[-3000:] for rank in ranks)
    two = open_trainer(tmp_path / "two", *options, "train.micro_batch_size=4", "evaluation.every=0", sinks=lambda t: [])
    assert two.progress.step == 4
    kinds = [n for n in two.optimizer.tensors() if not n.startswith("model.")]
    assert kinds
    for tensor_name, tensor in alone.optimizer.tensors().items():
        if not tensor_name.startswith("model.") or "sgd" in name:  # a sign may be another where a sum is near 0
            torch.testing.assert_close(two.optimizer.tensors()[tensor_name], tensor, rtol=1e-3, atol=1e-5)
    two.close()


def test_what_is_of_another_kind_is_refused() -> None:
    for values, message in (
        (
            {"kind": "lion", "momentum": 0.9},
            "optimizer.momentum must be 0.0 unless optimizer.kind is sgd, got 0.9 for lion",
        ),
        ({"kind": "sgd", "state_dtype": "bf16"}, "optimizer.state_dtype must be fp32 unless optimizer.kind is adamw"),
    ):
        with pytest.raises(ValueError, match=message):
            OptimizerConfig(**values)


def test_bytes_of_state() -> None:
    known = {"adamw": 8, "adamw8bit": 2.03125, "lion": 4, "sgd": 0}
    assert {kind: state_bytes(OptimizerConfig(kind=kind)) for kind in known} == known  # type: ignore[arg-type]
    assert state_bytes(OptimizerConfig(kind="sgd", momentum=0.5)) == 4


@pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="torchao is installed")
def test_a_missing_package_is_named() -> None:
    with pytest.raises(MissingExtra, match=r"adamw8bit needs torchao: pip install 'powertrain\[optimizers\]'"):
        make_rule([{"params": [nn.Parameter(torch.zeros(2))]}], OptimizerConfig(kind="adamw8bit"))


@pytest.mark.slow
@needs_torchao
def test_8_bit_adamw(tmp_path: Path) -> None:
    """Near AdamW's losses; a resumed run goes on from moments that were quantized again."""
    options = ("optimizer.kind=adamw8bit", "optimizer.lr=3e-3", "train.precision=bf16", "model.hidden_size=64")
    whole, losses = _run(tmp_path / "whole", *options)
    _, exact = _run(tmp_path / "exact", *(word.replace("adamw8bit", "adamw") for word in options))
    assert losses[-1] == pytest.approx(exact[-1], rel=0.02) and losses != exact
    _run(tmp_path / "parts", *options, stop=4)
    resumed, rest = _run(tmp_path / "parts", *options)
    assert rest == pytest.approx(losses[-len(rest) :], rel=1e-3)
    assert resumed.progress.step == 12
    assert any(t.dtype is torch.uint8 for s in whole.optimizer.rule.inner.state.values() for t in
               (getattr(s["exp_avg"], "codes", s["exp_avg"]),))  # fmt: skip
