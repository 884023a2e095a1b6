"""cuDNN's backward behind a forward that was not cuDNN's: it needs out and LSE, whoever computed them.

With p_ij = exp(s_ij - lse_i) and delta_i = o_i . do_i, gradients of q, k and v depend on the forward through o and lse
alone. So cuDNN differentiates the Hopper forward where it was measured faster than ours (backend_order.py), and a part
of the keys, whose o and lse are those of all (partial_backward.py): sinks, and keys elsewhere, are in the LSE.

Not deterministic. Memory beyond the gradients: cuDNN's workspace, float32 sums of dq among it.
Source: PyTorch's aten/src/ATen/native/cudnn/MHA.cpp for the arguments: LSE in nats, float32 [b, h, s, 1].
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from powertrain.ops.attention import autograd
from powertrain.ops.attention.backends import sdpa
from powertrain.ops.attention.backends.versions import Installed, installed
from powertrain.ops.attention.layouts import from_bhsd, to_bhsd
from powertrain.ops.attention.mask import MaskSpec
from powertrain.ops.attention.operands import BackwardCall, Operands, is_expanded
from powertrain.ops.attention.problem import AttentionProblem, Layout, Lengths, Reason, use
from powertrain.ops.attention.triton.backward import attention_backward
from powertrain.ops.shapes import empty
from powertrain.runtime import checks, recording, tracing
from powertrain.runtime.target import Target

_CUDNN = sdpa.Cudnn()


def why_not_cudnn_backward(call: BackwardCall, operands: Operands) -> str | None:
    """Why cuDNN's backward does not take this call, or None."""
    query, out, args = call.query, call.out, call.args
    if reason := _why_not_kind(args.deterministic, args.layout, args.bias is not None):
        return reason
    if out.dtype is not query.dtype:
        return f"cuDNN's backward takes out in query's dtype {checks.name(query.dtype)}, not {checks.name(out.dtype)}"
    q, k, v = _inputs(operands)
    for name, x in (("query", q), ("key", k), ("value", v), ("out", out)):
        # cuDNN's graph is built of strides and does not take 0
        if is_expanded(x):
            return f"{name} is expanded, strides {tuple(x.stride())}"
    if not _is_aligned(to_bhsd(out, args.layout)):
        return f"out's rows must be contiguous and 16-byte aligned, strides are {tuple(out.stride())}"
    return _refusal(_problem_of(q, k, v, call), installed())


def backward_why_not(problem: AttentionProblem) -> Iterator[Reason]:
    """The part of `why_not_cudnn_backward` that needs no tensors."""
    if reason := _why_not_kind(problem.deterministic, problem.layout, problem.mask.bias != "none"):
        yield Reason(reason, use("triton"))
    else:
        # a sink changes only the LSE, which is an input here
        yield from _CUDNN.why_not(replace(problem, mask=replace(problem.mask, sinks=False)))


def _why_not_kind(deterministic: bool, layout: Layout, has_bias: bool) -> str | None:
    if deterministic:
        return "cuDNN's backward adds in no fixed order"
    if layout in ("thd", "bmghk"):
        return f"cuDNN's backward takes bshd, bhsd and sbhd, not {layout}"
    return "cuDNN's backward is handed no bias" if has_bias else None


def _inputs(operands: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Views bhsd of query, key and value, without copies of a head that the caller expanded."""
    q, k, v = (to_bhsd(operand.tensor, operands.args.layout) for operand in (operands.q, operands.k, operands.v))
    kv_heads = operands.heads.kv
    # expanded heads are one head in memory
    return q, k[:, :kv_heads], v[:, :kv_heads]


@lru_cache(maxsize=256)
def _refusal(problem: AttentionProblem, software: Installed) -> str | None:
    reason = next(_CUDNN.why_not(problem), None)
    return None if reason is None else reason.text


def _problem_of(q: Tensor, k: Tensor, v: Tensor, call: BackwardCall) -> AttentionProblem:
    """The call without the sinks, which are in its LSE."""
    args = call.args
    mask = MaskSpec(
        args.left, args.right, args.bottom_right, args.chunk, args.prefix is not None,
        args.query_documents is not None, alibi=args.slopes is not None, softcap=args.softcap,
    )  # fmt: skip
    return AttentionProblem(
        q.dtype, q.shape[3], v.shape[3], Target.of(q.device), mask, args.layout, q.shape[1], k.shape[1],
        Lengths.of(q.shape[2], k.shape[2], batch=q.shape[0], elements=q.numel() + k.numel() + v.numel()),
        has_key_lengths=args.query_used is not None or args.key_used is not None, dropout=args.seed is not None,
        dropout_seeded=args.seed is not None, needs_lse_grad=call.dlse is not None,
        aligned=all(map(_is_aligned, (q, k, v))),
    )  # fmt: skip


def _is_aligned(x: Tensor) -> bool:
    elements = 16 // x.element_size()
    fits = x.stride(-1) == 1 and not any(stride % elements for stride in x.stride()[:-1])
    return fits and (x.is_meta or x.data_ptr() % 16 == 0)


def cudnn_attention_backward(call: BackwardCall, operands: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, an empty dbias). The universal kernels serve where cuDNN does not take the tensors."""
    query, args = call.query, call.args
    if reason := why_not_cudnn_backward(call, operands):
        # once per reason and not per step
        if tracing.first(("attention's backward", reason)):
            text = f"attention's backward: triton for cudnn: {reason}"
            tracing.event("dispatch", text, op="attention", backend="triton")
        return attention_backward(call, operands)
    # nothing of ours is launched
    # `record` and meta tensors want launches of ours only; cuDNN has none
    if query.is_meta or recording.state.recording is not None:
        return call.outputs()
    q, k, v = _inputs(operands)
    o, do = to_bhsd(call.out, args.layout), to_bhsd(_dense(call.dout), args.layout)
    nothing = torch.empty(0, dtype=torch.int64, device=query.device)
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        # the two int64 tensors are Philox seed and offset, unused without dropout
        do, q, k, v, o, call.lse.contiguous()[..., None], nothing, nothing, None, None, None, q.shape[2], k.shape[2],
        0.0,
        args.right == 0, scale=args.scale,
    )  # fmt: skip
    dq, dk, dv = (
        from_bhsd(_with_strides(grad, x), args.layout) if need else empty(query)
        for grad, x, need in zip(grads, (q, k, v), call.need[:3], strict=True)
    )
    return dq, dk, dv, empty(query)


def _dense(dout: Tensor) -> Tensor:
    """A gradient as cuDNN reads it: sums and means hand over expanded ones."""
    return dout if _is_aligned(dout) and 0 not in dout.stride() else dout.clone(memory_format=torch.contiguous_format)


def _with_strides(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient in the strides of `empty_like(x)`, which torch.compile was told of."""
    if grad.stride() == x.stride():
        return grad
    like = torch.empty_like(x)
    return grad if grad.stride() == like.stride() else like.copy_(grad)


backward_op = autograd.backward_op("attention_cudnn_bwd", cudnn_attention_backward)
