"""Dense rows whose byte length is no multiple of 16, taken as one flat tensor.

Rows of such a width begin at any address, so a kernel that goes over rows loads and stores them element by element, and
idles lanes behind the end of each. Over the flat tensor accesses are whole vectors, whatever the width is; rows and
columns are found by the place of an element. For kernels that work element by element.
"""

import triton
import triton.language as tl

BLOCK, WARPS = 1024, 4
# the quotient by the width is taken in float32: exact, as (1 + BLOCK / N) * 2^-23 is below 0.5 / N
_WIDTHS = range(9, 1 << 20)
_MOST_STRIDE = 1 << 21  # times the rows of a block, an int32


def goes_flat(N: int, itemsize: int, *strides: int) -> bool:
    """Whether rows of N elements of these sizes are better taken as one flat tensor.

    us, one H200, bf16, 2^26 elements, by rows, flat; torch.compile: bias and residual, 159 columns 117, 97; 97. 777
    119, 97; 97. 4099 121, 97; 97. swiglu 159 163, 115; 111. 777 149, 113; 110. 11007 137, 113; 110."""
    return N * itemsize % 16 != 0 and N in _WIDTHS and all(stride <= _MOST_STRIDE for stride in strides)


@triton.jit
def flat_places(N, inverse, BLOCK: tl.constexpr):
    """Of this program's BLOCK elements of [rows, N]: their places in the flat tensor, the first one's row, and how many
    rows behind it and in which column each is. `inverse` is 1 / N."""
    base = tl.program_id(0).to(tl.int64) * BLOCK
    first_row = base // N
    behind = (base - first_row * N).to(tl.int32) + tl.arange(0, BLOCK)
    rows = ((behind.to(tl.float32) + 0.5) * inverse).to(tl.int32)
    return base + tl.arange(0, BLOCK), first_row, rows, behind - rows * N
