"""What the Hopper kernels of attention share: rings in shared memory, and the numbers of a tile told through it.

Who draws a tile writes what the others need of it into `tile_smem`, int32 [2 * FIELDS, 1]: two tiles, in turn.
"""

from powertrain.runtime.gluon_compat import gl, gluon, mbarrier

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
MINUS_INF = gl.constexpr(float("-inf"))


@gluon.jit
def int32(x):
    return gl.to_tensor(x).to(gl.int32)


@gluon.jit
def here(stride):
    """`stride`, computed with where it is used: both consumers' were, ahead of them, and spilled meanwhile."""
    return gl.inline_asm_elementwise(
        "mov.b64 $0, $1;", "=l,l", [stride.to(gl.int64)], dtype=gl.int64, is_pure=False, pack=1
    )


@gluon.jit
def keep_order():
    """What is loaded or added ahead of this is not moved behind it, as ptxas does to save registers."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def tanh(x):
    """The hardware's, good to 2^-11: enough beside operands of 16 bits."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def rings(COUNT: gl.constexpr, arrivals: gl.constexpr):
    """COUNT barriers, each of so many arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@gluon.jit
def stages(dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLS], dtype)
    return gl.allocate_shared_memory(dtype, [COUNT, ROWS, COLS], layout)


@gluon.jit
def tell(tile_smem, slot, place: gl.constexpr, value):
    """Number `place` of the tile in `slot`."""
    _write(tile_smem, slot * (tile_smem.shape[0] // 2) + place, value)


@gluon.jit
def told(tile_smem, slot, place: gl.constexpr):
    return _read(tile_smem, slot * (tile_smem.shape[0] // 2) + place)


# apart, for Triton walks through a function once for each set of its constants, and `place` is one


@gluon.jit
def _write(tile_smem, at, value):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    tile_smem.index(at).store(gl.full([1], value, gl.int32, layout))


@gluon.jit
def _read(tile_smem, at):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(tile_smem.index(at).load(layout), 0)
