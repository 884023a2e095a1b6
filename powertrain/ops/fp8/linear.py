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
x and dy are read twice; once by tensor with scales that are given, and with `last` in most calls (ops/fp8/current.py).

Sources: TransformerEngine's recipes; DeepSeek-V3, arXiv:2412.19437, section 3.3, for groups and blocks.
"""

from math import prod
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.ops.batch_invariance import refuse_invariant
from powertrain.ops.fp8.current import Current, fp8_quantize_current, quantize_current_op, write_state_op
from powertrain.ops.fp8.formulas import DTYPES, GROUP, Copies, Quantized, padded
from powertrain.ops.fp8.gemm import fp8_gemm_into_op, fp8_gemm_op
from powertrain.ops.fp8.plain import plain_function
from powertrain.ops.fp8.quantize import block_scales, fp8_quantize, quantize_op
from powertrain.ops.fp8.transpose import transpose_op
from powertrain.ops.shapes import acc_dtype, as_rows, cdiv
from powertrain.runtime import checks
from powertrain.runtime.dispatch import Op, cast_by_autocast, falls_back, is_traced, use_kernel, without_autocast
from powertrain.runtime.flops import Shape
from powertrain.runtime.nodes import refuse_graph

By = Literal["tensor", "row", "block"]
# by -> granularities of x, W, dy for dgrad, and of dyᵀ and xᵀ
GRANULARITIES = {
    "tensor": ("tensor", "tensor", "tensor", "tensor"),
    "row": ("row", "row", "row", "group"),
    "block": ("group", "block", "group", "group"),
}
_INPUT, _WEIGHT, _GRAD = range(3)  # roles: places in `scales`, `amaxes` and `last`


def fp8_linear_ref(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The function behind `fp8_linear`: the product without quantization, in float32, or float64 for float64."""
    acc = acc_dtype(x.dtype)
    return F.linear(x.to(acc), weight.to(acc), None if bias is None else bias.to(acc)).to(x.dtype)


def quantized_weight(
    weight: Tensor, by: By, *, power_of_two: bool = True, scale: Tensor | None = None, last: Tensor | None = None
) -> Copies:
    """Both copies of a weight [N, K], which several calls of `fp8_linear` may share; last [3, 4] as of `fp8_linear`."""
    if last is not None:
        return fp8_quantize_current(weight, last[_WEIGHT])
    return fp8_quantize(
        weight, GRANULARITIES[by][_WEIGHT], power_of_two=power_of_two, scale=scale, measure=scale is not None
    )


def _quantized(x: Tensor, by: str, format: str, power_of_two: bool, kernel: bool, **options: Any) -> Copies:
    scale, fold = options.get("scale"), options.get("fold")
    rows, columns, measure = (options.get(name, False) for name in ("rows", "columns", "measure"))
    return Copies(*quantize_op(x, scale, fold, None, by, format, power_of_two, rows, columns, measure, kernel))


def _product(
    a: Quantized, b: Quantized, dtype: torch.dtype, fast: bool, kernel: bool, bias: Tensor | None = None
) -> Tensor:
    product: Tensor = fp8_gemm_op(*a, *b, bias, dtype, fast, None, kernel)
    return product


def _role(scales: Tensor | None, role: int) -> Tensor | None:
    return None if scales is None else scales[role : role + 1]


def _noted(
    x: Tensor, role: int, by: str, format: str, power_of_two: bool, kernel: bool, scales: Tensor | None,
    amaxes: Tensor | None, last: Tensor | None, *, rows: bool, columns: bool = False,
) -> tuple[Copies, Tensor]:  # fmt: skip
    """The copies of one operand, and statistics noted of it: its amax [1], its next state [1, 4], or nothing [0]."""
    if last is not None:
        made = Current(*quantize_current_op(x, last[role], format, rows, columns, kernel))
        return made.copies, made.state[None]
    scale, measure = _role(scales, role), amaxes is not None
    copies = _quantized(x, by, format, power_of_two, kernel, scale=scale, rows=rows, columns=columns, measure=measure)
    return copies, copies.amax


def _outputs(
    x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None, w: Tensor | None, w_inv: Tensor | None,
    wt: Tensor | None, wt_inv: Tensor | None, main_grad: Tensor | None, amaxes: Tensor | None, last: Tensor | None,
    by: str, grad_format: str, power_of_two: bool, fast: bool, keep: bool, kernel: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """keep: gradients are enabled; backward needs the transposed x and the scales of W."""
    (*lead, K), N = x.shape, weight.shape[0]
    M = prod(lead)
    y = x.new_empty((*lead, N))
    x_t = x.new_empty((K, padded(M)) if keep else 0, dtype=DTYPES["e4m3"])
    none = x.new_empty(0, dtype=torch.float32)
    groups = none.new_empty((cdiv(M, GROUP), K)).T
    x_inv = (none.new_empty(1) if by == "tensor" else groups) if keep else none
    w_scale = none.new_empty({"tensor": 1, "row": N}.get(by, 0) if keep and w is None else 0)
    count = 1 if w is not None else 2
    notes = none.new_empty(0 if amaxes is None else count) if last is None else last.new_empty((count, 4))
    return y, notes, x_t, x_inv, w_scale


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None, w: Tensor | None, w_inv: Tensor | None,
    wt: Tensor | None, wt_inv: Tensor | None, main_grad: Tensor | None, amaxes: Tensor | None, last: Tensor | None,
    by: str, grad_format: str, power_of_two: bool, fast: bool, keep: bool, kernel: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    in_x, in_w, _, in_wgrad = GRANULARITIES[by]
    options, statistics = ("e4m3", power_of_two, kernel), (scales, amaxes, last)
    lead, x = x.shape[:-1], as_rows(x)
    none = x.new_empty(0, dtype=torch.float32)
    # one pass over x for both copies, where their scales are the same
    both = keep and in_x == in_wgrad
    ours, notes = _noted(x, _INPUT, in_x, *options, *statistics, rows=True, columns=both)
    transposed = ours if both or not keep else _quantized(x, in_wgrad, *options, columns=True)
    if w is not None and w_inv is not None:
        weights, w_scale = Quantized(w, w_inv), none
    else:
        made, note = _noted(weight, _WEIGHT, in_w, *options, *statistics, rows=True)
        weights, w_scale = made.rows, made.scale if keep else none
        notes = torch.cat([notes, note]) if notes.numel() else notes
    y = _product(ours.rows, weights, x.dtype, fast, kernel, bias)
    # no view to autograd, which would refuse to change it in place
    y = torch.ops.aten._unsafe_view(y, (*lead, weight.shape[0]))
    columns = transposed.columns if keep else Quantized(x.new_empty(0, dtype=DTYPES["e4m3"]), none)
    return y, notes, columns.data, columns.scale_inv, w_scale


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, weight, _, scales, w, w_inv, wt, wt_inv, main_grad, amaxes, last, *ctx.options = inputs
    _, notes, x_t, x_inv, w_scale = output
    ctx.save_for_backward(weight, w if wt is None else None, w_inv, wt, wt_inv, x_t, x_inv, w_scale)
    # not saved as tensors of the graph: they may change before backward, which needs their values at that time
    ctx.scales, ctx.amaxes, ctx.last, ctx.main_grad = scales, amaxes, last, main_grad
    ctx.mark_non_differentiable(x_t, x_inv, w_scale, notes)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 17
    # the saved tensors are rounded copies: a second derivative by the inputs would leave out a term
    refuse_graph(ctx, "fp8_linear")
    need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
    # once: recomputation unpacks them once
    weight, w, w_inv, wt, wt_inv, x_t, x_inv, w_scale = ctx.saved_tensors
    kernel, lead, dy = ctx.options[-1], dy.shape[:-1], as_rows(dy)
    dx = dw = db = None
    with without_autocast(dy.device):
        fold = None
        if ctx.options[0] == "row":
            # a row's scale of W is a column's of Wᵀ, along the sum of dgrad: no product takes it there, so dy takes it
            fold = w_scale.reciprocal() if w_inv is None else w_inv
        rows, columns = _grads(ctx, dy, need_dx, need_dw, fold)
        if need_dx:
            if wt is not None:
                transposed = Quantized(wt, wt_inv)
            elif w is not None:
                transposed = _transposed_data(w, w_inv, weight.shape[1], kernel)
            else:
                transposed = _transposed(ctx, weight, w_scale)
            if fold is not None:
                # W's are in dy
                transposed = transposed._replace(scale_inv=fold.new_ones(weight.shape[1]))
            dx = _product(rows, transposed, weight.dtype, False, kernel).view(*lead, weight.shape[1])
        if need_dw and ctx.main_grad is None:
            # never with fast accumulation: gradients keep float32 sums
            dw = _product(columns, Quantized(x_t, x_inv), weight.dtype, False, kernel)
        elif need_dw:
            fp8_gemm_into_op(*columns, x_t, x_inv, None, ctx.main_grad, True, False, None, kernel)
        if need_db:
            # of dy as it is: quantizing would lose digits for nothing
            db = dy.sum(0, dtype=acc_dtype(dy.dtype)).to(dy.dtype)
    return dx, dw, db, *(None,) * 14


def _grads(ctx: Any, dy: Tensor, need_dx: bool, need_dw: bool, fold: Tensor | None) -> tuple[Quantized, Quantized]:
    """dy by rows for dgrad, and its transposed copy for wgrad."""
    by, grad_format, power_of_two, *_, kernel = ctx.options
    _, _, in_dgrad, in_wgrad = GRANULARITIES[by]
    options = (grad_format, power_of_two, kernel)
    if in_dgrad == in_wgrad:
        # a compiled backward that writes to `last` would refuse to run after another forward or backward has
        last = None if is_traced(dy) else ctx.last
        both, note = _noted(
            dy, _GRAD, in_dgrad, *options, ctx.scales, ctx.amaxes, last, rows=need_dx, columns=need_dw
        )  # fmt: skip
        _write(ctx.amaxes, last, note, _GRAD)
        return both.rows, both.columns
    none = dy.new_empty(0, dtype=torch.float32)
    rows = columns = Quantized(none, none)
    if need_dx:
        rows = _quantized(dy, in_dgrad, *options, fold=fold, rows=True).rows
    if need_dw:
        columns = _quantized(dy, in_wgrad, *options, columns=True).columns
    return rows, columns


def _transposed(ctx: Any, weight: Tensor, w_scale: Tensor) -> Quantized:
    """Wᵀ, by the scales of the forward."""
    by, _, power_of_two, *_, kernel = ctx.options
    # a block's scale is the same for both copies, and costs less to find again than to save
    scale = None if by == "block" else w_scale
    return _quantized(
        weight, GRANULARITIES[by][_WEIGHT], "e4m3", power_of_two, kernel, scale=scale, columns=True
    ).columns


def _transposed_data(w: Tensor, w_inv: Tensor, columns: int, kernel: bool) -> Quantized:
    """Wᵀ, of W that is quantized already: its bytes, and by block its scales, transposed."""
    if w_inv.dim() == 2:
        w_inv = block_scales(w, columns, w.shape[0]).copy_(w_inv.T)
    return Quantized(transpose_op(w, columns, kernel), w_inv)


def _write(amaxes: Tensor | None, last: Tensor | None, notes: Tensor, first: int) -> None:
    """The statistics that quantizations noted into the buffers that the call was given, from role `first` on."""
    if amaxes is not None:
        _raise_op(amaxes, notes, first)
    elif last is not None:
        write_state_op(last, notes, first)


def _raise(amaxes: Tensor, amax: Tensor, first: int) -> None:
    part = amaxes[first : first + amax.shape[0]]
    torch.maximum(part, amax, out=part)


def _flops(x: Shape, weight: Shape, **_: Any) -> int:
    return 2 * prod(x) * weight[0]


_raise_op = Op("fp8_raise(Tensor(a!) amaxes, Tensor amax, int first) -> ()", _raise, lambda amaxes, amax, first: None)
_linear_op = Op(
    "fp8_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? scales, Tensor? w, Tensor? w_inv, Tensor? wt, "
    "Tensor? wt_inv, Tensor? main_grad, Tensor? amaxes, Tensor? last, str by, str grad_format, bool power_of_two, "
    "bool fast, bool keep, bool kernel) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _outputs,
    backward=_backward,
    setup_context=_setup_context,
    num_results=2,
    flops=_flops,
)


_Plain = plain_function("fp8_linear", _forward, _setup_context, _backward)


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
    last: Tensor | None = None,
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
        last           [3, 4]    int32 of `new_states(3, device)`, only with by="tensor" and scales that are powers of
                                 two: in place, the scales of the last call, which save a read of x, weight and dy where
                                 the exponents are the same now. Results do not depend on them
        weight_copies            `quantized_weight(weight, by)`, shared by calls between which weight does not change;
                                 without data_t backward makes that, and the values of weight are not read
        main_grad      [N, K]    float32, contiguous rows: backward adds the weight's gradient here, and weight.grad
                                 stays None
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
    x, weight, bias = cast_by_autocast(x, weight, bias)
    grad_format = grad_format or ("e5m2" if by == "tensor" else "e4m3")
    _check(x, weight, bias, by, grad_format, scales, amaxes, weight_copies, main_grad)
    _check_last(x, last, by, power_of_two, scales, amaxes)
    refuse_invariant("fp8_linear", "compute in bfloat16")
    served = use_kernel("fp8_linear", x)
    # x frozen: copies for the weight's gradient are made in the same kernel. Weight frozen, with copies: nothing is
    needs_scales = x.requires_grad and weight_copies is None
    keep = torch.is_grad_enabled() and (weight.requires_grad or needs_scales)
    copies = _parts(weight_copies)
    args = (
        x, weight, bias, scales, *copies, main_grad, amaxes, last, by, grad_format, power_of_two, fast, keep,
        served,
    )  # fmt: skip
    if served or is_traced(x):
        y, notes, *_ = _linear_op(*args)
    else:
        with without_autocast(x.device):
            y, notes, *_ = _Plain.apply(*args)
    _write(amaxes, last, notes.detach() if notes.requires_grad else notes, _INPUT)
    out: Tensor = y
    return out


def _parts(copies: Copies | None) -> tuple[Tensor | None, ...]:
    """(w, w_inv, wt, wt_inv); the transposed ones None where there is no such copy."""
    if copies is None:
        return (None,) * 4
    return (*copies.rows, *copies.columns) if copies.data_t.dim() == 2 else (*copies.rows, None, None)


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
    checks.same_dtype(op, "x", x, weight=weight, bias=bias)
    for name, tensor in (("scales", scales), ("amaxes", amaxes)):
        checks.shape(op, name, tensor, (3,), "of x, weight and dy")
        if tensor is not None:
            checks.one_of(op, "by", by, ("tensor",))
            checks.require(tensor.dtype is torch.float32, op, name, "be float32", checks.name(tensor.dtype))
    if main_grad is not None:
        checks.require(main_grad.dtype is torch.float32, op, "main_grad", "be float32", checks.name(main_grad.dtype))
        rows_whole = main_grad.stride(1) == 1 or main_grad.shape[1] <= 1
        checks.require(rows_whole, op, "main_grad", "have contiguous rows", f"strides {main_grad.stride()}")
    if copies is not None:
        expected = (weight.shape[0], padded(weight.shape[1]))
        checks.shape(op, "weight_copies", copies.data, expected, "rows of weight, columns padded to 16")


def _check_last(
    x: Tensor, last: Tensor | None, by: str, power_of_two: bool, scales: Tensor | None, amaxes: Tensor | None
) -> None:
    if last is None:
        return
    op = "fp8_linear"
    checks.same_device(op, "x", x, last=last)
    checks.shape(op, "last", last, (3, 4), "of x, weight and dy")
    checks.require(last.dtype is torch.int32, op, "last", "be int32", checks.name(last.dtype))
    checks.require(by == "tensor", op, "last", "be None unless by is 'tensor'", f"a tensor with by {by!r}")
    checks.require(power_of_two, op, "last", "be None unless scales are powers of two", "a tensor")
    given = "scales" if scales is not None else "amaxes" if amaxes is not None else None
    checks.require(given is None, op, "last", "be None with delayed scaling", f"a tensor beside {given}")
