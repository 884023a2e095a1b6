"""A GPT-NeoX config translated to ours: keys whose meaning depends on the value. neox_keys.py lists all keys.

Facts from GPT-NeoX (Apache-2.0; no code): megatron/neox_arguments/arguments.py (batch arithmetic, precision, ZeRO
defaults), megatron/model/transformer.py (MLP widths, windows), megatron/learning_rates.py and training.py (schedule),
megatron/model/utils.py (weight decay groups), megatron/tokenizer/tokenizer.py (vocabularies).
"""

import math
from typing import Any

from powertrain.train.config.neox_keys import KEYS
from powertrain.train.config.table import Disposition, Row
from powertrain.train.config.yaml_source import DEFAULT, ConfigError, KeyPath, Source, UnsupportedConfig, nearest
from powertrain.train.data.tokenizer import load_tokenizer, padded_vocab_size

_MISSING: Any = object()
_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (float, int), "bool": (bool,), "str": (str,), "list": (list,), "dict": (dict,),
}  # fmt: skip
_KIND_WORDS = {
    "int": "an integer", "float": "a number", "bool": "true or false", "str": "text", "list": "a list",
    "dict": "a section",
}  # fmt: skip


def translate(source: Source, world_size: int) -> tuple[dict[str, Any], tuple[Row, ...], dict[KeyPath, str]]:
    """GPT-NeoX's keys as the values of a RunConfig, the table of keys, and the key behind each of our fields.

    Raises ConfigError with every mistake, one a line; UnsupportedConfig where a feature is missing here.
    """
    keys = _Keys(source)
    parts = {
        "parallel": _parallel(keys, world_size),
        "train": _train(keys, world_size),
        "optimizer": _optimizer(keys),
        "schedule": _schedule(keys),
        "checkpoint": _checkpoint(keys),
        "evaluation": _evaluation(keys),
        "logging": _logging(keys),
        "data": _data(keys),
        "model": _model(keys),
    }
    keys.finish()
    return parts, tuple(keys.rows()), _origins(keys)


def model_fields(source: Source) -> dict[str, Any]:
    """The fields of a gpt_neox model's config from the keys that say them; the others are checked by name only.

    Raises ConfigError and UnsupportedConfig as `translate` does.
    """
    keys = _Keys(source)
    fields = _model(keys)
    keys.finish()
    return fields


def tokenizer_name(source: Source) -> str | None:
    """The tokenizer as `load_tokenizer` takes it; None if the keys name none that is read here."""
    keys = _Keys(source)
    name = _tokenizer(keys)
    return None if keys.mistakes or keys.missing else name


class _Keys:
    """The config's keys, type-checked as read; collects a table row per key and all errors."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.values = dict(source.values)
        self.mistakes: list[str] = []
        self.missing: list[str] = []  # features, not mistakes
        self._outcomes: dict[str, tuple[Disposition, str]] = {}
        self._defaults: list[Row] = []
        self._hoist()
        self._check_names_and_kinds()

    def _hoist(self) -> None:
        """Keys of deepspeed_extra_args count as DeepSpeed's own, which stand beside it."""
        extra = self.values.get("deepspeed_extra_args")
        for key, value in extra.items() if isinstance(extra, dict) else ():
            if key in self.values:
                self.wrong(
                    ("deepspeed_extra_args", key), "must be set once, it stands outside deepspeed_extra_args too"
                )
            elif key in KEYS:
                self.values[key] = value
                self.source.locations[(key,)] = self.source.location(("deepspeed_extra_args", key))
            else:
                self._defaults.append(
                    self._row(f"deepspeed_extra_args.{key}", value, "ignored", "DeepSpeed is not used")
                )

    def _check_names_and_kinds(self) -> None:

        for key, value in list(self.values.items()):
            if key not in KEYS:
                self.mistakes.append(f"{self.source.location((key,))}: {key}: unknown key{nearest(key, KEYS)}")
            elif value is not None and not _is_kind(value, KEYS[key].kind):
                self.wrong((key,), f"must be {_words(KEYS[key].kind)}, got {str(value)[:80]!r}")
            else:
                if KEYS[key].disposition == "refused" and _is_on(value):
                    self.unsupported(key, value, KEYS[key].words)
                continue
            del self.values[key]

    def get(self, key: str, default: Any = None) -> Any:
        """The key's value; null and a key that is not there give the default."""
        value = self.values.get(key)
        return default if value is None else value

    def number(self, key: str, default: Any = None, *, above: float | None = None, least: float | None = None) -> Any:
        """A number, checked before it is computed with; a wrong one is noted and the default goes on."""
        value = self.get(key, default)
        if value is not None and above is not None and value <= above:
            self.wrong((key,), f"must be above {above}, got {value!r}")
            return default
        if value is not None and least is not None and value < least:
            self.wrong((key,), f"must be at least {least}, got {value!r}")
            return default
        return value

    def choice(self, key: str, default: Any, known: dict[str, Any], refused: dict[str, str] | None = None) -> Any:
        """The value's meaning; GPT-NeoX's choices ignore case."""
        value = self.get(key, default)
        served = {name.lower(): meaning for name, meaning in known.items()}
        if str(value).lower() in served:
            return served[str(value).lower()]
        why = {name.lower(): why for name, why in (refused or {}).items()}.get(str(value).lower())
        if why:
            self.unsupported(key, value, why)
        else:
            self.wrong((key,), f"must be one of {', '.join([*known, *(refused or {})])}, got {value!r}")
        return served[str(default).lower()]

    def wrong(self, path: KeyPath, words: str) -> None:
        self.mistakes.append(f"{self.source.location(path)}: {'.'.join(map(str, path))} {words}")

    def unsupported(self, key: str, value: Any, todo: str) -> None:
        self.missing.append(f"{self.source.location((key,))}: {key} is not supported at {str(value)[:60]}: {todo}")

    def add_row(self, key: str, disposition: Disposition, words: str, value: Any = _MISSING) -> None:
        """The key's row in the table; for a key that was not set, `value` is its default there."""
        if key in self.values:
            self._outcomes[key] = (disposition, words)
        elif value is not _MISSING:
            self._defaults.append(Row(key, value, str(DEFAULT), disposition, words))

    def add_inner_row(self, path: KeyPath, value: Any, disposition: Disposition, words: str) -> None:
        """A row for a key inside a section."""
        self._defaults.append(self._row(".".join(map(str, path)), value, disposition, words, path))

    def _row(self, key: str, value: Any, disposition: Disposition, words: str, path: KeyPath | None = None) -> Row:
        return Row(key, value, str(self.source.location(path or tuple(key.split(".")))), disposition, words)

    def finish(self) -> None:
        """Raise the collected errors, each once."""
        problems = list(dict.fromkeys(self.mistakes + self.missing))
        if problems:
            raise (ConfigError if self.mistakes else UnsupportedConfig)("\n".join(problems))

    def rows(self) -> list[Row]:
        rows = []
        for key, value in self.values.items():
            default, words = KEYS[key].disposition, KEYS[key].words
            # a refused key that got here has a value that switches the feature off
            usual: tuple[Disposition, str] = ("honoured", "off, as here") if default == "refused" else (default, words)
            rows.append(self._row(key, value, *self._outcomes.get(key, usual)))
        return rows + self._defaults


def _is_kind(value: Any, kind: str) -> bool:
    kinds = kind.split("|")
    if isinstance(value, bool):
        return "bool" in kinds
    return isinstance(value, tuple(t for name in kinds for t in _KINDS[name] if name != "bool"))


def _words(kind: str) -> str:
    return " or ".join(_KIND_WORDS[name] for name in kind.split("|"))


def _is_on(value: Any) -> bool:
    """A feature that a value switches on; `{"enabled": false}` does not."""
    return bool(value.get("enabled", True)) if isinstance(value, dict) and value else bool(value)


def _origins(keys: _Keys) -> dict[KeyPath, str]:
    """Our field -> the GPT-NeoX key that set it, for errors found later."""
    origins: dict[KeyPath, str] = {}
    for key in keys.values:
        word = KEYS[key].words.split(",")[0].split(":")[0].split(" ")[0]
        if "." in word and KEYS[key].disposition in ("honoured", "mapped"):
            origins.setdefault(tuple(word.split(".")), key)
    return origins


def _section(keys: _Keys, key: str) -> dict[str, Any]:
    value = keys.get(key, {})
    return value if isinstance(value, dict) else {}


def _inner(keys: _Keys, section: str, key: str, default: Any, kind: str, *, least: float | None = None) -> Any:
    """A typed value inside a section such as fp16."""
    value = _section(keys, section).get(key)
    if value is None:
        return default
    if not _is_kind(value, kind):
        keys.wrong((section, key), f"must be {_words(kind)}, got {str(value)[:80]!r}")
        return default
    if least is not None and value < least:
        keys.wrong((section, key), f"must be at least {least}, got {value!r}")
        return default
    return value


# --- parallelism and batches ---

_ZERO_HINTS = {
    "allgather_partitions", "allgather_bucket_size", "overlap_comm", "reduce_scatter", "reduce_bucket_size",
    "contiguous_gradients", "round_robin_gradients", "prefetch_bucket_size", "param_persistence_threshold",
    "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters",
    "stage3_max_reuse_distance", "sub_group_size", "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save", "elastic_checkpoint", "ignore_unused_parameters",
    "load_from_fp32_weights", "mics_shard_size", "mics_hierarchical_params_gather", "zero_hpz_partition_size",
    "memory_efficient_linear", "use_multi_rank_bucket_allreduce", "legacy_stage1",
}  # fmt: skip
_ZERO_OFFLOAD = {
    "cpu_offload",
    "cpu_offload_params",
    "cpu_offload_use_pin_memory",
    "offload_optimizer",
    "offload_param",
}
_ZERO_LOSSY = {"zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights"}


def _parallel(keys: _Keys, world_size: int) -> dict[str, Any]:
    if keys.get("pipe_parallel_size", 0) > 1:
        keys.unsupported("pipe_parallel_size", keys.get("pipe_parallel_size"), "set it to 1; ZeRO 3 saves memory too")
    keys.choice("output_layer_parallelism", "column", {"column": None}, {"row": "GPT-NeoX refuses it too: use column"})
    tensor = _tensor_parallel(keys, world_size)
    stage = _zero_stage(keys)
    words = {
        0: "DDP: nothing is sharded",
        1: "FSDP2 with parameters gathered for forward and backward together: gradients are sharded too",
        2: "FSDP2 with parameters gathered for forward and backward together",
        3: "FSDP2",
    }
    keys.add_row("zero_optimization", "mapped", f"parallel.strategy: {words[stage]}", {"stage": 0})
    strategy = "fsdp" if stage else "ddp"
    parallel: dict[str, Any] = {"strategy": strategy, "tensor": tensor, "reshard_after_forward": stage == 3}
    if strategy == "ddp":
        parallel |= {"replicate": max(world_size // tensor, 1), "shard": 1}
    return parallel


def _tensor_parallel(keys: _Keys, world_size: int) -> int:
    tensor = max(keys.get("model_parallel_size", 1), 1)
    if world_size % tensor:
        keys.wrong(("model_parallel_size",), f"must divide the number of ranks ({world_size}), got {tensor}")
        return 1
    return int(tensor)


def _zero_stage(keys: _Keys) -> int:
    section = _section(keys, "zero_optimization")
    if not section:
        return 0
    stage = section.get("stage", _MISSING)
    if stage is _MISSING:
        keys.wrong(("zero_optimization",), "must have a stage (0, 1, 2 or 3), got none")
        return 0
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        keys.wrong(("zero_optimization", "stage"), f"must be 0, 1, 2 or 3, got {stage!r}")
        return 0
    for key, value in section.items():
        path = ("zero_optimization", key)
        if key in _ZERO_HINTS:
            keys.add_inner_row(
                path, value, "ignored", "a tuning hint for DeepSpeed; FSDP2 overlaps and buckets by itself"
            )
        elif key in _ZERO_OFFLOAD:
            keys.add_inner_row(path, value, "ignored", "nothing is offloaded to the CPU; the result is the same")
        elif key in _ZERO_LOSSY and value:
            keys.unsupported("zero_optimization", f"{key}: {value}", "set it to false; collectives are not quantized")
        elif key not in ("stage", *_ZERO_LOSSY):
            keys.add_inner_row(path, value, "ignored", "not a key of ZeRO that changes a result")
    return int(stage)


def _batch(keys: _Keys, world_size: int) -> tuple[int, int]:
    """(micro batch, accumulation steps) from any two of three, by GPT-NeoX's integer divisions."""
    ranks = max(world_size // max(keys.get("model_parallel_size", 1), 1), 1)
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    batch, micro, steps = (keys.number(name, above=0) for name in names)
    if batch is None and micro is None:
        keys.wrong(names[1:2], "must be given, or train_batch_size; got neither")
        return 1, 1
    if micro is None:
        steps = steps or 1
        micro = batch // ranks // steps
    elif steps is None:
        steps = 1 if batch is None else batch // micro // ranks
    total = micro * steps * ranks
    if batch is not None and batch != total:
        keys.wrong(
            names[:1],
            f"must equal micro batch ({micro}) * accumulation steps ({steps}) * data-parallel ranks ({ranks}),"
            f" which is {total}, got {batch}",
        )
        return 1, 1
    if batch is None:
        keys.add_row(names[0], "honoured", f"{micro} * {steps} * {ranks} ranks", total)
    return int(micro), int(steps)


# --- training ---


def _train(keys: _Keys, world_size: int) -> dict[str, Any]:
    micro, steps = _batch(keys, world_size)
    precision = _precision(keys)
    for name in ("train_iters", "seq_length"):
        if keys.get(name) is None:
            keys.wrong((name,), "must be given")
    keys.choice("train_impl", "normal", {"normal": None}, dict.fromkeys(
        ("dpo", "rm", "kto", "reinforce"), "only next-token prediction is there: train_impl normal"))  # fmt: skip
    if keys.get("fp16_lm_cross_entropy"):
        keys.add_row("fp16_lm_cross_entropy", "changes numerics", "the loss is computed in fp32 here: more precise")
    keys.add_row(
        "seed",
        "honoured",
        "train.seed: the order of samples is GPT-NeoX's; first weights and dropout are other draws",
        1234,
    )
    return {
        "steps": keys.get("train_iters"),
        "seq_length": keys.get("seq_length"),
        "micro_batch_size": micro,
        "gradient_accumulation_steps": steps,
        "precision": precision,
        "reduce_dtype": _reduce_dtype(keys, precision),
        "loss_scale": _loss_scale(keys),
        "gradient_clipping": keys.number("gradient_clipping", 1.0, least=0),
        "seed": keys.get("seed", 1234),
        "activation_checkpointing": "full" if keys.get("checkpoint_activations") else "none",
    }


_PRECISIONS = {"fp16": "fp16", "bf16": "bf16"}


def _precision(keys: _Keys) -> str:
    """fp32 unless a key selects another precision; several such keys must agree."""
    asked_by = {}
    if keys.get("precision") is not None:
        asked_by["precision"] = keys.choice("precision", "fp32", {"fp16": "fp16", "fp32": "fp32", "bfloat16": "bf16"})
    for section, name in _PRECISIONS.items():
        value = keys.get(section)
        if value is True or _inner(keys, section, "enabled", False, "bool"):
            asked_by[section] = name
    if len(set(asked_by.values())) > 1:
        where = " and ".join(f"{key} ({keys.source.location((key,))})" for key in asked_by)
        keys.wrong((next(iter(asked_by)),), f"conflicts: {where} ask for {' and '.join(asked_by.values())}")
    for section in _PRECISIONS:
        if section in keys.values and section not in asked_by:
            keys.add_row(section, "honoured", "off")
    if not asked_by:
        keys.add_row("precision", "honoured", "fp32: neither precision, fp16 nor bf16 asks for another", "fp32")
    return next(iter(asked_by.values()), "fp32")


_FP16_KEYS = {"enabled", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"}


def _loss_scale(keys: _Keys) -> dict[str, Any]:
    for section in _PRECISIONS:
        for key, value in _section(keys, section).items():
            if key == "fp16_master_weights_and_grads" and value:
                keys.unsupported(section, f"{key}: {value}", "set it to false; master weights are fp32")
            elif key not in (_FP16_KEYS if section == "fp16" else {"enabled"}):
                keys.add_inner_row((section, key), value, "ignored", "not a key of loss scaling")
    static = _inner(keys, "fp16", "loss_scale", 0, "float", least=0)
    return {
        "static": float(static) or None,
        "initial_power": _inner(keys, "fp16", "initial_scale_power", 16, "int", least=0),
        "window": _inner(keys, "fp16", "loss_scale_window", 1000, "int", least=1),
        "hysteresis": _inner(keys, "fp16", "hysteresis", 2, "int", least=1),
        "minimum": float(_inner(keys, "fp16", "min_loss_scale", 1, "float")),
    }


def _reduce_dtype(keys: _Keys, precision: str) -> str:
    wide = _section(keys, "data_types").get("grad_accum_dtype")
    if wide not in (None, "fp32"):
        keys.add_inner_row(
            ("data_types", "grad_accum_dtype"), wide, "changes numerics", "gradients accumulate in fp32 here"
        )
    if keys.get("communication_data_type") is not None:
        known = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "bfp16": "bf16", "bfloat16": "bf16"}
        return str(keys.choice("communication_data_type", "fp32", known))
    if "fp32_allreduce" in keys.values and not keys.get("fp32_allreduce"):
        keys.add_row("fp32_allreduce", "honoured", f"train.reduce_dtype: {precision}")
        return precision
    if precision != "fp32":
        words = f"train.reduce_dtype: fp32; GPT-NeoX's default is {precision}, which fp32_allreduce: false gives"
        keys.add_row("fp32_allreduce", "mapped" if keys.get("fp32_allreduce") else "changes numerics", words, False)
    return "fp32"


# --- optimizer and schedule ---

_OTHER_OPTIMIZERS = {
    **dict.fromkeys(
        ("onebitadam", "sm3", "madgrad_wd", "lion", "sgd", "lamb", "adafactor", "muon"), "use Adam, which is AdamW"
    ),
    "cpu_torch_adam": "its weight decay is L2, not decoupled; use Adam, which is AdamW",
}


def _optimizer(keys: _Keys) -> dict[str, Any]:
    section = _section(keys, "optimizer")
    params = section.get("params") or {}
    if not isinstance(params, dict):
        keys.wrong(("optimizer", "params"), f"must be a section, got {params!r}")
        params = {}
    _optimizer_type(keys, section)
    for key in section.keys() - {"type", "params"}:
        keys.wrong(("optimizer", key), "is unknown; known: type, params")
    values = {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8} | {
        k: v for k, v in params.items() if k in ("lr", "betas", "eps")
    }
    for key, value in params.items():
        _optimizer_param(keys, key, value)
    for key in ("lr", "eps"):
        if not _is_kind(values[key], "float") or values[key] <= 0:
            keys.wrong(("optimizer", "params", key), f"must be a number above 0, got {values[key]!r}")
    betas = values["betas"]
    if not (isinstance(betas, list) and len(betas) == 2 and all(_is_kind(b, "float") and 0 <= b < 1 for b in betas)):
        keys.wrong(("optimizer", "params", "betas"), f"must be two numbers in [0, 1), got {betas!r}")
    return {**values, "weight_decay": keys.number("weight_decay", 0.1, least=0), "decay_norms_and_biases": False}


def _optimizer_type(keys: _Keys, section: dict[str, Any]) -> None:
    kind = section.get("type", "Adam")
    if str(kind).lower() in _OTHER_OPTIMIZERS:
        keys.unsupported("optimizer", f"type: {kind}", _OTHER_OPTIMIZERS[str(kind).lower()])
    elif str(kind).lower() not in ("adam", "adamw", "cpu_adam"):
        keys.wrong(("optimizer", "type"), f"must be Adam, AdamW or cpu_adam, got {kind!r}")
    elif "optimizer" in keys.values:
        words = "AdamW: decoupled weight decay, which Adam means in GPT-NeoX too"
        keys.add_row("optimizer", "mapped", words + ("; on the GPU" if str(kind).lower() == "cpu_adam" else ""))
    else:
        keys.add_row("optimizer", "mapped", "AdamW with lr 0.001, betas 0.9, 0.999: GPT-NeoX's defaults", "Adam")


def _optimizer_param(keys: _Keys, key: str, value: Any) -> None:
    path = ("optimizer", "params", key)
    if key == "weight_decay":
        keys.wrong(path, "must be the top-level key weight_decay; GPT-NeoX passes both and fails")
    elif key in ("adam_w_mode", "bias_correction") and value is not True:
        keys.unsupported("optimizer", f"{key}: {value}", "remove it; Adam is AdamW with bias correction")
    elif key == "amsgrad" and value:
        keys.unsupported("optimizer", f"{key}: {value}", "remove it")
    elif key in ("set_grad_none", "fused", "foreach", "torch_adam", "capturable"):
        keys.add_inner_row(path, value, "ignored", "an implementation choice of Adam; the result is the same")
    elif key not in ("lr", "betas", "eps", "adam_w_mode", "bias_correction", "amsgrad"):
        keys.wrong(path, "is unknown; known: lr, betas, eps")


def _schedule(keys: _Keys) -> dict[str, Any]:
    steps = keys.number("train_iters", 1, above=0)
    decay = keys.number("lr_decay_iters", above=0)
    fraction = keys.number("lr_decay_fraction", above=0)
    if decay is not None and fraction is not None:
        keys.add_row("lr_decay_fraction", "ignored", "lr_decay_iters is set, and comes first in GPT-NeoX too")
    elif fraction is not None:
        decay = max(int(fraction * steps), 1)
    kinds = {kind: kind for kind in ("linear", "constant", "cosine", "exponential")}
    kind = keys.choice("lr_decay_style", "linear", kinds)
    clamp = keys.choice("lr_clamp", "neox", {"neox": "neox", "safe": "safe"})
    span = decay or steps
    warmup = keys.number("warmup", 0.01, least=0) * span
    keys.add_row(
        "warmup", "mapped", f"schedule.warmup_steps: {warmup:g}, the fraction of {span} steps, not rounded", 0.01
    )
    if kind == "cosine" and clamp == "neox" and span < steps:
        words = f"past step {span} the cosine goes on and the rate rises again, as in GPT-NeoX; lr_clamp: safe stops it"
        keys.add_row("lr_decay_style", "changes numerics", words)
    return {
        "kind": kind, "warmup_steps": warmup, "decay_steps": decay, "min_lr": keys.number("min_lr", 0.0, least=0),
        "clamp": clamp,
    }  # fmt: skip


# --- checkpoints, evaluation, logs ---


def _checkpoint(keys: _Keys) -> dict[str, Any]:
    every = keys.number("checkpoint_factor", above=0)
    extra = keys.get("extra_save_iters")
    if keys.get("save") is not None and every is None and extra is None:
        keys.wrong(("save",), "must come with checkpoint_factor or extra_save_iters, got neither")
    if every is not None and every != int(every):
        keys.unsupported("checkpoint_factor", every, "use a whole number")
    if not all(_is_kind(step, "int") for step in extra or ()):
        keys.wrong(("extra_save_iters",), f"must be a list of integers, got {extra!r}")
        extra = None
    return {
        "folder": keys.get("save"),
        "load": keys.get("load"),
        "finetune": bool(keys.get("finetune")),
        "every": int(every or 0),
        "scale": keys.choice("checkpoint_scale", "linear", {"linear": "linear", "log": "log"}),
        "extra_steps": extra or (),
        "keep_last": keys.get("keep_last_n_checkpoints"),
    }


def _evaluation(keys: _Keys) -> dict[str, Any]:
    steps = keys.number("eval_iters", 100, least=0)
    every = keys.number("eval_interval", 1000, least=0)
    if not steps:
        return {"every": 0, "at_end": False}
    return {"every": every, "steps": steps}


def _logging(keys: _Keys) -> dict[str, Any]:
    folders = [keys.get("log_dir"), keys.get("tensorboard_dir")]
    folder = next((f for f in folders if f is not None), None)
    if folders[0] is not None and folders[1] is not None:
        keys.add_row("tensorboard_dir", "mapped", f"TensorBoard's events are in log_dir ({folder}) with the other logs")
    return {
        "folder": folder,
        "every": keys.number("log_interval", 100, above=0),
        "wandb": _wandb(keys),
        "peak_tflops": keys.get("peak_theoretical_tflops"),
        "phase_timers": keys.get("wall_clock_breakdown", False),
    }


def _wandb(keys: _Keys) -> dict[str, Any] | None:
    names = {"wandb_project": "project", "wandb_group": "group", "wandb_team": "entity", "wandb_run_name": "name"}
    if not keys.get("use_wandb"):
        for key in names:
            keys.add_row(key, "ignored", "use_wandb is not true")
        return None
    settings = {ours: keys.get(theirs) for theirs, ours in names.items()}
    return {"project": "neox"} | {name: value for name, value in settings.items() if value is not None}


# --- data ---


def _data(keys: _Keys) -> dict[str, Any]:
    keys.choice("data_impl", "infer", {"infer": None, "mmap": None},
                {"cached": "an old format; write the data again with `powertrain preprocess`"})  # fmt: skip
    keys.choice("dataset_impl", "gpt2", {"gpt2": None}, dict.fromkeys(("pairwise", "online"), "use gpt2"))
    apart = "use packed; data.document_mask (ours) keeps documents apart"
    keys.choice("pack_impl", "packed", {"packed": None}, {"pack_until_overflow": apart, "unpacked": apart})
    split = keys.get("split", "969, 30, 1")
    return {
        **_sources(keys),
        "split": split,
        "tokenizer": _tokenizer(keys),
        "vocab_multiple": keys.number("make_vocab_size_divisible_by", 128, above=0),
        "eod_mask_loss": keys.get("eod_mask_loss", False),
        "weight_by_num_documents": keys.get("weight_by_num_documents", False),
        "weighted_sampler_alpha": keys.get("weighted_sampler_alpha", 1.0),
        "num_workers": keys.number("num_workers", 2, least=0),
    }


_PARTS = {"train": "train", "valid": "validation", "test": "test"}


def _sources(keys: _Keys) -> dict[str, Any]:
    single = keys.get("data_path")
    given = [part for part in _PARTS if keys.get(f"{part}_data_paths") is not None]
    if single is not None and given:
        keys.wrong(("data_path",), f"must not stand beside {given[0]}_data_paths")
    if given and len(given) < 3:
        missing = ", ".join(f"{part}_data_paths" for part in _PARTS if part not in given)
        keys.wrong((f"{given[0]}_data_paths",), f"must come with {missing}")
    if given:
        return {ours: _blend(keys, part) for part, ours in _PARTS.items()}
    if single is None:
        keys.wrong(("data_path",), "must be given, or train_data_paths, valid_data_paths and test_data_paths;"
                   " GPT-NeoX's examples keep it in a second file, such as local_setup.yml")  # fmt: skip
    for part in _PARTS:
        for key in (f"{part}_data_weights", f"{part}_label_data_paths"):
            if keys.get(key) is not None:
                keys.wrong((key,), f"must come with {part}_data_paths")
    return {"train": [{"path": single}]}


def _blend(keys: _Keys, part: str) -> list[dict[str, Any]]:
    paths = keys.get(f"{part}_data_paths", [])
    weights = keys.get(f"{part}_data_weights", [1.0] * len(paths))
    labels = keys.get(f"{part}_label_data_paths", [None] * len(paths))
    for name, values in ((f"{part}_data_weights", weights), (f"{part}_label_data_paths", labels)):
        if len(values) != len(paths):
            keys.wrong((name,), f"must have as many entries as {part}_data_paths ({len(paths)}), got {len(values)}")
            return []
    if keys.get("weight_by_num_documents"):
        keys.add_row(f"{part}_data_weights", "ignored", "weight_by_num_documents overrides weights, in GPT-NeoX too")
    return [
        {"path": path, "weight": weight, "labels": label}
        for path, weight, label in zip(paths, weights, labels, strict=True)
    ]


_TOKENIZERS = {name: name for name in ("GPT2BPETokenizer", "HFTokenizer", "HFGPT2Tokenizer", "CharLevelTokenizer")}
_OTHER_TOKENIZERS = dict.fromkeys(
    ("SPMTokenizer", "TiktokenTokenizer"), "convert it to a tokenizer.json and name it with HFTokenizer and vocab_file"
)


def _tokenizer(keys: _Keys) -> str:
    kind = keys.choice("tokenizer_type", "GPT2BPETokenizer", _TOKENIZERS, _OTHER_TOKENIZERS)
    if kind == "CharLevelTokenizer":
        return "CharLevelTokenizer"
    vocab, merges = keys.get("vocab_file"), keys.get("merge_file")
    if keys.missing and vocab is None:  # the tokenizer's type is refused already
        return "CharLevelTokenizer"
    if vocab is None or (merges is None and kind == "GPT2BPETokenizer"):
        missing = "vocab_file" if vocab is None else "merge_file"
        keys.wrong((missing,), f"must be given for {kind}")
    return f"gpt2:{vocab}:{merges}" if kind == "GPT2BPETokenizer" else str(vocab)


# --- the model ---

_ACTIVATIONS = {
    "gelu": "gelu", "relu": "relu", "swish": "silu", "silu": "silu", "geglu": "geglu", "reglu": "reglu",
    "swiglu": "swiglu",
}  # fmt: skip
_OTHER_ACTIVATIONS = dict.fromkeys(("softsign", "mish", "bilinear", "glu"), f"use one of {', '.join(_ACTIVATIONS)}")
_GATED = ("geglu", "reglu", "swiglu")
_NORMS = {"layernorm": "layer_norm", "te_layernorm": "layer_norm", "rmsnorm": "rms_norm", "te_rmsnorm": "rms_norm"}
_INITS = {
    name: name
    for name in (
        "normal", "scaled_normal", "orthogonal", "xavier_uniform", "xavier_normal", "wang_init", "small_init",
        "single_residual_scaled_normal",
    )
}  # fmt: skip
_NO_SCALED_ORTHOGONAL = {"scaled_orthogonal": "use orthogonal, or scaled_normal"}


def _model(keys: _Keys) -> dict[str, Any]:
    for name in ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings"):
        if keys.get(name) is None:
            keys.wrong((name,), "must be given")
    _attention_types(keys)
    _only_one(keys, "moe_num_experts", "use model.architecture deepseek (ours), or 1")
    unique = keys.get("num_unique_layers")
    if unique is not None and unique != keys.get("num_layers"):
        keys.unsupported("num_unique_layers", unique, "remove it; every layer has its own parameters")
    llama = "write activation: swiglu, use_bias_in_mlp: false and intermediate_size, as GPT-NeoX does now"
    keys.choice("mlp_type", "regular", {"regular": None}, {"llama": llama, "identity": "every layer has an MLP"})
    norm = keys.choice("norm", "layernorm", _NORMS, {"scalenorm": "use layernorm or rmsnorm"})
    is_layer_norm = norm == "layer_norm"
    window = keys.number("sliding_window_width", above=-1)
    return {
        "architecture": "gpt_neox",
        "vocab_size": _vocab_size(keys),
        "hidden_size": keys.get("hidden_size"),
        "num_layers": keys.get("num_layers"),
        "num_heads": keys.get("num_attention_heads"),
        "num_kv_heads": keys.get("num_kv_heads"),
        "max_position_embeddings": keys.get("max_position_embeddings"),
        "tie_embeddings": not keys.get("no_weight_tying", False),
        "norm": norm,
        "norm_eps": keys.get("layernorm_epsilon", 1e-5) if is_layer_norm else keys.get("rms_norm_epsilon", 1e-8),
        "norm_bias": is_layer_norm and keys.get("use_bias_in_norms", True),
        "attention_bias": keys.get("use_bias_in_attn_linear", True),
        "mlp_bias": keys.get("use_bias_in_mlp", True),
        **_mlp(keys),
        **_positions(keys),
        "parallel_residual": keys.get("gpt_j_residual", False),
        "shared_norm": keys.get("gpt_j_residual", False) and keys.get("gpt_j_tied", False),
        "sliding_window": None if window is None else window + 1,
        "hidden_dropout": keys.get("hidden_dropout", 0.0),
        "attention_dropout": keys.get("attention_dropout", 0.0),
        "init_method": keys.choice("init_method", "normal", _INITS, _NO_SCALED_ORTHOGONAL),
        "output_init_method": keys.choice("output_layer_init_method", "scaled_normal", _INITS, _NO_SCALED_ORTHOGONAL),
        "init_std": keys.get("init_method_std", 0.02),
    }


def _only_one(keys: _Keys, key: str, todo: str) -> None:
    if keys.get(key, 1) > 1:
        keys.unsupported(key, keys.get(key), todo)


def _positions(keys: _Keys) -> dict[str, Any]:
    known = {name: name for name in ("rotary", "learned", "alibi", "none")}
    refused = dict.fromkeys(("sinusoidal", "rpe"), f"use one of {', '.join(known)}")
    kind = keys.choice("pos_emb", "learned", known, refused)
    if kind != "rotary":
        for key in ("rotary_pct", "rotary_emb_base"):
            keys.add_row(key, "ignored", f"pos_emb is {kind}")
    pct = keys.number("rotary_pct", 1.0, above=0)
    if pct > 1:
        keys.wrong(("rotary_pct",), f"must be at most 1, got {pct!r}")
        pct = 1.0
    return {"position_embedding": kind, "rotary_pct": pct, "rope_theta": keys.get("rotary_emb_base", 10000)}


def _mlp(keys: _Keys) -> dict[str, Any]:
    """activation and width: gated MLPs get two thirds of intermediate_size, so that both kinds have as many weights."""
    name = str(keys.get("activation", "gelu")).lower()
    kind = keys.choice("activation", "gelu", _ACTIVATIONS, _OTHER_ACTIVATIONS)
    if name == "gelu" and keys.get("bias_gelu_fusion"):
        kind = "gelu_tanh"
        keys.add_row(
            "bias_gelu_fusion", "changes numerics", "GELU becomes its tanh approximation, as in GPT-NeoX; false: erf"
        )
    elif keys.get("bias_gelu_fusion"):
        keys.add_row("bias_gelu_fusion", "mapped", f"no effect with activation {name}, as in GPT-NeoX")
    width = keys.number("intermediate_size", above=0)
    factor = keys.number("expansion_factor", above=0)
    if width is not None and factor is not None:
        keys.wrong(("expansion_factor",), "must not stand beside intermediate_size")
    hidden = keys.get("hidden_size") or 1
    width = width or (int(factor * hidden) if factor else 4 * hidden)
    return {"activation": kind, "intermediate_size": _mlp_width(keys, width, name in _GATED)}


def _mlp_width(keys: _Keys, width: int, gated: bool) -> int:
    """GPT-NeoX rounds the first matrix's rows to 2m, the second's columns to m; they must fit each other."""
    m = int(keys.number("mlp_multiple_of", 1, above=0))
    rows = int(width * 2 / 3) if gated else width
    columns = rows // 2 if gated else rows
    rows = math.ceil(rows / (2 * m)) * 2 * m
    columns = math.ceil(columns / m) * m
    if (rows // 2 if gated else rows) != columns:
        key = next((k for k in ("intermediate_size", "expansion_factor") if k in keys.values), "hidden_size")
        words = f"makes an MLP of {rows} rows into {columns} columns in GPT-NeoX, which do not fit"
        keys.wrong((key,), f"{words}; use a multiple of {6 * m if gated else 2 * m}")
        return 1
    if gated:
        words = f"model.intermediate_size {columns}: gated, so two thirds of {width} in two matrices"
        keys.add_row("intermediate_size", "mapped", words, width)
    return int(columns)


_OTHER_ATTENTION = (
    "local",
    "sparse_fixed",
    "sparse_variable",
    "bigbird",
    "bslongformer",
    "gmlp",
    "amlp",
    "rwkv",
    "mamba",
)


def _attention_types(keys: _Keys) -> None:
    config = keys.get("attention_config")
    layers = keys.get("num_layers")
    if config is None or not isinstance(layers, int):
        return
    try:
        kinds = _expanded(config, layers)
    except ValueError as error:
        keys.wrong(("attention_config",), str(error))
        return
    others = sorted({kind for kind in kinds if kind not in ("global", "flash")})
    if others and set(others) <= set(_OTHER_ATTENTION):
        keys.unsupported(
            "attention_config", ", ".join(others), f'use [[["flash"], {layers}]]; sliding_window_width is a local one'
        )
    elif others:
        keys.wrong(("attention_config",), f"must name global or flash layers, got {', '.join(others)}")
    elif len(kinds) != layers:
        keys.wrong(("attention_config",), f"must have {layers} layers (num_layers), got {len(kinds)}")


def _expanded(config: list[Any], layers: int) -> list[str]:
    """[[["global", "flash"], 6]] and ["global", ...] as a name for each layer; "all" repeats to the end."""
    if all(isinstance(item, str) for item in config):
        return list(config)
    kinds: list[str] = []
    for item in config:
        if not (isinstance(item, list) and len(item) == 2 and isinstance(item[0], list) and item[0]):
            raise ValueError(f'must be a list such as [[["flash"], {layers}]], got {config!r}')
        names, count = item
        if not all(isinstance(name, str) for name in names):
            raise ValueError(f"must name layer types, got {names!r}")
        if count == "all":
            count = max(layers - len(kinds), 0) // len(names)
        if not _is_kind(count, "int") or not 0 <= count <= layers:
            raise ValueError(f'must repeat types 0 to {layers} times or "all", got {count!r}')
        kinds += names * count
    return kinds


_GPT2_VOCABULARY = 50257


def _vocab_size(keys: _Keys) -> int:
    """Rows of the embedding: the tokenizer's vocabulary padded to make_vocab_size_divisible_by * tensor parallel."""
    if keys.get("padded_vocab_size") is not None:
        return int(keys.number("padded_vocab_size", 1, above=0))
    multiple = keys.number("make_vocab_size_divisible_by", 128, above=0)
    size, where = _vocabulary(keys)
    padded = padded_vocab_size(size, multiple, max(keys.get("model_parallel_size", 1), 1))
    keys.add_row("make_vocab_size_divisible_by", "honoured", f"{size} tokens ({where}), padded to {padded}", multiple)
    return padded


def _vocabulary(keys: _Keys) -> tuple[int, str]:
    """The tokenizer's number of ids, and where that is known from."""
    name = _tokenizer(keys)
    try:
        return load_tokenizer(name).vocab_size, name
    except FileNotFoundError as error:
        if name.startswith("gpt2:"):
            return _GPT2_VOCABULARY, f"GPT-2's, assumed: {error}"
        keys.wrong(("vocab_file",), f"must exist, or padded_vocab_size be given: {error}")
    except (ValueError, OSError) as error:
        keys.wrong(("vocab_file",), f"must be a tokenizer: {error}")
    return 1, name
