"""What both sides of the Hopper forward for head dims above 256 share: barriers' numbers, buffers, chunks of a ring."""

from typing import Any, NamedTuple

from powertrain.runtime.gluon_compat import gl, gluon

# numbered barriers (Triton takes 0 to 4): both consumers' sums are stored; weights of consumer 0 or 1 are stored; and
# the return of chunks, 4 for each consumer
SUMS_FULL = gl.constexpr(5)
WEIGHTS_FULL = gl.constexpr(6)
CHUNKS_FREE = gl.constexpr(8)

# a field of the tile descriptor, in place of the split, which these tiles do not have
TILE_K_START = gl.constexpr(7)


class Buffers(NamedTuple):
    """Shared memory."""

    q: Any  # [pieces, 64, 128]
    ring: Any  # [2 * STAGES, 64, 128]: chunks of consumer 0, then of consumer 1
    p: Any  # [2, 64, 64]: weights of each consumer's last block
    o: Any  # [2, 64, 64]
    m: Any  # float32 [2, 64]: the running maximum with the weights
    l: Any  # float32 [4, 64]: a consumer's sums, of two tiles  # noqa: E741


class Sync(NamedTuple):
    """The tile descriptor and the mbarriers. Chunks are given back at numbered barriers instead."""

    tile: Any  # int32 [2 * TILE_FIELDS, 1]
    q_full: Any
    q_empty: Any
    full: Any  # one for each chunk
    tile_full: Any
    tile_empty: Any


@gluon.jit
def chunk_index(at, ring, CONSUMER: gl.constexpr):
    """Where a consumer's chunk number `at` is."""
    STAGES: gl.constexpr = ring.shape[0] // 2
    return CONSUMER * STAGES + (at & (STAGES - 1))
