"""GPT-NeoX's finetuning configs (post-training/configs/llama3-8b-*.yml) at a small size: read, linted, three steps."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from powertrain.cli import app
from powertrain.train import ranks
from powertrain.train.config.reader import Run, read_config
from powertrain.train.config.yaml_source import ConfigError, UnsupportedConfig
from powertrain.train.data.completions import CompletionEncoding, write_completions
from powertrain.train.data.corpus import Raw
from powertrain.train.data.tokenizer import load_tokenizer
from powertrain.train.run import start
from tests.train.test_objectives import RECORDS, Recorder

# what the four files have in common, sizes and paths aside
COMMON: dict[str, Any] = {
    "pipe_parallel_size": 0, "model_parallel_size": 1, "make_vocab_size_divisible_by": 1, "num_layers": 2,
    "hidden_size": 32, "num_attention_heads": 4, "num_kv_heads": 2, "seq_length": 48, "max_position_embeddings": 48,
    "pos_emb": "rotary", "rotary_pct": 1, "rotary_emb_base": 500000, "rope_fusion": True, "no_weight_tying": True,
    "gpt_j_residual": False, "output_layer_parallelism": "column", "norm": "rmsnorm", "rms_norm_epsilon": 1.0e-5,
    "attention_config": [[["flash"], 2]], "scaled_upper_triang_masked_softmax_fusion": True, "bias_gelu_fusion": False,
    "use_bias_in_norms": False, "use_bias_in_attn_linear": False, "use_bias_in_mlp": False,
    "use_flashattn_swiglu": True, "activation": "swiglu", "intermediate_size": 64, "mlp_multiple_of": 64,
    "optimizer": {"type": "Adam", "params": {"lr": 5.0e-7, "betas": [0.9, 0.95], "eps": 1.0e-8}}, "min_lr": 0.0,
    "zero_optimization": {"stage": 1, "allgather_partitions": True, "overlap_comm": True, "reduce_scatter": True,
                          "contiguous_gradients": True, "cpu_offload": False},
    "allow_chopped": False, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "data_impl": "mmap",
    "pack_impl": "unpacked", "num_workers": 1, "checkpoint_activations": True, "checkpoint_num_layers": 1,
    "partition_activations": True, "synchronize_each_layer": True, "gradient_clipping": 1.0, "weight_decay": 0.1,
    "hidden_dropout": 0, "attention_dropout": 0, "precision": "bfloat16", "fp32_allreduce": True,
    "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "train_iters": 3, "lr_decay_iters": 3,
    "distributed_backend": "nccl", "lr_decay_style": "cosine", "warmup": 0.1, "checkpoint_factor": 1000,
    "eval_interval": 100, "eval_iters": 1, "log_interval": 1, "steps_per_print": 1, "wall_clock_breakdown": True,
    "use_wandb": False, "finetune": True, "tokenizer_type": "CharLevelTokenizer",
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "dpo": {"train_impl": "dpo", "dataset_impl": "pairwise", "dpo_fp32": True, "dpo_beta": 0.01},
    "rm": {"train_impl": "rm", "dataset_impl": "pairwise"},
    "kto": {"train_impl": "kto", "kto_fp32": True, "kto_beta": 0.1},
    "reinforce": {"train_impl": "reinforce", "kl_impl": "abs", "kl_div_beta": 0.05, "fp32_reinforce": True,
                  "serve_model_weights": False},
    "sft": {},
}  # fmt: skip
OBJECTIVES = {"dpo": "dpo", "rm": "reward", "kto": "kto", "sft": "pretrain", "reinforce": "policy"}
FORMS: dict[str, Any] = {"dpo": "pairs", "rm": "pairs", "kto": "labels", "sft": "messages", "reinforce": "advantages"}


def _config(folder: Path, name: str, **changes: Any) -> Path:
    """The config, and its data written by us in GPT-NeoX's files."""
    encoding = CompletionEncoding(load_tokenizer("CharLevelTokenizer"), FORMS[name])
    records = [json.dumps(RECORDS["sft" if name == "sft" else OBJECTIVES[name]](n)).encode() for n in range(40)]
    prefix = folder / name
    write_completions(
        (Raw(f"records:{n}", r, True) for n, r in enumerate(records, 1)), prefix, encoding, overwrite=True
    )
    data: dict[str, Any] = {}
    for part in ("train", "valid", "test"):
        if FORMS[name] == "pairs":
            for sign, side in (("pos", "chosen"), ("neg", "rejected")):
                data[f"{sign}_{part}_data_paths"] = [f"{prefix}_{side}_document"]
                data[f"{sign}_{part}_label_data_paths"] = [f"{prefix}_{side}_label_document"]
            continue
        data[f"{part}_data_paths"] = [f"{prefix}_document"]
        data[f"{part}_label_data_paths"] = [f"{prefix}_label_document"]
        if name in ("kto", "reinforce"):
            data[f"{part}_reward_data_paths"] = [f"{prefix}_reward_document"]
    values = COMMON | OWN[name] | data | {"save": str(folder / "run")} | changes
    file = folder / f"{name}.yml"
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}, indent=1))
    return file


def _run(folder: Path, name: str, **changes: Any) -> Run:
    return read_config([_config(folder, name, **changes)])


@pytest.mark.parametrize(
    "name", ["dpo", "reinforce", *(pytest.param(n, marks=pytest.mark.slow) for n in ("kto", "rm", "sft"))]
)
def test_three_steps(name: str, tmp_path: Path) -> None:
    run = _run(tmp_path, name)
    config = run.config
    assert (
        config.train.objective == OBJECTIVES[name]
        and config.data.packing == "unpacked"
        and not config.data.allow_chopped
    )
    assert config.train.preference.beta == (0.01 if name == "dpo" else 0.1)
    recorder = Recorder()
    trainer = start(run, ranks.read_launch_env(), lambda _: [recorder])
    trainer.fit()
    trainer.close()
    assert len(recorder.steps) == 3 and not any(record.skipped for record in recorder.steps)
    if name in ("dpo", "rm"):
        assert recorder.steps[0].loss == pytest.approx(0.693, abs=0.2)


def test_reinforce(tmp_path: Path) -> None:
    """Rewards of files; what comes from the data server, or needs groups or whole vocabularies, is refused."""
    policy = _run(tmp_path, "reinforce").config.train.policy
    assert (policy.kl, policy.kl_weight, policy.average, policy.ratio) == ("abs", 0.05, "token", "token")
    assert _run(tmp_path, "reinforce", kl_impl=None, kl_div_beta=0.0).config.train.policy.kl == "k2"
    for changes, words in (
        (
            {"dataset_impl": "online"},
            "no server is asked for samples. Write completions with their advantages to files",
        ),
        ({"reinforce_leave_one_out": True}, "subtract the mean reward of a prompt's other completions"),
        ({"kl_impl": "full"}, "kl_impl is not supported at full: use mse, abs or kl"),
        ({"serve_model_weights": True}, "serve_model_weights is not supported at true"),
    ):
        with pytest.raises(UnsupportedConfig, match=re.escape(words)):
            _run(tmp_path, "reinforce", **changes)
    with pytest.raises(ConfigError, match="kl_div_beta must be at least 0"):
        _run(tmp_path, "reinforce", kl_div_beta=-1.0)


@pytest.mark.parametrize("name", ["rm", *(pytest.param(n, marks=pytest.mark.slow) for n in ("dpo", "kto", "sft"))])
def test_lint(name: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["lint", str(_config(tmp_path, name)), "--arch", "H100"])
    assert result.exit_code == 0, result.output


def test_mistakes_name_the_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neg_train_data_paths must be given beside pos_train_data_paths"):
        _run(tmp_path, "dpo", neg_train_data_paths=None)
    with pytest.raises(ConfigError, match="pos_train_data_paths must be given for train_impl rm"):
        _run(tmp_path, "rm", pos_train_data_paths=None)
    with pytest.raises(ConfigError, match="pos_valid_label_data_paths must have as many entries as"):
        _run(tmp_path, "dpo", pos_valid_label_data_paths=["a", "b"])
