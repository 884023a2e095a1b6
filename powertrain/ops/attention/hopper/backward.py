"""Backward of attention for Hopper: backward_kernel.py, or backward_kernel_d256.py for head dims above 192, between two
kernels in Triton.

The first computes delta_i = o_i do_i - dlse_i and writes the zeros to which the second adds sums of dq, in float32 and
in the order in which its threads hold them; the third brings these into rows and scales them. Tiles of keys add in no
fixed order, and the last bits of dq differ from run to run; where the same bits are wanted each time, in turn
(hopper/dq_order.py).

Memory beyond results: for each query and head, 4 bytes a head dim (padded to 64, 128 or 256) and 8; 1152 an SM (256:
640 for each 64 keys of a head); where tiles add in turn, 16 for each 64 queries of a head.
FLOPs: five products for each pair that a mask lets see; none twice.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.attention.hopper.backward_kernel import _hopper_attention_bwd_kernel
from powertrain.ops.attention.hopper.backward_kernel_d256 import _hopper_attention_bwd_d256_kernel
from powertrain.ops.attention.operands import BackwardCall, OpArguments, Operand, Operands
from powertrain.ops.attention.triton.sequences import find_sequence, sequence_span
from powertrain.ops.attention.triton.tiles import LOG2E, to_int64
from powertrain.ops.shapes import next_power_of_2
from powertrain.runtime import checks
from powertrain.runtime.launch import kernel

_BLOCK_N = {64: 128, 128: 128, 256: 64}  # keys of a tile, by padded head dim


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


@kernel()
def _hopper_attention_bwd_preprocess_kernel(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, rows_ptr, sum_ptr, order_ptr, counter_ptr, starts_ptr, used_ptr,
    batch, queries, slots, heads, num_q_per_kv, head_of_kv, head_of_repeat,
    stride_ob, stride_os, stride_oh, stride_or, stride_dob, stride_dos, stride_doh, stride_dor,
    D_V: tl.constexpr, W_QK: tl.constexpr, W_V: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """For a tile of queries: LSE in base 2 and delta, inf and 0 where a row sees nothing and behind the rows (whose
    weights are then 0, whatever ALiBi makes of their places), and zeros for the sums of dq and for whose turn it is to
    add. Then a zero to draw tiles from."""
    t = tl.program_id(0)
    if t == 0:
        tl.store(counter_ptr, 0)
    b, index, start, first, length, _ = _tile_of(t, slots, heads, batch, starts_ptr, used_ptr, queries, BLOCK_M)
    kv, repeat = index // num_q_per_kv, index % num_q_per_kv
    head = kv * head_of_kv + repeat * head_of_repeat
    storage = to_int64(b)
    at = (storage * heads + head) * queries
    if starts_ptr is not None:
        storage = storage * 0
        at = to_int64(head) * queries + start
    rows = first + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, W_V)[None, :]
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
    # a row that sees no key: with +inf for its LSE every p is 2^-inf = 0
    blind = lse == float("-inf")
    to = rows_ptr + to_int64(t) * (2 * BLOCK_M) + tl.arange(0, BLOCK_M)
    tl.store(to, tl.where(blind, float("inf"), lse * LOG2E))  # [BLOCK_M]
    tl.store(to + BLOCK_M, tl.where(blind, 0.0, delta))  # [BLOCK_M]
    if sum_ptr is not None:
        # zeros here, in a pass over memory that is made anyway, instead of a memset
        piece = tl.arange(0, BLOCK_M * W_QK)
        tl.store(sum_ptr + to_int64(t) * (BLOCK_M * W_QK) + piece, tl.zeros([BLOCK_M * W_QK], tl.float32))
    if order_ptr is not None:
        tl.store(order_ptr + to_int64(t) * 4 + tl.arange(0, 4), tl.zeros([4], tl.int32))


@kernel()
def _hopper_attention_dq_kernel(
    sum_ptr, dq_ptr, starts_ptr, used_ptr, batch, queries, slots, heads, num_q_per_kv, scale,
    stride_dqb, stride_dqs, stride_dqh, stride_dqr, D_QK: tl.constexpr, W_QK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """64 rows of dq from the sums in float32, which lie as the threads of a warpgroup hold them."""
    PARTS: tl.constexpr = BLOCK_M // 64
    t, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    b, index, start, first, length, capacity = _tile_of(t, slots, heads, batch, starts_ptr, used_ptr, queries, BLOCK_M)
    first += part * 64
    if first < capacity:
        kv, repeat = index // num_q_per_kv, index % num_q_per_kv
        storage = to_int64(b)
        if starts_ptr is not None:
            storage = storage * 0
        x = tl.load(sum_ptr + (to_int64(t) * PARTS + part) * (64 * W_QK) + tl.arange(0, 64 * W_QK))  # [64 * W_QK]
        # 8 columns, warp, row of 8, 2 columns, which 8 rows of the warp's 16, column
        x = x.reshape(W_QK // 8, 4, 8, 4, 2, 2).permute(1, 4, 2, 0, 3, 5).reshape(64, W_QK)
        rows = first + tl.arange(0, 64)
        cols = tl.arange(0, W_QK)[None, :]
        base = dq_ptr + storage * stride_dqb + to_int64(kv) * stride_dqh + to_int64(repeat) * stride_dqr
        ptrs = base + to_int64(start + rows)[:, None] * stride_dqs + cols
        x = tl.where((rows < length)[:, None], x * scale, 0.0).to(dq_ptr.dtype.element_ty)
        tl.store(ptrs, x, mask=(rows < capacity)[:, None] & (cols < D_QK))  # [64, W_QK]


class Plan(NamedTuple):
    """Tiles of 128 keys (64 at head dims above 192) by block_m queries, so that a consumer's scores, dp, dk and dv
    leave it registers enough."""

    block_m: int = 64
    stages: int = 3
    ds_stages: int = 2
    part: int = 32  # columns of dq at a time
    registers: int = 224  # of a consumer's thread; the producer has 504 less twice as many
    group: int = 4  # heads at a time
    group_start: int = 2  # in turn: blocks that the tile before is to be ahead


def plan_for(d_qk: int, d_v: int) -> Plan:
    """ms, bf16, one H200, causal: H32 D64 S8192 2.99 with 128 queries a block, 2.71 with 64, 2.59 with 64 columns of dq
    too; H16 D128 S2048 2 heads at a time 0.744, 4 0.737, packed 1.905, 1.855; H8 D256 S8192 64 columns of dq and 208
    registers 3.08, 32 and 224 3.23."""
    if max(d_qk, d_v) > 128:
        return Plan(stages=2, part=64, registers=208, group=2, group_start=4)
    if max(d_qk, d_v) <= 64:
        return Plan(stages=4, part=64, registers=208, group_start=8)
    return Plan()


def deterministic_swizzle(plan: Plan, queries: int, repeats: int, args: OpArguments, num_sms: int) -> int:
    """Heads at a time where tiles add in turn: so many that a head's tiles are drawn `group_start` blocks apart, for
    each waits for the one before.

    ms, bf16, one H200, causal, groups of 4, 8, 16, 32: D128 H16 S2048 1.215, 0.933, 0.905, 0.916; S8192 2.739, 2.747,
    2.793, 2.945; D64 H32 S2048 1.734, 1.257, 1.093, 1.002; S8192 3.486, 3.144, 3.096, 3.124; D256 H8 S8192 4.325,
    4.180, 4.461, 4.438."""
    seen = queries // 2 if args.right >= 0 else queries
    if args.left >= 0:
        seen = min(seen, args.left + 128)
    blocks = max(1, repeats * seen // plan.block_m)
    return min(32, max(4, next_power_of_2(plan.group_start * num_sms // blocks)))


def width_of(head_dim: int) -> int:
    """The padded head dim. No larger one serves: no panel of 64 columns may lie wholly outside a tensor."""
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


def why_not_of(d_qk: int, d_v: int, unordered: bool) -> str | None:
    """The part of `why_not_backward` that the forward does not share and that needs no tensors."""
    dims = d_qk, d_v
    if any(dim % 8 for dim in dims) or not (max(dims) <= 128 or 192 < min(dims) <= max(dims) <= 256):
        return f"head dims must be multiples of 8, both up to 128 or both of 200 to 256, are {d_qk} and {d_v}"
    if unordered:
        return "keys must be of one sequence each, in ascending order (cu_seqlens_k_padded says that they are)"
    return None


def why_not_backward(operands: Operands) -> str | None:
    """Why this backward does not take these tensors, or None. Says nothing of the device."""
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
    if reason := why_not_of(operands.d_qk, operands.d_v, args.unordered):
        return reason
    for name, (x, b, s, h, r) in named.items():
        is_aligned = x.is_meta or x.data_ptr() % 16 == 0
        if not is_aligned or x.stride(-1) != 1 or (b | s | h | r) % (16 // x.element_size()):
            return f"{name}'s rows must be contiguous and 16-byte aligned, strides are {tuple(x.stride())}"
        if s == 0 or (r == 0 and name == "query" and heads.q_per_kv > 1):
            return f"{name} is expanded, strides {tuple(x.stride())}"
    if 2 * query.numel() // query.shape[-1] >= 2**31 - 2**24:
        return "TMA counts the rows of all heads in an int32"
    return None


def launch_backward(
    call: BackwardCall, operands: Operands, plan: Plan | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, an empty dbias) on sm_90; the ones not needed are empty. `why_not_backward` has the limits."""
    dq, dk, dv, dbias = call.outputs()
    if any(call.need[:3]):
        _launch(
            call, operands, operands.like_query(dq) if call.need[0] else None,
            operands.like_key(dk) if call.need[1] else None, operands.like_key(dv) if call.need[2] else None,
            plan or plan_for(operands.d_qk, operands.d_v),
        )  # fmt: skip
    return dq, dk, dv, dbias


class _Scratch(NamedTuple):
    """Memory between the three launches, by tiles of block_m queries."""

    tiles: int
    slots: int  # tiles of a head
    rows: Tensor  # [tiles, 2, block_m]: LSE in base 2 and delta
    sums: Tensor | None  # [tiles, block_m, w_qk]: dq in float32
    order: Tensor | None  # [tiles, 4]: whose turn it is to add
    counter: Tensor  # the next tile of keys

    @staticmethod
    def of(operands: Operands, plan: Plan, need_dq: bool) -> "_Scratch":
        device, slots = operands.q.tensor.device, operands.query_blocks(plan.block_m)
        tiles = operands.num_heads * slots
        sums = order = None
        if need_dq:
            size = tiles * plan.block_m * width_of(operands.d_qk)
            sums = torch.empty(size, dtype=torch.float32, device=device)
            if operands.args.deterministic:
                order = torch.empty(tiles * 4, dtype=torch.int32, device=device)
        rows = torch.empty(tiles * 2 * plan.block_m, dtype=torch.float32, device=device)
        return _Scratch(tiles, slots, rows, sums, order, torch.empty(1, dtype=torch.int32, device=device))


def _launch(
    call: BackwardCall, operands: Operands, dq: Operand | None, dk: Operand | None, dv: Operand | None, plan: Plan
) -> None:
    args, heads = operands.args, operands.heads
    num_heads, w_qk = heads.kv * heads.q_per_kv, width_of(operands.d_qk)
    scratch = _Scratch.of(operands, plan, dq is not None)
    do = operands.like_query(_for_tma(call.dout))
    dlse = None if call.dlse is None else call.dlse.contiguous()
    _, *o_strides = operands.like_query(call.out)
    _hopper_attention_bwd_preprocess_kernel[(scratch.tiles,)](
        call.out, do.tensor, call.lse, dlse, scratch.rows, scratch.sums, scratch.order, scratch.counter,
        args.query_starts, args.query_used,
        operands.batch, operands.queries, scratch.slots, num_heads, heads.q_per_kv, heads.kv_step, heads.q_step,
        *o_strides, do.b, do.s, do.h, do.r,
        D_V=operands.d_v, W_QK=w_qk, W_V=width_of(operands.d_v), BLOCK_M=plan.block_m,
    )  # fmt: skip
    _launch_main(operands, do, dk, dv, scratch, plan)
    if dq is not None:
        _hopper_attention_dq_kernel[(scratch.tiles * plan.block_m // 64,)](
            scratch.sums, dq.tensor, args.query_starts, args.query_used, operands.batch, operands.queries,
            scratch.slots, num_heads, heads.q_per_kv, args.scale, dq.b, dq.s, dq.h, dq.r,
            D_QK=operands.d_qk, W_QK=w_qk, BLOCK_M=plan.block_m,
        )  # fmt: skip


def _launch_main(
    operands: Operands, do: Operand, dk: Operand | None, dv: Operand | None, scratch: _Scratch, plan: Plan
) -> None:
    args, heads, num_sms = operands.args, operands.heads, operands.target.num_sms
    q, k, v = operands.q, operands.k, operands.v
    w_qk, w_v = width_of(operands.d_qk), width_of(operands.d_v)
    blocks = operands.key_blocks(_BLOCK_N[w_qk])
    group = plan.group
    if scratch.order is not None:
        # of packed sequences only the mean length is known to the host
        sequences = max(1, operands.batch) if operands.is_packed else 1
        group = deterministic_swizzle(plan, operands.queries // sequences, heads.q_per_kv, args, num_sms)
    # any address and no stride: the kernel is compiled without what it would use
    absent = Operand(k.tensor, 0, 0, 0, 0)
    count = operands.storage * heads.kv * blocks
    tensors = (
        q.tensor, k.tensor, v.tensor, do.tensor, scratch.sums, scratch.order, dk and dk.tensor, dv and dv.tensor,
        scratch.rows, scratch.counter, args.slopes, args.query_starts, args.key_starts, args.query_used, args.key_used,
    )  # fmt: skip
    sizes = (
        operands.batch, operands.queries, operands.keys, heads.kv, heads.q_per_kv, blocks, group, scratch.slots,
    )  # fmt: skip
    dk, dv = dk or absent, dv or absent
    rest = (
        scratch.rows.numel(), q.b, q.s, q.r, k.b, k.s, k.h, v.b, v.s, v.h, do.b, do.s, do.r, dk.b, dk.s, dk.h,
        dv.b, dv.s, dv.h, args.slopes_stride, args.scale, args.softcap, args.left, args.right,
    )  # fmt: skip
    options = {
        "LEFT": args.left >= 0, "RIGHT": args.right >= 0, "BOTTOM_RIGHT": args.bottom_right, "CAP": args.softcap > 0,
        "D_QK": operands.d_qk, "D_V": operands.d_v, "BLOCK_M": plan.block_m, "STAGES": plan.stages, "PART": plan.part,
        "REGISTERS": plan.registers, "num_warps": 4,
    }  # fmt: skip
    if w_qk > 128:
        _hopper_attention_bwd_d256_kernel[(count,)](*tensors, *sizes, *rest, W=w_qk, BLOCK_N=_BLOCK_N[w_qk], **options)
    else:
        _hopper_attention_bwd_kernel[(min(num_sms, count),)](
            *tensors, *sizes, count, *rest, W_QK=w_qk, W_V=w_v, DS_STAGES=plan.ds_stages, **options
        )


def _for_tma(x: Tensor) -> Tensor:
    """`x`, or a copy of it in rows that TMA can read."""
    elements = 16 // x.element_size()
    # a stride of 0 too: TMA wants strides that are multiples of 16 bytes, and more than 0
    fits = x.stride(-1) == 1 and all(s and s % elements == 0 for s in x.stride()[:-1])
    fits = fits and (x.is_meta or x.data_ptr() % 16 == 0)
    return x if fits else x.clone(memory_format=torch.contiguous_format)
