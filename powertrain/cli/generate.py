"""`powertrain generate`: text out of a trained model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from powertrain.cli.paths import must_exist

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor

    from powertrain.train.data.tokenizer import Tokenizer


def generate(
    checkpoint: Annotated[
        Path, typer.Argument(help="a run's folder, or a checkpoint: ours, Hugging Face's, GPT-NeoX's")
    ],
    prompt: Annotated[list[str], typer.Option(help="repeatable: several are a batch")],
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0: the most likely token, always")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="only the k most likely tokens", show_default=False)] = None,
    top_p: Annotated[float | None, typer.Option(help="only the fewest that make up p", show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="the same seed gives the same text")] = 0,
    device: Annotated[str | None, typer.Option(help="such as cuda:1; default: the first GPU, or the CPU")] = None,
) -> None:
    """Continue each prompt. One is written as it comes, several when all are done.

    \b
    powertrain generate runs/quickstart --prompt "def main(" --temperature 0
    """
    must_exist([checkpoint])
    from powertrain.models.generate import Sampler, stream
    from powertrain.models.generate import generate as new_tokens
    from powertrain.train.checkpoint.load import load_model

    console = Console(soft_wrap=True)
    try:
        where = _device(device)
        model, weights = load_model(checkpoint, device=where)
        tokenizer = weights.open_tokenizer()
        sampler = Sampler(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        prompts = [tokenizer.encode(text) for text in prompt]
        if len(prompts) == 1:
            tokens = stream(model, prompts, max_new_tokens=max_new_tokens, sampler=sampler)
            _write(console, prompt[0], prompts[0], tokens, tokenizer)
            return
        rows = new_tokens(model, prompts, max_new_tokens=max_new_tokens, sampler=sampler, eod=tokenizer.eod)
    except (ValueError, OSError) as error:
        Console(stderr=True, soft_wrap=True).print(str(error), markup=False, highlight=False)
        raise typer.Exit(2) from None
    for text, row in zip(prompt, rows, strict=True):
        console.rule(style="dim")
        console.print(text + tokenizer.decode(row), markup=False, highlight=False)


def _device(name: str | None) -> "torch.device":
    """The device of that name, or the first GPU, or the CPU. Raises ValueError for one that is not here."""
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = name.partition(":")
    count = {"cpu": 1, "cuda": torch.cuda.device_count()}.get(kind, 0)
    if not (number or "0").isdecimal() or int(number or 0) >= count:
        raise ValueError(f"--device must be cpu or one of the {torch.cuda.device_count()} GPUs here, got {name}")
    return torch.device(name)


def _write(console: Console, text: str, ids: list[int], tokens: "Iterator[Tensor]", tokenizer: "Tokenizer") -> None:
    """The prompt and its continuation, streamed; an incomplete character waits for its other bytes."""
    ids, shown = list(ids), ""
    start = len(tokenizer.decode(ids))
    for number, token in enumerate(tokens):
        # not before: an error in the prompt is printed instead of it
        if number == 0:
            console.print(text, end="", style="bold", markup=False, highlight=False)
        if int(token) == tokenizer.eod:
            break
        ids.append(int(token))
        new = tokenizer.decode(ids)[start:]
        if not new.endswith("\ufffd"):
            console.print(new[len(shown) :], end="", markup=False, highlight=False)
            shown = new
    console.print()
