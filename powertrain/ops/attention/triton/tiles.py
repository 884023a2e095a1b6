"""Tiles of rows in device functions: load, store, products.

A tile of rows is a tuple with one [BLOCK, PIECES[n]] tensor per piece of the head dim.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

# exp2 and log2 are single instructions of the special function unit, exp and log are not: kernels keep scores in base 2
LOG2E = tl.constexpr(1.4426950408889634)


LN2 = tl.constexpr(0.6931471805599453)


class TiledRows(NamedTuple):
    """Rows of one head in memory, read and written in tiles."""

    # a descriptor describes a box of one width, so each piece of the head dim needs its own
    handles: Any  # TMA descriptors, one per piece of the head dim; without TMA the pointer to the first row
    length: Any
    stride: Any


class Strides(NamedTuple):
    """Strides of a tensor by batch entry, position, KV head and query head of a KV head."""

    b: Any
    s: Any
    h: Any
    r: Any


# powers of two because the sides of a Triton tensor are; 192 in two pieces loads and multiplies a quarter less than
# padded to 256
def pieces(head_dim: int, largest: int = 512) -> tuple[int, ...]:
    """The powers of two, 16 or more, that a head dim is computed in, largest first: 192 is (128, 64)."""
    # 16 is the smallest inner dim of a tensor core product of 16-bit operands
    rounded = -(-head_dim // 16) * 16
    whole, rest = divmod(rounded, largest)
    # largest: callers without tensor cores ask for narrower pieces, which hold fewer operands in registers
    return (largest,) * whole + tuple(1 << bit for bit in range(rest.bit_length(), 3, -1) if rest >> bit & 1)


def few_pieces(head_dim: int) -> tuple[int, ...]:
    """The same, with one piece of 256 above 192 and one of 64 behind it: of more and narrower ones ptxas keeps
    kilobytes on the stack where mma multiplies (docs/log/attention_triton.md)."""
    # 208 and 272 keep at most 360 bytes in their own widths, and would multiply a fifth more columns
    if 192 < head_dim <= 320 and head_dim not in (208, 272):
        return (256,) if head_dim <= 256 else (256, 64)
    return pieces(head_dim)


@triton.jit
def piece_start(PIECES: tl.constexpr, i: tl.constexpr):
    start: tl.constexpr = 0
    for j in tl.static_range(i):
        start += PIECES[j]
    return start


@triton.jit
def tiled_rows(base_ptr, length, stride, D: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr):
    """`length` rows of D elements, read in tiles of BLOCK rows. By TMA, rows and columns past the end read as zeros."""
    if TMA:
        handles = ()
        for n in tl.static_range(len(PIECES)):
            handles += (_descriptor(base_ptr, length, stride, D, PIECES[n], BLOCK),)
    else:
        handles = (base_ptr,)
    return TiledRows(handles, length, stride)


@triton.jit
def _descriptor(base_ptr, length, stride, D: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    # an empty sequence still makes a descriptor, and CUDA's tensor maps have no dim of 0
    return tl.make_tensor_descriptor(base_ptr, [tl.maximum(length, 1), D], [stride, 1], [BLOCK, PIECE])


@triton.jit
def load_tile(
    rows, start, D: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr, BOUNDED: tl.constexpr
):
    """The tile of rows start to start + BLOCK: a tuple of [BLOCK, PIECES[n]]. Without BOUNDED all of them exist."""
    tile = ()
    for n in tl.static_range(len(PIECES)):
        if TMA:
            # TMA takes the start as coordinates and fills rows and columns beyond the tensor with zeros, so no mask is
            # needed
            piece = rows.handles[n].load([start, piece_start(PIECES, n)])  # [BLOCK, PIECES[n]]
        else:
            piece = _load_piece(rows, start, D, piece_start(PIECES, n), PIECES[n], BLOCK, BOUNDED, False)
        tile += (piece,)
    return tile


@triton.jit
def _load_piece(
    rows, start, D: tl.constexpr, FIRST: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
    BOUNDED: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Columns FIRST to FIRST + PIECE of a tile, by pointers. AGAIN: a volatile load, which the compiler does not
    replace by an earlier one."""
    # [BLOCK, 1]
    i = tl.arange(0, BLOCK)[:, None]
    # [1, PIECE]
    cols = FIRST + tl.arange(0, PIECE)[None, :]
    # the product start * stride may exceed 2^31 elements, i * stride inside one tile does not
    ptrs = rows.handles[0] + start * rows.stride.to(tl.int64) + i * rows.stride + cols  # [BLOCK, PIECE]
    if BOUNDED:
        # FIRST, PIECE and D are compile-time constants: only the last piece of an odd head dim pays for the column mask
        if FIRST + PIECE > D:
            piece = tl.load(ptrs, mask=(i < rows.length - start) & (cols < D), other=0.0, volatile=AGAIN)
        else:
            piece = tl.load(ptrs, mask=i < rows.length - start, other=0.0, volatile=AGAIN)
    elif FIRST + PIECE > D:
        piece = tl.load(ptrs, mask=cols < D, other=0.0, volatile=AGAIN)
    else:
        piece = tl.load(ptrs, volatile=AGAIN)
    return piece


@triton.jit
def dot_rows_fma(
    a_rows, a_start, b_rows, b_start,
    D: tl.constexpr, PIECES: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """a b^T in float32 without tensor cores: [BLOCK_A, BLOCK_B].

    A dot without tensor cores holds the whole inner dim of its operands in registers. A tile that stayed there would
    fill them all, so both are loaded here piece by piece, by loads that the compiler cannot keep between blocks."""
    # tensor cores have no full-precision float32 product ("ieee" is computed with FMAs)
    product = tl.zeros([BLOCK_A, BLOCK_B], tl.float32)
    for n in tl.static_range(len(PIECES)):
        a = _load_piece(a_rows, a_start, D, piece_start(PIECES, n), PIECES[n], BLOCK_A, True, True)  # [BLOCK_A, piece]
        b = _load_piece(b_rows, b_start, D, piece_start(PIECES, n), PIECES[n], BLOCK_B, True, True)  # [BLOCK_B, piece]
        # float16 operands of sm_75 are widened too: its tl.dot reaches no tensor core either
        # (docs/log/attention_triton.md)
        product = tl.dot(a.to(tl.float32), tl.trans(b.to(tl.float32)), product, input_precision="ieee")
    return product


@triton.jit
def store_tile(rows, tile, start, capacity, D: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    """Store a tile at row `start`: its rows below rows.length, and zeros from there to `capacity`."""
    for n in tl.static_range(len(PIECES)):
        _store_piece(rows, tile[n], start, capacity, D, piece_start(PIECES, n), PIECES[n], BLOCK)


@triton.jit
def _store_piece(
    rows, piece, start, capacity, D: tl.constexpr, FIRST: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr
):
    base_ptr = rows.handles[0]
    i = tl.arange(0, BLOCK)[:, None]
    cols = FIRST + tl.arange(0, PIECE)[None, :]
    # masked and padded rows are results too: zeros are promised there (docs/attention.md, "The contract")
    piece = tl.where(i < rows.length - start, piece, 0.0).to(base_ptr.dtype.element_ty)
    ptrs = base_ptr + start * rows.stride.to(tl.int64) + i * rows.stride + cols  # [BLOCK, PIECE]
    if FIRST + PIECE > D:
        # the bound is the capacity and not the length, so padding is overwritten too
        tl.store(ptrs, piece, mask=(i < capacity - start) & (cols < D))
    else:
        tl.store(ptrs, piece, mask=i < capacity - start)


@triton.jit
def zeros_tile(BLOCK: tl.constexpr, PIECES: tl.constexpr):
    tile = ()
    for i in tl.static_range(len(PIECES)):
        tile += (_zeros(BLOCK, PIECES[i]),)
    return tile


@triton.jit
def _zeros(BLOCK: tl.constexpr, PIECE: tl.constexpr):
    return tl.zeros([BLOCK, PIECE], tl.float32)


@triton.jit
def dot_rows(a, b, PRECISION: tl.constexpr):
    """a b^T, summed over the pieces of the head dim: [rows of a, rows of b]."""
    product = tl.dot(a[0], tl.trans(b[0]), input_precision=PRECISION)
    for n in tl.static_range(1, len(a)):
        # one accumulator for all pieces, so the sum over the head dim never leaves float32
        product = tl.dot(a[n], tl.trans(b[n]), product, input_precision=PRECISION)
    return product


@triton.jit
def add_product(tile, weights, b, PRECISION: tl.constexpr, FMA: tl.constexpr):
    """tile + weights b, piece by piece: weights [M, N], b a tile of N rows, the result a tile of M rows."""
    total = ()
    for n in tl.static_range(len(tile)):
        if FMA:
            # weights stay float32 here: rounding them to 16 bits would cost accuracy and buy nothing without tensor
            # cores
            total += (tl.dot(weights, b[n].to(tl.float32), tile[n], input_precision="ieee"),)
        else:
            # probabilities are rounded to value's dtype because a tensor core takes two operands of one dtype
            total += (tl.dot(weights.to(b[n].dtype), b[n], tile[n], input_precision=PRECISION),)
    return total


@triton.jit
def scale_tile(tile, factor):
    scaled = ()
    for n in tl.static_range(len(tile)):
        scaled += (tile[n] * factor,)
    return scaled


@triton.jit
def to_int64(x):
    # the method call as a function: index products that may pass 2^31 read alike in every kernel
    return x.to(tl.int64)
