"""A consumer of the Hopper forward: 64 rows of every tile for each of its warpgroups, scores and results in registers.

A consumer has one warpgroup, or two that share its code. Two wait for keys and values, and take turns, without waiting
for each other between the barriers of a tile."""

from powertrain.ops.attention.hopper.forward_store import Rows, store_lse, store_rows
from powertrain.ops.attention.hopper.forward_tiles import (
    KEYS_FREE,
    TILE_B,
    TILE_FIRST,
    TILE_HEAD,
    TILE_Q_CAPACITY,
    TILE_Q_LEN,
    TILE_Q_START,
    TILE_SLOT,
    TILE_SPLIT,
    TURN,
    VALUES_FREE,
    Scores,
    block_at,
    clear_values,
    give_back,
    keys_of_tile,
    phase_parity,
    query_of,
    with_head_of,
)
from powertrain.ops.attention.hopper.primitives import LOG2E, MINUS_INF, read_tile_field
from powertrain.ops.attention.hopper.softmax import (
    apply_mask,
    apply_softcap_alibi,
    as_operand,
    beside_zeros,
    by_row,
    end_of_softmax,
    partial_row_sums,
    rescale_o,
    softmax,
    to_p16,
)
from powertrain.ops.attention.triton.scores import ScoreScale
from powertrain.ops.early_start import await_kernel_before
from powertrain.runtime.gluon_compat import (
    await_phase,
    barrier,
    gl,
    gluon,
    hopper,
    mbarrier,
    named_barrier_arrive,
    named_barrier_sync,
    tma,
    warpgroup_index,
)


@gluon.jit
def _await_block(at, full, address, CONFIG: gl.constexpr):
    """Wait for block number `at` of keys or values, whose mbarriers are `full`. Two warpgroups of a consumer wait at
    the `address` of the mbarriers, since Triton's wait is a barrier of both."""
    STAGES: gl.constexpr = full.shape[0]
    stage = at & (STAGES - 1)
    if CONFIG.warpgroups > CONFIG.consumers:
        await_phase(address + 8 * stage, phase_parity(at, STAGES))
    else:
        mbarrier.wait(full.index(stage), phase_parity(at, STAGES))
    if CONFIG.loader_warps > 1:
        # wgmma reads by another path to shared memory than the loader's copies took
        hopper.fence_async_shared()


@gluon.jit
def _place_of(CONFIG: gl.constexpr, CONSUMER: gl.constexpr):
    """The index, in the order of turns, of the calling warpgroup."""
    place = CONSUMER
    if CONFIG.warpgroups > CONFIG.consumers:
        place = warpgroup_index()
    return place


@gluon.jit
def _first_rows(smem, ROWS: gl.constexpr):
    if ROWS != smem.shape[0]:
        smem = smem.slice(0, ROWS)
    return smem


@gluon.jit
def _slot_of(pair, q_smem, CONSUMERS: gl.constexpr, CONSUMER: gl.constexpr):
    """Where a consumer's queries of every other tile are."""
    slot = CONSUMER
    if q_smem[0].shape[0] == 2 * CONSUMERS:
        slot = pair * CONSUMERS + CONSUMER
    return slot


@gluon.jit
def _queries_at(slot, q_smem):
    q = ()
    for i in gl.static_range(len(q_smem)):
        q += (q_smem[i].index(slot),)  # type: ignore[assignment]
    return q


@gluon.jit
def _times_keys(q, k_smem, stage, KEYS: gl.constexpr):
    """q kᵀ for the first KEYS of a block, asynchronously: [rows, keys]. q: pieces of its channels, as k's are, in
    shared memory or in registers."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, KEYS, 16])
    ROWS: gl.constexpr = q[0].shape[0]
    s = gl.zeros([ROWS, KEYS], gl.float32, layout)
    k = _first_rows(k_smem[0].index(stage), KEYS)  # [KEYS, PIECE]
    # use_acc=False: the zeros are never read, they only give the accumulators their layout
    s = hopper.warpgroup_mma(q[0], k.permute((1, 0)), s, use_acc=False, is_async=True)  # [64, KEYS]
    for i in gl.static_range(1, len(k_smem)):
        k = _first_rows(k_smem[i].index(stage), KEYS)  # [KEYS, PIECE]
        s = hopper.warpgroup_mma(q[i], k.permute((1, 0)), s, is_async=True)  # [64, KEYS]
    return s


@gluon.jit
def _no_results(v_smem, ROWS: gl.constexpr):
    COLS: gl.constexpr = v_smem.shape[2]
    return gl.zeros([ROWS, COLS], gl.float32, gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, COLS, 16]))


@gluon.jit
def _value_operands(o, weights, v_smem, stage):
    """The operands of o += p v: p, in registers, and v, for each piece of columns. p may be of half a block.

    Ahead of a consumer's turn: addresses computed within it cost 3% at head dim 256."""
    weights_of = ()
    values_of = ()
    for i in gl.static_range(len(o)):
        # accumulators of s lie as wgmma wants its left operand, so p goes from registers to the product
        p = as_operand(weights, v_smem[i], o[i])  # [64, BLOCK_N], or half a block's columns
        weights_of += (p,)  # type: ignore[assignment]
        values_of += (_first_rows(v_smem[i].index(stage), p.shape[1]),)  # type: ignore[assignment]  # [BLOCK_N, PIECE]
    return weights_of, values_of


@gluon.jit
def _add_values(p, v, o):
    """o += p v, asynchronously."""
    added = ()
    for i in gl.static_range(len(o)):
        added += (hopper.warpgroup_mma(p[i], v[i], o[i], is_async=True),)  # type: ignore[assignment]  # [64, PIECE]
    return added


@gluon.jit
def _added(added, operands, AHEAD: gl.constexpr):
    """The results of `_add_values`, when no more than AHEAD later products are pending."""
    waited = hopper.warpgroup_mma_wait(AHEAD, deps=added + operands)
    o = ()
    for i in gl.static_range(len(added)):
        o += (waited[i],)  # type: ignore[assignment]
    return o


@gluon.jit
def _step(
    o, m, l, weights, at, q, buffers, sync, start, scores,  # noqa: E741
    CONFIG: gl.constexpr, CONSUMER: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Block number `at`: its scores and its weights, beside the product of the block before."""
    k_smem, v_smem, v_full = buffers.k, buffers.v, sync.v_full
    STAGES: gl.constexpr = v_smem[0].shape[0]
    BLOCK_N: gl.constexpr = v_smem[0].shape[1]
    dtype: gl.constexpr = v_smem[0].dtype
    stage = at & (STAGES - 1)
    last = (at - 1) & (STAGES - 1)
    p, v = _value_operands(o, weights, v_smem, last)
    _await_block(at, sync.k_full, sync.k_at, CONFIG)
    # warpgroups take turns at the tensor cores: one's exponentials beside another's products
    place = _place_of(CONFIG, CONSUMER)
    if CONFIG.takes_turns and not MASKED:
        named_barrier_sync(TURN + place, 256)
    # two products are pending: the exponentials of this block run beside the product of the one before
    s_later = _times_keys(q, k_smem, stage, BLOCK_N)  # [64, BLOCK_N]
    _await_block(at - 1, sync.v_full, sync.v_at, CONFIG)
    o_later = _add_values(p, v, o)
    if CONFIG.takes_turns and not MASKED:
        named_barrier_arrive(TURN + (place + 1) % CONFIG.warpgroups, 256)
    if CONFIG.warpgroups == CONFIG.consumers:
        barrier()  # nobody waits longer for it here; Triton 3.6 puts one ahead of each wait for an mbarrier otherwise
    s = hopper.warpgroup_mma_wait(len(v_smem), deps=[s_later])
    # s is complete, so k is no longer read: no need to wait for o
    give_back(KEYS_FREE, stage, CONFIG.warpgroups, CONFIG.loader_warps)
    s = apply_softcap_alibi(
        s, start, scores.positions, scores.factors, scores.slope, scores.p_first, CONFIG.has_softcap, CONFIG.alibi
    )
    if MASKED:
        s = apply_mask(
            s,
            start,
            scores.positions,
            scores.k_len,
            scores.window.left,
            scores.window.right,
            CONFIG.has_left,
            CONFIG.has_right,
        )
    weights, m, l, alpha = softmax(s, m, l, scores.factor, MASKED)  # noqa: E741
    # rounded as it is made: later the tensor cores would wait for it between a turn and its products
    weights = to_p16(weights, dtype)
    # behind the exponentials, which need no o
    o = _added(o_later, p, 0)
    give_back(VALUES_FREE, last, CONFIG.warpgroups, CONFIG.loader_warps)
    if CONFIG.ragged and MASKED:
        # never taken, since a block that reaches behind the keys is its tile's first; without it the step takes 1.5 %
        # longer (one H200, 1 chunk of 1024 queries beside 32768 keys 722 us, 735)
        if start + BLOCK_N > scores.k_len:
            mbarrier.wait(v_full.index(stage), phase_parity(at, STAGES))
            clear_values(v_smem, stage, gl.maximum(scores.k_len - start, 0))
    # m moves only when a row's maximum grew by more than GROWTH, so most warps skip the 64 multiplications
    rescaled = ()
    for i in gl.static_range(len(o)):
        rescaled += (rescale_o(o[i], by_row(alpha, o[i])),)  # type: ignore[assignment]
    return rescaled, m, l, weights


@gluon.jit
def _first_block(s, visited, start, masked, scores, v_smem, v_full, CONFIG: gl.constexpr):
    """(results, m, l, weights) of the first block of a tile, which is masked if any is, from its scores."""
    STAGES: gl.constexpr = v_smem[0].shape[0]
    BLOCK_N: gl.constexpr = v_smem[0].shape[1]
    ROWS: gl.constexpr = s.shape[0]
    row_layout: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    stage = visited & (STAGES - 1)
    positions = gl.convert_layout(scores.positions, row_layout)
    s = apply_softcap_alibi(
        s, start, positions, scores.factors, scores.slope, scores.p_first, CONFIG.has_softcap, CONFIG.alibi
    )
    if masked > 0:
        s = apply_mask(
            s, start, positions, scores.k_len, scores.window.left, scores.window.right, CONFIG.has_left,
            CONFIG.has_right,
        )  # fmt: skip
    if CONFIG.ragged:
        if start + BLOCK_N > scores.k_len:
            mbarrier.wait(v_full.index(stage), phase_parity(visited, STAGES))
            clear_values(v_smem, stage, gl.maximum(scores.k_len - start, 0))
    m = gl.full([ROWS], MINUS_INF, gl.float32, row_layout)
    # sums are per thread: the four threads of a row meet once a tile, at its end
    l = gl.zeros_like(partial_row_sums(s))  # noqa: E741
    weights, m, l, _ = softmax(s, m, l, scores.factor, True)  # noqa: E741
    weights = to_p16(weights, v_smem[0].dtype)
    o = ()
    for i in gl.static_range(len(v_smem)):
        o += (_no_results(v_smem[i], ROWS),)  # type: ignore[assignment]
    return o, m, l, weights


@gluon.jit
def _other_blocks(
    o, m, l, weights, visited, blocks, start, q, buffers, sync, scores,  # noqa: E741
    HALF: gl.constexpr, CONFIG: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """(results, m, l, weights) of all blocks of a tile but its first, whose keys begin at `start`. HALF: of that one
    the weights have half a block's columns."""
    begin, end, full_end, at_right, masked = blocks
    ROWS: gl.constexpr = buffers.q[0].shape[1]
    BLOCK_N: gl.constexpr = buffers.v[0].shape[1]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    done = gl.to_tensor(1)
    if HALF:
        # the first step had half a block's columns; the loop below has whole blocks
        m = gl.convert_layout(m, row_layout)
        l = gl.convert_layout(l, partial_row_sums(gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)).type.layout)  # noqa: E741
        if end - begin > 1:
            o, m, l, whole = _step(  # noqa: E741
                o, m, l, weights, visited + 1, q, buffers, sync, start - BLOCK_N, scores, CONFIG, CONSUMER, False,
            )  # fmt: skip
        else:
            whole = beside_zeros(weights, s_layout)
        weights = whole
        done += 1
    elif CONFIG.first_block == "any":
        # masked blocks come first, so that the loop over all others has no mask code
        for n in range(1, masked):
            start = block_at(n, begin, end, full_end, at_right, masked, CONFIG.has_left) * BLOCK_N
            o, m, l, weights = _step(  # noqa: E741
                o, m, l, weights, visited + n, q, buffers, sync, start, scores, CONFIG, CONSUMER, True,
            )  # fmt: skip
        done = gl.maximum(masked, 1)
    for n in range(done, end - begin):
        start = block_at(n, begin, end, full_end, at_right, masked, CONFIG.has_left) * BLOCK_N
        o, m, l, weights = _step(  # noqa: E741
            o, m, l, weights, visited + n, q, buffers, sync, start, scores, CONFIG, CONSUMER, False,
        )  # fmt: skip
    return o, m, l, weights


@gluon.jit
def _first_scores(visited, taken, buffers, sync, FIRST_N: gl.constexpr, CONFIG: gl.constexpr, CONSUMER: gl.constexpr):
    """The head of tile number `taken`, or -1, and the scores of its first block, number `visited`, asynchronously:
    unused after the last tile."""
    tile_smem, q_full, tile_full = sync.tile, sync.q_full, sync.tile_full
    CONSUMERS: gl.constexpr = CONFIG.consumers
    STAGES: gl.constexpr = buffers.k[0].shape[0]
    pair = taken & 1
    mbarrier.wait(tile_full.index(pair), phase_parity(taken, 2))
    head = read_tile_field(tile_smem, pair, TILE_HEAD)
    stage = visited & (STAGES - 1)
    slot = _slot_of(pair, buffers.q, CONSUMERS, CONSUMER)
    if head >= 0:
        mbarrier.wait(q_full.index(slot), phase_parity(taken, buffers.q[0].shape[0] // CONSUMERS))
        _await_block(visited, sync.k_full, sync.k_at, CONFIG)
    return head, _times_keys(_queries_at(slot, buffers.q), buffers.k, stage, FIRST_N)  # [64, FIRST_N]


@gluon.jit
def _has_rows(pair, tile_smem, place, FIRST: gl.constexpr, CONFIG: gl.constexpr):
    """Whether any row of a tile's is the warpgroup's of this place. The last tile of a sequence may have less; it has
    those of the FIRST warpgroup, and of all that share its code."""
    if FIRST:
        any_rows: gl.constexpr = True
    else:
        QUERIES: gl.constexpr = 64 // CONFIG.heads_per_tile
        first = read_tile_field(tile_smem, pair, TILE_FIRST) + place * QUERIES
        any_rows = first < read_tile_field(tile_smem, pair, TILE_Q_CAPACITY)
    return any_rows


@gluon.jit
def _pass_blocks(visited, blocks, sync, CONFIG: gl.constexpr, CONSUMER: gl.constexpr):
    """`_other_blocks` for a warpgroup without rows of the tile, whose share of the tensor cores is the others'. It
    comes to every barrier that `_other_blocks` comes to."""
    k_full, v_full = sync.k_full, sync.v_full
    STAGES: gl.constexpr = v_full.shape[0]
    begin, end, _, _, masked = blocks
    place = _place_of(CONFIG, CONSUMER)
    for n in range(1, end - begin):
        at = visited + n
        # a stage is given back once a round, so not before it was loaded
        _await_block(at, k_full, sync.k_at, CONFIG)
        if CONFIG.takes_turns:
            if CONFIG.first_block != "any" or n >= masked:
                named_barrier_sync(TURN + place, 256)
                named_barrier_arrive(TURN + (place + 1) % CONFIG.warpgroups, 256)
        _await_block(at - 1, v_full, sync.v_at, CONFIG)
        give_back(KEYS_FREE, at & (STAGES - 1), CONFIG.warpgroups, CONFIG.loader_warps)
        give_back(VALUES_FREE, (at - 1) & (STAGES - 1), CONFIG.warpgroups, CONFIG.loader_warps)


@gluon.jit
def _pass_tile(
    visited, taken, buffers, sync, sizes, window, FIRST_N: gl.constexpr, CONFIG: gl.constexpr, CONSUMER: gl.constexpr
):  # fmt: skip
    """A tile with no rows of this consumer. It comes to every barrier that `_consume_tile` comes to, and returns what
    that returns."""
    STAGES: gl.constexpr = buffers.v[0].shape[0]
    BLOCK_N: gl.constexpr = buffers.v[0].shape[1]
    QUERIES: gl.constexpr = buffers.q[0].shape[1] // CONFIG.heads_per_tile * CONFIG.consumers
    pair = taken & 1
    _, _, _, blocks = keys_of_tile(pair, sync.tile, sizes.num_splits, window, QUERIES, BLOCK_N, CONFIG)
    begin, end, _, _, _ = blocks
    give_back(KEYS_FREE, visited & (STAGES - 1), CONFIG.warpgroups, CONFIG.loader_warps)
    _pass_blocks(visited, blocks, sync, CONFIG, CONSUMER)
    visited += end - begin
    _await_block(visited - 1, sync.v_full, sync.v_at, CONFIG)
    give_back(VALUES_FREE, (visited - 1) & (STAGES - 1), CONFIG.warpgroups, CONFIG.loader_warps)
    mbarrier.arrive(sync.tile_empty.index(pair), count=1)
    taken += 1
    head, s = _first_scores(visited, taken, buffers, sync, FIRST_N, CONFIG, CONSUMER)
    return visited, taken, head, hopper.warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def _blocks_of_rows(
    o, m, l, weights, visited, blocks, start, q, buffers, sync, scores, pair,  # noqa: E741
    HALF: gl.constexpr, CONFIG: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """`_other_blocks`; in tiles of a list a warpgroup without rows passes them, also one that shares its code. Tiles
    of no list that share keys run in step instead, so that keys are read once."""
    if CONFIG.listed and CONFIG.warpgroups > CONFIG.consumers:
        if _has_rows(pair, sync.tile, warpgroup_index(), False, CONFIG):
            o, m, l, weights = _other_blocks(  # noqa: E741
                o, m, l, weights, visited, blocks, start, q, buffers, sync, scores, HALF, CONFIG, CONSUMER
            )
        else:
            _pass_blocks(visited, blocks, sync, CONFIG, CONSUMER)
    else:
        o, m, l, weights = _other_blocks(  # noqa: E741
            o, m, l, weights, visited, blocks, start, q, buffers, sync, scores, HALF, CONFIG, CONSUMER
        )
    return o, m, l, weights


@gluon.jit
def _consume_tile(
    visited, taken, head, s, o_desc, factors, factor, results, buffers, o_smem, sync, sizes, storage, strides, window,
    CONFIG: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """A tile of `head`, whose first block has the scores `s`. Returns how many blocks and tiles there were, then the
    head of the next tile, or -1, and the scores of its first block.

    Not in the loop over tiles: Triton compiles a loop's body twice, and four times where loops nest."""
    q_smem, k_smem, v_smem = buffers.q, buffers.k, buffers.v
    tile_smem, v_full, tile_empty = sync.tile, sync.v_full, sync.tile_empty
    batch, num_splits = sizes.batch, sizes.num_splits
    CONSUMERS: gl.constexpr = CONFIG.consumers
    HEADS_PER_TILE: gl.constexpr = CONFIG.heads_per_tile
    STAGES: gl.constexpr = v_smem[0].shape[0]
    BLOCK_N: gl.constexpr = v_smem[0].shape[1]
    ROWS: gl.constexpr = q_smem[0].shape[1]
    QUERIES: gl.constexpr = ROWS // HEADS_PER_TILE  # of a consumer
    FIRST_N: gl.constexpr = s.shape[1]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    pair = taken & 1
    first, offset, k_len, blocks = keys_of_tile(
        pair, tile_smem, num_splits, window, QUERIES * CONSUMERS, BLOCK_N, CONFIG
    )
    begin, end, full_end, at_right, masked = blocks
    row = first + CONSUMER * QUERIES
    positions = row + offset + query_of(gl.arange(0, ROWS, row_layout), HEADS_PER_TILE)
    q = _queries_at(_slot_of(pair, q_smem, CONSUMERS, CONSUMER), q_smem)
    if CONFIG.q_held:
        # from registers a product reads 64 bytes a clock of shared memory's 128, with q in shared memory 96
        held = ()
        for i in gl.static_range(len(q)):
            held += (q[i].load(gl.DotOperandLayout(0, s_layout, 2)),)  # type: ignore[assignment]  # [64, PIECE]
        q = held
    slope = 0.0
    if CONFIG.alibi != "none":
        b = read_tile_field(tile_smem, pair, TILE_B)
        slope = gl.load(results.slopes + b * strides.slopes + head, mask=b < batch, other=0.0) * LOG2E
    scores = Scores(positions, row + offset, k_len, window, factors, factor, slope)

    give_back(KEYS_FREE, visited & (STAGES - 1), CONFIG.warpgroups, CONFIG.loader_warps)
    start = block_at(gl.to_tensor(0), begin, end, full_end, at_right, masked, CONFIG.has_left) * BLOCK_N
    o, m, l, weights = _first_block(s, visited, start, masked, scores, v_smem, v_full, CONFIG)  # noqa: E741
    o, m, l, weights = _blocks_of_rows(  # noqa: E741
        o, m, l, weights, visited, blocks, start, q, buffers, sync, scores, pair, FIRST_N < BLOCK_N, CONFIG, CONSUMER
    )
    visited += end - begin
    last = (visited - 1) & (STAGES - 1)
    _await_block(visited - 1, sync.v_full, sync.v_at, CONFIG)
    p, v = _value_operands(o, weights, v_smem, last)
    o_later = _add_values(p, v, o)

    # reload from shared memory to keep registers free in the loops
    b = read_tile_field(tile_smem, pair, TILE_B)
    head = read_tile_field(tile_smem, pair, TILE_HEAD)
    row = read_tile_field(tile_smem, pair, TILE_FIRST) + CONSUMER * QUERIES
    q_start = read_tile_field(tile_smem, pair, TILE_Q_START)
    q_len = read_tile_field(tile_smem, pair, TILE_Q_LEN)
    q_capacity = read_tile_field(tile_smem, pair, TILE_Q_CAPACITY)
    split = None
    if num_splits is not None:
        split = read_tile_field(tile_smem, pair, TILE_SPLIT)
    slot_of_part = None
    if CONFIG.listed:
        slot_of_part = read_tile_field(tile_smem, pair, TILE_SLOT)
    rows = Rows(b, head, row, q_start, q_len, q_capacity, split, slot_of_part)
    # every field has been read: the loader may write the descriptor of the tile after the next here
    mbarrier.arrive(tile_empty.index(pair), count=1)
    # the next tile's first scores, while this one's results are finished
    taken += 1
    next_head, s_later = _first_scores(visited, taken, buffers, sync, FIRST_N, CONFIG, CONSUMER)

    # the tensor cores compute the next tile's first scores meanwhile
    lane = with_head_of(0, gl.arange(0, ROWS, row_layout), HEADS_PER_TILE)
    total = gl.convert_layout(gl.sum(l, 1), row_layout)
    lse, inverse = end_of_softmax(m, total, slope, factor, results.sinks, lane, rows, sizes, CONFIG)
    i = rows.row + query_of(gl.arange(0, ROWS, row_layout), HEADS_PER_TILE)
    # rows past the sequence's queries are promised to be 0, with an LSE of -inf
    inverse = gl.where(i < rows.q_len, inverse, 0.0)
    lse = gl.where(i < rows.q_len, lse, MINUS_INF)
    store_lse(lse, i, lane, rows, results, sizes, storage, CONFIG, CONSUMER)
    o = _added(o_later, p, len(k_smem))
    give_back(VALUES_FREE, last, CONFIG.warpgroups, CONFIG.loader_warps)
    store_rows(o, inverse, i, rows, o_desc, o_smem, results, sizes, storage, strides, CONFIG, CONSUMER)
    s = hopper.warpgroup_mma_wait(0, deps=[s_later])
    return visited, taken, next_head, s


@gluon.jit
def consume(
    o_desc, results, buffers, o_smem, sync, sizes, strides, window, scale, softcap,
    CONFIG: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """A consumer: its rows of every tile of this CTA."""
    await_kernel_before(CONFIG.starts_early)
    q_smem, k_smem, v_smem = buffers.q, buffers.k, buffers.v
    tile_smem, q_full, tile_full = sync.tile, sync.q_full, sync.tile_full
    BLOCK_N: gl.constexpr = v_smem[0].shape[1]
    # of a diagonal block, the first half of the queries see the first half of the keys
    HALF: gl.constexpr = CONFIG.first_block == "half" or (CONFIG.first_block == "diagonal" and CONSUMER == 0)
    FIRST_N: gl.constexpr = BLOCK_N // 2 if HALF else BLOCK_N
    RAW: gl.constexpr = not CONFIG.has_softcap and CONFIG.alibi == "none"  # m is a maximum of unscaled scores
    storage = sizes.batch
    if CONFIG.packed:
        storage = gl.to_tensor(1)
    factors = ScoreScale(scale * LOG2E, softcap)
    if CONFIG.has_softcap:
        factors = ScoreScale(scale / softcap, softcap * LOG2E)
    factor = factors.inner
    if not RAW:
        factor = 1.0

    visited = gl.to_tensor(0)
    taken = gl.to_tensor(0)
    if CONFIG.takes_turns:
        # the first begins: its turn is passed on once ahead of the loop
        if _place_of(CONFIG, CONSUMER) == CONFIG.warpgroups - 1:
            named_barrier_arrive(TURN, 256)
    mbarrier.wait(tile_full.index(0), 0)
    head = read_tile_field(tile_smem, 0, TILE_HEAD)
    if head >= 0:
        mbarrier.wait(q_full.index(CONSUMER), 0)
        _await_block(visited, sync.k_full, sync.k_at, CONFIG)
    s = _times_keys(_queries_at(CONSUMER, q_smem), k_smem, 0, FIRST_N)  # [64, FIRST_N]
    barrier()
    s = hopper.warpgroup_mma_wait(0, deps=[s])
    while head >= 0:
        # s crosses the loop as finished registers: with a wgmma pending at the loop's back edge ptxas waits after
        # each one
        has_rows = _has_rows(taken & 1, tile_smem, CONSUMER, CONSUMER == 0, CONFIG)
        if has_rows:
            visited, taken, head, s = _consume_tile(
                visited, taken, head, s, o_desc, factors, factor, results, buffers, o_smem, sync, sizes, storage,
                strides, window, CONFIG, CONSUMER,
            )  # fmt: skip
        else:
            visited, taken, head, s = _pass_tile(
                visited, taken, buffers, sync, sizes, window, FIRST_N, CONFIG, CONSUMER
            )  # fmt: skip
    # shared memory is the CTA's until it ends, and TMA may still be reading results from it
    tma.store_wait(0)
