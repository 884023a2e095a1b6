"""A linear layer with an activation, gate or residual, in the GEMM's epilogue where that is faster.

    y = act(x Wᵀ + b) + residual                             z = x Wᵀ + b
    y = act(x Wᵀ + b) * (x W_upᵀ + b_up) + residual          gated

    backward: dz from dy and z by the activation's formulas; dx = dz W (+ dz_up W_up); dW = dzᵀ x; db sums dz's rows

On sm_90 (ops/gemm/hopper_activation.py) the activation is computed while the next tile is multiplied, which saves
reading z and, where no gradient is wanted, writing it. Elsewhere it is the product, then `activation` or
`gated_activation`.
x [M, K], W [N, K]: 2 M N K operations forward (gated 4), twice that backward. Saved: x, the weights, z, z_up.
"""

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from powertrain.ops.activations import (
    GATED,
    KINDS,
    activation,
    activation_bwd_op,
    activation_ref,
    activation_torch,
    check_clamp,
    gated_activation,
    gated_activation_ref,
    gated_torch,
)
from powertrain.ops.batch_invariance import is_batch_invariant
from powertrain.ops.gemm import gemm as gemms
from powertrain.ops.gemm.gemm import Choice, gemm
from powertrain.ops.gemm.hopper_activation import Epilogue, hopper_epilogue, why_not_epilogue
from powertrain.ops.gemm.odd_widths import wide_linear
from powertrain.ops.shapes import acc_dtype, as_rows, empty
from powertrain.runtime import checks, recording, self_test
from powertrain.runtime.dispatch import Op, falls_back, has_kernels, repeats, use_kernel
from powertrain.runtime.flops import Shape
from powertrain.runtime.plain_calls import plain
from powertrain.runtime.positional import hinted
from powertrain.runtime.target import Target


def linear_activation_ref(
    x: Tensor,
    weight: Tensor,
    kind: str | None,
    *,
    bias: Tensor | None = None,
    up_weight: Tensor | None = None,
    up_bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The specification of `linear_activation`, in plain PyTorch: products rounded to x's dtype, then the rest."""
    acc = acc_dtype(x.dtype)

    def product(weight: Tensor, bias: Tensor | None) -> Tensor:
        z = x.to(acc) @ weight.to(acc).T
        return (z if bias is None else z + bias.to(acc)).to(x.dtype)

    y = product(weight, bias)
    if up_weight is not None:
        y = gated_activation_ref(y, kind or "", up=product(up_weight, up_bias))
    elif kind is not None:
        y = activation_ref(y, kind)
    return y if residual is None else y + residual


@cache
def choose(
    M: int,
    N: int,
    K: int,
    *,
    gated: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    target: Target | None = None,
) -> Choice:
    """Which backend `linear_activation` takes for M rows of K features and N results on `target` (None: the current
    GPU), aligned memory assumed: "hopper", one kernel, or "apart", a product and an activation kernel."""
    target = target or Target.of(torch.device("cuda"))
    # bf16, one H200, the product apart from its activation / in one, ms; M, N, K:
    #   swiglu 16384 14336 4096  5.08 / 4.81     8192 28672 8192  9.83 / 9.77     16384 4096 1024  0.475 / 0.388
    #   gelu   16384 16384 4096  3.10 / 2.93     16384 8192 2048  0.889 / 0.819   residual 0.897 / 0.775
    # and where it is not chosen, since three warps are slower with all of a tile than its product is:
    #   gelu   16384 5120 1280   0.401 / 0.415
    reason = gemms.why_not_hopper(M, 2 * N if gated else N, K, dtype, target, 1024 if gated else 2048)
    return Choice("apart", {"hopper": reason}) if reason else Choice("hopper", {})


def _is_one_kernel(x: Tensor, weight: Tensor, epilogue: Epilogue) -> bool:
    """Whether the Hopper kernel serves this call."""
    tensors = [x, weight, *(t for t in epilogue if isinstance(t, Tensor))]
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        # Inductor, and modes that count or choose by operators, see the product and the activation
        return False
    if any(type(t) not in (Tensor, Parameter) for t in tensors) or not use_kernel("linear_activation", x):
        return False
    if any(t.dtype is not x.dtype for t in tensors) or (not x.is_meta and torch.is_autocast_enabled(x.device.type)):
        return False
    rows, target = as_rows(x), Target.of(x.device)
    choice = choose(
        rows.shape[0], weight.shape[0], weight.shape[1], gated=epilogue.up is not None, dtype=x.dtype, target=target
    )
    if choice.backend != "hopper" or weight.shape[0] % 8 or why_not_epilogue(rows, weight, epilogue):
        return False
    return recording.state.recording is not None or x.is_meta or fails_here(x.device) is None


_self_tests: dict[int | None, str | None] = {}


def fails_here(device: torch.device) -> str | None:
    """Why the Hopper kernel must not be used on this sm_90 device, or None: once per device it computes one tile."""
    instead = "linear_activation: cuBLAS and separate activation kernels are used"
    return self_test.failure(_self_tests, device, _self_test, instead)


def _self_test(device: torch.device) -> str | None:
    """A tile of relu(a bᵀ) * (a upᵀ) + residual, and all that is kept of it, to the bit: products and sums of
    multiples of 1/8 are exact, and every rounding is known."""
    a, b = gemms.exact_operand(128, 192, 7, device), gemms.exact_operand(128, 192, 5, device)
    up, residual = gemms.exact_operand(128, 192, 11, device), gemms.exact_operand(128, 128, 13, device)
    y, z, up_z = (torch.full((128, 128), float("nan"), device=device, dtype=a.dtype) for _ in range(3))
    amax = torch.zeros(1, dtype=torch.float32, device=device)
    hopper_epilogue(a, b, y, Epilogue("relu", up, residual=residual, amax=amax, z=z, up_z=up_z))
    gate, other = (gemms.exact_product(a, x).to(a.dtype) for x in (b, up))
    exact = (gate.float().relu() * other.float() + residual.float()).to(a.dtype)
    pairs = ((y, exact), (z, gate), (up_z, other), (amax, exact.float().abs().amax()[None]))
    wrong = sum(int((result != right).sum()) for result, right in pairs)
    return f"its self-test gave {wrong} wrong results of {3 * y.numel() + 1}" if wrong else None


def _outputs(
    x: Tensor, weight: Tensor, bias: Tensor | None, up_weight: Tensor | None, up_bias: Tensor | None,
    residual: Tensor | None, kind: str, limit: float, alpha: float, keep: bool, measure: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    shape = (x.shape[0], weight.shape[0])
    z = x.new_empty(shape) if keep else empty(x)
    up_z = x.new_empty(shape) if keep and up_weight is not None else empty(x)
    return x.new_empty(shape), x.new_zeros(1 if measure else 0, dtype=torch.float32), z, up_z


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, up_weight: Tensor | None, up_bias: Tensor | None,
    residual: Tensor | None, kind: str, limit: float, alpha: float, keep: bool, measure: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    results = _outputs(x, weight, bias, up_weight, up_bias, residual, kind, limit, alpha, keep, measure)
    y, amax, z, up_z = (t if t.numel() else None for t in results)
    assert y is not None
    hopper_epilogue(x, weight, y, Epilogue(kind, up_weight, bias, up_bias, residual, amax, z, up_z, limit, alpha))
    return results


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, up_weight, _, _, kind, limit, alpha, _, _ = inputs
    ctx.save_for_backward(x, weight, up_weight, *output[2:])
    ctx.options = kind, limit, alpha
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 11
    x, weight, up_weight, z, up_z = ctx.saved_tensors
    kind, limit, alpha = ctx.options
    need, gated = ctx.needs_input_grad, up_weight is not None
    dz, dup = dy, dy
    if kind:
        options = (kind, "gate_first", gated, limit, alpha, True, gated, False)
        dz, dup, _ = activation_bwd_op(dy, z, up_z if gated else None, None, *options)
    dx = gemm(dz, weight, layout="nn") if need[0] else None
    if dx is not None and gated:
        torch.addmm(dx, dup, up_weight, out=dx)
    grads = (*_weight_grads(dz, x, need[1:3]), *(_weight_grads(dup, x, need[3:5]) if gated else (None, None)))
    return dx, *grads, dy if need[5] else None, *(None,) * 5


def _weight_grads(dz: Tensor, x: Tensor, need: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]:
    dweight = gemm(dz, x, layout="tn") if need[0] else None
    return dweight, dz.sum(0, dtype=torch.float32).to(dz.dtype) if need[1] else None


def _flops(x: Shape, weight: Shape, up_weight: Shape | None, **_: Any) -> int:
    return 2 * prod(x) * (weight[0] + (up_weight[0] if up_weight else 0))


_linear_activation_op = Op(
    "linear_activation(Tensor x, Tensor weight, Tensor? bias, Tensor? up_weight, Tensor? up_bias, Tensor? residual, "
    "str kind, float limit, float alpha, bool keep, bool measure) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _outputs,
    backward=_backward,
    setup_context=_setup_context,
    num_results=2,
    flops=_flops,
)


@repeats
@hinted
def linear_activation(
    x: Tensor,
    weight: Tensor,
    kind: str | None,
    *,
    bias: Tensor | None = None,
    up_weight: Tensor | None = None,
    up_bias: Tensor | None = None,
    residual: Tensor | None = None,
    amax: Tensor | None = None,
    limit: float = 7.0,
    alpha: float = 1.702,
) -> Tensor:
    """act(x Wᵀ + b), gated where `up_weight` is given, plus a residual: a linear layer with its activation.

    Shapes: N features of the result, K of x, any leading dims.
        x          [..., K]  float32, float16 or bfloat16 (float64 on the CPU)
        weight     [N, K]    x's dtype; with `up_weight` the gate's
        kind                 of `activation`; with `up_weight` of `gated_activation`; None: no activation
        bias       [N]       or None; the dtype of all is x's, but for autocast
        up_weight  [N, K], up_bias [N]   the other half of a gated layer, or None
        residual   [..., N]  added to the result, or None
        amax       [1]       float32: raised to the largest magnitude of the result (for FP8 scales), NaN if one is; no
                             gradient
        limit, alpha         of clamped_swiglu
    Returns y [..., N] in x's dtype. Under autocast it is F.linear, then the activation.
    Numerics: products accumulate in float32 and are rounded to x's dtype, the activation is computed in float32 from
        that: the bits of both apart. A residual is added before the last rounding in one kernel, after it elsewhere.
        Deterministic.
    Memory: saves x, the weights, x Wᵀ + b and its up half; nothing of them when no gradient is wanted. On a GPU, where
        N is no multiple of 8 in 16 bits, also a padded copy of each weight while it is multiplied.
    Raises ValueError with the argument's name, requirement and value. Double backward is not implemented in one
        kernel and says so.
    `choose` says which way is taken, and why. Modes that see operators (selective checkpointing, counting FLOPs) and
    torch.compile get the product and the activation apart.
    """
    check_layer(x, weight, kind, bias, up_weight, up_bias, residual, amax)
    check_clamp("linear_activation", kind, limit, alpha)
    if amax is None and _is_plain(x):
        layer = _linear_activation_torch(x, kind, up_weight is not None, limit, alpha)
        return plain(layer, x, weight, bias, up_weight, up_bias, residual)
    options = (x, weight, kind, bias, up_weight, up_bias, residual, amax, limit, alpha)
    act = "" if kind is None else kind if up_weight is None else GATED[kind]
    biases = [None if b is None else b.contiguous() for b in (bias, up_bias)]
    rows = None if residual is None else as_rows(residual)
    if not _is_one_kernel(x, weight, Epilogue(act, up_weight, biases[0], biases[1], rows)):
        return _apart(*options)
    return _in_one(act, biases, rows, options)


@falls_back("linear_activation")
def _in_one(act: str, biases: list[Tensor | None], rows: Tensor | None, options: tuple[Any, ...]) -> Tensor:
    x, weight, _, bias, up_weight, up_bias, residual, amax, limit, alpha = options
    # it could not be compiled
    if not use_kernel("linear_activation", x):
        return _apart(*options)
    differentiable = (x, weight, bias, up_weight, up_bias, residual)
    wants_gradients = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in differentiable)
    results = _linear_activation_op(
        as_rows(x), weight, biases[0], up_weight, biases[1], rows, act, float(limit), float(alpha),
        wants_gradients and bool(act), amax is not None,
    )  # fmt: skip
    if amax is not None:
        torch.maximum(amax, results[1].detach(), out=amax)
    y: Tensor = results[0]
    return y.view(*x.shape[:-1], weight.shape[0])


def _is_plain(x: Tensor) -> bool:
    """Whether the product and the activation, one behind the other, are all that a call is. Not in modes and traces,
    which see the public functions."""
    if has_kernels(x) or torch.compiler.is_compiling() or is_batch_invariant():
        return False
    return not torch.is_autocast_enabled(x.device.type)


def _linear_activation_torch(x: Tensor, kind: Any, gated: bool, limit: float, alpha: float) -> Callable[..., Tensor]:
    """The layer of such tensors, (x, weight, bias, up_weight, up_bias, residual), in plain PyTorch."""
    gate = gated_torch(x, kind, x, "gate_first", limit, alpha) if gated else None
    act = activation_torch(x, kind, None) if kind is not None and not gated else None

    def layer(
        x: Tensor, weight: Tensor, bias: Tensor | None, up_weight: Tensor, up_bias: Tensor | None,
        residual: Tensor | None,
    ) -> Tensor:  # fmt: skip
        y = F.linear(x, weight, bias)
        if gate is not None:
            y = gate(y, F.linear(x, up_weight, up_bias), None)
        elif act is not None:
            y = act(y, None)
        return y if residual is None else y + residual

    return layer


def _apart(
    x: Tensor, weight: Tensor, kind: Any, bias: Tensor | None, up_weight: Tensor | None, up_bias: Tensor | None,
    residual: Tensor | None, amax: Tensor | None, limit: float, alpha: float,
) -> Tensor:  # fmt: skip
    # columns of a wider tensor where N is no multiple of 8; what follows reads any strides
    y = wide_linear(x, weight, bias)
    if up_weight is not None:
        y = gated_activation(y, kind, up=wide_linear(x, up_weight, up_bias), limit=limit, alpha=alpha)
    elif kind is not None:
        y = activation(y, kind)
    y = y.contiguous() if residual is None else y + residual
    if amax is not None and y.numel():
        torch.maximum(amax, y.detach().abs().amax().float(), out=amax)
    return y


def check_layer(
    x: Tensor, weight: Tensor, kind: str | None, bias: Tensor | None, up_weight: Tensor | None,
    up_bias: Tensor | None, residual: Tensor | None = None, amax: Tensor | None = None,
) -> None:  # fmt: skip
    """Raise ValueError unless these are arguments of `linear_activation`."""
    op = "linear_activation"
    if up_weight is not None:
        checks.one_of(op, "kind", kind, tuple(GATED))
    elif kind is not None:
        checks.one_of(op, "kind", kind, KINDS)
    checks.require(x.dim() > 0, op, "x", "have at least one dim", "a scalar")
    checks.require(weight.dim() == 2, op, "weight", "be [N, K]", list(weight.shape))
    checks.floating(op, x=x, weight=weight, bias=bias, up_weight=up_weight, up_bias=up_bias, residual=residual)
    checks.same_device(
        op, "x", x, weight=weight, bias=bias, up_weight=up_weight, up_bias=up_bias, residual=residual, amax=amax
    )
    N, K = weight.shape
    checks.shape(op, "x", x, (*x.shape[:-1], K), "last dim of weight")
    checks.shape(op, "up_weight", up_weight, (N, K), "as weight")
    checks.shape(op, "bias", bias, (N,), "rows of weight")
    checks.shape(op, "up_bias", up_bias, (N,), "rows of up_weight")
    checks.shape(op, "residual", residual, (*x.shape[:-1], N), "the result's shape")
    checks.shape(op, "amax", amax, (1,), "one value")
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        others = dict(weight=weight, bias=bias, up_weight=up_weight, up_bias=up_bias, residual=residual)
        checks.same_dtype(op, "x", x, **others)
    if up_bias is not None:
        checks.require(up_weight is not None, op, "up_bias", "be None without up_weight", "a tensor")
    if amax is not None:
        checks.require(amax.dtype is torch.float32, op, "amax", "be float32", checks.name(amax.dtype))
