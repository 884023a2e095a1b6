"""Partial results over splits of the keys, combined by their LSE: the last step of decoding and of the Hopper
forward."""

import triton.language as tl
from torch import Tensor

from powertrain.ops.shapes import cdiv, next_power_of_2
from powertrain.runtime.launch import kernel


@kernel()
def _combine_kernel(
    partial_ptr,
    partial_lse_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    rows,
    num_queries,
    heads,
    num_splits,
    stride_ob,
    stride_os,
    stride_oh,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One row (batch, query, head) and some channels: the splits' results, weighted by exp(lse - max)."""
    row = tl.program_id(0).to(tl.int64)
    head = row % heads
    query = row // heads % num_queries
    batch = row // heads // num_queries
    lse_row = (batch * heads + head) * num_queries + query
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    lanes = tl.arange(0, BLOCK_S)
    top = float("-inf")
    sink = float("-inf")
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32)  # scalar
        top = sink
    for start in range(0, num_splits, BLOCK_S):
        splits = (start + lanes).to(tl.int64)
        # [BLOCK_S]
        lse = tl.load(partial_lse_ptr + splits * rows + lse_row, mask=splits < num_splits, other=float("-inf"))
        top = tl.maximum(top, tl.max(lse, axis=0))
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.exp(sink - safe)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, num_splits, BLOCK_S):
        splits = (start + lanes).to(tl.int64)
        # [BLOCK_S]
        lse = tl.load(partial_lse_ptr + splits * rows + lse_row, mask=splits < num_splits, other=float("-inf"))
        weight = tl.exp(lse - safe)
        total += tl.sum(weight, axis=0)
        offsets = (splits * rows + row)[:, None] * HEAD_DIM_V + dims[None, :]
        mask = (lse > float("-inf"))[:, None] & (dims < HEAD_DIM_V)[None, :]
        # partial: [BLOCK_S, BLOCK_D]
        acc += tl.sum(weight[:, None] * tl.load(partial_ptr + offsets, mask=mask, other=0.0), axis=0)
    acc = acc / tl.where(total > 0.0, total, 1.0)
    out_row = batch * stride_ob + query * stride_os + head * stride_oh
    tl.store(out_ptr + out_row + dims, acc.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM_V)  # [BLOCK_D]
    if lse_ptr is not None:
        tl.store(lse_ptr + lse_row, tl.where(total > 0.0, safe + tl.log(total), float("-inf")))  # scalar


def combine(
    partial: Tensor, partial_lse: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, strides: tuple[int, ...]
) -> None:
    """Results of parts of the keys, weighted by their LSE, into `out`, with these strides by batch, query and head, and
    `lse` [B, H, S]. partial [splits, B, S, H, E] and partial_lse [splits, B, H, S], float32; of a part with LSE -inf
    nothing is read."""
    num_splits, b, sq, h, head_dim_v = partial.shape
    block_d = min(128, next_power_of_2(head_dim_v))
    _combine_kernel[(b * sq * h, cdiv(head_dim_v, block_d))](
        partial, partial_lse, sinks, out, lse, b * sq * h, sq, h, num_splits, *strides,
        HEAD_DIM_V=head_dim_v, BLOCK_S=min(32, next_power_of_2(num_splits)), BLOCK_D=block_d, num_warps=2,
    )  # fmt: skip
