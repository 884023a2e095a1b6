"""Arithmetic on shapes, and conversion of tensors to the 2D forms that kernels take."""

from collections.abc import Sequence

import torch
from torch import Tensor


def as_rows(x: Tensor) -> Tensor:
    """`x` as [rows, last dim] with a unit last stride: a view where strides allow it, else a copy.

    A single row, column or element may report any stride; a last dim of 1 counts as unit.
    """
    if x.dim() == 2 and x.stride(1) == 1:
        return x
    # of no elements -1 could be any number
    rows = x.reshape(-1 if x.numel() else x.shape[:-1].numel(), x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] <= 1 else rows.contiguous()


def as_flat(x: Tensor) -> Tensor:
    """`x` as [elements] with a unit stride. reshape(-1) alone keeps the stride of a column such as labels[:, -1]."""
    return x.reshape(-1).contiguous()


def empty(x: Tensor) -> Tensor:
    """The tensor that stands for "not wanted" in an op's results."""
    return x.new_empty(0)


def empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory of x's shape, dense, in the order of its dims, but for the last, which is contiguous.

    torch.empty_like of an expanded tensor, or of windows that overlap, may permute the last dim; that of meta tensors,
    on which a backward's kernels are found ahead, makes PyTorch import sympy: up to 4 s of a first call.
    """
    if not x.is_meta:
        like = torch.empty_like(x, dtype=dtype)
        return like if like.stride(-1) == 1 or x.shape[-1] <= 1 else x.new_empty(x.shape, dtype=dtype)
    order = [*sorted(range(x.dim() - 1), key=x.stride, reverse=True), x.dim() - 1]
    made = x.new_empty([x.shape[dim] for dim in order], dtype=dtype)
    return made.permute([order.index(dim) for dim in range(x.dim())])


def wanted(x: Tensor | None, need: bool) -> Tensor | None:
    """None if the gradient was not requested, else the gradient."""
    return x if need else None


def broadcasts(sizes: Sequence[int], to: Sequence[int]) -> bool:
    """Whether dims of these sizes, as many, broadcast to those. (Not `n in (1, m)`: under torch.compile no number is
    found in a tuple of symbols.)"""
    return all(n == 1 or n == m for n, m in zip(sizes, to, strict=True))


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64 (references and the CPU path)."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def document_starts(document_ids: Tensor) -> Tensor:
    """Where documents begin among the tokens of all rows, one row behind the other, and the end: [n] int32.

    document_ids [B, S]: tokens of a document lie together and have one number, its neighbours another one.
    n is a power of two, 16 at least, and the end repeated, as the start of empty documents: a call of an op is
    recorded, and a compiled graph made, for each shape, and the number of documents differs from batch to batch.
    A GPU's ids are waited for, once.
    """
    first = torch.ones_like(document_ids, dtype=torch.bool)
    # a row's first token begins a document
    first[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    starts = first.flatten().nonzero()[:, 0].int()
    length = max(16, 1 << len(starts).bit_length())
    return torch.nn.functional.pad(starts, (0, length - len(starts)), value=document_ids.numel())


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. (triton.cdiv costs 4 us from Python.)"""
    return -(-a // b)
