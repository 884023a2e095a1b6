"""Tensor maps by which the warps of the Hopper kernels find tiles of attention's inputs and results."""

from typing import NamedTuple

from torch import Tensor

from powertrain.ops.attention.operands import Operand, Operands
from powertrain.ops.shapes import next_power_of_2
from powertrain.runtime.tensor_maps import TensorMap, takes_zero_strides, tensor_map

# a head dim in two pieces (hopper/pieces.py) has a map of each; of one piece the second is None
Maps = tuple[TensorMap, TensorMap | None]
MaybeMaps = tuple[TensorMap | None, TensorMap | None]  # none of a result that is not wanted


class Source(NamedTuple):
    """A whole tensor [storage, heads, rows, dim] with its strides."""

    tensor: Tensor
    sizes: tuple[int, int, int, int]
    b: int
    h: int
    s: int


def queries_of(operands: Operands, x: Operand, dim: int) -> Source:
    """Queries, or gradients of results."""
    heads = operands.heads.kv * operands.heads.q_per_kv
    if _must_copy(x.tensor, operands.storage > 1 and x.b == 0, heads > 1 and x.r == 0):
        x = operands.like_query(x.tensor.contiguous())
    return Source(x.tensor, (operands.storage, heads, operands.queries, dim), x.b, x.r, x.s)


def keys_of(operands: Operands, x: Operand, dim: int) -> Source:
    """Keys or values."""
    if _must_copy(x.tensor, operands.storage > 1 and x.b == 0, operands.heads.kv > 1 and x.h == 0):
        x = operands.like_key(x.tensor.contiguous())
    return Source(x.tensor, (operands.storage, operands.heads.kv, operands.keys, dim), x.b, x.h, x.s)


def _must_copy(x: Tensor, *shared: bool) -> bool:
    """Whether batch entries or heads share their rows, which this driver takes no map of."""
    return any(shared) and _is_on_gpu(x) and not takes_zero_strides(x.get_device())


def _is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def rows_maps(x: Source, block: int, pieces: tuple[int, ...]) -> Maps:
    """In tiles of `block` rows. Rows and columns outside are zeros, so head dims are padded for free."""
    return _each(x.tensor, x.sizes, (x.b, x.h, x.s, 1), (1, 1, block), pieces)


def packed_maps(x: Source, block: int, pieces: tuple[int, ...], heads_per_tile: int) -> Maps:
    """[storage, rows, heads, dim] in tiles of (row, head) pairs: heads share a tile. With heads that are no power of 2
    the last few of `block` pairs are left out."""
    storage, heads, rows, dim = x.sizes
    box = 1, block // heads_per_tile, heads_per_tile
    width = next_power_of_2(heads_per_tile)
    tile = 1, block // width, width
    return _each(x.tensor, (storage, rows, heads, dim), (x.b, x.s, x.h, 1), tile, pieces, filled=box)


def copies_rows(pages: Tensor) -> bool:
    """Whether the loader copies rows of a cache [pages, rows of a page, KV heads, dim] instead of loading boxes by TMA.
    Shared memory is swizzled by 8 rows, and a box of fewer would not fit."""
    return pages.shape[1] % 8 > 0


def pages_maps(x: Operand, block: int, pieces: tuple[int, ...]) -> Maps:
    """Of a cache [pages, rows of a page, KV heads, dim], by parts of a block that lie in one page, 64 columns each."""
    pages, rows, heads, dim = x.tensor.shape
    widths = tuple(min(piece, 64) for piece in pieces)
    # the largest power of 2 that divides a page's rows
    return rows_maps(Source(x.tensor, (pages, heads, rows, dim), x.b, x.h, x.s), min(block, rows & -rows), widths)


def cache_maps(x: Operand, block: int, pieces: tuple[int, ...]) -> Maps:
    """Of a cache [entries, rows, KV heads, dim]."""
    entries, rows, heads, dim = x.tensor.shape
    return rows_maps(Source(x.tensor, (entries, heads, rows, dim), x.b, x.h, x.s), block, pieces)


def results_maps(operands: Operands, o: Operand, block: int, pieces: tuple[int, ...], heads_per_tile: int = 1) -> Maps:
    """Of the forward's results, by tiles like those of queries. A row or column outside is not written."""
    heads = operands.heads.kv * operands.heads.q_per_kv
    whole = Source(o.tensor, (operands.storage, heads, operands.queries, operands.d_v), o.b, o.r, o.s)
    if heads_per_tile == 1:
        return rows_maps(whole, block, pieces)
    return packed_maps(whole, block, pieces, heads_per_tile)


def gradient_maps(operands: Operands, x: Operand | None, dim: int, block: int, pieces: tuple[int, ...]) -> MaybeMaps:
    """Of dk or dv. Those of packed sequences end with each, so that no row of the next one is written."""
    if x is None:
        return None, None
    whole = Source(x.tensor, (operands.storage, operands.heads.kv, operands.keys, dim), x.b, x.h, x.s)
    return ending_maps(whole, block, pieces, operands.is_packed)


def ending_maps(x: Source, block: int, pieces: tuple[int, ...], is_ragged: bool) -> Maps:
    """[storage, heads, end, rows, dim]. `is_ragged`: it ends where any sequence ends; row i of the n rows that end
    before row `end` is (end, rows - n + i). Else row i is (0, i).

    64 columns of a tile, which TMA moves at a time, must not lie wholly outside: it then accesses the map's start."""
    storage, heads, rows, dim = x.sizes
    shape = storage, heads, rows + 1 if is_ragged else 1, rows, dim
    offset = -rows * x.s if is_ragged else 0
    return _each(x.tensor, shape, (x.b, x.h, x.s, x.s, 1), (1, 1, 1, block), pieces, offset)


def _each(
    x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...], pieces: tuple[int, ...],
    offset: int = 0, filled: tuple[int, ...] | None = None,
) -> Maps:  # fmt: skip
    first, *rest = (tensor_map(x, shape, strides, (*block, piece), offset, filled) for piece in pieces)
    return first, rest[0] if rest else None
