"""What Python does around graphs of micro-batches: a stand-in for PyTorch's graphs computes on this CPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.train import micro_batch_graph
from powertrain.train.data.loader import Batch
from powertrain.train.reporting.metrics import PartialSink
from powertrain.train.trainer import Trainer
from tests.train.tiny_run import open_trainer

MODELS: dict[str, tuple[str, ...]] = {
    "llama": (),
    "gpt_neox": ("model.architecture=gpt_neox", "model.hidden_dropout=0.1", "model.attention_dropout=0.1"),
    "fp16": ("train.precision=fp16", "train.loss_scale.window=2"),
    "accumulation": ("train.gradient_accumulation_steps=3",),
    "documents": ("data.document_mask=true", "train.gradient_accumulation_steps=2"),
    "lora": ("train.lora.rank=4",),
    "tied": ("model.tie_embeddings=true",),
}


class Graph:
    """Calls `compute` where a graph would be launched, and writes its results where the captured ones were."""

    def __init__(self, trainer: Trainer, batch: Batch, counted: Tensor) -> None:
        self.arguments = batch, counted
        self.compute, self.parameters = trainer._graphs.compute, trainer.optimizer.parameters
        before = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        self.adds = any(x is not None for x in before)
        # a capture computes nothing
        with torch.random.fork_rng():
            self.results = self.compute(*self.arguments)
        self.gradients = [p.grad for p in self.parameters]
        for gradient, value in zip(self.gradients, before, strict=True):
            if gradient is not None:
                gradient.copy_(torch.full_like(gradient, torch.nan) if value is None else value)

    def pool(self) -> None:
        return None

    def replay(self) -> None:
        # what the captured kernels add to, whatever the parameters hold now
        for p, gradient in zip(self.parameters, self.gradients, strict=True):
            p.grad = gradient if self.adds else None
        found = self.compute(*self.arguments)
        for target, source in zip(self.results, found, strict=True):
            target.copy_(source)
        for p, gradient in zip(self.parameters, self.gradients, strict=True):
            if gradient is not None and p.grad is not gradient:
                gradient.copy_(p.grad)


class Seen(PartialSink):
    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []
        self.notes: list[str] = []

    def step(self, record: Any) -> None:
        self.steps.append((record.loss, record.grad_norm))

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Graph]]:
    """Those that are made, as if this CPU were a GPU that waits for Python."""
    made: list[Graph] = []
    trainers: list[Trainer] = []

    def captured(compute: Any, batch: Batch, counted: Tensor, pool: Any) -> tuple[Graph, tuple[Tensor, Tensor]]:
        made.append(Graph(trainers[-1], batch, counted))
        return made[-1], made[-1].results

    def why_no_graphs(trainer: Trainer) -> None:
        trainers.append(trainer)

    monkeypatch.setattr(micro_batch_graph, "_captured", captured)
    monkeypatch.setattr(micro_batch_graph, "_why_not_memory", lambda device: None)
    monkeypatch.setattr(Trainer, "_why_no_graphs", why_no_graphs)
    yield made


def _run(folder: Path, *overrides: str) -> tuple[Trainer, Seen]:
    folder.mkdir()
    seen = Seen()
    trainer = open_trainer(folder, *overrides, sinks=lambda trainer: [seen])
    trainer.fit()
    trainer.close()
    return trainer, seen


def _plain(folder: Path, *overrides: str) -> tuple[Trainer, Seen]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_why_no_graphs", lambda trainer: "not here")
        return _run(folder, *overrides)


def _assert_same(found: tuple[Trainer, Seen], expected: tuple[Trainer, Seen]) -> None:
    assert found[1].steps == expected[1].steps
    tensors = expected[0].optimizer.tensors()
    for name, x in found[0].optimizer.tensors().items():
        assert torch.equal(x, tensors[name]), name


@pytest.mark.parametrize("name", MODELS)
def test_the_bits_of_the_python_code(name: str, graphs: list[Graph], tmp_path: Path) -> None:
    found = _run(tmp_path / "graphs", *MODELS[name])
    assert len(graphs) >= 1 + ("accumulation" in str(MODELS[name]))
    assert sum("replayed from CUDA graphs" in note for note in found[1].notes) >= 1
    _assert_same(found, _plain(tmp_path / "plain", *MODELS[name]))
