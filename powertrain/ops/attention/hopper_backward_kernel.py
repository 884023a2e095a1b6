"""The Hopper backward kernel in Gluon: persistent, TMA and wgmma, a job for each warpgroup; docs/hopper.md teaches it.

    p     = 2^(s - lse)                     recomputed, keys along the rows
    dv_j  = sum_i p_ij do_i;                ds_ij = p_ij (do_i v_j - delta_i) (1 - tanh_ij^2 with a softcap)
    dk_j  = scale sum_i ds_ij q_i;          dq_i  = scale sum_j ds_ij k_j

One CTA an SM takes tiles of 128 keys of one head from a counter in memory and runs over the blocks of queries that see
them, of all query heads that share the keys. Two *consumer* warpgroups hold 64 keys each: scores, dk and dv in
registers, keys along the rows, so that p and ds are operands of the next products as they are. The third, the *server*,
draws tiles, loads by TMA, and multiplies what a block adds to dq, from ds in shared memory. It adds to float32 sums in
memory, 16 bytes a thread at once, in the order in which the threads hold them, and in no fixed order of blocks, unless
hopper_order.py gives it one.

Source: Dao 2023, arXiv:2307.08691; Shah et al. 2024, arXiv:2407.08608, for warpgroups that take turns and registers
that hold p and ds. Bounds that move by coordinates: Triton's tools/ragged_tma.py has the idea.
"""

from powertrain.ops.attention.hopper_order import last_turn, pass_turn, take_turn
from powertrain.ops.attention.hopper_tiles import LOG2E, here, int32, keep_order, rings, stages, tanh, tell, told
from powertrain.ops.attention.triton_tiles import find_sequence, span_of
from powertrain.runtime.gluon_compat import (
    arrive_named,
    barrier,
    gl,
    gluon,
    hopper,
    kept,
    mbarrier,
    reinterpret,
    sync_named,
    tma,
    tma_load,
    tma_store,
)
from powertrain.runtime.launch import gluon_kernel

# the hardware's barriers, at which who arrives need not wait: ds of a block is there, a stage was given back, whose
# turn it is at the tensor cores
_DS_FULL = gl.constexpr(8)
_EMPTY = gl.constexpr(10)
_TURN = gl.constexpr(14)
_EVERYONE = gl.constexpr(384)
_CONSUMERS = gl.constexpr(256)


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
    keep_order()  # the next product writes to these registers


@gluon.jit
def _as_tile(smem):
    """[rows, columns] in shared memory as the tile of a descriptor."""
    ROWS: gl.constexpr = smem.shape[0]
    COLS: gl.constexpr = smem.shape[1]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, 1, ROWS, COLS], smem.dtype)
    return reinterpret(smem, smem.dtype, [1, 1, 1, ROWS, COLS], layout)


@gluon.jit
def _rows_desc(ptr, batch, heads, rows, D, stride_b, stride_h, stride_s, smem, RAGGED: gl.constexpr):
    """A descriptor [batch, heads, end, row, column] of a whole tensor [batch, heads, rows, D], of the tiles that the
    stages of `smem` hold. RAGGED: it ends where any sequence ends, for row i of n that end before row `end` is
    (end, rows - n + i); else row i is (0, i).

    A tile must not lie wholly outside: TMA touches then what it takes for the tensor's start."""
    ROWS: gl.constexpr = smem.shape[1]
    COLS: gl.constexpr = smem.shape[2]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, 1, ROWS, COLS], smem.dtype)
    stride = stride_s.to(gl.int64)
    ends = gl.to_tensor(1)
    if RAGGED:
        ptr -= rows * stride
        ends = rows + 1
    return tma.make_tensor_descriptor(
        ptr, [batch, heads, ends, rows, D], [stride_b, stride_h, stride, stride, 1], [1, 1, 1, ROWS, COLS], layout
    )


@gluon.jit
def _place(start, length, row, rows, RAGGED: gl.constexpr):
    """(end, row) of row `row` of a sequence of `length` rows from row `start` of a tensor of `rows` on."""
    end = gl.to_tensor(0)
    if RAGGED:
        end = start + length
        row += rows - length
    return end, row


# what the server tells of a tile: [2, _FIELDS] int32 in shared memory
_FIELDS = gl.constexpr(16)
_KV = gl.constexpr(0)  # head of keys; -1: no more tiles
_B = gl.constexpr(1)
_COUNT = gl.constexpr(2)  # blocks of queries
_FIRST = gl.constexpr(3)  # key
_TILE = gl.constexpr(4)  # of the sums, of the first block of the first query head
_DISTANCE = gl.constexpr(5)  # position of the first query less that of the first key
_K_LEFT = gl.constexpr(6)  # keys from the first one on
_Q_END = gl.constexpr(7)
_Q_ROW = gl.constexpr(8)
_K_END = gl.constexpr(9)
_K_ROW = gl.constexpr(10)
_DK_END = gl.constexpr(11)
_DK_ROW = gl.constexpr(12)
_DK_LEFT = gl.constexpr(13)  # rows of dk from the first one on
_UNSEEN = gl.constexpr(14)  # blocks that the tile of the keys before does not see, of all heads


@gluon.jit
def _keys_of(
    tile, k_starts_ptr, q_starts_ptr, k_used_ptr, q_used_ptr, batch, queries, keys, kv_heads, blocks, group,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """A tile of keys: (batch entry, head, first key), then start, length and room of its sequence's keys, and start and
    length of its queries. `group` heads at a time share the L2, and of each the first keys, which most queries see, go
    first."""
    heads = kv_heads
    if k_starts_ptr is None:
        heads = kv_heads * batch
    first_head = tile // (group * blocks) * group
    size = gl.minimum(heads - first_head, group)
    within = tile - first_head * blocks
    block = within // size
    kv = first_head + within % size
    if k_starts_ptr is not None:
        b, block = find_sequence(k_starts_ptr, batch, block, BLOCK_N)
    else:
        b = kv // kv_heads
        kv = kv % kv_heads
    k_start, k_len, k_room = span_of(k_starts_ptr, k_used_ptr, b, batch, keys)
    q_start, q_len, _ = span_of(q_starts_ptr, q_used_ptr, b, batch, queries)
    return b, kv, block * BLOCK_N, k_start, k_len, k_room, q_start, q_len


@gluon.jit
def _queries_of(
    first, k_len, q_len, left, right,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """(first block, number) of the blocks of queries that see keys of the tile from key `first` on, and the position
    of query 0."""
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
    return begin, gl.where(first < k_len, gl.maximum(gl.cdiv(end, BLOCK_M) - begin, 0), 0), offset


@gluon.jit
def _draw(counter_ptr, IN_TURN: gl.constexpr):
    """A tile that nobody has. The first of each CTA is that of its own number, but IN_TURN, where who waits for a tile
    must be sure that its CTA runs."""
    first = gl.num_programs(0)
    if IN_TURN:
        first = 0
    return first + gl.atomic_add(counter_ptr, 1, sem="relaxed")


@gluon.jit
def _tell_tile(
    tile, taken, tile_smem, tile_full, tile_empty, counter_ptr,
    q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr,
    batch, queries, keys, kv_heads, repeats, blocks, group, slots, tiles, left, right,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    IN_TURN: gl.constexpr,
):  # fmt: skip
    """Tell the consumers of `tile`, or of the next one drawn that has keys; or that there is none."""
    slot = taken & 1
    mbarrier.wait(tile_empty.index(slot), (taken >> 1) & 1 ^ 1)
    RAGGED_Q: gl.constexpr = q_starts_ptr is not None or q_used_ptr is not None
    RAGGED_K: gl.constexpr = k_starts_ptr is not None or k_used_ptr is not None
    looks = tile < tiles
    if not looks:
        tell(tile_smem, slot, _KV, -1)
    while looks:
        b, kv, first, k_start, k_len, k_room, q_start, q_len = _keys_of(
            tile, k_starts_ptr, q_starts_ptr, k_used_ptr, q_used_ptr, batch, queries, keys, kv_heads, blocks, group,
            BLOCK_N,
        )  # fmt: skip
        if first < k_room:
            begin, count, offset = _queries_of(
                first, k_len, q_len, left, right, LEFT, RIGHT, BOTTOM_RIGHT, BLOCK_M, BLOCK_N
            )
            start = begin
            if IN_TURN:
                start = begin + count - 1
            at = kv * repeats * slots + start
            if q_starts_ptr is not None:
                at += q_start // BLOCK_M + b
            else:
                at += b * kv_heads * repeats * slots
            tell(tile_smem, slot, _KV, kv)
            tell(tile_smem, slot, _B, b)
            tell(tile_smem, slot, _COUNT, count)
            tell(tile_smem, slot, _FIRST, first)
            tell(tile_smem, slot, _TILE, at)
            tell(tile_smem, slot, _DISTANCE, start * BLOCK_M + offset - first)
            tell(tile_smem, slot, _K_LEFT, k_len - first)
            end, row = _place(q_start, q_len, start * BLOCK_M, queries, RAGGED_Q)
            tell(tile_smem, slot, _Q_END, end)
            tell(tile_smem, slot, _Q_ROW, row)
            end, row = _place(k_start, k_len, first, keys, RAGGED_K)
            if RAGGED_K:  # where there is nothing to load, the first rows of all
                end = gl.where(count > 0, end, keys)
                row = gl.where(count > 0, row, 0)
            tell(tile_smem, slot, _K_END, end)
            tell(tile_smem, slot, _K_ROW, row)
            end, row = _place(k_start, k_room, first, keys, k_starts_ptr is not None)
            tell(tile_smem, slot, _DK_END, end)
            tell(tile_smem, slot, _DK_ROW, row)
            tell(tile_smem, slot, _DK_LEFT, k_room - first)
            if IN_TURN:
                before, size, _ = _queries_of(
                    first - BLOCK_N, k_len, q_len, left, right, LEFT, RIGHT, BOTTOM_RIGHT, BLOCK_M, BLOCK_N
                )
                tell(tile_smem, slot, _UNSEEN, (begin + count - before - size) * repeats)
            looks = tile < 0  # no longer
        else:
            tile = _draw(counter_ptr, IN_TURN)
            looks = tile < tiles
            if not looks:
                tell(tile_smem, slot, _KV, -1)
    mbarrier.arrive(tile_full.index(slot), count=1)
    mbarrier.wait(tile_full.index(slot), (taken >> 1) & 1)


@gluon.jit
def _load(q_desc, do_desc, rows_desc, q_smem, do_smem, rows_smem, full, at, place, tile):
    """Block number `at` of queries, at `place` = (batch entry, head, end, row), when its stage has been given back."""
    STAGES: gl.constexpr = q_smem.shape[0]
    BLOCK_M: gl.constexpr = q_smem.shape[1]
    BYTES: gl.constexpr = (q_smem.shape[2] + do_smem.shape[2]) * q_smem.dtype.primitive_bitwidth // 8 + 2 * 4
    b, head, end, row = place
    stage = at % STAGES
    if at >= STAGES:
        sync_named(_EMPTY + stage, _EVERYONE)
    bar = full.index(stage)
    mbarrier.expect(bar, BLOCK_M * BYTES)
    tma_load(q_desc, [b, head, end, row, 0], bar, _as_tile(q_smem.index(stage)))
    tma_load(rows_desc, [tile * 2 * BLOCK_M], bar, rows_smem.index(stage))
    tma_load(do_desc, [b, head, end, row, 0], bar, _as_tile(do_smem.index(stage)))


@gluon.jit
def _next(head, row, tile, left, count, repeats, slots, BLOCK_M: gl.constexpr, IN_TURN: gl.constexpr):
    """The block of queries after this one: the head's next, and the heads that share the keys follow each other.
    IN_TURN: of the last rows those of all heads, then of the rows before."""
    left -= 1
    wraps = left == 0
    if IN_TURN:
        head = gl.where(wraps, head - repeats + 1, head + 1)
        row = gl.where(wraps, row - BLOCK_M, row)
        tile = gl.where(wraps, tile - (repeats - 1) * slots - 1, tile + slots)
        return head, row, tile, gl.where(wraps, repeats, left)
    head = gl.where(wraps, head + 1, head)
    row = gl.where(wraps, row - (count - 1) * BLOCK_M, row + BLOCK_M)
    tile = gl.where(wraps, tile + slots - count + 1, tile + 1)
    return head, row, tile, gl.where(wraps, count, left)


@gluon.jit
def _load_keys(desc, smem, bar, tile_smem, slot, PACKED: gl.constexpr):
    b = gl.to_tensor(0)
    if not PACKED:
        b = told(tile_smem, slot, _B)
    kv = told(tile_smem, slot, _KV)
    place = [b, kv, told(tile_smem, slot, _K_END), told(tile_smem, slot, _K_ROW), 0]
    mbarrier.expect(bar, smem.shape[0] * smem.shape[1] * smem.dtype.primitive_bitwidth // 8)
    tma_load(desc, place, bar, _as_tile(smem))


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
        last = last_turn(order_ptr, tile)
    sync_named(_DS_FULL + stage, _EVERYONE)
    for m in gl.static_range(BLOCK_M // 64):
        ds = ds_smem.index(stage).slice(m * 64, 64, 1).permute((1, 0))
        for n in gl.static_range(W_QK // PART):
            zeros = gl.zeros([64, PART], gl.float32, layout)
            # index 0, and no constant: what is computed from it does not fill registers all the while
            k = k_smem.index(i >> 30).slice(n * PART, PART, 1)
            part = m * (W_QK // PART) + n
            if sum_ptr is not None:
                dq = hopper.warpgroup_mma(ds, k, zeros, use_acc=False, is_async=True)
                if order_ptr is not None and part == 0:
                    take_turn(order_ptr, tile, last, before, owed, owed_turn)
                dq = hopper.warpgroup_mma_wait(0, deps=[dq])
            if part == BLOCK_M // 64 * (W_QK // PART) - 1:
                mbarrier.arrive(ds_empty.index(stage), count=1)
            if sum_ptr is not None:
                _add_in_order(sum_ptr + tile.to(gl.int64) * (BLOCK_M * W_QK) + part * 64 * PART, dq)


@gluon.jit
def _serve(
    q_ptr, k_ptr, v_ptr, do_ptr, sum_ptr, order_ptr, rows_ptr, counter_ptr,
    q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr, smem, tile_smem, bars,
    batch, queries, keys, kv_heads, repeats, blocks, group, slots, tiles, rows_size,
    stride_qb, stride_qs, stride_qr, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_dob, stride_dos, stride_dor, left, right,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr,
    D_QK: gl.constexpr, D_V: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """The warpgroup that draws tiles and loads them, multiplies ds K and adds it to the sums of dq."""
    k_smem, v_smem, q_smem, do_smem, rows_smem, ds_smem = smem
    k_full, v_full, full, ds_empty, tile_full, tile_empty = bars
    STAGES: gl.constexpr = q_smem.shape[0]
    BLOCK_M: gl.constexpr = q_smem.shape[1]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    PACKED: gl.constexpr = q_starts_ptr is not None
    IN_TURN: gl.constexpr = order_ptr is not None
    rows_layout: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    storage = batch
    if PACKED:
        storage = gl.to_tensor(1)
    heads = kv_heads * repeats
    RAGGED_Q: gl.constexpr = PACKED or q_used_ptr is not None
    RAGGED_K: gl.constexpr = PACKED or k_used_ptr is not None
    k_desc = _rows_desc(k_ptr, storage, kv_heads, keys, D_QK, stride_kb, stride_kh, stride_ks, k_smem, RAGGED_K)
    v_desc = _rows_desc(v_ptr, storage, kv_heads, keys, D_V, stride_vb, stride_vh, stride_vs, v_smem, RAGGED_K)
    q_desc = _rows_desc(q_ptr, storage, heads, queries, D_QK, stride_qb, stride_qr, stride_qs, q_smem, RAGGED_Q)
    do_desc = _rows_desc(do_ptr, storage, heads, queries, D_V, stride_dob, stride_dor, stride_dos, do_smem, RAGGED_Q)
    rows_desc = tma.make_tensor_descriptor(rows_ptr, [rows_size], [1], [2 * BLOCK_M], rows_layout)

    taken = gl.to_tensor(0)  # tiles begun
    at = gl.to_tensor(0)  # blocks multiplied, of all tiles
    loaded = gl.to_tensor(0)  # blocks asked for
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
    waits_from = gl.to_tensor(0)  # the first block to which another tile adds before this one
    owed = gl.to_tensor(-1)  # the tile of sums that the next one waits for, and whose turn it was
    owed_turn = gl.to_tensor(0)
    begins = gl.to_tensor(1)
    while kv >= 0:
        slot = taken & 1
        if begins:
            # while a tile's last blocks are multiplied the next one's are loaded. It is drawn late, for what a long
            # tile has drawn waits for its end
            if IN_TURN:
                number = _draw(counter_ptr, IN_TURN)
            else:
                number = gl.program_id(0)
                if taken > 0:
                    number = _draw(counter_ptr, IN_TURN)
            _tell_tile(
                number, taken, tile_smem, tile_full, tile_empty, counter_ptr,
                q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr,
                batch, queries, keys, kv_heads, repeats, blocks, group, slots, tiles, left, right,
                LEFT, RIGHT, BOTTOM_RIGHT, BLOCK_M, BLOCK_N, IN_TURN,
            )  # fmt: skip
            todo = rest + 0
            kv = told(tile_smem, slot, _KV)
            to_load = gl.to_tensor(0)
            if kv >= 0:
                if not PACKED:
                    b = told(tile_smem, slot, _B)
                head = kv * repeats
                end = told(tile_smem, slot, _Q_END)
                row = told(tile_smem, slot, _Q_ROW)
                load_tile = told(tile_smem, slot, _TILE)
                load_count = told(tile_smem, slot, _COUNT)
                load_left = load_count + 0
                if IN_TURN:
                    load_left = repeats + 0
                to_load = load_count * repeats
            for _ in range(kept(gl.minimum(at + STAGES - loaded, to_load))):
                _load(
                    q_desc, do_desc, rows_desc, q_smem, do_smem, rows_smem, full, loaded, (b, head, end, row), load_tile
                )
                head, row, load_tile, load_left = _next(
                    head, row, load_tile, load_left, load_count, repeats, slots, BLOCK_M, IN_TURN
                )
                loaded += 1
                to_load -= 1
        else:
            # who has stored the last ds has done with the scores; this warpgroup was the last to read the keys
            tile = told(tile_smem, slot, _TILE)
            count = told(tile_smem, slot, _COUNT)
            left_over = count + 0
            if IN_TURN:
                left_over = repeats + 0
                turn = told(tile_smem, slot, _FIRST) + BLOCK_N
                waits_from = at + told(tile_smem, slot, _UNSEEN)
            rest = gl.minimum(count * repeats, STAGES)
            todo = count * repeats - rest
            # for keys that no query sees too: a branch would cost the consumers registers
            _load_keys(k_desc, k_smem.index(0), k_full.index(slot), tile_smem, slot, PACKED)
            _load_keys(v_desc, v_smem.index(0), v_full.index(slot), tile_smem, slot, PACKED)
            mbarrier.wait(k_full.index(slot), (taken >> 1) & 1)
            mbarrier.wait(v_full.index(slot), (taken >> 1) & 1)
        for i in range(kept(todo)):
            before = at
            if IN_TURN:
                before = gl.where(at >= waits_from, turn - BLOCK_N, 0)
            _add_to_dq(sum_ptr, order_ptr, tile, at, i, k_smem, ds_smem, ds_empty, before, owed, owed_turn, PART)
            if IN_TURN:
                owed = tile + 0
                owed_turn = turn + 0
            at += 1
            _, _, tile, left_over = _next(tile, tile, tile, left_over, count, repeats, slots, BLOCK_M, IN_TURN)
            if to_load > 0:
                _load(
                    q_desc, do_desc, rows_desc, q_smem, do_smem, rows_smem, full, loaded, (b, head, end, row), load_tile
                )
                head, row, load_tile, load_left = _next(
                    head, row, load_tile, load_left, load_count, repeats, slots, BLOCK_M, IN_TURN
                )
                loaded += 1
                to_load -= 1
        taken += 1 - begins
        begins = 1 - begins
    if IN_TURN:
        pass_turn(order_ptr, owed, owed_turn)


@gluon.jit
def _store(desc, place, rows_left, tile, x, PACKED: gl.constexpr):
    """Rows of results through shared memory to memory, by TMA, when the ones before have left."""
    tma.store_wait(0)
    barrier()
    tile.store(x)
    hopper.fence_async_shared()
    barrier()
    if not PACKED:
        tma_store(desc, place, _as_tile(tile))
    elif rows_left > 0:
        tma_store(desc, place, _as_tile(tile))


@gluon.jit
def _pass_over(ds_smem, full, ds_empty, at, zeros, CONSUMER: gl.constexpr):
    """Block number `at`, in which a consumer's keys are seen by none: nothing but zeros for the server."""
    STAGES: gl.constexpr = full.shape[0]
    DS_STAGES: gl.constexpr = ds_smem.shape[0]
    mbarrier.wait(full.index(at % STAGES), (at // STAGES) & 1)
    arrive_named(_EMPTY + at % STAGES, _EVERYONE)
    sync_named(_TURN + CONSUMER, _CONSUMERS)
    arrive_named(_TURN + 1 - CONSUMER, _CONSUMERS)
    stage = at % DS_STAGES
    mbarrier.wait(ds_empty.index(stage), (at // DS_STAGES) & 1 ^ 1)
    ds_smem.index(stage).slice(CONSUMER * 64, 64, 0).store(zeros.to(ds_smem.dtype))
    hopper.fence_async_shared()
    arrive_named(_DS_FULL + stage, _EVERYONE)


# What _consume's loops have within stands in functions: Triton walks twice through a loop, four times where loops nest.


@gluon.jit
def _row_numbers(smem, at, DELTA: gl.constexpr, layout: gl.constexpr):
    """LSE, or delta where DELTA is 1, of block number `at` of queries, along the columns."""
    _, _, q_smem, _, rows_smem, _ = smem
    BLOCK_M: gl.constexpr = q_smem.shape[1]
    rows = rows_smem.index(at % rows_smem.shape[0]).slice(DELTA * BLOCK_M, BLOCK_M)
    return gl.expand_dims(rows.load(gl.SliceLayout(0, layout)), 0)


@gluon.jit
def _ask(keys, b_smem, at, zeros):
    """keys bᵀ, under way, b being q (for the scores; keys are k) or do (for dp; v) of block number `at` of queries."""
    b = b_smem.index(at % b_smem.shape[0])
    return hopper.warpgroup_mma(keys, b.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _weights_of(
    s, lse, low, slopes, number, blocks, is_sequence, k_left, scale, softcap, left, right,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, CAP: gl.constexpr,
):  # fmt: skip
    """p of a block of queries from its scores; and what the softcap's tanh was, with CAP."""
    BLOCK_M: gl.constexpr = s.shape[1]
    s_layout: gl.constexpr = s.type.layout
    row_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    t = s
    if CAP:
        t = tanh(s * (scale / softcap))
        s = t * (softcap * LOG2E)
    else:
        s = s * (scale * LOG2E)
    if slopes is not None:  # of head number // blocks
        slope = gl.load(slopes + number // blocks, mask=is_sequence, other=0.0) * LOG2E
        j = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, s_layout)), 1)
        place = gl.expand_dims(low + gl.arange(0, BLOCK_M, row_layout), 0)
        s -= slope * gl.abs(place - j).to(gl.float32)
    p = gl.exp2(s - lse)
    masked = k_left < 64
    if RIGHT:
        masked = masked | (low + right < 63)
    if LEFT:
        masked = masked | (low + BLOCK_M - 1 - left > 0)
    if masked:
        j = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, s_layout)), 1)
        place = gl.expand_dims(low + gl.arange(0, BLOCK_M, row_layout), 0)
        last = k_left - 1
        if RIGHT:
            last = gl.minimum(place + right, last)
        seen = j <= last
        if LEFT:
            seen = seen & (j >= place - left)
        p = gl.where(seen, p, 0.0)
    return p, t


@gluon.jit
def _hand_over(ds, at, ds_smem, ds_empty, CONSUMER: gl.constexpr):
    """This consumer's ds of block number `at` into shared memory, when the server has done with what was there."""
    stage = at % ds_smem.shape[0]
    mbarrier.wait(ds_empty.index(stage), (at // ds_smem.shape[0]) & 1 ^ 1)
    ds_smem.index(stage).slice(CONSUMER * 64, 64, 0).store(ds)


@gluon.jit
def _add_products(
    dk, dv, p, ds, at, k, zeros, smem, full, ds_empty,
    CONSUMER: gl.constexpr, DS_FIRST: gl.constexpr, NEXT: gl.constexpr,
):  # fmt: skip
    """s, dk and dv, the latter with what block number `at` of queries adds, under way; and ds for the server. DS_FIRST:
    it is stored ahead of the products. NEXT: s is the next block's scores, asked for behind them; else nothing."""
    _, _, q_smem, do_smem, _, ds_smem = smem
    STAGES: gl.constexpr = q_smem.shape[0]
    dtype: gl.constexpr = q_smem.dtype
    p16 = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, dv.type.layout, 2))
    ds = ds.to(dtype)
    ds16 = gl.convert_layout(ds, gl.DotOperandLayout(0, dk.type.layout, 2))
    if NEXT:
        mbarrier.wait(full.index((at + 1) % STAGES), ((at + 1) // STAGES) & 1)
    if DS_FIRST:
        _hand_over(ds, at, ds_smem, ds_empty, CONSUMER)
    sync_named(_TURN + CONSUMER, _CONSUMERS)
    dv = hopper.warpgroup_mma(p16, do_smem.index(at % STAGES), dv, is_async=True)
    dk = hopper.warpgroup_mma(ds16, q_smem.index(at % STAGES), dk, is_async=True)
    s = zeros
    if NEXT:
        s = _ask(k, q_smem, at + 1, zeros)
    if not DS_FIRST:
        _hand_over(ds, at, ds_smem, ds_empty, CONSUMER)
    hopper.fence_async_shared()
    arrive_named(_DS_FULL + at % ds_smem.shape[0], _EVERYONE)
    return s, dk, dv


@gluon.jit
def _consume_block(
    dk, dv, at, after, low, k, v, zeros, slopes, number, blocks, is_sequence, smem, full, ds_empty,
    k_left, scale, softcap, left, right,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, CAP: gl.constexpr, EARLY: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """dk and dv with what block number `at` of queries adds. EARLY: its queries are there, those of number
    `after` are waited for beside the products, LSE is loaded ahead of the scores, the turn passed on behind them."""
    _, _, q_smem, do_smem, _, _ = smem
    STAGES: gl.constexpr = q_smem.shape[0]
    s_layout: gl.constexpr = zeros.type.layout
    if EARLY:
        lse = _row_numbers(smem, at, 0, s_layout)
        keep_order()
    else:
        mbarrier.wait(full.index(at % STAGES), (at // STAGES) & 1)
    s = _ask(k, q_smem, at, zeros)
    dp = _ask(v, do_smem, at, zeros)
    if EARLY:
        arrive_named(_TURN + 1 - CONSUMER, _CONSUMERS)
    s = hopper.warpgroup_mma_wait(1, deps=[s])
    if not EARLY:
        arrive_named(_TURN + 1 - CONSUMER, _CONSUMERS)
        lse = _row_numbers(smem, at, 0, s_layout)
    p, t = _weights_of(
        s, lse, low, slopes, number, blocks, is_sequence, k_left, scale, softcap, left, right, LEFT, RIGHT, CAP
    )
    dp = hopper.warpgroup_mma_wait(0, deps=[dp])
    ds = p * (dp - _row_numbers(smem, at, 1, s_layout))
    if CAP:
        ds *= 1.0 - t * t
    _, dk, dv = _add_products(dk, dv, p, ds, at, k, zeros, smem, full, ds_empty, CONSUMER, False, False)
    if EARLY:
        mbarrier.wait(full.index(after % STAGES), (after // STAGES) & 1)
    dv, dk = hopper.warpgroup_mma_wait(0, deps=[dv, dk])
    arrive_named(_EMPTY + at % STAGES, _EVERYONE)
    return dk, dv


@gluon.jit
def _weigh_ahead(
    s, at, low, v, zeros, slopes, number, blocks, is_sequence, smem, k_left, scale, left, right,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """p, dp and delta of block number `at` of queries, whose scores `s` have been asked for. With RIGHT, whose masks
    need the registers, delta is loaded later, by _products_ahead, and something stands in its place here."""
    _, _, _, do_smem, _, _ = smem
    s_layout: gl.constexpr = zeros.type.layout
    lse = _row_numbers(smem, at, 0, s_layout)  # behind dp's products it would wait for them
    keep_order()
    dp = _ask(v, do_smem, at, zeros)
    arrive_named(_TURN + 1 - CONSUMER, _CONSUMERS)
    s = hopper.warpgroup_mma_wait(1, deps=[s])
    p, _ = _weights_of(
        s, lse, low, slopes, number, blocks, is_sequence, k_left, scale, 0.0, left, right, LEFT, RIGHT, False
    )
    if RIGHT:
        dp = hopper.warpgroup_mma_wait(0, deps=[dp])
        return p, dp, dp
    else:
        delta = _row_numbers(smem, at, 1, s_layout)
        keep_order()
        dp = hopper.warpgroup_mma_wait(0, deps=[dp])
        return p, dp, delta


@gluon.jit
def _products_ahead(
    dk, dv, p, dp, delta, at, k, zeros, smem, full, ds_empty,
    RIGHT: gl.constexpr, CONSUMER: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """dk and dv with what block number `at` of queries adds; unless LAST, the next one's scores are under way."""
    STAGES: gl.constexpr = full.shape[0]
    s_layout: gl.constexpr = zeros.type.layout
    if RIGHT:
        delta = _row_numbers(smem, at, 1, s_layout)
    s, dk, dv = _add_products(dk, dv, p, p * (dp - delta), at, k, zeros, smem, full, ds_empty, CONSUMER, True, not LAST)
    if LAST:
        dv, dk = hopper.warpgroup_mma_wait(0, deps=[dv, dk])
    else:
        dv, dk = hopper.warpgroup_mma_wait(1, deps=[dv, dk])
    arrive_named(_EMPTY + at % STAGES, _EVERYONE)
    return s, dk, dv


@gluon.jit
def _consume(
    dk_ptr, dv_ptr, slopes_ptr, smem, out_smem, tile_smem, bars, batch, keys, kv_heads, repeats,
    stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh, slopes_stride_b,
    scale, softcap, left, right,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, CAP: gl.constexpr, PACKED: gl.constexpr, RAGGED: gl.constexpr,
    D_QK: gl.constexpr, D_V: gl.constexpr, IN_TURN: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """A warpgroup that owns 64 keys of a tile: their dk and dv, from all blocks of queries that see them."""
    k_smem, v_smem, q_smem, _, _, ds_smem = smem
    dk_smem, dv_smem = out_smem
    k_full, v_full, full, ds_empty, tile_full, tile_empty = bars
    STAGES: gl.constexpr = q_smem.shape[0]
    BLOCK_M: gl.constexpr = q_smem.shape[1]
    W_QK: gl.constexpr = k_smem.shape[2]
    W_V: gl.constexpr = v_smem.shape[2]
    dtype: gl.constexpr = k_smem.dtype
    # AHEAD: a block's scores are asked for behind the products of the one before, where there are registers for both.
    # EARLY: as _consume_block says, where it was measured faster: masks, ALiBi and a softcap need the registers. Where
    # tiles add in turn neither was faster
    AHEAD: gl.constexpr = W_QK == 64 and W_V == 64 and not CAP and not IN_TURN
    PLAIN: gl.constexpr = not (LEFT or RIGHT or CAP or RAGGED or IN_TURN) and slopes_ptr is None
    EARLY: gl.constexpr = PLAIN and W_QK == 128 and W_V == 128
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W_QK, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W_V, 16])
    k = k_smem.index(0).slice(CONSUMER * 64, 64, 0)
    v = v_smem.index(0).slice(CONSUMER * 64, 64, 0)
    storage = batch
    if PACKED:
        storage = gl.to_tensor(1)
    if dk_ptr is not None:
        dk_desc = _rows_desc(
            dk_ptr, storage, kv_heads, keys, D_QK, here(stride_dkb), here(stride_dkh), here(stride_dks),
            dk_smem, PACKED,
        )  # fmt: skip
    if dv_ptr is not None:
        dv_desc = _rows_desc(
            dv_ptr, storage, kv_heads, keys, D_V, here(stride_dvb), here(stride_dvh), here(stride_dvs),
            dv_smem, PACKED,
        )  # fmt: skip
    zeros = gl.zeros([64, BLOCK_M], gl.float32, s_layout)
    taken = gl.to_tensor(0)
    done = gl.to_tensor(0)  # blocks
    if CONSUMER == 1:
        arrive_named(_TURN, _CONSUMERS)
    mbarrier.wait(tile_full.index(0), 0)
    kv = told(tile_smem, 0, _KV)
    while kv >= 0:
        slot = taken & 1
        count = told(tile_smem, slot, _COUNT)
        distance = told(tile_smem, slot, _DISTANCE) - CONSUMER * 64
        k_left = told(tile_smem, slot, _K_LEFT) - CONSUMER * 64
        slopes = None
        is_sequence = None
        if slopes_ptr is not None:
            b = told(tile_smem, slot, _B)
            slopes = slopes_ptr + b * slopes_stride_b + kv * repeats
            is_sequence = b < batch
        dk = gl.zeros([64, W_QK], gl.float32, dk_layout)
        dv = gl.zeros([64, W_V], gl.float32, dv_layout)
        mbarrier.wait(k_full.index(slot), (taken >> 1) & 1)
        mbarrier.wait(v_full.index(slot), (taken >> 1) & 1)
        low = distance
        limit = distance + count * BLOCK_M
        heads_left = repeats + 0
        first = gl.to_tensor(0)
        end = repeats * count
        if RIGHT and CONSUMER > 0:
            # the diagonal begins where keys of the other consumer are
            if IN_TURN:
                if (distance + (2 - count) * BLOCK_M - 1 + right < 0) & (count > 1):
                    end -= repeats
            elif (low + BLOCK_M - 1 + right < 0) & (count > 1):
                _pass_over(ds_smem, full, ds_empty, done, zeros, CONSUMER)
                low += BLOCK_M
                first += 1
        at = done + first
        if EARLY:
            mbarrier.wait(full.index(at % STAGES), (at // STAGES) & 1, pred=first < end)
        sync_named(_TURN + CONSUMER, _CONSUMERS)
        if not AHEAD:
            for i in range(first, end):
                number, blocks = i, count
                if IN_TURN:
                    number, blocks = repeats - heads_left, 1
                # the next tile's first block is not waited for: its place may be the one to be given back
                after = done + gl.minimum(i + 1, end - 1)
                dk, dv = _consume_block(
                    dk, dv, done + i, after, low, k, v, zeros, slopes, number, blocks,
                    is_sequence, smem, full, ds_empty, k_left, scale, softcap, left, right,
                    LEFT, RIGHT, CAP, EARLY, CONSUMER,
                )  # fmt: skip
                if IN_TURN:
                    heads_left -= 1
                    low = gl.where(heads_left == 0, low - BLOCK_M, low)
                    heads_left = gl.where(heads_left == 0, repeats, heads_left)
                else:
                    low += BLOCK_M
                    if low == limit:
                        low = told(tile_smem, slot, _DISTANCE) - CONSUMER * 64
        elif first < end:
            mbarrier.wait(full.index(at % STAGES), (at // STAGES) & 1)
            s = _ask(k, q_smem, at, zeros)
            p, dp, delta = _weigh_ahead(
                s, at, low, v, zeros, slopes, first, count, is_sequence, smem, k_left, scale, left, right,
                LEFT, RIGHT, CONSUMER,
            )  # fmt: skip
            for i in range(first + 1, end):
                s, dk, dv = _products_ahead(
                    dk, dv, p, dp, delta, done + i - 1, k, zeros, smem, full, ds_empty, RIGHT, CONSUMER, False
                )
                low += BLOCK_M
                if low == limit:
                    low = told(tile_smem, slot, _DISTANCE) - CONSUMER * 64
                p, dp, delta = _weigh_ahead(
                    s, done + i, low, v, zeros, slopes, i, count, is_sequence, smem, k_left, scale, left, right,
                    LEFT, RIGHT, CONSUMER,
                )  # fmt: skip
            _no_scores, dk, dv = _products_ahead(
                dk, dv, p, dp, delta, done + end - 1, k, zeros, smem, full, ds_empty, RIGHT, CONSUMER, True
            )
        arrive_named(_TURN + 1 - CONSUMER, _CONSUMERS)
        if RIGHT and CONSUMER > 0 and IN_TURN:
            for i in range(end, repeats * count):
                _pass_over(ds_smem, full, ds_empty, done + i, zeros, CONSUMER)
        done += repeats * count
        # what the loop need not keep is read again
        b = gl.to_tensor(0)
        if not PACKED:
            b = told(tile_smem, slot, _B)
        place = [
            b, told(tile_smem, slot, _KV), told(tile_smem, slot, _DK_END),
            told(tile_smem, slot, _DK_ROW) + CONSUMER * 64, 0,
        ]  # fmt: skip
        if RAGGED:  # of rows behind a sequence, by gradients that are not finite
            k_left = told(tile_smem, slot, _K_LEFT) - CONSUMER * 64
            dv = gl.where(gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, dv_layout)) < k_left, 1), dv, 0.0)
            dk = gl.where(gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, dk_layout)) < k_left, 1), dk, 0.0)
        rows_left = told(tile_smem, slot, _DK_LEFT) - CONSUMER * 64
        mbarrier.arrive(tile_empty.index(slot), count=1)
        if dv_ptr is not None:
            _store(dv_desc, place, rows_left, dv_smem.index(CONSUMER), dv.to(dtype), PACKED)
        if dk_ptr is not None:
            _store(dk_desc, place, rows_left, dk_smem.index(CONSUMER), (dk * scale).to(dtype), PACKED)
        taken += 1
        mbarrier.wait(tile_full.index(taken & 1), (taken >> 1) & 1)
        kv = told(tile_smem, taken & 1, _KV)
    tma.store_wait(0)


@gluon_kernel(archs=(90,))
def _hopper_attention_bwd_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, sum_ptr, order_ptr, dk_ptr, dv_ptr, rows_ptr, counter_ptr, slopes_ptr,
    q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr,
    batch, queries, keys, kv_heads, repeats, blocks, group, slots, tiles, rows_size,
    stride_qb, stride_qs, stride_qr, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_dob, stride_dos, stride_dor, stride_dkb, stride_dks, stride_dkh,
    stride_dvb, stride_dvs, stride_dvh, slopes_stride_b, scale, softcap, left, right,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, CAP: gl.constexpr,
    D_QK: gl.constexpr, D_V: gl.constexpr, W_QK: gl.constexpr, W_V: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, DS_STAGES: gl.constexpr, PART: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = 128
    gl.static_assert(2 <= STAGES and STAGES <= 4 and DS_STAGES <= 2)  # the barriers by number that there are
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    PACKED: gl.constexpr = q_starts_ptr is not None
    RAGGED: gl.constexpr = PACKED or k_used_ptr is not None
    # int64 where a stride needs it
    queries, keys, kv_heads, repeats = int32(queries), int32(keys), int32(kv_heads), int32(repeats)
    blocks, group, slots, tiles = int32(blocks), int32(group), int32(slots), int32(tiles)
    batch, left, right, rows_size = int32(batch), int32(left), int32(right), int32(rows_size)
    k_smem = stages(dtype, 1, BLOCK_N, W_QK)
    v_smem = stages(dtype, 1, BLOCK_N, W_V)
    q_smem = stages(dtype, STAGES, BLOCK_M, W_QK)
    do_smem = stages(dtype, STAGES, BLOCK_M, W_V)
    ds_smem = stages(dtype, DS_STAGES, BLOCK_N, BLOCK_M)
    # a consumer's dv leaves through shared memory, then its dk through the same
    dk_smem = stages(dtype, 2, 64, W_QK)
    dv_smem = dk_smem
    if W_V != W_QK:
        dv_smem = stages(dtype, 2, 64, W_V)
    rows_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * BLOCK_M], gl.NVMMASharedLayout(0, 32, 1))
    tile_smem = gl.allocate_shared_memory(gl.int32, [2 * _FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_full = rings(2, 1)
    v_full = rings(2, 1)
    full = rings(STAGES, 1)
    ds_empty = rings(DS_STAGES, 1)
    tile_full = rings(2, 1)
    tile_empty = rings(2, 2)
    hopper.fence_async_shared()

    smem = (k_smem, v_smem, q_smem, do_smem, rows_smem, ds_smem)
    out_smem = (dk_smem, dv_smem)
    bars = (k_full, v_full, full, ds_empty, tile_full, tile_empty)
    gl.warp_specialize([
        (_serve, (
            q_ptr, k_ptr, v_ptr, do_ptr, sum_ptr, order_ptr, rows_ptr, counter_ptr,
            q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr, smem, tile_smem, bars,
            batch, queries, keys, kv_heads, repeats, blocks, group, slots, tiles, rows_size,
            stride_qb, stride_qs, stride_qr, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
            stride_dob, stride_dos, stride_dor, left, right, LEFT, RIGHT, BOTTOM_RIGHT, D_QK, D_V, PART,
        )),
        (_consume, (
            dk_ptr, dv_ptr, slopes_ptr, smem, out_smem, tile_smem, bars, batch, keys, kv_heads, repeats,
            stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh, slopes_stride_b,
            scale, softcap, left, right, LEFT, RIGHT, CAP, PACKED, RAGGED, D_QK, D_V,
            order_ptr is not None, 0,
        )),
        (_consume, (
            dk_ptr, dv_ptr, slopes_ptr, smem, out_smem, tile_smem, bars, batch, keys, kv_heads, repeats,
            stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh, slopes_stride_b,
            scale, softcap, left, right, LEFT, RIGHT, CAP, PACKED, RAGGED, D_QK, D_V,
            order_ptr is not None, 1,
        )),
    ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip
