"""The Hopper forward kernel in Gluon: persistent, TMA and wgmma, each warp with one role; docs/hopper.md explains it.

    o = softmax(scale q kᵀ, masked) v,  lse = log of the softmax's denominator, natural

One CTA per SM takes tiles of queries of one head from a counter in memory, longest first. A *loader* warp fetches tile
indices, publishes each tile's descriptor, and loads q once and blocks of k and v into rings of two stages by TMA;
*consumer* warpgroups hold 64 rows of queries each, scores and results in registers. While the tensor cores compute the
scores of one block and add the previous block to the result, the other warpgroup computes exponentials. TMA signals a
load at an mbarrier; stages are released at the hardware's named barriers, at which a warp arrives without waiting.

Blocks that hold keys which some of a tile's queries do not see come first, so that the loop over all others has no
masks. Any order is right, because the softmax is online: running maximum m and sum l per query, base 2.

With few queries and many keys the rows of a tile are (query, head) pairs, with HEADS_PER_TILE query heads of a KV head,
and the keys of each tile may be divided into `num_splits` splits. Each split is a tile of its own, and another kernel
combines the float32 results and LSE (combine.py). Or a list contains the tiles and the number of splits of each
(decode_tiles.py): results of unsplit tiles are then stored as always, those of splits for the combination.

Source: Shah et al. 2024, arXiv:2407.08608 (FlashAttention-3) for warpgroups that alternate and products that run during
the softmax; Milakov and Gimelshein 2018 (online softmax).
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from powertrain.ops.attention.combine import combine
from powertrain.ops.attention.decode_tiles import TileList, results_in, size_of_part
from powertrain.ops.attention.hopper.forward_consumer import consume
from powertrain.ops.attention.hopper.forward_producer import produce
from powertrain.ops.attention.hopper.forward_tiles import (
    LISTED_FIELDS,
    TILE_FIELDS,
    CacheRows,
    ConsumerSizes,
    ForwardBuffers,
    ForwardConfig,
    ForwardSync,
    Pages,
    ProducerSizes,
    Results,
    ResultStrides,
)
from powertrain.ops.attention.hopper.maps import (
    MaybeMaps,
    cache_maps,
    copies_rows,
    keys_of,
    packed_maps,
    pages_maps,
    queries_of,
    results_maps,
    rows_maps,
)
from powertrain.ops.attention.hopper.pieces import by_piece
from powertrain.ops.attention.hopper.plans import Plan, group_of
from powertrain.ops.attention.hopper.primitives import (
    Lengths,
    Window,
    alloc_mbarriers,
    alloc_mbarriers_at,
    alloc_pipeline_stages,
    int32,
)
from powertrain.ops.attention.hopper.tile_counter import counter_of
from powertrain.ops.attention.operands import Operand, Operands
from powertrain.ops.attention.triton.launch_arguments import alibi_kind
from powertrain.ops.attention.triton.sequences import SMALL
from powertrain.ops.early_start import starts_early
from powertrain.runtime.gluon_compat import gl, hopper
from powertrain.runtime.launch import gluon_kernel


@gluon_kernel(archs=(90,), unaligned=SMALL)
def _hopper_attention_fwd_kernel(
    q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, v_tail_desc, o_desc, o_tail_desc,
    k_ptr, v_ptr, o_ptr, lse_ptr, slopes_ptr, sinks_ptr, partial_ptr,
    q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr, page_table_ptr, list_ptr, counter_ptr,
    page_row, batch, queries, keys, kv_heads, num_q_per_kv, blocks, swizzle, tiles, new_keys,
    stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_ob, stride_os, stride_oh,
    slopes_step, scale, softcap, left, right,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, CAP: gl.constexpr, ALIBI: gl.constexpr,
    D: gl.constexpr, P_QK: gl.constexpr, P_V: gl.constexpr,
    FIRST_BLOCK: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    STORE_PARTS: gl.constexpr, Q_SLOTS: gl.constexpr, Q_HELD: gl.constexpr, TAKES_TURNS: gl.constexpr,
    HEADS_PER_TILE: gl.constexpr, SPLIT_KV: gl.constexpr, PAGE_SIZE: gl.constexpr, STARTS_EARLY: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    PACKED: gl.constexpr = q_starts_ptr is not None
    RAGGED: gl.constexpr = q_starts_ptr is not None or k_used_ptr is not None or q_used_ptr is not None
    CONFIG: gl.constexpr = ForwardConfig(
        LEFT,
        RIGHT,
        BOTTOM_RIGHT,
        CAP,
        ALIBI,
        FIRST_BLOCK,
        PACKED,
        RAGGED,
        D[0],
        D[1],
        Q_HELD,
        CONSUMERS,
        CONSUMERS * gl.num_warps() // 4,
        TAKES_TURNS,
        HEADS_PER_TILE,
        PAGE_SIZE,
        STARTS_EARLY,
        k_starts_ptr is not None,
        list_ptr is not None,
        1 if k_ptr is None else 4,
    )
    ROWS: gl.constexpr = 16 * gl.num_warps()  # of queries, that a consumer has of a tile
    # ptxas 12.8 takes addresses of q that depend on the tile for computed where the loop with masks was skipped
    gl.static_assert(Q_SLOTS == 1 or Q_HELD or FIRST_BLOCK != "any", "Q_SLOTS must be 1 where q is read in two loops")
    q_smem = ()
    k_smem = ()
    for i in gl.static_range(len(P_QK)):
        q_smem += (alloc_pipeline_stages(dtype, CONSUMERS * Q_SLOTS, ROWS, P_QK[i]),)  # type: ignore[assignment]
        k_smem += (alloc_pipeline_stages(dtype, STAGES, BLOCK_N, P_QK[i]),)  # type: ignore[assignment]
    v_smem = ()
    o_smem = ()
    for i in gl.static_range(len(P_V)):
        v_smem += (alloc_pipeline_stages(dtype, STAGES, BLOCK_N, P_V[i]),)  # type: ignore[assignment]
        o_smem += (alloc_pipeline_stages(dtype, CONSUMERS, ROWS, P_V[i] // STORE_PARTS),)  # type: ignore[assignment]
    tile_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # two descriptors: the next tile is published while this one is computed
    FIELDS: gl.constexpr = LISTED_FIELDS if list_ptr is not None else TILE_FIELDS
    tile_smem = gl.allocate_shared_memory(gl.int32, [2 * FIELDS, 1], tile_layout)
    q_full = alloc_mbarriers(CONSUMERS * Q_SLOTS, 1)
    k_at = None
    v_at = None
    # TMA's bytes complete one arrival, copies those of all threads of the loader
    ARRIVALS: gl.constexpr = 1 if CONFIG.loader_warps == 1 else 32 * CONFIG.loader_warps
    if CONFIG.warpgroups == CONFIG.consumers:
        k_full = alloc_mbarriers(STAGES, ARRIVALS)
        v_full = alloc_mbarriers(STAGES, ARRIVALS)
    else:
        k_full, k_at = alloc_mbarriers_at(STAGES, ARRIVALS)
        v_full, v_at = alloc_mbarriers_at(STAGES, ARRIVALS)
    tile_full = alloc_mbarriers(2, 1)
    # each consumer says when it has read a descriptor
    tile_empty = alloc_mbarriers(2, CONSUMERS)
    hopper.fence_async_shared()
    buffers = ForwardBuffers(q_smem, k_smem, v_smem)
    sync = ForwardSync(tile_smem, q_full, k_full, v_full, tile_full, tile_empty, k_at, v_at)

    # int64 where a stride needs it
    batch, queries, keys, kv_heads = int32(batch), int32(queries), int32(keys), int32(kv_heads)
    num_q_per_kv, blocks, swizzle, tiles = int32(num_q_per_kv), int32(blocks), int32(swizzle), int32(tiles)
    left, right = int32(left), int32(right)
    heads = kv_heads * num_q_per_kv
    if SPLIT_KV:
        num_splits = tiles // (blocks * kv_heads * gl.cdiv(num_q_per_kv, HEADS_PER_TILE) * (1 if PACKED else batch))
    else:
        num_splits: gl.constexpr = None  # type: ignore[no-redef]
    if o_desc is None or list_ptr is not None:
        members = num_q_per_kv
    else:
        members: gl.constexpr = None  # type: ignore[no-redef]
    results = Results(o_ptr, lse_ptr, slopes_ptr, sinks_ptr, partial_ptr)
    sizes = ConsumerSizes(batch, queries, heads, num_splits, members)
    strides = ResultStrides(stride_ob, stride_os, stride_oh, slopes_step)
    window = Window(left, right)
    if k_ptr is None:
        k_source = by_piece(k_desc, k_tail_desc, P_QK)
        v_source = by_piece(v_desc, v_tail_desc, P_V)
    else:
        k_source = CacheRows(k_ptr, stride_kb, stride_ks, stride_kh)
        v_source = CacheRows(v_ptr, stride_vb, stride_vs, stride_vh)
    sources = by_piece(q_desc, q_tail_desc, P_QK), k_source, v_source
    # none where results leave by ordinary stores
    o_descs: gl.constexpr = None
    if o_desc is not None:
        o_descs = by_piece(o_desc, o_tail_desc, P_V)
    lengths = Lengths(q_starts_ptr, k_starts_ptr, q_used_ptr, k_used_ptr)
    pages = Pages(page_table_ptr, page_row)
    all_sizes = ProducerSizes(
        batch, queries, keys, kv_heads, num_q_per_kv, blocks, swizzle, tiles, num_splits, new_keys
    )
    # registers of a thread; of the 65536 of an SM, 240 * 256 + 24 * 128 are used, or 160 * 384 + 32 * 128. Four warps
    # of a loader take no more than one, for registers are given to four warps at a time
    OF_LOADER: gl.constexpr = 24 if CONFIG.loader_warps == 1 else 32
    if CONSUMERS == 1:
        gl.warp_specialize([
            (consume, (o_descs, results, buffers, o_smem, sync, sizes, strides, window, scale, softcap, CONFIG, 0)),
            (produce, (sources, counter_ptr, lengths, pages, list_ptr, buffers, sync, all_sizes, window, CONFIG)),
        ], [CONFIG.loader_warps], [OF_LOADER])  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (o_descs, results, buffers, o_smem, sync, sizes, strides, window, scale, softcap, CONFIG, 0)),
            (consume, (o_descs, results, buffers, o_smem, sync, sizes, strides, window, scale, softcap, CONFIG, 1)),
            (produce, (sources, counter_ptr, lengths, pages, list_ptr, buffers, sync, all_sizes, window, CONFIG)),
        ], [4, CONFIG.loader_warps], [240, OF_LOADER])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (o_descs, results, buffers, o_smem, sync, sizes, strides, window, scale, softcap, CONFIG, 0)),
            (consume, (o_descs, results, buffers, o_smem, sync, sizes, strides, window, scale, softcap, CONFIG, 1)),
            (consume, (o_descs, results, buffers, o_smem, sync, sizes, strides, window, scale, softcap, CONFIG, 2)),
            (produce, (sources, counter_ptr, lengths, pages, list_ptr, buffers, sync, all_sizes, window, CONFIG)),
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip


class _Results(NamedTuple):
    """Where tiles, and splits of them, store their results."""

    o: Tensor
    lse: Tensor
    strides: tuple[int, ...]  # of o by batch, query and head
    maps: MaybeMaps  # none where results leave by ordinary stores
    partial: Tensor | None = None  # of a list [slots, groups, size_of_part]


def launch_forward(
    operands: Operands,
    plan: Plan,
    page_table: Tensor | None = None,
    listed: TileList | None = None,
    together: int = 1,
    most: int = 1,
    new_keys: int = 0,
    counter: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse). With a page table keys and values are [pages, rows of a page, KV heads, head dim]; with a list of
    splits and none, [entries >= batch, rows, KV heads, head dim].

    together  number of groups of heads, a divisor of all, for which a CTA computes a list entry one after another
    most      most queries of a sequence in a list: the combination's grid depends on it, results do not
    new_keys  keys of a sequence beyond `key_used`, for equal numbers of queries without a list
    counter   an int32 that is 0 and is left so, of launches that follow one another; None: that of the stream
    """
    args, heads = operands.args, operands.heads
    q, k = operands.q, operands.k
    out, lse = operands.outputs()
    o = operands.like_query(out)
    first_block = _first_block(operands, plan, listed)
    if first_block == "diagonal" and operands.is_packed:
        # H16 D128, 16k tokens, documents of 132 to 8097: 700 for 672 TFLOP/s
        plan = plan._replace(q_held=False)
    groups = plan.groups_of(heads)
    if listed is None:
        blocks = operands.query_blocks(plan.queries)
        tiles = blocks * groups * plan.num_splits * operands.storage
        together = group_of(operands, plan)
    else:
        # no more than that; the list has their number
        blocks, tiles = 0, listed.most * groups
    into = _results_of(operands, plan, listed, out, lse, o)
    queries = queries_of(operands, q, operands.d_qk)
    if plan.heads_per_tile == 1:
        q_maps = rows_maps(queries, plan.rows, plan.p_qk)
    else:
        q_maps = packed_maps(queries, plan.rows, plan.p_qk, plan.heads_per_tile)
    k_maps, v_maps, rows = _keys_of(operands, plan, page_table is not None, listed is not None)
    # one CTA an SM, for its shared memory is full; it runs until no tile is left
    _hopper_attention_fwd_kernel[(min(operands.target.num_sms, tiles),)](
        *q_maps, *k_maps, *v_maps, *into.maps, *rows.tensors, into.o, into.lse, args.slopes, args.sinks, into.partial,
        args.query_starts, args.key_starts, args.query_used, args.key_used, page_table,
        listed and listed.entries, counter_of(q.tensor) if counter is None else counter,
        0 if page_table is None else page_table.stride(0),
        operands.batch, operands.queries, operands.keys, heads.kv, heads.q_per_kv, blocks, together, tiles, new_keys,
        *rows.strides, *into.strides, args.slopes_stride,
        args.scale, args.softcap, args.left, args.right,
        LEFT=args.left >= 0, RIGHT=args.right >= 0, BOTTOM_RIGHT=args.bottom_right, CAP=args.softcap > 0,
        ALIBI=alibi_kind(args), D=(operands.d_qk, operands.d_v), P_QK=plan.p_qk, P_V=plan.p_v,
        BLOCK_N=plan.block_n, STAGES=plan.stages, CONSUMERS=plan.consumers, STORE_PARTS=plan.store_parts,
        Q_SLOTS=plan.q_slots, Q_HELD=plan.q_held, TAKES_TURNS=plan.takes_turns, HEADS_PER_TILE=plan.heads_per_tile,
        SPLIT_KV=listed is None and plan.num_splits > 1, FIRST_BLOCK=first_block,
        PAGE_SIZE=0 if page_table is None else k.tensor.shape[1], STARTS_EARLY=starts_early(operands.target),
        num_warps=plan.warps,
    )  # fmt: skip
    if listed is not None and into.partial is not None:
        partial, partial_lse = results_in(into.partial, plan.queries * plan.heads_per_tile, operands.d_v)
        listed.combine(partial, partial_lse, args.sinks, out, lse, heads.kv, most, plan.heads_per_tile)
    elif listed is None and plan.num_splits > 1:
        combine(into.o, into.lse, None, out, lse, (o.b, o.s, o.r))
    return out, lse


def _results_of(
    operands: Operands, plan: Plan, listed: TileList | None, out: Tensor, lse: Tensor, o: Operand
) -> _Results:
    heads = operands.heads
    if listed is None and plan.num_splits > 1:
        shape = plan.num_splits, operands.storage, operands.queries, heads.kv * heads.q_per_kv, operands.d_v
        into, into_lse = out.new_empty(shape, dtype=torch.float32), lse.new_empty((plan.num_splits, *lse.shape))
        return _Results(into, into_lse, into.stride()[1:4], (None, None))
    parts = tuple(columns // plan.store_parts for columns in plan.p_v)
    # a box of more heads than share keys would reach into the next KV head's
    none: MaybeMaps = (None, None)
    maps = none if plan.partial else results_maps(operands, o, plan.rows, parts, plan.heads_per_tile)
    partial = None
    if listed is not None:
        rows = plan.queries * plan.heads_per_tile
        # one tensor, for a second address would take two registers of the consumers
        partial = lse.new_empty((listed.slots, plan.groups_of(heads), size_of_part(rows, operands.d_v)))
    return _Results(out, lse, (o.b, o.s, o.r), maps, partial)


class _Rows(NamedTuple):
    """Pointers and strides of keys and values that are copied row by row; None where TMA loads them."""

    tensors: tuple[Tensor | None, Tensor | None] = None, None
    strides: tuple[int, ...] = (0,) * 6  # of pages, rows and heads, of keys and of values, in 8 elements


def _keys_of(
    operands: Operands, plan: Plan, in_pages: bool, of_cache: bool
) -> tuple[MaybeMaps, MaybeMaps, _Rows]:  # fmt: skip
    """How the loader finds keys and values: maps of them, or pointers and strides."""
    k, v = operands.k, operands.v
    if in_pages and copies_rows(k.tensor):
        strides = tuple(stride // 8 for x in (k, v) for stride in (x.b, x.s, x.h))
        return (None, None), (None, None), _Rows((k.tensor, v.tensor), strides)
    if in_pages:
        return pages_maps(k, plan.block_n, plan.p_qk), pages_maps(v, plan.block_n, plan.p_v), _Rows()
    if of_cache:
        return cache_maps(k, plan.block_n, plan.p_qk), cache_maps(v, plan.block_n, plan.p_v), _Rows()
    keys, values = keys_of(operands, k, operands.d_qk), keys_of(operands, v, operands.d_v)
    return rows_maps(keys, plan.block_n, plan.p_qk), rows_maps(values, plan.block_n, plan.p_v), _Rows()


def _first_block(operands: Operands, plan: Plan, listed: TileList | None) -> Literal["any", "diagonal", "half"]:
    """The kind of the first block of every tile (`ForwardConfig`)."""
    # of a part of the keys it may be any
    if listed is not None or plan.num_splits > 1 or operands.args.left >= 0:
        return "any"
    if operands.args.right < 0:
        return "half" if _last_keys_fill_half(operands, plan) else "any"
    return "diagonal" if _diagonals_are_aligned(operands, plan) else "any"


def _last_keys_fill_half(operands: Operands, plan: Plan) -> bool:
    """Whether the last block of keys has half of its keys or fewer, where all sequences have the same number."""
    args = operands.args
    if args.key_starts is not None or args.key_used is not None:
        return False
    return 0 < operands.keys % plan.block_n <= plan.block_n // 2


def _diagonals_are_aligned(operands: Operands, plan: Plan) -> bool:
    """Whether each tile has one block with hidden scores, whose diagonal goes from corner to corner."""
    args = operands.args
    # the first consumer has the first half of the queries
    if plan.heads_per_tile > 1 or plan.warps > 4 or args.right != 0 or (plan.block_m, plan.block_n) != (128, 128):
        return False
    if args.query_starts is not args.key_starts or args.query_used is not args.key_used:
        return False
    # as many keys as queries
    if args.query_starts is not None or args.query_used is not None:
        return operands.keys == operands.queries
    return (operands.keys - operands.queries) % 128 == 0 if args.bottom_right else operands.keys >= operands.queries
