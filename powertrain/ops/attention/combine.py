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
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    """One row (batch, query, head) and some channels: the splits' results, weighted by exp(lse - max). With `parts`, a
    sequence's are those of its tile's parts; one part alone is the result already."""
    wait_for_kernel_before(STARTS_EARLY)
    # int64: partial results of all splits may exceed 2^31 elements
    row = tl.program_id(0).to(tl.int64)
    head = row % heads
    query = row // heads % num_queries
    batch = row // heads // num_queries
    # slots of results: of the first split, of the second, and from each to the next
    slot, second, step = batch, batch + batches, batches
    if parts_ptr is not None:
        tile = (query * ratio + head % ratio) // block_m
        entry = parts_ptr + (batch * tl.cdiv(num_queries * ratio, block_m) + tile) * 2
        num_splits = tl.load(entry + 1)  # scalar
        # the attention kernel has stored a single part as the result itself
        if num_splits == 1:
            return
        slot, second, step = extra + batch, tl.load(entry).to(tl.int64), 1  # scalar
    of_row, of_lse = query * heads + head, head * num_queries + query
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    lanes, many = tl.arange(0, BLOCK_S), tl.arange(0, 128)
    top = float("-inf")
    sink = float("-inf")
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32)  # scalar
        # the sink is one more score of the whole row: it is counted here, once, not in every split
        top = sink
    for start in range(0, num_splits, 128):
        splits = (start + many).to(tl.int64)
        slots = tl.where(splits == 0, slot, second + (splits - 1) * step) * (num_queries * heads)
        # [128]
        lse = tl.load(partial_lse_ptr + slots + of_lse, mask=splits < num_splits, other=float("-inf"))
        # the maximum first: weights of the second loop cannot overflow then
        top = tl.maximum(top, tl.max(lse, axis=0))
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.exp(sink - safe)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, num_splits, BLOCK_S):
        splits = (start + lanes).to(tl.int64)
        slots = tl.where(splits == 0, slot, second + (splits - 1) * step) * (num_queries * heads)
        # [BLOCK_S]
        lse = tl.load(partial_lse_ptr + slots + of_lse, mask=splits < num_splits, other=float("-inf"))
        weight = tl.exp(lse - safe)
        total += tl.sum(weight, axis=0)
        offsets = (slots + of_row)[:, None] * HEAD_DIM_V + dims[None, :]
        mask = (splits < num_splits)[:, None] & (dims < HEAD_DIM_V)[None, :]
        partial = tl.load(partial_ptr + offsets, mask=mask, other=0.0)  # [BLOCK_S, BLOCK_D]
        # the load does not wait for the LSE; what a part without keys left there may be NaN
        acc += tl.sum(tl.where(lse[:, None] > float("-inf"), weight[:, None] * partial, 0.0), axis=0)
    # a row that no split saw has total 0 and gives 0
    acc = acc / tl.where(total > 0.0, total, 1.0)
    out_row = batch * stride_ob + query * stride_os + head * stride_oh
    tl.store(out_ptr + out_row + dims, acc.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM_V)  # [BLOCK_D]
    if lse_ptr is not None:
        result = tl.where(total > 0.0, safe + tl.log(total), float("-inf"))
        tl.store(lse_ptr + batch * heads * num_queries + of_lse, result)  # scalar


class PartTable(NamedTuple):
    """Parts of each sequence's keys, where sequences have different numbers of them."""

    parts: (
        Tensor  # [B, tiles, 2] int32: slot of the second part's result, number of parts; one alone is in `out` already
    )
    heads_per_kv: int
    block_m: int  # rows (query, query head of a kv head) of a tile
    extra: int  # slot of the first sequence's first part; those of the others follow


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
    # many splits at a time, for the loads of one batch wait for those of the last; with many rows, few, so that more
    # rows are on an SM. us, one H200: 31 short sequences and one of 64 splits 5.7 (8: 12.5); 8 queries of 32 sequences,
    # 8192 rows, 8: 12.5 (32: 22.3); on two warps 7.8 and 24.9; 4096 rows, 32: 12.5, as long as twice as many with 8.
    # Few rows leave room on the SMs, so two warps share one. In the L2, 32 and 64 at a time, two warps: 144 rows of 64
    # splits 4.6, 3.8, of 128 7.1, 5.5; 512 rows 5.9, 5.6 and 9.3, 8.4. With a table most sequences have fewer
    rows = b * sq * h
    at_a_time, num_warps = 8 if rows > 2048 else 32, 2 if rows <= 512 else 1
    if rows <= 512 and table is None:
        at_a_time = 64
    parts, ratio, block_m, extra = table or (None, 1, 1, 0)
    _combine_kernel[(rows, cdiv(head_dim_v, block_d))](
        partial, partial_lse, sinks, out, lse, parts, b, sq, h, partial.shape[0], ratio, block_m, extra, *strides,
        HEAD_DIM_V=head_dim_v, BLOCK_S=min(at_a_time, next_power_of_2(partial.shape[0])), BLOCK_D=block_d,
        STARTS_EARLY=starts_early(Target.of(out.device)), num_warps=num_warps,
    )  # fmt: skip
