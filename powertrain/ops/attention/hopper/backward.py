"""Backward of attention for Hopper: backward_kernel.py, or backward_kernel_d256.py and backward_kernel_d192.py for head
dims above 128, between two kernels in Triton.

The first computes delta_i = o_i do_i - dlse_i and sets the sums of dq to zero. The second adds to them, in float32 and
in the order in which its threads hold dq. The third brings them into rows and scales them. Tiles of keys add in no
fixed order, so the last bits of dq differ from run to run; with deterministic=True they add in a fixed order
(hopper/dq_order.py). Where the query heads of a KV head are split over tiles, dk and dv are sums too, to which the
tiles of all splits add; with deterministic=True each split has sums of its own, which are added in order.

Memory beyond results: for each query and head, 4 bytes per channel (padded as in plans.py's `pieces_of`) and 8 more.
With deterministic=True, also 16 bytes for each 64 queries of a head. If heads are split, also float32 sums of dk and
dv, for each split with deterministic=True.
FLOPs: five products for each visible pair of query and key; no product is computed twice.

Above head dim 256, and above 192 where it is faster, backward_d512.py follows the first launch instead: it has no such
sums, is always deterministic, and uses other memory.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.attention.hopper.backward_d512 import ROWS, launch_products
from powertrain.ops.attention.hopper.backward_kernel import _hopper_attention_bwd_kernel
from powertrain.ops.attention.hopper.backward_kernel_d192 import _hopper_attention_bwd_d192_kernel
from powertrain.ops.attention.hopper.backward_kernel_d256 import _hopper_attention_bwd_d256_kernel
from powertrain.ops.attention.hopper.backward_plans import (
    Plan,
    Schedule,
    is_plain_call,
    plan_of,
    schedule_of,
    why_not_96_keys,
    why_not_weights,
    width_of,
)
from powertrain.ops.attention.hopper.maps import ending_maps, gradient_maps, keys_of, queries_of
from powertrain.ops.attention.hopper.plans import pieces_of
from powertrain.ops.attention.operands import BackwardCall, Operand, Operands
from powertrain.ops.attention.triton.sequences import SMALL, find_sequence, longest_first, sequence_span
from powertrain.ops.attention.triton.tiles import LOG2E, to_int64
from powertrain.ops.early_start import starts_early, wait_for_kernel_before
from powertrain.ops.shapes import cdiv, next_power_of_2
from powertrain.runtime import checks
from powertrain.runtime.launch import kernel
from powertrain.runtime.tensor_maps import TensorMap, tensor_map

_ROWS = 64  # keys whose dk and dv leave together
_WARPS = 8  # of a program of the first launch and of the last


@triton.jit
def _tile_of(t, slots, heads, batch, starts_ptr, used_ptr, size, BLOCK_M: tl.constexpr):
    """(batch entry, head, first row of its storage, the block's first row, length, capacity) of tile t of queries."""
    slot, index = t % slots, t // slots
    if starts_ptr is not None:
        b, block = find_sequence(starts_ptr, batch, slot, BLOCK_M)
    else:
        b, block = index // heads, slot
        index = index % heads
    start, length, capacity = sequence_span(starts_ptr, used_ptr, b, batch, size)
    return b, index, start, block * BLOCK_M, length, capacity


@kernel(unaligned=SMALL | {"lse_ptr", "dlse_ptr"})
def _hopper_attention_bwd_preprocess_kernel(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, rows_ptr, sum_ptr, order_ptr, counter_ptr, key_sum_ptr, starts_ptr, used_ptr,
    key_starts_ptr, key_slots_ptr,
    batch, queries, slots, heads, num_q_per_kv, head_of_kv, head_of_repeat, key_sums, key_blocks,
    stride_ob, stride_os, stride_oh, stride_or, stride_dob, stride_dos, stride_doh, stride_dor,
    D_V: tl.constexpr, W_QK: tl.constexpr, W_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """For a tile of queries: LSE in base 2 and delta, inf and 0 for rows that see no key and beyond the last row (so
    that their weights are 0, whatever ALiBi adds), and zeros for the sums of dq and for the flags of dq_order.py. Then
    a zero for the tile counter, `key_sums` zeros for the sums of dk and dv, and the order of slots of keys."""
    wait_for_kernel_before(STARTS_EARLY)
    t = tl.program_id(0)
    if t == 0:
        tl.store(counter_ptr, 0)
    if key_sum_ptr is not None:
        for block in range(t, tl.cdiv(key_sums, 4096), tl.num_programs(0)):
            place = to_int64(t * 0 + block) * 4096 + tl.arange(0, 4096)
            tl.store(key_sum_ptr + place, tl.zeros([4096], tl.float32), mask=place < key_sums)
    if key_slots_ptr is not None:
        for slot in range(t, key_blocks, tl.num_programs(0)):
            place = longest_first(key_starts_ptr, batch, slot, BLOCK_N)
            # starts that decrease, or pass the tensor's end, give results of no meaning, not stores elsewhere
            tl.store(key_slots_ptr + place, slot, mask=(place >= 0) & (place < key_blocks))
    b, index, start, first, length, _ = _tile_of(t, slots, heads, batch, starts_ptr, used_ptr, queries, BLOCK_M)
    kv, repeat = index // num_q_per_kv, index % num_q_per_kv
    head = kv * head_of_kv + repeat * head_of_repeat
    storage = to_int64(b)
    at = (storage * heads + head) * queries
    if starts_ptr is not None:
        storage = storage * 0
        at = to_int64(head) * queries + start
    rows = first + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, triton.next_power_of_2(W_V))[None, :]
    mask = (rows < length)[:, None] & (cols < D_V)
    i = to_int64(start + rows)[:, None]
    o_base = o_ptr + storage * stride_ob + to_int64(kv) * stride_oh + to_int64(repeat) * stride_or
    do_base = do_ptr + storage * stride_dob + to_int64(kv) * stride_doh + to_int64(repeat) * stride_dor
    o = tl.load(o_base + i * stride_os + cols, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_M, W_V]
    do = tl.load(do_base + i * stride_dos + cols, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_M, W_V]
    delta = tl.sum(o * do, 1)
    lse = tl.load(lse_ptr + at + rows, mask=rows < length, other=float("-inf"))  # [BLOCK_M]
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + at + rows, mask=rows < length, other=0.0)  # [BLOCK_M]
    blind = lse == float("-inf")
    to = rows_ptr + to_int64(t) * (2 * BLOCK_M) + tl.arange(0, BLOCK_M)
    tl.store(to, tl.where(blind, float("inf"), lse * LOG2E))  # [BLOCK_M]
    tl.store(to + BLOCK_M, tl.where(blind, 0.0, delta))  # [BLOCK_M]
    if sum_ptr is not None:
        # a third of the tiles of short packed sequences have no rows
        if first < length:
            SIZE: tl.constexpr = triton.next_power_of_2(BLOCK_M * W_QK)
            piece = tl.arange(0, SIZE)
            sums = sum_ptr + to_int64(t) * (BLOCK_M * W_QK) + piece
            if SIZE == BLOCK_M * W_QK:
                tl.store(sums, tl.zeros([SIZE], tl.float32))
            else:
                tl.store(sums, tl.zeros([SIZE], tl.float32), mask=piece < BLOCK_M * W_QK)
    if order_ptr is not None:
        tl.store(order_ptr + to_int64(t) * 4 + tl.arange(0, 4), tl.zeros([4], tl.int32))


@triton.jit
def _sums_of(from_ptr, place, SIZE: tl.constexpr, PADDED: tl.constexpr):
    if SIZE == PADDED:
        x = tl.load(from_ptr)  # [SIZE]
    else:
        x = tl.load(from_ptr, mask=place < SIZE, other=0.0)  # [PADDED]
    return x


@triton.jit
def _in_rows(x, COLS: tl.constexpr):
    """[64, COLS], from sums in the order in which the threads of a warpgroup hold accumulators."""
    # 8 columns, warp, row of 8, 2 columns, which 8 rows of the warp's 16, column
    return x.reshape(COLS // 8, 4, 8, 4, 2, 2).permute(1, 4, 2, 0, 3, 5).reshape(64, COLS)


@triton.jit
def _bring_into_rows(
    number, sum_ptr, x_ptr, starts_ptr, used_ptr, batch, queries, slots, heads, num_q_per_kv, num_splits, scale,
    stride_xb, stride_xs, stride_xh, stride_xr, D: tl.constexpr, W: tl.constexpr, BLOCK_M: tl.constexpr,
    SPLIT_HEADS: tl.constexpr,
):  # fmt: skip
    """64 rows of dq from the float32 sums, which are in the order in which the threads of a warpgroup hold them. Or
    64 rows (keys) of dk or dv, if the query heads of a KV head are split over `num_splits` tiles."""
    PARTS: tl.constexpr = BLOCK_M // 64
    t, part = number // PARTS, number % PARTS
    b, index, start, first, length, capacity = _tile_of(t, slots, heads, batch, starts_ptr, used_ptr, queries, BLOCK_M)
    first += part * 64
    if first < capacity:
        kv, repeat = index // num_q_per_kv, index % num_q_per_kv
        storage = to_int64(b)
        if starts_ptr is not None:
            storage = storage * 0
        WIDTH: tl.constexpr = triton.next_power_of_2(W)
        place = tl.arange(0, 64 * WIDTH)
        if not SPLIT_HEADS:
            from_ptr = sum_ptr + (to_int64(t) * PARTS + part) * (64 * W) + place
            x = _sums_of(from_ptr, place, 64 * W, 64 * WIDTH)
        else:
            x = tl.zeros([64 * WIDTH], tl.float32)
            for split in range(num_splits):
                tile = to_int64(t // slots * num_splits + split) * slots + t % slots
                from_ptr = sum_ptr + (tile * PARTS + part) * (64 * W) + place
                x += _sums_of(from_ptr, place, 64 * W, 64 * WIDTH)
        x = _in_rows(x, WIDTH)
        rows = first + tl.arange(0, 64)
        cols = tl.arange(0, WIDTH)[None, :]
        base = x_ptr + storage * stride_xb + to_int64(kv) * stride_xh + to_int64(repeat) * stride_xr
        ptrs = base + to_int64(start + rows)[:, None] * stride_xs + cols
        x = tl.where((rows < length)[:, None], x * scale, 0.0).to(x_ptr.dtype.element_ty)
        tl.store(ptrs, x, mask=(rows < capacity)[:, None] & (cols < D))  # [64, W]


@triton.jit
def _bring_piece(from_ptr, base, place, cols, scale, stride_xs, D: tl.constexpr, KEYS: tl.constexpr):
    """A piece of 64 columns `cols` of KEYS keys, whose sums are [64, KEYS]."""
    start, first, length, capacity = place
    x = tl.load(from_ptr + tl.arange(0, 64 * KEYS))  # [64 * KEYS]
    x = _in_rows(x, KEYS)
    rows = first + tl.arange(0, KEYS)[None, :]
    x = tl.where(rows < length, x * scale, 0.0).to(base.dtype.element_ty)
    ptrs = base + to_int64(start + rows) * stride_xs + cols
    tl.store(ptrs, x, mask=(rows < capacity) & (cols < D))  # [64, KEYS]


@triton.jit
def _bring_columns_into_rows(
    number, sum_ptr, x_ptr, starts_ptr, used_ptr, batch, keys, slots, heads, scale, stride_xb, stride_xs, stride_xh,
    D: tl.constexpr,
):  # fmt: skip
    """64 columns of dk or dv of 96 keys, from the sums [64 columns, 64 keys] and [64, 32] of a consumer of
    backward_kernel_d192.py."""
    PIECES: tl.constexpr = (D + 63) // 64
    t, piece = number // 3, number % 3
    b, head, start, first, length, capacity = _tile_of(t, slots, heads, batch, starts_ptr, used_ptr, keys, 96)
    if (first < capacity) & (piece < PIECES):
        storage = to_int64(b)
        if starts_ptr is not None:
            storage = storage * 0
        from_ptr = sum_ptr + (to_int64(t) * PIECES + piece) * (64 * 96)
        base = x_ptr + storage * stride_xb + to_int64(head) * stride_xh
        cols = piece * 64 + tl.arange(0, 64)[:, None]
        _bring_piece(from_ptr, base, (start, first, length, capacity), cols, scale, stride_xs, D, 64)
        _bring_piece(from_ptr + 64 * 64, base, (start, first + 64, length, capacity), cols, scale, stride_xs, D, 32)


@kernel(unaligned=SMALL)
def _hopper_attention_sums_kernel(
    dq_sum_ptr, dk_sum_ptr, dv_sum_ptr, dq_ptr, dk_ptr, dv_ptr, q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr,
    batch, queries, keys, q_slots, k_slots, kv_heads, num_q_per_kv, num_splits, k_programs, scale,
    stride_dqb, stride_dqs, stride_dqh, stride_dqr, stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs,
    stride_dvh,
    D_QK: tl.constexpr, D_V: tl.constexpr, W_DQ: tl.constexpr, W_QK: tl.constexpr, W_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_HEADS: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """A program writes 64 rows of a result (64 columns for tiles of 96 keys): `k_programs` programs for dk, as many for
    dv, then those for dq. It is one launch, because between launches the SMs have no work for a microsecond or two."""
    wait_for_kernel_before(STARTS_EARLY)
    number = tl.program_id(0)
    if dk_ptr is not None:
        if number < k_programs:
            if BLOCK_N == 96:
                _bring_columns_into_rows(
                    number, dk_sum_ptr, dk_ptr, k_starts_ptr, k_used_ptr, batch, keys, k_slots, kv_heads, scale,
                    stride_dkb, stride_dks, stride_dkh, D_QK,
                )  # fmt: skip
            else:
                _bring_into_rows(
                    number, dk_sum_ptr, dk_ptr, k_starts_ptr, k_used_ptr, batch, keys, k_slots, kv_heads, 1, num_splits,
                    scale, stride_dkb, stride_dks, stride_dkh, 0, D_QK, W_QK, BLOCK_N, SPLIT_HEADS,
                )  # fmt: skip
        number -= k_programs
    if dv_ptr is not None:
        if (number >= 0) & (number < k_programs):
            if BLOCK_N == 96:
                _bring_columns_into_rows(
                    number, dv_sum_ptr, dv_ptr, k_starts_ptr, k_used_ptr, batch, keys, k_slots, kv_heads, 1.0,
                    stride_dvb, stride_dvs, stride_dvh, D_V,
                )  # fmt: skip
            else:
                _bring_into_rows(
                    number, dv_sum_ptr, dv_ptr, k_starts_ptr, k_used_ptr, batch, keys, k_slots, kv_heads, 1, num_splits,
                    1.0, stride_dvb, stride_dvs, stride_dvh, 0, D_V, W_V, BLOCK_N, SPLIT_HEADS,
                )  # fmt: skip
        number -= k_programs
    if dq_ptr is not None:
        if number >= 0:
            _bring_into_rows(
                number, dq_sum_ptr, dq_ptr, q_starts_ptr, q_used_ptr, batch, queries, q_slots, kv_heads * num_q_per_kv,
                num_q_per_kv, 1, scale, stride_dqb, stride_dqs, stride_dqh, stride_dqr, D_QK, W_DQ, BLOCK_M, False,
            )  # fmt: skip


def why_not_of(d_qk: int, d_v: int, unordered: bool, is_plain: bool) -> str | None:
    """The reasons of `why_not_backward` that the forward does not have and that need no tensors. `is_plain`: neither
    deterministic nor with a softcap or ALiBi."""
    dims = d_qk, d_v
    if max(dims) > 256:
        if reason := why_not_weights(d_qk, d_v):
            return reason
    elif any(dim % 8 for dim in dims):
        return f"head dims must be multiples of 8, are {d_qk} and {d_v}"
    elif min(dims) <= 128 < max(dims) and (reason := why_not_96_keys(d_qk, d_v, is_plain)):
        return f"of head dims on both sides of 128: {reason}"
    if unordered:
        return "keys must belong to one sequence each, sequences in ascending order (cu_seqlens_k_padded says so)"
    return None


def why_not_backward(operands: Operands) -> str | None:
    """Why this backward does not support these tensors, or None. The device is not checked."""
    args, heads = operands.args, operands.heads
    for name, given in (
        ("bias", args.bias is not None),
        ("prefix", args.prefix is not None),
        ("documents", args.query_documents is not None),
        ("chunk", args.chunk > 0),
        ("dropout", args.seed is not None),
        ("layout bmghk", args.layout == "bmghk"),
    ):
        if given:
            return f"it has no {name}"
    named = {"query": operands.q, "key": operands.k, "value": operands.v}
    query = operands.q.tensor
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {checks.name(query.dtype)}"
    for name, operand in named.items():
        if not operand.tensor.numel():
            return f"{name} is empty"
    if reason := why_not_of(operands.d_qk, operands.d_v, args.unordered, is_plain_call(args)):
        return reason
    for name, (x, b, s, h, r) in named.items():
        is_aligned = x.is_meta or x.data_ptr() % 16 == 0
        if not is_aligned or x.stride(-1) != 1 or (b | s | h | r) % (16 // x.element_size()):
            return f"{name}'s rows must be contiguous and 16-byte aligned, strides are {tuple(x.stride())}"
        if s == 0 or (r == 0 and name == "query" and heads.q_per_kv > 1):
            return f"{name} is expanded, strides {tuple(x.stride())}"
    if 2 * query.numel() // query.shape[-1] >= 2**31 - 2**24:
        return "the rows of all heads are more than an int32 counts, as TMA does"
    return None


def launch_backward(
    call: BackwardCall, operands: Operands, plan: Plan | None = None, schedule: Schedule | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, an empty dbias) on sm_90; those that are not needed are empty. `why_not_backward` has the limits."""
    dq, dk, dv, dbias = call.outputs()
    into = (
        operands.like_query(dq) if call.need[0] else None, operands.like_key(dk) if call.need[1] else None,
        operands.like_key(dv) if call.need[2] else None,
    )  # fmt: skip
    if any(call.need[:3]):
        plan = plan or plan_of(operands)
        if plan.stores_weights:
            _launch_weights(call, operands, *into)
        else:
            _launch(call, operands, *into, plan, schedule or schedule_of(operands, plan))
    return dq, dk, dv, dbias


def _launch_weights(
    call: BackwardCall, operands: Operands, dq: Operand | None, dk: Operand | None, dv: Operand | None
) -> None:
    args, heads, device = operands.args, operands.heads, operands.q.tensor.device
    slots = operands.query_blocks(ROWS)
    tiles = operands.num_heads * slots
    rows = torch.empty(tiles * 2 * ROWS, dtype=torch.float32, device=device)
    do = operands.like_query(_for_tma(call.dout))
    dlse = None if call.dlse is None else call.dlse.contiguous()
    _, *o_strides = operands.like_query(call.out)
    _hopper_attention_bwd_preprocess_kernel[(tiles,)](
        call.out, do.tensor, call.lse, dlse, rows, None, None, torch.empty(1, dtype=torch.int32, device=device), None,
        args.query_starts, args.query_used, None, None,
        operands.batch, operands.queries, slots, heads.kv * heads.q_per_kv, heads.q_per_kv, heads.kv_step, heads.q_step,
        0, 0, *o_strides, do.b, do.s, do.h, do.r, D_V=operands.d_v, W_QK=0,
        W_V=next_power_of_2(operands.d_v), BLOCK_M=ROWS, BLOCK_N=ROWS, STARTS_EARLY=starts_early(operands.target),
        num_warps=_WARPS,
    )  # fmt: skip
    launch_products(operands, do, rows, dq, dk, dv)


class _Scratch(NamedTuple):
    """Memory between the three launches, by tiles of block_m queries."""

    tiles: int
    slots: int  # tiles of a head
    rows: Tensor  # [tiles, 2, block_m]: LSE in base 2 and delta
    sums: Tensor | None  # [tiles, block_m, w_qk]: dq in float32
    order: Tensor | None  # [tiles, 4]: whose turn it is to add
    counter: Tensor  # the next tile of keys
    key_slots: Tensor | None  # [blocks of keys]: of packed sequences, the longest first

    @staticmethod
    def of(operands: Operands, plan: Plan, need_dq: bool, schedule: Schedule) -> "_Scratch":
        device, slots = operands.q.tensor.device, operands.query_blocks(plan.block_m)
        tiles = operands.num_heads * slots
        sums = order = None
        if need_dq:
            size = tiles * plan.block_m * width_of(operands.d_qk)
            sums = torch.empty(size, dtype=torch.float32, device=device)
        # it tells the kernel too that parts have sums of dk and dv of their own, whether dq is wanted or not
        if operands.args.deterministic and (need_dq or schedule.num_splits > 1):
            order = torch.empty(tiles * 4, dtype=torch.int32, device=device)
        rows = torch.empty(tiles * 2 * plan.block_m, dtype=torch.float32, device=device)
        key_slots = None
        if schedule.longest_first:
            key_slots = torch.empty(operands.key_blocks(plan.block_n), dtype=torch.int32, device=device)
        counter = torch.empty(1, dtype=torch.int32, device=device)
        return _Scratch(tiles, slots, rows, sums, order, counter, key_slots)


def _width_of_sums(head_dim: int, plan: Plan) -> int:
    """Columns of the sums of dk or dv."""
    return 64 * cdiv(head_dim, 64) if plan.block_n == 96 else width_of(head_dim)


class _KeySums(NamedTuple):
    """Sums of dk and dv in float32, where the query heads of a KV head are split over tiles. In the order in which
    the threads hold them: [storage * KV heads, splits, blocks, keys of a tile * width]."""

    memory: Tensor
    dk: Operand | None
    dv: Operand | None
    parts: int  # with sums of their own: 1, to which all parts add; if deterministic, one for each part

    @staticmethod
    def of(operands: Operands, plan: Plan, schedule: Schedule, need_dk: bool, need_dv: bool) -> "_KeySums":
        rows = operands.storage * operands.heads.kv * operands.key_blocks(plan.block_n) * plan.block_n
        parts = schedule.num_splits if operands.args.deterministic else 1
        dims = (need_dk, operands.d_qk), (need_dv, operands.d_v)
        sizes = [rows * parts * _width_of_sums(dim, plan) if need else 0 for need, dim in dims]
        memory = torch.empty(sum(sizes), dtype=torch.float32, device=operands.q.tensor.device)
        dk, dv = (Operand(x, 0, 0, 0, 0) if x.numel() else None for x in memory.split(sizes))
        return _KeySums(memory, dk, dv, parts)


def _launch(
    call: BackwardCall, operands: Operands, dq: Operand | None, dk: Operand | None, dv: Operand | None, plan: Plan,
    schedule: Schedule,
) -> None:  # fmt: skip
    args, heads = operands.args, operands.heads
    num_heads, blocks = heads.kv * heads.q_per_kv, operands.key_blocks(plan.block_n)
    early = starts_early(operands.target)
    scratch = _Scratch.of(operands, plan, dq is not None, schedule)
    sums = None
    if schedule.num_splits > 1:
        sums = _KeySums.of(operands, plan, schedule, dk is not None, dv is not None)
    zeros = sums.memory if sums is not None and sums.parts == 1 else None
    do = operands.like_query(_for_tma(call.dout))
    dlse = None if call.dlse is None else call.dlse.contiguous()
    _, *o_strides = operands.like_query(call.out)
    _hopper_attention_bwd_preprocess_kernel[(scratch.tiles,)](
        call.out, do.tensor, call.lse, dlse, scratch.rows, scratch.sums, scratch.order, scratch.counter, zeros,
        args.query_starts, args.query_used, args.key_starts, scratch.key_slots,
        operands.batch, operands.queries, scratch.slots, num_heads, heads.q_per_kv, heads.kv_step, heads.q_step,
        0 if zeros is None else zeros.numel(), blocks, *o_strides, do.b, do.s, do.h, do.r,
        D_V=operands.d_v, W_QK=width_of(operands.d_qk), W_V=width_of(operands.d_v), BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n, STARTS_EARLY=early, num_warps=_WARPS,
    )  # fmt: skip
    into = (dk, dv) if sums is None else (sums.dk, sums.dv)
    _launch_main(operands, do, into[0], into[1], scratch, plan, schedule, blocks)
    _launch_sums(operands, scratch, sums, dq, *((None, None) if sums is None else (dk, dv)), plan)


def _launch_sums(
    operands: Operands, scratch: _Scratch, sums: _KeySums | None, dq: Operand | None, dk: Operand | None,
    dv: Operand | None, plan: Plan,
) -> None:  # fmt: skip
    """Compute the given gradients from their sums."""
    args, heads, blocks = operands.args, operands.heads, operands.key_blocks(plan.block_n)
    k_programs = operands.storage * heads.kv * blocks * (3 if plan.block_n == 96 else plan.block_n // 64)
    programs = scratch.tiles * plan.block_m // 64 if dq else 0
    programs += k_programs * ((dk is not None) + (dv is not None))
    absent = Operand(operands.k.tensor, 0, 0, 0, 0)
    to_q, to_k, to_v = dq or absent, dk or absent, dv or absent
    parts = sums.parts if sums else 1
    _hopper_attention_sums_kernel[(programs,)](
        scratch.sums if dq else None, sums.dk.tensor if sums and sums.dk and dk else None,
        sums.dv.tensor if sums and sums.dv and dv else None, dq and dq.tensor, dk and dk.tensor, dv and dv.tensor,
        args.query_starts, args.key_starts, args.query_used, args.key_used,
        operands.batch, operands.queries, operands.keys, scratch.slots, blocks, heads.kv, heads.q_per_kv, parts,
        k_programs, args.scale,
        to_q.b, to_q.s, to_q.h, to_q.r, to_k.b, to_k.s, to_k.h, to_v.b, to_v.s, to_v.h,
        D_QK=operands.d_qk, D_V=operands.d_v, W_DQ=width_of(operands.d_qk), W_QK=width_of(operands.d_qk),
        W_V=width_of(operands.d_v), BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, SPLIT_HEADS=parts > 1,
        STARTS_EARLY=starts_early(operands.target), num_warps=_WARPS,
    )  # fmt: skip


def _launch_main(
    operands: Operands, do: Operand, dk: Operand | None, dv: Operand | None, scratch: _Scratch, plan: Plan,
    schedule: Schedule, blocks: int,
) -> None:  # fmt: skip
    """dk and dv, or the sums of each split of the query heads of a KV head."""
    args, heads, num_splits = operands.args, operands.heads, schedule.num_splits
    absent = Operand(operands.k.tensor, 0, 0, 0, 0)
    count = operands.storage * heads.kv * num_splits * blocks
    maps = _maps_of(operands, do, scratch, plan)
    tensors = (
        scratch.sums, scratch.order, dk and dk.tensor, dv and dv.tensor, scratch.counter, args.slopes,
        args.query_starts, args.key_starts, args.query_used, args.key_used, scratch.key_slots,
    )  # fmt: skip
    pieces = pieces_of(operands.d_qk), pieces_of(operands.d_v)
    order = blocks, schedule.late_blocks, schedule.group, scratch.slots
    to_k, to_v = dk or absent, dv or absent
    strides = to_k.b, to_k.s, to_k.h, to_v.b, to_v.s, to_v.h
    rest = args.slopes_stride, args.scale, args.softcap, args.left, args.right
    options = {
        "LEFT": args.left >= 0, "RIGHT": args.right >= 0, "BOTTOM_RIGHT": args.bottom_right, "CAP": args.softcap > 0,
        "D_QK": operands.d_qk, "D_V": operands.d_v, "P_QK": pieces[0], "P_V": pieces[1],
        "BLOCK_M": plan.block_m, "STAGES": plan.stages, "PART": plan.part, "REGISTERS": plan.registers,
        "STARTS_EARLY": starts_early(operands.target), "num_warps": 4,
    }  # fmt: skip
    sizes = operands.batch, operands.queries, operands.keys
    members = heads.q_per_kv // num_splits
    if plan.block_n == 96:
        # it finds the number of parts by the number of programs
        names = "LEFT", "RIGHT", "BOTTOM_RIGHT", "D_QK", "D_V", "REGISTERS", "STARTS_EARLY", "num_warps"
        _hopper_attention_bwd_d192_kernel[(count,)](
            *maps, *tensors[2:4], *tensors[6:], *sizes, heads.kv, members, *order, *strides,
            args.scale, args.left, args.right, SPLIT_HEADS=num_splits > 1, **{name: options[name] for name in names},
        )  # fmt: skip
    elif plan.block_n == 64:
        # it finds the number of parts by the number of programs
        _hopper_attention_bwd_d256_kernel[(count,)](
            *maps, *tensors, *sizes, heads.kv, members, *order, *strides, *rest,
            BLOCK_N=64, SPLIT_HEADS=num_splits > 1, **options,
        )  # fmt: skip
    else:
        into: tuple[Any, ...] = (None,) * 4
        if num_splits == 1:
            dk_maps = gradient_maps(operands, dk, operands.d_qk, _ROWS, pieces[0])
            into = *dk_maps, *gradient_maps(operands, dv, operands.d_v, _ROWS, pieces[1])
            tensors = *tensors[:2], None, None, *tensors[4:]
        _hopper_attention_bwd_kernel[(min(operands.target.num_sms, count),)](
            *maps, *into, *tensors, *sizes, heads.kv * num_splits, members, num_splits, *order, count, *rest,
            DS_STAGES=plan.ds_stages, AHEAD=plan.ahead, EARLY=plan.early, SPLIT_HEADS=num_splits > 1, **options,
        )  # fmt: skip


def _maps_of(operands: Operands, do: Operand, scratch: _Scratch, plan: Plan) -> tuple[TensorMap | None, ...]:
    """The tensor maps of q, k, v, do, two each, and of LSE and delta, in the order of the kernels' parameters; with
    tiles of 96 keys also of the sums of dq."""
    args = operands.args
    ragged_q = operands.is_packed or args.query_used is not None
    ragged_k = operands.is_packed or args.key_used is not None
    queries = queries_of(operands, operands.q, operands.d_qk), queries_of(operands, do, operands.d_v)
    keys = keys_of(operands, operands.k, operands.d_qk), keys_of(operands, operands.v, operands.d_v)
    rows = tensor_map(scratch.rows, (scratch.rows.numel(),), (1,), (2 * plan.block_m,))
    if plan.block_n == 96:
        # pieces of 64 columns; keys in 64 and 32 rows
        q, grads = (ending_maps(x, plan.block_m, (64,), ragged_q)[0] for x in queries)
        parts = [ending_maps(x, rows_of_part, (64,), ragged_k)[0] for x in keys for rows_of_part in (64, 32)]
        return q, *parts, grads, rows, None if scratch.sums is None else _map_of_sums(scratch.sums)
    pieces = pieces_of(operands.d_qk), pieces_of(operands.d_v)
    of_queries = [ending_maps(x, plan.block_m, p, ragged_q) for x, p in zip(queries, pieces, strict=True)]
    of_keys = [ending_maps(x, plan.block_n, p, ragged_k) for x, p in zip(keys, pieces, strict=True)]
    return *of_queries[0], *of_keys[0], *of_keys[1], *of_queries[1], rows


def _map_of_sums(sums: Tensor) -> TensorMap:
    """As backward_kernel_d192.py adds to them: 64 rows of 32 at a time."""
    return tensor_map(sums, (sums.numel() // 32, 32), (32, 1), (64, 32))


def _for_tma(x: Tensor) -> Tensor:
    """`x`, or a copy of it in rows that TMA can read."""
    elements = 16 // x.element_size()
    fits = x.stride(-1) == 1 and all(s and s % elements == 0 for s in x.stride()[:-1])
    fits = fits and (x.is_meta or x.data_ptr() % 16 == 0)
    return x if fits else x.clone(memory_format=torch.contiguous_format)
