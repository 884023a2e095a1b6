"""The sum of partial results, in a fixed order: what ends a reduce-scatter.

    y[i] = round(((parts[0, i] + parts[1, i]) + ...) + bias[i % N])

Adds in float32 (float64 for float64) in the order of the first dimension, so that the bits do not depend on who came
first. No backward of its own: the functions of powertrain.parallel call it inside theirs. Bytes: W + 1 results.
"""

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


@kernel(aligned=("stride_p", "N"))
def _sum_parts_kernel(parts_ptr, bias_ptr, y_ptr, W, numel, N, stride_p, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < numel
    total = tl.load(parts_ptr + index, mask=mask, other=0.0).to(tl.float32)
    for part in range(1, W):
        start = parts_ptr + tl.cast(part, tl.int64) * stride_p
        total += tl.load(start + index, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + index % N, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + index, total.to(y_ptr.dtype.element_ty), mask=mask)


_BLOCK = 2048


def _fwd_outputs(parts: Tensor, bias: Tensor | None, kernel: bool) -> Tensor:
    return parts.new_empty(parts.shape[1:])


def _fwd(parts: Tensor, bias: Tensor | None, kernel: bool) -> Tensor:
    if not kernel:
        return sum_parts_ref(parts, bias)
    y = _fwd_outputs(parts, bias, kernel)
    _sum_parts_kernel[(cdiv(y.numel(), _BLOCK),)](
        parts, bias, y, parts.shape[0], y.numel(), y.shape[1], parts.stride(0), BLOCK=_BLOCK, num_warps=8
    )
    return y


_sum_parts_op = Op("sum_parts(Tensor parts, Tensor? bias, bool kernel) -> Tensor", _fwd, _fwd_outputs)


@falls_back("sum_parts")
def sum_parts(parts: Tensor, bias: Tensor | None = None) -> Tensor:
    """The sum over the first dimension of parts [W, M, N], in that order, and bias [N] once: [M, N].

    Dtypes: float32, float16 or bfloat16 (float64 on the CPU), the result's too; added in float32. Each part [M, N] is
    contiguous. Not differentiable: powertrain.parallel has the backward. Deterministic.
    Raises ValueError naming the argument, what it must be and what it was.
    """
    op = "sum_parts"
    checks.floating(op, parts=parts, bias=bias)
    checks.require(parts.dim() == 3 and parts.shape[0] > 0, op, "parts", "be [W, M, N]", list(parts.shape))
    checks.require(parts[0].is_contiguous(), op, "parts", "be contiguous in its last two dims", parts.stride())
    checks.shape(op, "bias", bias, parts.shape[2:], "last dim of parts")
    checks.same_device(op, "parts", parts, bias=bias)
    kernel = use_kernel(op, parts)
    if kernel or is_traced(parts):
        found: Tensor = _sum_parts_op(parts, bias, kernel)
        return found
    return sum_parts_ref(parts, bias)
