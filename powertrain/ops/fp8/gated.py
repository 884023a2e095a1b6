"""A gated activation that saves gate and up in FP8: forward and backward are computed from the FP8 data.

    ĝ, û = gate, up rounded to e4m3, one scale for 128 elements of a row, a power of two (ops/fp8/formulas.py, "group")
    y    = act(ĝ) û
    dgate = dy act'(ĝ) û        dup = dy act(ĝ)         the rounding's derivative is taken as 1

The forward, its recomputation and the backward see the same numbers: gate and up, which saved exactly are 4 bytes an
element of y in 16 bits, are 2 and 8 bytes for 128. Saved: data and scales of ĝ and û.
Forward: 4 bytes read and 4 written an element of y in 16 bits; backward: 4 and 4.
"""

from collections import defaultdict
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.activation_kernels import activate_gated
from powertrain.ops.activations import GATED, Gated, check_clamp, gated_activation_ref
from powertrain.ops.fp8.formulas import DTYPES, GROUP, Quantized, dequantized, padded, quantize_ref
from powertrain.ops.fp8.plain import plain_function
from powertrain.ops.fp8.quantize import same_bits, special_values
from powertrain.ops.fp8.quantize_kernels import inverse_of, magnitude_of, scale_of_magnitude
from powertrain.ops.fp8.tested import serves
from powertrain.ops.shapes import as_rows, cdiv
from powertrain.runtime import checks
from powertrain.runtime.dispatch import Op, falls_back, is_traced, use_kernel
from powertrain.runtime.launch import kernel
from powertrain.runtime.nodes import refuse_graph

_BLOCK_R = 16  # of rows of one group: 16 bytes of a 16-bit operand are 8 elements for each of 256 threads


def fp8_gated_activation_ref(
    gate: Tensor, up: Tensor, kind: Gated = "swiglu", *, limit: float = 7.0, alpha: float = 1.702
) -> Tensor:
    """The specification of `fp8_gated_activation`, in float32; differentiable, the rounding's derivative being 1."""
    shape, halves = gate.shape, []
    for x in (gate, up):
        rows = as_rows(x.float())
        rounded = _kept(rows.detach())[1]
        halves.append(rows + (rounded - rows).detach())
    y = gated_activation_ref(halves[0], kind, up=halves[1], limit=limit, alpha=alpha)
    return y.view(shape).to(gate.dtype)


def _kept(rows: Tensor) -> tuple[Quantized, Tensor]:
    """The kept form of [R, C], and its values, float32."""
    if not rows.numel():
        data = rows.new_zeros((rows.shape[0], padded(rows.shape[1])), dtype=torch.uint8)
        empty = Quantized(data.view(DTYPES["e4m3"]), rows.new_ones((rows.shape[0], cdiv(rows.shape[1], GROUP))))
        return empty, rows.float()
    q = quantize_ref(rows, "group", "e4m3").rows
    return q, dequantized(q, rows.shape[1])


@triton.jit
def _round(x, data_ptr, scale_ptr, row, lanes, cols, group, R, C16, step_g):
    """x [BLOCK_R, 128] as it is kept: stores data and scales, returns the values."""
    scale = scale_of_magnitude(tl.max(magnitude_of(x), 1), 448.0, True)  # [BLOCK_R]
    inverse = inverse_of(scale, True)
    in_rows = row + lanes < R
    tl.store(scale_ptr + group.to(tl.int64) * step_g + row + lanes, inverse, mask=in_rows)
    data = (x * scale[:, None]).to(data_ptr.dtype.element_ty)
    where = row.to(tl.int64) * C16 + lanes[:, None] * C16 + cols[None, :]
    tl.store(data_ptr + where, data, mask=in_rows[:, None] & (cols < C16)[None, :])  # [BLOCK_R, 128]
    return data.to(tl.float32) * inverse[:, None]


@triton.jit
def _read(data_ptr, scale_ptr, row, lanes, cols, group, R, C16, step_g):
    """The values of what was kept, [BLOCK_R, 128]."""
    in_rows = row + lanes < R
    scale = tl.load(scale_ptr + group.to(tl.int64) * step_g + row + lanes, mask=in_rows, other=0.0)
    where = row.to(tl.int64) * C16 + lanes[:, None] * C16 + cols[None, :]
    data = tl.load(data_ptr + where, mask=in_rows[:, None] & (cols < C16)[None, :], other=0.0)
    return data.to(tl.float32) * scale[:, None]


@kernel(aligned=("C", "C16"))
def _gated_fwd_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    gate_data_ptr,
    up_data_ptr,
    gate_scale_ptr,
    up_scale_ptr,
    R,
    C,
    C16,
    stride_gm,
    stride_um,
    step_g,  # of scales: R, of no use as a stride that must be a multiple of 16
    limit,
    alpha,
    KIND: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    groups = tl.cdiv(C, BLOCK_C)
    row, group = tl.program_id(0) // groups * BLOCK_R, tl.program_id(0) % groups
    lanes, cols = tl.arange(0, BLOCK_R), group * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (row + lanes < R)[:, None] & (cols < C)[None, :]
    # 64 bits for the tile's place, 32 within it
    gate_ptr += row.to(tl.int64) * stride_gm
    up_ptr += row.to(tl.int64) * stride_um
    gate = tl.load(gate_ptr + lanes[:, None] * stride_gm + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + lanes[:, None] * stride_um + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    gate = _round(gate, gate_data_ptr, gate_scale_ptr, row, lanes, cols, group, R, C16, step_g)
    up = _round(up, up_data_ptr, up_scale_ptr, row, lanes, cols, group, R, C16, step_g)
    y, _, _ = activate_gated(gate, up, limit, alpha, KIND)
    y_ptr += row.to(tl.int64) * C
    tl.store(y_ptr + lanes[:, None] * C + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel(aligned=("C", "C16"))
def _gated_bwd_kernel(
    dy_ptr,
    gate_data_ptr,
    up_data_ptr,
    gate_scale_ptr,
    up_scale_ptr,
    dgate_ptr,
    dup_ptr,
    R,
    C,
    C16,
    stride_dym,
    step_g,
    limit,
    alpha,
    KIND: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    groups = tl.cdiv(C, BLOCK_C)
    row, group = tl.program_id(0) // groups * BLOCK_R, tl.program_id(0) % groups
    lanes, cols = tl.arange(0, BLOCK_R), group * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (row + lanes < R)[:, None] & (cols < C)[None, :]
    dy_ptr += row.to(tl.int64) * stride_dym
    dy = tl.load(dy_ptr + lanes[:, None] * stride_dym + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    gate = _read(gate_data_ptr, gate_scale_ptr, row, lanes, cols, group, R, C16, step_g)
    up = _read(up_data_ptr, up_scale_ptr, row, lanes, cols, group, R, C16, step_g)
    _, by_gate, by_up = activate_gated(gate, up, limit, alpha, KIND)
    where = row.to(tl.int64) * C + lanes[:, None] * C + cols[None, :]
    tl.store(dgate_ptr + where, (dy * by_gate).to(dgate_ptr.dtype.element_ty), mask=mask)  # [BLOCK_R, BLOCK_C]
    tl.store(dup_ptr + where, (dy * by_up).to(dup_ptr.dtype.element_ty), mask=mask)  # [BLOCK_R, BLOCK_C]


def _outputs(gate: Tensor, up: Tensor, kind: str, limit: float, alpha: float, kernel: bool) -> tuple[Tensor, ...]:
    R, C = gate.numel() // max(1, gate.shape[-1]), gate.shape[-1]
    kept = [gate.new_empty((R, padded(C)), dtype=DTYPES["e4m3"]) for _ in range(2)]
    scales = [gate.new_empty((cdiv(C, GROUP), R), dtype=torch.float32) for _ in range(2)]
    return gate.new_empty(gate.shape), *kept, *scales


def _launch(gate: Tensor, up: Tensor, kind: str, limit: float, alpha: float, out: tuple[Tensor, ...]) -> None:
    gate, up = as_rows(gate), as_rows(up)
    (R, C), C16 = gate.shape, out[1].shape[1]
    _gated_fwd_kernel[(cdiv(R, _BLOCK_R) * cdiv(C, GROUP),)](
        gate, up, *out, R, C, C16, gate.stride(0), up.stride(0), R, limit, alpha,
        KIND=GATED[kind], BLOCK_R=_BLOCK_R, BLOCK_C=GROUP, num_warps=8,
    )  # fmt: skip


def _forward(gate: Tensor, up: Tensor, kind: str, limit: float, alpha: float, kernel: bool) -> tuple[Tensor, ...]:
    if kernel and gate.numel() and _kernel_serves(gate):
        out = _outputs(gate, up, kind, limit, alpha, kernel)
        _launch(gate, up, kind, limit, alpha, out)
        return out
    (g, values), (u, up_values) = (_kept(as_rows(x)) for x in (gate, up))
    y = gated_activation_ref(values, kind, up=up_values, limit=limit, alpha=alpha)
    scales = [q.scale_inv.T.contiguous() for q in (g, u)]
    return y.to(gate.dtype).view(gate.shape), g.data, u.data, *scales


def _bwd_outputs(dy: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return dy.new_empty(dy.shape), dy.new_empty(dy.shape)


def _backward_op(
    dy: Tensor, g: Tensor, u: Tensor, g_inv: Tensor, u_inv: Tensor, kind: str, limit: float, alpha: float, kernel: bool
) -> tuple[Tensor, Tensor]:
    if kernel and dy.numel() and _kernel_serves(dy):
        rows, out = as_rows(dy), _bwd_outputs(dy)
        R, C = rows.shape
        _gated_bwd_kernel[(cdiv(R, _BLOCK_R) * cdiv(C, GROUP),)](
            rows, g, u, g_inv, u_inv, *out, R, C, g.shape[1], rows.stride(0), R, limit, alpha,
            KIND=GATED[kind], BLOCK_R=_BLOCK_R, BLOCK_C=GROUP, num_warps=8,
        )  # fmt: skip
        return out
    C = dy.shape[-1]
    # the kernels store scales by group, the formulas read them by row
    halves = [dequantized(Quantized(q, inv.T), C) for q, inv in ((g, g_inv), (u, u_inv))]
    # backward runs without a graph, and this derivative is autograd's
    with torch.enable_grad():
        leaves = [half.detach().requires_grad_() for half in halves]
        y = gated_activation_ref(leaves[0], kind, up=leaves[1], limit=limit, alpha=alpha)
    grads = torch.autograd.grad(y, leaves, as_rows(dy).float())
    dgate, dup = (grad.to(dy.dtype).view(dy.shape) for grad in grads)
    return dgate, dup


_self_tests: dict[torch.dtype, dict[int | None, str | None]] = defaultdict(dict)


def _kernel_serves(x: Tensor) -> bool:
    """Whether the kernels' bytes are right on x's device; elsewhere plain PyTorch computes them."""
    op = f"fp8_gated_activation of {checks.name(x.dtype)}"
    return serves(_self_tests[x.dtype], x.device, op, partial(_self_test, dtype=x.dtype))


def _self_test(device: torch.device, dtype: torch.dtype) -> str | None:
    """Bytes kept of special values, beside the formulas' on the CPU, and y of ordinary ones."""
    # values at which a conversion goes wrong first
    gate = special_values().to(dtype)
    up = gate.flip(0).contiguous()
    options = ("swiglu", 7.0, 1.702)
    out = _outputs(gate.to(device), up, *options, True)
    out = tuple(t.to(device) for t in out)
    _launch(gate.to(device), up.to(device), *options, out)
    for name, x, data, scale in (("gate", gate, out[1], out[3]), ("up", up, out[2], out[4])):
        right = quantize_ref(x, "group", "e4m3").rows
        if not (same_bits(data, right.data) and same_bits(scale.T.contiguous(), right.scale_inv.contiguous())):
            return f"the kept form of {name} differs from its formula (triton {triton.__version__})"
    # ordinary rows: y of the special ones may overflow
    right_y = fp8_gated_activation_ref(gate, up)[20:120].float()
    if not torch.allclose(out[0].cpu()[20:120].float(), right_y, rtol=2**-6, atol=2**-12):
        return f"the activation differs from its formula (triton {triton.__version__})"
    return None


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, *ctx.options = inputs
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 6
    # the saved tensors are rounded copies: a second derivative by the inputs would leave out a term
    refuse_graph(ctx, "fp8_gated_activation")
    need_gate, need_up = ctx.needs_input_grad[:2]
    dgate, dup = _gated_bwd_op(dy, *ctx.saved_tensors, *ctx.options)
    return (dgate if need_gate else None), (dup if need_up else None), *(None,) * 4


_gated_bwd_op = Op(
    "fp8_gated_activation_bwd(Tensor dy, Tensor g, Tensor u, Tensor g_inv, Tensor u_inv, str kind, float limit, "
    "float alpha, bool kernel) -> (Tensor, Tensor)",
    _backward_op,
    _bwd_outputs,
)
_gated_op = Op(
    "fp8_gated_activation(Tensor gate, Tensor up, str kind, float limit, float alpha, bool kernel) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _outputs,
    backward=_backward,
    setup_context=_setup_context,
    num_results=1,
)


_Plain = plain_function("fp8_gated_activation", _forward, _setup_context, _backward)


@falls_back("fp8_gated_activation")
def fp8_gated_activation(
    gate: Tensor, up: Tensor, kind: Gated = "swiglu", *, limit: float = 7.0, alpha: float = 1.702
) -> Tensor:
    """act(gate) * up of gate and up rounded to FP8, which are kept in FP8 for backward.

    Shapes: N features, any leading dims.
        gate, up   [..., N]  float32, float16 or bfloat16 (float64 on the CPU, taken as float32); the same dtype
        kind, limit, alpha   as of `gated_activation`
    Returns y [..., N] in gate's dtype, also under autocast.
    Numerics: each 128 elements of a row are rounded to e4m3 (3 mantissa bits) by a scale of theirs, a power of two; the
        activation of the rounded values is computed in float32 and rounded once. Backward is the derivative there; that
        of the rounding is taken as 1. So a recomputed forward has the same bits, and backward its numbers.
        Deterministic. NaN stays NaN, infinity becomes 448.
    Memory: saves 2 bytes an element of y and 8 for 128, where `gated_activation` saves gate and up.
    Raises ValueError naming the argument, the expected value and the given one. Double backward and vmap are not
        implemented and say so.
    """
    op = "fp8_gated_activation"
    checks.one_of(op, "kind", kind, tuple(GATED))
    checks.require(gate.dim() > 0, op, "gate", "have at least one dim", "a scalar")
    checks.floating(op, gate=gate, up=up)
    checks.same_device(op, "gate", gate, up=up)
    checks.shape(op, "up", up, gate.shape, "shape of gate")
    checks.same_dtype(op, "gate", gate, up=up)
    check_clamp(op, kind, limit, alpha)
    if kind != "clamped_swiglu":
        limit, alpha = 7.0, 1.702  # as `check_clamp` says
    served = use_kernel(op, gate)
    args = (gate, up, kind, float(limit), float(alpha), served)
    if served or is_traced(gate):
        y = _gated_op(*args)
    else:
        # autograd's function outside the op: no kernel of ours is launched
        y = _Plain.apply(*args)
    out: Tensor = y[0] if isinstance(y, tuple) else y
    return out
