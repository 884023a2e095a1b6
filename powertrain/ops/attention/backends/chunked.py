"""Attention in plain PyTorch by chunks of queries: O(sequence) memory, any device, any mask, forward and backward.

Forward computes `attention_ref` of some queries at a time against all keys, and backward computes each chunk again and
differentiates it. Gradients are summed in the accumulation dtype. Saved: inputs only. Memory beyond inputs and results:
about 6 * CHUNK_BYTES of scores, and the gradients in float32.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from powertrain.ops.attention.backends.reference import assemble, attention_ref, sequences
from powertrain.ops.attention.layouts import from_lse_order, to_lse_order
from powertrain.ops.attention.mask import MaskSpec, MaskTensors
from powertrain.ops.attention.problem import AttentionCall, AttentionProblem, Reason, Varlen, use
from powertrain.ops.shapes import acc_dtype
from powertrain.runtime.dispatch import without_autocast
from powertrain.runtime.nodes import once_differentiable

# rows of a chunk are chosen by this bound, so memory does not grow with the sequence
CHUNK_BYTES = 32 << 20  # of float32 scores


def why_not(problem: AttentionProblem) -> Iterator[Reason]:
    """Every need that the problem does not meet."""
    # torch.compile would specialize on every length, or break the graph
    if problem.compiling:
        changes = (use("cpu"), "move the tensors to a GPU") if problem.target is None else (use("triton"),)
        yield Reason("chunked reads lengths on the host, which torch.compile cannot trace", *changes)


def run(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """(out, lse), differentiable."""
    parts = []
    for q, k, v, tensors, first in sequences(call):
        options = (call.mask, call.scale, call.dropout_p, call.dropout_seed, first)
        # inputs of the autograd function are the tensors that may need gradients; all else is an option
        parts.append(_Chunked.apply(q, k, v, tensors.bias, tensors.sinks, tensors, *options))
    return assemble(call, parts)


def backward(
    call: AttentionCall, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) where `out` and `lse` may be those of a larger attention of which these keys are a part: that is
    out = sum_n w_n out_n with w_n = exp(lse_n - lse), so this part's results n have the gradients

        dout_n = w_n dout        dlse_n = w_n (dlse + dout . (out_n - out))
    """
    given = (call.query, call.key, call.value, *call.tensors, *call.varlen[:4], out, lse)
    if torch.is_inference_mode_enabled() or any(x is not None and x.is_inference() for x in given):
        # nothing is recorded in inference mode, nor of tensors made there
        with torch.inference_mode(False):
            again = replace(
                call, query=_recordable(call.query), key=_recordable(call.key), value=_recordable(call.value),
                tensors=MaskTensors._make(map(_recordable, call.tensors)),
                varlen=Varlen._make(map(_recordable, call.varlen)),
            )  # fmt: skip
            return backward(again, *map(_recordable, (dout, out, lse, dlse)))
    inputs = (call.query, call.key, call.value)
    dtype = acc_dtype(call.query.dtype)
    with torch.enable_grad():
        # leaves in the accumulation dtype: summing shares of a ring in 16 bits would lose the small ones
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        query, key, value = leaves
        own, own_lse = run(replace(call, query=query, key=key, value=value))
    # out_n - out of the formula: how far this part's result is from the merged one
    dout, apart = dout.to(dtype), own.detach() - out
    grad = to_lse_order(dout * apart, call.layout).sum(-1) + (0.0 if dlse is None else dlse)
    # exp(-inf - -inf) is NaN: a row that sees no key of this part has weight 0
    unseen = own_lse == -torch.inf
    weight = torch.exp(own_lse - lse).masked_fill(unseen, 0.0).detach()
    grad = (weight * grad).masked_fill(unseen, 0.0)
    # one weight per row, broadcast over the head dim
    dout = from_lse_order(weight, call.layout)[..., None] * dout
    grads = torch.autograd.grad([own, own_lse], leaves, [dout, grad])
    dq, dk, dv = (g.to(x.dtype) for g, x in zip(grads, inputs, strict=True))
    return dq, dk, dv


def _recordable(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) and x.is_inference() else x


def _chunks(q: Tensor, k: Tensor) -> Iterator[tuple[int, int]]:
    # scores of one chunk are batch * heads * rows * keys float32
    rows = max(1, CHUNK_BYTES // (4 * max(1, q.shape[0] * q.shape[2] * k.shape[1])))
    return ((first, min(first + rows, q.shape[1])) for first in range(0, q.shape[1], rows))


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        tensors: MaskTensors,
        *options: Any,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v, *tensors, options[3])
        ctx.options = options
        # an unused result gives None in backward instead of a tensor of zeros the size of out
        ctx.set_materialize_grads(False)
        out = q.new_empty((*q.shape[:3], v.shape[-1]))
        lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=acc_dtype(q.dtype), device=q.device)
        for rows in _chunks(q, k):
            # written into place: no list of chunks, no concatenation
            out[:, slice(*rows)], lse[:, :, slice(*rows)] = _chunk(q, k, v, tensors, rows, *options)
        return out, lse

    @staticmethod
    # the backward recomputes with grad mode on, and a graph through that would be wrong rather than missing
    @once_differentiable("attention")
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        given = dlse if dout is None else dout
        if given is None:
            # a node behind the result gave no gradient at all
            return (None,) * len(ctx.needs_input_grad)
        # else a backward inside autocast would round its products to 16 bits
        with without_autocast(given.device):
            return _Chunked._gradients(ctx, dout, dlse)

    @staticmethod
    def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, *rest, seed = ctx.saved_tensors
        tensors = MaskTensors(*rest)
        mask, scale, dropout_p, _, first = ctx.options
        need = ctx.needs_input_grad[:5]
        dtype = acc_dtype(q.dtype)
        leaves = [
            # a boolean bias has no gradient and cannot require one
            x if x is None or not x.is_floating_point() else x.detach().to(dtype).requires_grad_(needed)
            for x, needed in zip((q, k, v, tensors.bias, tensors.sinks), need, strict=True)
        ]
        again = tensors._replace(bias=leaves[3], sinks=leaves[4])
        # only these get sums: zeros of an unneeded key gradient would cost its whole size
        wanted = {n: leaf for n, leaf in enumerate(leaves) if leaf is not None and need[n]}
        totals = {n: torch.zeros_like(leaf) for n, leaf in wanted.items()}
        for rows in _chunks(q, k):
            # autograd runs backward without grad mode
            with torch.enable_grad():
                out, lse = _chunk(*leaves[:3], again, rows, mask, scale, dropout_p, seed, first)  # type: ignore[call-arg]
            outs, grads = [], []
            for result, grad, dim in ((out, dout, 1), (lse, dlse, 2)):
                # the LSE does not depend on value
                if grad is not None and result.requires_grad:
                    outs.append(result)
                    grads.append(grad.narrow(dim, rows[0], rows[1] - rows[0]).to(result.dtype))
            parts = torch.autograd.grad(outs, list(wanted.values()), grads, allow_unused=True) if outs else ()
            for total, grad in zip(totals.values(), parts, strict=bool(outs)):
                if grad is not None:
                    total += grad
        inputs = (q, k, v, tensors.bias, tensors.sinks)
        results = (totals[n].to(x.dtype) if n in totals and x is not None else None for n, x in enumerate(inputs))
        # one None for `tensors` and one per option, as autograd wants a result for every input
        return (*results, None, *(None for _ in ctx.options))


def _chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: MaskTensors,
    rows: tuple[int, int],
    mask: MaskSpec,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    first: int,
) -> tuple[Tensor, Tensor]:
    """Queries rows[0] to rows[1] against all keys."""
    # dropout counts by the batch entry of the whole call, so that chunks draw the bits that kernels draw
    batch = torch.arange(first, first + q.shape[0], device=q.device)
    return attention_ref(
        q[:, slice(*rows)], k, v, mask=mask, tensors=tensors, scale=scale, dropout_p=dropout_p, dropout_seed=seed,
        batch=batch, rows=rows, num_queries=q.shape[1],
    )  # fmt: skip
