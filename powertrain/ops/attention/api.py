"""The public attention functions: they check the arguments (arguments.py), choose a backend (select.py) and run it."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from operator import index
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, overload

import torch
from torch import Tensor

from powertrain.ops.attention import select
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
from powertrain.ops.attention.backend_registry import BACKENDS
from powertrain.ops.attention.invariant import run_invariant
from powertrain.ops.attention.mask import MaskSpec, MaskTensors
from powertrain.ops.attention.problem import LAYOUTS, AttentionCall, AttentionProblem, Layout, Lengths
from powertrain.ops.batch_invariance import is_batch_invariant
from powertrain.ops.philox import dropout_seed as draw_seed
from powertrain.runtime import checks
from powertrain.runtime.dispatch import falls_back, has_kernels, is_traced, refuse_vmap, use_kernel, wants_grad
from powertrain.runtime.float32_products import allows_tf32
from powertrain.runtime.plain_calls import plain
from powertrain.runtime.target import Target

if TYPE_CHECKING:
    from typing_extensions import Unpack

# read once: the fields are walked in every traced call
_MASK_FIELDS = tuple(field.name for field in fields(MaskSpec))
_DENSE = tuple(name for name in LAYOUTS if name != "thd")


class _Options(TypedDict, total=False):
    """Keywords of both functions, for type checkers; `return_lse` decides the type of the result."""

    is_causal: bool
    causal_align: Alignment
    window_size: tuple[int, int]
    chunk_size: int
    prefix_lengths: Tensor | None
    alibi_slopes: Tensor | None
    softcap: float | None
    sinks: Tensor | None
    scale: float | None
    dropout_p: float
    dropout_seed: Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    deterministic: bool | None
    backend: str | Sequence[str] | None


class _Dense(_Options, total=False):
    attn_bias: Tensor | None
    document_ids: Tensor | tuple[Tensor, Tensor] | None
    layout: Layout


class _Packed(_Options, total=False):
    cu_seqlens_q_padded: Tensor | None
    cu_seqlens_k_padded: Tensor | None


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[False] = False, **options: "Unpack[_Dense]"
) -> Tensor: ...
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[True], **options: "Unpack[_Dense]"
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool, **options: "Unpack[_Dense]"
) -> Tensor | tuple[Tensor, Tensor]: ...
@falls_back("attention", preference_or_none)
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
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    layout: Layout = "bshd",
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | Sequence[str] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention for every mask, layout and head dim, by the backend that was fastest on problems like the call.

        s = scale * q k^T;  s = softcap * tanh(s / softcap);  s -= slope * |p - j|;  s += attn_bias
        out = dropout(softmax(s over the keys that the mask lets see)) v

    Query i stands at position p = i, or with causal_align "bottom_right" at p = i + Sk - Sq, where seqused_q and
    seqused_k replace Sq and Sk if given. mask.py says which keys j it sees.

    Shapes: B batch, Sq queries, Sk keys, H heads (a multiple of K key heads), D and E head dims, 1 to 512 each.
        layout           query             key               value
        "bshd"           [B, Sq, H, D]     [B, Sk, K, D]     [B, Sk, K, E]
        "bhsd"           [B, H, Sq, D]     [B, K, Sk, D]     [B, K, Sk, E]
        "sbhd"           [Sq, B, H, D]     [Sk, B, K, D]     [Sk, B, K, E]
        "bmghk"          [B, Sq, G, H, D]  [B, Sk, G, H, D]  [B, Sk, G, H, E]; H there are the heads of a group
        query, key, value   one dtype: float16, bfloat16, float32 or float64 (float64 without our kernels). The last dim
                         has stride 1, the others any: expanded (stride 0) heads or groups are read once
        attn_bias        broadcasts to [B, H, Sq, Sk] from 2 to 4 dims; bool (True: is seen) or floating, added. Its
                         gradient has its own shape
        is_causal        no key after the query's position
        causal_align     where positions count from: "bottom_right", the last query at the last key, or "top_left", the
                         first at the first. The same if Sq == Sk. Windows, chunks and ALiBi count so too
        window_size      (left, right) keys before and after the position that are seen, -1: all; is_causal holds too
        chunk_size       positions see the keys of their own chunk of this size only; 0: no chunks
        prefix_lengths   [B] int: keys below it are seen, whatever causal, window and chunk say
        document_ids     [B, Sq] int, or a pair ([B, Sq], [B, Sk]): equal ids see each other, a negative one nobody.
                         Documents that lie one behind the other are faster as sequences of `varlen_attention`
        alibi_slopes     [H] or [B, H], floating, without a gradient
        softcap          None or 0: none
        sinks            [H] floating: one more score per head in the softmax's denominator, with no value, not scaled
                         or capped; with gradient
        scale            a number; None: D^-0.5
        dropout_p        in [0, 1), applied whenever it is not 0
        dropout_seed     [2] int64 on the device: drops the same elements whatever backend, tiles and packing; backends
                         that draw their own are not taken then. None: from PyTorch's generator of the device, so that
                         torch.manual_seed, checkpointing and CUDA graphs act as on F.dropout
        seqused_q, seqused_k   [B] int: how many of Sq and Sk count, the first ones. Never read by the host but on
                         the CPU; rows behind them are not read either (NaN does not leak), their results are 0
        return_lse       (out, lse): also the log-sum-exp of the scores, differentiable
        deterministic    backward must give the same bits every time; None: as torch.use_deterministic_algorithms says.
                         The universal kernels always do, Hopper's then sum dq in a fixed order; backends that
                         cannot are not taken
        backend          a name, or names to try in order and no others; "-name" forbids. See attention_backend,
                         explain_attention and docs/attention.md
    int is int32 or int64 (converted).

    Returns out in query's layout and dtype, with E for D; with return_lse also LSE in nats, float32 (float64 for
        float64): [B, H, Sq], for "bmghk" [B, G, H, Sq]. A query that sees no key gives 0 and an LSE of -inf (the sink's
        score with a sink), and its gradients are 0. Under autocast query, key and value are cast to autocast's dtype.
    Numerics: scores, softmax and sums in float32; probabilities are rounded to value's dtype before their product.
        float32 products are full precision unless PyTorch is set to allow TF32.
    Memory beyond inputs and results, our kernel: LSE, 4 * B * H * Sq bytes, is saved beside inputs and out; backward
        takes 8 * B * H * ceil(Sq / 128) * 128 bytes, the Hopper one besides 4 for each of dq's elements, head dims
        rounded up to 64, 80, 96, 128, 160, 192 or 256, and 4 * B * K * Sk * (D + E) where query heads of a KV head are
        split over tiles. Where the GPU has TMA attn_bias is copied, once in the forward and once in the
        backward, without what it is broadcast to: a boolean one as 2 bytes an element, another one if its rows are no
        multiple of 16 bytes apart. The gradient of a bias that is broadcast takes 4 * B * H * Sq * Sk bytes more, if
        these are at most 256 MiB, and else more time. On the CPU "chunked" takes about 0.2 GiB of scores, and float32
        gradients. Only "reference" keeps 4 * B * H * Sq * Sk bytes, several times, and repeats key heads.
    Raises ValueError with the argument's name, requirement and value; NoBackendError with every backend's reasons
        and the smallest change where none that is allowed takes the call. Our kernel's double backward and vmap raise
        and name the way out.
    Source: Dao, arXiv:2307.08691 (FlashAttention-2); Rabe and Staats, arXiv:2112.05682; Press et al., arXiv:2108.12409
        (ALiBi); Xiao et al., arXiv:2309.17453 (sinks).
    """
    op = "attention"
    # thd needs cu_seqlens, so it is a function of its own; the error names it
    if layout == "thd":
        checks.fail(op, "layout", f"be one of {', '.join(map(repr, _DENSE))}", "'thd' (use varlen_attention)")
    checks.one_of(op, "layout", layout, _DENSE)
    # autocast is applied ahead of the checks, which compare the dtypes of the three
    query, key, value = _autocast(op, query, key, value)
    mask = MaskArguments(
        attn_bias, is_causal, causal_align, window_size, chunk_size, prefix_lengths, document_ids, alibi_slopes,
        softcap, sinks,
    )  # fmt: skip
    options = CallOptions(scale, dropout_p, dropout_seed, return_lse, deterministic)
    call = dense_call(op, query, key, value, layout, (seqused_q, seqused_k), mask, options)
    return _run(call, backend)


@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    *,
    return_lse: Literal[False] = False,
    **options: "Unpack[_Packed]",
) -> Tensor: ...
@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    *,
    return_lse: Literal[True],
    **options: "Unpack[_Packed]",
) -> tuple[Tensor, Tensor]: ...
@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    *,
    return_lse: bool,
    **options: "Unpack[_Packed]",
) -> Tensor | tuple[Tensor, Tensor]: ...
@falls_back("varlen_attention", preference_or_none)
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
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | Sequence[str] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` over sequences of different lengths that are packed one behind the other, layout "thd".

    Shapes: T tokens of all B sequences, for queries Tq, for keys Tk; H heads (a multiple of K key heads), D and E head
        dims, 1 to 512 each.
        query          [Tq, H, D]  dtypes and strides as in `attention`
        key, value     [Tk, K, D], [Tk, K, E]
        cu_seqlens_q   [B + 1] int32 or int64 (converted) on query's device: sequence n is rows cu[n] to cu[n + 1]. May
                       repeat (an empty sequence), begin behind 0 and end before Tq. Never read by the host but on the
                       CPU
        cu_seqlens_k   the same of the keys; None: cu_seqlens_q
        max_seqlen_q, max_seqlen_k   upper bounds known to the host, for flash-2, which launches by them (too small a
                       one leaves rows out); our kernel needs none. None: Tq, Tk
        cu_seqlens_q_padded, cu_seqlens_k_padded   [B + 1]: where sequences begin, if not one behind the other,
                       ascending; the differences of cu_seqlens are then their lengths only
        seqused_q, seqused_k   [B]: their lengths, if less than that. With seqused_k, and without cu_seqlens_k_padded,
                       keys lie anywhere: sequence n has seqused_k[n] rows from cu_seqlens_k[n] on, and starts may be in
                       any order, and rows those of several sequences, whose gradients add up. (With
                       cu_seqlens_k_padded the Hopper backward can run, without it the universal one)
        prefix_lengths [B]; alibi_slopes [H] or [B, H]; sinks [H]
    is_causal to backend are those of `attention`: positions count within a sequence, as do dropout's rows and columns
    (and the sequence's number in the batch), so that packing changes no result.

    Returns out [Tq, H, E] in query's dtype; with return_lse also LSE [H, Tq] in nats, float32 (float64 for float64),
        differentiable. Rows of no sequence, ahead of the first, between two and behind the last, are 0 with an LSE of
        -inf and have zero gradients, and are never read: NaN there does not leak.
    Numerics, determinism and errors are those of `attention`.
    Memory beyond inputs and results, our kernel: 4 * H * Tq bytes saved, 8 * H * ceil(Tq / 128) * 128 in backward, on
        Hopper besides as for `attention`.
    Source: as for `attention`; arguments of flash_attn_varlen_func and TransformerEngine's thd.
    """
    op = "varlen_attention"
    query, key, value = _autocast(op, query, key, value)
    sequences = PackedSequences(
        cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded, cu_seqlens_k_padded, seqused_q, seqused_k, max_seqlen_q,
        max_seqlen_k,
    )  # fmt: skip
    mask = MaskArguments(
        None, is_causal, causal_align, window_size, chunk_size, prefix_lengths, None, alibi_slopes, softcap, sinks
    )
    options = CallOptions(scale, dropout_p, dropout_seed, return_lse, deterministic)
    return _run(packed_call(op, query, key, value, sequences, mask, options), backend)


def _run(call: AttentionCall, backend: str | Sequence[str] | None) -> Any:
    """Choose a backend by the facts of the call, and run it."""
    if not call.scale > 0:
        call, _ = with_positive_scale(call)
    # the selector depends on sizes, and batch-invariant bits must not: it is not asked there
    if is_batch_invariant():
        result = run_invariant(call)
        return result if call.return_lse else result[0]
    op = "varlen_attention" if call.layout == "thd" else "attention"
    # functorch's vmap sees the op's outside only; the message names the alternative
    if use_kernel(op, call.query):
        refuse_vmap(op, call.query, call.key, call.value)
    facts = facts_of(call)
    if torch.compiler.is_compiling():
        # Dynamo traces the selection as a constant: a graph is compiled for one backend
        name, backward = select.names_traced(problem_of, backend, *facts.as_constants())
        chosen = BACKENDS[name]
    else:
        if facts.compiling:
            facts = facts.without_symbols()
        decision = select.choose(facts, lambda: problem_of(*facts), backend)
        chosen, backward = decision.backend, decision.other_backward
    # drawn here and not in the backend, so that forward, recomputation and backward share one seed
    if call.dropout_p > 0 and call.dropout_seed is None and chosen.uses_philox_seed:
        call = replace(call, dropout_seed=draw_seed(call.query.device))
    if not has_kernels(call.query) and _draws_none_and_takes_no_others(call):
        return _plain(call, chosen.run)
    # only SEPARABLE forwards take the name of a backward
    out, lse = chosen.run(call) if backward is None else chosen.run(call, backward=backward)  # type: ignore[call-arg]
    return (out, lse) if call.return_lse else out


def _draws_none_and_takes_no_others(call: AttentionCall) -> bool:
    """Whether a call has no tensors besides query, key, value and a bias."""
    others = (*call.tensors._replace(bias=None), *call.varlen[:4])
    return call.dropout_p == 0 and all(x is None for x in others)


def _plain(call: AttentionCall, run: Callable[[AttentionCall], tuple[Tensor, Tensor | None]]) -> Any:
    """Run the call on a backend of plain PyTorch, and let repeated calls skip the checks."""
    layout, mask, varlen, has_lse = call.layout, call.mask, call.varlen, call.return_lse
    rest = call.scale, call.dropout_p, None, has_lse, call.deterministic, call.sizes

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Any:
        tensors = MaskTensors(bias=bias)
        result = run(AttentionCall(query, key, value, layout, mask, tensors, varlen, *rest))
        return result if has_lse else result[0]

    return plain(attend, call.query, call.key, call.value, call.tensors.bias)


class Facts(NamedTuple):
    """The properties of a call that the choice of a backend depends on; cheap to build, hash and compare in each
    call."""

    dtype: torch.dtype
    head_dim_qk: int
    head_dim_v: int
    device: torch.device
    mask: MaskSpec
    layout: Layout
    num_heads: int
    num_kv_heads: int
    has_key_lengths: bool
    has_unordered_keys: bool
    dropout_p: float
    dropout_seeded: bool
    needs_grad: bool
    needs_lse: bool
    deterministic: bool
    aligned: bool
    compiling: bool
    tf32: bool
    lengths: tuple[Any, ...]  # fields of Lengths

    def as_constants(self) -> tuple[Any, ...]:
        """Facts as arguments of `select.names_traced`: mask and lengths as their fields, without symbolic sizes."""
        mask = (getattr(self.mask, name) for name in _MASK_FIELDS)
        return tuple(_constant(fact) for fact in (*self[:4], *mask, *self[5:-1], *self.lengths))

    def without_symbols(self) -> "Facts":
        """Facts without symbolic sizes, for use as a key: fake tensors may have such sizes outside of torch.compile
        too."""
        return Facts._make((*map(_guarded, self[:-1]), tuple(map(_guarded, self.lengths))))


def facts_of(call: AttentionCall) -> Facts:
    query, key, value, varlen, tensors = call.query, call.key, call.value, call.varlen, call.tensors
    # needs_grad is asked of the inputs: a backend without backward may serve in evaluation
    needs_grad = wants_grad(query, key, value, tensors.bias, tensors.sinks)
    # identity of the two tensors: equal values would have to be read from the device
    equal = varlen.query_starts is varlen.key_starts if call.layout == "thd" else None
    compiling = is_traced(query)
    elements = query.numel() + key.numel() + value.numel()
    batch, heads, kv_heads, queries, keys = call.sizes
    # the bound of flash-2's launch tells how unequal packed sequences are
    longest = varlen.max_queries if call.layout == "thd" else None
    return Facts(
        query.dtype, query.shape[-1], value.shape[-1], query.device, call.mask, call.layout, heads, kv_heads,
        varlen.query_used is not None or varlen.key_used is not None, varlen.unordered, call.dropout_p,
        call.dropout_seed is not None, needs_grad, call.return_lse, call.deterministic,
        # TF32 is a global setting of PyTorch, so it is read at each call
        _aligned(query, key, value, compiling), compiling, query.dtype is torch.float32 and allows_tf32(),
        Lengths.facts(queries, keys, equal, batch, elements, longest, compiling, call.mask.bias != "none"),
    )  # fmt: skip


def _constant(fact: Any) -> Any:
    """A size as a constant, where Dynamo traces sizes as symbols."""
    # bool is a subclass of int, so it is asked first
    if isinstance(fact, bool):
        return True if fact else False
    if isinstance(fact, float):
        # a symbolic float becomes a plain one by its text
        return float(f"{fact}")
    return index(fact) if isinstance(fact, int) else fact


def _guarded(fact: Any) -> Any:
    if isinstance(fact, torch.SymBool):
        return bool(fact)
    return int(fact) if isinstance(fact, torch.SymInt) else fact


def problem_of(*facts: Any) -> AttentionProblem:
    """The problem of a call's Facts, on the device of its tensors."""
    f = Facts(*facts)
    return AttentionProblem(
        f.dtype,
        f.head_dim_qk,
        f.head_dim_v,
        # the CPU has no Target: CPU backends depend on no arch
        None if f.device.type == "cpu" else Target.of(f.device),
        f.mask,
        f.layout,
        f.num_heads,
        f.num_kv_heads,
        Lengths(*f.lengths),
        f.has_key_lengths,
        f.has_unordered_keys,
        dropout=f.dropout_p > 0,
        dropout_seeded=f.dropout_seeded,
        needs_grad=f.needs_grad,
        needs_lse=f.needs_lse,
        # whether a returned LSE will get a gradient is not known yet; it can if anything requires one
        needs_lse_grad=f.needs_lse and f.needs_grad,
        deterministic=f.deterministic,
        aligned=f.aligned,
        compiling=f.compiling,
        tf32=f.tf32,
    )


def _autocast(op: str, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value in autocast's dtype, as F.scaled_dot_product_attention casts them."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        checks.tensor(op, name, x)
    kind = query.device.type
    # autocast leaves float64 alone in F.scaled_dot_product_attention too
    if kind == "meta" or not torch.is_autocast_enabled(kind) or query.dtype is torch.float64:
        return query, key, value
    dtype = torch.get_autocast_dtype(kind)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _aligned(query: Tensor, key: Tensor, value: Tensor, compiling: bool) -> bool:
    """Base addresses and strides are multiples of 16 bytes. Traced tensors have no address yet; theirs are assumed to
    be."""
    size = query.element_size()
    # sizes may be symbols, which know no `|`
    if compiling:
        return all(stride * size % 16 == 0 for x in (query, key, value) for stride in x.stride()[:-1])
    if query.is_contiguous() and key.is_contiguous() and value.is_contiguous():
        # every stride is a multiple of one of them
        bits = query.shape[-1] | value.shape[-1]
    else:
        bits = 0
        for x in (query, key, value):
            for stride in x.stride()[:-1]:
                bits |= stride
    # a set low bit of any stride or address is a misalignment, so one OR and one remainder test them all
    return (bits * size | query.data_ptr() | key.data_ptr() | value.data_ptr()) % 16 == 0
