"""Primitives of the Hopper attention kernels: mbarriers, pipeline stages, tile descriptors, numbered barriers.

The warp that fetches a tile writes the tile's descriptor to `tile_smem`, int32 [2 * FIELDS, 1], from where the others
read its fields. There are two descriptors, used alternately.
"""

from typing import Any, NamedTuple

from powertrain.runtime.gluon_compat import address_of, gl, gluon, mbarrier, reinterpret

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
MINUS_INF = gl.constexpr(float("-inf"))


@gluon.jit
def int32(x):
    return gl.to_tensor(x).to(gl.int32)


@gluon.jit
def keep_order():
    """Keep loads and additions before this point before it: ptxas moves them down to save registers."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def rows_in_order(x):
    """Accumulators [64, N] in the order in which the threads hold them, as [2 * N, 32]."""
    N: gl.constexpr = x.shape[1]
    return x.reshape([4, 2, 8, N // 8, 4, 2]).permute(3, 0, 2, 4, 1, 5).reshape([2 * N, 32])


@gluon.jit
def _in_order(x):
    """Accumulators [64, N] in vectors of 4, one a thread, and where each vector stands, counted in float32."""
    N: gl.constexpr = x.shape[1]
    x = rows_in_order(x).reshape([16 * N, 2, 2])
    even, odd = x.split()
    x0, x2 = even.split()
    x1, x3 = odd.split()
    return x0, x1, x2, x3, gl.arange(0, 16 * N, x0.type.layout) * 4


@gluon.jit
def add_in_order(base, x):
    """Add accumulators [64, N] to the float32 at `base`, in the order in which the threads hold them."""
    # sums lie in the order of the accumulators, so that each thread adds vectors without a shuffle; the last launch
    # brings them into rows
    x0, x1, x2, x3, place = _in_order(x)
    ptrs = base + place
    gl.inline_asm_elementwise(
        # 16 bytes a thread, no shared memory, no barrier: the L2 takes 3.8 TB/s of such additions, the kernel needs
        # 1.9
        "red.relaxed.gpu.global.add.v4.f32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;",
        "=r,l,f,f,f,f",
        [ptrs.to(gl.int64), x0, x1, x2, x3],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    keep_order()  # the next product writes to these registers


@gluon.jit
def store_in_order(base, x):
    """Store accumulators [64, N] as float32 at `base`, in the order in which the threads hold them."""
    x0, x1, x2, x3, place = _in_order(x)
    ptrs = base + place
    gl.inline_asm_elementwise(
        "st.global.v4.f32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;",
        "=r,l,f,f,f,f",
        [ptrs.to(gl.int64), x0, x1, x2, x3],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def tanh(x):
    """The hardware's instruction, accurate to 2^-11: enough for operands of 16 bits."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def alloc_mbarriers(COUNT: gl.constexpr, arrivals: gl.constexpr):
    """COUNT mbarriers, each completed by so many arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@gluon.jit
def alloc_mbarriers_at(COUNT: gl.constexpr, arrivals: gl.constexpr):
    """The same, and their address (`address_of`)."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    address = address_of(bars)
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars, address


@gluon.jit
def alloc_pipeline_stages(dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr):
    # the swizzled layout that TMA and wgmma share
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLS], dtype)
    return gl.allocate_shared_memory(dtype, [COUNT, ROWS, COLS], layout)


@gluon.jit
def write_tile_field(tile_smem, slot, field: gl.constexpr, value):
    """Write a field of the tile descriptor in `slot`."""
    _write(tile_smem, slot * (tile_smem.shape[0] // 2) + field, value)


@gluon.jit
def read_tile_field(tile_smem, slot, field: gl.constexpr):
    return _read(tile_smem, slot * (tile_smem.shape[0] // 2) + field)


# a function of its own, because Triton compiles a function once per set of its constants, and `field` is one


@gluon.jit
def _write(tile_smem, at, value):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    tile_smem.index(at).store(gl.full([1], value, gl.int32, layout))


@gluon.jit
def _read(tile_smem, at):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(tile_smem.index(at).load(layout), 0)


# Of the backward: the hardware's numbered barriers, at which a warp can arrive without waiting. They announce that ds
# of a block is stored, that a stage is free, and which consumer may use the tensor cores.
BAR_DS_FULL = gl.constexpr(8)
BAR_EMPTY = gl.constexpr(10)
BAR_TURN = gl.constexpr(14)
EVERYONE = gl.constexpr(384)
CONSUMERS = gl.constexpr(256)

# fields of the backward's tile descriptor in shared memory, int32 [2 * TILE_FIELDS, 1]
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
TILE_OUT = gl.constexpr(15)  # where groups of heads are split: of the sums of dk and dv


class Lengths(NamedTuple):
    """Where packed sequences begin, and the lengths of those that end early; None where absent."""

    q_starts: Any
    k_starts: Any
    q_used: Any
    k_used: Any
    k_slots: Any = None  # slots of keys, in the order of their tiles


class Window(NamedTuple):
    """Visible keys before and after a position; CONFIG.has_left and has_right say which bounds hold."""

    left: Any
    right: Any


class BackwardConfig(NamedTuple):
    """The constants of a launch of a backward kernel: the constexpr argument CONFIG of the device functions."""

    has_left: bool
    has_right: bool
    bottom_right: bool  # the last query has the position of the last key
    has_softcap: bool
    packed: bool  # sequences lie one behind the other
    ragged_q: bool  # sequences of queries end before their storage does
    ragged_k: bool
    d_qk: int
    d_v: int
    deterministic: bool  # tiles add to dq in a fixed order
    splits_heads: bool  # a tile has some of the query heads of a KV head
    ahead: bool  # a block's scores are asked for behind the products of the one before
    early: bool  # queries are waited for and LSE is loaded early, where nothing else needs the registers
    starts_early: bool  # jobs wait for the kernel before


class Gradients(NamedTuple):
    """A consumer's, and the slopes that it reads; None where a gradient is not wanted."""

    dk: Any  # maps of its pieces, or a pointer to sums
    dv: Any
    slopes: Any


class BackwardSizes(NamedTuple):
    batch: Any
    queries: Any
    keys: Any
    kv_heads: Any  # heads of keys, times num_splits
    num_q_per_kv: Any  # query heads of each
    num_splits: Any  # parts of the query heads of a KV head, a tile each; None: they are not split
    blocks: Any
    late_blocks: Any  # the last blocks of each head, which come behind all others
    swizzle: Any
    slots: Any
    tiles: Any


class KeySizes(NamedTuple):
    batch: Any
    num_q_per_kv: Any


class ScoreArguments(NamedTuple):
    """Arguments that turn q kᵀ into scores."""

    scale: Any
    softcap: Any
    window: Any


class BackwardBuffers(NamedTuple):
    """Pipeline stages of the backward in shared memory; of k, v, q and do one for each piece of the head dim."""

    k: Any  # [1, 128, PIECE]
    v: Any  # [1, 128, PIECE]
    q: Any  # [STAGES, BLOCK_M, PIECE]
    do: Any  # [STAGES, BLOCK_M, PIECE]
    rows: Any  # [STAGES, 2 * BLOCK_M]: LSE and delta
    ds: Any  # [DS_STAGES, 128, BLOCK_M]


class BackwardBarriers(NamedTuple):
    """mbarriers of the backward."""

    k_full: Any
    v_full: Any
    block_full: Any  # per stage of q, do and rows
    ds_empty: Any
    tile_full: Any
    tile_empty: Any


@gluon.jit
def as_tile(smem):
    """[rows, columns] in shared memory as the tile of a descriptor."""
    ROWS: gl.constexpr = smem.shape[0]
    COLS: gl.constexpr = smem.shape[1]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, 1, ROWS, COLS], smem.dtype)
    return reinterpret(smem, smem.dtype, [1, 1, 1, ROWS, COLS], layout)
