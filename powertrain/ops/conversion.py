"""Conversion of other libraries' tensors to the layout of our attention."""

from typing import NoReturn

import torch
from torch import Tensor

from powertrain.runtime import checks
from powertrain.runtime.dispatch import apart_from_autocast


def unsupported(op: str, argument: str, got: object, nearest: str) -> NoReturn:
    """Raise `NotImplementedError: op: argument = got is not supported; nearest: ...`."""
    raise NotImplementedError(f"{op}: {argument} = {got!r} is not supported; nearest: {nearest}")


def cat(tensors: tuple[Tensor, ...] | list[Tensor], dim: int = 0) -> Tensor:
    """torch.cat, also under torch.autocast, whose own takes float32 and its own dtype only."""
    return apart_from_autocast(torch.cat, tensors[0].device)(tensors, dim)


def stack(tensors: tuple[Tensor, ...] | list[Tensor], dim: int = 0) -> Tensor:
    """torch.stack, also under torch.autocast, whose own takes float32 and its own dtype only."""
    return apart_from_autocast(torch.stack, tensors[0].device)(tensors, dim)


def unit_stride(q: Tensor, k: Tensor, v: Tensor, op: str | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Each tensor with a last dim of stride 1: itself where it has one, else a copy. `op`: of q, k and v by those
    names, for errors."""
    if op is not None:
        for name, x in (("q", q), ("k", k), ("v", v)):
            checks.tensor(op, name, x)
    return _unit_stride(q), _unit_stride(k), _unit_stride(v)


def _unit_stride(x: Tensor) -> Tensor:
    # what has no dims, or is not dense, is named by the op that takes it
    if not x.dim() or x.is_nested or x.layout is not torch.strided:
        return x
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def known(length: int | Tensor | None) -> int | None:
    """An upper bound of lengths, if the host knows it without reading a GPU tensor (a synchronization)."""
    return None if isinstance(length, Tensor) else length


def gather_pages(
    cache: Tensor,  # [pages, page_size, ...]
    page_table: Tensor,  # [batch, pages per sequence]
    length: int,
) -> Tensor:  # [batch, length, ...]
    """The first `length` positions of every sequence of a paged cache, copied together; differentiable.

    Keys that a sequence does not own (page numbers outside the cache) are read from the nearest page: mask by length.
    """
    page_size = cache.shape[1]
    if not cache.shape[0]:
        # a page of zeros, which no sequence owns
        cache = torch.nn.functional.pad(cache, [0, 0] * (cache.dim() - 1) + [0, 1])
    position = torch.arange(length, device=cache.device)
    pages = page_table.long()[:, position // page_size].clamp(0, cache.shape[0] - 1)
    return cache.flatten(0, 1)[pages * page_size + position % page_size]
