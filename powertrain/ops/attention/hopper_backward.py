"""Backward of attention for Hopper in Gluon: one pass over keys, a job for each warpgroup; docs/hopper.md teaches it.

    p     = 2^(s - lse)                     recomputed, keys along the rows
    dv_j  = sum_i p_ij do_i;                ds_ij = p_ij (do_i v_j - delta_i) (1 - tanh_ij^2 with a softcap)
    dk_j  = scale sum_i ds_ij q_i;          dq_i  = scale sum_j ds_ij k_j;     delta_i = o_i do_i - dlse_i

A CTA owns 128 keys of one head and runs over the blocks of queries that see them, of all query heads that share the
keys. Two *consumer* warpgroups hold 64 keys each: scores, dk and dv in registers, keys along the rows, so that p and ds
are operands of the next products as they are. The third, the *server*, loads by TMA, and multiplies what a block adds
to dq, from ds in shared memory. It adds to float32 sums in memory, 16 bytes a thread at once, in the order in which
the threads hold them; a second kernel brings them into rows and scales them. The additions come in no fixed order.

Memory beyond results: for each query and head, 4 bytes a head dim (padded to 64 or 128) and 8; 640 for each CTA.
FLOPs: five products for each pair that a mask lets see; none twice.

Source: Dao 2023, arXiv:2307.08691; Shah et al. 2024, arXiv:2407.08608, for a warpgroup's registers holding p and ds.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.attention.triton_flash import (
    _Args,
    _bwd_outputs,
    _Heads,
    _heads,
    _Operand,
    _operand,
    _Shape,
    _shape,
    _slots,
)
from powertrain.ops.attention.triton_tiles import LOG2E, find_sequence, span_of, to_int64
from powertrain.runtime import checks
from powertrain.runtime.gluon_compat import gl, gluon, hopper, mbarrier, reinterpret, tma, tma_load
from powertrain.runtime.launch import gluon_kernel, kernel

_BLOCK_N = 128
_LOG2E = gl.constexpr(1.4426950408889634)


@triton.jit
def _tile_of(t, slots, heads, batch, starts_ptr, used_ptr, size, BLOCK_M: tl.constexpr):
    """(batch entry, head, first row of its storage, the block's first row, length, room) of tile t of queries."""
    slot, index = t % slots, t // slots
    if starts_ptr is not None:
        b, block = find_sequence(starts_ptr, batch, slot, BLOCK_M)
    else:
        b, block = index // heads, slot
        index = index % heads
    start, length, room = span_of(starts_ptr, used_ptr, b, batch, size)
    return b, index, start, block * BLOCK_M, length, room


@kernel()
def _hopper_attention_rows_kernel(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, rows_ptr, sum_ptr, starts_ptr, used_ptr, batch, queries, slots, heads, repeats,
    head_of_kv, head_of_repeat, stride_ob, stride_os, stride_oh, stride_or, stride_dob, stride_dos, stride_doh,
    stride_dor, D_V: tl.constexpr, W_QK: tl.constexpr, W_V: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """For a tile of queries: LSE in base 2 and delta, both 0 where a row sees nothing and behind the rows, and zeros
    for the sums of dq."""
    t = tl.program_id(0)
    b, index, start, first, length, _ = _tile_of(t, slots, heads, batch, starts_ptr, used_ptr, queries, BLOCK_M)
    kv, repeat = index // repeats, index % repeats
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
    o = tl.load(o_base + i * stride_os + cols, mask=mask, other=0.0).to(tl.float32)
    do = tl.load(do_base + i * stride_dos + cols, mask=mask, other=0.0).to(tl.float32)
    delta = tl.sum(o * do, 1)
    lse = tl.load(lse_ptr + at + rows, mask=rows < length, other=float("-inf"))
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + at + rows, mask=rows < length, other=0.0)
    blind = lse == float("-inf")
    to = rows_ptr + to_int64(t) * (2 * BLOCK_M) + tl.arange(0, BLOCK_M)
    tl.store(to, tl.where(blind, 0.0, lse * LOG2E))
    tl.store(to + BLOCK_M, tl.where(blind, 0.0, delta))
    if sum_ptr is not None:
        piece = tl.arange(0, BLOCK_M * W_QK)
        tl.store(sum_ptr + to_int64(t) * (BLOCK_M * W_QK) + piece, tl.zeros([BLOCK_M * W_QK], tl.float32))


@kernel()
def _hopper_attention_dq_kernel(
    sum_ptr, dq_ptr, starts_ptr, used_ptr, batch, queries, slots, heads, repeats, scale,
    stride_dqb, stride_dqs, stride_dqh, stride_dqr, D_QK: tl.constexpr, W_QK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """64 rows of dq from the sums in float32, which lie as the threads of a warpgroup hold them."""
    PARTS: tl.constexpr = BLOCK_M // 64
    t, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    b, index, start, first, length, room = _tile_of(t, slots, heads, batch, starts_ptr, used_ptr, queries, BLOCK_M)
    first += part * 64
    if first < room:
        kv, repeat = index // repeats, index % repeats
        storage = to_int64(b)
        if starts_ptr is not None:
            storage = storage * 0
        x = tl.load(sum_ptr + (to_int64(t) * PARTS + part) * (64 * W_QK) + tl.arange(0, 64 * W_QK))
        # 8 columns, warp, row of 8, 2 columns, which 8 rows of the warp's 16, column
        x = x.reshape(W_QK // 8, 4, 8, 4, 2, 2).permute(1, 4, 2, 0, 3, 5).reshape(64, W_QK)
        rows = first + tl.arange(0, 64)
        cols = tl.arange(0, W_QK)[None, :]
        base = dq_ptr + storage * stride_dqb + to_int64(kv) * stride_dqh + to_int64(repeat) * stride_dqr
        ptrs = base + to_int64(start + rows)[:, None] * stride_dqs + cols
        x = tl.where((rows < length)[:, None], x * scale, 0.0).to(dq_ptr.dtype.element_ty)
        tl.store(ptrs, x, mask=(rows < room)[:, None] & (cols < D_QK))


@gluon.jit
def _add_in_order(base, x):
    """Add accumulators [64, N] to the float32 at `base`, in the order in which the threads hold them."""
    N: gl.constexpr = x.shape[1]
    x = x.reshape([4, 2, 8, N // 8, 4, 2]).permute(3, 0, 2, 4, 1, 5).reshape([16 * N, 2, 2])
    even, odd = x.split()
    x0, x2 = even.split()
    x1, x3 = odd.split()
    ptrs = base + gl.arange(0, 16 * N, x0.type.layout) * 4
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v4.f32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;",
        "=r,l,f,f,f,f",
        [ptrs.to(gl.int64), x0, x1, x2, x3],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    # not to be put off until behind the next product, whose registers these are
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _as_tile(smem):
    """[rows, columns] in shared memory as the tile of a descriptor of several heads."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, smem.dtype.primitive_bitwidth, 3)
    return reinterpret(smem, smem.dtype, [1, smem.shape[0], smem.shape[1]], layout)


@gluon.jit
def _load(q_desc, do_desc, rows_desc, q_smem, do_smem, rows_smem, full, empty, i, repeat, block, tile):
    """Block number i of what the consumers read, when they have given its stage back."""
    STAGES: gl.constexpr = q_smem.shape[0]
    BLOCK_M: gl.constexpr = q_smem.shape[1]
    BYTES: gl.constexpr = (q_smem.shape[2] + do_smem.shape[2]) * q_smem.dtype.primitive_bitwidth // 8 + 2 * 4
    stage = i % STAGES
    row = block * BLOCK_M
    mbarrier.wait(empty.index(stage), (i // STAGES) & 1 ^ 1)
    bar = full.index(stage)
    mbarrier.expect(bar, BLOCK_M * BYTES)
    tma_load(q_desc, [repeat, row, 0], bar, _as_tile(q_smem.index(stage)))
    tma_load(rows_desc, [tile * 2 * BLOCK_M], bar, rows_smem.index(stage))
    tma_load(do_desc, [repeat, row, 0], bar, _as_tile(do_smem.index(stage)))


@gluon.jit
def _next(repeat, block, begin, end):
    """The block of queries after this one; the heads that share the keys follow each other."""
    block += 1
    wraps = block == end
    return gl.where(wraps, repeat + 1, repeat), gl.where(wraps, begin, block)


@gluon.jit
def _store_rows(tile, base, row, length, room, stride, D: gl.constexpr):
    """64 rows in shared memory to memory; zeros from `length` to `room`."""
    W: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // W, W // 8], [4, 1], [1, 0])
    for part in gl.static_range(4):
        rows = row + part * 16 + gl.arange(0, 16, gl.SliceLayout(1, layout))
        cols = gl.arange(0, W, gl.SliceLayout(0, layout))
        values = tile.slice(part * 16, 16, 0).load(layout)
        values = gl.where(gl.expand_dims(rows < length, 1), values, 0.0)
        ptrs = base + gl.expand_dims(rows.to(gl.int64) * stride, 1) + gl.expand_dims(cols, 0)
        gl.store(ptrs, values, mask=gl.expand_dims(rows < room, 1) & gl.expand_dims(cols < D, 0))


@gluon.jit
def _serve(
    q_desc, do_desc, rows_desc, sum_ptr, dk_ptr, dv_ptr, smem, bars, begin, end, tile0, slots, repeats, first, k_len,
    k_room, stride_dks, stride_dvs, D_QK: gl.constexpr, D_V: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """The warpgroup that loads queries, multiplies ds K and adds it to the sums of dq, and stores dk and dv."""
    k_smem, v_smem, q_smem, do_smem, rows_smem, ds_smem = smem
    kv_full, full, empty, ds_full, ds_empty, drained, dv_full, dk_full = bars
    STAGES: gl.constexpr = q_smem.shape[0]
    DS_STAGES: gl.constexpr = ds_smem.shape[0]
    BLOCK_M: gl.constexpr = q_smem.shape[1]
    W_QK: gl.constexpr = k_smem.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    total = (end - begin) * repeats
    repeat = gl.to_tensor(0)
    block = begin
    for i in range(gl.minimum(total, STAGES)):
        tile = tile0 + repeat * slots + block
        _load(q_desc, do_desc, rows_desc, q_smem, do_smem, rows_smem, full, empty, i, repeat, block, tile)
        repeat, block = _next(repeat, block, begin, end)

    mbarrier.wait(kv_full, 0)
    dq_repeat = gl.to_tensor(0)
    dq_block = begin
    for i in range(total):
        tile = tile0 + dq_repeat * slots + dq_block
        stage = i % DS_STAGES
        mbarrier.wait(ds_full.index(stage), (i // DS_STAGES) & 1)
        for m in gl.static_range(BLOCK_M // 64):
            ds = ds_smem.index(stage).slice(m * 64, 64, 1).permute((1, 0))
            for n in gl.static_range(W_QK // PART):
                zeros = gl.zeros([64, PART], gl.float32, layout)
                # index 0, and no constant: what is computed from it does not fill registers all the while
                k = k_smem.index(i >> 30).slice(n * PART, PART, 1)
                part = m * (W_QK // PART) + n
                if sum_ptr is not None:
                    dq = hopper.warpgroup_mma(ds, k, zeros, use_acc=False, is_async=True)
                    dq = hopper.warpgroup_mma_wait(0, deps=[dq])
                if part == BLOCK_M // 64 * (W_QK // PART) - 1:
                    mbarrier.arrive(ds_empty.index(stage), count=1)
                if sum_ptr is not None:
                    _add_in_order(sum_ptr + tile.to(gl.int64) * (BLOCK_M * W_QK) + part * 64 * PART, dq)
        if i + STAGES < total:
            to = tile0 + repeat * slots + block
            _load(q_desc, do_desc, rows_desc, q_smem, do_smem, rows_smem, full, empty, i + STAGES, repeat, block, to)
            repeat, block = _next(repeat, block, begin, end)
        dq_repeat, dq_block = _next(dq_repeat, dq_block, begin, end)
    mbarrier.arrive(drained, count=1)
    for consumer in gl.static_range(2):
        mbarrier.wait(dv_full.index(consumer), 0)
        if dv_ptr is not None:
            rows = v_smem.slice(consumer * 64, 64, 0)
            _store_rows(rows, dv_ptr, first + consumer * 64, k_len, k_room, stride_dvs, D_V)
    for consumer in gl.static_range(2):
        mbarrier.wait(dk_full.index(consumer), 0)
        if dk_ptr is not None:
            rows = k_smem.index(0).slice(consumer * 64, 64, 0)
            _store_rows(rows, dk_ptr, first + consumer * 64, k_len, k_room, stride_dks, D_QK)


@gluon.jit
def _tanh(x):
    """The hardware's, good to 2^-11, enough beside operands of 16 bits."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _consume(
    slopes_ptr, smem, bars, count, repeats, head0, head_of_repeat, distance, k_left, scale, softcap, left, right,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, CAP: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """A warpgroup that owns 64 keys: their dk and dv, from all blocks of queries that see them.

    distance  position of the first query less that of the CTA's first key;  k_left  keys from that one on"""
    k_smem, v_smem, q_smem, do_smem, rows_smem, ds_smem = smem
    kv_full, full, empty, ds_full, ds_empty, drained, dv_full, dk_full = bars
    STAGES: gl.constexpr = q_smem.shape[0]
    DS_STAGES: gl.constexpr = ds_smem.shape[0]
    BLOCK_M: gl.constexpr = q_smem.shape[1]
    W_QK: gl.constexpr = k_smem.shape[2]
    W_V: gl.constexpr = v_smem.shape[1]
    dtype: gl.constexpr = k_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W_QK, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W_V, 16])
    row_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    k = k_smem.index(0).slice(CONSUMER * 64, 64, 0)
    v = v_smem.slice(CONSUMER * 64, 64, 0)
    k_left -= CONSUMER * 64
    distance -= CONSUMER * 64
    zeros = gl.zeros([64, BLOCK_M], gl.float32, s_layout)
    dk = gl.zeros([64, W_QK], gl.float32, dk_layout)
    dv = gl.zeros([64, W_V], gl.float32, dv_layout)
    mbarrier.wait(kv_full, 0)
    low = distance
    for i in range(repeats * count):
        stage = i % STAGES
        q = q_smem.index(stage)
        do = do_smem.index(stage)
        rows = rows_smem.index(stage)
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        s = hopper.warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
        dp = hopper.warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
        s = hopper.warpgroup_mma_wait(1, deps=[s])
        lse = gl.expand_dims(rows.slice(0, BLOCK_M).load(row_layout), 0)
        if CAP:
            t = _tanh(s * (scale / softcap))
            s = t * (softcap * _LOG2E)
        else:
            s = s * (scale * _LOG2E)
        if slopes_ptr is not None:
            slope = gl.load(slopes_ptr + head0 + i // count * head_of_repeat) * _LOG2E
            j = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, s_layout)), 1)
            at = gl.expand_dims(low + gl.arange(0, BLOCK_M, row_layout), 0)
            s -= slope * gl.abs(at - j).to(gl.float32)
        p = gl.exp2(s - lse)
        masked = k_left < 64
        if RIGHT:
            masked = masked | (low + right < 63)
        if LEFT:
            masked = masked | (low + BLOCK_M - 1 - left > 0)
        if masked:
            j = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, s_layout)), 1)
            at = gl.expand_dims(low + gl.arange(0, BLOCK_M, row_layout), 0)
            last = k_left - 1
            if RIGHT:
                last = gl.minimum(at + right, last)
            seen = j <= last
            if LEFT:
                seen = seen & (j >= at - left)
            p = gl.where(seen, p, 0.0)
        dp = hopper.warpgroup_mma_wait(0, deps=[dp])
        delta = gl.expand_dims(rows.slice(BLOCK_M, BLOCK_M).load(row_layout), 0)
        ds = p * (dp - delta)
        if CAP:
            ds *= 1.0 - t * t
        p16 = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, dv_layout, 2))
        ds = ds.to(dtype)
        ds16 = gl.convert_layout(ds, gl.DotOperandLayout(0, dk_layout, 2))
        dv = hopper.warpgroup_mma(p16, do, dv, is_async=True)
        dk = hopper.warpgroup_mma(ds16, q, dk, is_async=True)
        ds_stage = i % DS_STAGES
        mbarrier.wait(ds_empty.index(ds_stage), (i // DS_STAGES) & 1 ^ 1)
        ds_smem.index(ds_stage).slice(CONSUMER * 64, 64, 0).store(ds)
        hopper.fence_async_shared()
        mbarrier.arrive(ds_full.index(ds_stage), count=1)
        dv, dk = hopper.warpgroup_mma_wait(0, deps=[dv, dk])
        mbarrier.arrive(empty.index(stage), count=1)
        low += BLOCK_M
        low = gl.where(low == distance + count * BLOCK_M, distance, low)
    # v is read by this warpgroup alone, k by the server too
    v.store(dv.to(dtype))
    mbarrier.arrive(dv_full.index(CONSUMER), count=1)
    mbarrier.wait(drained, 0)
    k.store((dk * scale).to(dtype))
    mbarrier.arrive(dk_full.index(CONSUMER), count=1)


@gluon.jit
def _int32(x):
    return gl.to_tensor(x).to(gl.int32)


@gluon_kernel(archs=(90,))
def _hopper_attention_bwd_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, sum_ptr, dk_ptr, dv_ptr, rows_ptr, slopes_ptr,
    q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr,
    batch, queries, keys, kv_heads, repeats, blocks, group, slots, rows_size, head_of_kv, head_of_repeat,
    stride_qb, stride_qs, stride_qh, stride_qr, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_dob, stride_dos, stride_doh, stride_dor, stride_dkb, stride_dks, stride_dkh,
    stride_dvb, stride_dvs, stride_dvh, slopes_stride_b, scale, softcap, left, right,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, CAP: gl.constexpr,
    D_QK: gl.constexpr, D_V: gl.constexpr, W_QK: gl.constexpr, W_V: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, DS_STAGES: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = 128
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    BYTES: gl.constexpr = dtype.primitive_bitwidth // 8
    # int64 where a stride needs it
    queries, keys, kv_heads, repeats = _int32(queries), _int32(keys), _int32(kv_heads), _int32(repeats)
    blocks, group, slots, head_of_repeat = _int32(blocks), _int32(group), _int32(slots), _int32(head_of_repeat)
    batch, left, right = _int32(batch), _int32(left), _int32(right)
    rows_size, head_of_kv = _int32(rows_size), _int32(head_of_kv)
    # `group` heads at a time share the L2, and of each the first keys, which most queries see, go first
    heads = kv_heads
    if k_starts_ptr is None:
        heads = kv_heads * batch
    first_head = gl.program_id(0) // (group * blocks) * group
    size = gl.minimum(heads - first_head, group)
    within = gl.program_id(0) - first_head * blocks
    block = within // size
    kv = first_head + within % size
    if k_starts_ptr is not None:
        b, block = find_sequence(k_starts_ptr, batch, block, BLOCK_N)
    else:
        b = kv // kv_heads
        kv = kv % kv_heads
    k_start, k_len, k_room = span_of(k_starts_ptr, k_used_ptr, b, batch, keys)
    q_start, q_len, _ = span_of(q_starts_ptr, q_used_ptr, b, batch, queries)
    first = block * BLOCK_N
    offset = gl.to_tensor(0)
    if BOTTOM_RIGHT:
        offset = k_len - q_len
    begin = gl.to_tensor(0)
    end = q_len
    if RIGHT:
        begin = gl.maximum(first - right - offset, 0)
    if LEFT:
        end = gl.minimum(end, gl.minimum(first + BLOCK_N, k_len) + left - offset)
    begin = begin // BLOCK_M
    end = gl.maximum(gl.cdiv(end, BLOCK_M), begin)
    end = gl.where(first < k_len, end, begin)
    head0 = kv * head_of_kv
    tile0 = kv * repeats * slots
    storage = b.to(gl.int64)
    if slopes_ptr is not None:
        slopes_ptr += storage * slopes_stride_b
    if q_starts_ptr is not None:
        tile0 += q_start // BLOCK_M + b
        storage = storage * 0
    else:
        tile0 += b * kv_heads * repeats * slots
    kv64 = kv.to(gl.int64)
    q64 = q_start.to(gl.int64)
    k64 = k_start.to(gl.int64)
    q_ptr += storage * stride_qb + q64 * stride_qs + kv64 * stride_qh
    do_ptr += storage * stride_dob + q64 * stride_dos + kv64 * stride_doh
    k_ptr += storage * stride_kb + k64 * stride_ks + kv64 * stride_kh
    v_ptr += storage * stride_vb + k64 * stride_vs + kv64 * stride_vh
    if dk_ptr is not None:
        dk_ptr += storage * stride_dkb + k64 * stride_dks + kv64 * stride_dkh
    if dv_ptr is not None:
        dv_ptr += storage * stride_dvb + k64 * stride_dvs + kv64 * stride_dvh

    layout: gl.constexpr = gl.NVMMASharedLayout(128, dtype.primitive_bitwidth, 2)
    q_layout: gl.constexpr = gl.NVMMASharedLayout(128, dtype.primitive_bitwidth, 3)
    rows_layout: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    k_smem = gl.allocate_shared_memory(dtype, [1, BLOCK_N, W_QK], layout)
    v_smem = gl.allocate_shared_memory(dtype, [BLOCK_N, W_V], layout)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, W_QK], layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, W_V], layout)
    ds_smem = gl.allocate_shared_memory(dtype, [DS_STAGES, BLOCK_N, BLOCK_M], layout)
    rows_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * BLOCK_M], rows_layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [DS_STAGES, 1], mbarrier.MBarrierLayout())
    ds_empty = gl.allocate_shared_memory(gl.int64, [DS_STAGES, 1], mbarrier.MBarrierLayout())
    drained = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    dv_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    dk_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    mbarrier.init(drained, count=1)
    for i in gl.static_range(2):
        mbarrier.init(dv_full.index(i), count=1)
        mbarrier.init(dk_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(DS_STAGES):
        mbarrier.init(ds_full.index(i), count=2)
        mbarrier.init(ds_empty.index(i), count=1)
    hopper.fence_async_shared()

    # descriptors that end where the sequence ends: behind it are zeros
    rows = gl.maximum(k_len, 1)
    k_desc = tma.make_tensor_descriptor(k_ptr, [rows, D_QK], [stride_ks, 1], [BLOCK_N, W_QK], layout)
    v_desc = tma.make_tensor_descriptor(v_ptr, [rows, D_V], [stride_vs, 1], [BLOCK_N, W_V], layout)
    mbarrier.expect(kv_full, BLOCK_N * (W_QK + W_V) * BYTES)
    tma_load(k_desc, [first, 0], kv_full, k_smem.index(0))
    tma_load(v_desc, [first, 0], kv_full, v_smem)
    rows = gl.maximum(q_len, 1)
    q_desc = tma.make_tensor_descriptor(
        q_ptr, [repeats, rows, D_QK], [stride_qr, stride_qs, 1], [1, BLOCK_M, W_QK], q_layout
    )
    do_desc = tma.make_tensor_descriptor(
        do_ptr, [repeats, rows, D_V], [stride_dor, stride_dos, 1], [1, BLOCK_M, W_V], q_layout
    )
    rows_desc = tma.make_tensor_descriptor(rows_ptr, [rows_size], [1], [2 * BLOCK_M], rows_layout)

    smem = (k_smem, v_smem, q_smem, do_smem, rows_smem, ds_smem)
    bars = (kv_full, full, empty, ds_full, ds_empty, drained, dv_full, dk_full)
    distance = begin * BLOCK_M + offset - first
    gl.warp_specialize([
        (_serve, (
            q_desc, do_desc, rows_desc, sum_ptr, dk_ptr, dv_ptr, smem, bars, begin, end, tile0, slots, repeats, first,
            k_len, k_room, stride_dks, stride_dvs, D_QK, D_V, PART,
        )),
        (_consume, (
            slopes_ptr, smem, bars, end - begin, repeats, head0, head_of_repeat, distance, k_len - first, scale,
            softcap, left, right, LEFT, RIGHT, CAP, 0,
        )),
        (_consume, (
            slopes_ptr, smem, bars, end - begin, repeats, head0, head_of_repeat, distance, k_len - first, scale,
            softcap, left, right, LEFT, RIGHT, CAP, 1,
        )),
    ], [4, 4], [224, 224])  # fmt: skip


class Plan(NamedTuple):
    """The tiles of a pair of head dims: 128 keys by block_m queries, so that a consumer's scores, dp, dk and dv are 192
    registers a thread."""

    width: int  # what head dims are padded to
    block_m: int
    stages: int = 2
    ds_stages: int = 2
    part: int = 32  # columns of dq at a time
    group: int = 2  # heads at a time


def plan_for(d_qk: int, d_v: int) -> Plan:
    return Plan(64, 128) if max(d_qk, d_v) <= 64 else Plan(128, 64, stages=3)


_MAX_HEAD_DIM = 128


def why_not_backward(query: Tensor, key: Tensor, value: Tensor, args: _Args) -> str | None:
    """Why this backward does not take these tensors, or None. Says nothing of the device, nor of whether the caller
    wants the same bits every time, which the order of its additions does not give."""
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
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {checks.name(query.dtype)}"
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.shape[-1] > _MAX_HEAD_DIM or x.shape[-1] % 8:
            return f"{name}'s head dim must be a multiple of 8 up to {_MAX_HEAD_DIM}, is {x.shape[-1]}"
        if not x.numel():
            return f"{name} is empty"
    heads = _heads(query, key, value, args.layout)
    operands = {
        "query": _operand(query, args.layout, heads),
        "key": _operand(key, args.layout, heads, True),
        "value": _operand(value, args.layout, heads, True),
    }
    for name, operand in operands.items():
        tensor, *strides = operand
        elements = 16 // tensor.element_size()
        aligned = tensor.is_meta or tensor.data_ptr() % 16 == 0
        if not aligned or tensor.stride(-1) != 1 or any(stride % elements for stride in strides):
            return f"{name}'s rows must be contiguous and 16-byte aligned, strides are {tuple(tensor.stride())}"
        if operand.s == 0 or (operand.r == 0 and name == "query" and heads.repeats > 1):
            return f"{name} is expanded, strides {tuple(tensor.stride())}"
    if 2 * query.numel() // query.shape[-1] >= 2**31 - 2**24:
        return "TMA counts the rows of all heads in an int32"
    return None


def _launch(
    q: _Operand, k: _Operand, v: _Operand, o: _Operand, do: _Operand, dq: _Operand | None, dk: _Operand | None,
    dv: _Operand | None, lse: Tensor, dlse: Tensor | None, args: _Args, shape: _Shape, heads: _Heads, plan: Plan,
) -> None:  # fmt: skip
    d_qk, d_v = k.tensor.shape[-1], v.tensor.shape[-1]
    batch = shape.batch if args.query_starts is None else 1
    slots = _slots(shape, shape.queries, args.query_starts, plan.block_m)
    tiles = batch * heads.kv * heads.repeats * slots
    rows = torch.empty(tiles * 2 * plan.block_m, dtype=torch.float32, device=lse.device)
    sums = None
    if dq is not None:
        sums = torch.empty(tiles * plan.block_m * plan.width, dtype=torch.float32, device=lse.device)
    _hopper_attention_rows_kernel[(tiles,)](
        o.tensor, do.tensor, lse, dlse, rows, sums, args.query_starts, args.query_used, shape.batch, shape.queries,
        slots, heads.kv * heads.repeats, heads.repeats, heads.of_kv, heads.of_repeat, *o[1:], *do[1:],
        D_V=d_v, W_QK=plan.width, W_V=plan.width, BLOCK_M=plan.block_m,
    )  # fmt: skip
    blocks = _slots(shape, shape.keys, args.key_starts, _BLOCK_N)
    slopes, absent = args.slopes, _Operand(k.tensor, 0, 0, 0, 0)
    _hopper_attention_bwd_kernel[(batch * heads.kv * blocks,)](
        q.tensor, k.tensor, v.tensor, do.tensor, sums, dk and dk.tensor, dv and dv.tensor, rows, slopes,
        args.query_starts, args.key_starts, args.query_used, args.key_used,
        shape.batch, shape.queries, shape.keys, heads.kv, heads.repeats, blocks, plan.group, slots, rows.numel(),
        heads.of_kv, heads.of_repeat, *q[1:], *k[1:4], *v[1:4], *do[1:], *(dk or absent)[1:4], *(dv or absent)[1:4],
        slopes.shape[1] if slopes is not None and slopes.dim() == 2 else 0,
        args.scale, args.softcap, args.left, args.right,
        LEFT=args.left >= 0, RIGHT=args.right >= 0, BOTTOM_RIGHT=args.bottom_right, CAP=args.softcap > 0,
        D_QK=d_qk, D_V=d_v, W_QK=plan.width, W_V=plan.width, BLOCK_M=plan.block_m,
        STAGES=plan.stages, DS_STAGES=plan.ds_stages, PART=plan.part, num_warps=4,
    )  # fmt: skip
    if dq is not None:
        _hopper_attention_dq_kernel[(tiles * plan.block_m // 64,)](
            sums, dq.tensor, args.query_starts, args.query_used, shape.batch, shape.queries, slots,
            heads.kv * heads.repeats, heads.repeats, args.scale, *dq[1:],
            D_QK=d_qk, W_QK=plan.width, BLOCK_M=plan.block_m,
        )  # fmt: skip


def hopper_attention_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    need: list[bool],
    *rest: Any,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, an empty dbias) on sm_90, with the arguments and results of triton_flash._attention_bwd; those that
    are not needed are empty. `why_not_backward` says what is taken."""
    args = _Args(*rest)
    dq, dk, dv, dbias = _bwd_outputs(dout, dlse, query, key, value, out, lse, need, *rest)
    heads, shape = _heads(query, key, value, args.layout), _shape(query, key, args.layout, args.query_starts)
    dout = _for_tma(dout)

    def operand(x: Tensor, is_key: bool = False) -> _Operand:
        return _operand(x, args.layout, heads, is_key)

    if any(need[:3]):
        _launch(
            operand(query), operand(key, True), operand(value, True), operand(out), operand(dout),
            operand(dq) if need[0] else None, operand(dk, True) if need[1] else None,
            operand(dv, True) if need[2] else None, lse, None if dlse is None else dlse.contiguous(), args, shape,
            heads, plan or plan_for(query.shape[-1], value.shape[-1]),
        )  # fmt: skip
    return dq, dk, dv, dbias


def _for_tma(x: Tensor) -> Tensor:
    """`x`, or a copy of it in rows that TMA can read."""
    elements = 16 // x.element_size()
    fits = x.stride(-1) == 1 and all(s and s % elements == 0 for s in x.stride()[:-1])
    fits = fits and (x.is_meta or x.data_ptr() % 16 == 0)
    return x if fits else x.clone(memory_format=torch.contiguous_format)
