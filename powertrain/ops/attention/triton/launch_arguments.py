"""Arguments that the forward and backward kernels share, from the operands of a call."""

from typing import Any, Literal

import torch
from torch import Tensor

from powertrain.ops.attention.operands import OpArguments, Operand, Operands
from powertrain.ops.attention.triton.plans import FMA_PIECE, dot_precision, is_wide, uses_fma
from powertrain.ops.attention.triton.read_mask import ReadMask, has_descriptors, has_ranges, is_regular
from powertrain.ops.attention.triton.scores import Features
from powertrain.ops.attention.triton.tiles import few_pieces, pieces
from powertrain.ops.early_start import starts_early
from powertrain.ops.philox import threshold
from powertrain.ops.shapes import next_power_of_2
from powertrain.runtime.settings import settings
from powertrain.runtime.target import Target


def shared_arguments(operands: Operands, mask: ReadMask) -> dict[str, Any]:
    """Tensors, strides, masks, dropout, head dims and precision, by their names in the kernels."""
    args, heads = operands.args, operands.heads
    return (
        strides(q=operands.q, k=operands.k, v=operands.v)
        | _mask_arguments(operands, mask)
        | _precision(operands)
        | dict(
            qdoc_ptr=args.query_documents, kdoc_ptr=args.key_documents, num_q_per_kv=heads.q_per_kv,
            head_of_kv=heads.kv_step, head_of_repeat=heads.q_step, STARTS_EARLY=starts_early(operands.target),
        )
    )  # fmt: skip


def strides(**operands: Operand) -> dict[str, Any]:
    """Pointer and strides of each operand under its kernel name."""
    named: dict[str, Any] = {}
    for name, (tensor, b, s, h, r) in operands.items():
        named[f"{name}_ptr"] = tensor
        named[f"stride_{name}b"], named[f"stride_{name}s"] = b, s
        named[f"stride_{name}h"], named[f"stride_{name}r"] = h, r
    return named


def _mask_arguments(operands: Operands, mask: ReadMask) -> dict[str, Any]:
    args, bias = operands.args, mask.bias
    by_dim = (0,) * 4 if bias is None else _bias_strides(bias)
    return dict(
        bias_ptr=bias, slopes_ptr=args.slopes, prefix_ptr=args.prefix,
        q_starts_ptr=args.query_starts, k_starts_ptr=args.key_starts, q_used_ptr=args.query_used,
        k_used_ptr=args.key_used, seed_ptr=args.seed, batch=operands.batch, queries=operands.queries,
        keys=operands.keys,
        bias_stride_b=by_dim[0], bias_stride_h=by_dim[1], bias_stride_q=by_dim[2], bias_stride_k=by_dim[3],
        slopes_stride_b=args.slopes_stride,
        scale=args.scale, softcap=args.softcap, left=args.left, right=args.right, chunk=args.chunk,
        threshold=threshold(args.dropout_p), keep_scale=1 / (1 - args.dropout_p),
        FEATURES=_features(args, mask, operands.q.tensor.dtype, operands.target),
    )  # fmt: skip


def _features(args: OpArguments, mask: ReadMask, dtype: torch.dtype, target: Target) -> Features:
    return Features(
        has_left=args.left >= 0, has_right=args.right >= 0, has_chunk=args.chunk > 0,
        has_prefix=args.prefix is not None, bottom_right=args.bottom_right, alibi=alibi_kind(args),
        bias=_bias_kind(mask.bias, target), bias_is_mask=mask.is_boolean,
        has_documents=args.query_documents is not None, has_ranges=has_ranges(args, mask),
        mask_has_ranges=mask.tiles is not None,
        has_dropout=args.seed is not None, has_softcap=args.softcap > 0,
        fast_tanh=dtype is not torch.float32 and not settings().interpret,
    )  # fmt: skip


def alibi_kind(args: OpArguments) -> Literal["none", "two_sided", "one_sided"]:
    if args.slopes is None:
        return "none"
    return "one_sided" if args.right == 0 and args.prefix is None else "two_sided"


def _bias_strides(bias: Tensor) -> tuple[int, ...]:
    """Strides by batch, head, query and key; 0 where the bias is broadcast."""
    return tuple(0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride(), strict=True))


def _bias_kind(bias: Tensor | None, target: Target) -> Literal["none", "pointers", "descriptor", "one_row"]:
    """`bias`: as read_mask.py gives it."""
    if bias is None:
        return "none"
    if bias.shape[2] == 1:
        return "one_row"
    return "descriptor" if has_descriptors(target) and is_regular(bias) else "pointers"


def _precision(operands: Operands) -> dict[str, Any]:
    dtype, d_qk, d_v = operands.q.tensor.dtype, operands.d_qk, operands.d_v
    fma = uses_fma(dtype, d_qk, d_v, operands.target)
    p_qk, p_v = (pieces(d, FMA_PIECE) if fma else pieces_of(operands, d) for d in (d_qk, d_v))
    return dict(
        D_QK=d_qk, D_V=d_v, P_QK=p_qk, P_V=p_v, FMA=fma,
        PRECISION=dot_precision(dtype, operands.target),
    )  # fmt: skip


def pieces_of(operands: Operands, head_dim: int) -> tuple[int, ...]:
    """The pieces of a head dim of a call that multiplies by tensor cores."""
    target = operands.target
    by_mma = target.has_tensor_core_dot and not is_wide(target) and operands.q.tensor.element_size() == 2
    return few_pieces(head_dim) if by_mma else pieces(head_dim)


def plan_key(operands: Operands) -> tuple[int, int, int, str]:
    """(bytes of an element, padded head dims, slowest feature): the facts that a plan's tables are read by."""
    element = operands.q.tensor.element_size()
    d_qk, d_v = (sum(pieces_of(operands, d)) for d in (operands.d_qk, operands.d_v))
    return element, d_qk, d_v, _slowest_feature(operands.args)


def _slowest_feature(args: OpArguments) -> str:
    """The feature that costs a tile most beside the products."""
    if args.seed is not None:
        return "dropout"
    if args.bias is not None:
        if args.bias.dtype is not torch.bool:
            return "bias"
        return "mask" if args.bias.shape[2] > 1 else "padding"
    if args.query_documents is not None:
        return "documents"
    if args.softcap > 0:
        return "softcap"
    if args.slopes is not None:
        return "alibi"
    if args.prefix is not None:
        return "prefix"
    return "window" if args.left >= 0 or args.chunk > 0 else "plain"


def uses_tma(fma: bool, target: Target, *operands: Operand) -> bool:
    """Whether TMA descriptors can be made: they need 16-byte addresses and strides."""
    if fma or not has_descriptors(target):
        return False
    for x, b, s, h, r in operands:
        if (b | s | h | r) % (16 // x.element_size()) or (not x.is_meta and x.data_ptr() % 16):
            return False
    return True


def swizzle(rows_bytes: int, q_per_kv: int, target: Target) -> int:
    """Heads whose other side, of `rows_bytes` each, fits in the L2 together; a power of two."""
    return max(1, min(64, next_power_of_2(max(1, int(0.7 * target.l2_bytes * q_per_kv / max(1, rows_bytes)))) // 2))
