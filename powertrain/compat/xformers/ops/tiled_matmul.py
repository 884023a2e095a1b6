"""xformers.ops.tiled_matmul by torch's products."""

from collections.abc import Sequence

import torch
from torch import Tensor

from powertrain.compat.missing import unknown
from powertrain.runtime import checks

__all__ = ["tiled_matmul"]


def tiled_matmul(a: Sequence[Sequence[Tensor]], b: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """The product of two matrices given as rows of tiles: c[m][n] = sum over k of a[m][k] @ b[k][n]."""
    fits = bool(a) and bool(b) and all(len(row) == len(b) for row in a) and all(len(row) == len(b[0]) for row in b)
    checks.require(fits, "tiled_matmul", "b", "have as many rows of tiles as a has columns", [len(a), len(b)])
    # tiles of a row side by side: one product instead of many small ones
    rows = [torch.cat(list(row), 1) for row in a]
    columns = [torch.cat([row[n] for row in b], 0) for n in range(len(b[0]))]
    return [[row @ column for column in columns] for row in rows]


__getattr__ = unknown(__name__)
