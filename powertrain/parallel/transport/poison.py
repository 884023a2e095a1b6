"""Results that must not be trusted become NaN: what a call over ranks leaves behind when a peer was lost.

    x = NaN everywhere if error != 0, else x stays as it is

The word is read on the device, so nothing waits for the host. Bytes: 4 where all is well.
"""

import torch
import triton.language as tl
from torch import Tensor

from powertrain.ops.shapes import cdiv
from powertrain.runtime import checks
from powertrain.runtime.dispatch import use_kernel
from powertrain.runtime.launch import kernel


def poison_ref(x: Tensor, error: Tensor) -> Tensor:
    """The specification of `poison`, in plain PyTorch, not in place."""
    return torch.where(error != 0, torch.nan, x)


@kernel()
def _poison_kernel(x_ptr, error_ptr, numel, BLOCK: tl.constexpr):
    if tl.load(error_ptr) != 0:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        for first in range(start, numel, tl.num_programs(0).to(tl.int64) * BLOCK):
            index = first + tl.arange(0, BLOCK)
            value = tl.full([BLOCK], float("nan"), tl.float32).to(x_ptr.dtype.element_ty)
            tl.store(x_ptr + index, value, mask=index < numel)


_BLOCK, _PROGRAMS = 4096, 64


def poison(x: Tensor, error: Tensor) -> None:
    """Fill x with NaN, in place, if error is not zero when the stream comes here.

    x: contiguous, float32, float16 or bfloat16 (float64 on the CPU). error: int32 [1] on x's device.
    Raises ValueError naming the argument.
    """
    checks.floating("poison", x=x)
    checks.require(x.is_contiguous(), "poison", "x", "be contiguous", x.stride())
    checks.shape("poison", "error", error, (1,), "one word")
    checks.same_device("poison", "x", x, error=error)
    if use_kernel("poison", x):
        poison_kernel(x, error)
    else:
        x.copy_(poison_ref(x, error))


def poison_kernel(x: Tensor, error: Tensor) -> None:
    """`poison` on a GPU without checks, for callers whose own results these are."""
    if x.numel():
        _poison_kernel[(min(_PROGRAMS, cdiv(x.numel(), _BLOCK)),)](x, error, x.numel(), BLOCK=_BLOCK, num_warps=4)
