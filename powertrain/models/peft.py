"""PEFT's adapter folders: adapter_config.json and adapter_model.safetensors, of LoRA, rsLoRA and DoRA, both ways.

A layer of ours can be several of theirs (queries, keys and values are one product here). When written, each has the
shared A and its own rows of B. When read, adapters with the same A become one again; others are stacked (A over A, B in
blocks of columns), which computes the same with the sum of their ranks.

Source: the file format of huggingface/peft, src/peft/utils/save_and_load.py and tuners/lora, as facts.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from powertrain.models.config import ModelConfig
from powertrain.models.huggingface import SCORE, hf_equivalent, save, shapes
from powertrain.models.registry import architecture
from powertrain.models.reward import VALUE
from powertrain.nn.lora import LoRALinear, check_forwards, exchange, lora_layers, merged
from powertrain.runtime.reading import read_json, reading

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
# PEFT wraps the model twice, and its names begin so
_PREFIX = "base_model.model."
# layers of a classifier that are trained whole; a reward model of ours has the second
_CLASSIFIERS = ("classifier", "score")
# starts that take the adapter's first product from the base model, which PEFT does again when it reads the adapter
_CHANGE_BASE = ("pissa", "olora", "corda", "loftq")


class Adapter(NamedTuple):
    """The adapter of one layer [N, K], which adds scale B A; magnitude [N] of DoRA, or None.

    A magnitude is NaN for rows of a part that has no adapter: `completed` gives them those of the layer's weight.
    """

    A: Tensor  # [r, K]
    B: Tensor  # [N, r]
    scale: float
    magnitude: Tensor | None = None


def adapters_of(model: nn.Module) -> dict[str, Adapter]:
    """The adapters of a model by the names of their layers; live tensors."""
    return {
        name: Adapter(
            layer.lora_A.detach(),
            layer.lora_B.detach(),
            layer.scale,
            None if layer.lora_magnitude is None else layer.lora_magnitude.detach(),
        )
        for name, layer in lora_layers(model).items()
    }


def save_adapter(
    model: nn.Module, folder: Path | str, *, base: str | None = None, dropout: float = 0.0, rslora: bool = False
) -> None:
    """Write the adapters of `lora(model)` as PEFT's folder.

    base    name or path of the model below them, for adapter_config.json
    rslora  state the scale as alpha / sqrt(rank)
    A model of ours is written under Hugging Face's names, with its value head if it has one; others under their own.
    """
    config = getattr(model, "config", None)
    ours = config if isinstance(config, ModelConfig) else None
    value = model.get_parameter(VALUE).detach() if ours and hasattr(model, "value") else None
    write_adapter(Path(folder), ours, adapters_of(model), base=base, dropout=dropout, rslora=rslora, value=value)


def load_adapter(model: nn.Module, folder: Path | str) -> nn.Module:
    """Add the adapters of a PEFT folder to the layers of `model`, in place, as `lora` does; returns the model.

    Raises FileNotFoundError, or ValueError naming the file and what does not fit.
    """
    config = getattr(model, "config", None)
    value = read_value(Path(folder), config if isinstance(config, ModelConfig) else None)
    if value is not None and not hasattr(model, "value"):
        raise ValueError(
            f"{folder}: model must have a value head (powertrain.models.reward.add_value_head) for {SCORE}, got none"
        )
    adapters = read_adapter(Path(folder), config if isinstance(config, ModelConfig) else None)
    values = read_json(Path(folder) / CONFIG)
    modules = dict(model.named_modules())
    for name, adapter in adapters.items():
        # the adapter's own tensors say the layer's shape
        linear, shape = modules.get(name), [adapter.B.shape[0], adapter.A.shape[1]]
        if type(linear) is not nn.Linear or list(linear.weight.shape) != shape:
            got = f"a {type(linear).__name__}"
            if isinstance(config, ModelConfig):
                got += " (powertrain convert merges its adapter)"
            if linear is None or type(linear) is nn.Linear:
                got = "no such layer" if linear is None else str(list(linear.weight.shape))
            raise ValueError(f"{folder}: {name} must be an nn.Linear {shape} in the model, got {got}")
    check_forwards("load_adapter", "model", {name: modules[name] for name in adapters})
    model.requires_grad_(False)
    layers: dict[nn.Module, nn.Module] = {}
    for name, adapter in adapters.items():
        layers[modules[name]] = layer = LoRALinear(
            modules[name], len(adapter.A), adapter.scale, dropout=float(values.get("lora_dropout") or 0.0),
            dora=adapter.magnitude is not None,
        )  # fmt: skip
        fill_layer(layer, adapter)
    exchange(model, layers)
    if value is not None:
        with torch.no_grad():
            model.get_parameter(VALUE).copy_(value)
    return model


@torch.no_grad()
def fill_layer(layer: LoRALinear, adapter: Adapter) -> None:
    adapter = completed(adapter, layer.weight)
    layer.lora_A.copy_(adapter.A)
    layer.lora_B.copy_(adapter.B)
    if layer.lora_magnitude is not None and adapter.magnitude is not None:
        layer.lora_magnitude.copy_(adapter.magnitude)


def completed(adapter: Adapter, weight: Tensor) -> Adapter:
    """The adapter of a layer with this weight; magnitudes that are NaN become the norms of the rows."""
    if adapter.magnitude is None or not adapter.magnitude.isnan().any():
        return adapter
    A, B, magnitude = (t.to(weight.device) for t in (adapter.A, adapter.B, adapter.magnitude))
    norms = merged(weight, A, B, adapter.scale, None).float().norm(dim=1)
    return Adapter(A, B, adapter.scale, torch.where(magnitude.isnan(), norms, magnitude))


def write_adapter(
    folder: Path, config: ModelConfig | None, adapters: Mapping[str, Adapter], *, base: str | None = None,
    dropout: float = 0.0, rslora: bool = False, value: Tensor | None = None,
) -> None:  # fmt: skip
    """`save_adapter` of adapters by name; config: of a model of ours, whose names become Hugging Face's.

    value   head of a reward model, which PEFT keeps whole beside the adapters
    """
    if not adapters:
        raise ValueError(f"{folder}: the model must have adapters to be written, got none")
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for name, adapter in adapters.items():
        rows = _parts(config, name, adapter.B)
        magnitudes = {} if adapter.magnitude is None else _parts(config, name, adapter.magnitude)
        for theirs, B in rows.items():
            # a part that had no adapter, as PEFT's usual targets leave out the keys
            if magnitudes and magnitudes[theirs].isnan().all():
                continue
            rank = ranks[theirs] = len(adapter.A)
            # PEFT stores alpha and derives the scale from it
            alphas[theirs] = adapter.scale * (math.sqrt(rank) if rslora else rank)
            # safetensors refuses tensors that share memory
            tensors[f"{_PREFIX}{theirs}.lora_A.weight"] = adapter.A.cpu().contiguous().clone()
            tensors[f"{_PREFIX}{theirs}.lora_B.weight"] = B.cpu().contiguous().clone()
            if magnitudes:
                magnitude = magnitudes[theirs].cpu().contiguous().clone()
                tensors[f"{_PREFIX}{theirs}.lora_magnitude_vector"] = magnitude
    if value is not None:
        tensors[_PREFIX + SCORE] = value.cpu().contiguous().clone()
    # the first layer's rank and alpha are the defaults, other layers go into the patterns
    first = next(iter(ranks))
    values = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM" if value is None else "SEQ_CLS",
        "base_model_name_or_path": base, "bias": "none",
        "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True, "lora_dropout": dropout,
        "r": ranks[first], "lora_alpha": alphas[first], "use_rslora": rslora,
        "use_dora": any(a.magnitude is not None for a in adapters.values()),
        "modules_to_save": None if value is None else list(_CLASSIFIERS),
        "target_modules": sorted(ranks),
        "rank_pattern": {name: rank for name, rank in ranks.items() if rank != ranks[first]},
        "alpha_pattern": {name: alpha for name, alpha in alphas.items() if alpha != alphas[first]},
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    save(tensors, folder / TENSORS)
    (folder / CONFIG).write_text(json.dumps(values, indent=2))


def read_adapter(folder: Path, config: ModelConfig | None) -> dict[str, Adapter]:
    """Adapters of PEFT's folder by names of layers: ours for a config, else theirs.

    Raises FileNotFoundError, or ValueError naming the file, the key and its expected value.
    """
    values = _read_config(folder)
    file = folder / TENSORS
    if not file.is_file():
        raise FileNotFoundError(f"{folder} must hold {TENSORS}, got none")
    with reading(file, "be a safetensors file"), safe_open(file, framework="pt") as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}
    # `read_value` reads it, of a model of ours
    if config is not None:
        tensors.pop(_PREFIX + SCORE, None)
    adapters = _by_layer(file, tensors, values)
    return adapters if config is None else _as_ours(file, config, adapters)


def read_value(folder: Path, config: ModelConfig | None) -> Tensor | None:
    """The value head [1, hidden_size] of a reward model that was trained beside the adapters, or None."""
    file = folder / TENSORS
    if config is None or not file.is_file():
        return None
    with reading(file, "be a safetensors file"), safe_open(file, framework="pt") as handle:
        if _PREFIX + SCORE not in handle.keys():
            return None
        value: Tensor = handle.get_tensor(_PREFIX + SCORE)
    if value.shape != (1, config.hidden_size):
        raise ValueError(
            f"{file}: {SCORE} must be [1, {config.hidden_size}], that of a reward model, got {list(value.shape)}"
        )
    return value


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG
    values = read_json(file)
    if not isinstance(values, dict):
        raise ValueError(f"{file} must hold an object, got {type(values).__name__}")
    # features that would change results if they were ignored
    must: dict[str, tuple[Any, ...]] = {
        "peft_type": ("LORA",), "bias": ("none",), "fan_in_fan_out": (False,), "lora_bias": (False,),
        "use_qalora": (False,), "layer_replication": ([],), "trainable_token_indices": ([],),
        "target_parameters": ([],),
    }  # fmt: skip
    for key, allowed in must.items():
        if values.get(key) not in (None, *allowed):
            raise ValueError(f"{file}: {key} must be {allowed[0]!r} or absent, got {values[key]!r}")
    # where, or in which blocks, an adapter computes
    for key in ("alora_invocation_tokens", "arrow_config", "use_bdlora"):
        if values.get(key) is not None:
            raise ValueError(f"{file}: {key} must be null or absent, got {values[key]!r}")
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGE_BASE):
        raise ValueError(
            f"{file}: init_lora_weights must be a start that leaves the base model as it is, got {start!r}; "
            "PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...) writes such an adapter"
        )
    whole = values.get("modules_to_save") or []
    if not set(whole) <= set(_CLASSIFIERS):
        raise ValueError(f"{file}: modules_to_save must be [] or absent, or of {list(_CLASSIFIERS)}, got {whole!r}")
    for key in ("r", "lora_alpha"):
        if isinstance(values.get(key), bool) or not isinstance(values.get(key), (int, float)) or values[key] <= 0:
            raise ValueError(f"{file}: {key} must be a number above 0, got {values.get(key)!r}")
    for key in ("rank_pattern", "alpha_pattern"):
        _check_patterns(f"{file}: {key}", values.get(key) or {})
    return values


def _check_patterns(name: str, patterns: Any) -> None:
    if not isinstance(patterns, dict):
        raise ValueError(f"{name} must be an object, got {patterns!r}")
    for pattern, value in patterns.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ValueError(f"{name} must hold numbers above 0, got {value!r} for {pattern!r}")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{name} must hold regular expressions, got {pattern!r}: {error}") from None


def _pattern(patterns: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    """Matches PEFT's rank_pattern and alpha_pattern: regular expressions of a name, or of its end after a dot."""
    for key, value in (patterns or {}).items():
        # so PEFT matches: a name is an expression for itself, and ^ is the name's beginning
        if re.match(rf"(.*\.)?({key})$", name):
            return value
    return default


def _by_layer(file: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> dict[str, Adapter]:
    layers: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
        if kind == "base_layer":
            raise ValueError(
                f"{file} must hold adapters alone, got {key}, a weight of the model itself; PEFT's "
                "save_pretrained(..., save_embedding_layers=False) leaves it out"
            )
        if kind not in ("lora_A", "lora_B", "lora_magnitude_vector"):
            raise ValueError(f"{file} must hold lora_A, lora_B and lora_magnitude_vector of layers, got {key}")
        layers.setdefault(name, {})[kind] = tensor
    adapters = {}
    for name, parts in layers.items():
        if "lora_A" not in parts or "lora_B" not in parts:
            raise ValueError(f"{file}: {name} must have lora_A and lora_B, got {', '.join(parts)}")
        A, B = parts["lora_A"], parts["lora_B"]
        if A.dim() != 2 or B.dim() != 2 or len(A) != B.shape[1]:
            raise ValueError(f"{file}: {name} must have lora_A [r, K] and lora_B [N, r], got {A.shape} and {B.shape}")
        rank, alpha = len(A), _pattern(values.get("alpha_pattern"), name, values["lora_alpha"])
        expected = _pattern(values.get("rank_pattern"), name, values["r"])
        # a pattern that disagrees with the tensors means that the config is of another adapter
        if rank != expected:
            raise ValueError(f"{file}: {name} must have rank {expected} as {CONFIG} says, got {rank}")
        scale = alpha / (math.sqrt(rank) if values.get("use_rslora") else rank)
        adapters[name] = Adapter(A, B, scale, parts.get("lora_magnitude_vector"))
    return adapters


def _as_ours(file: Path, config: ModelConfig, theirs: dict[str, Adapter]) -> dict[str, Adapter]:
    # names are asked of our model: a packed layer knows its parts
    left, ours = dict(theirs), {}
    for name, shape in shapes(config).items():
        layer, _, kind = name.rpartition(".")
        if kind != "weight" or shape.dim() != 2:
            continue
        rows = {part: len(t) for part, t in _parts(config, layer, shape).items()}
        present = {part: left.pop(part) for part in rows if part in left}
        if present:
            ours[layer] = _joined(file, config, layer, rows, present)
    if left:
        raise ValueError(f"{file} must hold adapters of layers that {config.architecture} has, got {sorted(left)[:3]}")
    return ours


def _joined(
    file: Path, config: ModelConfig, layer: str, rows: Mapping[str, int], parts: Mapping[str, Adapter]
) -> Adapter:
    """One adapter of ours from those of its parts."""
    found, with_magnitude = list(parts.values()), [p for p in parts.values() if p.magnitude is not None]
    if with_magnitude and len(with_magnitude) < len(found):
        raise ValueError(f"{file}: all of {', '.join(parts)} must have a magnitude, or none, got {len(with_magnitude)}")
    first = found[0]
    # parts with one A keep its rank; others get columns of their own, so the ranks add up
    # equal A and scale: the parts were written by us, or trained as one layer
    shared = len(found) == len(rows) and all(torch.equal(p.A, first.A) and p.scale == first.scale for p in found)
    rank = len(first.A) if shared else sum(len(p.A) for p in found)
    blocks, column = [], 0
    for part, count in rows.items():
        B = first.B.new_zeros(count, rank)
        if part in parts:
            adapter = parts[part]
            start = 0 if shared else column
            # one scale for the joined layer: each part's own is folded into its B
            B[:, start : start + len(adapter.A)] = adapter.B * (adapter.scale / first.scale)
            column += len(adapter.A)
        blocks.append(B)
    module = architecture(hf_equivalent(config).architecture)
    A = first.A if shared else torch.cat([p.A for p in found])
    magnitude = None
    if with_magnitude:
        given = with_magnitude[0].magnitude
        assert given is not None
        absent = {part: given.new_full((count,), math.nan) for part, count in rows.items() if part not in parts}
        magnitudes = [absent[part] if part in absent else parts[part].magnitude for part in rows]
        magnitude = module.from_hf_parts(config, f"{layer}.weight", magnitudes)
    return Adapter(A, module.from_hf_parts(config, f"{layer}.weight", blocks), first.scale, magnitude)


def _parts(config: ModelConfig | None, layer: str, rows: Tensor) -> dict[str, Tensor]:
    """Rows of a tensor of one of our layers, by the names of Hugging Face's layers that they belong to."""
    if config is None:
        return {layer: rows}
    module = architecture(hf_equivalent(config).architecture)
    parts = module.hf_parts(config, f"{layer}.weight", rows)
    return {name.removesuffix(".weight"): part for name, part in parts}
