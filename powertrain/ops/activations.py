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

import math
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.shapes import acc_dtype, as_rows, empty, next_power_of_2, wanted
from powertrain.runtime import checks
from powertrain.runtime.dispatch import Op, falls_back, use_kernel, without_autocast
from powertrain.runtime.launch import kernel
from powertrain.runtime.sharding import leading_dims, placements
from powertrain.runtime.target import Target
from powertrain.runtime.tuning import tunable

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
    gate, up = _split(x, up, order)
    gate, up = gate.to(acc), up.to(acc)
    if bias is not None:
        gate_bias, up_bias = _split(bias, None, order)
        gate, up = gate + gate_bias, up + up_bias
    if kind == "clamped_swiglu":
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (gate * torch.sigmoid(alpha * gate) * (up + 1)).to(x.dtype)
    return (_act_ref(gate, GATED[kind]) * up).to(x.dtype)


def _split(x: Tensor, up: Tensor | None, order: str) -> tuple[Tensor, Tensor]:
    """The gate and the up half, views of a packed x."""
    if up is not None:
        return x, up
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return (first, second) if order == "gate_first" else (second, first)


@triton.jit
def _sigmoid(w):
    """σ(w) and 1 - σ(w), the latter without cancellation (which GELU's slope multiplies by about 10)."""
    e = tl.exp(-tl.maximum(w, -80.0))
    s = 1.0 / (1.0 + e)
    return s, e * s


@triton.jit
def _normal_cdf(z):
    """Φ(z) by a polynomial for erfc, within 1.2e-7 of the value itself on both sides (W. J. Cody's form; Numerical
    Recipes, 2nd ed., 6.2). libdevice's erf takes twice the instructions, and 1 + erf(z) cancels for negative z."""
    u = tl.abs(z) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.5 * u)
    p = -0.82215223 + t * 0.17087277
    p = 1.48851587 + t * p
    p = -1.13520398 + t * p
    p = 0.27886807 + t * p
    p = -0.18628806 + t * p
    p = 0.09678418 + t * p
    p = 0.37409196 + t * p
    p = 1.00002368 + t * p
    tail = 0.5 * t * tl.exp(-u * u - 1.26551223 + t * p)
    return tl.where(z < 0.0, tail, 1.0 - tail)


@triton.jit
def activate(z, KIND: tl.constexpr):
    """act(z) and act'(z)."""
    if KIND == "gelu":
        cdf = _normal_cdf(z)
        value = z * cdf
        slope = cdf + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
    elif KIND == "gelu_tanh":
        # ½(1 + tanh(u)) = σ(2u): one exponential, no cancellation
        s, rest = _sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
        value = z * s
        slope = s + value * rest * (1.5957691216057308 * (1.0 + 0.134145 * z * z))
    elif KIND == "quick_gelu":
        s, rest = _sigmoid(1.702 * z)
        value = z * s
        slope = s + 1.702 * value * rest
    elif KIND == "silu":
        s, rest = _sigmoid(z)
        value = z * s
        slope = s + value * rest
    elif KIND == "relu":
        value = tl.where(z > 0, z, tl.where(z == z, 0.0, z))
        slope = tl.where(z > 0, 1.0, 0.0)
    else:
        value = tl.where(z > 0, z * z, tl.where(z == z, 0.0, z))
        slope = 2.0 * tl.where(z > 0, z, 0.0)
    return value, slope


@triton.jit
def activate_gated(gate, up, limit, alpha, KIND: tl.constexpr):
    """y and its derivatives by gate and by up."""
    if KIND == "clamped_swiglu":
        # written so that nan stays nan
        g = tl.where(gate > limit, limit, gate)
        u = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        s, rest = _sigmoid(alpha * g)
        by_up = g * s
        y = by_up * (u + 1.0)
        by_gate = tl.where(gate > limit, 0.0, (s + alpha * by_up * rest) * (u + 1.0))
        by_up = tl.where((up > limit) | (up < -limit), 0.0, by_up)
    else:
        by_up, slope = activate(gate, KIND)
        y = by_up * up
        by_gate = slope * up
    return y, by_gate, by_up


@triton.jit
def _load(x_ptr, bias_ptr, rows, cols, stride_m, mask, N):
    x = tl.load(x_ptr + rows * stride_m + cols, mask=mask, other=0.0).to(tl.float32)  # the shape of rows + cols
    if bias_ptr is not None:
        x += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)  # the shape of cols
    return x


@kernel(aligned=("N",))
def _activation_fwd_kernel(
    x_ptr,
    up_ptr,
    bias_ptr,
    up_bias_ptr,
    y_ptr,
    M,
    N,
    stride_xm,
    stride_um,
    limit,
    alpha,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    col_blocks = tl.cdiv(N, BLOCK_N)
    rows = (tl.program_id(0) // col_blocks * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    cols = (tl.program_id(0) % col_blocks * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (rows < M) & (cols < N)

    x = _load(x_ptr, bias_ptr, rows, cols, stride_xm, mask, N)
    if up_ptr is not None:
        y, _, _ = activate_gated(x, _load(up_ptr, up_bias_ptr, rows, cols, stride_um, mask, N), limit, alpha, KIND)
    else:
        y, _ = activate(x, KIND)
    tl.store(y_ptr + rows * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)  # [BLOCK_M, BLOCK_N]


@triton.jit
def _activation_bwd_tile(
    dy_ptr, x_ptr, up_ptr, bias_ptr, up_bias_ptr, dx_ptr, dup_ptr,
    rows, cols, M, N, stride_dym, stride_xm, stride_um, stride_dm, limit, alpha, KIND: tl.constexpr,
):  # fmt: skip
    mask = (rows < M) & (cols < N)
    dy = tl.load(dy_ptr + rows * stride_dym + cols, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_N]
    x = _load(x_ptr, bias_ptr, rows, cols, stride_xm, mask, N)
    if up_ptr is not None:
        _, by_gate, by_up = activate_gated(
            x, _load(up_ptr, up_bias_ptr, rows, cols, stride_um, mask, N), limit, alpha, KIND
        )
        dx = dy * by_gate
        dup = dy * by_up
        if dup_ptr is not None:
            # [BLOCK_M, BLOCK_N]
            tl.store(dup_ptr + rows * stride_dm + cols, dup.to(dup_ptr.dtype.element_ty), mask=mask)
    else:
        _, slope = activate(x, KIND)
        dx = dy * slope
        dup = dx
    if dx_ptr is not None:
        tl.store(dx_ptr + rows * stride_dm + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)  # [BLOCK_M, BLOCK_N]
    return dx, dup


@kernel(aligned=("N",))
def _activation_bwd_kernel(
    dy_ptr,
    x_ptr,
    up_ptr,
    bias_ptr,
    up_bias_ptr,
    dx_ptr,
    dup_ptr,
    dbias_partial_ptr,
    dup_bias_partial_ptr,
    M,
    N,
    stride_dym,
    stride_xm,
    stride_um,
    stride_dm,
    limit,
    alpha,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    col_blocks = tl.cdiv(N, BLOCK_N)
    first = tl.program_id(0) // col_blocks
    lanes = tl.arange(0, BLOCK_M)[:, None]
    cols = (tl.program_id(0) % col_blocks * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    if dbias_partial_ptr is not None:
        programs = tl.num_programs(0) // col_blocks
        dbias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        dup_bias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for block in range(first, tl.cdiv(M, BLOCK_M), programs):
            dx, dup = _activation_bwd_tile(
                dy_ptr, x_ptr, up_ptr, bias_ptr, up_bias_ptr, dx_ptr, dup_ptr,
                (block * BLOCK_M + lanes).to(tl.int64), cols,
                M, N, stride_dym, stride_xm, stride_um, stride_dm, limit, alpha, KIND,
            )  # fmt: skip
            dbias += dx
            dup_bias += dup
        partial = first.to(tl.int64) * N + cols
        tl.store(dbias_partial_ptr + partial, tl.sum(dbias, axis=0, keep_dims=True), mask=cols < N)  # [1, BLOCK_N]
        if dup_bias_partial_ptr is not None:
            # [1, BLOCK_N]
            tl.store(dup_bias_partial_ptr + partial, tl.sum(dup_bias, axis=0, keep_dims=True), mask=cols < N)
    else:
        _activation_bwd_tile(
            dy_ptr, x_ptr, up_ptr, bias_ptr, up_bias_ptr, dx_ptr, dup_ptr,
            (first * BLOCK_M + lanes).to(tl.int64), cols,
            M, N, stride_dym, stride_xm, stride_um, stride_dm, limit, alpha, KIND,
        )  # fmt: skip


class _Plan(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    row_blocks: int
    col_blocks: int


@tunable("NVIDIA H200, 2026-11-21")
def _plan(M: int, N: int, per_thread: int, target: Target) -> _Plan:
    """Blocks of 2048 elements. Two 16-byte vectors a thread are the least that keeps enough loads in flight; the one
    stream of a plain forward wants four: gelu_tanh 16384x14336 bf16 on an H200 took 0.227 ms with 32 elements a
    thread, 0.235 with 16 and 0.264 with 8 (a copy 0.223)."""
    block_n = min(next_power_of_2(N), 2048)
    if 256 <= N & -N < block_n:
        block_n = N & -N  # no part of a block beyond the row: 3072 is 3 x 1024
    block_m = max(1, min(2048 // block_n, next_power_of_2(M)))
    warps = max(1, block_m * block_n // (32 * per_thread))
    return _Plan(block_m, block_n, warps, triton.cdiv(M, block_m), triton.cdiv(N, block_n))


def _halves(x: Tensor, up: Tensor | None, order: str, gated: bool) -> tuple[Tensor, Tensor | None]:
    """x as rows, or gate and up as rows."""
    if not gated:
        return as_rows(x), None
    if up is not None:
        return as_rows(x), as_rows(up)
    return _split(as_rows(x), None, order)


def _bias_halves(bias: Tensor | None, order: str, gated: bool) -> tuple[Tensor | None, Tensor | None]:
    return (bias, None) if bias is None or not gated else _split(bias, None, order)


def _activation_fwd_outputs(
    x: Tensor, up: Tensor | None, bias: Tensor | None, kind: str, order: str, gated: bool, limit: float, alpha: float
) -> Tensor:
    N = x.shape[-1] // 2 if gated and up is None else x.shape[-1]
    return x.new_empty((*x.shape[:-1], N))


def _activation_fwd(
    x: Tensor, up: Tensor | None, bias: Tensor | None, kind: str, order: str, gated: bool, limit: float, alpha: float
) -> Tensor:
    y = _activation_fwd_outputs(x, up, bias, kind, order, gated, limit, alpha)
    gate, up = _halves(x, up, order, gated)
    gate_bias, up_bias = _bias_halves(bias, order, gated)
    M, N = gate.shape
    plan = _plan(M, N, 16 if gated else 32, Target.of(x.device))
    _activation_fwd_kernel[(plan.row_blocks * plan.col_blocks,)](
        gate, up, gate_bias, up_bias, y,
        M, N, gate.stride(0), 0 if up is None else up.stride(0), limit, alpha,
        KIND=kind, BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, num_warps=plan.num_warps,
    )  # fmt: skip
    return y


def _activation_bwd_outputs(
    dy: Tensor,
    x: Tensor,
    up: Tensor | None,
    bias: Tensor | None,
    kind: str,
    order: str,
    gated: bool,
    limit: float,
    alpha: float,
    *need: bool,  # dx, dup, dbias
) -> tuple[Tensor, Tensor, Tensor]:
    need_dx, need_dup, need_dbias = need
    dx = x.new_empty(x.shape) if need_dx else empty(x)
    dup = up.new_empty(up.shape) if up is not None and need_dup else empty(x)
    dbias = torch.empty_like(bias) if bias is not None and need_dbias else empty(x)
    return dx, dup, dbias


def _activation_bwd(
    dy: Tensor,
    x: Tensor,
    up: Tensor | None,
    bias: Tensor | None,
    kind: str,
    order: str,
    gated: bool,
    limit: float,
    alpha: float,
    *need: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    need_dx, need_dup, need_dbias = need
    outputs = _activation_bwd_outputs(dy, x, up, bias, kind, order, gated, limit, alpha, *need)
    dx, dup, dbias = outputs
    dgate: Tensor | None
    dup_half: Tensor | None
    if gated and up is None and need_dx:
        dgate, dup_half = halves = _split(as_rows(dx), None, order)
        stride_dm = halves[0].stride(0)
    else:
        dgate, dup_half = (dx if need_dx else None), (dup if up is not None and need_dup else None)
        stride_dm = dy.shape[-1]
    dy = as_rows(dy)
    gate, up = _halves(x, up, order, gated)
    gate_bias, up_bias = _bias_halves(bias, order, gated)
    M, N = gate.shape
    plan = _plan(M, N, 16, Target.of(dy.device))
    programs, partial = plan.row_blocks, None
    if need_dbias:
        programs = min(plan.row_blocks, max(1, Target.of(x.device).num_sms * 8 // max(1, plan.col_blocks)))
        partial = x.new_empty((2 if gated else 1, programs, N), dtype=torch.float32)
    _activation_bwd_kernel[(programs * plan.col_blocks,)](
        dy, gate, up, gate_bias, up_bias, dgate, dup_half,
        None if partial is None else partial[0], None if partial is None or not gated else partial[1],
        M, N, dy.stride(0), gate.stride(0), 0 if up is None else up.stride(0), stride_dm, limit, alpha,
        KIND=kind, BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, num_warps=plan.num_warps,
    )  # fmt: skip
    if partial is not None:
        sums = partial.sum(1)
        dbias.copy_((sums.flip(0) if gated and order == "up_first" else sums).view(-1))
    return outputs


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
    _activation_fwd,
    _activation_fwd_outputs,
    backward=_backward,
    setup_context=_setup_context,
    sharding=_fwd_sharding,
)
activation_bwd_op = Op(
    f"activation_bwd(Tensor dy, Tensor x, Tensor? up, Tensor? bias, {_OPTIONS}, bool need_dx, bool need_dup, "
    "bool need_dbias) -> (Tensor, Tensor, Tensor)",
    _activation_bwd,
    _activation_bwd_outputs,
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
        return _activation_torch(x, kind, bias)
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
    if torch.compiler.is_compiling() or not use_kernel(op, x):
        return _gated_torch(x, kind, up, bias, order, limit, alpha)
    bias = bias if bias is None else bias.contiguous()
    return _activation_op(x, up, bias, GATED[kind], order, True, float(limit), float(alpha))


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


def swiglu(x: Tensor, up: Tensor | None = None, *, bias: Tensor | None = None, order: Order = "gate_first") -> Tensor:
    """`gated_activation` of kind "swiglu": silu(gate) * up."""
    return gated_activation(x, "swiglu", up=up, bias=bias, order=order)


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


def _act_torch(z: Tensor, kind: str) -> Tensor:
    if torch.compiler.is_compiling():
        # Inductor's tanh takes gelu_tanh at 16384x14336 on an H200 from 0.22 to 0.27 ms; by the sigmoid it does not
        return _act_ref(z, kind)
    if kind in ("gelu", "gelu_tanh"):
        return F.gelu(z, approximate="tanh" if kind == "gelu_tanh" else "none")
    return F.silu(z) if kind == "silu" else _act_ref(z, kind)


def _activation_torch(x: Tensor, kind: str, bias: Tensor | None) -> Tensor:
    with without_autocast(x.device):
        z = x.to(acc_dtype(x.dtype))
        return _act_torch(z if bias is None else z + bias, kind).to(x.dtype)


def _gated_torch(
    x: Tensor, kind: str, up: Tensor | None, bias: Tensor | None, order: Order, limit: float, alpha: float
) -> Tensor:
    with without_autocast(x.device):
        if kind == "clamped_swiglu":
            return gated_activation_ref(x, kind, up=up, bias=bias, order=order, limit=limit, alpha=alpha)
        acc = acc_dtype(x.dtype)
        gate, other = (half.to(acc) for half in _split(x, up, order))
        if bias is not None:
            gate_bias, up_bias = _split(bias, None, order)
            gate, other = gate + gate_bias, other + up_bias
        return (_act_torch(gate, GATED[kind]) * other).to(x.dtype)
