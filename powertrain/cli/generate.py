"""`powertrain generate`: text out of a trained model."""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from powertrain.cli.paths import end_unwritten, must_exist, one_line
from powertrain.runtime import tracing
from powertrain.runtime.console import Console

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch
    from torch import Tensor

    from powertrain.train.completion import Completer, Completion
    from powertrain.train.data.tokenizer import Tokenizer


def generate(
    checkpoint: Annotated[
        Path, typer.Argument(help="a run's folder, or a checkpoint: ours, Hugging Face's, GPT-NeoX's")
    ],
    prompt: Annotated[
        list[str] | None, typer.Option(help="repeatable: several are a batch", show_default=False)
    ] = None,
    input: Annotated[Path | None, typer.Option(help="a file of prompts", show_default=False)] = None,
    prompt_end: Annotated[str, typer.Option(help="separator of the prompts in a file")] = r"\n",
    output: Annotated[
        Path | None, typer.Option(help="answers as JSON lines; default for a file: INPUT.output.jsonl")
    ] = None,
    interactive: Annotated[bool, typer.Option("--interactive", help="prompts from the keyboard, line by line")] = False,
    num_samples: Annotated[int, typer.Option(min=1, max=1_000_000, help="answers to each prompt")] = 1,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="default: 128, or as many as the model has positions for", show_default=False),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="only the k most likely tokens; 0: all")] = 0,
    top_p: Annotated[
        float, typer.Option(help="only the likeliest tokens, up to a probability of p together; 0: all")
    ] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="a text that ends an answer; repeatable")] = None,
    stop_token: Annotated[list[int] | None, typer.Option(help="a token that ends an answer; repeatable")] = None,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="also each token's log-probability")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="prompts that are continued together")] = 8,
    seed: Annotated[int, typer.Option(help="the same seed gives the same text")] = 0,
    device: Annotated[str | None, typer.Option(help="such as cuda:1; default: the first GPU, or the CPU")] = None,
) -> None:
    """Continue each prompt; without a prompt, generate whole documents. A single answer is printed token by token.

    \b
    powertrain generate runs/quickstart --prompt "def main(" --temperature 0
    powertrain generate runs/quickstart --num-samples 4 --stop "\\n\\n"
    powertrain generate runs/quickstart --input prompts.txt --output answers.jsonl --logprobs
    """
    must_exist([checkpoint, *([input] if input else [])])
    if sum((bool(prompt), input is not None, interactive)) > 1:
        raise typer.BadParameter("prompts must come from one of --prompt, --input and --interactive, got several")
    if interactive and output is not None:
        raise typer.BadParameter(f"--output must be left out with --interactive, which answers on screen, got {output}")
    if interactive and sys.stdin is None:
        raise typer.BadParameter("--interactive must have a standard input to read prompts from, got a closed one")
    if input and output is None and not (input.is_file() or input.is_dir()):
        raise typer.BadParameter(f"--output must be given for prompts from a pipe or device, got --input {input} alone")
    if input and output and output.exists() and output.samefile(input):
        raise typer.BadParameter(f"--output must not be --input, whose prompts it would replace, got {output}")
    if not prompt_end or not all(stop or ["any"]):
        raise typer.BadParameter("--prompt-end and --stop must not be empty, got an empty text")
    from powertrain.models.generate import Sampler
    from powertrain.train.checkpoint.load import load_model
    from powertrain.train.completion import Completer

    console = Console(soft_wrap=True)
    with one_line(ValueError, OSError):
        for text in prompt or []:
            _check_text("--prompt", text)
        prompts = _prompts_in(input, _escaped([prompt_end])[0]) if input else prompt or [""]
        model, weights = load_model(checkpoint, device=device_of(device))
        weights.need_head("the checkpoint")
        sampler = Sampler(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        stops = _escaped(stop or []), stop_token or []
        completer = Completer(model, weights.open_tokenizer(), sampler, max_new_tokens, *stops, batch_size)
    writer = _Writer(console, completer, output or (input and Path(f"{input}.output.jsonl")), logprobs, num_samples)
    # not OSError: one of the screen is no prompt's
    with one_line(ValueError):
        if interactive:
            _converse(writer)
        else:
            writer.write(prompts)


def _escaped(texts: list[str]) -> list[str]:
    r"""Texts of the command line, with \n and \t replaced by a newline and a tab."""
    return [text.replace("\\n", "\n").replace("\\t", "\t") for text in texts]


def _check_text(name: str, prompt: str) -> None:
    # a byte that is not UTF-8 reaches Python as a lone surrogate, which no tokenizer takes
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        got = ascii(prompt[error.start])
        raise ValueError(f"{name} must be UTF-8 text, got {got} at {error.start}") from None


def _prompts_in(file: Path, end: str) -> list[str]:
    from powertrain.train.data.corpus import begins_with_records, other_kind

    try:
        data = file.read_bytes()
        # editors on Windows begin text files with a byte order mark, which is no part of the first prompt
        text = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise ValueError(f"--input {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        got = f"byte 0x{error.object[error.start]:02x} at {error.start}{other_kind(data)}"
        raise ValueError(f"{file}: must be UTF-8 text, got {got}") from None
    if begins_with_records(data):
        tracing.warn(f"--input {file}: its lines are JSON objects, and each is a prompt with its braces: text is meant")
    prompts = [each.strip() for each in text.split(end)]
    # blank lines at the end of a file are no prompts
    while prompts and not prompts[-1]:
        prompts.pop()
    if not prompts:
        raise ValueError(f"{file} must hold prompts, got none")
    if blank := [number for number, each in enumerate(prompts, 1) if not each]:
        tracing.warn(
            f"--input {file}: {len(blank)} of {len(prompts)} prompts are blank and get no answer, the first is number "
            f"{blank[0]}"
        )
    return [each for each in prompts if each]


class _Writer:
    """Writes answers to the screen, or as JSON lines to a file."""

    def __init__(
        self, console: Console, completer: "Completer", output: Path | None, logprobs: bool, num_samples: int
    ) -> None:
        self.console, self.completer, self.output = console, completer, output
        self.logprobs, self.num_samples = logprobs, num_samples

    def write(self, prompts: list[str]) -> None:
        """Write the answers to these prompts; a single one that nothing else ends is printed token by token."""
        completer = self.completer
        asked = [prompt for prompt in prompts for _ in range(self.num_samples)]
        if len(asked) == 1 and not (self.output or completer.stops or completer.stop_tokens or self.logprobs):
            from powertrain.models.generate import stream

            ids = completer.tokens_of(asked[0])
            count = completer.count_after(len(ids))
            tokens = stream(completer.model, [ids], max_new_tokens=count, sampler=completer.sampler)
            _write(self.console, asked[0], ids, tokens, completer.tokenizer)
            return
        if self.output is not None:
            self._save(self.output, completer(asked))
            # in `--output /dev/stdout > file` this line would be written over the first answer
            if not _is_stdout(self.output):
                self.console.print(f"{len(asked)} answers in {self.output}", markup=False, highlight=False)
            return
        for completion in completer(asked):
            self.console.rule(style="dim")
            _show(self.console, completion.prompt + completion.text + "\n")
            if self.logprobs:
                row = completion.row
                pieces = [completer.tokenizer.decode([token]) for token in row.tokens]
                words = "  ".join(f"{piece!r} {p:.3f}" for piece, p in zip(pieces, row.logprobs, strict=True))
                self.console.print(words, style="dim", markup=False, highlight=False)

    def _save(self, output: Path, completions: "Iterable[Completion]") -> None:
        """Each answer as a line, as soon as it is there; a file without any is removed."""
        try:
            with output.open("a") as file:
                for number, completion in enumerate(completions):
                    # only now: a first prompt that is refused must not cost the answers of an earlier command
                    if number == 0 and output.is_file() and not _is_stdout(output):
                        file.truncate(0)
                    file.write(json.dumps(self._entry(completion)) + "\n")
        except OSError as error:
            end_unwritten(f"--output {output}", error)
        finally:
            # not a link or a device
            with suppress(OSError):
                if output.is_file() and not output.is_symlink() and not output.stat().st_size:
                    output.unlink()

    def _entry(self, completion: "Completion") -> dict[str, object]:
        """context, text, length and finished are those of GPT-NeoX's files."""
        row = completion.row
        entry: dict[str, object] = {
            "context": completion.prompt, "text": completion.text, "length": len(row.tokens),
            "finished": row.finished != "length", "reason": row.finished,
        }  # fmt: skip
        return entry | ({"tokens": row.tokens, "logprobs": row.logprobs} if self.logprobs else {})


def _is_stdout(path: Path) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(1))
    except OSError:  # one of them is not there, or closed
        return False


def _converse(writer: _Writer) -> None:
    """Answer each line of the input by itself, until an empty line or the end of the input."""
    while True:
        try:
            # from a file or pipe of Windows: its line ends and byte order mark
            prompt = input("> ").rstrip("\r").removeprefix("\ufeff")
        except EOFError:
            return
        if not prompt:
            return
        try:
            _check_text("a prompt", prompt)
            writer.write([prompt])
        except ValueError as error:  # too long, say: the next one may not be
            writer.console.print(str(error), markup=False, highlight=False)


def device_of(name: str | None) -> "torch.device":
    """The device of that name, or the first GPU, or the CPU. Raises ValueError for one that is not here."""
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    here = ["cpu", "cpu:0", *(["cuda"] if torch.cuda.device_count() else [])]
    if name not in [*here, *(f"cuda:{n}" for n in range(torch.cuda.device_count()))]:
        raise ValueError(f"--device must be cpu or one of the {torch.cuda.device_count()} GPUs here, got {name}")
    return torch.device(name)


def _write(console: Console, text: str, ids: list[int], tokens: "Iterator[Tensor]", tokenizer: "Tokenizer") -> None:
    """The prompt and its continuation, streamed; an incomplete character waits for its other bytes."""
    ids, shown = list(ids), ""
    start = len(tokenizer.decode(ids))
    for number, token in enumerate(tokens):
        # not before: an error in the prompt is printed instead of it
        if number == 0:
            _show(console, text, bold=True)
        if int(token) == tokenizer.eod:
            break
        ids.append(int(token))
        new = tokenizer.decode(ids)[start:]
        if not new.endswith("\ufffd"):
            _show(console, new[len(shown) :])
            shown = new
    _show(console, tokenizer.decode(ids)[start + len(shown) :] + "\n")


def _show(console: Console, text: str, *, bold: bool = False) -> None:
    """Print a text as it is: `console.print` would make spaces of its tabs."""
    console.file.write(typer.style(text, bold=True) if bold and console.is_terminal else text)
    console.file.flush()
