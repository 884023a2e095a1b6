"""RMSNorm and LayerNorm, with the residual addition before them, in one kernel.

    h  = x + residual                                     (h = x without a residual), rounded to its dtype
    x̂  = (h - mean) * rstd                                (mean = 0 for RMSNorm)
    y  = x̂ * w + b                                        (w = 1 + weight if zero-centred)

    wdy = dy * w
    dh  = rstd * (wdy - mean(wdy) - x̂ * mean(wdy * x̂)) + dh_out     (without mean(wdy) for RMSNorm)
    dw  = sum over rows of dy * x̂;   db = sum over rows of dy

Saved: h (x itself without a residual), rstd [rows] float32, mean [rows] float32 for LayerNorm. Everything is computed
in float32. M rows of N elements of e bytes: forward moves 2*M*N*e bytes (4*M*N*e with a residual), backward 3*M*N*e,
plus the partial weight gradients [programs, N] float32; about 8 and 16 operations an element.

dw is summed per program over rows strided by the number of programs, then over programs by a second kernel: no atomics,
so the same bits every time. Forward reads wide rows (beyond 6144 elements of 2 bytes, 14336 of 4, 24576 of 4 with a
residual) again for each of its two passes, or LayerNorm's three; RMSNorm of 49152 still takes a copy's time. Backward
reads rows beyond 20480 elements in three passes, also wide rows whose sums would not fit in registers (odd widths with
a bias from 8193 on); other rows beyond 12288 twice if there is a bias.

Sources: Zhang and Sennrich, arXiv:1910.07467; Ba et al., arXiv:1607.06450; chunked variance after Chan et al. 1979.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.ops.norm_bwd_kernels import norm_bwd, norm_bwd_outputs
from powertrain.ops.norm_fwd_kernels import norm_fwd, norm_fwd_outputs
from powertrain.ops.shapes import acc_dtype
from powertrain.runtime import checks
from powertrain.runtime.dispatch import Op, apart_from_autocast, falls_back, use_kernel
from powertrain.runtime.plain_calls import plain
from powertrain.runtime.sharding import leading_dims, placements, saved_dims

Casting = Literal["llama", "gemma", "te"]


def rms_norm_ref(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered: bool = False,
    casting: Casting = "te",
) -> Tensor | tuple[Tensor, Tensor]:
    """The specification of `rms_norm`, in plain PyTorch."""
    h = x if residual is None else (x.to(acc_dtype(x.dtype)) + residual).to(residual.dtype)
    z = h.to(acc_dtype(h.dtype))
    y = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
    y = _affine_ref(y, weight, bias, zero_centered, casting, x.dtype)
    return y if residual is None else (y, h)


def layer_norm_ref(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    zero_centered: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The specification of `layer_norm`, in plain PyTorch."""
    h = x if residual is None else (x.to(acc_dtype(x.dtype)) + residual).to(residual.dtype)
    z = h.to(acc_dtype(h.dtype))
    z = z - z.mean(-1, keepdim=True)
    y = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
    y = _affine_ref(y, weight, bias, zero_centered, "te", x.dtype)
    return y if residual is None else (y, h)


def _affine_ref(
    y: Tensor, weight: Tensor | None, bias: Tensor | None, zero_centered: bool, casting: str, dtype: torch.dtype
) -> Tensor:
    if casting == "llama":
        y = y.to(dtype).to(y.dtype)
    if weight is not None:
        y = y * (weight.to(y.dtype) + 1 if zero_centered else weight.to(y.dtype))
    if bias is not None:
        y = y + bias
    return y.to(dtype)


def rms_norm_bwd_ref(
    dy: Tensor, h: Tensor, weight: Tensor, *, eps: float = 1e-6, zero_centered: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The specification of the backward of `rms_norm`: (dh, dweight, dbias); h, the normalized input, is [..., N]."""
    g, z, w = (x.to(acc_dtype(x.dtype)) for x in (dy, h, weight))
    rstd = torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
    y = z * rstd
    wdy = g * (w + 1 if zero_centered else w)
    dh = rstd * (wdy - y * (wdy * y).mean(-1, keepdim=True))
    return dh, (g * y).flatten(0, -2).sum(0), g.flatten(0, -2).sum(0)


def layer_norm_bwd_ref(
    dy: Tensor, h: Tensor, weight: Tensor, *, eps: float = 1e-5, zero_centered: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The specification of the backward of `layer_norm`: (dh, dweight, dbias)."""
    z = h.to(acc_dtype(h.dtype))
    z = z - z.mean(-1, keepdim=True)
    dz, dweight, dbias = rms_norm_bwd_ref(dy, z, weight, eps=eps, zero_centered=zero_centered)
    return dz - dz.mean(-1, keepdim=True), dweight, dbias


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    x, residual, weight, bias, _, is_layer, zero_centered, _ = inputs
    _, h, mean, rstd = output
    # the sum is a result anyway; saving x and residual would keep two tensors more
    ctx.save_for_backward(x if residual is None else h, weight, bias, mean, rstd)
    ctx.is_layer, ctx.zero_centered, ctx.x_dtype = is_layer, zero_centered, x.dtype
    ctx.has_residual = residual is not None
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, dh: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    h, weight, bias, mean, rstd = ctx.saved_tensors
    need_x, need_residual, need_dw, need_db = ctx.needs_input_grad[:4]
    # without a residual there is no second result
    dh = dh if ctx.has_residual else None
    if dy is None and dh is None:
        return (None,) * 8
    if dy is None:
        # y was not used, so weight and bias have no gradient; the kernel takes no missing dy
        dy, need_dw, need_db = torch.zeros_like(h, dtype=ctx.x_dtype), False, False
    dx, dresidual, dw, db = _norm_bwd_op(
        dy, dh, h, weight, bias, mean, rstd, ctx.is_layer, ctx.zero_centered, ctx.x_dtype,
        need_x or need_residual, need_dw, need_db,
    )  # fmt: skip
    # one tensor for both: the gradient of a sum is that of each part
    if ctx.has_residual and h.dtype == ctx.x_dtype:
        dresidual = dx
    needed = ((need_x, dx), (need_residual, dresidual), (need_dw, dw), (need_db, db))
    return (*(grad if need else None for need, grad in needed), None, None, None, None)


def _norm_fwd_sharding(x: Any, residual: Any, is_layer: bool, **_: Any) -> Any:
    R, _P, S = placements()
    for at in [R, *map(S, leading_dims(x))]:
        rows = R if at is R else S(0)
        yield [at, R if residual is None else at, rows if is_layer else R, rows], {"x": at, "residual": at}


def _norm_bwd_sharding(h: Any, weight: Any, bias: Any, is_layer: bool, x_dtype: torch.dtype, **rest: Any) -> Any:
    R, P, S = placements()
    need_dx, need_dw, need_db = (rest[f"need_{name}"] for name in ("dx", "dw", "db"))
    for at in [S(dim) for dim in saved_dims(h)] or [R, S(0)]:
        # gradients of weight and bias sum over rows, of which a rank has a part
        rows, total = (R, R) if at is R else (S(0), P)
        dx = at if need_dx else R
        dresidual = at if need_dx and h.tensor_meta.dtype != x_dtype else R
        results = [dx, dresidual, total if need_dw and weight else R, total if need_db and bias else R]
        # a norm without mean, or without bias, saved an empty tensor
        yield results, {"dy": at, "dh": at, "h": at, "mean": rows if is_layer else R, "rstd": rows}


_norm_op = Op(
    "norm_fwd(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool is_layer, bool zero_centered, "
    "bool round_first) -> (Tensor, Tensor, Tensor, Tensor)",
    norm_fwd,
    norm_fwd_outputs,
    backward=_backward,
    setup_context=_setup_context,
    num_results=2,
    sharding=_norm_fwd_sharding,
)
_norm_bwd_op = Op(
    "norm_bwd(Tensor dy, Tensor? dh, Tensor h, Tensor? weight, Tensor? bias, Tensor? mean, Tensor rstd, bool is_layer, "
    "bool zero_centered, ScalarType x_dtype, bool need_dx, bool need_dw, bool need_db) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    norm_bwd,
    norm_bwd_outputs,
    sharding=_norm_bwd_sharding,
)


@falls_back("rms_norm")
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered: bool = False,
    casting: Casting = "te",
) -> Tensor | tuple[Tensor, Tensor]:
    """Root-mean-square norm over the last dim of `x`, or of `x + residual`, which is then returned too.

    Shapes: N hidden size, any leading dims.
        x         [..., N]  float32, float16 or bfloat16 (float64 on the CPU); any strides: rows are read where they
                            lie (heads of a fused projection, heads before tokens), and copied only if N has a stride
                            or leading dims merge to more than three
        weight    [N]       any of these dtypes, or None
        bias      [N]       likewise
        residual  [..., N]  x's shape; may be float32 beside a bfloat16 x
        eps                 added to the mean square
        zero_centered       multiply by 1 + weight (Gemma)
        casting             "te" and "gemma": multiply by the weight in float32, round once;
                            "llama": round to x's dtype before the weight
    Returns y [..., N] in x's dtype; with a residual (y, x + residual), the sum in the residual's dtype.
    Numerics: float32 throughout; the sum is rounded to its dtype before it is normalized. Deterministic.
    Memory: saves x (or the sum), weight and 4 bytes a row; nothing when no gradient is wanted.
    Raises ValueError naming the argument, the expected value and the given one. Double backward and vmap are not
        implemented and say so.
    Source: Zhang and Sennrich, arXiv:1910.07467.
    """
    checks.one_of("rms_norm", "casting", casting, ("llama", "gemma", "te"))
    return _norm("rms_norm", x, weight, bias, residual, eps, False, zero_centered, casting == "llama")


@falls_back("layer_norm")
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    zero_centered: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Layer norm over the last dim of `x`, or of `x + residual`, which is then returned too.

    Shapes, dtypes, results, memory and errors are those of `rms_norm`; 8 bytes a row are saved.
        zero_centered       multiply by 1 + weight (GPT-NeoX's and TransformerEngine's "1p")
    Numerics: float32 throughout; mean first, then the variance of the differences (rows beyond 32768 elements by
        Chan's one-pass update). Deterministic.
    Source: Ba et al., arXiv:1607.06450.
    """
    return _norm("layer_norm", x, weight, bias, residual, eps, True, zero_centered, False)


def _norm(
    op: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    is_layer: bool,
    zero_centered: bool,
    round_first: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    checks.require(x.dim() > 0, op, "x", "have at least one dim", "a scalar")
    checks.floating(op, x=x, weight=weight, bias=bias, residual=residual)
    checks.same_device(op, "x", x, weight=weight, bias=bias, residual=residual)
    if weight is not None:
        checks.shape(op, "weight", weight, x.shape[-1:], "last dim of x")
    if bias is not None:
        checks.shape(op, "bias", bias, x.shape[-1:], "last dim of x")
    if residual is not None:
        checks.shape(op, "residual", residual, x.shape, "shape of x")
    if not 0 <= eps < math.inf:
        checks.fail(op, "eps", "be at least 0 and finite", eps)
    if not use_kernel(op, x):
        norm = _norm_torch(x, weight, bias, residual, eps, is_layer, zero_centered, round_first)
        return plain(apart_from_autocast(norm, x.device), x, weight, bias, residual)
    # the kernels read weight and bias with stride 1
    weight = weight if weight is None else weight.contiguous()
    bias = bias if bias is None else bias.contiguous()
    y, h, *_ = _norm_op(x, residual, weight, bias, float(eps), is_layer, zero_centered, round_first)
    return y if residual is None else (y, h)


def _norm_torch(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    is_layer: bool,
    zero_centered: bool,
    round_first: bool,
) -> Callable[..., Any]:
    """The norm of such tensors in plain PyTorch."""
    shape, dtype, acc = x.shape[-1:], x.dtype, acc_dtype(x.dtype)
    one_dtype = all(t is None or t.dtype == dtype for t in (residual, weight, bias))
    rounds = round_first and dtype is not acc
    if one_dtype and not zero_centered and not rounds and (is_layer or bias is None):
        # PyTorch's own compute in float32 inside; casting up first takes up to twice as long on a CPU
        normalize = (
            (lambda h, w, b: F.layer_norm(h, shape, w, b, eps))
            if is_layer
            else (lambda h, w, b: F.rms_norm(h, shape, w, eps))
        )
    else:

        def normalize(h: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
            w, b = (None if t is None else t.to(acc) for t in (weight, bias))
            if w is not None and zero_centered:
                w = w + 1
            if is_layer:
                return F.layer_norm(h.to(acc), shape, w, b, eps).to(dtype)
            y = F.rms_norm(h.to(acc), shape, None if round_first else w, eps)
            if round_first:
                y = y.to(dtype) if w is None else y.to(dtype) * w
            return (y if b is None else y + b).to(dtype)

    def with_residual(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor) -> Any:
        h = x + residual
        h = h if h.dtype is residual.dtype else h.to(residual.dtype)
        return normalize(h, weight, bias), h

    return with_residual if residual is not None else lambda x, weight, bias, residual: normalize(x, weight, bias)
