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
from torch import Tensor
from torch.nn import Parameter

from powertrain.ops.activations import activation, gated_activation
from powertrain.ops.batch_invariance import is_batch_invariant
from powertrain.ops.shapes import acc_dtype, as_rows
from powertrain.runtime.dispatch import Op, autocast_dtype, cast_by_autocast, in_functorch
from powertrain.runtime.flops import Shape

_HALVES = (torch.float16, torch.bfloat16)
_WHOLE = 8  # elements of 16 bits in 16 bytes
# from so many rows on the copies of the weights cost less than they save. Forward of a gated MLP, one H200, us, as it
# is and padded: 2048 and 5461, 16 rows 86 and 93, 128 128 and 100; 4096 and 10922, 128 rows 177 and 366, 512 600 and 461
_FEWEST_ROWS_OF_ODD, _FEWEST_ROWS_OF_EVEN = 128, 512


def is_slow(x: Tensor, weight: Tensor) -> bool:
    """Whether x Wᵀ, x [..., K] and W [N, K], is a slow product for its N, in a call where it may be another: nobody
    looks at single products, and torch.compile, which pads them itself, does not trace."""
    if weight.shape[0] % _WHOLE == 0 or not (x.is_cuda or x.is_meta) or (autocast_dtype(x) or x.dtype) not in _HALVES:
        return False
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or in_functorch() or is_batch_invariant():
        return False
    return all(type(t) in (Tensor, Parameter) for t in (x, weight))


def padded_width(x: Tensor, weight: Tensor) -> int:
    """Columns with which to compute x Wᵀ: N, or more where the copy of W pays."""
    N = weight.shape[0]
    if not is_slow(x, weight) or prod(x.shape[:-1]) < (_FEWEST_ROWS_OF_ODD if N % 2 else _FEWEST_ROWS_OF_EVEN):
        return N
    return -(-N // _WHOLE) * _WHOLE


def has_odd_width(x: Tensor, weight: Tensor) -> bool:
    """Whether `padded_mlp` is the faster way."""
    return padded_width(x, weight) != weight.shape[0]


def _padded(weight: Tensor, columns: int, K: int) -> Tensor:
    return F.pad(weight, (0, K - weight.shape[1], 0, columns - weight.shape[0]))


def _outputs(x: Tensor, weight: Tensor, bias: Tensor | None, columns: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], columns))


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, columns: int) -> Tensor:
    if bias is not None:
        bias = F.pad(bias, (0, columns - bias.shape[0]))
    return F.linear(x, _padded(weight, columns, x.shape[-1]), bias)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    # the weight itself: padded again in backward, it is not in memory twice until then
    x, weight, _, _ = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    (N, K), rows = weight.shape, as_rows(dy).contiguous()
    need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
    dx = (rows @ _padded(weight, rows.shape[1], x.shape[-1])).view(x.shape) if need_dx else None
    dw = (rows.T @ as_rows(x))[:N, :K].contiguous() if need_dw else None
    db = rows[:, :N].sum(0, dtype=acc_dtype(dy.dtype)).to(dy.dtype) if need_db else None
    return dx, dw, db, None


def _flops(x: Shape, columns: int, **_: Any) -> int:
    return 2 * prod(x) * columns


_padded_linear_op = Op(
    "padded_linear(Tensor x, Tensor weight, Tensor? bias, SymInt columns) -> Tensor",
    _forward,
    _outputs,
    backward=_backward,
    setup_context=_setup_context,
    replays=False,
    flops=_flops,
)


def padded_linear(x: Tensor, weight: Tensor, bias: Tensor | None, columns: int) -> Tensor:
    """x Wᵀ + b with zeros where W [N, K] and b [N] have no columns: x [..., at least K], result [..., columns >= N]."""
    result: Tensor = _padded_linear_op(x, weight, bias, columns)
    return result


def padded_mlp(
    x: Tensor,
    weight: Tensor,
    kind: Any,
    down_weight: Tensor,
    *,
    bias: Tensor | None = None,
    up_weight: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """`linear_activation` and the linear layer behind it, with inner features of `padded_width`.

    Columns behind the last feature are act(0), times zeros of the padded down_weight.
    """
    width = padded_width(x, weight)
    x, weight, bias, up_weight, up_bias, down_weight, down_bias = cast_by_autocast(
        x, weight, bias, up_weight, up_bias, down_weight, down_bias
    )
    inner = padded_linear(x, weight, bias, width)
    if up_weight is None:
        inner = activation(inner, kind)
    else:
        inner = gated_activation(inner, kind, up=padded_linear(x, up_weight, up_bias, width))
    return padded_linear(inner, down_weight, down_bias, down_weight.shape[0])
