"""Quantization to FP8: data, its transposed copy, scales and the largest magnitude (formulas: ops/fp8/formulas.py).

An FP8 product reads both operands along K only, so forward and backward need an operand and its transpose: x [M, K] in
y = x Wᵀ, xᵀ [K, M] in dW = dyᵀ x. How often x is read (2 bytes an element of bfloat16; 2 bytes are written):

    tensor   two: for its amax, then for both copies. One where a scale is given; a given scale of 0 means that none is
             known yet, and is replaced by the tensor's own on the device
    row      one for each copy; rows beyond 16384 elements are read once more
    group    one for each copy: tiles of 128x128, which hold whole groups of both directions, take longer than two reads
    block    one

amax is a maximum of integers, which are ordered like magnitudes: exact, in any order, with NaN on top.
"""

from collections import defaultdict
from functools import partial

import torch
import triton
from torch import Tensor

from powertrain.ops.fp8.formulas import BY, DTYPES, GROUP, Copies, padded, quantize_ref
from powertrain.ops.fp8.quantize_kernels import launch
from powertrain.ops.fp8.tested import serves
from powertrain.ops.shapes import as_rows, cdiv
from powertrain.runtime import checks, tracing
from powertrain.runtime.dispatch import Op, use_kernel
from powertrain.runtime.target import Target


def _outputs(
    x: Tensor, scale: Tensor | None, fold: Tensor | None, offsets: Tensor | None, by: str, format: str,
    power_of_two: bool, rows: bool, columns: bool, measure: bool, kernel: bool,
) -> Copies:  # fmt: skip
    R, C = x.shape
    data = x.new_empty((R, padded(C)) if rows else 0, dtype=DTYPES[format])
    data_t = x.new_empty((C, padded(R)) if columns else 0, dtype=DTYPES[format])
    size = {"tensor": 1, "row": R if scale is None else 0}.get(by, 0)
    own, inverse, inverse_t, amax = (x.new_empty(n, dtype=torch.float32) for n in (size, size, 0, 1 if measure else 0))
    if by in ("group", "block"):
        inverse = _scales(x, R, C, by) if rows else inverse
        inverse_t = _scales(x, C, R, by) if columns else inverse_t
    return Copies(data, data_t, own, inverse, inverse_t, amax)


def _scales(x: Tensor, R: int, C: int, by: str) -> Tensor:
    """Groups with rows fastest: so cuBLAS reads them."""
    if by == "group":
        return x.new_empty((cdiv(C, GROUP), R), dtype=torch.float32).T
    return block_scales(x, R, C)


def block_scales(x: Tensor, R: int, C: int) -> Tensor:
    """Memory, on x's device, for the scales of [R, C] by block: with rows of whole 16 bytes, so cuBLAS reads them."""
    groups = cdiv(C, GROUP)
    return x.new_empty((cdiv(R, GROUP), cdiv(groups, 4) * 4), dtype=torch.float32)[:, :groups]


def _quantize(
    x: Tensor, scale: Tensor | None, fold: Tensor | None, offsets: Tensor | None, by: str, format: str,
    power_of_two: bool, rows: bool, columns: bool, measure: bool, kernel: bool,
) -> Copies:  # fmt: skip
    out = _outputs(x, scale, fold, offsets, by, format, power_of_two, rows, columns, measure, kernel)
    if not x.numel():
        for part in (out.scale, out.scale_inv, out.scale_inv_t):
            part.fill_(1.0)
        for part in (out.data, out.data_t, out.amax):
            part.view(torch.uint8).zero_()
    elif kernel and kernels_serve(x):
        out.amax.zero_()
        launch(as_rows(x), scale, fold, offsets, by, format, power_of_two, out)
    else:
        exact = quantize_ref(x, by, format, power_of_two=power_of_two, scale=scale, fold=fold, offsets=offsets)
        for ours, right in zip(out, exact, strict=True):
            # the CPU copies no FP8 from a transposed view, but its bytes
            if ours.numel():
                is_data = ours.dtype is not torch.float32
                (ours.view(torch.uint8) if is_data else ours).copy_(right.view(torch.uint8) if is_data else right)
    return out


quantize_op = Op(
    "fp8_quantize(Tensor x, Tensor? scale, Tensor? fold, Tensor? offsets, str by, str format, bool power_of_two, "
    "bool rows, bool columns, bool measure, bool kernel) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _quantize,
    _outputs,
)
# by dtype of the input: a defect of a compiler may concern one alone
_self_tests: dict[torch.dtype, dict[int | None, str | None]] = defaultdict(dict)


def kernels_serve(x: Tensor) -> bool:
    """Whether our FP8 kernels can quantize x on its device; elsewhere plain PyTorch computes the formulas."""
    target = Target.of(x.device)
    if not target.has_fp8:
        if tracing.first(("fp8", target.arch)):
            tracing.event("dispatch", f"fp8: emulated, because sm_{target.arch} has no FP8 products", op="fp8_linear")
        return False
    # operands that are FP8 already were quantized by a kernel that was tested
    if x.element_size() == 1:
        return True
    op = f"fp8_quantize of {checks.name(x.dtype)}"
    return serves(_self_tests[x.dtype], x.device, op, partial(_self_test, dtype=x.dtype))


def _self_test(device: torch.device, dtype: torch.dtype) -> str | None:
    """Bytes of every kind of launch, beside the formulas' on the CPU."""
    x = special_values().to(dtype)
    for by in BY:
        for format in DTYPES:
            out = _outputs(x.to(device), None, None, None, by, format, True, True, True, True, True)
            out.amax.zero_()
            launch(x.to(device), None, None, None, by, format, True, out)
            for part, found, exact in zip(Copies._fields, out, quantize_ref(x, by, format), strict=True):
                if found.numel() and not same_bits(found, exact):
                    return f"{part} by {by} in {format} differs from its formula (triton {triton.__version__})"
    return None


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of float32 or FP8 are equal bit for bit. In float32 any NaN equals any other: a GPU
    converts a NaN of float16 to 7fffffff, a CPU keeps its payload."""
    integers = torch.int32 if a.dtype is torch.float32 else torch.uint8
    a, b = (torch.where(t.isnan(), torch.nan, t) if t.dtype is torch.float32 else t for t in (a, b))
    return a.dtype is b.dtype and torch.equal(a.cpu().view(integers), b.cpu().view(integers))


def special_values() -> Tensor:
    """[144, 272] bfloat16: rows of ties, denormals, zeros, infinities and NaN between rows of ordinary values."""
    at = torch.arange(144 * 272, dtype=torch.int32, device="cpu")
    x = ((at * 7919 % 10007).float() / 5003 - 1).view(144, 272)
    # ties of e4m3, once scaled by a power of two
    x[5] = (at[:272] % 64 - 32) / 16 + 1 / 32
    x[6], x[7], x[8, ::3], x[9, 200], x[140, 3] = x[6] * 1e-38, 0.0, 0.0, torch.inf, torch.nan
    x[10], x[11] = x[10] * 3e38, -x[11] * 1e-30
    return x.to(torch.bfloat16)


def fp8_quantize(
    x: Tensor,
    by: str,
    format: str = "e4m3",
    *,
    power_of_two: bool = True,
    scale: Tensor | None = None,
    fold: Tensor | None = None,
    offsets: Tensor | None = None,
    rows: bool = True,
    columns: bool = True,
    measure: bool = False,
) -> Copies:
    """x and its transpose in FP8.

    Shapes: R rows, C columns.
        x         [R, C]  float32, float16 or bfloat16 (float64 on the CPU, taken as float32); any strides
        by                elements that share a scale: "tensor", "row", "group" (1x128) or "block" (128x128)
        format            "e4m3" or "e5m2"
        power_of_two      scales are rounded down to powers of two
        scale     [1]     by tensor: this one instead of x's own; 0 on the device stands for x's own
                  [R]     by row, for the transposed copy alone
        fold      [C]     by row: x * fold is quantized
        offsets   [E]     by row and group, int32: where groups of rows end, as of `grouped_gemm`. Rows of none count as
                          zeros; fold, of the rows' copy, is [E, C]: one for each group
        rows, columns     whether the copy [R, C] and the transposed one [C, R] are wanted
        measure           whether the largest magnitude is, NaN if one is NaN
    Returns `Copies`: plain tensors; data is padded with zeros to rows of whole 16 bytes.
    Numerics: the formulas of ops/fp8/formulas.py to the bit, on every device; deterministic.
    Raises ValueError naming the argument, the expected value and the given one. No gradient is defined.
    """
    op = "fp8_quantize"
    checks.floating(op, x=x)
    checks.same_device(op, "x", x, scale=scale, fold=fold, offsets=offsets)
    checks.require(x.dim() == 2, op, "x", "be [R, C]", list(x.shape))
    for name, value, choices in (("by", by, BY), ("format", format, tuple(DTYPES))):
        checks.one_of(op, name, value, choices)
    if scale is not None:
        checks.one_of(op, "by", by, ("tensor", "row"))
        checks.shape(op, "scale", scale, (1,) if by == "tensor" else x.shape[:1], f"by {by}")
        checks.require(by == "tensor" or not rows, op, "rows", "be False with scales of rows", rows)
        checks.require(scale.dtype is torch.float32, op, "scale", "be float32", checks.name(scale.dtype))
    if fold is not None:
        checks.one_of(op, "by", by, ("row",))
        checks.shape(op, "fold", fold, (*(offsets.shape if offsets is not None else ()), x.shape[1]), "columns of x")
    if offsets is not None:
        checks.one_of(op, "by", by, ("row", "group"))
        checks.require(offsets.dtype is torch.int32, op, "offsets", "be int32", checks.name(offsets.dtype))
        checks.require(offsets.dim() == 1 and len(offsets) > 0, op, "offsets", "be [E], not empty", list(offsets.shape))
        checks.require(by == "group" or not columns, op, "columns", "be False with offsets by row", columns)
    found = quantize_op(
        x.detach(), scale, fold, offsets, by, format, power_of_two, rows, columns, measure, use_kernel("fp8_linear", x)
    )
    return Copies(*found)
