"""Weights of a run's checkpoint, a Hugging Face folder or a GPT-NeoX checkpoint, detected from the files."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from powertrain.models import ModelConfig, build, configure, huggingface, peft
from powertrain.models.causal_lm import CausalLM
from powertrain.models.config import as_yaml
from powertrain.models.fp8_stored import FP8Tensors
from powertrain.models.peft import Adapter
from powertrain.models.reward import VALUE, NoHead, add_value_head
from powertrain.nn.lora import merged
from powertrain.runtime.reading import read_json, reading
from powertrain.train.checkpoint import neox as neox_checkpoint
from powertrain.train.checkpoint import store as checkpoint_store
from powertrain.train.checkpoint.neox_config import as_gpt_neox
from powertrain.train.checkpoint.neox_training import NeoXTraining
from powertrain.train.config.objectives import LoRAConfig
from powertrain.train.config.schema import DataConfig, RunConfig
from powertrain.train.data.tokenizer import load_tokenizer, tokenizer_in
from powertrain.train.optim import DTYPES

if TYPE_CHECKING:
    from powertrain.train.data.tokenizer import Tokenizer

Kind = Literal["powertrain", "hf", "neox", "peft"]
NAMES: dict[Kind, str] = {"powertrain": "Powertrain", "hf": "Hugging Face", "neox": "GPT-NeoX", "peft": "PEFT"}
# tensors that a run's checkpoint is asked for at once
_BYTES_AT_ONCE = 1 << 30
# fields of a model's config that may change when training continues from other weights
_MAY_DIFFER = {
    "vocab_size", "max_position_embeddings", "rope_theta", "rope_scaling", "sliding_window", "hidden_dropout",
    "attention_dropout", "init_method", "output_init_method", "init_std", "balance_loss", "bias_update_rate",
    "router_jitter",
}  # fmt: skip


@dataclass(frozen=True)
class Weights:
    """A model's weights in files.

    path, kind   where, and its kind
    config       of the model;  dtype: of computation, or of storage
    tensors      () -> (our name, tensor), each read when it comes
    is_run       a run's checkpoint, with an optimizer and a place in the data
    training     of GPT-NeoX's that it is from the midst or the end of; None: weights alone
    adapters        of a run with LoRA, or of PEFT's folder; in `tensors` they are merged
    base            of adapters: the weights that they were trained on, where those have a path
    is_fp8          some are stored in FP8: they come in float32, those of `dtype` being rounded to it by who keeps them
    has_value       a reward model: `tensors` begin with its value head
    has_head        False: without an output layer, as Hugging Face's reward models are
    hf_config       config.json of the Hugging Face folder that they are from, or were converted from
    """

    path: Path
    kind: Kind
    config: ModelConfig
    dtype: torch.dtype
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    tokenizer: DataConfig | str | None = None
    is_run: bool = False
    training: Callable[[], NeoXTraining] | None = None
    adapters: Callable[[], Mapping[str, Adapter]] | None = None
    base: str | None = None
    is_fp8: bool = False
    has_value: bool = False
    has_head: bool = True
    hf_config: Mapping[str, Any] | None = None

    def need_head(self, name: str) -> "Weights":
        """These weights. Raises ValueError, naming what they are given as, where they predict no token."""
        if not self.has_head:
            raise ValueError(f"{name} must have an output layer, got a reward model without one: {self.path}")
        return self

    def value(self) -> Tensor | None:
        """The value head [1, hidden_size] of a reward model."""
        return next(t for name, t in self.tensors() if name == VALUE) if self.has_value else None

    def open_tokenizer(self) -> "Tokenizer":
        """The tokenizer that the model was trained with. Raises FileNotFoundError if the folder has none."""
        from powertrain.train.data.sources import open_tokenizer

        if self.tokenizer is None:
            raise FileNotFoundError(f"{self.path} must hold a tokenizer.json, got none")
        if isinstance(self.tokenizer, str):
            return load_tokenizer(self.tokenizer)
        try:
            return open_tokenizer(self.tokenizer)
        except FileNotFoundError as error:
            # a name relative to another folder, or text that has gone
            raise FileNotFoundError(
                f"{self.path} holds no tokenizer, and the data.tokenizer of its run, {self.tokenizer.tokenizer}, "
                f"cannot be opened: {error}"
            ) from None

    def with_vocabulary(self, rows: int) -> "Weights":
        """The same with so many rows of embedding and head: new ones are 0, the last ones are left out."""
        if rows == self.config.vocab_size:
            return self
        config = self.config.model_copy(update={"vocab_size": rows})
        return replace(self, config=config, tensors=lambda: ((n, with_rows(n, t, rows)) for n, t in self.tensors()))


def with_rows(name: str, tensor: Tensor, rows: int) -> Tensor:
    """A tensor of a model, or one of its shape in an optimizer, with so many rows of vocabulary if it has any."""
    if name.partition(".")[0] not in ("embed", "head") or len(tensor) == rows:
        return tensor
    # rows of padding: no token has these numbers
    resized = tensor.new_zeros(rows, *tensor.shape[1:])
    resized[: len(tensor)] = tensor[:rows]
    return resized


def open_weights(path: Path, kind: Kind | None = None, configs: Sequence[Path] = ()) -> Weights:
    """The weights at `path`: a checkpoint, a run's folder, a Hugging Face folder, GPT-NeoX's folder or its global_step.

    kind      None: detected from the folder's files
    configs   YAML files of a GPT-NeoX checkpoint whose folder has none
    Raises FileNotFoundError where there are none, ValueError naming file and key or tensor for bad ones.
    """
    kinds = kinds_at(path) if kind is None else [kind]
    # a guess between two kinds could load the wrong weights without an error
    if len(kinds) != 1:
        got = " and ".join(NAMES[k] for k in kinds) or ("nothing of the kind" if path.exists() else "no such path")
        raise FileNotFoundError(
            f"{path} must be a checkpoint (step_…), a Hugging Face folder (config.json) or a GPT-NeoX checkpoint "
            f"(global_step…), or PEFT's adapters (adapter_config.json), got {got}"
        )
    if configs and kinds[0] != "neox":
        raise ValueError(f"--config must be given for a GPT-NeoX checkpoint only, got {NAMES[kinds[0]]}'s: {path}")
    openers = {"powertrain": _ours, "hf": _hf, "neox": lambda path: _neox(path, configs), "peft": _peft}
    return openers[kinds[0]](path)


def kinds_at(path: Path) -> list[Kind]:
    """The checkpoint formats that a folder could be read as; none if it does not exist."""
    kinds: dict[Kind, bool] = {
        "powertrain": _run_checkpoint(path) is not None,
        "hf": (path / "config.json").is_file(),
        "neox": neox_checkpoint.find(path) is not None,
        "peft": (path / peft.CONFIG).is_file(),
    }
    return [kind for kind, is_there in kinds.items() if is_there]


def _run_checkpoint(path: Path) -> Path | None:
    return checkpoint_store.find(path) or checkpoint_store.find(path / "checkpoints")


def _ours(path: Path) -> Weights:
    checkpoint = _run_checkpoint(path)
    if checkpoint is None:
        raise FileNotFoundError(f"{path} must be a checkpoint or a folder of checkpoints (step_…), got none")
    facts = checkpoint_store.read_facts(checkpoint)
    if facts.get("weights_only"):
        config = model_of(facts, checkpoint)
        tokenizer = tokenizer_in(checkpoint) or facts.get("tokenizer")
        if not isinstance(tokenizer, (str, type(None))):
            raise checkpoint_store.CheckpointError(
                f"{checkpoint}/checkpoint.json: tokenizer must be a name, got {tokenizer!r}"
            )
        # earlier versions wrote language models only
        value, head = bool(facts.get("has_value", False)), bool(facts.get("has_head", True))
        return Weights(
            checkpoint, "powertrain", config, _dtype(facts.get("dtype")),
            lambda: _stored(checkpoint, config, value, head), tokenizer, has_value=value, has_head=head,
            hf_config=facts.get("hf_config"),
        )  # fmt: skip
    with reading(checkpoint / "checkpoint.json", "hold the config of a run"):
        run = RunConfig.model_validate(facts.get("config"))
    settings, model, value = run.train.lora, run.model, run.train.objective == "reward"
    plain = Weights(
        checkpoint, "powertrain", model, DTYPES[run.train.precision], lambda: _stored(checkpoint, model, value),
        # an earlier version kept none
        tokenizer_in(checkpoint) or run.data, is_run=True, has_value=value, hf_config=_config_below(run),
    )  # fmt: skip
    if settings is None:
        return plain

    def merged_with_all() -> Iterator[tuple[str, Tensor]]:
        return merged_tensors(plain.tensors(), _stored_adapters(checkpoint, model, settings, value))

    return replace(
        plain, tensors=merged_with_all, adapters=lambda: _stored_adapters(checkpoint, model, settings),
        base=run.checkpoint.load,
    )  # fmt: skip


def _config_below(run: RunConfig) -> dict[str, Any] | None:
    """config.json of the Hugging Face folder that a run began with, without the token ids, which the run's tokenizer
    has; None if there is none, or if it describes another model than the run's."""
    folder = Path(run.checkpoint.load or "")
    if run.checkpoint.load is None or not (folder / "config.json").is_file():
        return None
    try:
        values, theirs = read_json(folder / "config.json"), huggingface.read_config(folder)
        theirs = theirs.model_copy(update={"vocab_size": run.model.vocab_size})
        is_same = huggingface.to_hf_config(theirs) == huggingface.to_hf_config(run.model)
    # the folder was changed since, or no class of transformers is this model: only the run's own config counts
    except (OSError, ValueError):
        return None
    # a language model that began with a reward model's layers is of another class
    is_same = is_same and (run.train.objective == "reward" or not huggingface.is_reward(values))
    return huggingface.without_token_ids(values) if is_same else None


def _stored_adapters(
    checkpoint: Path, config: ModelConfig, settings: LoRAConfig, has_value: bool = False
) -> dict[str, Adapter]:
    """The adapters of a run that trained them, by the names of their layers.

    has_value   with the one that earlier versions put beside the value head of a reward run
    """
    rank, found = settings.rank, {}
    scale = settings.alpha / (math.sqrt(rank) if settings.rslora else rank)
    expected, stored = _shapes(config, has_value), checkpoint_store.dtypes(checkpoint)
    for name in sorted(
        name.removeprefix("model.") for name in stored if name.startswith("model.") and name.endswith(".lora_A")
    ):
        layer = name.removesuffix(".lora_A")
        # the value head is no layer of the language model
        if f"{layer}.weight" not in expected:
            continue
        N, K = expected[f"{layer}.weight"].shape
        batch = {
            f"model.{layer}.lora_A": torch.empty(rank, K, device="cpu"),
            f"model.{layer}.lora_B": torch.empty(N, rank, device="cpu"),
        }
        if settings.dora:
            batch[f"model.{layer}.lora_magnitude"] = torch.empty(N, device="cpu")
        checkpoint_store.fill(checkpoint, batch)
        A, B, *magnitude = batch.values()
        found[layer] = Adapter(A, B, scale, *magnitude)
    return found


def merged_tensors(
    tensors: Iterator[tuple[str, Tensor]], adapters: Mapping[str, Adapter]
) -> Iterator[tuple[str, Tensor]]:
    """A model's tensors, those of adapted layers merged with their adapters."""
    for name, tensor in tensors:
        adapter = adapters.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        yield name, tensor if adapter is None else merged(tensor, *peft.completed(adapter, tensor))


def model_of(facts: Mapping[str, Any], checkpoint: Path) -> ModelConfig:
    """The model that a checkpoint's facts describe. Raises ValueError naming the file."""
    with reading(checkpoint / "checkpoint.json", "describe a model under config"):
        return configure(**facts["config"]["model"])


def _dtype(name: Any) -> torch.dtype:
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    if name not in dtypes:
        raise checkpoint_store.CheckpointError(
            f"checkpoint.json: dtype must be one of {', '.join(dtypes)}, got {name!r}"
        )
    return dtypes[name]


def _shapes(config: ModelConfig, has_value: bool, has_head: bool = True) -> dict[str, Tensor]:
    """Names and shapes of a model's tensors, the value head of a reward model first."""
    found = huggingface.reward_shapes(config) if has_value else {}
    return found | (huggingface.shapes(config) if has_head else {})


def _stored(
    checkpoint: Path, config: ModelConfig, has_value: bool = False, has_head: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """A checkpoint's weights as they are stored, a gigabyte at a time."""
    checkpoint_store.verify(checkpoint, checkpoint_store.read_facts(checkpoint))
    stored = checkpoint_store.dtypes(checkpoint)
    batch: dict[str, Tensor] = {}
    for name, shape in _shapes(config, has_value, has_head).items():
        batch[f"model.{name}"] = torch.empty(
            shape.shape, dtype=stored.get(f"model.{name}", torch.float32), device="cpu"
        )
        # a model larger than memory is converted a batch at a time
        if sum(t.nbytes for t in batch.values()) > _BYTES_AT_ONCE:
            yield from _filled(checkpoint, batch)
            batch = {}
    yield from _filled(checkpoint, batch)


def _filled(checkpoint: Path, batch: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    checkpoint_store.fill(checkpoint, batch)
    for name, tensor in batch.items():
        yield name.removeprefix("model."), tensor


def _hf(path: Path) -> Weights:
    config = huggingface.read_config(path)
    opened = huggingface.open_tensors(path)
    name = next(iter(huggingface.to_hf(config, [("embed.weight", torch.empty(0, device="meta"))])))[0]
    if name not in opened:
        raise ValueError(f"{path} must hold {name}, got {', '.join(sorted(opened)[:3])} …")
    # the size of the vocabulary is its rows; config.json may name fewer
    embedding = opened[name]
    # one that is no matrix is refused with the others' shapes
    if embedding.dim() and len(embedding) > config.vocab_size:
        # rows of padding that config.json does not count
        config = config.model_copy(update={"vocab_size": len(embedding)})
    values = read_json(path / "config.json")
    is_fp8, reward = isinstance(opened, FP8Tensors), huggingface.is_reward(values)
    return Weights(
        path, "hf", config, embedding.dtype, lambda: _named(path, huggingface.from_hf(config, opened, reward=reward)),
        tokenizer_in(path), is_fp8=is_fp8, has_value=reward,
        has_head=config.tie_embeddings or not reward, hf_config=values,
    )  # fmt: skip


def _named(path: Path, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors, with the checkpoint's path in errors, because a run may read several checkpoints."""
    try:
        yield from tensors
    except ValueError as error:
        raise ValueError(re.sub("^checkpoint", lambda _: str(path), str(error))) from None


def _peft(path: Path) -> Weights:
    """Adapters merged into the model that adapter_config.json names, which must be a folder here."""
    named = read_json(path / peft.CONFIG).get("base_model_name_or_path")
    folder = next((each for each in (Path(str(named)), path / str(named)) if named and each.is_dir()), None)
    if folder is None:
        raise ValueError(
            f"{path / peft.CONFIG}: base_model_name_or_path must name a folder with the model below the adapters, got "
            f"{named!r}"
        )
    base = open_weights(folder)

    value = peft.read_value(path, base.config)

    def adapters() -> dict[str, Adapter]:
        return peft.read_adapter(path, base.config)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        below = base.tensors() if value is None else ((n, t) for n, t in base.tensors() if n != VALUE)
        return merged_tensors(below if value is None else chain([(VALUE, value)], below), adapters())

    # trained with another one than the model below: a chat template, say, and another end of an answer
    if (path / "tokenizer.json").is_file():
        hf_config = base.hf_config and huggingface.without_token_ids(base.hf_config)
        base = replace(base, tokenizer=str(path), hf_config=hf_config)
    return replace(
        base, path=path, kind="peft", tensors=tensors, adapters=adapters, is_run=False, base=str(folder),
        has_value=base.has_value or value is not None,
    )  # fmt: skip


def _neox(path: Path, configs: Sequence[Path]) -> Weights:
    source = neox_checkpoint.find(path)
    if source is None:
        raise FileNotFoundError(f"{path} must be a GPT-NeoX checkpoint (global_step…), got none")
    opened = neox_checkpoint.NeoXCheckpoint(source, configs)
    beside = next(filter(None, map(tokenizer_in, (source, source.parent))), None)
    return Weights(
        source, "neox", opened.config, opened.dtype, opened.tensors,
        opened.tokenizer if beside is None else beside,
        training=(lambda: NeoXTraining(opened)) if neox_checkpoint.trained_steps(source) else None,
    )  # fmt: skip


def load_model(path: Path, *, device: torch.device | str, dtype: torch.dtype | None = None) -> tuple[CausalLM, Weights]:
    """The model at `path` (`open_weights`), in evaluation mode, and its source.

    A reward model has its value head, `model.value`, for `powertrain.models.reward.rewards`.
    dtype   None: the dtype of training or storage, float32 on a CPU
    Raises FileNotFoundError where there is no checkpoint, ValueError for one that cannot be read.
    """
    weights, device = open_weights(path), torch.device(device)
    return build_from(weights, device, dtype or (weights.dtype if device.type == "cuda" else torch.float32)), weights


def build_from(weights: Weights, device: torch.device, dtype: torch.dtype) -> CausalLM:
    """The model of these weights on a device; one tensor of them is in memory beside it."""
    model = build(weights.config)
    if weights.has_value:
        add_value_head(model)
    if not weights.has_head:
        model.head = NoHead()
    model.to(dtype)
    # built on the meta device: the weights are in memory once, where they are needed
    model.to_empty(device=device)
    fill(model.state_dict(), weights.tensors())
    loaded: CausalLM = model.eval()
    return loaded


def fill(into: Mapping[str, Tensor], tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Copy every tensor to the one of its name, in that one's dtype; a DTensor gets its shard.

    Every one of `into` must come. Others are left out: a pipeline stage has some of a model's tensors.
    """
    left = set(into)
    with torch.no_grad():
        for name, tensor in tensors:
            if name not in into:
                continue
            target = into[name]
            if isinstance(target, DTensor):
                moved = tensor.to(target.device, target.dtype)
                # every rank has read the whole tensor, so nothing needs to be sent
                tensor = distribute_tensor(moved, target.device_mesh, target.placements, src_data_rank=None)
            target.copy_(tensor)
            left.discard(name)
    assert not left, left


def fitted(weights: Weights, config: ModelConfig) -> Weights:
    """Weights for a model of this config, which may have more rows of vocabulary, other dropout, window or rotary base.

    Raises ValueError naming the first field that makes it another model.
    """
    # a Llama can be written as either, with the same tensors
    if config.architecture == "gpt_neox":
        weights = replace(weights, config=as_gpt_neox(weights.config))
    elif config.architecture == "llama":
        weights = replace(weights, config=huggingface.hf_equivalent(weights.config))
    refuse_another(weights.config, config, weights.path)
    if config.vocab_size < weights.config.vocab_size:
        raise ValueError(
            f"model.vocab_size must be at least {weights.config.vocab_size} as in {weights.path}, "
            f"got {config.vocab_size}"
        )
    return weights.with_vocabulary(config.vocab_size)


def refuse_another(theirs: ModelConfig, ours: ModelConfig, path: Path) -> None:
    """Raise ValueError naming the first field that makes `ours` another model than `theirs`, which `path` holds."""
    values = theirs.model_dump()
    # learned positions, and gMLP's gates, have a row for each
    has_rows = getattr(ours, "position_embedding", None) == "learned" or getattr(ours, "has_gmlp", False)
    may_differ = _MAY_DIFFER - ({"max_position_embeddings"} if has_rows else set())
    for name, value in ours.model_dump().items():
        if name not in may_differ and _plain(theirs, name, values.get(name)) != _plain(ours, name, value):
            raise ValueError(f"model.{name} must be {as_yaml(values.get(name))} as in {path}, got {as_yaml(value)}")


def _plain(config: ModelConfig, name: str, value: object) -> object:
    """A field, with None replaced by its default."""
    if value is None:
        defaults = {"num_kv_heads": config.num_heads, "head_dim": config.hidden_size // config.num_heads,
                    "intermediate_size": 4 * config.hidden_size,
                    "expert_intermediate_size": getattr(config, "expert_ffn", None),
                    "expert_activation": getattr(config, "activation", None)}  # fmt: skip
        return defaults.get(name)
    return value
