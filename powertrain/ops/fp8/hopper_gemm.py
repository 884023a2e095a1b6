"""FP8 GEMM for Hopper in Gluon: c = (a * its scales) (b * its scales)ᵀ, each sum of 128 products promoted to float32.

    a [M, K], b [N, K], both along K; c [M, N] in 16 bits or float32, also added to float32
    ends   scales of tensors or rows, applied to the whole sum
    block  a by groups of 128 along K (or rows, or one scale), b by blocks of 128 x 128
    group  both by groups of 128 along K (or one of them by rows, or one scale)

The warps are those of ops/gemm/hopper.py, with two differences. A *consumer* multiplies 128 columns and 128 of K at a
time into 64 registers a thread and adds them, scaled, to its sums in 64 or 128 others, while the tensor cores work for
the other consumer. A *scale loader* warp copies each stage's scales to shared memory.

Sources: ops/gemm/hopper.py; DeepSeek-V3, arXiv:2412.19437, section 3.3, for the promotion of partial sums.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from powertrain.ops.fp8.formulas import Quantized, cast, fp8_gemm_ref, granularity, scale_strides
from powertrain.ops.fp8.hopper_warps import ScaledBuffers, ScalePointers, ScaleStages, consume, load_scales
from powertrain.ops.gemm.hopper_warps import (
    Arrival,
    Chunks,
    GemmConfig,
    GemmOperands,
    GemmSizes,
    GemmStrides,
    OperandStages,
    load,
    store,
)
from powertrain.ops.shapes import cdiv
from powertrain.runtime import gluon_compat, self_test
from powertrain.runtime.gluon_compat import gl, hopper, mbarrier
from powertrain.runtime.launch import gluon_kernel
from powertrain.runtime.target import Target


@gluon_kernel(archs=(90,), unaligned=("sa_ptr", "sb_ptr"))
def _fp8_hopper_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    sa_ptr,
    sb_ptr,
    bias_ptr,
    M,
    N,
    K,
    stride_a,
    stride_b,
    stride_c,
    step_am,
    step_ag,
    step_bn,
    step_bg,
    FORM: gl.constexpr,
    ADD: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    HALVES: gl.constexpr = BLOCK_N // 128
    RING: gl.constexpr = 288 if FORM == "ends" else 320
    CONFIG: gl.constexpr = GemmConfig(False, False, BLOCK_M, BLOCK_N, 128, GROUP_M, 2, HALVES, False, BLOCK_N, RING)
    dtype: gl.constexpr = a_ptr.dtype.element_ty
    b_dtype: gl.constexpr = b_ptr.dtype.element_ty
    out_dtype: gl.constexpr = c_ptr.dtype.element_ty
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, 128], dtype)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, 128], b_dtype)
    c_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 128], out_dtype)
    linear: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    B_COUNT: gl.constexpr = 128 if FORM == "group" else 1
    a_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, 128], a_layout)
    b_smem = gl.allocate_shared_memory(b_dtype, [STAGES, BLOCK_N, 128], b_layout)
    c_smem = gl.allocate_shared_memory(out_dtype, [2, 64, 128], c_layout)
    sa_smem = gl.allocate_shared_memory(gl.float32, [STAGES * 2, 64], linear)
    sb_smem = gl.allocate_shared_memory(gl.float32, [STAGES * HALVES, B_COUNT], linear)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    c_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    c_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 if FORM == "ends" else 33)
    for i in gl.static_range(2):
        mbarrier.init(c_full.index(i), count=1)
        mbarrier.init(c_empty.index(i), count=1)
    # TMA, on another path to shared memory, must see the barriers initialized
    hopper.fence_async_shared()

    buffers = ScaledBuffers(a_smem, b_smem, c_smem, full, c_full, c_empty)
    scales = ScaleStages(sa_smem, sb_smem)
    pointers = ScalePointers(sa_ptr, sb_ptr, step_am, step_ag, step_bn, step_bg)
    stages = OperandStages(a_smem, b_smem, full)
    sizes = GemmSizes(M, N, K, 1)
    # written out in both branches: in a tuple that has a name, the numbers of CONFIG are no constants in Triton 3.9
    if FORM == "ends":
        gl.warp_specialize([
            (consume, (buffers, scales, pointers, bias_ptr, sizes, CONFIG, FORM, 0)),
            (consume, (buffers, scales, pointers, bias_ptr, sizes, CONFIG, FORM, 1)),
            (load, (
                GemmOperands(a_ptr, None, b_ptr, None), stages, Chunks(None, None, None), sizes,
                GemmStrides(stride_a, stride_b, 0, 0), Arrival(0, 0, 0, 0), CONFIG,
            )),
            (store, (c_ptr, c_smem, c_full, c_empty, None, None, M, N, 1, stride_c, ADD, CONFIG, 0)),
            (store, (c_ptr, c_smem, c_full, c_empty, None, None, M, N, 1, stride_c, ADD, CONFIG, 1)),
        ], [4, 1, 1, 1], [232, 40, 40, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (buffers, scales, pointers, bias_ptr, sizes, CONFIG, FORM, 0)),
            (consume, (buffers, scales, pointers, bias_ptr, sizes, CONFIG, FORM, 1)),
            (load, (
                GemmOperands(a_ptr, None, b_ptr, None), stages, Chunks(None, None, None), sizes,
                GemmStrides(stride_a, stride_b, 0, 0), Arrival(0, 0, 0, 0), CONFIG,
            )),
            (load_scales, (pointers, scales, full, sizes, CONFIG, FORM)),
            (store, (c_ptr, c_smem, c_full, c_empty, None, None, M, N, 1, stride_c, ADD, CONFIG, 0)),
            (store, (c_ptr, c_smem, c_full, c_empty, None, None, M, N, 1, stride_c, ADD, CONFIG, 1)),
        ], [4, 1, 1, 1, 1], [232, 40, 40, 40, 40])  # fmt: skip


class Plan(NamedTuple):
    block_n: int = 256
    stages: int = 3
    group_m: int = 8


def _plan(M: int, N: int, out: Tensor, num_sms: int) -> Plan:
    """Tiles of 128x256, or of 128x128 where those leave fewer SMs idle in the last wave: 227 KiB of shared memory."""
    # 128x128 has 0.94 of the speed where both fill their waves (docs/log/fp8.md)
    if _filled(M, N, 128, num_sms) * 0.94 > _filled(M, N, 256, num_sms):
        return Plan(128, 4 if out.dtype is torch.float32 else 5)
    return Plan()


def _filled(M: int, N: int, block_n: int, num_sms: int) -> float:
    """The share of its waves that the tiles fill."""
    tiles = cdiv(M, 128) * cdiv(N, block_n)
    return tiles / (cdiv(tiles, num_sms) * num_sms)


def why_not_faster(M: int, N: int, by: tuple[str, str], accumulate: bool, target: Target) -> str | None:
    """Why torch._scaled_mm serves sizes that both take, or None."""
    # one H200, torch / ours, time of the GPU. Added to float32 0.96 to 1.6, since PyTorch's product is a tensor of its
    # own there (benchmarks/results/2026-11-23_h200_fp8_gemm.md). 1 to 2048 rows by 1024 to 14336 columns
    # (benchmarks/results/2026-12-01_h200_fp8_sizes.md): by tensor 0.26 to 1.00, by row 0.70 to 0.99 below 4 waves, by
    # group and block 0.34 to 1.00 below 2
    if accumulate:
        return None
    if by in (("group", "group"), ("tensor", "tensor")):
        return f"by {by[0]} it was measured at 0.3 to 1.0 of PyTorch's speed"
    waves, least = cdiv(M, 128) * cdiv(N, 256) / target.num_sms, 2 if by[1] == "block" else 4
    if waves < least:
        return f"by {by[0]} and {by[1]} PyTorch's was measured faster for tiles that fill less than {least} waves"
    return None


def why_not(a: Quantized, b: Quantized, out_dtype: torch.dtype, out: Tensor | None = None) -> str | None:
    """Why this product is not for this kernel, or None. out None: it is made, in rows of N."""
    target = Target.of(a.data.device)
    if target.arch != 90:
        return f"it runs on sm_90 only, got sm_{target.arch}"
    if missing := gluon_compat.trouble():
        return missing
    if granularity(a) == "block":
        return "it takes scales by block of b only, not of a"
    stride = b.data.shape[0] if out is None else out.stride(0)
    if stride * out_dtype.itemsize % 16:
        return f"out's rows must be multiples of 16 bytes apart, are {stride * out_dtype.itemsize} bytes"
    for name, tensor in {"a": a.data, "b": b.data, "out": out}.items():
        if tensor is None:
            continue
        if tensor.stride(1) != 1 or (tensor is not out and tensor.stride(0) % 16):
            return f"{name}'s rows must be contiguous and 16-byte aligned, strides are {tuple(tensor.stride())}"
        if not tensor.is_meta and tensor.data_ptr() % 16:
            return f"{name} must start at a multiple of 16 bytes"
    return None


_self_tests: dict[int | None, str | None] = {}


def fails_here(device: torch.device) -> str | None:
    """Why the kernel must not be used on this sm_90 device, or None: once per device each form multiplies one tile."""
    return self_test.failure(_self_tests, device, _self_test, "fp8_gemm: another backend is used")


def _self_test(device: torch.device) -> str | None:
    """Products of small integers by scales that are powers of two, exact in float32."""
    at = torch.arange(256 * 384, device=device, dtype=torch.int32).view(256, 384)
    powers = torch.exp2((torch.arange(3 * 256, device=device) % 5).float()).view(3, 256)
    x, y = (cast((at % period - period // 2).float(), "e4m3") for period in (7, 5))
    by_group = Quantized(x[:128], powers[:, :128].T)
    pairs = (
        (Quantized(x[:128], powers[0, :128]), Quantized(y, powers[1])),
        (by_group, Quantized(y, powers[:, :2].T.contiguous())),
        (by_group, Quantized(y, powers.T)),
    )
    for a, b in pairs:
        out = torch.full((128, 256), float("nan"), dtype=torch.float32, device=device)
        hopper_fp8_gemm(a, b, out)
        wrong = int((out != fp8_gemm_ref(a, b).float()).sum())
        if wrong:
            by = f"{granularity(a)} and {granularity(b)}"
            return f"its self-test by {by} gave {wrong} wrong results of {out.numel()}"
    return None


def _form(a: Quantized, b: Quantized) -> str:
    by = {granularity(a), granularity(b)}
    return "block" if "block" in by else "group" if "group" in by else "ends"


def hopper_fp8_gemm(
    a: Quantized, b: Quantized, out: Tensor, *, bias: Tensor | None = None, accumulate: bool = False,
    plan: Plan | None = None,
) -> None:  # fmt: skip
    """`out = a bᵀ + bias`, or `out += a bᵀ`, on sm_90; nothing is checked that `fp8_gemm` checks, and `why_not`.

    Shapes: a data [M, K], b data [N, K], out [M, N] in 16 bits or float32, bias [N].
    Host: no synchronisation.
    """
    (M, K), N = a.data.shape, b.data.shape[0]
    num_sms = Target.of(a.data.device).num_sms
    plan = plan or _plan(M, N, out, num_sms)
    tiles = cdiv(M, 128) * cdiv(N, plan.block_n)
    _fp8_hopper_kernel[(min(num_sms, tiles),)](
        a.data, b.data, out, a.scale_inv, b.scale_inv, bias, M, N, K,
        a.data.stride(0), b.data.stride(0), out.stride(0), *scale_strides(a), *scale_strides(b),
        FORM=_form(a, b), ADD=accumulate, BLOCK_M=128, BLOCK_N=plan.block_n, STAGES=plan.stages, GROUP_M=plan.group_m,
        num_warps=4,
    )  # fmt: skip
