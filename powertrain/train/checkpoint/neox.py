"""Checkpoints of GPT-NeoX (DeepSpeed's folders), read into our tensors and written from them, weights only.

    FOLDER/latest                                          the name of the newest
    FOLDER/global_step1000/configs/*.yml                   the config it was trained with
    FOLDER/global_step1000/mp_rank_00_model_states.pt      a file per tensor-parallel rank: pipe_parallel_size 0
    FOLDER/global_step1000/layer_02-model_00-model_states.pt   a file per layer and rank: pipe_parallel_size 1 or more

Layer 0 has the embeddings, 1 and N + 2 have nothing, N + 3 is the last norm, N + 4 the head if it is not tied.
Facts from GPT-NeoX (Apache-2.0; no code): megatron/model/transformer.py and gpt2_model.py, megatron/mpu/layers.py,
tools/ckpts. Where its versions differ (names of the MLP, of a norm's weight) each is read, and the newest is written.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

import torch
import yaml
from torch import Tensor

from powertrain.models import ModelConfig, configure
from powertrain.models.gpt_neox import Config
from powertrain.models.huggingface import Named, shapes
from powertrain.models.llama import join_qkv, split_qkv
from powertrain.models.pickles import load_pickle
from powertrain.ops.activations import Gated
from powertrain.runtime.reading import reading
from powertrain.train.checkpoint.neox_config import as_gpt_neox, to_neox_config
from powertrain.train.checkpoint.neox_names import (
    APART,
    COLUMNS,
    EXPERTS,
    KINDS,
    NAMES,
    ROWS,
    SLOPES,
    UNUSED_BIASES,
    allowed,
    from_experts,
    has_groups,
    heads_of_rank,
    own_slopes,
    place,
    to_experts,
)

_LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_STEP = re.compile(r"global_step(\d+)")


def find(path: Path) -> Path | None:
    """The checkpoint at `path`: itself, or the one that `latest` names, or the newest in it; None if there is none."""
    if not path.is_dir():
        return None
    if any(_LAYER_FILE.fullmatch(f.name) or _RANK_FILE.fullmatch(f.name) for f in path.iterdir()):
        return path
    steps = {f.name: int(match[1]) for f in path.iterdir() if f.is_dir() and (match := _STEP.fullmatch(f.name))}
    if (path / "latest").is_file():
        name = (path / "latest").read_bytes()[:1000].decode(errors="replace").strip()
        # `latest` is a file of unknown origin: it may name a folder beside it, nothing else
        if name not in ("", ".", "..") and Path(name).name == name and "\0" not in name and (path / name).is_dir():
            return find(path / name)
    return path / max(steps, key=lambda name: steps[name]) if steps else None


def trained_steps(folder: Path) -> int:
    """How many steps of a training a global_step folder comes after: by its name, or by its first rank's state."""
    match = _STEP.fullmatch(folder.name)
    state = folder / "mp_rank_00_model_states.pt"
    if (match is None or not int(match[1])) and state.is_file():
        content = load_pickle(state)
        counts = [content.get(name) for name in ("iteration", "global_steps")] if isinstance(content, dict) else []
        return max((count for count in counts if isinstance(count, int)), default=0)
    return int(match[1]) if match else 0


# of a reward model, in its last layer
VALUE = "rm_linear.weight"


class NeoXCheckpoint:
    """A global_step folder: `config`, and `tensors()` in our names and layout, merged over tensor-parallel ranks.

    tokenizer   as `load_tokenizer` takes it, or None
    configs   GPT-NeoX YAML files; none: those in the folder's `configs`
    Memory: one layer (pipe_parallel_size 1 or more), or the whole model mapped from its files.
    Raises FileNotFoundError, or ValueError naming the file, the tensor or the key.
    """

    def __init__(self, folder: Path, configs: Sequence[Path] = ()) -> None:
        self.folder = folder
        with reading(folder, "be a GPT-NeoX checkpoint"):
            self._open(configs)

    def _open(self, configs: Sequence[Path]) -> None:
        folder = self.folder
        self._files = _files(folder)
        self.num_ranks = max(rank for _, rank in self._files) + 1
        missing = [i for i, _ in self._files if any((i, rank) not in self._files for rank in range(self.num_ranks))]
        if missing:
            raise ValueError(
                f"{folder} must hold every layer of {self.num_ranks} tensor-parallel ranks, got not all of {missing[0]}"
            )
        self._whole: list[dict[int, dict[str, Tensor]]] | None = None
        self._adds_biases = True
        if all(index is None for index, _ in self._files):
            self._whole = [_by_layer(self._files[None, rank]) for rank in range(self.num_ranks)]
        self._cached_index, self._cached = -1, list[dict[str, Tensor]]()
        # GPT-NeoX pads the vocabulary for its ranks; only the tensors say by how much
        rows = sum(self._find(shard, "embed", "weight").shape[0] for shard in self._layer(0))
        self.dtype = self._find(self._layer(0)[0], "embed", "weight").dtype
        self.config, self.tokenizer = _read_config(folder, configs, rows)
        self._check_layers()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, expected in shapes(self.config).items():
            with reading(self.folder, f"hold {name}"):
                tensor = self._tensor(name)
            if tensor.shape != expected.shape:
                raise ValueError(
                    f"{self.folder}: {name} must be {list(expected.shape)} by its config, got {list(tensor.shape)} "
                    f"from {self.num_ranks} tensor-parallel ranks"
                )
            yield name, tensor

    def over(self, shards: list[dict[int, dict[str, Tensor]]], *, adds_biases: bool) -> "NeoXCheckpoint":
        """The same merging of other tensors, in the layout of the weights: {layer: {name: tensor}} of each rank.

        adds_biases   whether biases that every rank adds are summed; of an optimizer's state they are copies
        """
        other = copy.copy(self)
        other._whole, other._adds_biases = shards, adds_biases
        return other

    def shard(self, index: int, rank: int) -> dict[str, Tensor]:
        """A layer's tensors on one rank, in its module's order."""
        return self._layer(index)[rank]

    def layer_indices(self) -> list[int]:
        if self._whole is not None:
            return sorted(self._whole[0])
        return sorted({index for index, _ in self._files if index is not None})

    def _check_layers(self) -> None:
        present = set(self.layer_indices())
        n = self.config.num_layers
        if any(VALUE in shard for shard in self._layer(max(present))):
            raise ValueError(
                f"{self.folder} must hold a language model, got {VALUE} of train_impl rm in place of its output layer: "
                "GPT-NeoX's reward models are not read; objective reward trains one from a language model"
            )
        expected = {0, *range(2, n + 2), n + 3} | (set() if self.config.tie_embeddings else {n + 4})
        # layer 1 and the one before the norm are functions without parameters in their pipeline
        if present != expected:
            raise ValueError(
                f"{self.folder}: layers must be {sorted(expected)} by its config (num_layers {n}, no_weight_tying "
                f"{not self.config.tie_embeddings}), got {sorted(present)}"
            )
        for index in expected:
            known = allowed(self.config, index)
            for shard in self._layer(index):
                unknown = sorted(shard.keys() - known)
                if unknown:
                    raise ValueError(f"{self.folder}: layer {index} must have known tensors only, got {unknown[:5]}")
            slopes = [shard[SLOPES] for shard in self._layer(index) if SLOPES in shard]
            # they are a buffer, which we compute: others would be another model
            if slopes and not torch.allclose(torch.cat(slopes).float(), own_slopes(self.config), rtol=1e-2):
                raise ValueError(f"{self.folder}: {SLOPES} of layer {index} must be ALiBi's own for its heads")

    def _layer(self, index: int) -> list[dict[str, Tensor]]:
        """A layer's tensors on every rank; the last one is kept."""
        if self._whole is not None:
            return [rank.get(index, {}) for rank in self._whole]
        # tensors of a layer are asked for one behind the other, so one layer in memory is enough
        if self._cached_index != index:
            files = [self._files.get((index, rank)) for rank in range(self.num_ranks)]
            self._cached_index, self._cached = index, [load_pickle(file) if file else {} for file in files]
        return self._cached

    def _find(self, shard: dict[str, Tensor], module: str, kind: str) -> Tensor:
        names = [f"{name}.{k}" for name in NAMES[module] for k in KINDS[kind]]
        tensor = next((shard[name] for name in names if name in shard), None)
        if tensor is None:
            raise ValueError(f"{self.folder} must hold {names[0]}, got {', '.join(sorted(shard)[:6]) or 'nothing'}")
        return tensor

    def _tensor(self, name: str) -> Tensor:
        index, module, kind = place(name, self.config)
        parts = [self._part(shard, module, kind) for shard in self._layer(index)]
        if module == EXPERTS:
            return from_experts(torch.cat(parts), kind, self.config.num_experts)
        if module in COLUMNS:
            return torch.cat(parts)
        if module in ROWS and kind == "weight":
            return torch.cat(parts, 1)
        # with parallel residuals each rank adds its bias before the ranks' results are summed
        is_sum = module in ROWS and self.config.parallel_residual and self._adds_biases
        return _sum(parts) if is_sum else _same(parts)

    def _part(self, shard: dict[str, Tensor], module: str, kind: str) -> Tensor:
        """One rank's part of a tensor of ours."""
        if self.config.activation in get_args(Gated) and module in APART:
            apart = f"{APART[module]}.{kind}"
            if apart in shard:
                return shard[apart]
            # every rank's rows are its own up, then its own gate
            up, gate = self._find(shard, "mlp.up", kind).chunk(2)
            return up if module == "mlp.up" else gate
        tensor = self._find(shard, module, kind)
        if module == "attention.qkv" and has_groups(self.config):
            heads, kv_heads = heads_of_rank(self.config, self.num_ranks)
            sizes = [n * self.config.hidden_size // self.config.num_heads for n in (heads, kv_heads, kv_heads)]
            if len(tensor) != sum(sizes):
                raise ValueError(
                    f"{self.folder}: attention.query_key_value must have {sum(sizes)} rows on each rank (num_kv_heads "
                    f"{self.config.num_kv_heads}), got {len(tensor)}"
                )
            return join_qkv(tensor.split(sizes), heads, kv_heads)
        return tensor


def rank_files(folder: Path) -> dict[int, Path]:
    """The mp_rank files of a folder: of tensor-parallel ranks, a pipeline stage's after those of the one before."""
    return {int(m[1]): file for file in folder.iterdir() if (m := _RANK_FILE.fullmatch(file.name))}


def _files(folder: Path) -> dict[tuple[int | None, int], Path]:
    """(layer, rank) -> file; layer None where a file has all of them."""
    files: dict[tuple[int | None, int], Path] = {}
    for file in folder.iterdir():
        if match := _LAYER_FILE.fullmatch(file.name):
            files[int(match[1]), int(match[2])] = file
    if not files:
        files = {(None, rank): file for rank, file in rank_files(folder).items()}
    if not files:
        raise FileNotFoundError(
            f"{folder} must hold layer_XX-model_YY-model_states.pt or mp_rank_XX_model_states.pt, got neither"
        )
    return files


def _by_layer(file: Path) -> dict[int, dict[str, Tensor]]:
    """A rank's tensors: `sequential.2.mlp.linear1.weight` is layer 2's."""
    content = load_pickle(file)
    module = content.get("module") if isinstance(content, dict) else None
    if not isinstance(module, dict) or not module:
        hint = "; its weights are in zero_pp_rank files (ZeRO 3): DeepSpeed's zero_to_fp32.py merges them"
        zero = any(file.parent.glob("zero_pp_rank_*_model_states.pt"))
        raise ValueError(f"{file} must hold weights under `module`, got none{hint if zero else ''}")
    layers: dict[int, dict[str, Tensor]] = {}
    for name, tensor in module.items():
        match = re.fullmatch(r"sequential\.(\d+)\.(.+)", name)
        if match is None:
            raise ValueError(f"{file}: module must hold sequential.LAYER.NAME, got {name}")
        layers.setdefault(int(match[1]), {})[match[2]] = tensor
    return layers


def _read_config(folder: Path, configs: Sequence[Path], vocab_size: int) -> tuple[Config, str | None]:
    from powertrain.train.config.neox import model_fields, tokenizer_name
    from powertrain.train.config.yaml_source import merge, parse_files

    files = list(configs) or sorted(f for f in (folder / "configs").glob("*") if f.suffix in (".yml", ".yaml", ".json"))
    if not files:
        raise FileNotFoundError(
            f"{folder / 'configs'} must hold the YAML files of the training (or name them: --config)"
        )
    source = merge(parse_files(files), ours=False)
    source.override(f"padded_vocab_size={vocab_size}")
    config = configure(**model_fields(source))
    assert isinstance(config, Config)
    return config, tokenizer_name(source)


def _same(parts: list[Tensor]) -> Tensor:
    """Tensors that every rank has a copy of; copies that differ are averaged, as GPT-NeoX's own converter does."""
    if all(torch.equal(part, parts[0]) for part in parts):
        return parts[0]
    return torch.stack(parts).float().mean(0).to(parts[0].dtype)


def _sum(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).float().sum(0).to(parts[0].dtype)


def write(
    folder: Path,
    config: ModelConfig,
    tensors: Named,
    *,
    pipe_parallel_size: int = 1,
    model_parallel_size: int = 1,
    tokenizer: Mapping[str, str | int] | None = None,
) -> Path:
    """Write FOLDER/global_step0 and FOLDER/latest; returns the former. `finetune: true` loads it in GPT-NeoX.

    pipe_parallel_size   0: a file per rank, held in memory until the end; 1: a file per layer and rank
    tokenizer            keys of its config.yml that say the tokenizer and the padding of its vocabulary
    Raises ValueError naming features that GPT-NeoX lacks.
    """
    if pipe_parallel_size not in (0, 1):
        raise ValueError(f"pipe_parallel_size must be 0 or 1 (more stages read 1's files), got {pipe_parallel_size}")
    config = as_gpt_neox(config)
    _check_ranks(config, model_parallel_size)
    step = folder / "global_step0"
    (step / "configs").mkdir(parents=True)
    keys = to_neox_config(config, pipe_parallel_size, model_parallel_size) | dict(tokenizer or {})
    text = yaml.safe_dump(keys, sort_keys=False)
    # GPT-NeoX looks for its configuration beside the weights
    (step / "configs" / "config.yml").write_text(text)
    modules: list[dict[str, Tensor]] = [{} for _ in range(model_parallel_size)]
    for index, ours in _layers(config, tensors):
        for rank in range(model_parallel_size):
            theirs = _shard(config, ours, rank, model_parallel_size)
            if config.position_embedding == "alibi" and ("attention.qkv", "weight") in ours:
                theirs[SLOPES] = own_slopes(config).chunk(model_parallel_size)[rank].clone()
            if pipe_parallel_size:
                torch.save(theirs, step / f"layer_{index:02d}-model_{rank:02d}-model_states.pt")
            else:
                modules[rank] |= {f"sequential.{index}.{name}": tensor for name, tensor in theirs.items()}
    for rank, module in enumerate(modules):
        counts = dict.fromkeys(("global_steps", "global_samples", "skipped_steps", "iteration"), 0)
        sizes = {"dp_world_size": 1, "mp_world_size": model_parallel_size}
        state = {"module": module or None, "optimizer": {}, "lr_scheduler": {}, **counts, **sizes}
        torch.save(state, step / f"mp_rank_{rank:02d}_model_states.pt")
    (folder / "latest").write_text(step.name)
    return step


def _check_ranks(config: Config, ranks: int) -> None:
    if config.has_gmlp and ranks != 1:
        raise ValueError(f"model_parallel_size must be 1 with gmlp layers, got {ranks}")
    for key, size in (("num_kv_heads", config.num_kv_heads or config.num_heads), ("num_heads", config.num_heads),
                      ("intermediate_size", config.ffn), ("vocab_size", config.vocab_size),
                      *((("num_experts", config.num_experts),) if config.num_experts > 1 else ())):  # fmt: skip
        if ranks < 1 or size % ranks:
            raise ValueError(f"model_parallel_size must divide model.{key} ({size}), got {ranks}")


def _layers(config: Config, tensors: Named) -> Iterator[tuple[int, dict[tuple[str, str], Tensor]]]:
    """Their layer -> our (module, kind) -> tensor, each as soon as it is whole."""
    lacking: dict[int, int] = {}
    for name in shapes(config):
        index = place(name, config)[0]
        lacking[index] = lacking.get(index, 0) + 1
    waiting: dict[int, dict[tuple[str, str], Tensor]] = {index: {} for index in lacking}
    for name, tensor in tensors:
        index, module, kind = place(name, config)
        waiting[index][module, kind] = tensor
        if len(waiting[index]) == lacking[index]:
            yield index, waiting.pop(index)
    assert not waiting


def _shard(config: Config, ours: dict[tuple[str, str], Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """One rank's tensors of a layer, under their names, each with memory of its own."""
    tensors: dict[str, Tensor] = {}
    for (module, kind), tensor in ours.items():
        if module == "mlp.gate":
            continue
        part = _share(config, module, kind, tensor, rank, ranks)
        if module == "mlp.up" and ("mlp.gate", kind) in ours:
            part = torch.cat([part, _share(config, "mlp.gate", kind, ours["mlp.gate", kind], rank, ranks)])
        is_rms = config.norm == "rms_norm" and module.endswith("norm")
        # torch.save writes the whole storage of a view
        tensors[f"{NAMES[module][0]}.{KINDS[kind][is_rms]}"] = part.clone()
        # GPT-NeoX makes both norms though it uses one
        if module == "attention_norm" and config.shared_norm:
            tensors[f"{NAMES['mlp_norm'][0]}.{KINDS[kind][is_rms]}"] = part.clone()
        if module in UNUSED_BIASES:
            tensors[UNUSED_BIASES[module]] = part.new_zeros(len(part))
    return tensors


def _share(config: Config, module: str, kind: str, tensor: Tensor, rank: int, ranks: int) -> Tensor:
    if module == EXPERTS:
        return to_experts(tensor, kind).chunk(ranks)[rank]
    if module in COLUMNS:
        part = tensor.chunk(ranks)[rank]
        if module == "attention.qkv" and has_groups(config):
            return torch.cat(split_qkv(part, *heads_of_rank(config, ranks)))
        return part
    if module in ROWS and kind == "weight":
        return tensor.chunk(ranks, 1)[rank]
    # every rank adds it once; the sum must be ours
    return tensor / ranks if module in ROWS and config.parallel_residual else tensor
