"""GPT-NeoX configs with sparse attention: keys beside DeepSpeed's layouts, checkpoints, a run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.models import build, configure
from powertrain.nn.block_sparsity import BlockSparsity
from powertrain.train.checkpoint.load import build_from, open_weights
from powertrain.train.checkpoint.neox import write
from powertrain.train.checkpoint.neox_config import to_neox_config
from powertrain.train.config.neox import model_fields
from powertrain.train.config.reader import Run, read_config
from powertrain.train.config.yaml_source import ConfigError, Source, UnsupportedConfig
from tests.train.tiny_run import open_trainer

KEYS: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 192, "max_position_embeddings": 192,
    "train_micro_batch_size_per_gpu": 4, "train_iters": 10, "data_path": "d", "tokenizer_type": "CharLevelTokenizer",
}  # fmt: skip


def _read(folder: Path, kind: str, section: dict[str, Any] | None, **keys: Any) -> Run:
    file = folder / "neox.yml"
    more = {"attention_config": [[[kind, "global"], "all"]]} | ({} if section is None else {"sparsity_config": section})
    file.write_text(json.dumps(KEYS | more | keys, indent=0))
    return read_config([file], world_size=1)


# DeepSpeed's rules by kind, as (r, c) of 12 blocks, from its class and GPT-NeoX's defaults; c <= r goes without saying
CASES: dict[str, tuple[str, dict[str, Any] | None, Any]] = {
    "local": ("local", None, lambda r, c: c >= r - 2),
    "sparse.yml": ("local", {"block": 16, "num_local_blocks": 8}, lambda r, c: c >= r - 4),
    "local-by-other-name": ("local", {"num_sliding_window_blocks": 3}, lambda r, c: c >= r - 1),
    "fixed": ("sparse_fixed", None, lambda r, c: r // 4 == c // 4 or c % 4 == 3),
    "fixed-2": ("sparse_fixed", {"num_local_blocks": 6, "num_global_blocks": 2},
                lambda r, c: r // 6 == c // 6 or c % 6 >= 4),
    "variable": ("sparse_variable", None, lambda r, c: r // 4 == c // 4 or c == 0),
    "variable-ranges": ("sparse_variable", {"local_window_blocks": [2, 5], "global_block_indices": [3],
                                            "global_block_end_indices": [5]},
                        lambda r, c: any(a <= c <= r < b for a, b in ((0, 2), (2, 7), (7, 12))) or 3 <= c < 5),
    "bigbird": ("bigbird", {"num_random_blocks": 0}, lambda r, c: c >= r - 1 or c == 0),
    "bslongformer": ("bslongformer", {"global_block_indices": [0, 5]},
                     lambda r, c: c >= r - 1 or c in (0, 5) or r in (0, 5)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_layouts(case: str, tmp_path: Path) -> None:
    kind, section, sees = CASES[case]
    model: Any = _read(tmp_path, kind, section).config.model
    assert model.layer_types == ("sparse", "attention") and model.sparsity.block == 16
    wanted = [[c <= r and bool(sees(r, c)) for c in range(12)] for r in range(12)]
    assert model.sparsity.sees_blocks(12).tolist() == wanted


@pytest.mark.parametrize(
    "kind, section, keys, error, words",
    [
        ("local", {"block": 10}, {}, ConfigError, r"sparsity_config.block must divide seq_length \(192\), got 10"),
        ("local", {"num_local_blocks": 13}, {}, ConfigError, "num_local_blocks must be at most 12, the blocks of seq"),
        ("local", {"block": "x"}, {}, ConfigError, "sparsity_config.block must be an integer, got 'x'"),
        ("local", None, {"num_kv_heads": 2}, UnsupportedConfig, "GPT-NeoX refuses it with sparse attention too"),
        ("local", None, {"attention_config": [[["local", "bigbird"], 1]]}, UnsupportedConfig, "one sparsity here"),
        ("sparse_fixed", {"num_local_blocks": 5}, {}, UnsupportedConfig, "give a divisor of the 12 blocks"),
        ("sparse_fixed", {"num_global_blocks": 3}, {}, ConfigError, r"must divide num_local_blocks \(4\), got 3"),
        ("sparse_fixed", {"num_different_global_patterns": 2, "different_layout_per_head": True}, {},
         UnsupportedConfig, "heads have one layout here"),
        ("sparse_variable", {"num_random_blocks": 2}, {}, UnsupportedConfig, "blocks are drawn anew in every process"),
        ("sparse_variable", {"local_window_blocks": []}, {}, ConfigError, "local_window_blocks must be a list of int"),
        ("bslongformer", {"global_block_indices": [3], "global_block_end_indices": [3]}, {}, ConfigError,
         r"global_block_end_indices must have an end above each of \[3\], got \[3\]"),
        ("bigbird", None, {}, UnsupportedConfig, "give num_random_blocks: 0"),
    ],
)  # fmt: skip
def test_what_is_refused(
    kind: str, section: dict[str, Any] | None, keys: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        _read(tmp_path, kind, section, **keys)


def test_keys_that_a_kind_does_not_read(tmp_path: Path) -> None:
    rows = {row.key: row for row in _read(tmp_path, "local", {"num_global_blocks": 2}).table}
    assert rows["sparsity_config.num_global_blocks"].explanation == "GPT-NeoX does not read it for local attention"
    # without a sparse layer none is read
    flash = _read(tmp_path, "flash", {"num_local_blocks": 99})
    assert flash.config.model.sparsity is None  # type: ignore[attr-defined]


SIZES: dict[str, Any] = {
    "architecture": "gpt_neox", "vocab_size": 96, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
    "max_position_embeddings": 192, "layer_types": ("sparse", "attention"),
}  # fmt: skip
RULES: list[dict[str, Any]] = [
    {"before": 2}, {"before": 0, "block": 8}, {"windows": (4,), "last_of_window": 2},
    {"windows": (1, 3), "global_blocks": ((0, 1),)}, {"before": 1, "global_blocks": ((0, 2),)},
    {"before": 1, "global_blocks": ((0, 1), (4, 6)), "global_rows": True},
]  # fmt: skip


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_every_key_is_written(rules: dict[str, Any]) -> None:
    config: Any = configure(**SIZES, sparsity=rules)
    again: Any = configure(**model_fields(Source(values=to_neox_config(config))))
    assert again.sparsity == config.sparsity and again.layer_types == config.layer_types


def test_rules_that_gpt_neox_has_not() -> None:
    config: Any = configure(**SIZES, sparsity={"before": 1, "global_blocks": ((2, 3),)})
    with pytest.raises(
        ValueError, match=r"model.sparsity must be one of GPT-NeoX's layouts, got BlockSparsity\(block="
    ):
        to_neox_config(config)


def test_a_checkpoint_there_and_back(tmp_path: Path) -> None:
    """Sparse layers have the tensors of others: the same logits, of the model that the written config names."""
    model = build(configure(**SIZES, sparsity={"block": 4, "before": 1}, init_std=0.3), device="cpu").eval()
    model.init_weights(3)
    step = write(tmp_path, model.config, iter(model.state_dict().items()))
    weights = open_weights(step)
    assert weights.config.sparsity == BlockSparsity(4, before=1)  # type: ignore[attr-defined]
    tokens = torch.randint(0, 96, (2, 30))
    with torch.no_grad():
        assert torch.equal(build_from(weights, "cpu", torch.float32).eval()(tokens), model(tokens))
        full = build(configure(**{**SIZES, "layer_types": ("attention",)}), device="cpu").eval()
        full.load_state_dict(model.state_dict())
        assert not torch.allclose(full(tokens), model(tokens))


def test_a_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    model = (
        "model.architecture=gpt_neox", "model.layer_types=[sparse,attention]", "model.attention_dropout=0.2",
        "model.sparsity={block: 4, before: 1}", "train.activation_checkpointing=selective", "schedule.decay_steps=6",
        "evaluation.every=0", "evaluation.at_end=false",
    )  # fmt: skip

    def run(name: str, steps: int, *overrides: str) -> dict[str, Tensor]:
        (tmp_path / name).mkdir()
        trainer = open_trainer(tmp_path / name, *model, f"train.steps={steps}", *overrides, sinks=lambda _: [])
        trainer.fit()
        trainer.close()
        tensors: dict[str, Tensor] = trainer.optimizer.tensors()
        return tensors

    expected = run("whole", 6)
    run("first", 3)
    found = run("again", 6, f"checkpoint.load={tmp_path}/first/run")
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
