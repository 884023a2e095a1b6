"""x weightᵀ + bias in which a row's bits do not depend on the other rows, nor on how many they are.

cuBLAS chooses kernel, tile and split of the depth by the number of rows, so the order of a row's sums changes with the
batch. Here one fixed tile walks over the depth from its beginning to its end, for every row alike: that of the Hopper
GEMM where it serves, which depends on everything but the number of rows, else that of a Triton kernel.

2 M N K operations. Source of the problem and of the remedy: He and Thinking Machines Lab, "Defeating Nondeterminism in
LLM Inference" (2025).
"""

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from powertrain.ops.gemm import hopper
from powertrain.ops.gemm.gemm import fails_here
from powertrain.ops.shapes import cdiv
from powertrain.runtime import gluon_compat, recording
from powertrain.runtime.dispatch import use_kernel
from powertrain.runtime.launch import kernel
from powertrain.runtime.target import Target


@kernel(aligned=("K",))
def _row_invariant_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    stride_xm,
    stride_wn,
    stride_om,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    # neighbouring programs share rows of weight, which stay in the L2 cache
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_m = tl.cdiv(M, BLOCK_M)
    group = tl.program_id(0) // (GROUP_M * tiles_n)
    first = group * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    within = tl.program_id(0) % (GROUP_M * tiles_n)
    rows = (first + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = within // height * BLOCK_N + tl.arange(0, BLOCK_N)
    # rows past the end repeat the last ones: no mask in the loop but the depth's
    x_rows = x_ptr + tl.minimum(rows, M - 1).to(tl.int64)[:, None] * stride_xm
    w_rows = weight_ptr + tl.minimum(cols, N - 1).to(tl.int64)[:, None] * stride_wn
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        depth = start + tl.arange(0, BLOCK_K)[None, :]
        x = tl.load(x_rows + depth, mask=depth < K, other=0.0)  # [BLOCK_M, BLOCK_K]
        w = tl.load(w_rows + depth, mask=depth < K, other=0.0)  # [BLOCK_N, BLOCK_K]
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]  # [BLOCK_N]
    out = out_ptr + rows.to(tl.int64)[:, None] * stride_om + cols[None, :]
    tl.store(
        out, acc.to(out_ptr.dtype.element_ty), mask=(rows < M)[:, None] & (cols < N)[None, :]
    )  # [BLOCK_M, BLOCK_N]


def row_invariant_linear_(
    x: Tensor,  # [M, K]
    weight: Tensor,  # [N, K], x's dtype
    bias: Tensor | None,  # [N]
    out: Tensor,  # [M, N], written
) -> Tensor:
    """out = x weightᵀ + bias; row i of out has the same bits whatever the other rows are and how many.

    Numerics: float32 sums in one order, rounded once to out's dtype. No gradient is defined.
    """
    M, K = x.shape
    N = weight.shape[0]
    if not use_kernel("gemm", x):
        return _by_rows(x, weight, bias, out)
    # always packed and aligned: other strides or alignments would get another kernel
    # (a single row is contiguous whatever its stride is)
    x, weight = (t.contiguous().as_strided(t.shape, (K, 1)) for t in (x, weight))
    x, weight = (t if t.is_meta or t.data_ptr() % 16 == 0 else t.clone() for t in (x, weight))
    # both kernels read it as N numbers side by side
    bias = None if bias is None else bias.contiguous()
    # no TMA descriptor of a matrix without elements
    if x.numel() and out.numel() and _by_hopper(x, weight, out):
        hopper.hopper_gemm(x, weight, out, bias=bias)
        return out
    # by device and dtype, never by a size. sm_75 has no asynchronous copies: the large tile spills 15 kB there
    big = x.element_size() == 2 and Target.of(x.device).arch >= 80
    tile = dict(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64) if big else dict(BLOCK_M=64, BLOCK_N=32, BLOCK_K=32)
    _row_invariant_kernel[(cdiv(M, tile["BLOCK_M"]) * cdiv(N, tile["BLOCK_N"]),)](
        x, weight, bias, out, M, N, K, x.stride(0), weight.stride(0), out.stride(0),
        **tile, GROUP_M=8, num_warps=8 if big else 4, num_stages=3,
    )  # fmt: skip
    return out


def _by_hopper(x: Tensor, weight: Tensor, out: Tensor) -> bool:
    """Whether the Hopper GEMM serves; the number of rows must not decide."""
    if x.device.type == "cpu" or Target.of(x.device).arch != 90 or gluon_compat.trouble():
        return False
    # TMA takes rows of whole 16 bytes. out's are decided by N too: rows of a scratch that is wider would differ
    if hopper.why_not(x, weight, out) or out.dtype is not x.dtype or weight.shape[0] % 8:
        return False
    return recording.state.recording is not None or x.is_meta or fails_here(x.device) is None


def _by_rows(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Plain PyTorch: each row by a product of its own, from memory of the same alignment."""
    row = x.new_empty((1, x.shape[1]))
    for index in range(x.shape[0]):
        out[index] = F.linear(row.copy_(x[index]), weight, bias)[0]
    return out


class RowInvariantLinear(torch.autograd.Function):
    """`row_invariant_linear_` with the gradients of `F.linear`."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return row_invariant_linear_(x, weight, bias, x.new_empty((x.shape[0], weight.shape[0])))

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        need = ctx.needs_input_grad  # type: ignore[attr-defined]
        return dy @ weight if need[0] else None, dy.T @ x if need[1] else None, dy.sum(0) if need[2] else None
