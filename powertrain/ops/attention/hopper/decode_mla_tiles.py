"""What all sides of the Hopper decoding kernel for MLA share: barriers' numbers, buffers, what a program computes."""

from typing import Any, NamedTuple

from powertrain.runtime.gluon_compat import gl

# numbered barriers (Triton takes 0 to 4): both consumers' sums are stored; weights of consumer 0 or 1 are stored; and
# the return of a half of the columns of a stage, 2 * stage + half
SUMS_FULL = gl.constexpr(5)
WEIGHTS_FULL = gl.constexpr(6)
HALVES_FREE = gl.constexpr(8)

ROWS = gl.constexpr(64)  # queries times heads of a tile
BLOCK_N = gl.constexpr(64)  # keys of a block
HALF = gl.constexpr(256)  # columns of the values that a consumer has
TAIL = gl.constexpr(64)  # columns of the keys that are no values


class Buffers(NamedTuple):
    """Shared memory."""

    q: Any  # [2, 64, 256]
    q_tail: Any  # [1, 64, 64]
    k: Any  # [4, 64, 256]: halves of two stages
    k_tail: Any  # [2, 64, 64]
    p: Any  # [64, 64]: weights of the last block
    m: Any  # float32 [2, 64]: the running maximum with a consumer's weights
    l: Any  # float32 [2, 64]: a consumer's sums  # noqa: E741


class Sync(NamedTuple):
    """mbarriers. Halves are given back at numbered barriers instead."""

    q_full: Any  # halves 0 and 1 are at 0 and 2, the tail at 1
    full: Any  # of each stage: the pieces of its halves of columns, its tail


class Part(NamedTuple):
    """What a program computes: rows of a tile of one sequence, blocks of keys from `begin` on."""

    batch: Any
    slot: Any  # of its partial results
    alone: Any  # 1: there is no other part
    row: Any  # the first
    length: Any  # of the sequence
    last: Any  # keys that any row sees end here
    begin: Any
    count: Any  # at least 1


class Sizes(NamedTuple):
    queries: Any
    heads: Any
    right: Any


class Results(NamedTuple):
    """Pointers of a consumer; of a part that is not alone the partial ones are written."""

    out: Any
    lse: Any
    partial: Any
    partial_lse: Any
    sinks: Any
