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
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.fp8.formulas import BY, DTYPES, GROUP, MAX, Copies, padded, quantize_ref
from powertrain.ops.shapes import as_rows, cdiv, next_power_of_2
from powertrain.runtime import checks, recording, self_test, tracing
from powertrain.runtime.dispatch import Op, use_kernel
from powertrain.runtime.errors import WarmUpFirst
from powertrain.runtime.launch import kernel
from powertrain.runtime.target import Target
from powertrain.runtime.tuning import tunable

_FLT_MAX = tl.constexpr(torch.finfo(torch.float32).max)
_INF_BITS = tl.constexpr(0x7F800000)


@triton.jit
def _scale_of(bits, MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """The scale for the bits of a largest magnitude."""
    is_plain = (bits > 0) & (bits < _INF_BITS)
    if POWER_OF_TWO:
        # by exponents: a division calls a subroutine, and costs 41 registers by group. MAX is 1.75 * 2^n in both
        # formats: MAX / amax is at least 2 to the difference of their exponents unless amax has the larger mantissa
        exponent: tl.constexpr = 135 if MAX == 448.0 else 142  # of MAX, biased
        power = exponent + 127 - (bits >> 23) - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
        power = tl.where(is_plain, tl.minimum(power, 254), 127)
        return (power << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.div_rn(MAX, tl.where(bits == 0, 1.0, bits.to(tl.float32, bitcast=True)))
        # MAX / a denormal overflows; the largest finite scale still gives a finite product
        scale = tl.where(scale.to(tl.int32, bitcast=True) == _INF_BITS, _FLT_MAX, scale)
        return tl.where(is_plain, scale, 1.0)


@triton.jit
def _inverse(scale, POWER_OF_TWO: tl.constexpr):
    if POWER_OF_TWO:
        power = 254 - (scale.to(tl.int32, bitcast=True) >> 23)
        # 2^-127 is a denormal
        return tl.where(power == 0, 0x400000, power << 23).to(tl.float32, bitcast=True)
    else:
        return tl.div_rn(1.0, scale)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@kernel()
def _amax_kernel(
    x_ptr,
    given_ptr,
    amax_ptr,
    R,
    C,
    stride_xm,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    tiles_c = tl.cdiv(C, BLOCK_C)
    tiles = tl.cdiv(R, BLOCK_R) * tiles_c
    if given_ptr is not None:
        # a scale that is known needs no amax
        tiles = tl.where(tl.load(given_ptr) == 0, tiles, 0)
    found = tl.zeros([BLOCK_R, BLOCK_C], tl.int32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        rows = (tile // tiles_c * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None]
        cols = (tile % tiles_c * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
        x = tl.load(x_ptr + rows * stride_xm + cols, mask=(rows < R) & (cols < C), other=0.0)  # [BLOCK_R, BLOCK_C]
        found = tl.maximum(found, _bits(x.to(tl.float32)))
    # bit patterns of absolute values: integers order them as floats do, NaN above all, and atomics take them
    most = tl.max(tl.max(found, 1), 0)
    if most > 0:
        tl.atomic_max(amax_ptr, most)


@kernel(aligned=("R16", "C16"))
def _quantize_tile_kernel(
    x_ptr,
    fold_ptr,
    given_ptr,
    offsets_ptr,
    own_amax_ptr,
    data_ptr,
    data_t_ptr,
    scale_ptr,
    scale_inv_ptr,
    scale_inv_t_ptr,
    amax_ptr,
    R,
    C,
    E,
    R16,
    C16,
    stride_xm,
    step_r,  # of scales; as strides they would be among those that must all be multiples of 16
    step_c,
    step_tr,
    step_tc,
    BY: tl.constexpr,
    MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK_R: tl.constexpr,  # 128 by block, and by group for the transposed copy
    BLOCK_C: tl.constexpr,  # 128 by block, and by group for the copy by rows
):
    tiles_c = tl.cdiv(C, BLOCK_C)
    tile_r, tile_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
    # 64 bits for the tile's place, 32 within it
    row, col = (tile_r * BLOCK_R).to(tl.int64), (tile_c * BLOCK_C).to(tl.int64)
    lanes_r, lanes_c = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    rows, cols = tile_r * BLOCK_R + lanes_r, tile_c * BLOCK_C + lanes_c
    used = R
    if offsets_ptr is not None:
        # rows of no group count as zeros, whatever stands there
        used = tl.minimum(tl.load(offsets_ptr + E - 1), R)
    mask = (rows < used)[:, None] & (cols < C)[None, :]
    where = lanes_r[:, None] * stride_xm + lanes_c[None, :]
    x = tl.load(x_ptr + row * stride_xm + col + where, mask=mask, other=0.0).to(tl.float32)
    if fold_ptr is not None:
        x *= tl.load(fold_ptr + cols, mask=cols < C, other=0.0)[None, :]
    bits = _bits(x)  # [BLOCK_R, BLOCK_C]
    if amax_ptr is not None:
        most = tl.max(tl.max(bits, 1), 0)
        if most > 0:
            tl.atomic_max(amax_ptr, most)

    # the cast saturates, as the formula does
    at_rows, at_cols = data_ptr, data_t_ptr
    if data_ptr is not None:
        at_rows += row * C16 + col
    if data_t_ptr is not None:
        at_cols += col * R16 + row
    if BY == "group":
        # a launch writes one of the copies
        if data_ptr is not None:
            scale = _scale_of(tl.max(bits, 1), MAX, POWER_OF_TWO)  # [BLOCK_R]
            start = scale_inv_ptr + row * step_r + tile_c.to(tl.int64) * step_c
            tl.store(start + lanes_r * step_r, _inverse(scale, POWER_OF_TWO), mask=rows < R)  # [BLOCK_R]
            _store_rows(at_rows, x * scale[:, None], rows < R, cols < C16, C16, BLOCK_R, BLOCK_C)
        if data_t_ptr is not None:
            scale = _scale_of(tl.max(_bits(x), 0), MAX, POWER_OF_TWO)  # [BLOCK_C]
            start = scale_inv_t_ptr + col * step_tr + tile_r.to(tl.int64) * step_tc
            tl.store(start + lanes_c * step_tr, _inverse(scale, POWER_OF_TWO), mask=cols < C)  # [BLOCK_C]
            _store_rows(at_cols, (x * scale[None, :]).T, cols < C, rows < R16, R16, BLOCK_C, BLOCK_R)
    else:
        if BY == "tensor":
            scale = _scale_of(tl.load(own_amax_ptr), MAX, POWER_OF_TWO)
            if given_ptr is not None:
                given = tl.load(given_ptr)
                scale = tl.where(given == 0, scale, given)
            if tl.program_id(0) == 0:
                tl.store(scale_ptr, scale)
                tl.store(scale_inv_ptr, _inverse(scale, POWER_OF_TWO and given_ptr is None))
            x *= scale
        elif BY == "row":
            x *= tl.load(given_ptr + rows, mask=rows < R, other=1.0)[:, None]
        else:
            scale = _scale_of(tl.max(tl.max(bits, 1), 0), MAX, POWER_OF_TWO)
            if data_ptr is not None:
                tl.store(scale_inv_ptr + tile_r.to(tl.int64) * step_r + tile_c * step_c, _inverse(scale, POWER_OF_TWO))
            if data_t_ptr is not None:
                tl.store(
                    scale_inv_t_ptr + tile_c.to(tl.int64) * step_tr + tile_r * step_tc,
                    _inverse(scale, POWER_OF_TWO),
                )
            x *= scale
        if data_ptr is not None:
            _store_rows(at_rows, x, rows < R, cols < C16, C16, BLOCK_R, BLOCK_C)
        if data_t_ptr is not None:
            _store_rows(at_cols, x.T, cols < C, rows < R16, R16, BLOCK_C, BLOCK_R)


@triton.jit
def _store_rows(ptr, x, in_rows, in_cols, width, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """A tile of FP8 in rows of `width`."""
    where = tl.arange(0, BLOCK_R)[:, None] * width + tl.arange(0, BLOCK_C)[None, :]
    tl.store(ptr + where, x.to(ptr.dtype.element_ty), mask=in_rows[:, None] & in_cols[None, :])


@kernel(aligned=("C", "C16"))
def _quantize_row_kernel(
    x_ptr,
    fold_ptr,
    offsets_ptr,
    data_ptr,
    scale_ptr,
    scale_inv_ptr,
    amax_ptr,
    C,
    C16,
    E,
    stride_xm,
    MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_C)
    width = C
    if offsets_ptr is not None:
        groups = tl.arange(0, BLOCK_E)
        # the row's group: so many end before it
        group = tl.sum((tl.load(offsets_ptr + groups, mask=groups < E, other=row + 1) <= row).to(tl.int32))
        # those of no group count as zeros
        width = tl.where(group < E, C, 0)
        if fold_ptr is not None:
            fold_ptr += tl.minimum(group, E - 1).to(tl.int64) * C
    x = _load_part(x_ptr + row * stride_xm, fold_ptr, cols, width)
    found = _bits(x)
    if not WHOLE:
        for start in range(BLOCK_C, C, BLOCK_C):
            found = tl.maximum(found, _bits(_load_part(x_ptr + row * stride_xm, fold_ptr, start + cols, width)))
    most = tl.max(found, 0)
    scale = _scale_of(most, MAX, POWER_OF_TWO)
    tl.store(scale_ptr + row, scale)
    tl.store(scale_inv_ptr + row, _inverse(scale, POWER_OF_TWO))
    if amax_ptr is not None:
        if most > 0:
            tl.atomic_max(amax_ptr, most)
    if data_ptr is not None:
        data_ptr += row * C16
        tl.store(data_ptr + cols, (x * scale).to(data_ptr.dtype.element_ty), mask=cols < C16)  # [BLOCK_C]
        if not WHOLE:
            for start in range(BLOCK_C, C16, BLOCK_C):
                x = _load_part(x_ptr + row * stride_xm, fold_ptr, start + cols, width)
                out = (x * scale).to(data_ptr.dtype.element_ty)
                tl.store(data_ptr + start + cols, out, mask=start + cols < C16)  # [BLOCK_C]


@triton.jit
def _load_part(x_ptr, fold_ptr, cols, C):
    x = tl.load(x_ptr + cols, mask=cols < C, other=0.0).to(tl.float32)
    if fold_ptr is not None:
        x *= tl.load(fold_ptr + cols, mask=cols < C, other=0.0)
    return x


class _Plan(NamedTuple):
    block_r: int
    block_c: int
    num_warps: int


@tunable("NVIDIA H200, 2026-11-23")
def _plan_tile(by: str, rows: bool, columns: bool, target: Target) -> _Plan:
    """Tiles for the copies wanted."""
    # 16384x4096 bf16, ms (a copy 0.067); tiles, warps:
    #   tensor       64x64 4  0.118   64x64 8  0.112   32x128 4  0.108   64x128 8  0.110   128x64 8  0.115
    #   block        128x128 8  0.119   128x128 16  0.145
    #   group, both  128x128 8  0.199   128x128 16  0.232
    #   group, rows  16x128 4  0.081   32x128 4  0.079
    #   group, transposed  128x32 4  0.116   128x32 8  0.143   128x64 8  0.101
    if by == "block":
        return _Plan(GROUP, GROUP, 8)
    return _Plan(GROUP, 64, 8) if by == "group" and columns else _Plan(32, GROUP, 4)


@tunable("NVIDIA H200, 2026-11-23")
def _plan_row(width: int, target: Target) -> _Plan:
    """A part of a row that a program holds: 32 elements a thread. 16384x4096 bf16 0.052 ms, 16384x14336 0.176."""
    block = min(next_power_of_2(width), 16384)
    return _Plan(1, block, max(1, min(16, block // 1024)))


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
        _launch(as_rows(x), scale, fold, offsets, by, format, power_of_two, out)
    else:
        exact = quantize_ref(x, by, format, power_of_two=power_of_two, scale=scale, fold=fold, offsets=offsets)
        for ours, right in zip(out, exact, strict=True):
            # the CPU copies no FP8 from a transposed view, but its bytes
            if ours.numel():
                is_data = ours.dtype is not torch.float32
                (ours.view(torch.uint8) if is_data else ours).copy_(right.view(torch.uint8) if is_data else right)
    return out


def _launch(
    x: Tensor, scale: Tensor | None, fold: Tensor | None, offsets: Tensor | None, by: str, format: str,
    power_of_two: bool, out: Copies,
) -> None:  # fmt: skip
    (R, C), target = x.shape, Target.of(x.device)
    data, data_t, own, inverse, inverse_t, amax = (t if t.numel() else None for t in out)
    amax = None if amax is None else amax.view(torch.int32)
    options: dict[str, Any] = {"MAX": MAX[format], "POWER_OF_TWO": power_of_two}
    own_amax = None
    if by == "tensor":
        own_amax = x.new_zeros(1, dtype=torch.int32)
        programs = min(cdiv(R, 16) * cdiv(C, 512), 8 * target.num_sms)
        _amax_kernel[(programs,)](x, scale, own_amax, R, C, x.stride(0), BLOCK_R=16, BLOCK_C=512, num_warps=8)
    elif by == "row" and scale is None:
        plan = _plan_row(padded(C), target)
        _quantize_row_kernel[(R,)](
            x, fold, offsets, data, own, inverse, amax, C, padded(C), 0 if offsets is None else offsets.shape[0],
            x.stride(0), **options, WHOLE=padded(C) <= plan.block_c, BLOCK_C=plan.block_c,
            BLOCK_E=1 if offsets is None else next_power_of_2(offsets.shape[0]), num_warps=plan.num_warps,
        )  # fmt: skip
        if data_t is None:
            return
        scale, data, amax = own, None, None
    for part in [(data, None), (None, data_t)] if by == "group" else [(data, data_t)]:
        if part != (None, None):
            _launch_tiles(x, fold, scale, offsets, own_amax, part, own, inverse, inverse_t, amax, by, options)
            # measured by the first launch
            amax = None


def _launch_tiles(
    x: Tensor, fold: Tensor | None, scale: Tensor | None, offsets: Tensor | None, own_amax: Tensor | None,
    copies: tuple[Tensor | None, Tensor | None], own: Tensor | None, inverse: Tensor | None, inverse_t: Tensor | None,
    amax: Tensor | None, by: str, options: dict[str, Any],
) -> None:  # fmt: skip
    (R, C), (data, data_t) = x.shape, copies
    plan = _plan_tile(by, data is not None, data_t is not None, Target.of(x.device))
    steps = [t.stride() if t is not None and t.dim() == 2 else (0, 0) for t in (inverse, inverse_t)]
    _quantize_tile_kernel[(cdiv(R, plan.block_r) * cdiv(C, plan.block_c),)](
        x, fold, scale, offsets, own_amax, data, data_t, own, inverse, inverse_t, amax,
        R, C, 0 if offsets is None else offsets.shape[0], padded(R), padded(C), x.stride(0), *steps[0], *steps[1],
        BY=by, **options, BLOCK_R=plan.block_r, BLOCK_C=plan.block_c, num_warps=plan.num_warps,
    )  # fmt: skip


quantize_op = Op(
    "fp8_quantize(Tensor x, Tensor? scale, Tensor? fold, Tensor? offsets, str by, str format, bool power_of_two, "
    "bool rows, bool columns, bool measure, bool kernel) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _quantize,
    _outputs,
)
# by dtype of what is quantized: a defect of a compiler may concern one alone
_self_tests: dict[torch.dtype, dict[int | None, str | None]] = defaultdict(dict)


def kernels_serve(x: Tensor) -> bool:
    """Whether our FP8 kernels can quantize x on its device; elsewhere plain PyTorch computes the formulas."""
    target = Target.of(x.device)
    if not target.has_fp8:
        if tracing.first(("fp8", target.arch)):
            tracing.event("dispatch", f"fp8: emulated, because sm_{target.arch} has no FP8 products", op="fp8_linear")
        return False
    # operands that are FP8 already were quantized by a kernel that was tested
    if x.device.type != "cuda" or x.element_size() == 1 or recording.state.recording is not None:
        return True
    tested = _self_tests[x.dtype]
    if x.device.index not in tested and torch.cuda.is_current_stream_capturing():
        what = f"fp8_quantize of {checks.name(x.dtype)}"
        raise WarmUpFirst(
            f"{what} would have to be tested on {x.device} inside graph capture: run the call once before"
        )
    otherwise = f"fp8_quantize of {checks.name(x.dtype)}: plain PyTorch is used"
    return self_test.failure(tested, x.device, partial(_self_test, dtype=x.dtype), otherwise) is None


def _self_test(device: torch.device, dtype: torch.dtype) -> str | None:
    """Bytes of every kind of launch, beside the formulas' on the CPU."""
    x = special_values().to(dtype)
    for by in BY:
        for format in DTYPES:
            out = _outputs(x.to(device), None, None, None, by, format, True, True, True, True, True)
            out.amax.zero_()
            _launch(x.to(device), None, None, None, by, format, True, out)
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
    at = torch.arange(144 * 272, dtype=torch.int32)
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
