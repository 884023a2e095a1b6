"""What the forward and backward kernels share: head dims in pieces, sequences, spans of visible keys, masks, scores.

A tensor of rows is a *source*: TMA descriptors, one per piece of the head dim, or its pointer. A tile is a tuple of
pieces [rows, piece]. Scores are kept in base 2: s * log2(e).
"""

import triton
import triton.language as tl

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
def source(base_ptr, length, stride, D: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr):
    """A source of `length` rows of D elements, of which tiles of BLOCK rows are read; zeros behind its end."""
    if TMA:
        found = ()
        for i in tl.static_range(len(PIECES)):
            found += (_descriptor(base_ptr, length, stride, D, PIECES[i], BLOCK),)
    else:
        found = (base_ptr,)
    return found


@triton.jit
def _descriptor(base_ptr, length, stride, D: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    return tl.make_tensor_descriptor(base_ptr, [tl.maximum(length, 1), D], [stride, 1], [BLOCK, PIECE])


@triton.jit
def load_tile(
    src,
    start,
    length,
    stride,
    D: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    TMA: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Rows start to start + BLOCK of a source. Without BOUNDED all of them must exist."""
    tile = ()
    for i in tl.static_range(len(PIECES)):
        if TMA:
            piece = src[i].load([start, piece_start(PIECES, i)])
        else:
            piece = _load_piece(
                src[0], start, length, stride, D, piece_start(PIECES, i), PIECES[i], BLOCK, BOUNDED, False
            )
        tile += (piece,)
    return tile


@triton.jit
def _load_piece(
    base_ptr,
    start,
    length,
    stride,
    D: tl.constexpr,
    FIRST: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
    BOUNDED: tl.constexpr,
    AGAIN: tl.constexpr,
):
    rows = tl.arange(0, BLOCK)[:, None]
    cols = FIRST + tl.arange(0, PIECE)[None, :]
    ptrs = base_ptr + start * stride.to(tl.int64) + rows * stride + cols
    if BOUNDED:
        if FIRST + PIECE > D:
            piece = tl.load(ptrs, mask=(rows < length - start) & (cols < D), other=0.0, volatile=AGAIN)
        else:
            piece = tl.load(ptrs, mask=rows < length - start, other=0.0, volatile=AGAIN)
    elif FIRST + PIECE > D:
        piece = tl.load(ptrs, mask=cols < D, other=0.0, volatile=AGAIN)
    else:
        piece = tl.load(ptrs, volatile=AGAIN)
    return piece


@triton.jit
def dot_rows_fma(
    a_src, a_start, a_length, a_stride, b_src, b_start, b_length, b_stride,
    D: tl.constexpr, PIECES: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """a b^T in float32 without tensor cores, both loaded here piece by piece: such a dot holds the whole inner dim of
    its operands in registers, so a tile that stays would fill them all (volatile: not to be kept between blocks)."""
    product = tl.zeros([BLOCK_A, BLOCK_B], tl.float32)
    for i in tl.static_range(len(PIECES)):
        a = _load_piece(
            a_src[0], a_start, a_length, a_stride, D, piece_start(PIECES, i), PIECES[i], BLOCK_A, True, True
        )
        b = _load_piece(
            b_src[0], b_start, b_length, b_stride, D, piece_start(PIECES, i), PIECES[i], BLOCK_B, True, True
        )
        product = tl.dot(a.to(tl.float32), tl.trans(b.to(tl.float32)), product, input_precision="ieee")
    return product


@triton.jit
def store_tile(base_ptr, tile, start, length, room, stride, D: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    """Store rows below `length`, and zeros in those from there to `room`."""
    for i in tl.static_range(len(PIECES)):
        _store_piece(base_ptr, tile[i], start, length, room, stride, D, piece_start(PIECES, i), PIECES[i], BLOCK)


@triton.jit
def _store_piece(
    base_ptr,
    piece,
    start,
    length,
    room,
    stride,
    D: tl.constexpr,
    FIRST: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.arange(0, BLOCK)[:, None]
    cols = FIRST + tl.arange(0, PIECE)[None, :]
    piece = tl.where(rows < length - start, piece, 0.0).to(base_ptr.dtype.element_ty)
    ptrs = base_ptr + start * stride.to(tl.int64) + rows * stride + cols
    if FIRST + PIECE > D:
        tl.store(ptrs, piece, mask=(rows < room - start) & (cols < D))
    else:
        tl.store(ptrs, piece, mask=rows < room - start)


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
    """a b^T over the pieces of the head dim: [rows of a, rows of b]."""
    product = tl.dot(a[0], tl.trans(b[0]), input_precision=PRECISION)
    for i in tl.static_range(1, len(a)):
        product = tl.dot(a[i], tl.trans(b[i]), product, input_precision=PRECISION)
    return product


@triton.jit
def add_product(tile, weights, b, PRECISION: tl.constexpr, FMA: tl.constexpr):
    """tile + weights b, piece by piece."""
    total = ()
    for i in tl.static_range(len(tile)):
        if FMA:
            total += (tl.dot(weights, b[i].to(tl.float32), tile[i], input_precision="ieee"),)
        else:
            total += (tl.dot(weights.to(b[i].dtype), b[i], tile[i], input_precision=PRECISION),)
    return total


@triton.jit
def scale_tile(tile, factor):
    scaled = ()
    for i in tl.static_range(len(tile)):
        scaled += (tile[i] * factor,)
    return scaled


@triton.jit
def find_sequence(starts_ptr, batch, slot, BLOCK: tl.constexpr):
    """(sequence, block in it) of a slot. Sequence n has the slots from cdiv(starts[n], BLOCK) + n on: enough for its
    blocks. Number `batch` stands for the rows behind the last sequence, batch + 1 for those ahead of the first."""
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
def span_of(starts_ptr, used_ptr, b, batch, size):
    """(first row, length, rows of storage) of sequence b; `size` rows in all."""
    start = b * 0
    room = start + size
    length = room
    if starts_ptr is not None:
        start = tl.load(starts_ptr + b, mask=b <= batch, other=0)
        room = tl.load(starts_ptr + tl.where(b <= batch, b + 1, 0), mask=b != batch, other=size) - start
        length = tl.where(b < batch, room, 0)
    if used_ptr is not None:
        length = tl.minimum(size - start, tl.load(used_ptr + b, mask=b < batch, other=0))
    return start, length, room


@triton.jit
def next_over(starts_ptr, used_ptr, row, b, batch, size):
    """The first sequence from b on that has row `row`, or `batch`."""
    WIDTH: tl.constexpr = 128
    found = b * 0 + batch
    at = b
    while at < found:
        n = at + tl.arange(0, WIDTH)
        start = tl.load(starts_ptr + n, mask=n < batch, other=size)
        end = start + tl.load(used_ptr + n, mask=n < batch, other=0)
        found = tl.min(tl.where((start <= row) & (row < end), n, found), 0)
        at += WIDTH
    return found


# Positions are limited by `limits` = (left, right, chunk, prefix); HAS, a constexpr tuple of four, says which hold.


@triton.jit
def _first_seen(p, limits, HAS: tl.constexpr):
    """The first key that position p sees, prefix aside."""
    first = p * 0
    if HAS[0]:
        first = tl.maximum(first, p - limits[0])
    if HAS[2]:
        first = tl.maximum(first, p // limits[2] * limits[2])
    return first


@triton.jit
def _end_seen(p, keys, limits, HAS: tl.constexpr):
    """The end of the keys that position p sees, prefix aside."""
    end = p * 0 + keys
    if HAS[1]:
        end = tl.minimum(end, p + limits[1] + 1)
    if HAS[2]:
        end = tl.minimum(end, tl.where(p < 0, 0, (p // limits[2] + 1) * limits[2]))
    return tl.maximum(end, 0)


@triton.jit
def key_span(p_first, p_last, keys, limits, HAS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys that positions p_first to p_last may see, in blocks: (begin, begin of what all see, its end, end).

    What a position sees is an interval whose ends do not fall as the position rises, so four numbers say it."""
    begin = _first_seen(p_first, limits, HAS)
    full_begin = _first_seen(p_last, limits, HAS)
    full_end = _end_seen(p_first, keys, limits, HAS)
    end = _end_seen(p_last, keys, limits, HAS)
    if HAS[3]:
        prefix = tl.minimum(limits[3], keys)
        begin = tl.where(prefix > 0, 0, begin)
        full_end = tl.maximum(full_end, prefix)
        end = tl.maximum(end, prefix)
    begin = begin // BLOCK_N * BLOCK_N
    full_begin = tl.minimum(tl.cdiv(full_begin, BLOCK_N) * BLOCK_N, tl.cdiv(end, BLOCK_N) * BLOCK_N)
    full_begin = tl.maximum(full_begin, begin)
    full_end = tl.maximum(full_end // BLOCK_N * BLOCK_N, full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def query_span(j_first, j_last, queries, offset, limits, HAS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Queries that may see keys j_first to j_last: (begin, in blocks, end). Query i has the position i + offset."""
    begin = j_first * 0
    end = begin + queries
    if HAS[1]:
        begin = tl.maximum(begin, j_first - limits[1] - offset)
    if HAS[0]:
        end = tl.minimum(end, j_last + limits[0] + 1 - offset)
    if HAS[2]:
        begin = tl.maximum(begin, j_first // limits[2] * limits[2] - offset)
        end = tl.minimum(end, (j_last // limits[2] + 1) * limits[2] - offset)
    if HAS[3]:
        begin = tl.where(j_first < limits[3], 0, begin)
        end = tl.where(j_first < limits[3], queries, end)
    return begin // BLOCK_M * BLOCK_M, end


@triton.jit
def is_visible(p, j, keys, limits, HAS: tl.constexpr, BOUNDED: tl.constexpr):
    """Whether position p sees key j, and with BOUNDED that the key exists; p and j broadcast, either way round."""
    seen = (j == j) & (p == p)
    if HAS[0]:
        seen = seen & (j >= p - limits[0])
    if HAS[1]:
        seen = seen & (j <= p + limits[1])
    if HAS[2]:
        seen = seen & (p >= 0) & (p // limits[2] == j // limits[2])
    if HAS[3]:
        seen = seen | (j < limits[3])
    if BOUNDED:
        seen = seen & (j < keys)
    return seen


@triton.jit
def capped(product, factor, SOFTCAP: tl.constexpr, FAST: tl.constexpr):
    """(scores in base 2 and, with a softcap, tanh) of q k^T. `factor`: (scale * log2(e), ..), with a softcap
    (scale / softcap, softcap * log2(e))."""
    if SOFTCAP:
        t = tanh(product * factor[0], FAST)
        s = t * factor[1]
    else:
        t = product
        s = product * factor[0]
    return s, t


@triton.jit
def factors(scale, softcap, SOFTCAP: tl.constexpr):
    if SOFTCAP:
        found = (scale / softcap, softcap * LOG2E)
    else:
        found = (scale * LOG2E, softcap)
    return found


@triton.jit
def prefix_of(prefix_ptr, b, batch):
    prefix = b * 0
    if prefix_ptr is not None:
        prefix = tl.load(prefix_ptr + b, mask=b < batch, other=0)
    return prefix


# What is done to scores besides positions, as a constexpr tuple ADDS: (ALiBi, bias, documents, dropout). What is absent
# has a number in its pointer's place, since device functions cannot return None.
#   ALiBi  1, or 2 if no query sees keys behind its own position: |p - j| is p - j then, and the p part, the same in all
#          of a row, goes into the LSE instead of every score
#   bias   1 by pointers, 2 by a descriptor, 3 one row for all queries


@triton.jit
def bias_of(
    bias_ptr, slopes_ptr, b64, head, strides, slopes_stride_b, batch, queries, keys,
    ADDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(bias of a head, its strides by query and key, ALiBi's slope in base 2) for `add_bias`; it has queries x keys."""
    slope = 0.0
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + b64 * slopes_stride_b + head, mask=b64 < batch, other=0.0) * LOG2E
    base = b64
    if bias_ptr is not None:
        base = bias_ptr + b64 * strides[0] + to_int64(head) * strides[1]
        if ADDS[1] == 2:
            base = tl.make_tensor_descriptor(base, [queries, keys], [strides[2], 1], [BLOCK_M, BLOCK_N])
    return base, strides[2], strides[3], slope


@triton.jit
def add_bias(s, i_first, j_first, i, j, p, p_first, queries, keys, bias, ADDS: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """(s with ALiBi and a floating bias, what a boolean bias lets see) of queries i and keys j from i_first and j_first
    on; keys along the first dim with KEYS_FIRST. With the one-sided ALiBi, s lacks - slope * (p - p_first)."""
    seen = (i == i) & (j == j)
    if ADDS[0] == 1:
        s -= bias[3] * tl.abs(p - j).to(tl.float32)
    if ADDS[0] == 2:
        s += bias[3] * (j - p_first).to(tl.float32)
    if ADDS[1]:
        if ADDS[1] == 2:
            value = bias[0].load([i_first, j_first])
            if KEYS_FIRST:
                value = tl.trans(value)
        elif ADDS[1] == 3:
            value = tl.load(bias[0] + j * bias[2], mask=j < keys, other=0.0)
        else:
            corner = bias[0] + i_first * to_int64(bias[1]) + j_first * to_int64(bias[2])
            ptrs = corner + (i - i_first) * bias[1] + (j - j_first) * bias[2]
            value = tl.load(ptrs, mask=(i < queries) & (j < keys), other=0.0)
        if value.dtype == tl.uint8:
            seen = seen & (value != 0)
        else:
            s += value.to(tl.float32) * LOG2E
    return s, seen


@triton.jit
def documents_of(row_ptr, other_ptr, range_ptr, b64, rows, length, size, other_size):
    """((documents of rows, those of the other side), begin and end of what they match there)."""
    low = length
    high = length
    if row_ptr is not None:
        own = tl.load(row_ptr + b64 * size + rows, mask=rows < length, other=-1)
        found = (own, other_ptr + b64 * other_size)
    else:
        found = (rows, length)
    if range_ptr is not None:
        low_ptr = range_ptr + (b64 * size + rows) * 2
        low = tl.min(tl.min(tl.load(low_ptr, mask=rows < length, other=2147483647), 0), 0)
        high = tl.max(tl.max(tl.load(low_ptr + 1, mask=rows < length, other=0), 0), 0)
    return found, low, high


@triton.jit
def same_document(documents, others, length, ADDS: tl.constexpr):
    """Whether rows and the other side's positions `others` are in one document."""
    if ADDS[2]:
        same = documents[0] == tl.load(documents[1] + others, mask=others < length, other=-1)
        same = same & (documents[0] >= 0)
    else:
        same = others == others
    return same


@triton.jit
def to_int64(x):
    return x.to(tl.int64)


@triton.jit
def tanh(x, FAST: tl.constexpr):
    """tanh; FAST is the hardware's, good to 2^-11, enough beside operands of 16 bits."""
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
    """What dropout = (seed, stream, threshold) keeps of rows i [BLOCK_M, 1] and columns col to col + BLOCK_N, col being
    a multiple of 4: as `attention_keep` in reference.py."""
    flat = tl.zeros([BLOCK_M, BLOCK_N // 4], tl.uint32)
    counter = flat + (col // 4 + tl.arange(0, BLOCK_N // 4))[None, :].to(tl.uint32)
    operation = flat + tl.load(dropout[0] + 1).to(tl.uint32)
    words = tl.philox(
        tl.load(dropout[0]), counter, flat + i.to(tl.uint32), flat + dropout[1].to(tl.uint32), operation, 7
    )
    even, odd = tl.join(words[0], words[2]), tl.join(words[1], words[3])
    drawn = tl.reshape(tl.join(even, odd), [BLOCK_M, BLOCK_N])
    return (drawn >> 1).to(tl.int32) >= dropout[2]
