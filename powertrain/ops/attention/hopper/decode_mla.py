"""The Hopper decoding kernel for MLA: head dim 576, whose first 512 columns are the values, one head of keys.

    s = scale * q kᵀ,  masked;   o = softmax(s) k[:, :512];   lse = log sum exp(s)

A tile has 64 rows (queries times heads) of one sequence, with packed or equal numbers of queries, and all of a
sequence's keys or a split of them. A list made on the device contains the tiles and the number of splits of each
(decode_tiles.py); CTAs fetch its entries through a counter. With `num_splits` given there is no list: all sequences
have that many splits.

Two *consumers* hold 256 columns of o each, 128 registers a thread. Blocks of 64 keys belong to them alternately: the
owner computes the block's scores and weights p, keeps p in registers for its own columns, and stores p and the running
maximum in shared memory for the other consumer. A block is loaded once, [64, 576] into one of two stages, and used as
keys and as values. Its halves of 256 columns are released one by one: the last read of a half is as values, by the
consumer that holds those columns.

The latency of loads must be hidden: with two stages, a stage can be loaded only between the last product of its block
and the scores of the block that comes next into it. So the first consumer adds the second one's block to its sums
before it computes its own next scores. The next tile's queries are loaded when both consumers have their last scores,
and its first blocks while this tile's results are stored.

Shared memory: q 72 KiB, two stages of 72 KiB, p 8 KiB, in all 226 of 227 KiB. One buffer of p is enough: the consumer
that stores weights is the one that read the previous weights.

The limit is the tensor cores: 2176 clocks per block (8.9 MFLOP). Shared memory takes 2300 (products with q and k both
read from it, and the arriving block); half the bytes loaded saved 4 % of the time, half of the scores' product 17 %.

Source: the alternating schedule of two warpgroups is that of FlashMLA (DeepSeek 2025) and of forward_d512.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from powertrain.ops.attention.combine import combine
from powertrain.ops.attention.decode_plans import choose_splits
from powertrain.ops.attention.decode_schedule import KeysSeen
from powertrain.ops.attention.decode_tiles import TileList
from powertrain.ops.attention.hopper.decode_mla_consumer import consume
from powertrain.ops.attention.hopper.decode_mla_producer import Tiles, produce
from powertrain.ops.attention.hopper.decode_mla_tiles import (
    BLOCK_N,
    HALF,
    ROWS,
    TAIL,
    TILE_FIELDS,
    Buffers,
    MlaConfig,
    Results,
    Sizes,
    Sync,
)
from powertrain.ops.attention.hopper.forward_tiles import CacheRows, Pages
from powertrain.ops.attention.hopper.maps import Source, copies_rows, rows_maps
from powertrain.ops.attention.hopper.primitives import (
    alloc_mbarriers,
    alloc_mbarriers_at,
    alloc_pipeline_stages,
    int32,
)
from powertrain.ops.attention.hopper.tile_counter import counter_of
from powertrain.ops.attention.triton.sequences import SMALL
from powertrain.ops.early_start import starts_early
from powertrain.ops.shapes import cdiv
from powertrain.runtime import checks, gluon_compat
from powertrain.runtime.gluon_compat import gl, hopper
from powertrain.runtime.launch import gluon_kernel
from powertrain.runtime.target import Target
from powertrain.runtime.tensor_maps import TensorMap

HEAD_DIM_QK, HEAD_DIM_V = 576, 512
# how the work of a program is cut into parts: at most so many, and keys of the smallest
_ROUNDS, _LEAST_KEYS = 3, 128


def _result_keys(rows: int) -> int:
    """Keys that take as long as storing and combining the results of a split, of `rows` rows of a sequence on average.

    us, one H200, 32 sequences of 500 to 32k keys, by blocks of a split: 128 heads, 8 233, 20 202, 24 193, 40 182, 48
    180, 56 196; 16 heads, 6 101, 12 93, 24 89, 32 91, 48 113."""
    return 64 + 4 * min(rows, ROWS.value)


@gluon_kernel(archs=(90,), unaligned=SMALL)
def _hopper_decode_mla_kernel(
    q_desc, k_desc, k_ptr, seqlens_ptr, page_table_ptr, list_ptr, counter_ptr,
    sinks_ptr, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr,
    batch, queries, heads, num_new, capacity, num_splits, right, page_row, stride_kb, stride_ks, scale,
    RIGHT: gl.constexpr, PAGE_SIZE: gl.constexpr, PACKED: gl.constexpr, STARTS_EARLY: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    CONFIG: gl.constexpr = MlaConfig(
        RIGHT, PAGE_SIZE, PACKED, list_ptr is not None, 1 if k_ptr is None else 4, STARTS_EARLY
    )
    rows_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    buffers = Buffers(
        alloc_pipeline_stages(dtype, 2, ROWS, HALF),
        alloc_pipeline_stages(dtype, 1, ROWS, TAIL),
        alloc_pipeline_stages(dtype, 4, BLOCK_N, HALF),
        alloc_pipeline_stages(dtype, 2, BLOCK_N, TAIL),
        alloc_pipeline_stages(dtype, 1, ROWS, BLOCK_N),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], rows_layout),
        gl.allocate_shared_memory(gl.float32, [4, ROWS], rows_layout),
    )
    tile_smem = gl.allocate_shared_memory(gl.int32, [2 * TILE_FIELDS, 1], rows_layout)
    # TMA's bytes complete one arrival, copies those of all threads of the loader
    ARRIVALS: gl.constexpr = 1 if CONFIG.loader_warps == 1 else 32 * CONFIG.loader_warps
    # four for each stage, of which three are used: their number is a power of 2
    full, full_at = alloc_mbarriers_at(8, ARRIVALS)
    sync = Sync(tile_smem, alloc_mbarriers(2, 1), alloc_mbarriers(2, 2), alloc_mbarriers(3, 1), full, full_at)
    hopper.fence_async_shared()
    sizes = Sizes(int32(batch), int32(queries), int32(heads), int32(right))
    tiles = Tiles(list_ptr, counter_ptr, seqlens_ptr, int32(num_new), int32(capacity), int32(num_splits))
    pages = Pages(page_table_ptr, page_row)
    results = Results(out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, sinks_ptr)
    if k_ptr is None:
        k_source = k_desc
    else:
        k_source = CacheRows(k_ptr, stride_kb, stride_ks, 0)
    # registers of a thread; of the 65536 of an SM, 232 * 256 + 40 * 128 are used. With 24 the loader of pages of 16
    # spilled 12 bytes
    gl.warp_specialize([
        (consume, (results, sizes, scale, buffers, sync, CONFIG, 0)),
        (consume, (results, sizes, scale, buffers, sync, CONFIG, 1)),
        (produce, (q_desc, k_source, tiles, pages, buffers, sync, sizes, CONFIG)),
    ], [4, CONFIG.loader_warps], [232, 40])  # fmt: skip


class MlaCall(NamedTuple):
    """The arguments of a decode_attention call that this kernel and its limits need."""

    query: Tensor  # [B, S, H, D]; packed [1, T, H, D]
    key_cache: Tensor
    value_cache: Tensor | None
    head_dim_v: int
    query_starts: Tensor | None  # [B + 1]; None: queries are not packed
    max_queries: int  # of a sequence
    keys: KeysSeen
    seen: int  # the most keys of a sequence that are read
    page_table: Tensor | None
    cache_batch_idx: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    softcap: float
    scale: float
    num_splits: int  # 0: of each sequence by the lengths
    entries: Tensor | None = None  # of `list_mla`, from a call with these arguments; None: the call makes its own
    counter: Tensor | None = None  # an int32 that is 0, and is left so; None: that of the stream

    @property
    def batch(self) -> int:
        return self.keys.seqlens.shape[0]

    @property
    def has_list(self) -> bool:
        """Tiles of one sequence are nearly equal, and need none."""
        return self.num_splits == 0 and (self.query.shape[0] > 1 or self.query_starts is not None)


def why_not_mla(call: MlaCall, target: Target) -> str | None:
    """Why the universal kernel computes the call instead, or None."""
    query, cache = call.query, call.key_cache
    # first, because all other decoding ends here
    if (query.shape[-1], call.head_dim_v) != (HEAD_DIM_QK, HEAD_DIM_V) or call.value_cache is not None:
        return "it takes MLA caches only: head dim 576, of which the first 512 columns are the values"
    if reason := gluon_compat.why_not_hopper(target):
        return reason
    if query.dtype not in (torch.bfloat16, torch.float16) or cache.dtype is not query.dtype:
        return f"it takes bfloat16 or float16, got {checks.name(query.dtype)}"
    if cache.shape[2] != 1:
        return f"it takes one KV head, got {cache.shape[2]}"
    # a table without columns too: the loader reads an id of a sequence
    if any(x is not None and not x.numel() for x in (query, cache, call.keys.seqlens, call.page_table)):
        return "it takes no empty tensors"
    if call.page_table is not None and copies_rows(cache) and cache.shape[0] * cache.stride(0) >= 2**34:
        return f"with pages of {cache.shape[1]} keys it takes caches of up to 2^34 elements"
    for name, given in (
        ("left window", call.keys.left >= 0),
        ("softcap", call.softcap > 0),
        ("ALiBi", call.alibi_slopes is not None),
        ("cache_batch_idx", call.cache_batch_idx is not None),
        ("cache_leftpad", call.keys.leftpad is not None),
    ):
        if given:
            return f"it does not take {name}"
    # so written, a NaN is refused too
    if not call.scale > 0:
        return f"the scale must be positive, got {call.scale}"
    return _why_not_strides(query, cache)


def _why_not_strides(query: Tensor, cache: Tensor) -> str | None:
    for x in (query, cache):
        if not x.is_meta and x.data_ptr() % 16:
            return "an address is not a multiple of 16 bytes"
        if x.stride(-1) != 1 or any(s % 8 for s in x.stride()[:-1]) or (0 in x.stride()):
            return f"strides must be positive multiples of 16 bytes, got {x.stride()}"
    # rows of a tile are queries times heads
    if query.shape[1] > 1 and query.stride(1) != query.shape[2] * query.stride(2):
        return f"all heads of a query must be stored before the next query, got strides {query.stride()}"
    return None


def launch_mla(call: MlaCall, out: Tensor, lse: Tensor, target: Target) -> None:
    """Writes out [B, S, H, 512] and lse [B, H, S]; B is 1 for packed queries."""
    query = call.query
    b, sq, h, _ = query.shape
    tiles, num_splits = b * cdiv(sq * h, ROWS.value), call.num_splits
    if num_splits == 0 and not call.has_list:
        num_splits = choose_splits(tiles, call.seen, 1, target)
    if num_splits == 1:
        _launch(call, None, 1, tiles, out, lse, None, None, target)
    elif num_splits > 1:
        partial = query.new_empty((num_splits, *out.shape), dtype=torch.float32)
        partial_lse = query.new_empty((num_splits, *lse.shape), dtype=torch.float32)
        _launch(call, None, num_splits, tiles * num_splits, out, lse, partial, partial_lse, target)
        combine(partial, partial_lse, call.sinks, out, lse, out.stride()[:3], None)
    else:
        listed = _tiles_of(call, target)
        partial = query.new_empty((listed.slots, 1, ROWS.value, HEAD_DIM_V), dtype=torch.float32)
        partial_lse = query.new_empty(partial.shape[:-1], dtype=torch.float32)
        _launch(call, listed, 0, listed.most, out, lse, partial, partial_lse, target)
        listed.combine(partial, partial_lse, call.sinks, out, lse, 1, call.max_queries)


def list_mla(call: MlaCall, target: Target) -> Tensor | None:
    """The entries of the list that `launch_mla` makes of such a call; None: it makes none."""
    return _tiles_of(call, target).entries if call.has_list else None


def _tiles_of(call: MlaCall, target: Target) -> TileList:
    b, sq, h, _ = call.query.shape
    return TileList.of(
        call.query_starts, call.keys, sq, h, 1, call.seen, (ROWS.value, BLOCK_N.value, 1), target, _ROUNDS,
        _LEAST_KEYS, _result_keys(b * sq * h // call.batch), by_waves=True, entries=call.entries,
    )  # fmt: skip


def _launch(
    call: MlaCall, listed: TileList | None, num_splits: int, tiles: int, out: Tensor, lse: Tensor,
    partial: Tensor | None, partial_lse: Tensor | None, target: Target,
) -> None:  # fmt: skip
    """`tiles`: at most. `num_splits`: of each sequence, without a list."""
    query, cache, table, keys = call.query, call.key_cache, call.page_table, call.keys
    b, sq, h, _ = query.shape
    q_map, _ = rows_maps(
        Source(query, (b, 1, sq * h, HEAD_DIM_QK), query.stride(0), HEAD_DIM_QK, query.stride(2)), ROWS.value, (64,)
    )
    k_map: TensorMap | None = None
    k_rows: Tensor | None = None
    strides = 0, 0
    if table is not None and copies_rows(cache):
        k_rows, strides = cache, (cache.stride(0) // 8, cache.stride(1) // 8)
    else:
        entries, rows = cache.shape[:2]
        # the largest power of 2 that divides a page's rows
        box = BLOCK_N.value if table is None else min(BLOCK_N.value, rows & -rows)
        k_map, _ = rows_maps(
            Source(cache, (entries, 1, rows, HEAD_DIM_QK), cache.stride(0), HEAD_DIM_QK, cache.stride(1)), box, (64,)
        )
    _hopper_decode_mla_kernel[(min(tiles, target.num_sms),)](
        q_map, k_map, k_rows, keys.seqlens, table, listed and listed.entries,
        counter_of(query) if call.counter is None else call.counter, call.sinks, out, lse, partial, partial_lse,
        call.batch, sq, h, keys.num_new, keys.capacity, num_splits, keys.right,
        0 if table is None else table.stride(0), *strides, call.scale,
        RIGHT=keys.right >= 0, PAGE_SIZE=0 if table is None else cache.shape[1], PACKED=call.query_starts is not None,
        STARTS_EARLY=starts_early(target), num_warps=4,
    )  # fmt: skip
