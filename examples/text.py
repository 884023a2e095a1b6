"""Text for the examples that bring their own loop: the source of a module of Python, by bytes."""

import argparse

import torch


def rows(count: int, length: int = 64) -> torch.Tensor:
    """[count, length] int64, each below 256; from the start again where the text ends, after some 100 kB."""
    with open(argparse.__file__, "rb") as file:
        text = torch.tensor(list(file.read()))
    return text[torch.arange(count * length) % len(text)].view(count, length)
