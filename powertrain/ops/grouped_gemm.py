"""Grouped GEMM: consecutive groups of rows, each times its own weight; the groups' ends are known only on the GPU.

    y[r]  = x[r] weight[e]ᵀ       for rows r of group e, offsets[e-1] <= r < offsets[e];   y[r] = 0 from offsets[-1] on
    dx[r] = dy[r] weight[e];      dx[r] = 0 from offsets[-1] on
    dweight[e] = sum over the rows of group e of dy[r]ᵀ x[r];   zeros for an empty group

Saved: x, weight, offsets. Products accumulate in float32. With T rows, 2*T*N*K operations for each of the three.

A tile of rows never crosses a group's end, so E groups cost at most E tiles more than one GEMM of T rows. Each program
reads all offsets, adds up the groups' tiles and walks its own share of them: nothing waits for the host. dweight is
summed by one program a tile: the same bits every time.

For bfloat16 whose rows are aligned PyTorch's own kernel (CUTLASS) makes dweight on sm_90, and everything on sm_100.

Sources: Gale et al., MegaBlocks, arXiv:2211.15841; torch.nn.functional.grouped_mm for the layout of offsets.
"""

from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.attention.backends.zero_padding import zero_tail
from powertrain.ops.batch_invariance import refuse_invariant
from powertrain.ops.shapes import acc_dtype, as_rows, cdiv, next_power_of_2
from powertrain.runtime import checks, tracing
from powertrain.runtime.dispatch import (
    Op,
    cast_by_autocast,
    falls_back,
    in_functorch,
    is_traced,
    refuse_vmap,
    use_kernel,
    without_autocast,
)
from powertrain.runtime.float32_products import allows_tf32
from powertrain.runtime.flops import Shape
from powertrain.runtime.launch import kernel
from powertrain.runtime.target import Target
from powertrain.runtime.tuning import tunable


def grouped_gemm_ref(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """The specification of `grouped_gemm`, in plain PyTorch."""
    acc = acc_dtype(x.dtype)
    y = x.new_zeros((x.shape[0], weight.shape[1]), dtype=acc)
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    start = torch.zeros((), dtype=offsets.dtype, device=x.device)
    for w, end in zip(weight.unbind(), offsets.unbind(), strict=True):
        y = torch.where((rows >= start) & (rows < end), x.to(acc) @ w.to(acc).T, y)
        start = end
    return y.to(x.dtype)


@kernel(aligned=("N", "K"), unaligned=("offsets_ptr",))
def _grouped_gemm_kernel(
    x_ptr,
    weight_ptr,
    offsets_ptr,
    y_ptr,
    T,
    E,
    N,
    K,
    stride_xm,
    stride_we,
    stride_wr,
    TRANSPOSED: tl.constexpr,  # weight is [E, K, N], not [E, N, K]
    PRECISION: tl.constexpr,
    FMA: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    # groups [BLOCK_E]: the experts', then the rows that belong to none, then empty ones
    groups = tl.arange(0, BLOCK_E)
    ends = tl.minimum(tl.load(offsets_ptr + groups, mask=groups < E, other=T), T)  # [BLOCK_E]
    starts = tl.load(offsets_ptr + groups - 1, mask=(groups > 0) & (groups <= E), other=0)  # [BLOCK_E]
    starts = tl.minimum(tl.where(groups > E, T, starts), T)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tl.cdiv(ends - starts, BLOCK_M)
    last_tiles = tl.cumsum(tiles, 0)
    if TMA:
        x_desc = tl.make_tensor_descriptor(x_ptr, [T, K], [stride_xm, 1], [BLOCK_M, BLOCK_K])
        if TRANSPOSED:
            w_desc = tl.make_tensor_descriptor(weight_ptr, [E * K, N], [stride_wr, 1], [BLOCK_K, BLOCK_N])
        else:
            w_desc = tl.make_tensor_descriptor(weight_ptr, [E * N, K], [stride_wr, 1], [BLOCK_N, BLOCK_K])

    for tile in range(tl.program_id(0), tl.sum(tiles) * tiles_n, tl.num_programs(0)):
        group = tl.sum((last_tiles * tiles_n <= tile).to(tl.int32))
        mine = groups == group
        start, end = tl.sum(tl.where(mine, starts, 0)), tl.sum(tl.where(mine, ends, 0))
        tiles_m = tl.sum(tl.where(mine, tiles, 0))
        tile -= (tl.sum(tl.where(mine, last_tiles, 0)) - tiles_m) * tiles_n
        # GROUP_M tiles of rows by all columns, rows first: their operands stay in L2
        first_m = tile // (GROUP_M * tiles_n) * GROUP_M
        height = tl.minimum(tiles_m - first_m, GROUP_M)
        tile -= first_m * tiles_n
        row, col = start + (first_m + tile % height) * BLOCK_M, tile // height * BLOCK_N

        rows = (row + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        cols = col + tl.arange(0, BLOCK_N)
        depth = tl.where(group < E, K, 0)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, depth, BLOCK_K):
            if TMA:
                # rows and columns beyond the group's are read too, and not stored
                x = x_desc.load([row, k])
                w = w_desc.load([group * K + k, col]) if TRANSPOSED else w_desc.load([group * N + col, k]).T
            else:
                ks = k + tl.arange(0, BLOCK_K)
                # [BLOCK_M, BLOCK_K]
                x = tl.load(x_ptr + rows * stride_xm + ks[None, :], mask=(rows < end) & (ks < K)[None, :], other=0.0)
                w_start = weight_ptr + group.to(tl.int64) * stride_we
                mask = (ks < K)[:, None] & (cols < N)[None, :]
                if TRANSPOSED:
                    # [BLOCK_K, BLOCK_N]
                    w = tl.load(w_start + ks.to(tl.int64)[:, None] * stride_wr + cols[None, :], mask=mask, other=0.0)
                else:
                    # [BLOCK_K, BLOCK_N]
                    w = tl.load(w_start + cols.to(tl.int64)[None, :] * stride_wr + ks[:, None], mask=mask, other=0.0)
            acc = _add_product(acc, x, w, PRECISION, FMA)
        y = acc.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + rows * N + cols[None, :], y, mask=(rows < end) & (cols < N)[None, :])  # [BLOCK_M, BLOCK_N]


@triton.jit
def _add_product(acc, a, b, PRECISION: tl.constexpr, FMA: tl.constexpr):
    if FMA:
        # without tensor cores: one running sum over all of K loses digits that cuBLAS keeps, so block by block
        return tl.fma(tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee"), 1.0, acc)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@kernel(aligned=("N", "K"), unaligned=("offsets_ptr",))
def _grouped_gemm_wgrad_kernel(
    dy_ptr,
    x_ptr,
    offsets_ptr,
    dw_ptr,
    T,
    N,
    K,
    stride_dym,
    stride_xm,
    PRECISION: tl.constexpr,
    FMA: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP_N: tl.constexpr,
):
    group = tl.program_id(1)
    start = tl.minimum(tl.load(offsets_ptr + group - 1, mask=group > 0, other=0), T)  # scalar
    end = tl.minimum(tl.load(offsets_ptr + group), T)  # scalar
    tiles_n, tiles_k = tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    tile = tl.program_id(0)
    first_n = tile // (GROUP_N * tiles_k) * GROUP_N
    height = tl.minimum(tiles_n - first_n, GROUP_N)
    tile -= first_n * tiles_k
    row, col = (first_n + tile % height) * BLOCK_N, tile // height * BLOCK_K

    dy_ptr += start.to(tl.int64) * stride_dym
    x_ptr += start.to(tl.int64) * stride_xm
    length = end - start
    if TMA:
        # descriptors of this group alone: behind its end they give zeros, whatever stands there
        room = tl.maximum(length, 1)
        dy_desc = tl.make_tensor_descriptor(dy_ptr, [room, N], [stride_dym, 1], [BLOCK_T, BLOCK_N])
        x_desc = tl.make_tensor_descriptor(x_ptr, [room, K], [stride_xm, 1], [BLOCK_T, BLOCK_K])
    rows, cols = row + tl.arange(0, BLOCK_N), col + tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for t in range(0, length, BLOCK_T):
        if TMA:
            dy = dy_desc.load([t, row])
            x = x_desc.load([t, col])
        else:
            ts = (t + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
            # [BLOCK_T, BLOCK_N]
            dy = tl.load(dy_ptr + ts * stride_dym + rows[None, :], mask=(ts < length) & (rows < N)[None, :], other=0.0)
            # [BLOCK_T, BLOCK_K]
            x = tl.load(x_ptr + ts * stride_xm + cols[None, :], mask=(ts < length) & (cols < K)[None, :], other=0.0)
        acc = _add_product(acc, dy.T, x, PRECISION, FMA)
    out = dw_ptr + (group.to(tl.int64) * N + rows[:, None]) * K + cols[None, :]
    tl.store(out, acc.to(dw_ptr.dtype.element_ty), mask=(rows < N)[:, None] & (cols < K)[None, :])  # [BLOCK_N, BLOCK_K]


class _Plan(NamedTuple):
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    per_sm: int = 1  # programs that an SM holds at once
    tma: bool = False


_FEW_ROWS = 32


def _few_columns(T: int, E: int, N: int, K: int, target: Target) -> int:
    """Columns of a tile of 16 rows, if those of few rows keep more loads of the weight in flight than the usual ones of
    256 columns do, of which an SM has two at most; 0 if they do not."""
    # us, one H200, in a graph, 16x64, 16x128, 64x256; torch's grouped_mm; E, rows, N, K:
    #   8, 2, 4096, 14336 59, -, 129; 97    8, 2, 28672, 4096 114, -, 126; 182    16, 8, 5120, 8192 157, 172, 203; 245
    #   60, 4, 2816, 2048 20, 16, 25; 30    128, 8, 768, 2048 12, 16, 22; 18    256, 16, 512, 7168 34, 43, 67; 46
    #   32, 32, 2880, 2880 95, 91, 89; 146    128, 32, 2048, 768 32, 32, 28; 42    256, 32, 2048, 1024 45, 40, 38; 63
    groups = min(T, E)
    if T > _FEW_ROWS or groups * cdiv(N, 256) > target.num_sms * (2 if K >= 1536 else 1):
        return 0
    at_once = (width for width in (64, 128) if groups * cdiv(N, width) <= target.num_sms)
    return next(at_once, 64)


@tunable("NVIDIA H200, 2026-11-30", ("num_warps", "num_stages"))
def _plan(rows_per_group: int, few_columns: int, element: int, regular: bool, target: Target) -> _Plan:
    """Tiles of y and dx: rows by columns by depth; `regular` if rows are aligned and a depth's last block is whole."""
    # bf16, TFLOP/s forward and dgrad; 8192^3 by cuBLAS 748. 128x256 with 8 warps, 64x256 with 4; E, N, K, rows a group:
    #   64, 2816, 2048, 1536   128x256 647, 650   64x256 605, 623   128x128 625, 618   torch's grouped_mm 638, 630
    #   32, 4096, 7168, 1024   128x256 640, 614   64x256 623, 596   128x128 615, 578   torch's grouped_mm 607, 594
    #   256, 4096, 7168, 256   128x256 489, 470   64x256 508, 484   128x128 490, 464   torch's grouped_mm 413, 399
    #   64, 2816, 2048, 64     128x256 212, 238   64x256 227, 231   128x128 219, 237   torch's grouped_mm 191, 191
    # by pointers, not descriptors: 548, 482 at the first
    if element == 4 or not target.has_tensor_core_dot:
        return _Plan(64, 64, 16, 8, 2, 2)
    if regular and target.arch in (90, 100, 103):
        if few_columns:
            return _Plan(16, 64, 128, 4, 6, 1, True) if few_columns == 64 else _Plan(16, 128, 64, 4, 5, 1, True)
        return _Plan(128, 256, 64, 8, 3, 1, True) if rows_per_group > 384 else _Plan(64, 256, 64, 4, 4, 1, True)
    if not regular:
        return _Plan(64, 64, 32, 8, 3, 2)
    return _Plan(128 if rows_per_group > 64 else 64, 128, 32, 8, 3, 1)


@tunable("NVIDIA H200, 2026-11-21", ("num_warps", "num_stages"))
def _plan_wgrad(element: int, regular: bool, target: Target) -> _Plan:
    """Tiles of dweight: block_m by block_n, block_k rows at a time; `regular` if rows are aligned."""
    # bf16, TFLOP/s, as above: 256x128 4 stages 588, 519, 266, 85; 128x256 3 stages 593, 516, 274, 86; 128x128 570, 529,
    # 299, 98; grouped_mm 669, 643, 448, 146, which is therefore taken. N 2048, K 1408: 623, 575, 577, 593
    if element == 4 or not target.has_tensor_core_dot:
        return _Plan(64, 64, 16, 8, 2)
    if regular and target.arch in (90, 100, 103):
        return _Plan(256, 128, 64, 8, 4, 1, True)
    return _Plan(128 if regular else 64, 128, 32, 8, 3)


def _dot_options(dtype: torch.dtype, target: Target) -> dict[str, Any]:
    tf32 = dtype is torch.float32 and allows_tf32()
    fma = not target.has_tensor_core_dot or (dtype is torch.float32 and not tf32)
    return {"PRECISION": "tf32" if tf32 and not fma else "ieee", "FMA": fma}


def _is_aligned(*tensors: Tensor) -> bool:
    """Rows of whole 16-byte units, as TMA and CUTLASS read them."""
    return all(
        t.stride(-1) == 1
        and all(stride * t.element_size() % 16 == 0 for stride in t.stride()[:-1])
        and t.shape[-1] * t.element_size() % 16 == 0
        and (t.is_meta or t.data_ptr() % 16 == 0)
        for t in tensors
    )


# where PyTorch's kernel is taken: on sm_90 by measurement, see the plans; sm_100, where ours was never timed
_TORCH_PRODUCT, _TORCH_WGRAD = (100,), (90, 100)


def _torch_serves(archs: tuple[int, ...], target: Target, *tensors: Tensor) -> bool:
    """PyTorch has a kernel without host synchronisation for these: bfloat16 on sm_90 and sm_100 (elsewhere it copies
    offsets to the host and loops)."""
    return (
        target.arch in archs
        and tensors[0].device.type != "cpu"
        and all(t.dtype is torch.bfloat16 and t.numel() for t in tensors)
        and _is_aligned(*tensors)
    )


@cache
def _note(product: str, arch: int) -> None:
    tracing.event("dispatch", f"grouped_gemm: {product} by torch's grouped_mm on sm_{arch}", op="grouped_gemm")


def _fwd_outputs(x: Tensor, weight: Tensor, offsets: Tensor, kernel: bool) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[1]))


def _fwd(x: Tensor, weight: Tensor, offsets: Tensor, kernel: bool) -> Tensor:
    return _product(x, weight, offsets, kernel, transposed=False)


def _dgrad_outputs(dy: Tensor, weight: Tensor, offsets: Tensor, kernel: bool) -> Tensor:
    return dy.new_empty((dy.shape[0], weight.shape[2]))


def _dgrad(dy: Tensor, weight: Tensor, offsets: Tensor, kernel: bool) -> Tensor:
    return _product(dy, weight, offsets, kernel, transposed=True)


def _product(x: Tensor, weight: Tensor, offsets: Tensor, kernel: bool, *, transposed: bool) -> Tensor:
    """Rows of x times their group's weight [E, N, K]: over K, or over N if transposed."""
    if not kernel:
        return _grouped_gemm_torch(x, weight.mT if transposed else weight, offsets)
    target = Target.of(x.device)
    x, weight = as_rows(x), weight if weight.stride(-1) == 1 else weight.contiguous()
    if _torch_serves(_TORCH_PRODUCT, target, x, weight):
        _note("dx" if transposed else "the product", target.arch)
        products = F.grouped_mm(x, weight if transposed else weight.mT, offs=offsets)
        return zero_tail(products, offsets)
    T, (E, *inner) = x.shape[0], weight.shape
    N, K = reversed(inner) if transposed else inner
    y = x.new_empty((T, N))
    if not y.numel():
        return y
    options = _dot_options(x.dtype, target)
    stacked = weight.stride(0) == weight.shape[1] * weight.stride(1)
    # a block of the transposed weight that reaches past K would read the next group's, which times 0 may be NaN
    whole = K % 64 == 0 or not transposed
    few_columns = 0 if transposed else _few_columns(T, E, N, K, target)
    regular = stacked and whole and _is_aligned(x, weight)
    plan = _plan(T // max(1, E), few_columns, x.element_size(), regular, target)
    tiles = (T // plan.block_m + E + 1) * cdiv(N, plan.block_n)
    _grouped_gemm_kernel[(min(tiles, plan.per_sm * target.num_sms),)](
        x, weight, offsets, y, T, E, N, K, x.stride(0), weight.stride(0), weight.stride(1),
        TRANSPOSED=transposed, **options, TMA=plan.tma,
        BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, BLOCK_K=plan.block_k, BLOCK_E=next_power_of_2(E + 1), GROUP_M=8,
        num_warps=plan.num_warps, num_stages=plan.num_stages,
    )  # fmt: skip
    return y


def _wgrad_outputs(dy: Tensor, x: Tensor, offsets: Tensor, kernel: bool) -> Tensor:
    return x.new_empty((offsets.shape[0], dy.shape[1], x.shape[1]))


def _wgrad(dy: Tensor, x: Tensor, offsets: Tensor, kernel: bool) -> Tensor:
    if not kernel:
        return torch.stack([d.T @ r for d, r in zip(_groups(dy, offsets), _groups(x, offsets), strict=True)][:-1])
    target = Target.of(x.device)
    dy, x = as_rows(dy), as_rows(x)
    if _torch_serves(_TORCH_WGRAD, target, dy, x):
        _note("dweight", target.arch)
        return F.grouped_mm(dy.t(), x, offs=offsets)
    dw = _wgrad_outputs(dy, x, offsets, kernel)
    if not x.numel():
        return dw.zero_()
    E, N, K = dw.shape
    options = _dot_options(x.dtype, target)
    plan = _plan_wgrad(x.element_size(), _is_aligned(dy, x), target)
    _grouped_gemm_wgrad_kernel[(cdiv(N, plan.block_m) * cdiv(K, plan.block_n), E)](
        dy, x, offsets, dw, x.shape[0], N, K, dy.stride(0), x.stride(0),
        **options, TMA=plan.tma, BLOCK_N=plan.block_m, BLOCK_K=plan.block_n, BLOCK_T=plan.block_k, GROUP_N=8,
        num_warps=plan.num_warps, num_stages=plan.num_stages,
    )  # fmt: skip
    return dw


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, offsets, ctx.kernel = inputs
    ctx.save_for_backward(x, weight, offsets)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 4
    x, weight, offsets = ctx.saved_tensors
    need_x, need_weight = ctx.needs_input_grad[:2]
    dx = _dgrad_op(dy, weight, offsets, ctx.kernel) if need_x else None
    dw = _wgrad_op(dy, x, offsets, ctx.kernel) if need_weight else None
    return dx, dw, None, None


def _rows_flops(weight: Shape, x: Shape = (), dy: Shape = (), **_: Any) -> int:
    """Every row of x, or of dy, times a matrix of its group."""
    return 2 * (x or dy)[0] * weight[-1] * weight[-2]


def _wgrad_flops(dy: Shape, x: Shape, **_: Any) -> int:
    return 2 * dy[0] * dy[1] * x[1]


_grouped_gemm_op = Op(
    "grouped_gemm_fwd(Tensor x, Tensor weight, Tensor offsets, bool kernel) -> Tensor",
    _fwd,
    _fwd_outputs,
    backward=_backward,
    setup_context=_setup_context,
    flops=_rows_flops,
)
_dgrad_op = Op(
    "grouped_gemm_dgrad(Tensor dy, Tensor weight, Tensor offsets, bool kernel) -> Tensor",
    _dgrad,
    _dgrad_outputs,
    flops=_rows_flops,
)
_wgrad_op = Op(
    "grouped_gemm_wgrad(Tensor dy, Tensor x, Tensor offsets, bool kernel) -> Tensor",
    _wgrad,
    _wgrad_outputs,
    flops=_wgrad_flops,
)


@falls_back("grouped_gemm")
def grouped_gemm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """`x[r] @ weight[e].T` for every row r, where the rows of group e follow those of group e-1.

    Shapes: T rows, E groups (experts), K features in, N features out.
        x        [T, K]     float32, float16 or bfloat16 (float64 on the CPU); any strides
        weight   [E, N, K]  same dtype; under autocast both are cast to its dtype, this being a matmul
        offsets  [E]        int32, on x's device: where each group ends; ascending, the last at most T. A group may be
                            empty. Read on the device only: no host synchronisation (on the CPU, and when disabled,
                            they are read)
    Returns y [T, N] in x's dtype; rows from offsets[-1] on are zero, and so are their gradients.
    Numerics: products accumulate in float32; float32 ones are full precision unless PyTorch's settings allow TF32.
        Deterministic.
    Memory: saves x and weight. dweight has weight's shape and dtype, zero for an empty group.
    Backends: ours; torch.nn.functional.grouped_mm for bfloat16 with rows of whole 16 bytes, on sm_90 for dweight and on
        sm_100 for all three.
    Raises ValueError naming the argument, the expected value and the given one; offsets' values are checked on the CPU.
        Double backward and vmap are not implemented and say so.
    Source: Gale et al., arXiv:2211.15841.
    """
    op = "grouped_gemm"
    x, weight = cast_by_autocast(x, weight)
    check_groups(op, x, weight, offsets)
    refuse_invariant("grouped_gemm (mixture of experts)", "use a model with dense MLPs")
    kernel = use_kernel(op, x)
    if kernel or (is_traced(x) and not in_functorch()):
        y: Tensor = _grouped_gemm_op(x, weight, offsets.contiguous(), kernel)
        return y
    refuse_vmap(op, offsets, instead="offsets are read on the host: groups that differ take one call each")
    with without_autocast(x.device):
        return _grouped_gemm_torch(x, weight, offsets)


def check_groups(op: str, x: Tensor, weight: Tensor, offsets: Tensor) -> None:
    """Raise ValueError unless the shapes, dtypes and devices are those of a grouped GEMM."""
    checks.floating(op, x=x, weight=weight)
    checks.same_device(op, "x", x, weight=weight, offsets=offsets)
    checks.require(x.dim() == 2, op, "x", "be [T, K]", list(x.shape))
    checks.require(weight.dim() == 3, op, "weight", "be [E, N, K]", list(weight.shape))
    checks.shape(op, "weight", weight, (*weight.shape[:2], x.shape[1]), "[E, N, last dim of x]")
    checks.shape(op, "offsets", offsets, weight.shape[:1], "first dim of weight")
    checks.require(offsets.dtype is torch.int32, op, "offsets", "be int32", checks.name(offsets.dtype))
    checks.same_dtype(op, "x", x, weight=weight)


def grouped_gemm_dgrad(dy: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """dx [T, K] of `grouped_gemm` for dy [T, N], weight [E, N, K]: for functions with a backward of their own."""
    with without_autocast(dy.device):
        dx: Tensor = _dgrad_op(dy, weight, offsets, use_kernel("grouped_gemm", dy))
    return dx


def grouped_gemm_wgrad(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """dweight [E, N, K] of `grouped_gemm` for dy [T, N], x [T, K]: for functions with a backward of their own."""
    with without_autocast(dy.device):
        dw: Tensor = _wgrad_op(dy, x, offsets, use_kernel("grouped_gemm", dy))
    return dw


def _groups(x: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    """The rows of each group, then those of none."""
    ends = [0, *offsets.tolist(), x.shape[0]]
    sizes = [end - start for start, end in pairwise(ends)]
    good = min(sizes) >= 0
    checks.require(good, "grouped_gemm", "offsets", f"ascend from 0 to at most {x.shape[0]} (rows of x)", ends[1:-1])
    return x.split(sizes)


def _grouped_gemm_torch(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    *groups, rest = _groups(x, offsets)
    products = [F.linear(rows, w) for rows, w in zip(groups, weight.unbind(), strict=True)]
    return torch.cat([*products, rest.new_zeros((rest.shape[0], weight.shape[1]))])
