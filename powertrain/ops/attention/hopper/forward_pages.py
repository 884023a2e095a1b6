"""The Hopper forward over caches, in pages or dense: packed queries, such as chunks of prompts with single new tokens
among them, or the same number of queries of each sequence, one or more.

The kernel is that of forward.py: tiles of 64 to 192 rows of one sequence (queries, times query heads of a KV head where
queries are few) and blocks of 64 or 128 keys, which the loader finds through the page table: by TMA, or row by row
where 8 rows in a page need not lie side by side (`copies_rows`). Pages ahead of a window are not read.

The host knows neither the lengths nor how many queries each sequence has. So a list made on the device says which tiles
there are and into how many parts the keys of each are cut, by the blocks of keys that it sees (decode_tiles.py): the
CTAs take its entries from a counter, the longest first, so that few tiles need be cut for all CTAs to end together. One
sequence alone, packed or not, has no list: the keys of each of its tiles are cut into the same number of parts, chosen
from shapes (splits.py).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from powertrain.ops.attention.decode_schedule import KeysSeen
from powertrain.ops.attention.decode_tiles import TileList
from powertrain.ops.attention.hopper.forward import launch_forward
from powertrain.ops.attention.hopper.maps import copies_rows
from powertrain.ops.attention.hopper.plans import (
    Plan,
    heads_per_tile_for,
    most_tiles,
    plan_for,
    with_consumers,
    work_of,
)
from powertrain.ops.attention.hopper.splits import num_splits_for
from powertrain.ops.attention.operands import Heads, OpArguments, Operand, Operands
from powertrain.runtime import checks, gluon_compat
from powertrain.runtime.target import Target


class Cut(NamedTuple):
    """How the keys of tiles are cut into parts, and in which order parts are taken."""

    rounds: int  # the work of a CTA is cut into so many parts or fewer
    least_keys: int  # of a part
    result_keys: int  # keys that take as long as storing and combining the results of a part
    together: int  # groups of heads that take the same entry of the list one after another


def cut_for(rows: int) -> Cut:
    """`rows`: queries times heads of a KV head, of a sequence on average.

    Storing and combining results of 128 rows costs as much as three or four blocks of 128 keys. On one H100 two
    groups of heads together are 6 to 8 % faster than eight where a sequence has 2 or 3 tiles, eight 3 to 4 % faster
    where it has few rows and memory is the limit."""
    return Cut(3, 128, 72 + 3 * min(rows, 128), 2 if 128 < rows < 512 else 8)


class PagedCall(NamedTuple):
    """Arguments of decode_attention that the kernel reads."""

    query: Tensor  # [T, H, D] packed, or [B, S, H, D]
    key_cache: Tensor  # [pages, rows, K, D], or [entries, rows, K, D]
    value_cache: Tensor | None
    query_starts: Tensor | None  # [B + 1]; None: queries are not packed
    seqlens: Tensor  # [B]
    page_table: Tensor | None  # [B, pages]; None: sequence n is entry n
    leftpad: Tensor | None
    slopes: Tensor | None
    sinks: Tensor | None
    left: int
    right: int
    softcap: float
    scale: float
    num_new: int = 0  # keys of each sequence beyond `seqlens`
    entries: Tensor | None = None  # of `list_pages`, from a call with these arguments; None: the call makes its own
    counter: Tensor | None = None  # an int32 that is 0, and is left so; None: that of the stream


def why_not_cache(call: PagedCall, cache_batch_idx: Tensor | None, target: Target) -> str | None:
    """Why the universal decoding kernel computes the call instead, or None."""
    query, keys, values = call.query, call.key_cache, call.value_cache
    if reason := gluon_compat.why_not_hopper(target):
        return reason
    if values is None:
        return "it does not read values out of the keys (value_cache=None)"
    if cache_batch_idx is not None:
        return "it does not take cache_batch_idx"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 or float16, got {checks.name(query.dtype)}"
    dims = query.shape[-1], values.shape[-1]
    if max(dims) > 256 or any(dim % 8 for dim in dims):
        return f"head dims must be multiples of 8 up to 256, got {dims[0]} and {dims[1]}"
    if call.page_table is not None and copies_rows(keys) and max(_extent(x) for x in (keys, values)) >= 2**34:
        return f"with pages of {keys.shape[1]} keys it takes caches of up to 2^34 elements, got {_extent(keys)}"
    # a table without columns too: the loader reads an id of a sequence without keys
    if any(x is not None and not x.numel() for x in (query, keys, call.seqlens, call.page_table)):
        return "it takes no empty tensors"
    if call.leftpad is not None:
        return "it does not take cache_leftpad"
    if not call.scale > 0:
        return f"the scale must be positive, got {call.scale}"
    for x in (query, keys, values):
        if not x.is_meta and x.data_ptr() % 16:
            return "an address is not a multiple of 16 bytes"
        if x.stride(-1) != 1 or any(s % 8 for s in x.stride()[:-1]) or 0 in x.stride():
            return f"strides must be positive multiples of 16 bytes, got {x.stride()}"
    return None


def _extent(cache: Tensor) -> int:
    return cache.shape[0] * cache.stride(0)


def launch_pages(call: PagedCall, max_queries: int, target: Target) -> tuple[Tensor, Tensor]:
    """(out [T, H, E], lse [H, T]) of packed queries, whose rows of no sequence are 0 and -inf; (out [B, S, H, E], lse
    [B, H, S]) of others. `why_not_cache` has the limits."""
    operands = _operands_of(call, target)
    plan = plan_of_pages(operands, max_queries)
    if operands.batch == 1:
        # tiles of one sequence are nearly equal: 1024 queries beside 32768 keys take 781 us, with a list 813 (one H100)
        plan = _in_equal_parts(operands, plan)
        return launch_forward(operands, plan, call.page_table, new_keys=call.num_new, counter=call.counter)
    listed = _tiles_of(call, operands, plan, max_queries)
    together = math.gcd(plan.groups_of(operands.heads), _cut_of(operands).together)
    return launch_forward(operands, plan, call.page_table, listed, together, max_queries, counter=call.counter)


def list_pages(call: PagedCall, max_queries: int, target: Target) -> Tensor | None:
    """The entries of the list that `launch_pages` makes of such a call; None: it makes none."""
    operands = _operands_of(call, target)
    if operands.batch == 1:
        return None
    return _tiles_of(call, operands, plan_of_pages(operands, max_queries), max_queries).entries


def _cut_of(operands: Operands) -> Cut:
    return cut_for(operands.queries * operands.storage * operands.heads.q_per_kv // operands.batch)


def _tiles_of(call: PagedCall, operands: Operands, plan: Plan, max_queries: int) -> TileList:
    cut = _cut_of(operands)
    keys = KeysSeen(call.seqlens, None, call.num_new, operands.keys, call.left, call.right)
    seen = _most_seen(operands, max_queries)
    return TileList.of(
        call.query_starts, keys, operands.queries, plan.heads_per_tile, plan.groups_of(operands.heads), seen,
        (plan.queries * plan.heads_per_tile, plan.block_n, 1), operands.target, cut.rounds, cut.least_keys,
        cut.result_keys, entries=call.entries,
    )  # fmt: skip


def _operands_of(call: PagedCall, target: Target) -> Operands:
    query, keys, values, table = call.query, call.key_cache, call.value_cache, call.page_table
    assert values is not None
    is_packed = call.query_starts is not None
    args = OpArguments(
        None, call.slopes, call.sinks, None, None, None, call.query_starts, None, None, call.seqlens, None,
        "thd" if is_packed else "bshd", call.scale, call.softcap, 0.0, call.left, call.right, 0, True,
    )  # fmt: skip
    heads, kv_heads = query.shape[-2], keys.shape[2]
    ratio, batch = heads // kv_heads, call.seqlens.shape[0]
    of_batch = 0 if is_packed else query.stride(0)
    q, k, v = (
        Operand(query, of_batch, query.stride(-3), query.stride(-2) * ratio, query.stride(-2)),
        *(Operand(x, x.stride(0), x.stride(1), x.stride(2), 0) for x in (keys, values)),
    )
    capacity = keys.shape[1] * (1 if table is None else table.shape[1])
    return Operands(
        args, target, Heads(kv_heads, ratio, ratio, 1, ratio > 1), is_packed, batch, 1 if is_packed else batch,
        query.shape[-3], capacity, query.shape[-1], values.shape[-1], q, k, v,
    )  # fmt: skip


def _most_seen(operands: Operands, max_queries: int) -> int:
    """The most keys of a sequence that are read."""
    left = operands.args.left
    return min(operands.keys, left + max_queries) if left >= 0 else operands.keys


def _in_equal_parts(operands: Operands, plan: Plan) -> Plan:
    work = work_of(operands, plan, operands.queries, operands.keys)
    return plan._replace(num_splits=num_splits_for(work))


def plan_of_pages(operands: Operands, max_queries: int) -> Plan:
    """Tiles of 64 rows where these are faster; else larger ones, above head dim 64 by warpgroups with shared code."""
    plan = plan_for(operands.d_qk, operands.d_v, max_queries)
    small = _with_packed_heads(operands, with_consumers(plan, 1), max_queries)
    # one tile of 64 rows holds all of a sequence: us, one H200, with 128 rows and so: 8 sequences of 365 to 1061 keys
    # H8/1 18.2, 17.0; 3 to 8259 H40/8 41, 30; 64 to 2766 H64/8 104, 97; 32 of 500 to 32k H32/8 327, 326
    if max_queries * operands.heads.q_per_kv <= 64 or _is_faster_in_small_tiles(operands, small, max_queries):
        return small
    if max(operands.d_qk, operands.d_v) > 64:
        # us, one H200, with two consumers and so: 100 chunks of 20 to 600 queries beside 2600 keys H28/4 1018, 954; 32
        # chunks of 256 H32/8 2054, 1999; 4 chunks of 512 beside 28 tokens 436, 427
        plan = with_consumers(plan, 1, warps=8)
    return _with_packed_heads(operands, plan, max_queries)


def _is_faster_in_small_tiles(operands: Operands, small: Plan, max_queries: int) -> bool:
    """Whether tiles of 64 rows are faster than larger ones though a sequence fills several: their code is shorter, so
    they start sooner. So they are where all run at once and memory is the limit: rows are few on average, or keys are.

    us, one H200, nothing in the L2, with 128 rows and 64: a chunk of 32 and 7 tokens beside 424 to 1724 keys H8/1 19.3,
    16.3; 3 of 128 beside 505 H12/2 22.5, 18.7; 8 of 16 beside 214 to 295 H28/4 19.4, 17.2; geometric mean of 21 random
    batches 0.90, slowest 1.05. But a chunk of 256 and 2 tokens beside 1546 to 3955 H40/8, 192 tiles, 40.5, 67.7; 8 of
    32 beside 625 to 14838 H28/4, 144 tiles, 54.1, 70.8."""
    rows = operands.queries * operands.storage * operands.heads.q_per_kv
    is_few = rows <= 128 * operands.batch or _most_seen(operands, max_queries) <= 2048
    return operands.batch > 1 and is_few and most_tiles(operands, small) <= operands.target.num_sms


def _with_packed_heads(operands: Operands, plan: Plan, max_queries: int) -> Plan:
    """With as many heads in one tile as makes the fewest tiles of the mean number of queries."""
    # a tile has one slope
    if operands.args.slopes is not None:
        return plan
    is_ragged = operands.is_packed and operands.queries < operands.batch * max_queries
    mean = max(1, operands.queries // operands.batch) if operands.is_packed else operands.queries
    pack = heads_per_tile_for(operands.heads.q_per_kv, mean, plan.block_m, is_ragged)
    return plan._replace(heads_per_tile=pack, partial=operands.heads.q_per_kv % pack > 0)
