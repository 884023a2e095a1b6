"""A GPT-NeoX config translated to ours: keys whose meaning depends on the value. neox_keys.py lists all keys.

Facts from GPT-NeoX (Apache-2.0; no code): megatron/neox_arguments/arguments.py (batch arithmetic, precision, ZeRO
defaults), megatron/model/transformer.py (MLP widths, windows), megatron/learning_rates.py and training.py (schedule),
megatron/model/utils.py (weight decay groups), megatron/tokenizer/tokenizer.py (vocabularies).
"""

import math
from typing import Any

from powertrain.train.config.neox_data import data, tokenizer
from powertrain.train.config.neox_keys import KEYS
from powertrain.train.config.neox_model import model
from powertrain.train.config.neox_objective import objective_section
from powertrain.train.config.neox_optimizer import optimizer
from powertrain.train.config.neox_source import MISSING, NeoXKeys, given, is_kind
from powertrain.train.config.table import Row
from powertrain.train.config.yaml_source import KeyPath, Source, did_you_mean


def translate(source: Source, world_size: int) -> tuple[dict[str, Any], tuple[Row, ...], dict[KeyPath, str]]:
    """GPT-NeoX's keys as the values of a RunConfig, the table of keys, and the key behind each of our fields.

    Raises ConfigError with every mistake, one a line; UnsupportedConfig where a feature is missing here.
    """
    keys = NeoXKeys(source)
    parts = {
        "parallel": _parallel(keys, world_size),
        "train": _train(keys, world_size),
        "optimizer": optimizer(keys),
        "schedule": _schedule(keys),
        "fp8": _fp8(keys),
        "checkpoint": _checkpoint(keys),
        "evaluation": _evaluation(keys, world_size),
        "logging": _logging(keys),
        "data": data(keys),
        "model": model(keys),
    }
    keys.finish()
    return parts, tuple(keys.rows()), _origins(keys)


def model_fields(source: Source) -> dict[str, Any]:
    """The fields of a gpt_neox model's config from the keys that say them; the others are checked by name only.

    Raises ConfigError and UnsupportedConfig as `translate` does.
    """
    keys = NeoXKeys(source)
    fields = model(keys)
    keys.finish()
    return fields


def tokenizer_name(source: Source) -> str | None:
    """The tokenizer as `load_tokenizer` takes it; None if the keys name none that is read here."""
    keys = NeoXKeys(source)
    name = tokenizer(keys)
    return None if keys.mistakes or keys.missing else name


def _origins(keys: NeoXKeys) -> dict[KeyPath, str]:
    """Our field -> the GPT-NeoX key that set it, for errors found later."""
    origins: dict[KeyPath, str] = {}
    for key in keys.values:
        word = KEYS[key].words.split(",")[0].split(":")[0].split(" ")[0]
        if "." in word and KEYS[key].disposition in ("honoured", "mapped"):
            origins.setdefault(tuple(word.split(".")), key)
    for key in keys.section("fp16"):
        if key in _SCALE_KEYS:
            origins["train", "loss_scale", _SCALE_KEYS[key]] = f"fp16.{key}"
    return origins


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
_ZERO = {"stage", "load_from_fp32_weights", *_ZERO_HINTS, *_ZERO_OFFLOAD, *_ZERO_LOSSY}


def _parallel(keys: NeoXKeys, world_size: int) -> dict[str, Any]:
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
    stages = keys.get("pipe_parallel_size", 0)
    if stages > 1 and world_size % (tensor * stages):
        must = f"must divide the number of ranks ({world_size}) over those of model_parallel_size ({tensor})"
        keys.wrong(("pipe_parallel_size",), f"{must}, got {stages}")
    _, _, context, pipeline = _batch(keys, world_size)
    if pipeline > 1:
        keys.add_row("pipe_parallel_size", "honoured", "parallel.pipeline: as many stages, by 1F1B")
    elif stages > 1:
        shards = (
            "parallel.shard: stages become shards of FSDP2, with the same global batches in the same order; where a "
        )
        shards += "batch does not divide over them, ranks share its sequences (parallel.context)"
        keys.add_row("pipe_parallel_size", "mapped", shards)
    strategy = "fsdp" if stage or stages > pipeline else "ddp"
    parallel: dict[str, Any] = {
        "strategy": strategy, "pipeline": pipeline, "tensor": tensor, "context": context,
        "reshard_after_forward": stage == 3,
    }  # fmt: skip
    if strategy == "ddp":
        parallel |= {"replicate": max(world_size // tensor // pipeline, 1), "shard": 1}
    return parallel


def _tensor_parallel(keys: NeoXKeys, world_size: int) -> int:
    tensor = max(keys.get("model_parallel_size", 1), 1)
    if world_size % tensor:
        keys.wrong(("model_parallel_size",), f"must divide the number of ranks ({world_size}), got {tensor}")
        return 1
    return int(tensor)


def _zero_stage(keys: NeoXKeys) -> int:
    section = keys.section("zero_optimization")
    if not section:
        return 0
    stage = section.get("stage", MISSING)
    if stage is MISSING:
        keys.wrong(("zero_optimization",), "must have a stage (0, 1, 2 or 3), got none")
        return 0
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        keys.wrong(("zero_optimization", "stage"), f"must be 0, 1, 2 or 3, got {given(stage)}")
        return 0
    for key, value in section.items():
        path = ("zero_optimization", key)
        if key == "load_from_fp32_weights" and value is False and keys.path("load") is not None:
            words = "a checkpoint's fp32 masters are read; DeepSpeed then makes them of the 16-bit weights"
            keys.add_inner_row(path, value, "changes numerics", words)
        elif key in _ZERO_HINTS:
            keys.add_inner_row(
                path, value, "ignored", "a tuning hint for DeepSpeed; FSDP2 overlaps and buckets by itself"
            )
        elif key in _ZERO_OFFLOAD:
            keys.add_inner_row(path, value, "ignored", "nothing is offloaded to the CPU; the result is the same")
        elif key in _ZERO_LOSSY and value:
            keys.unsupported("zero_optimization", f"{key}: {value}", "set it to false; collectives are not quantized")
        elif key not in ("stage", *_ZERO_LOSSY):
            keys.add_inner_row(
                path, value, "ignored", f"not a key of ZeRO that changes a result{did_you_mean(key, _ZERO)}"
            )
    return int(stage)


def _batch(keys: NeoXKeys, world_size: int) -> tuple[int, int, int, int]:
    """(micro batch, accumulation steps, context ranks, pipeline stages) here, from any two of the first two and the
    global batch by GPT-NeoX's integer divisions.

    Stages become shards where they would wait more than they compute, with fewer accumulation steps than stages; where
    the ranks, the layers or ZeRO's gradients cannot be divided by them; and for what stages do not train.
    """
    tensor, stages = (max(keys.get(name, 1), 1) for name in ("model_parallel_size", "pipe_parallel_size"))
    ours = max(world_size // tensor, 1)
    # data-parallel ranks there; here each stage's ranks are some, too
    ranks = max(ours // stages, 1)
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    batch, micro, steps = (keys.number(name, above=0) for name in names)
    if steps is None and (steps := keys.number("gas", above=0)) is not None:
        keys.add_row("gas", "mapped", "gradient_accumulation_steps, its name today")
    elif "gas" in keys.values:
        keys.add_row("gas", "ignored", "gradient_accumulation_steps is set")
    if batch is None and micro is None:
        if keys.lacks(names[0]) and keys.lacks(names[1]):
            keys.wrong(names[1:2], "must be given, or train_batch_size; got neither")
        return 1, 1, 1, 1
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
        return 1, 1, 1, 1
    if batch is None:
        keys.add_row(names[0], "honoured", f"{micro} * {steps} * {ranks} ranks", total)
    layers = keys.get("num_layers") or stages
    is_plain = (
        keys.get("train_impl", "normal") == "normal" and not keys.get("te_fp8_mha") and not keys.get("eval_tasks")
    )
    if is_plain and 1 < stages <= min(steps, layers) and ours % stages == 0 and _zero_stage(keys) <= 1:
        return int(micro), int(steps), 1, stages
    return *_over_more_ranks(keys, int(micro), int(steps), ours, ranks), 1


def _over_more_ranks(keys: NeoXKeys, micro: int, steps: int, ours: int, theirs: int) -> tuple[int, int, int]:
    """The same global batch over more data-parallel ranks: fewer steps for each, then smaller micro batches.

    The third is what is left of their ratio: so many ranks share each sequence.
    """
    more, rest = divmod(ours, theirs)
    from_steps = math.gcd(steps, more)
    from_micro = math.gcd(micro, more // from_steps)
    context = more // from_steps // from_micro
    if rest or (context > 1 and _get_rate(keys, "attention_dropout")):
        words = f"{ours} ranks cannot share a global batch of {micro * steps * theirs}"
        keys.unsupported(
            "pipe_parallel_size",
            keys.get("pipe_parallel_size"),
            f"{words}: use a multiple of {ours} samples, other ranks, or no attention_dropout",
        )
        return micro, steps, 1
    return micro // from_micro, steps // from_steps, context


def _get_rate(keys: NeoXKeys, name: str) -> float:
    value = keys.get(name, 0.0)
    return value if is_kind(value, "float") else 0.0


# --- training ---


def _train(keys: NeoXKeys, world_size: int) -> dict[str, Any]:
    micro, steps, *_ = _batch(keys, world_size)
    precision = _precision(keys)
    for name in ("train_iters", "seq_length"):
        if keys.lacks(name):
            keys.wrong((name,), "must be given")
    if keys.get("fp16_lm_cross_entropy"):
        keys.add_row("fp16_lm_cross_entropy", "changes numerics", "the loss is computed in fp32 here: more precise")
    keys.add_row(
        "seed",
        "honoured",
        "train.seed: the order of samples is GPT-NeoX's; first weights and dropout are other draws",
        1234,
    )
    return {
        **objective_section(keys),
        "steps": keys.get("train_iters"),
        "exit_interval": keys.number("exit_interval", 0, least=0),
        "seq_length": keys.get("seq_length"),
        "micro_batch_size": micro,
        "gradient_accumulation_steps": steps,
        "precision": precision,
        "reduce_dtype": _reduce_dtype(keys, precision),
        "loss_scale": _loss_scale(keys, precision),
        "gradient_clipping": _gradient_clipping(keys),
        "seed": keys.get("seed", 1234),
        "activation_checkpointing": "full" if keys.get("checkpoint_activations") else "none",
    }


_FP8_KEYS = (
    "te_fp8_format", "te_fp8_wgrad", "te_fp8_amax_history_len", "te_fp8_amax_compute_algo", "te_fp8_margin",
)  # fmt: skip


def _fp8(keys: NeoXKeys) -> dict[str, Any]:
    """Delayed scaling of the attention's projections with te_fp8_mha, which alone makes GPT-NeoX compute in FP8."""
    if not keys.get("te_fp8_mha"):
        for key in ("te_fp8_mha", *_FP8_KEYS):
            keys.add_row(key, "honoured", "off: without te_fp8_mha GPT-NeoX computes nothing in FP8")
        return {}
    words = "fp8: the attention's projections by tensor-delayed; attention itself stays in 16 bits"
    keys.add_row("te_fp8_mha", "changes numerics", words)
    formats = {"e4m3": "e4m3", "hybrid": "hybrid"}
    if keys.get("te_fp8_wgrad", True) is False:
        keys.unsupported("te_fp8_wgrad", False, "leave it out: weight gradients are FP8 products like the others")
    section = {
        "recipe": "tensor-delayed",
        "keep": ["lm_head", "router", "*.mlp.*"],
        "format": keys.choice("te_fp8_format", "hybrid", formats),
        "history": keys.number("te_fp8_amax_history_len", 1, least=1),
        "most_recent": keys.choice("te_fp8_amax_compute_algo", "most_recent", {"most_recent": True, "max": False}),
        "margin": keys.number("te_fp8_margin", 0, least=0),
    }
    for key, name in zip(_FP8_KEYS, ("format", None, "history", "most_recent", "margin"), strict=True):
        keys.add_row(key, "honoured", f"fp8.{name}" if name else "weight gradients are FP8 products")
    return section


def _gradient_clipping(keys: NeoXKeys) -> float:
    """Left out it is no clipping, as in GPT-NeoX, whose default of 1.0 does not reach DeepSpeed."""
    params = keys.section("optimizer").get("params")
    old = params.get("max_grad_norm") if isinstance(params, dict) else None
    if old is not None and not (is_kind(old, "float") and old >= 0):
        keys.wrong(("optimizer", "params", "max_grad_norm"), f"must be a number of at least 0, got {given(old)}")
        old = None
    if keys.get("gradient_clipping") is None and old is None:
        keys.add_row("gradient_clipping", "honoured", "no clipping: GPT-NeoX's default does not reach DeepSpeed", 1.0)
        return 0.0
    norm = float(keys.number("gradient_clipping", old or 0.0, least=0))
    if norm and "gradient_clipping" in keys.values:
        words = f"clips at {norm:g}; in GPT-NeoX since 2023-03 the value does not reach DeepSpeed (gpt-neox#1432)"
        keys.add_row("gradient_clipping", "changes numerics", words)
    if old is not None:
        first = keys.get("gradient_clipping") is not None
        words = "gradient_clipping is set, and comes first" if first else f"train.gradient_clipping: {norm:g}"
        keys.add_inner_row(
            ("optimizer", "params", "max_grad_norm"), old, "ignored" if first else "changes numerics", words
        )
    return norm


_PRECISIONS = {"fp16": "fp16", "bf16": "bf16"}


def _precision(keys: NeoXKeys) -> str:
    """fp32 unless a key selects another precision; several such keys must agree."""
    asked_by = {}
    if keys.get("precision") is not None:
        asked_by["precision"] = keys.choice("precision", "fp32", {"fp16": "fp16", "fp32": "fp32", "bfloat16": "bf16"})
    for section, name in _PRECISIONS.items():
        value = keys.get(section)
        if value is True or keys.inner(section, "enabled", False, "bool"):
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


# of the section fp16 -> of train.loss_scale
_SCALE_KEYS = {
    "loss_scale": "static", "initial_scale_power": "initial_power", "loss_scale_window": "window",
    "hysteresis": "hysteresis", "min_loss_scale": "minimum",
}  # fmt: skip


def _loss_scale(keys: NeoXKeys, precision: str) -> dict[str, Any]:
    for section in _PRECISIONS:
        for key, value in keys.section(section).items():
            if key == "fp16_master_weights_and_grads" and value:
                keys.unsupported(section, f"{key}: {value}", "set it to false; master weights are fp32")
            elif (section, key, value) == ("fp16", "type", "bfloat16"):
                # those look at the type whether fp16 is enabled or not
                words = f"{precision}, as in GPT-NeoX today; older releases computed in bf16: bf16.enabled for that"
                if precision == "bf16":
                    keys.add_inner_row((section, key), value, "ignored", "the run computes in bf16 already")
                else:
                    keys.add_inner_row((section, key), value, "changes numerics", words)
            elif key not in (known := {"enabled", *_SCALE_KEYS} if section == "fp16" else {"enabled"}):
                near = did_you_mean(key, known)
                keys.add_inner_row((section, key), value, "ignored", f"not a key of loss scaling{near}")
    static = keys.inner("fp16", "loss_scale", 0, "float", least=0)
    hysteresis = keys.inner("fp16", "hysteresis", 2, "int", least=1)
    if not keys.section("zero_optimization").get("stage"):
        # DeepSpeed's fp16 optimizers halve the scale at each overflow; ZeRO's has the hysteresis
        if hysteresis > 1 and "hysteresis" in keys.section("fp16"):
            words = "without ZeRO DeepSpeed has none: train.loss_scale.hysteresis 1"
            keys.add_inner_row(("fp16", "hysteresis"), hysteresis, "ignored", words)
        hysteresis = 1
    return {
        "static": float(static) or None,
        "initial_power": keys.inner("fp16", "initial_scale_power", 16, "int", least=0),
        "window": keys.inner("fp16", "loss_scale_window", 1000, "int", least=1),
        "hysteresis": hysteresis,
        "minimum": float(keys.inner("fp16", "min_loss_scale", 1, "float")),
    }


def _reduce_dtype(keys: NeoXKeys, precision: str) -> str:
    wide = keys.section("data_types").get("grad_accum_dtype")
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


# --- schedule ---


def _schedule(keys: NeoXKeys) -> dict[str, Any]:
    steps = keys.number("train_iters", 1, above=0)
    decay = keys.number("lr_decay_iters", above=0)
    fraction = keys.number("lr_decay_fraction", above=0)
    if decay is not None and fraction is not None:
        keys.add_row("lr_decay_fraction", "ignored", "lr_decay_iters is set, and comes first in GPT-NeoX too")
    elif fraction is not None:
        decay = max(int(fraction * steps), 1)
    kinds = {kind: kind for kind in ("linear", "constant", "cosine", "exponential")}
    kind = keys.choice("lr_decay_style", "linear", kinds)
    clamp = keys.choice("lr_clamp", "neox", {name: name for name in ("neox", "neox-2023", "neox-2022", "safe")})
    span = decay or steps
    warmup = keys.number("warmup", 0.01, least=0) * span
    words = f"schedule.warmup_steps: {warmup:g}, the fraction of {span} steps, not rounded"
    if clamp == "neox" and 0 < warmup < 1:
        words += f"; below 1 the first step has {1 / warmup:g} times lr, as there; not with warmup: 0 or lr_clamp: safe"
        keys.add_row("warmup", "changes numerics", words, 0.01)
    else:
        keys.add_row("warmup", "mapped", words, 0.01)
    if kind == "cosine" and clamp in ("neox", "neox-2023") and span < steps:
        words = f"past step {span} the cosine goes on and the rate rises again, as in GPT-NeoX; lr_clamp: safe stops it"
        keys.add_row("lr_decay_style", "changes numerics", words)
    return {
        "kind": kind, "warmup_steps": warmup, "decay_steps": decay, "min_lr": keys.number("min_lr", 0.0, least=0),
        "clamp": clamp,
    }  # fmt: skip


# --- checkpoints, evaluation, logs ---


def _checkpoint(keys: NeoXKeys) -> dict[str, Any]:
    every = keys.number("checkpoint_factor", above=0)
    if every is None and (every := keys.number("save_interval", above=0)) is not None:
        keys.add_row("save_interval", "mapped", "checkpoint.every; GPT-NeoX calls it checkpoint_factor now")
    elif "save_interval" in keys.values:
        keys.add_row("save_interval", "ignored", "checkpoint_factor is set")
    extra = keys.get("extra_save_iters")
    lacks_steps = all(map(keys.lacks, ("checkpoint_factor", "save_interval", "extra_save_iters")))
    if keys.path("save") is not None and lacks_steps:
        keys.wrong(("save",), "must come with checkpoint_factor or extra_save_iters, got neither")
    if every is not None and every != int(every):
        keys.unsupported("checkpoint_factor", every, "use a whole number")
    if not all(is_kind(step, "int") for step in extra or ()):
        keys.wrong(("extra_save_iters",), f"must be a list of integers, got {given(extra)}")
        extra = None
    if keys.get("no_load_optim"):
        words = "checkpoint.load_optimizer: all parameters are trained; in GPT-NeoX since 2024-09 the first one alone"
        keys.add_row("no_load_optim", "changes numerics", words)
    from_checkpoint = bool(keys.get("use_checkpoint_lr_scheduler"))
    if from_checkpoint and keys.get("override_lr_scheduler"):
        keys.wrong(("override_lr_scheduler",), "must be false beside use_checkpoint_lr_scheduler")
    return {
        "folder": keys.path("save"),
        "load": keys.path("load"),
        "finetune": bool(keys.get("finetune")),
        "load_optimizer": not keys.get("no_load_optim"),
        "load_schedule": from_checkpoint,
        "load_rng": not keys.get("no_load_rng"),
        "every": int(every or 0),
        "scale": keys.choice("checkpoint_scale", "linear", {"linear": "linear", "log": "log"}),
        "extra_steps": extra or (),
        "keep_last": keys.get("keep_last_n_checkpoints"),
    }


def _evaluation(keys: NeoXKeys, world_size: int) -> dict[str, Any]:
    """eval_iters counts optimizer batches there: accumulation steps times as many micro-batches, along the set."""
    batches = keys.number("eval_iters", 100, least=0)
    every = keys.number("eval_interval", 1000, least=0)
    if not batches:
        return {"every": 0, "at_end": False}
    _, accumulation, *_ = _batch(keys, world_size)
    steps = batches * accumulation
    words = f"evaluation.steps: {steps} micro-batches, {accumulation} for each optimizer batch"
    keys.add_row("eval_iters", "honoured", words, 100)
    return {"every": every, "steps": steps, "advance": True, "tasks": keys.get("eval_tasks") or ()}


def _logging(keys: NeoXKeys) -> dict[str, Any]:
    folders = [keys.path("log_dir"), keys.path("tensorboard_dir")]
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


def _wandb(keys: NeoXKeys) -> dict[str, Any] | None:
    names = {"wandb_project": "project", "wandb_group": "group", "wandb_team": "entity", "wandb_run_name": "name"}
    if not keys.get("use_wandb"):
        for key in names:
            keys.add_row(key, "ignored", "use_wandb is not true")
        return None
    settings = {ours: keys.get(theirs) for theirs, ours in names.items()}
    return {"project": "neox"} | {name: value for name, value in settings.items() if value is not None}
