"""Weights of the Hopper backward above head dim 256: p and ds, each computed once and written in 16 bits.

A persistent CTA takes tiles of 128 queries by 128 keys; two consumers have 64 queries each, a loader warp keeps a ring
of chunks of 64 columns filled: of q and k, whose products are the scores, then of do and v. The exponentials run beside
the first products of do and v.
"""

from powertrain.ops.attention.hopper.backward_d512_tiles import (
    TILE,
    Config,
    chunk_of,
    keys_seen,
    sizes_of,
    tile_at,
)
from powertrain.ops.attention.hopper.backward_tiles import place_of
from powertrain.ops.attention.hopper.primitives import (
    LOG2E,
    Lengths,
    alloc_mbarriers,
    alloc_pipeline_stages,
    as_tile,
    int32,
    tanh,
)
from powertrain.ops.attention.hopper.softmax import apply_mask
from powertrain.ops.attention.triton.sequences import SMALL, sequence_span
from powertrain.ops.early_start import await_kernel_before, let_next_kernel_start
from powertrain.runtime.gluon_compat import barrier, gl, gluon, hopper, kept, mbarrier, tma, tma_load, tma_store
from powertrain.runtime.launch import gluon_kernel

ROWS = gl.constexpr(32)  # queries of a block of LSE and delta


@gluon.jit
def _item(index, parts, lengths, sizes, chunk, CONFIG: gl.constexpr):
    """(part, tile of queries, its first row of weights, first and last tile of keys, position of query 0, length of
    keys) of an item."""
    part = index % parts
    rest = index // parts
    # the last queries see the most keys under a causal mask: they come first
    slot = chunk.slots - 1 - rest % chunk.slots
    unit = rest // chunk.slots
    heads = sizes.kv_heads * sizes.num_q_per_kv
    tile = tile_at(
        chunk.slot + slot, chunk.unit + unit, heads, sizes.batch, sizes.queries, lengths.q_starts, lengths.q_used
    )
    k_start, k_len, _ = sequence_span(lengths.k_starts, lengths.k_used, tile.b, sizes.batch, sizes.keys)
    begin, end, offset = keys_seen(tile.first, tile.length, k_len, sizes, CONFIG)
    return part, tile, (unit * chunk.slots + slot) * TILE, begin, end, offset, k_start, k_len


@gluon.jit
def _load_pair(x_desc, y_desc, x_smem, y_smem, full, empty, at, x_place, y_place, column):
    """64 columns of 128 queries and of 128 keys."""
    STAGES: gl.constexpr = x_smem.shape[0]
    BYTES: gl.constexpr = 2 * x_smem.shape[1] * x_smem.shape[2] * x_smem.dtype.primitive_bitwidth // 8
    stage = at % STAGES
    mbarrier.wait(empty.index(stage), (at // STAGES) & 1 ^ 1)
    bar = full.index(stage)
    # columns behind the tensor's are filled with zeros, which count as bytes
    mbarrier.expect(bar, BYTES)
    b, head, end, row = x_place
    tma_load(x_desc, [b, head, end, row, column], bar, as_tile(x_smem.index(stage)))  # [128, 64]
    b, head, end, row = y_place
    tma_load(y_desc, [b, head, end, row, column], bar, as_tile(y_smem.index(stage)))  # [128, 64]


@gluon.jit
def _load(descs, lengths, smem, bars, sizes, chunk, items, parts, CONFIG: gl.constexpr):
    await_kernel_before(CONFIG.starts_early)
    x_smem, y_smem = smem[0], smem[1]
    full, empty = bars
    COLS: gl.constexpr = x_smem.shape[2]
    CHUNKS: gl.constexpr = (CONFIG.d + COLS - 1) // COLS
    q_desc, k_desc, v_desc, do_desc = descs
    at = gl.to_tensor(0)
    for index in range(gl.program_id(0), items, gl.num_programs(0)):
        part, tile, _row, begin, end, _offset, k_start, k_len = _item(index, parts, lengths, sizes, chunk, CONFIG)
        b = tile.b
        if CONFIG.packed:
            b = gl.to_tensor(0)
        q_end, q_row = place_of(tile.start, tile.length, tile.first, sizes.queries, CONFIG.ragged_q)
        q_place = (b, tile.head, q_end, q_row)
        kv = tile.head // sizes.num_q_per_kv
        for n in range(kept(begin + part), kept(end), parts):
            k_end, k_row = place_of(k_start, k_len, n * TILE, sizes.keys, CONFIG.ragged_k)
            k_place = (b, kv, k_end, k_row)
            for i in range(CHUNKS):
                _load_pair(q_desc, k_desc, x_smem, y_smem, full, empty, at + i, q_place, k_place, i * COLS)
            for i in range(CHUNKS):
                _load_pair(do_desc, v_desc, x_smem, y_smem, full, empty, at + CHUNKS + i, q_place, k_place, i * COLS)
            at += 2 * CHUNKS


@gluon.jit
def _multiply(acc, at, x_smem, y_smem, full, USE: gl.constexpr, CONSUMER: gl.constexpr):
    """acc += 64 rows of chunk number `at` times the other's, asynchronously."""
    STAGES: gl.constexpr = x_smem.shape[0]
    stage = at % STAGES
    mbarrier.wait(full.index(stage), (at // STAGES) & 1)
    x = x_smem.index(stage).slice(CONSUMER * 64, 64, 0)
    y = y_smem.index(stage).permute((1, 0))
    return hopper.warpgroup_mma(x, y, acc, use_acc=USE, is_async=True)  # [64, 128]


@gluon.jit
def _numbers(rows_ptr, tile, slots, unit, CONSUMER: gl.constexpr, layout: gl.constexpr, PACKED: gl.constexpr):
    """LSE in base 2 and delta of a consumer's 64 queries; infinity and 0 behind the last."""
    at = unit * slots
    if PACKED:
        at += gl.cdiv(tile.start, ROWS) + tile.b
    row = tile.first + CONSUMER * 64 + gl.arange(0, 64, layout)
    place = rows_ptr + (at + row // ROWS).to(gl.int64) * (2 * ROWS) + row % ROWS
    lse = gl.load(place, mask=row < tile.length, other=float("inf"))  # [64]
    delta = gl.load(place + ROWS, mask=row < tile.length, other=0.0)  # [64]
    return lse, delta


@gluon.jit
def _masked_scores(
    s, n, low, k_len, slope, scale, softcap, sizes, CONFIG: gl.constexpr, HAS_SLOPES: gl.constexpr
):  # fmt: skip
    """Scores in base 2 of q kᵀ [64, 128] of tile number `n` of keys, -inf where a query does not see a key; and the
    softcap's tanh, if there is one. low: position of the first query."""
    s_layout: gl.constexpr = s.type.layout
    positions = low + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    t = s
    if CONFIG.has_softcap:
        t = tanh(s * (scale / softcap))
        s = t * (softcap * LOG2E)
    else:
        s = s * (scale * LOG2E)
    if HAS_SLOPES:
        key = n * TILE + gl.arange(0, TILE, gl.SliceLayout(0, s_layout))
        s -= slope * gl.abs(gl.expand_dims(positions, 1) - gl.expand_dims(key, 0)).to(gl.float32)
    masked = (n + 1) * TILE > k_len
    if CONFIG.has_right:
        masked = masked | ((n + 1) * TILE - 1 > low + sizes.right)
    if CONFIG.has_left:
        masked = masked | (n * TILE < low + 63 - sizes.left)
    if masked:
        s = apply_mask(s, n * TILE, positions, k_len, sizes.left, sizes.right, CONFIG.has_left, CONFIG.has_right)
    return s, t


@gluon.jit
def _consume(
    rows_ptr, slopes_ptr, w_desc, lengths, smem, bars, sizes, chunk, items, parts, rows_slots, slopes_stride,
    scale, softcap, CONFIG: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """A warpgroup that computes the weights of 64 of a tile's 128 queries."""
    await_kernel_before(CONFIG.starts_early)
    x_smem, y_smem, p_smem, ds_smem = smem
    full, empty = bars
    STAGES: gl.constexpr = x_smem.shape[0]
    CHUNKS: gl.constexpr = (CONFIG.d + x_smem.shape[2] - 1) // x_smem.shape[2]
    dtype: gl.constexpr = x_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    zeros = gl.zeros([64, TILE], gl.float32, s_layout)
    all_rows = chunk.units * chunk.slots * TILE
    at = gl.to_tensor(0)
    for index in range(gl.program_id(0), items, gl.num_programs(0)):
        part, tile, w_row, begin, end, offset, _start, k_len = _item(index, parts, lengths, sizes, chunk, CONFIG)
        unit = tile.head + 0
        if not CONFIG.packed:
            unit += tile.b * sizes.kv_heads * sizes.num_q_per_kv
        lse, delta = _numbers(rows_ptr, tile, rows_slots, unit, CONSUMER, row_layout, CONFIG.packed)
        low = tile.first + offset + CONSUMER * 64
        slope = gl.to_tensor(0.0)
        if slopes_ptr is not None:
            at_slope = slopes_ptr + tile.b * slopes_stride + tile.head
            slope = gl.load(at_slope, mask=tile.b < sizes.batch, other=0.0) * LOG2E
        for n in range(kept(begin + part), kept(end), parts):
            s = zeros
            for i in gl.static_range(CHUNKS):
                s = _multiply(s, at + i, x_smem, y_smem, full, i > 0, CONSUMER)
                if i > 0:
                    s = hopper.warpgroup_mma_wait(1, deps=[s])
                    mbarrier.arrive(empty.index((at + i - 1) % STAGES), count=1)
            at += CHUNKS
            # two products run beside the exponentials
            dp = _multiply(zeros, at, x_smem, y_smem, full, False, CONSUMER)
            s = hopper.warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(empty.index((at - 1) % STAGES), count=1)
            dp = _multiply(dp, at + 1, x_smem, y_smem, full, True, CONSUMER)
            s, t = _masked_scores(
                s, n, low, k_len, slope, scale, softcap, sizes, CONFIG, slopes_ptr is not None
            )  # fmt: skip
            p = gl.exp2(s - gl.expand_dims(lse, 1))
            # the weights of the tile before have been read
            tma.store_wait(0)
            barrier()
            p_smem.index(CONSUMER).store(p.to(dtype))  # [64, 128]
            for i in gl.static_range(2, CHUNKS):
                dp = hopper.warpgroup_mma_wait(1, deps=[dp])
                mbarrier.arrive(empty.index((at + i - 2) % STAGES), count=1)
                dp = _multiply(dp, at + i, x_smem, y_smem, full, True, CONSUMER)
            dp = hopper.warpgroup_mma_wait(0, deps=[dp])
            mbarrier.arrive(empty.index((at + CHUNKS - 2) % STAGES), count=1)
            mbarrier.arrive(empty.index((at + CHUNKS - 1) % STAGES), count=1)
            at += CHUNKS
            ds = p * (dp - gl.expand_dims(delta, 1))
            if CONFIG.has_softcap:
                ds *= 1.0 - t * t
            ds_smem.index(CONSUMER).store(ds.to(dtype))  # [64, 128]
            hopper.fence_async_shared()
            barrier()
            row = w_row + CONSUMER * 64
            tma_store(w_desc, [row, (n - begin) * TILE], p_smem.index(CONSUMER))
            tma_store(w_desc, [row + all_rows, (n - begin) * TILE], ds_smem.index(CONSUMER))
    # shared memory is the CTA's until it ends
    tma.store_wait(0)


@gluon_kernel(archs=(90,), unaligned=SMALL)
def _hopper_attention_bwd_d512_scores_kernel(
    q_desc, k_desc, v_desc, do_desc, w_desc, rows_ptr, slopes_ptr, q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr,
    batch, queries, keys, kv_heads, num_q_per_kv, left, right, unit, units, slot, slots, items, parts, rows_slots,
    slopes_stride, scale, softcap,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, CAP: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, STARTS_EARLY: gl.constexpr,
):  # fmt: skip
    let_next_kernel_start(STARTS_EARLY)
    dtype: gl.constexpr = q_desc.dtype
    PACKED: gl.constexpr = q_starts_ptr is not None
    CONFIG: gl.constexpr = Config(
        LEFT,
        RIGHT,
        BOTTOM_RIGHT,
        CAP,
        PACKED,
        PACKED or q_used_ptr is not None,
        PACKED or k_used_ptr is not None,
        D,
        STARTS_EARLY,
    )
    x_smem = alloc_pipeline_stages(dtype, STAGES, TILE, 64)
    y_smem = alloc_pipeline_stages(dtype, STAGES, TILE, 64)
    p_smem = alloc_pipeline_stages(dtype, 2, 64, TILE)
    ds_smem = alloc_pipeline_stages(dtype, 2, 64, TILE)
    full = alloc_mbarriers(STAGES, 1)
    empty = alloc_mbarriers(STAGES, 2)
    hopper.fence_async_shared()
    lengths = Lengths(q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr)
    sizes = sizes_of(batch, queries, keys, kv_heads, num_q_per_kv, left, right)
    chunk = chunk_of(unit, units, slot, slots)
    descs = (q_desc, k_desc, v_desc, do_desc)
    smem = (x_smem, y_smem, p_smem, ds_smem)
    bars = (full, empty)
    items, parts, rows_slots = int32(items), int32(parts), int32(rows_slots)
    gl.warp_specialize([
        (_consume, (
            rows_ptr, slopes_ptr, w_desc, lengths, smem, bars, sizes, chunk, items, parts, rows_slots,
            slopes_stride, scale, softcap, CONFIG, 0,
        )),
        (_consume, (
            rows_ptr, slopes_ptr, w_desc, lengths, smem, bars, sizes, chunk, items, parts, rows_slots,
            slopes_stride, scale, softcap, CONFIG, 1,
        )),
        (_load, (descs, lengths, smem, bars, sizes, chunk, items, parts, CONFIG)),
    ], [4, 1], [232, 40])  # fmt: skip
