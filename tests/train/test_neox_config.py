"""GPT-NeoX configs as they are: what each key becomes, the batch arithmetic, the traps, what is refused."""

import json
import math
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
from rich.console import Console

from powertrain.train.config.neox_keys import KEYS
from powertrain.train.config.reader import Run, read_config
from powertrain.train.config.schema import RunConfig, ScheduleConfig
from powertrain.train.config.table import Row, render
from powertrain.train.config.yaml_source import ConfigError, UnsupportedConfig
from powertrain.train.mesh_shape import check_parallel, mesh_shape
from powertrain.train.run import unpadded, with_vocabulary
from powertrain.train.schedule import learning_rate

QUIRKS = Path(__file__).parent / "fixtures/every_quirk.yml"
# a whole config, of which each test changes a key or two
BASE = {
    "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "max_position_embeddings": 32,
    "train_micro_batch_size_per_gpu": 4, "train_iters": 100, "data_path": "d", "tokenizer_type": "CharLevelTokenizer",
}  # fmt: skip


def _read(folder: Path, world_size: int = 1, *, strict: bool = False, **keys: Any) -> Run:
    path = folder / "neox.yml"
    values = {key: value for key, value in (BASE | keys).items() if value is not ...}
    path.write_text(json.dumps(values, indent=0))
    return read_config([path], world_size=world_size, strict=strict)


def _config(folder: Path, world_size: int = 1, **keys: Any) -> Any:
    return _read(folder, world_size, **keys).config


def _error(folder: Path, world_size: int = 1, **keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        _read(folder, world_size, **keys)
    assert not isinstance(caught.value, UnsupportedConfig)
    return str(caught.value)


def _row(run: Run, key: str) -> Row:
    return next(row for row in run.table if row.key == key)


def test_every_quirk_of_writing() -> None:
    run = read_config([QUIRKS], world_size=2)
    config: Any = run.config
    model, train = config.model, config.train
    assert run.format == "gpt_neox" and "no section `model:`" in run.note
    assert (model.num_layers, model.num_kv_heads, model.norm, model.norm_eps) == (2, 2, "rms_norm", 1e-8)
    assert (model.activation, model.intermediate_size) == ("swiglu", 100)
    assert not model.tie_embeddings and not model.norm_bias and model.attention_bias
    assert model.sliding_window == 17  # GPT-NeoX's width leaves the query's own position out
    assert model.vocab_size == 512
    assert (train.micro_batch_size, train.gradient_accumulation_steps) == (4, 4)
    assert train.precision == "fp16" and train.loss_scale.initial_power == 12 and train.loss_scale.hysteresis == 3
    assert train.loss_scale.static is None
    assert config.schedule.warmup_steps == 0.015 * 800 and config.schedule.decay_steps == 800
    assert (config.parallel.strategy, config.parallel.reshard_after_forward) == ("fsdp", False)
    assert [s.weight for s in config.data.train] == [1, 3]
    assert config.checkpoint.scale == "log" and config.checkpoint.extra_steps == (7, 9)
    assert _row(run, "fp16.fp16").disposition == "ignored"
    assert _row(run, "lr_decay_style").disposition == "changes numerics"  # decays over 800 of 1000 steps
    assert _row(run, "num_layers").place.endswith("every_quirk.yml:5")


def test_defaults_are_gpt_neoxs(tmp_path: Path) -> None:
    config = _config(tmp_path)
    model = config.model
    assert (model.init_method, model.output_init_method) == ("normal", "scaled_normal")
    assert model.position_embedding == "learned"
    assert model.tie_embeddings and model.intermediate_size == 256 and model.activation == "gelu"
    assert (config.optimizer.lr, config.optimizer.betas, config.optimizer.weight_decay) == (1e-3, (0.9, 0.999), 0.1)
    assert config.train.precision == "fp32" and config.train.seed == 1234 and config.train.gradient_clipping == 0.0
    assert (config.schedule.kind, config.schedule.warmup_steps, config.schedule.clamp) == ("linear", 1.0, "neox")
    assert (config.evaluation.every, config.evaluation.steps, config.logging.every) == (1000, 100, 100)
    assert config.evaluation.advance  # a next evaluation takes the next batches there
    accumulated = _config(tmp_path, eval_iters=7, gradient_accumulation_steps=3).evaluation
    assert accumulated.steps == 21  # eval_iters counts optimizer batches
    assert config.data.split == "969, 30, 1" and config.parallel.strategy == "ddp"


def test_every_key_is_read(tmp_path: Path) -> None:
    """A key that is mapped or honoured, and read by nobody, would be silently ignored."""
    from powertrain.train.config import neox

    source = "".join(file.read_text() for file in Path(str(neox.__file__)).parent.glob("neox*.py"))
    by_part = {f"{part}_data_paths" for part in ("train", "valid", "test")}
    by_part |= {
        f"{part}_{kind}" for part in ("train", "valid", "test") for kind in ("data_weights", "label_data_paths")
    }
    by_part |= {f"{part}_reward_data_paths" for part in ("train", "valid", "test")}
    by_part |= {
        f"{side}_{part}_{kind}"
        for side in ("pos", "neg")
        for part in ("train", "valid", "test")
        for kind in ("data_paths", "label_data_paths")
    }
    # fused whatever they say
    words = ("whatever", "same result")
    no_effect = {key for key, row in KEYS.items() if row.disposition == "mapped" and any(w in row.words for w in words)}
    pending = [
        key for key, row in KEYS.items() if row.disposition in ("honoured", "mapped") and f'"{key}"' not in source
    ]
    by_nature = {"apply_query_key_layer_scaling", "distributed_backend", "deepspeed_mpi", "deepspeed_slurm"}
    assert set(pending) - by_part - no_effect == by_nature


def test_whose_schedule_goes_on(tmp_path: Path) -> None:
    """use_checkpoint_lr_scheduler and override_lr_scheduler exclude each other, as there."""
    assert not _config(tmp_path).checkpoint.load_schedule
    assert _config(tmp_path, use_checkpoint_lr_scheduler=True).checkpoint.load_schedule
    assert not _config(tmp_path, override_lr_scheduler=True).checkpoint.load_schedule
    both = _error(tmp_path, use_checkpoint_lr_scheduler=True, override_lr_scheduler=True)
    assert "override_lr_scheduler must be false beside use_checkpoint_lr_scheduler" in both


def test_every_key_has_a_type_and_words() -> None:
    kinds = {"int", "float", "bool", "str", "list", "dict"}
    for key, row in KEYS.items():
        assert set(row.kind.split("|")) <= kinds and row.words and key == key.lower()
    assert len(KEYS) > 250


@pytest.mark.parametrize("key", [key for key, row in KEYS.items() if row.disposition == "refused"])
def test_what_is_not_there_is_refused_when_switched_on_only(key: str, tmp_path: Path) -> None:
    kind = KEYS[key].kind
    off: Any = {"bool": False, "int": 0, "list": [], "dict": {"enabled": False}, "str": ""}[kind]
    assert _row(_read(tmp_path, **{key: off}), key).disposition == "honoured"
    on: Any = {"bool": True, "int": 2, "list": ["x"], "dict": {"enabled": True}, "str": "x"}[kind]
    with pytest.raises(UnsupportedConfig, match=rf"neox.yml:\d+: {key} is not supported"):
        _read(tmp_path, **{key: on})
    with pytest.raises(NotImplementedError):
        _read(tmp_path, **{key: on})


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"attention_config": [[["mamba"], 4]]}, "mamba"),
        ({"attention_config": [[["global", "mamba"], 2]]}, "mamba"),
        ({"moe_num_experts": 8, "moe_type": "deepspeed"}, "use megablocks"),
        ({"num_unique_layers": 2}, "own parameters"),
        ({"norm": "scalenorm"}, "rmsnorm"),
        ({"pos_emb": "rpe"}, "rotary"),
        ({"activation": "mish"}, "swiglu"),
        ({"dataset_impl": "online"}, "dataset_impl gpt2"),
        ({"data_impl": "cached"}, "preprocess"),
        ({"tokenizer_type": "TiktokenTokenizer"}, "tokenizer.json"),
        ({"norm": "non_parametric_layernorm"}, "use layernorm or rmsnorm"),
        ({"output_layer_parallelism": "row"}, "column"),
        ({"init_method": "scaled_orthogonal"}, "orthogonal"),
        ({"mlp_type": "identity"}, "every layer has an MLP"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}}, "AdamW"),
        ({"optimizer": {"type": "SGD", "params": {"nesterov": True}}}, "only momentum is there"),
        ({"use_bnb_optimizer": True, "pos_emb": "learned"}, "StableEmbedding"),
        ({"optimizer": {"type": "cpu_torch_adam", "params": {}}}, "L2"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "AdamW"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "quantized"),
        ({"checkpoint_factor": 1.5}, "whole number"),
    ],
)
def test_values_that_are_refused(keys: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedConfig, match=words):
        _read(tmp_path, **keys)


@pytest.mark.parametrize(
    "world, batch, micro, steps, expected",
    [
        (8, None, 4, None, (4, 1)),
        (8, None, 4, 3, (4, 3)),
        (8, 64, None, None, (8, 1)),
        (8, 64, None, 2, (4, 2)),
        (8, 64, 4, None, (4, 2)),
        (8, 64, 4, 2, (4, 2)),
    ],
)
def test_batch_arithmetic(
    world: int, batch: int | None, micro: int | None, steps: int | None, expected: tuple[int, int], tmp_path: Path
) -> None:
    train = _config(
        tmp_path, world, train_batch_size=batch, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=steps
    ).train
    assert (train.micro_batch_size, train.gradient_accumulation_steps) == expected


def test_batch_arithmetic_counts_data_parallel_ranks(tmp_path: Path) -> None:
    config = _config(tmp_path, 8, model_parallel_size=2, train_batch_size=32)
    assert (
        config.train.gradient_accumulation_steps == 2 and config.parallel.tensor == 2 and config.parallel.replicate == 4
    )
    assert "must equal micro batch (4)" in _error(tmp_path, 8, train_batch_size=65, gradient_accumulation_steps=2)
    assert "got 30" in _error(tmp_path, 8, train_batch_size=30, train_micro_batch_size_per_gpu=...)
    assert "must be given, or train_batch_size" in _error(tmp_path, train_micro_batch_size_per_gpu=...)
    assert "must divide the number of ranks (8)" in _error(tmp_path, 8, model_parallel_size=3)


@pytest.mark.parametrize(
    "keys, expected",
    [
        ({}, "fp32"),
        ({"precision": "bfloat16"}, "bf16"),
        ({"precision": "FP16"}, "fp16"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"fp16": True}, "fp16"),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": True}}, "bf16"),
        ({"bf16": {"enabled": True}, "precision": "bfloat16"}, "bf16"),
        ({"deepspeed_extra_args": {"bf16": {"enabled": True}}}, "bf16"),
    ],
)
def test_precision(keys: dict[str, Any], expected: str, tmp_path: Path) -> None:
    assert _config(tmp_path, **keys).train.precision == expected


@pytest.mark.parametrize(
    "keys",
    [{"fp16": {"enabled": True}, "bf16": {"enabled": True}}, {"fp16": {"enabled": True}, "precision": "bfloat16"}],
)
def test_precisions_that_conflict(keys: dict[str, Any], tmp_path: Path) -> None:
    assert "conflicts" in _error(tmp_path, **keys)


def test_the_type_of_fp16_in_older_releases_is_said(tmp_path: Path) -> None:
    """Older releases of GPT-NeoX computed in bf16 then, and its README says so; today it computes in fp16."""
    run = _read(tmp_path, fp16={"enabled": True, "type": "bfloat16"})
    row = _row(run, "fp16.type")
    assert run.config.train.precision == "fp16" and row.disposition == "changes numerics"
    assert "bf16.enabled" in row.explanation
    assert _row(_read(tmp_path, fp16={"enabled": True, "type": "fp16"}), "fp16.type").disposition == "ignored"


@pytest.mark.parametrize("fp16", [{"type": "bfloat16"}, {"enabled": False, "type": "bfloat16"}])
def test_the_type_of_fp16_that_is_off(fp16: dict[str, Any], tmp_path: Path) -> None:
    """The table said that the run, in fp32 or bf16, computes in fp16."""
    run = _read(tmp_path, fp16=fp16)
    row = _row(run, "fp16.type")
    assert run.config.train.precision == "fp32" and row.disposition == "changes numerics"
    assert row.explanation.startswith("fp32, as in GPT-NeoX today")
    run = _read(tmp_path, fp16=fp16, bf16={"enabled": True})
    assert run.config.train.precision == "bf16" and _row(run, "fp16.type").disposition == "ignored"


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("loss_scale", 1e39, "static"),
        ("initial_scale_power", 128, "initial_power"),
        ("min_loss_scale", 0, "minimum"),
        ("min_loss_scale", 1e9, "minimum"),
    ],
)
def test_mistakes_of_loss_scaling_name_their_line_and_key(key: str, value: float, field: str, tmp_path: Path) -> None:
    """`neox.yml: train.loss_scale.minimum must be greater than 0`: neither the line nor GPT-NeoX's key."""
    said = _error(tmp_path, fp16={"enabled": True, key: value})
    assert re.search(rf":\d+: (fp16\.{key} \()?train\.loss_scale\.{field}\b", said), said


def test_a_misspelled_key_of_a_section_names_the_nearest(tmp_path: Path) -> None:
    run = _read(tmp_path, fp16={"enabld": True}, zero_optimization={"stage": 1, "overlap_com": True})
    assert _row(run, "fp16.enabld").explanation.endswith("; did you mean enabled?")
    assert _row(run, "zero_optimization.overlap_com").explanation.endswith("; did you mean overlap_comm?")


@pytest.mark.parametrize(
    "keys",
    [
        {"train_iters": 100.5}, {"hidden_size": "64"}, {"train_micro_batch_size_per_gpu": "2"},
        {"save": "ck", "checkpoint_factor": "100"},
    ],
)  # fmt: skip
def test_a_key_of_the_wrong_kind_is_not_called_missing(keys: dict[str, Any], tmp_path: Path) -> None:
    assert len(_error(tmp_path, **keys).splitlines()) == 1


def test_empty_paths_are_not_set(tmp_path: Path) -> None:
    keys = ("save", "load", "log_dir", "tensorboard_dir")
    assert _config(tmp_path, **dict.fromkeys(keys, "")) == _config(tmp_path)


def test_gradients_are_reduced_in_fp32_unless_asked_otherwise(tmp_path: Path) -> None:
    run = _read(tmp_path, precision="bfloat16")
    assert run.config.train.reduce_dtype == "fp32" and _row(run, "fp32_allreduce").disposition == "changes numerics"
    assert _config(tmp_path, precision="bfloat16", fp32_allreduce=False).train.reduce_dtype == "bf16"
    assert _config(tmp_path, precision="bfloat16", communication_data_type="fp32").train.reduce_dtype == "fp32"


@pytest.mark.parametrize(
    "keys, width",
    [
        # LLaMA 7B's, at a scale of 1: 2/3 of 32768, in multiples of 256
        ({"activation": "swiglu", "intermediate_size": 32768, "mlp_multiple_of": 256}, 11008),
        ({"activation": "geglu", "hidden_size": 768, "num_attention_heads": 12}, 1024),
        ({"expansion_factor": 3.0}, 192),
        ({"intermediate_size": 100, "mlp_multiple_of": 2}, 100),
        ({}, 256),
    ],
)
def test_mlp_widths(keys: dict[str, Any], width: int, tmp_path: Path) -> None:
    assert _config(tmp_path, **keys).model.intermediate_size == width


def test_mlp_widths_that_do_not_fit_in_gpt_neox_either(tmp_path: Path) -> None:
    assert "do not fit" in _error(tmp_path, intermediate_size=101)
    assert "must not stand beside" in _error(tmp_path, intermediate_size=100, expansion_factor=2)


def test_fused_gelu_is_the_tanh_one(tmp_path: Path) -> None:
    run = _read(tmp_path, bias_gelu_fusion=True)
    config: Any = run.config
    assert config.model.activation == "gelu_tanh" and _row(run, "bias_gelu_fusion").disposition == "changes numerics"
    assert _config(tmp_path, bias_gelu_fusion=True, activation="geglu").model.activation == "geglu"


def test_flags_that_hang_there_just_work(tmp_path: Path) -> None:
    flags = {"scaled_upper_triang_masked_softmax_fusion": True, "rope_fusion": True, "layernorm_fusion": True}
    run = _read(tmp_path, **flags)
    assert run.config == _config(tmp_path)
    assert all(_row(run, key).disposition == "mapped" for key in flags)


def test_residuals_and_norms(tmp_path: Path) -> None:
    both = _config(tmp_path, gpt_j_residual=True).model
    assert both.parallel_residual and not both.shared_norm
    assert _config(tmp_path, gpt_j_residual=True, gpt_j_tied=True).model.shared_norm
    assert not _config(tmp_path, gpt_j_tied=True).model.shared_norm
    run = _read(tmp_path, use_bias_in_norms=False)  # never read there
    model: Any = run.config.model
    assert model.norm_bias and _row(run, "use_bias_in_norms").disposition == "ignored"
    assert not _config(tmp_path, norm="rmsnorm").model.norm_bias


@pytest.mark.parametrize(
    "stage, strategy, reshard", [(0, "ddp", False), (1, "fsdp", False), (2, "fsdp", False), (3, "fsdp", True)]
)
def test_zero_stages(stage: int, strategy: str, reshard: bool, tmp_path: Path) -> None:
    run = _read(tmp_path, 2, zero_optimization={"stage": stage, "overlap_comm": True, "cpu_offload": True})
    parallel = run.config.parallel
    assert (parallel.strategy, parallel.reshard_after_forward) == (strategy, reshard)
    assert _row(run, "zero_optimization.overlap_comm").disposition == "ignored"
    with pytest.raises(ConfigError, match=r"zero_optimization.overlap_comm would be ignored \(--strict\)"):
        _read(tmp_path, 2, strict=True, zero_optimization={"stage": stage, "overlap_comm": True})


def test_schedule(tmp_path: Path) -> None:
    schedule = _config(tmp_path, lr_decay_iters=50, warmup=0.1, lr_decay_style="cosine").schedule
    assert (schedule.warmup_steps, schedule.decay_steps) == (5.0, 50)
    rates = [learning_rate(step, 1.0, schedule, 100) for step in range(100)]
    assert rates[50] < 1e-6 < 0.3 < rates[90]  # it rises again, as there
    safe = _config(tmp_path, lr_decay_iters=50, warmup=0.1, lr_decay_style="cosine", lr_clamp="safe").schedule
    assert learning_rate(90, 1.0, safe, 100) < 1e-6
    assert _config(tmp_path, lr_decay_fraction=0.25).schedule.decay_steps == 25
    run = _read(tmp_path, lr_decay_fraction=0.25, lr_decay_iters=40)
    assert run.config.schedule.decay_steps == 40 and _row(run, "lr_decay_fraction").disposition == "ignored"


def test_tokenizers(tmp_path: Path) -> None:
    import tokenizers

    assert "vocab_file must be given" in _error(tmp_path, tokenizer_type=...)
    assert "must exist, or padded_vocab_size" in _error(tmp_path, tokenizer_type="HFTokenizer", vocab_file="no.json")
    gpt2 = _read(tmp_path, tokenizer_type=..., vocab_file="v.json", merge_file="m.txt")
    assert gpt2.config.model.vocab_size == 50304 and gpt2.config.data.tokenizer == "gpt2:v.json:m.txt"
    assert "assumed" in _row(gpt2, "make_vocab_size_divisible_by").explanation
    file = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(300)}, "0")).save(str(file))
    config = _config(tmp_path, 2, tokenizer_type="HFTokenizer", vocab_file=str(file), model_parallel_size=2)
    assert config.model.vocab_size == 512  # a multiple of 128 * 2
    file.write_text("{}")
    assert "must be a tokenizer" in _error(tmp_path, tokenizer_type="HFTokenizer", vocab_file=str(file))
    assert _config(tmp_path, padded_vocab_size=777).model.vocab_size == 777


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"hiden_size": 4}, "hiden_size: unknown key; did you mean hidden_size"),
        ({"hidden_size": "64"}, "hidden_size must be an integer, got '64'"),
        ({"hidden_size": True}, "hidden_size must be an integer"),
        ({"hidden_size": 66}, "model.hidden_size must be a multiple of num_heads (4), got 66"),
        ({"num_layers": 0}, "num_layers (model.num_layers) must be greater than 0"),
        ({"num_layers": None}, "num_layers must be given"),
        ({"train_iters": None}, "train_iters must be given"),
        ({"data_path": None}, "data_path must be given"),
        ({"train_data_paths": ["a"]}, "data_path must not stand beside train_data_paths"),
        ({"data_path": None, "train_data_paths": ["a"]}, "must come with valid_data_paths, test_data_paths"),
        ({"train_data_weights": [1]}, "train_data_weights must come with train_data_paths"),
        ({"seq_length": 64}, "train.seq_length must be at most"),
        ({"save": "x"}, "must come with checkpoint_factor"),
        ({"zero_optimization": {"overlap_comm": True}}, "must have a stage"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage must be 0, 1, 2 or 3, got 4"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "x"}}}, "optimizer.params.lr must be a number above 0"),
        ({"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1}}}, "must be the top-level key weight_decay"),
        ({"optimizer": {"type": "Adam", "params": {"beta": 1}}}, "optimizer.params.beta is unknown"),
        ({"optimizer": {"type": "Foo"}}, "optimizer.type must be Adam"),
        ({"optimizer": {"type": "Lion", "params": {"eps": 1e-8}}}, "eps must be left out with optimizer.type lion"),
        (
            {"optimizer": {"type": "SGD", "params": {"momentum": 1.0}}},
            "momentum must be a number in [0, 1), got 1.0",
        ),
        ({"optimizer": {"type": "Lion", "params": {"betas": [0.9]}}}, "betas must be two numbers"),
        ({"attention_config": [["global", 4]]}, "attention_config must be a list such as"),
        ({"attention_config": [[["global"], 3]]}, "must have 4 layers"),
        ({"attention_config": [[["gobal"], 4]]}, "must name global, flash, gmlp, amlp, local, sparse_fixed"),
        ({"fp16": {"enabled": "yes"}}, "fp16.enabled must be true or false"),
        ({"activation": "gleu"}, "activation must be one of gelu"),
        ({"deepspeed_extra_args": {"train_iters": 3}}, "stands outside deepspeed_extra_args too"),
        ({"extra_save_iters": ["a"]}, "must be a list of integers"),
        ({"rotary_pct": 1.5}, "rotary_pct must be at most 1"),
        ({"hidden_dropout": 1.0}, "hidden_dropout (model.hidden_dropout) must be less than 1"),
    ],
)
def test_mistakes_name_file_line_and_key(keys: dict[str, Any], words: str, tmp_path: Path) -> None:
    message = _error(tmp_path, **keys)
    assert words in message, message
    assert "neox.yml" in message


def test_two_files(tmp_path: Path) -> None:
    one, two = tmp_path / "one.yml", tmp_path / "two.yml"
    one.write_text(json.dumps(BASE))
    two.write_text('{"hidden-size": 3}')
    with pytest.raises(ConfigError, match=r"two.yml:1: hidden_size must be set once, it is at .*one.yml:1 already"):
        read_config([one, two])
    two.write_text('{"min-lr": 1e-5}')
    run = read_config([one, two], ["min-lr=2e-5", "optimizer.params.lr=3e-3", "train_iters=7"])
    assert run.config.schedule.min_lr == 2e-5 and run.config.optimizer.lr == 3e-3 and run.config.train.steps == 7
    assert run.texts == {"one.yml": one.read_text(), "two.yml": two.read_text()}
    assert _row(run, "min_lr").place == "command line"
    with pytest.raises(ConfigError, match="looks like a Powertrain config; one must have the section model:"):
        read_config([one, two], ["train.steps=3"])
    two.write_text("model: {preset: pythia-70m}")
    with pytest.raises(ConfigError, match="looks like a Powertrain config; leave out --format gpt_neox"):
        read_config([two], format="gpt_neox")


def test_wandb(tmp_path: Path) -> None:
    on = _config(tmp_path, use_wandb=True, wandb_team="us", wandb_group="g")
    assert on.logging.wandb == {"project": "neox", "entity": "us", "group": "g"}
    off = _read(tmp_path, wandb_project="p")
    assert off.config.logging.wandb is None and _row(off, "wandb_project").disposition == "ignored"


def test_the_table_is_shown_with_what_matters_first() -> None:
    console = Console(width=160, record=True)
    render(read_config([QUIRKS], world_size=2).table, console)
    text = console.export_text()
    order = [text.index(word) for word in ("changes numerics (", "ignored, and why (", "mapped to (", "honoured (")]
    assert order == sorted(order)
    assert "every_quirk.yml:30" in text and "rises again" in text


def test_a_config_survives_its_own_dump(tmp_path: Path) -> None:
    config = _config(tmp_path, lr_decay_style="cosine")
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config
    assert math.isclose(config.schedule.warmup_steps, 1.0)


def _rate_there(n: int, lr: float, style: str, warmup: float, end: int, least: float, version: str) -> float:
    """AnnealingLR.get_lr of GPT-NeoX at 0535bfbb (2022), e431ff54 (2023) and ea7aefd8 (2026), from its facts."""
    count = min(n, end - warmup) if version == "neox-2022" else n
    if warmup > 0 and n <= warmup:
        return lr * (max(1, count) if version == "neox" else count) / warmup
    count -= warmup
    span = end if version == "neox-2022" else end - warmup
    floor = 0.0 if version == "neox-2022" else least
    rate = {
        "linear": lr * (span - count) / span,
        "cosine": floor + (lr - floor) / 2 * (math.cos(math.pi * count / span) + 1),
        "exponential": lr * math.exp(-0.693 * count / span),
        "constant": lr,
    }[style]
    return max(rate, least)


@pytest.mark.parametrize("version", ["neox", "neox-2023", "neox-2022"])
def test_schedules_are_gpt_neoxs(version: str, tmp_path: Path) -> None:
    """Every style, with and without warm-up, before and past the end of decay."""
    random = Random(7)
    for _ in range(60):
        style = random.choice(["linear", "cosine", "exponential", "constant"])
        end, warmup = random.randint(1, 400), random.choice([0.0, 0.01, 0.1, random.random() * 0.9])
        lr, least = 10 ** random.uniform(-5, -2), random.choice([0.0, 1e-6, 1e-4])
        schedule = ScheduleConfig(
            kind=style, warmup_steps=warmup * end, decay_steps=end, min_lr=least, clamp=version  # type: ignore[arg-type]
        )  # fmt: skip
        for step in [0, 1, 2, end // 2, end - 1, end, end + 7, *(random.randint(0, 2 * end) for _ in range(10))]:
            right = _rate_there(step, lr, style, warmup * end, end, least, version)
            assert learning_rate(step, lr, schedule, 1000) == pytest.approx(right, rel=1e-12), (
                style,
                step,
                end,
                warmup,
            )
    config = _config(tmp_path, lr_clamp=version)
    assert config.schedule.clamp == version


@pytest.mark.parametrize("keys", [{}, {"warmup": 0.01}])
def test_a_warm_up_of_less_than_a_step_is_said(tmp_path: Path, keys: dict[str, Any]) -> None:
    """lr / warm-up, the formula's first rate, is then above lr: a short try of a long run's config has it."""
    run = _read(tmp_path, train_iters=4, **keys)
    row = _row(run, "warmup")
    assert row.disposition == "changes numerics" and "below 1 the first step has 25 times lr" in row.explanation
    assert learning_rate(0, 1.0, run.config.schedule, 4) == pytest.approx(25.0)
    for fine in ({"lr_clamp": "safe"}, {"lr_clamp": "neox-2023"}, {"train_iters": 100}):
        assert _row(_read(tmp_path, **{"train_iters": 4, **keys, **fine}), "warmup").disposition == "mapped"


def test_first_and_last_rate_of_the_default_schedule(tmp_path: Path) -> None:
    """Linear with a warm-up of a tenth: the first step has the rate of the second, the last one almost none."""
    schedule = _config(tmp_path, warmup=0.1).schedule
    rates = [learning_rate(step, 1.0, schedule, 100) for step in range(100)]
    assert rates[0] == rates[1] == pytest.approx(0.1) and rates[99] == pytest.approx(1 / 90)


@pytest.mark.parametrize(
    "keys, norm, row",
    [
        ({}, 0.0, "honoured"),
        ({"gradient_clipping": 1.0}, 1.0, "changes numerics"),
        ({"gradient_clipping": 0.0}, 0.0, "honoured"),
        ({"optimizer": {"params": {"lr": 1e-3, "max_grad_norm": 0.5}}}, 0.5, "changes numerics"),
        ({"gradient_clipping": 2.0, "optimizer": {"params": {"max_grad_norm": 0.5}}}, 2.0, "changes numerics"),
    ],
)
def test_gradient_clipping(keys: dict[str, Any], norm: float, row: str, tmp_path: Path) -> None:
    """Left out it is none there: the default does not reach DeepSpeed."""
    run = _read(tmp_path, **keys)
    assert run.config.train.gradient_clipping == norm
    name = "gradient_clipping" if "optimizer" not in keys or len(keys) == 2 else "optimizer.params.max_grad_norm"
    assert _row(run, name).disposition == row


def test_names_of_older_releases(tmp_path: Path) -> None:
    run = _read(tmp_path, save_interval=7, gas=3, zero_allow_untested_optimizer=True)
    assert run.config.checkpoint.every == 7 and run.config.train.gradient_accumulation_steps == 3
    assert _row(run, "save_interval").disposition == _row(run, "gas").disposition == "mapped"
    both = _read(tmp_path, save_interval=7, checkpoint_factor=5, gas=3, gradient_accumulation_steps=2)
    assert both.config.checkpoint.every == 5 and both.config.train.gradient_accumulation_steps == 2
    assert _row(both, "save_interval").disposition == _row(both, "gas").disposition == "ignored"


@pytest.mark.parametrize("activation, kind", [("silu", "swiglu"), ("gelu", "geglu"), ("relu", "reglu")])
def test_mlp_type_llama(activation: str, kind: str, tmp_path: Path) -> None:
    """Of 2023: 8/3 of the width, rounded up to 256, without biases."""
    model = _config(tmp_path, mlp_type="llama", activation=activation, hidden_size=4096, num_attention_heads=32).model
    assert (model.activation, model.intermediate_size, model.mlp_bias) == (kind, 11008, False)


@pytest.mark.parametrize(
    "world, stages, tensor, micro, steps, found",
    [
        (8, 4, 2, 2, 2, (1, 1, 4, 1)),  # 1 data-parallel rank there, 4 here
        (8, 2, 1, 4, 1, (2, 1, 8, 1)),
        (12, 3, 2, 6, 2, (2, 2, 6, 1)),
        (6, 3, 2, 16, 2, (16, 2, 1, 3)),  # 3 ranks share each sequence
        (24, 12, 2, 4, 8, (4, 2, 4, 3)),  # a quarter of the steps, and 3 ranks share each sequence
        (12, 6, 1, 1, 1, (1, 1, 2, 6)),
    ],
)
def test_stages_become_shards(
    world: int, stages: int, tensor: int, micro: int, steps: int, found: tuple[int, int, int, int], tmp_path: Path
) -> None:
    """With fewer accumulation steps than stages. The global batch stays what it is there."""
    run = _read(
        tmp_path, world, pipe_parallel_size=stages, model_parallel_size=tensor, train_micro_batch_size_per_gpu=micro,
        gradient_accumulation_steps=steps, train_batch_size=...,
    )  # fmt: skip
    train, context = run.config.train, run.config.parallel.context
    ranks = world // tensor // context
    assert (train.micro_batch_size, train.gradient_accumulation_steps, ranks, context) == found
    check_parallel(run.config, world)
    stages = min(stages, world // tensor)
    assert ranks * context == world // tensor
    assert train.micro_batch_size * train.gradient_accumulation_steps * ranks == micro * steps * (
        world // tensor // stages
    )
    assert run.config.parallel.strategy == "fsdp" and _row(run, "pipe_parallel_size").disposition == "mapped"


@pytest.mark.parametrize("world, stages, tensor, steps", [(8, 4, 2, 8), (8, 2, 1, 2), (6, 3, 2, 64), (4, 4, 1, 5)])
@pytest.mark.parametrize("zero", [0, 1])
def test_stages_are_stages(world: int, stages: int, tensor: int, steps: int, zero: int, tmp_path: Path) -> None:
    run = _read(
        tmp_path, world, pipe_parallel_size=stages, model_parallel_size=tensor, train_micro_batch_size_per_gpu=2,
        gradient_accumulation_steps=steps, train_batch_size=..., num_layers=12, zero_optimization={"stage": zero},
    )  # fmt: skip
    parallel, train = run.config.parallel, run.config.train
    assert (parallel.pipeline, parallel.strategy) == (stages, "fsdp" if zero else "ddp")
    assert (train.micro_batch_size, train.gradient_accumulation_steps) == (2, steps)
    assert mesh_shape(parallel, world)[1:] == (1, 1, 1, tensor) if world == stages * tensor else True
    check_parallel(run.config, world)
    assert _row(run, "pipe_parallel_size").disposition == "honoured"


@pytest.mark.parametrize(
    "keys", [{"eval_tasks": ["piqa"]}, {"te_fp8_mha": True}, {"zero_optimization": {"stage": 2}}, {"num_layers": 3}]
)
def test_what_stages_do_not_train_is_sharded(keys: dict[str, Any], tmp_path: Path) -> None:
    keys = {
        "num_layers": 12,
        "pipe_parallel_size": 4,
        "gradient_accumulation_steps": 8,
        "train_batch_size": ...,
        **keys,
    }
    parallel = (run := _read(tmp_path, 4, **keys)).config.parallel
    assert (parallel.pipeline, parallel.strategy) == (1, "fsdp")
    check_parallel(run.config, 4)
    assert _row(run, "pipe_parallel_size").disposition == "mapped"


def test_a_batch_that_stages_cannot_share_is_refused(tmp_path: Path) -> None:
    """Ranks that share a sequence have no dropout in attention."""
    with pytest.raises(UnsupportedConfig, match="6 ranks cannot share a global batch of"):
        _read(
            tmp_path, 6, pipe_parallel_size=6, gradient_accumulation_steps=4, attention_dropout=0.1,
            train_batch_size=...,
        )  # fmt: skip


@pytest.mark.parametrize("world, stages, tensor", [(1, 4, 1), (5, 2, 1), (8, 3, 2), (4, 4, 2)])
def test_stages_must_divide_the_ranks(world: int, stages: int, tensor: int, tmp_path: Path) -> None:
    """GPT-NeoX asks the same."""
    message = rf"pipe_parallel_size must divide the number of ranks \({world}\) .* \({tensor}\), got {stages}"
    with pytest.raises(ConfigError, match=message):
        _read(tmp_path, world, pipe_parallel_size=stages, model_parallel_size=tensor)


def test_exit_interval(tmp_path: Path) -> None:
    assert _config(tmp_path, exit_interval=7).train.exit_interval == 7


def test_a_key_twice(tmp_path: Path) -> None:
    """The last counts, as there, with a note; files may give one value twice."""
    text = json.dumps(BASE)[1:-1]
    (tmp_path / "twice.yml").write_text("{" + text + ',\n"seed": 5,\n"seed": 6}')
    (tmp_path / "again.yml").write_text("seed: 6\n")
    run = read_config([tmp_path / "twice.yml", tmp_path / "again.yml"])
    assert run.config.train.seed == 6
    row = next(row for row in run.table if row.key == "seed" and row.value == "(replaced)")
    assert row.place.endswith("twice.yml:2") and "twice.yml:3" in row.explanation
    (tmp_path / "again.yml").write_text("seed: 7\n")
    with pytest.raises(ConfigError, match="seed must be set once"):
        read_config([tmp_path / "twice.yml", tmp_path / "again.yml"])


@pytest.mark.parametrize(
    "keys, activation, width",
    [({}, "gelu_tanh", 256), ({"activation": "swiglu"}, "swiglu", 256), ({"intermediate_size": 101}, "gelu_tanh", 101),
     ({"activation": "relu", "use_bias_in_mlp": False, "norm": "rmsnorm"}, "relu", 256)],
)  # fmt: skip
def test_te_layernorm_mlp(keys: dict[str, Any], activation: str, width: int, tmp_path: Path) -> None:
    """TransformerEngine's GELU is the tanh one, gated widths are whole, there are biases whatever the key says."""
    run = _read(tmp_path, te_layernorm_mlp=True, **keys)
    model: Any = run.config.model
    assert (model.activation, model.intermediate_size, model.mlp_bias) == (activation, width, True)
    assert _row(run, "te_layernorm_mlp").disposition == "mapped"
    with pytest.raises(UnsupportedConfig, match="whatever the key says"):
        _read(tmp_path, te_layernorm_mlp=True, layernorm_epsilon=1e-6)


@pytest.mark.parametrize(
    "keys, expected, row",
    [
        ({"optimizer": {"type": "Lion", "params": {"lr": 1e-4}}}, ("lion", (0.9, 0.99), 0.0), "optimizer"),
        (
            {"optimizer": {"type": "lion", "params": {"lr": 1e-4, "betas": [0.8, 0.9]}}},
            ("lion", (0.8, 0.9), 0.0),
            "optimizer",
        ),
        ({"optimizer": {"type": "SGD", "params": {"lr": 1e-4, "momentum": 0.9}}}, ("sgd", None, 0.9), "optimizer"),
        ({"use_bnb_optimizer": True, "pos_emb": "rotary"}, ("adamw8bit", (0.9, 0.999), 0.0), "use_bnb_optimizer"),
        ({"use_bnb_optimizer": True, "optimizer": {"type": "Lion"}}, ("lion", (0.9, 0.99), 0.0), "use_bnb_optimizer"),
        ({"use_bnb_optimizer": False}, ("adamw", (0.9, 0.999), 0.0), "use_bnb_optimizer"),
    ],
)
def test_optimizers(keys: dict[str, Any], expected: tuple[Any, ...], row: str, tmp_path: Path) -> None:
    run = _read(tmp_path, **keys)
    optimizer = run.config.optimizer
    kind, betas, momentum = expected
    assert (optimizer.kind, optimizer.momentum) == (kind, momentum)
    assert betas is None or optimizer.betas == betas
    assert (_row(run, row).disposition == "changes numerics") == (kind == "adamw8bit")


def test_whole_documents(tmp_path: Path) -> None:
    data = _config(tmp_path, pack_impl="pack_until_overflow", allow_chopped=False).data
    assert (data.packing, data.allow_chopped) == ("until_overflow", False)
    with pytest.raises(ConfigError, match="pack_impl must come with train_label_data_paths where it is unpacked"):
        _config(tmp_path, pack_impl="unpacked")
    run = _read(tmp_path, allow_chopped=True)
    assert run.config.data.packing == "packed" and _row(run, "allow_chopped").disposition == "ignored"


@pytest.mark.parametrize("stage, written, expected", [(0, 4, 1), (0, None, 1), (1, 4, 4), (2, None, 2)])
def test_hysteresis_is_zeros(stage: int, written: int | None, expected: int, tmp_path: Path) -> None:
    """Without ZeRO DeepSpeed halves the scale at each overflow."""
    fp16 = {"enabled": True} | ({"hysteresis": written} if written else {})
    run = _read(tmp_path, fp16=fp16, precision="fp16", zero_optimization={"stage": stage})
    assert run.config.train.loss_scale.hysteresis == expected
    assert any(row.key == "fp16.hysteresis" for row in run.table) == (stage == 0 and written is not None)


def test_masters_of_16_bit_weights_are_said(tmp_path: Path) -> None:
    zero = {"stage": 1, "load_from_fp32_weights": False}
    name = "zero_optimization.load_from_fp32_weights"
    assert _row(_read(tmp_path, zero_optimization=zero, load="x"), name).disposition == "changes numerics"
    assert _row(_read(tmp_path, zero_optimization=zero), name).disposition == "ignored"


def test_eval_tasks(tmp_path: Path) -> None:
    assert _config(tmp_path, eval_tasks=["piqa", "lambada_openai"]).evaluation.tasks == ("piqa", "lambada_openai")
    assert _config(tmp_path, eval_tasks=["piqa"], eval_iters=0).evaluation.tasks == ()


def test_loading_keys(tmp_path: Path) -> None:
    run = _read(tmp_path, load="somewhere", no_load_optim=True, no_load_rng=True)
    checkpoint = run.config.checkpoint
    assert (checkpoint.load, checkpoint.load_optimizer, checkpoint.load_rng) == ("somewhere", False, False)
    assert _row(run, "no_load_optim").disposition == "changes numerics"
    assert _config(tmp_path).checkpoint.load_optimizer and _config(tmp_path).checkpoint.load_rng


def test_a_padding_for_the_ranks_is_not_a_size_of_the_vocabulary(tmp_path: Path) -> None:
    """A checkpoint of one rank, with 300 rows, was refused by the config for two, whose vocabulary has 600."""
    run = _read(tmp_path, 2, model_parallel_size=2, make_vocab_size_divisible_by=300)
    assert run.config.model.vocab_size == with_vocabulary(unpadded(run), 256).model.vocab_size == 600
    assert with_vocabulary(unpadded(run), 256, rows=300).model.vocab_size == 300
    assert unpadded(_read(tmp_path, padded_vocab_size=512)).model.vocab_size == 512
