"""Reads GPT-NeoX configs of a file, compares them with GPT-NeoX's rules, and takes three small steps of each.

python scripts/neox_configs.py CONFIGS.jsonl [--no-steps]

Each line of the input has name, world (number of ranks) and keys (the merged YAML). What a config leaves to a second
file (data, vocabulary files, the size of the vocabulary) is added. Compared at full size: global batch, precision,
number of parameters, rates of six steps; at a small size, on the CPU: it starts, and three steps have finite losses
and the same rates. Expected numbers are computed here from the keys alone, by the rules of
megatron/neox_arguments/arguments.py, learning_rates.py, model/transformer.py and model/word_embeddings.py
(Apache-2.0; facts, no code).
"""

import argparse
import json
import math
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from powertrain.models.huggingface import shapes
from powertrain.runtime.extras import MissingExtra
from powertrain.train import mesh_shape, ranks
from powertrain.train.config.reader import Run, read_config
from powertrain.train.config.schema import RunConfig
from powertrain.train.data.indexed import IndexedWriter
from powertrain.train.reporting.metrics import PartialSink, StepRecord
from powertrain.train.run import start
from powertrain.train.schedule import learning_rate

VOCABULARY = 512
LENGTH = 32
STEPS = 3
GATED = ("swiglu", "geglu", "reglu", "bilinear", "glu")


def complete(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys with those that a second file would bring."""
    added: dict[str, Any] = {"vocab_file": "vocab.json", "merge_file": "merges.txt", "padded_vocab_size": 50432}
    if not any(key.endswith(("data_path", "data_paths")) for key in keys):
        added["data_path"] = "data"
    return {**added, **{key.replace("-", "_"): value for key, value in keys.items()}}


def expected(keys: Mapping[str, Any], world: int) -> dict[str, Any]:
    """batch, precision, parameters, rates by GPT-NeoX's rules."""
    return {
        "batch": _batch(keys, world), "precision": _precision(keys), "parameters": _parameters(keys),
        "rates": [_rate(keys, step) for step in _looked_at(keys["train_iters"])],
    }  # fmt: skip


def found(run: Run, world: int) -> dict[str, Any]:
    """The same of our config."""
    config = run.config
    train, parallel = config.train, config.parallel
    data_ranks = world // parallel.tensor // parallel.context // parallel.pipeline
    rates = [learning_rate(s, config.optimizer.lr, config.schedule, train.steps) for s in _looked_at(train.steps)]
    return {
        "batch": train.micro_batch_size * train.gradient_accumulation_steps * data_ranks, "precision": train.precision,
        "parameters": sum(t.numel() for t in shapes(config.model).values()), "rates": rates,
    }  # fmt: skip


def _looked_at(steps: int) -> list[int]:
    return sorted({0, 1, 2, steps // 100, steps // 2, steps - 1})


def _get(keys: Mapping[str, Any], name: str, default: Any) -> Any:
    return default if keys.get(name) is None else keys[name]


def _batch(keys: Mapping[str, Any], world: int) -> int:
    stages, tensor = max(_get(keys, "pipe_parallel_size", 0), 1), max(_get(keys, "model_parallel_size", 1), 1)
    data = world // stages // tensor
    batch, micro = keys.get("train_batch_size"), keys.get("train_micro_batch_size_per_gpu")
    steps = _get(keys, "gradient_accumulation_steps", keys.get("gas"))
    if batch is not None:
        return int(batch)
    return int(micro * (steps or 1) * data)


def _precision(keys: Mapping[str, Any]) -> str:
    for name, ours in (("fp16", "fp16"), ("bf16", "bf16")):
        section = keys.get(name)
        if section is True or (isinstance(section, dict) and section.get("enabled")):
            return ours
    return {"bfloat16": "bf16", None: "fp32"}.get(keys.get("precision"), str(keys.get("precision")))


def _parameters(keys: Mapping[str, Any]) -> int:
    """Those that take part: a norm that gpt_j_tied leaves out is not counted."""
    h, layers, vocabulary = keys["hidden_size"], keys["num_layers"], keys["padded_vocab_size"]
    norm = h if _get(keys, "norm", "layernorm") == "rmsnorm" else 2 * h
    positions = keys["max_position_embeddings"] * h if _get(keys, "pos_emb", "learned") == "learned" else 0
    heads = keys["num_attention_heads"]
    kv = 2 * h * _get(keys, "num_kv_heads", heads) // heads
    attention = (h + kv) * h + h * h
    attention += (h + kv) + h if _get(keys, "use_bias_in_attn_linear", True) else 0
    norms = 1 if keys.get("gpt_j_residual") and keys.get("gpt_j_tied") else 2
    tables = 2 if keys.get("no_weight_tying") else 1
    outside = tables * vocabulary * h + positions + norm
    if keys.get("attention_config") == [[["gmlp"], "all"]]:
        # norm, 8 and 4 times h inside without biases, the gate's norm, spatial weights and biases
        length = keys["seq_length"]
        return outside + layers * (norm + 12 * h * h + 4 * norm + length * (length + 1))
    moe = _experts(keys, h)
    with_experts = -(-layers // moe[0]) if moe else 0
    mlps = (layers - with_experts) * _mlp(keys, h) + (with_experts * moe[1] if moe else 0)
    return outside + layers * (attention + norms * norm) + mlps


def _experts(keys: Mapping[str, Any], h: int) -> tuple[int, int] | None:
    """(interval, parameters of a layer with experts), or None without any: router, two matrices each, no biases."""
    count = _get(keys, "moe_num_experts", 1)
    if count <= 1:
        return None
    if {"moe_type", "moe_token_dropping", "expert_interval", "moe_loss_coeff"} & keys.keys():
        # MegaBlocks' default width, and its bias
        return _get(keys, "expert_interval", 2), count * h + 2 * count * h * 4096 + h
    width = _get(keys, "intermediate_size", -(-4 * h // 256) * 256)
    return _get(keys, "moe_expert_interval", 1), count * h + 2 * count * h * width


def _mlp(keys: Mapping[str, Any], h: int) -> int:
    bias = _get(keys, "use_bias_in_mlp", True)
    width = _get(keys, "intermediate_size", int(h * _get(keys, "expansion_factor", 4)))
    if keys.get("mlp_type") == "llama":
        # of older releases: three matrices without biases, 8/3 of the hidden size in multiples of 256
        return 3 * h * _get(keys, "intermediate_size", -(-int(2 * h * 4 / 3) // 256) * 256)
    if keys.get("te_layernorm_mlp"):
        return (3 if _get(keys, "activation", "gelu") in GATED else 2) * h * width + (
            (2 if _get(keys, "activation", "gelu") in GATED else 1) * width + h
        )
    if _get(keys, "activation", "gelu") in GATED:
        multiple = _get(keys, "mlp_multiple_of", 1)
        # two thirds of the rows in two matrices
        width = -(-(int(2 * width / 3) // 2) // multiple) * multiple
        return 3 * h * width + (2 * width + h if bias else 0)
    return 2 * h * width + (width + h if bias else 0)


def _rate(keys: Mapping[str, Any], step: int) -> float:
    """AnnealingLR of today; `step` is 0 for the first."""
    params = (keys.get("optimizer") or {}).get("params") or {}
    lr, least = _get(params, "lr", 0.001), _get(keys, "min_lr", 0.0)
    end = keys.get("lr_decay_iters")
    if end is None:
        end = math.floor(keys["train_iters"] * _get(keys, "lr_decay_fraction", 1.0))
    end = max(1, end)
    warmup = _get(keys, "warmup", 0.01) * end
    if warmup > 0 and step <= warmup:
        return lr * max(1, step) / warmup
    done = (step - warmup) / (end - warmup)
    style = _get(keys, "lr_decay_style", "linear")
    rate = {
        "linear": lr * (1 - done), "cosine": least + (lr - least) / 2 * (math.cos(math.pi * done) + 1),
        "exponential": lr * math.exp(-0.693 * done), "constant": lr,
    }[style]  # fmt: skip
    return max(rate, least)


def differences(wanted: Mapping[str, Any], got: Mapping[str, Any]) -> list[str]:
    """What is another number."""
    lines = [f"{name} {wanted[name]} {got[name]}" for name in ("batch", "precision", "parameters")
             if wanted[name] != got[name]]  # fmt: skip
    if not np.allclose(wanted["rates"], got["rates"], rtol=1e-9, atol=0):
        lines.append(f"rates {wanted['rates']} {got['rates']}")
    return lines


def small(config: RunConfig, folder: Path) -> RunConfig:
    """The same run at a size for a CPU: one process, few heads and layers, short sequences, all kinds as they are."""
    model = config.model
    heads, kv = 4, getattr(model, "num_kv_heads", None)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "num_layers": 2, "num_heads": heads,
        "max_position_embeddings": LENGTH,
    }  # fmt: skip
    if kv is not None:
        sizes["num_kv_heads"] = heads if kv == model.num_heads else 2 if kv > 1 else 1
    if getattr(model, "intermediate_size", None):
        sizes["intermediate_size"] = 96
    if getattr(model, "sliding_window", None):
        sizes["sliding_window"] = 8
    if getattr(model, "expert_intermediate_size", None):
        sizes["expert_intermediate_size"] = 48
    if sparsity := getattr(model, "sparsity", None):
        sizes["sparsity"] = replace(sparsity, block=4)
    schedule = config.schedule.model_copy(update={"decay_steps": config.schedule.decay_steps or config.train.steps})
    values = config.model_dump()
    train = {
        "steps": STEPS, "seq_length": LENGTH, "micro_batch_size": min(config.train.micro_batch_size, 2),
        "gradient_accumulation_steps": min(config.train.gradient_accumulation_steps, 2),
    }  # fmt: skip
    checkpoint = {"folder": str(folder / "checkpoints"), "load": None, "extra_steps": (), "every": 2, "scale": "linear"}
    evaluation = {"every": 2 if values["evaluation"]["every"] else 0, "steps": 1, "tasks": ()}
    # the same prefixes beside the tokens as the config names: labels, rejected completions, rewards
    documents = folder.parent / ("data" if config.train.objective == "pretrain" else "short/data")
    prefixes = {"labels": "labels", "rejected": "data", "rejected_labels": "labels", "rewards": "rewards"}
    named = {key: str(documents.with_name(name)) for key, name in prefixes.items()
             if any(getattr(source, key) for source in config.data.train)}  # fmt: skip
    data = {"train": [{"path": str(documents), **named}], "validation": (), "test": (),
            "split": "80,10,10",
            "tokenizer": "CharLevelTokenizer", "num_workers": 0,
            "cache_folder": str(folder.parent / "cache")}  # fmt: skip
    return RunConfig.model_validate({
        "model": model.model_copy(update=sizes).model_dump(), "data": {**values["data"], **data},
        "train": {**values["train"], **train}, "optimizer": values["optimizer"], "schedule": schedule.model_dump(),
        "checkpoint": {**values["checkpoint"], **checkpoint}, "evaluation": {**values["evaluation"], **evaluation},
        "logging": {"folder": str(folder), "tensorboard": False, "report": False},
    })  # fmt: skip


class _Steps(PartialSink):
    """The sink that keeps rates and losses."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def step(self, record: StepRecord) -> None:
        self.records.append(record)


def steps_of(run: Run, folder: Path) -> list[StepRecord]:
    """Three steps of the run at a small size."""
    folder.mkdir()
    sink = _Steps()
    tiny = replace(run, config=small(run.config, folder))
    trainer = start(tiny, ranks.read_launch_env(), lambda _: [sink])
    try:
        trainer.fit()
    finally:
        trainer.close()
    return sink.records


def write_data(folder: Path) -> None:
    """Documents for all of them, and short ones that fit into a row with their prompt."""
    _write_documents(folder, 40, 200)
    (folder / "short").mkdir()
    _write_documents(folder / "short", 200, 14)


def _write_documents(folder: Path, count: int, length: int) -> None:
    """Tokens, labels, and a reward for each document."""
    generator = np.random.default_rng(0)
    with (
        IndexedWriter(folder / "data", "uint16") as texts,
        IndexedWriter(folder / "labels", "int32") as labels,
        IndexedWriter(folder / "rewards", "float32") as rewards,
    ):
        for number in range(count):
            tokens = generator.integers(1, 256, length)
            texts.add(tokens)
            labels.add(np.where(np.arange(length) < 10, -100, tokens))
            rewards.add(np.array([1.0 if number % 2 else -1.0]))


def judge(keys: Mapping[str, Any], world: int, folder: Path, *, steps: bool) -> tuple[str, str]:
    """(read | refused | differs | failed, words) of one config; `folder` does not exist yet, its parent has data."""
    keys = complete(keys)
    file = folder.with_suffix(".yml")
    file.write_text(yaml.safe_dump(dict(keys)))
    try:
        run = read_config([file], [], world_size=world, format="gpt_neox")
        mesh_shape.check_parallel(run.config, world)
    except (ValueError, NotImplementedError) as error:
        return "refused", " ".join(str(error).replace(str(file), "").split())[:300]
    different = differences(expected(keys, world), found(run, world))
    if different:
        return "differs", "; ".join(different)
    if not steps:
        return "read", ""
    try:
        records = steps_of(run, folder)
    except MissingExtra as error:
        return "read", f"not started: {error}"
    except Exception as error:  # any: the config goes on the list
        return "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    rates = [_rate(keys, step) for step in range(STEPS)]
    if len(records) != STEPS or not np.isfinite([r.loss for r in records]).all():
        return "failed", f"losses {[r.loss for r in records]}"
    if not any(r.skipped for r in records) and not np.allclose([r.lr for r in records], rates, rtol=1e-9):
        return "differs", f"rates {rates} {[r.lr for r in records]}"
    return "read", ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--no-steps", action="store_true", help="compare only")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder)
        for number, line in enumerate(options.file.read_text().splitlines(), 1):
            row = json.loads(line)
            verdict, words = judge(row["keys"], row["world"], folder / f"run{number}", steps=not options.no_steps)
            counts[verdict] += 1
            if words:
                print(f"{number:4} {row['name']:40} {verdict:8} {words}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))


if __name__ == "__main__":
    main()
