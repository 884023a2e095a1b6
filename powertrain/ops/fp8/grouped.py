"""Grouped FP8 products: consecutive groups of rows, each times its own weight; the groups' ends are on the device.

    y[r]  = x[r] W[e]ᵀ                                fprop, rows r of group e;  0 for rows of no group
    dx[r] = dy[r] W[e]                                dgrad
    dW[e] = sum over the rows r of group e of dy[r]ᵀ x[r]    wgrad

`by` says which elements share a scale (ops/fp8/formulas.py):

             x        W        dy (dgrad)                      dyᵀ, xᵀ (wgrad)
    row      row      row      row, of dy / scale(W[e])        group
    block    group    block    group                           group

The groups of wgrad are 128 consecutive rows, the first a multiple of 128 wherever the groups of rows begin: at their
ends a product leaves the others' rows out, and scales are shared with them. So no row is padded and no size is read on
the host. By row W's scales are folded into dy, as in ops/fp8/linear.py.

Saved: xᵀ in FP8 with its scales, the weight and its row scales; Wᵀ is quantized in backward.
2 T N K operations for each of the three.

Backends: `torch`, torch._scaled_grouped_mm, for fprop and dgrad by row where a small product shows that this build and
device have it; `triton`, ours; `emulated` on devices without FP8: values times scales in float32.

Sources: ops/grouped_gemm.py; DeepSeek-V3, arXiv:2412.19437, section 3.3.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.ops.batch_invariance import refuse_invariant
from powertrain.ops.fp8.formulas import ALIGN, DTYPES, GROUP, Copies, Quantized, dequantized, padded, spread
from powertrain.ops.fp8.grouped_kernels import Stacked, launch_product, launch_wgrad
from powertrain.ops.fp8.plain import plain_function
from powertrain.ops.fp8.quantize import kernels_serve, quantize_op
from powertrain.ops.grouped_gemm import check_groups, grouped_gemm, grouped_gemm_ref, grouped_gemm_wgrad
from powertrain.ops.shapes import as_rows, cdiv
from powertrain.runtime import checks, recording, tracing
from powertrain.runtime.dispatch import Op, cast_by_autocast, falls_back, is_traced, use_kernel, without_autocast
from powertrain.runtime.flops import Shape
from powertrain.runtime.nodes import refuse_graph
from powertrain.runtime.target import Target

GroupedBy = Literal["row", "block"]
_BY_ROLE = {"row": ("row", "row", "row"), "block": ("group", "block", "group")}  # of x, W, dy for dgrad


def fp8_grouped_gemm_ref(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """What `fp8_grouped_gemm` approximates: the product without quantization."""
    return grouped_gemm_ref(x, weight, offsets)


def _quantized(
    x: Tensor, by: str, format: str, power_of_two: bool, kernel: bool, *, scale: Tensor | None = None,
    fold: Tensor | None = None, offsets: Tensor | None = None, columns: bool = False,
) -> Copies:  # fmt: skip
    return Copies(*quantize_op(x, scale, fold, offsets, by, format, power_of_two, not columns, columns, False, kernel))


def _matrix(weight: Tensor, by: str) -> Tensor:
    """The groups' weights [E, N, K] one below the other. N is padded with zeros: so no block is two groups', and rows
    of Wᵀ are whole 16 bytes, as dy's are."""
    multiple = GROUP if by == "block" else ALIGN
    if weight.shape[1] % multiple:
        weight = F.pad(weight, (0, 0, 0, -weight.shape[1] % multiple))
    return weight.reshape(weight.shape[0] * weight.shape[1], weight.shape[2])


def _weights(weight: Tensor, by: str, power_of_two: bool, kernel: bool) -> tuple[Stacked, Tensor]:
    """For fprop, and the scales of rows."""
    matrix = _matrix(weight, by)
    made = _quantized(matrix, _BY_ROLE[by][1], "e4m3", power_of_two, kernel)
    return Stacked(made.data, made.scale_inv, matrix.shape[0] // max(1, weight.shape[0]), 0), made.scale


def _weights_t(weight: Tensor, scale: Tensor, by: str, power_of_two: bool, kernel: bool) -> Stacked:
    """For dgrad: the groups' Wᵀ side by side. By row W's scales are in dy."""
    matrix = _matrix(weight, by)
    given = scale if by == "row" else None
    made = _quantized(matrix, _BY_ROLE[by][1], "e4m3", power_of_two, kernel, scale=given, columns=True)
    step = matrix.shape[0] // max(1, weight.shape[0])
    return Stacked(made.data_t, None if by == "row" else made.scale_inv_t, 0, step)


def why_not_torch(a: Quantized, b: Stacked, depth: int, width: int, out_dtype: torch.dtype) -> str | None:
    """Why torch._scaled_grouped_mm cannot compute a product on a GPU with FP8, or None."""
    if a.scale_inv.dim() != 1:
        return "it has no product of scales by group and by block"
    if depth % 16 or width % 16:
        return f"N and K must be multiples of 16, are {width} and {depth}"
    if out_dtype is not torch.bfloat16:
        return f"its results are bfloat16, not {checks.name(out_dtype)}"
    target = Target.of(a.data.device)
    if target.arch != 90:
        return f"it has not been tried on sm_{target.arch}"
    if a.data.is_meta or recording.state.recording is not None:
        return None if a.data.dtype is DTYPES["e4m3"] else "its operands are e4m3"
    key = (a.data.device.index, a.data.dtype)
    if key not in _probes:
        if torch.cuda.is_current_stream_capturing():
            return "it has not been tried on this device, and cannot while a CUDA graph is captured"
        _probes[key] = _probe(a.data.device, a.data.dtype)
    return _probes[key]


_probes: dict[Any, str | None] = {}


def _probe(device: torch.device, dtype: torch.dtype) -> str | None:
    """Try one product of both layouts, with groups of 5, 0 and 130 rows and 9 rows of none; its values are exact."""
    at = torch.arange(3 * 64 * 144, device=device)
    a = (at[: 144 * 64].view(144, 64) % 7 - 3).float()
    scales = torch.exp2((at[:144] % 3).float())
    offsets = torch.tensor([5, 5, 135], dtype=torch.int32, device=device)
    q = Quantized(a.to(dtype), scales)
    w = (at[: 3 * 48 * 64].view(3, 48, 64) % 5 - 2).float()
    w_scales = torch.exp2((at[: 3 * 48] % 3).float())
    stacked = w.reshape(144, 64).to(DTYPES["e4m3"])
    side = w.permute(2, 0, 1).reshape(64, 144).contiguous()
    try:
        result = _torch(q, Stacked(stacked, w_scales, 48, 0), offsets, 48)
        right = grouped_gemm_ref(a * scales[:, None], w * w_scales.view(3, 48, 1), offsets)
        back = Quantized(a[:, :48].contiguous().to(dtype), scales)
        found_t = _torch(back, Stacked(side.to(DTYPES["e4m3"]), None, 0, 48), offsets, 64)
        right_t = grouped_gemm_ref(a[:, :48] * scales[:, None], w.mT, offsets)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        return str(error).partition("\n")[0]
    exact = torch.equal(result, right.to(result.dtype)) and torch.equal(found_t, right_t.to(result.dtype))
    return None if exact else "its result of a small product is wrong"


def _torch(a: Quantized, b: Stacked, offsets: Tensor, width: int) -> Tensor:
    E = offsets.shape[0]
    if b.col_step:
        # [depth, C] of each group, whose memory is along the depth
        weights = b.data.as_strided((E, b.col_step, width), (b.col_step, 1, b.data.stride(0)))
    else:
        weights = b.data.view(E, b.row_step, -1).mT
    ones = a.scale_inv.new_ones((E, width)) if b.scale_inv is None else b.scale_inv.view(E, width)
    y = torch._scaled_grouped_mm(a.data, weights, a.scale_inv, ones, offs=offsets, out_dtype=torch.bfloat16)
    # rows of no group are not written
    rows = torch.arange(y.shape[0], device=y.device, dtype=torch.int32)[:, None]
    return torch.where(rows < offsets[-1], y, 0.0).to(y.dtype)


def _product_outputs(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor | None, offsets: Tensor, row_step: int, col_step: int,
    depth: int, width: int, dtype: torch.dtype, kernel: bool,
) -> Tensor:  # fmt: skip
    return a.new_empty((a.shape[0], width), dtype=dtype)


def _product(
    a_data: Tensor, a_scale: Tensor, b_data: Tensor, b_scale: Tensor | None, offsets: Tensor, row_step: int,
    col_step: int, depth: int, width: int, dtype: torch.dtype, kernel: bool,
) -> Tensor:  # fmt: skip
    """Rows of a times their group's b: [T, width] in dtype."""
    a, b = Quantized(a_data, a_scale), Stacked(b_data, b_scale, row_step, col_step)
    T, E = a.data.shape[0], offsets.shape[0]
    if not (T and E and width and depth):
        return a.data.new_zeros((T, width), dtype=dtype)
    if not kernel or not kernels_serve(a.data):
        return _emulated(a, b, offsets, depth, width).to(dtype)
    reason = why_not_torch(a, b, depth, width, dtype) if a.data.device.type != "cpu" else "the interpreter runs ours"
    if tracing.first(("fp8_grouped_gemm", T, width, depth, b.col_step > 0, reason)):
        backend = f"triton; not torch: {reason}" if reason else "torch"
        sizes = f"T{T} E{E} N{width} K{depth} {'dx' if b.col_step else 'y'}"
        tracing.event("dispatch", f"fp8_grouped_gemm {sizes}: {backend}", op="fp8_grouped_gemm")
    if reason is None:
        with without_autocast(a.data.device):
            return _torch(a, b, offsets, width)
    # stores of rows that are not whole 16 elements would take all registers
    out = a.data.new_empty((T, padded(width)), dtype=dtype)
    launch_product(a, b, offsets, out)
    return out if out.shape[1] == width else out[:, :width].contiguous()


def _emulated(a: Quantized, b: Stacked, offsets: Tensor, depth: int, width: int) -> Tensor:
    """The values of both operands, in float32."""
    values = b.data.float() if b.scale_inv is None else b.data.float() * spread(b.scale_inv, b.data.shape)
    E = offsets.shape[0]
    if b.col_step:
        weights = values[:width, : E * b.col_step].reshape(width, E, b.col_step)[..., :depth].transpose(0, 1)
    else:
        weights = values.view(E, b.row_step, -1)[:, :width, :depth]
    with torch.no_grad():
        return grouped_gemm(dequantized(a, depth), weights.contiguous(), offsets)


def _wgrad_outputs(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    offsets: Tensor,
    rows: int,
    dtype: torch.dtype,
    kernel: bool,
) -> Tensor:
    return x.new_empty((offsets.shape[0], dy.shape[0], x.shape[0]), dtype=dtype)


def _wgrad(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    offsets: Tensor,
    rows: int,
    dtype: torch.dtype,
    kernel: bool,
) -> Tensor:
    """[E, N, K], of transposed copies [N, rows] and [K, rows]."""
    out = _wgrad_outputs(dy, dy_scale, x, x_scale, offsets, rows, dtype, kernel)
    if not (rows and out.numel()):
        return out.zero_()
    a, b = Quantized(dy, dy_scale), Quantized(x, x_scale)
    if kernel and kernels_serve(x):
        E, N, K = out.shape
        wide = out if K == padded(K) else out.new_empty((E, N, padded(K)))
        launch_wgrad(a, b, offsets, wide, rows)
        return out if wide is out else wide[..., :K].contiguous()
    dy_rows, x_rows = (dequantized(q, rows).T.contiguous() for q in (a, b))
    return out.copy_(grouped_gemm_wgrad(dy_rows, x_rows, offsets))


def _product_flops(a: Shape, depth: int, width: int, **_: Any) -> int:
    return 2 * a[0] * depth * width


def _wgrad_flops(dy: Shape, x: Shape, rows: int, **_: Any) -> int:
    return 2 * rows * dy[0] * x[0]


_product_op = Op(
    "fp8_grouped_product(Tensor a, Tensor a_scale, Tensor b, Tensor? b_scale, Tensor offsets, SymInt row_step, "
    "SymInt col_step, SymInt depth, SymInt width, ScalarType dtype, bool kernel) -> Tensor",
    _product,
    _product_outputs,
    replays=False,
    flops=_product_flops,
)
_wgrad_op = Op(
    "fp8_grouped_wgrad(Tensor dy, Tensor dy_scale, Tensor x, Tensor x_scale, Tensor offsets, SymInt rows, "
    "ScalarType dtype, bool kernel) -> Tensor",
    _wgrad,
    _wgrad_outputs,
    replays=False,
    flops=_wgrad_flops,
)


def _outputs(
    x: Tensor, weight: Tensor, offsets: Tensor, by: str, grad_format: str, power_of_two: bool, keep: bool, kernel: bool
) -> tuple[Tensor, ...]:
    """keep: gradients are enabled; backward needs the transposed x and the scales of W's rows."""
    (T, K), (E, N, _) = x.shape, weight.shape
    x_t = x.new_empty((K, padded(T)) if keep else 0, dtype=DTYPES["e4m3"])
    none = x.new_empty(0, dtype=torch.float32)
    x_inv = none.new_empty((cdiv(T, GROUP), K)).T if keep else none
    return x.new_empty((T, N)), x_t, x_inv, none.new_empty(E * padded(N) if keep and by == "row" else 0)


def _forward(
    x: Tensor, weight: Tensor, offsets: Tensor, by: str, grad_format: str, power_of_two: bool, keep: bool, kernel: bool
) -> tuple[Tensor, ...]:
    options = ("e4m3", power_of_two, kernel)
    none = x.new_empty(0, dtype=torch.float32)
    with without_autocast(x.device):
        weights, scale = _weights(weight, by, power_of_two, kernel)
        rows = _quantized(x, _BY_ROLE[by][0], *options)
        y = _product_op(*rows.rows, *weights[:2], offsets, *weights[2:], x.shape[1], weight.shape[1], x.dtype, kernel)
        if not keep:
            return y, none.new_empty(0, dtype=DTYPES["e4m3"]), none, none
        x_t = _quantized(x, "group", *options, offsets=offsets, columns=True) if len(offsets) else _no_rows(x)
    return y, x_t.data_t, x_t.scale_inv_t, scale if by == "row" else none


def _no_rows(x: Tensor) -> Copies:
    """In place of a transposed copy where there is no group."""
    copies = _quantized(x[:0], "group", "e4m3", True, False, columns=True)
    T, K = x.shape
    data, scales = copies.data_t.new_empty((K, padded(T))), copies.scale_inv_t.new_ones((cdiv(T, GROUP), K)).T
    data.view(torch.uint8).zero_()
    return copies._replace(data_t=data, scale_inv_t=scales)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, weight, offsets, *ctx.options = inputs
    _, x_t, x_inv, scale = output
    ctx.save_for_backward(weight, offsets, x_t, x_inv, scale)
    ctx.mark_non_differentiable(x_t, x_inv, scale)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 8
    # the saved tensors are rounded copies: a second derivative by the inputs would leave out a term
    refuse_graph(ctx, "fp8_grouped_gemm")
    need_dx, need_dw = ctx.needs_input_grad[:2]
    weight, offsets, x_t, x_inv, scale = ctx.saved_tensors
    by, format, power_of_two, _, kernel = ctx.options
    (E, N, K), dy = weight.shape, as_rows(dy)
    dx = dw = None
    with without_autocast(dy.device):
        if need_dx and not E:
            dx = dy.new_zeros((dy.shape[0], K))
        elif need_dx:
            fold = scale.reciprocal().view(E, -1)[:, :N].contiguous() if by == "row" else None
            rows = _quantized(dy, _BY_ROLE[by][2], format, power_of_two, kernel, fold=fold, offsets=offsets).rows
            weights = _weights_t(weight, scale, by, power_of_two, kernel)
            dx = _product_op(*rows, *weights[:2], offsets, *weights[2:], N, K, weight.dtype, kernel)
        if need_dw and not E:
            dw = weight.new_empty(weight.shape)
        elif need_dw:
            dy_t = _quantized(dy, "group", format, power_of_two, kernel, offsets=offsets, columns=True).columns
            dw = _wgrad_op(*dy_t, x_t, x_inv, offsets, dy.shape[0], weight.dtype, kernel)
    return dx, dw, *(None,) * 6


def _flops(x: Shape, weight: Shape, **_: Any) -> int:
    return 2 * x[0] * weight[1] * weight[2]


_grouped_op = Op(
    "fp8_grouped_gemm(Tensor x, Tensor weight, Tensor offsets, str by, str grad_format, bool power_of_two, bool keep, "
    "bool kernel) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _outputs,
    backward=_backward,
    setup_context=_setup_context,
    replays=False,
    flops=_flops,
)


_Plain = plain_function("fp8_grouped_gemm", _forward, _setup_context, _backward)


@falls_back("fp8_grouped_gemm")
def fp8_grouped_gemm(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    by: GroupedBy = "block",
    grad_format: str = "e4m3",
    power_of_two: bool = True,
) -> Tensor:
    """`grouped_gemm` whose three products, forward and backward, are FP8.

    Shapes: T rows, E groups (experts), K features in, N features out.
        x             [T, K]     float32, float16 or bfloat16 (float64 on the CPU); any strides
        weight        [E, N, K]  x's dtype; under autocast both are cast to its dtype, this being a matmul
        offsets       [E]        int32, on x's device: where each group ends; ascending, the last at most T. A group may
                                 have any size. Read on the device only (on the CPU they are read)
        by                       elements that share a scale: "row" or "block"; see the module
        grad_format              format of dy: "e4m3" or "e5m2"
        power_of_two             scales are powers of two
    Returns y [T, N] in x's dtype; rows from offsets[-1] on are zero, and so are their gradients; whatever they hold.
    Numerics: x, weight and dy are rounded to FP8 by the formulas of ops/fp8/formulas.py; sums of 128 products are added
        in float32 by our kernels and as torch._scaled_grouped_mm does in it; y, dx and dW are rounded once.
        Deterministic.
    Memory: saves x in one byte an element with a float32 for 128 elements, and the weight itself.
    Raises ValueError naming the argument, the expected value and the given one; offsets' values are checked on the CPU.
        Double backward and vmap are not implemented and say so.
    """
    op = "fp8_grouped_gemm"
    x, weight = cast_by_autocast(x, weight)
    check_groups(op, x, weight, offsets)
    checks.one_of(op, "by", by, tuple(_BY_ROLE))
    checks.one_of(op, "grad_format", grad_format, tuple(DTYPES))
    refuse_invariant("fp8_grouped_gemm (mixture of experts)", "use a model with dense MLPs")
    served = use_kernel(op, x)
    keep = torch.is_grad_enabled() and (weight.requires_grad or x.requires_grad)
    args = (as_rows(x), weight, offsets.contiguous(), by, grad_format, power_of_two, keep, served)
    if served or is_traced(x):
        y, *_ = _grouped_op(*args)
    else:
        with without_autocast(x.device):
            y, *_ = _Plain.apply(*args)
    result: Tensor = y
    return result
