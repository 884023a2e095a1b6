"""The Hopper GEMM with further epilogues: activations, gates, a residual, the largest magnitude.

    z = a bᵀ + bias                                     [M, N]
    y = act(z) + residual                               or z + residual
    y = act(z) * (a upᵀ + up_bias) + residual           gated: b and up [N, K] each

The loader and the consumers are those of gemm/hopper.py. The epilogue of a tile is computed by three *finishers*, a
warp each, while the next tile is multiplied: they read the tile from shared memory, where it is rounded to a's dtype,
so that results have the bits of a GEMM followed by the activation, and take its pieces in turn. Gated, a tile of 256
columns is 128 of b's and 128 of up's, which stand in the same thread.
"""

from typing import Any, NamedTuple

from torch import Tensor

from powertrain.ops.activation_kernels import activate, activate_gated
from powertrain.ops.gemm.hopper import why_not
from powertrain.ops.gemm.hopper_warps import (
    Arrival,
    Chunks,
    ConsumerBuffers,
    GemmConfig,
    GemmOperands,
    GemmSizes,
    GemmStrides,
    OperandStages,
    consume,
    load,
    tile_coords,
)
from powertrain.ops.shapes import cdiv
from powertrain.runtime.gluon_compat import (
    gl,
    gluon,
    hopper,
    mbarrier,
    reinterpret,
    tma,
    tma_store,
)
from powertrain.runtime.launch import gluon_kernel
from powertrain.runtime.target import Target


class EpiloguePointers(NamedTuple):
    """None where not wanted."""

    y: Any
    z: Any  # the activation's input
    up_z: Any
    residual: Any
    amax: Any


class EpilogueStrides(NamedTuple):
    """Between rows."""

    y: Any
    z: Any
    residual: Any


@gluon.jit
def _piece(smem, piece, layout: gl.constexpr):
    """Rows of 64 columns by 8 of a half tile, as TMA's layout has them: panels of 64 columns, in which 8 rows are
    swizzled among themselves."""
    COUNT: gl.constexpr = smem.shape[0] // 8 * smem.shape[1] // 64
    swizzle: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, 64], smem.dtype)
    return reinterpret(smem, smem.dtype, [COUNT, 8, 64], swizzle).index(piece).load(layout)


@gluon.jit
def _finish(
    pointers, c_smem, c_full, c_empty, M, N, strides, limit, alpha,
    KIND: gl.constexpr, GATED: gl.constexpr, BLOCK_M: gl.constexpr, GROUP_M: gl.constexpr, FINISHER: gl.constexpr,
):  # fmt: skip
    """A finisher warp: every third piece of this CTA's tiles."""
    y_ptr, z_ptr, up_z_ptr, residual_ptr, amax_ptr = pointers
    stride_y, stride_z, stride_residual = strides
    ROWS: gl.constexpr = c_smem.shape[1]
    COLS: gl.constexpr = c_smem.shape[2]
    PIECES: gl.constexpr = ROWS // 8 * COLS // 64
    TILE_N: gl.constexpr = COLS if GATED else 2 * COLS
    dtype: gl.constexpr = c_smem.dtype
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    tiles_n = gl.cdiv(N, TILE_N)
    tiles = gl.cdiv(M, BLOCK_M) * tiles_n
    if z_ptr is not None:
        z_desc = tma.make_tensor_descriptor(z_ptr, [M, N], [stride_z, 1], [ROWS, COLS], c_smem.layout)
    if up_z_ptr is not None:
        up_z_desc = tma.make_tensor_descriptor(up_z_ptr, [M, N], [stride_z, 1], [ROWS, COLS], c_smem.layout)
    phase = gl.to_tensor(0)
    # a number: a tile of them takes registers that the finishers do not have
    largest = gl.to_tensor(0)
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        tile_m, tile_n = tile_coords(t, gl.cdiv(M, BLOCK_M), tiles_n, GROUP_M)
        for half in range(2):
            row = tile_m * BLOCK_M + half * ROWS
            mbarrier.wait(c_full.index(half), phase)
            if z_ptr is not None:
                if half == FINISHER:
                    tma_store(z_desc, [row, tile_n * TILE_N], c_smem.index(2 * half))  # [ROWS, COLS]
                    if GATED:
                        tma_store(up_z_desc, [row, tile_n * TILE_N], c_smem.index(2 * half + 1))  # [ROWS, COLS]
                    else:
                        tma_store(z_desc, [row, tile_n * TILE_N + COLS], c_smem.index(2 * half + 1))  # [ROWS, COLS]
            for n in range(FINISHER, PIECES if GATED else 2 * PIECES, 3):
                part = n // PIECES
                piece = n % PIECES
                r = row + piece % (ROWS // 8) * 8 + gl.arange(0, 8, gl.SliceLayout(1, layout))
                c = tile_n * TILE_N + part * COLS + piece // (ROWS // 8) * 64
                c += gl.arange(0, 64, gl.SliceLayout(0, layout))
                inside = gl.max_constancy(gl.expand_dims(r < M, 1) & gl.expand_dims(c < N, 0), [1, 8])
                y = _piece(c_smem.index(2 * half + part), piece, layout).to(gl.float32)
                if GATED:
                    up = _piece(c_smem.index(2 * half + 1), piece, layout).to(gl.float32)
                    y = activate_gated(y, up, limit, alpha, KIND)[0]
                elif KIND != "":
                    y = activate(y, KIND)[0]
                if residual_ptr is not None:
                    place = gl.expand_dims(r.to(gl.int64) * stride_residual, 1) + gl.expand_dims(c, 0)
                    place = gl.multiple_of(gl.max_contiguous(place, [1, 8]), [1, 8])
                    y += gl.load(residual_ptr + place, mask=inside, other=0.0).to(gl.float32)  # [8, 64]
                y = y.to(dtype)
                place = gl.expand_dims(r.to(gl.int64) * stride_y, 1) + gl.expand_dims(c, 0)
                gl.store(y_ptr + gl.multiple_of(gl.max_contiguous(place, [1, 8]), [1, 8]), y, mask=inside)  # [8, 64]
                if amax_ptr is not None:
                    # magnitudes in the order of their bits, in which NaN is above all
                    size = gl.where(inside, y.to(gl.float32).to(gl.int32, bitcast=True) & 0x7FFFFFFF, 0)
                    largest = gl.maximum(largest, gl.max(gl.max(size, 1), 0))
            tma.store_wait(0)
            mbarrier.arrive(c_empty.index(half), count=1)
        phase ^= 1
    if amax_ptr is not None:
        gl.atomic_max(amax_ptr.to(gl.pointer_type(gl.int32), bitcast=True), largest)


@gluon_kernel(archs=(90,))
def _epilogue_kernel(
    a_ptr,
    b_ptr,
    up_ptr,
    bias_ptr,
    up_bias_ptr,
    y_ptr,
    z_ptr,
    up_z_ptr,
    residual_ptr,
    amax_ptr,
    M,
    N,
    K,
    stride_a,
    stride_b,
    stride_up,
    stride_y,
    stride_z,
    stride_residual,
    limit,
    alpha,
    KIND: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    GATED: gl.constexpr = up_ptr is not None
    TILE_N: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    dtype: gl.constexpr = a_ptr.dtype.element_ty
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_K], dtype)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_K], dtype)
    c_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M // 2, BLOCK_N // 2], dtype)
    a_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], a_layout)
    b_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], b_layout)
    c_smem = gl.allocate_shared_memory(dtype, [4, BLOCK_M // 2, BLOCK_N // 2], c_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    c_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    c_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(c_full.index(i), count=1)
        mbarrier.init(c_empty.index(i), count=3)
    hopper.fence_async_shared()
    buffers = ConsumerBuffers(a_smem, b_smem, c_smem, full, c_full, c_empty)
    stages = OperandStages(a_smem, b_smem, full)
    pointers = EpiloguePointers(y_ptr, z_ptr, up_z_ptr, residual_ptr, amax_ptr)
    strides = EpilogueStrides(stride_y, stride_z, stride_residual)
    CONFIG: gl.constexpr = GemmConfig(False, False, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, 2, 2, True, TILE_N)
    gl.warp_specialize([
        (consume, (buffers, bias_ptr, up_bias_ptr, None, None, GemmSizes(M, N, K, 1), CONFIG, 0)),
        (consume, (buffers, bias_ptr, up_bias_ptr, None, None, GemmSizes(M, N, K, 1), CONFIG, 1)),
        (load, (
            GemmOperands(a_ptr, None, b_ptr, up_ptr), stages, Chunks(None, None, None), GemmSizes(M, N, K, 1),
            GemmStrides(stride_a, stride_b, stride_up, 0), Arrival(0, 0, 0, 0), CONFIG,
        )),
        (_finish, (pointers, c_smem, c_full, c_empty, M, N, strides, limit, alpha, KIND, GATED, BLOCK_M, GROUP_M, 0)),
        (_finish, (pointers, c_smem, c_full, c_empty, M, N, strides, limit, alpha, KIND, GATED, BLOCK_M, GROUP_M, 1)),
        (_finish, (pointers, c_smem, c_full, c_empty, M, N, strides, limit, alpha, KIND, GATED, BLOCK_M, GROUP_M, 2)),
        ], [4, 1, 1, 1, 1], [216, 72, 72, 72, 72])  # fmt: skip


class Epilogue(NamedTuple):
    """The epilogue of the product. `kind`: of ops/activations.py, the gate's where `up` is given, or ""."""

    kind: str = ""
    up: Tensor | None = None  # [N, K]
    bias: Tensor | None = None  # [N]
    up_bias: Tensor | None = None  # beside bias only
    residual: Tensor | None = None  # [M, N]
    amax: Tensor | None = None  # [1] float32, raised to the largest |y|, NaN above all
    z: Tensor | None = None  # [M, N]: the activation's input is written here
    up_z: Tensor | None = None
    limit: float = 7.0
    alpha: float = 1.702


def why_not_epilogue(a: Tensor, b: Tensor, epilogue: Epilogue) -> str | None:
    """Why these tensors are not for this kernel, or None. Says nothing of the device."""
    reason = why_not(a, b, None)
    if epilogue.up_bias is not None and epilogue.bias is None:
        return "up_bias is for where bias is, too: the columns of both are those of bias"
    for other in (epilogue.up, epilogue.residual, epilogue.z, epilogue.up_z):
        reason = reason or (None if other is None else why_not(a, b, other))
    return reason


def hopper_epilogue(a: Tensor, b: Tensor, y: Tensor, epilogue: Epilogue) -> None:
    """`y` and the results of `epilogue`, on sm_90. a [M, K], b [N, K], y [M, N], all of one 16-bit dtype."""
    e, (M, K), N = epilogue, a.shape, b.shape[0]
    block_m, block_n = 128, 256
    tiles = cdiv(M, block_m) * cdiv(N, block_n if e.up is None else block_n // 2)
    _epilogue_kernel[(min(Target.of(a.device).num_sms, tiles),)](
        a, b, e.up, e.bias, e.bias if e.up is None else e.up_bias, y, e.z, e.up_z, e.residual, e.amax, M, N, K,
        a.stride(0), b.stride(0), _stride(e.up), y.stride(0), _stride(e.z), _stride(e.residual), e.limit, e.alpha,
        KIND=e.kind, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=64, STAGES=3, GROUP_M=16, num_warps=4,
    )  # fmt: skip


def _stride(x: Tensor | None) -> Any:
    return 0 if x is None else x.stride(0)
