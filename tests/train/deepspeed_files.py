"""A training's state in the files that DeepSpeed writes for GPT-NeoX, engine by engine.

By the rules of its save_checkpoint (names and contents of files), of its optimizers' state_dict and partitions, and of
PipelineModule and SequentialWrapper (names and order of parameters). Its classes are pickled under their own names.
"""

import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import yaml
from torch import Tensor

from powertrain.train.checkpoint.neox_config import to_neox_config

COLUMNS = ("word_embeddings", "final_linear", "attention.query_key_value", "mlp.linear1")
ROWS = ("attention.dense", "mlp.linear2")
NORMS = ("input_layernorm", "post_attention_layernorm", "norm")
# their module of a layer, in the order in which it is made -> ours
LAYER = {
    "input_layernorm": "attention_norm", "attention.query_key_value": "attention.qkv",
    "attention.dense": "attention.out", "post_attention_layernorm": "mlp_norm",
    "mlp.linear1": "mlp.up", "mlp.linear2": "mlp.down",
}  # fmt: skip
# tensors of a layer with experts: of all of a rank's experts, one behind the other
EXPERTS = {
    "mlp.router.layer.weight": "mlp.router.weight", "mlp.experts.mlp.w1": "mlp.experts.up",
    "mlp.experts.mlp.w2": "mlp.experts.down",
}  # fmt: skip
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Engine:
    """kind: fp32, fused and unfused (no ZeRO); zero, elastic and stage1 (ZeRO 1 and 2, and older ones); bf16."""

    kind: str
    precision: str
    dp: int = 1
    tp: int = 1
    pipe: int = 0
    param_shapes: bool = True

    @property
    def is_zero(self) -> bool:
        return self.kind in ("zero", "elastic", "stage1", "bf16")


@dataclass(frozen=True)
class Parameter:
    full_name: str
    layer: int
    name: str
    values: Mapping[str, Tensor]  # master, exp_avg, exp_avg_sq of one tensor-parallel rank

    @property
    def decays(self) -> bool:
        module, _, kind = self.name.rpartition(".")
        return kind in ("weight", "w1", "w2") and module not in NORMS


_CLASSES = {
    path: type(path.rpartition(".")[2], (base,), {"__module__": f"deepspeed.{path}".rpartition(".")[0]})
    for path, base in {
        "runtime.fp16.loss_scaler.DynamicLossScaler": object, "utils.tensor_fragment.fragment_address": object,
        "runtime.zero.config.ZeroStageEnum": int,
    }.items()
}  # fmt: skip


def _instance(path: str, *args: Any, **attributes: Any) -> Any:
    found = _CLASSES[path](*args)
    found.__dict__.update(attributes)
    return found


def save(content: Any, file: Path) -> None:
    """torch.save, with DeepSpeed's modules importable meanwhile."""
    modules: dict[str, ModuleType] = {}
    for path, made in _CLASSES.items():
        parents = f"deepspeed.{path}".split(".")[:-1]
        for end in range(1, len(parents) + 1):
            modules.setdefault(".".join(parents[:end]), ModuleType(parents[end - 1]))
        setattr(modules[".".join(parents)], made.__name__, made)
    with patch.dict(sys.modules, modules):
        torch.save(content, file)


def write(
    folder: Path,
    config: Any,
    tensors: Mapping[str, Tensor],
    engine: Engine,
    *,
    step: int,
    adam_step: int,
    scaler: Mapping[str, Any] | None = None,
    **client_state: Any,
) -> Path:
    """FOLDER/global_stepN of a run whose tensors (our names: model.X, exp_avg.X ...) these are."""
    path = folder / f"global_step{step}"
    (path / "configs").mkdir(parents=True)
    keys = to_neox_config(config, engine.pipe, engine.tp)
    (path / "configs" / "config.yml").write_text(yaml.safe_dump(keys))
    (folder / "latest").write_text(path.name)
    for rank in range(engine.tp):
        layers = _layers(config, tensors, rank, engine)
        if engine.pipe:
            for index, parameters in layers.items():
                weights = {p.name: p.values["master"].to(DTYPES[engine.precision]) for p in parameters}
                torch.save(weights, path / f"layer_{index:02d}-model_{rank:02d}-model_states.pt")
        for stage, parameters in enumerate(_stages(config, layers, engine)):
            groups = [[p for p in parameters if p.decays], [p for p in parameters if not p.decays]]
            mp = stage * engine.tp + rank
            module = {p.full_name: p.values["master"].to(DTYPES[engine.precision]) for p in parameters}
            shapes = [OrderedDict((p.full_name, p.values["master"].shape) for p in group) for group in groups]
            state = {
                "module": None if engine.pipe else module,
                "optimizer": None if engine.is_zero else _optimizer(engine, groups, adam_step, scaler or {}),
                "param_shapes": shapes if engine.is_zero and engine.param_shapes else None,
                "skipped_steps": 0, "global_steps": step, "dp_world_size": engine.dp, "ds_version": "0.14.0",
                "mp_world_size": engine.tp * max(engine.pipe, 1), "ds_config": {"train_batch_size": 4},
                "iteration": step, "random_rng_state": (3, (1, 2, 3), None), "torch_rng_state": torch.get_rng_state(),
                **client_state,
            }  # fmt: skip
            save(state, path / f"mp_rank_{mp:02d}_model_states.pt")
            for dp in range(engine.dp if engine.is_zero else 0):
                zero = {"optimizer_state_dict": _zero(engine, groups, dp, adam_step, scaler), "ds_version": "0.14.0"}
                start = "bf16_" if engine.precision == "bf16" else ""
                save(zero, path / f"{start}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt")
    return path


def _layers(config: Any, tensors: Mapping[str, Tensor], rank: int, engine: Engine) -> dict[int, list[Parameter]]:
    """Layer -> its parameters in a module's order, one rank's part of each."""
    n = config.num_layers
    modules = {0: {"word_embeddings": "embed"}, n + 3: {"norm": "norm"}}
    modules |= {i + 2: {theirs: f"layers.{i}.{ours}" for theirs, ours in LAYER.items()} for i in range(n)}
    if not config.tie_embeddings:
        modules[n + 4] = {"final_linear": "head"}
    layers: dict[int, list[Parameter]] = {}
    for index, of_layer in sorted(modules.items()):
        names = {f"{t}.{kind}": f"{o}.{kind}" for t, o in of_layer.items() for kind in ("weight", "bias")}
        names |= {theirs: f"layers.{index - 2}.{ours}" for theirs, ours in EXPERTS.items()}
        layers[index] = []
        for name, ours in names.items():
            if f"model.{ours}" not in tensors:
                continue
            values = {
                state: _part(name, tensors[f"{kind}.{ours}"], rank, engine.tp, config, state)
                for state, kind in (("master", "model"), ("exp_avg",) * 2, ("exp_avg_sq",) * 2)
                if f"{kind}.{ours}" in tensors
            }
            full = f"{index}.{name}" if engine.pipe else f"sequential.{index}.{name}"
            if engine.pipe and index == 0 and config.tie_embeddings:
                full = f"tied_modules.embed.{name}"
            layers[index].append(Parameter(full, index, name, values))
    return layers


def _part(name: str, tensor: Tensor, rank: int, tp: int, config: Any, state: str) -> Tensor:
    tensor = tensor.detach().clone()
    theirs, _, kind = name.rpartition(".")
    if kind in ("w1", "w2"):
        return (tensor if kind == "w1" else tensor.mT).flatten(0, 1).chunk(tp)[rank].clone()
    if theirs in COLUMNS:
        return tensor.chunk(tp)[rank].clone()
    if theirs in ROWS and kind == "weight":
        return tensor.chunk(tp, 1)[rank].clone()
    # every rank adds its bias before the ranks' results are summed; each has the gradient of the sum
    return tensor / tp if theirs in ROWS and config.parallel_residual and state == "master" else tensor


def _stages(config: Any, layers: dict[int, list[Parameter]], engine: Engine) -> list[list[Parameter]]:
    indices = sorted(layers)
    if engine.pipe < 2:
        return [[p for i in indices for p in layers[i]]]
    first, last = [i for i in indices if i < 3], [i for i in indices if i >= 3]
    if config.tie_embeddings:
        last = [0, *last]  # tied modules come first
    return [[p for i in stage for p in layers[i]] for stage in (first, last)]


def _adam(states: Sequence[Mapping[str, Any]], groups: Sequence[int]) -> dict[str, Any]:
    """state_dict of a torch optimizer: `groups` parameters in each of its groups."""
    ids = iter(range(len(states)))
    defaults = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    param_groups = [{**defaults, "params": [next(ids) for _ in range(count)]} for count in groups]
    return {"state": dict(enumerate(states)), "param_groups": param_groups}


def _optimizer(
    engine: Engine, groups: list[list[Parameter]], adam_step: int, scaler: Mapping[str, Any]
) -> dict[str, Any]:
    """Without ZeRO: fp32's is torch's own, fp16's keeps masters beside it."""
    kinds = [kind for kind in groups[0][0].values if kind != "master"]
    if engine.kind == "fused":
        flat = [{kind: _flat(group, kind) for kind in ("master", *kinds)} for group in groups]
        inner = _adam([{"step": adam_step, **{kind: f[kind] for kind in kinds}} for f in flat], [1] * len(groups))
        masters = [f["master"].requires_grad_() for f in flat]
        return {"optimizer_state_dict": inner, "fp32_groups_flat": masters, "clip_grad": 0.0, **scaler}
    states = [{"step": torch.tensor(float(adam_step)), **{k: p.values[k] for k in kinds}} for g in groups for p in g]
    inner = _adam(states, [len(group) for group in groups])
    if engine.kind == "fp32":
        return inner
    masters_of = [[p.values["master"].requires_grad_() for p in group] for group in groups]
    return {"optimizer_state_dict": inner, "fp32_groups": masters_of, **scaler}


def _flat(group: list[Parameter], kind: str) -> Tensor:
    return torch.cat([p.values[kind].flatten() for p in group])


def _zero(
    engine: Engine, groups: list[list[Parameter]], dp: int, adam_step: int, scaler: Mapping[str, Any] | None
) -> dict[str, Any]:
    """One data-parallel rank's optimizer_state_dict."""
    intervals = 2 if engine.kind == "stage1" else 1
    kinds = list(groups[0][0].values)
    held: list[list[dict[str, Tensor]]] = []  # group -> partition of this rank -> kind -> values
    lean: list[list[dict[str, Tensor]]] = []
    for group in groups:
        parts, cut = [], []
        for interval in range(intervals):
            whole, short = {}, {}
            for kind in kinds:
                flat = _flat(group, kind)
                alignment = 2 * engine.dp * intervals
                padded = torch.cat([flat, flat.new_zeros(-len(flat) % alignment)])
                size, number = len(padded) // (engine.dp * intervals), interval * engine.dp + dp
                whole[kind] = padded[number * size : (number + 1) * size].clone()
                short[kind] = flat[number * size : (number + 1) * size].clone()
            parts.append(whole)
            cut.append(short)
        held.append(parts)
        lean.append(cut)
    states = [{"step": adam_step} | {k: t for k, t in p.items() if k != "master"} for g in held for p in g]
    base: Any = _adam(states, [intervals] * len(groups))
    masters = [[p["master"].requires_grad_() for p in g] for g in held]
    if engine.kind == "bf16":
        mapping = OrderedDict(a=_instance("utils.tensor_fragment.fragment_address", numel=1, start=0))
        return {"base_optimizer_state": base, "single_partition_of_fp32_groups": [m[0] for m in masters],
                "group_paddings": [0, 0], "partition_count": [engine.dp] * 2, "param_slice_mappings": [mapping],
                "clip_grad": 0.0, "ds_version": "0.14.0"}  # fmt: skip
    state: dict[str, Any] = {"loss_scaler": None, "dynamic_loss_scale": scaler is not None, "overflow": False}
    if scaler is not None:
        state["loss_scaler"] = _instance("runtime.fp16.loss_scaler.DynamicLossScaler", **scaler)
    if engine.kind == "stage1":
        return {**state, "base_optimizer_state": base, "local_sub_partitions_of_fp32_groups": masters}
    if engine.kind == "elastic":
        # Apex counts steps in the group
        base = [{k: t for k, t in p.items() if k != "master"} for g in lean for p in g]
        state["base_optimizer_state_step"] = adam_step
    stage = _instance("runtime.zero.config.ZeroStageEnum", 2)
    return {**state, "base_optimizer_state": base, "zero_stage": stage,
            "single_partition_of_fp32_groups": [p["master"].requires_grad_() for g in lean for p in g]}  # fmt: skip
