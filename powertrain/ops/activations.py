"""Activations, and gated activations (act(gate) * up), with an optional bias.

    y = act(x + bias)                      dx = dy * act'(x + bias);            dbias = sum over rows of dx
    y = act(gate) * up                     dgate = dy * act'(gate) * up;        dup = dy * act(gate)

    gelu          z * Φ(z)                 Φ the normal distribution function, by erf
    gelu_tanh     z * σ(2√(2/π) (z + 0.044715 z³))            the same as ½z(1 + tanh(√(2/π)(z + 0.044715 z³)))
    quick_gelu    z * σ(1.702 z)
    silu          z * σ(z)
    relu          max(z, 0)
    relu_squared  max(z, 0)²
    clamped_swiglu (gated only)   g = min(gate, limit), u = clamp(up, ±limit):  g * σ(alpha g) * (u + 1)

Saved: the inputs only; backward computes everything again. Computed in float32. M rows of N outputs of e bytes: forward
moves 2*M*N*e bytes (gated 3*M*N*e), backward 3*M*N*e (gated 5*M*N*e); 10 to 30 operations an element.

dbias is summed per program over rows strided by the number of programs, then over programs: no atomics, so the same
bits every time. Under torch.compile these ops are plain PyTorch, which Inductor fuses as well as these kernels, and
with the surrounding operations.

Sources: Hendrycks and Gimpel, arXiv:1606.08415; Shazeer, arXiv:2002.05202; So et al., arXiv:2109.08668 (relu²); the
clamped form is that of OpenAI's gpt-oss.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.ops.activation_kernels import (
    activation_bwd,
    activation_bwd_outputs,
    activation_fwd,
    activation_fwd_outputs,
    split_halves,
)
from powertrain.ops.batch_invariance import is_batch_invariant, rows_apart
from powertrain.ops.shapes import acc_dtype, wanted
from powertrain.runtime import checks
from powertrain.runtime.dispatch import Op, apart_from_autocast, falls_back, use_kernel
from powertrain.runtime.plain_calls import plain
from powertrain.runtime.positional import hinted
from powertrain.runtime.sharding import leading_dims, placements

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "relu_squared"]
Gated = Literal["swiglu", "geglu", "geglu_tanh", "quick_geglu", "reglu", "relu_squared_glu", "clamped_swiglu"]
Order = Literal["gate_first", "up_first"]

_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
KINDS = ("gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "relu_squared")
# the activation of the gate
GATED = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "quick_geglu": "quick_gelu",
    "reglu": "relu",
    "relu_squared_glu": "relu_squared",
    "clamped_swiglu": "clamped_swiglu",
}


def _act_ref(z: Tensor, kind: str) -> Tensor:
    if kind == "gelu":
        return z * (0.5 * (1 + torch.erf(z * math.sqrt(0.5))))
    if kind == "gelu_tanh":
        return z * torch.sigmoid(2 * _SQRT_2_OVER_PI * (z + 0.044715 * z * z * z))
    if kind == "quick_gelu":
        return z * torch.sigmoid(1.702 * z)
    if kind == "silu":
        return z * torch.sigmoid(z)
    return torch.relu(z) if kind == "relu" else torch.relu(z).square()


def activation_ref(x: Tensor, kind: str, bias: Tensor | None = None) -> Tensor:
    """The specification of `activation`, in plain PyTorch."""
    z = x.to(acc_dtype(x.dtype))
    return _act_ref(z if bias is None else z + bias, kind).to(x.dtype)


def gated_activation_ref(
    x: Tensor,
    kind: str,
    *,
    up: Tensor | None = None,
    bias: Tensor | None = None,
    order: Order = "gate_first",
    limit: float = 7.0,
    alpha: float = 1.702,
) -> Tensor:
    """The specification of `gated_activation`, in plain PyTorch."""
    acc = acc_dtype(x.dtype)
    gate, up = split_halves(x, up, order)
    gate, up = gate.to(acc), up.to(acc)
    if bias is not None:
        gate_bias, up_bias = split_halves(bias, None, order)
        gate, up = gate + gate_bias, up + up_bias
    if kind == "clamped_swiglu":
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (gate * torch.sigmoid(alpha * gate) * (up + 1)).to(x.dtype)
    return (_act_ref(gate, GATED[kind]) * up).to(x.dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, up, bias, *ctx.options = inputs
    ctx.save_for_backward(x, up, bias)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 8
    need_dx, need_dup, need_dbias = ctx.needs_input_grad[:3]
    grads = activation_bwd_op(dy, *ctx.saved_tensors, *ctx.options, need_dx, need_dup, need_dbias)
    needs = (need_dx, need_dup, need_dbias)
    return (*(wanted(grad, need) for grad, need in zip(grads, needs, strict=True)), *(None,) * 5)


def _fwd_sharding(x: Any, up: Any, bias: Any, gated: bool, **_: Any) -> Any:
    R, _P, S = placements()
    is_packed = gated and up is None
    for at in [R, *map(S, leading_dims(x, last=not is_packed and bias is None))]:
        yield [at], {"x": at, "up": at}


def _bwd_sharding(x: Any, up: Any, bias: Any, gated: bool, **rest: Any) -> Any:
    R, P, S = placements()
    need_dx, need_dup, need_dbias = (rest[f"need_{name}"] for name in ("dx", "dup", "dbias"))
    is_packed = gated and up is None
    for at in [R, *map(S, leading_dims(x, last=not is_packed and bias is None))]:
        dbias = P if at is not R and need_dbias and bias else R
        yield [at if need_dx else R, at if need_dup and up else R, dbias], {"dy": at, "x": at, "up": at}


_OPTIONS = "str kind, str order, bool gated, float limit, float alpha"
_activation_op = Op(
    f"activation_fwd(Tensor x, Tensor? up, Tensor? bias, {_OPTIONS}) -> Tensor",
    activation_fwd,
    activation_fwd_outputs,
    backward=_backward,
    setup_context=_setup_context,
    sharding=_fwd_sharding,
)
activation_bwd_op = Op(
    f"activation_bwd(Tensor dy, Tensor x, Tensor? up, Tensor? bias, {_OPTIONS}, bool need_dx, bool need_dup, "
    "bool need_dbias) -> (Tensor, Tensor, Tensor)",
    activation_bwd,
    activation_bwd_outputs,
    sharding=_bwd_sharding,
)


@falls_back("activation")
def activation(x: Tensor, kind: Activation, bias: Tensor | None = None) -> Tensor:
    """act(x + bias), element by element.

    Shapes: N features, any leading dims.
        x     [..., N]  float32, float16 or bfloat16 (float64 on the CPU); any strides
        kind            "gelu" (erf), "gelu_tanh", "quick_gelu", "silu", "relu" or "relu_squared"
        bias  [N]       any of these dtypes, or None
    Returns y [..., N] in x's dtype, also under autocast.
    Numerics: float32 throughout, rounded once. Deterministic, the bias gradient too.
    Memory: saves x and bias; nothing when no gradient is wanted.
    Raises ValueError naming the argument, the expected value and the given one. Double backward and vmap are not
        implemented and say so.
    Under torch.compile it is plain PyTorch, for Inductor to fuse.
    """
    checks.one_of("activation", "kind", kind, KINDS)
    checks.require(x.dim() > 0, "activation", "x", "have at least one dim", "a scalar")
    checks.floating("activation", x=x, bias=bias)
    checks.same_device("activation", "x", x, bias=bias)
    checks.shape("activation", "bias", bias, x.shape[-1:], "last dim of x")
    if torch.compiler.is_compiling() or not use_kernel("activation", x):
        act = apart_from_autocast(activation_torch(x, kind, bias), x.device)
        return rows_apart(lambda x: act(x, bias), x) if is_batch_invariant() else plain(act, x, bias)
    bias = bias if bias is None else bias.contiguous()
    return _activation_op(x, None, bias, kind, "gate_first", False, 0.0, 0.0)


@falls_back("gated_activation")
def gated_activation(
    x: Tensor,
    kind: Gated,
    *,
    up: Tensor | None = None,
    bias: Tensor | None = None,
    order: Order = "gate_first",
    limit: float = 7.0,
    alpha: float = 1.702,
) -> Tensor:
    """act(gate) * up, from one packed tensor or from two.

    Shapes: N features of the result, any leading dims.
        x      [..., 2N]  gate and up side by side; with `up` given, the gate alone [..., N]. Dtypes as in `activation`
        kind              "swiglu", "geglu" (erf), "geglu_tanh", "quick_geglu", "reglu", "relu_squared_glu",
                          "clamped_swiglu"
        up     [..., N]   the other half, or None
        bias   [2N]       added to both halves, in `order`
        order             "gate_first" (Llama, Megatron) or "up_first" (GPT-NeoX)
        limit, alpha      of clamped_swiglu: gate at most limit, up within ±limit, σ(alpha * gate), up + 1
    Returns y [..., N] in x's dtype, also under autocast.
    Numerics, memory, errors and torch.compile as in `activation`.
    """
    op = "gated_activation"
    checks.one_of(op, "kind", kind, tuple(GATED))
    checks.one_of(op, "order", order, ("gate_first", "up_first"))
    checks.require(x.dim() > 0, op, "x", "have at least one dim", "a scalar")
    checks.floating(op, x=x, up=up, bias=bias)
    checks.same_device(op, "x", x, up=up, bias=bias)
    if up is None:
        checks.require(x.shape[-1] % 2 == 0, op, "x", "have an even last dim (gate and up)", list(x.shape))
    checks.shape(op, "up", up, x.shape, "shape of x")
    width = x.shape[-1] if up is None else 2 * x.shape[-1]
    checks.shape(op, "bias", bias, (width,), "gate and up")
    check_clamp(op, kind, limit, alpha)
    if torch.compiler.is_compiling() or not use_kernel(op, x):
        act = apart_from_autocast(gated_torch(x, kind, up, order, limit, alpha), x.device)
        return rows_apart(lambda x, up: act(x, up, bias), x, up) if is_batch_invariant() else plain(act, x, up, bias)
    bias = bias if bias is None else bias.contiguous()
    return _activation_op(x, up, bias, GATED[kind], order, True, float(limit), float(alpha))


@hinted
def gelu(x: Tensor, bias: Tensor | None = None, *, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """`activation` of kind "gelu" or "gelu_tanh"; `approximate` as in torch.nn.functional.gelu."""
    checks.one_of("gelu", "approximate", approximate, ("none", "tanh"))
    return activation(x, "gelu" if approximate == "none" else "gelu_tanh", bias)


def quick_gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """`activation` of kind "quick_gelu"."""
    return activation(x, "quick_gelu", bias)


def relu_squared(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """`activation` of kind "relu_squared"."""
    return activation(x, "relu_squared", bias)


@hinted
def swiglu(x: Tensor, up: Tensor | None = None, *, bias: Tensor | None = None, order: Order = "gate_first") -> Tensor:
    """`gated_activation` of kind "swiglu": silu(gate) * up."""
    return gated_activation(x, "swiglu", up=up, bias=bias, order=order)


@hinted
def geglu(
    x: Tensor,
    up: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    order: Order = "gate_first",
    approximate: Literal["none", "tanh"] = "none",
) -> Tensor:
    """`gated_activation` of kind "geglu" or "geglu_tanh": gelu(gate) * up."""
    checks.one_of("geglu", "approximate", approximate, ("none", "tanh"))
    return gated_activation(x, "geglu" if approximate == "none" else "geglu_tanh", up=up, bias=bias, order=order)


def reglu(x: Tensor, up: Tensor | None = None, *, bias: Tensor | None = None, order: Order = "gate_first") -> Tensor:
    """`gated_activation` of kind "reglu": relu(gate) * up."""
    return gated_activation(x, "reglu", up=up, bias=bias, order=order)


def _act_torch(kind: str) -> Callable[[Tensor], Tensor]:
    # Inductor's tanh takes gelu_tanh at 16384x14336 on an H200 from 0.22 to 0.27 ms; by the sigmoid it does not
    own = None if torch.compiler.is_compiling() else _PYTORCHS.get(kind)
    return own or (lambda z: _act_ref(z, kind))


# they compute 16 bits in float32 inside, and round once
_PYTORCHS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh"), "silu": F.silu, "relu": torch.relu,
}  # fmt: skip


def activation_torch(x: Tensor, kind: str, bias: Tensor | None) -> Callable[..., Tensor]:
    """The activation of such tensors, (x, bias), in plain PyTorch."""
    act, dtype, acc = _act_torch(kind), x.dtype, acc_dtype(x.dtype)
    if bias is None and (act is _PYTORCHS.get(kind) or dtype is acc):
        return lambda x, bias: act(x)
    if bias is None:
        return lambda x, bias: act(x.to(acc)).to(dtype)
    return lambda x, bias: act(x.to(acc) + bias).to(dtype)


def check_clamp(op: str, kind: str | None, limit: float, alpha: float) -> None:
    """Raise ValueError unless clamped_swiglu can take these numbers."""
    # of other kinds they are not read: with symbolic numbers Dynamo fails on a default that two checkpoints read
    if kind == "clamped_swiglu":
        if not limit >= 0:
            checks.fail(op, "limit", "be at least 0 (inf: none)", limit)
        if not abs(alpha) < math.inf:
            checks.fail(op, "alpha", "be finite", alpha)


def gated_torch(
    x: Tensor, kind: str, up: Tensor | None, order: Order, limit: float, alpha: float
) -> Callable[..., Tensor]:
    """The gated activation of such tensors, (x, up, bias), in plain PyTorch."""
    if kind == "clamped_swiglu":
        return lambda x, up, bias: gated_activation_ref(
            x, kind, up=up, bias=bias, order=order, limit=limit, alpha=alpha
        )
    act, dtype, acc = _act_torch(GATED[kind]), x.dtype, acc_dtype(x.dtype)
    casts = not (dtype is acc and (up is None or up.dtype is acc))

    def gated(x: Tensor, up: Tensor | None, bias: Tensor | None) -> Tensor:
        gate, other = split_halves(x, up, order)
        if casts:
            gate, other = gate.to(acc), other.to(acc)
        if bias is not None:
            gate_bias, up_bias = split_halves(bias, None, order)
            gate, other = gate + gate_bias, other + up_bias
        y = act(gate) * other
        return y.to(dtype) if casts else y

    return gated
