"""The backward for a subset of the keys, from the output and LSE over all keys.

With p_ij = exp(s_ij - lse_i) and delta_i = o_i . do_i - dlse_i, the gradients of a key need that key's scores, and from
all other keys only `out` and `lse`. So in ring attention each rank computes the gradients of the keys that it holds.
"""

from typing import Any

import torch
from torch import Tensor

from powertrain.ops.attention import api, autograd, select
from powertrain.ops.attention.arguments import (
    Alignment,
    CallOptions,
    MaskArguments,
    PackedSequences,
    dense_call,
    packed_call,
    with_positive_scale,
)
from powertrain.ops.attention.backend_preferences import preference_or_none
from powertrain.ops.attention.backend_registry import backward_op, loaded_backwards
from powertrain.ops.attention.backends import chunked
from powertrain.ops.attention.layouts import to_lse_order
from powertrain.ops.attention.operands import BackwardCall, OpArguments
from powertrain.ops.attention.problem import LAYOUTS, AttentionCall, Layout
from powertrain.runtime import checks
from powertrain.runtime.dispatch import Op, falls_back, in_functorch, use_kernel, without_autocast


@falls_back("attention", preference_or_none)
def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    grad_lse: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_k_padded: Tensor | None = None,
    attn_bias: Tensor | None = None,
    is_causal: bool = False,
    causal_align: Alignment = "bottom_right",
    window_size: tuple[int, int] = (-1, -1),
    chunk_size: int = 0,
    prefix_lengths: Tensor | None = None,
    document_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    layout: Layout = "bshd",
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of an attention to these keys, whose `out` and `lse` may be those of a larger attention.

    Shapes: those of `attention`, or of `varlen_attention` with layout="thd"; Dv is the head dim of value.
        grad_out  as out, dtype of query
        query, key, value, masks, scale, dropout_p, dropout_seed: those of the forward over these keys
        out       query's shape with Dv last, any floating dtype: the result over all keys
        lse       its log-sum-exp in nats, float32 (or float64) [B, H, Sq], thd [H, Tq], bmghk [B, G, H, Sq]
        grad_lse  gradient of that LSE, float32, the same shape
        cu_seqlens_q to cu_seqlens_k_padded   thd only, as in varlen_attention; cu_seqlens_k is cu_seqlens_q unless
                  given
        seqused_q, seqused_k, attn_bias, document_ids   the other layouts only
    Returns the gradients of query, key and value, in their shapes and dtypes. dq is this part's share: sum the shares
        of all parts, in float32 if they are many. Along a dim of key or value that is expanded, gradients sum to the
        right one; how they are spread over the copies is not said. A sink is in lse already; its gradient and the
        bias's are not computed here (autograd through `attention(..., return_lse=True)` and `merge_attentions` gives
        all).
    Numerics: products accumulate in float32. On a GPU by cuDNN, the Hopper or the universal kernels, whichever comes
        first in the selector's order and takes the call; deterministic under torch.use_deterministic_algorithms, else
        dq's last bits may differ. On the CPU in float32 (float64 for float64), by chunks, deterministic.
    Memory beyond the results: 8 bytes per query and head, and but for the universal kernels float32 sums of dq; on the
        CPU O(sequence), float32 copies among it.
    Raises ValueError with the argument's name, requirement and value.
    Source: Liu et al., arXiv:2310.01889 (ring attention); Dao, arXiv:2307.08691 (backward from out and LSE).

    Backward of a ring over `parts` of the keys, forward being merge_attentions over attention(..., return_lse=True):

        dq = torch.zeros_like(q, dtype=torch.float32)
        for n, (k, v) in enumerate(parts):
            share, dk[n], dv[n] = attention_backward(do, q, k, v, out, lse)
            dq += share
    """
    # the op's name begins every error message, as in the other public functions
    op = "attention_backward"
    checks.one_of(op, "layout", layout, LAYOUTS)
    # a bias's gradient sums over all parts, which one part cannot know
    if attn_bias is not None and attn_bias.requires_grad:
        checks.fail(
            op, "attn_bias", "not require a gradient (it gets none here: pass attn_bias.detach())", "one that does"
        )
    # the keep mask is drawn again from the seed, so without it the gradients would be those of other dropped elements
    if dropout_p > 0 and dropout_seed is None:
        checks.fail(op, "dropout_seed", "be that of the forward, where dropout_p is not 0", None)
    mask = MaskArguments(
        attn_bias, is_causal, causal_align, window_size, chunk_size, prefix_lengths, document_ids, alibi_slopes, softcap
    )
    options = CallOptions(scale, dropout_p, dropout_seed, grad_lse is not None)
    if layout == "thd":
        # arguments of the other layouts are refused rather than ignored
        _refuse(op, "thd", attn_bias=attn_bias, document_ids=document_ids)
        if cu_seqlens_q is None:
            checks.fail(op, "cu_seqlens_q", "be given for thd", None)
        sequences = PackedSequences(
            cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded, cu_seqlens_k_padded, seqused_q, seqused_k
        )
        call = packed_call(op, query, key, value, sequences, mask, options)
    else:
        _refuse(
            op, layout, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            cu_seqlens_q_padded=cu_seqlens_q_padded, cu_seqlens_k_padded=cu_seqlens_k_padded,
        )  # fmt: skip
        call = dense_call(op, query, key, value, layout, (seqused_q, seqused_k), mask, options)
    _check_results(op, call, grad_out, out, lse, grad_lse)
    computes = use_kernel("attention", query) and query.dtype is not torch.float64  # of which no device has kernels
    _refuse_transforms(computes, grad_out, query, key, value, out, lse, grad_lse)
    # the op is a gradient already; double backward is not supported
    with torch.no_grad():
        if not computes:
            with without_autocast(query.device):
                return chunked.backward(call, grad_out, out, lse, grad_lse)
        call, factor = with_positive_scale(call)
        part = BackwardCall(
            # the kernels read rows by a unit stride of the head dim; grad_out of `out.sum()` is expanded and has stride
            # 0
            _unit(grad_out), None if grad_lse is None else grad_lse.contiguous(), call.query, key, value, _unit(out),
            # the bias's gradient is not wanted: it was refused above
            lse.contiguous(), [True, True, True, False], OpArguments.of(call),
        )  # fmt: skip
        dq, dk, dv, _ = autograd.gradients(part, _differentiation(call, grad_lse is not None))
    assert dq is not None and dk is not None and dv is not None
    return (dq if factor == 1 else dq * factor), dk, dv


def _refuse_transforms(has_kernel: bool, *tensors: Tensor | None) -> None:
    """Refuse what has no gradient here, and what differentiates inside, as plain PyTorch does."""
    op, instead = "attention_backward", "differentiate `attention(..., return_lse=True)` and `merge_attentions`"
    if in_functorch():
        tracks = torch._C._functorch.is_gradtrackingtensor
        if not has_kernel or any(x is not None and tracks(x) for x in tensors):
            raise NotImplementedError(f"{op}: torch.func.grad, vmap and their kin are not implemented; {instead}")
    elif torch.compiler.is_compiling() and not has_kernel:
        # the error of fullgraph=True; without it the rest of the function runs eagerly
        torch._dynamo.graph_break(
            msg=f"{op}: plain PyTorch (on a CPU, of float64) reads lengths on the host, which torch.compile cannot "
            f"trace; leave fullgraph=True out, or {instead}"
        )


def _differentiation(call: AttentionCall, has_lse_grad: bool) -> Op:
    """The backward op that the selector chooses for a call."""
    facts = api.facts_of(call)
    if torch.compiler.is_compiling():
        # a traced graph holds constants only, so the backward's name is decided at trace time and its op looked up by
        # it
        return loaded_backwards[_name_traced(has_lse_grad, *facts.as_constants())]
    return backward_op(select.choose_backward(facts, lambda: api.problem_of(*facts), has_lse_grad))


@select.constant_to_dynamo
def _name_traced(has_lse_grad: bool, *facts: Any) -> str:
    """The name of the backward while torch.compile traces; its op is loaded then."""
    full = select.full_facts(facts)
    name = select.choose_backward(full, lambda: api.problem_of(*full), has_lse_grad)
    # an op must be registered before Dynamo meets it in the graph
    backward_op(name)
    return name


def _refuse(op: str, layout: Layout, **given: object) -> None:
    for name, value in given.items():
        if value is not None:
            checks.fail(op, name, f"be None for layout {layout}", "one")


def _check_results(
    op: str, call: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None
) -> None:
    query = call.query
    checks.same_device(op, "query", query, grad_out=grad_out, out=out, lse=lse, grad_lse=grad_lse)
    expected = (*query.shape[:-1], call.value.shape[-1])
    checks.shape(op, "grad_out", grad_out, expected, "query's, with value's head dim")
    checks.shape(op, "out", out, expected, "query's, with value's head dim")
    checks.at_least_16_bits(op, out=out)
    if grad_out.dtype is not query.dtype:
        checks.fail(op, "grad_out", f"have query's dtype {checks.name(query.dtype)}", checks.name(grad_out.dtype))
    # LSE has the order heads, queries whatever the layout: the kernels' rows of one head are contiguous
    rows = to_lse_order(query, call.layout).shape[:-1]
    for name, x in (("lse", lse), ("grad_lse", grad_lse)):
        checks.shape(op, name, x, rows, "heads and queries, as attention returns it")
        # float64 results come with a float64 LSE from the reference backends
        if x is not None and x.dtype not in (torch.float32, query.dtype if query.dtype is torch.float64 else None):
            checks.fail(op, name, "be float32", checks.name(x.dtype))


def _unit(x: Tensor) -> Tensor:
    # a dim of one element may have any stride
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
