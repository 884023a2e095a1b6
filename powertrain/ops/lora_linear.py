"""A linear layer with a low-rank adapter: x weightᵀ + bias + scale (x Aᵀ) Bᵀ.

    h = scale x Aᵀ;   y = h Bᵀ, then y += x weightᵀ
    g = scale dy B;   dx = g A, then dx += dy weight;   dA = gᵀ x;   dB = dyᵀ h
with a magnitude m (DoRA):  y = gain z + bias,  z = x weightᵀ + h Bᵀ,  gain = m / norm of the rows of weight + scale B A
    dz = gain dy in place of dy;   dm = sum over rows of dy z, over the norm, which is a constant to gradients

The small product comes first and the large one adds to it (cuBLAS reads the old values while it stores), so neither
forward nor backward has a pass of its own for the sum. Saved: x and h [T, r]; with a magnitude z [T, N] too.
Norms need no weight + scale B A in memory: |w + s BA|² = |w|² + 2 s B (w Aᵀ) + s² (B (A Aᵀ)) B, row by row.

2 T K N operations forward and the same for dx; the adapter adds 2 T r (K + N) and twice that backward.
Sources: Hu et al., arXiv:2106.09685; Liu et al., arXiv:2402.09353 (DoRA), whose section 4.3 makes the norm a constant.
"""

from collections.abc import Sequence
from math import inf, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.ops.batch_invariance import is_batch_invariant
from powertrain.ops.gemm.gemm import gemm
from powertrain.ops.shapes import acc_dtype, as_rows
from powertrain.runtime import checks
from powertrain.runtime.dispatch import (
    Op,
    autocast_dtype,
    cast_by_autocast,
    falls_back,
    in_functorch,
    use_kernel,
    without_autocast,
)
from powertrain.runtime.flops import Shape


def lora_linear_ref(
    x: Tensor,
    weight: Tensor,
    A: Tensor,
    B: Tensor,
    *,
    scale: float = 1.0,
    bias: Tensor | None = None,
    magnitude: Tensor | None = None,
    x_adapter: Tensor | None = None,
) -> Tensor:
    """The specification of `lora_linear`, in plain PyTorch."""
    acc = acc_dtype(x.dtype)
    a, b, w = A.to(acc), B.to(acc), weight.to(acc)
    z = x.to(acc) @ w.T + scale * (x if x_adapter is None else x_adapter).to(acc) @ a.T @ b.T
    if magnitude is not None:
        z = z * (magnitude.to(acc) / (w + scale * b @ a).norm(dim=1).detach())
    return (z if bias is None else z + bias.to(acc)).to(x.dtype)


# tokens N K up to which PyTorch's autograd computes it, as the host decides there: 4096 tokens of 2048x2048 took 916 us
# a step as one op and 754 so; 512 tokens 898 and 930, 4096 of 8192x2048 972 and 962 (one H200)
_FEW = 1 << 36
_HALVES = (torch.float16, torch.bfloat16)


def adapted_norm(weight: Tensor, A: Tensor, B: Tensor, scale: float) -> Tensor:
    """Norms of the rows of weight + scale B A: [N], float32 (float64 for float64). No gradient."""
    acc = acc_dtype(weight.dtype)
    # forward mode differentiates in no_grad too
    weight, A, B = (t.detach() for t in (weight, A, B))
    with torch.no_grad(), without_autocast(weight.device):
        a, b = A.to(weight.dtype), B.to(acc) * scale
        cross = _products(weight, a, acc) * b
        squares = torch.linalg.vector_norm(weight, dim=1, dtype=acc).square()
        wide = a.to(acc)
        # not in place: vmap may batch B and not weight
        squares = squares + 2 * cross.sum(1) + (b @ (wide @ wide.T) * b).sum(1)
        # rounding can leave a little less than 0 where B A cancels weight
        return squares.clamp(min=torch.finfo(acc).tiny).sqrt()


def _products(weight: Tensor, a: Tensor, acc: torch.dtype) -> Tensor:
    """weight aᵀ: [N, r] in `acc`."""
    # the product in `acc` without a copy of weight in that dtype; vmap cannot batch an `out=` argument
    if in_functorch():
        return weight.to(acc) @ a.to(acc).T
    return gemm(weight, a, out=weight.new_empty((weight.shape[0], a.shape[0]), dtype=acc))


def _outputs(
    x: Tensor, weight: Tensor, bias: Any, A: Tensor, B: Any, magnitude: Tensor | None, x_adapter: Any, scale: float
) -> tuple[Tensor | None, ...]:
    lead, N = x.shape[:-1], weight.shape[0]
    T, has_gain = prod(lead), magnitude is not None
    return (
        x.new_empty((*lead, N)),
        x.new_empty((T, A.shape[0])),
        x.new_empty((T, N)) if has_gain else None,
        x.new_empty(N, dtype=acc_dtype(x.dtype)) if has_gain else None,
    )


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, A: Tensor, B: Tensor, magnitude: Tensor | None,
    x_adapter: Tensor | None, scale: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    shape, x = (*x.shape[:-1], weight.shape[0]), as_rows(x)
    # the scale at the smallest tensor, [T, r]
    h = gemm(x if x_adapter is None else as_rows(x_adapter), A.to(x.dtype)).mul_(scale)
    z = gemm(h, B.to(x.dtype))
    gemm(x, weight, out=z, accumulate=True)
    y, norm = z, None
    if magnitude is not None:
        norm = adapted_norm(weight, A, B, scale)
        # not in place: backward needs z
        y = z * (magnitude / norm).to(z.dtype)
    if bias is not None:
        y.add_(bias)
    return _with_shape(y, shape), h, None if norm is None else z, norm


def _with_shape(x: Tensor, shape: Sequence[int]) -> Tensor:
    # no view to autograd, which would refuse to change it in place
    view: Tensor = torch.ops.aten._unsafe_view(x, shape)
    return view


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, A, B, magnitude, x_adapter, ctx.scale = inputs
    ctx.save_for_backward(x, weight, bias, A, B, magnitude, x_adapter, *output[1:])
    ctx.mark_non_differentiable(*(t for t in output[1:] if t is not None))
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 8
    x, weight, bias, A, B, magnitude, x_adapter, h, z, norm = ctx.saved_tensors
    grads = _bwd_op(dy, x, weight, bias, A, B, magnitude, x_adapter, h, z, norm, ctx.scale, *ctx.needs_input_grad[:7])
    return (*(g if need else None for g, need in zip(grads, ctx.needs_input_grad[:7], strict=True)), None)


def _bwd_outputs(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Any, A: Tensor, B: Tensor, magnitude: Any, x_adapter: Any, h: Any,
    z: Any, norm: Any, scale: float, *needs: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    likes = (x, weight, bias, A, B, magnitude, x_adapter)
    return tuple(
        torch.empty_like(t, memory_format=torch.contiguous_format) if need and t is not None else None
        for t, need in zip(likes, needs, strict=True)
    )


def _bwd(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, A: Tensor, B: Tensor, magnitude: Tensor | None,
    x_adapter: Tensor | None, h: Tensor, z: Tensor | None, norm: Tensor | None, scale: float, need_dx: bool,
    need_dw: bool, need_db: bool, need_dA: bool, need_dB: bool, need_dm: bool, need_dx_adapter: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    acc, shape = acc_dtype(x.dtype), x.shape
    dy, x = as_rows(dy).contiguous(), as_rows(x)
    dx = dx_adapter = dweight = dbias = dA = dB = dm = None
    if need_db and bias is not None:
        dbias = dy.sum(0, dtype=acc).to(bias.dtype)
    # without a magnitude
    dz = dy
    if magnitude is not None and norm is not None and z is not None:
        dz = dy * (magnitude / norm).to(dy.dtype)
        dm = ((dy.to(acc) * z).sum(0) / norm).to(magnitude.dtype) if need_dm else None
    # [T, r], which dA and the adapter's part of dx share
    g = gemm(dz, B.to(x.dtype), layout="nn").mul_(scale)
    adapted = x if x_adapter is None else as_rows(x_adapter)
    if need_dA:
        dA = gemm(g, adapted, layout="tn", out=torch.empty_like(A, memory_format=torch.contiguous_format))
    if need_dB:
        dB = gemm(dz, h, layout="tn", out=torch.empty_like(B, memory_format=torch.contiguous_format))
    if x_adapter is not None:
        # two inputs have two gradients, so neither product adds to the other
        dx_adapter = gemm(g, A.to(x.dtype), layout="nn") if need_dx_adapter else None
        dx = gemm(dz, weight, layout="nn") if need_dx else None
    elif need_dx:
        dx = gemm(g, A.to(x.dtype), layout="nn")
        # small product first, as in the forward
        gemm(dz, weight, layout="nn", out=dx, accumulate=True)
    if need_dw:
        dweight = gemm(dz, x, layout="tn")
    dx, dx_adapter = (None if d is None else _with_shape(d, shape) for d in (dx, dx_adapter))
    return dx, dweight, dbias, dA, dB, dm, dx_adapter


def _fwd_flops(x: Shape, weight: Shape, A: Shape, **_: Any) -> int:
    return 2 * prod(x[:-1]) * (prod(weight) + A[0] * (x[-1] + weight[0]))


def _bwd_flops(x: Shape, weight: Shape, A: Shape, need_dx: bool, need_dA: bool, need_dB: bool, **_: Any) -> int:
    K, N, r = x[-1], weight[0], A[0]
    return 2 * prod(x[:-1]) * (need_dx * (N + r) * K + r * N + need_dA * r * K + need_dB * r * N)


_INPUTS = "Tensor x, Tensor weight, Tensor? bias, Tensor A, Tensor B, Tensor? magnitude, Tensor? x_adapter"
_fwd_op = Op(
    f"lora_linear({_INPUTS}, float scale) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _outputs,
    backward=_backward,
    setup_context=_setup_context,
    num_results=1,
    flops=_fwd_flops,
)
_bwd_op = Op(
    f"lora_linear_bwd(Tensor dy, {_INPUTS}, Tensor h, Tensor? z, Tensor? norm, float scale, bool need_dx, "
    "bool need_dw, bool need_db, bool need_dA, bool need_dB, bool need_dm, bool need_dx_adapter) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _bwd,
    _bwd_outputs,
    flops=_bwd_flops,
)


@falls_back("lora_linear")
def lora_linear(
    x: Tensor,
    weight: Tensor,
    A: Tensor,
    B: Tensor,
    *,
    scale: float = 1.0,
    bias: Tensor | None = None,
    magnitude: Tensor | None = None,
    x_adapter: Tensor | None = None,
) -> Tensor:
    """x @ weight.T + bias + scale * (x @ A.T) @ B.T; with a magnitude the rows of weight + scale B A get that norm.

    Shapes: K inputs, N outputs, r rank, any leading dims.
        x          [..., K]  float32, float16 or bfloat16 (float64 on the CPU); under autocast cast to its dtype
        weight     [N, K]    x's dtype, as bias [N]
        A, B       [r, K], [N, r]  x's dtype or float32 (under autocast any of 16 bits); their gradients have their own
                   dtype
        magnitude  [N]       x's dtype or float32 (DoRA), or None
        x_adapter  [..., K]  the adapter's input instead of x: x after dropout
    Returns [..., N] in x's dtype.
    Numerics: products accumulate in float32. The adapter's part is rounded to x's dtype before the layer's is added; on
        a GPU with few tokens (tokens N K up to 2^36) it is the other way round. Deterministic.
    Memory: saves x and r elements a token (N more with a magnitude); no gradient of weight unless it requires one.
    Raises ValueError naming argument, expected and given value. Double backward and vmap are not implemented and say
        so.
    Sources: Hu et al., arXiv:2106.09685; Liu et al., arXiv:2402.09353.
    """
    op, dtype = "lora_linear", autocast_dtype(x)
    if dtype is not None:
        x, weight, bias, x_adapter = cast_by_autocast(x, weight, bias, x_adapter)
        # of 16 bits they may be the layer's own dtype, and not autocast's; float32 ones are taken as they are
        A, B = (t.to(dtype) if t.dtype in _HALVES else t for t in (A, B))
        magnitude = magnitude.to(dtype) if magnitude is not None and magnitude.dtype in _HALVES else magnitude
    checks.require(x.dim() > 0 and weight.dim() == 2, op, "weight", "have shape [N, last dim of x]", list(weight.shape))
    checks.floating(op, x=x, weight=weight, bias=bias, A=A, B=B, magnitude=magnitude, x_adapter=x_adapter)
    others = dict(weight=weight, bias=bias, A=A, B=B, magnitude=magnitude, x_adapter=x_adapter)
    checks.same_device(op, "x", x, **others)
    N, K = weight.shape
    checks.shape(op, "weight", weight, (N, x.shape[-1]), "[N, last dim of x]")
    checks.shape(op, "A", A, (*A.shape[:1], K), "[rank, last dim of x]")
    checks.shape(op, "B", B, (N, *A.shape[:1]), "[N, rank]")
    checks.shape(op, "bias", bias, (N,), "first dim of weight")
    checks.shape(op, "magnitude", magnitude, (N,), "first dim of weight")
    checks.shape(op, "x_adapter", x_adapter, x.shape, "shape of x")
    checks.require(abs(scale) < inf, op, "scale", "be finite", scale)
    checks.same_dtype(op, "x", x, weight=weight, bias=bias, x_adapter=x_adapter)
    for name, tensor in (("A", A), ("B", B), ("magnitude", magnitude)):
        good = tensor is None or tensor.dtype in (x.dtype, torch.float32)
        checks.require(good, op, name, f"be {checks.name(x.dtype)} or float32", None if good else tensor.dtype)  # type: ignore[union-attr]
    if not use_kernel(op, x) or few_tokens(x, weight):
        with without_autocast(x.device):
            base = F.linear(x, weight)
        adapted = x if x_adapter is None else x_adapter
        return add_adapter(base, weight, A, B, adapted, scale=scale, bias=bias, magnitude=magnitude)
    y: Tensor = _fwd_op(x, weight, bias, A, B, magnitude, x_adapter, float(scale))[0]
    return y


def few_tokens(x: Tensor, weight: Tensor) -> bool:
    """Whether `lora_linear` leaves x [..., K] and weight [N, K] to products of PyTorch, whose autograd costs less time
    of the host than one op saves on the GPU."""
    return x.is_cuda and x.shape[:-1].numel() * weight.numel() <= _FEW


def add_adapter(
    base: Tensor,
    weight: Tensor,
    A: Tensor,
    B: Tensor,
    x_adapter: Tensor,
    *,
    scale: float,
    bias: Tensor | None = None,
    magnitude: Tensor | None = None,
) -> Tensor:
    """`lora_linear` where base [..., N] is x @ weight.T by another product; weight gives DoRA's norms alone.

    Shapes and dtypes as there; computed in base's dtype by plain PyTorch.
    """
    dtype = base.dtype
    with without_autocast(base.device):
        h = F.linear(x_adapter.to(dtype), A.to(dtype))
        if is_batch_invariant():
            # addmm's order of sums depends on the number of rows
            z = base + scale * F.linear(h, B.to(dtype))
        else:
            # the product adds to the base: no pass for the sum
            z = torch.addmm(as_rows(base), as_rows(h), B.to(dtype).T, alpha=scale).view(base.shape)
        if magnitude is not None:
            z = z * (magnitude / adapted_norm(weight, A, B, scale)).to(dtype)
        return z if bias is None else z + bias.to(dtype)
