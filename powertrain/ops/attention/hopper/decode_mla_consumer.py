"""A consumer of the Hopper decoding kernel for MLA: every other block's scores, half of the columns."""

from powertrain.ops.attention.hopper.decode_mla_tiles import (
    BLOCK_N,
    HALF,
    HALVES_FREE,
    ROWS,
    SUMS_FULL,
    WEIGHTS_FULL,
)
from powertrain.ops.attention.hopper.forward_tiles import clear_behind, give_back
from powertrain.ops.attention.hopper.primitives import LN2, LOG2E, MINUS_INF
from powertrain.ops.attention.hopper.softmax import apply_mask, by_row, partial_row_sums, rescale_o, softmax
from powertrain.runtime.gluon_compat import (
    barrier,
    gl,
    gluon,
    hopper,
    kept,
    mbarrier,
    named_barrier_arrive,
    named_barrier_sync,
    named_barrier_sync_divergent,
    reinterpret,
)


@gluon.jit
def _pieces(smem, PIECE: gl.constexpr):
    """[64, columns] as [columns / PIECE, 64, PIECE]: panels of 64 columns lie one behind the other."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([smem.shape[0], PIECE], smem.dtype)
    return reinterpret(smem, smem.dtype, [smem.shape[1] // PIECE, smem.shape[0], PIECE], layout)


@gluon.jit
def _half_of_scores(s, half, q, k, full, first, parity, FIRST: gl.constexpr, PIECE: gl.constexpr):
    """`s` and the product over 256 columns, each piece once it is there."""
    of_q, of_k = _pieces(q, PIECE), _pieces(k, PIECE)
    for i in gl.static_range(HALF // PIECE):
        mbarrier.wait(full.index(first + i), parity)
        s = hopper.warpgroup_mma(
            of_q.index(half + i), of_k.index(half + i).permute((1, 0)), s, use_acc=not FIRST or i > 0, is_async=True
        )
    return s


@gluon.jit
def _scores(n, buffers, full, PIECE: gl.constexpr, CONSUMER: gl.constexpr):
    """q kᵀ of a block of this consumer's: [64, 64]."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    s = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
    parity = (n >> 1) & 1
    # hidden from the optimizer: addresses that are the same for all blocks would be kept in registers
    zero = kept(gl.to_tensor(0))
    OWN: gl.constexpr = 3 * CONSUMER  # 2 * stage + half
    OTHER: gl.constexpr = 1 + CONSUMER
    PIECES: gl.constexpr = HALF // PIECE
    AT: gl.constexpr = CONSUMER * (2 * PIECES + 1)
    # the zeros are never read, they only give the accumulators their layout
    s = _half_of_scores(
        s, zero, buffers.q.index(zero + CONSUMER), buffers.k.index(zero + OWN), full, AT + CONSUMER * PIECES, parity,
        True, PIECE,
    )  # fmt: skip
    mbarrier.wait(full.index(AT + 2 * PIECES), parity)
    s = hopper.warpgroup_mma(
        buffers.q_tail.index(zero), buffers.k_tail.index(zero + CONSUMER).permute((1, 0)), s, is_async=True
    )
    s = _half_of_scores(
        s, zero, buffers.q.index(zero + (1 - CONSUMER)), buffers.k.index(zero + OTHER), full,
        AT + (1 - CONSUMER) * PIECES, parity, False, PIECE,
    )  # fmt: skip
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
def _others_values(n, part, buffers, full, PIECE: gl.constexpr, CONSUMER: gl.constexpr):
    """This consumer's half of the other's block n, once it is there."""
    STAGE: gl.constexpr = 1 - CONSUMER
    INDEX: gl.constexpr = 2 * STAGE + CONSUMER
    # the other has waited for it too, but what TMA wrote is visible to who waits
    PIECES: gl.constexpr = HALF // PIECE
    for i in gl.static_range(PIECES):
        mbarrier.wait(full.index(STAGE * (2 * PIECES + 1) + CONSUMER * PIECES + i), (n >> 1) & 1)
    v = buffers.k.index(INDEX)
    _clear((part.begin + n) * BLOCK_N, part.last, v)
    return v


@gluon.jit
def _add_others(
    n, o, m, l, part, buffers, sync, factor, PIECE: gl.constexpr, CONSUMER: gl.constexpr  # noqa: E741
):  # fmt: skip
    """The other's block n, with nothing beside it."""
    o, m, l = _follow(o, m, l, buffers, factor, CONSUMER)  # noqa: E741
    v = _others_values(n, part, buffers, sync.full, PIECE, CONSUMER)
    o = hopper.warpgroup_mma_wait(0, deps=[hopper.warpgroup_mma(buffers.p.index(0), v, o, is_async=True)])
    return o, m, l


@gluon.jit
def _step(
    o, m, l, n, positions, part, sizes, buffers, sync, factor,  # noqa: E741
    RIGHT: gl.constexpr, PIECE: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """The n-th block, which is this consumer's: its scores, its own values. Consumer 1 adds the other's block before it
    beside its exponentials; consumer 0 the other's block behind it, before its next scores, so that all of that
    block is free for another while it waits for those."""
    OWN: gl.constexpr = 3 * CONSUMER
    OTHERS: gl.constexpr = 2 * (1 - CONSUMER) + CONSUMER
    start = (part.begin + n) * BLOCK_N
    s = _scores(n, buffers, sync.full, PIECE, CONSUMER)
    seen_by_all = part.length
    if RIGHT:
        seen_by_all = gl.minimum(seen_by_all, part.length - sizes.queries + sizes.right + 1)
    if start + BLOCK_N > seen_by_all:
        s = apply_mask(s, start, positions, part.length, 0, sizes.right, False, RIGHT)
    if CONSUMER == 0:
        p, m, l, alpha = softmax(s, m, l, factor, True)  # noqa: E741
        p16 = p.to(buffers.p.dtype)
    else:
        o, m, l = _follow(o, m, l, buffers, factor, CONSUMER)  # noqa: E741
        v = _others_values(n - 1, part, buffers, sync.full, PIECE, CONSUMER)
        later = hopper.warpgroup_mma(buffers.p.index(0), v, o, is_async=True)  # [64, 256]
        p, m, l, alpha = softmax(s, m, l, factor, True)  # noqa: E741
        p16 = p.to(buffers.p.dtype)
        o = hopper.warpgroup_mma_wait(0, deps=[later])
        give_back(HALVES_FREE, OTHERS, 1)
    # one buffer: this consumer alone read the weights before these, and has waited for that product
    buffers.p.index(0).store(p16)  # [64, 64]
    buffers.m.index(CONSUMER).store(m)
    # wgmma reads shared memory by another path than the stores above
    hopper.fence_async_shared()
    named_barrier_arrive(WEIGHTS_FULL + CONSUMER, 256)
    v = buffers.k.index(OWN)
    _clear(start, part.last, v)
    o = rescale_o(o, by_row(alpha, o))
    o_layout: gl.constexpr = o.type.layout
    operand = gl.convert_layout(p16, gl.DotOperandLayout(0, o_layout, 2))
    added = hopper.warpgroup_mma(operand, v, o, is_async=True)  # [64, 256]
    # operands in registers must stay until they have been read
    waited = hopper.warpgroup_mma_wait(0, deps=(added, operand))
    give_back(HALVES_FREE, OWN, 1)
    o = waited[0]
    if CONSUMER == 0:
        if n + 1 < part.count:
            o, m, l = _add_others(n + 1, o, m, l, part, buffers, sync, factor, PIECE, CONSUMER)  # noqa: E741
            give_back(HALVES_FREE, OTHERS, 1)
    return o, m, l


@gluon.jit
def consume(
    results, part, sizes, scale, buffers, sync,
    RIGHT: gl.constexpr, PIECE: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: its columns of the tile."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    factor = scale * LOG2E
    rows = part.row + gl.arange(0, ROWS, row_layout)
    positions = rows // sizes.heads + (part.length - sizes.queries)
    m = gl.full([ROWS], MINUS_INF, gl.float32, row_layout)
    # sums are per thread: the four threads of a row meet at the end
    l = gl.zeros_like(partial_row_sums(gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)))  # noqa: E741
    o = gl.zeros([ROWS, HALF], gl.float32, o_layout)
    for i in gl.static_range(3):
        mbarrier.wait(sync.q_full.index(i), 0)
    for n in range(CONSUMER, part.count, 2):
        o, m, l = _step(  # noqa: E741
            o, m, l, n, positions, part, sizes, buffers, sync, factor, RIGHT, PIECE, CONSUMER
        )
    # the last block is the other consumer's
    if CONSUMER == 1 and (part.count & 1) == 1:
        o, m, l = _add_others(part.count - 1, o, m, l, part, buffers, sync, factor, PIECE, CONSUMER)  # noqa: E741

    # each consumer has the sums of its own blocks, relative to the same maximum
    buffers.l.index(CONSUMER).store(gl.convert_layout(gl.sum(l, 1), row_layout))
    named_barrier_sync_divergent(SUMS_FULL, 256)
    # in the same order in both, which so have the same bits
    total = buffers.l.index(0).load(row_layout) + buffers.l.index(1).load(row_layout)
    m = m * factor
    rescale = gl.full([ROWS], 1.0, gl.float32, row_layout)
    inside = rows < sizes.queries * sizes.heads
    head = rows % sizes.heads
    if results.sinks is not None:
        sink = gl.load(results.sinks + head, mask=inside, other=0.0).to(gl.float32) * LOG2E  # [64]
        # else the combination adds it
        sink = gl.where(part.alone > 0, sink, MINUS_INF)
        with_sink = gl.maximum(m, sink)
        safe = gl.where(with_sink == MINUS_INF, 0.0, with_sink)
        rescale = gl.exp2(m - safe)
        total = total * rescale + gl.exp2(sink - safe)
        m = with_sink
    # a row that sees no key has a total of 0: its LSE is -inf and its result 0, not NaN
    lse = gl.where(total > 0, (m + gl.log2(gl.where(total > 0, total, 1.0))) * LN2, MINUS_INF)
    inverse = gl.where(total > 0, rescale / gl.where(total > 0, total, 1.0), 0.0)
    o = o * by_row(inverse, o)
    of_lse = head * sizes.queries + rows // sizes.heads
    size = sizes.queries * sizes.heads
    r = part.row + gl.arange(0, ROWS, gl.SliceLayout(1, o_layout))
    c = CONSUMER * HALF + gl.arange(0, HALF, gl.SliceLayout(0, o_layout))
    place = gl.expand_dims(r * (2 * HALF), 1) + gl.expand_dims(c, 0)
    mask = gl.expand_dims(r < size, 1)
    if part.alone > 0:
        at = part.batch.to(gl.int64) * size
        if CONSUMER == 0:
            gl.store(results.lse + at + of_lse, lse, mask=inside)  # [64]
        gl.store(results.out + at * (2 * HALF) + place, o.to(results.out.dtype.element_ty), mask=mask)  # [64, 256]
    elif results.partial is not None:
        at = part.slot.to(gl.int64) * size
        if CONSUMER == 0:
            gl.store(results.partial_lse + at + of_lse, lse, mask=inside)  # [64]
        gl.store(results.partial + at * (2 * HALF) + place, o, mask=mask)  # [64, 256]
