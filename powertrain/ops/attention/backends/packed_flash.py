"""PyTorch's flash-2 over packed sequences: zeros outside of the sequences, and one autograd node of ours, so that
repeated calls are replayed with their backward (runtime/replay.py).

Its kernels write nothing before cu_seqlens[0] or beyond cu_seqlens[-1] (zero_padding.py). Saved for backward: the
inputs, out, LSE, and the state of the random generator that its dropout drew.
"""

from typing import Any

import torch
from torch import Tensor

from powertrain.ops.attention.autograd import backward_flops, forward_flops
from powertrain.ops.attention.backends.zero_padding import empty_tail, zero_tail
from powertrain.ops.attention.problem import AttentionCall
from powertrain.ops.shapes import wanted
from powertrain.runtime.dispatch import Op

_Gradients = tuple[Tensor, Tensor, Tensor]


def attend(call: AttentionCall, causal: bool, window: list[int]) -> tuple[Tensor, Tensor | None]:
    """(out, lse if the call wants it). `window`: its two sides, or nothing."""
    starts = call.varlen.query_starts
    assert starts is not None
    longest = call.varlen.max_queries or call.query.shape[0]
    out, lse, *_ = _forward_op(
        call.query, call.key, call.value, starts, longest, causal, window, call.dropout_p, call.scale
    )
    return out, empty_tail(lse, starts) if call.return_lse else None


def _sides(window: list[int]) -> dict[str, int]:
    return dict(zip(("window_size_left", "window_size_right"), window, strict=False))


def _forward(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, causal: bool, window: list[int],
    dropout_p: float, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    out, lse, seed, offset, _ = torch.ops.aten._flash_attention_forward(
        query, key, value, starts, starts, longest, longest, dropout_p, causal, False, scale=scale,
        **_sides(window),
    )  # fmt: skip
    return zero_tail(out, starts, ahead=True), lse, seed, offset


def _backward(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, starts: Tensor, seed: Tensor,
    offset: Tensor, longest: int, causal: bool, window: list[int], dropout_p: float, scale: float,
) -> _Gradients:  # fmt: skip
    grads = torch.ops.aten._flash_attention_backward(
        dout, query, key, value, out, lse, starts, starts, longest, longest, dropout_p, causal, seed, offset,
        scale=scale, **_sides(window),
    )  # fmt: skip
    # `zero_tail` takes rows one behind the other
    dq, dk, dv = (zero_tail(grad.contiguous(), starts, ahead=True) for grad in grads)
    return dq, dk, dv


def _outputs(query: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, heads, _d = query.shape
    state = query.new_empty(2, dtype=torch.uint64), query.new_empty((), dtype=torch.uint64)
    return query.new_empty(query.shape), query.new_empty((heads, tokens), dtype=torch.float32), *state


def _gradients(dout: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> _Gradients:
    dq, dk, dv = (x.new_empty(x.shape) for x in (query, key, value))
    return dq, dk, dv


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, starts, *ctx.options = inputs
    out, lse, seed, offset = output
    ctx.save_for_backward(query, key, value, out, lse, starts, seed, offset)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    need = ctx.needs_input_grad
    grads: tuple[Tensor | None, ...] = (None,) * 3
    if dout is not None:
        results = _backward_op(dout, *ctx.saved_tensors, *ctx.options)
        grads = tuple(wanted(grad, needed) for grad, needed in zip(results, need, strict=False))
    return (*grads, *[None] * (len(need) - 3))


def _forward_flops(query: Any, key: Any, value: Any, starts: Any, **_: Any) -> int:
    return forward_flops(query, key, value, starts, "thd")


def _backward_flops(query: Any, key: Any, value: Any, starts: Any, **_: Any) -> int:
    return backward_flops(query, key, value, starts, "thd")


_OPTIONS = "SymInt longest, bool causal, int[] window, float dropout_p, float scale"
_forward_op = Op(
    f"packed_flash_fwd(Tensor query, Tensor key, Tensor value, Tensor starts, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _outputs,
    backward=_differentiate,
    setup_context=_setup_context,
    num_results=2,
    usual_gradients=1,
    flops=_forward_flops,
)
_backward_op = Op(
    "packed_flash_bwd(Tensor dout, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor starts, "
    f"Tensor seed, Tensor offset, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _backward,
    _gradients,
    flops=_backward_flops,
)
