"""transformer_engine.pytorch.permutation: tokens sorted by expert and back, by PyTorch's indexing.

A row of the permuted tensor is one pair of a token and one of its experts, experts ascending, tokens ascending in each.
`row_id_map` is an opaque tensor: where each row came from. Without `num_out_tokens` the host waits for their number.
"""

import torch
from torch import Tensor

from powertrain.compat.missing import unknown
from powertrain.ops.conversion import unsupported
from powertrain.runtime import checks

__all__ = [
    "moe_permute",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
]


def moe_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: int = -1, max_token_num: int = -1, map_type: str = "mask"
) -> tuple[Tensor, Tensor]:
    """Tokens [T, H] in the order of their experts: (rows [num_out_tokens, H], row_id_map).

        routing_map     "mask": [T, E], not zero where a token goes to an expert; "index": [T, K] experts of each token
        num_out_tokens  how many rows; -1: all. Rows beyond are dropped
        max_token_num   a hint on memory there, changes nothing
    Raises ValueError naming the argument.
    """
    rows = _rows("moe_permute", inp, routing_map, num_out_tokens, map_type)
    return inp.index_select(0, _tokens(rows, routing_map, map_type)), rows


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """`moe_permute` by a mask, with the probability [T, E] of each row: (rows, probabilities, row_id_map)."""
    checks.shape("moe_permute_with_probs", "probs", probs, routing_map.shape, "shape of routing_map")
    rows = _rows("moe_permute_with_probs", inp, routing_map, num_out_tokens, "mask")
    # transposed: rows are sorted by expert first
    permuted = probs.t().reshape(-1).index_select(0, rows)
    return inp.index_select(0, _tokens(rows, routing_map, "mask")), permuted, rows


def moe_unpermute(
    inp: Tensor, row_id_map: Tensor, merging_probs: Tensor | None = None, restore_shape: torch.Size | None = None,
    map_type: str = "mask", probs: Tensor | None = None, pad_offsets: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Rows back at their tokens, [T, H]: the sum of each token's rows, times `merging_probs` where it is given.

        merging_probs  [T, E] of a mask, [T, K] of indices
        restore_shape  [T, H]; needed for a mask without probabilities
    The sum is in float32 (float64 of float64), rounded once; on a GPU its order is fixed only under
    torch.use_deterministic_algorithms.
    Raises ValueError naming the argument.
    """
    if pad_offsets is not None:
        unsupported("moe_unpermute", "pad_offsets", "a tensor", "rows without padding")
    checks.one_of("moe_unpermute", "map_type", map_type, ("mask", "index"))
    # `probs` is the older name
    merging_probs = probs if merging_probs is None else merging_probs
    if map_type == "mask" and restore_shape is None and merging_probs is None:
        checks.fail("moe_unpermute", "restore_shape", "be given for a mask without merging_probs", None)
    kind = torch.float64 if inp.dtype is torch.float64 else torch.float32
    # float32 sums: a token may go to many experts
    values = inp.to(kind)
    tokens, width = _size(row_id_map, merging_probs, restore_shape, map_type)
    if merging_probs is not None:
        flat = (merging_probs.t() if map_type == "mask" else merging_probs).reshape(-1)
        values = values * flat.index_select(0, row_id_map).to(kind)[:, None]
    # row ids count experts by tokens, or tokens by slots
    at = row_id_map % tokens if map_type == "mask" else row_id_map // width
    # index_add: tokens without an expert stay 0
    return values.new_zeros(tokens, inp.shape[1]).index_add(0, at, values).to(inp.dtype)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """Chunks of rows, of `split_sizes` each, in another order: chunk i of the result is chunk sorted_index[i]."""
    return inp.index_select(0, _chunk_rows(inp, split_sizes, sorted_index))


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """`moe_sort_chunks_by_index` of rows and of their probabilities."""
    rows = _chunk_rows(inp, split_sizes, sorted_index)
    return inp.index_select(0, rows), probs.index_select(0, rows)


def _rows(op: str, inp: Tensor, routing_map: Tensor, count: int, map_type: str) -> Tensor:
    """Of each row: expert * T + token of a mask, token * K + slot of indices."""
    checks.one_of(op, "map_type", map_type, ("mask", "index"))
    checks.require(inp.dim() == 2, op, "inp", "have shape [T, H]", list(inp.shape))
    fits = routing_map.dim() == 2 and routing_map.shape[0] == inp.shape[0]
    checks.require(fits, op, "routing_map", f"have shape [{inp.shape[0]}, experts]", list(routing_map.shape))
    if map_type == "index":
        # stable: tokens keep their order within an expert, as there
        return routing_map.reshape(-1).argsort(stable=True)[: count if count >= 0 else None]
    taken = routing_map.t().reshape(-1).bool()
    # reading the sum waits for the GPU; callers who know the number pass it
    count = int(taken.sum()) if count < 0 else count
    # zeros first: the chosen pairs come first, in order of expert and token
    return (~taken).to(torch.uint8).argsort(stable=True)[:count]


def _tokens(rows: Tensor, routing_map: Tensor, map_type: str) -> Tensor:
    return rows % routing_map.shape[0] if map_type == "mask" else rows // routing_map.shape[1]


def _size(rows: Tensor, probs: Tensor | None, shape: torch.Size | None, map_type: str) -> tuple[int, int]:
    """(tokens, experts of one token in the map of indices)."""
    if probs is not None:
        return probs.shape[0], probs.shape[1]
    # without a shape every row is a token's only one
    tokens = rows.numel() if shape is None else shape[0]
    return tokens, max(rows.numel() // max(tokens, 1), 1)


def _chunk_rows(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    sizes, order = split_sizes.to(inp.device).long(), sorted_index.to(inp.device).long()
    # where each chunk begins in the input, in the new order
    starts = (sizes.cumsum(0) - sizes)[order]
    lengths = sizes[order]
    ends = lengths.cumsum(0)
    at = torch.arange(inp.shape[0], device=inp.device)
    chunk = torch.searchsorted(ends, at, right=True)
    # row of the input for each row of the result
    return starts[chunk] + at - (ends - lengths)[chunk]


__getattr__ = unknown(__name__)
