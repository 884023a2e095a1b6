"""Backward of attention for Hopper at head dims of 193 to 256, in Gluon; docs/hopper.md teaches it.

The sums are those of hopper/backward.py. dk and dv of 64 keys fill the registers of two warpgroups, so a CTA owns 64
keys of one head, and its two *consumers* share them by columns: each holds half of dk's and dv's. Of a block's scores
each computes half of the queries; p and ds meet in shared memory, from where both multiply all of them. The product
for dv waits for the next block, whose exponentials run beside it. The *producer* loads, and computes each block's
contribution to dq, as there.

Memory beyond results: for each query and head 1032 bytes; 640 for each CTA; in turn, 16 for each 64 queries of a head.
Source: as hopper/backward.py's.
"""

from powertrain.ops.attention.hopper.backward_kernel import add_in_order
from powertrain.ops.attention.hopper.backward_tiles import fetch_next_tile, keys_of, queries_of
from powertrain.ops.attention.hopper.dq_order import last_turn, signal_successor, wait_for_predecessor
from powertrain.ops.attention.hopper.primitives import (
    LOG2E,
    BackwardConfig,
    BackwardSizes,
    Lengths,
    Window,
    alloc_mbarriers,
    int32,
    tanh,
)
from powertrain.runtime.gluon_compat import (
    gl,
    gluon,
    hopper,
    mbarrier,
    named_barrier_sync_divergent,
    reinterpret,
    tma,
    tma_load,
)
from powertrain.runtime.launch import gluon_kernel

_PAIR = gl.constexpr(8)  # at which the consumers meet


@gluon.jit
def _as_tile(smem):
    """[rows, columns] in shared memory as the tile of a descriptor of several heads."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, smem.dtype.primitive_bitwidth, 3)
    return reinterpret(smem, smem.dtype, [1, smem.shape[0], smem.shape[1]], layout)


@gluon.jit
def _load_queries(desc, rows_desc, smem, rows_smem, full, empty, i, repeat, block, tile):
    """Block number i of queries, with their LSE and delta, when its stage has been given back."""
    STAGES: gl.constexpr = smem.shape[0]
    BLOCK_M: gl.constexpr = smem.shape[1]
    BYTES: gl.constexpr = smem.shape[2] * smem.dtype.primitive_bitwidth // 8 + 2 * 4
    stage = i % STAGES
    mbarrier.wait(empty.index(stage), (i // STAGES) & 1 ^ 1)
    bar = full.index(stage)
    mbarrier.expect(bar, BLOCK_M * BYTES)
    tma_load(desc, [repeat, block * BLOCK_M, 0], bar, _as_tile(smem.index(stage)))
    tma_load(rows_desc, [tile * 2 * BLOCK_M], bar, rows_smem.index(stage))  # [2 * BLOCK_M]: LSE, delta


@gluon.jit
def _load_grads(desc, smem, full, empty, i, repeat, block):
    """Block number i of the results' gradients, when its stage has been given back."""
    STAGES: gl.constexpr = smem.shape[0]
    BLOCK_M: gl.constexpr = smem.shape[1]
    stage = i % STAGES
    mbarrier.wait(empty.index(stage), (i // STAGES) & 1 ^ 1)
    bar = full.index(stage)
    mbarrier.expect(bar, BLOCK_M * smem.shape[2] * smem.dtype.primitive_bitwidth // 8)
    tma_load(desc, [repeat, block * BLOCK_M, 0], bar, _as_tile(smem.index(stage)))


@gluon.jit
def _next(repeat, block, begin, end, num_q_per_kv, DETERMINISTIC: gl.constexpr):
    """The block of queries after this one: the head's next, and the heads that share the keys follow each other.
    DETERMINISTIC: of the last rows those of all heads, then of the rows before."""
    if DETERMINISTIC:
        repeat += 1
        wraps = repeat == num_q_per_kv
        return gl.where(wraps, 0, repeat), gl.where(wraps, block - 1, block)
    block += 1
    wraps = block == end
    return gl.where(wraps, repeat + 1, repeat), gl.where(wraps, begin, block)


@gluon.jit
def _store_rows(tile, base, length, capacity, stride, D: gl.constexpr):
    """64 rows in shared memory to memory; zeros from `length` to `capacity`."""
    W: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // W, W // 8], [4, 1], [1, 0])
    for part in gl.static_range(4):
        rows = part * 16 + gl.arange(0, 16, gl.SliceLayout(1, layout))
        cols = gl.arange(0, W, gl.SliceLayout(0, layout))
        values = tile.slice(part * 16, 16, 0).load(layout)
        # gradients of rows past the sequence are promised to be 0
        values = gl.where(gl.expand_dims(rows < length, 1), values, 0.0)
        ptrs = base + gl.expand_dims(rows.to(gl.int64) * stride, 1) + gl.expand_dims(cols, 0)
        gl.store(ptrs, values, mask=gl.expand_dims(rows < capacity, 1) & gl.expand_dims(cols < D, 0))  # [16, W]


@gluon.jit
def _produce(
    q_desc, do_desc, rows_desc, sum_ptr, order_ptr, dk_ptr, dv_ptr, smem, bars, begin, end, first, unseen, tile0,
    slots, num_q_per_kv, k_left, k_capacity, stride_dks, stride_dvs,
    D_QK: gl.constexpr, D_V: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """The warpgroup that loads queries, multiplies ds K and adds it to the sums of dq, and stores dk and dv."""
    k_smem, v_smem, q_smem, do_smem, rows_smem, _, ds_smem = smem
    kv_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty, drained, dv_full, dk_full = bars
    STAGES: gl.constexpr = q_smem.shape[0]
    BLOCK_M: gl.constexpr = q_smem.shape[1]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    W: gl.constexpr = k_smem.shape[2]
    DETERMINISTIC: gl.constexpr = order_ptr is not None
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    total = (end - begin) * num_q_per_kv
    q_repeat = gl.to_tensor(0)
    q_block = begin
    if DETERMINISTIC:
        q_block = end - 1
    for i in range(gl.minimum(total, STAGES)):
        tile = tile0 + q_repeat * slots + q_block
        _load_queries(q_desc, rows_desc, q_smem, rows_smem, q_full, q_empty, i, q_repeat, q_block, tile)
        _load_grads(do_desc, do_smem, do_full, do_empty, i, q_repeat, q_block)
        q_repeat, q_block = _next(q_repeat, q_block, begin, end, num_q_per_kv, DETERMINISTIC)
    do_repeat = q_repeat
    do_block = q_block

    mbarrier.wait(kv_full, 0)
    repeat = gl.to_tensor(0)
    block = begin
    if DETERMINISTIC:
        block = end - 1
    # the tile of sums that the next one waits for
    owed = gl.to_tensor(-1)
    for i in range(total):
        tile = tile0 + repeat * slots + block
        stage = i % STAGES
        if DETERMINISTIC:
            last = last_turn(order_ptr, tile)
        mbarrier.wait(ds_full.index(stage), (i // STAGES) & 1)
        # the stage of the block before, whose dv has been computed by now
        if (i > 0) & (i + 1 < total):
            _load_grads(do_desc, do_smem, do_full, do_empty, i + 1, do_repeat, do_block)
            do_repeat, do_block = _next(do_repeat, do_block, begin, end, num_q_per_kv, DETERMINISTIC)
        ds = ds_smem.index(stage).permute((1, 0))  # [BLOCK_M, 64]
        for n in gl.static_range(W // PART):
            zeros = gl.zeros([BLOCK_M, PART], gl.float32, layout)
            # index 0, but not as a constant: addresses computed from a constant would be kept in registers throughout
            k = k_smem.index(i >> 30).slice(n * PART, PART, 1)  # [64, PART]
            if sum_ptr is not None:
                # PART columns at a time: registers hold no more
                dq = hopper.warpgroup_mma(ds, k, zeros, use_acc=False, is_async=True)  # [BLOCK_M, PART]
                if DETERMINISTIC and n == 0:
                    wait_for_predecessor(order_ptr, tile, last, gl.where(i >= unseen, first, 0), owed, first + BLOCK_N)
                    owed = tile
                dq = hopper.warpgroup_mma_wait(0, deps=[dq])
            if n == W // PART - 1:
                mbarrier.arrive(ds_empty.index(stage), count=1)
            if sum_ptr is not None:
                add_in_order(sum_ptr + tile.to(gl.int64) * (BLOCK_M * W) + n * BLOCK_M * PART, dq)
        if i + STAGES < total:
            to = tile0 + q_repeat * slots + q_block
            _load_queries(q_desc, rows_desc, q_smem, rows_smem, q_full, q_empty, i + STAGES, q_repeat, q_block, to)
            q_repeat, q_block = _next(q_repeat, q_block, begin, end, num_q_per_kv, DETERMINISTIC)
        repeat, block = _next(repeat, block, begin, end, num_q_per_kv, DETERMINISTIC)
    if DETERMINISTIC:
        signal_successor(order_ptr, owed, first + BLOCK_N)
    mbarrier.arrive(drained, count=1)
    mbarrier.wait(dv_full, 0)
    if dv_ptr is not None:
        _store_rows(v_smem.index(0), dv_ptr, k_left, k_capacity, stride_dvs, D_V)
    mbarrier.wait(dk_full, 0)
    if dk_ptr is not None:
        _store_rows(k_smem.index(0), dk_ptr, k_left, k_capacity, stride_dks, D_QK)


@gluon.jit
def _consume(
    slopes_ptr, smem, bars, count, num_q_per_kv, distance, k_left, scale, softcap, left, right,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, CAP: gl.constexpr, DETERMINISTIC: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """A warpgroup that owns half of the columns of dk and dv, and computes half of each block's p and ds.

    distance  position of the first query less that of the CTA's first key;  k_left  keys from that one on"""
    k_smem, v_smem, q_smem, do_smem, rows_smem, p_smem, ds_smem = smem
    kv_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty, drained, dv_full, dk_full = bars
    STAGES: gl.constexpr = q_smem.shape[0]
    KEYS: gl.constexpr = k_smem.shape[1]
    BLOCK_M: gl.constexpr = q_smem.shape[1]
    ROWS: gl.constexpr = BLOCK_M // 2
    COLS: gl.constexpr = k_smem.shape[2] // 2
    MINE: gl.constexpr = CONSUMER * ROWS
    MY_COLS: gl.constexpr = CONSUMER * COLS
    dtype: gl.constexpr = k_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    row_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    zeros = gl.zeros([KEYS, ROWS], gl.float32, s_layout)
    dk = gl.zeros([KEYS, COLS], gl.float32, d_layout)
    dv = gl.zeros([KEYS, COLS], gl.float32, d_layout)
    mbarrier.wait(kv_full, 0)
    distance += MINE
    low = distance
    heads_left = num_q_per_kv + 0
    for i in range(num_q_per_kv * count):
        stage = i % STAGES
        # the stage of the block before, there being two
        before = (i + 1) % STAGES
        q = q_smem.index(stage)
        do = do_smem.index(stage)
        rows = rows_smem.index(stage)
        # as in _produce
        k = k_smem.index(i >> 30)
        v = v_smem.index(i >> 30)
        mbarrier.wait(q_full.index(stage), (i // STAGES) & 1)
        s = hopper.warpgroup_mma(k, q.slice(MINE, ROWS, 0).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(do_full.index(stage), (i // STAGES) & 1)
        dp = hopper.warpgroup_mma(v, do.slice(MINE, ROWS, 0).permute((1, 0)), zeros, use_acc=False, is_async=True)
        # of the block before; at the first there is none: use_acc discards the product
        # dv trails by one block, so that the product runs beside this block's exponentials
        do_before = do_smem.index(before).slice(MY_COLS, COLS, 1)
        dv = hopper.warpgroup_mma(p_smem.index(before), do_before, dv, use_acc=i > 1, is_async=True)  # [64, COLS]
        lse = gl.expand_dims(rows.slice(MINE, ROWS).load(row_layout), 0)
        s = hopper.warpgroup_mma_wait(2, deps=[s])
        if CAP:
            t = tanh(s * (scale / softcap))
            s = t * (softcap * LOG2E)
        else:
            s = s * (scale * LOG2E)
        if slopes_ptr is not None:
            head = i // count
            if DETERMINISTIC:
                head = num_q_per_kv - heads_left
            slope = gl.load(slopes_ptr + head) * LOG2E
            j = gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(1, s_layout)), 1)
            at = gl.expand_dims(low + gl.arange(0, ROWS, row_layout), 0)
            s -= slope * gl.abs(at - j).to(gl.float32)
        p = gl.exp2(s - lse)
        masked = k_left < KEYS
        if RIGHT:
            masked = masked | (low + right < KEYS - 1)
        if LEFT:
            masked = masked | (low + ROWS - 1 - left > 0)
        if masked:
            j = gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(1, s_layout)), 1)
            at = gl.expand_dims(low + gl.arange(0, ROWS, row_layout), 0)
            last = k_left - 1
            if RIGHT:
                last = gl.minimum(at + right, last)
            seen = j <= last
            if LEFT:
                seen = seen & (j >= at - left)
            p = gl.where(seen, p, 0.0)
        # given back by the producer, and by both consumers
        mbarrier.wait(ds_empty.index(stage), (i // STAGES) & 1 ^ 1)
        # a consumer computes half of the queries' weights and needs all of them for its columns of dv
        p_smem.index(stage).slice(MINE, ROWS, 1).store(p.to(dtype))  # [64, ROWS]
        dp = hopper.warpgroup_mma_wait(1, deps=[dp])
        delta = gl.expand_dims(rows.slice(BLOCK_M + MINE, ROWS).load(row_layout), 0)
        ds = p * (dp - delta)
        if CAP:
            ds *= 1.0 - t * t
        ds_smem.index(stage).slice(MINE, ROWS, 1).store(ds.to(dtype))  # [64, ROWS]
        hopper.fence_async_shared()
        # both halves of p and ds are stored
        named_barrier_sync_divergent(_PAIR, 256)
        mbarrier.arrive(ds_full.index(stage), count=1)
        dk = hopper.warpgroup_mma(ds_smem.index(stage), q.slice(MY_COLS, COLS, 1), dk, is_async=True)  # [64, COLS]
        dv = hopper.warpgroup_mma_wait(1, deps=[dv])
        if i > 0:
            mbarrier.arrive(do_empty.index(before), count=1)
            mbarrier.arrive(ds_empty.index(before), count=1)
        dk = hopper.warpgroup_mma_wait(0, deps=[dk])
        mbarrier.arrive(q_empty.index(stage), count=1)
        if DETERMINISTIC:
            heads_left -= 1
            low = gl.where(heads_left == 0, low - BLOCK_M, low)
            heads_left = gl.where(heads_left == 0, num_q_per_kv, heads_left)
        else:
            low += BLOCK_M
            low = gl.where(low == distance + count * BLOCK_M, distance, low)
    last_block = num_q_per_kv * count - 1
    if last_block >= 0:
        do = do_smem.index(last_block % STAGES).slice(MY_COLS, COLS, 1)
        dv = hopper.warpgroup_mma(p_smem.index(last_block % STAGES), do, dv, use_acc=last_block > 0, is_async=True)
        dv = hopper.warpgroup_mma_wait(0, deps=[dv])
    # in the place of v, which both have read; and of k, when the producer has
    named_barrier_sync_divergent(_PAIR, 256)
    v_smem.index(0).slice(MY_COLS, COLS, 1).store(dv.to(dtype))  # [64, COLS]
    mbarrier.arrive(dv_full, count=1)
    mbarrier.wait(drained, 0)
    k_smem.index(0).slice(MY_COLS, COLS, 1).store((dk * scale).to(dtype))  # [64, COLS]
    mbarrier.arrive(dk_full, count=1)


@gluon.jit
def _barrier(arrivals: gl.constexpr):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=arrivals)
    return bar


@gluon_kernel(archs=(90,))
def _hopper_attention_bwd_d256_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, sum_ptr, order_ptr, dk_ptr, dv_ptr, rows_ptr, counter_ptr, slopes_ptr,
    q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr,
    batch, queries, keys, kv_heads, num_q_per_kv, blocks, swizzle, slots, rows_size,
    stride_qb, stride_qs, stride_qr, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_dob, stride_dos, stride_dor, stride_dkb, stride_dks, stride_dkh,
    stride_dvb, stride_dvs, stride_dvh, slopes_stride_b, scale, softcap, left, right,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, CAP: gl.constexpr,
    D_QK: gl.constexpr, D_V: gl.constexpr, W: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, PART: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    BYTES: gl.constexpr = dtype.primitive_bitwidth // 8
    # int64 where a stride needs it
    queries, keys, kv_heads, num_q_per_kv = int32(queries), int32(keys), int32(kv_heads), int32(num_q_per_kv)
    blocks, swizzle, slots, rows_size = int32(blocks), int32(swizzle), int32(slots), int32(rows_size)
    batch, left, right = int32(batch), int32(left), int32(right)
    number = gl.program_id(0)
    if order_ptr is not None:
        number = fetch_next_tile(counter_ptr, True)
    lengths = Lengths(q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr)
    sizes = BackwardSizes(batch, queries, keys, kv_heads, num_q_per_kv, blocks, swizzle, slots, None, rows_size)
    window = Window(left, right)
    PACKED: gl.constexpr = q_starts_ptr is not None
    CONFIG: gl.constexpr = BackwardConfig(
        LEFT, RIGHT, BOTTOM_RIGHT, CAP, PACKED, PACKED or q_used_ptr is not None, PACKED or k_used_ptr is not None,
        D_QK, D_V, order_ptr is not None,
    )  # fmt: skip
    b, kv, first, k_start, k_len, k_capacity, q_start, q_len = keys_of(number, lengths, sizes, BLOCK_N)
    begin, count, offset = queries_of(first, k_len, q_len, window, CONFIG, BLOCK_M, BLOCK_N)
    start = begin
    unseen = gl.to_tensor(0)
    if order_ptr is not None:
        start = begin + count - 1
        before, size, _ = queries_of(first - BLOCK_N, k_len, q_len, window, CONFIG, BLOCK_M, BLOCK_N)
        unseen = (begin + count - before - size) * num_q_per_kv
    tile0 = kv * num_q_per_kv * slots
    storage = b.to(gl.int64)
    if slopes_ptr is not None:
        slopes_ptr += storage * slopes_stride_b + kv * num_q_per_kv
    if q_starts_ptr is not None:
        tile0 += gl.cdiv(q_start, BLOCK_M) + b
        storage = storage * 0
    else:
        tile0 += b * kv_heads * num_q_per_kv * slots
    kv64 = kv.to(gl.int64)
    head64 = kv64 * num_q_per_kv
    q64 = q_start.to(gl.int64)
    k64 = k_start.to(gl.int64)
    q_ptr += storage * stride_qb + q64 * stride_qs + head64 * stride_qr
    do_ptr += storage * stride_dob + q64 * stride_dos + head64 * stride_dor
    # keys are loaded whether there are any or not: then the first rows of all, for behind the last may be nothing
    from64 = gl.where(first < k_len, k_start, 0).to(gl.int64)
    k_ptr += storage * stride_kb + from64 * stride_ks + kv64 * stride_kh
    v_ptr += storage * stride_vb + from64 * stride_vs + kv64 * stride_vh
    if dk_ptr is not None:
        dk_ptr += storage * stride_dkb + (k64 + first) * stride_dks + kv64 * stride_dkh
    if dv_ptr is not None:
        dv_ptr += storage * stride_dvb + (k64 + first) * stride_dvs + kv64 * stride_dvh

    layout: gl.constexpr = gl.NVMMASharedLayout(128, dtype.primitive_bitwidth, 2)
    # panels of 32 queries, one for each consumer
    half_layout: gl.constexpr = gl.NVMMASharedLayout(64, dtype.primitive_bitwidth, 2)
    q_layout: gl.constexpr = gl.NVMMASharedLayout(128, dtype.primitive_bitwidth, 3)
    rows_layout: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    k_smem = gl.allocate_shared_memory(dtype, [1, BLOCK_N, W], layout)
    v_smem = gl.allocate_shared_memory(dtype, [1, BLOCK_N, W], layout)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, W], layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, W], layout)
    p_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_M], half_layout)
    ds_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_M], half_layout)
    rows_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * BLOCK_M], rows_layout)
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

    # descriptors that end where the sequence ends: behind it are zeros
    rows = gl.maximum(k_len, 1)
    k_desc = tma.make_tensor_descriptor(k_ptr, [rows, D_QK], [stride_ks, 1], [BLOCK_N, W], layout)
    v_desc = tma.make_tensor_descriptor(v_ptr, [rows, D_V], [stride_vs, 1], [BLOCK_N, W], layout)
    mbarrier.expect(kv_full, BLOCK_N * 2 * W * BYTES)
    tma_load(k_desc, [first, 0], kv_full, k_smem.index(0))  # [64, W]
    tma_load(v_desc, [first, 0], kv_full, v_smem.index(0))  # [64, W]
    rows = gl.maximum(q_len, 1)
    q_desc = tma.make_tensor_descriptor(
        q_ptr, [num_q_per_kv, rows, D_QK], [stride_qr, stride_qs, 1], [1, BLOCK_M, W], q_layout
    )
    do_desc = tma.make_tensor_descriptor(
        do_ptr, [num_q_per_kv, rows, D_V], [stride_dor, stride_dos, 1], [1, BLOCK_M, W], q_layout
    )
    rows_desc = tma.make_tensor_descriptor(rows_ptr, [rows_size], [1], [2 * BLOCK_M], rows_layout)

    smem = (k_smem, v_smem, q_smem, do_smem, rows_smem, p_smem, ds_smem)
    bars = (kv_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty, drained, dv_full, dk_full)
    distance = start * BLOCK_M + offset - first
    gl.warp_specialize([
        (_produce, (
            q_desc, do_desc, rows_desc, sum_ptr, order_ptr, dk_ptr, dv_ptr, smem, bars, begin, begin + count,
            first, unseen, tile0, slots, num_q_per_kv, k_len - first, k_capacity - first, stride_dks, stride_dvs,
            D_QK, D_V, PART,
        )),
        (_consume, (
            slopes_ptr, smem, bars, count, num_q_per_kv, distance, k_len - first, scale,
            softcap, left, right, LEFT, RIGHT, CAP, order_ptr is not None, 0,
        )),
        (_consume, (
            slopes_ptr, smem, bars, count, num_q_per_kv, distance, k_len - first, scale,
            softcap, left, right, LEFT, RIGHT, CAP, order_ptr is not None, 1,
        )),
    ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip
