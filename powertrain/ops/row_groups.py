"""Rows that lie at more than one distance: heads of q in a fused projection, heads before tokens, sequences without
their last token. Kernels read them where they are: a copy would double the memory traffic.

    row (o * middle + m) * inner + i begins at o * strides[2] + m * strides[1] + i * strides[0]
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.shapes import as_rows, empty_like

MOST_LEVELS = 3
Strides = tuple[int, int, int]
_NO_STRIDES = (0, 0, 0)


class RowGroups(NamedTuple):
    """Where the rows of several tensors of one shape begin, in elements.

    levels   distances that there are, 1 to 3; 1: rows have one stride
    sizes    rows of a group; groups of `inner` rows in one of the outermost (1 where there are fewer levels)
    strides  by tensor (zeros of one that is absent): of a row, of a group, of an outermost group
    """

    levels: int
    sizes: tuple[int, int]
    strides: list[Strides]


def row_groups(*tensors: Tensor | None) -> tuple[list[Tensor | None], RowGroups]:
    """The tensors [..., N], of one shape, and where their rows begin.

    A tensor whose last dim has a stride is copied; all are made [rows, N] if leading dims have more than three levels,
    which those of four dims never have."""
    are_dense = True
    for x in tensors:
        are_dense = are_dense and (x is None or x.is_contiguous())
    if are_dense:
        # most calls, and host time of those that are not replayed
        return list(tensors), RowGroups(1, (1, 1), [_NO_STRIDES if x is None else (x.shape[-1], 0, 0) for x in tensors])
    found = [x if x is None or x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous() for x in tensors]
    levels = _levels([x for x in found if x is not None])
    if len(levels) > MOST_LEVELS:
        found = [None if x is None else as_rows(x) for x in found]
        levels = _levels([x for x in found if x is not None])
    # the innermost first
    sizes = [size for size, _ in reversed(levels)] + [1] * MOST_LEVELS
    by_tensor = zip(*(strides for _, strides in reversed(levels)), strict=True)
    strides = [_NO_STRIDES if x is None else _filled(next(by_tensor)) for x in found]
    return found, RowGroups(len(levels), (sizes[0], sizes[1]), strides)


def _levels(tensors: Sequence[Tensor]) -> list[tuple[int, tuple[int, ...]]]:
    """The leading dims, (size, strides by tensor), those merged that lie behind one another in every tensor."""
    levels: list[tuple[int, tuple[int, ...]]] = []
    for dim, size in enumerate(tensors[0].shape[:-1]):
        strides = tuple(x.stride(dim) for x in tensors)
        if size == 1:
            continue
        if levels and all(outer == size * inner for outer, inner in zip(levels[-1][1], strides, strict=True)):
            size *= levels.pop()[0]
        levels.append((size, strides))
    # of one row any stride will do
    return levels or [(1, tuple(x.shape[-1] for x in tensors))]


def _filled(strides: tuple[int, ...]) -> Strides:
    row, group, outermost = (*strides, *(0,) * MOST_LEVELS)[:MOST_LEVELS]
    return row, group, outermost


def empty_like_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory of x's shape, whose dims lie as x's do if kernels can write such rows: a gradient of heads before tokens
    is then that of tokens before heads without a copy."""
    is_writable = x.dim() <= MOST_LEVELS + 1 and (x.stride(-1) == 1 or x.shape[-1] <= 1)
    return empty_like(x, dtype) if is_writable else x.new_empty(x.shape, dtype=dtype)


@triton.jit
def row_places(rows, strides, sizes, LEVELS: tl.constexpr):
    """Offsets of rows, int64, the shape of `rows`, int32."""
    if LEVELS == 1:
        places = rows.to(tl.int64) * strides[0]
    else:
        group = rows // sizes[0]
        places = (rows - group * sizes[0]).to(tl.int64) * strides[0]
        if LEVELS == 2:
            places += group.to(tl.int64) * strides[1]
        else:
            outer = group // sizes[1]
            places += (group - outer * sizes[1]).to(tl.int64) * strides[1] + outer.to(tl.int64) * strides[2]
    return places
