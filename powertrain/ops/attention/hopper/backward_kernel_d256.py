"""Backward of attention for Hopper at head dims of 136 to 256, in Gluon; docs/hopper.md explains it.

The sums are those of hopper/backward.py. dk and dv of 64 keys fill the registers of two warpgroups, so a CTA owns 64
keys of one head, and its two *consumers* share them by columns: each holds half of dk's and dv's. Each computes the
scores of half of a block's queries; both store p and ds in shared memory and multiply all of them. The product for dv
is issued with the next block, whose exponentials overlap with it. The *producer* loads, and computes each block's
contribution to dq, as in backward_kernel.py. Where heads are split, the consumers store dk and dv as sums.

Memory beyond results: see hopper/backward.py.
Source: that of backward_kernel.py.
"""

from typing import Any, NamedTuple

from powertrain.ops.attention.hopper.backward_tiles import (
    fetch_next_tile,
    keys_of,
    place_of,
    place_of_keys,
    queries_of,
    sums_of,
)
from powertrain.ops.attention.hopper.dq_order import last_turn, signal_successor
from powertrain.ops.attention.hopper.pieces import (
    add_piece_of_dq,
    alloc_pieces,
    by_piece,
    half_of,
    leave_halves,
    load_pieces,
    no_half_sums,
    store_rows,
)
from powertrain.ops.attention.hopper.primitives import (
    LOG2E,
    BackwardConfig,
    BackwardSizes,
    Lengths,
    ScoreArguments,
    Window,
    alloc_mbarriers,
    int32,
    tanh,
)
from powertrain.ops.attention.triton.sequences import SMALL
from powertrain.ops.early_start import await_kernel_before
from powertrain.runtime.gluon_compat import (
    gl,
    gluon,
    hopper,
    mbarrier,
    named_barrier_sync_divergent,
    tma_load,
)
from powertrain.runtime.launch import gluon_kernel

_PAIR = gl.constexpr(8)  # at which the consumers meet


class _Buffers(NamedTuple):
    """Tiles in shared memory; of k, v, q and do one for each piece of the head dim."""

    k: Any  # [1, BLOCK_N, PIECE]
    v: Any  # [1, BLOCK_N, PIECE]
    q: Any  # [STAGES, BLOCK_M, PIECE]
    do: Any  # [STAGES, BLOCK_M, PIECE]
    rows: Any  # [STAGES, 2 * BLOCK_M]: LSE and delta
    p: Any  # [STAGES, BLOCK_N, BLOCK_M]
    ds: Any  # [STAGES, BLOCK_N, BLOCK_M]


class _Barriers(NamedTuple):
    """mbarriers; those of stages have one for each."""

    kv_full: Any
    q_full: Any  # with LSE and delta
    q_empty: Any  # both consumers have multiplied q
    do_full: Any
    do_empty: Any  # both consumers have multiplied do
    ds_full: Any  # both consumers have stored p and ds
    ds_empty: Any  # the producer has multiplied ds, both consumers p
    drained: Any  # the producer has read k for the last time
    dv_full: Any  # dv lies in the place of v
    dk_full: Any  # dk lies in the place of k


class _Tile(NamedTuple):
    """The keys of a CTA, and the blocks of queries that see them."""

    distance: Any  # position of the first query to come less that of the first key
    begin: Any  # block of queries
    end: Any
    first: Any  # key
    unseen: Any  # blocks that the tile of the keys before does not see, of all heads
    sums: Any  # of dq: the tile of the sequence's first block, of the first head
    k_left: Any  # keys of the sequence from the first one on
    k_capacity: Any  # rows of dk and dv from the first one on


@gluon.jit
def _load_queries(desc, rows_desc, smem, rows_smem, full, empty, i, place, repeat, block, tile):
    """Block number i of queries, with their LSE and delta, when its stage has been released."""
    STAGES: gl.constexpr = smem[0].shape[0]
    BLOCK_M: gl.constexpr = smem[0].shape[1]
    COLS: gl.constexpr = smem[0].shape[2] + (smem[1].shape[2] if len(smem) > 1 else 0)
    BYTES: gl.constexpr = COLS * smem[0].dtype.primitive_bitwidth // 8 + 2 * 4
    stage = i % STAGES
    mbarrier.wait(empty.index(stage), (i // STAGES) & 1 ^ 1)
    bar = full.index(stage)
    mbarrier.expect(bar, BLOCK_M * BYTES)
    b, head, end, row = place
    load_pieces(desc, (b, head + repeat, end, row + block * BLOCK_M), bar, smem, stage)
    tma_load(rows_desc, [tile * 2 * BLOCK_M], bar, rows_smem.index(stage))  # [2 * BLOCK_M]: LSE, delta


@gluon.jit
def _load_grads(desc, smem, full, empty, i, place, repeat, block):
    """Block number i of the results' gradients, when its stage has been released."""
    STAGES: gl.constexpr = smem[0].shape[0]
    BLOCK_M: gl.constexpr = smem[0].shape[1]
    COLS: gl.constexpr = smem[0].shape[2] + (smem[1].shape[2] if len(smem) > 1 else 0)
    stage = i % STAGES
    mbarrier.wait(empty.index(stage), (i // STAGES) & 1 ^ 1)
    bar = full.index(stage)
    mbarrier.expect(bar, BLOCK_M * COLS * smem[0].dtype.primitive_bitwidth // 8)
    b, head, end, row = place
    load_pieces(desc, (b, head + repeat, end, row + block * BLOCK_M), bar, smem, stage)


@gluon.jit
def _next(repeat, block, begin, end, num_q_per_kv, DETERMINISTIC: gl.constexpr):
    """The next block of queries: the head's next block, or the first one of the KV head's next query head.
    DETERMINISTIC: the last rows of all heads, then the rows before."""
    if DETERMINISTIC:
        repeat += 1
        wraps = repeat == num_q_per_kv
        return gl.where(wraps, 0, repeat), gl.where(wraps, block - 1, block)
    block += 1
    wraps = block == end
    return gl.where(wraps, repeat + 1, repeat), gl.where(wraps, begin, block)


@gluon.jit
def _produce(
    q_desc, do_desc, rows_desc, place, sum_ptr, order_ptr, dk_ptr, dv_ptr, smem, bars, key_tile, slots, num_q_per_kv,
    stride_dks, stride_dvs, CONFIG: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """The warpgroup that loads queries, multiplies ds K and adds it to the sums of dq, and stores dk and dv."""
    await_kernel_before(CONFIG.starts_early)
    k_smem, v_smem, q_smem, do_smem, rows_smem, _, ds_smem = smem
    kv_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty, drained, dv_full, dk_full = bars
    STAGES: gl.constexpr = q_smem[0].shape[0]
    BLOCK_M: gl.constexpr = q_smem[0].shape[1]
    BLOCK_N: gl.constexpr = k_smem[0].shape[1]
    W: gl.constexpr = k_smem[0].shape[2] + (k_smem[1].shape[2] if len(k_smem) > 1 else 0)
    DETERMINISTIC: gl.constexpr = CONFIG.deterministic
    _, begin, end, first, unseen, tile0, k_left, k_capacity = key_tile
    total = (end - begin) * num_q_per_kv
    q_repeat = gl.to_tensor(0)
    q_block = begin
    if DETERMINISTIC:
        q_block = end - 1
    for i in range(gl.minimum(total, STAGES)):
        tile = tile0 + q_repeat * slots + q_block
        _load_queries(q_desc, rows_desc, q_smem, rows_smem, q_full, q_empty, i, place, q_repeat, q_block, tile)
        _load_grads(do_desc, do_smem, do_full, do_empty, i, place, q_repeat, q_block)
        q_repeat, q_block = _next(q_repeat, q_block, begin, end, num_q_per_kv, DETERMINISTIC)
    do_repeat = q_repeat
    do_block = q_block

    mbarrier.wait(kv_full, 0)
    repeat = gl.to_tensor(0)
    block = begin
    if DETERMINISTIC:
        block = end - 1
    owed = gl.to_tensor(-1)  # the tile of sums whose flag is yet to be set
    for i in range(total):
        tile = tile0 + repeat * slots + block
        stage = i % STAGES
        if DETERMINISTIC:
            last = last_turn(order_ptr, tile)
        mbarrier.wait(ds_full.index(stage), (i // STAGES) & 1)
        if (i > 0) & (i + 1 < total):  # the stage of the block before, whose dv has been computed by now
            _load_grads(do_desc, do_smem, do_full, do_empty, i + 1, place, do_repeat, do_block)
            do_repeat, do_block = _next(do_repeat, do_block, begin, end, num_q_per_kv, DETERMINISTIC)
        ds = ds_smem.index(stage).permute((1, 0))  # [BLOCK_M, 64]
        turn = ()
        if DETERMINISTIC:
            turn = (tile, last, gl.where(i >= unseen, first, 0), owed, first + BLOCK_N)  # type: ignore[assignment]
        for piece in gl.static_range(len(k_smem)):
            # index 0, but not as a constant: addresses computed from a constant would be kept in registers throughout
            k = k_smem[piece].index(i >> 30)  # [64, PIECE]
            at_piece = tile.to(gl.int64) * (BLOCK_M * W) + 64 * (piece * k_smem[0].shape[2])
            add_piece_of_dq(
                sum_ptr, at_piece, ds, k, ds_empty.index(stage), order_ptr, turn,
                piece == 0, piece == len(k_smem) - 1, PART,
            )  # fmt: skip
        if DETERMINISTIC:
            owed = tile
        if i + STAGES < total:
            to = tile0 + q_repeat * slots + q_block
            _load_queries(
                q_desc, rows_desc, q_smem, rows_smem, q_full, q_empty, i + STAGES, place, q_repeat, q_block, to
            )
            q_repeat, q_block = _next(q_repeat, q_block, begin, end, num_q_per_kv, DETERMINISTIC)
        repeat, block = _next(repeat, block, begin, end, num_q_per_kv, DETERMINISTIC)
    if DETERMINISTIC:
        signal_successor(order_ptr, owed, first + BLOCK_N)
    if not CONFIG.splits_heads:
        mbarrier.arrive(drained, count=1)
        mbarrier.wait(dv_full, 0)
        if dv_ptr is not None:
            store_rows(v_smem, dv_ptr, k_left, k_capacity, stride_dvs, CONFIG.d_v)
        mbarrier.wait(dk_full, 0)
        if dk_ptr is not None:
            store_rows(k_smem, dk_ptr, k_left, k_capacity, stride_dks, CONFIG.d_qk)


@gluon.jit
def _ask(keys, block, b_smem, stage, zeros, CONSUMER: gl.constexpr):
    """keys bᵀ of a consumer's half of the rows of b, asynchronously: [64, ROWS]."""
    ROWS: gl.constexpr = zeros.shape[1]
    # index 0, but not as a constant, as in _produce
    b = b_smem[0].index(stage).slice(CONSUMER * ROWS, ROWS, 0).permute((1, 0))
    s = hopper.warpgroup_mma(keys[0].index(block >> 30), b, zeros, use_acc=False, is_async=True)
    for i in gl.static_range(1, len(keys)):
        b = b_smem[i].index(stage).slice(CONSUMER * ROWS, ROWS, 0).permute((1, 0))
        s = hopper.warpgroup_mma(keys[i].index(block >> 30), b, s, is_async=True)
    return s


@gluon.jit
def _multiply(weights, b_smem, stage, sums, use_acc, CONSUMER: gl.constexpr):
    """sums += weights b, asynchronously: a consumer's half of each piece of columns."""
    added = ()
    for i in gl.static_range(len(sums)):
        b = half_of(b_smem[i].index(stage), CONSUMER)
        added += (  # type: ignore[assignment]
            hopper.warpgroup_mma(weights, b, sums[i], use_acc=use_acc, is_async=True),
        )
    return added


@gluon.jit
def _wait_for_sums(sums, AHEAD: gl.constexpr):
    """`sums` when no more than AHEAD later products are pending."""
    waited = hopper.warpgroup_mma_wait(AHEAD, deps=sums)
    if len(sums) == 1:
        waited = (waited,)
    return waited


@gluon.jit
def _weights(s, lse, low, slope, k_left, mods, CONFIG: gl.constexpr):
    """p of a consumer's queries, [KEYS, ROWS], from q kᵀ, keys along the rows; and the softcap's tanh, if there is one.

    low  position of the first query less that of the first key"""
    KEYS: gl.constexpr = s.shape[0]
    ROWS: gl.constexpr = s.shape[1]
    s_layout: gl.constexpr = s.type.layout
    row_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    left, right = mods.window.left, mods.window.right
    t = s
    if CONFIG.has_softcap:
        t = tanh(s * (mods.scale / mods.softcap))
        s = t * (mods.softcap * LOG2E)
    else:
        s = s * (mods.scale * LOG2E)
    if slope is not None:
        j = gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(1, s_layout)), 1)
        at = gl.expand_dims(low + gl.arange(0, ROWS, row_layout), 0)
        s -= slope * gl.abs(at - j).to(gl.float32)
    p = gl.exp2(s - lse)
    masked = k_left < KEYS
    if CONFIG.has_right:
        masked = masked | (low + right < KEYS - 1)
    if CONFIG.has_left:
        masked = masked | (low + ROWS - 1 - left > 0)
    if masked:
        j = gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(1, s_layout)), 1)
        at = gl.expand_dims(low + gl.arange(0, ROWS, row_layout), 0)
        last = k_left - 1
        if CONFIG.has_right:
            last = gl.minimum(at + right, last)
        seen = j <= last
        if CONFIG.has_left:
            seen = seen & (j >= at - left)
        p = gl.where(seen, p, 0.0)
    return p, t


@gluon.jit
def _leave(dk, dv, dk_sum_ptr, dv_sum_ptr, smem, bars, scale, CONFIG: gl.constexpr, CONSUMER: gl.constexpr):
    """A consumer's half of dk and dv: to the sums where heads are split, else to shared memory, for the producer."""
    if CONFIG.splits_heads:
        if dv_sum_ptr is not None:
            leave_halves(dv_sum_ptr, dv, not CONFIG.deterministic, CONSUMER)
        if dk_sum_ptr is not None:
            leave_halves(dk_sum_ptr, dk, not CONFIG.deterministic, CONSUMER)
    else:
        k_smem, v_smem = smem.k, smem.v
        dtype: gl.constexpr = k_smem[0].dtype
        # in the place of v, which both have read; and of k, when the producer has
        named_barrier_sync_divergent(_PAIR, 256)
        for i in gl.static_range(len(v_smem)):
            half_of(v_smem[i].index(0), CONSUMER).store(dv[i].to(dtype))  # [64, COLS]
        mbarrier.arrive(bars.dv_full, count=1)
        mbarrier.wait(bars.drained, 0)
        for i in gl.static_range(len(k_smem)):
            half_of(k_smem[i].index(0), CONSUMER).store((dk[i] * scale).to(dtype))  # [64, COLS]
        mbarrier.arrive(bars.dk_full, count=1)


@gluon.jit
def _consume(
    slopes_ptr, dk_sum_ptr, dv_sum_ptr, smem, bars, count, num_q_per_kv, distance, k_left, mods,
    CONFIG: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """A warpgroup that owns half of the columns of dk and dv, and computes half of each block's p and ds.

    distance  position of the first query less that of the CTA's first key;  k_left  keys from that one on"""
    await_kernel_before(CONFIG.starts_early)
    k_smem, v_smem, q_smem, do_smem, rows_smem, p_smem, ds_smem = smem
    _, q_full, q_empty, do_full, do_empty, ds_full, ds_empty, _, _, _ = bars
    STAGES: gl.constexpr = q_smem[0].shape[0]
    KEYS: gl.constexpr = k_smem[0].shape[1]
    BLOCK_M: gl.constexpr = q_smem[0].shape[1]
    ROWS: gl.constexpr = BLOCK_M // 2
    MINE: gl.constexpr = CONSUMER * ROWS
    dtype: gl.constexpr = k_smem[0].dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    row_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    zeros = gl.zeros([KEYS, ROWS], gl.float32, s_layout)
    dk = no_half_sums(k_smem)
    dv = no_half_sums(v_smem)
    mbarrier.wait(bars.kv_full, 0)
    distance += MINE
    low = distance
    heads_left = num_q_per_kv + 0
    for i in range(num_q_per_kv * count):
        stage = i % STAGES
        before = (i + 1) % STAGES  # the stage of the block before, there being two
        rows = rows_smem.index(stage)
        mbarrier.wait(q_full.index(stage), (i // STAGES) & 1)
        s = _ask(k_smem, i, q_smem, stage, zeros, CONSUMER)  # [64, ROWS]
        mbarrier.wait(do_full.index(stage), (i // STAGES) & 1)
        dp = _ask(v_smem, i, do_smem, stage, zeros, CONSUMER)  # [64, ROWS]
        # of the block before; at the first there is none: use_acc discards the product
        # dv trails by one block, so that the product runs beside this block's exponentials
        dv = _multiply(p_smem.index(before), do_smem, before, dv, i > 1, CONSUMER)
        lse = gl.expand_dims(rows.slice(MINE, ROWS).load(row_layout), 0)
        s = hopper.warpgroup_mma_wait(2 * len(v_smem), deps=[s])
        slope = None
        if slopes_ptr is not None:
            head = i // count
            if CONFIG.deterministic:
                head = num_q_per_kv - heads_left
            slope = gl.load(slopes_ptr + head) * LOG2E
        p, t = _weights(s, lse, low, slope, k_left, mods, CONFIG)
        # given back by the producer, and by both consumers
        mbarrier.wait(ds_empty.index(stage), (i // STAGES) & 1 ^ 1)
        # a consumer computes half of the queries' weights and needs all of them for its columns of dv
        p_smem.index(stage).slice(MINE, ROWS, 1).store(p.to(dtype))  # [64, ROWS]
        dp = hopper.warpgroup_mma_wait(len(v_smem), deps=[dp])
        delta = gl.expand_dims(rows.slice(BLOCK_M + MINE, ROWS).load(row_layout), 0)
        ds = p * (dp - delta)
        if CONFIG.has_softcap:
            ds *= 1.0 - t * t
        ds_smem.index(stage).slice(MINE, ROWS, 1).store(ds.to(dtype))  # [64, ROWS]
        hopper.fence_async_shared()
        # both halves of p and ds are stored
        named_barrier_sync_divergent(_PAIR, 256)
        mbarrier.arrive(ds_full.index(stage), count=1)
        dk = _multiply(ds_smem.index(stage), q_smem, stage, dk, True, CONSUMER)
        dv = _wait_for_sums(dv, len(k_smem))
        if i > 0:
            mbarrier.arrive(do_empty.index(before), count=1)
            mbarrier.arrive(ds_empty.index(before), count=1)
        dk = _wait_for_sums(dk, 0)
        mbarrier.arrive(q_empty.index(stage), count=1)
        if CONFIG.deterministic:
            heads_left -= 1
            low = gl.where(heads_left == 0, low - BLOCK_M, low)
            heads_left = gl.where(heads_left == 0, num_q_per_kv, heads_left)
        else:
            low += BLOCK_M
            low = gl.where(low == distance + count * BLOCK_M, distance, low)
    last_block = num_q_per_kv * count - 1
    if last_block >= 0:
        stage = last_block % STAGES
        dv = _wait_for_sums(_multiply(p_smem.index(stage), do_smem, stage, dv, last_block > 0, CONSUMER), 0)
    _leave(dk, dv, dk_sum_ptr, dv_sum_ptr, smem, bars, mods.scale, CONFIG, CONSUMER)


@gluon.jit
def _barrier(arrivals: gl.constexpr):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=arrivals)
    return bar


@gluon.jit
def _alloc_buffers(
    dtype: gl.constexpr, P_QK: gl.constexpr, P_V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    # panels of 32 queries, one for each consumer
    half_layout: gl.constexpr = gl.NVMMASharedLayout(64, dtype.primitive_bitwidth, 2)
    rows_layout: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    k = alloc_pieces(dtype, 1, BLOCK_N, P_QK)
    v = alloc_pieces(dtype, 1, BLOCK_N, P_V)
    q = alloc_pieces(dtype, STAGES, BLOCK_M, P_QK)
    do = alloc_pieces(dtype, STAGES, BLOCK_M, P_V)
    p = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_M], half_layout)
    ds = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_M], half_layout)
    rows = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * BLOCK_M], rows_layout)
    return _Buffers(k, v, q, do, rows, p, ds)


@gluon.jit
def _init_barriers(STAGES: gl.constexpr):
    kv_full = _barrier(1)
    q_full = alloc_mbarriers(STAGES, 1)
    q_empty = alloc_mbarriers(STAGES, 2)
    do_full = alloc_mbarriers(STAGES, 1)
    do_empty = alloc_mbarriers(STAGES, 2)
    ds_full = alloc_mbarriers(STAGES, 2)
    ds_empty = alloc_mbarriers(STAGES, 3)
    drained = _barrier(1)
    dv_full = _barrier(2)
    dk_full = _barrier(2)
    hopper.fence_async_shared()
    return _Barriers(kv_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty, drained, dv_full, dk_full)


@gluon.jit
def _blocks_of(
    first, k_len, q_len, sizes, window, CONFIG: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):  # fmt: skip
    """Blocks of queries of a tile of keys: (first of all, number, first to come, those that the tile of the keys
    before does not see, of all heads, position of query 0)."""
    begin, count, offset = queries_of(first, k_len, q_len, window, CONFIG, BLOCK_M, BLOCK_N)
    start = begin
    unseen = gl.to_tensor(0)
    if CONFIG.deterministic:
        start = begin + count - 1
        before, size, _ = queries_of(first - BLOCK_N, k_len, q_len, window, CONFIG, BLOCK_M, BLOCK_N)
        unseen = (begin + count - before - size) * sizes.num_q_per_kv
    return begin, count, start, unseen, offset


@gluon.jit
def _row_of_sums(kv, b, slot, sizes, splits, CONFIG: gl.constexpr, BLOCK_N: gl.constexpr):
    """The first row of a tile of keys in the sums of dk and dv that heads in `splits` parts have."""
    head = kv
    if not CONFIG.packed:
        head += b * sizes.kv_heads
    if not CONFIG.deterministic:  # all parts add to the same sums
        head = head // splits
    return (head * sizes.blocks + slot).to(gl.int64) * BLOCK_N


@gluon_kernel(archs=(90,), unaligned=SMALL)
def _hopper_attention_bwd_d256_kernel(
    q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, v_tail_desc, do_desc, do_tail_desc, rows_desc,
    sum_ptr, order_ptr, dk_ptr, dv_ptr, counter_ptr, slopes_ptr,
    q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr, k_slots_ptr,
    batch, queries, keys, kv_heads, num_q_per_kv, blocks, late_blocks, swizzle, slots,
    stride_dkb, stride_dks, stride_dkh,
    stride_dvb, stride_dvs, stride_dvh, slopes_stride_b, scale, softcap, left, right,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, CAP: gl.constexpr,
    D_QK: gl.constexpr, D_V: gl.constexpr, P_QK: gl.constexpr, P_V: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, PART: gl.constexpr, REGISTERS: gl.constexpr, SPLIT_HEADS: gl.constexpr,
    STARTS_EARLY: gl.constexpr,
):  # fmt: skip
    W_QK: gl.constexpr = P_QK[0] + (P_QK[1] if len(P_QK) > 1 else 0)
    W_V: gl.constexpr = P_V[0] + (P_V[1] if len(P_V) > 1 else 0)
    PACKED: gl.constexpr = q_starts_ptr is not None
    CONFIG: gl.constexpr = BackwardConfig(
        LEFT, RIGHT, BOTTOM_RIGHT, CAP, PACKED, PACKED or q_used_ptr is not None, PACKED or k_used_ptr is not None,
        D_QK, D_V, order_ptr is not None, SPLIT_HEADS, False, False, STARTS_EARLY,
    )  # fmt: skip
    # int64 where a stride needs it
    queries, keys, kv_heads, num_q_per_kv = int32(queries), int32(keys), int32(kv_heads), int32(num_q_per_kv)
    blocks, swizzle, slots = int32(blocks), int32(swizzle), int32(slots)
    batch, left, right = int32(batch), int32(left), int32(right)
    smem = _alloc_buffers(q_desc.dtype, P_QK, P_V, BLOCK_M, BLOCK_N, STAGES)
    bars = _init_barriers(STAGES)

    await_kernel_before(STARTS_EARLY)
    number = gl.program_id(0)
    if order_ptr is not None:
        number = fetch_next_tile(counter_ptr, True)
    lengths = Lengths(q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr, k_slots_ptr)
    if SPLIT_HEADS:
        splits = gl.num_programs(0) // (blocks * kv_heads * (1 if PACKED else batch))
        kv_heads = kv_heads * splits
    sizes = BackwardSizes(
        batch, queries, keys, kv_heads, num_q_per_kv, None, blocks, int32(late_blocks), swizzle, slots, None
    )
    mods = ScoreArguments(scale, softcap, Window(left, right))
    b, kv, slot, first, k_start, k_len, k_capacity, q_start, q_len = keys_of(number, lengths, sizes, BLOCK_N)
    begin, count, start, unseen, offset = _blocks_of(
        first, k_len, q_len, sizes, mods.window, CONFIG, BLOCK_M, BLOCK_N
    )  # fmt: skip
    sums = sums_of(b, kv, q_start, sizes, PACKED, BLOCK_M)
    # the batch entry in memory: packed sequences share one
    storage, b_load = b.to(gl.int64), b
    if slopes_ptr is not None:
        slopes_ptr += storage * slopes_stride_b + kv * num_q_per_kv
    if PACKED:
        storage, b_load = storage * 0, gl.to_tensor(0)
    kv64 = kv.to(gl.int64)
    k64 = k_start.to(gl.int64)
    kv_load = kv
    if SPLIT_HEADS:
        kv_load = kv // splits
        kv64 = kv64 // splits
    dk_sum_ptr: gl.constexpr = None
    dv_sum_ptr: gl.constexpr = None
    if SPLIT_HEADS:
        row = _row_of_sums(kv, b, slot, sizes, splits, CONFIG, BLOCK_N)
        if dk_ptr is not None:
            dk_sum_ptr = dk_ptr + row * W_QK
        if dv_ptr is not None:
            dv_sum_ptr = dv_ptr + row * W_V
    else:
        if dk_ptr is not None:
            dk_ptr += storage * stride_dkb + (k64 + first) * stride_dks + kv64 * stride_dkh
        if dv_ptr is not None:
            dv_ptr += storage * stride_dvb + (k64 + first) * stride_dvs + kv64 * stride_dvh

    q_descs, k_descs = by_piece(q_desc, q_tail_desc, P_QK), by_piece(k_desc, k_tail_desc, P_QK)
    v_descs, do_descs = by_piece(v_desc, v_tail_desc, P_V), by_piece(do_desc, do_tail_desc, P_V)
    k_end, k_row = place_of_keys(k_start, k_len, first, keys, CONFIG.ragged_k)
    q_end, q_row = place_of(q_start, q_len, gl.to_tensor(0), queries, CONFIG.ragged_q)
    mbarrier.expect(bars.kv_full, BLOCK_N * (W_QK + W_V) * (q_desc.dtype.primitive_bitwidth // 8))
    load_pieces(k_descs, (b_load, kv_load, k_end, k_row), bars.kv_full, smem.k, 0)
    load_pieces(v_descs, (b_load, kv_load, k_end, k_row), bars.kv_full, smem.v, 0)
    place = (b_load, kv * num_q_per_kv, q_end, q_row)
    distance = start * BLOCK_M + offset - first
    tile = _Tile(distance, begin, begin + count, first, unseen, sums, k_len - first, k_capacity - first)
    gl.warp_specialize([
        (_produce, (
            q_descs, do_descs, rows_desc, place, sum_ptr, order_ptr, dk_ptr, dv_ptr, smem, bars, tile, slots,
            num_q_per_kv, stride_dks, stride_dvs, CONFIG, PART,
        )),
        (_consume, (
            slopes_ptr, dk_sum_ptr, dv_sum_ptr, smem, bars, count, num_q_per_kv, tile.distance, tile.k_left, mods,
            CONFIG, 0,
        )),
        (_consume, (
            slopes_ptr, dk_sum_ptr, dv_sum_ptr, smem, bars, count, num_q_per_kv, tile.distance, tile.k_left, mods,
            CONFIG, 1,
        )),
    ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip
