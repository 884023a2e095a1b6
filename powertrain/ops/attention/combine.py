"""Combines the results of splits over the keys by their LSE: the last step of decoding, and of the Hopper forward where
it splits keys. decode_tiles.py has a kernel of its own for the splits of its list; it uses `add_parts` of this file."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.attention.triton.sequences import SMALL
from powertrain.ops.attention.triton.tiles import LN2, LOG2E
from powertrain.ops.early_start import starts_early, wait_for_kernel_before
from powertrain.ops.shapes import cdiv, next_power_of_2
from powertrain.runtime.launch import kernel
from powertrain.runtime.target import Target


@triton.jit
def add_parts(acc, total, top, lses, parts, AHEAD: tl.constexpr):
    """Add AHEAD blocks of splits to some rows. acc [rows, dims] is the sum of results weighted by 2^(lse - top), total
    the sum of the weights, top the highest LSE so far. lses [splits, rows], base 2, -inf where a row has no such split;
    parts [splits, rows, dims]: the results of the splits."""
    higher = top
    for i in tl.static_range(AHEAD):
        higher = tl.maximum(higher, tl.max(lses[i], axis=0))
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    scale = tl.exp2(top - safe)
    total *= scale
    acc *= scale[:, None]
    for i in tl.static_range(AHEAD):
        weight = tl.exp2(lses[i] - safe[None, :])
        total += tl.sum(weight, axis=0)
        # the result of a split without keys may be NaN
        part = tl.where((lses[i] != float("-inf"))[:, :, None], parts[i], 0.0)
        acc += tl.sum(weight[:, :, None] * part, axis=0)
    return acc, total, higher


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
    AHEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    """For BLOCK_H heads of one query and some channels: the sum of the splits' results, weighted by exp(lse - max).
    AHEAD blocks of BLOCK_S splits are loaded at a time. With `parts`, a sequence has its own number of splits; a single
    split needs no combination."""
    wait_for_kernel_before(STARTS_EARLY)
    # unsigned: half of the instructions
    batch = (tl.program_id(0).to(tl.uint32) // num_queries.to(tl.uint32)).to(tl.int32)
    query = tl.program_id(0) - batch * num_queries
    BLOCKS_D: tl.constexpr = (HEAD_DIM_V + BLOCK_D - 1) // BLOCK_D
    head = tl.program_id(1) // BLOCKS_D * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.program_id(1) % BLOCKS_D * BLOCK_D + tl.arange(0, BLOCK_D)
    is_row = head < heads
    is_dim = dims < HEAD_DIM_V
    # of rows that are none the last one is read
    near = tl.minimum(head, heads - 1)
    count = num_splits
    if parts_ptr is not None:
        tile = (query * ratio + near % ratio) // block_m
        entry = parts_ptr + (batch * tl.cdiv(num_queries * ratio, block_m) + tile) * 2
        second = tl.load(entry)  # [BLOCK_H]
        count = tl.load(entry + 1)  # [BLOCK_H]
        # the attention kernel has stored a single split as the result itself
        is_row = is_row & (count > 1)
        num_splits = tl.max(tl.where(is_row, count, 0))
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    if sinks_ptr is not None:
        # the sink is one more score of the whole row: it is counted here, once, not in every split
        top = tl.load(sinks_ptr + near).to(tl.float32) * LOG2E  # [BLOCK_H]
        total = tl.where(top > float("-inf"), 1.0, 0.0)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    # int64: partial results may exceed 2^31 elements
    slot_rows = (num_queries * heads).to(tl.int64)
    of_lse = near * num_queries + query
    of_row = (query * heads + near).to(tl.int64)[:, None] * HEAD_DIM_V + dims[None, :]
    for start in range(0, num_splits, BLOCK_S * AHEAD):
        lses = ()
        parts = ()
        # no load waits for another
        for i in tl.static_range(AHEAD):
            splits = (start + i * BLOCK_S + tl.arange(0, BLOCK_S))[:, None]
            is_split = splits < count
            # where the first split's results are, the second's, and those of others behind it. Of splits that are none
            # the first one's are read
            splits = tl.where(is_split, splits, 0)
            if parts_ptr is None:
                slots = batch + splits * batches
            else:
                slots = tl.where(splits == 0, extra + batch, second[None, :] + splits - 1)
            slots = slots * slot_rows  # [BLOCK_S, 1 or BLOCK_H]
            lse = tl.load(partial_lse_ptr + (slots + of_lse[None, :]))
            # [BLOCK_S, BLOCK_H]
            lses += (tl.where(is_split, lse * LOG2E, float("-inf")),)  # type: ignore[assignment]
            at = partial_ptr + ((slots * HEAD_DIM_V)[:, :, None] + of_row[None, :, :])
            if HEAD_DIM_V % BLOCK_D == 0:
                parts += (tl.load(at),)  # type: ignore[assignment]
            else:
                parts += (tl.load(at, mask=is_dim[None, None, :], other=0.0),)  # type: ignore[assignment]
        acc, total, top = add_parts(acc, total, top, lses, parts, AHEAD)
    # a row that no split saw has total 0 and gives 0
    divisor = tl.where(total != 0.0, total, 1.0)
    acc = acc * (1.0 / divisor)[:, None]
    out_ptr += batch.to(tl.int64) * stride_ob + query.to(tl.int64) * stride_os
    to = out_ptr + head.to(tl.int64)[:, None] * stride_oh + dims[None, :]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_dim[None, :])
    if lse_ptr is not None:
        result = tl.where(total != 0.0, (top + tl.log2(divisor)) * LN2, float("-inf"))
        tl.store(lse_ptr + batch * slot_rows + of_lse, result, mask=is_row)  # [BLOCK_H]


class PartTable(NamedTuple):
    """Where the results of each sequence's splits are, if sequences have different numbers of splits."""

    # [B, tiles, 2] int32: slot of the second split's result, number of splits; a single split's result is in `out`
    parts: Tensor
    heads_per_kv: int
    block_m: int  # rows (query, query head of a KV head) of a tile
    extra: int  # slot of the first sequence's first split; those of the others follow


class Rows(NamedTuple):
    """The rows that one program combines."""

    heads: int  # of a query, a power of 2
    splits: int  # at a time, which warps share
    ahead: int  # as many of these are loaded before the first is added
    warps: int


def rows_of(rows: int, splits: int | None) -> Rows:
    """Of so many rows (batch, query, head) and splits of each, None where rows have different numbers of them.

    Few splits or many rows: a warp a head, which has all splits of its channels, so that warps exchange nothing. Else a
    head a program, whose splits the warps share. us with the launch, one H200, in the L2, head dim 128, by (heads,
    splits, ahead, warps): 64 rows of 2 (4, 1, 2, 4) 4.0; of 8 (4, 1, 8, 4) 4.5, (1, 8, 1, 2) 4.8; of 32 (1, 32, 1, 4)
    5.5, (1, 16, 1, 2) 6.5; 768 rows of 16 (1, 16, 1, 2) 6.8, (4, 1, 8, 4) 7.4; 2048 of 16 (4, 1, 4, 4) 10.1; 6144 of 2
    (4, 1, 2, 4) 7.0, (4, 1, 4, 4) 7.6. Of rows with different numbers of splits whole decoding calls were timed
    (benchmarks/results/2026-11-29_h200_where_few_queries_wait.md)."""
    if splits is None:
        return Rows(1, 32, 1, 4) if rows <= 256 else Rows(1, 16, 1, 2) if rows <= 2048 else Rows(4, 1, 4, 4)
    if splits <= 8:
        return Rows(4, 1, 2 if splits == 2 else 4 if splits <= 4 else 8, 4)
    if rows > 1024:
        return Rows(4, 1, 4, 4)
    if rows > 256 or splits <= 16:
        return Rows(1, 16, 1, 2)
    return Rows(1, 64, 1, 8) if splits > 32 and rows <= 64 else Rows(1, 32, 1, 4)


def combine(
    partial: Tensor,
    partial_lse: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    strides: tuple[int, ...],
    table: PartTable | None = None,
) -> None:
    """Combine the results of splits, weighted by their LSE, into `out`, with strides by batch, query and head, and
    `lse` [B, H, S], or [H, S] if B is 1. partial [splits, B, S, H, E] and partial_lse [splits, *lse's shape], float32;
    with a table [slots, S, H, E] and [slots, H, S]. A partial result whose LSE is -inf is ignored."""
    sq, h, head_dim_v = partial.shape[-3:]
    # of packed sequences partial results have a batch of one, and lse [H, S] has no batch
    b = partial.shape[1] if table is None else lse.shape[0]
    block_d = min(128, next_power_of_2(head_dim_v))
    tile = rows_of(b * sq * h, None if table else partial.shape[0])
    block_h = min(tile.heads, next_power_of_2(h))
    parts, ratio, block_m, extra = table or (None, 1, 1, 0)
    _combine_kernel[(b * sq, cdiv(h, block_h) * cdiv(head_dim_v, block_d))](
        partial, partial_lse, sinks, out, lse, parts, b, sq, h, partial.shape[0], ratio, block_m, extra,
        *strides, HEAD_DIM_V=head_dim_v, BLOCK_H=block_h, BLOCK_S=tile.splits, AHEAD=tile.ahead,
        BLOCK_D=block_d, STARTS_EARLY=starts_early(Target.of(out.device)), num_warps=tile.warps,
    )  # fmt: skip
