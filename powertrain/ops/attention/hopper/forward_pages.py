"""The Hopper forward for packed queries beside a paged KV cache: chunks of prompts, with single new tokens among them.

Tiles of 128 rows of one sequence (queries, times heads that share keys where queries are few) and blocks of 64 or 128
keys, which the loader warp finds through the page table: the kernel of forward.py. The host knows neither lengths nor
shares of the rows, so keys are cut into the same number of parts for every tile, where tiles are few; parts behind a
sequence's end cost one block.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from powertrain.ops.attention.hopper.forward import launch_forward
from powertrain.ops.attention.hopper.plans import Plan, heads_per_tile_for, num_splits_for, plan_for
from powertrain.ops.attention.operands import Heads, OpArguments, Operand, Operands
from powertrain.ops.shapes import cdiv
from powertrain.runtime import checks, gluon_compat
from powertrain.runtime.settings import settings
from powertrain.runtime.target import Target

# where few rows (queries times heads) of a sequence on average make sequences of different lengths likely: blocks of
# a part of the keys, parts at most, and bytes of their results. us, one H200, pages of 64, 32 sequences of 500 to 32k,
# H32/8, whole, in 2, 4, 8 parts; FlashAttention-3: 1 query each 451, 408, 374, 360; 350; 4 each 460, 421, 387, 380;
# 351; 1 to 16 467, 431, 400, 394; 355; a chunk of 512 beside 31 tokens 456, 440, 414, 416; 438; 64 sequences with 64
# each 1112, 1227, 1251, 1346; 1085; 32 with 256 each 2126, 2468, 2663, 2853; 2221
_FEW_ROWS, _BLOCKS, _PARTS, _BYTES = 256, 32, 8, 256 << 20


class PagedCall(NamedTuple):
    """Arguments of decode_attention with packed queries that the kernel reads."""

    query: Tensor  # [T, H, D]
    key_cache: Tensor  # [pages, rows, K, D]
    value_cache: Tensor | None
    query_starts: Tensor  # [B + 1]
    seqlens: Tensor  # [B]
    page_table: Tensor | None  # [B, pages]
    leftpad: Tensor | None
    slopes: Tensor | None
    sinks: Tensor | None
    left: int
    right: int
    softcap: float
    scale: float


def why_not_pages(call: PagedCall, target: Target) -> str | None:
    """Why the universal decoding kernel serves, or None."""
    query, keys, values = call.query, call.key_cache, call.value_cache
    if target.arch != 90:
        return "it is made for sm_90"
    if settings().interpret:
        return "Gluon has no interpreter"
    if missing := gluon_compat.trouble():
        return missing
    if call.page_table is None or values is None:
        return "it takes pages of keys and of values"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {checks.name(query.dtype)}"
    dims, size = (query.shape[-1], values.shape[-1]), keys.shape[1]
    if max(dims) > 256 or any(dim % 8 for dim in dims):
        return f"head dims must be multiples of 8 to 256, are {dims[0]} and {dims[1]}"
    if size % 128 and size not in (16, 32, 64):
        return f"it takes pages of 16, 32, 64 and multiples of 128, got {size}"
    if not query.numel() or not keys.numel() or not call.seqlens.numel():
        return "it takes no empty tensors"
    # keys ahead of a window may lie in pages that were given away
    if call.left >= 0 or call.leftpad is not None:
        return "it has no left window and no cache_leftpad"
    if not call.scale > 0:
        return f"the scale must be positive, is {call.scale}"
    for x in (query, keys, values):
        if not x.is_meta and x.data_ptr() % 16:
            return "an address is not a multiple of 16"
        if x.stride(-1) != 1 or any(s % 8 for s in x.stride()[:-1]) or 0 in x.stride():
            return f"strides must be positive multiples of 16 bytes, are {x.stride()}"
    return None


def launch_pages(call: PagedCall, max_queries: int, target: Target) -> tuple[Tensor, Tensor]:
    """(out [T, H, E], lse [H, T]); rows of no sequence are 0 and -inf. `why_not_pages` has the limits."""
    operands = _operands_of(call, target)
    return launch_forward(operands, plan_of_pages(operands, max_queries), call.page_table)


def _operands_of(call: PagedCall, target: Target) -> Operands:
    query, keys, values, table = call.query, call.key_cache, call.value_cache, call.page_table
    assert values is not None and table is not None
    args = OpArguments(
        None, call.slopes, call.sinks, None, None, None, call.query_starts, None, None, call.seqlens, None, "thd",
        call.scale, call.softcap, 0.0, call.left, call.right, 0, True,
    )  # fmt: skip
    heads, kv_heads = query.shape[1], keys.shape[2]
    ratio = heads // kv_heads
    q, k, v = (
        Operand(query, 0, query.stride(0), query.stride(1) * ratio, query.stride(1)),
        *(Operand(x, x.stride(0), x.stride(1), x.stride(2), 0) for x in (keys, values)),
    )
    capacity = keys.shape[1] * table.shape[1]
    return Operands(
        args, target, Heads(kv_heads, ratio, ratio, 1, ratio > 1), True, call.seqlens.shape[0], 1, query.shape[0],
        capacity, query.shape[-1], values.shape[-1], q, k, v,
    )  # fmt: skip


def plan_of_pages(operands: Operands, max_queries: int) -> Plan:
    """Heads share tiles by the mean number of queries a sequence; keys are cut where tiles are few, or queries."""
    heads, args = operands.heads, operands.args
    mean = max(1, operands.queries // operands.batch)
    plan = plan_for(operands.d_qk, operands.d_v, max_queries)
    # a tile has one slope
    if args.slopes is None:
        pack = heads_per_tile_for(heads.q_per_kv, mean, plan.block_m)
        plan = plan._replace(heads_per_tile=pack, partial=heads.q_per_kv % pack > 0)
    groups = heads.kv * cdiv(heads.q_per_kv, plan.heads_per_tile)
    blocks, sms = cdiv(operands.keys, plan.block_n), operands.target.num_sms
    result_bytes = operands.queries * heads.kv * heads.q_per_kv * operands.d_v * 4
    parts = num_splits_for(cdiv(operands.queries, plan.queries) * groups, blocks, result_bytes, sms)
    if operands.batch > 1 and mean * heads.q_per_kv < _FEW_ROWS:
        parts = max(parts, min(_PARTS, cdiv(blocks, _BLOCKS), _BYTES // result_bytes))
    return plan._replace(num_splits=parts)
