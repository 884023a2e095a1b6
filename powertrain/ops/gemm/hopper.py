"""GEMM for Hopper in Gluon: persistent, warp-specialized, with TMA and wgmma; with hooks for overlapped transfers.

    c = op(a) op(b) + bias       [M, N], accumulated in float32
    nt  a [M, K], b [N, K]       y = x Wᵀ
    nn  a [M, K], b [K, N]       dx = dy W
    tn  a [K, M], b [K, N]       dW = dyᵀ x, also added to float32 c

One CTA an SM walks over tiles of c. A *loader* warp fetches blocks of a and b by TMA into a ring of stages; two
*consumer* warpgroups multiply, half a tile each; two *storer* warps write the halves by TMA while the next tile is
being multiplied. Descriptors are made on the device, so pointers may come from device memory.

`Gathered` input: a's rows come in chunks that other GPUs or copy engines write while the GEMM runs. The loader waits
for a chunk's flag once, before its first tile of that chunk. Nothing else waits, and no host and no other kernel is
needed for a flag to be seen. Whoever writes the chunk must not need an SM: this kernel may hold them all.

Ordering: ld.acquire.sys until the flag is there, fence.proxy.async, TMA loads.

Source: CUTLASS's warp-specialised persistent kernels for the division of labour; PTX ISA 8.x, memory consistency model
and async proxy.
"""

from typing import NamedTuple

import torch
from torch import Tensor

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
    store,
)
from powertrain.ops.shapes import cdiv
from powertrain.runtime import checks
from powertrain.runtime.gluon_compat import (
    gl,
    hopper,
    mbarrier,
)
from powertrain.runtime.launch import gluon_kernel
from powertrain.runtime.target import Target

LAYOUTS = ("nt", "nn", "tn")


@gluon_kernel(archs=(90,))
def _gemm_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    bias_ptr,
    local_ptr,
    bounds_ptr,
    order_ptr,
    flags_ptr,
    M,
    N,
    K,
    chunks,
    stride_a,
    stride_b,
    stride_c,
    stride_local,
    flag_step,
    ready,
    local_first,
    local_end,
    LAYOUT: gl.constexpr,
    ADD: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    CONSUMERS: gl.constexpr,
    SPLIT: gl.constexpr,
):
    A_T: gl.constexpr = LAYOUT == "tn"
    B_T: gl.constexpr = LAYOUT != "nt"
    CONFIG: gl.constexpr = GemmConfig(
        A_T, B_T, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, CONSUMERS, SPLIT, False, BLOCK_N
    )  # fmt: skip
    dtype: gl.constexpr = a_ptr.dtype.element_ty
    out_dtype: gl.constexpr = c_ptr.dtype.element_ty
    ROWS: gl.constexpr = BLOCK_M // CONSUMERS
    COLS: gl.constexpr = BLOCK_N // SPLIT
    A_SHAPE: gl.constexpr = (BLOCK_K, BLOCK_M) if A_T else (BLOCK_M, BLOCK_K)
    B_SHAPE: gl.constexpr = (BLOCK_K, BLOCK_N) if B_T else (BLOCK_N, BLOCK_K)
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([A_SHAPE[0], A_SHAPE[1]], dtype)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([B_SHAPE[0], B_SHAPE[1]], dtype)
    c_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLS], out_dtype)

    a_smem = gl.allocate_shared_memory(dtype, [STAGES, A_SHAPE[0], A_SHAPE[1]], a_layout)
    b_smem = gl.allocate_shared_memory(dtype, [STAGES, B_SHAPE[0], B_SHAPE[1]], b_layout)
    c_smem = gl.allocate_shared_memory(out_dtype, [CONSUMERS, ROWS, COLS], c_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    c_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    c_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(c_full.index(i), count=1)
        mbarrier.init(c_empty.index(i), count=1)
    # TMA, on another path to shared memory, must see the barriers initialized
    hopper.fence_async_shared()

    buffers = ConsumerBuffers(a_smem, b_smem, c_smem, full, c_full, c_empty)
    stages = OperandStages(a_smem, b_smem, full)
    chunked = Chunks(bounds_ptr, order_ptr, flags_ptr)
    sizes = GemmSizes(M, N, K, chunks)
    arrival = Arrival(flag_step, ready, local_first, local_end)
    if CONSUMERS == 1:
        gl.warp_specialize([
        (consume, (buffers, bias_ptr, bias_ptr, bounds_ptr, order_ptr, sizes, CONFIG, 0)),
        (load, (
            GemmOperands(a_ptr, local_ptr, b_ptr, None), stages, chunked, sizes,
            GemmStrides(stride_a, stride_b, 0, stride_local), arrival, CONFIG,
        )),
        (store, (
            c_ptr, c_smem, c_full, c_empty, bounds_ptr, order_ptr, M, N, chunks, stride_c, ADD, CONFIG, 0,
        )),
        ], [1, 1], [40, 40])  # fmt: skip
    else:
        gl.warp_specialize([
        (consume, (buffers, bias_ptr, bias_ptr, bounds_ptr, order_ptr, sizes, CONFIG, 0)),
        (consume, (buffers, bias_ptr, bias_ptr, bounds_ptr, order_ptr, sizes, CONFIG, 1)),
        (load, (
            GemmOperands(a_ptr, local_ptr, b_ptr, None), stages, chunked, sizes,
            GemmStrides(stride_a, stride_b, 0, stride_local), arrival, CONFIG,
        )),
        (store, (
            c_ptr, c_smem, c_full, c_empty, bounds_ptr, order_ptr, M, N, chunks, stride_c, ADD, CONFIG, 0,
        )),
        (store, (
            c_ptr, c_smem, c_full, c_empty, bounds_ptr, order_ptr, M, N, chunks, stride_c, ADD, CONFIG, 1,
        )),
        ], [4, 1, 1, 1], [232, 40, 40, 40])  # fmt: skip


class Gathered(NamedTuple):
    """a's rows arrive while the GEMM runs, in C chunks. Chunk c is rows bounds[c] to bounds[c + 1], possibly none."""

    bounds: Tensor  # [C + 1] int32, ascending from 0 to M
    order: Tensor  # [C] int32: the chunks as they are multiplied, the local ones first
    flags: Tensor  # [C] int32, any stride: chunk c is there when flags[c] >= ready
    local: Tensor | None = None  # [rows, K]: the rows of the local chunks, read here and not from a, and not waited for
    local_chunks: tuple[int, int] = (0, 0)  # first, and behind the last
    ready: int = 1


class Plan(NamedTuple):
    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    stages: int = 3
    group_m: int = 16
    consumers: int = 2
    split: int = 1  # parts in which a consumer hands over its half


def _plan(out: Tensor, bias: Tensor | None) -> Plan:
    """The tiles of a call: 227 KiB of stages and of results on their way out."""
    if out.dtype is torch.float32:
        return Plan(split=2)
    # a bias of 256 columns in registers spilled (Triton 3.9)
    return Plan() if bias is None else Plan(split=2, stages=4)


def why_not(a: Tensor, b: Tensor, out: Tensor | None) -> str | None:
    """Why these tensors are not for this kernel, or None. Says nothing of the device."""
    for name, tensor in {"a": a, "b": b, "out": out}.items():
        if tensor is None:
            continue
        if tensor.stride(1) != 1 or tensor.stride(0) < tensor.shape[1] or tensor.stride(0) * tensor.element_size() % 16:
            return f"{name}'s rows must be contiguous and 16-byte aligned, strides are {tuple(tensor.stride())}"
        if not tensor.is_meta and tensor.data_ptr() % 16:
            return f"{name} must start at a multiple of 16 bytes"
    if a.dtype not in (torch.bfloat16, torch.float16):
        return f"a must be bfloat16 or float16, is {checks.name(a.dtype)}"
    return None


def sizes(a: Tensor, b: Tensor, layout: str) -> tuple[int, int, int]:
    """M, N, K."""
    M, K = reversed(a.shape) if layout == "tn" else a.shape
    return M, b.shape[0] if layout == "nt" else b.shape[1], K


def _check(a: Tensor, layout: str, gathered: Gathered) -> None:
    op = "hopper_gemm"
    if layout == "tn":
        checks.fail(op, "gathered", "be None for layout tn, whose a does not hold rows of the result", gathered.order)
    C = (gathered.order.numel(),)
    checks.shape(op, "bounds", gathered.bounds, (C[0] + 1,), "one more than order")
    for name, table in {"order": gathered.order, "flags": gathered.flags, "bounds": gathered.bounds}.items():
        if name != "bounds":
            checks.shape(op, name, table, C, "one for each chunk of order")
        checks.require(table.dtype is torch.int32, op, name, "be int32", checks.name(table.dtype))
        checks.require(
            name == "flags" or table.is_contiguous(), op, name, "be contiguous", f"strides {tuple(table.stride())}"
        )
    local = gathered.local
    if local is not None:
        checks.same_dtype(op, "a", a, local=local)
        checks.require(local.shape[1] == a.shape[1], op, "local", f"have {a.shape[1]} columns as a has", local.shape[1])
        reason = why_not(local, a, None)
        checks.require(reason is None, op, "local", "have aligned rows as a has", reason)


def hopper_gemm(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    layout: str = "nt",
    bias: Tensor | None = None,
    accumulate: bool = False,
    gathered: Gathered | None = None,
    num_sms: int | None = None,
    plan: Plan | None = None,
) -> None:
    """`out = op(a) op(b) + bias`, or `out += op(a) op(b)`, on sm_90; nothing is checked that `gemm` checks.

    Shapes: nt a [M, K], b [N, K]; nn a [M, K], b [K, N]; tn a [K, M], b [K, N]. `why_not` says which memory.
        out       [M, N] in a's dtype, or float32 with accumulate
        gathered  a's rows come while this runs, and local ones from elsewhere (nt and nn)
        num_sms   how many SMs to use; all by default
    Host: no synchronisation; bounds and order are read on the device, so a graph's replay reads them anew.
    Raises ValueError for hooks that do not fit, by name.
    """
    M, N, K = sizes(a, b, layout)
    if gathered is not None:
        _check(a, layout, gathered)
    # the kernel reads bias without a stride
    bias = None if bias is None else bias.contiguous()
    plan = plan or _plan(out, bias)
    g = gathered
    chunks = g.order.numel() if g else 1
    local = g.local if g else None
    local_first, local_end = g.local_chunks if g else (0, 0)
    tiles = (cdiv(M, plan.block_m) + (chunks if g else 0)) * cdiv(N, plan.block_n)
    _gemm_kernel[(min(num_sms or Target.of(a.device).num_sms, tiles),)](
        a, b, out, bias, local,
        g.bounds if g else None, g.order if g else None, g.flags if g else None,
        M, N, K, chunks,
        a.stride(0), b.stride(0), out.stride(0), 0 if local is None else local.stride(0),
        g.flags.stride(0) if g else 0, g.ready if g else 0, local_first, local_end,
        LAYOUT=layout, ADD=accumulate,
        BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, BLOCK_K=plan.block_k,
        STAGES=plan.stages, GROUP_M=plan.group_m, CONSUMERS=plan.consumers, SPLIT=plan.split,
        num_warps=8 // plan.consumers,
    )  # fmt: skip
