"""Rows of packed sequences ahead of the first one and past the last: zeros, where kernels of others leave what was in
memory.

flash-2 and its successors write nothing before cu_seqlens[0] or beyond cu_seqlens[-1], neither results nor gradients
(https://github.com/pytorch/pytorch/issues/176793). The host does not know where that is, so a small kernel looks; it
reads two numbers and writes nothing where sequences fill their storage.
"""

import torch
import triton.language as tl
from torch import Tensor

from powertrain.runtime.launch import kernel

_PROGRAMS, _BLOCK = 64, 1024


@kernel(aligned=("row_size",), unaligned=("starts_ptr",))
def _zero_tail_kernel(
    x_ptr, starts_ptr, batch, rows, row_size, AHEAD: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr
):
    # the rows ahead and those past the end are counted as one run of rows
    # two numbers read on the device cost less than a synchronisation to know them on the host
    ahead = 0
    if AHEAD:
        ahead = tl.load(starts_ptr)
    inside = tl.load(starts_ptr + batch) - ahead
    # a fixed number of programs walks over the rows: the host does not know how many there are
    for at in range(tl.program_id(0), rows - inside, PROGRAMS):
        row_ptr = x_ptr + tl.where(at < ahead, at, at + inside).to(tl.int64) * row_size
        for start in range(0, row_size, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            tl.store(row_ptr + cols, tl.zeros((BLOCK,), x_ptr.dtype.element_ty), mask=cols < row_size)


def zero_tail(x: Tensor, starts: Tensor, *, ahead: bool = False) -> Tensor:
    """`x` [tokens, ...] contiguous, its rows from starts[-1] on set to zero in place, unseen by autograd; with `ahead`
    those before starts[0] too."""
    # a launch with an empty tensor would divide by its rows
    if x.numel():
        row_size = x.numel() // x.shape[0]
        _zero_tail_kernel[(_PROGRAMS,)](
            x, starts, starts.shape[0] - 1, x.shape[0], row_size, AHEAD=ahead, PROGRAMS=_PROGRAMS, BLOCK=_BLOCK
        )
    return x


def empty_tail(lse: Tensor, starts: Tensor) -> Tensor:
    """`lse` [heads, tokens], -inf ahead of the first sequence and past the last."""
    tokens = torch.arange(lse.shape[-1], device=lse.device)
    # the LSE of a row that saw nothing, as in every other backend
    return lse.masked_fill((tokens < starts[0]) | (tokens >= starts[-1]), -torch.inf)
