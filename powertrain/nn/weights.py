"""First values of parameters that no nn.Linear draws."""

import torch
from torch import nn


def drawn(*shape: int) -> nn.Parameter:
    """A parameter [..., out, in] drawn as nn.Linear draws its weight, on the default device."""
    bound = max(1, shape[-1]) ** -0.5
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
