"""The consumers of the Hopper backward: two warpgroups, each with 64 keys of a tile; docs/hopper.md explains it.

A consumer holds dk and dv of its keys in registers and runs over the blocks of queries that see them, keys along the
rows. Three ways: as _consume_block does, its EARLY form, and AHEAD, one block's scores behind the other's products.
"""

from typing import Any, NamedTuple

from powertrain.ops.attention.hopper.pieces import (
    as_operands,
    first_keys,
    multiply,
    no_sums,
    own_keys,
    scaled,
    wait_for_sums,
)
from powertrain.ops.attention.hopper.primitives import (
    BAR_DS_FULL,
    BAR_EMPTY,
    BAR_TURN,
    CONSUMERS,
    EVERYONE,
    LOG2E,
    TILE_B,
    TILE_COUNT,
    TILE_DISTANCE,
    TILE_DK_END,
    TILE_DK_LEFT,
    TILE_DK_ROW,
    TILE_K_LEFT,
    TILE_KV,
    TILE_OUT,
    add_in_order,
    as_tile,
    keep_order,
    read_tile_field,
    store_in_order,
    tanh,
)
from powertrain.ops.attention.hopper.softmax import zero_outside
from powertrain.ops.early_start import await_kernel_before
from powertrain.runtime.gluon_compat import (
    barrier,
    gl,
    gluon,
    hopper,
    mbarrier,
    named_barrier_arrive,
    named_barrier_sync,
    tma,
    tma_store,
)


@gluon.jit
def _store(desc, place, rows_left, smem, x, PACKED: gl.constexpr, CONSUMER: gl.constexpr):
    """Rows of results through shared memory to memory, by TMA, when the ones before have left."""
    tma.store_wait(0)
    barrier()
    for i in gl.static_range(len(smem)):
        smem[i].index(CONSUMER).store(x[i].to(smem[i].dtype))  # [64, PIECE]
    # TMA and wgmma read shared memory by another path than ordinary stores
    hopper.fence_async_shared()
    barrier()
    if not PACKED:
        _send(desc, place, smem, CONSUMER)
    elif rows_left > 0:
        _send(desc, place, smem, CONSUMER)


@gluon.jit
def _send(desc, place, smem, CONSUMER: gl.constexpr):
    b, kv, end, row = place
    for i in gl.static_range(len(smem)):
        tma_store(desc[i], [b, kv, end, row, i * smem[0].shape[2]], as_tile(smem[i].index(CONSUMER)))


@gluon.jit
def _leave_sums(ptr, tile, x, ADD: gl.constexpr, CONSUMER: gl.constexpr):
    """Add a consumer's sums to those of tile number `tile`, in float32, or store them there."""
    W: gl.constexpr = x[0].shape[1] + (x[1].shape[1] if len(x) > 1 else 0)
    base = ptr + (tile * 2 + CONSUMER).to(gl.int64) * (64 * W)
    for i in gl.static_range(len(x)):
        if ADD:
            add_in_order(base + i * (64 * x[0].shape[1]), x[i])
        else:
            store_in_order(base + i * (64 * x[0].shape[1]), x[i])


@gluon.jit
def _pass_over(ds_smem, full, ds_empty, at, zeros, CONSUMER: gl.constexpr):
    """Block number `at`, in which none of a consumer's keys is seen, or there are none: zeros for the producer."""
    STAGES: gl.constexpr = full.shape[0]
    DS_STAGES: gl.constexpr = ds_smem.shape[0]
    mbarrier.wait(full.index(at % STAGES), (at // STAGES) & 1)
    # an arrival does not wait: the producer meets both consumers there
    named_barrier_arrive(BAR_EMPTY + at % STAGES, EVERYONE)
    # consumers issue products by turns, so that one's exponentials run beside the other's products
    named_barrier_sync(BAR_TURN + CONSUMER, CONSUMERS)
    named_barrier_arrive(BAR_TURN + 1 - CONSUMER, CONSUMERS)
    stage = at % DS_STAGES
    mbarrier.wait(ds_empty.index(stage), (at // DS_STAGES) & 1 ^ 1)
    ds_smem.index(stage).slice(CONSUMER * 64, 64, 0).store(zeros.to(ds_smem.dtype))
    hopper.fence_async_shared()
    named_barrier_arrive(BAR_DS_FULL + stage, EVERYONE)


# The bodies of consume's loops are functions: Triton compiles a loop's body twice, four times where loops nest.


@gluon.jit
def _row_numbers(smem, at, DELTA: gl.constexpr, layout: gl.constexpr):
    """LSE, or delta where DELTA is 1, of block number `at` of queries, along the columns."""
    _, _, q_smem, _, rows_smem, _ = smem
    BLOCK_M: gl.constexpr = q_smem[0].shape[1]
    rows = rows_smem.index(at % rows_smem.shape[0]).slice(DELTA * BLOCK_M, BLOCK_M)
    return gl.expand_dims(rows.load(gl.SliceLayout(0, layout)), 0)


@gluon.jit
def _ask(keys, b_smem, at, zeros):
    """keys bᵀ, asynchronously, b being q (for the scores; keys are k) or do (for dp; v) of block number `at` of
    queries."""
    STAGES: gl.constexpr = b_smem[0].shape[0]
    b = b_smem[0].index(at % STAGES)
    s = hopper.warpgroup_mma(keys[0], b.permute((1, 0)), zeros, use_acc=False, is_async=True)  # [64, BLOCK_M]
    for i in gl.static_range(1, len(keys)):
        b = b_smem[i].index(at % STAGES)
        s = hopper.warpgroup_mma(keys[i], b.permute((1, 0)), s, is_async=True)  # [64, BLOCK_M]
    return s


@gluon.jit
def _weights_of(
    s, lse, low, slopes, number, blocks, is_sequence, k_left, mods, CONFIG: gl.constexpr
):  # fmt: skip
    """p of a block of queries from its scores; and the softcap's tanh, if there is one."""
    BLOCK_M: gl.constexpr = s.shape[1]
    s_layout: gl.constexpr = s.type.layout
    row_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    t = s
    left, right = mods.window.left, mods.window.right
    if CONFIG.has_softcap:
        t = tanh(s * (mods.scale / mods.softcap))
        s = t * (mods.softcap * LOG2E)
    else:
        s = s * (mods.scale * LOG2E)
    # block `number` of a tile's queries is of head number // blocks
    if slopes is not None:
        slope = gl.load(slopes + number // blocks, mask=is_sequence, other=0.0) * LOG2E
        j = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, s_layout)), 1)
        place = gl.expand_dims(low + gl.arange(0, BLOCK_M, row_layout), 0)
        s -= slope * gl.abs(place - j).to(gl.float32)
    # rows past the sequence have an LSE of +inf, so their p is 0 without a mask
    p = gl.exp2(s - lse)
    # most blocks are fully visible: the comparison of all scores is skipped for them
    masked = k_left < 64
    if CONFIG.has_right:
        masked = masked | (low + right < 63)
    if CONFIG.has_left:
        masked = masked | (low + BLOCK_M - 1 - left > 0)
    if masked:
        key = gl.arange(0, 64, gl.SliceLayout(1, s_layout))
        if CONFIG.has_left:  # with two bounds the compiler's masks cost 20 loads from the stack a block
            first = key * 0
            if CONFIG.has_right:
                first = key - right - low
            p = zero_outside(p, first, gl.where(key < k_left, key + left - low, -1))
        else:
            last = k_left - 1
            if CONFIG.has_right:
                last = gl.minimum(gl.expand_dims(low + gl.arange(0, BLOCK_M, row_layout), 0) + right, last)
            p = gl.where(gl.expand_dims(key, 1) <= last, p, 0.0)
    return p, t


@gluon.jit
def _hand_over(ds, at, ds_smem, ds_empty, CONSUMER: gl.constexpr):
    """This consumer's ds of block number `at` into shared memory, when the producer has read the ds before it."""
    stage = at % ds_smem.shape[0]
    # the producer has multiplied the ds that lies there
    mbarrier.wait(ds_empty.index(stage), (at // ds_smem.shape[0]) & 1 ^ 1)
    ds_smem.index(stage).slice(CONSUMER * 64, 64, 0).store(ds)  # [64, BLOCK_M]


@gluon.jit
def _add_products(
    dk, dv, p, ds, at, k, zeros, smem, full, ds_empty,
    CONSUMER: gl.constexpr, DS_FIRST: gl.constexpr, NEXT: gl.constexpr,
):  # fmt: skip
    """Issue the products that add block number `at` of queries to dk and dv, and store ds for the producer. Returns s,
    dk, dv, still pending. DS_FIRST: ds is stored before the products are issued. NEXT: s is the next block's scores,
    issued after them; otherwise s is unused."""
    q_smem, do_smem, ds_smem = smem.q, smem.do, smem.ds
    STAGES: gl.constexpr = q_smem[0].shape[0]
    dtype: gl.constexpr = q_smem[0].dtype
    # only the rounding
    p16 = as_operands(p.to(dtype), dv)
    ds = ds.to(dtype)
    ds16 = as_operands(ds, dk)
    if NEXT:
        mbarrier.wait(full.index((at + 1) % STAGES), ((at + 1) // STAGES) & 1)
    # a store before the barrier: ptxas had moved the computation of ds behind it, while the other consumer waited
    if DS_FIRST:
        _hand_over(ds, at, ds_smem, ds_empty, CONSUMER)
    named_barrier_sync(BAR_TURN + CONSUMER, CONSUMERS)
    dv = multiply(p16, do_smem, at, dv)
    dk = multiply(ds16, q_smem, at, dk)
    s = zeros
    if NEXT:
        s = _ask(k, q_smem, at + 1, zeros)
    if not DS_FIRST:
        _hand_over(ds, at, ds_smem, ds_empty, CONSUMER)
    hopper.fence_async_shared()
    named_barrier_arrive(BAR_DS_FULL + at % ds_smem.shape[0], EVERYONE)
    return s, dk, dv


@gluon.jit
def _consume_block(
    dk, dv, at, after, low, k, v, zeros, slopes, number, blocks, is_sequence, smem, full, ds_empty,
    k_left, mods, CONFIG: gl.constexpr, EARLY: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """dk and dv with the contribution of block number `at` of queries. EARLY: its queries are there, those of number
    `after` are waited for beside the products, LSE is loaded ahead of the scores, and the other consumer may issue its
    products as soon as these are issued."""
    q_smem, do_smem = smem.q, smem.do
    STAGES: gl.constexpr = q_smem[0].shape[0]
    s_layout: gl.constexpr = zeros.type.layout
    if EARLY:
        lse = _row_numbers(smem, at, 0, s_layout)
        keep_order()
    else:
        mbarrier.wait(full.index(at % STAGES), (at // STAGES) & 1)
    # keys along the rows: p and ds are then left operands of dv += p do and dk += ds q as they are
    s = _ask(k, q_smem, at, zeros)  # [64, BLOCK_M]: keys along the rows
    dp = _ask(v, do_smem, at, zeros)  # [64, BLOCK_M]
    if EARLY:
        named_barrier_arrive(BAR_TURN + 1 - CONSUMER, CONSUMERS)
    s = hopper.warpgroup_mma_wait(len(v), deps=[s])
    if not EARLY:
        named_barrier_arrive(BAR_TURN + 1 - CONSUMER, CONSUMERS)
        lse = _row_numbers(smem, at, 0, s_layout)
    p, t = _weights_of(s, lse, low, slopes, number, blocks, is_sequence, k_left, mods, CONFIG)
    dp = hopper.warpgroup_mma_wait(0, deps=[dp])
    ds = p * (dp - _row_numbers(smem, at, 1, s_layout))
    if CONFIG.has_softcap:
        ds *= 1.0 - t * t
    _, dk, dv = _add_products(dk, dv, p, ds, at, k, zeros, smem, full, ds_empty, CONSUMER, False, False)
    if EARLY:
        mbarrier.wait(full.index(after % STAGES), (after // STAGES) & 1)
    dk, dv = wait_for_sums(dk, dv, 0)
    named_barrier_arrive(BAR_EMPTY + at % STAGES, EVERYONE)
    return dk, dv


@gluon.jit
def _weigh_ahead(
    s, at, low, v, zeros, slopes, number, blocks, is_sequence, smem, k_left, mods,
    CONFIG: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """p, dp and delta of block number `at` of queries, whose scores `s` are pending. With a bound to the right, whose
    masks need the registers, `_products_ahead` loads delta later, and dp stands in its place here."""
    do_smem = smem.do
    s_layout: gl.constexpr = zeros.type.layout
    # loads and products of a warp go through one queue: behind dp's products the load would wait for the tensor cores
    lse = _row_numbers(smem, at, 0, s_layout)
    keep_order()
    dp = _ask(v, do_smem, at, zeros)  # [64, BLOCK_M]
    named_barrier_arrive(BAR_TURN + 1 - CONSUMER, CONSUMERS)
    s = hopper.warpgroup_mma_wait(len(v), deps=[s])
    p, _ = _weights_of(s, lse, low, slopes, number, blocks, is_sequence, k_left, mods, CONFIG)
    if CONFIG.has_right:
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
    """dk and dv with the contribution of block number `at`; unless LAST, the next one's scores are pending."""
    STAGES: gl.constexpr = full.shape[0]
    s_layout: gl.constexpr = zeros.type.layout
    if RIGHT:
        delta = _row_numbers(smem, at, 1, s_layout)
    s, dk, dv = _add_products(dk, dv, p, p * (dp - delta), at, k, zeros, smem, full, ds_empty, CONSUMER, True, not LAST)
    if LAST:
        dk, dv = wait_for_sums(dk, dv, 0)
    else:
        dk, dv = wait_for_sums(dk, dv, len(k))
    named_barrier_arrive(BAR_EMPTY + at % STAGES, EVERYONE)
    return s, dk, dv


class _Tile(NamedTuple):
    """A consumer's part of a tile of keys."""

    slot: Any  # of its descriptor
    count: Any  # blocks of queries of each head
    low: Any  # position of the first query to come less that of the first key
    limit: Any  # that of the query behind a head's last
    k_left: Any  # keys of the sequence from the first one on
    slopes: Any  # pointer to the slope of the first head, or None
    is_sequence: Any  # mask of its loads


@gluon.jit
def _first_distance(tile_smem, slot, CONSUMER: gl.constexpr):
    """Position of the first query less that of a consumer's first key: read anew, which keeps a register free."""
    return read_tile_field(tile_smem, slot, TILE_DISTANCE) - CONSUMER * 64


@gluon.jit
def _add_blocks(
    dk, dv, first, end, done, tile, k, v, zeros, num_q_per_kv, smem, tile_smem, bars, mods,
    CONFIG: gl.constexpr, EARLY: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """dk and dv with the contributions of blocks `first` to `end` of a tile, one after the other; `done`: blocks of the
    tiles before."""
    BLOCK_M: gl.constexpr = smem.q[0].shape[1]
    count, low = tile.count, tile.low
    heads_left = num_q_per_kv + 0
    for i in range(first, end):
        number, blocks = i, count
        if CONFIG.deterministic:
            number, blocks = num_q_per_kv - heads_left, 1
        # the next tile's first block is not waited for: its place may be the one to be given back
        after = done + gl.minimum(i + 1, end - 1)
        dk, dv = _consume_block(
            dk, dv, done + i, after, low, k, v, zeros, tile.slopes, number, blocks, tile.is_sequence, smem,
            bars.block_full, bars.ds_empty, tile.k_left, mods, CONFIG, EARLY, CONSUMER,
        )  # fmt: skip
        if CONFIG.deterministic:
            heads_left -= 1
            low = gl.where(heads_left == 0, low - BLOCK_M, low)
            heads_left = gl.where(heads_left == 0, num_q_per_kv, heads_left)
        else:
            low += BLOCK_M
            if low == tile.limit:
                low = _first_distance(tile_smem, tile.slot, CONSUMER)
    return dk, dv


@gluon.jit
def _add_blocks_ahead(
    dk, dv, first, end, done, tile, k, v, zeros, smem, tile_smem, bars, mods,
    CONFIG: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """The same, a block's scores asked for behind the products of the one before."""
    STAGES: gl.constexpr = smem.q[0].shape[0]
    BLOCK_M: gl.constexpr = smem.q[0].shape[1]
    RIGHT: gl.constexpr = CONFIG.has_right
    full, ds_empty = bars.block_full, bars.ds_empty
    count, low = tile.count, tile.low
    at = done + first
    if first < end:
        mbarrier.wait(full.index(at % STAGES), (at // STAGES) & 1)
        s = _ask(k, smem.q, at, zeros)  # [64, BLOCK_M]: keys along the rows
        p, dp, delta = _weigh_ahead(
            s, at, low, v, zeros, tile.slopes, first, count, tile.is_sequence, smem, tile.k_left, mods,
            CONFIG, CONSUMER,
        )  # fmt: skip
        # no wgmma may be pending where a loop goes back to its beginning, or ptxas waits after each: so the
        # loop begins at the results of the exponentials
        for i in range(first + 1, end):
            s, dk, dv = _products_ahead(
                dk, dv, p, dp, delta, done + i - 1, k, zeros, smem, full, ds_empty, RIGHT, CONSUMER, False
            )
            low += BLOCK_M
            if low == tile.limit:
                low = _first_distance(tile_smem, tile.slot, CONSUMER)
            p, dp, delta = _weigh_ahead(
                s, done + i, low, v, zeros, tile.slopes, i, count, tile.is_sequence, smem, tile.k_left, mods,
                CONFIG, CONSUMER,
            )  # fmt: skip
        _no_scores, dk, dv = _products_ahead(
            dk, dv, p, dp, delta, done + end - 1, k, zeros, smem, full, ds_empty, RIGHT, CONSUMER, True
        )
    return dk, dv


@gluon.jit
def _leave(
    dk, dv, grads, out_smem, tile_smem, slot, tile_empty, scale, CONFIG: gl.constexpr, CONSUMER: gl.constexpr
):  # fmt: skip
    """Store a tile's dk and dv, or add them to the sums; give its descriptor back."""
    PACKED: gl.constexpr = CONFIG.packed
    dk_smem, dv_smem = out_smem
    # reload from shared memory to keep registers free in the loop
    b = gl.to_tensor(0)
    if not PACKED:
        b = read_tile_field(tile_smem, slot, TILE_B)
    place = [
        b, read_tile_field(tile_smem, slot, TILE_KV), read_tile_field(tile_smem, slot, TILE_DK_END),
        read_tile_field(tile_smem, slot, TILE_DK_ROW) + CONSUMER * 64,
    ]  # fmt: skip
    # of rows behind a sequence, by gradients that are not finite
    if CONFIG.ragged_k:
        k_left = read_tile_field(tile_smem, slot, TILE_K_LEFT) - CONSUMER * 64
        dv = first_keys(dv, k_left)
        dk = first_keys(dk, k_left)
    rows_left = read_tile_field(tile_smem, slot, TILE_DK_LEFT) - CONSUMER * 64
    if CONFIG.splits_heads:
        out_tile = read_tile_field(tile_smem, slot, TILE_OUT)
    mbarrier.arrive(tile_empty.index(slot), count=1)
    if CONFIG.splits_heads:
        if grads.dv is not None:
            _leave_sums(grads.dv, out_tile, dv, not CONFIG.deterministic, CONSUMER)
        if grads.dk is not None:
            _leave_sums(grads.dk, out_tile, dk, not CONFIG.deterministic, CONSUMER)
    if grads.dv is not None and not CONFIG.splits_heads:
        _store(grads.dv, place, rows_left, dv_smem, dv, PACKED, CONSUMER)
    if grads.dk is not None and not CONFIG.splits_heads:
        _store(grads.dk, place, rows_left, dk_smem, scaled(dk, scale), PACKED, CONSUMER)


@gluon.jit
def consume(
    grads, smem, out_smem, tile_smem, bars, sizes, slopes_stride, mods, CONFIG: gl.constexpr, CONSUMER: gl.constexpr
):  # fmt: skip
    """A warpgroup that owns 64 keys of a tile: their dk and dv, from all blocks of queries that see them."""
    await_kernel_before(CONFIG.starts_early)
    k_smem, v_smem, q_smem, ds_smem = smem.k, smem.v, smem.q, smem.ds
    batch, num_q_per_kv = sizes
    right = mods.window.right
    LEFT: gl.constexpr = CONFIG.has_left
    RIGHT: gl.constexpr = CONFIG.has_right
    CAP: gl.constexpr = CONFIG.has_softcap
    RAGGED: gl.constexpr = CONFIG.ragged_k
    DETERMINISTIC: gl.constexpr = CONFIG.deterministic
    k_full, v_full, full, ds_empty = bars.k_full, bars.v_full, bars.block_full, bars.ds_empty
    tile_full, tile_empty = bars.tile_full, bars.tile_empty
    STAGES: gl.constexpr = q_smem[0].shape[0]
    BLOCK_M: gl.constexpr = q_smem[0].shape[1]
    # AHEAD: a block's scores are asked for behind the products of the one before, where there are registers for both.
    # EARLY: as _consume_block says, where it was measured faster: masks, ALiBi and a softcap need the registers. With
    # the fixed order of dq_order.py neither was faster
    AHEAD: gl.constexpr = CONFIG.ahead and not CAP and not DETERMINISTIC
    PLAIN: gl.constexpr = not (LEFT or RIGHT or CAP or RAGGED or DETERMINISTIC) and grads.slopes is None
    EARLY: gl.constexpr = CONFIG.early and PLAIN
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    k, v = own_keys(k_smem, CONSUMER), own_keys(v_smem, CONSUMER)
    # the type of accumulators; use_acc=False never reads them
    zeros = gl.zeros([64, BLOCK_M], gl.float32, s_layout)
    taken = gl.to_tensor(0)
    # blocks so far
    done = gl.to_tensor(0)
    if CONSUMER == 1:
        named_barrier_arrive(BAR_TURN, CONSUMERS)
    mbarrier.wait(tile_full.index(0), 0)
    kv = read_tile_field(tile_smem, 0, TILE_KV)
    while kv >= 0:
        slot = taken & 1
        count = read_tile_field(tile_smem, slot, TILE_COUNT)
        distance = read_tile_field(tile_smem, slot, TILE_DISTANCE) - CONSUMER * 64
        k_left = read_tile_field(tile_smem, slot, TILE_K_LEFT) - CONSUMER * 64
        slopes = None
        is_sequence = None
        if grads.slopes is not None:
            b = read_tile_field(tile_smem, slot, TILE_B)
            slopes = grads.slopes + b * slopes_stride + kv * num_q_per_kv
            is_sequence = b < batch
        dk, dv = no_sums(k_smem), no_sums(v_smem)
        # two barriers, used by every other tile each: a barrier that only some tiles use could be two phases ahead
        mbarrier.wait(k_full.index(slot), (taken >> 1) & 1)
        mbarrier.wait(v_full.index(slot), (taken >> 1) & 1)
        low = distance
        limit = distance + count * BLOCK_M
        first = gl.to_tensor(0)
        # all query heads of a KV head: dk and dv need no additions across tiles
        end = num_q_per_kv * count
        if CONSUMER > 0:
            unseen = gl.to_tensor(0)
            if RIGHT and DETERMINISTIC:
                # the diagonal begins where keys of the other consumer are
                if (distance + (2 - count) * BLOCK_M - 1 + right < 0) & (count > 1):
                    end -= num_q_per_kv
            elif RIGHT:
                # of a tile's first 64 queries under a causal mask this consumer's keys see nothing
                unseen = ((low + BLOCK_M - 1 + right < 0) & (count > 1)).to(gl.int32)
            # a sequence's last tile may have no keys of this consumer: its share of the tensor cores is the other's
            if DETERMINISTIC:
                end = gl.where(k_left > 0, end, 0)
            else:
                unseen = gl.where(k_left > 0, unseen, end)
                for i in range(unseen):
                    _pass_over(ds_smem, full, ds_empty, done + i, zeros, CONSUMER)
                low += unseen * BLOCK_M
                first += unseen
        at = done + first
        if EARLY:
            mbarrier.wait(full.index(at % STAGES), (at // STAGES) & 1, pred=first < end)
        named_barrier_sync(BAR_TURN + CONSUMER, CONSUMERS)
        tile = _Tile(slot, count, low, limit, k_left, slopes, is_sequence)
        if AHEAD:
            dk, dv = _add_blocks_ahead(
                dk, dv, first, end, done, tile, k, v, zeros, smem, tile_smem, bars, mods, CONFIG, CONSUMER
            )
        else:
            dk, dv = _add_blocks(
                dk, dv, first, end, done, tile, k, v, zeros, num_q_per_kv, smem, tile_smem, bars, mods,
                CONFIG, EARLY, CONSUMER,
            )  # fmt: skip
        named_barrier_arrive(BAR_TURN + 1 - CONSUMER, CONSUMERS)
        if CONSUMER > 0 and DETERMINISTIC:
            for i in range(end, num_q_per_kv * count):
                _pass_over(ds_smem, full, ds_empty, done + i, zeros, CONSUMER)
        done += num_q_per_kv * count
        _leave(dk, dv, grads, out_smem, tile_smem, slot, tile_empty, mods.scale, CONFIG, CONSUMER)
        taken += 1
        mbarrier.wait(tile_full.index(taken & 1), (taken >> 1) & 1)
        kv = read_tile_field(tile_smem, taken & 1, TILE_KV)
    tma.store_wait(0)
