"""Kernels of quantization to FP8, their plans and launches; quantize.py has the op."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.fp8.formulas import ALIGN, GROUP, MAX, Copies, padded
from powertrain.ops.shapes import cdiv, next_power_of_2
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
def _raise_amax(amax_ptr, bits):
    # integers order the bit patterns of absolute values as floats, NaN above all, and atomics take them. Most tiles are
    # below the maximum so far: 16384 atomics to one address double the time of a tensor of 16384x4096
    if bits > tl.load(amax_ptr):
        tl.atomic_max(amax_ptr, bits)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@kernel(aligned=("C",), unaligned=("given_ptr",))
def _amax_kernel(
    x_ptr,
    given_ptr,
    amax_ptr,
    R,
    C,
    stride_xm,
    BITS: tl.constexpr,  # of an element of x
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    tiles_c = tl.cdiv(C, BLOCK_C)
    tiles = tl.cdiv(R, BLOCK_R) * tiles_c
    if given_ptr is not None:
        # a scale that is known needs no amax
        tiles = tl.where(tl.load(given_ptr) == 0, tiles, 0)
    found = tl.zeros([BLOCK_R, BLOCK_C], tl.int16 if BITS == 16 else tl.int32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        rows = (tile // tiles_c * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None]
        cols = (tile % tiles_c * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
        x = tl.load(x_ptr + rows * stride_xm + cols, mask=(rows < R) & (cols < C), other=0.0)  # [BLOCK_R, BLOCK_C]
        # in the width of x: half the registers and instructions for 16 bits, whose patterns have float32's order
        found = tl.maximum(found, x.to(found.dtype, bitcast=True) & ((1 << (BITS - 1)) - 1))
    most = tl.max(tl.max(found, 1), 0).to(found.dtype).to(x_ptr.dtype.element_ty, bitcast=True)
    _raise_amax(amax_ptr, _bits(most.to(tl.float32)))


# a given scale is one of three (x, weight, dy) of delayed scaling, mostly not at a multiple of 16 bytes
@kernel(aligned=("R16", "C16"), unaligned=("given_ptr", "offsets_ptr"))
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
    WHOLE: tl.constexpr,  # C is C16
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
    # loads of 16 bytes need a limit that is known to be a multiple of 16
    mask = (rows < used)[:, None] & (cols < (C16 if WHOLE else C))[None, :]
    where = lanes_r[:, None] * stride_xm + lanes_c[None, :]
    x = tl.load(x_ptr + row * stride_xm + col + where, mask=mask, other=0.0).to(tl.float32)
    if fold_ptr is not None:
        x *= tl.load(fold_ptr + cols, mask=cols < C, other=0.0)[None, :]
    bits = _bits(x)  # [BLOCK_R, BLOCK_C]
    if amax_ptr is not None:
        _raise_amax(amax_ptr, tl.max(tl.max(bits, 1), 0))

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


@kernel(aligned=("C", "C16"), unaligned=("offsets_ptr",))
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
        _raise_amax(amax_ptr, most)
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


# for other kernels that write FP8
scale_of_magnitude, inverse_of, magnitude_of = _scale_of, _inverse, _bits
raise_amax, store_rows = _raise_amax, _store_rows


class _Plan(NamedTuple):
    block_r: int
    block_c: int
    num_warps: int


@tunable("NVIDIA H200, 2026-11-23")
def plan_tile(by: str, rows: bool, columns: bool, target: Target) -> _Plan:
    """Tiles for the copies wanted."""
    # 16384x4096 bf16, ms (a copy 0.066); tiles, warps:
    #   tensor, both        64x64 4  0.079   32x128 4  0.079   64x128 8  0.078   128x64 4  0.079   128x128 16  0.085
    #   tensor, transposed  64x64 8  0.061   128x64 4  0.060   128x128 16  0.061
    #   row, transposed     64x64 4  0.056   128x64 4  0.054   32x128 4  0.057
    #   group, rows         16x128 4  0.052   32x128 4  0.052   64x128 8  0.053
    #   group, transposed   128x32 2  0.061   128x64 4  0.056   128x64 8  0.070   128x128 8  0.082
    #   block, rows         128x128 4  0.055   128x128 8  0.052   128x128 16  0.055
    if by == "block":
        return _Plan(GROUP, GROUP, 8)
    return _Plan(GROUP, 64, 4) if columns and not rows else _Plan(32, GROUP, 4)


@tunable("NVIDIA H200, 2026-11-23")
def _plan_row(width: int, target: Target) -> _Plan:
    """A part of a row that a program holds: 32 elements a thread. 16384x4096 bf16 0.052 ms, 16384x14336 0.176."""
    block = min(next_power_of_2(width), 16384)
    return _Plan(1, block, max(1, min(16, block // 1024)))


def launch(
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
        # one tile a program reads 16384x14336 in 0.116 ms, a loop over tiles in 0.122; a scale that is known needs few
        tiles = cdiv(R, 4) * cdiv(C, 1024)
        programs = tiles if scale is None else min(tiles, 2 * target.num_sms)
        _amax_kernel[(programs,)](
            x, scale, own_amax, R, C, x.stride(0), BITS=8 * x.element_size(), BLOCK_R=4, BLOCK_C=1024, num_warps=4
        )
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
    plan = plan_tile(by, data is not None, data_t is not None, Target.of(x.device))
    steps = [t.stride() if t is not None and t.dim() == 2 else (0, 0) for t in (inverse, inverse_t)]
    _quantize_tile_kernel[(cdiv(R, plan.block_r) * cdiv(C, plan.block_c),)](
        x, fold, scale, offsets, own_amax, data, data_t, own, inverse, inverse_t, amax,
        R, C, 0 if offsets is None else offsets.shape[0], padded(R), padded(C), x.stride(0), *steps[0], *steps[1],
        BY=by, **options, WHOLE=C % ALIGN == 0, BLOCK_R=plan.block_r, BLOCK_C=plan.block_c, num_warps=plan.num_warps,
    )  # fmt: skip
