"""Products of the Hopper backward above head dim 256: dq = ds k, dk = dsᵀ q, dv = pᵀ do, from weights in memory.

    OF_KEYS   128 keys by COLS columns of dk or of dv: over all query heads of a KV head, and their queries
    else      128 queries by COLS columns of dq: over the keys that they see

A persistent CTA takes such tiles; two consumers have 64 rows each, a loader warp keeps a ring of stages filled, of 64
queries or keys each. Where a chunk has only a part of what a tile of keys sums over, sums stay in float32 from launch
to launch. Long tiles come first, and every second round goes the other way.
"""

from typing import Any, NamedTuple

from powertrain.ops.attention.hopper.backward_d512_tiles import (
    TILE,
    Config,
    chunk_of,
    first_seen,
    grouped,
    keys_seen,
    own_item,
    queries_that_see,
    sizes_of,
    tile_at,
)
from powertrain.ops.attention.hopper.backward_tiles import place_of
from powertrain.ops.attention.hopper.primitives import (
    Lengths,
    alloc_mbarriers,
    alloc_pipeline_stages,
    as_tile,
    int32,
)
from powertrain.ops.attention.triton.sequences import SMALL, sequence_span
from powertrain.ops.early_start import await_kernel_before, let_next_kernel_start
from powertrain.runtime.gluon_compat import barrier, gl, gluon, hopper, kept, mbarrier, reinterpret, tma_load
from powertrain.runtime.launch import gluon_kernel

GROUP = gl.constexpr(4)  # heads at a time


class Work(NamedTuple):
    """A tile of results."""

    tile: Any
    kind: Any  # 0: of the first result, 1: of the second
    column: Any  # the first, in tiles of columns
    begin: Any  # tiles of queries, counted in the sequence; of dq, of keys
    steps: Any  # of 64 rows, of each head
    repeat: Any  # the first head in the chunk that shares the keys, and how many do
    repeats: Any
    w_row: Any  # of the weights: of row 0 of the sequence in the first head; of dq, of the tile


@gluon.jit
def _work_of_keys(
    index, kinds, key_slots, lengths, sizes, chunk, COLUMNS: gl.constexpr, CONFIG: gl.constexpr
):  # fmt: skip
    """A tile of dk or dv, and its sequence's first query, number of queries, and the position of query 0."""
    rest = index // (kinds * COLUMNS)
    column = index % COLUMNS
    kind = index // COLUMNS % kinds
    # of the chunk's heads of keys
    first_kv = chunk.unit // sizes.num_q_per_kv
    kvs = (chunk.unit + chunk.units - 1) // sizes.num_q_per_kv - first_kv + 1
    slot, kv = grouped(rest, key_slots, kvs, GROUP)
    tile = tile_at(slot, first_kv + kv, sizes.kv_heads, sizes.batch, sizes.keys, lengths.k_starts, lengths.k_used)
    q_start, q_len, _ = sequence_span(lengths.q_starts, lengths.q_used, tile.b, sizes.batch, sizes.queries)
    begin, end, offset = queries_that_see(tile.first, q_len, tile.length, sizes, CONFIG)
    # the chunk has a range of tiles
    q_slot = gl.to_tensor(0)
    if CONFIG.packed:
        q_slot = gl.cdiv(q_start, TILE) + tile.b
    begin = gl.maximum(begin, chunk.slot - q_slot)
    end = gl.minimum(end, chunk.slot + chunk.slots - q_slot)
    # a step must not lie wholly behind the sequence
    steps = gl.maximum(gl.minimum(2 * end, gl.cdiv(q_len, 64)) - 2 * begin, 0)
    unit = gl.maximum((first_kv + kv) * sizes.num_q_per_kv, chunk.unit)
    last = gl.minimum((first_kv + kv + 1) * sizes.num_q_per_kv, chunk.unit + chunk.units)
    w_row = ((unit - chunk.unit) * chunk.slots + q_slot - chunk.slot) * TILE
    repeat = unit - (first_kv + kv) * sizes.num_q_per_kv
    return Work(tile, kind, column, begin, steps, repeat, last - unit, w_row), q_start, q_len, offset


@gluon.jit
def _work_of_queries(index, lengths, sizes, chunk, COLUMNS: gl.constexpr, CONFIG: gl.constexpr):
    """A tile of dq, and its sequence's first key, number of keys, and the position of query 0."""
    column = index % COLUMNS
    slot, unit = grouped(index // COLUMNS, chunk.slots, chunk.units, GROUP)
    # the last queries see the most keys under a causal mask
    slot = chunk.slots - 1 - slot
    heads = sizes.kv_heads * sizes.num_q_per_kv
    tile = tile_at(
        chunk.slot + slot, chunk.unit + unit, heads, sizes.batch, sizes.queries, lengths.q_starts, lengths.q_used
    )
    k_start, k_len, _ = sequence_span(lengths.k_starts, lengths.k_used, tile.b, sizes.batch, sizes.keys)
    begin, end, offset = keys_seen(tile.first, tile.length, k_len, sizes, CONFIG)
    steps = gl.maximum(gl.minimum(2 * end, gl.cdiv(k_len, 64)) - 2 * begin, 0)
    w_row = (unit * chunk.slots + slot) * TILE
    nothing = gl.to_tensor(0)
    return Work(tile, nothing, column, begin, steps, nothing, nothing + 1, w_row), k_start, k_len, offset


@gluon.jit
def _take_stage(smem, bars, at):
    a_smem, b_smem = smem[0], smem[1]
    full, empty = bars
    STAGES: gl.constexpr = a_smem.shape[0]
    SIZE: gl.constexpr = a_smem.shape[1] * a_smem.shape[2] + b_smem.shape[1] * b_smem.shape[2]
    stage = at % STAGES
    mbarrier.wait(empty.index(stage), (at // STAGES) & 1 ^ 1)
    # columns behind the tensor's are filled with zeros, which count as bytes
    mbarrier.expect(full.index(stage), SIZE * a_smem.dtype.primitive_bitwidth // 8)
    return stage, full.index(stage)


@gluon.jit
def _panels(b_smem, D: gl.constexpr, RAGGED: gl.constexpr):
    """The stages in tiles of a descriptor: [tiles of all stages, 64 rows, columns].

    A tile has all columns of a stage, or 64 of them: where a map begins ahead of the tensor (maps.py's `ending_maps`)
    and the last 64 columns of a stage may lie wholly behind the tensor's."""
    STAGES: gl.constexpr = b_smem.shape[0]
    ROWS: gl.constexpr = b_smem.shape[1]
    COLS: gl.constexpr = b_smem.shape[2]
    if RAGGED and -D % COLS >= 64:
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, 64], b_smem.dtype)
        return reinterpret(b_smem, b_smem.dtype, [STAGES * COLS // 64, ROWS, 64], layout)
    else:
        return b_smem


@gluon.jit
def _load_rows(desc, place, bar, panels, stage, COLS: gl.constexpr, D: gl.constexpr):
    """64 rows and COLS columns from `place` on. Behind the tensor's columns are zeros, or the last 64 once more:
    results of these are not stored."""
    WIDTH: gl.constexpr = panels.shape[2]
    b, head, end, row, column = place
    for i in gl.static_range(COLS // WIDTH):
        at = column + i * WIDTH
        if WIDTH != COLS:
            at = gl.minimum(at, (D - 1) // WIDTH * WIDTH)
        tma_load(desc, [b, head, end, row, at], bar, as_tile(panels.index(stage * (COLS // WIDTH) + i)))


@gluon.jit
def _load_of_keys(
    x_desc, y_desc, w_desc, lengths, smem, bars, sizes, chunk, items, kinds, key_slots,
    FIRST: gl.constexpr, COLUMNS: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """x, y: do and q. FIRST: the first kind of result that is wanted, 0 for dv."""
    await_kernel_before(CONFIG.starts_early)
    a_smem, b_smem = smem[0], smem[1]
    COLS: gl.constexpr = b_smem.shape[2]
    panels = _panels(b_smem, CONFIG.d, CONFIG.ragged_q)
    all_rows = chunk.units * chunk.slots * TILE
    at = gl.to_tensor(0)
    for n in range(gl.cdiv(items, gl.num_programs(0))):
        index = own_item(n)
        if index < items:
            work, q_start, q_len, offset = _work_of_keys(
                index, kinds, key_slots, lengths, sizes, chunk, COLUMNS, CONFIG
            )
            b = work.tile.b
            if CONFIG.packed:
                b = gl.to_tensor(0)
            kind = work.kind + FIRST
            for repeat in range(kept(work.repeats)):
                head = work.tile.head * sizes.num_q_per_kv + work.repeat + repeat
                w_row = work.w_row + repeat * chunk.slots * TILE + kind * all_rows
                for step in range(kept(work.steps)):
                    first = work.begin * TILE + step * 64
                    left = first_seen(first // TILE * TILE, offset, sizes.left, CONFIG.has_left)
                    end, row = place_of(q_start, q_len, first, sizes.queries, CONFIG.ragged_q)
                    stage, bar = _take_stage(smem, bars, at)
                    tma_load(w_desc, [w_row + first, work.tile.first - left * TILE], bar, a_smem.index(stage))
                    place = [b, head, end, row, work.column * COLS]
                    if kind == 0:
                        _load_rows(x_desc, place, bar, panels, stage, COLS, CONFIG.d)
                    else:
                        _load_rows(y_desc, place, bar, panels, stage, COLS, CONFIG.d)
                    at += 1


@gluon.jit
def _load_of_queries(
    k_desc, w_desc, lengths, smem, bars, sizes, chunk, items, COLUMNS: gl.constexpr, CONFIG: gl.constexpr
):  # fmt: skip
    await_kernel_before(CONFIG.starts_early)
    a_smem, b_smem = smem[0], smem[1]
    COLS: gl.constexpr = b_smem.shape[2]
    panels = _panels(b_smem, CONFIG.d, CONFIG.ragged_k)
    all_rows = chunk.units * chunk.slots * TILE
    at = gl.to_tensor(0)
    for n in range(gl.cdiv(items, gl.num_programs(0))):
        index = own_item(n)
        if index < items:
            work, k_start, k_len, _offset = _work_of_queries(index, lengths, sizes, chunk, COLUMNS, CONFIG)
            b = work.tile.b
            if CONFIG.packed:
                b = gl.to_tensor(0)
            kv = work.tile.head // sizes.num_q_per_kv
            for step in range(kept(work.steps)):
                end, row = place_of(k_start, k_len, work.begin * TILE + step * 64, sizes.keys, CONFIG.ragged_k)
                stage, bar = _take_stage(smem, bars, at)
                tma_load(w_desc, [work.w_row + all_rows, step * 64], bar, a_smem.index(stage))  # [128, 64]
                place = [b, kv, end, row, work.column * COLS]
                _load_rows(k_desc, place, bar, panels, stage, COLS, CONFIG.d)
                at += 1


@gluon.jit
def _products(acc, at, steps, smem, bars, OF_KEYS: gl.constexpr, CONSUMER: gl.constexpr):
    """acc + the products of `steps` stages from number `at` on."""
    a_smem, b_smem = smem[0], smem[1]
    full, empty = bars
    STAGES: gl.constexpr = a_smem.shape[0]
    for step in range(steps):
        stage = (at + step) % STAGES
        mbarrier.wait(full.index(stage), ((at + step) // STAGES) & 1)
        if OF_KEYS:
            a = a_smem.index(stage).slice(CONSUMER * 64, 64, 1).permute((1, 0))
        else:
            a = a_smem.index(stage).slice(CONSUMER * 64, 64, 0)
        acc = hopper.warpgroup_mma(a, b_smem.index(stage), acc, is_async=True)  # [64, COLS]
        # the one before has finished, and its stage is free
        acc = hopper.warpgroup_mma_wait(1, deps=[acc])
        if step > 0:
            mbarrier.arrive(empty.index((at + step - 1) % STAGES), count=1)
    acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    if steps > 0:
        mbarrier.arrive(empty.index((at + steps - 1) % STAGES), count=1)
    return acc


@gluon.jit
def _copy_out(smem, base, first, length, capacity, column, stride, D: gl.constexpr):
    """64 rows in shared memory, row `first` of a sequence and the next ones, to memory from row 0 of the sequence at
    `base` on; zeros from `length` to `capacity`."""
    W: gl.constexpr = smem.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // W, W // 8], [4, 1], [1, 0])
    cols = column + gl.arange(0, W, gl.SliceLayout(0, layout))
    for part in gl.static_range(smem.shape[0] // 16):
        rows = first + part * 16 + gl.arange(0, 16, gl.SliceLayout(1, layout))
        values = smem.slice(part * 16, 16, 0).load(layout)
        values = gl.where(gl.expand_dims(rows < length, 1), values, 0.0)
        ptrs = base + gl.expand_dims(rows.to(gl.int64) * stride, 1) + gl.expand_dims(cols, 0)
        mask = gl.expand_dims(rows < capacity, 1) & gl.expand_dims(cols < D, 0)
        # rows begin at 16-byte addresses, which the compiler cannot know
        gl.store(
            gl.multiple_of(gl.max_contiguous(ptrs, [1, 8]), [1, 16]), values, mask=gl.max_constancy(mask, [1, 8])
        )  # [16, W]


@gluon.jit
def _columns(acc, COLS: gl.constexpr):
    """Accumulators in parts of COLS columns, which are all of them or half."""
    if acc.shape[1] == COLS:
        return (acc,)
    else:
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
        left, right = acc.reshape([64, 2, COLS]).permute(0, 2, 1).split()
        return gl.convert_layout(left, layout), gl.convert_layout(right, layout)


@gluon.jit
def _consume(
    x_ptr, y_ptr, x_strides, y_strides, sum_ptr, lengths, smem, bars, sizes, chunk, items, kinds, key_slots,
    is_first, is_last, scale, FIRST: gl.constexpr, OF_KEYS: gl.constexpr, COLUMNS: gl.constexpr, CONFIG: gl.constexpr,
    CONSUMER: gl.constexpr,
):  # fmt: skip
    """A warpgroup with 64 rows of each tile. x, y: dv and dk, or dq; FIRST as in _load_of_keys."""
    await_kernel_before(CONFIG.starts_early)
    b_smem, out_smem = smem[1], smem[2]
    COLS: gl.constexpr = b_smem.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    at = gl.to_tensor(0)
    for n in range(gl.cdiv(items, gl.num_programs(0))):
        index = own_item(n)
        if index < items:
            if OF_KEYS:
                work = _work_of_keys(index, kinds, key_slots, lengths, sizes, chunk, COLUMNS, CONFIG)[0]
            else:
                work = _work_of_queries(index, lengths, sizes, chunk, COLUMNS, CONFIG)[0]
            steps = work.steps * work.repeats
            tile = work.tile
            acc = gl.zeros([64, COLS], gl.float32, layout)
            if sum_ptr is not None:
                r = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, layout)), 1)
                c = gl.expand_dims(gl.arange(0, COLS, gl.SliceLayout(0, layout)), 0)
                sums = sum_ptr + (index * 2 + CONSUMER).to(gl.int64) * (64 * COLS) + r * COLS + c
                if (is_first == 0) & ((steps > 0) | (is_last != 0)):
                    acc = gl.load(sums)  # [64, COLS]
            acc = _products(acc, at, kept(steps), smem, bars, OF_KEYS, CONSUMER)
            at += steps
            ends = tile.first + CONSUMER * 64 < tile.capacity
            if sum_ptr is not None:
                if (is_last == 0) & ((steps > 0) | (is_first != 0)):
                    gl.store(sums, acc)  # [64, COLS]
                ends = ends & (is_last != 0)
            if ends:
                kind = work.kind + FIRST
                storage = tile.b.to(gl.int64)
                if CONFIG.packed:
                    storage = storage * 0
                factor = scale
                if OF_KEYS:
                    factor = gl.where(kind == 0, 1.0, scale)
                row = tile.first + CONSUMER * 64
                column = work.column * COLS
                head = tile.head.to(gl.int64)
                begin = tile.start.to(gl.int64)
                parts = _columns(acc * factor, out_smem.shape[2])
                for i in gl.static_range(len(parts)):
                    out = out_smem.index(CONSUMER)
                    # the part before has been read
                    barrier()
                    out.store(parts[i].to(out.dtype))  # [64, 128]
                    barrier()
                    at_column = column + i * out_smem.shape[2]
                    if kind == 0:
                        if x_ptr is not None:
                            base = x_ptr + storage * x_strides[0] + begin * x_strides[1] + head * x_strides[2]
                            _copy_out(out, base, row, tile.length, tile.capacity, at_column, x_strides[1], CONFIG.d)
                    elif y_ptr is not None:
                        base = y_ptr + storage * y_strides[0] + begin * y_strides[1] + head * y_strides[2]
                        _copy_out(out, base, row, tile.length, tile.capacity, at_column, y_strides[1], CONFIG.d)


@gluon_kernel(archs=(90,), unaligned=SMALL)
def _hopper_attention_bwd_d512_products_kernel(
    x_desc, y_desc, w_desc, dx_ptr, dy_ptr, sum_ptr, q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr,
    batch, queries, keys, kv_heads, num_q_per_kv, left, right, unit, units, slot, slots, items, key_slots,
    is_first, is_last, stride_dxb, stride_dxs, stride_dxh, stride_dyb, stride_dys, stride_dyh, scale,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, D: gl.constexpr, COLS: gl.constexpr,
    OF_KEYS: gl.constexpr, STAGES: gl.constexpr, STARTS_EARLY: gl.constexpr,
):  # fmt: skip
    """OF_KEYS: x, y, dx, dy are do, q, dv, dk; of dv and dk one may be None. Else k, None, dq, None."""
    let_next_kernel_start(STARTS_EARLY)
    dtype: gl.constexpr = w_desc.dtype
    PACKED: gl.constexpr = q_starts_ptr is not None
    CONFIG: gl.constexpr = Config(
        LEFT,
        RIGHT,
        BOTTOM_RIGHT,
        False,
        PACKED,
        PACKED or q_used_ptr is not None,
        PACKED or k_used_ptr is not None,
        D,
        STARTS_EARLY,
    )
    COLUMNS: gl.constexpr = (D + COLS - 1) // COLS
    FIRST: gl.constexpr = 1 if dx_ptr is None else 0
    kinds: gl.constexpr = 2 if dx_ptr is not None and dy_ptr is not None else 1
    a_smem = alloc_pipeline_stages(dtype, STAGES, 64 if OF_KEYS else TILE, TILE if OF_KEYS else 64)
    b_smem = alloc_pipeline_stages(dtype, STAGES, 64, COLS)
    out_smem = alloc_pipeline_stages(dtype, 2, 64, 128)
    full = alloc_mbarriers(STAGES, 1)
    empty = alloc_mbarriers(STAGES, 2)
    hopper.fence_async_shared()
    lengths = Lengths(q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr)
    sizes = sizes_of(batch, queries, keys, kv_heads, num_q_per_kv, left, right)
    chunk = chunk_of(unit, units, slot, slots)
    items, key_slots = int32(items), int32(key_slots)
    is_first, is_last = int32(is_first), int32(is_last)
    smem = (a_smem, b_smem, out_smem)
    bars = (full, empty)
    dx_strides = (stride_dxb, stride_dxs, stride_dxh)
    dy_strides = (stride_dyb, stride_dys, stride_dyh)
    number = int32(kinds)
    if OF_KEYS:
        gl.warp_specialize([
            (_consume, (
                dx_ptr, dy_ptr, dx_strides, dy_strides, sum_ptr, lengths, smem, bars, sizes, chunk, items, number,
                key_slots, is_first, is_last, scale, FIRST, True, COLUMNS, CONFIG, 0,
            )),
            (_consume, (
                dx_ptr, dy_ptr, dx_strides, dy_strides, sum_ptr, lengths, smem, bars, sizes, chunk, items, number,
                key_slots, is_first, is_last, scale, FIRST, True, COLUMNS, CONFIG, 1,
            )),
            (_load_of_keys, (
                x_desc, y_desc, w_desc, lengths, smem, bars, sizes, chunk, items, number, key_slots,
                FIRST, COLUMNS, CONFIG,
            )),
        ], [4, 1], [232, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (
                dx_ptr, None, dx_strides, dy_strides, sum_ptr, lengths, smem, bars, sizes, chunk, items, number,
                key_slots, is_first, is_last, scale, 0, False, COLUMNS, CONFIG, 0,
            )),
            (_consume, (
                dx_ptr, None, dx_strides, dy_strides, sum_ptr, lengths, smem, bars, sizes, chunk, items, number,
                key_slots, is_first, is_last, scale, 0, False, COLUMNS, CONFIG, 1,
            )),
            (_load_of_queries, (x_desc, w_desc, lengths, smem, bars, sizes, chunk, items, COLUMNS, CONFIG)),
        ], [4, 1], [232, 40])  # fmt: skip
