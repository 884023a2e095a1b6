"""Dense rows whose byte length is no multiple of 16, taken as one flat tensor.

Rows of such a width begin at any address, so a kernel that goes over rows loads and stores them element by element, and
idles lanes behind the end of each. Over the flat tensor accesses are whole vectors, whatever the width is; rows and
columns are found by the place of an element. For kernels that work element by element; the last elements, which are no
whole vector, are a block of their own.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 4
REST = tl.constexpr(16)  # elements of the block for what lies behind the whole vectors
# the quotient by the width is taken in float32: exact, as (1 + BLOCK / N) * 2^-23 is below 0.5 / N
_WIDTHS = range(9, 1 << 20)
_MOST_STRIDE = 1 << 21  # times the rows of a block, an int32
_MANY = 1 << 22  # elements; with fewer, the second launch, for the last rows, takes longer than vectors save


def goes_flat(N: int, itemsize: int, *strides: int) -> bool:
    """Whether rows of N elements of these sizes are better taken as one flat tensor.

    us, one H200, bf16, 2^26 elements, by rows, flat; torch.compile: bias and residual, 159 columns 117, 97; 97. 777
    119, 97; 132. 11007 115, 98; 97. swiglu of packed gates, whose loads are no vectors: 159 163, 125; 129. 777 149,
    124; 144. 11007 137, 124; 110."""
    return N * itemsize % 16 != 0 and N in _WIDTHS and all(stride <= _MOST_STRIDE for stride in strides)


@triton.jit
def flat_places(base, N, inverse, BLOCK: tl.constexpr):
    """Of the BLOCK elements of [rows, N] from the int64 place `base` on: their places in the flat tensor; the first
    one's row, how far behind its beginning each is, and how many rows behind it. `inverse` is 1 / N."""
    first_row = base // N
    behind = (base - first_row * N).to(tl.int32) + tl.arange(0, BLOCK)
    return base + tl.arange(0, BLOCK), first_row, behind, ((behind.to(tl.float32) + 0.5) * inverse).to(tl.int32)


@triton.jit
def whole_vectors(size):
    """The part of `size` in whole vectors of 16 elements; so written, the compiler knows that a mask cuts none."""
    return size // 16 * 16


def goes_by_eights(M: int, N: int, itemsize: int) -> bool:
    """Whether sums over M rows of N elements are better taken over `rows_of_eight`."""
    return M * N >= _MANY and goes_flat(N, itemsize)


def rows_of_eight(*tensors: Tensor | None) -> list[list[Any]]:
    """Dense tensors [rows, N] of one shape as [rows // 8, 8 N], whose rows begin at multiples of 16 bytes, and the rest
    as [rows % 8, N], if there are any: for sums over rows, which are then 8 for each column."""
    M, N = next(x.shape for x in tensors if x is not None)
    whole = M // 8 * 8
    parts = [[None if x is None else x[:whole].view(-1, 8 * N) for x in tensors]] if whole else []
    return parts + ([[None if x is None else x[whole:] for x in tensors]] if whole < M else [])
