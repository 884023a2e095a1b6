"""From q k^T to masked scores, in device functions: visible spans, masks, softcap, ALiBi, bias, documents, dropout.

Scores are kept in base 2: s * log2(e). The arguments that travel together are NamedTuples, which Triton passes to
device functions as they are; constexprs are not among their fields, because Triton turns a constexpr that is assigned
or returned into a tensor.
"""

from typing import Any, Literal, NamedTuple

import triton
import triton.language as tl

from powertrain.ops.attention.triton.read_mask import visible_ranges
from powertrain.ops.attention.triton.tiles import LOG2E, to_int64


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
    bias_is_mask: bool  # boolean: says who sees whom
    has_documents: bool
    has_ranges: bool  # blocks that nobody or everybody sees are known (read_mask.py)
    mask_has_ranges: bool  # by the boolean mask too, so that it is not read in the latter
    has_dropout: bool
    has_softcap: bool
    fast_tanh: bool  # the hardware's tanh


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
def add_bias(
    s, i_first, j_first, i, j, p, p_first, mods, FEATURES: tl.constexpr, READS_BIAS: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """(s with ALiBi and a floating bias, visibility by a boolean bias) of queries i, at positions p, and keys j, the
    first of which are i_first, p_first and j_first. KEYS_FIRST: the tile is [keys, queries]. With one-sided ALiBi,
    s lacks - slope * (p - p_first), which the caller adds to the LSE."""
    bias = mods.bias
    visible = (i == i) & (j == j)
    if FEATURES.alibi == "two_sided":
        s -= bias.slope * tl.abs(p - j).to(tl.float32)
    if FEATURES.alibi == "one_sided":
        s += bias.slope * (j - p_first).to(tl.float32)
    if READS_BIAS:
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
        if FEATURES.bias_is_mask:
            visible = visible & (value != 0)
        else:
            s += value.to(tl.float32) * LOG2E
    return s, visible


@triton.jit
def documents_of(row_ptr, other_ptr, b64, rows, length, size, other_size, other_length):
    """Documents of rows [BLOCK, 1]."""
    if row_ptr is not None:
        own = tl.load(row_ptr + b64 * size + rows, mask=rows < length, other=-1)  # [BLOCK, 1]
        documents = Documents(own, other_ptr + b64 * other_size, other_length)
    else:
        documents = Documents(rows, length, length)
    return documents


@triton.jit
def visible_keys(span, first, q_len, b64, queries, qrange_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The bounds `span` of the keys that the queries from `first` on see, as `key_span` gives them, without what their
    ranges leave out."""
    begin, full_begin, full_end, end = span
    if qrange_ptr is not None:
        low, high, full_low, full_high = visible_ranges(qrange_ptr, b64, first, queries, BLOCK_M)
        end = tl.minimum(end, high)
        begin = tl.minimum(tl.maximum(begin, low // BLOCK_N * BLOCK_N), end // BLOCK_N * BLOCK_N)
        full_begin = tl.maximum(tl.maximum(full_begin, tl.cdiv(full_low, BLOCK_N) * BLOCK_N), begin)
        full_begin = tl.minimum(full_begin, tl.cdiv(end, BLOCK_N) * BLOCK_N)
        full_end = tl.maximum(tl.minimum(full_end, tl.minimum(end, full_high) // BLOCK_N * BLOCK_N), full_begin)
    # a block past the sequence sees nothing: its results are zeros
    return begin, full_begin, full_end, tl.where(first < q_len, end, full_end)


@triton.jit
def same_document(documents, others, FEATURES: tl.constexpr):
    """Whether rows and positions `others` of the other side belong to one document; without documents the shape of
    `others`, all true."""
    if FEATURES.has_documents:
        others_documents = tl.load(documents.other_ptr + others, mask=others < documents.other_length, other=-1)
        same = documents.own == others_documents
        # -1: padding, which belongs to no document
        same = same & (documents.own >= 0)
    else:
        same = others == others
    return same


@triton.jit
def tanh(x, FAST: tl.constexpr):
    """tanh of any shape. FAST is the hardware's instruction, accurate to 2^-11: enough for operands of 16 bits."""
    if FAST:
        y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
        y = (1.0 - e) / (1.0 + e)
        y = tl.where(x < 0, -y, y)
        # near 0, where 1 - e has lost its digits, the series
        z = x * x
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


@triton.jit
def row_values(base, i, length, other: tl.constexpr, VARLEN: tl.constexpr):
    """Values of rows i [BLOCK_M]. Packed sequences need a mask, with `other` past the end; dense layouts are padded."""
    if VARLEN:
        values = tl.load(base + i, mask=i < length, other=other)
    else:
        values = tl.load(base + i)
    return values


@triton.jit
def recomputed_weights(
    product, i_first, j_first, i, j, p, p_first, others, lse, mods,
    FEATURES: tl.constexpr, MASKED: tl.constexpr, BOUNDED: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """(p, tanh with a softcap) of a tile of q k^T, [BLOCK_M, BLOCK_N] or with KEYS_FIRST [BLOCK_N, BLOCK_M]. `others`:
    the indices that mods.documents.own is compared with.

    Rows past the sequence need no mask, because their q and do are 0 and their lse and delta finite. Without BOUNDED
    keys past the end need none either: their gradients are not stored."""
    # a block that all see needs no look at the mask
    READS_BIAS: tl.constexpr = FEATURES.bias != "none" and (MASKED or not FEATURES.mask_has_ranges)
    s, t = apply_softcap(product, mods.scale, FEATURES)
    s, visible = add_bias(s, i_first, j_first, i, j, p, p_first, mods, FEATURES, READS_BIAS, KEYS_FIRST)
    if FEATURES.alibi == "one_sided":
        # the part of ALiBi that add_bias left out
        lse += mods.bias.slope * (p - p_first).to(tl.float32)
    weights = tl.exp2(s - lse)
    if MASKED or READS_BIAS:
        if MASKED:
            visible = visible & is_visible(p, j, mods.k_len, mods.limits, FEATURES, BOUNDED)
        visible = visible & same_document(mods.documents, others, FEATURES)
        weights = tl.where(visible, weights, 0.0)
    return weights, t
