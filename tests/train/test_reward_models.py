"""Reward models: the value head is loaded, converted both ways, and not lost without a word."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.models import build, configure, huggingface
from powertrain.models.peft import load_adapter, save_adapter
from powertrain.models.reward import add_value_head, rewards
from powertrain.nn.lora import lora, lora_layers
from powertrain.runtime import tracing
from powertrain.train.checkpoint import store as checkpoint_store
from powertrain.train.checkpoint.convert import convert
from powertrain.train.checkpoint.load import load_model, open_weights
from powertrain.train.model_setup import is_base
from tests.train.test_objectives import _open
from tests.train.tiny_run import open_trainer

SIZES = {"vocab_size": 96, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "llama", "intermediate_size": 48},
    "mistral": {"architecture": "llama", "intermediate_size": 48, "sliding_window": 8},
    "qwen2": {"architecture": "llama", "intermediate_size": 48, "qkv_bias": True, "tie_embeddings": True},
    "qwen3": {"architecture": "llama", "intermediate_size": 48, "qk_norm": True, "head_dim": 16, "num_kv_heads": 2},
    "neox": {"architecture": "gpt_neox", "parallel_residual": True, "rotary_pct": 0.5},
    "neox as llama": {
        "architecture": "gpt_neox", "norm": "rms_norm", "norm_bias": False, "activation": "swiglu",
        "attention_bias": False, "mlp_bias": False,
    },
    "deepseek": {
        "architecture": "deepseek", "intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 4,
        "experts_per_token": 2, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    },
}  # fmt: skip


def _trained(folder: Path, *options: str) -> Any:
    folder.mkdir(exist_ok=True)
    trainer, _ = _open(folder, "reward", "train.steps=2", "evaluation.at_end=false", *options)
    trainer.fit()
    trainer.close()
    return trainer.model.eval()


def _tokens(count: int = 96) -> Tensor:
    return torch.randint(1, count, (3, 12), generator=torch.Generator().manual_seed(0))


def _rewards(path: Path, tokens: Tensor) -> Tensor:
    return rewards(load_model(path, device="cpu")[0], tokens)


@pytest.mark.parametrize("options", [(), ("train.lora.rank=4", "train.lora.dora=true")], ids=["whole", "lora"])
def test_a_run_is_loaded_and_converted_with_its_value_head(options: tuple[str, ...], tmp_path: Path) -> None:
    model = _trained(tmp_path, *options)
    # trained whole: no adapter beside it
    assert type(model.value) is torch.nn.Linear and model.value.weight.requires_grad
    tokens = _tokens(256)
    expected = rewards(model, tokens)
    padded = rewards(model, torch.cat([tokens, tokens], 1), torch.full((3,), 12))
    torch.testing.assert_close(padded, expected, rtol=1e-4, atol=1e-5)
    for lengths, words in (([3], "shape [3]"), ([0, 3, 3], "be in [1, 13)"), ([3, 3, 13], "be in [1, 13)")):
        with pytest.raises(ValueError, match=re.escape("rewards: lengths must ") + ".*" + re.escape(words)):
            rewards(model, tokens, torch.tensor(lengths))
    source = tmp_path / "run"
    for number, kind in enumerate(("powertrain", "hf", "powertrain", "hf")):
        done = convert(open_weights(source), tmp_path / str(number), kind)  # type: ignore[arg-type]
        assert done.compared is not None and done.compared.ok and done.compared.of == "rewards"
        source = tmp_path / str(number)
        torch.testing.assert_close(_rewards(source, tokens), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(_rewards(tmp_path / "run", tokens), expected, rtol=1e-4, atol=1e-5)
    for path in ("0", "run"):
        torch.testing.assert_close(load_model(tmp_path / path, device="cpu")[0](tokens), model(tokens))
    with pytest.raises(ValueError, match="must have an output layer for logits"):
        load_model(source, device="cpu")[0](tokens)
    done = convert(open_weights(tmp_path / "run"), tmp_path / "neox", "neox")
    assert any("the value head of" in note and "left out" in note for note in done.notes)
    with pytest.raises(ValueError, match="a GPT-NeoX checkpoint must have an output layer, got a reward model"):
        convert(open_weights(source), tmp_path / "no", "neox")


def _folder(folder: Path, **fields: Any) -> Any:
    """A Hugging Face folder of a reward model."""
    model = build(configure(**{**SIZES, **fields}), device="cpu")
    add_value_head(model, device="cpu")
    model.init_weights(1)
    folder.mkdir(parents=True)
    tensors = model.state_dict()
    huggingface.write(folder, model.config, tensors.items(), eod=0, reward=True)
    return model.eval()


def test_a_language_model_that_began_with_a_reward_model_is_of_its_own_class(tmp_path: Path) -> None:
    """Its config.json keeps the keys of another only where the class is the same."""
    _folder(tmp_path / "reward", architecture="llama", intermediate_size=64, num_heads=2, tie_embeddings=True)
    options = (f"checkpoint.load={tmp_path / 'reward'}", "train.steps=1", "evaluation.at_end=false")
    trainer = open_trainer(
        tmp_path, *options, "model.vocab_size=256", "model.tie_embeddings=true", sinks=lambda _: []
    )  # fmt: skip
    trainer.fit()
    trainer.close()
    convert(open_weights(tmp_path / "run"), tmp_path / "out", "hf", check=False)
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_gives_the_same_rewards(family: str, tmp_path: Path) -> None:
    """With and without the end token, which a classifier takes for padding: training reads the state before it."""
    transformers = pytest.importorskip("transformers")
    model = _folder(tmp_path / "hf", **FAMILIES[family])
    theirs, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    tokens = _tokens()
    expected = rewards(model, tokens)
    with torch.no_grad():
        for row in (tokens, torch.cat([tokens, torch.zeros(3, 1, dtype=torch.long)], 1)):
            torch.testing.assert_close(theirs.float().eval()(row).logits[:, 0], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(_rewards(tmp_path / "hf", tokens), expected, rtol=1e-4, atol=1e-5)
    done = convert(open_weights(tmp_path / "hf"), tmp_path / "ours", "powertrain")
    assert done.compared is not None and (done.compared.source, done.compared.of) == ("transformers", "rewards")


def test_a_classifier_of_several_labels_is_refused(tmp_path: Path) -> None:
    _folder(tmp_path / "hf", **FAMILIES["llama"])
    file = tmp_path / "hf/config.json"
    values = json.loads(file.read_text())
    for labels, count in (({"0": "a", "1": "b"}, 2), (None, 2)):
        file.write_text(json.dumps({**values, "id2label": labels}))
        with pytest.raises(ValueError, match=f"id2label must have one label, that of a reward model, got {count}"):
            open_weights(tmp_path / "hf")


def test_adapters_of_a_reward_model_are_pefts(tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    (tmp_path / "sft").mkdir()
    sft, _ = _open(tmp_path / "sft", "sft", "train.steps=1")
    sft.fit()
    sft.close()
    convert(open_weights(tmp_path / "sft/run"), tmp_path / "base", "hf", check=False)
    model = _trained(tmp_path / "reward", f"checkpoint.load={tmp_path}/base", "train.lora.rank=4")
    convert(open_weights(tmp_path / "reward/run"), tmp_path / "adapter", "peft")
    tokens = _tokens(256)
    expected = rewards(model, tokens)
    torch.testing.assert_close(_rewards(tmp_path / "adapter", tokens), expected, rtol=1e-4, atol=1e-5)
    base = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        scores = [theirs(row[None]).logits[0, 0] for row in tokens]
    torch.testing.assert_close(torch.stack(scores), expected, rtol=1e-4, atol=1e-5)
    # written by PEFT, read by us
    theirs.save_pretrained(tmp_path / "again")
    torch.testing.assert_close(_rewards(tmp_path / "again", tokens), expected, rtol=1e-4, atol=1e-5)
    done = convert(open_weights(tmp_path / "again"), tmp_path / "merged", "hf")
    assert done.compared is not None and done.compared.ok


def test_adapters_from_python_come_with_the_value_head(tmp_path: Path) -> None:
    def made(seed: int) -> Any:
        model = build(configure(**{**SIZES, **FAMILIES["llama"]}), device="cpu")
        model.init_weights(0)
        add_value_head(model, device="cpu")
        torch.nn.init.normal_(model.value.weight, generator=torch.Generator().manual_seed(seed))
        return model

    first, second = lora(made(1), targets=["attention.out"]), made(2)
    save_adapter(first, tmp_path)
    load_adapter(second, tmp_path)
    assert torch.equal(second.value.weight, first.value.weight)
    with pytest.raises(ValueError, match="model must have a value head"):
        load_adapter(build(second.config, device="cpu"), tmp_path)
    with pytest.raises(ValueError, match="must hold lora_A"):
        load_adapter(torch.nn.Linear(2, 2), tmp_path)


@pytest.mark.parametrize("kind", ["run", "hf"])
def test_training_begins_with_a_value_head(kind: str, tmp_path: Path) -> None:
    model = _trained(tmp_path)
    if kind == "hf":
        convert(open_weights(tmp_path / "run"), tmp_path / "hf", "hf", check=False)
    (tmp_path / "inside").mkdir()
    options = (f"checkpoint.load={tmp_path / kind}", "checkpoint.finetune=true")
    again, _ = _open(tmp_path / "inside", "reward", *options)
    assert torch.equal(rewards(again.model.eval(), _tokens()), rewards(model, _tokens()))
    again.close()
    if kind == "hf":
        with pytest.raises(ValueError, match=r"checkpoint\.load for train\.objective sft must have an output layer"):
            _open(tmp_path / "inside", "sft", *options)
        with pytest.raises(ValueError, match=r"train\.reference must have an output layer"):
            _open(tmp_path / "inside", "dpo", f"train.reference={tmp_path / kind}")
        return
    other, _ = _open(tmp_path / "inside", "sft", *options)
    other.close()
    assert any("the value head in" in e.text and "train.objective sft" in e.text for e in tracing.trace())


@pytest.mark.parametrize("first, then", [("reward", "sft"), ("dpo", "reward")])
@pytest.mark.parametrize("fresh_optimizer", [False, True])
def test_a_value_head_is_not_dropped_by_another_objective(
    first: str, then: str, fresh_optimizer: bool, tmp_path: Path
) -> None:
    trainer, _ = _open(tmp_path, first, "train.steps=1")
    trainer.fit()
    trainer.close()
    words = rf"train.objective must be {first} as in .*, which holds (no|a) value head, got {then}; another logging"
    options: tuple[str, ...] = ("train.steps=2",)
    if fresh_optimizer:
        options = (*options, f"checkpoint.load={tmp_path}/run/checkpoints", "checkpoint.load_optimizer=false")
        options = (*options, f"checkpoint.folder={tmp_path}/other", f"logging.folder={tmp_path}/other")
    with pytest.raises(ValueError, match=words):
        _open(tmp_path, then, *options)


def test_another_objective_is_said(tmp_path: Path) -> None:
    trainer, _ = _open(tmp_path, "sft", "train.steps=1")
    trainer.fit()
    trainer.close()
    trainer, _ = _open(tmp_path, "dpo", f"train.reference={tmp_path}/run/checkpoints/step_00000001")
    trainer.close()
    assert trainer.progress.step == 1
    said = f"train.objective was sft in {tmp_path}"
    assert any(e.text.startswith(said) and "is dpo from here on" in e.text for e in tracing.trace())


def test_a_run_of_an_earlier_version_has_an_adapter_of_the_value_head(tmp_path: Path, monkeypatch: Any) -> None:
    """It is read with that adapter merged; it is not resumed."""

    def as_before(model: Any, config: Any) -> None:
        add_value_head(model)
        lora(model, rank=config.train.lora.rank, alpha=config.train.lora.alpha)
        for name, p in model.named_parameters():
            p.requires_grad_(not is_base(name))

    with monkeypatch.context() as patch:
        patch.setattr("powertrain.train.model_setup.add_trained_parts", as_before)
        model = _trained(tmp_path, "train.lora.rank=4")
    assert "value" in lora_layers(model)
    tokens = _tokens(256)
    expected = rewards(model, tokens)
    torch.testing.assert_close(_rewards(tmp_path / "run", tokens), expected, rtol=1e-4, atol=1e-5)
    convert(open_weights(tmp_path / "run"), tmp_path / "adapter", "peft")
    assert "model.value.lora_A" in checkpoint_store.dtypes(tmp_path / "run/checkpoints/step_00000002")
    with pytest.raises(ValueError, match=r"must have no adapter of the value head to be resumed.*finetune: true"):
        _open(tmp_path, "reward", "train.lora.rank=4")
    (tmp_path / "inside").mkdir()
    options = (f"checkpoint.load={tmp_path}/run", "checkpoint.finetune=true", "train.lora.rank=4")
    again, _ = _open(tmp_path / "inside", "reward", *options)
    torch.testing.assert_close(rewards(again.model.eval(), tokens), expected, rtol=1e-4, atol=1e-5)
    again.close()
