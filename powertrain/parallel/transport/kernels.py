"""Kernels at the end of a call over ranks: the sum of partial results, and NaN for results that are invalid.

    sum_parts   y[i] = round(((parts[0, i] + parts[1, i]) + ...) + bias[i % N])
    poison      x = NaN everywhere if error != 0, else x stays as it is

`sum_parts` adds in float32 (float64 for float64) in the order of the first dimension, so that the bits do not depend on
which rank came first. It has no backward of its own: the functions of powertrain.parallel call it inside theirs.
Bytes: W + 1 results. `poison` reads the error flag on the device, so nothing waits for the host. Bytes: 4 if no error.
"""

import torch
import triton.language as tl
from torch import Tensor

from powertrain.ops.shapes import acc_dtype, cdiv
from powertrain.runtime import checks
from powertrain.runtime.dispatch import Op, falls_back, is_traced, use_kernel
from powertrain.runtime.launch import kernel


def sum_parts_ref(parts: Tensor, bias: Tensor | None = None) -> Tensor:
    """The specification of `sum_parts`, in plain PyTorch."""
    acc = acc_dtype(parts.dtype)
    y = parts[0].to(acc)
    for part in parts[1:].unbind():
        y = y + part.to(acc)
    if bias is not None:
        y = y + bias.to(acc)
    return y.to(parts.dtype)


@kernel(aligned=("stride_p", "N", "numel"))
def _sum_parts_kernel(parts_ptr, bias_ptr, y_ptr, W, numel, N, stride_p, BLOCK: tl.constexpr):
    # int64: a long sequence's part may have more than 2^31 elements
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < numel
    total = tl.load(parts_ptr + index, mask=mask, other=0.0).to(tl.float32)
    for part in range(1, W):
        start = parts_ptr + tl.cast(part, tl.int64) * stride_p
        total += tl.load(start + index, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + index % N, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + index, total.to(y_ptr.dtype.element_ty), mask=mask)


_SUM_BLOCK = 2048


def _sum_parts_outputs(parts: Tensor, bias: Tensor | None, kernel: bool) -> Tensor:
    return parts.new_empty(parts.shape[1:])


def _sum_parts_fwd(parts: Tensor, bias: Tensor | None, kernel: bool) -> Tensor:
    if not kernel:
        return sum_parts_ref(parts, bias)
    y = _sum_parts_outputs(parts, bias, kernel)
    _sum_parts_kernel[(cdiv(y.numel(), _SUM_BLOCK),)](
        parts, bias, y, parts.shape[0], y.numel(), y.shape[1], parts.stride(0), BLOCK=_SUM_BLOCK, num_warps=8
    )
    return y


_sum_parts_op = Op("sum_parts(Tensor parts, Tensor? bias, bool kernel) -> Tensor", _sum_parts_fwd, _sum_parts_outputs)


@falls_back("sum_parts")
def sum_parts(parts: Tensor, bias: Tensor | None = None) -> Tensor:
    """The sum over the first dimension of parts [W, M, N], in that order, and bias [N] once: [M, N].

    Dtypes: float32, float16 or bfloat16 (float64 on the CPU), the result's too; added in float32. Each part [M, N] is
    contiguous. Not differentiable: powertrain.parallel has the backward. Deterministic.
    Raises ValueError naming the argument, the expected value and the given one.
    """
    op = "sum_parts"
    checks.floating(op, parts=parts, bias=bias)
    checks.require(parts.dim() == 3 and parts.shape[0] > 0, op, "parts", "be [W, M, N]", list(parts.shape))
    checks.require(parts[0].is_contiguous(), op, "parts", "be contiguous in its last two dims", parts.stride())
    checks.shape(op, "bias", bias, parts.shape[2:], "last dim of parts")
    checks.same_device(op, "parts", parts, bias=bias)
    kernel = use_kernel(op, parts)
    if kernel or is_traced(parts):
        y: Tensor = _sum_parts_op(parts, bias, kernel)
        return y
    return sum_parts_ref(parts, bias)


def poison_ref(x: Tensor, error: Tensor) -> Tensor:
    """The specification of `poison`, in plain PyTorch, not in place."""
    return torch.where(error != 0, torch.nan, x)


@kernel(unaligned=("error_ptr",))
def _poison_kernel(x_ptr, error_ptr, numel, BLOCK: tl.constexpr):
    if tl.load(error_ptr) != 0:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        for first in range(start, numel, tl.num_programs(0).to(tl.int64) * BLOCK):
            index = first + tl.arange(0, BLOCK)
            if x_ptr.dtype.element_ty == tl.uint8:
                value = tl.full([BLOCK], 0x7F, tl.uint8)  # NaN of FP8 data
            else:
                value = tl.full([BLOCK], float("nan"), tl.float32).to(x_ptr.dtype.element_ty)
            tl.store(x_ptr + index, value, mask=index < numel)


# few programs: without an error, the usual case, each only reads the flag
_POISON_BLOCK, _PROGRAMS = 4096, 64


def poison(x: Tensor, error: Tensor) -> None:
    """Fill x with NaN, in place, if error is not zero when the stream comes here.

    x: contiguous, float32, float16 or bfloat16 (float64 on the CPU). error: int32 [1] on x's device.
    Raises ValueError naming the argument.
    """
    checks.floating("poison", x=x)
    checks.require(x.is_contiguous(), "poison", "x", "be contiguous", x.stride())
    checks.shape("poison", "error", error, (1,), "one word")
    checks.require(error.dtype is torch.int32, "poison", "error", "be int32", checks.name(error.dtype))
    checks.same_device("poison", "x", x, error=error)
    if use_kernel("poison", x):
        poison_kernel(x, error)
    else:
        x.copy_(poison_ref(x, error))


def poison_kernel(x: Tensor, error: Tensor) -> None:
    """`poison` on a GPU without checks, for callers whose own results these are; bytes become FP8's NaN, 0x7f."""
    if x.numel():
        _poison_kernel[(min(_PROGRAMS, cdiv(x.numel(), _POISON_BLOCK)),)](
            x, error, x.numel(), BLOCK=_POISON_BLOCK, num_warps=4
        )
