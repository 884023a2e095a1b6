"""The Hopper backward kernel in Gluon: persistent, TMA and wgmma, a job for each warpgroup; docs/hopper.md teaches it.

    p     = 2^(s - lse)                     recomputed, keys along the rows
    dv_j  = sum_i p_ij do_i;                ds_ij = p_ij (do_i v_j - delta_i) (1 - tanh_ij^2 with a softcap)
    dk_j  = scale sum_i ds_ij q_i;          dq_i  = scale sum_j ds_ij k_j

One CTA an SM takes tiles of 128 keys of one head from a counter in memory and runs over the blocks of queries that see
them, of all query heads that share the keys. Two *consumer* warpgroups hold 64 keys each: scores, dk and dv in
registers, keys along the rows, so that p and ds are operands of the next products as they are. The third warpgroup, the
*producer*, fetches tiles, loads by TMA, and computes each block's contribution to dq from ds in shared memory. It adds
that to float32 sums in memory, 16 bytes a thread at once, in the order in which the threads hold them, and in no fixed
order of blocks, unless hopper/dq_order.py gives it one.

Source: Dao 2023, arXiv:2307.08691; Shah et al. 2024, arXiv:2407.08608, for warpgroups that take turns and registers
that hold p and ds. Bounds that move by coordinates: Triton's tools/ragged_tma.py has the idea.
"""

from powertrain.ops.attention.hopper.backward_consumer import consume
from powertrain.ops.attention.hopper.backward_tiles import (
    fetch_next_tile,
    publish_tile,
)
from powertrain.ops.attention.hopper.dq_order import last_turn, signal_successor, wait_for_predecessor
from powertrain.ops.attention.hopper.primitives import (
    BAR_DS_FULL,
    BAR_EMPTY,
    EVERYONE,
    TILE_B,
    TILE_COUNT,
    TILE_FIELDS,
    TILE_FIRST,
    TILE_K_END,
    TILE_K_ROW,
    TILE_KV,
    TILE_Q_END,
    TILE_Q_ROW,
    TILE_SUMS,
    TILE_UNSEEN,
    BackwardBarriers,
    BackwardBuffers,
    BackwardConfig,
    BackwardInputs,
    BackwardSizes,
    BackwardStrides,
    Gradients,
    GradientStrides,
    KeySizes,
    Lengths,
    ScoreArguments,
    Scratch,
    Window,
    alloc_mbarriers,
    alloc_pipeline_stages,
    as_tile,
    int32,
    keep_order,
    read_tile_field,
    rows_desc_of,
)
from powertrain.runtime.gluon_compat import (
    gl,
    gluon,
    hopper,
    kept,
    mbarrier,
    named_barrier_sync,
    tma,
    tma_load,
)
from powertrain.runtime.launch import gluon_kernel


@gluon.jit
def add_in_order(base, x):
    """Add accumulators [64, N] to the float32 at `base`, in the order in which the threads hold them."""
    N: gl.constexpr = x.shape[1]
    # sums lie in the order of the accumulators, so that each thread adds vectors without a shuffle; the last launch
    # brings them into rows
    x = x.reshape([4, 2, 8, N // 8, 4, 2]).permute(3, 0, 2, 4, 1, 5).reshape([16 * N, 2, 2])
    even, odd = x.split()
    x0, x2 = even.split()
    x1, x3 = odd.split()
    ptrs = base + gl.arange(0, 16 * N, x0.type.layout) * 4
    gl.inline_asm_elementwise(
        # 16 bytes a thread, no shared memory, no barrier: the L2 takes 3.8 TB/s of such additions, the kernel needs
        # 1.9
        "red.relaxed.gpu.global.add.v4.f32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;",
        "=r,l,f,f,f,f",
        [ptrs.to(gl.int64), x0, x1, x2, x3],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    # the next product writes to these registers
    keep_order()


@gluon.jit
def _load(q_desc, do_desc, rows_desc, q_smem, do_smem, rows_smem, full, at, place, tile):
    """Block number `at` of queries, at `place` = (batch entry, head, end, row), when its stage has been given back."""
    STAGES: gl.constexpr = q_smem.shape[0]
    BLOCK_M: gl.constexpr = q_smem.shape[1]
    BYTES: gl.constexpr = (q_smem.shape[2] + do_smem.shape[2]) * q_smem.dtype.primitive_bitwidth // 8 + 2 * 4
    b, head, end, row = place
    stage = at % STAGES
    if at >= STAGES:
        # both consumers have given the stage back
        named_barrier_sync(BAR_EMPTY + stage, EVERYONE)
    bar = full.index(stage)
    # one phase for q, do, LSE and delta: a consumer waits once a block
    mbarrier.expect(bar, BLOCK_M * BYTES)
    tma_load(q_desc, [b, head, end, row, 0], bar, as_tile(q_smem.index(stage)))  # [BLOCK_M, W_QK]
    tma_load(rows_desc, [tile * 2 * BLOCK_M], bar, rows_smem.index(stage))  # [2 * BLOCK_M]: LSE, delta
    tma_load(do_desc, [b, head, end, row, 0], bar, as_tile(do_smem.index(stage)))  # [BLOCK_M, W_V]


@gluon.jit
def _next(head, row, tile, left, count, num_q_per_kv, slots, BLOCK_M: gl.constexpr, DETERMINISTIC: gl.constexpr):
    """The block of queries after this one: the head's next, and the heads that share the keys follow each other.
    DETERMINISTIC: of the last rows those of all heads, then of the rows before."""
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
def _load_keys(desc, smem, bar, tile_smem, slot, PACKED: gl.constexpr):
    b = gl.to_tensor(0)
    if not PACKED:
        b = read_tile_field(tile_smem, slot, TILE_B)
    kv = read_tile_field(tile_smem, slot, TILE_KV)
    place = [b, kv, read_tile_field(tile_smem, slot, TILE_K_END), read_tile_field(tile_smem, slot, TILE_K_ROW), 0]
    mbarrier.expect(bar, smem.shape[0] * smem.shape[1] * smem.dtype.primitive_bitwidth // 8)
    tma_load(desc, place, bar, as_tile(smem))


@gluon.jit
def _add_to_dq(
    sum_ptr, order_ptr, tile, at, i, k_smem, ds_smem, ds_empty, before, owed, owed_turn, PART: gl.constexpr,
):  # fmt: skip
    """Add block number `at` of ds, when it is there, times the keys to tile number `tile` of the sums; give ds back.
    With `order_ptr` after turn `before`, when turn `owed_turn` at the tile `owed` has been passed on."""
    DS_STAGES: gl.constexpr = ds_smem.shape[0]
    BLOCK_M: gl.constexpr = ds_smem.shape[2]
    W_QK: gl.constexpr = k_smem.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    stage = at % DS_STAGES
    if order_ptr is not None:
        # read ahead of the product, which hides the trip to the L2
        last = last_turn(order_ptr, tile)
    # both consumers have stored their half of ds
    named_barrier_sync(BAR_DS_FULL + stage, EVERYONE)
    for m in gl.static_range(BLOCK_M // 64):
        ds = ds_smem.index(stage).slice(m * 64, 64, 1).permute((1, 0))  # [64 queries, 128 keys]
        for n in gl.static_range(W_QK // PART):
            zeros = gl.zeros([64, PART], gl.float32, layout)
            # index 0, but not as a constant: addresses computed from a constant would be kept in registers throughout
            k = k_smem.index(i >> 30).slice(n * PART, PART, 1)  # [128, PART]
            part = m * (W_QK // PART) + n
            if sum_ptr is not None:
                # PART columns at a time: 64 need 72 registers, 32 leave the consumers more
                dq = hopper.warpgroup_mma(ds, k, zeros, use_acc=False, is_async=True)  # [64, PART]
                if order_ptr is not None and part == 0:
                    wait_for_predecessor(order_ptr, tile, last, before, owed, owed_turn)
                dq = hopper.warpgroup_mma_wait(0, deps=[dq])
            if part == BLOCK_M // 64 * (W_QK // PART) - 1:
                # the last product of this block has read ds
                mbarrier.arrive(ds_empty.index(stage), count=1)
            if sum_ptr is not None:
                add_in_order(sum_ptr + tile.to(gl.int64) * (BLOCK_M * W_QK) + part * 64 * PART, dq)


@gluon.jit
def _produce(
    inputs, scratch, counter_ptr, lengths, smem, tile_smem, bars, sizes, strides, window,
    CONFIG: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """The warpgroup that fetches tiles and loads them, multiplies ds K and adds it to the sums of dq."""
    sum_ptr, order_ptr, rows_ptr = scratch
    kv_heads, num_q_per_kv, slots = sizes.kv_heads, sizes.num_q_per_kv, sizes.slots
    queries, keys = sizes.queries, sizes.keys
    k_smem, v_smem, q_smem, do_smem, rows_smem, ds_smem = smem.k, smem.v, smem.q, smem.do, smem.rows, smem.ds
    k_full, v_full, full, ds_empty = bars.k_full, bars.v_full, bars.block_full, bars.ds_empty
    tile_full, tile_empty = bars.tile_full, bars.tile_empty
    STAGES: gl.constexpr = q_smem.shape[0]
    BLOCK_M: gl.constexpr = q_smem.shape[1]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    PACKED: gl.constexpr = CONFIG.packed
    DETERMINISTIC: gl.constexpr = CONFIG.deterministic
    D_QK: gl.constexpr = CONFIG.d_qk
    D_V: gl.constexpr = CONFIG.d_v
    # LSE and delta of a block come by TMA too, so that one mbarrier announces q, do and them
    rows_layout: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    storage = sizes.batch
    if PACKED:
        storage = gl.to_tensor(1)
    heads = kv_heads * num_q_per_kv
    RAGGED_Q: gl.constexpr = CONFIG.ragged_q
    RAGGED_K: gl.constexpr = CONFIG.ragged_k
    k_desc = rows_desc_of(inputs.k, storage, kv_heads, keys, D_QK, strides.kb, strides.kh, strides.ks, k_smem, RAGGED_K)
    v_desc = rows_desc_of(inputs.v, storage, kv_heads, keys, D_V, strides.vb, strides.vh, strides.vs, v_smem, RAGGED_K)
    q_desc = rows_desc_of(inputs.q, storage, heads, queries, D_QK, strides.qb, strides.qr, strides.qs, q_smem, RAGGED_Q)
    do_desc = rows_desc_of(
        inputs.do, storage, heads, queries, D_V, strides.dob, strides.dor, strides.dos, do_smem, RAGGED_Q
    )
    rows_desc = tma.make_tensor_descriptor(rows_ptr, [sizes.rows_size], [1], [2 * BLOCK_M], rows_layout)

    # tiles begun
    taken = gl.to_tensor(0)
    # blocks multiplied, of all tiles
    at = gl.to_tensor(0)
    # blocks asked for
    loaded = gl.to_tensor(0)
    kv = gl.to_tensor(0)
    b = gl.to_tensor(0)
    # the blocks to load next: place, count a head, how many are left of the head and of the tile
    head = gl.to_tensor(0)
    end = gl.to_tensor(0)
    row = gl.to_tensor(0)
    load_tile = gl.to_tensor(0)
    load_count = gl.to_tensor(1)
    load_left = gl.to_tensor(1)
    to_load = gl.to_tensor(0)
    # and to multiply
    tile = gl.to_tensor(0)
    count = gl.to_tensor(1)
    left_over = gl.to_tensor(1)
    rest = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    # the first block to which another tile adds before this one
    waits_from = gl.to_tensor(0)
    # the tile of sums that the next one waits for, and whose turn it was
    owed = gl.to_tensor(-1)
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
            publish_tile(
                number, taken, tile_smem, tile_full, tile_empty, counter_ptr, lengths, sizes, window,
                CONFIG, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            todo = rest + 0
            kv = read_tile_field(tile_smem, slot, TILE_KV)
            to_load = gl.to_tensor(0)
            if kv >= 0:
                if not PACKED:
                    b = read_tile_field(tile_smem, slot, TILE_B)
                head = kv * num_q_per_kv
                end = read_tile_field(tile_smem, slot, TILE_Q_END)
                row = read_tile_field(tile_smem, slot, TILE_Q_ROW)
                load_tile = read_tile_field(tile_smem, slot, TILE_SUMS)
                load_count = read_tile_field(tile_smem, slot, TILE_COUNT)
                load_left = load_count + 0
                if DETERMINISTIC:
                    load_left = num_q_per_kv + 0
                to_load = load_count * num_q_per_kv
            for _ in range(kept(gl.minimum(at + STAGES - loaded, to_load))):
                _load(
                    q_desc, do_desc, rows_desc, q_smem, do_smem, rows_smem, full, loaded, (b, head, end, row), load_tile
                )
                head, row, load_tile, load_left = _next(
                    head, row, load_tile, load_left, load_count, num_q_per_kv, slots, BLOCK_M, DETERMINISTIC
                )
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
            _load_keys(k_desc, k_smem.index(0), k_full.index(slot), tile_smem, slot, PACKED)
            _load_keys(v_desc, v_smem.index(0), v_full.index(slot), tile_smem, slot, PACKED)
            mbarrier.wait(k_full.index(slot), (taken >> 1) & 1)
            mbarrier.wait(v_full.index(slot), (taken >> 1) & 1)
        for i in range(kept(todo)):
            before = at
            if DETERMINISTIC:
                before = gl.where(at >= waits_from, turn - BLOCK_N, 0)
            _add_to_dq(sum_ptr, order_ptr, tile, at, i, k_smem, ds_smem, ds_empty, before, owed, owed_turn, PART)
            if DETERMINISTIC:
                owed = tile + 0
                owed_turn = turn + 0
            at += 1
            _, _, tile, left_over = _next(
                tile, tile, tile, left_over, count, num_q_per_kv, slots, BLOCK_M, DETERMINISTIC
            )
            if to_load > 0:
                _load(
                    q_desc, do_desc, rows_desc, q_smem, do_smem, rows_smem, full, loaded, (b, head, end, row), load_tile
                )
                head, row, load_tile, load_left = _next(
                    head, row, load_tile, load_left, load_count, num_q_per_kv, slots, BLOCK_M, DETERMINISTIC
                )
                loaded += 1
                to_load -= 1
        taken += 1 - begins
        begins = 1 - begins
    if DETERMINISTIC:
        # of the last block; the others were signalled with the block after them
        signal_successor(order_ptr, owed, owed_turn)


@gluon_kernel(archs=(90,))
def _hopper_attention_bwd_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, sum_ptr, order_ptr, dk_ptr, dv_ptr, rows_ptr, counter_ptr, slopes_ptr,
    q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr,
    batch, queries, keys, kv_heads, num_q_per_kv, blocks, swizzle, slots, tiles, rows_size,
    stride_qb, stride_qs, stride_qr, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_dob, stride_dos, stride_dor, stride_dkb, stride_dks, stride_dkh,
    stride_dvb, stride_dvs, stride_dvh, slopes_stride_b, scale, softcap, left, right,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, CAP: gl.constexpr,
    D_QK: gl.constexpr, D_V: gl.constexpr, W_QK: gl.constexpr, W_V: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, DS_STAGES: gl.constexpr, PART: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = 128
    # the barriers by number that there are
    gl.static_assert(2 <= STAGES and STAGES <= 4 and DS_STAGES <= 2)
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    PACKED: gl.constexpr = q_starts_ptr is not None
    CONFIG: gl.constexpr = BackwardConfig(
        LEFT, RIGHT, BOTTOM_RIGHT, CAP, PACKED, PACKED or q_used_ptr is not None, PACKED or k_used_ptr is not None,
        D_QK, D_V, order_ptr is not None,
    )  # fmt: skip
    # int64 where a stride needs it
    queries, keys, kv_heads, num_q_per_kv = int32(queries), int32(keys), int32(kv_heads), int32(num_q_per_kv)
    blocks, swizzle, slots, tiles = int32(blocks), int32(swizzle), int32(slots), int32(tiles)
    batch, left, right, rows_size = int32(batch), int32(left), int32(right), int32(rows_size)
    k_smem = alloc_pipeline_stages(dtype, 1, BLOCK_N, W_QK)
    v_smem = alloc_pipeline_stages(dtype, 1, BLOCK_N, W_V)
    q_smem = alloc_pipeline_stages(dtype, STAGES, BLOCK_M, W_QK)
    do_smem = alloc_pipeline_stages(dtype, STAGES, BLOCK_M, W_V)
    ds_smem = alloc_pipeline_stages(dtype, DS_STAGES, BLOCK_N, BLOCK_M)
    # a consumer's dv leaves through shared memory, then its dk through the same
    # 64 rows for each consumer
    dk_smem = alloc_pipeline_stages(dtype, 2, 64, W_QK)
    dv_smem = dk_smem
    if W_V != W_QK:
        dv_smem = alloc_pipeline_stages(dtype, 2, 64, W_V)
    rows_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * BLOCK_M], gl.NVMMASharedLayout(0, 32, 1))
    tile_smem = gl.allocate_shared_memory(gl.int32, [2 * TILE_FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_full = alloc_mbarriers(2, 1)
    v_full = alloc_mbarriers(2, 1)
    full = alloc_mbarriers(STAGES, 1)
    ds_empty = alloc_mbarriers(DS_STAGES, 1)
    tile_full = alloc_mbarriers(2, 1)
    # each of the two consumers says when it has read a descriptor
    tile_empty = alloc_mbarriers(2, 2)
    # TMA must see the barriers initialized
    hopper.fence_async_shared()

    smem = BackwardBuffers(k_smem, v_smem, q_smem, do_smem, rows_smem, ds_smem)
    out_smem = (dk_smem, dv_smem)
    bars = BackwardBarriers(k_full, v_full, full, ds_empty, tile_full, tile_empty)
    inputs = BackwardInputs(q_ptr, k_ptr, v_ptr, do_ptr)
    scratch = Scratch(sum_ptr, order_ptr, rows_ptr)
    lengths = Lengths(q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr)
    sizes = BackwardSizes(
        batch, queries, keys, kv_heads, num_q_per_kv, blocks, swizzle, slots, tiles, rows_size
    )  # fmt: skip
    strides = BackwardStrides(
        stride_qb, stride_qs, stride_qr, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
        stride_dob, stride_dos, stride_dor,
    )  # fmt: skip
    window = Window(left, right)
    grads = Gradients(dk_ptr, dv_ptr, slopes_ptr)
    key_sizes = KeySizes(batch, keys, kv_heads, num_q_per_kv)
    grad_strides = GradientStrides(
        stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh, slopes_stride_b
    )
    mods = ScoreArguments(scale, softcap, window)
    gl.warp_specialize([
        (_produce, (
            inputs, scratch, counter_ptr, lengths, smem, tile_smem, bars, sizes, strides, window, CONFIG, PART,
        )),
        (consume, (grads, smem, out_smem, tile_smem, bars, key_sizes, grad_strides, mods, CONFIG, 0)),
        (consume, (grads, smem, out_smem, tile_smem, bars, key_sizes, grad_strides, mods, CONFIG, 1)),
    ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip
