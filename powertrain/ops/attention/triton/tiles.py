"""Device functions of the forward and backward kernels: tiles of rows, sequences, visible spans, masks, scores.

A tile of rows is a tuple with one [BLOCK, PIECES[n]] tensor per piece of the head dim. Scores are kept in base 2:
s * log2(e). The arguments that travel together are NamedTuples, which Triton passes to device functions as they are;
constexprs are not among their fields, because Triton turns a constexpr that is assigned or returned into a tensor.
"""

from typing import Any, Literal, NamedTuple

import triton
import triton.language as tl


class Features(NamedTuple):
    """The features that a launch compiles in: the constexpr argument FEATURES of the attention kernels."""

    has_left: bool  # the window is bounded to the left
    has_right: bool
    has_chunk: bool  # queries see the keys of their own chunk only
    has_prefix: bool  # every query sees the first keys of its sequence
    bottom_right: bool  # the last query has the position of the last key
    # One-sided ALiBi: no query sees keys behind its own position, so |p - j| is p - j, and its p part, which is the
    # same for a whole row, is added to the LSE instead of to every score.
    alibi: Literal["none", "two_sided", "one_sided"]
    bias: Literal["none", "pointers", "descriptor", "one_row"]  # how it is read; one row serves all queries
    has_documents: bool
    has_dropout: bool
    has_softcap: bool
    fast_tanh: bool  # the hardware's tanh


class TiledRows(NamedTuple):
    """Rows of one head in memory, read and written in tiles."""

    handles: Any  # TMA descriptors, one per piece of the head dim; without TMA the pointer to the first row
    length: Any
    stride: Any


class Limits(NamedTuple):
    """Limits of the visible positions; Features.has_* says which hold."""

    left: Any
    right: Any
    chunk: Any
    prefix: Any


class ScoreScale(NamedTuple):
    """Scores in base 2 are `inner` * q k^T, and with a softcap `outer` * tanh(inner * q k^T)."""

    inner: Any
    outer: Any


class BiasStrides(NamedTuple):
    """Strides of the bias tensor by batch entry, head, query and key; 0 where it is broadcast."""

    b: Any
    h: Any
    q: Any
    k: Any


class Bias(NamedTuple):
    """The bias of one head, and its ALiBi slope in base 2."""

    base: Any  # pointer or descriptor
    stride_q: Any
    stride_k: Any
    slope: Any


class Documents(NamedTuple):
    """Document ids of a tile's rows, and where those of the other side lie."""

    own: Any  # [BLOCK, 1]
    other_ptr: Any
    other_length: Any


class Dropout(NamedTuple):
    """A Philox stream: one per head."""

    seed_ptr: Any
    stream: Any
    threshold: Any


class ScoreMods(NamedTuple):
    """Everything that turns q k^T of a head into masked scores."""

    scale: Any
    limits: Any
    bias: Any
    documents: Any
    dropout: Any
    q_len: Any
    k_len: Any


class Strides(NamedTuple):
    """Strides of a tensor by batch entry, position, kv head and query head of a kv head."""

    b: Any
    s: Any
    h: Any
    r: Any


LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


def pieces(head_dim: int, largest: int = 512) -> tuple[int, ...]:
    """The powers of two, 16 or more, that a head dim is computed in, largest first: 192 is (128, 64)."""
    rounded = -(-head_dim // 16) * 16
    whole, rest = divmod(rounded, largest)
    return (largest,) * whole + tuple(1 << bit for bit in range(rest.bit_length(), 3, -1) if rest >> bit & 1)


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
    return tl.make_tensor_descriptor(base_ptr, [tl.maximum(length, 1), D], [stride, 1], [BLOCK, PIECE])


@triton.jit
def load_tile(
    rows, start, D: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr, BOUNDED: tl.constexpr
):
    """The tile of rows start to start + BLOCK: a tuple of [BLOCK, PIECES[n]]. Without BOUNDED all of them exist."""
    tile = ()
    for n in tl.static_range(len(PIECES)):
        if TMA:
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
    i = tl.arange(0, BLOCK)[:, None]
    cols = FIRST + tl.arange(0, PIECE)[None, :]
    ptrs = rows.handles[0] + start * rows.stride.to(tl.int64) + i * rows.stride + cols  # [BLOCK, PIECE]
    if BOUNDED:
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
    product = tl.zeros([BLOCK_A, BLOCK_B], tl.float32)
    for n in tl.static_range(len(PIECES)):
        a = _load_piece(a_rows, a_start, D, piece_start(PIECES, n), PIECES[n], BLOCK_A, True, True)  # [BLOCK_A, piece]
        b = _load_piece(b_rows, b_start, D, piece_start(PIECES, n), PIECES[n], BLOCK_B, True, True)  # [BLOCK_B, piece]
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
    piece = tl.where(i < rows.length - start, piece, 0.0).to(base_ptr.dtype.element_ty)
    ptrs = base_ptr + start * rows.stride.to(tl.int64) + i * rows.stride + cols  # [BLOCK, PIECE]
    if FIRST + PIECE > D:
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
        product = tl.dot(a[n], tl.trans(b[n]), product, input_precision=PRECISION)
    return product


@triton.jit
def add_product(tile, weights, b, PRECISION: tl.constexpr, FMA: tl.constexpr):
    """tile + weights b, piece by piece: weights [M, N], b a tile of N rows, the result a tile of M rows."""
    total = ()
    for n in tl.static_range(len(tile)):
        if FMA:
            total += (tl.dot(weights, b[n].to(tl.float32), tile[n], input_precision="ieee"),)
        else:
            total += (tl.dot(weights.to(b[n].dtype), b[n], tile[n], input_precision=PRECISION),)
    return total


@triton.jit
def scale_tile(tile, factor):
    scaled = ()
    for n in tl.static_range(len(tile)):
        scaled += (tile[n] * factor,)
    return scaled


@triton.jit
def find_sequence(starts_ptr, batch, slot, BLOCK: tl.constexpr):
    """(sequence, block in it) of a slot. Sequence n owns the slots from cdiv(starts[n], BLOCK) + n on, which are enough
    for its blocks whatever the lengths are. Sequence `batch` is the rows after the last one, batch + 1 the rows before
    the first."""
    low = slot * 0 - 1
    high = slot * 0 + batch
    while low < high:
        middle = (low + high + 1) // 2
        is_before = tl.cdiv(tl.load(starts_ptr + middle), BLOCK) + middle <= slot
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle - 1)
    first = tl.cdiv(tl.load(starts_ptr + low, mask=low >= 0, other=0), BLOCK) + tl.maximum(low, 0)
    return tl.where(low < 0, batch + 1, low), slot - first


@triton.jit
def sequence_span(starts_ptr, used_ptr, b, batch, size):
    """(first row, length, capacity) of sequence b: its capacity is the rows between its start and the next one's, its
    length those in use. The tensor has `size` rows."""
    start = b * 0
    capacity = start + size
    length = capacity
    if starts_ptr is not None:
        start = tl.load(starts_ptr + b, mask=b <= batch, other=0)
        capacity = tl.load(starts_ptr + tl.where(b <= batch, b + 1, 0), mask=b != batch, other=size) - start
        length = tl.where(b < batch, capacity, 0)
    if used_ptr is not None:
        length = tl.minimum(size - start, tl.load(used_ptr + b, mask=b < batch, other=0))
    return start, length, capacity


@triton.jit
def next_sequence_with(starts_ptr, used_ptr, row, b, batch, size):
    """The first sequence from b on that contains row `row`, or `batch`."""
    WIDTH: tl.constexpr = 128
    sequence = b * 0 + batch
    at = b
    while at < sequence:
        n = at + tl.arange(0, WIDTH)
        start = tl.load(starts_ptr + n, mask=n < batch, other=size)  # [WIDTH]
        end = start + tl.load(used_ptr + n, mask=n < batch, other=0)  # [WIDTH]
        sequence = tl.min(tl.where((start <= row) & (row < end), n, sequence), 0)
        at += WIDTH
    return sequence


@triton.jit
def _first_visible(p, limits, FEATURES: tl.constexpr):
    """The first key that position p sees, prefix aside."""
    first = p * 0
    if FEATURES.has_left:
        first = tl.maximum(first, p - limits.left)
    if FEATURES.has_chunk:
        first = tl.maximum(first, p // limits.chunk * limits.chunk)
    return first


@triton.jit
def _end_visible(p, k_len, limits, FEATURES: tl.constexpr):
    """The end of the keys that position p sees, prefix aside."""
    end = p * 0 + k_len
    if FEATURES.has_right:
        end = tl.minimum(end, p + limits.right + 1)
    if FEATURES.has_chunk:
        end = tl.minimum(end, tl.where(p < 0, 0, (p // limits.chunk + 1) * limits.chunk))
    return tl.maximum(end, 0)


@triton.jit
def key_span(p_first, p_last, k_len, limits, FEATURES: tl.constexpr, BLOCK_N: tl.constexpr):
    """(begin, full_begin, full_end, end), in whole blocks but for the end: positions p_first to p_last see no keys
    outside begin to end, and all of those from full_begin to full_end, whose blocks need no mask.

    The keys that a position sees are an interval whose two ends never fall as the position rises (the prefix aside),
    so that the first and the last position decide all four numbers."""
    begin = _first_visible(p_first, limits, FEATURES)
    full_begin = _first_visible(p_last, limits, FEATURES)
    full_end = _end_visible(p_first, k_len, limits, FEATURES)
    end = _end_visible(p_last, k_len, limits, FEATURES)
    if FEATURES.has_prefix:
        prefix = tl.minimum(limits.prefix, k_len)
        begin = tl.where(prefix > 0, 0, begin)
        full_end = tl.maximum(full_end, prefix)
        end = tl.maximum(end, prefix)
    begin = begin // BLOCK_N * BLOCK_N
    full_begin = tl.minimum(tl.cdiv(full_begin, BLOCK_N) * BLOCK_N, tl.cdiv(end, BLOCK_N) * BLOCK_N)
    full_begin = tl.maximum(full_begin, begin)
    full_end = tl.maximum(full_end // BLOCK_N * BLOCK_N, full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def query_span(j_first, j_last, q_len, offset, limits, FEATURES: tl.constexpr, BLOCK_M: tl.constexpr):
    """(begin, in whole blocks, end) of the queries that may see keys j_first to j_last. Query i has position
    i + offset."""
    begin = j_first * 0
    end = begin + q_len
    if FEATURES.has_right:
        begin = tl.maximum(begin, j_first - limits.right - offset)
    if FEATURES.has_left:
        end = tl.minimum(end, j_last + limits.left + 1 - offset)
    if FEATURES.has_chunk:
        begin = tl.maximum(begin, j_first // limits.chunk * limits.chunk - offset)
        end = tl.minimum(end, (j_last // limits.chunk + 1) * limits.chunk - offset)
    if FEATURES.has_prefix:
        begin = tl.where(j_first < limits.prefix, 0, begin)
        end = tl.where(j_first < limits.prefix, q_len, end)
    return begin // BLOCK_M * BLOCK_M, end


@triton.jit
def is_visible(p, j, k_len, limits, FEATURES: tl.constexpr, BOUNDED: tl.constexpr):
    """Whether position p sees key j, and with BOUNDED that the key exists. p and j broadcast to a tile, queries or
    keys along its rows."""
    visible = (j == j) & (p == p)
    if FEATURES.has_left:
        visible = visible & (j >= p - limits.left)
    if FEATURES.has_right:
        visible = visible & (j <= p + limits.right)
    if FEATURES.has_chunk:
        visible = visible & (p >= 0) & (p // limits.chunk == j // limits.chunk)
    if FEATURES.has_prefix:
        visible = visible | (j < limits.prefix)
    if BOUNDED:
        visible = visible & (j < k_len)
    return visible


@triton.jit
def score_scale(scale, softcap, FEATURES: tl.constexpr):
    if FEATURES.has_softcap:
        factors = ScoreScale(scale / softcap, softcap * LOG2E)
    else:
        factors = ScoreScale(scale * LOG2E, softcap)
    return factors


@triton.jit
def apply_softcap(product, scale, FEATURES: tl.constexpr):
    """(scores in base 2, tanh of the softcap or anything) of q k^T; all of the tile's shape."""
    if FEATURES.has_softcap:
        t = tanh(product * scale.inner, FEATURES.fast_tanh)
        s = t * scale.outer
    else:
        t = product
        s = product * scale.inner
    return s, t


@triton.jit
def prefix_of(prefix_ptr, b, batch):
    prefix = b * 0
    if prefix_ptr is not None:
        prefix = tl.load(prefix_ptr + b, mask=b < batch, other=0)
    return prefix


@triton.jit
def bias_of(
    bias_ptr, slopes_ptr, b64, head, strides, slopes_stride_b, batch, queries, keys,
    FEATURES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The Bias of a head; the bias tensor has queries x keys. Without a bias its base is a number, because a device
    function cannot return None."""
    slope = 0.0
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + b64 * slopes_stride_b + head, mask=b64 < batch, other=0.0) * LOG2E
    base = b64
    if bias_ptr is not None:
        base = bias_ptr + b64 * strides.b + to_int64(head) * strides.h
        if FEATURES.bias == "descriptor":
            base = tl.make_tensor_descriptor(base, [queries, keys], [strides.q, 1], [BLOCK_M, BLOCK_N])
    return Bias(base, strides.q, strides.k, slope)


@triton.jit
def add_bias(s, i_first, j_first, i, j, p, p_first, mods, FEATURES: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """(s with ALiBi and a floating bias, visibility by a boolean bias) of queries i, at positions p, and keys j, the
    first of which are i_first, p_first and j_first. KEYS_FIRST: the tile is [keys, queries]. With one-sided ALiBi,
    s lacks - slope * (p - p_first), which the caller adds to the LSE."""
    bias = mods.bias
    visible = (i == i) & (j == j)
    if FEATURES.alibi == "two_sided":
        s -= bias.slope * tl.abs(p - j).to(tl.float32)
    if FEATURES.alibi == "one_sided":
        s += bias.slope * (j - p_first).to(tl.float32)
    if FEATURES.bias != "none":
        if FEATURES.bias == "descriptor":
            value = bias.base.load([i_first, j_first])  # [BLOCK_M, BLOCK_N]
            if KEYS_FIRST:
                value = tl.trans(value)  # [BLOCK_N, BLOCK_M]
        elif FEATURES.bias == "one_row":
            value = tl.load(bias.base + j * bias.stride_k, mask=j < mods.k_len, other=0.0)  # the shape of j
        else:
            # int64 for the tile's corner only: offsets within a tile fit in 32 bits
            corner = bias.base + i_first * to_int64(bias.stride_q) + j_first * to_int64(bias.stride_k)
            ptrs = corner + (i - i_first) * bias.stride_q + (j - j_first) * bias.stride_k
            value = tl.load(ptrs, mask=(i < mods.q_len) & (j < mods.k_len), other=0.0)  # the shape of s
        if value.dtype == tl.uint8:
            visible = visible & (value != 0)
        else:
            s += value.to(tl.float32) * LOG2E
    return s, visible


@triton.jit
def documents_of(row_ptr, other_ptr, range_ptr, b64, rows, length, size, other_size, other_length):
    """(Documents of rows [BLOCK, 1], begin and end of the other side's positions that have any of these documents)."""
    low = length
    high = length
    if row_ptr is not None:
        own = tl.load(row_ptr + b64 * size + rows, mask=rows < length, other=-1)  # [BLOCK, 1]
        documents = Documents(own, other_ptr + b64 * other_size, other_length)
    else:
        documents = Documents(rows, length, length)
    if range_ptr is not None:
        low_ptr = range_ptr + (b64 * size + rows) * 2
        low = tl.min(tl.min(tl.load(low_ptr, mask=rows < length, other=2147483647), 0), 0)
        high = tl.max(tl.max(tl.load(low_ptr + 1, mask=rows < length, other=0), 0), 0)
    return documents, low, high


@triton.jit
def same_document(documents, others, FEATURES: tl.constexpr):
    """Whether rows and positions `others` of the other side belong to one document; without documents the shape of
    `others`, all true."""
    if FEATURES.has_documents:
        others_documents = tl.load(documents.other_ptr + others, mask=others < documents.other_length, other=-1)
        same = documents.own == others_documents
        same = same & (documents.own >= 0)  # -1: padding, which belongs to no document
    else:
        same = others == others
    return same


@triton.jit
def to_int64(x):
    return x.to(tl.int64)


@triton.jit
def tanh(x, FAST: tl.constexpr):
    """tanh of any shape. FAST is the hardware's instruction, accurate to 2^-11: enough for operands of 16 bits."""
    if FAST:
        y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
        y = (1.0 - e) / (1.0 + e)
        y = tl.where(x < 0, -y, y)
        z = x * x  # near 0, where 1 - e has lost its digits, the series
        near = x * (1.0 + z * (-1.0 / 3.0 + z * (2.0 / 15.0 + z * (-17.0 / 315.0 + z * (62.0 / 2835.0)))))
        y = tl.where(z < 0.09, near, y)
    return y


@triton.jit
def keep_tile(dropout, i, col, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which weights of rows i [BLOCK_M, 1] and columns col to col + BLOCK_N dropout keeps: [BLOCK_M, BLOCK_N], the same
    as `attention_keep` in reference.py. col is a multiple of 4, since one Philox counter gives four columns."""
    flat = tl.zeros([BLOCK_M, BLOCK_N // 4], tl.uint32)
    counter = flat + (col // 4 + tl.arange(0, BLOCK_N // 4))[None, :].to(tl.uint32)
    operation = flat + tl.load(dropout.seed_ptr + 1).to(tl.uint32)
    words = tl.philox(
        tl.load(dropout.seed_ptr), counter, flat + i.to(tl.uint32), flat + dropout.stream.to(tl.uint32), operation, 7
    )
    even, odd = tl.join(words[0], words[2]), tl.join(words[1], words[3])  # [BLOCK_M, BLOCK_N // 4, 2]
    bits = tl.reshape(tl.join(even, odd), [BLOCK_M, BLOCK_N])
    return (bits >> 1).to(tl.int32) >= dropout.threshold
