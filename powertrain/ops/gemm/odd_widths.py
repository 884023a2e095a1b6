"""Products whose width is no multiple of 8 elements of 16 bits, by products that are as wide as the next multiple.

    y = x Wᵀ + b, with zeros for rows and columns that W and b do not have
    backward: dx = dy W, dW = dyᵀ x, db sums dy's rows

cuBLAS copies 16 bytes at a time only where all dims and strides are multiples of them. One H200, 2048 rows of bfloat16,
us, as they are and padded (the copy of W takes 18 us, 32 where its rows grow): N 5461 K 2048 forward 536 and 64, dx 346
and 60, dW 348 and 76; N 2048 K 5461 368 and 61, 373 and 78, 321 and 77; N 10922 K 4096 742 and 233.
"""

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from powertrain.ops.batch_invariance import is_batch_invariant
from powertrain.ops.column_sums import column_sums
from powertrain.ops.shapes import acc_dtype, as_rows, cdiv
from powertrain.runtime.dispatch import (
    Op,
    autocast_dtype,
    cast_by_autocast,
    falls_back,
    in_functorch,
    is_disabled,
    use_kernel,
)
from powertrain.runtime.flops import Shape
from powertrain.runtime.launch import kernel

_OP = "linear_activation"
_HALVES = (torch.float16, torch.bfloat16)
_WHOLE = 8  # elements of 16 bits in 16 bytes
# from so many rows on the copies of the weights cost less than they save. Forward of a gated MLP, one H200, us, as it
# is and padded: 2048 and 5461, 16 rows 86 and 93, 128 128 and 100; 4096 and 10922, 128 rows 177, 366, 512 600, 461
_FEWEST_ROWS_OF_ODD, _FEWEST_ROWS_OF_EVEN = 128, 512


def is_slow(x: Tensor, weight: Tensor) -> bool:
    """Whether x Wᵀ, x [..., K] and W [N, K], is a slow product for its N, in a call where it may be another: nobody
    looks at single products, and torch.compile, which pads them itself, does not trace."""
    if weight.shape[0] % _WHOLE == 0 or not (x.is_cuda or x.is_meta) or (autocast_dtype(x) or x.dtype) not in _HALVES:
        return False
    if (
        is_disabled(_OP)
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or in_functorch()
        # the padded op has no forward-mode derivative
        or forward_ad._current_level >= 0
        or is_batch_invariant()
    ):
        return False
    return are_plain(x, weight)


def are_plain(*tensors: Tensor | None) -> bool:
    return all(t is None or type(t) in (Tensor, Parameter) for t in tensors)


def padded_width(x: Tensor, weight: Tensor) -> int:
    """Columns with which to compute x Wᵀ: N, or more where the copy of W pays."""
    N = weight.shape[0]
    if not is_slow(x, weight) or prod(x.shape[:-1]) < (_FEWEST_ROWS_OF_ODD if N % 2 else _FEWEST_ROWS_OF_EVEN):
        return N
    return -(-N // _WHOLE) * _WHOLE


@kernel(unaligned=("source_ptr", "target_ptr"), down_to=2)
def _resize_kernel(
    source_ptr, target_ptr, M, N, rows, columns, stride_m, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """target [rows, columns], contiguous: the part of source [M, N] that it has, zeros beside and below."""
    col_blocks = tl.cdiv(columns, BLOCK_N)
    row = ((tl.program_id(0) // col_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    col = (tl.program_id(0) % col_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    inside = (row < rows) & (col < columns)
    x = tl.load(source_ptr + row * stride_m + col, mask=inside & (row < M) & (col < N), other=0.0)  # [BLOCK_M, BLOCK_N]
    tl.store(target_ptr + row * columns + col, x, mask=inside)


def _resized(x: Tensor, rows: int, columns: int) -> Tensor:
    """x [M, N] as [rows, columns], contiguous: cut off, or padded with zeros."""
    M, N = x.shape
    if N == columns and rows <= M:
        return x[:rows].contiguous()
    if not use_kernel(_OP, x):
        return F.pad(x, (0, columns - N, 0, rows - M)).contiguous()
    x, target = (x if x.stride(1) == 1 else x.contiguous()), x.new_empty(rows, columns)
    _resize_kernel[(cdiv(rows, 4) * cdiv(columns, 1024),)](
        x, target, M, N, rows, columns, x.stride(0), BLOCK_M=4, BLOCK_N=1024, num_warps=4
    )
    return target


def _outputs(x: Tensor, weight: Tensor, bias: Tensor | None, columns: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], columns))


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, columns: int) -> Tensor:
    if bias is not None:
        bias = F.pad(bias, (0, columns - bias.shape[0]))
    return F.linear(x, _resized(weight, columns, x.shape[-1]), bias)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, _ = inputs
    need_dx, need_dw = ctx.needs_input_grad[:2]
    # the weight itself: padded again in backward, it is not in memory twice until then; x not behind a frozen weight
    ctx.save_for_backward(x if need_dw else None, weight if need_dx else None)
    ctx.shapes = x.shape, weight.shape


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    (shape, (N, K)), rows = ctx.shapes, as_rows(dy).contiguous()
    need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
    dx = (rows @ _resized(weight, rows.shape[1], shape[-1])).view(shape) if need_dx else None
    dw = _resized(rows.T @ as_rows(x), N, K) if need_dw else None
    return dx, dw, _sums(rows)[:N] if need_db else None, None


def _sums(rows: Tensor) -> Tensor:
    if not use_kernel(_OP, rows):
        return rows.sum(0, dtype=acc_dtype(rows.dtype)).to(rows.dtype)
    out = rows.new_empty(rows.shape[1])
    column_sums(rows, out)
    return out


def _flops(x: Shape, columns: int, **_: Any) -> int:
    return 2 * prod(x) * columns


_padded_linear_op = Op(
    "padded_linear(Tensor x, Tensor weight, Tensor? bias, SymInt columns) -> Tensor",
    _forward,
    _outputs,
    backward=_backward,
    setup_context=_setup_context,
    flops=_flops,
)


@falls_back(_OP)
def padded_linear(x: Tensor, weight: Tensor, bias: Tensor | None, columns: int) -> Tensor:
    """x Wᵀ + b with zeros where W [N, K] and b [N] have no columns: x [..., at least K], result [..., columns >= N]."""
    result: Tensor = _padded_linear_op(x, weight, bias, columns)
    return result


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear of tensors whose sizes match. Where it would be slow for this N the product is padded, and the result is
    the first N columns of a wider tensor."""
    N = weight.shape[0]
    if (width := padded_width(x, weight)) == N:
        return F.linear(x, weight, bias)
    x, weight, bias = cast_by_autocast(x, weight, bias)
    return padded_linear(x, weight, bias, width)[..., :N]
