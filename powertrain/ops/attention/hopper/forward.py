"""The Hopper forward kernel in Gluon: persistent, TMA and wgmma, each warp with one job; docs/hopper.md teaches it.

    o = softmax(scale q kᵀ, masked) v,  lse = log of the softmax's denominator, natural

One CTA an SM takes tiles of queries of one head from a counter in memory, longest first. A *loader* warp fetches tile
indices, publishes each tile's descriptor, and loads q once and blocks of k and v into rings of two stages by TMA;
*consumer* warpgroups hold 64 rows of queries each, scores and results in registers. While the tensor cores compute the
scores of one block and add the block before to the result, the other warpgroup is at its exponentials. Loads are
announced by mbarriers, which TMA can reach; stages are given back by the hardware's numbered barriers, to which a warp
comes without waiting.

Blocks that hold keys which some of a tile's queries do not see come first, so that the loop over all others has no
masks; the order is free, for the softmax is an online one: running maximum m and sum l per query, base 2.

Queries beside long keys may be few. Then the rows of a tile are (query, head) pairs, HEADS_PER_TILE heads that share
keys, and the keys of each tile may be divided into `num_splits` splits, each a tile of its own, whose results and LSE,
in float32, another kernel combines (`combine` in decode.py).

Source: Shah et al. 2024, arXiv:2407.08608 (FlashAttention-3) for warpgroups beside one another and products under way
during the softmax; Milakov and Gimelshein 2018 (online softmax).
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from powertrain.ops.attention.decode import combine
from powertrain.ops.attention.hopper.plans import Plan, group_for
from powertrain.ops.attention.hopper.primitives import (
    LN2,
    LOG2E,
    MINUS_INF,
    Lengths,
    Window,
    alloc_mbarriers,
    alloc_pipeline_stages,
    here,
    int32,
    read_tile_field,
    write_tile_field,
)
from powertrain.ops.attention.hopper.softmax import (
    apply_mask,
    apply_softcap_alibi,
    as_operand,
    beside_zeros,
    partial_row_sums,
    rescale_o,
    softmax,
    to_p16,
)
from powertrain.ops.attention.operands import Operands
from powertrain.ops.attention.triton.launch_arguments import alibi_kind
from powertrain.ops.attention.triton.sequences import find_sequence, sequence_span, tile_coords
from powertrain.ops.shapes import cdiv
from powertrain.runtime.gluon_compat import (
    await_next_tile,
    barrier,
    fetch_next_tile_async,
    gl,
    gluon,
    hopper,
    mbarrier,
    named_barrier_arrive,
    named_barrier_sync,
    reinterpret,
    tma,
    tma_load,
    tma_store,
)
from powertrain.runtime.launch import gluon_kernel

# numbered barriers: the first consumer's turn, and the first stage's return of keys and of values, up to 4 each
_TURN = gl.constexpr(5)
_KEYS_FREE = gl.constexpr(8)
_VALUES_FREE = gl.constexpr(12)


# fields of the tile descriptor in shared memory, int32 [2 * _TILE_FIELDS, 1]
_TILE_FIELDS = gl.constexpr(8)
_B = gl.constexpr(0)
_HEAD = gl.constexpr(1)  # -1: no more tiles
_FIRST = gl.constexpr(2)  # query
_Q_START = gl.constexpr(3)
_Q_LEN = gl.constexpr(4)
_Q_CAPACITY = gl.constexpr(5)
_K_LEN = gl.constexpr(6)
_SPLIT = gl.constexpr(7)


class ForwardConfig(NamedTuple):
    """The constants of a launch, by name: the constexpr argument CONFIG of the device functions."""

    has_left: bool  # the window is bounded to the left
    has_right: bool
    bottom_right: bool  # the last query has the position of the last key
    has_softcap: bool
    alibi: Literal["none", "two_sided", "one_sided"]
    aligned: bool  # each tile has one masked block, whose diagonal goes from corner to corner
    packed: bool  # sequences lie one behind the other
    ragged: bool  # sequences end before their storage does
    d: tuple[int, int]  # head dims of queries and values
    q_held: bool  # queries are read from registers
    consumers: int  # warpgroups, 64 rows each
    heads_per_tile: int  # heads that share keys in one tile


class Inputs(NamedTuple):
    q: Any
    k: Any
    v: Any


class Results(NamedTuple):
    """Pointers of a consumer: results, and the vectors by head."""

    o: Any
    lse: Any
    slopes: Any
    sinks: Any


class InputStrides(NamedTuple):
    """By batch entry, position and head."""

    qb: Any
    qs: Any
    qh: Any
    kb: Any
    ks: Any
    kh: Any
    vb: Any
    vs: Any
    vh: Any


class ResultStrides(NamedTuple):
    ob: Any
    os: Any
    oh: Any
    slopes: Any


class ProducerSizes(NamedTuple):
    batch: Any
    queries: Any
    keys: Any
    kv_heads: Any
    num_q_per_kv: Any
    blocks: Any
    swizzle: Any
    tiles: Any
    num_splits: Any  # None: keys are not split


class ConsumerSizes(NamedTuple):
    batch: Any
    queries: Any
    heads: Any
    num_splits: Any
    num_q_per_kv: Any  # None without splits


class ForwardBuffers(NamedTuple):
    """Pipeline stages in shared memory."""

    q: Any  # one [slots, 64, PIECE] per piece of the head dim
    k: Any  # one [STAGES, BLOCK_N, PIECE] per piece
    v: Any  # [STAGES, BLOCK_N, D_V]


class ForwardSync(NamedTuple):
    """The tile descriptor and the mbarriers. Stages of k and v are freed at numbered barriers instead."""

    tile: Any  # int32 [2 * FIELDS, 1]
    q_full: Any
    k_full: Any
    v_full: Any
    tile_full: Any
    tile_empty: Any


class Scores(NamedTuple):
    """Arguments that turn the products of a consumer's tile into masked scores."""

    positions: Any  # [64], of the rows' queries
    p_first: Any  # position of the first row
    k_len: Any
    window: Any
    factors: Any  # before and behind the softcap
    factor: Any  # from the running maximum to base 2
    slope: Any  # of ALiBi


@gluon.jit
def _blocks_of(
    first, offset, q_len, k_len, window, split, num_splits,
    QUERIES: gl.constexpr, BLOCK_N: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """The blocks of keys of a tile: (first, end, end of the blocks that all rows see, masked blocks at the right,
    masked blocks in all). At least one block, in which nothing may be visible."""
    p_first = first + offset
    p_last = gl.minimum(first + QUERIES, q_len) - 1 + offset
    begin = gl.to_tensor(0)
    full_begin = begin
    end = k_len
    full_end = k_len
    if CONFIG.has_left:
        begin = gl.maximum(p_first - window.left, 0)
        full_begin = gl.maximum(p_last - window.left, 0)
    if CONFIG.has_right:
        end = gl.maximum(gl.minimum(k_len, p_last + window.right + 1), 0)
        full_end = gl.maximum(gl.minimum(k_len, p_first + window.right + 1), 0)
    begin = begin // BLOCK_N
    end = gl.maximum(gl.cdiv(end, BLOCK_N), begin + 1)
    if num_splits is not None:  # a split past the end gets one fully masked block
        share = gl.cdiv(end - begin, num_splits)
        begin = gl.minimum(begin + split * share, end)
        end = gl.maximum(gl.minimum(begin + share, end), begin + 1)
    full_begin = gl.maximum(gl.minimum(gl.cdiv(full_begin, BLOCK_N), end), begin)
    full_end = gl.maximum(gl.minimum(full_end // BLOCK_N, end), full_begin)
    return begin, end, full_end, end - full_end, end - full_end + full_begin - begin


@gluon.jit
def _block_at(n, begin, end, full_end, at_right, masked, LEFT: gl.constexpr):
    """The n-th block of a tile: the masked ones at the right, those at the left, then the others from the right."""
    block = end - 1 - n
    if LEFT:
        block = gl.where(n >= at_right, begin + n - at_right, block)
        block = gl.where(n >= masked, full_end - 1 - (n - masked), block)
    return block


@gluon.jit
def _rows_desc(ptr, batch, heads, rows, D, stride_b, stride_h, stride_s, smem):
    """A descriptor of a whole tensor [batch, heads, rows, D], of the tiles that the stages of `smem` hold."""
    ROWS: gl.constexpr = smem.shape[1]
    COLS: gl.constexpr = smem.shape[2]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, ROWS, COLS], smem.dtype)
    return tma.make_tensor_descriptor(
        ptr, [batch, heads, rows, D], [stride_b, stride_h, stride_s, 1], [1, 1, ROWS, COLS], layout
    )


@gluon.jit
def _packed_desc(ptr, batch, heads, rows, D, stride_b, stride_h, stride_s, smem, HEADS_PER_TILE: gl.constexpr):
    """The same of queries or results, with rows of (query, head) pairs where HEADS_PER_TILE heads share a tile."""
    ROWS: gl.constexpr = smem.shape[1]
    COLS: gl.constexpr = smem.shape[2]
    if HEADS_PER_TILE == 1:
        desc = _rows_desc(ptr, batch, heads, rows, D, stride_b, stride_h, stride_s, smem)
    else:
        box: gl.constexpr = [1, ROWS // HEADS_PER_TILE, HEADS_PER_TILE, COLS]
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(box, smem.dtype)
        desc = tma.make_tensor_descriptor(ptr, [batch, rows, heads, D], [stride_b, stride_s, stride_h, 1], box, layout)
    return desc


@gluon.jit
def _as_tile(smem, HEADS_PER_TILE: gl.constexpr = 1):
    """[rows, columns] in shared memory as the tile of a descriptor."""
    ROWS: gl.constexpr = smem.shape[0]
    COLS: gl.constexpr = smem.shape[1]
    box: gl.constexpr = [1, 1, ROWS, COLS] if HEADS_PER_TILE == 1 else [1, ROWS // HEADS_PER_TILE, HEADS_PER_TILE, COLS]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(box, smem.dtype)
    return reinterpret(smem, smem.dtype, box, layout)


@gluon.jit
def _query_of(row, HEADS_PER_TILE: gl.constexpr):
    """Which of a tile's queries a row is of."""
    if HEADS_PER_TILE > 1:
        row = row >> (HEADS_PER_TILE.bit_length() - 1)
    return row


@gluon.jit
def _with_head_of(head, row, HEADS_PER_TILE: gl.constexpr):
    """The head of a row whose tile begins with `head`."""
    if HEADS_PER_TILE > 1:
        head += row & (HEADS_PER_TILE - 1)
    return head


@gluon.jit
def phase_parity(count, STAGES: gl.constexpr):
    """The parity of the round in which a ring of STAGES, a power of 2, has its element number `count`."""
    return (count >> (STAGES.bit_length() - 1)) & 1


@gluon.jit
def _give_back(first: gl.constexpr, stage, CONSUMERS: gl.constexpr):
    """By each warp of the consumers, once for each round of a stage: who takes it meets them all."""
    named_barrier_arrive(first + stage, 32 + 128 * CONSUMERS)


@gluon.jit
def _take(first: gl.constexpr, stage, CONSUMERS: gl.constexpr):
    """By the loader, once for each round of a stage but the first."""
    named_barrier_sync(first + stage, 32 + 128 * CONSUMERS)


@gluon.jit
def _load_queries(
    q_desc, q_smem, q_full, batch, head, row, first_slot, CONSUMERS: gl.constexpr, HEADS_PER_TILE: gl.constexpr
):  # fmt: skip
    ROWS: gl.constexpr = q_smem[0].shape[1]
    CHANNELS: gl.constexpr = q_smem[0].shape[2] + (q_smem[1].shape[2] if len(q_smem) > 1 else 0)
    BYTES: gl.constexpr = ROWS * CHANNELS * q_smem[0].dtype.primitive_bitwidth // 8
    for c in gl.static_range(CONSUMERS):
        bar = q_full.index(first_slot + c)
        mbarrier.expect(bar, BYTES)
        for i in gl.static_range(len(q_smem)):
            if HEADS_PER_TILE == 1:
                where = [batch, head, row + c * ROWS, i * q_smem[0].shape[2]]
            else:
                where = [batch, row + c * (ROWS // HEADS_PER_TILE), head, i * q_smem[0].shape[2]]
            tma_load(q_desc[i], where, bar, _as_tile(q_smem[i].index(first_slot + c), HEADS_PER_TILE))  # [64, PIECE]


@gluon.jit
def _load_tile(
    tile, visited, taken, emptied, counter_ptr, lengths, q_desc, k_desc, v_desc, buffers, sync, sizes, head_groups,
    window, CONFIG: gl.constexpr,
):  # fmt: skip
    """Publish the tile descriptor and issue its TMA loads. Returns the next tile, and the counts of blocks, tiles and
    free stages of keys so far."""
    q_smem, k_smem, v_smem = buffers.q, buffers.k, buffers.v
    tile_smem, q_full, k_full, v_full, tile_full, tile_empty = sync
    batch, num_splits, num_q_per_kv = sizes.batch, sizes.num_splits, sizes.num_q_per_kv
    CONSUMERS: gl.constexpr = CONFIG.consumers
    HEADS_PER_TILE: gl.constexpr = CONFIG.heads_per_tile
    STAGES: gl.constexpr = v_smem.shape[0]
    BLOCK_N: gl.constexpr = v_smem.shape[1]
    ROWS: gl.constexpr = q_smem[0].shape[1]
    QUERIES: gl.constexpr = ROWS * CONSUMERS // HEADS_PER_TILE
    PIECES: gl.constexpr = len(q_smem)
    Q_SLOTS: gl.constexpr = q_smem[0].shape[0] // CONSUMERS
    BYTES: gl.constexpr = v_smem.dtype.primitive_bitwidth // 8
    K_BYTES: gl.constexpr = BLOCK_N * (q_smem[0].shape[2] + (q_smem[1].shape[2] if PIECES > 1 else 0)) * BYTES
    V_BYTES: gl.constexpr = BLOCK_N * v_smem.shape[2] * BYTES
    if CONFIG.packed:
        slot, head = tile_coords(tile, sizes.blocks, head_groups, sizes.swizzle)
        b, block = find_sequence(lengths.q_starts, batch, slot, QUERIES)
    else:
        block, at = tile_coords(tile, sizes.blocks, batch * head_groups, sizes.swizzle)
        b = at // head_groups
        head = at % head_groups
    split = None
    if num_splits is not None:
        split = head % num_splits
        head = head // num_splits
    if HEADS_PER_TILE > 1:
        parts = gl.cdiv(num_q_per_kv, HEADS_PER_TILE)
        head = head // parts * num_q_per_kv + head % parts * HEADS_PER_TILE
    q_start, q_len, q_capacity = sequence_span(lengths.q_starts, lengths.q_used, b, batch, sizes.queries)
    k_start, k_len, _ = sequence_span(lengths.k_starts, lengths.k_used, b, batch, sizes.keys)
    first = block * QUERIES
    if first < q_capacity:
        pair = taken & 1
        mbarrier.wait(tile_empty.index(pair), phase_parity(taken, 2) ^ 1)
        write_tile_field(tile_smem, pair, _B, b)
        write_tile_field(tile_smem, pair, _HEAD, head)
        write_tile_field(tile_smem, pair, _FIRST, first)
        write_tile_field(tile_smem, pair, _Q_START, q_start)
        write_tile_field(tile_smem, pair, _Q_LEN, q_len)
        write_tile_field(tile_smem, pair, _Q_CAPACITY, q_capacity)
        write_tile_field(tile_smem, pair, _K_LEN, k_len)
        if num_splits is not None:
            write_tile_field(tile_smem, pair, _SPLIT, split)
        mbarrier.arrive(tile_full.index(pair), count=1)
        offset = gl.to_tensor(0)
        if CONFIG.bottom_right:
            offset = k_len - q_len
        begin, end, full_end, at_right, masked = _blocks_of(
            first, offset, q_len, k_len, window, split, num_splits, QUERIES, BLOCK_N, CONFIG
        )
        kv = head // num_q_per_kv
        b_at = b
        if CONFIG.packed:
            b_at = gl.to_tensor(0)
        if Q_SLOTS == 2:  # the tile before the last, which had this slot, is done: its place in tile_smem was free
            _load_queries(
                q_desc, q_smem, q_full, b_at, head, q_start + first, pair * CONSUMERS, CONSUMERS, HEADS_PER_TILE
            )
        before = gl.to_tensor(0)
        for n in range(end - begin):
            row = k_start + _block_at(n, begin, end, full_end, at_right, masked, CONFIG.has_left) * BLOCK_N
            at = visited + n
            stage = at & (STAGES - 1)
            if emptied <= at:
                _take(_KEYS_FREE, stage, CONSUMERS)
                emptied += 1
            bar = k_full.index(stage)
            mbarrier.expect(bar, K_BYTES)
            for i in gl.static_range(PIECES):
                tma_load(k_desc[i], [b_at, kv, row, i * q_smem[0].shape[2]], bar, _as_tile(k_smem[i].index(stage)))
            if n == 0:
                if Q_SLOTS == 1:
                    # who has given back the last block of keys has done with the queries
                    while emptied < at + STAGES:
                        _take(_KEYS_FREE, emptied & (STAGES - 1), CONSUMERS)
                        emptied += 1
                    _load_queries(q_desc, q_smem, q_full, b_at, head, q_start + first, 0, CONSUMERS, HEADS_PER_TILE)
            else:
                stage = (at - 1) & (STAGES - 1)
                if at > STAGES:
                    _take(_VALUES_FREE, stage, CONSUMERS)
                bar = v_full.index(stage)
                mbarrier.expect(bar, V_BYTES)
                tma_load(v_desc, [b_at, kv, before, 0], bar, _as_tile(v_smem.index(stage)))  # [BLOCK_N, D_V]
            before = row
        visited += end - begin
        # late: a tile fetched early would wait for the end of a long one; not last: the answer takes a microsecond
        tile_idx = fetch_next_tile_async(counter_ptr)
        stage = (visited - 1) & (STAGES - 1)
        if visited > STAGES:
            _take(_VALUES_FREE, stage, CONSUMERS)
        bar = v_full.index(stage)
        mbarrier.expect(bar, V_BYTES)
        tma_load(v_desc, [b_at, kv, before, 0], bar, _as_tile(v_smem.index(stage)))  # [BLOCK_N, D_V]
        taken += 1
    else:
        tile_idx = fetch_next_tile_async(counter_ptr)
    tile_idx = await_next_tile(tile_idx)
    # there are as many fetches as tiles: the CTA that fetches the last resets the counter
    if tile_idx == sizes.tiles - 1:
        gl.store(counter_ptr, 0)
    return gl.num_programs(0) + tile_idx, visited, taken, emptied


@gluon.jit
def _load(
    inputs, counter_ptr, lengths, buffers, sync, sizes, strides, window, CONFIG: gl.constexpr
):  # fmt: skip
    """The loader warp: all tiles of this CTA."""
    q_smem, k_smem, v_smem = buffers.q, buffers.k, buffers.v
    tile_smem, tile_full, tile_empty = sync.tile, sync.tile_full, sync.tile_empty
    D: gl.constexpr = CONFIG.d
    HEADS_PER_TILE: gl.constexpr = CONFIG.heads_per_tile
    PIECES: gl.constexpr = len(q_smem)
    heads = sizes.kv_heads * sizes.num_q_per_kv
    head_groups = heads
    if HEADS_PER_TILE > 1:
        head_groups = sizes.kv_heads * gl.cdiv(sizes.num_q_per_kv, HEADS_PER_TILE)
    if sizes.num_splits is not None:
        head_groups = head_groups * sizes.num_splits
    storage = sizes.batch
    if CONFIG.packed:
        storage = gl.to_tensor(1)
    # made by the warp that uses them: acquiring a descriptor is a thread's own affair
    q_desc = ()
    k_desc = ()
    for i in gl.static_range(PIECES):
        q_desc += (  # type: ignore[assignment]
            _packed_desc(
                inputs.q,
                storage,
                heads,
                sizes.queries,
                D[0],
                strides.qb,
                strides.qh,
                strides.qs,
                q_smem[i],
                HEADS_PER_TILE,
            ),
        )
        k_desc += (  # type: ignore[assignment]
            _rows_desc(
                inputs.k, storage, sizes.kv_heads, sizes.keys, D[0], strides.kb, strides.kh, strides.ks, k_smem[i]
            ),
        )
    v_desc = _rows_desc(inputs.v, storage, sizes.kv_heads, sizes.keys, D[1], strides.vb, strides.vh, strides.vs, v_smem)

    tile = gl.program_id(0)
    visited = gl.to_tensor(0)  # blocks so far
    taken = gl.to_tensor(0)  # tiles so far
    emptied = gl.to_tensor(v_smem.shape[0])  # blocks of keys whose stage is free, counted from the first
    while tile < sizes.tiles:
        tile, visited, taken, emptied = _load_tile(
            tile, visited, taken, emptied, counter_ptr, lengths, q_desc, k_desc, v_desc, buffers, sync, sizes,
            head_groups, window, CONFIG,
        )  # fmt: skip
    pair = taken & 1
    mbarrier.wait(tile_empty.index(pair), phase_parity(taken, 2) ^ 1)
    write_tile_field(tile_smem, pair, _HEAD, -1)
    mbarrier.arrive(tile_full.index(pair), count=1)


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
    """q kᵀ under way for the first KEYS of a block: [rows, keys]. q: pieces of its channels, as k's are, in shared
    memory or in registers."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ROWS: gl.constexpr = q[0].shape[0]
    s = gl.zeros([ROWS, KEYS], gl.float32, layout)
    k = _first_rows(k_smem[0].index(stage), KEYS)  # [KEYS, PIECE]
    s = hopper.warpgroup_mma(q[0], k.permute((1, 0)), s, use_acc=False, is_async=True)  # [64, KEYS]
    for i in gl.static_range(1, len(k_smem)):
        k = _first_rows(k_smem[i].index(stage), KEYS)  # [KEYS, PIECE]
        s = hopper.warpgroup_mma(q[i], k.permute((1, 0)), s, is_async=True)  # [64, KEYS]
    return s


@gluon.jit
def _clear_piece(pieces, first, group, count):
    WIDTH: gl.constexpr = pieces.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1, WIDTH // 16], [2, 16], [4, 1], [1, 0])
    piece = pieces.index(first + group)
    row = group * 8 + gl.arange(0, 8, gl.SliceLayout(1, layout))
    piece.store(gl.where(gl.expand_dims(row < count, 1), piece.load(layout), 0.0).to(pieces.dtype))


@gluon.jit
def _clear_behind(v_smem, count):
    """Zeros in the rows of a block of v from `count` on: rows past a sequence may hold NaN, and 0 times NaN is NaN."""
    ROWS: gl.constexpr = v_smem.shape[0]
    COLS: gl.constexpr = v_smem.shape[1]
    WIDTH: gl.constexpr = min(COLS, 64)
    swizzle: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, WIDTH], v_smem.dtype)
    pieces = reinterpret(v_smem, v_smem.dtype, [COLS // WIDTH * ROWS // 8, 8, WIDTH], swizzle)
    for panel in gl.static_range(COLS // WIDTH):
        for group in range(count // 8, ROWS // 8):
            _clear_piece(pieces, gl.to_tensor(panel * (ROWS // 8)), group, count)
    # wgmma of any warp reads the stores of all, by another path to shared memory
    hopper.fence_async_shared()
    barrier()


@gluon.jit
def _step(
    o, m, l, weights, at, q, buffers, sync, start, scores,  # noqa: E741
    CONFIG: gl.constexpr, CONSUMER: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Block number `at`: its scores and its weights, beside the product of the block before."""
    k_smem, v_smem, k_full, v_full = buffers.k, buffers.v, sync.k_full, sync.v_full
    CONSUMERS: gl.constexpr = CONFIG.consumers
    STAGES: gl.constexpr = v_smem.shape[0]
    BLOCK_N: gl.constexpr = v_smem.shape[1]
    o_layout: gl.constexpr = o.type.layout
    stage = at & (STAGES - 1)
    last = (at - 1) & (STAGES - 1)
    p = as_operand(weights, v_smem.dtype, o_layout)  # [64, BLOCK_N], or half a block's columns
    v = _first_rows(v_smem.index(last), p.shape[1])  # [BLOCK_N, D_V], or half of it
    mbarrier.wait(k_full.index(stage), phase_parity(at, STAGES))
    # consumers take turns at the tensor cores: one's exponentials beside another's products
    if not MASKED:
        named_barrier_sync(_TURN + CONSUMER, 256)
    s_later = _times_keys(q, k_smem, stage, BLOCK_N)  # [64, BLOCK_N]
    mbarrier.wait(v_full.index(last), phase_parity(at - 1, STAGES))
    o_later = hopper.warpgroup_mma(p, v, o, is_async=True)  # [64, D_V]
    if not MASKED:
        named_barrier_arrive(_TURN + (CONSUMER + 1) % CONSUMERS, 256)
    barrier()  # nobody waits longer for it here; Triton 3.6 puts one ahead of each wait for an mbarrier otherwise
    s = hopper.warpgroup_mma_wait(1, deps=[s_later])
    _give_back(_KEYS_FREE, stage, CONSUMERS)
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
    weights = to_p16(weights, v_smem.dtype)
    o, _ = hopper.warpgroup_mma_wait(0, deps=[o_later, p])
    _give_back(_VALUES_FREE, last, CONSUMERS)
    if CONFIG.ragged and MASKED:
        if start + BLOCK_N > scores.k_len:
            mbarrier.wait(v_full.index(stage), phase_parity(at, STAGES))
            _clear_behind(v_smem.index(stage), gl.maximum(scores.k_len - start, 0))
    return rescale_o(o, gl.convert_layout(alpha, gl.SliceLayout(1, o_layout))), m, l, weights


@gluon.jit
def _parts(o, STORE_PARTS: gl.constexpr):
    """`o` [rows, columns] in STORE_PARTS parts of its columns."""
    if STORE_PARTS == 1:
        parts = (o,)
    else:
        ROWS: gl.constexpr = o.shape[0]
        COLS: gl.constexpr = o.shape[1]
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS // 2, 16])
        left, right = o.reshape([ROWS, 2, COLS // 2]).permute(0, 2, 1).split()
        parts = _parts(gl.convert_layout(left, layout), STORE_PARTS // 2)
        parts += _parts(gl.convert_layout(right, layout), STORE_PARTS // 2)
    return parts


@gluon.jit
def _consume_tile(
    visited, taken, head, s, o_desc, factors, factor, results, buffers, o_smem, sync, sizes, storage, strides, window,
    CONFIG: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """A tile of `head`, whose first block has the scores `s`. Returns how many blocks and tiles there were, then the
    head of the next tile, or -1, and the scores of its first block.

    Not in the loop over tiles: Triton compiles a loop's body twice, and four times where loops nest."""
    q_smem, k_smem, v_smem = buffers.q, buffers.k, buffers.v
    tile_smem, q_full, k_full, v_full, tile_full, tile_empty = sync
    batch, queries, heads, num_splits, num_q_per_kv = sizes
    CONSUMERS: gl.constexpr = CONFIG.consumers
    HEADS_PER_TILE: gl.constexpr = CONFIG.heads_per_tile
    D: gl.constexpr = CONFIG.d
    STAGES: gl.constexpr = v_smem.shape[0]
    BLOCK_N: gl.constexpr = v_smem.shape[1]
    ROWS: gl.constexpr = q_smem[0].shape[1]
    D_V: gl.constexpr = v_smem.shape[2]
    QUERIES: gl.constexpr = ROWS // HEADS_PER_TILE  # of a consumer
    FIRST_N: gl.constexpr = s.shape[1]
    HALF: gl.constexpr = FIRST_N < BLOCK_N
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_V, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    first_row_layout: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    o_row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = v_smem.dtype
    COLS: gl.constexpr = o_smem.shape[2]
    STORE_PARTS: gl.constexpr = D_V // COLS
    o_tile = o_smem.index(CONSUMER)
    pair = taken & 1
    first = read_tile_field(tile_smem, pair, _FIRST)
    q_len = read_tile_field(tile_smem, pair, _Q_LEN)
    k_len = read_tile_field(tile_smem, pair, _K_LEN)
    offset = gl.to_tensor(0)
    if CONFIG.bottom_right:
        offset = k_len - q_len
    split = None
    if num_splits is not None:
        split = read_tile_field(tile_smem, pair, _SPLIT)
    begin, end, full_end, at_right, masked = _blocks_of(
        first, offset, q_len, k_len, window, split, num_splits, QUERIES * CONSUMERS, BLOCK_N, CONFIG
    )
    row = first + CONSUMER * QUERIES
    positions = row + offset + _query_of(gl.arange(0, ROWS, row_layout), HEADS_PER_TILE)
    q = _queries_at(_slot_of(pair, q_smem, CONSUMERS, CONSUMER), q_smem)
    if CONFIG.q_held:
        q = (q[0].load(gl.DotOperandLayout(0, s_layout, 2)),)  # [64, PIECE], in registers
    slope = 0.0
    if CONFIG.alibi != "none":
        b = read_tile_field(tile_smem, pair, _B)
        slope = gl.load(results.slopes + b * strides.slopes + head, mask=b < batch, other=0.0) * LOG2E
    p_first = row + offset
    scores = Scores(positions, p_first, k_len, window, factors, factor, slope)

    # the first block: masked, if any is
    stage = visited & (STAGES - 1)
    _give_back(_KEYS_FREE, stage, CONSUMERS)
    start = _block_at(gl.to_tensor(0), begin, end, full_end, at_right, masked, CONFIG.has_left) * BLOCK_N
    first_positions = gl.convert_layout(positions, first_row_layout)
    s = apply_softcap_alibi(s, start, first_positions, factors, slope, p_first, CONFIG.has_softcap, CONFIG.alibi)
    if masked > 0:
        s = apply_mask(s, start, first_positions, k_len, window.left, window.right, CONFIG.has_left, CONFIG.has_right)
    if CONFIG.ragged:
        if start + BLOCK_N > k_len:
            mbarrier.wait(v_full.index(stage), phase_parity(visited, STAGES))
            _clear_behind(v_smem.index(stage), gl.maximum(k_len - start, 0))
    m = gl.full([ROWS], MINUS_INF, gl.float32, first_row_layout)
    l = gl.zeros_like(partial_row_sums(s))  # noqa: E741
    weights, m, l, _ = softmax(s, m, l, factor, True)  # noqa: E741
    weights = to_p16(weights, dtype)
    o = gl.zeros([ROWS, D_V], gl.float32, o_layout)

    done = gl.to_tensor(1)
    if HALF:
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
    elif not CONFIG.aligned:
        for n in range(1, masked):
            start = _block_at(n, begin, end, full_end, at_right, masked, CONFIG.has_left) * BLOCK_N
            o, m, l, weights = _step(  # noqa: E741
                o, m, l, weights, visited + n, q, buffers, sync, start, scores, CONFIG, CONSUMER, True,
            )  # fmt: skip
        done = gl.maximum(masked, 1)
    for n in range(done, end - begin):
        start = _block_at(n, begin, end, full_end, at_right, masked, CONFIG.has_left) * BLOCK_N
        o, m, l, weights = _step(  # noqa: E741
            o, m, l, weights, visited + n, q, buffers, sync, start, scores, CONFIG, CONSUMER, False,
        )  # fmt: skip

    visited += end - begin
    last = (visited - 1) & (STAGES - 1)
    mbarrier.wait(v_full.index(last), phase_parity(visited - 1, STAGES))
    p = as_operand(weights, dtype, o_layout)
    o_later = hopper.warpgroup_mma(p, v_smem.index(last), o, is_async=True)  # [64, D_V]

    # reload from shared memory to keep registers free in the loops
    b = read_tile_field(tile_smem, pair, _B)
    head = read_tile_field(tile_smem, pair, _HEAD)
    row = read_tile_field(tile_smem, pair, _FIRST) + CONSUMER * QUERIES
    q_start = read_tile_field(tile_smem, pair, _Q_START)
    q_len = read_tile_field(tile_smem, pair, _Q_LEN)
    q_capacity = read_tile_field(tile_smem, pair, _Q_CAPACITY)
    if num_splits is not None:
        split = read_tile_field(tile_smem, pair, _SPLIT)
    mbarrier.arrive(tile_empty.index(pair), count=1)
    # the next tile's first scores, while this one's results are finished; after the last tile they are unused
    taken += 1
    pair = taken & 1
    mbarrier.wait(tile_full.index(pair), phase_parity(taken, 2))
    next_head = read_tile_field(tile_smem, pair, _HEAD)
    stage = visited & (STAGES - 1)
    slot = _slot_of(pair, q_smem, CONSUMERS, CONSUMER)
    if next_head >= 0:
        mbarrier.wait(q_full.index(slot), phase_parity(taken, q_smem[0].shape[0] // CONSUMERS))
        mbarrier.wait(k_full.index(stage), phase_parity(visited, STAGES))
    s_later = _times_keys(_queries_at(slot, q_smem), k_smem, stage, FIRST_N)  # [64, FIRST_N]

    total = gl.convert_layout(gl.sum(l, 1), row_layout)
    m = m * factor
    if CONFIG.alibi == "one_sided":
        m -= slope * gl.arange(0, ROWS, row_layout).to(gl.float32)
    rescale = gl.full([ROWS], 1.0, gl.float32, row_layout)
    lane = _with_head_of(0, gl.arange(0, ROWS, row_layout), HEADS_PER_TILE)
    if results.sinks is not None:
        if HEADS_PER_TILE == 1:
            sink = gl.load(results.sinks + head).to(gl.float32) * LOG2E
        else:
            sink = gl.load(results.sinks + head + lane, mask=head + lane < heads, other=0.0).to(gl.float32) * LOG2E
        with_sink = gl.maximum(m, sink)
        rescale = gl.exp2(m - with_sink)
        weight = gl.exp2(sink - with_sink)
        if num_splits is not None:  # once in all
            weight = gl.where(split == 0, weight, 0.0)
        total = total * rescale + weight
        m = with_sink
    lse = gl.where(total > 0, (m + gl.log2(gl.where(total > 0, total, 1.0))) * LN2, MINUS_INF)
    inverse = gl.where(total > 0, rescale / gl.where(total > 0, total, 1.0), 0.0)
    i = row + _query_of(gl.arange(0, ROWS, row_layout), HEADS_PER_TILE)
    inverse = gl.where(i < q_len, inverse, 0.0)
    lse = gl.where(i < q_len, lse, MINUS_INF)
    if CONFIG.packed:
        lse_base = results.lse + head.to(gl.int64) * queries + q_start
    else:
        lse_base = results.lse + (b.to(gl.int64) * heads + head) * queries
    if num_splits is not None:
        lse_base += (split * storage).to(gl.int64) * heads * queries
    if HEADS_PER_TILE > 1:
        lse_base += lane * queries
    is_row = i < q_capacity
    if HEADS_PER_TILE > 1 and num_splits is not None:  # the last tile of a group may have fewer heads
        is_row = is_row & (lane < num_q_per_kv - head % num_q_per_kv)
    gl.store(lse_base + i, lse, mask=is_row)  # [64]

    o, _ = hopper.warpgroup_mma_wait(1, deps=[o_later, p])
    _give_back(_VALUES_FREE, last, CONSUMERS)
    o = o * gl.expand_dims(gl.convert_layout(inverse, o_row_layout), 1)
    b_at = b
    if CONFIG.packed:
        b_at = gl.to_tensor(0)
    if num_splits is not None:
        base = results.o + (split * storage + b_at).to(gl.int64) * strides.ob
        base += (q_start + row).to(gl.int64) * strides.os
        base += head.to(gl.int64) * strides.oh
        _store_part(
            o, base, q_capacity - row, num_q_per_kv - head % num_q_per_kv, strides.os, strides.oh, D[1], HEADS_PER_TILE
        )
    else:
        if CONFIG.ragged:  # rows of no sequence may hold NaN
            o = gl.where(gl.expand_dims(gl.convert_layout(i, o_row_layout) < q_len, 1), o, 0.0)
        parts = _parts(o, STORE_PARTS)
        for part in gl.static_range(STORE_PARTS):
            _store(
                parts[part], gl.to_tensor(part * COLS), o_desc, o_tile, results.o, b_at, head, row, q_start, q_capacity,
                strides, CONFIG,
            )  # fmt: skip

    s = hopper.warpgroup_mma_wait(0, deps=[s_later])
    return visited, taken, next_head, s


@gluon.jit
def _consume(
    results, buffers, o_smem, sync, sizes, strides, window, scale, softcap,
    CONFIG: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: 64 rows of every tile of this CTA."""
    q_smem, k_smem, v_smem = buffers.q, buffers.k, buffers.v
    tile_smem, q_full, k_full, tile_full = sync.tile, sync.q_full, sync.k_full, sync.tile_full
    CONSUMERS: gl.constexpr = CONFIG.consumers
    BLOCK_N: gl.constexpr = v_smem.shape[1]
    # of the one masked block of a tile, the first half of the queries see the first half of the keys
    HALF: gl.constexpr = CONFIG.aligned and CONSUMER == 0
    FIRST_N: gl.constexpr = BLOCK_N // 2 if HALF else BLOCK_N
    RAW: gl.constexpr = not CONFIG.has_softcap and CONFIG.alibi == "none"  # m is a maximum of unscaled scores
    storage = sizes.batch
    if CONFIG.packed:
        storage = gl.to_tensor(1)
    o_desc = None
    if sizes.num_splits is None:
        o_desc = _packed_desc(
            results.o, storage, sizes.heads, sizes.queries, CONFIG.d[1], here(strides.ob), here(strides.oh),
            here(strides.os), o_smem, CONFIG.heads_per_tile,
        )  # fmt: skip
    factors = (scale * LOG2E, softcap)
    if CONFIG.has_softcap:
        factors = (scale / softcap, softcap * LOG2E)
    factor = factors[0]
    if not RAW:
        factor = 1.0

    visited = gl.to_tensor(0)
    taken = gl.to_tensor(0)
    if CONSUMER == CONSUMERS - 1:
        named_barrier_arrive(_TURN, 256)
    mbarrier.wait(tile_full.index(0), 0)
    head = read_tile_field(tile_smem, 0, _HEAD)
    if head >= 0:
        mbarrier.wait(q_full.index(CONSUMER), 0)
        mbarrier.wait(k_full.index(0), 0)
    s = _times_keys(_queries_at(CONSUMER, q_smem), k_smem, 0, FIRST_N)  # [64, FIRST_N]
    barrier()
    s = hopper.warpgroup_mma_wait(0, deps=[s])
    while head >= 0:
        visited, taken, head, s = _consume_tile(
            visited, taken, head, s, o_desc, factors, factor, results, buffers, o_smem, sync, sizes, storage, strides,
            window, CONFIG, CONSUMER,
        )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def _store(
    o, column, o_desc, o_tile, o_ptr, batch, head, row, q_start, q_capacity, strides, CONFIG: gl.constexpr
):  # fmt: skip
    """A part of results, whose columns begin at `column`, through shared memory to memory."""
    HEADS_PER_TILE: gl.constexpr = CONFIG.heads_per_tile
    QUERIES: gl.constexpr = o_tile.shape[0] // HEADS_PER_TILE
    tma.store_wait(0)
    barrier()
    o_tile.store(o.to(o_tile.dtype))  # [64, COLS]
    hopper.fence_async_shared()
    barrier()
    if not CONFIG.packed:
        _store_tile(o_desc, o_tile, batch, head, row, column, HEADS_PER_TILE)
    elif row + QUERIES <= q_capacity:
        _store_tile(o_desc, o_tile, batch, head, q_start + row, column, HEADS_PER_TILE)
    else:  # the rows behind are another sequence's
        base = o_ptr + (q_start + row).to(gl.int64) * strides.os + head.to(gl.int64) * strides.oh
        _copy_out(o_tile, base, q_capacity - row, column, strides.os, strides.oh, CONFIG.d[1], HEADS_PER_TILE)


@gluon.jit
def _store_tile(o_desc, o_tile, batch, head, row, column, HEADS_PER_TILE: gl.constexpr):
    if HEADS_PER_TILE == 1:
        tma_store(o_desc, [batch, head, row, column], _as_tile(o_tile))
    else:
        tma_store(o_desc, [batch, row, head, column], _as_tile(o_tile, HEADS_PER_TILE))


@gluon.jit
def _store_part(o, base, rows, heads, stride, stride_h, D: gl.constexpr, HEADS_PER_TILE: gl.constexpr):
    """The first `rows` queries and `heads` heads of `o` [rows, columns] to [rows, heads, D] at `base`, in float32."""
    r = gl.arange(0, o.shape[0], gl.SliceLayout(1, o.type.layout))
    c = gl.arange(0, o.shape[1], gl.SliceLayout(0, o.type.layout))
    query = _query_of(r, HEADS_PER_TILE)
    offset = query * stride.to(gl.int64)
    is_row = query < rows
    if HEADS_PER_TILE > 1:
        lane = _with_head_of(0, r, HEADS_PER_TILE)
        offset += lane * stride_h.to(gl.int64)
        is_row = is_row & (lane < heads)
    place = base + gl.expand_dims(offset, 1) + gl.expand_dims(c, 0)
    gl.store(place, o, mask=gl.expand_dims(is_row, 1) & gl.expand_dims(c < D, 0))  # [64, D_V], float32


@gluon.jit
def _copy_out(o_smem, base, rows, first, stride, stride_h, D: gl.constexpr, HEADS_PER_TILE: gl.constexpr):
    """The first `rows` queries of a tile in shared memory to columns `first` on of [rows, heads, D] at `base`, by
    ordinary stores."""
    ROWS: gl.constexpr = o_smem.shape[0]
    COLS: gl.constexpr = o_smem.shape[1]
    WIDTH: gl.constexpr = min(COLS, 64)
    HEIGHT: gl.constexpr = 16
    # TMA's layout: panels of 64 columns, in which 8 rows are swizzled among themselves
    swizzle: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEIGHT, WIDTH], o_smem.dtype)
    pieces = reinterpret(o_smem, o_smem.dtype, [COLS // WIDTH * ROWS // HEIGHT, HEIGHT, WIDTH], swizzle)
    for panel in gl.static_range(COLS // WIDTH):
        for piece in range(ROWS // HEIGHT):
            _copy_piece(
                pieces,
                gl.to_tensor(panel * (ROWS // HEIGHT)),
                piece,
                base,
                rows,
                first + panel * WIDTH,
                stride,
                stride_h,
                D,
                HEADS_PER_TILE,
            )


@gluon.jit
def _copy_piece(
    pieces, first, piece, base, rows, column, stride, stride_h, D: gl.constexpr, HEADS_PER_TILE: gl.constexpr
):  # fmt: skip
    HEIGHT: gl.constexpr = pieces.shape[1]
    WIDTH: gl.constexpr = pieces.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    r = piece * HEIGHT + gl.arange(0, HEIGHT, gl.SliceLayout(1, layout))
    c = column + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    query = _query_of(r, HEADS_PER_TILE)
    offset = query.to(gl.int64) * stride
    if HEADS_PER_TILE > 1:
        offset += _with_head_of(0, r, HEADS_PER_TILE).to(gl.int64) * stride_h
    place = base + gl.expand_dims(offset, 1) + gl.expand_dims(c, 0)
    mask = gl.expand_dims(query < rows, 1) & gl.expand_dims(c < D, 0)
    gl.store(
        gl.multiple_of(gl.max_contiguous(place, [1, 8]), [1, 16]),
        pieces.index(first + piece).load(layout),
        mask=gl.max_constancy(mask, [1, 8]),
    )


@gluon_kernel(archs=(90,))
def _hopper_attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, slopes_ptr, sinks_ptr,
    q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr, counter_ptr,
    batch, queries, keys, kv_heads, num_q_per_kv, blocks, swizzle, tiles,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
    stride_vb, stride_vs, stride_vh, stride_ob, stride_os, stride_oh,
    slopes_step, scale, softcap, left, right,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, CAP: gl.constexpr, ALIBI: gl.constexpr,
    D: gl.constexpr, P_QK: gl.constexpr, P_V: gl.constexpr,
    ALIGNED: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    STORE_PARTS: gl.constexpr, Q_SLOTS: gl.constexpr, Q_HELD: gl.constexpr,
    HEADS_PER_TILE: gl.constexpr, SPLIT_KV: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    PACKED: gl.constexpr = q_starts_ptr is not None
    RAGGED: gl.constexpr = q_starts_ptr is not None or k_used_ptr is not None or q_used_ptr is not None
    CONFIG: gl.constexpr = ForwardConfig(
        LEFT, RIGHT, BOTTOM_RIGHT, CAP, ALIBI, ALIGNED, PACKED, RAGGED, D, Q_HELD, CONSUMERS, HEADS_PER_TILE
    )
    ROWS: gl.constexpr = 64
    # ptxas 12.8 takes addresses of q that depend on the tile for computed where the loop with masks was skipped
    gl.static_assert(Q_SLOTS == 1 or Q_HELD or ALIGNED, "Q_SLOTS must be 1 where q is read in two loops")
    q_smem = ()
    k_smem = ()
    for i in gl.static_range(len(P_QK)):
        q_smem += (alloc_pipeline_stages(dtype, CONSUMERS * Q_SLOTS, ROWS, P_QK[i]),)  # type: ignore[assignment]
        k_smem += (alloc_pipeline_stages(dtype, STAGES, BLOCK_N, P_QK[i]),)  # type: ignore[assignment]
    v_smem = alloc_pipeline_stages(dtype, STAGES, BLOCK_N, P_V)
    o_smem = alloc_pipeline_stages(dtype, CONSUMERS, ROWS, P_V // STORE_PARTS)
    tile_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile_smem = gl.allocate_shared_memory(gl.int32, [2 * _TILE_FIELDS, 1], tile_layout)
    q_full = alloc_mbarriers(CONSUMERS * Q_SLOTS, 1)
    k_full = alloc_mbarriers(STAGES, 1)
    v_full = alloc_mbarriers(STAGES, 1)
    tile_full = alloc_mbarriers(2, 1)
    tile_empty = alloc_mbarriers(2, CONSUMERS)
    hopper.fence_async_shared()
    buffers = ForwardBuffers(q_smem, k_smem, v_smem)
    sync = ForwardSync(tile_smem, q_full, k_full, v_full, tile_full, tile_empty)

    # int64 where a stride needs it
    batch, queries, keys, kv_heads = int32(batch), int32(queries), int32(keys), int32(kv_heads)
    num_q_per_kv, blocks, swizzle, tiles = int32(num_q_per_kv), int32(blocks), int32(swizzle), int32(tiles)
    left, right = int32(left), int32(right)
    heads = kv_heads * num_q_per_kv
    if SPLIT_KV:
        num_splits = tiles // (blocks * kv_heads * gl.cdiv(num_q_per_kv, HEADS_PER_TILE) * (1 if PACKED else batch))
        members = num_q_per_kv
    else:
        num_splits: gl.constexpr = None  # type: ignore[no-redef]
        members: gl.constexpr = None  # type: ignore[no-redef]
    results = Results(o_ptr, lse_ptr, slopes_ptr, sinks_ptr)
    sizes = ConsumerSizes(batch, queries, heads, num_splits, members)
    strides = ResultStrides(stride_ob, stride_os, stride_oh, slopes_step)
    window = Window(left, right)
    inputs = Inputs(q_ptr, k_ptr, v_ptr)
    lengths = Lengths(q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr)
    all_sizes = ProducerSizes(batch, queries, keys, kv_heads, num_q_per_kv, blocks, swizzle, tiles, num_splits)
    input_strides = InputStrides(
        stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh
    )
    # registers of a thread; of the 65536 of an SM, 240 * 256 + 24 * 128 are used, or 160 * 384 + 32 * 128
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (results, buffers, o_smem, sync, sizes, strides, window, scale, softcap, CONFIG, 0)),
            (_consume, (results, buffers, o_smem, sync, sizes, strides, window, scale, softcap, CONFIG, 1)),
            (_load, (inputs, counter_ptr, lengths, buffers, sync, all_sizes, input_strides, window, CONFIG)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (results, buffers, o_smem, sync, sizes, strides, window, scale, softcap, CONFIG, 0)),
            (_consume, (results, buffers, o_smem, sync, sizes, strides, window, scale, softcap, CONFIG, 1)),
            (_consume, (results, buffers, o_smem, sync, sizes, strides, window, scale, softcap, CONFIG, 2)),
            (_load, (inputs, counter_ptr, lengths, buffers, sync, all_sizes, input_strides, window, CONFIG)),
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip


def launch_forward(operands: Operands, plan: Plan) -> tuple[Tensor, Tensor]:
    """(out, lse)."""
    args, heads = operands.args, operands.heads
    q, k, v = operands.q, operands.k, operands.v
    out, lse = operands.outputs()
    o = operands.like_query(out)
    aligned = _is_aligned(operands, plan)
    if aligned and operands.is_packed:
        plan = plan._replace(q_held=False)  # H16 D128, 16k tokens, documents of 132 to 8097: 700 for 672 TFLOP/s
    blocks = operands.query_blocks(plan.queries)
    tiles = blocks * heads.kv * cdiv(heads.q_per_kv, plan.heads_per_tile) * plan.num_splits * operands.storage
    keys_bytes = operands.keys * (operands.d_qk + operands.d_v) * k.tensor.element_size()
    into, into_lse = out, lse
    strides: tuple[int, ...] = o.b, o.s, o.r
    if plan.leaves_parts:
        shape = plan.num_splits, operands.storage, operands.queries, heads.kv * heads.q_per_kv, operands.d_v
        into, into_lse = out.new_empty(shape, dtype=torch.float32), lse.new_empty((plan.num_splits, *lse.shape))
        strides = into.stride()[1:4]
    _hopper_attention_fwd_kernel[(min(operands.target.num_sms, tiles),)](
        q.tensor, k.tensor, v.tensor, into, into_lse, args.slopes, args.sinks,
        args.query_starts, args.key_starts, args.query_used, args.key_used, _counter(q.tensor),
        operands.batch, operands.queries, operands.keys, heads.kv, heads.q_per_kv, blocks,
        group_for(keys_bytes, heads.q_per_kv, args.right >= 0), tiles,
        q.b, q.s, q.r, k.b, k.s, k.h, v.b, v.s, v.h, *strides, args.slopes_stride,
        args.scale, args.softcap, args.left, args.right,
        LEFT=args.left >= 0, RIGHT=args.right >= 0, BOTTOM_RIGHT=args.bottom_right, CAP=args.softcap > 0,
        ALIBI=alibi_kind(args), D=(operands.d_qk, operands.d_v), P_QK=plan.p_qk, P_V=plan.p_v,
        BLOCK_N=plan.block_n, STAGES=plan.stages, CONSUMERS=plan.consumers, STORE_PARTS=plan.store_parts,
        Q_SLOTS=plan.q_slots, Q_HELD=plan.q_held, HEADS_PER_TILE=plan.heads_per_tile, SPLIT_KV=plan.leaves_parts,
        ALIGNED=aligned, num_warps=4,
    )  # fmt: skip
    if plan.leaves_parts:
        combine(into, into_lse, None, out, lse, (o.b, o.s, o.r))
    return out, lse


def _is_aligned(operands: Operands, plan: Plan) -> bool:
    """Whether each tile has one block with hidden scores, whose diagonal goes from corner to corner."""
    args = operands.args
    if plan.heads_per_tile > 1 or plan.num_splits > 1:
        return False
    if args.left >= 0 or args.right != 0 or (plan.block_m, plan.block_n) != (128, 128):
        return False
    if args.query_starts is not args.key_starts or args.query_used is not args.key_used:
        return False
    if args.query_starts is not None or args.query_used is not None:  # as many keys as queries
        return operands.keys == operands.queries
    return (operands.keys - operands.queries) % 128 == 0 if args.bottom_right else operands.keys >= operands.queries


_counters: dict[tuple[int, int], Tensor] = {}  # by device and stream


def _counter(x: Tensor) -> Tensor:
    """An int32 that is 0, which the launch leaves 0: one for each stream, whose launches follow one another."""
    if x.is_meta or torch.cuda.is_current_stream_capturing():  # the graph's own: its replays may run on any stream
        return torch.zeros(1, dtype=torch.int32, device=x.device)
    where = x.get_device(), torch._C._cuda_getCurrentRawStream(x.get_device())
    counter = _counters.get(where)
    if counter is None:
        counter = _counters[where] = _zero_to_keep(x.device)
    return counter


def _zero_to_keep(device: torch.device) -> Tensor:
    """By another thread, on its stream: memory that this thread allocates while torch.compile warms up for CUDA graphs
    belongs to the graphs and must not be kept."""
    with ThreadPoolExecutor(1) as thread:
        zero = thread.submit(lambda: torch.zeros(1, dtype=torch.int32, device=device)).result()
    torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
    return zero
