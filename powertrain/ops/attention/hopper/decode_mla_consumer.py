"""A consumer of the Hopper decoding kernel for MLA: every other block's scores, half of the columns."""

from typing import Any, NamedTuple

from powertrain.ops.attention.hopper.decode_mla_tiles import (
    BLOCK_N,
    HALF,
    HALVES_FREE,
    QUERIES_FREE,
    ROWS,
    SUMS_FULL,
    TILE_ALONE,
    TILE_B,
    TILE_BEGIN,
    TILE_BLOCKS,
    TILE_FIRST,
    TILE_LAST,
    TILE_LENGTH,
    TILE_PARTIAL,
    TILE_QUERIES,
    TILE_ROW,
    WEIGHTS_FULL,
)
from powertrain.ops.attention.hopper.forward_tiles import clear_behind, give_back, phase_parity
from powertrain.ops.attention.hopper.primitives import LN2, LOG2E, MINUS_INF, read_tile_field
from powertrain.ops.attention.hopper.softmax import apply_mask, by_row, partial_row_sums, rescale_o, softmax
from powertrain.ops.early_start import await_kernel_before
from powertrain.runtime.gluon_compat import (
    await_phase,
    barrier,
    gl,
    gluon,
    hopper,
    kept,
    mbarrier,
    named_barrier_arrive,
    named_barrier_sync,
    named_barrier_sync_divergent,
)


@gluon.jit
def _await(part: gl.constexpr, stage: gl.constexpr, used, sync, CONFIG: gl.constexpr):
    """Wait for a part of the keys of a stage that held `used` blocks before, each warp for itself: Triton's wait is a
    barrier of all four."""
    await_phase(sync.full_at + 8 * (4 * stage + part), used & 1)
    if CONFIG.loader_warps > 1:
        # wgmma reads by another path to shared memory than the loader's copies took
        hopper.fence_async_shared()


@gluon.jit
def _half_of_scores(
    s, half: gl.constexpr, used, buffers, sync, zero, CONFIG: gl.constexpr, CONSUMER: gl.constexpr
):  # fmt: skip
    """`s` and the product over 256 columns, once they are there."""
    _await(half, CONSUMER, used, sync, CONFIG)
    k = buffers.k.index(zero + (2 * CONSUMER + half)).permute((1, 0))
    # zeros are never read, they only give the accumulators their layout
    return hopper.warpgroup_mma(buffers.q.index(zero + half), k, s, use_acc=half != CONSUMER, is_async=True)


@gluon.jit
def _scores(used, buffers, sync, CONFIG: gl.constexpr, CONSUMER: gl.constexpr):
    """q kᵀ of a block of this consumer's, whose stage held `used` others before: [64, 64]."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    s = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
    # hidden from the optimizer: addresses that are the same for all blocks would be kept in registers
    zero = kept(gl.to_tensor(0))
    s = _half_of_scores(s, CONSUMER, used, buffers, sync, zero, CONFIG, CONSUMER)
    _await(2, CONSUMER, used, sync, CONFIG)
    s = hopper.warpgroup_mma(
        buffers.q_tail.index(zero), buffers.k_tail.index(zero + CONSUMER).permute((1, 0)), s, is_async=True
    )
    s = _half_of_scores(s, 1 - CONSUMER, used, buffers, sync, zero, CONFIG, CONSUMER)
    return hopper.warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def _clear(start, last, v):
    """Zeros in the rows of this consumer's half of a block behind the keys that are seen: they may hold NaN, and 0
    times NaN is NaN."""
    if start + BLOCK_N > last:
        clear_behind(v, gl.maximum(last - start, 0))
        # wgmma of any warp reads the stores of all, by another path to shared memory
        hopper.fence_async_shared()
        barrier()


@gluon.jit
def _follow(o, m, l, buffers, factor, CONSUMER: gl.constexpr):  # noqa: E741
    """The other consumer's last block: its weights are in shared memory when this returns, and `m`, `l` and `o` are
    relative to its maximum."""
    named_barrier_sync(WEIGHTS_FULL + 1 - CONSUMER, 256)
    m_new = buffers.m.index(1 - CONSUMER).load(m.type.layout)  # [64]
    # nothing seen so far: 2^-inf is 0, not NaN
    alpha = gl.exp2(m * factor - gl.where(m_new == MINUS_INF, 0.0, m_new * factor))
    of_l = gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))
    return rescale_o(o, by_row(alpha, o)), m_new, l * gl.expand_dims(of_l, 1)


@gluon.jit
def _others_values(n, part, buffers, sync, CONFIG: gl.constexpr, CONSUMER: gl.constexpr):
    """This consumer's half of the other's block n, once it is there."""
    STAGE: gl.constexpr = 1 - CONSUMER
    # the other has waited for it too, but what TMA wrote is visible to who waits
    _await(CONSUMER, STAGE, part.used[STAGE] + (n >> 1), sync, CONFIG)
    v = buffers.k.index(2 * STAGE + CONSUMER)
    _clear((part.begin + n) * BLOCK_N, part.last, v)
    return v


@gluon.jit
def _give_back_others(CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    give_back(HALVES_FREE, 2 * (1 - CONSUMER) + CONSUMER, 1, CONFIG.loader_warps)


@gluon.jit
def _add_others(n, o, m, l, part, buffers, sync, factor, CONFIG: gl.constexpr, CONSUMER: gl.constexpr):  # noqa: E741
    """The other's block n, with nothing beside it."""
    o, m, l = _follow(o, m, l, buffers, factor, CONSUMER)  # noqa: E741
    v = _others_values(n, part, buffers, sync, CONFIG, CONSUMER)
    o = hopper.warpgroup_mma_wait(0, deps=[hopper.warpgroup_mma(buffers.p.index(0), v, o, is_async=True)])
    _give_back_others(CONSUMER, CONFIG)
    return o, m, l


@gluon.jit
def _step(
    o, m, l, n, positions, part, buffers, sync, right, factor,  # noqa: E741
    CONFIG: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """The n-th block, which is this consumer's: its scores, its own values. Consumer 1 adds the other's block before it
    beside its exponentials; consumer 0 the other's block behind it, before its next scores, so that all of that
    block is free for another while it waits for those."""
    start = (part.begin + n) * BLOCK_N
    s = _scores(part.used[CONSUMER] + (n >> 1), buffers, sync, CONFIG, CONSUMER)
    if n + 2 >= part.blocks:
        named_barrier_arrive(QUERIES_FREE, 256 + 32 * CONFIG.loader_warps)
    if start + BLOCK_N > part.seen_by_all:
        s = apply_mask(s, start, positions, part.length, 0, right, False, CONFIG.has_right)
    if CONSUMER == 0:
        p, m, l, alpha = softmax(s, m, l, factor, True)  # noqa: E741
        p16 = p.to(buffers.p.dtype)
    else:
        o, m, l = _follow(o, m, l, buffers, factor, CONSUMER)  # noqa: E741
        v = _others_values(n - 1, part, buffers, sync, CONFIG, CONSUMER)
        later = hopper.warpgroup_mma(buffers.p.index(0), v, o, is_async=True)  # [64, 256]
        p, m, l, alpha = softmax(s, m, l, factor, True)  # noqa: E741
        p16 = p.to(buffers.p.dtype)
        o = hopper.warpgroup_mma_wait(0, deps=[later])
        _give_back_others(CONSUMER, CONFIG)
    # one buffer: this consumer alone read the weights before these, and has waited for that product
    buffers.p.index(0).store(p16)  # [64, 64]
    buffers.m.index(CONSUMER).store(m)
    # wgmma reads shared memory by another path than the stores above
    hopper.fence_async_shared()
    named_barrier_arrive(WEIGHTS_FULL + CONSUMER, 256)
    v = buffers.k.index(3 * CONSUMER)
    _clear(start, part.last, v)
    o = rescale_o(o, by_row(alpha, o))
    o_layout: gl.constexpr = o.type.layout
    operand = gl.convert_layout(p16, gl.DotOperandLayout(0, o_layout, 2))
    added = hopper.warpgroup_mma(operand, v, o, is_async=True)  # [64, 256]
    # operands in registers must stay until they have been read
    waited = hopper.warpgroup_mma_wait(0, deps=(added, operand))
    give_back(HALVES_FREE, 3 * CONSUMER, 1, CONFIG.loader_warps)
    o = waited[0]
    if CONSUMER == 0:
        if n + 1 < part.blocks:
            o, m, l = _add_others(n + 1, o, m, l, part, buffers, sync, factor, CONFIG, CONSUMER)  # noqa: E741
    return o, m, l


class _Part(NamedTuple):
    """What the tile's descriptor says to a consumer, and blocks that each stage has held."""

    used: Any
    blocks: Any
    begin: Any
    last: Any
    length: Any
    seen_by_all: Any  # keys that all rows of the tile see end here


@gluon.jit
def _tile(taken, used, blocks, results, sizes, scale, buffers, sync, CONFIG: gl.constexpr, CONSUMER: gl.constexpr):
    """This consumer's columns of a tile, and their store."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    pair = taken & 1
    row, length = read_tile_field(sync.tile, pair, TILE_ROW), read_tile_field(sync.tile, pair, TILE_LENGTH)
    offset = length - read_tile_field(sync.tile, pair, TILE_QUERIES)
    seen_by_all = length
    if CONFIG.has_right:
        seen_by_all = gl.minimum(length, row // sizes.heads + offset + sizes.right + 1)
    begin, last = read_tile_field(sync.tile, pair, TILE_BEGIN), read_tile_field(sync.tile, pair, TILE_LAST)
    part = _Part(used, blocks, begin, last, length, seen_by_all)
    factor = scale * LOG2E
    rows = row + gl.arange(0, ROWS, row_layout)
    positions = rows // sizes.heads + offset
    m = gl.full([ROWS], MINUS_INF, gl.float32, row_layout)
    # sums are per thread: the four threads of a row meet at the end
    l = gl.zeros_like(partial_row_sums(gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)))  # noqa: E741
    o = gl.zeros([ROWS, HALF], gl.float32, o_layout)
    for i in gl.static_range(3):
        mbarrier.wait(sync.q_full.index(i), pair)
    for n in range(CONSUMER, blocks, 2):
        o, m, l = _step(  # noqa: E741
            o, m, l, n, positions, part, buffers, sync, sizes.right, factor, CONFIG, CONSUMER
        )
    if CONSUMER == 1:
        # it has no scores of its own
        if blocks == 1:
            named_barrier_arrive(QUERIES_FREE, 256 + 32 * CONFIG.loader_warps)
        # the last block is the other consumer's
        if (blocks & 1) == 1:
            o, m, l = _add_others(blocks - 1, o, m, l, part, buffers, sync, factor, CONFIG, CONSUMER)  # noqa: E741

    # each consumer has the sums of its own blocks, relative to the same maximum; in two buffers by turns, for the other
    # may still read those of the tile before
    buffers.l.index(2 * pair + CONSUMER).store(gl.convert_layout(gl.sum(l, 1), row_layout))
    named_barrier_sync_divergent(SUMS_FULL, 256)
    # in the same order in both, which so have the same bits
    total = buffers.l.index(2 * pair).load(row_layout) + buffers.l.index(2 * pair + 1).load(row_layout)
    row = read_tile_field(sync.tile, pair, TILE_ROW)
    queries, first = read_tile_field(sync.tile, pair, TILE_QUERIES), read_tile_field(sync.tile, pair, TILE_FIRST)
    b, alone = read_tile_field(sync.tile, pair, TILE_B), read_tile_field(sync.tile, pair, TILE_ALONE)
    partial = read_tile_field(sync.tile, pair, TILE_PARTIAL)
    # every field has been read: the loader may write the descriptor of the tile after the next here
    mbarrier.arrive(sync.tile_empty.index(pair), count=1)
    m = m * factor
    rescale = gl.full([ROWS], 1.0, gl.float32, row_layout)
    inside = rows < queries * sizes.heads
    head = rows % sizes.heads
    if results.sinks is not None:
        sink = gl.load(results.sinks + head, mask=inside, other=0.0).to(gl.float32) * LOG2E  # [64]
        # of parts the combination adds it; rows of no sequence have none
        sink = gl.where((alone > 0) & (b >= 0), sink, MINUS_INF)
        with_sink = gl.maximum(m, sink)
        safe = gl.where(with_sink == MINUS_INF, 0.0, with_sink)
        rescale = gl.exp2(m - safe)
        total = total * rescale + gl.exp2(sink - safe)
        m = with_sink
    # a row that sees no key has a total of 0: its LSE is -inf and its result 0, not NaN. A total of NaN stays NaN: the
    # combination of parts and the backward leave out rows whose LSE is -inf
    lse = gl.where(total != 0, (m + gl.log2(gl.where(total != 0, total, 1.0))) * LN2, MINUS_INF)
    inverse = gl.where(total != 0, rescale / gl.where(total != 0, total, 1.0), 0.0)
    o = o * by_row(inverse, o)
    r = row + gl.arange(0, ROWS, gl.SliceLayout(1, o_layout))
    c = CONSUMER * HALF + gl.arange(0, HALF, gl.SliceLayout(0, o_layout))
    mask = gl.expand_dims(r < queries * sizes.heads, 1)
    place = gl.expand_dims((r - row) * (2 * HALF), 1) + gl.expand_dims(c, 0)
    if alone > 0:
        if CONSUMER == 0:
            # [heads, queries], of each sequence or of all packed ones
            if CONFIG.packed:
                lse_ptr = results.lse + first
            else:
                lse_ptr = results.lse + b.to(gl.int64) * (sizes.heads * sizes.queries)
            gl.store(lse_ptr + head * sizes.queries + rows // sizes.heads, lse, mask=inside)  # [64]
        at = first.to(gl.int64) * sizes.heads + row
        out = results.out + at * (2 * HALF) + place
        gl.store(out, o.to(results.out.dtype.element_ty), mask=mask)  # [64, 256]
    elif results.partial is not None:
        if CONSUMER == 0:
            # of a list, rows of a part lie one behind the other; else in the order of the results
            of_row = rows - row
            if not CONFIG.listed:
                of_row = head * sizes.queries + rows // sizes.heads - row
            gl.store(results.partial_lse + partial + of_row, lse, mask=inside)  # [64]
        gl.store(results.partial + partial.to(gl.int64) * (2 * HALF) + place, o, mask=mask)  # [64, 256]


@gluon.jit
def consume(results, sizes, scale, buffers, sync, CONFIG: gl.constexpr, CONSUMER: gl.constexpr):
    """A consumer warpgroup: its columns of all tiles of this CTA."""
    await_kernel_before(CONFIG.starts_early)
    taken = gl.to_tensor(0)
    used_0 = gl.to_tensor(0)
    used_1 = gl.to_tensor(0)
    mbarrier.wait(sync.tile_full.index(0), 0)
    blocks = read_tile_field(sync.tile, 0, TILE_BLOCKS)
    while blocks > 0:
        _tile(taken, (used_0, used_1), blocks, results, sizes, scale, buffers, sync, CONFIG, CONSUMER)
        used_0 += (blocks + 1) // 2
        used_1 += blocks // 2
        taken += 1
        mbarrier.wait(sync.tile_full.index(taken & 1), phase_parity(taken, 2))
        blocks = read_tile_field(sync.tile, taken & 1, TILE_BLOCKS)
