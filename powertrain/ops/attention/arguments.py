"""What callers of attention say, checked and lowered: shapes to Sizes, masks to a MaskSpec, all of it to a call."""

from collections.abc import Sequence
from math import inf
from operator import index
from typing import Literal, NamedTuple, SupportsIndex, overload

import torch
from torch import Tensor

from powertrain.ops.attention.mask import BiasKind, MaskSpec, MaskTensors
from powertrain.ops.attention.problem import AttentionCall, Layout, Varlen
from powertrain.runtime import checks

MAX_HEAD_DIM = 512
Alignment = Literal["top_left", "bottom_right"]
_DTYPES = (*checks.FLOATS, torch.float64)  # float64: reference and chunked, on every device


class Sizes(NamedTuple):
    """What the shapes of query, key and value say; of thd, queries and keys are tokens."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int


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
        if x.stride(-1) != 1 and x.numel() and x.shape[-1] > 1:
            checks.fail(op, name, "have a last dim of stride 1 (use .contiguous())", f"stride {x.stride(-1)}")
    checks.shape(op, "key", key, (*key.shape[:-1], query.shape[-1]), "head dim of query")
    checks.shape(op, "value", value, (*key.shape[:-1], value.shape[-1]), "as key, but for the head dim")
    if layout == "bmghk":
        checks.shape(op, "key", key, (query.shape[0], key.shape[1], *query.shape[2:]), "as query")
        heads = query.shape[2] * query.shape[3]
        return Sizes(query.shape[0], heads, heads, query.shape[1], key.shape[1])
    if layout == "thd":
        batch, sequence, head = 1, 0, 1
    else:
        b, sequence, head = _DIMS[layout]
        batch = query.shape[b]
        checks.require(key.shape[b] == batch, op, "key", f"have query's batch of {batch}", key.shape[b])
    heads, kv_heads = query.shape[head], key.shape[head]
    if kv_heads == 0 or heads % kv_heads:
        checks.fail(op, "query", f"have a multiple of key's {kv_heads} heads", heads)
    return Sizes(batch, heads, kv_heads, query.shape[sequence], key.shape[sequence])


def sequence_starts(
    op: str, side: str, cu_seqlens: Tensor, padded: Tensor | None, used: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(where sequences begin, their lengths if they end before the next begins)."""
    checks.shape(op, f"cu_seqlens_{side}_padded", padded, cu_seqlens.shape, f"as cu_seqlens_{side}")
    checks.shape(op, f"seqused_{side}", used, (cu_seqlens.shape[0] - 1,), "batch")
    name, starts = (f"cu_seqlens_{side}", cu_seqlens) if padded is None else (f"cu_seqlens_{side}_padded", padded)
    lengths = as_int32(op, f"seqused_{side}", used)
    if padded is not None and lengths is None:
        lengths = as_int32(op, f"cu_seqlens_{side}", cu_seqlens.diff())
    return as_int32(op, name, starts), lengths


_FARTHEST = 2**30  # as far as no sequence reaches, and kernels add places to it in int32


def window_bounds(op: str, window_size: Sequence[SupportsIndex]) -> tuple[int, int]:
    """(left, right) of a window: integers of Python, of NumPy, of tensors (which are read)."""
    try:
        left, right = (bound if type(bound) is int else index(bound) for bound in window_size)
    except (TypeError, ValueError):
        left = right = -2
    if left < -1 or right < -1:
        checks.fail(
            op, "window_size", "be two integers of at least -1, (left, right), -1 for no bound", repr(window_size)
        )
    return min(left, _FARTHEST), min(right, _FARTHEST)


def lower_mask(
    op: str,
    sizes: Sizes,
    *,
    attn_bias: Tensor | None = None,
    is_causal: bool = False,
    causal_align: Alignment = "bottom_right",
    window_size: Sequence[SupportsIndex] = (-1, -1),
    chunk_size: int = 0,
    prefix_lengths: Tensor | None = None,
    document_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[MaskSpec, MaskTensors]:
    """Mask arguments to (MaskSpec, MaskTensors), checked."""
    batch, heads, _, queries, keys = sizes
    checks.one_of(op, "causal_align", causal_align, ("top_left", "bottom_right"))
    left, right = window_bounds(op, window_size)
    if is_causal:
        right = 0
    if not (isinstance(chunk_size, int) and chunk_size >= 0):
        checks.fail(op, "chunk_size", "be an integer of at least 0 (0: no chunks)", repr(chunk_size))
    if not (isinstance(softcap, (int, float)) and 0 <= softcap < inf):
        checks.fail(op, "softcap", "be a finite number of at least 0 (0: none)", repr(softcap))
    bias_kind: BiasKind = "none"
    if attn_bias is not None:
        checks.tensor(op, "attn_bias", attn_bias)
        bias_kind = "bool" if attn_bias.dtype is torch.bool else "float"
        checks.require(2 <= attn_bias.dim() <= 4, op, "attn_bias", "have 2 to 4 dims", list(attn_bias.shape))
        attn_bias = attn_bias[(None,) * (4 - attn_bias.dim())]
        fits = all(n in (1, full) for n, full in zip(attn_bias.shape[:3], (batch, heads, queries), strict=True))
        if not fits or attn_bias.shape[3] not in (1, keys):
            checks.fail(op, "attn_bias", f"broadcast to [{batch}, {heads}, {queries}, {keys}]", list(attn_bias.shape))
        if attn_bias.shape[3] != keys:
            attn_bias = attn_bias.expand(*attn_bias.shape[:3], keys)
        if bias_kind == "float":
            floating = attn_bias.dtype in _DTYPES
            checks.require(floating, op, "attn_bias", "be bool or floating point", checks.name(attn_bias.dtype))
    if prefix_lengths is not None:
        checks.shape(op, "prefix_lengths", prefix_lengths, (batch,), "batch")
        prefix_lengths = as_int32(op, "prefix_lengths", prefix_lengths)
    query_documents = key_documents = None
    if document_ids is not None:
        pair = document_ids if isinstance(document_ids, tuple) else (document_ids, document_ids)
        if len(pair) != 2:
            checks.fail(op, "document_ids", "be a tensor or a pair, of queries and of keys", f"{len(pair)} of them")
        query_documents, key_documents = pair
        checks.shape(op, "document_ids", query_documents, (batch, queries), "batch, queries")
        checks.shape(op, "document_ids", key_documents, (batch, keys), "batch, keys")
        query_documents = as_int32(op, "document_ids", query_documents)
        key_documents = as_int32(op, "document_ids", key_documents)
    if alibi_slopes is not None:
        checks.tensor(op, "alibi_slopes", alibi_slopes)
        expected = (heads,) if alibi_slopes.dim() == 1 else (batch, heads)
        checks.shape(op, "alibi_slopes", alibi_slopes, expected, "heads, or batch and heads")
        checks.require(
            alibi_slopes.is_floating_point(), op, "alibi_slopes", "be floating point", checks.name(alibi_slopes.dtype)
        )
        if alibi_slopes.requires_grad:
            checks.fail(op, "alibi_slopes", "not require a gradient (use .detach())", "one that does")
        alibi_slopes = alibi_slopes.float().contiguous()
    if sinks is not None:
        checks.shape(op, "sinks", sinks, (heads,), "heads")
        checks.require(sinks.is_floating_point(), op, "sinks", "be floating point", checks.name(sinks.dtype))
        sinks = sinks.contiguous()
    spec = MaskSpec(
        left=left,
        right=right,
        bottom_right=causal_align == "bottom_right",
        chunk=chunk_size,
        prefix=prefix_lengths is not None,
        documents=document_ids is not None,
        bias=bias_kind,
        bias_grad=attn_bias is not None and attn_bias.requires_grad and torch.is_grad_enabled(),
        alibi=alibi_slopes is not None,
        softcap=float(softcap),
        sinks=sinks is not None,
    )
    return spec, MaskTensors(prefix_lengths, query_documents, key_documents, attn_bias, alibi_slopes, sinks)


def make_call(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    mask: MaskSpec,
    tensors: MaskTensors,
    varlen: Varlen,
    scale: float | None,
    dropout_p: float,
    seed: Tensor | None,
    return_lse: bool,
    deterministic: bool | None,
) -> AttentionCall:
    if not (isinstance(dropout_p, (int, float)) and 0 <= dropout_p < 1):
        checks.fail(op, "dropout_p", "be a number in [0, 1)", repr(dropout_p))
    if scale is not None and not isinstance(scale, (int, float)):
        checks.fail(op, "scale", "be a number, known to the host, or None", repr(scale))
    if seed is not None:
        checks.shape(op, "dropout_seed", seed, (2,), "seed and operation")
        checks.require(seed.dtype is torch.int64, op, "dropout_seed", "be int64", checks.name(seed.dtype))
    checks.same_device(
        op, "query", query, attn_bias=tensors.bias, alibi_slopes=tensors.alibi_slopes, sinks=tensors.sinks,
        prefix_lengths=tensors.prefix, document_ids=tensors.query_documents, dropout_seed=seed,
    )  # fmt: skip
    checks.same_device(op, "query", query, document_ids=tensors.key_documents)
    return AttentionCall(
        query, key, value, layout, mask, tensors, varlen,
        float(query.shape[-1] ** -0.5 if scale is None else scale), float(dropout_p),
        seed if dropout_p > 0 else None, return_lse,
        torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
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
    return None if x is None else x.to(torch.int32).contiguous()
