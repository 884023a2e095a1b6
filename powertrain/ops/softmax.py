"""Softmax of scaled attention scores, plain, masked or causal, without a limit on shapes.

    z  = scale * x, -inf where masked out
    y  = exp(z - max(z)) / sum(exp(z - max(z)))          over the last dim; 0 (or 1/N) where a whole row is -inf
    dx = scale * y * (dy - sum(dy * y))                  0 where masked out

Saved: y (and, for "uniform", a byte a row: it has no key). Everything is computed in float32. M rows of N elements of e
bytes: forward moves 2*M*N*e bytes, backward 3*M*N*e; causal, elements above the diagonal are never read, so 1.5 and 2
times M*N*e for square scores; a mask adds its own bytes to the forward. About 8 operations an element. Rows beyond
32768 elements do not fit in registers and are read twice, in blocks (forward with a running maximum and sum in each
lane).

Sources: the three fused softmaxes of Megatron-LM; running maximum after Milakov and Gimelshein, arXiv:1805.02867.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from powertrain.ops.shapes import acc_dtype, broadcasts
from powertrain.ops.softmax_kernels import softmax_bwd, softmax_bwd_outputs, softmax_fwd, softmax_fwd_outputs
from powertrain.runtime import checks
from powertrain.runtime.dispatch import Op, apart_from_autocast, falls_back, is_traced, use_kernel
from powertrain.runtime.plain_calls import plain
from powertrain.runtime.sharding import placements

FullyMasked = Literal["zero", "uniform"]


def scaled_softmax_ref(
    x: Tensor,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    is_causal: bool = False,
    fully_masked: FullyMasked = "zero",
) -> Tensor:
    """The specification of `scaled_softmax`, in plain PyTorch."""
    z = x.to(acc_dtype(x.dtype)) * scale
    if mask is not None:
        z = z.masked_fill(mask, float("-inf"))
    if is_causal:
        z = z.masked_fill(_above_diagonal(x), float("-inf"))
    empty = (z == float("-inf")).all(-1, keepdim=True)
    y = torch.softmax(z.masked_fill(empty, 0.0), -1)
    return (y if fully_masked == "uniform" else y.masked_fill(empty, 0.0)).to(x.dtype)


def _above_diagonal(x: Tensor) -> Tensor:
    sq, sk = x.shape[-2:]
    return torch.arange(sk, device=x.device) > torch.arange(sq, device=x.device)[:, None] + (sk - sq)


def softmax_bwd_ref(dy: Tensor, y: Tensor, *, scale: float = 1.0) -> Tensor:
    """The specification of the backward of `scaled_softmax`, whatever its mask: dx from its results y and their dy."""
    g, p = dy.to(acc_dtype(dy.dtype)), y.to(acc_dtype(y.dtype))
    return scale * p * (g - (p * g).sum(-1, keepdim=True))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> None:
    _, _, ctx.scale, ctx.causal, uniform = inputs
    y, keyless = output
    # where masked out y is 0, and so is dx; of a row of 1/N y does not show whether x made it or the lack of keys
    ctx.save_for_backward(y, keyless if uniform else None)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    y, keyless = ctx.saved_tensors
    dx = None if dy is None else _softmax_bwd_op(dy, y, keyless, ctx.scale, ctx.causal)
    return dx, None, None, None, None


def _fwd_sharding(x: Any, mask: Any, uniform: bool, **_: Any) -> Any:
    R, _P, _S = placements()
    for at in _shards(x):
        is_cut = mask is not None and at is not R and mask.ndim == x.ndim and mask.shape[at.dim] > 1
        yield [at, at if uniform else R], {"x": at, "mask": at if is_cut else R}


def _bwd_sharding(y: Any, **_: Any) -> Any:
    for at in _shards(y):
        yield [at], {"dy": at, "y": at, "keyless": at}


def _shards(x: Any) -> Any:
    """Placements of the scores: by batch or heads, the dims before the two of the causal mask."""
    R, _P, S = placements()
    return [R, *map(S, range(min(x.ndim - 2, 2)))]


_softmax_op = Op(
    "scaled_softmax(Tensor x, Tensor? mask, float scale, bool causal, bool uniform) -> (Tensor, Tensor)",
    softmax_fwd,
    softmax_fwd_outputs,
    backward=_backward,
    setup_context=_setup_context,
    num_results=1,
    sharding=_fwd_sharding,
)
_softmax_bwd_op = Op(
    "scaled_softmax_bwd(Tensor dy, Tensor y, Tensor? keyless, float scale, bool causal) -> Tensor",
    softmax_bwd,
    softmax_bwd_outputs,
    sharding=_bwd_sharding,
)


@falls_back("scaled_softmax")
def scaled_softmax(
    x: Tensor,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    is_causal: bool = False,
    fully_masked: FullyMasked = "zero",
) -> Tensor:
    """Softmax of `scale * x` over the last dim, of all keys or of those a mask or the causal order leaves.

    Shapes: Sq queries, Sk keys, any leading dims, any sizes.
        x             [..., Sq, Sk]  float32, float16 or bfloat16 (float64 on the CPU); any strides; without mask and
                      is_causal also [Sk]
        mask          bool, broadcastable to x ([1 or B, 1, Sq, Sk] in GPT-NeoX and Apex); True is masked out
        is_causal     keys after the query are masked out, the last query at the last key; any Sq and Sk
        fully_masked  values of a row without a key: "zero" (Apex), or "uniform": 1/Sk (GPT-NeoX)
    Returns y like x, contiguous.
    Numerics: float32, rounded once; exact zeros where masked out. A row of nothing but -inf counts as fully masked.
        Its gradient is zero. Deterministic.
    Memory: saves y, and for "uniform" a byte a row. Causal elements are not read, except the rest of the last
        16 keys.
    Raises ValueError naming the argument, the expected value and the given one. Double backward and vmap are not
        implemented and say so.
    Source: Megatron-LM's fused softmaxes.
    """
    checks.floating("scaled_softmax", x=x)
    checks.one_of("scaled_softmax", "fully_masked", fully_masked, ("zero", "uniform"))
    checks.same_device("scaled_softmax", "x", x, mask=mask)
    checks.require(abs(scale) < math.inf, "scaled_softmax", "scale", "be finite", scale)
    dims = 2 if is_causal or mask is not None else 1
    checks.require(x.dim() >= dims, "scaled_softmax", "x", f"have at least {dims} dims", x.dim())
    keywise = None if mask is None else _keywise(mask, x)
    if not use_kernel("scaled_softmax", x):
        options = float(scale), is_causal, fully_masked == "uniform"
        softmax = apart_from_autocast(lambda x, mask: _softmax_torch(x, mask, *options), x.device)
        return plain(softmax, x, mask)
    y: Tensor = _softmax_op(x, keywise, float(scale), is_causal, fully_masked == "uniform")[0]
    return y


def _keywise(mask: Tensor, x: Tensor) -> Tensor:
    """The mask, checked, with a unit stride along the keys."""
    if mask.dtype is not torch.bool:
        checks.fail("scaled_softmax", "mask", "be bool", checks.name(mask.dtype))
    fits = mask.dim() <= x.dim() and broadcasts(mask.shape, x.shape[x.dim() - mask.dim() :])
    checks.require(fits, "scaled_softmax", "mask", f"broadcast to x's shape {list(x.shape)}", list(mask.shape))
    mask = mask.expand(*mask.shape[:-1], x.shape[-1])
    return mask if mask.stride(-1) == 1 else mask.contiguous()


def _softmax_torch(x: Tensor, mask: Tensor | None, scale: float, causal: bool, uniform: bool) -> Tensor:
    z = x.to(acc_dtype(x.dtype))
    z = z if scale == 1.0 else z * scale
    for masked in (mask, _above_diagonal(x) if causal else None):
        z = z if masked is None else z.masked_fill(masked, float("-inf"))
    empty = z.detach().amax(-1, keepdim=True) == float("-inf") if z.shape[-1] else z.new_zeros((), dtype=torch.bool)
    # a CPU's host need not wait for the answer, and saves three passes over z
    if x.is_cpu and not is_traced(x) and not empty.any():
        return torch.softmax(z, -1).to(x.dtype)
    y = torch.softmax(z.masked_fill(empty, 0.0), -1)
    return (y if uniform else y.masked_fill(empty, 0.0)).to(x.dtype)
