"""The ops of our attention kernels: schemas, tensors saved for backward, and the gradients of a call.

Saved for backward: the inputs, out, and lse (float32). A backward needs nothing else from the forward, so any backward
op can follow any of these forwards.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from powertrain.ops.attention.operands import (
    NUM_TENSORS,
    SCHEMA,
    BackwardCall,
    OpArguments,
    Operands,
    expanded_dim,
    forward_outputs,
    heads_of,
)
from powertrain.ops.attention.problem import AttentionCall
from powertrain.ops.attention.triton.backward_sinks import sinks_grad
from powertrain.ops.shapes import wanted
from powertrain.runtime.dispatch import Op
from powertrain.runtime.flops import Shape

Forward = Callable[[Operands], tuple[Tensor, Tensor]]
Backward = Callable[[BackwardCall, Operands], tuple[Tensor, Tensor, Tensor, Tensor]]


def forward_op(name: str, forward: Forward, backwards: Mapping[str, Op]) -> Op:
    """An op (query, key, value, *OpArguments, backward) -> (out, lse), differentiated by the backward of that name."""

    def run(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        # the last argument is the backward's name, which only setup_context reads
        return forward(Operands.of(query, key, value, OpArguments(*rest[:-1])))

    def outputs(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        # runs under FakeTensorMode too: shapes only, no data
        return forward_outputs(query, value, OpArguments(*rest[:-1]).layout)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *rest, backward = inputs[3:]
        # out and LSE are saved instead of the probabilities: O(sequence) memory, recomputed in backward
        ctx.save_for_backward(*inputs[:3], *output, *rest[:NUM_TENSORS])
        ctx.options = rest[NUM_TENSORS:]
        # looked up in forward: a `with attention_backend` block may have ended when backward runs
        ctx.backward_op = backwards[backward]
        ctx.set_materialize_grads(False)

    return Op(
        f"{name}(Tensor query, Tensor key, Tensor value, {SCHEMA}, str backward) -> (Tensor, Tensor)",
        run,
        outputs,
        backward=_backward,
        setup_context=setup_context,
        usual_gradients=1,  # not the LSE's
        flops=forward_flops,
    )


def backward_op(name: str, backward: Backward) -> Op:
    """An op (*BackwardCall) -> (dq, dk, dv, dbias)."""

    def run(*flat: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        call = BackwardCall.of(*flat)
        return backward(call, call.operands())

    return Op(
        f"{name}(Tensor dout, Tensor? dlse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
        f"bool[] need, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
        run,
        # the fake implementation: results of the real shapes and strides
        lambda *flat: BackwardCall.of(*flat).outputs(),
        flops=backward_flops,
    )


def apply(op: Op, call: AttentionCall, backward: str) -> tuple[Tensor, Tensor]:
    """(out, lse) by a forward op, differentiable by the backward of that name."""
    result: tuple[Tensor, Tensor] = op(call.query, call.key, call.value, *OpArguments.of(call), backward)
    return result


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, out, lse, *tensors = ctx.saved_tensors
    # query, key, value, bias, slopes, sinks, ...
    need = ctx.needs_input_grad
    results: list[Tensor | None] = [None] * len(need)
    # both None: the results were not used, and all gradients are None
    if dout is not None or dlse is not None:
        dout = torch.zeros_like(out) if dout is None else dout
        args = OpArguments(*tensors, *ctx.options)
        call = BackwardCall(dout, dlse, query, key, value, out, lse, list(need[:4]), args)
        results[:4] = gradients(call, ctx.backward_op)
        if need[5]:
            results[5] = sinks_grad(call)
    return tuple(results)


def gradients(call: BackwardCall, op: Op) -> list[Tensor | None]:
    """Gradients of query, key, value and bias by a backward op; None where not needed."""
    grads = [wanted(grad, need) for grad, need in zip(op(*call.flat()), call.need, strict=True)]
    layout = call.args.layout
    heads = heads_of(call.query, call.key, call.value, layout)
    # query is never expanded by heads_of, so only key and value can be
    for index, x in ((1, call.key), (2, call.value)):
        dim, grad = expanded_dim(x, layout, heads), grads[index]
        if grad is not None and dim is not None:
            # an equal share to each copy: expand's own backward adds them up again
            grads[index] = (grad / x.shape[dim]).expand(x.shape)
    return grads


def _pairs(query: Shape, key: Shape, starts: Shape | None, layout: str) -> int:
    """(query, key) pairs of all heads, as if no mask hid any."""
    if layout == "thd":
        # lengths are on the device: all sequences are counted as equally long
        sequences = starts[0] - 1 if starts else 1
        return query[0] * key[0] // max(sequences, 1) * query[1]
    if layout == "bmghk":
        return query[0] * query[1] * query[2] * query[3] * key[1]
    sizes = dict(zip(layout, query, strict=False))
    return sizes["b"] * sizes["h"] * sizes["s"] * dict(zip(layout, key, strict=False))["s"]


def forward_flops(query: Shape, key: Shape, value: Shape, query_starts: Shape | None, layout: str, **_: Any) -> int:
    # as PyTorch's formula for SDPA, masks do not reduce the count
    return 2 * _pairs(query, key, query_starts, layout) * (query[-1] + value[-1])


def backward_flops(query: Shape, key: Shape, value: Shape, query_starts: Shape | None, layout: str, **_: Any) -> int:
    """Five products: the scores again, dp, dv, dq, dk."""
    return 2 * _pairs(query, key, query_starts, layout) * (3 * query[-1] + 2 * value[-1])
