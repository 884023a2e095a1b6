"""The kernel of rotary position embeddings, its plan and launch; rope.py has the formulas."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.early_start import starts_early_if_small, wait_then_let_next_start
from powertrain.ops.shapes import cdiv, next_power_of_2
from powertrain.runtime.launch import kernel
from powertrain.runtime.target import Target
from powertrain.runtime.tuning import tunable


@kernel(unaligned=("position_ids_ptr", "offsets_ptr", "cu_seqlens_ptr"), down_to=2)
def _rope_kernel(
    q_ptr, k_ptr, v_ptr, q_out_ptr, k_out_ptr, v_out_ptr, cos_ptr, sin_ptr, axes_ptr, position_ids_ptr, offsets_ptr,
    cu_seqlens_ptr,
    num_outer, num_inner, num_heads, num_kv_heads, group_size, max_seqlen, offset, num_seqs, search_steps, direction,
    stride_qo, stride_qi, stride_qg, stride_qh, stride_ko, stride_ki, stride_kh,
    stride_q_out_o, stride_q_out_i, stride_q_out_g, stride_q_out_h, stride_k_out_o, stride_k_out_i, stride_k_out_h,
    # of position ids, often 1; as strides they would be among those that must all be multiples of 16
    step_pa, step_po, step_pi, num_axes, capacity,
    HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, GROUPED: tl.constexpr,
    SEQ_INNER: tl.constexpr, IN_PLACE: tl.constexpr, APPENDS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_then_let_next_start(STARTS_EARLY)
    # a program takes BLOCK_T tokens and BLOCK_H heads of q, of k or of v; head blocks vary fastest, as in memory
    q_blocks = tl.cdiv(num_heads, BLOCK_H)
    kv_blocks = tl.cdiv(num_kv_heads, BLOCK_H)
    blocks = q_blocks
    if k_ptr is not None:
        blocks += kv_blocks
    if v_ptr is not None:
        blocks += kv_blocks
    program = tl.program_id(0)
    block = program % blocks
    tokens = (program // blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = tokens < num_outer * num_inner
    # int64 before the strides: an offset of a long batch passes 2^31
    outer, inner = (tokens // num_inner).to(tl.int64), (tokens % num_inner).to(tl.int64)

    pairs = tl.arange(0, BLOCK_C)[None, :]
    if position_ids_ptr is not None:
        of_tokens = position_ids_ptr + outer[:, None] * step_po + inner[:, None] * step_pi
        position = _given_position(of_tokens, axes_ptr, pairs, live[:, None], step_pa, num_axes, PAIRS)
    else:
        position = _counted_position(
            outer, inner, live, offsets_ptr, cu_seqlens_ptr, offset, num_seqs, search_steps, SEQ_INNER, BLOCK_T
        )[:, None]
    # a position the table does not have gives NaN, not memory of others
    rows = position.to(tl.int64) * PAIRS + pairs
    known = (position >= 0) & (position < max_seqlen) & (pairs < PAIRS)
    cos = tl.load(cos_ptr + rows, mask=known, other=float("nan")).to(tl.float32)[:, None, :]
    sin = tl.load(sin_ptr + rows, mask=known, other=float("nan")).to(tl.float32)[:, None, :] * direction

    if block < q_blocks:
        heads = block * BLOCK_H + tl.arange(0, BLOCK_H)[None, :]
        mask = live[:, None] & (heads < num_heads)
        heads = heads.to(tl.int64)
        source = outer[:, None] * stride_qo + inner[:, None] * stride_qi
        target = outer[:, None] * stride_q_out_o + inner[:, None] * stride_q_out_i
        if GROUPED:
            source += (heads // group_size) * stride_qg + (heads % group_size) * stride_qh
            target += (heads // group_size) * stride_q_out_g + (heads % group_size) * stride_q_out_h
        else:
            source += heads * stride_qh
            target += heads * stride_q_out_h
        _rotate(
            q_ptr, q_out_ptr, source, target, mask, cos, sin,
            HEAD_DIM, PAIRS, INTERLEAVED, IN_PLACE, BLOCK_T, BLOCK_H, BLOCK_C, BLOCK_REST,
        )  # fmt: skip
    elif k_ptr is not None:
        heads = (block - q_blocks) % kv_blocks * BLOCK_H + tl.arange(0, BLOCK_H)[None, :]
        mask = live[:, None] & (heads < num_kv_heads)
        heads = heads.to(tl.int64)
        source = outer[:, None] * stride_ko + inner[:, None] * stride_ki + heads * stride_kh
        row = inner[:, None]
        if APPENDS:
            # k_out and v_out are a KV cache with a row for each position; tokens beyond its capacity are dropped
            row = position.to(tl.int64)
            mask = mask & (row >= 0) & (row < capacity)
        target = outer[:, None] * stride_k_out_o + row * stride_k_out_i + heads * stride_k_out_h
        if block < q_blocks + kv_blocks:
            _rotate(
                k_ptr, k_out_ptr, source, target, mask, cos, sin,
                HEAD_DIM, PAIRS, INTERLEAVED, IN_PLACE, BLOCK_T, BLOCK_H, BLOCK_C, BLOCK_REST,
            )  # fmt: skip
        elif v_ptr is not None:
            _copy(v_ptr, v_out_ptr, source, target, mask, 0, HEAD_DIM, BLOCK_D)


@triton.jit
def _given_position(ids_ptr, axes_ptr, pairs, live, step_pa, num_axes, PAIRS: tl.constexpr):
    """Positions of tokens whose ids are at `ids_ptr` [BLOCK_T, 1]; with axes one for each pair, [BLOCK_T, BLOCK_C].

    -1 for an axis that the ids do not have.
    """
    if axes_ptr is not None:
        axes = tl.load(axes_ptr + pairs, mask=pairs < PAIRS, other=0).to(tl.int64)  # [1, BLOCK_C]
        given = live & (pairs < PAIRS) & (axes >= 0) & (axes < num_axes)
        position = tl.load(ids_ptr + axes * step_pa, mask=given, other=-1)  # [BLOCK_T, BLOCK_C]
    else:
        position = tl.load(ids_ptr, mask=live, other=0)  # [BLOCK_T, 1]
    return position


@triton.jit
def _counted_position(
    outer, inner, live, offsets_ptr, cu_seqlens_ptr, offset, num_seqs, search_steps, SEQ_INNER: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Positions [BLOCK_T] of tokens by their places in their sequences, which begin at `offset` and `offsets`."""
    if cu_seqlens_ptr is not None:
        # the number of sequences that end at or before this token, by bisection
        sequence = tl.zeros([BLOCK_T], tl.int32)
        high = tl.full([BLOCK_T], 0, tl.int32) + num_seqs
        # a fixed number of steps for the launch: lanes of one tile end at different ones, and `open` stops them
        for _ in range(search_steps):
            middle = (sequence + high) // 2
            open = sequence < high
            ended = open & (tl.load(cu_seqlens_ptr + middle + 1, mask=open, other=0) <= inner)  # the shape of live
            sequence = tl.where(ended, middle + 1, sequence)
            high = tl.where(open & ~ended, middle, high)
        in_sequence = live & (sequence < num_seqs) & (inner >= tl.load(cu_seqlens_ptr))  # scalar
        position = inner - tl.load(cu_seqlens_ptr + sequence, mask=in_sequence, other=0) + offset  # the shape of live
        if offsets_ptr is not None:
            position += tl.load(offsets_ptr + sequence, mask=in_sequence, other=0)  # the shape of live
        # rows of no sequence get position 0, which the table has: their values matter to nobody, NaN would
        position = tl.where(in_sequence, position, 0)
    else:
        batch = outer if SEQ_INNER else inner
        position = (inner if SEQ_INNER else outer) + offset
        if offsets_ptr is not None:
            position += tl.load(offsets_ptr + batch, mask=live, other=0)  # the shape of live
    return position


@triton.jit
def _rotate(
    x_ptr,
    y_ptr,
    source,
    target,
    mask,
    cos,
    sin,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK_C)
        inside = mask[:, :, None] & (cols < 2 * PAIRS)
        x = tl.load(x_ptr + source[:, :, None] + cols, mask=inside, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, [BLOCK_T, BLOCK_H, BLOCK_C, 2]))
        # pairs lie side by side: one load of both halves and a split in registers, where two strided loads would use
        # half of each sector
        y = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), [BLOCK_T, BLOCK_H, 2 * BLOCK_C])
        tl.store(y_ptr + target[:, :, None] + cols, y.to(y_ptr.dtype.element_ty), mask=inside)
    else:
        cols = tl.arange(0, BLOCK_C)
        inside = mask[:, :, None] & (cols < PAIRS)
        a = tl.load(x_ptr + source[:, :, None] + cols, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + source[:, :, None] + PAIRS + cols, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + target[:, :, None] + cols, (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=inside)
        tl.store(y_ptr + target[:, :, None] + PAIRS + cols, (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask=inside)
    # dims behind the rotary ones are copied where the result is a tensor of its own
    if 2 * PAIRS < HEAD_DIM and not IN_PLACE:
        _copy(x_ptr, y_ptr, source, target, mask, 2 * PAIRS, HEAD_DIM, BLOCK_REST)


@triton.jit
def _copy(x_ptr, y_ptr, source, target, mask, first, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    cols = first + tl.arange(0, BLOCK)
    inside = mask[:, :, None] & (cols < HEAD_DIM)
    x = tl.load(x_ptr + source[:, :, None] + cols, mask=inside, other=0.0)
    tl.store(y_ptr + target[:, :, None] + cols, x, mask=inside)


class _Plan(NamedTuple):
    block_t: int
    block_h: int
    num_warps: int


@tunable("NVIDIA H200, 2026-11-21", ("block_t", "block_h", "num_warps"))
def _plan(num_heads: int, head_dim: int, target: Target) -> _Plan:
    # a warp for 1024 elements: q + k of B4 S4096 H32/8 D128 bf16 took 0.0840 ms on an H200, on two warps 0.0868, on
    # four 0.0931; more heads or tokens on as many more warps 0.0843 to 0.0860
    block_d = next_power_of_2(head_dim)
    block_h = min(next_power_of_2(num_heads), max(1, 1024 // block_d))
    block_t = max(1, min(16, 1024 // (block_h * block_d)))
    return _Plan(block_t, block_h, max(1, block_t * block_h * block_d // 1024))


class Positions(NamedTuple):
    """Token positions given to `rope`, in the form that every op takes."""

    cos: Tensor
    sin: Tensor
    axes: Tensor | None
    position_ids: Tensor | None  # [axes or 1, outer, inner]
    offsets: Tensor | None  # one per sequence
    cu_seqlens: Tensor | None
    offset: int
    layout: str
    interleaved: bool


POSITIONS = (
    "Tensor cos, Tensor sin, Tensor? axes, Tensor? position_ids, Tensor? offsets, Tensor? cu_seqlens, SymInt offset, "
    "str layout, bool interleaved"
)


def launch_rope(
    sources: tuple[Tensor, Tensor | None, Tensor | None],
    targets: tuple[Tensor, Tensor | None, Tensor | None],
    at: Positions,
    inverse: bool,
    in_place: bool = False,
    appends: bool = False,
) -> None:
    """Rotate q [outer, inner, groups, group_size, D] and k [outer, inner, H, D], copy v [outer, inner, H, D].

    in_place   the targets are the sources
    appends    k and v go to a cache [outer, capacity, H, D] of equal strides, to the rows of the tokens' positions
    """
    (q, k, v), (q_out, k_out, v_out) = sources, targets
    num_outer, num_inner, groups, group_size, head_dim = q.shape
    num_kv_heads = 0 if k is None else k.shape[2]
    pairs = at.cos.shape[1]
    target = Target.of(q.device)
    plan = _plan(groups * group_size, head_dim, target)
    blocks = cdiv(groups * group_size, plan.block_h)
    blocks += ((k is not None) + (v is not None)) * cdiv(num_kv_heads, plan.block_h)
    num_seqs = 0 if at.cu_seqlens is None else at.cu_seqlens.shape[0] - 1
    q_strides = q.stride()[:4]
    q_out_strides = q_out.stride()[:4]
    k_strides = (0, 0, 0) if k is None else k.stride()[:3]
    k_out_strides = (0, 0, 0) if k_out is None else k_out.stride()[:3]
    position_strides = (0, 0, 0) if at.position_ids is None else at.position_ids.stride()
    num_axes = 0 if at.position_ids is None else at.position_ids.shape[0]
    programs = blocks * cdiv(num_outer * num_inner, plan.block_t)
    _rope_kernel[(programs,)](
        q, k, v, q_out, k_out, v_out, at.cos, at.sin, None if at.position_ids is None else at.axes, at.position_ids,
        at.offsets, at.cu_seqlens,
        num_outer, num_inner, groups * group_size, num_kv_heads, group_size, at.cos.shape[0], at.offset, num_seqs,
        num_seqs.bit_length(), -1.0 if inverse else 1.0,
        *q_strides, *k_strides, *q_out_strides, *k_out_strides, *position_strides, num_axes,
        k_out.shape[1] if appends and k_out is not None else 0,
        HEAD_DIM=head_dim, PAIRS=pairs, INTERLEAVED=at.interleaved, GROUPED=groups > 1,
        SEQ_INNER=at.layout != "sbhd", IN_PLACE=in_place, APPENDS=appends,
        BLOCK_T=plan.block_t, BLOCK_H=plan.block_h, BLOCK_C=next_power_of_2(pairs),
        BLOCK_D=next_power_of_2(head_dim), BLOCK_REST=next_power_of_2(head_dim - 2 * pairs),
        STARTS_EARLY=starts_early_if_small(target, programs, q.numel()), num_warps=plan.num_warps,
    )  # fmt: skip


def as_4d(x: Tensor, layout: str) -> Tensor:
    """[dim 0, dim 1, H, D], one outer dim for thd."""
    return x[None] if layout == "thd" else x


def unit_of(x: Tensor) -> Tensor:
    """With a unit stride along the head dim."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
