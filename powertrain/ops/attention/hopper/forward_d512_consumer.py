"""A consumer of the Hopper forward for head dims above 256: every other block's scores, half of the columns."""

from powertrain.ops.attention.hopper.forward_d512_tiles import (
    CHUNKS_FREE,
    SUMS_FULL,
    WEIGHTS_FULL,
    chunk_index,
)
from powertrain.ops.attention.hopper.forward_store import Rows, parts_of, store_lse, store_result
from powertrain.ops.attention.hopper.forward_tiles import (
    TILE_B,
    TILE_FIRST,
    TILE_HEAD,
    TILE_Q_CAPACITY,
    TILE_Q_LEN,
    TILE_Q_START,
    Scores,
    block_at,
    clear_behind,
    give_back,
    keys_of_tile,
    phase_parity,
)
from powertrain.ops.attention.hopper.primitives import LOG2E, MINUS_INF, read_tile_field
from powertrain.ops.attention.hopper.softmax import (
    apply_mask,
    apply_softcap_alibi,
    by_row,
    end_of_softmax,
    partial_row_sums,
    rescale_o,
    softmax,
)
from powertrain.ops.attention.triton.scores import ScoreScale
from powertrain.ops.early_start import await_kernel_before
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
    tma,
)


@gluon.jit
def _await_chunk(at, ring, full, CONSUMER: gl.constexpr):
    """A consumer's chunk number `at`, loaded."""
    index = chunk_index(at, ring, CONSUMER)
    STAGES: gl.constexpr = ring.shape[0] // 2
    mbarrier.wait(full.index(index), phase_parity(at, STAGES))
    return ring.index(index)


@gluon.jit
def _release_chunk(at, ring, CONSUMER: gl.constexpr):
    STAGES: gl.constexpr = ring.shape[0] // 2
    give_back(CHUNKS_FREE + CONSUMER * STAGES, at & (STAGES - 1), 1)


@gluon.jit
def _first_columns(smem, COLS: gl.constexpr):
    if COLS != smem.shape[1]:
        smem = smem.slice(0, COLS, 1)
    return smem


@gluon.jit
def _times_keys(at, buffers, full, P_QK: gl.constexpr, CONSUMER: gl.constexpr):
    """q kᵀ of a block of this consumer's: (scores [64, 64], chunks so far)."""
    ring = buffers.ring
    ROWS: gl.constexpr = buffers.q.shape[1]
    BLOCK_N: gl.constexpr = ring.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    s = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
    # hidden from the optimizer: 32 addresses of parts of q, the same for all blocks, were kept in registers and spilled
    zero = kept(gl.to_tensor(0))
    for i in gl.static_range(len(P_QK)):
        q = _first_columns(buffers.q.index(zero + i), P_QK[i])  # [64, PIECE]
        k = _first_columns(_await_chunk(at, ring, full, CONSUMER), P_QK[i])  # [64, PIECE]
        if i == 0:
            # the zeros are never read, they only give the accumulators their layout
            s = hopper.warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)
        else:
            s = hopper.warpgroup_mma(q, k.permute((1, 0)), s, is_async=True)
            # the product before has been computed: its chunk is free
            s = hopper.warpgroup_mma_wait(1, deps=[s])
            _release_chunk(at - 1, ring, CONSUMER)
        at += 1
    s = hopper.warpgroup_mma_wait(0, deps=[s])
    _release_chunk(at - 1, ring, CONSUMER)
    return s, at


@gluon.jit
def _no_results(ROWS: gl.constexpr, COLS: gl.constexpr):
    return gl.zeros([ROWS, COLS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16]))


@gluon.jit
def _scaled(o, alpha):
    scaled = ()
    for i in gl.static_range(len(o)):
        scaled += (rescale_o(o[i], by_row(alpha, o[i])),)  # type: ignore[assignment]
    return scaled


@gluon.jit
def _as_operand(p, o):
    """Weights in registers as the left operand of a product that is added to `o`: accumulators lie so."""
    o_layout: gl.constexpr = o.type.layout
    return gl.convert_layout(p, gl.DotOperandLayout(0, o_layout, 2))


@gluon.jit
def _add_values(o, p, at, ring, full, P_V: gl.constexpr, CONSUMER: gl.constexpr):
    """o += p v, asynchronously, with a product for each chunk of columns from chunk `at` on. p: an operand for each."""
    added = ()
    for i in gl.static_range(len(o)):
        v = _first_columns(_await_chunk(at + i, ring, full, CONSUMER), P_V[i])  # [64, PIECE]
        added += (hopper.warpgroup_mma(p[i], v, o[i], is_async=True),)  # type: ignore[assignment]  # [64, PIECE]
    return added


@gluon.jit
def _added(added, p, at, ring, CONSUMER: gl.constexpr, IN_REGISTERS: gl.constexpr):
    """The results of `_add_values`, whose chunks are given back."""
    deps = added
    # operands in registers must stay until they have been read
    if IN_REGISTERS:
        deps = added + p
    if len(added) == 2:
        deps = hopper.warpgroup_mma_wait(1, deps=deps)
        _release_chunk(at, ring, CONSUMER)
        waited = hopper.warpgroup_mma_wait(0, deps=deps)
        o = (waited[0], waited[1])
    elif IN_REGISTERS:
        waited = hopper.warpgroup_mma_wait(0, deps=deps)
        o = (waited[0],)  # type: ignore[assignment]
    else:
        o = (hopper.warpgroup_mma_wait(0, deps=deps),)  # type: ignore[assignment]
    _release_chunk(at + len(added) - 1, ring, CONSUMER)
    return o


@gluon.jit
def _clear_values(at, start, k_len, ring, full, CHUNKS: gl.constexpr, CONSUMER: gl.constexpr):
    """Zeros in the rows of a block of v behind the sequence's: they may hold NaN, and 0 times NaN is NaN."""
    if start + ring.shape[1] > k_len:
        for i in gl.static_range(CHUNKS):
            clear_behind(_await_chunk(at + i, ring, full, CONSUMER), gl.maximum(k_len - start, 0))
        # wgmma of any warp reads the stores of all, by another path to shared memory
        hopper.fence_async_shared()
        barrier()


@gluon.jit
def _change(m, m_new, factor):
    """The factor of results so far, when the running maximum becomes `m_new`."""
    # nothing seen so far: 2^-inf is 0, not NaN
    return gl.exp2(m * factor - gl.where(m_new == MINUS_INF, 0.0, m_new * factor))


@gluon.jit
def _follow(o, m, l, buffers, factor, CONSUMER: gl.constexpr):  # noqa: E741
    """The other consumer's last block: its weights are in shared memory when this returns, and `m`, `l` and `o` are
    relative to its maximum."""
    named_barrier_sync(WEIGHTS_FULL + 1 - CONSUMER, 256)
    m_new = buffers.m.index(1 - CONSUMER).load(m.type.layout)  # [64]
    alpha = _change(m, m_new, factor)
    of_l = gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))
    return _scaled(o, alpha), m_new, l * gl.expand_dims(of_l, 1)


@gluon.jit
def _others(o, buffers):
    """Nothing but the same operand for each piece: the other consumer's weights."""
    p = ()
    for _ in gl.static_range(len(o)):
        p += (buffers,)  # type: ignore[assignment]
    return p


@gluon.jit
def _step(
    o, m, l, at, n, order, k_len, buffers, sync, scores,  # noqa: E741
    CONFIG: gl.constexpr, P_QK: gl.constexpr, P_V: gl.constexpr, CONSUMER: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """The n-th block, which is this consumer's: its scores; the values of the block before, beside its exponentials;
    its own values. FIRST: there is no block before."""
    ring, full = buffers.ring, sync.full
    begin, end, full_end, at_right, masked = order
    BLOCK_N: gl.constexpr = ring.shape[1]
    start = block_at(n, begin, end, full_end, at_right, masked, CONFIG.has_left) * BLOCK_N
    # hidden from the optimizer: with 8 chunks a block all addresses were the same for all blocks, and spilled
    at = kept(at)
    s, at = _times_keys(at, buffers, full, P_QK, CONSUMER)
    if n + 2 >= end - begin:
        mbarrier.arrive(sync.q_empty.index(0), count=1)
    s = apply_softcap_alibi(
        s, start, scores.positions, scores.factors, scores.slope, scores.p_first, CONFIG.has_softcap, CONFIG.alibi
    )
    if n < masked:
        window = scores.window
        s = apply_mask(
            s, start, scores.positions, k_len, window.left, window.right, CONFIG.has_left, CONFIG.has_right
        )  # fmt: skip
    if FIRST:
        p, m, l, alpha = softmax(s, m, l, scores.factor, True)  # noqa: E741
        p16 = p.to(ring.dtype)
    else:
        o, m, l = _follow(o, m, l, buffers, scores.factor, CONSUMER)  # noqa: E741
        if CONFIG.ragged:
            before = block_at(n - 1, begin, end, full_end, at_right, masked, CONFIG.has_left) * BLOCK_N
            _clear_values(at, before, k_len, ring, full, len(P_V), CONSUMER)
        others = _others(o, buffers.p.index(1 - CONSUMER))
        later = _add_values(o, others, at, ring, full, P_V, CONSUMER)
        p, m, l, alpha = softmax(s, m, l, scores.factor, True)  # noqa: E741
        p16 = p.to(ring.dtype)
        o = _added(later, others, at, ring, CONSUMER, False)
        at += len(P_V)
    # the other consumer has read the weights before these: its own, which came behind, have been waited for
    buffers.p.index(CONSUMER).store(p16)  # [64, 64]
    buffers.m.index(CONSUMER).store(m)
    # wgmma reads shared memory by another path than the stores above
    hopper.fence_async_shared()
    named_barrier_arrive(WEIGHTS_FULL + CONSUMER, 256)
    if CONFIG.ragged:
        _clear_values(at, start, k_len, ring, full, len(P_V), CONSUMER)
    if not FIRST:
        o = _scaled(o, alpha)
    own = ()
    for i in gl.static_range(len(o)):
        own += (_as_operand(p16, o[i]),)  # type: ignore[assignment]  # [64, 64]
    o = _added(_add_values(o, own, at, ring, full, P_V, CONSUMER), own, at, ring, CONSUMER, True)
    return o, m, l, at + len(P_V)


@gluon.jit
def _store_piece(
    piece, FIRST: gl.constexpr, o_desc, buffers, o_ptr, b, head, row, q_start, q_capacity, strides,
    CONFIG: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Results [64, PIECE], from column FIRST on, 64 columns at a time."""
    PARTS: gl.constexpr = piece.shape[1] // buffers.o.shape[2]
    parts = (parts_of(piece, PARTS),)
    for part in gl.static_range(PARTS):
        store_result(
            parts, part, (o_desc,), (buffers.o,), CONSUMER, o_ptr, b, head, row, q_start, q_capacity, strides, CONFIG,
            FIRST,
        )  # fmt: skip


@gluon.jit
def _consume_tile(
    at, taken, head, o_desc, factors, factor, results, buffers, sync, sizes, strides, window,
    CONFIG: gl.constexpr, P_QK: gl.constexpr, P_V: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """A tile of `head`. Returns how many chunks and tiles there were, and the head of the next tile, or -1."""
    tile_smem, ring, full = sync.tile, buffers.ring, sync.full
    ROWS: gl.constexpr = buffers.q.shape[1]
    BLOCK_N: gl.constexpr = ring.shape[1]
    COLS: gl.constexpr = ring.shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    pair = taken & 1
    first, offset, k_len, order = keys_of_tile(pair, tile_smem, None, window, ROWS, BLOCK_N, CONFIG)
    begin, end, full_end, at_right, masked = order
    count = end - begin
    slope = 0.0
    if CONFIG.alibi != "none":
        b = read_tile_field(tile_smem, pair, TILE_B)
        slope = gl.load(results.slopes + b * strides.slopes + head, mask=b < sizes.batch, other=0.0) * LOG2E
    positions = first + offset + gl.arange(0, ROWS, row_layout)
    scores = Scores(positions, first + offset, k_len, window, factors, factor, slope)

    m = gl.full([ROWS], MINUS_INF, gl.float32, row_layout)
    # sums are per thread: the four threads of a row meet once a tile, at its end
    l = gl.zeros_like(partial_row_sums(gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)))  # noqa: E741
    o = ()
    for i in gl.static_range(len(P_V)):
        o += (_no_results(ROWS, P_V[i]),)  # type: ignore[assignment]
    mbarrier.wait(sync.q_full.index(0), taken & 1)
    if CONSUMER == 0:
        o, m, l, at = _step(  # noqa: E741
            o, m, l, at, gl.to_tensor(0), order, k_len, buffers, sync, scores, CONFIG, P_QK, P_V, CONSUMER, True,
        )  # fmt: skip
    elif count == 1:
        mbarrier.arrive(sync.q_empty.index(0), count=1)
    for n in range(2 - CONSUMER, count, 2):
        o, m, l, at = _step(  # noqa: E741
            o, m, l, at, n, order, k_len, buffers, sync, scores, CONFIG, P_QK, P_V, CONSUMER, False,
        )  # fmt: skip
    # the last block is the other consumer's
    if (count & 1) == CONSUMER:
        o, m, l = _follow(o, m, l, buffers, factor, CONSUMER)  # noqa: E741
        if CONFIG.ragged:
            start = block_at(count - 1, begin, end, full_end, at_right, masked, CONFIG.has_left) * BLOCK_N
            _clear_values(at, start, k_len, ring, full, len(P_V), CONSUMER)
        others = _others(o, buffers.p.index(1 - CONSUMER))
        o = _added(
            _add_values(o, others, at, ring, full, P_V, CONSUMER), others, at, ring, CONSUMER, False
        )  # fmt: skip
        at += len(P_V)

    # reload from shared memory to keep registers free in the loops
    b = read_tile_field(tile_smem, pair, TILE_B)
    row = read_tile_field(tile_smem, pair, TILE_FIRST)
    q_start = read_tile_field(tile_smem, pair, TILE_Q_START)
    q_len = read_tile_field(tile_smem, pair, TILE_Q_LEN)
    q_capacity = read_tile_field(tile_smem, pair, TILE_Q_CAPACITY)
    mbarrier.arrive(sync.tile_empty.index(pair), count=1)

    # each consumer has the sums of its own blocks, relative to the same maximum
    buffers.l.index(2 * pair + CONSUMER).store(gl.convert_layout(gl.sum(l, 1), row_layout))
    named_barrier_sync_divergent(SUMS_FULL, 256)
    # in the same order in both, which so have the same bits
    total = buffers.l.index(2 * pair).load(row_layout) + buffers.l.index(2 * pair + 1).load(row_layout)
    rows = Rows(b, head, row, q_start, q_len, q_capacity, None, None)
    lse, inverse = end_of_softmax(m, total, slope, factor, results.sinks, 0, rows, sizes, CONFIG)
    i = row + gl.arange(0, ROWS, row_layout)
    # rows past the sequence's queries are promised to be 0, with an LSE of -inf
    inverse = gl.where(i < q_len, inverse, 0.0)
    if CONSUMER == 0:
        lse = gl.where(i < q_len, lse, MINUS_INF)
        store_lse(lse, i, 0, rows, results, sizes, None, CONFIG, CONSUMER)
    b_at = b
    if CONFIG.packed:
        b_at = gl.to_tensor(0)
    for n in gl.static_range(len(P_V)):
        piece = o[n] * by_row(inverse, o[n])
        if CONFIG.ragged:  # rows of no sequence may hold NaN
            piece = gl.where(by_row(i, o[n]) < q_len, piece, 0.0)
        _store_piece(
            piece, (2 * CONSUMER + n) * COLS, o_desc, buffers, results.o, b_at, head, row, q_start, q_capacity, strides,
            CONFIG, CONSUMER,
        )  # fmt: skip

    taken += 1
    mbarrier.wait(sync.tile_full.index(taken & 1), phase_parity(taken, 2))
    return at, taken, read_tile_field(tile_smem, taken & 1, TILE_HEAD)


@gluon.jit
def consume(
    o_desc, results, buffers, sync, sizes, strides, window, scale, softcap,
    CONFIG: gl.constexpr, P_QK: gl.constexpr, P_V: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: its columns of every tile of this CTA."""
    await_kernel_before(CONFIG.starts_early)
    RAW: gl.constexpr = not CONFIG.has_softcap and CONFIG.alibi == "none"  # m is a maximum of unscaled scores
    factors = ScoreScale(scale * LOG2E, softcap)
    if CONFIG.has_softcap:
        factors = ScoreScale(scale / softcap, softcap * LOG2E)
    factor = factors.inner
    if not RAW:
        factor = 1.0
    at = gl.to_tensor(0)
    taken = gl.to_tensor(0)
    mbarrier.wait(sync.tile_full.index(0), 0)
    head = read_tile_field(sync.tile, 0, TILE_HEAD)
    while head >= 0:
        at, taken, head = _consume_tile(
            at, taken, head, o_desc, factors, factor, results, buffers, sync, sizes, strides, window,
            CONFIG, P_QK, P_V, CONSUMER,
        )  # fmt: skip
    # shared memory is the CTA's until it ends, and TMA may still be reading results from it
    tma.store_wait(0)
