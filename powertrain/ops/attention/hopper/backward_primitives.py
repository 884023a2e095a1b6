"""What the warpgroups of the Hopper backward agree on: barriers by number, what is told of a tile, descriptors."""

from powertrain.runtime.gluon_compat import gl, gluon, reinterpret, tma

# the hardware's barriers, at which who arrives need not wait: ds of a block is there, a stage was given back, whose
# turn it is at the tensor cores
BAR_DS_FULL = gl.constexpr(8)
BAR_EMPTY = gl.constexpr(10)
BAR_TURN = gl.constexpr(14)
EVERYONE = gl.constexpr(384)
CONSUMERS = gl.constexpr(256)

# what the server tells of a tile: [2, TILE_FIELDS] int32 in shared memory
TILE_FIELDS = gl.constexpr(16)
TILE_KV = gl.constexpr(0)  # head of keys; -1: no more tiles
TILE_B = gl.constexpr(1)
TILE_COUNT = gl.constexpr(2)  # blocks of queries
TILE_FIRST = gl.constexpr(3)  # key
TILE_SUMS = gl.constexpr(4)  # of the sums, of the first block of the first query head
TILE_DISTANCE = gl.constexpr(5)  # position of the first query less that of the first key
TILE_K_LEFT = gl.constexpr(6)  # keys from the first one on
TILE_Q_END = gl.constexpr(7)
TILE_Q_ROW = gl.constexpr(8)
TILE_K_END = gl.constexpr(9)
TILE_K_ROW = gl.constexpr(10)
TILE_DK_END = gl.constexpr(11)
TILE_DK_ROW = gl.constexpr(12)
TILE_DK_LEFT = gl.constexpr(13)  # rows of dk from the first one on
TILE_UNSEEN = gl.constexpr(14)  # blocks that the tile of the keys before does not see, of all heads


@gluon.jit
def as_tile(smem):
    """[rows, columns] in shared memory as the tile of a descriptor."""
    ROWS: gl.constexpr = smem.shape[0]
    COLS: gl.constexpr = smem.shape[1]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, 1, ROWS, COLS], smem.dtype)
    return reinterpret(smem, smem.dtype, [1, 1, 1, ROWS, COLS], layout)


@gluon.jit
def rows_desc_of(ptr, batch, heads, rows, D, stride_b, stride_h, stride_s, smem, RAGGED: gl.constexpr):
    """A descriptor [batch, heads, end, row, column] of a whole tensor [batch, heads, rows, D], of the tiles that the
    stages of `smem` hold. RAGGED: it ends where any sequence ends, for row i of n that end before row `end` is
    (end, rows - n + i); else row i is (0, i).

    A tile must not lie wholly outside: TMA touches then what it takes for the tensor's start."""
    ROWS: gl.constexpr = smem.shape[1]
    COLS: gl.constexpr = smem.shape[2]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, 1, ROWS, COLS], smem.dtype)
    stride = stride_s.to(gl.int64)
    ends = gl.to_tensor(1)
    if RAGGED:
        ptr -= rows * stride
        ends = rows + 1
    return tma.make_tensor_descriptor(
        ptr, [batch, heads, ends, rows, D], [stride_b, stride_h, stride, stride, 1], [1, 1, 1, ROWS, COLS], layout
    )
