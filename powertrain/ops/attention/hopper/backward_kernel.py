"""The Hopper backward kernel in Gluon: persistent, TMA and wgmma, a role for each warpgroup; docs/hopper.md explains
it.

    p     = 2^(s - lse)                     recomputed, keys along the rows
    dv_j  = sum_i p_ij do_i;                ds_ij = p_ij (do_i v_j - delta_i) (1 - tanh_ij^2 with a softcap)
    dk_j  = scale sum_i ds_ij q_i;          dq_i  = scale sum_j ds_ij k_j

One CTA per SM takes tiles of 128 keys of one head from a counter in memory and runs over the blocks of queries that see
them, of all query heads of a KV head. Two *consumer* warpgroups hold 64 keys each: scores, dk and dv in
registers, keys along the rows, so that p and ds are operands of the next products as they are. The third warpgroup, the
*producer*, fetches tiles, loads by TMA, and computes each block's contribution to dq from ds in shared memory. It adds
that to float32 sums in memory, 16 bytes a thread at once, in the order in which the threads hold them, and in no fixed
order of blocks, unless hopper/dq_order.py gives it one.

Source: Dao 2023, arXiv:2307.08691; Shah et al. 2024, arXiv:2407.08608, for warpgroups that take turns and registers
that hold p and ds. Bounds that move by coordinates: Triton's tools/ragged_tma.py has the idea.
"""

from typing import Any, NamedTuple

from powertrain.ops.attention.hopper.backward_consumer import consume
from powertrain.ops.attention.hopper.backward_tiles import fetch_next_tile, keys_of, place_of, queries_of, sums_of
from powertrain.ops.attention.hopper.dq_order import last_turn, signal_successor
from powertrain.ops.attention.hopper.pieces import add_piece_of_dq, alloc_pieces, by_piece, load_pieces
from powertrain.ops.attention.hopper.primitives import (
    BAR_DS_FULL,
    BAR_EMPTY,
    EVERYONE,
    TILE_B,
    TILE_COUNT,
    TILE_DISTANCE,
    TILE_DK_END,
    TILE_DK_LEFT,
    TILE_DK_ROW,
    TILE_FIELDS,
    TILE_FIRST,
    TILE_K_END,
    TILE_K_LEFT,
    TILE_K_ROW,
    TILE_KV,
    TILE_OUT,
    TILE_Q_END,
    TILE_Q_ROW,
    TILE_SUMS,
    TILE_UNSEEN,
    BackwardBarriers,
    BackwardBuffers,
    BackwardConfig,
    BackwardSizes,
    Gradients,
    KeySizes,
    Lengths,
    ScoreArguments,
    Window,
    alloc_mbarriers,
    alloc_pipeline_stages,
    int32,
    read_tile_field,
    write_tile_field,
)
from powertrain.ops.attention.triton.sequences import SMALL
from powertrain.ops.early_start import await_kernel_before
from powertrain.runtime.gluon_compat import (
    gl,
    gluon,
    hopper,
    kept,
    mbarrier,
    named_barrier_sync,
    tma_load,
)
from powertrain.runtime.launch import gluon_kernel


@gluon.jit
def _write_tile(
    tile, taken, tile_smem, tile_full, tile_empty, counter_ptr, lengths, sizes, window,
    CONFIG: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Publish the descriptor of `tile` or of the next fetched tile that has keys, or one that says that none is
    left."""
    slot = taken & 1
    mbarrier.wait(tile_empty.index(slot), (taken >> 1) & 1 ^ 1)
    num_q_per_kv, tiles = sizes.num_q_per_kv, sizes.tiles
    RAGGED_Q: gl.constexpr = CONFIG.ragged_q
    RAGGED_K: gl.constexpr = CONFIG.ragged_k
    DETERMINISTIC: gl.constexpr = CONFIG.deterministic
    looks = tile < tiles
    if not looks:
        write_tile_field(tile_smem, slot, TILE_KV, -1)
    while looks:
        b, kv, key_slot, first, k_start, k_len, k_capacity, q_start, q_len = keys_of(tile, lengths, sizes, BLOCK_N)
        if first < k_capacity:
            begin, count, offset = queries_of(first, k_len, q_len, window, CONFIG, BLOCK_M, BLOCK_N)
            start = begin
            if DETERMINISTIC:
                start = begin + count - 1
            at = sums_of(b, kv, q_start, sizes, CONFIG.packed, BLOCK_M) + start
            # consumers read a field where they need it, which keeps registers free over their loop
            write_tile_field(tile_smem, slot, TILE_KV, kv)
            write_tile_field(tile_smem, slot, TILE_B, b)
            write_tile_field(tile_smem, slot, TILE_COUNT, count)
            write_tile_field(tile_smem, slot, TILE_FIRST, first)
            write_tile_field(tile_smem, slot, TILE_SUMS, at)
            write_tile_field(tile_smem, slot, TILE_DISTANCE, start * BLOCK_M + offset - first)
            write_tile_field(tile_smem, slot, TILE_K_LEFT, k_len - first)
            end, row = place_of(q_start, q_len, start * BLOCK_M, sizes.queries, RAGGED_Q)
            write_tile_field(tile_smem, slot, TILE_Q_END, end)
            write_tile_field(tile_smem, slot, TILE_Q_ROW, row)
            end, row = place_of(k_start, k_len, first, sizes.keys, RAGGED_K)
            if RAGGED_K:  # where there is nothing to load, the first rows of all
                end = gl.where(count > 0, end, sizes.keys)
                row = gl.where(count > 0, row, 0)
            write_tile_field(tile_smem, slot, TILE_K_END, end)
            write_tile_field(tile_smem, slot, TILE_K_ROW, row)
            end, row = place_of(k_start, k_capacity, first, sizes.keys, CONFIG.packed)
            write_tile_field(tile_smem, slot, TILE_DK_END, end)
            write_tile_field(tile_smem, slot, TILE_DK_ROW, row)
            write_tile_field(tile_smem, slot, TILE_DK_LEFT, k_capacity - first)
            if sizes.num_splits is not None:
                head = kv
                if not CONFIG.packed:
                    head += b * sizes.kv_heads
                if not DETERMINISTIC:  # all parts add to the same sums
                    head = head // sizes.num_splits
                write_tile_field(tile_smem, slot, TILE_OUT, head * sizes.blocks + key_slot)
            if DETERMINISTIC:
                before, size, _ = queries_of(first - BLOCK_N, k_len, q_len, window, CONFIG, BLOCK_M, BLOCK_N)
                write_tile_field(tile_smem, slot, TILE_UNSEEN, (begin + count - before - size) * num_q_per_kv)
            looks = tile < 0  # no longer
        else:
            tile = fetch_next_tile(counter_ptr, DETERMINISTIC)
            looks = tile < tiles
            if not looks:
                write_tile_field(tile_smem, slot, TILE_KV, -1)
    mbarrier.arrive(tile_full.index(slot), count=1)
    mbarrier.wait(tile_full.index(slot), (taken >> 1) & 1)


@gluon.jit
def _load(q_desc, do_desc, rows_desc, q_smem, do_smem, rows_smem, full, at, place, tile):
    """Block number `at` of queries, at `place` = (batch entry, head, end, row), when its stage has been released."""
    STAGES: gl.constexpr = q_smem[0].shape[0]
    BLOCK_M: gl.constexpr = q_smem[0].shape[1]
    W_QK: gl.constexpr = q_smem[0].shape[2] + (q_smem[1].shape[2] if len(q_smem) > 1 else 0)
    W_V: gl.constexpr = do_smem[0].shape[2] + (do_smem[1].shape[2] if len(do_smem) > 1 else 0)
    BYTES: gl.constexpr = (W_QK + W_V) * q_smem[0].dtype.primitive_bitwidth // 8 + 2 * 4
    b, head, end, row = place
    stage = at % STAGES
    if at >= STAGES:
        # both consumers have given the stage back
        named_barrier_sync(BAR_EMPTY + stage, EVERYONE)
    bar = full.index(stage)
    mbarrier.expect(bar, BLOCK_M * BYTES)
    load_pieces(q_desc, (b, head, end, row), bar, q_smem, stage)
    tma_load(rows_desc, [tile * 2 * BLOCK_M], bar, rows_smem.index(stage))  # [2 * BLOCK_M]: LSE, delta
    load_pieces(do_desc, (b, head, end, row), bar, do_smem, stage)


@gluon.jit
def _next(head, row, tile, left, count, num_q_per_kv, slots, BLOCK_M: gl.constexpr, DETERMINISTIC: gl.constexpr):
    """The next block of queries: the head's next block, or the first one of the KV head's next query head.
    DETERMINISTIC: the last rows of all heads, then the rows before."""
    left -= 1
    wraps = left == 0
    if DETERMINISTIC:
        head = gl.where(wraps, head - num_q_per_kv + 1, head + 1)
        row = gl.where(wraps, row - BLOCK_M, row)
        tile = gl.where(wraps, tile - (num_q_per_kv - 1) * slots - 1, tile + slots)
        return head, row, tile, gl.where(wraps, num_q_per_kv, left)
    head = gl.where(wraps, head + 1, head)
    row = gl.where(wraps, row - (count - 1) * BLOCK_M, row + BLOCK_M)
    tile = gl.where(wraps, tile + slots - count + 1, tile + 1)
    return head, row, tile, gl.where(wraps, count, left)


@gluon.jit
def _load_keys(desc, smem, bar, tile_smem, slot, num_splits, PACKED: gl.constexpr):
    b = gl.to_tensor(0)
    if not PACKED:
        b = read_tile_field(tile_smem, slot, TILE_B)
    kv = read_tile_field(tile_smem, slot, TILE_KV)
    if num_splits is not None:
        kv = kv // num_splits
    place = (b, kv, read_tile_field(tile_smem, slot, TILE_K_END), read_tile_field(tile_smem, slot, TILE_K_ROW))
    COLS: gl.constexpr = smem[0].shape[2] + (smem[1].shape[2] if len(smem) > 1 else 0)
    mbarrier.expect(bar, smem[0].shape[1] * COLS * smem[0].dtype.primitive_bitwidth // 8)
    load_pieces(desc, place, bar, smem, 0)


@gluon.jit
def _add_to_dq(
    sum_ptr, order_ptr, tile, at, i, k_smem, ds_smem, ds_empty, before, owed, owed_turn, PART: gl.constexpr,
):  # fmt: skip
    """Add block number `at` of ds, when it is there, times the keys to tile number `tile` of the sums; give ds back.
    With `order_ptr`, the flag of tile `owed` is set to `owed_turn` first, and the flag of `tile` must be `before`."""
    DS_STAGES: gl.constexpr = ds_smem.shape[0]
    BLOCK_M: gl.constexpr = ds_smem.shape[2]
    W_QK: gl.constexpr = k_smem[0].shape[2] + (k_smem[1].shape[2] if len(k_smem) > 1 else 0)
    stage = at % DS_STAGES
    turn = ()
    if order_ptr is not None:
        turn = (tile, last_turn(order_ptr, tile), before, owed, owed_turn)  # type: ignore[assignment]
    # both consumers have stored their half of ds
    named_barrier_sync(BAR_DS_FULL + stage, EVERYONE)
    for m in gl.static_range(BLOCK_M // 64):
        ds = ds_smem.index(stage).slice(m * 64, 64, 1).permute((1, 0))  # [64 queries, 128 keys]
        for piece in gl.static_range(len(k_smem)):
            # index 0, but not as a constant: addresses computed from a constant would be kept in registers throughout
            k = k_smem[piece].index(i >> 30)
            at_piece = tile.to(gl.int64) * (BLOCK_M * W_QK) + 64 * (m * W_QK + piece * k_smem[0].shape[2])
            add_piece_of_dq(
                sum_ptr, at_piece, ds, k, ds_empty.index(stage), order_ptr, turn,
                m + piece == 0, m == BLOCK_M // 64 - 1 and piece == len(k_smem) - 1, PART,
            )  # fmt: skip


class _Loads(NamedTuple):
    """The place of the block of queries to load next."""

    b: Any  # batch entry
    head: Any
    end: Any  # of the sequence's rows
    row: Any
    tile: Any  # of the sums
    count: Any  # blocks of a head
    left: Any  # of its blocks; or heads of this block, if deterministic: `_next`


@gluon.jit
def _loads_of(tile_smem, slot, kv, num_q_per_kv, CONFIG: gl.constexpr):
    """The first block of the tile whose descriptor is in `slot`."""
    b = gl.to_tensor(0)
    if not CONFIG.packed:
        b = read_tile_field(tile_smem, slot, TILE_B)
    head = kv * num_q_per_kv
    end = read_tile_field(tile_smem, slot, TILE_Q_END)
    row = read_tile_field(tile_smem, slot, TILE_Q_ROW)
    tile = read_tile_field(tile_smem, slot, TILE_SUMS)
    count = read_tile_field(tile_smem, slot, TILE_COUNT)
    left = count + 0
    if CONFIG.deterministic:
        left = num_q_per_kv + 0
    return _Loads(b, head, end, row, tile, count, left)


@gluon.jit
def _load_next(loads, descs, smem, full, at, num_q_per_kv, slots, CONFIG: gl.constexpr):
    """Load the next block, number `at`; returns the place of the block after it."""
    BLOCK_M: gl.constexpr = smem.q[0].shape[1]
    _, _, q_desc, do_desc, rows_desc = descs
    b, head, end, row, tile, count, left = loads
    _load(q_desc, do_desc, rows_desc, smem.q, smem.do, smem.rows, full, at, (b, head, end, row), tile)
    head, row, tile, left = _next(head, row, tile, left, count, num_q_per_kv, slots, BLOCK_M, CONFIG.deterministic)
    return _Loads(b, head, end, row, tile, count, left)


@gluon.jit
def _produce(
    descs, scratch, counter_ptr, lengths, smem, tile_smem, bars, sizes, window, CONFIG: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    """The warpgroup that fetches tiles and loads them, multiplies ds K and adds it to the sums of dq."""
    await_kernel_before(CONFIG.starts_early)
    sum_ptr, order_ptr = scratch
    num_q_per_kv, slots = sizes.num_q_per_kv, sizes.slots
    k_full, v_full, full, ds_empty = bars.k_full, bars.v_full, bars.block_full, bars.ds_empty
    STAGES: gl.constexpr = smem.q[0].shape[0]
    BLOCK_M: gl.constexpr = smem.q[0].shape[1]
    BLOCK_N: gl.constexpr = smem.k[0].shape[1]
    DETERMINISTIC: gl.constexpr = CONFIG.deterministic
    # LSE and delta of a block come by TMA too, so that one mbarrier announces q, do and them
    k_desc, v_desc = descs[0], descs[1]

    taken = gl.to_tensor(0)  # tiles begun
    at = gl.to_tensor(0)  # blocks multiplied, of all tiles
    loaded = gl.to_tensor(0)  # blocks asked for
    kv = gl.to_tensor(0)
    zero, one = gl.to_tensor(0), gl.to_tensor(1)
    loads = _Loads(zero, zero, zero, zero, zero, one, one)
    to_load = gl.to_tensor(0)
    # the block to multiply next: its tile of sums, as of _Loads
    tile = gl.to_tensor(0)
    count = gl.to_tensor(1)
    left_over = gl.to_tensor(1)
    rest = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    waits_from = gl.to_tensor(0)  # the first block to which another tile adds before this one
    owed = gl.to_tensor(-1)  # the tile of sums whose flag is yet to be set, and the turn to set it to
    owed_turn = gl.to_tensor(0)
    begins = gl.to_tensor(1)
    while kv >= 0:
        slot = taken & 1
        if begins:
            # while a tile's last blocks are multiplied the next one's are loaded. It is fetched late: a tile fetched
            # early would wait for the end of a long one
            if DETERMINISTIC:
                number = fetch_next_tile(counter_ptr, DETERMINISTIC)
            else:
                number = gl.program_id(0)
                if taken > 0:
                    number = fetch_next_tile(counter_ptr, DETERMINISTIC)
            _write_tile(
                number, taken, tile_smem, bars.tile_full, bars.tile_empty, counter_ptr, lengths, sizes, window,
                CONFIG, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            todo = rest + 0
            kv = read_tile_field(tile_smem, slot, TILE_KV)
            to_load = gl.to_tensor(0)
            if kv >= 0:
                loads = _loads_of(tile_smem, slot, kv, num_q_per_kv, CONFIG)
                to_load = loads.count * num_q_per_kv
            for _ in range(kept(gl.minimum(at + STAGES - loaded, to_load))):
                loads = _load_next(loads, descs, smem, full, loaded, num_q_per_kv, slots, CONFIG)
                loaded += 1
                to_load -= 1
        else:
            # who has stored the last ds has done with the scores; this warpgroup was the last to read the keys
            tile = read_tile_field(tile_smem, slot, TILE_SUMS)
            count = read_tile_field(tile_smem, slot, TILE_COUNT)
            left_over = count + 0
            if DETERMINISTIC:
                left_over = num_q_per_kv + 0
                turn = read_tile_field(tile_smem, slot, TILE_FIRST) + BLOCK_N
                waits_from = at + read_tile_field(tile_smem, slot, TILE_UNSEEN)
            rest = gl.minimum(count * num_q_per_kv, STAGES)
            todo = count * num_q_per_kv - rest
            # for keys that no query sees too: a branch would cost the consumers registers
            # the keys follow when the last ds k of the tile before is done; consumers store dv and dk meanwhile
            _load_keys(k_desc, smem.k, k_full.index(slot), tile_smem, slot, sizes.num_splits, CONFIG.packed)
            _load_keys(v_desc, smem.v, v_full.index(slot), tile_smem, slot, sizes.num_splits, CONFIG.packed)
            mbarrier.wait(k_full.index(slot), (taken >> 1) & 1)
            mbarrier.wait(v_full.index(slot), (taken >> 1) & 1)
        for i in range(kept(todo)):
            before = at
            if DETERMINISTIC:
                before = gl.where(at >= waits_from, turn - BLOCK_N, 0)
            _add_to_dq(sum_ptr, order_ptr, tile, at, i, smem.k, smem.ds, ds_empty, before, owed, owed_turn, PART)
            if DETERMINISTIC:
                owed = tile + 0
                owed_turn = turn + 0
            at += 1
            _, _, tile, left_over = _next(
                tile, tile, tile, left_over, count, num_q_per_kv, slots, BLOCK_M, DETERMINISTIC
            )
            if to_load > 0:
                loads = _load_next(loads, descs, smem, full, loaded, num_q_per_kv, slots, CONFIG)
                loaded += 1
                to_load -= 1
        taken += 1 - begins
        begins = 1 - begins
    if DETERMINISTIC:
        signal_successor(order_ptr, owed, owed_turn)


@gluon_kernel(archs=(90,), unaligned=SMALL)
def _hopper_attention_bwd_kernel(
    q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, v_tail_desc, do_desc, do_tail_desc, rows_desc,
    dk_desc, dk_tail_desc, dv_desc, dv_tail_desc, sum_ptr, order_ptr, dk_ptr, dv_ptr, counter_ptr, slopes_ptr,
    q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr, k_slots_ptr,
    batch, queries, keys, kv_heads, num_q_per_kv, num_splits, blocks, late_blocks, swizzle, slots, tiles,
    slopes_stride_b, scale, softcap, left, right,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, CAP: gl.constexpr,
    D_QK: gl.constexpr, D_V: gl.constexpr, P_QK: gl.constexpr, P_V: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, DS_STAGES: gl.constexpr, PART: gl.constexpr, REGISTERS: gl.constexpr,
    AHEAD: gl.constexpr, EARLY: gl.constexpr, SPLIT_HEADS: gl.constexpr, STARTS_EARLY: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = 128
    gl.static_assert(2 <= STAGES and STAGES <= 4 and DS_STAGES <= 2)  # the barriers by number that there are
    dtype: gl.constexpr = q_desc.dtype
    PACKED: gl.constexpr = q_starts_ptr is not None
    CONFIG: gl.constexpr = BackwardConfig(
        LEFT, RIGHT, BOTTOM_RIGHT, CAP, PACKED, PACKED or q_used_ptr is not None, PACKED or k_used_ptr is not None,
        D_QK, D_V, order_ptr is not None, SPLIT_HEADS, AHEAD, EARLY, STARTS_EARLY,
    )  # fmt: skip
    # int64 where a stride needs it
    queries, keys, kv_heads, num_q_per_kv = int32(queries), int32(keys), int32(kv_heads), int32(num_q_per_kv)
    blocks, swizzle, slots, tiles = int32(blocks), int32(swizzle), int32(slots), int32(tiles)
    late_blocks = int32(late_blocks)
    if SPLIT_HEADS:
        splits = int32(num_splits)
    else:
        splits: gl.constexpr = None  # type: ignore[no-redef]
    batch, left, right = int32(batch), int32(left), int32(right)
    k_smem = alloc_pieces(dtype, 1, BLOCK_N, P_QK)
    v_smem = alloc_pieces(dtype, 1, BLOCK_N, P_V)
    q_smem = alloc_pieces(dtype, STAGES, BLOCK_M, P_QK)
    do_smem = alloc_pieces(dtype, STAGES, BLOCK_M, P_V)
    ds_smem = alloc_pipeline_stages(dtype, DS_STAGES, BLOCK_N, BLOCK_M)
    # a consumer's dv leaves through shared memory, then its dk through the same
    # 64 rows for each consumer
    dk_smem = alloc_pieces(dtype, 2, 64, P_QK)
    dv_smem = dk_smem
    if P_V != P_QK:
        dv_smem = alloc_pieces(dtype, 2, 64, P_V)
    rows_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * BLOCK_M], gl.NVMMASharedLayout(0, 32, 1))
    tile_smem = gl.allocate_shared_memory(gl.int32, [2 * TILE_FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_full = alloc_mbarriers(2, 1)
    v_full = alloc_mbarriers(2, 1)
    full = alloc_mbarriers(STAGES, 1)
    ds_empty = alloc_mbarriers(DS_STAGES, 1)
    tile_full = alloc_mbarriers(2, 1)
    # each of the two consumers says when it has read a descriptor
    tile_empty = alloc_mbarriers(2, 2)
    hopper.fence_async_shared()

    smem = BackwardBuffers(k_smem, v_smem, q_smem, do_smem, rows_smem, ds_smem)
    out_smem = (dk_smem, dv_smem)
    bars = BackwardBarriers(k_full, v_full, full, ds_empty, tile_full, tile_empty)
    q_descs, k_descs = by_piece(q_desc, q_tail_desc, P_QK), by_piece(k_desc, k_tail_desc, P_QK)
    v_descs, do_descs = by_piece(v_desc, v_tail_desc, P_V), by_piece(do_desc, do_tail_desc, P_V)
    descs = (k_descs, v_descs, q_descs, do_descs, rows_desc)
    scratch = (sum_ptr, order_ptr)
    lengths = Lengths(q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr, k_slots_ptr)
    sizes = BackwardSizes(
        batch, queries, keys, kv_heads, num_q_per_kv, splits, blocks, late_blocks, swizzle, slots, tiles
    )  # fmt: skip
    window = Window(left, right)
    # maps, or sums where heads are split
    dk, dv = dk_ptr, dv_ptr
    if dk_desc is not None:
        dk = by_piece(dk_desc, dk_tail_desc, P_QK)
    if dv_desc is not None:
        dv = by_piece(dv_desc, dv_tail_desc, P_V)
    grads = Gradients(dk, dv, slopes_ptr)
    key_sizes = KeySizes(batch, num_q_per_kv)
    mods = ScoreArguments(scale, softcap, window)
    gl.warp_specialize([
        (_produce, (
            descs, scratch, counter_ptr, lengths, smem, tile_smem, bars, sizes, window, CONFIG, PART,
        )),
        (consume, (grads, smem, out_smem, tile_smem, bars, key_sizes, slopes_stride_b, mods, CONFIG, 0)),
        (consume, (grads, smem, out_smem, tile_smem, bars, key_sizes, slopes_stride_b, mods, CONFIG, 1)),
    ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip
