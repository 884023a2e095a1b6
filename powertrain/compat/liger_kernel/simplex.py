"""Projection onto the probability simplex."""

import torch
from torch import Tensor

from powertrain.ops.shapes import acc_dtype


def liger_sparsemax(input: Tensor, dim: int = -1) -> Tensor:
    """The projection of `input` onto the probability simplex along `dim`: max(x - τ, 0); PyTorch in float32.

    Source: Martins and Astudillo, arXiv:1602.02068.
    """
    x = input.to(acc_dtype(input.dtype)).movedim(dim, -1)
    largest = x.sort(-1, descending=True).values
    count = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
    total = largest.cumsum(-1)
    # the support: the largest k with 1 + k x_k above the sum of the k largest
    k = (1 + count * largest > total).sum(-1, keepdim=True)
    tau = (total.gather(-1, k - 1) - 1) / k
    return torch.relu(x - tau).movedim(-1, dim).to(input.dtype)
