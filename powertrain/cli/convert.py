"""`powertrain convert`: checkpoints of Powertrain, Hugging Face and GPT-NeoX into each other."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from powertrain.cli.paths import must_exist, unwritten
from powertrain.runtime.console import Console
from powertrain.runtime.reading import named


class Kind(str, Enum):
    """Formats of a checkpoint."""

    powertrain = "powertrain"
    hf = "hf"
    neox = "neox"
    peft = "peft"


class DType(str, Enum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


def convert(
    source: Annotated[Path, typer.Argument(help="a run's folder, or a checkpoint: ours, Hugging Face's, GPT-NeoX's")],
    destination: Annotated[Path, typer.Argument(help="a folder that does not exist yet")],
    to: Annotated[Kind, typer.Option(help="format to write")],
    from_: Annotated[
        Kind | None, typer.Option("--from", help="default: recognized by content", show_default=False)
    ] = None,
    config: Annotated[
        list[Path] | None, typer.Option(help="YAML of a GPT-NeoX checkpoint whose folder has none; repeatable")
    ] = None,
    dtype: Annotated[DType | None, typer.Option(help="of the weights; default: as they are")] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="rows of embedding and head; default: as they are", min=1, max=1 << 28)
    ] = None,
    check: Annotated[bool, typer.Option(help="run both on the CPU in float32 and compare their logits")] = True,
    pipe_parallel_size: Annotated[int, typer.Option(help="GPT-NeoX: 0, a file per rank; 1, a file per layer")] = 1,
    model_parallel_size: Annotated[int, typer.Option(help="GPT-NeoX: tensor-parallel ranks to write for")] = 1,
) -> None:
    """Convert a checkpoint. Source and result are run on a few tokens; if their logits differ, the result is deleted.

    \b
    powertrain convert runs/quickstart quickstart-hf --to hf --dtype bf16
    powertrain convert checkpoints/global_step143000 pythia-hf --to hf --config 160M.yml
    powertrain convert pythia-160m pythia-neox --to neox --model-parallel-size 2
    powertrain convert runs/lora adapter --to peft
    powertrain convert adapter merged-hf --to hf
    """
    must_exist([source, *(config or ())])
    from powertrain.train.checkpoint.convert import convert as write
    from powertrain.train.checkpoint.load import NAMES, open_weights
    from powertrain.train.optim import DTYPES

    console = Console(soft_wrap=True, highlight=False)
    with _one_line(source):
        weights = open_weights(source, from_.value if from_ else None, config or ())
    model = weights.config
    words = f"{NAMES[weights.kind]}, {model.architecture}, {model.num_layers} layers"
    console.print(f"{weights.path}: {words}", markup=False)
    with _one_line(destination), _saying_signals(destination):
        done = write(
            weights, destination, to.value, dtype=DTYPES[dtype.value] if dtype else None, vocab_size=vocab_size,
            check=check, pipe_parallel_size=pipe_parallel_size, model_parallel_size=model_parallel_size,
        )  # fmt: skip
    console.print(f"{destination}: {NAMES[to.value]}", markup=False)
    for note in done.notes:
        console.print(note, markup=False)
    if done.compared:
        c = done.compared
        console.print(
            f"largest difference of {c.of} {c.difference:.3g}, of {c.largest:.4g} ({c.source} and {c.result}, float32)"
        )


@contextmanager
def _saying_signals(destination: Path) -> Iterator[None]:
    """A signal that ends the conversion is named on stderr, with what is left."""
    from powertrain.train.signals import Ended, exits_on_signals

    try:
        with exits_on_signals():
            yield
    except (KeyboardInterrupt, Ended) as error:
        name = error.name if isinstance(error, Ended) else "SIGINT"
        left = "is complete" if destination.exists() else "was not written, and nothing of it is left"
        with suppress(OSError):  # a terminal that hung up
            typer.echo(f"{name} ended the conversion: {destination} {left}", err=True)
        raise


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """End the command with one line where `path` cannot be read or written: 1 where the result is wrong, else 2."""
    from powertrain.train.checkpoint.convert import LogitsDiffer
    from powertrain.train.checkpoint.store import NotWritten

    try:
        yield
    except OSError as error:
        # of a full disk the error names no file, and before the end the result has another name
        is_result = error.errno and ".partial" in str(error.filename or ".partial")
        _end(unwritten(path, error) if is_result else named(error), 2)
    except (ValueError, LogitsDiffer, NotWritten, NotImplementedError) as error:
        _end(str(error), 1 if isinstance(error, LogitsDiffer) else 2)
    except RuntimeError as error:
        # torch has no classes for these two, and any other is a defect. Of a full disk torch.save says that its file
        # has another length than it should
        if "inline_container" in str(error):
            _end(f"{path} cannot be written: the disk is full or failed, or `ulimit -f` is too low", 2)
        if "can't allocate memory" in str(error):
            _end(f"{path}: not enough memory for its tensors", 2)
        raise


def _end(words: str, code: int) -> NoReturn:
    # before the end the result has another name, which no user has seen
    words = re.sub(r"\.([^/]+)\.\d+\.partial\b", r"\1", words)
    Console(stderr=True, soft_wrap=True).print(words, markup=False, highlight=False)
    raise typer.Exit(code) from None
