"""The Hopper decoding kernel for MLA: head dim 576, whose first 512 columns are the values, one head of keys.

    s = scale * q kᵀ,  masked;   o = softmax(s) k[:, :512];   lse = log sum exp(s)

A program has 64 rows (queries times heads) and a part of a sequence's keys, as the universal kernel's programs have
(decode_kernels.py), and leaves the same results for the same combination. Two *consumers* hold 256 columns of o each,
128 registers a thread. Blocks of 64 keys belong to them alternately: the owner computes the block's scores and weights
p, keeps p in registers for its own columns, and stores p and the running maximum in shared memory for the other
consumer. A block is loaded once, [64, 576] into one of two stages, and serves as keys and as values. Its halves of 256
columns are released one by one: the last read of a half is as values, by the consumer that holds those columns.

The latency of loads must be hidden: with two stages, a stage can be loaded only between the last product of its block
and the scores of the block that comes next into it. So the first consumer adds the second one's block to its sums
before it computes its own next scores, and pieces of the keys have barriers of their own.

Shared memory: q 72 KiB, two stages of 72 KiB, p 8 KiB, in all 226 of 227 KiB. One buffer of p is enough: the consumer
that stores weights is the one that read the weights before.

What bounds it, a block (8.9 MFLOP): the tensor cores need 2176 clocks; shared memory 2300 (products with q and k both
read from it, and the arriving block); the L2 sends 72 KiB, one byte for 121 FLOP.

Source: the alternating schedule of two warpgroups is that of FlashMLA (DeepSeek 2025) and of forward_d512.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from powertrain.ops.attention.hopper.decode_mla_consumer import consume
from powertrain.ops.attention.hopper.decode_mla_producer import produce
from powertrain.ops.attention.hopper.decode_mla_tiles import (
    BLOCK_N,
    HALF,
    ROWS,
    TAIL,
    Buffers,
    Part,
    Results,
    Sizes,
    Sync,
)
from powertrain.ops.attention.hopper.maps import Source, rows_maps
from powertrain.ops.attention.hopper.primitives import alloc_mbarriers, alloc_pipeline_stages, int32
from powertrain.ops.attention.triton.sequences import SMALL
from powertrain.ops.early_start import starts_early, wait_for_kernel_before
from powertrain.runtime import checks, gluon_compat
from powertrain.runtime.gluon_compat import gl, hopper
from powertrain.runtime.launch import gluon_kernel
from powertrain.runtime.target import Target

HEAD_DIM_QK, HEAD_DIM_V = 576, 512
# rows of a tile, keys of a block, programs that run on one SM at a time
PLAN = ROWS.value, BLOCK_N.value, 1
# columns of keys that complete one barrier: scores begin when the first piece is there
PIECE = 256


@gluon_kernel(archs=(90,), unaligned=SMALL)
def _hopper_decode_mla_kernel(
    q_desc, k_desc, seqlens_ptr, page_table_ptr, sinks_ptr, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, parts_ptr,
    batches, num_queries, heads, num_new, capacity, num_parts, right, page_row, scale,
    RIGHT: gl.constexpr, PAGE_SIZE: gl.constexpr, BOX: gl.constexpr, PIECE: gl.constexpr,
    STARTS_EARLY: gl.constexpr,
):  # fmt: skip
    wait_for_kernel_before(STARTS_EARLY)
    dtype: gl.constexpr = q_desc.dtype
    batches, num_queries, heads = int32(batches), int32(num_queries), int32(heads)
    num_new, capacity, num_parts, right = int32(num_new), int32(capacity), int32(num_parts), int32(right)
    tiles = gl.cdiv(num_queries * heads, ROWS)
    tile = gl.program_id(0) % tiles
    number = gl.program_id(1)
    if parts_ptr is not None:
        of_part = parts_ptr + (tile * num_parts + number) * 3
        batch, split, parts = gl.load(of_part), gl.load(of_part + 1), gl.load(of_part + 2)  # scalars
        # results of first parts lie behind those of all others, where the combination finds them
        slot = gl.where(split == 0, num_parts - batches + batch, number)
    else:
        batch = gl.program_id(0) // tiles
        split, parts = number, num_parts
        slot = split * batches + batch
    if batch < batches:
        length = gl.minimum(gl.load(seqlens_ptr + batch).to(gl.int32) + num_new, capacity)
        last = length
        if RIGHT:
            last_query = gl.minimum((tile * ROWS + ROWS - 1) // heads, num_queries - 1)
            last = gl.minimum(last, last_query + (length - num_queries) + right + 1)
        last = gl.maximum(last, 0)
        blocks = gl.cdiv(last, BLOCK_N)
        share = gl.cdiv(blocks, parts)
        begin = split * share
        count = gl.maximum(gl.minimum(share, blocks - begin), 1)
        part = Part(batch, slot, (parts == 1).to(gl.int32), tile * ROWS, length, last, begin, count)

        rows_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        buffers = Buffers(
            alloc_pipeline_stages(dtype, 2, ROWS, HALF),
            alloc_pipeline_stages(dtype, 1, ROWS, TAIL),
            alloc_pipeline_stages(dtype, 4, BLOCK_N, HALF),
            alloc_pipeline_stages(dtype, 2, BLOCK_N, TAIL),
            alloc_pipeline_stages(dtype, 1, ROWS, BLOCK_N),
            gl.allocate_shared_memory(gl.float32, [2, ROWS], rows_layout),
            gl.allocate_shared_memory(gl.float32, [2, ROWS], rows_layout),
        )
        sync = Sync(alloc_mbarriers(3, 1), alloc_mbarriers(4 * HALF // PIECE + 2, 1))
        hopper.fence_async_shared()
        sizes = Sizes(num_queries, heads, right)
        results = Results(out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, sinks_ptr)
        # registers of a thread; of the 65536 of an SM, 232 * 256 + 40 * 128 are used. With 24 the loader of pages of 16
        # spilled 12 bytes
        gl.warp_specialize([
            (consume, (results, part, sizes, scale, buffers, sync, RIGHT, PIECE, 0)),
            (consume, (results, part, sizes, scale, buffers, sync, RIGHT, PIECE, 1)),
            (produce, (q_desc, k_desc, page_table_ptr, page_row, buffers, sync, part, PAGE_SIZE, BOX, PIECE)),
        ], [4, 1], [232, 40])  # fmt: skip


class MlaCall(NamedTuple):
    """A call of decode_attention's kernels, as far as this kernel's limits and arguments ask."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor | None
    head_dim_v: int
    page_table: Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    alibi_slopes: Tensor | None
    left: int
    softcap: float
    scale: float


def why_not_mla(call: MlaCall, target: Target) -> str | None:
    """Why the universal kernel serves, or None."""
    query, cache = call.query, call.key_cache
    size = cache.shape[1]
    # first, because all other decoding ends here
    if (query.shape[-1], call.head_dim_v) != (HEAD_DIM_QK, HEAD_DIM_V) or call.value_cache is not None:
        return "it takes head dim 576 whose first 512 columns are the values"
    if reason := gluon_compat.why_not_hopper(target):
        return reason
    if query.dtype not in (torch.bfloat16, torch.float16) or cache.dtype is not query.dtype:
        return f"it takes bfloat16 and float16, not {checks.name(query.dtype)}"
    if cache.shape[2] != 1:
        return f"it takes one kv head, got {cache.shape[2]}"
    if not query.numel() or not cache.numel():
        return "it takes no empty tensors"
    if call.page_table is not None and size % BLOCK_N.value and size not in (16, 32):
        return f"it takes pages of 16, 32 and multiples of 64, got {size}"
    for name, given in (
        ("a left window", call.left >= 0),
        ("softcap", call.softcap > 0),
        ("ALiBi", call.alibi_slopes is not None),
        ("cache_batch_idx", call.cache_batch_idx is not None),
        ("cache_leftpad", call.cache_leftpad is not None),
    ):
        if given:
            return f"it has no {name}"
    # so written, a NaN is refused too
    if not call.scale > 0:
        return f"the scale must be positive, is {call.scale}"
    return _why_not_strides(query, cache)


def _why_not_strides(query: Tensor, cache: Tensor) -> str | None:
    for x in (query, cache):
        if not x.is_meta and x.data_ptr() % 16:
            return "an address is not a multiple of 16"
        if x.stride(-1) != 1 or any(s % 8 for s in x.stride()[:-1]) or (0 in x.stride()):
            return f"strides must be positive multiples of 16 bytes, are {x.stride()}"
    # rows of a tile are queries times heads
    if query.shape[1] > 1 and query.stride(1) != query.shape[2] * query.stride(2):
        return f"heads of one query must lie before the next query, strides are {query.stride()}"
    return None


def launch_mla(
    call: MlaCall, seqlens: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, partial: Tensor | None,
    partial_lse: Tensor | None, parts: Tensor | None, grid: tuple[int, int], num_parts: int, num_new: int, right: int,
    target: Target,
) -> None:  # fmt: skip
    """The attention of `_decode_kernel`, with the same parts and results."""
    query, cache, table = call.query, call.key_cache, call.page_table
    b, sq, h, _ = query.shape
    entries, size = cache.shape[:2]
    paged = 0 if table is None else size
    box = min(paged, BLOCK_N.value) if paged else BLOCK_N.value
    q_map, _ = rows_maps(
        Source(query, (b, 1, sq * h, HEAD_DIM_QK), query.stride(0), HEAD_DIM_QK, query.stride(2)), ROWS.value, (64,)
    )
    k_map, _ = rows_maps(
        Source(cache, (entries, 1, size, HEAD_DIM_QK), cache.stride(0), HEAD_DIM_QK, cache.stride(1)), box, (64,)
    )
    _hopper_decode_mla_kernel[grid](
        q_map, k_map, seqlens, table, sinks, out, lse, partial, partial_lse, parts, b, sq, h, num_new,
        size if table is None else size * table.shape[1], num_parts, right, 0 if table is None else table.stride(0),
        call.scale, RIGHT=right >= 0, PAGE_SIZE=paged, BOX=box, PIECE=PIECE,
        STARTS_EARLY=starts_early(target),
        num_warps=4,
    )  # fmt: skip
