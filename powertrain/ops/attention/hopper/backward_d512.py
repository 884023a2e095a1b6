"""Backward of attention for Hopper at head dims of 200 to 512: p and ds are stored in memory, then multiplied.

    p, ds              of tiles of 128 queries by 128 keys, in 16 bits       backward_d512_scores.py
    dv = pᵀ do, dk = scale dsᵀ q, dq = scale ds k                            backward_d512_products.py

dk and dv of 64 keys and 512 columns are 256 KiB, as many as an SM has registers. A fused kernel would have to keep only
part of the columns, and compute the scores again for each part. Here each pair of query and key writes 4 bytes and
reads 6 for 10 * 512 FLOP, so 500 TFLOP/s need 1 TB/s, a fifth of the memory's bandwidth. Every product is computed
once, by matrix products without a softmax between them. Results are deterministic: there are no atomics.

p and ds are computed in chunks of query heads, or of queries of one head, that fit into MEMORY bytes. Where a chunk has
only a part of the queries that see some keys, dk and dv are accumulated in float32 from chunk to chunk.

Memory beyond results: 4 bytes per pair of query and key in the same chunk, up to MEMORY but at least for 128 queries;
8 per query and head; where the query heads of a KV head are not in one chunk, 4 per key of one head and
column of dk and dv.
FLOPs: five products for each visible pair of query and key, in tiles of 128 by 128.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from powertrain.ops.attention.hopper.backward_d512_products import _hopper_attention_bwd_d512_products_kernel
from powertrain.ops.attention.hopper.backward_d512_scores import _hopper_attention_bwd_d512_scores_kernel
from powertrain.ops.attention.hopper.maps import ending_maps, keys_of, queries_of
from powertrain.ops.attention.operands import Operand, Operands
from powertrain.ops.early_start import starts_early
from powertrain.ops.shapes import cdiv
from powertrain.runtime.tensor_maps import TensorMap, tensor_map

MEMORY = 512 * 2**20  # bytes of weights at a time
_TILE = 128
ROWS = 32  # queries of a block of LSE and delta, of which a program of the first launch reads all columns


class Chunk(NamedTuple):
    """The query heads, counted over the batch, and the tiles of queries that one launch computes."""

    unit: int
    units: int
    slot: int
    slots: int
    is_first: bool  # of the chunks that accumulate dk and dv of the same heads
    is_last: bool


def chunks_of(groups: int, repeats: int, slots: int, slot_bytes: int, memory: int) -> Iterator[Chunk]:
    """Chunks of `groups` times `repeats` query heads of a KV head, with `slots` tiles of queries each, in which weights
    have at most `memory` bytes, or one tile."""
    unit_bytes = slots * slot_bytes
    if repeats * unit_bytes <= memory:
        count = cdiv(groups, memory // (repeats * unit_bytes))
        size = cdiv(groups, count)
        for first in range(0, groups, size):
            yield Chunk(first * repeats, min(size, groups - first) * repeats, 0, slots, True, True)
        return
    heads = min(repeats, max(1, memory // unit_bytes))
    size = slots if unit_bytes <= memory else max(1, memory // slot_bytes)
    for group in range(groups):
        parts = [
            (head, min(heads, repeats - head), slot, min(size, slots - slot))
            for head in range(0, repeats, heads)
            for slot in range(0, slots, size)
        ]
        for n, (head, count, slot, length) in enumerate(parts):
            yield Chunk(group * repeats + head, count, slot, length, n == 0, n == len(parts) - 1)


def key_tiles_seen(keys: int, left: int, right: int) -> int:
    """The most tiles of keys that a tile of queries sees."""
    tiles = cdiv(keys, _TILE)
    return tiles if left < 0 or right < 0 else min(tiles, cdiv(left + right + _TILE, _TILE) + 1)


def width_of_products(head_dim: int) -> int:
    """Columns of a tile of results."""
    return 128 if 256 < head_dim <= 384 else 256


def launch_products(
    operands: Operands, do: Operand, rows: Tensor, dq: Operand | None, dk: Operand | None, dv: Operand | None
) -> None:
    """dq, dk and dv, if needed. `rows`: LSE in base 2 and delta, in blocks of ROWS queries."""
    args, heads = operands.args, operands.heads
    groups, slots = operands.storage * heads.kv, operands.query_blocks(_TILE)
    columns = key_tiles_seen(operands.keys, args.left, args.right) * _TILE
    chunks = list(chunks_of(groups, heads.q_per_kv, slots, 4 * _TILE * columns, MEMORY))
    size = max(chunk.units * chunk.slots for chunk in chunks) * _TILE * columns
    weights = operands.q.tensor.new_empty(2 * size)
    width = width_of_products(operands.d_qk)
    sums = None
    if not all(chunk.is_first and chunk.is_last for chunk in chunks) and (dk or dv):
        results = operands.key_blocks(_TILE) * ((dk is not None) + (dv is not None)) * cdiv(operands.d_qk, width)
        sums = torch.empty(results * _TILE * width, dtype=torch.float32, device=weights.device)
    inputs = _Inputs.of(operands, do, width)
    for chunk in chunks:
        _launch_scores(operands, inputs, rows, weights, columns, chunk)
        if dk or dv:
            _launch_products_of_keys(operands, inputs, weights, columns, chunk, dk, dv, sums, width)
        if dq:
            _launch_products_of_queries(operands, inputs, weights, columns, chunk, dq, width)


class _Inputs(NamedTuple):
    """Maps of the tensors that are read: of all four in the first kernel, of do, q and k by the products."""

    scores: tuple[TensorMap, ...]  # q, k, v, do in tiles of 128 rows and 64 columns
    rows: tuple[TensorMap, ...]  # do, q, k in 64 rows and `width` columns, or 64

    @staticmethod
    def of(operands: Operands, do: Operand, width: int) -> "_Inputs":
        args, dim = operands.args, operands.d_qk
        ragged_q = operands.is_packed or args.query_used is not None
        ragged_k = operands.is_packed or args.key_used is not None
        q, grads = queries_of(operands, operands.q, dim), queries_of(operands, do, dim)
        k, v = keys_of(operands, operands.k, dim), keys_of(operands, operands.v, dim)
        each = (q, ragged_q), (k, ragged_k), (v, ragged_k), (grads, ragged_q)
        scores = tuple(ending_maps(x, _TILE, (64,), ragged)[0] for x, ragged in each)
        rows = tuple(
            ending_maps(x, 64, (panel_width(dim, width, ragged),), ragged)[0]
            for x, ragged in (each[3], each[0], each[1])
        )
        return _Inputs(scores, rows)


def panel_width(head_dim: int, width: int, ragged: bool) -> int:
    """Columns that a TMA instruction of the products' loader is given: as the kernel's `_panels` has them."""
    return 64 if ragged and -head_dim % width >= 64 else width


def _weights_map(weights: Tensor, columns: int, chunk: Chunk, tile: tuple[int, int]) -> TensorMap:
    """Of p, and ds below it."""
    return tensor_map(weights, (2 * chunk.units * chunk.slots * _TILE, columns), (columns, 1), tile)


def _mask(operands: Operands) -> dict[str, bool]:
    args = operands.args
    return {"LEFT": args.left >= 0, "RIGHT": args.right >= 0, "BOTTOM_RIGHT": args.bottom_right}


def _lengths(operands: Operands) -> tuple[Tensor | None, ...]:
    args = operands.args
    return args.query_starts, args.key_starts, args.query_used, args.key_used


def _sizes(operands: Operands, chunk: Chunk) -> tuple[int, ...]:
    args, heads = operands.args, operands.heads
    return (
        operands.batch, operands.queries, operands.keys, heads.kv, heads.q_per_kv, args.left, args.right, *chunk[:4]
    )  # fmt: skip


def _launch_scores(
    operands: Operands, inputs: _Inputs, rows: Tensor, weights: Tensor, columns: int, chunk: Chunk
) -> None:
    args, num_sms = operands.args, operands.target.num_sms
    # parts of the keys of a tile of queries, so that all SMs have some items
    parts = min(max(1, columns // _TILE), cdiv(8 * num_sms, chunk.units * chunk.slots))
    items = chunk.units * chunk.slots * parts
    _hopper_attention_bwd_d512_scores_kernel[(min(num_sms, items),)](
        *inputs.scores, _weights_map(weights, columns, chunk, (64, _TILE)), rows, args.slopes, *_lengths(operands),
        *_sizes(operands, chunk), items, parts, operands.query_blocks(ROWS), args.slopes_stride, args.scale,
        args.softcap,
        **_mask(operands), CAP=args.softcap > 0, D=operands.d_qk, STAGES=5,
        STARTS_EARLY=starts_early(operands.target), num_warps=4,
    )  # fmt: skip


def _launch_products_of_keys(
    operands: Operands, inputs: _Inputs, weights: Tensor, columns: int, chunk: Chunk, dk: Operand | None,
    dv: Operand | None, sums: Tensor | None, width: int,
) -> None:  # fmt: skip
    args, repeats = operands.args, operands.heads.q_per_kv
    absent = Operand(operands.q.tensor, 0, 0, 0, 0)
    groups = cdiv(chunk.units, repeats)
    kinds = (dk is not None) + (dv is not None)
    items = groups * operands.key_blocks(_TILE) * kinds * cdiv(operands.d_qk, width)
    into = dv or absent, dk or absent
    _hopper_attention_bwd_d512_products_kernel[(min(operands.target.num_sms, items),)](
        *inputs.rows[:2], _weights_map(weights, columns, chunk, (64, _TILE)), dv and dv.tensor, dk and dk.tensor, sums,
        *_lengths(operands), *_sizes(operands, chunk), items, operands.key_blocks(_TILE), int(chunk.is_first),
        int(chunk.is_last), into[0].b, into[0].s, into[0].h, into[1].b, into[1].s, into[1].h, args.scale,
        **_mask(operands), D=operands.d_qk, COLS=width, OF_KEYS=True, STAGES=4,
        STARTS_EARLY=starts_early(operands.target), num_warps=4,
    )  # fmt: skip


def _launch_products_of_queries(
    operands: Operands, inputs: _Inputs, weights: Tensor, columns: int, chunk: Chunk, dq: Operand, width: int
) -> None:
    items = chunk.units * chunk.slots * cdiv(operands.d_qk, width)
    _hopper_attention_bwd_d512_products_kernel[(min(operands.target.num_sms, items),)](
        inputs.rows[2], None, _weights_map(weights, columns, chunk, (_TILE, 64)), dq.tensor, None, None,
        *_lengths(operands), *_sizes(operands, chunk), items, 0, 1, 1,
        dq.b, dq.s, dq.r, 0, 0, 0, operands.args.scale,
        **_mask(operands), D=operands.d_qk, COLS=width, OF_KEYS=False, STAGES=4,
        STARTS_EARLY=starts_early(operands.target), num_warps=4,
    )  # fmt: skip
