"""The loop on a GPU: bit-exact resume, precisions, generation, and what stops it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from powertrain.models.generate import Sampler, generate
from powertrain.train.checkpoint.load import load_model
from powertrain.train.objective import NextToken
from powertrain.train.reporting.timers import Moment
from powertrain.train.trainer import Trainer, TrainingStopped
from tests.train.test_objectives import _open
from tests.train.tiny_run import At, open_trainer

pytestmark = pytest.mark.gpu

_MODELS: dict[str, tuple[str, ...]] = {
    "llama": ("model.num_kv_heads=1", "model.hidden_size=128"),
    "gpt_neox": (
        "model.architecture=gpt_neox", "model.hidden_size=128", "model.hidden_dropout=0.1",
        "model.attention_dropout=0.1",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _undo_determinism() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(True, warn_only=True)  # as tests/torch_setup.py has it


class _Losses(At):
    def __init__(self) -> None:
        super().__init__(0, lambda: None)
        self.seen: list[str] = []

    def step(self, record: Any) -> None:
        self.seen.append(f"{record.step} {record.loss!r} {record.grad_norm!r}")


def _run(folder: Path, *overrides: str) -> tuple[Trainer, list[str]]:
    losses = _Losses()
    trainer = open_trainer(folder, *overrides, sinks=lambda trainer: [losses])
    trainer.fit()
    trainer.close()
    return trainer, losses.seen


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("model", list(_MODELS))
def test_a_resumed_run_has_the_same_bits(model: str, precision: str, tmp_path: Path) -> None:
    options = (*_MODELS[model], f"train.precision={precision}", "train.deterministic=true")
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    trainer, losses = _run(tmp_path / "whole", *options)
    first = open_trainer(tmp_path / "parts", *options, sinks=lambda t: [At(4, lambda: setattr(t, "should_stop", True))])
    first.fit()
    first.close()
    assert first.progress.step < 12
    resumed, rest = _run(tmp_path / "parts", *options)
    assert losses[-len(rest) :] == rest and len(rest) == 12 - first.progress.step
    for name, t in trainer.optimizer.tensors().items():
        assert torch.equal(t, resumed.optimizer.tensors()[name]), name


_CAPTURED = {
    **_MODELS,
    "mixture": (
        "model.architecture=deepseek", "model.moe_intermediate_size=64", "model.num_experts=8",
        "model.experts_per_token=2", "model.balance_loss=0.01",
    ),
    "accumulation": (*_MODELS["gpt_neox"], "train.gradient_accumulation_steps=3"),
    "documents": (*_MODELS["llama"], "data.document_mask=true", "train.gradient_accumulation_steps=2"),
    "lora": (*_MODELS["llama"], "train.lora.rank=4"),
    "tied, fp16": (*_MODELS["llama"], "model.tie_embeddings=true", "train.precision=fp16"),
    "odd width": (*_MODELS["llama"], "model.intermediate_size=181"),
    "recomputed": (*_MODELS["llama"], "train.activation_checkpointing=full", "train.gradient_accumulation_steps=2"),
    "partly recomputed": (*_MODELS["llama"], "train.activation_checkpointing=selective", "fp8.recipe=row"),
    "a mixture, recomputed": (
        "model.architecture=deepseek", "model.moe_intermediate_size=64", "model.num_experts=8",
        "model.experts_per_token=2", "model.balance_loss=0.01", "train.activation_checkpointing=full",
    ),
    "fp8 by tensor": (*_MODELS["llama"], "fp8.recipe=tensor", "fp8.watch=7"),
    "fp8, delayed, accumulation": (
        *_MODELS["gpt_neox"], "fp8.recipe=tensor-delayed", "fp8.history=4", "train.gradient_accumulation_steps=3",
    ),
    "fp8 by row, accumulation": (*_MODELS["llama"], "fp8.recipe=row", "train.gradient_accumulation_steps=2"),
    "fp8 by block, lora": (*_MODELS["llama"], "fp8.recipe=block", "train.lora.rank=4"),
}  # fmt: skip


@pytest.mark.parametrize("name", _CAPTURED)
def test_graphs_of_micro_batches_have_the_bits_of_the_python_code(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, norms and all that a checkpoint holds, of steps that are replayed."""
    # other processes that use the GPU would keep it busy
    monkeypatch.setattr(Moment, "is_over", lambda moment: True)
    options = ("train.precision=bf16", *_CAPTURED[name], "train.steps=20", "train.spike_factor=0")
    runs = {}
    for wanted in ("true", "false"):
        (tmp_path / wanted).mkdir()
        runs[wanted] = _run(tmp_path / wanted, *options, f"train.cuda_graphs={wanted}")
    (trainer, losses), (plain, expected) = runs["true"], runs["false"]
    assert trainer._graphs.is_wanted and trainer._graphs.why_not is None
    assert losses == expected
    for key, x in plain.optimizer.tensors().items():
        assert torch.equal(x, trainer.optimizer.tensors()[key]), key


@pytest.mark.parametrize("objective", ["kto", "sft"])
def test_graphs_of_packed_completions(objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of several shapes: each has a graph, whichever comes first in a step."""
    monkeypatch.setattr(Moment, "is_over", lambda moment: True)
    options = ("train.steps=30", "train.gradient_accumulation_steps=3", "train.precision=bf16", "train.spike_factor=0")
    runs = {}
    for wanted in ("true", "false"):
        (tmp_path / wanted).mkdir()
        trainer, recorder = _open(tmp_path / wanted, objective, *options, f"train.cuda_graphs={wanted}")
        trainer.fit()
        trainer.close()
        runs[wanted] = trainer, [repr((step.loss, step.grad_norm)) for step in recorder.steps]
    (trainer, losses), (plain, expected) = runs["true"], runs["false"]
    assert trainer._graphs.why_not is None and len(trainer._graphs._adding) >= (2 if objective == "kto" else 1)
    assert losses == expected
    for key, x in plain.optimizer.tensors().items():
        assert torch.equal(x, trainer.optimizer.tensors()[key]), key


def test_a_capture_that_fails_costs_nothing_but_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that waits for the GPU: dropout goes on with the same numbers."""
    monkeypatch.setattr(Moment, "is_over", lambda moment: True)
    forward = NextToken.__call__

    def waits(self: NextToken, *arguments: Any) -> Any:
        share, seen = forward(self, *arguments)
        assert share.item() > 0
        return share, seen

    monkeypatch.setattr(NextToken, "__call__", waits)
    runs = {}
    for wanted in ("true", "false"):
        (tmp_path / wanted).mkdir()
        runs[wanted] = _run(tmp_path / wanted, *_CAPTURED["accumulation"], f"train.cuda_graphs={wanted}")
    (trainer, losses), (_, expected) = runs["true"], runs["false"]
    assert "capturing" in str(trainer._graphs.why_not) and len(losses) == 12
    assert losses == expected


def test_half_precision_follows_float32(tmp_path: Path) -> None:
    losses = {}
    for precision in ("fp32", "bf16", "fp16"):
        (tmp_path / precision).mkdir()
        scale = "train.loss_scale.initial_power=8"  # no step is skipped
        _, seen = _run(tmp_path / precision, *_MODELS["llama"], f"train.precision={precision}", scale)
        losses[precision] = [float(line.split()[1]) for line in seen]
    for precision in ("bf16", "fp16"):
        assert losses[precision] == pytest.approx(losses["fp32"], rel=2e-2)


def test_greedy_tokens_are_the_full_forwards(tmp_path: Path) -> None:
    _run(tmp_path, *_MODELS["llama"], "train.precision=fp32")
    model, _ = load_model(tmp_path / "run", device=torch.device("cuda"))
    prompts = [[1, 2, 3, 4, 5], [7]]
    rows = generate(model, prompts, max_new_tokens=12, sampler=Sampler(temperature=0))
    for prompt, row in zip(prompts, rows, strict=True):
        tokens = torch.tensor([prompt + row], device="cuda")
        with torch.no_grad():
            logits = model(tokens)[0, len(prompt) - 1 : -1]
        best = logits.topk(2).values
        # how far apart the two best are tells rounding from a fault
        assert row == logits.argmax(-1).tolist(), (best[:, 0] - best[:, 1]).tolist()


def test_a_bad_weight_stops_the_run(tmp_path: Path) -> None:
    def poison(trainer: Trainer) -> Any:
        def act() -> None:
            with torch.no_grad():
                trainer.model.layers[1].mlp.down.weight[0, 0] = float("nan")

        return [At(3, act)]

    # in float32, since a 16-bit weight is made anew from its master
    trainer = open_trainer(tmp_path, *_MODELS["llama"], "train.precision=fp32", sinks=poison)
    with pytest.raises(TrainingStopped, match=r"layers\.1\.mlp\.down\.weight is not finite"):
        trainer.fit()
    trainer.close()
