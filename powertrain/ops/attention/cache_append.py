"""The append of new keys and values to a KV cache, dense or paged, by a kernel of its own or, for a dense cache, by the
one that rotates them; decode.py has the algorithm."""

import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.attention.triton.sequences import SMALL
from powertrain.ops.rope import unpack
from powertrain.ops.rope_kernels import Positions, launch_rope, unit_of
from powertrain.ops.shapes import cdiv, next_power_of_2
from powertrain.runtime.dispatch import Op
from powertrain.runtime.launch import kernel


@triton.jit
def cache_entry(page_table_ptr, batch_idx_ptr, batch, position, mask, page_row, PAGE_SIZE: tl.constexpr):
    """Index in the cache's first dim of the entry or page that holds each position of a sequence."""
    if PAGE_SIZE > 0:
        # the shape of position
        # masked: entries of the table behind a sequence's pages may hold any number
        page = tl.load(page_table_ptr + batch * page_row + position // PAGE_SIZE, mask=mask, other=0)
        return page.to(tl.int64)
    else:
        entry = batch
        if batch_idx_ptr is not None:
            entry = tl.load(batch_idx_ptr + batch).to(tl.int64)  # scalar
        return entry


@triton.jit
def row_of_entry(position, PAGE_SIZE: tl.constexpr):
    """The row of each position in its entry."""
    if PAGE_SIZE > 0:
        position = position % PAGE_SIZE
    return position.to(tl.int64)


@kernel(unaligned=SMALL)
def _append_kernel(
    key_new_ptr,
    value_new_ptr,
    key_cache_ptr,
    value_cache_ptr,
    seqlens_ptr,
    page_table_ptr,
    batch_idx_ptr,
    num_new,
    kv_heads,
    capacity,
    page_row,
    stride_knb,
    stride_kns,
    stride_knh,
    stride_vnb,
    stride_vns,
    stride_vnh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    HEAD_DIM_QK: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program appends some heads of one new token. A token beyond the cache's capacity is dropped."""
    batch = tl.program_id(0).to(tl.int64) // num_new
    token = tl.program_id(0).to(tl.int64) % num_new
    heads = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    position = tl.load(seqlens_ptr + batch) + token  # scalar
    # cache_seqlens is on the device, so an overflow cannot raise; it must not write either
    fits = (position >= 0) & (position < capacity)
    # a safe position for the address, the stores are masked
    position = tl.where(fits, position, 0)
    entry = cache_entry(page_table_ptr, batch_idx_ptr, batch, position, fits, page_row, PAGE_SIZE)
    row = row_of_entry(position, PAGE_SIZE)
    mask = (heads < kv_heads) & fits & (dims < HEAD_DIM_QK)
    # [BLOCK_H, BLOCK_D]
    k = tl.load(key_new_ptr + batch * stride_knb + token * stride_kns + heads * stride_knh + dims, mask=mask)
    # [BLOCK_H, BLOCK_D]
    tl.store(key_cache_ptr + entry * stride_kb + row * stride_ks + heads * stride_kh + dims, k, mask=mask)
    if value_new_ptr is not None:
        mask = (heads < kv_heads) & fits & (dims < HEAD_DIM_V)
        # [BLOCK_H, BLOCK_D]
        v = tl.load(value_new_ptr + batch * stride_vnb + token * stride_vns + heads * stride_vnh + dims, mask=mask)
        # [BLOCK_H, BLOCK_D]
        tl.store(value_cache_ptr + entry * stride_vb + row * stride_vs + heads * stride_vh + dims, v, mask=mask)


def _append(
    key_new: Tensor,
    value_new: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | None,
    cache_seqlens: Tensor,
    page_table: Tensor | None,
    cache_batch_idx: Tensor | None,
) -> None:
    b, num_new, kv_heads, dqk = key_new.shape
    page_size = key_cache.shape[1]
    value_new, value_cache = (value_new, value_cache) if value_new is not None else (None, None)
    strides = [
        s for t in (key_new, value_new, key_cache, value_cache) for s in ((0,) * 3 if t is None else t.stride()[:3])
    ]
    dv = 0 if value_new is None else value_new.shape[-1]
    block_d = next_power_of_2(max(dqk, dv))
    block_h = max(1, min(next_power_of_2(kv_heads), 2048 // block_d))
    _append_kernel[(b * num_new, cdiv(kv_heads, block_h))](
        key_new, value_new, key_cache, value_cache, cache_seqlens, page_table, cache_batch_idx,
        # dense: one "page" is the whole row of the cache
        num_new, kv_heads, page_size if page_table is None else page_size * page_table.shape[1],
        0 if page_table is None else page_table.stride(0), *strides,
        HEAD_DIM_QK=dqk, HEAD_DIM_V=dv, PAGE_SIZE=0 if page_table is None else page_size,
        BLOCK_H=block_h, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip


def _rotate_append_outputs(qkv: Tensor, num_heads: int, *_: object) -> Tensor:
    return qkv.new_empty((*qkv.shape[:2], num_heads, qkv.shape[-1]))


def _rotate_append(
    qkv: Tensor,
    num_heads: int,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_seqlens: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    out = _rotate_append_outputs(qkv, num_heads)
    q, k, v = unpack(unit_of(qkv), num_heads, key_cache.shape[2], True)
    at = Positions(cos, sin, None, None, cache_seqlens, None, 0, "bshd", False)
    launch_rope((q, k, v), (out.unflatten(2, q.shape[2:4]), key_cache, value_cache), at, False, appends=True)
    return out


# queries [B, S, H, D] of a packed projection [B, S, H + 2 * K, D], grouped as `rope_qkv` says, with keys and values
# written to a dense cache instead of to tensors that `append_op` would copy. Both caches have the same strides
rotate_append_op = Op(
    "rope_qkv_cache_append(Tensor qkv, SymInt num_heads, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor cache_seqlens, Tensor cos, Tensor sin) -> Tensor",
    _rotate_append,
    _rotate_append_outputs,
)

append_op = Op(
    # (a!) and (b!) declare the writes: torch.compile keeps the order of appends and reads by them
    "cache_append(Tensor key_new, Tensor? value_new, Tensor(a!) key_cache, Tensor(b!)? value_cache, "
    "Tensor cache_seqlens, Tensor? page_table, Tensor? cache_batch_idx) -> ()",
    _append,
    lambda *_: None,
)
