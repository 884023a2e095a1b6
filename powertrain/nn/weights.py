"""Initialization of weights that are not in an nn.Linear."""

import torch
from torch import nn


def drawn(*shape: int) -> nn.Parameter:
    """A parameter [..., out, in], initialized as nn.Linear initializes its weight, on the default device."""
    bound = max(1, shape[-1]) ** -0.5
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
