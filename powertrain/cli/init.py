"""`powertrain init`: a commented run.yml to begin with."""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from powertrain.cli.paths import end_unwritten, must_exist
from powertrain.runtime.atomic_file import write_whole
from powertrain.runtime.console import Console

TINY = """\
  architecture: llama
  hidden_size: 192
  num_layers: 6
  num_heads: 6
  intermediate_size: 512
  max_position_embeddings: {seq_length}"""

TEMPLATE = """\
# Every key: docs/configuration.md. Any key on the command line: powertrain train {file} train.steps=50
model:
{model}
data:
  # a text file, a folder, .jsonl(.zst), .parquet, tokens (.bin/.idx), hf:ORG/NAME of the Hub; or a list of
  # {{path: ..., weight: ...}}. quickstart: Python's own standard library
  train: {data}
  # shares of training, validation and test where no `validation:` is given
  split: "95, 5, 0"
  # bytes, a tokenizer.json or a folder with one, hf:ORG/NAME, or train:SIZE to train one on the text
  tokenizer: {tokenizer}
train:
  steps: {steps}
  seq_length: {seq_length}
  micro_batch_size: {batch}  # sequences in one forward, on each data-parallel rank
  gradient_accumulation_steps: 1
  precision: {precision}  # bf16 on GPUs from Ampere on, fp16 on Turing, fp32 on most CPUs
  activation_checkpointing: none  # selective and full take less memory and more time
optimizer:
  lr: {lr}
  weight_decay: 0.1
schedule:
  kind: cosine
  warmup_steps: {warmup}
checkpoint:
  every: {every}  # and at the end, and on Ctrl-C; in runs/{name}/checkpoints
  keep_last: 2
evaluation:
  every: {every}
  steps: 10
logging:
  folder: runs/{name}  # metrics.jsonl, report.html, TensorBoard
  every: 10
"""


def init(
    file: Annotated[Path, typer.Argument(help="the file to write")] = Path("run.yml"),
    data: Annotated[str | None, typer.Option(help="text, jsonl, parquet, folder, hf:ORG/NAME or quickstart")] = None,
    model: Annotated[str | None, typer.Option(help="tiny, or a preset such as llama-1b or pythia-160m")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="bytes, tokenizer.json, hf:ORG/NAME, train:SIZE")] = None,
    steps: Annotated[int | None, typer.Option(help="optimizer steps", min=1)] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace the file")] = False,
) -> None:
    """Write a commented config for `powertrain train`. On a terminal it asks for the values that no option gives.

    \b
    powertrain init
    powertrain init books.yml --data books/ --model tiny --tokenizer train:8192 --steps 2000
    """
    if file.suffix not in (".yml", ".yaml"):
        raise typer.BadParameter(f"must end in .yml or .yaml, got {str(file)!r}", param_hint="FILE")
    if file.exists() and not force:
        raise typer.BadParameter(f"{file} exists already; --force replaces it", param_hint="FILE")
    data = _asked(data, "Data (a file, a folder, hf:ORG/NAME, or quickstart)", "quickstart")
    _check_data(data)
    model = _asked(model, "Model (tiny, or a preset such as llama-1b)", "tiny")
    _check_model(model)
    tokenizer = _asked(tokenizer, "Tokenizer (bytes, tokenizer.json, hf:ORG/NAME, train:SIZE)", "bytes")
    _check_tokenizer(tokenizer)
    count = steps or _count(_asked(None, "Steps", "200"))
    precision = precision or _precision()
    if precision not in ("fp32", "bf16", "fp16"):
        raise typer.BadParameter(f"must be fp32, bf16 or fp16, got {precision!r}", param_hint="--precision")
    text = _text(file, data, model, tokenizer, count, precision)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # whole or not at all: --force on a full disk must not cost the old file. Through a link, as open() writes
        write_whole(Path(os.path.realpath(file)), text.encode(errors="backslashreplace"))
    except OSError as error:
        end_unwritten(file, error)
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{file} written. Next: powertrain train {shlex.quote(str(file))}", markup=False)


def _asked(given: str | None, question: str, default: str) -> str:
    """The option's value; else the answer on a terminal, else the default."""
    if given is not None:
        return given
    # None: it is closed
    has_keyboard = sys.stdin is not None and sys.stdin.isatty()
    return str(typer.prompt(question, default)) if has_keyboard else default


def _count(answer: str) -> int:
    if not answer.strip().isdecimal() or int(answer) < 1:
        raise typer.BadParameter(f"must be a number of at least 1, got {answer!r}", param_hint="--steps")
    return int(answer)


def _check_data(data: str) -> None:
    if not data.strip():
        raise typer.BadParameter(f"must be a file, a folder, hf:ORG/NAME or quickstart, got {data!r}",
                                 param_hint="--data")  # fmt: skip
    if data != "quickstart" and not data.startswith("hf:") and not Path(f"{data}.bin").exists():
        must_exist([data])


def _check_tokenizer(name: str) -> None:
    if name == "bytes" or name.startswith("hf:"):
        return
    kind, _, size = name.partition(":")
    if kind == "train":
        # as the run would refuse it
        if not size.isdecimal() or len(size) > 9 or int(size) < 257:
            raise typer.BadParameter(f"must be train:SIZE with a number of ids, at least 257, got {name!r}",
                                     param_hint="--tokenizer")  # fmt: skip
        return
    must_exist(size.split(":") if kind == "gpt2" else [size if kind == "spm" else name])


def _check_model(name: str) -> None:
    if name == "tiny":
        return
    from powertrain.models.registry import presets

    if name not in presets():
        raise typer.BadParameter(f"must be tiny, {', '.join(presets())}, got {name!r}", param_hint="--model")


def _precision() -> str:
    """bf16 where a GPU has it. Without a GPU fp32, and torch need not be imported to know that there is none."""
    if not Path("/dev/nvidiactl").exists():
        return "fp32"
    import torch

    if not torch.cuda.is_available():
        return "fp32"
    return "bf16" if torch.cuda.get_device_capability() >= (8, 0) else "fp16"


def _text(file: Path, data: str, model: str, tokenizer: str, steps: int, precision: str) -> str:
    is_tiny = model == "tiny"
    seq_length = 256 if is_tiny else 1024
    return TEMPLATE.format(
        file=file.name,
        name=file.stem,
        model=TINY.format(seq_length=seq_length) if is_tiny else f"  preset: {model}",
        # JSON strings are YAML strings: nothing that was typed is read as YAML
        data=json.dumps(data),
        tokenizer=json.dumps(tokenizer),
        steps=steps,
        seq_length=seq_length,
        batch=8 if is_tiny else 1,
        precision=precision,
        lr="2e-3" if is_tiny else "3e-4",
        # the first step of a warm-up has rate 0: a run of a few steps has none
        warmup=steps // 10,
        every=max(1, steps // 4),
    )
