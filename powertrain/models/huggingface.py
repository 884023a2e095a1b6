"""Hugging Face folders: config.json and safetensors, read and written one tensor at a time.

An architecture's file has the facts: `from_hf_config` and `to_hf_config`, `hf_parts` (one of our tensors under their
names and in their layout), `from_hf_parts` (its inverse) and HF_LEFT_OUT (their tensors that hold no weights). Here is
their common part.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from powertrain.models.config import ModelConfig
from powertrain.models.fp8_stored import FP8Tensors, stored_as
from powertrain.models.pickles import load_pickle
from powertrain.models.registry import ARCHITECTURES, architecture
from powertrain.models.reward import VALUE
from powertrain.runtime.reading import one_line, read_json, reading

Named = Iterable[tuple[str, Tensor]]

# loaders map the shards of a checkpoint one by one
_SHARD_BYTES = 4 << 30
_LANGUAGE, _REWARD = "ForCausalLM", "ForSequenceClassification"
SCORE = "score.weight"
_HEADS = ("lm_head.weight", "embed_out.weight")
_DTYPES = {
    torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16",
}  # fmt: skip


def read_config(folder: Path) -> ModelConfig:
    """The model of a folder's config.json. Raises ValueError naming the file and the expectation."""
    file = folder / "config.json"
    values = read_json(file)
    if not isinstance(values, dict):
        raise ValueError(f"{file} must hold an object, got {type(values).__name__}")
    with reading(file, "describe a model"):
        try:
            return from_hf_config(values)
        # pydantic's is a ValueError too, and names the fields already
        except ValidationError:
            raise
        except ValueError as error:
            raise ValueError(f"{file}: {str(error).removeprefix('config.json: ')}") from None


def from_hf_config(values: Mapping[str, Any]) -> ModelConfig:
    """Our config of a config.json's values. Raises ValueError naming the key, the expected value and the given one."""
    names = values.get("architectures") or [None]
    # asked of every architecture: classes are declared where they are implemented
    known = {hf: module for module in map(architecture, ARCHITECTURES) for hf in module.Config.hf_architectures}
    name = str(names[0]).replace(_REWARD, _LANGUAGE)
    if name not in known:
        raise ValueError(f"config.json: architectures must name one of {', '.join(known)}, got {names[0]!r}")
    if is_reward(values):
        _check_labels(values)
    # how weights are stored is no part of the model, but must be known
    stored_as(values)
    config: ModelConfig = known[name].from_hf_config(values)
    return config


def is_reward(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a class ForSequenceClassification."""
    return str((values.get("architectures") or [None])[0]).endswith(_REWARD)


def _check_labels(values: Mapping[str, Any]) -> None:
    # two is the default of transformers
    labels = values.get("id2label")
    count = values.get("num_labels", 2) if labels is None else len(labels)
    if count != 1:
        raise ValueError(f"config.json: id2label must have one label, that of a reward model, got {count}")


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """config.json of a model. Raises ValueError naming features that no class of transformers has."""
    values: dict[str, Any] = architecture(config.architecture).to_hf_config(config)
    return values


def to_hf(config: ModelConfig, tensors: Named) -> Iterator[tuple[str, Tensor]]:
    """A state dict's tensors under Hugging Face's names and in its layout: views where possible."""
    # a GPT-NeoX config may be a Llama under another name, with Llama's tensor names
    module = architecture(hf_equivalent(config).architecture)
    for name, tensor in tensors:
        yield from [(SCORE, tensor)] if name == VALUE else module.hf_parts(config, name, tensor)


def from_hf(
    config: ModelConfig, tensors: Mapping[str, Tensor], *, reward: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """The state dict of `build(config)` from a checkpoint's tensors, each read when it is yielded.

    reward   of a ForSequenceClassification: with its value head, without an output layer
    Raises ValueError naming tensors that are missing, or unknown, and one whose shape differs.
    """
    module = architecture(config.architecture)
    expected = reward_shapes(config) if reward else shapes(config)
    # the names of our tensors as theirs, found by mapping meta tensors: one table serves both directions
    parts = {
        name: [SCORE] if name == VALUE else [theirs for theirs, _ in module.hf_parts(config, name, t)]
        for name, t in expected.items()
    }
    has_head = not reward and not config.tie_embeddings
    _check_names(config, module, {name for names in parts.values() for name in names}, set(tensors), has_head)
    if config.tie_embeddings and not reward:
        _check_tied(tensors, parts["embed.weight"][0])
    for name, names in parts.items():
        with reading("checkpoint", f"make {name} of {' with '.join(names[:3])}"):
            read = [tensors[part] for part in names]
            tensor = read[0] if name == VALUE else module.from_hf_parts(config, name, read)
        # integer tensors would be cast silently by copy_
        if not tensor.is_floating_point():
            raise ValueError(f"checkpoint: {' with '.join(names[:3])} must hold floats, got {tensor.dtype}")
        if tensor.shape != expected[name].shape:
            got, must = list(tensor.shape), list(expected[name].shape)
            raise ValueError(f"checkpoint: {' with '.join(names[:3])} must make {name} {must}, got {got}")
        yield name, tensor


def _check_names(config: ModelConfig, module: Any, wanted: set[str], present: set[str], has_head: bool) -> None:
    left_out = re.compile(module.HF_LEFT_OUT.format(num_layers=config.num_layers))
    # some files hold the head though it is tied to the embedding, or not used
    heads = () if has_head else _HEADS
    unknown = sorted(name for name in present - wanted if name not in heads and not left_out.search(name))
    missing = sorted(wanted - present)
    if missing or unknown:
        raise ValueError(
            f"checkpoint must have the tensors of its config; missing {missing[:5]}, unknown {unknown[:5]}"
        )


def _check_tied(tensors: Mapping[str, Tensor], embedding: str) -> None:
    """Refuse a tied head whose values differ: transformers 5 reads such a head, earlier versions ignore it."""
    for name in _HEADS:
        if name not in tensors:
            continue
        head, embed = tensors[name], tensors[embedding]
        if head.shape != embed.shape or not torch.equal(head, embed.to(head.dtype)):
            raise ValueError(
                f"checkpoint: {name} must be {embedding} where config.json has tie_word_embeddings true, got other "
                "values; with false there they are read"
            )


def shapes(config: ModelConfig) -> dict[str, Tensor]:
    """The state dict of `build(config)`, on the meta device."""
    with torch.device("meta"):
        # on meta: only shapes and names are needed
        state: dict[str, Tensor] = architecture(config.architecture).Model(config).state_dict()
    return state


def reward_shapes(config: ModelConfig) -> dict[str, Tensor]:
    """The same of a reward model: its value head first, and no output layer."""
    value = torch.empty(1, config.hidden_size, device="meta")
    return {VALUE: value, **{name: t for name, t in shapes(config).items() if not is_head(name)}}


def is_head(name: str) -> bool:
    """Whether a tensor of this name of ours is the output layer's."""
    return name.startswith("head.")


def hf_equivalent(config: ModelConfig) -> ModelConfig:
    """The config whose architecture has the Hugging Face class: a Llama written as a GPT-NeoX config is a Llama."""
    module = architecture(config.architecture)
    equivalent: ModelConfig = module.hf_equivalent(config) if hasattr(module, "hf_equivalent") else config
    return equivalent


def open_tensors(folder: Path) -> Mapping[str, Tensor]:
    """`open_files`; of weights that config.json says are stored in FP8 the values, in float32, without the scales."""
    tensors, config = open_files(folder), folder / "config.json"
    stored = stored_as(read_json(config)) if config.is_file() else None
    return tensors if stored is None else FP8Tensors(tensors, stored)


def open_files(folder: Path) -> Mapping[str, Tensor]:
    """A folder's tensors by name, read when they are asked for.

    safetensors; where there are none, pytorch_model.bin files that hold nothing but tensors.
    Raises FileNotFoundError, or ValueError naming the file.
    """
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{name}.index.json"
        files = [folder / name] if (folder / name).is_file() else _indexed(index) if index.is_file() else []
        if files:
            return _Safetensors(files) if name.endswith("safetensors") else _pickled(files)
    raise FileNotFoundError(f"{folder} must hold model.safetensors, or an index of its parts, got neither")


def _indexed(index: Path) -> list[Path]:
    values = read_json(index)
    with reading(index, "be an index with a weight_map"):
        names = sorted(set(values["weight_map"].values()))
    for name in names:
        # an index comes with the checkpoint and could name any path; only files of its folder are opened
        if not isinstance(name, str) or Path(name).name != name or not (index.parent / name).is_file():
            raise ValueError(f"{index}: weight_map must name files beside it, got {name!r}")
    return [index.parent / name for name in names]


class _Safetensors(Mapping[str, Tensor]):
    """Tensors of several files; each is read when it is asked for, and not kept."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files: dict[str, Any] = {}
        for file in files:
            with reading(file, "be a safetensors file"):
                # files are opened once and mapped; tensors are read on request
                handle = safe_open(file, framework="pt")
                self._files |= dict.fromkeys(handle.keys(), (file, handle))

    def __getitem__(self, name: str) -> Tensor:
        file, handle = self._files[name]
        with reading(file, f"hold {name}"):
            tensor: Tensor = handle.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _pickled(files: Iterable[Path]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in files:
        content = load_pickle(file)
        if not isinstance(content, dict) or not all(isinstance(t, Tensor) for t in content.values()):
            raise ValueError(f"{file} must be a dictionary of tensors, got something else")
        tensors |= content
    return tensors


def write(
    folder: Path,
    config: ModelConfig,
    tensors: Named,
    *,
    eod: int | None = None,
    special: Mapping[str, int | None] | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = _SHARD_BYTES,
    reward: bool = False,
    theirs: Mapping[str, Any] | None = None,
) -> None:
    """config.json, safetensors and, if there are several, their index, into `folder`.

    tensors   our state dict; one shard of it is in memory at a time
    dtype     of the written tensors, but for buffers such as a router's biases; None: as they are
    eod       the id that ends a document, or None
    special   ids of bos_token, eos_token and pad_token that a tokenizer declares
    reward    `tensors` hold a value head: the folder is a ForSequenceClassification's, without an output layer
    theirs    the config.json that `config` was read from: keys that the model determines are replaced, others kept
    """
    values = to_hf_config(config) if theirs is None else _kept_config(config, theirs)
    if reward:
        if not is_reward(values):
            values |= _reward_config(values["architectures"])
        tensors = ((name, tensor) for name, tensor in tensors if not is_head(name))
    plan = _plan(config, shard_bytes, dtype, reward)
    # how many tensors each shard still waits for: it is written and freed with its last one
    lacking = Counter(plan.values())
    open_shards: dict[int, dict[str, Tensor]] = {number: {} for number in lacking}
    names, size = {}, 0
    for name, tensor in to_hf(config, _cast(tensors, dtype)):
        number = plan[name]
        names[name] = _shard_name(number, len(lacking))
        size += tensor.numel() * tensor.element_size()
        # safetensors refuses strided views
        open_shards[number][name] = tensor.contiguous()
        lacking[number] -= 1
        if not lacking[number]:
            save(open_shards.pop(number), folder / names[name])
    # every planned tensor came, and no other
    assert not open_shards and names.keys() == plan.keys()
    if len(lacking) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": names}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    spelled = [key for key in ("torch_dtype", "dtype") if key in values] or ["torch_dtype"]
    values |= dict.fromkeys(spelled, _DTYPES[dtype or tensor.dtype])
    ids = _token_ids(eod, special or {})
    # null in a config of ours: an id that is left out is the default of transformers
    values |= {key: id for key, id in ids.items() if theirs is None or (id is not None and key not in theirs)}
    # a classifier reads the last token that is no padding: in front of the end token, as training does
    if reward and values.get("pad_token_id") is None:
        values["pad_token_id"] = eod
    (folder / "config.json").write_text(json.dumps(values, indent=1))


def without_token_ids(values: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without the ids that `write` then takes from the tokenizer."""
    return {key: value for key, value in values.items() if key not in _token_ids(None, {})}


def _token_ids(eod: int | None, special: Mapping[str, int | None]) -> dict[str, Any]:
    special = {name: id for name, id in special.items() if id is not None}
    # a chat may end its answers with another token than documents
    ends = list(dict.fromkeys(id for id in (special.get("eos_token"), eod) if id is not None))
    return {
        "bos_token_id": special.get("bos_token", eod),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": special.get("pad_token"),
    }


def _kept_config(config: ModelConfig, theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Their config.json for tensors that are written anew: in no FP8, without Python code and further predictions."""
    ours = to_hf_config(config)
    left_out = ("quantization_config", "auto_map")
    changed = {key: ours[key] for key in ("vocab_size", "num_nextn_predict_layers") if key in ours}
    return {key: value for key, value in theirs.items() if key not in left_out} | changed


def _reward_config(architectures: list[str]) -> dict[str, Any]:
    """Keys of config.json that make the same architecture a reward model: one label, a regression value."""
    name = architectures[0].replace(_LANGUAGE, _REWARD)
    return {"architectures": [name], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def save(tensors: dict[str, Tensor], path: Path) -> None:
    """A safetensors file. Raises OSError naming it where it cannot be written: the library's own error is none."""
    try:
        # the library's own file is its owner's alone, whatever the umask
        path.touch()
        mode = path.stat().st_mode
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(mode)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {one_line(error)}") from None


def _cast(tensors: Named, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        yield name, tensor if dtype is None or is_buffer(name) else tensor.to(dtype)


def is_buffer(name: str) -> bool:
    """A router's biases stay in float32, whatever the weights are in."""
    return name.endswith("correction_bias")


def _shard_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _plan(config: ModelConfig, shard_bytes: int, dtype: torch.dtype | None, reward: bool) -> dict[str, int]:
    """Their tensor -> the shard it goes to, in the order they come; sizes are those of float32, or of `dtype`."""
    # by the sizes of the written dtype, since shards are limited in bytes
    plan, filled, number = {}, 0, 0
    for name, tensor in to_hf(config, (reward_shapes(config) if reward else shapes(config)).items()):
        size = tensor.numel() * (dtype or torch.float32).itemsize
        if filled and filled + size > shard_bytes:
            number, filled = number + 1, 0
        plan[name] = number
        filled += size
    return plan
