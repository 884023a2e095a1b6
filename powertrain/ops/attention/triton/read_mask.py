"""A call's dense bias or mask as the kernels read it, and which part of the other side a block of queries or keys sees,
as documents or a boolean mask say: the attention kernels pass over the blocks outside of it, and mask nothing in blocks
that all of its positions see.

A range may cover more than its positions see, since the kernels mask what it lets through; one that all see is exact.
Cost: a pass over the ids or the mask, a few microseconds, ahead of each forward and backward.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.attention.operands import OpArguments, Operands
from powertrain.ops.attention.triton.tiles import to_int64
from powertrain.ops.early_start import await_kernel_before, starts_early
from powertrain.ops.shapes import cdiv, next_power_of_2
from powertrain.runtime.launch import kernel
from powertrain.runtime.settings import settings
from powertrain.runtime.target import Target

# positions that share a range. Blocks of fewer positions take the range of the 64 that they lie in
GRANULE = tl.constexpr(64)
_NONE = tl.constexpr(2**31 - 1)  # the begin of a range that nobody sees; its end is 0


@kernel(unaligned=("own_ptr", "other_ptr"))
def _document_ranges_kernel(
    own_ptr, other_ptr, range_ptr, own_size, other_size, granules, BLOCK: tl.constexpr, STARTS_EARLY: tl.constexpr
):
    """The ranges of one granule: from the first to the last position of `other` that has one of its documents. All of
    that is seen by each row if the granule has one document and no other document lies between."""
    await_kernel_before(STARTS_EARLY)
    b, granule = to_int64(tl.program_id(0) // granules), tl.program_id(0) % granules
    low = tl.full([BLOCK], _NONE, tl.int32)
    high = tl.zeros([BLOCK], tl.int32)
    count = tl.zeros([BLOCK], tl.int32)
    rows = granule * GRANULE + tl.arange(0, GRANULE)
    own = tl.load(own_ptr + b * own_size + rows, mask=rows < own_size, other=-1)  # [GRANULE]
    document = tl.max(own, 0)
    alike = tl.min(((own == document) | (rows >= own_size)).to(tl.int32), 0) == 1
    # one document of the granule after another; negative ids belong to none
    while document >= 0:
        for start in range(0, other_size, BLOCK):
            j = start + tl.arange(0, BLOCK)
            same = tl.load(other_ptr + b * other_size + j, mask=j < other_size, other=-1) == document  # [BLOCK]
            low = tl.minimum(low, tl.where(same, j, _NONE))
            high = tl.maximum(high, tl.where(same, j + 1, 0))
            count += same.to(tl.int32)
        own = tl.where(own == document, -1, own)
        document = tl.max(own, 0)
    low, high = tl.min(low, 0), tl.max(high, 0)
    is_whole = alike & (tl.sum(count, 0) == high - low)
    _store_ranges(range_ptr, low, high, tl.where(is_whole, low, high), high)


@kernel()
def _read_tiles_kernel(
    bias_ptr, copy_ptr, tiles_ptr, heads, rows, cols, row_tiles, col_tiles, copy_cols,
    stride_b, stride_h, stride_row, stride_col, ROWS: tl.constexpr, COLS: tl.constexpr, CONTIGUOUS: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """One tile of a bias or boolean mask: a copy; of a mask, whether none (0), some (1) or all (2) of its positions are
    seen. CONTIGUOUS: stride_col is 1."""
    await_kernel_before(STARTS_EARLY)
    tile = tl.program_id(0)
    col_tile, row_tile = tile % col_tiles, tile // col_tiles % row_tiles
    outer = to_int64(tile // (col_tiles * row_tiles))
    i = row_tile * ROWS + tl.arange(0, ROWS)[:, None]
    j = col_tile * COLS + tl.arange(0, COLS)[None, :]
    exists = (i < rows) & (j < cols)
    ptrs = bias_ptr + outer // heads * stride_b + outer % heads * stride_h + to_int64(i) * stride_row
    if CONTIGUOUS:
        ptrs += j
    else:
        ptrs += to_int64(j) * stride_col
    value = tl.load(ptrs, mask=exists, other=0)  # [ROWS, COLS]
    if copy_ptr is not None:
        at = copy_ptr + (outer * rows + i) * copy_cols + j
        tl.store(at, value.to(copy_ptr.dtype.element_ty), mask=exists)
    if tiles_ptr is not None:
        some = tl.max(tl.max(value.to(tl.int32), 1), 0)
        every = tl.min(tl.min(tl.where(exists, value.to(tl.int32), 1), 1), 0)
        tl.store(tiles_ptr + tile, (some + every).to(tl.int8))


@kernel()
def _tile_ranges_kernel(
    tiles_ptr, range_ptr, others, span, other_size, granules, stride_b, stride_own, stride_other,
    BLOCK: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """The ranges of one granule from its `others` tiles, each of `span` positions of the other side."""
    await_kernel_before(STARTS_EARLY)
    b, granule = to_int64(tl.program_id(0) // granules), tl.program_id(0) % granules
    n = tl.arange(0, BLOCK)
    at = tiles_ptr + b * stride_b + granule * stride_own + n * stride_other
    tile = tl.load(at, mask=n < others, other=0)  # [BLOCK]
    first, last, _ = _extent(tile > 0, n)
    full_first, full_last, is_whole = _extent(tile == 2, n)
    end = tl.minimum(last * span, other_size)
    begin = tl.where(first < last, first * span, _NONE)
    full_begin = tl.where(is_whole, full_first * span, end)
    full_end = tl.where(is_whole, tl.minimum(full_last * span, other_size), end)
    _store_ranges(range_ptr, begin, end, full_begin, full_end)


@triton.jit
def _extent(holds, n):
    """(first, end, whether all between hold) of the numbers n [BLOCK] for which `holds` is true; end 0 if there are
    none."""
    first = tl.min(tl.where(holds, n, _NONE), 0)
    end = tl.max(tl.where(holds, n + 1, 0), 0)
    return first, end, (end > 0) & (tl.sum(holds.to(tl.int32), 0) == end - first)


@triton.jit
def _store_ranges(range_ptr, begin, end, full_begin, full_end):
    at = range_ptr + to_int64(tl.program_id(0)) * 4
    tl.store(at, begin)
    tl.store(at + 1, end)
    tl.store(at + 2, full_begin)
    tl.store(at + 3, full_end)


@triton.jit
def visible_ranges(range_ptr, b64, first, size, BLOCK: tl.constexpr):
    """(begin, end, full_begin, full_end) of the block of positions that starts at `first`: outside of begin to end none
    of them sees anything, from full_begin to full_end each sees everything. `size`: positions of a batch entry."""
    WIDTH: tl.constexpr = (BLOCK + GRANULE - 1) // GRANULE
    n = first // GRANULE + tl.arange(0, WIDTH)
    granules = tl.cdiv(size, GRANULE)
    exists = n < granules
    at = range_ptr + (b64 * granules + n) * 4
    begin = tl.min(tl.load(at, mask=exists, other=_NONE), 0)
    end = tl.max(tl.load(at + 1, mask=exists, other=0), 0)
    full_begin = tl.max(tl.load(at + 2, mask=exists, other=0), 0)
    full_end = tl.min(tl.load(at + 3, mask=exists, other=_NONE), 0)
    return begin, end, full_begin, full_end


class ReadMask(NamedTuple):
    """The bias or mask as the kernels read it."""

    bias: Tensor | None  # a boolean one is uint8 or int16
    # of a boolean one that all heads share: int8 [b|1, tiles of rows, tiles of columns], from `_mask_tiles_kernel`
    tiles: Tensor | None

    @property
    def is_boolean(self) -> bool:
        return self.bias is not None and self.bias.dtype in (torch.uint8, torch.int16)


def read_mask(bias: Tensor | None, target: Target) -> ReadMask:
    """Itself, or a copy of whole 16 bytes a row where TMA reads it: by pointers, other rows come 1 or 2 bytes an
    instruction. A copied mask is int16, since bytes of shared memory are read one at a time."""
    # ms, forward, one H200, by pointers and copied: a bias of 2 x 2641 x 32 heads D128 3.95, 1.17; a mask of 4 x 2134 x
    # 16 heads D128 2.05, 0.60, copied as bytes 0.63
    if bias is None:
        return ReadMask(None, None)
    # a dim along which the bias was expanded has one entry in memory, and so in the copy
    once = bias[tuple(slice(1) if stride == 0 else slice(None) for stride in bias.stride()[:3])]
    copies = once.shape[2] > 1 and has_descriptors(target)
    if bias.dtype is torch.bool:
        return _read_tiles(once.view(torch.uint8), torch.int16 if copies else None, once.shape[1] == 1, target)
    if not copies or is_regular(once):
        return ReadMask(once, None)
    return _read_tiles(once, once.dtype, False, target)


def has_descriptors(target: Target) -> bool:
    return target.has_tma and not settings().interpret


def is_regular(bias: Tensor) -> bool:
    """Whether a TMA descriptor of it can be made."""
    elements = 16 // bias.element_size()
    aligned = bias.is_meta or bias.data_ptr() % 16 == 0
    strides = [stride for size, stride in zip(bias.shape[:3], bias.stride(), strict=False) if size > 1]
    return aligned and bias.stride(3) == 1 and not any(stride % elements for stride in strides)


def _padded(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Empty, of the same sizes, its rows whole 16 bytes apart."""
    elements, (*outer, cols) = 16 // dtype.itemsize, like.shape
    return like.new_empty((*outer, cdiv(cols, elements) * elements), dtype=dtype)[..., :cols]


def _read_tiles(bias: Tensor, copied: torch.dtype | None, by_tiles: bool, target: Target) -> ReadMask:
    """copied: the dtype of the copy; None: no copy is made. by_tiles: also write, for each tile of a boolean mask,
    whether none, some or all of its positions are seen."""
    batch, heads, rows, cols = bias.shape
    height, width = 1 if rows == 1 else GRANULE.value, GRANULE.value
    is_contiguous = bias.stride(3) == 1
    if is_contiguous and not by_tiles:
        # long rows. us, one H200, forward of 16 heads, tiles of 4 x 1024, 16 x 256, 64 x 64: 2735 tokens 259, 270, 309;
        # 580 34.9, 35.8, 38.1
        width = min(1024, next_power_of_2(cols))
        height = 4096 // width
    sizes = batch * heads, cdiv(rows, height), cdiv(cols, width)
    tiles = bias.new_empty(sizes, dtype=torch.int8) if by_tiles else None
    copy = None if copied is None else _padded(bias, copied)
    programs = sizes[0] * sizes[1] * sizes[2]
    if programs and (tiles is not None or copy is not None):
        _read_tiles_kernel[(programs,)](
            bias, copy, tiles, heads, rows, cols, sizes[1], sizes[2], cols if copy is None else copy.stride(2),
            *bias.stride(), ROWS=height, COLS=width, CONTIGUOUS=is_contiguous, STARTS_EARLY=starts_early(target),
            num_warps=8 if by_tiles else 4,
        )  # fmt: skip
    return ReadMask(bias if copy is None else copy, tiles)


def has_ranges(args: OpArguments, mask: ReadMask) -> bool:
    """Documents or a boolean mask shared by all heads say who sees whom."""
    return args.query_documents is not None or mask.tiles is not None


def ranges_of_queries(operands: Operands, mask: ReadMask) -> Tensor | None:
    """[b, granules, 4] int32: begin and end of the keys that the queries of a granule see, and of those that all of
    them see; None without `has_ranges`."""
    args, target = operands.args, operands.target
    of_documents = _of_documents(args.query_documents, args.key_documents, target)
    if mask.tiles is None:
        return of_documents
    tiles = mask.tiles
    if tiles.shape[1] == 1:
        tiles = tiles.expand(-1, cdiv(operands.queries, GRANULE.value), -1)
    return _both(of_documents, _of_mask(tiles, operands.batch, GRANULE.value, operands.keys, target))


def ranges_of_keys(operands: Operands, mask: ReadMask) -> Tensor | None:
    """The same of keys: begin and end of the queries that see them."""
    args, target = operands.args, operands.target
    of_documents = _of_documents(args.key_documents, args.query_documents, target)
    if mask.tiles is None or mask.bias is None:
        return of_documents
    span = operands.queries if mask.bias.shape[2] == 1 else GRANULE.value
    return _both(of_documents, _of_mask(mask.tiles.mT, operands.batch, span, operands.queries, target))


def _of_documents(own: Tensor | None, other: Tensor | None, target: Target) -> Tensor | None:
    if own is None or other is None:
        return None
    batch, size = own.shape
    granules = cdiv(size, GRANULE.value)
    ranges = torch.empty((batch, granules, 4), dtype=torch.int32, device=own.device)
    if ranges.numel():
        _document_ranges_kernel[(batch * granules,)](
            own, other, ranges, size, other.shape[1], granules, BLOCK=1024, STARTS_EARLY=starts_early(target),
            num_warps=4,
        )  # fmt: skip
    return ranges


def _of_mask(tiles: Tensor, batch: int, span: int, other_size: int, target: Target) -> Tensor:
    """tiles: int8 [b|1, granules, tiles of the other side]."""
    _, granules, others = tiles.shape
    ranges = torch.empty((batch, granules, 4), dtype=torch.int32, device=tiles.device)
    if ranges.numel():
        stride_b = 0 if tiles.shape[0] == 1 else tiles.stride(0)
        _tile_ranges_kernel[(batch * granules,)](
            tiles, ranges, others, span, other_size, granules, stride_b, *tiles.stride()[1:],
            BLOCK=next_power_of_2(others), STARTS_EARLY=starts_early(target), num_warps=1,
        )  # fmt: skip
    return ranges


def _both(a: Tensor | None, b: Tensor) -> Tensor:
    """What lies in both ranges."""
    if a is None:
        return b
    begins = torch.maximum(a[..., 0::2], b[..., 0::2])
    ends = torch.minimum(a[..., 1::2], b[..., 1::2])
    return torch.stack([begins, ends], -1).flatten(2)
