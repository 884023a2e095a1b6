"""`xformers.ops.fmha` on our attention: memory_efficient_attention, its variants and its biases.

Wider than there: 5-D inputs and grouped heads backward too, biases that broadcast, every bias with gradients, any page
size, dropout with every bias, keys and values with fewer heads than queries. Differs: a query that sees no key gives 0
(there NaN, or an error), and the LSE of packed sequences is packed too, [1, heads, rows].
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from powertrain.compat.xformers.ops.fmha import attn_bias
from powertrain.compat.xformers.ops.fmha.attn_bias import (
    AttentionBias,
    Band,
    BlockBias,
    BlockDiagonalMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
    LowerTriangularMaskWithTensorBias,
    PagedBias,
    _PaddedSeqLenInfo,
)
from powertrain.compat.xformers.ops.fmha.operators import (
    ALL_BW_OPS,
    ALL_FW_OPS,
    AttentionBwOpBase,
    AttentionFwOpBase,
    AttentionOp,
    AttentionOpBase,
    MemoryEfficientAttentionCutlassOp,
    MemoryEfficientAttentionFlashAttentionOp,
    backends_of,
    cutlass,
    flash,
    flash3,
    triton_splitk,
)
from powertrain.ops.attention import (
    NoBackendError,
    attention,
    attention_backward,
    decode_attention,
    varlen_attention,
)
from powertrain.ops.attention import merge_attentions as merge
from powertrain.ops.attention.decode import reads_pages
from powertrain.ops.conversion import gather_pages, unit_stride
from powertrain.runtime import checks
from powertrain.runtime.dispatch import use_kernel, wants_grad

_OP = "memory_efficient_attention"
# queries per sequence up to which keys are split among programs rather than queries
_DECODE = 16
Bias = Tensor | AttentionBias | None


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: AttentionOp | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Attention with xFormers' arguments: softmax(scale * q k^T + attn_bias) v, with dropout p.

    Shapes: B batch, M length, G groups, H heads (of a group), K and Kv head dims.
        query      [B, Mq, H, K], [B, Mq, K] (one head) or [B, Mq, G, H, K]
        key        the same with Mkv; heads and groups may be expanded (stride 0), which is never copied
        value      as key with Kv
        attn_bias  a class of `attn_bias`, or a floating point tensor that broadcasts to [B, H, Mq, Mkv] (3-D query:
                   [B, Mq, Mkv]; 5-D: [B, G, H, Mq, Mkv]), with its gradient. Block-diagonal classes take B = 1.
        op         (FwOp, BwOp) of fmha.cutlass, flash, flash3 or triton_splitk: the backend, instead of the best
    Returns the query's shape with Kv, in its dtype; with output_dtype rounded to the query's dtype, then converted.
    Raises ValueError naming the argument, the expected value and the given one.
    Source: the documentation of xformers.ops.memory_efficient_attention.
    """
    out, _ = _attend(query, key, value, attn_bias, p, scale, backends_of(op), return_lse=False)
    return out if output_dtype is None else out.to(output_dtype)


def memory_efficient_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: type[AttentionFwOpBase] | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """`memory_efficient_attention` outside autograd."""
    with torch.no_grad():
        out, _ = _attend(query, key, value, attn_bias, p, scale, backends_of(op), return_lse=False)
    return out if output_dtype is None else out.to(output_dtype)


def memory_efficient_attention_forward_requires_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: type[AttentionFwOpBase] | None = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) outside autograd, for `memory_efficient_attention_backward`.

    lse is float32, [B, H, Mq] (5-D: [B, G, H, Mq]; packed sequences: of B = 1).
    """
    _no_dropout("memory_efficient_attention_forward_requires_grad", p)
    with torch.no_grad():
        out, lse = _attend(query, key, value, attn_bias, p, scale, backends_of(op), return_lse=True)
    return out if output_dtype is None else out.to(output_dtype), lse


def memory_efficient_attention_partial(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: AttentionOp | type[AttentionFwOpBase] | None = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) over some of the keys, for `merge_attentions`; differentiable in both."""
    _no_dropout("memory_efficient_attention_partial", p)
    out, lse = _attend(query, key, value, attn_bias, p, scale, backends_of(op), return_lse=True)
    return out if output_dtype is None else out.to(output_dtype), lse


def memory_efficient_attention_backward(
    grad: Tensor,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: type[AttentionBwOpBase] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of a result and its LSE, which may be merged from more keys than those given here.

    With w = exp(own lse - lse), the share of these keys in the result, grad reaches their own output as w * grad and
    their own LSE as w * grad . (own output - output). Computes the forward of these keys once more where there are no
    kernels, in pages, for blocks of groups and where `op` is given.
    """
    _no_dropout("memory_efficient_attention_backward", p)
    backends = backends_of(op)
    _check_results(grad, output, lse, query, key, value)
    in_blocks = isinstance(attn_bias, BlockBias)
    is_plain = not isinstance(attn_bias, PagedBias) and not (in_blocks and query.dim() == 5)
    # Dynamo cannot differentiate our op inside its trace, so this path is taken where possible
    if is_plain and use_kernel("attention", query) and (backends is None or torch.compiler.is_compiling()):
        return _backward(grad, output, lse, query, key, value, attn_bias, scale)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out_lse: tuple[Tensor, Tensor] = _attend(q, k, v, attn_bias, p, scale, backends, return_lse=True)
        return out_lse

    (own, own_lse), differentiate = _vjp(attend, query, key, value)
    # rows that see none of these keys have a share of 0, where -inf - -inf is NaN
    share = torch.exp(own_lse - lse).masked_fill(own_lse == -torch.inf, 0.0)  # [B, H, Mq]
    towards = grad.to(share.dtype)
    d_lse = share * (towards * (own.detach() - output)).sum(-1).movedim(1, -1).reshape(share.shape)
    d_own = towards * share.movedim(-1, 1).reshape(*towards.shape[:-1], 1)
    dq, dk, dv = differentiate((d_own.to(own.dtype), d_lse))
    return dq, dk, dv


_Pair = tuple[Tensor, Tensor]
_Triple = tuple[Tensor, Tensor, Tensor]


def _vjp(attend: Callable[..., _Pair], *inputs: Tensor) -> tuple[_Pair, Callable[[_Pair], tuple[Tensor, ...]]]:
    """(out and lse, function from their gradients to those of the inputs)."""
    # Dynamo traces this way only
    if torch.compiler.is_compiling():
        results, differentiate = torch.func.vjp(attend, *(x.detach() for x in inputs))  # type: ignore[misc]
        return results, differentiate
    # nothing is recorded in inference mode, nor of tensors made there
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [(x.clone() if x.is_inference() else x.detach()).requires_grad_() for x in inputs]
        results = attend(*leaves)

    def backward(grads: _Pair) -> tuple[Tensor, ...]:
        with torch.inference_mode(False):
            return torch.autograd.grad(results, leaves, [x.clone() if x.is_inference() else x for x in grads])

    return results, backward


def _backward(
    grad: Tensor, output: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Bias,
    scale: float | None,
) -> _Triple:  # fmt: skip
    """By `attention_backward`, for keys that are neither paged nor in blocks of groups."""
    dims = query.dim()
    q, k, v = (x.detach() for x in unit_stride(query, key, value))
    given = (grad.to(q.dtype), q, k, v, output)
    if dims == 3:
        given = tuple(x.unsqueeze(2) for x in given)  # type: ignore[assignment]
        lse = lse.view(lse.shape[0], 1, lse.shape[-1])
    if isinstance(bias, BlockBias):
        _check_blocks(q, k, v, bias)
        given, lse = tuple(x[0] for x in given), lse[0]  # type: ignore[assignment]
        options = _block_options(bias, bias.k_seqinfo.seqstart, getattr(bias.k_seqinfo, "seqlen", None))
        grads = attention_backward(*given, lse, scale=scale, layout="thd", **options)
        dq, dk, dv = (x[None] for x in grads)
    else:
        dense = _dense_options(bias, query)
        if dense["attn_bias"] is not None:
            dense["attn_bias"] = dense["attn_bias"].detach()
        dq, dk, dv = attention_backward(*given, lse, scale=scale, **dense)
    return (dq.squeeze(2), dk.squeeze(2), dv.squeeze(2)) if dims == 3 else (dq, dk, dv)


def _check_results(grad: Tensor, output: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor) -> None:
    op = "memory_efficient_attention_backward"
    given = {"query": query, "key": key, "value": value, "grad": grad, "output": output, "lse": lse}
    for name, x in given.items():
        checks.at_least_16_bits(op, **{name: x})
        checks.same_device(op, "query", query, **{name: x})
    expected = (*query.shape[:-1], value.shape[-1])
    for name, x in (("grad", grad), ("output", output)):
        checks.shape(op, name, x, expected, "query's, with value's last dim")
    if query.dim() == 3:
        expected = (query.shape[0], 1, query.shape[1])
        if lse.dim() == 2:
            expected = (query.shape[0], query.shape[1])
    else:
        expected = (query.shape[0], *query.shape[2:-1], query.shape[1])
    checks.shape(op, "lse", lse, expected, "batch, heads, queries")


def merge_attentions(
    attn_split: Any,
    lse_split: Any,
    write_lse: bool = True,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attentions over parts of the keys as the attention over all of them.

    Shapes: attn_split [splits, B, M, H, K] or [splits, B, M, G, H, K], lse_split [splits, B, H, M] or
    [splits, B, G, H, M], or sequences of such without the first dim. Returns (out, lse or None). Differentiable.
    """
    for name, parts in (("attn_split", attn_split), ("lse_split", lse_split)):
        if not isinstance(parts, Tensor | Sequence):
            checks.fail("merge_attentions", name, "be a tensor or a sequence of tensors", checks.described(parts))
    outs, lses = list(attn_split), list(lse_split)
    checks.require(len(outs) == len(lses) > 0, "merge_attentions", "lse_split", f"be {len(outs)} parts", len(lses))
    for n, (part, its_lse) in enumerate(zip(outs, lses, strict=True)):
        checks.tensor("merge_attentions", f"attn_split[{n}]", part)
        checks.tensor("merge_attentions", f"lse_split[{n}]", its_lse)
    shape = outs[0].shape
    if len(shape) == 5:
        outs, lses = [x.flatten(2, 3) for x in outs], [x.flatten(1, 2) for x in lses]
    out, lse = merge(outs, lses)
    if len(shape) == 5:
        out, lse = out.unflatten(2, shape[2:4]), lse.unflatten(1, shape[2:4])
    return out if output_dtype is None else out.to(output_dtype), lse if write_lse else None


def _no_dropout(op: str, p: float) -> None:
    if p != 0.0:
        raise NotImplementedError(f"{op}: p = {p} is not supported; nearest: memory_efficient_attention, which is")


class _Options(NamedTuple):
    """Keyword arguments common to all paths."""

    dropout_p: float
    scale: float | None
    backend: tuple[str, ...] | None
    return_lse: bool


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Bias,
    p: float,
    scale: float | None,
    backends: tuple[str, ...] | None,
    *,
    return_lse: bool,
) -> Any:
    """(out, lse or None)."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        checks.tensor(_OP, name, x)
        if x.is_nested or x.layout is not torch.strided:
            checks.fail(_OP, name, "be a dense tensor", "a nested one" if x.is_nested else f"one of layout {x.layout}")
    dims = query.dim()
    checks.require(dims in (3, 4, 5), _OP, "query", "have 3, 4 or 5 dims", list(query.shape))
    for name, x in (("key", key), ("value", value)):
        checks.require(x.dim() == dims, _OP, name, f"have query's {dims} dims", list(x.shape))
    q, k, v = unit_stride(query, key, value)
    if dims == 3:
        q, k, v = (x.unsqueeze(2) for x in (q, k, v))
    if dims == 4 and k.shape[2] == v.shape[2] > 1 and k.stride(2) == v.stride(2) == 0:
        # one head, expanded: it is read once
        k, v = k[:, :, :1], v[:, :, :1]
    options = _Options(p, scale, backends, return_lse)
    try:
        if isinstance(bias, BlockBias):
            out, lse = _in_blocks(q, k, v, bias, options)
        else:
            out, lse = _pair(attention(q, k, v, **_dense_options(bias, query), **options._asdict()))
    except NoBackendError as error:
        # theirs where `op` does not take the call
        raise ValueError(str(error)) from error
    return out.squeeze(2) if dims == 3 else out, lse


def _pair(result: Any) -> tuple[Tensor, Tensor | None]:
    return (result[0], result[1]) if isinstance(result, tuple) else (result, None)


def _dense_options(bias: Tensor | AttentionBias | None, query: Tensor) -> dict[str, Any]:
    """Bias and layout as `attention` takes them, for sequences of equal length."""
    if not (bias is None or isinstance(bias, Tensor | AttentionBias)):
        checks.fail(_OP, "attn_bias", "be a tensor, a class of fmha.attn_bias or None", type(bias).__name__)
    band, tensor = Band(), bias if isinstance(bias, Tensor) else None
    if isinstance(bias, AttentionBias):
        band = bias.band
        tensor = bias.bias if isinstance(bias, LowerTriangularMaskWithTensorBias) else None
    if tensor is not None:
        tensor = _tensor_bias(tensor, query)
    return {"attn_bias": tensor, "layout": "bmghk" if query.dim() == 5 else "bshd", **_band_options(band)}


def _band_options(band: Band) -> dict[str, Any]:
    aligned = "bottom_right" if band.bottom_right else "top_left"
    return {"window_size": (band.left, band.right), "causal_align": aligned}


def _tensor_bias(bias: Tensor, query: Tensor) -> Tensor:
    """A bias for these queries as [B, heads, Mq, Mkv], or something that broadcasts to it."""
    dims = query.dim()
    if not bias.is_floating_point():
        checks.fail(
            _OP, "attn_bias", "be floating point: 0 where a query sees a key, -inf elsewhere", checks.name(bias.dtype)
        )
    checks.require(bias.dim() == dims, _OP, "attn_bias", f"have {dims} dims, as query", list(bias.shape))
    if dims == 3:
        return bias.unsqueeze(1)
    if dims == 4:
        return bias
    groups, heads = query.shape[2:4]
    if bias.shape[1] not in (1, groups) or bias.shape[2] not in (1, heads):
        checks.fail(_OP, "attn_bias", f"broadcast to query's {groups} groups and {heads} heads", list(bias.shape))
    # one for all groups, or for all heads of a group, is not one for all heads
    if bias.shape[1:3] != (1, 1):
        bias = bias.expand(-1, groups, heads, -1, -1)
    return bias.flatten(1, 2)


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, bias: BlockBias, options: _Options) -> tuple[Tensor, Tensor | None]:
    """Sequences in one row, [1, rows, H, K] or [1, rows, G, H, K]."""
    _check_blocks(q, k, v, bias)
    groups, (q, k, v) = _ungroup(q[0], k[0], v[0])
    if _decodes(q, k, v, bias, options):
        out, lse = _cached(q, k, v, bias, options)
    elif isinstance(bias, PagedBias):
        out, lse = _pair(_paged(q, k, v, bias, options))
    else:
        out, lse = _pair(_packed(q, k, v, bias, options))
    return groups.restore(out, -2)[None], None if lse is None else groups.restore(lse, 0)[None]


def _check_blocks(q: Tensor, k: Tensor, v: Tensor, bias: BlockBias) -> None:
    name = type(bias).__name__
    checks.require(q.shape[0] == k.shape[0] == 1, _OP, "query", f"have a batch of 1 for {name}", list(q.shape))
    checks.same_device(_OP, "query", q, key=k, value=v)
    checks.shape(_OP, "value", v, (*k.shape[:-1], v.shape[-1]), "as key, but for the last dim")
    rows = bias.q_seqinfo.seqstart_py[-1]
    checks.require(q.shape[1] == rows, _OP, "query", f"have {rows} rows, as {name} says", q.shape[1])
    device = bias.q_seqinfo.seqstart.device
    checks.require(device == q.device, _OP, "attn_bias", f"be on {q.device} (use attn_bias.to(query.device))", device)
    if isinstance(bias, PagedBias):
        checks.same_device(_OP, "query", q, **{"attn_bias.block_tables": bias.block_tables})
        checks.require(k.shape[1] % bias.page_size == 0, _OP, "key", f"have pages of {bias.page_size} rows", k.shape[1])
    else:
        rows = bias.k_seqinfo.seqstart_py[-1]
        checks.require(k.shape[1] == rows, _OP, "key", f"have {rows} rows, as {name} says", k.shape[1])


class _Groups(NamedTuple):
    """Mapping of groups and heads to heads."""

    sizes: tuple[int, int] | None  # of a 5-D query, in the order they were flattened
    swapped: bool = False

    def restore(self, x: Tensor, dim: int) -> Tensor:
        """Heads in `dim` as groups and heads again."""
        if self.sizes is None:
            return x
        dim %= x.dim()
        x = x.unflatten(dim, self.sizes)
        return x.transpose(dim, dim + 1) if self.swapped else x


def _ungroup(q: Tensor, k: Tensor, v: Tensor) -> tuple[_Groups, tuple[Tensor, Tensor, Tensor]]:
    """Rows [rows, G, H, K] as [rows, heads, K], keys and values with as few heads as they really have."""
    if q.dim() == 3:
        return _Groups(None), (q, k, v)
    g, h = q.shape[1:3]
    if k.shape[1:3] != (g, h) or v.shape[1:3] != (g, h):
        checks.fail(_OP, "key and value", f"have query's {g} groups and {h} heads", [*k.shape[1:3], *v.shape[1:3]])
    if h > 1 and k.stride(2) == v.stride(2) == 0:
        return _Groups((g, h)), (q.flatten(1, 2), k[:, :, 0], v[:, :, 0])
    if g > 1 and k.stride(1) == v.stride(1) == 0:
        return _Groups((h, g), swapped=True), (q.transpose(1, 2).flatten(1, 2), k[:, 0], v[:, 0])
    return _Groups((g, h)), (q.flatten(1, 2), k.flatten(1, 2), v.flatten(1, 2))


def _decodes(q: Tensor, k: Tensor, v: Tensor, bias: BlockBias, options: _Options) -> bool:
    """A few new queries for each sequence of a cache, or any in pages that a copy would cost more than they do, and
    nothing that decoding does not do."""
    info = bias.q_seqinfo
    in_cache = isinstance(bias, PagedBias) or isinstance(bias.k_seqinfo, _PaddedSeqLenInfo)
    few = 0 < info.min_seqlen == info.max_seqlen <= _DECODE
    if isinstance(bias, PagedBias):
        keys, values = (x.unflatten(0, (-1, bias.page_size)) for x in (k, v))
        few = few or reads_pages(
            q,
            keys,
            values,
            info.seqstart,
            bias.k_seqinfo.seqlen,
            bias.block_tables,
            bias.band.left,
            bias.first_rows(),
        )
    wanted = wants_grad(q, k, v)
    ours = options.backend in (None, triton_splitk.FwOp.BACKENDS)
    return in_cache and few and ours and not wanted and options.dropout_p == 0


def _cached(q: Tensor, k: Tensor, v: Tensor, bias: BlockBias, options: _Options) -> tuple[Tensor, Tensor | None]:
    """Padded or paged keys through `decode_attention`."""
    info, table, first = bias.k_seqinfo, None, None
    if isinstance(bias, PagedBias):
        table, first, size = bias.block_tables.contiguous(), bias.first_rows(), bias.page_size
    else:
        size = info.padding
    queries = bias.q_seqinfo
    rest: dict[str, Any] = {}
    is_even = queries.min_seqlen == queries.max_seqlen > 0
    if not is_even:
        rest = {"cu_seqlens_q": queries.seqstart, "max_seqlen_q": max(queries.max_seqlen, 0)}
    result = decode_attention(
        q.unflatten(0, (-1, queries.max_seqlen)) if is_even else q, k.unflatten(0, (-1, size)),
        v.unflatten(0, (-1, size)), info.seqlen, page_table=table, cache_leftpad=first, is_causal=False,
        window_size=(bias.band.left, bias.band.right), scale=options.scale, return_lse=options.return_lse, **rest,
    )  # fmt: skip
    out, lse = _pair(result)
    if not is_even:
        return out, lse
    return out.flatten(0, 1), None if lse is None else lse.transpose(0, 1).flatten(1, 2)


def _packed(q: Tensor, k: Tensor, v: Tensor, bias: BlockBias, options: _Options) -> Any:
    """Keys in blocks, padded and gappy ones with their lengths."""
    info, used = bias.k_seqinfo, getattr(bias.k_seqinfo, "seqlen", None)
    return _varlen(q, k, v, bias, options, info.seqstart, used, info.max_seqlen)


def _paged(q: Tensor, k: Tensor, v: Tensor, bias: PagedBias, options: _Options) -> Any:
    """Paged keys, copied together first."""
    info, first = bias.k_seqinfo, bias.first_rows()
    begin = torch.zeros_like(info.seqlen) if first is None else first
    pages = k.shape[0] // bias.page_size
    checks.pages(_OP, "attn_bias.block_tables", bias.block_tables, pages, bias.page_size, begin, info.seqlen)
    room = max(info.seqlen_py) if first is not None else info.max_seqlen
    k, v = (gather_pages(x.unflatten(0, (-1, bias.page_size)), bias.block_tables, room).flatten(0, 1) for x in (k, v))
    starts = torch.arange(len(info.seqlen_py) + 1, device=q.device, dtype=torch.int32) * room
    used = info.seqlen
    if first is not None:
        starts, used = starts + torch.nn.functional.pad(first, (0, 1)), used - first
    return _varlen(q, k, v, bias, options, starts, used, info.max_seqlen)


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: BlockBias,
    options: _Options,
    key_starts: Tensor,
    used: Tensor | None,
    max_keys: int,
) -> Any:
    return varlen_attention(
        q, k, v, max_seqlen_q=max(bias.q_seqinfo.max_seqlen, 0), max_seqlen_k=max(max_keys, 0),
        **_block_options(bias, key_starts, used), **options._asdict(),
    )  # fmt: skip


def _block_options(bias: BlockBias, key_starts: Tensor, used: Tensor | None) -> dict[str, Any]:
    """Blocks as `varlen_attention` takes them."""
    options = {"cu_seqlens_q": bias.q_seqinfo.seqstart, "cu_seqlens_k": key_starts, "seqused_k": used}
    if used is not None and (isinstance(bias, PagedBias) or isinstance(bias.k_seqinfo, _PaddedSeqLenInfo)):
        # one after the other; gappy ones lie anywhere
        options["cu_seqlens_k_padded"] = key_starts
    return options | _band_options(bias.band)


__all__ = [
    "ALL_BW_OPS",
    "ALL_FW_OPS",
    "AttentionBias",
    "AttentionBwOpBase",
    "AttentionFwOpBase",
    "AttentionOp",
    "AttentionOpBase",
    "BlockDiagonalMask",
    "LowerTriangularFromBottomRightMask",
    "LowerTriangularMask",
    "LowerTriangularMaskWithTensorBias",
    "MemoryEfficientAttentionCutlassOp",
    "MemoryEfficientAttentionFlashAttentionOp",
    "attn_bias",
    "cutlass",
    "flash",
    "flash3",
    "memory_efficient_attention",
    "memory_efficient_attention_backward",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "memory_efficient_attention_partial",
    "merge_attentions",
    "triton_splitk",
]
