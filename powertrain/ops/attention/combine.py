"""Partial results over splits of the keys, combined by their LSE: the last step of decoding and of the Hopper
forward."""

from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from powertrain.ops.attention.triton.sequences import SMALL
from powertrain.ops.early_start import starts_early, wait_for_kernel_before
from powertrain.ops.shapes import cdiv, next_power_of_2
from powertrain.runtime.launch import kernel
from powertrain.runtime.target import Target


@kernel(unaligned=SMALL)
def _combine_kernel(
    partial_ptr,
    partial_lse_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    parts_ptr,
    batches,
    num_queries,
    heads,
    num_splits,
    ratio,
    block_m,
    extra,
    stride_ob,
    stride_os,
    stride_oh,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    """BLOCK_H heads of one query, some channels: the splits' results, weighted by exp(lse - max), BLOCK_S splits at a
    time. With `parts`, a sequence's are those of its tile's parts; one part alone is the result already."""
    wait_for_kernel_before(STARTS_EARLY)
    batch = tl.program_id(0) // num_queries
    query = tl.program_id(0) % num_queries
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_row = head < heads
    count = num_splits
    if parts_ptr is not None:
        tile = (query * ratio + head % ratio) // block_m
        entry = parts_ptr + (batch * tl.cdiv(num_queries * ratio, block_m) + tile) * 2
        second = tl.load(entry, mask=is_row, other=0)  # [BLOCK_H]
        count = tl.load(entry + 1, mask=is_row, other=0)  # [BLOCK_H]
        # the attention kernel has stored a single part as the result itself
        is_row = is_row & (count > 1)
        num_splits = tl.max(tl.where(is_row, count, 0))
    # int64: partial results may exceed 2^31 elements
    of_row, of_lse = (query * heads + head).to(tl.int64), head * num_queries + query
    dims = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM_V
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    if sinks_ptr is not None:
        # the sink is one more score of the whole row: it is counted here, once, not in every split
        top = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32)  # [BLOCK_H]
        total = tl.where(top > float("-inf"), 1.0, 0.0)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    slot_rows = (num_queries * heads).to(tl.int64)
    for start in range(0, num_splits, BLOCK_S):
        splits = (start + tl.arange(0, BLOCK_S))[:, None]
        # where the first split's results are, the second's, and those of others behind it
        if parts_ptr is None:
            slots = batch + splits * batches
        else:
            slots = tl.where(splits == 0, extra + batch, second[None, :] + splits - 1)
        slots = slots.to(tl.int64) * slot_rows
        is_split = is_row[None, :] & (splits < count)
        # [BLOCK_S, BLOCK_H]
        lse = tl.load(partial_lse_ptr + (slots + of_lse[None, :]), mask=is_split, other=float("-inf"))
        offsets = (slots * HEAD_DIM_V)[:, :, None] + (of_row[:, None] * HEAD_DIM_V + dims[None, :])[None, :, :]
        # the load does not wait for the LSE
        partial = tl.load(partial_ptr + offsets, mask=is_split[:, :, None] & is_dim[None, None, :], other=0.0)
        higher = tl.maximum(top, tl.max(lse, axis=0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        scale = tl.exp(top - safe)
        weight = tl.exp(lse - safe[None, :])
        total = total * scale + tl.sum(weight, axis=0)
        # what a part without keys left in its result may be NaN
        partial = tl.where((lse > float("-inf"))[:, :, None], partial, 0.0)
        acc = acc * scale[:, None] + tl.sum(weight[:, :, None] * partial, axis=0)
        top = higher
    # a row that no split saw has total 0 and gives 0
    acc = acc * (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
    out_ptr += batch.to(tl.int64) * stride_ob + query.to(tl.int64) * stride_os
    to = out_ptr + head.to(tl.int64)[:, None] * stride_oh + dims[None, :]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_dim[None, :])
    if lse_ptr is not None:
        result = tl.where(total > 0.0, top + tl.log(total), float("-inf"))
        tl.store(lse_ptr + batch * slot_rows + of_lse, result, mask=is_row)  # [BLOCK_H]


class PartTable(NamedTuple):
    """Parts of each sequence's keys, where sequences have different numbers of them."""

    parts: (
        Tensor  # [B, tiles, 2] int32: slot of the second part's result, number of parts; one alone is in `out` already
    )
    heads_per_kv: int
    block_m: int  # rows (query, query head of a kv head) of a tile
    extra: int  # slot of the first sequence's first part; those of the others follow


class _Tile(NamedTuple):
    heads: int  # of a query, a power of 2
    splits: int  # at a time
    warps: int


def _tile_of(rows: int, splits: int | None) -> _Tile:
    """Of so many rows (batch, query, head) and splits of each, None where rows have different numbers of them.

    Few rows: all splits at once, on several warps, for the next ones wait for these. Many: several heads in a program,
    for 0.8 programs a ns start, and on one warp, which needs no shared memory between its lanes. us, head dim 128, one
    H200, in the L2, (heads, splits, warps): 8 rows of 16 splits (1, 16, 2) 1.6, (1, 16, 1) 1.8; of 64 (1, 64, 4) 2.7,
    (1, 16, 2) 3.6; 512 of 16 (1, 16, 1) 2.6, (1, 16, 2) 3.1; 2048 of 8 (1, 4, 1) 3.1, (2, 8, 1) 3.9; 8192 of 2
    (4, 2, 1) 4.4, (2, 2, 1) 5.6, of 4 (4, 4, 1) 5.6, a program a row 10.5. Of rows with different numbers only whole
    decoding calls were timed (benchmarks/results/2026-11-29_h200_few_queries.md)."""
    if splits is None:
        return _Tile(1, 32, 4) if rows <= 256 else _Tile(1, 16, 1) if rows <= 2048 else _Tile(2, 8, 1)
    if rows > 4096 and splits <= 8:
        return _Tile(4, 2 if splits == 2 else 4, 1)
    if splits <= 8:
        return _Tile(2 if rows > 1024 and splits <= 4 else 1, 4, 1)
    if rows > 256:
        return _Tile(1, 16, 1)
    return _Tile(1, 16, 2) if splits <= 16 else _Tile(1, 32, 4) if splits <= 32 else _Tile(1, 64, 4)


def combine(
    partial: Tensor,
    partial_lse: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    strides: tuple[int, ...],
    table: PartTable | None = None,
) -> None:
    """Results of parts of the keys, weighted by their LSE, into `out`, with these strides by batch, query and head, and
    `lse` [B, H, S], or [H, S] if B is 1. partial [splits, B, S, H, E] and partial_lse [splits, *lse's shape], float32;
    with a table [slots, S, H, E] and [slots, H, S]. A partial result whose LSE is -inf is ignored."""
    sq, h, head_dim_v = partial.shape[-3:]
    # of packed sequences partial results have a batch of one, and lse [H, S] has no batch
    b = partial.shape[1] if table is None else lse.shape[0]
    block_d = min(128, next_power_of_2(head_dim_v))
    tile = _tile_of(b * sq * h, None if table else partial.shape[0])
    block_h = min(tile.heads, next_power_of_2(h))
    parts, ratio, block_m, extra = table or (None, 1, 1, 0)
    _combine_kernel[(b * sq, cdiv(h, block_h), cdiv(head_dim_v, block_d))](
        partial, partial_lse, sinks, out, lse, parts, b, sq, h, partial.shape[0], ratio, block_m, extra,
        *strides, HEAD_DIM_V=head_dim_v, BLOCK_H=block_h, BLOCK_S=tile.splits, BLOCK_D=block_d,
        STARTS_EARLY=starts_early(Target.of(out.device)), num_warps=tile.warps,
    )  # fmt: skip
