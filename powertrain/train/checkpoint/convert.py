"""Conversion of checkpoints between formats; the result is kept only if both give the same logits."""

import errno
import glob
import importlib.util
import math
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from powertrain.models import huggingface, peft
from powertrain.models.reward import VALUE, token_rewards
from powertrain.runtime.atomic_file import unfinished
from powertrain.train.checkpoint import neox as neox_checkpoint
from powertrain.train.checkpoint import store as checkpoint_store
from powertrain.train.checkpoint.load import NAMES, Kind, Weights, build_from, open_weights
from powertrain.train.data.sentencepiece_model import SentencePieceTokenizer
from powertrain.train.data.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    copy_files,
    padded_vocab_size,
    write_files,
)
from powertrain.train.optim import DTYPES

# of the largest logit: float32 in another order of computation stays two digits below, a wrong layout far above
_TOLERANCE = 1e-4
_ABANDONED = 3600.0  # seconds without a write after which a half-written result has no writer
_CPU = torch.device("cpu")
_GENERATION, _SENTENCEPIECE = "generation_config.json", "tokenizer.model"


class Compared(NamedTuple):
    """The largest difference between two models' logits, the largest logit, and who computed each.

    of   "logits", or the "rewards" of reward models
    """

    difference: float
    largest: float
    source: str
    result: str
    of: str = "logits"

    @property
    def ok(self) -> bool:
        # NaN is never ok
        return self.difference <= _TOLERANCE * self.largest


class _Layout(NamedTuple):
    """Layout and destination of a GPT-NeoX checkpoint."""

    pipe_parallel_size: int
    model_parallel_size: int
    folder: Path


class Converted(NamedTuple):
    """compared: None if it was not requested;  notes: remarks on the result."""

    compared: Compared | None
    notes: tuple[str, ...]


class _Outputs(NamedTuple):
    """Outputs of a model for some tokens, in float32, computed `by` a library; None: it has no such layer."""

    logits: Tensor | None  # [B, S, V]
    rewards: Tensor | None  # [B, S]
    by: str


class LogitsDiffer(RuntimeError):
    """The converted model's logits differ from the source's, so the result was not kept."""


def convert(
    source: Weights,
    destination: Path,
    to: Kind,
    *,
    dtype: torch.dtype | None = None,
    vocab_size: int | None = None,
    check: bool = True,
    pipe_parallel_size: int = 1,
    model_parallel_size: int = 1,
) -> Converted:
    """Write `source` as a checkpoint of another kind; DESTINATION appears whole and checked, or not at all.

    dtype         of the written weights; None: as they are, of weights stored in FP8 that of the others
    vocab_size    rows of embedding and head; None: as they are. Further ones are 0
    check         run source and result on a few tokens on the CPU in float32 (one after the other in memory);
                  a Hugging Face folder by transformers where that is installed; of reward models their rewards too
    pipe_parallel_size, model_parallel_size   of a GPT-NeoX checkpoint: its layout
    A reward model is written as a ForSequenceClassification of Hugging Face's, without its output layer; for GPT-NeoX
    without its value head, which `notes` say.
    Raises FileExistsError, ValueError for features that the other kind lacks, LogitsDiffer.
    """
    if destination.exists():
        raise FileExistsError(f"{destination} must not exist yet")
    for name, size in (("pipe_parallel_size", pipe_parallel_size), ("model_parallel_size", model_parallel_size)):
        if to != "neox" and size != 1:
            raise ValueError(f"{name} must be 1 unless the result is a GPT-NeoX checkpoint, got {size} for {NAMES[to]}")
    tokenizer, notes = _tokenizer(source)
    if source.has_value and to == "neox":
        source.need_head("a GPT-NeoX checkpoint")
        notes += (f"the value head of {source.path} is left out: the result is its language model",)
    if vocab_size is not None:
        _check_vocabulary(vocab_size, tokenizer)
    if to == "hf":
        _check_padding(source, vocab_size or source.config.vocab_size)
    if source.is_fp8:
        # values of FP8 weights come in float32: they are written in the dtype of the others
        dtype = dtype or source.dtype
    if to != "peft":
        _check_dtype(dtype or source.dtype, source.path, to)
    written = source.with_vocabulary(vocab_size or source.config.vocab_size)
    # beside the destination, on the same file system, so that the rename at the end is one step
    partial = destination.with_name(f".{destination.name}.{os.getpid()}.partial")
    above = [folder for folder in partial.parents if not folder.exists()]
    unfinished.add(partial)
    try:
        partial.mkdir(parents=True)
        if not os.access(partial, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "the umask takes its owner's rights", str(partial))
        _remove_killed(destination)
        layout = _Layout(pipe_parallel_size, model_parallel_size, Path(os.path.realpath(destination)))
        _WRITERS[to](partial, written, dtype, tokenizer, layout)
        # adapters compute nothing without the model below them
        compared = _compare(source, open_weights(partial, to), dtype) if check and to != "peft" else None
        if compared is not None and not compared.ok:
            raise LogitsDiffer(
                f"{destination}: {compared.of} must be those of {source.path} to {_TOLERANCE:g} of the largest "
                f"({compared.largest:.4g}), got a difference of {compared.difference:.4g}; nothing was kept"
            )
        os.replace(partial, destination)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        with suppress(OSError):  # a folder that may not be listed is empty, and rmtree leaves it
            partial.rmdir()
        unfinished.discard(partial)
        with suppress(OSError):  # they are not empty: of a result that was written, or of somebody else's
            for folder in above:
                folder.rmdir()
    return Converted(compared, notes)


def _remove_killed(destination: Path) -> None:
    """Remove the partial results of killed conversions to `destination`. A partial result with new files may be written
    by another host at this moment: it stays."""
    for folder in destination.parent.glob(f".{glob.escape(destination.name)}.*.partial"):
        with suppress(OSError):
            newest = max(file.stat().st_mtime for file in (folder, *folder.rglob("*")))
            if time.time() - newest > _ABANDONED:
                shutil.rmtree(folder, ignore_errors=True)


def _tokenizer(source: Weights) -> tuple[Tokenizer | None, tuple[str, ...]]:
    try:
        tokenizer = source.open_tokenizer()
    except FileNotFoundError as error:
        return None, (f"no tokenizer: {error}",)
    if isinstance(tokenizer, FileTokenizer):
        return tokenizer, ()
    if isinstance(tokenizer, SentencePieceTokenizer):
        return tokenizer, ("no tokenizer.json: tokenizer.model is a SentencePiece model",)
    return tokenizer, ("no tokenizer.json: this one counts bytes and needs no file",)


def _check_vocabulary(rows: int, tokenizer: Tokenizer | None) -> None:
    least = 1 if tokenizer is None else tokenizer.vocab_size
    if rows < least:
        raise ValueError(f"vocab_size must be at least {least}, the tokenizer's, got {rows}")


def _check_padding(source: Weights, rows: int) -> None:
    """transformers has no model whose padding has no row."""
    padding = (source.hf_config or {}).get("pad_token_id")
    if isinstance(padding, int) and padding >= rows:
        raise ValueError(
            f"{source.path}: config.json: pad_token_id must be below the {rows} rows of the vocabulary, got {padding}"
        )


def _check_dtype(dtype: torch.dtype, path: Path, to: Kind) -> None:
    """Check the dtype before anything is written, because the checkpoint is loaded again with it."""
    known = [*DTYPES.values(), *([torch.float64] if to != "powertrain" else [])]
    if dtype not in known:
        names = ", ".join(str(each).removeprefix("torch.") for each in known)
        raise ValueError(
            f"dtype must be given ({', '.join(DTYPES)}): {NAMES[to]} may hold {names}, and {path} holds {dtype}"
        )


def _write_hf(
    folder: Path, source: Weights, dtype: torch.dtype | None, tokenizer: Tokenizer | None, _: "_Layout"
) -> None:
    eod = None if tokenizer is None else tokenizer.eod
    special = tokenizer.special_ids() if isinstance(tokenizer, FileTokenizer) else None
    huggingface.write(
        folder, source.config, source.tensors(), eod=eod, special=special, dtype=dtype, reward=source.has_value,
        theirs=source.hf_config,
    )  # fmt: skip
    _write_tokenizer(folder, source, tokenizer)
    _copy_generation(folder, source)
    if isinstance(tokenizer, FileTokenizer) and not (folder / "tokenizer_config.json").exists():
        end = None if eod is None else tokenizer.backend.id_to_token(eod)
        checkpoint_store.write_json(
            folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
        )


def _copy_generation(folder: Path, source: Weights) -> None:
    # of adapters that of the model below them
    for beside in (source.path, Path(source.base or source.path)):
        if (beside / _GENERATION).is_file() and not (folder / _GENERATION).exists():
            shutil.copyfile(beside / _GENERATION, folder / _GENERATION)


def _write_neox(
    folder: Path, source: Weights, dtype: torch.dtype | None, tokenizer: Tokenizer | None, layout: "_Layout"
) -> None:
    keys = _neox_tokenizer(tokenizer, source.config.vocab_size, layout)
    language = ((name, tensor) for name, tensor in _cast(source, dtype) if name != VALUE)
    neox_checkpoint.write(
        folder, source.config, language, pipe_parallel_size=layout.pipe_parallel_size,
        model_parallel_size=layout.model_parallel_size, tokenizer=keys,
    )  # fmt: skip
    _write_tokenizer(folder, source, tokenizer)


def _neox_tokenizer(tokenizer: Tokenizer | None, rows: int, layout: _Layout) -> dict[str, str | int]:
    """GPT-NeoX's keys for it, which its converter to Hugging Face needs; 256 single bytes have none there.

    rows   of the embedding: GPT-NeoX pads the tokenizer's to make_vocab_size_divisible_by times its ranks
    """
    if isinstance(tokenizer, FileTokenizer):
        keys: dict[str, str | int] = {
            "tokenizer_type": "HFTokenizer",
            "vocab_file": str(layout.folder / "tokenizer.json"),
        }
    elif isinstance(tokenizer, SentencePieceTokenizer):
        keys = {"tokenizer_type": "SPMTokenizer", "vocab_file": str(layout.folder / _SENTENCEPIECE)}
    elif tokenizer is not None and tokenizer.vocab_size == 512:
        keys = {"tokenizer_type": "CharLevelTokenizer"}
    else:
        return {}
    ranks = layout.model_parallel_size
    # 128 is GPT-NeoX's default for the multiple; rows of other projects' files may not divide by it
    multiple = math.gcd(rows // ranks, 128)
    if padded_vocab_size(tokenizer.vocab_size, multiple, ranks) != rows:
        # all rows as one multiple: whatever the tokenizer has is padded to them
        multiple = rows // ranks
    return keys | {"make_vocab_size_divisible_by": multiple}


def _write_ours(
    folder: Path, source: Weights, dtype: torch.dtype | None, tokenizer: Tokenizer | None, _: "_Layout"
) -> None:
    """A checkpoint of step 0 without an optimizer; the weights are in memory at once."""
    facts = {
        "step": 0,
        "weights_only": True,
        "config": {"model": source.config.model_dump(mode="json")},
        "dtype": str(dtype or source.dtype).removeprefix("torch."),
        "tokenizer": _name_of(tokenizer),
        "has_value": source.has_value,
        "has_head": source.has_head,
        # for a Hugging Face folder that is made of it again
        "hf_config": source.hf_config,
    }
    tensors = {f"model.{name}": tensor.contiguous() for name, tensor in _cast(source, dtype)}
    # nothing goes on meanwhile, so there is no reason to return before the files are there
    checkpoint_store.Checkpoints(folder).save(tensors, facts, asynchronous=False)
    checkpoint = checkpoint_store.checkpoints_in(folder)[0]
    _write_tokenizer(checkpoint, source, tokenizer)
    _copy_generation(checkpoint, source)


def _name_of(tokenizer: Tokenizer | None) -> str | None:
    """The name of a tokenizer that needs no file."""
    if not isinstance(tokenizer, ByteTokenizer):
        return None
    return "CharLevelTokenizer" if tokenizer.vocab_size == 512 else "bytes"


def _write_peft(
    folder: Path, source: Weights, dtype: torch.dtype | None, tokenizer: Tokenizer | None, _: "_Layout"
) -> None:
    """The adapters alone; adapter_config.json names the weights that the run began with."""
    if source.adapters is None:
        raise ValueError(f"{source.path} must have adapters (train.lora) to be written as PEFT's, got none")
    adapters = {
        name: adapter if dtype is None else adapter._replace(A=adapter.A.to(dtype), B=adapter.B.to(dtype))
        for name, adapter in source.adapters().items()
    }
    value = source.value()
    value = value if value is None or dtype is None else value.to(dtype)
    peft.write_adapter(folder, source.config, adapters, base=source.base, value=value)


_WRITERS: dict[Kind, Callable[..., None]] = {
    "hf": _write_hf, "neox": _write_neox, "powertrain": _write_ours, "peft": _write_peft,
}  # fmt: skip


def _cast(source: Weights, dtype: torch.dtype | None) -> huggingface.Named:
    for name, tensor in source.tensors():
        # buffers (the router's correction bias) stay in float32 in every format
        yield name, tensor if dtype is None or huggingface.is_buffer(name) else tensor.to(dtype)


def _write_tokenizer(folder: Path, source: Weights, tokenizer: Tokenizer | None) -> None:
    if tokenizer is not None:
        write_files(tokenizer, folder)
    elif source.kind == "hf":
        # one that is not read here, such as Python code
        copy_files(source.path, folder)


def _compare(source: Weights, result: Weights, dtype: torch.dtype | None) -> Compared:
    """Both models' logits, or rewards, of the same random tokens; one model is in memory at a time."""
    # rows that were added or left out have no counterpart to be compared with
    rows = min(source.config.vocab_size, result.config.vocab_size)
    length = min(24, source.config.max_position_embeddings)
    # two rows: a model that mixed up batch and sequence would pass with one
    tokens = torch.randint(0, rows, (2, length), generator=torch.Generator().manual_seed(0), device="cpu")
    first, second = _outputs(source, tokens, dtype), _outputs(result, tokens, None)
    pairs = {"logits": (first.logits, second.logits), "rewards": (first.rewards, second.rewards)}
    comparisons = []
    for of, (first_tensor, second_tensor) in pairs.items():
        if first_tensor is None or second_tensor is None:
            continue
        if of == "logits":
            first_tensor, second_tensor = first_tensor[..., :rows], second_tensor[..., :rows]
        difference = (first_tensor - second_tensor).abs().max().item()
        comparisons.append(Compared(difference, first_tensor.abs().max().item(), first.by, second.by, of))
    # a reward model has both: the worse of the two
    return next((each for each in comparisons if not each.ok), comparisons[-1])


@torch.no_grad()
def _outputs(weights: Weights, tokens: Tensor, dtype: torch.dtype | None) -> _Outputs:
    """The outputs of the model with its weights rounded to `dtype`."""
    # transformers reads FP8 weights on GPUs only
    by_them = weights.kind == "hf" and not weights.is_fp8 and importlib.util.find_spec("transformers")
    if by_them and _is_exact(weights):
        model: Any = _by_transformers(weights)
        # the source's weights are rounded as the result's are: the check is of the layout, not of the rounding
        for p in model.parameters() if dtype is not None else ():
            p.copy_(p.to(dtype))
        if weights.has_value:
            states = model.base_model(tokens).last_hidden_state
            # an output layer that is the embedding's weight
            logits = states @ model.get_input_embeddings().weight.T if weights.has_head else None
            return _Outputs(logits, model.score(states)[..., 0], "transformers")
        return _Outputs(model(tokens).logits, None, "transformers")
    rounded = replace(weights, tensors=lambda: iter(_cast(weights, dtype)))
    ours = build_from(rounded, _CPU, torch.float32)
    rewards = token_rewards(ours, tokens) if weights.has_value else None
    return _Outputs(ours(tokens) if weights.has_head else None, rewards, "powertrain")


def _is_exact(weights: Weights) -> bool:
    """transformers refuses a folder with more rows of vocabulary than its config.json counts."""
    return huggingface.read_config(weights.path).vocab_size == weights.config.vocab_size


def _by_transformers(weights: Weights) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind: Any = AutoModelForSequenceClassification if weights.has_value else AutoModelForCausalLM
    # local_files_only: a check must not reach for the network
    return kind.from_pretrained(weights.path, local_files_only=True).float().eval()
