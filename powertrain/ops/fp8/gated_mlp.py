"""A gated MLP whose nine products are FP8, quantized inside the activation's kernels.

    gate = x Wgᵀ;  up = x Wuᵀ;  act = act(gate) * up;  y = act Wdᵀ
    dact = dy Wd;  dgate = dact * act'(gate) * up;  dup = dact * act(gate);  dx = dgate Wg + dup Wu
    dWd = dyᵀ act;  dWg = dgateᵀ x;  dWu = dupᵀ x

The bits are those of three `fp8_linear` with `gated_activation` between them, which read and write more:

    x              is quantized once, for gate and up; apart once for each
    act            by tensor in 16 bits nowhere: a kernel computes it from gate and up and writes both FP8 copies,
                   behind another that finds its largest magnitude, if no scale is given (ops/fp8/gated_quantize.py)
    dgate, dup     likewise

`by` says which elements share a scale, as in ops/fp8/linear.py.
Saved: xᵀ and actᵀ in FP8 with their scales, gate and up in 16 bits, the weights and their scales.
K features in, N inside, D out, M tokens: 4 M N K + 2 M D N operations forward, twice that backward.

Sources: ops/fp8/linear.py; ops/activations.py.
"""

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from powertrain.ops.activations import GATED, Gated, gated_activation_ref
from powertrain.ops.batch_invariance import refuse_invariant
from powertrain.ops.fp8.formulas import DTYPES, Copies, Quantized, padded
from powertrain.ops.fp8.gated_quantize import ACT_SCHEMA, OPTIONS_SCHEMA, Act, activated, gated_grads
from powertrain.ops.fp8.linear import fp8_linear_ref
from powertrain.ops.fp8.operands import (
    GRAD,
    GRANULARITIES,
    INPUT,
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
from powertrain.ops.shapes import as_rows
from powertrain.runtime import checks
from powertrain.runtime.dispatch import Op, falls_back, is_traced, use_kernel, without_autocast
from powertrain.runtime.flops import Shape

_NAMES = ("gate", "up", "down")
_FIELDS = len(Layer._fields)
_WEIGHTS = tuple(1 + index * _FIELDS for index in range(3))  # places of the weights in the op's arguments


class _Keep(NamedTuple):
    """What backward needs."""

    any: bool
    x: bool  # the transposed copy
    act: bool


def fp8_gated_mlp_ref(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, kind: Gated = "swiglu") -> Tensor:
    """What `fp8_gated_mlp` approximates: the products without quantization, each rounded to x's dtype."""
    act = gated_activation_ref(fp8_linear_ref(x, gate), kind, up=fp8_linear_ref(x, up))
    return fp8_linear_ref(act, down)


def _parsed(args: tuple[Any, ...]) -> tuple[Tensor, list[Layer], Options, Act, _Keep]:
    """Of the op's arguments."""
    layers = [Layer(*args[at : at + _FIELDS]) for at in _WEIGHTS]
    kind, limit, alpha, act_kernel, by, grad_format, power_of_two, fast, kernel, *keep = args[1 + 3 * _FIELDS :]
    options = Options(by, grad_format, power_of_two, fast, kernel)
    return args[0], layers, options, Act(kind, limit, alpha, act_kernel), _Keep(*keep)


def _outputs(*args: Any) -> tuple[Tensor, ...]:
    x, layers, options, _, keep = _parsed(args)
    lead, (N, D) = x.shape[:-1], (layers[0].weight.shape[0], layers[2].weight.shape[0])
    inner = x.new_empty((prod(lead), N))
    gate, up = (torch.empty_like(inner) if keep.any else x.new_empty(0) for _ in range(2))
    amax = x.new_empty(0 if layers[0].amaxes is None else 6, dtype=torch.float32)
    kept = (*columns_outputs(x, options.by, keep.x), gate, up, *columns_outputs(inner, options.by, keep.act))
    return x.new_empty((*lead, D)), amax, *kept, *(weight_scale_outputs(w, options.by, keep.any) for w in layers)


def _forward(*args: Any) -> tuple[Tensor, ...]:
    x, layers, options, act, keep = _parsed(args)
    lead, x = x.shape[:-1], as_rows(x)
    measure, scales, amaxes = layers[0].amaxes is not None, [], []
    # gate and up have the same x, so the scale of one serves both
    rows, x_columns = input_operands(x, role(layers[0].scales, INPUT), options, keep.x, measure)
    halves = []
    for layer in layers[:2]:
        weights, scale, amax = weight_operand(layer, options, keep.any)
        halves.append(product(rows.rows, weights, x.dtype, options.fast, options))
        scales.append(scale)
        amaxes += [rows.amax, amax]
    rows, act_columns = activated(halves[0], halves[1], role(layers[2].scales, INPUT), options, act, keep.act, measure)
    weights, scale, amax = weight_operand(layers[2], options, keep.any)
    y = product(rows.rows, weights, x.dtype, options.fast, options)
    scales.append(scale)
    amaxes += [rows.amax, amax]
    # no view to autograd, which would refuse to change it in place
    y = torch.ops.aten._unsafe_view(y, (*lead, y.shape[1]))
    measured = torch.cat(amaxes) if measure else x.new_empty(0, dtype=torch.float32)
    gate, up = halves if keep.any else (x.new_empty(0), x.new_empty(0))
    return y, measured, *x_columns, gate, up, *act_columns, *scales


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, layers, ctx.options, ctx.act, _ = _parsed(inputs)
    _, amax, *kept = output
    # of a weight whose transposed copy is given the other one is not needed
    weights = [(w.weight, w.w if w.wt is None else None, w.w_inv, w.wt, w.wt_inv) for w in layers]
    ctx.save_for_backward(*(tensor for weight in weights for tensor in weight), *kept)
    # not saved as tensors of the graph: they may change before backward, which needs their values at that time
    ctx.scales, ctx.amaxes, ctx.main_grads = zip(*((w.scales, w.amaxes, w.main_grad) for w in layers), strict=True)
    ctx.mark_non_differentiable(amax, *kept)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    grads: list[Tensor | None] = [None] * (1 + 3 * _FIELDS + 12)
    if dy is None:
        return tuple(grads)
    options = ctx.options
    # once: recomputation unpacks them once
    saved = ctx.saved_tensors
    x_t, x_inv, gate, up, act_t, act_inv, *w_scales = saved[15:]
    layers = []
    for i, (scales, amaxes, main_grad) in enumerate(zip(ctx.scales, ctx.amaxes, ctx.main_grads, strict=True)):
        weight, w, w_inv, wt, wt_inv = saved[5 * i : 5 * i + 5]
        layers.append(Layer(weight, scales, w, w_inv, wt, wt_inv, main_grad, amaxes))
    need_x, *need = (ctx.needs_input_grad[at] for at in (0, *_WEIGHTS))
    lead, dy = dy.shape[:-1], as_rows(dy)
    with without_autocast(dy.device):
        down, inner = layers[2], need_x or need[0] or need[1]
        fold = dgrad_fold(down, w_scales[2], options.by)
        measure = down.amaxes is not None
        rows, columns, amax = grad_operands(dy, role(down.scales, GRAD), fold, options, inner, need[2], measure)
        if measure:
            raise_op(down.amaxes, amax, GRAD)
        if need[2]:
            grads[_WEIGHTS[2]] = wgrad(columns, Quantized(act_t, act_inv), down, options)
        if inner:
            folds = [dgrad_fold(layers[i], w_scales[i], options.by) for i in range(2)]
            halves = gated_grads(
                dgrad(rows, down, w_scales[2], fold, options), gate, up, [role(w.scales, GRAD) for w in layers[:2]],
                folds, ctx.act, options, (need_x, need[0], need[1]), measure,
            )  # fmt: skip
            dx, i = None, 0
            # enumerate would keep the last ones while the next are made
            for rows, columns, amax in halves:
                # the gradient of a layer that nobody wants is not measured: apart, its backward would not run
                if measure and (need_x or need[i]):
                    raise_op(layers[i].amaxes, amax, GRAD)
                if need_x:
                    part = dgrad(rows, layers[i], w_scales[i], folds[i], options)
                    dx = part if dx is None else dx.add_(part)
                if need[i]:
                    grads[_WEIGHTS[i]] = wgrad(columns, Quantized(x_t, x_inv), layers[i], options)
                del rows, columns
                i += 1
            grads[0] = None if dx is None else dx.view(*lead, dx.shape[1])
    return tuple(grads)


def _flops(x: Shape, gate: Shape, down: Shape, **_: Any) -> int:
    return 4 * prod(x) * gate[0] + 2 * prod(x[:-1]) * down[0] * down[1]


def _layer_schema(name: str) -> str:
    fields = ", ".join(f"Tensor? {name}_{field}" for field in Layer._fields[1:])
    return f"Tensor {name}, {fields}"


# not replayed: PyTorch's products are inside
_mlp_op = Op(
    f"fp8_gated_mlp(Tensor x, {', '.join(map(_layer_schema, _NAMES))}, {ACT_SCHEMA}, {OPTIONS_SCHEMA}, "
    f"bool keep, bool keep_x, bool keep_act) -> ({', '.join(['Tensor'] * 11)})",
    _forward,
    _outputs,
    backward=_backward,
    setup_context=_setup_context,
    num_results=2,
    replays=False,
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


class FP8Weight(NamedTuple):
    """One of the layers of `fp8_gated_mlp`: its weight, and what `fp8_linear` takes under the same names."""

    weight: Tensor
    scales: Tensor | None = None
    amaxes: Tensor | None = None
    weight_copies: Copies | None = None
    main_grad: Tensor | None = None


@falls_back("fp8_gated_mlp")
def fp8_gated_mlp(
    x: Tensor,
    gate: Tensor | FP8Weight,
    up: Tensor | FP8Weight,
    down: Tensor | FP8Weight,
    kind: Gated = "swiglu",
    *,
    by: By = "tensor",
    grad_format: str | None = None,
    power_of_two: bool = True,
    fast: bool = True,
    limit: float = 7.0,
    alpha: float = 1.702,
) -> Tensor:
    """`(act(x Wgᵀ) * (x Wuᵀ)) Wdᵀ` whose nine products, forward and backward, are FP8.

    Shapes: K features in, N inside, D out, any leading dims.
        x         [..., K]  float32, float16 or bfloat16 (float64 on the CPU)
        gate, up  [N, K]    weights in x's dtype, or `FP8Weight`s, whose scales, amaxes, weight_copies and main_grad are
                            as of `fp8_linear`; scales of all three or of none, likewise amaxes
        down      [D, N]    likewise
        kind                of `gated_activation`; limit and alpha of clamped_swiglu
        by, grad_format, power_of_two, fast    as of `fp8_linear`, for all three
    Under autocast x and the weights are cast to its dtype, these being matmuls.
    Returns y [..., D] in x's dtype.
    Numerics: to the bit those of `fp8_linear`, `gated_activation` and `fp8_linear` on the same device, if the scale of
        x is the same for gate and up: gate's is taken for both. dx is the sum of two products, each rounded to x's
        dtype; autocast casts that sum, where it casts each product apart. Deterministic.
    Memory: saves x and act in one byte an element, gate and up in x's dtype, the weights, and scales: for row and block
        a float32 for each 128 elements. Of x nothing where gate and up are frozen, of act nothing where down is.
    By tensor, in 16 bits and on GPUs with FP8, act, dgate and dup are quantized by the kernels that compute them, which
        are compared with those of `gated_activation` and `fp8_quantize` before their first use on a device; in other
        calls by kernels of their own. Where FP8 products are missing the same formulas are computed in float32, slowly.
    Raises ValueError naming the argument, the expected value and the given one. Double backward and vmap are not
        implemented and say so.
    """
    layers = [layer if isinstance(layer, FP8Weight) else FP8Weight(layer) for layer in (gate, up, down)]
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and x.dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(device)
        x, layers = x.to(dtype), [layer._replace(weight=layer.weight.to(dtype)) for layer in layers]
    grad_format = grad_format or ("e5m2" if by == "tensor" else "e4m3")
    _check(x, layers, kind, by, grad_format)
    refuse_invariant("fp8_gated_mlp", "compute in bfloat16")
    served = use_kernel("fp8_gated_mlp", x) and use_kernel("fp8_linear", x)
    enabled = torch.is_grad_enabled()
    trains = [enabled and layer.weight.requires_grad for layer in layers]
    keep = (enabled and x.requires_grad) or any(trains), trains[0] or trains[1], trains[2]
    act = (GATED[kind], float(limit), float(alpha), served and use_kernel("gated_activation", x))
    weights = [
        value
        for layer in layers
        for value in (layer.weight, layer.scales, *parts(layer.weight_copies), layer.main_grad, layer.amaxes)
    ]
    args = (x, *weights, *act, by, grad_format, power_of_two, fast, served, *keep)
    if served or is_traced(x):
        y, amax, *_ = _mlp_op(*args)
    else:
        with without_autocast(x.device):
            y, amax, *_ = _Plain.apply(*args)
    for i, layer in enumerate(layers):
        if layer.amaxes is not None:
            raise_op(layer.amaxes, amax.detach()[2 * i : 2 * i + 2], INPUT)
    found: Tensor = y
    return found


def _check(x: Tensor, layers: list[FP8Weight], kind: str, by: str, grad_format: str) -> None:
    op = "fp8_gated_mlp"
    checks.one_of(op, "kind", kind, tuple(GATED))
    checks.one_of(op, "by", by, tuple(GRANULARITIES))
    checks.one_of(op, "grad_format", grad_format, tuple(DTYPES))
    checks.require(x.dim() > 0, op, "x", "have at least one dim", "a scalar")
    checks.floating(op, x=x, **{name: layer.weight for name, layer in zip(_NAMES, layers, strict=True)})
    rows = layers[0].weight.shape[:1]
    wanted = (
        ((*rows, x.shape[-1]), "[N, last dim of x]"),
        ((*rows, x.shape[-1]), "as gate"),
        ((*layers[2].weight.shape[:1], *rows), "[D, rows of gate]"),
    )
    for name, layer, (shape, why) in zip(_NAMES, layers, wanted, strict=True):
        checks.shape(op, name, layer.weight, shape, why)
        if layer.weight.dtype is not x.dtype:
            checks.fail(op, name, f"have x's dtype {checks.name(x.dtype)}", checks.name(layer.weight.dtype))
        _check_layer(op, name, layer, x, by)
    for field in ("scales", "amaxes"):
        given = [name for name, layer in zip(_NAMES, layers, strict=True) if getattr(layer, field) is not None]
        checks.require(len(given) in (0, 3), op, field, "be given for gate, up and down or for none", ", ".join(given))


def _check_layer(op: str, name: str, layer: FP8Weight, x: Tensor, by: str) -> None:
    fields = {f"{name}'s {field}": getattr(layer, field) for field in ("scales", "amaxes", "main_grad")}
    checks.same_device(op, "x", x, **{name: layer.weight}, **fields)
    for field, tensor in fields.items():
        is_grad = field.endswith("main_grad")
        shape = tuple(layer.weight.shape) if is_grad else (3,)
        checks.shape(op, field, tensor, shape, f"shape of {name}" if is_grad else "of input, weight and gradient")
        if tensor is not None:
            checks.require(tensor.dtype is torch.float32, op, field, "be float32", checks.name(tensor.dtype))
            if not is_grad:
                checks.one_of(op, "by", by, ("tensor",))
    if layer.weight_copies is not None:
        N, K = layer.weight.shape
        shape = (N, padded(K))
        checks.shape(op, f"{name}'s weight_copies", layer.weight_copies.data, shape, "rows, columns padded to 16")
