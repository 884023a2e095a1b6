"""The universal backend: our own Triton kernels, for every problem on every GPU.

Forward: triton/forward.py. Backward: triton/backward.py, two kernels without atomics (dk and dv per block of keys, dq
per block of queries), so it is deterministic. Saved for backward: the inputs, out, and lse, float32 [b, h, sq].

Memory beyond inputs and results: backward 8 * b * h * sq bytes (lse in base 2, and delta), and where tiles are read
through descriptors 384 to 768 bytes a program, each of 64 or more rows of a head.
FLOPs: forward 2 * pairs * (dqk + dv) per head, backward 2 * pairs * (3 * dqk + 2 * dv) useful, and one product of each
kind more for computing scores twice, where pairs counts what the mask lets see.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from powertrain.ops.attention.layouts import to_lse_order
from powertrain.ops.attention.problem import AttentionCall, AttentionProblem, Layout, Reason
from powertrain.ops.attention.triton.backward import (
    _attention_bwd_preprocess_kernel,
    _attention_dbias_kernel,
    _attention_dkdv_kernel,
    _attention_dq_kernel,
)
from powertrain.ops.attention.triton.forward import _attention_fwd_kernel
from powertrain.ops.attention.triton.plans import (
    FMA_PIECE,
    dkdv_parts,
    dot_precision,
    plan_dbias,
    plan_dkdv,
    plan_dq,
    plan_fwd,
    uses_fma,
)
from powertrain.ops.attention.triton.tiles import Features, pieces
from powertrain.ops.philox import threshold
from powertrain.ops.shapes import cdiv, empty, next_power_of_2, wanted
from powertrain.runtime.dispatch import Op
from powertrain.runtime.flops import Shape
from powertrain.runtime.settings import settings
from powertrain.runtime.target import Target


class _Heads(NamedTuple):
    """Query heads as kv heads times repeats, and where the dims of a tensor lie for that."""

    kv: int
    repeats: int
    of_kv: int  # head = kv * of_kv + repeat * of_repeat, as the caller counts
    of_repeat: int
    shared: bool  # the repeats share a key and value head


class _Operand(NamedTuple):
    """A tensor with its strides by batch, sequence, kv head and repeat."""

    tensor: Tensor
    b: int
    s: int
    h: int
    r: int


def _heads(query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> _Heads:
    if layout == "bmghk":
        groups, heads = query.shape[2:4]
        if groups > 1 and heads > 0 and key.stride(2) == value.stride(2) == 0 != key.stride(3):
            return _Heads(heads, groups, 1, heads, True)
        return _Heads(groups, heads, heads, 1, heads > 1 and key.stride(3) == value.stride(3) == 0)
    dim = _HEAD_DIM[layout]
    heads, kv = query.shape[dim], key.shape[dim]
    if kv > 1 and key.stride(dim) == value.stride(dim) == 0:  # expanded by the caller
        return _Heads(1, heads, heads, 1, True)
    return _Heads(kv, heads // kv, heads // kv, 1, heads != kv)


_HEAD_DIM: dict[Layout, int] = {"bshd": 2, "bhsd": 1, "sbhd": 2, "thd": 1}
_BATCH_AND_SEQUENCE: dict[Layout, tuple[int, int]] = {"bshd": (0, 1), "bhsd": (0, 2), "sbhd": (1, 0), "bmghk": (0, 1)}


def _operand(x: Tensor, layout: Layout, heads: _Heads, is_key: bool = False) -> _Operand:
    b, s = (0, x.stride(0)) if layout == "thd" else (x.stride(dim) for dim in _BATCH_AND_SEQUENCE[layout])
    if layout == "bmghk":
        group, head = x.stride(2), x.stride(3)
        h, r = (head, group) if heads.of_kv == 1 and heads.repeats > 1 else (group, head)
    else:
        head = x.stride(_HEAD_DIM[layout])
        h, r = (head, 0) if is_key else (head * heads.repeats, head)
    return _Operand(x, b, s, h, 0 if is_key and heads.shared else r)


class _Shape(NamedTuple):
    batch: int
    queries: int  # of thd: tokens
    keys: int


def _shape(query: Tensor, key: Tensor, layout: Layout, starts: Tensor | None) -> _Shape:
    if layout == "thd":
        assert starts is not None
        return _Shape(starts.shape[0] - 1, query.shape[0], key.shape[0])
    b, s = _BATCH_AND_SEQUENCE[layout]
    return _Shape(query.shape[b], query.shape[s], key.shape[s])


def _feature(args: "_Args") -> str:
    """What weighs most on a tile beside the products."""
    if args.bias is not None or args.seed is not None:
        return "bias"
    if args.softcap > 0:
        return "softcap"
    if args.slopes is not None:
        return "alibi"
    return "window" if args.left >= 0 or args.chunk > 0 else "plain"


def _uses_tma(fma: bool, target: Target, *operands: _Operand) -> bool:
    """Descriptors want 16-byte addresses and strides."""
    if fma or not target.has_tma:
        return False
    for x, *strides in operands:
        elements = 16 // x.element_size()
        if (not x.is_meta and x.data_ptr() % 16) or any(stride % elements for stride in strides):
            return False
    return not settings().interpret


_TENSORS = 11  # the first so many arguments


class _Args(NamedTuple):
    """What forward and backward take besides query, key and value; the order of the ops' schemas."""

    bias: Tensor | None
    slopes: Tensor | None
    sinks: Tensor | None
    prefix: Tensor | None
    query_documents: Tensor | None
    key_documents: Tensor | None
    query_starts: Tensor | None
    key_starts: Tensor | None
    query_used: Tensor | None
    key_used: Tensor | None
    seed: Tensor | None
    layout: Layout
    scale: float
    softcap: float
    dropout_p: float
    left: int
    right: int
    chunk: int
    bottom_right: bool
    deterministic: bool = False  # the same gradients every time
    unordered: bool = False  # keys of sequences lie in any order, and may be those of several


_ARGS_SCHEMA = (
    "Tensor? bias, Tensor? slopes, Tensor? sinks, Tensor? prefix, Tensor? query_documents, Tensor? key_documents, "
    "Tensor? query_starts, Tensor? key_starts, Tensor? query_used, Tensor? key_used, Tensor? seed, str layout, "
    "float scale, float softcap, float dropout_p, int left, int right, int chunk, bool bottom_right, "
    "bool deterministic, bool unordered"
)


def _slots(shape: _Shape, tokens: int, starts: Tensor | None, block: int) -> int:
    """Blocks of a head: of thd as many as any lengths may need, and those ahead of the first sequence and behind the
    last."""
    return cdiv(tokens, block) if starts is None else cdiv(tokens, block) + shape.batch + 1


def _segments(starts: Tensor, used: Tensor, keys: int) -> Tensor:
    """Where sequences of keys, in any order, begin or end, [2 * batch] int32 ascending: between two of these, each
    sequence has all keys or none."""
    return torch.cat([starts[:-1], starts[:-1] + used]).clamp(0, keys).sort().values


def _swizzle(keys_bytes: int, repeats: int, target: Target) -> int:
    """Heads whose keys and values fit in the L2 together, a power of two."""
    return max(1, min(64, next_power_of_2(max(1, int(0.7 * target.l2_bytes * repeats / max(1, keys_bytes)))) // 2))


def _document_ranges(own: Tensor, other: Tensor) -> Tensor:
    """[b, s, 2] int32: the first and the end of the positions of `other` that have each position's document."""
    order, index = other.sort(dim=1, stable=True)
    low = torch.searchsorted(order, own.contiguous())
    high = torch.searchsorted(order, own.contiguous(), right=True)
    found = high > low
    limit = other.shape[1] - 1
    first = index.gather(1, low.clamp(max=limit))
    last = index.gather(1, (high - 1).clamp(min=0)) + 1
    first = torch.where(found, first, 2**31 - 1)
    return torch.stack([first, torch.where(found, last, 0)], -1).to(torch.int32)


def _alibi_kind(args: _Args) -> Literal["none", "two_sided", "one_sided"]:
    if args.slopes is None:
        return "none"
    return "one_sided" if args.right == 0 and args.prefix is None else "two_sided"


def _bias_strides(bias: Tensor) -> tuple[int, ...]:
    """Strides by batch, head, query and key; 0 where the bias is broadcast."""
    return tuple(0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride(), strict=True))


def _bias_kind(bias: Tensor | None, target: Target) -> Literal["none", "pointers", "descriptor", "one_row"]:
    if bias is None:
        return "none"
    if bias.shape[2] == 1:
        return "one_row"
    elements = 16 // bias.element_size()
    regular = bias.stride(3) == 1 and not any(s % elements for s in _bias_strides(bias)[:3])
    aligned = bias.is_meta or bias.data_ptr() % 16 == 0
    return "descriptor" if regular and aligned and target.has_tma and not settings().interpret else "pointers"


def _features(args: _Args, bias: Tensor | None, dtype: torch.dtype, target: Target) -> Features:
    return Features(
        has_left=args.left >= 0, has_right=args.right >= 0, has_chunk=args.chunk > 0,
        has_prefix=args.prefix is not None, bottom_right=args.bottom_right, alibi=_alibi_kind(args),
        bias=_bias_kind(bias, target), has_documents=args.query_documents is not None,
        has_dropout=args.seed is not None, has_softcap=args.softcap > 0,
        fast_tanh=dtype is not torch.float32 and not settings().interpret,
    )  # fmt: skip


def _mask_arguments(args: _Args, shape: _Shape, dtype: torch.dtype, target: Target) -> dict[str, Any]:
    """The kernels' arguments about masks, sequences and dropout."""
    bias = args.bias
    if bias is not None:
        bias = bias.view(torch.uint8) if bias.dtype is torch.bool else bias
    strides = (0,) * 4 if bias is None else _bias_strides(bias)
    return dict(
        bias_ptr=bias, slopes_ptr=args.slopes, prefix_ptr=args.prefix,
        q_starts_ptr=args.query_starts, k_starts_ptr=args.key_starts, q_used_ptr=args.query_used,
        k_used_ptr=args.key_used, seed_ptr=args.seed, batch=shape.batch, queries=shape.queries, keys=shape.keys,
        bias_stride_b=strides[0], bias_stride_h=strides[1], bias_stride_q=strides[2], bias_stride_k=strides[3],
        slopes_stride_b=args.slopes.shape[1] if args.slopes is not None and args.slopes.dim() == 2 else 0,
        scale=args.scale, softcap=args.softcap, left=args.left, right=args.right, chunk=args.chunk,
        threshold=threshold(args.dropout_p), keep_scale=1 / (1 - args.dropout_p),
        FEATURES=_features(args, bias, dtype, target),
    )  # fmt: skip


def _strides(**operands: _Operand) -> dict[str, Any]:
    """Pointer and strides of each operand under its kernel name."""
    named: dict[str, Any] = {}
    for name, (tensor, *strides) in operands.items():
        named[f"{name}_ptr"] = tensor
        named.update({f"stride_{name}{dim}": stride for dim, stride in zip("bshr", strides, strict=True)})
    return named


def _compute(query: Tensor, value: Tensor, target: Target) -> dict[str, Any]:
    d_qk, d_v = query.shape[-1], value.shape[-1]
    fma = uses_fma(query.dtype, d_qk, d_v, target)
    largest = FMA_PIECE if fma else 512
    return dict(
        D_QK=d_qk, D_V=d_v, P_QK=pieces(d_qk, largest), P_V=pieces(d_v, largest),
        FMA=fma,
        PRECISION=dot_precision(query.dtype, target),
    )  # fmt: skip


def _fwd_outputs(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    args = _Args(*rest)
    shape = [*query.shape[:-1], value.shape[-1]]
    out = query.new_empty(shape)
    if args.layout == "bhsd" and query.stride(1) < query.stride(2):  # keep the order of the dims in memory
        out = query.new_empty([shape[0], shape[2], shape[1], shape[3]]).transpose(1, 2)
    return out, torch.empty(_lse_shape(query, args.layout), dtype=torch.float32, device=query.device)


def _lse_shape(query: Tensor, layout: Layout) -> tuple[int, ...]:
    if layout == "thd":
        return query.shape[1], query.shape[0]
    if layout == "bmghk":
        return query.shape[0], query.shape[2], query.shape[3], query.shape[1]
    b, s = _BATCH_AND_SEQUENCE[layout]
    return query.shape[b], query.shape[_HEAD_DIM[layout]], query.shape[s]


def _attention_fwd(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    args = _Args(*rest)
    out, lse = _fwd_outputs(query, key, value, *rest)
    target = Target.of(query.device)
    heads, shape = _heads(query, key, value, args.layout), _shape(query, key, args.layout, args.query_starts)
    q, o = _operand(query, args.layout, heads), _operand(out, args.layout, heads)
    k, v = _operand(key, args.layout, heads, True), _operand(value, args.layout, heads, True)
    d_qk, d_v = query.shape[-1], value.shape[-1]
    compute = _compute(query, value, target)
    regular = _uses_tma(compute["FMA"], target, q, k, v)
    widths = sum(pieces(d_qk)), sum(pieces(d_v))
    plan = plan_fwd(query.element_size(), *widths, _feature(args), regular, compute["FMA"], target)
    blocks = _slots(shape, shape.queries, args.query_starts, plan.block_m)
    num_heads = heads.kv * heads.repeats * (shape.batch if args.query_starts is None else 1)
    ranges = None
    if args.query_documents is not None and args.key_documents is not None:
        ranges = _document_ranges(args.query_documents, args.key_documents)
    _attention_fwd_kernel[(blocks * num_heads,)](
        **_strides(q=q, k=k, v=v, o=o), **_mask_arguments(args, shape, query.dtype, target), **compute,
        lse_ptr=lse, sinks_ptr=args.sinks, qdoc_ptr=args.query_documents, kdoc_ptr=args.key_documents,
        qrange_ptr=ranges, kv_heads=heads.kv, num_q_per_kv=heads.repeats, head_of_kv=heads.of_kv,
        head_of_repeat=heads.of_repeat, blocks=blocks,
        swizzle=_swizzle(shape.keys * (d_qk + d_v) * key.element_size(), heads.repeats, target),
        BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, TMA=regular and plan.tma, num_warps=plan.num_warps,
        num_stages=plan.num_stages, maxnreg=plan.maxnreg,
    )  # fmt: skip
    return out, lse


def _bwd_outputs(
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
    args = _Args(*rest)
    heads = _heads(query, key, value, args.layout)
    like = [torch.empty_like(query) if need[0] else empty(query)]
    for x, wants in ((key, need[1]), (value, need[2])):
        like.append(_shared_empty(x, args.layout, heads) if wants else empty(query))
    dbias = empty(query)
    if need[3] and args.bias is not None:
        dbias = torch.empty_like(args.bias, memory_format=torch.contiguous_format)
    return like[0], like[1], like[2], dbias


def _expanded_dim(x: Tensor, layout: Layout, heads: _Heads) -> int | None:
    """The dim along which the caller expanded keys and values, of which we compute one."""
    if not heads.shared:
        return None
    if layout == "bmghk":
        return 2 if heads.of_kv == 1 else 3
    dim = _HEAD_DIM[layout]
    return dim if x.shape[dim] != heads.kv else None


def _shared_empty(x: Tensor, layout: Layout, heads: _Heads) -> Tensor:
    dim = _expanded_dim(x, layout, heads)
    return torch.empty_like(x if dim is None else x.narrow(dim, 0, 1))


def _attention_bwd(
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
    args = _Args(*rest)
    dq, dk, dv, dbias = _bwd_outputs(dout, dlse, query, key, value, out, lse, need, *rest)
    dout = dout if dout.stride(-1) == 1 and 0 not in dout.stride() else dout.contiguous()
    target = Target.of(query.device)
    heads, shape = _heads(query, key, value, args.layout), _shape(query, key, args.layout, args.query_starts)
    q, do = _operand(query, args.layout, heads), _operand(dout, args.layout, heads)
    k, v = _operand(key, args.layout, heads, True), _operand(value, args.layout, heads, True)
    row_stride = cdiv(shape.queries, 128) * 128
    num_heads = heads.kv * heads.repeats * (shape.batch if args.query_starts is None else 1)
    rows = torch.empty((2, num_heads * row_stride), dtype=torch.float32, device=lse.device)
    if rows.numel():
        _launch_preprocess(
            _operand(out, args.layout, heads), do, lse, dlse, rows, row_stride, args, shape, heads, value.shape[-1]
        )
    common = dict(
        **_strides(q=q, k=k, v=v, do=do), **_mask_arguments(args, shape, query.dtype, target),
        **_compute(query, value, target),
        rows_ptr=rows, size=rows.shape[1], row_stride=row_stride,
        qdoc_ptr=args.query_documents, kdoc_ptr=args.key_documents,
        num_q_per_kv=heads.repeats, head_of_kv=heads.of_kv, head_of_repeat=heads.of_repeat,
    )  # fmt: skip
    use_tma = _uses_tma(common["FMA"], target, q, k, v, do)
    if need[1] or need[2]:
        _launch_dkdv(common, dk if need[1] else None, dv if need[2] else None, key, value, args, shape, heads, use_tma)
    if need[0]:
        _launch_dq(common, dq, key, value, args, shape, heads, use_tma)
    if need[3]:
        _launch_dbias(common, dbias, query, value, shape, heads, use_tma)
    return dq, dk, dv, dbias


def _launch_preprocess(
    o: _Operand,
    do: _Operand,
    lse: Tensor,
    dlse: Tensor | None,
    rows: Tensor,
    row_stride: int,
    args: _Args,
    shape: _Shape,
    heads: _Heads,
    d_v: int,
) -> None:
    batch = 1 if args.query_starts is not None else shape.batch
    block = 64 if d_v <= 128 else 16
    _attention_bwd_preprocess_kernel[(rows.shape[1] // block,)](
        **_strides(o=o, do=do), lse_ptr=lse, dlse_ptr=None if dlse is None else dlse.contiguous(),
        rows_ptr=rows, size=rows.shape[1], row_stride=row_stride,
        batch=batch,
        queries=shape.queries, kv_heads=heads.kv, num_q_per_kv=heads.repeats, head_of_kv=heads.of_kv,
        head_of_repeat=heads.of_repeat, D_V=d_v, P_V=pieces(d_v), BLOCK_M=block,
    )  # fmt: skip


def _launch_dkdv(
    common: dict[str, Any], dk: Tensor | None, dv: Tensor | None, key: Tensor, value: Tensor, args: _Args,
    shape: _Shape, heads: _Heads, use_tma: bool,
) -> None:  # fmt: skip
    target, d_qk, d_v = Target.of(key.device), key.shape[-1], value.shape[-1]
    programs = heads.kv * (1 if heads.shared else heads.repeats) * (shape.batch if args.key_starts is None else 1)
    ranges = segments = None
    if args.query_documents is not None and args.key_documents is not None:
        ranges = _document_ranges(args.key_documents, args.query_documents)
    in_blocks = shape
    if args.unordered and shape.batch > 0:
        assert args.key_starts is not None and args.key_used is not None
        segments = _segments(args.key_starts, args.key_used, shape.keys)
        in_blocks = shape._replace(batch=segments.shape[0] - 1)
        use_tma = False  # descriptors of each sequence's keys
    widths = sum(pieces(d_qk)), sum(pieces(d_v))
    for part in dkdv_parts(d_qk, d_v, dk is not None, dv is not None, target):
        plan = plan_dkdv(key.element_size(), *widths, _feature(args), use_tma, common["FMA"], part, target)
        blocks = _slots(in_blocks, shape.keys, args.key_starts, plan.block_n)
        results = {"dk": dk if part != "dv" else None, "dv": dv if part != "dk" else None}
        absent = _Operand(key, 0, 0, 0, 0)
        named = _strides(
            **{n: absent if x is None else _operand(x, args.layout, heads, True) for n, x in results.items()}
        )
        _attention_dkdv_kernel[(blocks * programs,)](
            **(common | named | {f"{name}_ptr": x for name, x in results.items()}), krange_ptr=ranges,
            segments_ptr=segments, segments=in_blocks.batch,
            kv_heads=heads.kv, SHARED=heads.shared, LATE=plan.late, blocks=blocks,
            swizzle=_swizzle(shape.queries * (d_qk + d_v) * key.element_size(), 1, target),
            BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, TMA=use_tma and plan.tma, num_warps=plan.num_warps,
            num_stages=plan.num_stages, maxnreg=plan.maxnreg,
        )  # fmt: skip


def _launch_dq(
    common: dict[str, Any], dq: Tensor, key: Tensor, value: Tensor, args: _Args, shape: _Shape, heads: _Heads,
    use_tma: bool,
) -> None:  # fmt: skip
    target, d_qk, d_v = Target.of(key.device), key.shape[-1], value.shape[-1]
    plan = plan_dq(
        key.element_size(), sum(pieces(d_qk)), sum(pieces(d_v)), _feature(args), use_tma, common["FMA"], target
    )
    blocks = _slots(shape, shape.queries, args.query_starts, plan.block_m)
    num_heads = heads.kv * heads.repeats * (shape.batch if args.query_starts is None else 1)
    ranges = None
    if args.query_documents is not None and args.key_documents is not None:
        ranges = _document_ranges(args.query_documents, args.key_documents)
    _attention_dq_kernel[(blocks * num_heads,)](
        **common, **_strides(dq=_operand(dq, args.layout, heads)), qrange_ptr=ranges, kv_heads=heads.kv, blocks=blocks,
        swizzle=_swizzle(shape.keys * (d_qk + d_v) * key.element_size(), heads.repeats, target),
        BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, TMA=use_tma and plan.tma, num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        maxnreg=plan.maxnreg,
    )  # fmt: skip


def _launch_dbias(
    common: dict[str, Any], dbias: Tensor, query: Tensor, value: Tensor, shape: _Shape, heads: _Heads, use_tma: bool
) -> None:
    bias_batch, bias_heads, bias_rows, _ = dbias.shape
    d_qk, d_v = query.shape[-1], value.shape[-1]
    plan = plan_dbias(query.element_size(), d_qk, d_v, use_tma, common["FMA"], Target.of(query.device))
    q_blocks, k_blocks = cdiv(shape.queries, plan.block_m), cdiv(shape.keys, plan.block_n)
    tiles = k_blocks * bias_batch * bias_heads * (1 if bias_rows == 1 else q_blocks)
    unused = ("q_starts_ptr", "k_starts_ptr")
    _attention_dbias_kernel[(tiles,)](
        **{name: value for name, value in common.items() if name not in unused}, dbias_ptr=dbias,
        heads=heads.kv * heads.repeats, bias_batch=bias_batch, bias_heads=bias_heads, bias_rows=bias_rows,
        q_blocks=q_blocks, k_blocks=k_blocks, BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )  # fmt: skip


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    args = _Args(*inputs[3:])
    ctx.save_for_backward(*inputs[:3], *output, *args[:_TENSORS])
    ctx.options = args[_TENSORS:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    return backward_by(_attention_bwd_op, ctx, dout, dlse)


def backward_by(op: Op, ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """The backward of an op with these arguments; `op` computes the gradients of query, key, value and bias."""
    query, key, value, out, lse, *tensors = ctx.saved_tensors
    args = _Args(*tensors, *ctx.options)
    need = ctx.needs_input_grad
    results: list[Tensor | None] = [None] * len(need)
    if dout is not None or dlse is not None:
        grads = backward(dout, dlse, query, key, value, out, lse, args, (*need[:4], need[5]), op)
        for index, grad in zip((0, 1, 2, 3, 5), grads, strict=True):
            results[index] = grad
    return tuple(results)


def backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    args: _Args,
    need: tuple[bool, ...],
    op: Op | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of query, key, value, bias and sinks, those that are needed. `out` and `lse` may be those of a larger
    attention of which these keys are a part."""
    dout = torch.zeros_like(out) if dout is None else dout
    q_k_v_bias = (op or _attention_bwd_op)(dout, dlse, query, key, value, out, lse, list(need[:4]), *args)
    heads = _heads(query, key, value, args.layout)
    grads = [wanted(grad, needed) for grad, needed in zip(q_k_v_bias, need[:4], strict=True)]
    for index, x in ((1, key), (2, value)):
        dim, grad = _expanded_dim(x, args.layout, heads), grads[index]
        if grad is not None and dim is not None:
            # an equal share to each copy: expand's own backward adds them up again
            grads[index] = (grad / x.shape[dim]).expand(x.shape)
    dsinks = None
    if need[4] and args.sinks is not None:
        dsinks = _sinks_grad(dout, dlse, out, lse, args.sinks, args.layout)
    return (*grads, dsinks)


def _sinks_grad(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor, layout: Layout) -> Tensor:
    """- sum over rows of exp(sink - lse) * delta, per head."""
    delta = to_lse_order(dout.float() * out, layout).sum(-1)
    delta = delta if dlse is None else delta - dlse
    if layout == "thd":
        delta, lse = delta[None], lse[None]
    delta, lse = (x.flatten(1, -2) for x in (delta, lse))  # [b, heads, s]
    shares = torch.exp(sinks.float()[None, :, None] - lse) * delta
    return -torch.where(lse == -torch.inf, 0.0, shares).sum((0, 2)).to(sinks.dtype)


def _pairs(query: Shape, key: Shape, starts: Shape | None, layout: str) -> int:
    """(query, key) pairs of all heads, as if no mask hid any."""
    if layout == "thd":
        sequences = starts[0] - 1 if starts else 1
        return query[0] * key[0] // max(sequences, 1) * query[1]
    sizes = dict(zip(layout, query, strict=True))
    return sizes["b"] * sizes["h"] * sizes["s"] * dict(zip(layout, key, strict=True))["s"]


def fwd_flops(query: Shape, key: Shape, value: Shape, query_starts: Shape | None, layout: str, **_: Any) -> int:
    return 2 * _pairs(query, key, query_starts, layout) * (query[-1] + value[-1])


def bwd_flops(query: Shape, key: Shape, value: Shape, query_starts: Shape | None, layout: str, **_: Any) -> int:
    """Five products: the scores again, dp, dv, dq, dk."""
    return 2 * _pairs(query, key, query_starts, layout) * (3 * query[-1] + 2 * value[-1])


_attention_op = Op(
    f"attention(Tensor query, Tensor key, Tensor value, {_ARGS_SCHEMA}) -> (Tensor, Tensor)",
    _attention_fwd,
    _fwd_outputs,
    backward=_backward,
    setup_context=_setup_context,
    flops=fwd_flops,
)
_attention_bwd_op = Op(
    "attention_bwd(Tensor dout, Tensor? dlse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    f"bool[] need, {_ARGS_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
    _attention_bwd,
    _bwd_outputs,
    flops=bwd_flops,
)


def why_not(problem: AttentionProblem) -> Iterator[Reason]:
    """Every need of these kernels that the problem does not meet."""
    if problem.dtype is torch.float64:
        yield Reason("our kernels compute in float32", "use reference or chunked, or float32")
    if problem.target is None and not settings().interpret:
        yield Reason("our kernels run on GPUs", "use cpu or chunked, or move the tensors to a GPU")


backward_op = _attention_bwd_op
backward_why_not = why_not


def arguments(call: AttentionCall) -> _Args:
    mask, tensors, varlen = call.mask, call.tensors, call.varlen
    return _Args(
        tensors.bias, tensors.alibi_slopes, tensors.sinks, tensors.prefix, tensors.query_documents,
        tensors.key_documents, varlen.query_starts, varlen.key_starts, varlen.query_used, varlen.key_used,
        call.dropout_seed, call.layout, call.scale, mask.softcap, call.dropout_p, mask.left, mask.right, mask.chunk,
        mask.bottom_right, call.deterministic, varlen.unordered,
    )  # fmt: skip


def run(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """(out, lse), differentiable."""
    return _attention_op(call.query, call.key, call.value, *arguments(call))
