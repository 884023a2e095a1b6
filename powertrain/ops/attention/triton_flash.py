"""The universal backend: our own Triton kernels, for every problem on every GPU.

Forward: triton_forward.py. Backward: triton_backward.py, two kernels without atomics (dk and dv per block of keys, dq per
block of queries), so it is deterministic. Saved for backward: the inputs, out, and lse, float32 [b, h, sq].

Memory beyond inputs and results: backward 4 * b * h * sq bytes (delta) [+ what reductions of a bias gradient say there].
FLOPs: forward 2 * pairs * (dqk + dv) per head, backward 2 * pairs * (3 * dqk + 2 * dv) useful, and one product of each
kind more for computing scores twice, where pairs counts what the mask lets see.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from powertrain.ops.attention.problem import AttentionCall, AttentionProblem, Layout, Reason
from powertrain.ops.attention.triton_forward import _attention_fwd_kernel
from powertrain.ops.attention.triton_tiles import pieces
from powertrain.ops.layout import cdiv, empty, next_power_of_2, wanted
from powertrain.ops.philox import threshold
from powertrain.runtime.dispatch import Op
from powertrain.runtime.settings import settings
from powertrain.runtime.target import Target
from powertrain.runtime.tuning import tunable


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


class _Plan(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None


def _fits(candidates: tuple[_Plan, ...], resident: int, streamed: int, target: Target) -> _Plan:
    """The first plan whose tiles fit in shared memory: bytes per row of those kept (block_m rows) and streamed."""
    for plan in candidates:
        if plan.block_m * resident + plan.num_stages * plan.block_n * streamed <= target.shared_per_block - 2048:
            return plan
    return candidates[-1]


_FORWARD = (
    _Plan(128, 64, 8, 2),
    _Plan(64, 64, 4, 2),
    _Plan(64, 32, 4, 2),
    _Plan(64, 32, 4, 1),
    _Plan(32, 32, 4, 1),
    _Plan(16, 32, 4, 1),
    _Plan(16, 16, 4, 1),
)


@tunable("NVIDIA H200, 2026-11-21", ("num_warps",))
def _plan_fwd(element: int, d_qk: int, d_v: int, featured: bool, target: Target) -> _Plan:
    if target.has_wgmma and element == 2:
        largest = max(d_qk, d_v)
        if largest <= 64:
            return _Plan(128, 128, 4, 3)
        if largest <= 128:
            return _Plan(128, 64, 8, 2, 128) if featured else _Plan(128, 64, 4, 2)
        if largest <= 192:
            return _Plan(128, 64, 8, 3)
        if largest <= 256:
            return _Plan(128, 64, 8, 2)
    wide = d_v > 256
    candidates = tuple(p for p in _FORWARD if p.block_m * d_v <= (128 * 256 if target.has_tensor_core_dot else 64 * 128))
    return _fits(candidates, d_qk * element, (d_qk + d_v) * element, target)


def _precision(dtype: torch.dtype, target: Target) -> str:
    if dtype is not torch.float32 or not target.has_tensor_core_dot:
        return "ieee"
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _uses_tma(target: Target, *operands: _Operand) -> bool:
    """Descriptors want 16-byte addresses and strides."""
    if not target.has_tma:
        return False
    for x, *strides in operands:
        elements = 16 // x.element_size()
        if (not x.is_meta and x.data_ptr() % 16) or any(stride % elements for stride in strides):
            return False
    return not settings().interpret


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


_ARGS_SCHEMA = (
    "Tensor? bias, Tensor? slopes, Tensor? sinks, Tensor? prefix, Tensor? query_documents, Tensor? key_documents, "
    "Tensor? query_starts, Tensor? key_starts, Tensor? query_used, Tensor? key_used, Tensor? seed, str layout, "
    "float scale, float softcap, float dropout_p, int left, int right, int chunk, bool bottom_right"
)


def _slots(shape: _Shape, tokens: int, starts: Tensor | None, block: int) -> int:
    """Blocks of a head: of thd as many as any lengths may need, and those behind the last sequence."""
    return cdiv(tokens, block) if starts is None else tokens // block + shape.batch + 1


def _group(keys_bytes: int, repeats: int, target: Target) -> int:
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


def _mask_arguments(args: _Args, shape: _Shape) -> dict[str, Any]:
    """The kernels' arguments about masks, sequences and dropout."""
    bias = args.bias
    if bias is not None:
        bias = bias.view(torch.uint8) if bias.dtype is torch.bool else bias
    strides = (0,) * 4 if bias is None else tuple(n * s for n, s in zip((d > 1 for d in bias.shape), bias.stride()))
    return dict(
        bias_ptr=bias, slopes_ptr=args.slopes, prefix_ptr=args.prefix,
        q_starts_ptr=args.query_starts, k_starts_ptr=args.key_starts, q_used_ptr=args.query_used,
        k_used_ptr=args.key_used, seed_ptr=args.seed, batch=shape.batch, queries=shape.queries, keys=shape.keys,
        bias_stride_b=strides[0], bias_stride_h=strides[1], bias_stride_q=strides[2], bias_stride_k=strides[3],
        slopes_stride_b=args.slopes.shape[1] if args.slopes is not None and args.slopes.dim() == 2 else 0,
        scale=args.scale, softcap=args.softcap, left=args.left, right=args.right, chunk=args.chunk,
        threshold=threshold(args.dropout_p), keep_scale=1 / (1 - args.dropout_p),
        HAS=(args.left >= 0, args.right >= 0, args.chunk > 0, args.prefix is not None),
        BOTTOM_RIGHT=args.bottom_right,
    )  # fmt: skip


def _strides(**operands: _Operand) -> dict[str, Any]:
    """Pointer and strides of each operand under its kernel name."""
    named: dict[str, Any] = {}
    for name, (tensor, *strides) in operands.items():
        named[f"{name}_ptr"] = tensor
        named.update({f"stride_{name}{dim}": stride for dim, stride in zip("bshr", strides, strict=True)})
    return named


def _compute(query: Tensor, value: Tensor, args: _Args, target: Target) -> dict[str, Any]:
    d = (query.shape[-1], value.shape[-1])
    return dict(
        CAP=(args.softcap > 0, query.dtype is not torch.float32 and not settings().interpret),
        D=d, PIECES=(pieces(d[0]), pieces(d[1])),
        FLOAT32=query.dtype is not torch.float32 and not target.has_tensor_core_dot,
        PRECISION=_precision(query.dtype, target),
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
    featured = args.softcap > 0 or args.bias is not None or args.slopes is not None or args.seed is not None
    plan = _plan_fwd(query.element_size(), sum(pieces(d_qk)), sum(pieces(d_v)), featured, target)
    blocks = _slots(shape, shape.queries, args.query_starts, plan.block_m)
    num_heads = heads.kv * heads.repeats * (shape.batch if args.query_starts is None else 1)
    ranges = None
    if args.query_documents is not None and args.key_documents is not None:
        ranges = _document_ranges(args.query_documents, args.key_documents)
    _attention_fwd_kernel[(blocks * num_heads,)](
        **_strides(q=q, k=k, v=v, o=o), **_mask_arguments(args, shape), **_compute(query, value, args, target),
        lse_ptr=lse, sinks_ptr=args.sinks, qdoc_ptr=args.query_documents, kdoc_ptr=args.key_documents,
        qrange_ptr=ranges, kv_heads=heads.kv, repeats=heads.repeats, head_of_kv=heads.of_kv,
        head_of_repeat=heads.of_repeat, blocks=blocks,
        group=_group(shape.keys * (d_qk + d_v) * key.element_size(), heads.repeats, target),
        BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, TMA=_uses_tma(target, q, k, v), num_warps=plan.num_warps,
        num_stages=plan.num_stages, maxnreg=plan.maxnreg,
    )  # fmt: skip
    return out, lse


_attention_op = Op(
    f"attention(Tensor query, Tensor key, Tensor value, {_ARGS_SCHEMA}) -> (Tensor, Tensor)",
    _attention_fwd,
    _fwd_outputs,
)


def why_not(problem: AttentionProblem) -> Iterator[Reason]:
    """Every need of these kernels that the problem does not meet."""
    if problem.dtype is torch.float64:
        yield Reason("our kernels compute in float32", "use reference or chunked, or float32")
    if problem.target is None and not settings().interpret:
        yield Reason("our kernels run on GPUs", "use cpu or chunked, or move the tensors to a GPU")


def arguments(call: AttentionCall) -> _Args:
    mask, tensors, varlen = call.mask, call.tensors, call.varlen
    return _Args(
        tensors.bias, tensors.alibi_slopes, tensors.sinks, tensors.prefix, tensors.query_documents,
        tensors.key_documents, varlen.query_starts, varlen.key_starts, varlen.query_used, varlen.key_used,
        call.dropout_seed, call.layout, call.scale, mask.softcap, call.dropout_p, mask.left, mask.right, mask.chunk,
        mask.bottom_right,
    )  # fmt: skip


def run(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """(out, lse), differentiable."""
    return _attention_op(call.query, call.key, call.value, *arguments(call))
