"""FP8 in runs: trained, saved and resumed with the same bits, from runs without it, by GPT-NeoX's keys, errors."""

from pathlib import Path
from typing import Any

import pytest
import torch

import powertrain
from powertrain.quant import FP8Linear, quantize_model
from powertrain.quant.recipe import Tensor
from powertrain.runtime.target import Target
from powertrain.train.config.reader import read_config
from powertrain.train.config.schema import FP8Config
from powertrain.train.config.yaml_source import ConfigError, UnsupportedConfig
from powertrain.train.fp8 import recipe_of
from powertrain.train.fp8_watch import FP8Watch
from powertrain.train.lint import record_step
from powertrain.train.reporting.metrics import PartialSink
from powertrain.train.trainer import TrainingStopped
from tests.train.tiny_run import open_trainer, read


class Seen(PartialSink):
    """A sink that keeps losses and notes."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.notes: list[str] = []

    def step(self, record: object) -> None:
        self.losses.append(record.loss)

    def note(self, text: str) -> None:
        self.notes.append(text)


def _run(folder: Path, *overrides: str, resume: bool = False) -> tuple[Seen, dict[str, torch.Tensor]]:
    seen = Seen()
    trainer = open_trainer(folder, *overrides, sinks=lambda trainer: [seen])
    if resume:
        assert trainer.resume()
    trainer.fit()
    state = {name: t.clone() for name, t in trainer.optimizer.tensors().items()}
    trainer.close()
    return seen, state


SHORT = ("checkpoint.save=false", "evaluation.every=0", "evaluation.at_end=false", "logging.report=false")


def test_runs_learn_as_without(tmp_path: Path) -> None:
    plain, _ = _run(tmp_path / "plain", *SHORT, "train.steps=6")
    for recipe in ("tensor", "tensor-delayed", "row", "block"):
        found, _ = _run(tmp_path / "fp8", *SHORT, "train.steps=6", f"fp8.recipe={recipe}", "fp8.watch=4")
        assert found.notes[0].startswith(f"fp8: 10 linear layers by {recipe}")
        (reading,) = (note for note in found.notes if note.startswith("fp8 at step"))
        assert (
            reading.startswith("fp8 at step 4, the largest errors of 30 operands") and reading.count("underflow") == 3
        )
        assert ("% of quantizations so far read twice:" in reading) is (recipe == "tensor")
        assert found.losses != plain.losses
        assert abs(found.losses[-1] - plain.losses[-1]) < 0.02 * plain.losses[-1]


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path) -> None:
    for name in ("plain", "fp8", "whole", "parts"):
        (tmp_path / name).mkdir()


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    options = ("fp8.recipe=tensor-delayed", "fp8.history=4", "train.gradient_accumulation_steps=2")
    options += ("train.precision=bf16", "schedule.decay_steps=6", "train.steps=6", *SHORT[1:])
    whole, right = _run(tmp_path / "whole", *options)
    _run(tmp_path / "parts", *options, "train.steps=3")
    parts, found = _run(tmp_path / "parts", *options, resume=True)
    assert parts.losses == whole.losses[3:]
    assert found.keys() == right.keys() and all(torch.equal(t, right[name]) for name, t in found.items())
    assert any(name.endswith("fp8_amax_history") and t.any() for name, t in right.items())


def _planted(folder: Path, *overrides: str, resume: bool = False) -> tuple[Seen, Any, dict[str, torch.Tensor]]:
    """A run with an outlier planted in what layers.0.mlp.gate and up read: other values become 0 beside it."""
    seen = Seen()
    trainer = open_trainer(folder, *overrides, sinks=lambda trainer: [seen])
    if resume:
        assert trainer.resume()
    planted = trainer.model.layers[0].mlp_norm
    handle = planted.register_forward_hook(lambda module, inputs, out: _with_outlier(out))
    trainer.fit()
    handle.remove()
    recipes = {name: str(m.recipe) for name, m in trainer.model.named_modules() if isinstance(m, FP8Linear)}
    state = {name: t.clone() for name, t in trainer.optimizer.tensors().items()}
    trainer.close()
    return seen, recipes, state


def _with_outlier(out: Any) -> Any:
    x = out[0] if isinstance(out, tuple) else out
    x = torch.cat([x[..., :1] * 0 + 1e6, x[..., 1:]], -1)
    return (x, *out[1:]) if isinstance(out, tuple) else x


@pytest.mark.parametrize("recipe", [pytest.param("tensor", marks=pytest.mark.slow), "tensor-delayed"])
def test_bad_readings_move_a_layer_to_a_safer_recipe(recipe: str, tmp_path: Path) -> None:
    options = (f"fp8.recipe={recipe}", "fp8.watch=1", "schedule.decay_steps=7", "train.steps=7", *SHORT[1:])
    whole, recipes, right = _planted(tmp_path / "whole", *options)
    moves = [note.split(" after")[0] for note in whole.notes if "goes from" in note]
    for name in ("layers.0.mlp.gate", "layers.0.mlp.up"):
        # by row the outlier is in every row too
        steps = [f"fp8: {name} goes from {recipe} to row", f"fp8: {name} goes from row to block"]
        assert [move for move in moves if name in move][:2] == steps
    assert recipes["layers.1.mlp.down"].startswith("tensor")  # its readings are good
    assert not any(name.startswith("model.layers.0.mlp.gate.fp8") for name in right)
    _planted(tmp_path / "parts", *options, "train.steps=4")
    parts, again, found = _planted(tmp_path / "parts", *options, resume=True)
    assert parts.losses == whole.losses[4:] and again == recipes
    assert found.keys() == right.keys() and all(torch.equal(t, right[name]) for name, t in found.items())


def _regression(rescue: bool) -> tuple[list[float], list[str]]:
    """Losses of a layer that learns from channels beside one of 3e7, by tensor, and the notes of the run."""
    torch.manual_seed(0)
    x = torch.randn(64, 256)
    x[:, 0] = 3e7
    target = x[:, 128:] @ torch.randn(128, 8) / 11
    model = torch.nn.Sequential(torch.nn.Linear(256, 8, bias=False))
    torch.nn.init.zeros_(model[0].weight)
    quantize_model(model, Tensor())
    notes: list[str] = []
    watch = FP8Watch(model, FP8Config(recipe="tensor", watch=1, rescue=rescue), notes.append)
    # no step along the planted channel, whose gradient would hide what the others learn
    mask = torch.ones(256)
    mask[0] = 0.0
    losses = []
    for step in range(1, 81):
        with watch.step(step):
            loss = (model(x) - target).square().mean()
            (grad,) = torch.autograd.grad(loss, [model[0].weight])
        with torch.no_grad():
            model[0].weight -= 0.3 * grad * mask
        losses.append(loss.item())
    return losses, notes


def test_the_watch_rescues_a_run_with_planted_outliers() -> None:
    """By tensor all else becomes 0 beside the outlier, and nothing is learned; by block its group alone is lost."""
    lost, notes = _regression(rescue=False)
    assert lost[-1] > 0.95 * lost[0] and not any("goes from" in note for note in notes)
    saved, notes = _regression(rescue=True)
    assert saved[-1] < 0.2 * saved[0]
    assert any("0 goes from tensor to row" in note for note in notes)
    assert any("0 goes from row to block" in note for note in notes)


def test_a_scale_of_nan_stops_the_run_and_names_its_layer(tmp_path: Path) -> None:
    trainer = open_trainer(tmp_path / "fp8", *SHORT, "fp8.recipe=tensor-delayed", sinks=lambda trainer: [])
    trainer.model.get_submodule("layers.1.mlp.down").fp8_scale.fill_(float("nan"))
    with pytest.raises(TrainingStopped, match=r"not finite is that of layers\.1\.mlp\.down\.weight"):
        trainer.fit()
    trainer.close()


@pytest.mark.slow
def test_recipes_are_kept_without_rescue(tmp_path: Path) -> None:
    options = ("fp8.recipe=row", "fp8.watch=1", "fp8.rescue=false", "train.steps=4", *SHORT)
    kept, recipes, _ = _planted(tmp_path / "plain", *options)
    assert not any("goes from" in note for note in kept.notes) and set(recipes.values()) == {"row"}


@pytest.mark.parametrize("recipe", ["tensor-delayed", pytest.param("row", marks=pytest.mark.slow)])
def test_adapters_on_an_fp8_base(recipe: str, tmp_path: Path) -> None:
    """DoRA of a base in FP8: a resumed run has the same bits, though it quantizes the frozen weights anew."""
    options = (f"fp8.recipe={recipe}", "train.lora={rank: 4, dora: true}")
    options += ("train.precision=bf16", "schedule.decay_steps=4", "train.steps=4", "optimizer.lr=1e-2", *SHORT[1:])
    whole, right = _run(tmp_path / "whole", *options)
    assert whole.notes[0].startswith(f"fp8: 10 linear layers by {recipe}")
    _run(tmp_path / "parts", *options, "train.steps=2")
    parts, found = _run(tmp_path / "parts", *options, resume=True)
    assert parts.losses == whole.losses[2:] and whole.losses[-1] < whole.losses[0]
    assert found.keys() == right.keys() and all(torch.equal(t, right[name]) for name, t in found.items())


def test_from_a_run_without_it(tmp_path: Path) -> None:
    """A bf16 run goes on in FP8: its checkpoint has no magnitudes, which start anew."""
    _run(tmp_path / "parts", *SHORT[1:], "train.steps=2")
    found, _ = _run(tmp_path / "parts", *SHORT[1:], "fp8.recipe=tensor-delayed", "train.steps=4", resume=True)
    assert len(found.losses) == 2
    folder = tmp_path / "parts" / "run" / "checkpoints"
    seen = Seen()
    options = ("fp8.recipe=tensor-delayed", "train.steps=2", f"checkpoint.load={folder}", "checkpoint.finetune=true")
    trainer = open_trainer(tmp_path / "fp8", *SHORT, *options, sinks=lambda trainer: [seen])
    trainer.start_from(folder)
    trainer.fit()
    trainer.close()
    assert len(seen.losses) == 2


def test_gates_are_kept_in_fp8(tmp_path: Path) -> None:
    """And recomputed layers have the bits of those that are not; the watch reports what keeping changed."""
    options = (*SHORT, "train.steps=4", "fp8.recipe=block", "fp8.keep=fp8")
    found, state = _run(tmp_path / "plain", *options, "fp8.watch=2")
    assert "fp8.keep: 2 gated MLPs keep gate and up in FP8" in found.notes[0]
    assert any(" kept: amax" in note for note in found.notes)
    again, recomputed = _run(tmp_path / "fp8", *options, "train.activation_checkpointing=full")
    assert found.losses == again.losses
    assert all(torch.equal(recomputed[name], tensor) for name, tensor in state.items())
    plain, _ = _run(tmp_path / "plain", *SHORT, "train.steps=4", "fp8.recipe=block")
    assert plain.losses != found.losses
    torch.testing.assert_close(found.losses, plain.losses, rtol=1e-2, atol=0)


def test_keep_and_errors(tmp_path: Path) -> None:
    trainer = open_trainer(tmp_path / "fp8", "fp8.recipe=row", "fp8.keep=[first_block,'*.down']", sinks=lambda t: [])
    names = {name for name, m in trainer.model.named_modules() if isinstance(m, FP8Linear)}
    trainer.close()
    assert names == {f"layers.1.{name}" for name in ("attention.qkv", "attention.out", "mlp.gate", "mlp.up")}
    with pytest.raises(ValueError, match=r"fp8.keep must name layers, or be of lm_head, .*, got 'layers.7.\*'"):
        open_trainer(tmp_path / "fp8", "fp8.recipe=row", "fp8.keep=['layers.7.*']", sinks=lambda t: [])
    for override, words in (
        ("fp8.recipe=mxfp8", "fp8.recipe"),
        ("fp8.wire=fp16", "fp8.wire"),
        ("fp8.wire=fp8", r"fp8\.wire must be bf16 with fp8\.recipe none, got fp8"),
        ("fp8.history=0", "fp8.history"),
        ("fp8.margin=1", r"fp8\.margin must be 0 unless fp8\.recipe is tensor-delayed, got 1 for none"),
    ):
        with pytest.raises(ConfigError, match=words):
            read(tmp_path / "fp8", override)
    read(tmp_path / "fp8", "fp8.recipe=row", "parallel.tensor=2")
    with pytest.raises(ConfigError, match=r"fp8\.recipe must be tensor, row or block with parallel\.tensor 2: "):
        read(tmp_path / "fp8", "fp8.recipe=tensor-delayed", "parallel.tensor=2")
    with pytest.raises(ConfigError, match=r"fp8\.watch must be 0 with parallel\.tensor 2: .*, got 4"):
        read(tmp_path / "fp8", "fp8.recipe=row", "parallel.tensor=2", "fp8.watch=4")


def test_kernels_of_a_run_are_known_before_it(tmp_path: Path) -> None:
    """On a GPU the run's own kernels; layers too narrow for FP8 launch none."""
    wide = "{architecture: llama, hidden_size: 1024, num_layers: 3, num_heads: 8, intermediate_size: 2048}"
    config = read(tmp_path / "fp8", "fp8.recipe=row", f"model={wide}", "fp8.keep=['layers.2.*']").config
    config = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": 256})})
    kernels = {spec.kernel.name for spec in record_step(config, Target.parse("H100"), layers=1)}
    assert {"_quantize_row_kernel", "_quantize_tile_kernel"} <= kernels
    assert not {k for k in kernels if "quantize" in k} & {
        spec.kernel.name for spec in record_step(config, Target.parse("A100"), layers=1)
    }


NEOX = """
num_layers: 2
hidden_size: 32
num_attention_heads: 2
seq_length: 32
max_position_embeddings: 32
train_micro_batch_size_per_gpu: 2
train_iters: 3
pos_emb: rotary
tokenizer_type: CharLevelTokenizer
optimizer: {{type: Adam, params: {{lr: 0.001}}}}
data_path: {folder}/text
{fp8}
"""


def _neox(folder: Path, fp8: str) -> Path:
    file = folder / "neox.yml"
    file.write_text(NEOX.format(folder=folder, fp8=fp8))
    return file


def test_keys_of_gpt_neox(tmp_path: Path) -> None:
    keys = "te_fp8_mha: true\nte_fp8_format: e4m3\nte_fp8_amax_history_len: 16\nte_fp8_amax_compute_algo: max"
    run = read_config([_neox(tmp_path, keys)], [])
    recipe = recipe_of(run.config.fp8)
    assert recipe == Tensor(scale="delayed", format="e4m3", history=16)
    assert run.config.fp8.keep == ("lm_head", "router", "*.mlp.*")
    rows = {row.key: row for row in run.table}
    assert "projections by tensor-delayed" in rows["te_fp8_mha"].explanation
    run = read_config([_neox(tmp_path, "te_fp8_margin: 2")], [])
    assert recipe_of(run.config.fp8) is None
    with pytest.raises(UnsupportedConfig, match="te_fp8_wgrad is not supported at false"):
        read_config([_neox(tmp_path, "te_fp8_mha: true\nte_fp8_wgrad: false")], [])
    with pytest.raises(ConfigError, match="te_fp8_format must be one of e4m3, hybrid, got 'e5m2'"):
        read_config([_neox(tmp_path, "te_fp8_mha: true\nte_fp8_format: e5m2")], [])


@pytest.mark.parametrize("recipe", ["tensor-delayed", "block"])
def test_recomputation_keeps_the_bits(recipe: str, tmp_path: Path) -> None:
    options = (*SHORT, "train.steps=3", f"fp8.recipe={recipe}", "model.num_layers=1")
    losses = [
        _run(tmp_path / "fp8", *options, f"train.activation_checkpointing={mode}")[0].losses
        for mode in ("none", "selective", "full")
    ]
    assert losses[0] == losses[1] == losses[2]


def test_a_layer_with_an_adapter_is_moved_too() -> None:
    def made() -> torch.nn.Module:
        model = powertrain.lora(torch.nn.Sequential(torch.nn.Linear(32, 32)), rank=2)
        assert quantize_model(model, Tensor()).quantized
        return model

    notes: list[str] = []
    config = FP8Config(recipe="tensor", watch=1)
    watched = FP8Watch(made(), config, notes.append)
    x = torch.randn(8, 32)
    x[0, 0] = 1e6
    for step in range(1, 4):
        with watched.step(step):
            watched.model(x).square().mean().backward()
    assert watched.moved == {"0": "row"} and str(watched.model[0].fp8.recipe) == "row"  # type: ignore[index]
    resumed = FP8Watch(made(), config, notes.append)
    resumed.restore(**watched.state())
    assert str(resumed.model[0].fp8.recipe) == "row"  # type: ignore[index]
