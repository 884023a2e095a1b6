"""Backward of attention for Hopper at query head dims of 136 to 192 and value head dims up to 192, in Gluon, with 96
keys a tile.

The sums are those of hopper/backward.py. Three *consumers* share a tile of 96 keys. Of a block of 64 queries each
computes the scores and dp of 32 keys, queries along the rows; p and ds meet in shared memory. Then each owns 64 head
dims: dvᵀ and dkᵀ of all keys, [64 head dims, 64 + 32 keys] (Triton's tensors are powers of 2), and those columns of
dq, which TMA adds to the sums in memory, from shared memory: while a consumer's own additions are pending, its next
fence between ordinary stores and wgmma waits for them. The *producer* only loads.

k, v, q and do lie as pieces of 64 columns, of which the last may be zeros: q and k as three pieces, v and do as one to
three. A consumer without a piece of v has no columns of dv. Scores, dp and dq leave out the last 32 columns where they
are zeros; dk and dv cannot, as wgmma has 64 rows. Tiles add in no fixed order. ALiBi and a softcap are
backward_kernel_d256.py's, at 192/128 the universal kernels'. Where heads are split, dk and dv leave the consumers as
sums, [64 head dims, 64 keys] and [64 head dims, 32 keys] of each piece.

ms, one H200, backward of D192 causal, B2 S8192 16/16, B4 S3000, full; FlashAttention-3: 4.14 1.31 2.36; 3.75 1.17 2.10.
With additions by the consumers, and the product for dv beside the next block's exponentials: 4.46 1.39 2.61. With the
next block's scores behind the products of this one 4.24 1.33 2.39.

Source: FlashAttention-3's tile for this head dim has the same shape (Shah et al. 2024, arXiv:2407.08608).
"""

from typing import Any, NamedTuple

from powertrain.ops.attention.hopper.backward_tiles import (
    keys_of,
    place_of,
    place_of_keys,
    queries_of,
    sums_of,
)
from powertrain.ops.attention.hopper.pieces import store_piece
from powertrain.ops.attention.hopper.primitives import (
    LOG2E,
    BackwardConfig,
    BackwardSizes,
    Lengths,
    Window,
    add_in_order,
    alloc_mbarriers,
    alloc_pipeline_stages,
    as_tile,
    int32,
    keep_order,
    rows_in_order,
)
from powertrain.ops.attention.triton.sequences import SMALL
from powertrain.ops.early_start import await_kernel_before
from powertrain.runtime.gluon_compat import (
    barrier,
    gl,
    gluon,
    hopper,
    mbarrier,
    named_barrier_sync_divergent,
    tma,
    tma_load,
    tma_store_add,
)
from powertrain.runtime.launch import gluon_kernel

_CONSUMERS = gl.constexpr(8)  # the barrier at which they meet
_PIECES = gl.constexpr(3)  # of 64 columns of q and k, a consumer's each
_STAGES = gl.constexpr(2)  # of queries; results' gradients, p and ds have one
_SUMS = gl.constexpr(32)  # columns of a row of the sums of dq, as TMA adds it


class _Buffers(NamedTuple):
    """Tiles in shared memory, in pieces of 64 columns; k, v, p and ds have the first 64 keys and the last 32 apart."""

    k: Any  # [3, 64, 64], [3, 32, 64]
    v: Any  # [pieces, 64, 64], [pieces, 32, 64]
    q: Any  # [stages * 3, 64, 64]
    do: Any  # [pieces, 64, 64]
    rows: Any  # [stages, 128]: LSE and delta
    p: Any  # [1, 64, 64], [1, 64, 32]
    ds: Any  # [1, 64, 64], [1, 64, 32]
    dq: Any  # [3, 128, 32]: a consumer's columns, in the order in which its threads hold them


class _Barriers(NamedTuple):
    """mbarriers; those of queries have one for each stage."""

    kv_full: Any
    q_full: Any  # with LSE and delta
    q_empty: Any  # the three consumers have multiplied q, and ds with it
    do_full: Any
    do_empty: Any  # the three consumers have multiplied do


@gluon.jit
def _load(desc, smem, bar, stage, place, PIECES: gl.constexpr):
    """A tile in pieces of 64 columns, from piece number `stage` * PIECES on."""
    b, head, end, row = place
    for i in gl.static_range(PIECES):
        tma_load(desc, [b, head, end, row, i * 64], bar, as_tile(smem.index(stage * PIECES + i)))


@gluon.jit
def _produce(
    q_desc, do_desc, rows_desc, place, smem, bars, begin, end, tile0, slots, num_q_per_kv, CONFIG: gl.constexpr
):  # fmt: skip
    """The warpgroup that loads queries, their LSE and delta, and the results' gradients."""
    await_kernel_before(CONFIG.starts_early)
    q_smem, do_smem, rows_smem = smem.q, smem.do, smem.rows
    _, q_full, q_empty, do_full, do_empty = bars
    V_PIECES: gl.constexpr = (CONFIG.d_v + 63) // 64
    PIECE: gl.constexpr = 64 * 64 * q_smem.dtype.primitive_bitwidth // 8
    b, head0, q_end, row0 = place
    head = gl.to_tensor(0)
    block = begin
    for i in range((end - begin) * num_q_per_kv):
        stage = i % _STAGES
        mbarrier.wait(q_empty.index(stage), (i // _STAGES) & 1 ^ 1)
        bar = q_full.index(stage)
        mbarrier.expect(bar, _PIECES * PIECE + 2 * 64 * 4)
        _load(q_desc, q_smem, bar, stage, (b, head0 + head, q_end, row0 + block * 64), _PIECES)
        tma_load(rows_desc, [(tile0 + head * slots + block) * 128], bar, rows_smem.index(stage))  # [128]: LSE, delta
        mbarrier.wait(do_empty, i & 1 ^ 1)
        mbarrier.expect(do_full, V_PIECES * PIECE)
        _load(do_desc, do_smem, do_full, 0, (b, head0 + head, q_end, row0 + block * 64), V_PIECES)
        block += 1
        wraps = block == end
        head = gl.where(wraps, head + 1, head)
        block = gl.where(wraps, begin, block)


@gluon.jit
def _multiply_piece(rows, at, keys, piece, s, use_acc, COLS: gl.constexpr, CONSUMER: gl.constexpr):
    """s + rows keysᵀ of a consumer's 32 keys and the first COLS columns of a piece, asynchronously."""
    if CONSUMER == 2:
        own = keys[1].index(piece)
    else:
        own = keys[0].index(piece).slice(CONSUMER * 32, 32, 0)
    if COLS == 64:
        return hopper.warpgroup_mma(rows.index(at), own.permute((1, 0)), s, use_acc=use_acc, is_async=True)
    a, b = rows.index(at).slice(0, COLS, 1), own.slice(0, COLS, 1)
    return hopper.warpgroup_mma(a, b.permute((1, 0)), s, use_acc=use_acc, is_async=True)


@gluon.jit
def _ask(rows, stage, keys, i, zeros, D: gl.constexpr, CONSUMER: gl.constexpr):
    """rows keysᵀ of a consumer's keys, asynchronously: [64 queries, 32 keys]."""
    # not a constant: addresses computed from one would be kept in registers throughout
    first = i >> 30
    PIECES: gl.constexpr = (D + 63) // 64
    at = stage * PIECES
    s = zeros
    for n in gl.static_range(PIECES):
        s = _multiply_piece(rows, at + n, keys, first + n, s, n > 0, 32 if D <= n * 64 + 32 else 64, CONSUMER)
    return s


@gluon.jit
def _ask_for_dq(ds_smem, k_smem, i, COLS: gl.constexpr, CONSUMER: gl.constexpr):
    """ds k of a consumer's first COLS columns, asynchronously."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    at = i >> 30  # as in _ask
    zeros = gl.zeros([64, COLS], gl.float32, layout)
    k = k_smem[0].index(CONSUMER + at).slice(0, COLS, 1)
    dq = hopper.warpgroup_mma(ds_smem[0].index(at), k, zeros, use_acc=False, is_async=True)
    k = k_smem[1].index(CONSUMER + at).slice(0, COLS, 1)
    return hopper.warpgroup_mma(ds_smem[1].index(at), k, dq, is_async=True)


@gluon.jit
def _add_rows(rows, piece, weights, i, sums):
    """sums + rowsᵀ weights, asynchronously, of a piece of 64 columns of rows: [64 columns, 64 keys], [64, 32]."""
    a, at = rows.index(piece).permute((1, 0)), i >> 30  # as in _ask
    first = hopper.warpgroup_mma(a, weights[0].index(at), sums[0], is_async=True)
    second = hopper.warpgroup_mma(a, weights[1].index(at), sums[1], is_async=True)
    return first, second


@gluon.jit
def _add_dq(desc, dq, smem, row):
    """A consumer's columns of dq to the sums in memory, from row `row` on; `tma.store_wait` says when shared memory has
    been read."""
    smem = smem.slice(0, 2 * dq.shape[1], 0)
    smem.store(rows_in_order(dq))
    hopper.fence_async_shared()
    barrier()
    for part in gl.static_range(smem.shape[0] // 64):
        tma_store_add(desc, [row + part * 64, 0], smem.slice(part * 64, 64, 0))


@gluon.jit
def _masked_weights(p, low, keys_left, window, CONFIG: gl.constexpr):
    """`p` [64 queries, 32 keys] with zeros where a query does not see a key.

    low  position of the first query less that of the first key;  keys_left  keys of the sequence from that one on"""
    layout: gl.constexpr = p.type.layout
    # most blocks are fully visible
    masked = keys_left < 32
    if CONFIG.has_right:
        masked = masked | (low + window.right < 31)
    if CONFIG.has_left:
        masked = masked | (low + 63 - window.left > 0)
    if masked:
        at = gl.expand_dims(low + gl.arange(0, 64, gl.SliceLayout(1, layout)), 1)
        j = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, layout)), 0)
        last = keys_left - 1
        if CONFIG.has_right:
            last = gl.minimum(at + window.right, last)
        seen = j <= last
        if CONFIG.has_left:
            seen = seen & (j >= at - window.left)
        p = gl.where(seen, p, 0.0)
    return p


@gluon.jit
def _put(weights, x, CONSUMER: gl.constexpr):
    """A consumer's 32 keys of p or ds."""
    x = x.to(weights[0].dtype)
    if CONSUMER == 2:
        weights[1].index(0).store(x)
    else:
        weights[0].index(0).slice(CONSUMER * 32, 32, 1).store(x)


@gluon.jit
def _store_columns(sums, smem, ptr, rows_left, capacity, stride, D: gl.constexpr, CONSUMER: gl.constexpr):
    """A consumer's 64 columns of dk or dv of 96 keys, in the place of its piece of k or v."""
    for part in gl.static_range(2):
        tile = smem[part].index(CONSUMER)
        tile.permute((1, 0)).store(sums[part].to(tile.dtype))
    for part in gl.static_range(2):
        base = ptr + part * 64 * stride.to(gl.int64)
        store_piece(
            smem[part].index(CONSUMER), CONSUMER * 64, base, rows_left - part * 64, capacity - part * 64, stride, D
        )  # fmt: skip


@gluon.jit
def _leave_sums(sums, ptr, CONSUMER: gl.constexpr):
    """Add a consumer's columns of dk or dv to the float32 sums of a tile of keys."""
    base = ptr + CONSUMER * (64 * 96)
    add_in_order(base, sums[0])
    add_in_order(base + 64 * 64, sums[1])


@gluon.jit
def _consume(
    sum_desc, dk_ptr, dv_ptr, smem, bars, count, num_q_per_kv, tile0, begin, slots, distance, k_left, k_capacity,
    stride_dks, stride_dvs, scale, window, CONFIG: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """A warpgroup that owns 64 columns of dk, dv and dq, and computes p and ds of 32 of the 96 keys.

    distance  position of the first query less that of the CTA's first key;  k_left  keys from that one on"""
    await_kernel_before(CONFIG.starts_early)
    k_smem, v_smem, q_smem, do_smem, rows_smem, p_smem, ds_smem, dq_smem = smem
    kv_full, q_full, q_empty, do_full, do_empty = bars
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    zeros = gl.zeros([64, 32], gl.float32, s_layout)
    dk = (gl.zeros([64, 64], gl.float32, sums_layout), gl.zeros([64, 32], gl.float32, s_layout))
    dv = (gl.zeros([64, 64], gl.float32, sums_layout), gl.zeros([64, 32], gl.float32, s_layout))
    V_PIECES: gl.constexpr = (CONFIG.d_v + 63) // 64
    DQ_COLS: gl.constexpr = 32 if CONFIG.d_qk <= CONSUMER * 64 + 32 else 64
    W_DQ: gl.constexpr = 160 if CONFIG.d_qk <= 160 else 192
    # products pending for dq
    DQ: gl.constexpr = 2 if sum_desc is not None else 0
    mbarrier.wait(kv_full, 0)
    distance -= CONSUMER * 32
    own_left = k_left - CONSUMER * 32
    low = distance
    tile = tile0 + begin
    for i in range(num_q_per_kv * count):
        stage = i % _STAGES
        rows = rows_smem.index(stage)
        mbarrier.wait(q_full.index(stage), (i // _STAGES) & 1)
        # four numbers a thread, ahead of the products: loads behind them would wait for the tensor cores
        lse = gl.expand_dims(rows.slice(0, 64).load(row_layout), 1)
        delta = gl.expand_dims(rows.slice(64, 64).load(row_layout), 1)
        keep_order()
        s = _ask(q_smem, stage, k_smem, i, zeros, CONFIG.d_qk, CONSUMER)  # [64, 32]
        # loaded when all had multiplied the gradients of the block before, and its p with them
        mbarrier.wait(do_full, i & 1)
        dp = _ask(do_smem, i >> 30, v_smem, i, zeros, CONFIG.d_v, CONSUMER)  # [64, 32]
        s = hopper.warpgroup_mma_wait(V_PIECES, deps=[s])
        p = _masked_weights(gl.exp2(s * (scale * LOG2E) - lse), low, own_left, window, CONFIG)
        _put(p_smem, p, CONSUMER)
        dp = hopper.warpgroup_mma_wait(0, deps=[dp])
        # all have multiplied the ds of the block before
        mbarrier.wait(q_empty.index((i + 1) % _STAGES), ((i + 1) // _STAGES) & 1 ^ 1)
        _put(ds_smem, p * (dp - delta), CONSUMER)
        hopper.fence_async_shared()
        tma.store_wait(0)
        # all have stored their p and ds, and TMA has read the dq of the block before
        named_barrier_sync_divergent(_CONSUMERS, 384)
        if CONSUMER < V_PIECES:
            dv = _add_rows(do_smem, CONSUMER + (i >> 30), p_smem, i, dv)
        if sum_desc is not None:
            dq = _ask_for_dq(ds_smem, k_smem, i, DQ_COLS, CONSUMER)
        dk = _add_rows(q_smem, stage * _PIECES + CONSUMER, ds_smem, i, dk)
        if CONSUMER < V_PIECES:
            dv = hopper.warpgroup_mma_wait(2 + DQ, deps=dv)
        mbarrier.arrive(do_empty, count=1)
        if sum_desc is not None:
            dq = hopper.warpgroup_mma_wait(2, deps=[dq])
            _add_dq(sum_desc, dq, dq_smem.index(CONSUMER), tile * (64 * W_DQ // _SUMS) + CONSUMER * 128)
        dk = hopper.warpgroup_mma_wait(0, deps=dk)
        mbarrier.arrive(q_empty.index(stage), count=1)
        low += 64
        wraps = low == distance + count * 64
        tile = gl.where(wraps, tile + 1 + slots - count, tile + 1)
        low = gl.where(wraps, distance, low)
    # shared memory is the CTA's until it ends
    tma.store_wait(0)
    # all have read k and v, in whose place dk and dv leave
    named_barrier_sync_divergent(_CONSUMERS, 384)
    if CONFIG.splits_heads:
        if CONSUMER < V_PIECES and dv_ptr is not None:
            _leave_sums(dv, dv_ptr, CONSUMER)
        if dk_ptr is not None:
            _leave_sums(dk, dk_ptr, CONSUMER)
    else:
        if CONSUMER < V_PIECES and dv_ptr is not None:
            _store_columns(dv, v_smem, dv_ptr, k_left, k_capacity, stride_dvs, CONFIG.d_v, CONSUMER)
        if dk_ptr is not None:
            scaled = (dk[0] * scale, dk[1] * scale)
            _store_columns(scaled, k_smem, dk_ptr, k_left, k_capacity, stride_dks, CONFIG.d_qk, CONSUMER)


@gluon.jit
def _alloc_buffers(dtype: gl.constexpr, V_PIECES: gl.constexpr):
    # panels of 32 keys, one for each consumer
    half_layout: gl.constexpr = gl.NVMMASharedLayout(64, dtype.primitive_bitwidth, 2)
    rows_layout: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    k = (alloc_pipeline_stages(dtype, _PIECES, 64, 64), alloc_pipeline_stages(dtype, _PIECES, 32, 64))
    v = (alloc_pipeline_stages(dtype, V_PIECES, 64, 64), alloc_pipeline_stages(dtype, V_PIECES, 32, 64))
    q = alloc_pipeline_stages(dtype, _STAGES * _PIECES, 64, 64)
    do = alloc_pipeline_stages(dtype, V_PIECES, 64, 64)
    p = (
        gl.allocate_shared_memory(dtype, [1, 64, 64], half_layout),
        gl.allocate_shared_memory(dtype, [1, 64, 32], half_layout),
    )
    ds = (
        gl.allocate_shared_memory(dtype, [1, 64, 64], half_layout),
        gl.allocate_shared_memory(dtype, [1, 64, 32], half_layout),
    )
    rows = gl.allocate_shared_memory(gl.float32, [_STAGES, 128], rows_layout)
    dq = alloc_pipeline_stages(gl.float32, 3, 128, _SUMS)
    return _Buffers(k, v, q, do, rows, p, ds, dq)


@gluon.jit
def _barrier(arrivals: gl.constexpr):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=arrivals)
    return bar


@gluon.jit
def _init_barriers():
    kv_full = _barrier(1)
    q_full = alloc_mbarriers(_STAGES, 1)
    q_empty = alloc_mbarriers(_STAGES, 3)
    do_full = _barrier(1)
    do_empty = _barrier(3)
    hopper.fence_async_shared()
    return _Barriers(kv_full, q_full, q_empty, do_full, do_empty)


@gluon_kernel(archs=(90,), unaligned=SMALL)
def _hopper_attention_bwd_d192_kernel(
    q_desc, k_desc, k_tail_desc, v_desc, v_tail_desc, do_desc, rows_desc, sum_desc, dk_ptr, dv_ptr,
    q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr, k_slots_ptr,
    batch, queries, keys, kv_heads, num_q_per_kv, blocks, late_blocks, swizzle, slots,
    stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh, scale, left, right,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr,
    D_QK: gl.constexpr, D_V: gl.constexpr, REGISTERS: gl.constexpr, SPLIT_HEADS: gl.constexpr,
    STARTS_EARLY: gl.constexpr,
):  # fmt: skip
    # int64 where a stride needs it
    queries, keys, kv_heads, num_q_per_kv = int32(queries), int32(keys), int32(kv_heads), int32(num_q_per_kv)
    blocks, swizzle, slots = int32(blocks), int32(swizzle), int32(slots)
    batch, left, right = int32(batch), int32(left), int32(right)
    lengths = Lengths(q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr, k_slots_ptr)
    PACKED: gl.constexpr = q_starts_ptr is not None
    splits = gl.to_tensor(1)
    if SPLIT_HEADS:
        splits = gl.num_programs(0) // (blocks * kv_heads * (1 if PACKED else batch))
        kv_heads = kv_heads * splits
    sizes = BackwardSizes(
        batch, queries, keys, kv_heads, num_q_per_kv, None, blocks, int32(late_blocks), swizzle, slots, None
    )
    CONFIG: gl.constexpr = BackwardConfig(
        LEFT, RIGHT, BOTTOM_RIGHT, False, PACKED, PACKED or q_used_ptr is not None, PACKED or k_used_ptr is not None,
        D_QK, D_V, False, SPLIT_HEADS, False, False, STARTS_EARLY,
    )  # fmt: skip
    window = Window(left, right)
    V_PIECES: gl.constexpr = (D_V + 63) // 64
    smem = _alloc_buffers(q_desc.dtype, V_PIECES)
    bars = _init_barriers()

    await_kernel_before(STARTS_EARLY)
    b, kv, slot, first, k_start, k_len, k_capacity, q_start, q_len = keys_of(
        gl.program_id(0), lengths, sizes, 96
    )  # fmt: skip
    begin, count, offset = queries_of(first, k_len, q_len, window, CONFIG, 64, 96)
    tile0 = sums_of(b, kv, q_start, sizes, PACKED, 64)
    # the batch entry in memory: packed sequences share one
    storage, b_load = b.to(gl.int64), b
    if PACKED:
        storage, b_load = storage * 0, gl.to_tensor(0)
    head = kv // splits
    head64 = head.to(gl.int64)
    k64 = k_start.to(gl.int64)
    if SPLIT_HEADS:
        # all parts add to the same sums
        of_head = head64 if PACKED else head64 + b.to(gl.int64) * (kv_heads // splits)
        place_of_sums = (of_head * blocks + slot) * (64 * 96)
        if dk_ptr is not None:
            dk_ptr += place_of_sums * _PIECES
        if dv_ptr is not None:
            dv_ptr += place_of_sums * V_PIECES
    else:
        if dk_ptr is not None:
            dk_ptr += storage * stride_dkb + (k64 + first) * stride_dks + head64 * stride_dkh
        if dv_ptr is not None:
            dv_ptr += storage * stride_dvb + (k64 + first) * stride_dvs + head64 * stride_dvh

    end, row = place_of_keys(k_start, k_len, first, keys, CONFIG.ragged_k)
    # the last 32 keys may all lie behind the end: one row of the sequence is loaded then, whose scores are masked
    tail = gl.minimum(row + 64, keys - 1)
    mbarrier.expect(bars.kv_full, (_PIECES + V_PIECES) * 96 * 64 * (q_desc.dtype.primitive_bitwidth // 8))
    _load(k_desc, smem.k[0], bars.kv_full, 0, (b_load, head, end, row), _PIECES)
    _load(v_desc, smem.v[0], bars.kv_full, 0, (b_load, head, end, row), V_PIECES)
    _load(k_tail_desc, smem.k[1], bars.kv_full, 0, (b_load, head, end, tail), _PIECES)
    _load(v_tail_desc, smem.v[1], bars.kv_full, 0, (b_load, head, end, tail), V_PIECES)
    q_end, q_row = place_of(q_start, q_len, gl.to_tensor(0), queries, CONFIG.ragged_q)
    place = (b_load, kv * num_q_per_kv, q_end, q_row)
    distance = begin * 64 + offset - first
    k_left, k_capacity = k_len - first, k_capacity - first
    gl.warp_specialize([
        (_produce, (
            q_desc, do_desc, rows_desc, place, smem, bars, begin, begin + count, tile0, slots, num_q_per_kv, CONFIG,
        )),
        (_consume, (
            sum_desc, dk_ptr, dv_ptr, smem, bars, count, num_q_per_kv, tile0, begin, slots, distance, k_left,
            k_capacity, stride_dks, stride_dvs, scale, window, CONFIG, 0,
        )),
        (_consume, (
            sum_desc, dk_ptr, dv_ptr, smem, bars, count, num_q_per_kv, tile0, begin, slots, distance, k_left,
            k_capacity, stride_dks, stride_dvs, scale, window, CONFIG, 1,
        )),
        (_consume, (
            sum_desc, dk_ptr, dv_ptr, smem, bars, count, num_q_per_kv, tile0, begin, slots, distance, k_left,
            k_capacity, stride_dks, stride_dvs, scale, window, CONFIG, 2,
        )),
    ], [4, 4, 4], [REGISTERS, REGISTERS, REGISTERS])  # fmt: skip
