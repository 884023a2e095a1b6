"""The public attention functions: they check arguments, lower every mask to a MaskSpec and hand over to a backend."""

from collections.abc import Sequence
from dataclasses import fields, replace
from math import inf
from operator import index
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from powertrain.ops.attention import select
from powertrain.ops.attention.masks import BiasKind, MaskSpec, MaskTensors
from powertrain.ops.attention.problem import LAYOUTS, AttentionCall, AttentionProblem, Layout, Lengths, Varlen
from powertrain.ops.philox import dropout_seed as draw_seed
from powertrain.runtime import checks
from powertrain.runtime.dispatch import falls_back, is_traced, refuse_vmap, use_kernel
from powertrain.runtime.target import Target

MAX_HEAD_DIM = 512
Alignment = Literal["top_left", "bottom_right"]
_MASK_FIELDS = tuple(field.name for field in fields(MaskSpec))
_DTYPES = (*checks.FLOATS, torch.float64)  # float64: reference and chunked, on every device
_DENSE = tuple(name for name in LAYOUTS if name != "thd")


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


@falls_back("attention")
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_bias: Tensor | None = None,
    is_causal: bool = False,
    causal_align: Alignment = "bottom_right",
    window_size: tuple[int, int] = (-1, -1),
    chunk_size: int = 0,
    prefix_lengths: Tensor | None = None,
    document_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    query_lengths: Tensor | None = None,
    key_lengths: Tensor | None = None,
    layout: Layout = "bshd",
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | Sequence[str] | None = None,
) -> Any:
    """Softmax attention for every mask, layout and head dim, by the fastest backend that takes the call.

        s = scale * q k^T;  s = softcap * tanh(s / softcap);  s -= slope * |p - j|;  s += attn_bias
        out = dropout(softmax(s over the keys that the mask lets see)) v

    Query i stands at position p = i, or with causal_align "bottom_right" at p = i + Sk - Sq, where query_lengths and
    key_lengths replace Sq and Sk if given. masks.py says which keys j it sees.

    Shapes: B batch, Sq queries, Sk keys, H heads (a multiple of K key heads), D and E head dims, 1 to 512 each.
        layout           query             key               value
        "bshd"           [B, Sq, H, D]     [B, Sk, K, D]     [B, Sk, K, E]
        "bhsd"           [B, H, Sq, D]     [B, K, Sk, D]     [B, K, Sk, E]
        "sbhd"           [Sq, B, H, D]     [Sk, B, K, D]     [Sk, B, K, E]
        "bmghk"          [B, Sq, G, H, D]  [B, Sk, G, H, D]  [B, Sk, G, H, E]; H there are the heads of a group
        query, key, value   one dtype: float16, bfloat16, float32 or float64 (float64 without our kernels). The last dim
                         has stride 1, the others any: what is expanded (stride 0) along heads or groups is read once
        attn_bias        broadcasts to [B, H, Sq, Sk] from 2 to 4 dims; bool (True: is seen) or floating, added. Its
                         gradient has its own shape
        is_causal        no key after the query's position
        causal_align     where positions count from: "bottom_right", the last query at the last key, or "top_left", the
                         first at the first. The same if Sq == Sk. Windows, chunks and ALiBi count so too
        window_size      (left, right) keys before and after the position that are seen, -1: all; is_causal holds too
        chunk_size       positions see the keys of their own chunk of this size only; 0: no chunks
        prefix_lengths   [B] int: keys below it are seen, whatever causal, window and chunk say
        document_ids     [B, Sq] int, or a pair ([B, Sq], [B, Sk]): equal ids see each other, a negative one nobody
        alibi_slopes     [H] or [B, H], floating, without a gradient
        softcap          0: none
        sinks            [H] floating: one more score per head in the softmax's denominator, with no value, not scaled
                         or capped; with gradient
        scale            a number; None: D^-0.5
        dropout_p        in [0, 1), applied whenever it is not 0
        dropout_seed     [2] int64 on the device: drops the same elements whatever backend, tiles and packing; backends
                         that draw their own are not taken then. None: from PyTorch's generator of the device, so that
                         torch.manual_seed, checkpointing and CUDA graphs act as on F.dropout
        query_lengths, key_lengths   [B] int: how many of Sq and Sk count, the first ones. Never read by the host but on
                         the CPU; what lies behind them is not read either (NaN does not leak), its results are 0
        return_lse       (out, lse): also the log-sum-exp of the scores, differentiable
        deterministic    backward must give the same bits every time; None: as torch.use_deterministic_algorithms says.
                         Ours always do; others are not taken
        backend          a name, or names to try in order and no others; "-name" forbids. See attention_backend,
                         explain_attention and docs/attention.md
    int is int32 or int64 (converted).

    Returns out in query's layout and dtype, with E for D; with return_lse also LSE in nats, float32 (float64 for
        float64): [B, H, Sq], for "bmghk" [B, G, H, Sq]. A query that sees no key gives 0 and an LSE of -inf (the sink's
        score with a sink), and its gradients are 0. Under autocast query, key and value are cast to autocast's dtype.
    Numerics: scores, softmax and sums in float32; probabilities are rounded to value's dtype before their product.
        float32 products are full precision unless torch.set_float32_matmul_precision allows TF32.
    Memory beyond inputs and results, our kernel: LSE, 4 * B * H * Sq bytes, is saved beside inputs and out; backward
        takes 8 * B * H * ceil(Sq / 128) * 128 bytes; document_ids 8 * B * (Sq + Sk) and their sorting; the gradient of
        sinks 4 * B * H * Sq * (E + 3). On the CPU "chunked" takes about 0.2 GiB of scores, and float32 gradients. Only
        "reference" keeps 4 * B * H * Sq * Sk bytes, several times, and repeats key heads.
    Raises ValueError naming the argument, what it must be and what it was; NoBackendError with every backend's reasons
        and the smallest change where none that is allowed takes the call. Double backward raises and names the way out.
    Source: Dao, arXiv:2307.08691 (FlashAttention-2); Rabe and Staats, arXiv:2112.05682; Press et al., arXiv:2108.12409
        (ALiBi); Xiao et al., arXiv:2309.17453 (sinks).
    """
    op = "attention"
    if layout == "thd":
        checks.fail(op, "layout", f"be one of {', '.join(map(repr, _DENSE))}", "'thd' (use varlen_attention)")
    checks.one_of(op, "layout", layout, _DENSE)
    query, key, value = _autocast(op, query, key, value)
    sizes = check_qkv(op, query, key, value, layout)
    for name, lengths in (("query_lengths", query_lengths), ("key_lengths", key_lengths)):
        checks.shape(op, name, lengths, (sizes.batch,), "batch")
    checks.same_device(op, "query", query, query_lengths=query_lengths, key_lengths=key_lengths)
    mask, tensors = lower_mask(
        op, sizes, attn_bias=attn_bias, is_causal=is_causal, causal_align=causal_align, window_size=window_size,
        chunk_size=chunk_size, prefix_lengths=prefix_lengths, document_ids=document_ids, alibi_slopes=alibi_slopes,
        softcap=softcap, sinks=sinks,
    )  # fmt: skip
    query_lengths = as_int32(op, "query_lengths", query_lengths)
    key_lengths = as_int32(op, "key_lengths", key_lengths)
    varlen = Varlen(None, None, query_lengths, key_lengths, sizes.queries, sizes.keys)
    call = make_call(
        op, query, key, value, layout, mask, tensors, varlen, scale, dropout_p, dropout_seed, return_lse, deterministic
    )
    return _run(call, sizes, dropout_seed is not None, backend)


@falls_back("varlen_attention")
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_k_padded: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    is_causal: bool = False,
    causal_align: Alignment = "bottom_right",
    window_size: tuple[int, int] = (-1, -1),
    chunk_size: int = 0,
    prefix_lengths: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | Sequence[str] | None = None,
) -> Any:
    """`attention` over sequences of different lengths that are packed one behind the other, layout "thd".

    Shapes: T tokens of all B sequences, for queries Tq, for keys Tk; H heads (a multiple of K key heads), D and E head
        dims, 1 to 512 each.
        query          [Tq, H, D]  dtypes and strides as in `attention`
        key, value     [Tk, K, D], [Tk, K, E]
        cu_seqlens_q   [B + 1] int32 or int64 (converted) on query's device: sequence n is rows cu[n] to cu[n + 1]. May
                       repeat (an empty sequence) and end before Tq. Never read by the host but on the CPU
        cu_seqlens_k   the same of the keys; None: cu_seqlens_q
        max_seqlen_q, max_seqlen_k   upper bounds known to the host, for flash-2, which launches by them (too small a
                       one leaves rows out); our kernel needs none. None: Tq, Tk
        cu_seqlens_q_padded, cu_seqlens_k_padded   [B + 1]: where sequences begin, if not one behind the other; the
                       differences of cu_seqlens are then their lengths only
        seqused_q, seqused_k   [B]: their lengths, if less than that
        prefix_lengths [B]; alibi_slopes [H] or [B, H]; sinks [H]
    is_causal to backend are those of `attention`: positions count within a sequence, as do dropout's rows and columns
    (and the sequence's number in the batch), so that packing changes no result.

    Returns out [Tq, H, E] in query's dtype; with return_lse also LSE [H, Tq] in nats, float32 (float64 for float64),
        differentiable. Rows of no sequence, between two and behind the last, are 0 with an LSE of -inf and have zero
        gradients, and are never read: NaN there does not leak.
    Numerics, determinism and errors are those of `attention`.
    Memory beyond inputs and results, our kernel: 4 * H * Tq bytes saved, 8 * H * ceil(Tq / 128) * 128 in backward.
    Source: as for `attention`; arguments of flash_attn_varlen_func and TransformerEngine's thd.
    """
    op = "varlen_attention"
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        checks.tensor(op, name, tensor)
        if tensor.dim() != 1 or tensor.shape[0] == 0:
            checks.fail(op, name, "have shape [batch + 1]", list(tensor.shape))
    checks.shape(op, "cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape, "as cu_seqlens_q")
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if longest is not None and not (isinstance(longest, int) and longest >= 0):
            checks.fail(op, name, "be an integer of at least 0, known to the host, or None", repr(longest))
    query, key, value = _autocast(op, query, key, value)
    sizes = check_qkv(op, query, key, value, "thd")._replace(batch=cu_seqlens_q.shape[0] - 1)
    checks.same_device(
        op, "query", query, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q,
        seqused_k=seqused_k, cu_seqlens_q_padded=cu_seqlens_q_padded, cu_seqlens_k_padded=cu_seqlens_k_padded,
    )  # fmt: skip
    query_starts, query_used = sequence_starts(op, "q", cu_seqlens_q, cu_seqlens_q_padded, seqused_q)
    key_starts, key_used = query_starts, query_used
    ours, others = (cu_seqlens_q, cu_seqlens_q_padded, seqused_q), (cu_seqlens_k, cu_seqlens_k_padded, seqused_k)
    if any(x is not y for x, y in zip(ours, others, strict=True)):
        key_starts, key_used = sequence_starts(op, "k", *others)
    varlen = Varlen(query_starts, key_starts, query_used, key_used, max_seqlen_q or 0, max_seqlen_k or 0)
    mask, tensors = lower_mask(
        op, sizes, is_causal=is_causal, causal_align=causal_align, window_size=window_size, chunk_size=chunk_size,
        prefix_lengths=prefix_lengths, alibi_slopes=alibi_slopes, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    call = make_call(
        op, query, key, value, "thd", mask, tensors, varlen, scale, dropout_p, dropout_seed, return_lse, deterministic
    )
    return _run(call, sizes, dropout_seed is not None, backend)


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


def _window(op: str, window_size: tuple[int, int]) -> tuple[int, int]:
    must = "be two integers of at least -1, (left, right), -1 for no bound"
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        checks.fail(op, "window_size", must, repr(window_size))
    left, right = window_size
    if not (isinstance(left, int) and isinstance(right, int) and left >= -1 and right >= -1):
        checks.fail(op, "window_size", must, repr(window_size))
    return left, right


def lower_mask(
    op: str,
    sizes: Sizes,
    *,
    attn_bias: Tensor | None = None,
    is_causal: bool = False,
    causal_align: Alignment = "bottom_right",
    window_size: tuple[int, int] = (-1, -1),
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
    left, right = _window(op, window_size)
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


def _run(call: AttentionCall, sizes: Sizes, seeded: bool, backend: str | Sequence[str] | None) -> Any:
    """Choose a backend by the facts of the call, and run it."""
    op = "varlen_attention" if call.layout == "thd" else "attention"
    if use_kernel(op, call.query):
        refuse_vmap(op, call.query, call.key, call.value)
    facts = _facts(call, sizes, seeded)
    if torch.compiler.is_compiling():
        plain = (*facts[:4], *(getattr(call.mask, name) for name in _MASK_FIELDS), *facts[5:-1], *facts[-1])
        chosen = select.BACKENDS[select.name_traced(problem_of, backend, *(_constant(fact) for fact in plain))]
    else:
        chosen = select.choose(facts, lambda: problem_of(*facts), backend)
    if call.dropout_p > 0 and call.dropout_seed is None and chosen.draws_keep:
        call = replace(call, dropout_seed=draw_seed(call.query.device))
    out, lse = chosen.run(call)
    return (out, lse) if call.return_lse else out


def _facts(call: AttentionCall, sizes: Sizes, seeded: bool) -> tuple[Any, ...]:
    """The arguments of `problem_of`: cheap to make, to hash and to compare, for they are looked up at every call."""
    query, key, value, varlen, tensors = call.query, call.key, call.value, call.varlen, call.tensors
    needs_grad = torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (tensors.bias is not None and tensors.bias.requires_grad)
        or (tensors.sinks is not None and tensors.sinks.requires_grad)
    )
    equal = varlen.query_starts is varlen.key_starts if call.layout == "thd" else None
    compiling = is_traced(query)
    elements = query.numel() + key.numel() + value.numel()
    batch, heads, kv_heads, queries, keys = sizes
    return (
        query.dtype, query.shape[-1], value.shape[-1], query.device, call.mask, call.layout, heads, kv_heads,
        varlen.query_used is not None or varlen.key_used is not None, call.dropout_p, seeded, needs_grad,
        call.return_lse, call.deterministic, _aligned(query, key, value, compiling), compiling,
        query.dtype is torch.float32 and select.allows_tf32(),
        Lengths.facts(queries, keys, equal, batch, elements),
    )  # fmt: skip


def _constant(fact: Any) -> Any:
    """A fact as a constant, where Dynamo traces sizes as symbols."""
    if isinstance(fact, bool):
        return True if fact else False
    if isinstance(fact, float):
        return float(f"{fact}")
    return index(fact) if isinstance(fact, int) else fact


def problem_of(
    dtype: torch.dtype,
    head_dim_qk: int,
    head_dim_v: int,
    device: torch.device,
    mask: MaskSpec,
    layout: Layout,
    num_heads: int,
    num_kv_heads: int,
    has_key_lengths: bool,
    dropout_p: float,
    dropout_seeded: bool,
    needs_grad: bool,
    needs_lse: bool,
    deterministic: bool,
    aligned: bool,
    compiling: bool,
    tf32: bool,
    lengths: tuple[Any, ...],
) -> AttentionProblem:
    """The problem of a call's facts, on the device of its tensors."""
    return AttentionProblem(
        dtype,
        head_dim_qk,
        head_dim_v,
        None if device.type == "cpu" else Target.of(device),
        mask,
        layout,
        num_heads,
        num_kv_heads,
        Lengths(*lengths),
        has_key_lengths,
        dropout=dropout_p > 0,
        dropout_in_sixteenths=(dropout_p * 16).is_integer(),
        dropout_seeded=dropout_seeded,
        needs_grad=needs_grad,
        needs_lse=needs_lse,
        needs_lse_grad=needs_lse and needs_grad,
        deterministic=deterministic,
        aligned=aligned,
        compiling=compiling,
        tf32=tf32,
    )


def _autocast(op: str, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three in autocast's dtype, as F.scaled_dot_product_attention casts its own."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        checks.tensor(op, name, x)
    kind = query.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind) or query.dtype is torch.float64:
        return query, key, value
    dtype = torch.get_autocast_dtype(kind)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _aligned(query: Tensor, key: Tensor, value: Tensor, compiling: bool) -> bool:
    """Base addresses and strides are multiples of 16 bytes (traced tensors have no address yet: taken to be)."""
    size = query.element_size()
    if compiling:  # sizes may be symbols, which know no `|`
        return all(stride * size % 16 == 0 for x in (query, key, value) for stride in x.stride()[:-1])
    if query.is_contiguous() and key.is_contiguous() and value.is_contiguous():
        bits = query.shape[-1] | value.shape[-1]  # every stride is a multiple of one of them
    else:
        bits = 0
        for x in (query, key, value):
            for stride in x.stride()[:-1]:
                bits |= stride
    return (bits * size | query.data_ptr() | key.data_ptr() | value.data_ptr()) % 16 == 0


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
