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
from typing import Any

import torch
from torch import Tensor

from powertrain.ops.attention.backends import sdpa
from powertrain.ops.attention.backends.versions import Installed, installed
from powertrain.ops.attention.layouts import from_bhsd, to_bhsd
from powertrain.ops.attention.mask import MaskSpec
from powertrain.ops.attention.problem import AttentionProblem, Layout, Lengths, Reason
from powertrain.ops.attention.triton.backend import (
    _ARGS_SCHEMA,
    _Args,
    _attention_bwd,
    _bwd_outputs,
    _heads,
    bwd_flops,
)
from powertrain.ops.shapes import empty
from powertrain.runtime import checks, recording, tracing
from powertrain.runtime.dispatch import Op
from powertrain.runtime.target import Target

_CUDNN = sdpa.Cudnn()


def why_not_cudnn_backward(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, dlse: Tensor | None, args: _Args
) -> str | None:
    """Why cuDNN's backward does not take this call, or None."""
    if reason := _why_not_kind(args.deterministic, args.layout, args.bias is not None):
        return reason
    if out.dtype is not query.dtype:
        return f"cuDNN's backward takes out in query's dtype {checks.name(query.dtype)}, not {checks.name(out.dtype)}"
    q, k, v = _inputs(query, key, value, args.layout)
    for name, x in {"query": q, "key": k, "value": v, "out": out}.items():
        if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
            return f"{name} is expanded, strides {tuple(x.stride())}"
    if not _is_aligned(to_bhsd(out, args.layout)):
        return f"out's rows must be contiguous and 16-byte aligned, strides are {tuple(out.stride())}"
    return _refusal(_problem_of(q, k, v, dlse, args), installed())


def backward_why_not(problem: AttentionProblem) -> Iterator[Reason]:
    """What of `why_not_cudnn_backward` is known without tensors."""
    if reason := _why_not_kind(problem.deterministic, problem.layout, problem.mask.bias != "none"):
        yield Reason(reason, "use triton")
    else:
        yield from _CUDNN.why_not(replace(problem, mask=replace(problem.mask, sinks=False)))


def _why_not_kind(deterministic: bool, layout: Layout, has_bias: bool) -> str | None:
    if deterministic:
        return "cuDNN's backward adds in no fixed order"
    if layout in ("thd", "bmghk"):
        return f"cuDNN's backward takes bshd, bhsd and sbhd, not {layout}"
    return "cuDNN's backward is handed no bias" if has_bias else None


def _inputs(query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Their views bhsd, without copies of a head that the caller expanded."""
    q, k, v = (to_bhsd(x, layout) for x in (query, key, value))
    kv_heads = _heads(query, key, value, layout).kv
    return q, k[:, :kv_heads], v[:, :kv_heads]


@lru_cache(maxsize=256)
def _refusal(problem: AttentionProblem, software: Installed) -> str | None:
    reason = next(_CUDNN.why_not(problem), None)
    return None if reason is None else reason.text


def _problem_of(q: Tensor, k: Tensor, v: Tensor, dlse: Tensor | None, args: _Args) -> AttentionProblem:
    """What cuDNN is asked: the call without the sinks, which are in its LSE."""
    mask = MaskSpec(
        args.left, args.right, args.bottom_right, args.chunk, args.prefix is not None,
        args.query_documents is not None, alibi=args.slopes is not None, softcap=args.softcap,
    )  # fmt: skip
    return AttentionProblem(
        q.dtype, q.shape[3], v.shape[3], Target.of(q.device), mask, args.layout, q.shape[1], k.shape[1],
        Lengths.of(q.shape[2], k.shape[2], batch=q.shape[0], elements=q.numel() + k.numel() + v.numel()),
        has_key_lengths=args.query_used is not None or args.key_used is not None, dropout=args.seed is not None,
        dropout_seeded=args.seed is not None, needs_lse_grad=dlse is not None, aligned=all(map(_is_aligned, (q, k, v))),
    )  # fmt: skip


def _is_aligned(x: Tensor) -> bool:
    elements = 16 // x.element_size()
    fits = x.stride(-1) == 1 and not any(stride % elements for stride in x.stride()[:-1])
    return fits and (x.is_meta or x.data_ptr() % 16 == 0)


def cudnn_attention_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    need: list[bool],
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, an empty dbias) with the arguments and results of triton_flash._attention_bwd, which serves where
    cuDNN does not."""
    args = _Args(*rest)
    if reason := why_not_cudnn_backward(query, key, value, out, dlse, args):
        if tracing.first(("attention's backward", reason)):
            text = f"attention's backward: triton for cudnn: {reason}"
            tracing.event("dispatch", text, op="attention", backend="triton")
        return _attention_bwd(dout, dlse, query, key, value, out, lse, need, *rest)
    if query.is_meta or recording.state.recording is not None:  # nothing of ours is launched
        return _bwd_outputs(dout, dlse, query, key, value, out, lse, need, *rest)
    q, k, v = _inputs(query, key, value, args.layout)
    o, do = to_bhsd(out, args.layout), to_bhsd(_dense(dout), args.layout)
    nothing = torch.empty(0, dtype=torch.int64, device=query.device)
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, o, lse.contiguous()[..., None], nothing, nothing, None, None, None, q.shape[2], k.shape[2], 0.0,
        args.right == 0, scale=args.scale,
    )  # fmt: skip
    found = (_with_strides(grad, x) for grad, x in zip(grads, (q, k, v), strict=True))
    dq, dk, dv = (
        from_bhsd(x, args.layout) if needed else empty(query) for x, needed in zip(found, need[:3], strict=True)
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


backward_op = Op(
    "attention_cudnn_bwd(Tensor dout, Tensor? dlse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    f"bool[] need, {_ARGS_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
    cudnn_attention_bwd,
    _bwd_outputs,
    flops=bwd_flops,
)
