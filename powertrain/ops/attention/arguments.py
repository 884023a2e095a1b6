"""Arguments of the public attention functions, checked and lowered to an `AttentionCall`."""

import numbers
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from operator import index
from typing import Literal, NamedTuple, SupportsIndex, overload

import torch
from torch import Tensor

from powertrain.ops.attention.mask import BiasKind, MaskSpec, MaskTensors
from powertrain.ops.attention.problem import AttentionCall, Layout, Sizes, Varlen
from powertrain.ops.shapes import broadcasts
from powertrain.runtime import checks
from powertrain.runtime.dispatch import wants_grad
from powertrain.runtime.settings import settings

# 512 is the widest head dim whose tiles have plans; MLA decodes 576 by a kernel of its own
MAX_HEAD_DIM = 512
Alignment = Literal["top_left", "bottom_right"]
_DTYPES = (*checks.FLOATS, torch.float64)  # float64: reference and chunked, on every device


class MaskArguments(NamedTuple):
    """The mask arguments of the public functions."""

    attn_bias: Tensor | None = None
    is_causal: bool = False
    # flash-attn's default; SDPA's is top_left, which compat/sdpa.py passes
    causal_align: Alignment = "bottom_right"
    window_size: Sequence[SupportsIndex] = (-1, -1)
    chunk_size: int = 0
    prefix_lengths: Tensor | None = None
    document_ids: Tensor | tuple[Tensor, Tensor] | None = None
    alibi_slopes: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class PackedSequences(NamedTuple):
    """The sequence arguments of `varlen_attention`."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor | None = None  # None: cu_seqlens_q
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_k_padded: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None


class CallOptions(NamedTuple):
    """The other arguments of the public functions."""

    scale: float | None = None  # None: head dim^-0.5
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None
    return_lse: bool = False
    deterministic: bool | None = None  # None: as torch.use_deterministic_algorithms says


_DIMS: dict[Layout, tuple[int, int, int]] = {  # where batch, sequence and heads are
    "bshd": (0, 1, 2),
    "bhsd": (0, 2, 1),
    "sbhd": (1, 0, 2),
}


def check_qkv(op: str, query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> Sizes:
    """Check query, key and value against each other and their layout."""
    dims = {"thd": 3, "bmghk": 5}.get(layout, 4)
    if query.dtype not in _DTYPES:
        checks.fail(op, "query", "be float16, bfloat16, float32 or float64", checks.name(query.dtype))
    checks.same_device(op, "query", query, key=key, value=value)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != dims:
            checks.fail(op, name, f"have {dims} dims ({layout})", list(x.shape))
        if x.dtype is not query.dtype:
            checks.fail(op, name, f"have query's dtype {checks.name(query.dtype)}", checks.name(x.dtype))
        if not 1 <= x.shape[-1] <= MAX_HEAD_DIM:
            checks.fail(op, name, f"have a head dim of 1 to {MAX_HEAD_DIM}", x.shape[-1])
        # a dim of one element, or a tensor of none, may have any stride
        if x.stride(-1) != 1 and x.numel() and x.shape[-1] > 1:
            checks.fail_stride(op, name, x)
    checks.shape(op, "key", key, (*key.shape[:-1], query.shape[-1]), "head dim of query")
    checks.shape(op, "value", value, (*key.shape[:-1], value.shape[-1]), "as key, but for the head dim")
    # xFormers' 5-D layout has as many key groups as query groups: GQA is an expanded dim there
    if layout == "bmghk":
        checks.shape(op, "key", key, (query.shape[0], key.shape[1], *query.shape[2:]), "as query")
        heads = query.shape[2] * query.shape[3]
        return Sizes(query.shape[0], heads, heads, query.shape[1], key.shape[1])
    if layout == "thd":
        batch, sequence, head = 1, 0, 1
    else:
        b, sequence, head = _DIMS[layout]
        batch = query.shape[b]
        if key.shape[b] != batch:
            checks.fail(op, "key", f"have query's batch of {batch}", key.shape[b])
    heads, kv_heads = query.shape[head], key.shape[head]
    # first key heads of 0, which the remainder would divide by
    if kv_heads == 0 or heads % kv_heads:
        checks.fail(op, "query", f"have a multiple of key's {kv_heads} heads", heads)
    return Sizes(batch, heads, kv_heads, query.shape[sequence], key.shape[sequence])


def dense_call(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    lengths: tuple[Tensor | None, Tensor | None],
    mask: MaskArguments,
    options: CallOptions,
) -> AttentionCall:
    """A checked call in a dense layout; `lengths` of queries and keys by batch entry."""
    sizes = check_qkv(op, query, key, value, layout)
    seqused_q, seqused_k = lengths
    for name, x in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        checks.shape(op, name, x, (sizes.batch,), "batch")
    checks.same_device(op, "query", query, seqused_q=seqused_q, seqused_k=seqused_k)
    seqused_q = as_int32(op, "seqused_q", seqused_q)
    seqused_k = as_int32(op, "seqused_k", seqused_k)
    # lengths are upper-bounded by the storage, so no maximum has to be read from the device
    varlen = Varlen(None, None, seqused_q, seqused_k, sizes.queries, sizes.keys)
    return _checked_call(op, query, key, value, layout, sizes, varlen, mask, options)


def packed_call(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: PackedSequences,
    mask: MaskArguments,
    options: CallOptions,
) -> AttentionCall:
    """A checked call of packed sequences, layout "thd"."""
    varlen = _varlen(op, sequences)
    # the batch is known from a shape, without reading cu_seqlens
    batch = sequences.cu_seqlens_q.shape[0] - 1
    sizes = check_qkv(op, query, key, value, "thd")._replace(batch=batch)
    checks.same_device(
        op, "query", query, cu_seqlens_q=sequences.cu_seqlens_q, cu_seqlens_k=sequences.cu_seqlens_k,
        seqused_q=sequences.seqused_q, seqused_k=sequences.seqused_k,
        cu_seqlens_q_padded=sequences.cu_seqlens_q_padded, cu_seqlens_k_padded=sequences.cu_seqlens_k_padded,
    )  # fmt: skip
    return _checked_call(op, query, key, value, "thd", sizes, varlen, mask, options)


def _varlen(op: str, s: PackedSequences) -> Varlen:
    cu_k = s.cu_seqlens_q if s.cu_seqlens_k is None else s.cu_seqlens_k
    for name, tensor in (("cu_seqlens_q", s.cu_seqlens_q), ("cu_seqlens_k", cu_k)):
        checks.tensor(op, name, tensor)
        if tensor.dim() != 1 or tensor.shape[0] == 0:
            checks.fail(op, name, "have shape [batch + 1]", list(tensor.shape))
    checks.shape(op, "cu_seqlens_k", cu_k, s.cu_seqlens_q.shape, "as cu_seqlens_q")
    for name, longest in (("max_seqlen_q", s.max_seqlen_q), ("max_seqlen_k", s.max_seqlen_k)):
        # a tensor here would be a host synchronisation in every call
        if longest is not None and not (isinstance(longest, int) and longest >= 0):
            checks.fail(op, name, "be an integer of at least 0, known to the host, or None", repr(longest))
    starts, used = _sequence_starts(op, "q", s.cu_seqlens_q, s.cu_seqlens_q_padded, s.seqused_q)
    key_starts, key_used = starts, used
    # identity, not equality: comparing values would read them from the device
    is_same = cu_k is s.cu_seqlens_q and s.cu_seqlens_k_padded is s.cu_seqlens_q_padded and s.seqused_k is s.seqused_q
    if not is_same:
        key_starts, key_used = _sequence_starts(op, "k", cu_k, s.cu_seqlens_k_padded, s.seqused_k)
    # lengths without padded starts: key sequences may overlap
    unordered = key_used is not None and not is_same and s.cu_seqlens_k_padded is None
    return Varlen(starts, key_starts, used, key_used, s.max_seqlen_q or 0, s.max_seqlen_k or 0, unordered)


def _sequence_starts(
    op: str, side: str, cu_seqlens: Tensor, padded: Tensor | None, used: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(first row of each sequence, the lengths of those that end before the next begins)."""
    checks.shape(op, f"cu_seqlens_{side}_padded", padded, cu_seqlens.shape, f"as cu_seqlens_{side}")
    checks.shape(op, f"seqused_{side}", used, (cu_seqlens.shape[0] - 1,), "batch")
    # padded starts say where rows lie, cu_seqlens how many are used
    name, starts = (f"cu_seqlens_{side}", cu_seqlens) if padded is None else (f"cu_seqlens_{side}_padded", padded)
    lengths = as_int32(op, f"seqused_{side}", used)
    if padded is not None and lengths is None:
        # differences of the starts are the lengths once the starts themselves say something else
        lengths = as_int32(op, f"cu_seqlens_{side}", cu_seqlens.diff())
    return as_int32(op, name, starts), lengths


_FARTHEST = 2**30  # as far as no sequence reaches, and kernels add places to it in int32


def window_bounds(op: str, window_size: Sequence[SupportsIndex]) -> tuple[int, int]:
    """(left, right) of a window: integers of Python, of NumPy, of tensors (which are read)."""
    # index() takes NumPy integers and 0-dim tensors and refuses floats, which int() would truncate
    try:
        left, right = (bound if type(bound) is int else index(bound) for bound in window_size)
    except (TypeError, ValueError):
        # falls into the error below, which names the argument and its value
        left = right = -2
    if left < -1 or right < -1:
        checks.fail(
            op, "window_size", "be two integers of at least -1, (left, right), -1 for no bound", repr(window_size)
        )
    # sys.maxsize as "no bound" is common, and would overflow an int32 position
    return min(left, _FARTHEST), min(right, _FARTHEST)


def lower_mask(op: str, sizes: Sizes, mask: MaskArguments, dtype: torch.dtype) -> tuple[MaskSpec, MaskTensors]:
    """Mask arguments to (MaskSpec, MaskTensors), checked. `dtype`: query's."""
    checks.one_of(op, "causal_align", mask.causal_align, ("top_left", "bottom_right"))
    left, right = window_bounds(op, mask.window_size)
    if not (isinstance(mask.chunk_size, int) and mask.chunk_size >= 0):
        checks.fail(op, "chunk_size", "be an integer of at least 0 (0: no chunks)", repr(mask.chunk_size))
    softcap = 0.0 if mask.softcap is None else mask.softcap
    if not (isinstance(softcap, (int, float)) and 0 <= softcap < inf):
        checks.fail(op, "softcap", "be a finite number of at least 0 (None or 0: none)", repr(mask.softcap))
    bias_kind, bias = _bias(op, sizes, mask.attn_bias)
    if mask.prefix_lengths is not None:
        checks.shape(op, "prefix_lengths", mask.prefix_lengths, (sizes.batch,), "batch")
    query_documents, key_documents = _documents(op, sizes, mask.document_ids)
    sinks = mask.sinks
    if sinks is not None:
        checks.shape(op, "sinks", sinks, (sizes.heads,), "heads")
        checks.require(sinks.is_floating_point(), op, "sinks", "be floating point", checks.name(sinks.dtype))
        # kernels index them by head
        sinks = sinks.contiguous()
    spec = MaskSpec(
        left=left,
        # is_causal together with a window keeps the left bound, as in flash-attn
        right=0 if mask.is_causal else right,
        bottom_right=mask.causal_align == "bottom_right",
        chunk=mask.chunk_size,
        prefix=mask.prefix_lengths is not None,
        documents=query_documents is not None,
        bias=bias_kind,
        # a bias that requires a gradient under no_grad is an ordinary bias, which more backends take
        bias_grad=bias is not None and bias.is_floating_point() and wants_grad(bias),
        alibi=mask.alibi_slopes is not None,
        softcap=float(softcap),
        sinks=sinks is not None,
    )
    prefix = as_int32(op, "prefix_lengths", mask.prefix_lengths)
    slopes = _slopes(op, sizes, mask.alibi_slopes, dtype)
    return spec, MaskTensors(prefix, query_documents, key_documents, bias, slopes, sinks)


def _bias(op: str, sizes: Sizes, bias: Tensor | None) -> tuple[BiasKind, Tensor | None]:
    """(kind, bias in 4 dims, expanded along the keys)."""
    if bias is None:
        return "none", None
    batch, heads, _, queries, keys = sizes
    checks.tensor(op, "attn_bias", bias)
    checks.require(2 <= bias.dim() <= 4, op, "attn_bias", "have 2 to 4 dims", list(bias.shape))
    # missing dims are leading ones, as in PyTorch's broadcasting
    bias = bias if bias.dim() == 4 else bias[(None,) * (4 - bias.dim())]
    if not broadcasts(bias.shape, (batch, heads, queries, keys)):
        checks.fail(op, "attn_bias", f"broadcast to [{batch}, {heads}, {queries}, {keys}]", list(bias.shape))
    if bias.shape[3] != keys:
        # a view: kernels read a stride of 0
        bias = bias.expand(*bias.shape[:3], keys)
    if bias.dtype is torch.bool:
        return "bool", bias
    checks.require(bias.dtype in _DTYPES, op, "attn_bias", "be bool or floating point", checks.name(bias.dtype))
    return "float", bias


def _documents(
    op: str, sizes: Sizes, ids: Tensor | tuple[Tensor, Tensor] | None
) -> tuple[Tensor | None, Tensor | None]:
    """(ids of queries, ids of keys)."""
    if ids is None:
        return None, None
    pair = ids if isinstance(ids, tuple) else (ids, ids)
    if len(pair) != 2:
        checks.fail(op, "document_ids", "be a tensor or a pair, of queries and of keys", f"{len(pair)} of them")
    of_queries, of_keys = pair
    checks.shape(op, "document_ids", of_queries, (sizes.batch, sizes.queries), "batch, queries")
    checks.shape(op, "document_ids", of_keys, (sizes.batch, sizes.keys), "batch, keys")
    return as_int32(op, "document_ids", of_queries), as_int32(op, "document_ids", of_keys)


def _slopes(op: str, sizes: Sizes, slopes: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if slopes is None:
        return None
    checks.tensor(op, "alibi_slopes", slopes)
    expected = (sizes.heads,) if slopes.dim() == 1 else (sizes.batch, sizes.heads)
    checks.shape(op, "alibi_slopes", slopes, expected, "heads, or batch and heads")
    checks.require(slopes.is_floating_point(), op, "alibi_slopes", "be floating point", checks.name(slopes.dtype))
    # refused instead of silently without gradient: no kernel computes it
    if slopes.requires_grad:
        checks.fail(op, "alibi_slopes", "not require a gradient (use .detach())", "one that does")
    # float32 in 16-bit models too: a slope rounded to bfloat16 times a distance of thousands would be off by whole
    # units. In float64 one rounded to float32 would be off by 1e-4
    return slopes.to(torch.float64 if dtype is torch.float64 else torch.float32).contiguous()


def with_positive_scale(call: AttentionCall) -> tuple[AttentionCall, int]:
    """The call with a scale above 0, and the factor on its query that keeps the scores.

    With a scale of 0 or less, the kernels of PyTorch and flash-attn give NaN: they scale scores that they have masked
    with -inf, and take the maximum of unscaled ones.
    """
    if call.scale > 0:
        return call, 1
    factor, scale = (-1, -call.scale) if call.scale < 0 else (0, 1.0)
    return replace(call, query=call.query * factor, scale=scale), factor


def _checked_call(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    sizes: Sizes,
    varlen: Varlen,
    mask: MaskArguments,
    options: CallOptions,
) -> AttentionCall:
    spec, tensors = lower_mask(op, sizes, mask, query.dtype)
    scale, dropout_p, seed, return_lse, deterministic = options
    if not (isinstance(dropout_p, (int, float)) and 0 <= dropout_p < 1):
        checks.fail(op, "dropout_p", "be a number in [0, 1)", repr(dropout_p))
    # NumPy's numbers too
    if scale is not None and not (isinstance(scale, (int, float, numbers.Real)) and -inf < scale < inf):
        checks.fail(op, "scale", "be a finite number, known to the host, or None", repr(scale))
    if seed is not None:
        checks.shape(op, "dropout_seed", seed, (2,), "seed and operation")
        # the first number is Philox's key, the second enters its counter (docs/attention.md, "Dropout")
        checks.require(seed.dtype is torch.int64, op, "dropout_seed", "be int64", checks.name(seed.dtype))
        seed = seed.contiguous()
    checks.same_device(
        op, "query", query, attn_bias=tensors.bias, alibi_slopes=tensors.alibi_slopes, sinks=tensors.sinks,
        prefix_lengths=tensors.prefix, document_ids=tensors.query_documents, dropout_seed=seed,
    )  # fmt: skip
    checks.same_device(op, "query", query, document_ids=tensors.key_documents)
    return AttentionCall(
        query, key, value, layout, spec, tensors, varlen,
        float(query.shape[-1] ** -0.5 if scale is None else scale), float(dropout_p),
        # without dropout a seed is no fact: backends that draw from PyTorch's generator stay allowed
        seed if dropout_p > 0 else None, return_lse,
        torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic, sizes,
    )  # fmt: skip


@overload
def as_int32(op: str, name: str, x: Tensor) -> Tensor: ...
@overload
def as_int32(op: str, name: str, x: None) -> None: ...
@overload
def as_int32(op: str, name: str, x: Tensor | None) -> Tensor | None: ...
def as_int32(op: str, name: str, x: Tensor | None) -> Tensor | None:
    """An argument of whole numbers as the kernels read it: int32, without strides."""
    checks.integers(op, name, x)
    # they would be taken modulo 2^32. In the interpreter as on a GPU, whose values the host does not read
    if x is not None and x.dtype is torch.int64 and not settings().interpret:
        checks.indices(op, name, x, 2**31, -(2**31))
    # PyTorch's cumsum gives int64, flash-attn's functions int32: both are taken
    return None if x is None else x.to(torch.int32).contiguous()
