"""What Python does around graphs of micro-batches: a stand-in for PyTorch's graphs computes on this CPU."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.quant.linear import FP8State
from powertrain.runtime import invalidation
from powertrain.train import micro_batch_graph
from powertrain.train.data.loader import Batch
from powertrain.train.reporting.metrics import PartialSink
from powertrain.train.trainer import Trainer
from tests.train.test_objectives import _open
from tests.train.tiny_run import open_trainer

MODELS: dict[str, tuple[str, ...]] = {
    "llama": (),
    "gpt_neox": ("model.architecture=gpt_neox", "model.hidden_dropout=0.1", "model.attention_dropout=0.1"),
    "fp16": ("train.precision=fp16", "train.loss_scale.window=2"),
    "accumulation": ("train.gradient_accumulation_steps=3",),
    "documents": ("data.document_mask=true", "train.gradient_accumulation_steps=2"),
    "lora": ("train.lora.rank=4",),
    "tied": ("model.tie_embeddings=true",),
    "mixture": (
        "model.architecture=deepseek", "model.moe_intermediate_size=16", "model.num_experts=4",
        "model.experts_per_token=2", "model.balance_loss=0.01", "model.kv_lora_rank=8", "model.qk_nope_head_dim=8",
        "model.qk_rope_head_dim=8", "model.v_head_dim=8", "train.gradient_accumulation_steps=2",
    ),
    "lion": ("optimizer.kind=lion", "optimizer.betas=[0.9,0.99]"),
    "sgd": ("optimizer.kind=sgd", "optimizer.momentum=0.9", "train.gradient_accumulation_steps=2"),
    "fp8, measured steps": (
        "fp8.recipe=tensor-delayed", "fp8.history=4", "fp8.watch=5", "train.gradient_accumulation_steps=2",
        "train.steps=18",
    ),
    "fp8, frozen weights": ("fp8.recipe=block", "train.lora.rank=4", "train.gradient_accumulation_steps=2"),
    "recomputed": ("train.activation_checkpointing=full", "fp8.recipe=tensor-delayed"),
    "z-loss, evaluations": ("train.z_loss=1e-3", "evaluation.every=1"),
}  # fmt: skip


class Graph:
    """Calls `compute` where a graph would be launched, and writes its results where the captured ones were."""

    def __init__(self, trainer: Trainer, batch: Batch, counted: Tensor) -> None:
        self.arguments = batch, counted
        self.model = trainer.model
        self.compute, self.parameters = trainer._graphs.compute, trainer.optimizer.parameters
        before = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        self.adds = any(x is not None for x in before)
        # those of an optimizer step, which a graph must not read: it may be replayed in another one
        self.found_copies = any(m.copies for m in self.model.modules() if isinstance(m, FP8State) and m.shares)
        # a capture computes nothing
        with torch.random.fork_rng():
            self.results = self.compute(*self.arguments)
        self.replays = 0
        self.gradients = [p.grad for p in self.parameters]
        for gradient, value in zip(self.gradients, before, strict=True):
            if gradient is not None:
                gradient.copy_(torch.full_like(gradient, torch.nan) if value is None else value)

    def pool(self) -> None:
        return None

    def replay(self) -> None:
        self.replays += 1
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


# the optimizers come behind the graphs, as they are
_SLOW = {"tied", "lion", "sgd", "dpo", "kto", "reward", "distill"}


def _each(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow if name in _SLOW else ()) for name in names]


@pytest.mark.parametrize("name", _each(MODELS))
def test_the_bits_of_the_python_code(name: str, graphs: list[Graph], tmp_path: Path) -> None:
    found = _run(tmp_path / "graphs", *MODELS[name])
    assert len(graphs) >= 1 + ("accumulation" in str(MODELS[name]))
    assert sum("replayed from CUDA graphs" in note for note in found[1].notes) >= 1
    assert not any(graph.found_copies for graph in graphs)
    _assert_same(found, _plain(tmp_path / "plain", *MODELS[name]))


@pytest.mark.parametrize("objective", _each(["sft", "dpo", "kto", "reward", "policy", "distill"]))
def test_every_objective(objective: str, graphs: list[Graph], tmp_path: Path) -> None:
    """What Python reads of a batch must not become a constant of the graph."""
    options = ("train.steps=14", "train.gradient_accumulation_steps=2")
    runs = []
    for name, why_not in (("graphs", None), ("plain", "not here")):
        (tmp_path / name).mkdir()
        trainer, recorder = _open(tmp_path / name, objective, *options)
        trainer._graphs.why_not = why_not
        trainer.fit()
        trainer.close()
        runs.append((trainer, [(step.loss, step.grad_norm, step.objective) for step in recorder.steps]))
    assert graphs and runs[0][0]._graphs.why_not is None
    assert str(runs[0][1]) == str(runs[1][1])
    expected = runs[1][0].optimizer.tensors()
    for name, x in runs[0][0].optimizer.tensors().items():
        assert torch.equal(x, expected[name]), name


@pytest.mark.parametrize("most", [64, 2])
def test_batches_of_other_shapes(most: int, graphs: list[Graph], tmp_path: Path, monkeypatch: Any) -> None:
    """Packed completions differ in number: each number has a graph, whichever comes first in a step."""
    monkeypatch.setattr(micro_batch_graph, "_MOST_SIGNATURES", most)
    options = ("train.steps=24", "train.gradient_accumulation_steps=3", "evaluation.every=0")
    runs = []
    for name, why_not in (("graphs", None), ("plain", "not here")):
        (tmp_path / name).mkdir()
        trainer, recorder = _open(tmp_path / name, "kto", *options)
        notes: list[str] = []
        trainer._graphs.why_not, trainer._graphs.note = why_not, notes.append
        trainer.fit()
        trainer.close()
        runs.append((trainer, recorder, notes))
    numbers = {len(graph.arguments[0].completions.values) for graph in graphs}
    replays = sum(graph.replays for graph in graphs)
    if most == 2:
        assert len(numbers) <= 2 and sum("stay in Python" in note for note in runs[0][2]) == 1
    else:
        # of 72 micro-batches 21 come before, and Python computes the first of each number
        assert len(numbers) >= 3 and replays >= 36
    losses = [[(step.loss, step.grad_norm) for step in recorder.steps] for _, recorder, _ in runs]
    assert replays and losses[0] == losses[1]
    expected = runs[1][0].optimizer.tensors()
    for name, x in runs[0][0].optimizer.tensors().items():
        assert torch.equal(x, expected[name]), name


@pytest.mark.parametrize("failing", [1, 2])
def test_a_capture_that_fails(failing: int, graphs: list[Graph], tmp_path: Path, monkeypatch: Any) -> None:
    """Of a step's first micro-batch, or of the others: gradients that it has made hold nothing."""
    captured, calls = micro_batch_graph._captured, []

    def fails(*arguments: Any) -> Any:
        calls.append(1)
        result = captured(*arguments)
        if len(calls) == failing:
            raise TypeError("as a user's module may")
        return result

    monkeypatch.setattr(micro_batch_graph, "_captured", fails)
    options = ("train.gradient_accumulation_steps=3",)
    found = _run(tmp_path / "graphs", *options)
    assert len(calls) == failing and "as a user's module may" in str(found[0]._graphs.why_not)
    assert sum("as a user's module may" in note for note in found[1].notes) == 1
    _assert_same(found, _plain(tmp_path / "plain", *options))


def test_what_comes_later_is_seen(graphs: list[Graph], tmp_path: Path) -> None:
    """A setting: captured again; a hook: left to Python, which calls it."""
    called: list[int] = []

    class Acts(Seen):
        def step(self, record: Any) -> None:
            super().step(record)
            if record.step == 9:
                invalidation.changed()
            if record.step == 11:
                layers[0].register_forward_hook(lambda *_: called.append(1))

    (tmp_path / "graphs").mkdir()
    seen = Acts()
    trainer = open_trainer(tmp_path / "graphs", "train.steps=16", "evaluation.every=0", sinks=lambda trainer: [seen])
    layers: Any = trainer.model.layers
    trainer.fit()
    trainer.close()
    assert len(graphs) == 2 and len(called) >= 3 and "hooks" in str(trainer._graphs.why_not)
    _assert_same((trainer, seen), _plain(tmp_path / "plain", "train.steps=16", "evaluation.every=0"))


@pytest.mark.parametrize("changed", ["a frozen weight", "a recipe"])
def test_what_fp8_layers_hold(changed: str, graphs: list[Graph], tmp_path: Path) -> None:
    """A graph reads the copies of a frozen weight, and has the recipe, that were there when it was captured."""
    options = ("train.steps=12", "fp8.recipe=row", "evaluation.every=0")
    if changed == "a frozen weight":
        options += ("train.lora.rank=4",)

    def run(name: str) -> tuple[Trainer, Seen]:
        class Changes(Seen):
            def step(self, record: Any) -> None:
                super().step(record)
                if record.step != 9:
                    return
                if changed == "a recipe":
                    trainer._fp8_watch._move("layers.0.mlp.up", "block")
                else:
                    with torch.no_grad():
                        trainer.model.layers[0].mlp.up.weight.mul_(1.5)

        (tmp_path / name).mkdir()
        seen = Changes()
        trainer = open_trainer(tmp_path / name, *options, sinks=lambda trainer: [seen])
        trainer.fit()
        trainer.close()
        return trainer, seen

    found = run("graphs")
    assert len(graphs) == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_why_no_graphs", lambda trainer: "not here")
        _assert_same(found, run("plain"))


def test_a_capture_that_fails_leaves_no_quantized_weights(
    graphs: list[Graph], tmp_path: Path, monkeypatch: Any
) -> None:
    """Those that it has made hold nothing, as nothing has run."""
    captured = micro_batch_graph._captured

    def fails(*arguments: Any) -> Any:
        captured(*arguments)
        for module in graphs[-1].model.modules():
            if isinstance(module, FP8State) and module.copies is not None:
                module.copies.data.zero_()
        raise TypeError("as a user's module may")

    monkeypatch.setattr(micro_batch_graph, "_captured", fails)
    options = ("fp8.recipe=tensor", "train.gradient_accumulation_steps=2")
    found = _run(tmp_path / "graphs", *options)
    assert len(graphs) == 1
    _assert_same(found, _plain(tmp_path / "plain", *options))


def test_a_hook_of_a_parameter(graphs: list[Graph], tmp_path: Path) -> None:
    (tmp_path / "graphs").mkdir()
    trainer = open_trainer(tmp_path / "graphs", sinks=lambda trainer: [])
    called: list[int] = []
    trainer.optimizer.parameters[0].register_hook(lambda gradient: called.append(1))
    trainer.fit()
    trainer.close()
    assert not graphs and len(called) == 12 and "a parameter has hooks" in str(trainer._graphs.why_not)


def test_longer_lists_of_documents_are_captured_again(graphs: list[Graph], tmp_path: Path) -> None:
    """Python computes the first micro-batch of each length; shorter lists are padded."""
    (tmp_path / "graphs").mkdir()
    options = ("data.document_mask=true", "train.gradient_accumulation_steps=2")
    trainer = open_trainer(tmp_path / "graphs", *options, sinks=lambda trainer: [])
    trainer.fit()
    replayed, computed = trainer._graphs, []
    compute = replayed.compute
    batch = Batch(*(graphs[0].arguments[0]))
    starts = batch.document_starts
    assert starts is not None

    def counts(*arguments: Any) -> Any:
        computed.append(len(arguments[0].document_starts))
        return compute(*arguments)

    replayed.compute = counts
    longer = torch.nn.functional.pad(starts, (0, len(starts)), value=batch.tokens.numel())
    counted, before = torch.tensor(1.0), len(graphs)
    for given, is_replayed in ((starts, True), (longer, False), (longer, True), (starts, True)):
        for p in trainer.optimizer.parameters:
            p.grad = None
        found = replayed(batch._replace(document_starts=given), counted, is_first=True)
        assert (found is not None) == is_replayed
    assert len(graphs) == before + 1 and computed and set(computed) == {len(longer)}
    trainer.close()
