"""A linear layer whose three products are FP8.

    y  = x Wᵀ + b        fprop   x by rows of K, W by rows of K
    dx = dy W            dgrad   dy by rows of N, Wᵀ by rows of N
    dW = dyᵀ x           wgrad   dyᵀ and xᵀ by rows of M

`by` says which elements share a scale (ops/fp8/formulas.py):

             x        W        dy (dgrad)              dyᵀ, xᵀ (wgrad)
    tensor   tensor   tensor   tensor                  the same
    row      row      row      row, of dy / scale(W)   group
    block    group    block    group                   group

By rows W has one scale for each of its N rows, which dgrad sums over: dy is divided by them before it is quantized, so
W is quantized once for both. Scales of whole columns of x would need another pass over all tokens: wgrad takes groups.

Saved: xᵀ in FP8 (1 byte an element) with its scales, W and its scales; W's transposed copy is quantized in backward,
from W, unless both copies are given; if W's data is given alone, it is transposed, and the values of W are never read.
x and dy are read twice; once by tensor with scales that are given.

Sources: TransformerEngine's recipes; DeepSeek-V3, arXiv:2412.19437, section 3.3, for groups and blocks.
"""

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.ops.batch_invariance import refuse_invariant
from powertrain.ops.fp8.formulas import DTYPES, Copies, Quantized, padded
from powertrain.ops.fp8.operands import (
    GRAD,
    GRANULARITIES,
    INPUT,
    WEIGHT,
    By,
    Layer,
    Options,
    columns_outputs,
    dgrad,
    dgrad_fold,
    grad_operands,
    input_operands,
    parts,
    product,
    raise_op,
    role,
    weight_operand,
    weight_scale_outputs,
    wgrad,
)
from powertrain.ops.fp8.quantize import fp8_quantize
from powertrain.ops.shapes import acc_dtype, as_rows
from powertrain.runtime import checks
from powertrain.runtime.dispatch import Op, falls_back, is_traced, use_kernel, without_autocast
from powertrain.runtime.flops import Shape


def fp8_linear_ref(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What `fp8_linear` approximates: the product without quantization, in float32, or float64 for float64."""
    acc = acc_dtype(x.dtype)
    return F.linear(x.to(acc), weight.to(acc), None if bias is None else bias.to(acc)).to(x.dtype)


def quantized_weight(weight: Tensor, by: By, *, power_of_two: bool = True, scale: Tensor | None = None) -> Copies:
    """Both copies of a weight [N, K], which several calls of `fp8_linear` may share."""
    return fp8_quantize(
        weight, GRANULARITIES[by][WEIGHT], power_of_two=power_of_two, scale=scale, measure=scale is not None
    )


def _outputs(
    x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None, w: Tensor | None, w_inv: Tensor | None,
    wt: Tensor | None, wt_inv: Tensor | None, main_grad: Tensor | None, amaxes: Tensor | None, by: str,
    grad_format: str, power_of_two: bool, fast: bool, keep: bool, kernel: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """keep: gradients are enabled; backward needs the transposed x and the scales of W."""
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    amax = x.new_empty(0 if amaxes is None else 2, dtype=torch.float32)
    layer = Layer(weight, scales, w, w_inv, wt, wt_inv, main_grad, amaxes)
    return y, amax, *columns_outputs(x, by, keep), weight_scale_outputs(layer, by, keep)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None, w: Tensor | None, w_inv: Tensor | None,
    wt: Tensor | None, wt_inv: Tensor | None, main_grad: Tensor | None, amaxes: Tensor | None, by: str,
    grad_format: str, power_of_two: bool, fast: bool, keep: bool, kernel: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    layer = Layer(weight, scales, w, w_inv, wt, wt_inv, main_grad, amaxes)
    options = Options(by, grad_format, power_of_two, fast, kernel)
    lead, x = x.shape[:-1], as_rows(x)
    rows, columns = input_operands(x, role(scales, INPUT), options, keep, amaxes is not None)
    weights, w_scale, w_amax = weight_operand(layer, options, keep)
    y = product(rows.rows, weights, x.dtype, fast, options, bias)
    # no view to autograd, which would refuse to change it in place
    y = torch.ops.aten._unsafe_view(y, (*lead, weight.shape[0]))
    amax = x.new_empty(0, dtype=torch.float32) if amaxes is None else torch.cat([rows.amax, w_amax])
    return y, amax, columns.data, columns.scale_inv, w_scale


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, weight, _, scales, w, w_inv, wt, wt_inv, main_grad, amaxes, *ctx.options = inputs
    _, amax, x_t, x_inv, w_scale = output
    ctx.save_for_backward(weight, w if wt is None else None, w_inv, wt, wt_inv, x_t, x_inv, w_scale)
    # not saved as tensors of the graph: they may change before backward, which needs their values at that time
    ctx.scales, ctx.amaxes, ctx.main_grad = scales, amaxes, main_grad
    ctx.mark_non_differentiable(x_t, x_inv, w_scale, amax)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 16
    need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
    # once: recomputation unpacks them once
    weight, w, w_inv, wt, wt_inv, x_t, x_inv, w_scale = ctx.saved_tensors
    layer = Layer(weight, ctx.scales, w, w_inv, wt, wt_inv, ctx.main_grad, ctx.amaxes)
    by, grad_format, power_of_two, fast, _, kernel = ctx.options
    options = Options(by, grad_format, power_of_two, fast, kernel)
    lead, dy = dy.shape[:-1], as_rows(dy)
    dx = dw = db = None
    with without_autocast(dy.device):
        fold, measure = dgrad_fold(layer, w_scale, options.by), layer.amaxes is not None
        rows, columns, amax = grad_operands(dy, role(ctx.scales, GRAD), fold, options, need_dx, need_dw, measure)
        if measure:
            raise_op(layer.amaxes, amax, GRAD)
        if need_dx:
            dx = dgrad(rows, layer, w_scale, fold, options).view(*lead, weight.shape[1])
        if need_dw:
            dw = wgrad(columns, Quantized(x_t, x_inv), layer, options)
        if need_db:
            # of dy as it is: quantizing would lose digits for nothing
            db = dy.sum(0, dtype=acc_dtype(dy.dtype)).to(dy.dtype)
    return dx, dw, db, *(None,) * 13


def _flops(x: Shape, weight: Shape, **_: Any) -> int:
    return 2 * prod(x) * weight[0]


_linear_op = Op(
    "fp8_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? scales, Tensor? w, Tensor? w_inv, Tensor? wt, "
    "Tensor? wt_inv, Tensor? main_grad, Tensor? amaxes, str by, str grad_format, bool power_of_two, bool fast, "
    "bool keep, bool kernel) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _outputs,
    backward=_backward,
    setup_context=_setup_context,
    num_results=2,
    flops=_flops,
)


class _Plain(torch.autograd.Function):
    """The same functions outside the op."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        output = _forward(*args)
        _setup_context(ctx, args, output)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return _backward(ctx, *grads)


@falls_back("fp8_linear")
def fp8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    by: By = "tensor",
    grad_format: str | None = None,
    power_of_two: bool = True,
    fast: bool = True,
    scales: Tensor | None = None,
    amaxes: Tensor | None = None,
    weight_copies: Copies | None = None,
    main_grad: Tensor | None = None,
) -> Tensor:
    """`x Wᵀ + b` whose three products, forward and backward, are FP8.

    Shapes: K features in, N out, any leading dims.
        x              [..., K]  float32, float16 or bfloat16 (float64 on the CPU)
        weight         [N, K]    x's dtype; under autocast x, weight and bias are cast to its dtype, this being a matmul
        bias           [N]       x's dtype, or None
        by                       elements that share a scale: "tensor", "row" or "block"; see the module
        grad_format              format of dy: "e5m2" or "e4m3"; None: e5m2 with by="tensor", else e4m3
        power_of_two             scales are powers of two
        fast                     y accumulates in the tensor cores alone, about 14 bits on sm_90; gradients never do
        scales         [3]       float32, only with by="tensor" (delayed scaling): x, weight and dy are multiplied by
                                 these, not by scales of their own amax; 0: by the tensor's own scale
        amaxes         [3]       float32, only with by="tensor": in place, the maximum of each element and the largest
                                 magnitude of x, weight or dy; NaN if one of them is
        weight_copies            `quantized_weight(weight, by)`, shared by calls between which weight does not change;
                                 without data_t backward makes that, and the values of weight are not read
        main_grad      [N, K]    float32: backward adds the weight's gradient here, and weight.grad stays None
    Returns y [..., N] in x's dtype.
    Numerics: x, weight and dy are rounded to FP8 (e4m3: 3 mantissa bits, e5m2: 2) by the formulas of
        ops/fp8/formulas.py. Products of FP8 values are exact. Their sums are in the tensor cores' precision, added to
        float32 every 128 elements; with `fast` y is not. y, dx and dW are rounded once; y twice with a bias, by "row"
        or "block" and PyTorch's product. dbias is the float32 sum of dy. Deterministic, and the same on one device in
        eager, compiled, graphed and recomputed calls.
    Memory: saves x in one byte an element, the weight itself, and scales: for row and block a float32 for each 128
        elements. Of a frozen weight with `weight_copies` nothing of x.
    Where FP8 products are missing (CPU, before sm_89) the same formulas are computed in float32, slowly.
    Raises ValueError naming the argument, the expected value and the given one. Double backward and vmap are not
        implemented and say so.
    """
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and x.dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    grad_format = grad_format or ("e5m2" if by == "tensor" else "e4m3")
    _check(x, weight, bias, by, grad_format, scales, amaxes, weight_copies, main_grad)
    refuse_invariant("fp8_linear", "compute in bfloat16")
    served = use_kernel("fp8_linear", x)
    # x frozen: what only the weight's gradient needs is kept too, in one kernel. Weight frozen, with copies: nothing is
    needs_scales = x.requires_grad and weight_copies is None
    keep = torch.is_grad_enabled() and (weight.requires_grad or needs_scales)
    copies = parts(weight_copies)
    args = (
        x, weight, bias, scales, *copies, main_grad, amaxes, by, grad_format, power_of_two, fast, keep,
        served,
    )  # fmt: skip
    if served or is_traced(x):
        y, amax, *_ = _linear_op(*args)
    else:
        with without_autocast(x.device):
            y, amax, *_ = _Plain.apply(*args)
    if amaxes is not None:
        raise_op(amaxes, amax.detach() if amax.requires_grad else amax, INPUT)
    found: Tensor = y
    return found


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, by: str, grad_format: str, scales: Tensor | None,
    amaxes: Tensor | None, copies: Copies | None, main_grad: Tensor | None,
) -> None:  # fmt: skip
    op = "fp8_linear"
    checks.floating(op, x=x, weight=weight, bias=bias)
    checks.same_device(op, "x", x, weight=weight, bias=bias, scales=scales, amaxes=amaxes, main_grad=main_grad)
    checks.require(x.dim() > 0, op, "x", "have at least one dim", "a scalar")
    checks.shape(op, "weight", weight, (*weight.shape[:1], x.shape[-1]), "[N, last dim of x]")
    checks.shape(op, "bias", bias, weight.shape[:1], "rows of weight")
    checks.one_of(op, "by", by, tuple(GRANULARITIES))
    checks.one_of(op, "grad_format", grad_format, tuple(DTYPES))
    checks.shape(op, "main_grad", main_grad, weight.shape, "shape of weight")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype is not x.dtype:
            checks.fail(op, name, f"have x's dtype {checks.name(x.dtype)}", checks.name(tensor.dtype))
    for name, tensor in (("scales", scales), ("amaxes", amaxes)):
        checks.shape(op, name, tensor, (3,), "of x, weight and dy")
        if tensor is not None:
            checks.one_of(op, "by", by, ("tensor",))
            checks.require(tensor.dtype is torch.float32, op, name, "be float32", checks.name(tensor.dtype))
    if main_grad is not None:
        checks.require(main_grad.dtype is torch.float32, op, "main_grad", "be float32", checks.name(main_grad.dtype))
    if copies is not None:
        expected = (weight.shape[0], padded(weight.shape[1]))
        checks.shape(op, "weight_copies", copies.data, expected, "rows of weight, columns padded to 16")
