"""xformers.ops.indexing: rows of a batch taken and added, for stochastic depth (DINOv2)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from powertrain.compat.missing import unknown

__all__ = ["index_select_cat", "scaled_index_add"]


def index_select_cat(sources: Sequence[Tensor], indices: Sequence[Tensor]) -> Tensor:
    """sources[n] [S_n, D_n] at indices[n] [I_n], flat and behind each other: [sum of I_n * D_n]."""
    return torch.cat([source[index.long()].flatten() for source, index in zip(sources, indices, strict=True)])


def scaled_index_add(
    input: Tensor, index: Tensor, source: Tensor, scaling: Tensor | None = None, alpha: float = 1.0
) -> Tensor:
    """input [b, m, d] plus alpha * scaling * source [n, m, d] at the rows index [n], in place; scaling [d] or None.

    A leaf that wants a gradient is not written to: the sum is a new tensor.
    """
    scaled = source if scaling is None else source * scaling
    # PyTorch refuses in-place changes of leaves
    leaf = input.is_leaf and input.requires_grad and torch.is_grad_enabled()
    add = input.index_add if leaf else input.index_add_
    return add(0, index.long(), scaled.to(input.dtype), alpha=alpha)


__getattr__ = unknown(__name__)
