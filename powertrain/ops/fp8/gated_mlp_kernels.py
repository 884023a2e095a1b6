"""Kernels of a gated activation, and of its gradients, that write FP8: plans and launches; gated_mlp.py has the op.

    act = round16(act(gate) * up)                                     e(act * scale), and its transpose
    dgate = round16(dy * act'(gate) * up), dup = round16(dy * act(gate))      likewise, each with a scale of its own

Scales are those of whole tensors: given ones, or of the largest magnitude, which another kernel finds first by the same
formulas. round16 rounds to the dtype of gate, as the kernels of activations.py do: the bytes are those of
`gated_activation` or its backward, then `fp8_quantize`.
N elements of 2 bytes: forward reads 4 N and writes 2 N bytes, backward 6 N and 4 N; finding scales reads as much again.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.activation_kernels import activate_gated
from powertrain.ops.fp8 import formulas
from powertrain.ops.fp8.formulas import MAX
from powertrain.ops.fp8.quantize_kernels import inverse, magnitude, raise_amax, scale_of_bits, store_rows
from powertrain.ops.shapes import cdiv
from powertrain.runtime.launch import kernel
from powertrain.runtime.target import Target
from powertrain.runtime.tuning import tunable

ALIGN = tl.constexpr(formulas.ALIGN)


@triton.jit
def _gated_tile(dy_ptr, gate_ptr, up_ptr, start, where, mask, limit, alpha, KIND: tl.constexpr):
    """act twice, or with dy dgate and dup; in the dtype of gate, zero where the mask is not set."""
    gate = tl.load(gate_ptr + start + where, mask=mask, other=0.0)
    up = tl.load(up_ptr + start + where, mask=mask, other=0.0).to(tl.float32)
    y, by_gate, by_up = activate_gated(gate.to(tl.float32), up, limit, alpha, KIND)
    if dy_ptr is not None:
        dy = tl.load(dy_ptr + start + where, mask=mask, other=0.0).to(tl.float32)
        first = (dy * by_gate).to(gate.dtype)
        second = (dy * by_up).to(gate.dtype)
    else:
        first = y.to(gate.dtype)
        second = first
    return first, second


@triton.jit
def _largest(found, like):
    """Bits of the largest magnitude as float32, of the 16-bit patterns without their signs."""
    most = tl.max(tl.max(found, 1), 0).to(tl.int16).to(like.dtype.element_ty, bitcast=True)
    return magnitude(most.to(tl.float32))


# a given scale is one of three (x, weight, dy) of delayed scaling, mostly not at a multiple of 16 bytes
@kernel(unaligned=("given_ptr", "up_given_ptr"))
def _gated_amax_kernel(
    dy_ptr,
    gate_ptr,
    up_ptr,
    given_ptr,
    up_given_ptr,
    amax_ptr,
    R,
    C,
    units_c,  # of 16 elements: rows of FP8 are padded to whole ones
    stride_m,
    limit,
    alpha,
    KIND: tl.constexpr,
    WHOLE: tl.constexpr,  # C is a multiple of 16
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    C16 = units_c * ALIGN
    tiles_c = tl.cdiv(C, BLOCK_C)
    tiles = tl.cdiv(R, BLOCK_R) * tiles_c
    if given_ptr is not None:
        # scales that are known need no amax
        unknown = tl.load(given_ptr) == 0
        if up_given_ptr is not None:
            unknown = unknown | (tl.load(up_given_ptr) == 0)
        tiles = tl.where(unknown, tiles, 0)
    lanes_r, lanes_c = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    where = lanes_r[:, None] * stride_m + lanes_c[None, :]
    # in 16 bits: half the registers and instructions, and the patterns have float32's order
    first_found = tl.zeros([BLOCK_R, BLOCK_C], tl.int16)
    second_found = tl.zeros([BLOCK_R, BLOCK_C], tl.int16)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, col = tile // tiles_c * BLOCK_R, tile % tiles_c * BLOCK_C
        # loads of 16 bytes need a limit that is known to be a multiple of 16
        mask = (row + lanes_r < R)[:, None] & (col + lanes_c < (C16 if WHOLE else C))[None, :]
        start = row.to(tl.int64) * stride_m + col
        first, second = _gated_tile(dy_ptr, gate_ptr, up_ptr, start, where, mask, limit, alpha, KIND)
        first_found = tl.maximum(first_found, first.to(tl.int16, bitcast=True) & 0x7FFF)
        if dy_ptr is not None:
            second_found = tl.maximum(second_found, second.to(tl.int16, bitcast=True) & 0x7FFF)
    raise_amax(amax_ptr, _largest(first_found, gate_ptr))
    if dy_ptr is not None:
        raise_amax(amax_ptr + 1, _largest(second_found, gate_ptr))


@triton.jit
def _write(
    x, given_ptr, own_amax_ptr, data_ptr, data_t_ptr, scale_inv_ptr, amax_ptr,
    tile_r, tile_c, R, C, R16, C16,
    MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Both copies of a tile x of 16 bits, where they are wanted."""
    x = x.to(tl.float32)
    if amax_ptr is not None:
        raise_amax(amax_ptr, tl.max(tl.max(magnitude(x), 1), 0))
    scale = scale_of_bits(tl.load(own_amax_ptr), MAX, POWER_OF_TWO)
    if given_ptr is not None:
        given = tl.load(given_ptr)
        scale = tl.where(given == 0, scale, given)
    if tl.program_id(0) == 0:
        tl.store(scale_inv_ptr, inverse(scale, POWER_OF_TWO and given_ptr is None))
    x *= scale
    rows, cols = tile_r * BLOCK_R + tl.arange(0, BLOCK_R), tile_c * BLOCK_C + tl.arange(0, BLOCK_C)
    # 64 bits for the tile's place, 32 within it
    row, col = (tile_r * BLOCK_R).to(tl.int64), (tile_c * BLOCK_C).to(tl.int64)
    if data_ptr is not None:
        store_rows(data_ptr + row * C16 + col, x, rows < R, cols < C16, C16, BLOCK_R, BLOCK_C)
    if data_t_ptr is not None:
        store_rows(data_t_ptr + col * R16 + row, x.T, cols < C, rows < R16, R16, BLOCK_C, BLOCK_R)


@kernel(unaligned=("given_ptr", "up_given_ptr"))
def _gated_quantize_kernel(
    dy_ptr,
    gate_ptr,
    up_ptr,
    given_ptr,
    up_given_ptr,
    own_amax_ptr,
    data_ptr,
    data_t_ptr,
    scale_inv_ptr,
    up_data_ptr,
    up_data_t_ptr,
    up_scale_inv_ptr,
    amax_ptr,
    R,
    C,
    units_r,  # of 16 elements: rows of FP8 are padded to whole ones
    units_c,
    stride_m,
    limit,
    alpha,
    KIND: tl.constexpr,
    MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    WHOLE: tl.constexpr,  # C is a multiple of 16
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    # multiples of 16 whatever the stride is, so stores are of 16 bytes
    R16, C16 = units_r * ALIGN, units_c * ALIGN
    tiles_c = tl.cdiv(C, BLOCK_C)
    tile_r, tile_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
    lanes_r, lanes_c = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    row, col = tile_r * BLOCK_R, tile_c * BLOCK_C
    # loads of 16 bytes need a limit that is known to be a multiple of 16
    mask = (row + lanes_r < R)[:, None] & (col + lanes_c < (C16 if WHOLE else C))[None, :]
    start, where = row.to(tl.int64) * stride_m + col, lanes_r[:, None] * stride_m + lanes_c[None, :]
    first, second = _gated_tile(dy_ptr, gate_ptr, up_ptr, start, where, mask, limit, alpha, KIND)
    if scale_inv_ptr is not None:
        _write(
            first, given_ptr, own_amax_ptr, data_ptr, data_t_ptr, scale_inv_ptr, amax_ptr,
            tile_r, tile_c, R, C, R16, C16, MAX, POWER_OF_TWO, BLOCK_R, BLOCK_C,
        )  # fmt: skip
    if up_scale_inv_ptr is not None:
        up_amax_ptr = amax_ptr
        if amax_ptr is not None:
            up_amax_ptr += 1
        _write(
            second, up_given_ptr, own_amax_ptr + 1, up_data_ptr, up_data_t_ptr, up_scale_inv_ptr, up_amax_ptr,
            tile_r, tile_c, R, C, R16, C16, MAX, POWER_OF_TWO, BLOCK_R, BLOCK_C,
        )  # fmt: skip


class _Plan(NamedTuple):
    block_r: int
    block_c: int
    num_warps: int


@tunable("never measured")
def _plan_tile(backward: bool, target: Target) -> _Plan:
    """Tiles of which both copies are written."""
    return _Plan(64, 64, 4)


@tunable("never measured")
def _plan_amax(target: Target) -> _Plan:
    """Tiles that are only read: whole rows of memory, 16 elements a thread."""
    return _Plan(4, 512, 4)


class Part(NamedTuple):
    """Memory for one tensor's results, None where they are not wanted, and its given scale."""

    given: Tensor | None = None  # [1]
    data: Tensor | None = None  # [R, C padded to 16]
    data_t: Tensor | None = None  # [C, R padded to 16]
    scale_inv: Tensor | None = None  # [1]; None: nothing of this tensor is wanted


def _units(size: int) -> int:
    return cdiv(size, formulas.ALIGN)


def launch_gated(
    dy: Tensor | None, gate: Tensor, up: Tensor, first: Part, second: Part, amax: Tensor | None, kind: str,
    limit: float, alpha: float, format: str, power_of_two: bool,
) -> None:  # fmt: skip
    """act into `first`, or with dy dgate and dup into `first` and `second`. gate, up and dy [R, C] are contiguous.

    amax   [2] int32, zeros: raised to the bits of the largest magnitudes
    """
    (R, C), target = gate.shape, Target.of(gate.device)
    own_amax = gate.new_zeros(2, dtype=torch.int32)
    options = {"KIND": kind, "WHOLE": C % formulas.ALIGN == 0}
    # both scales are given or none is
    given = [part.given for part in (first, second) if part.scale_inv is not None]
    plan = _plan_amax(target)
    tiles = cdiv(R, plan.block_r) * cdiv(C, plan.block_c)
    # scales that are known need few programs, to see that they are
    programs = tiles if given[0] is None else min(tiles, 2 * target.num_sms)
    _gated_amax_kernel[(programs,)](
        dy, gate, up, given[0], given[-1] if len(given) > 1 else None, own_amax, R, C, _units(C), gate.stride(0),
        limit, alpha, **options, BLOCK_R=plan.block_r, BLOCK_C=plan.block_c, num_warps=plan.num_warps,
    )  # fmt: skip
    plan = _plan_tile(dy is not None, target)
    _gated_quantize_kernel[(cdiv(R, plan.block_r) * cdiv(C, plan.block_c),)](
        dy, gate, up, first.given, second.given, own_amax, first.data, first.data_t, first.scale_inv, second.data,
        second.data_t, second.scale_inv, amax, R, C, _units(R), _units(C), gate.stride(0), limit, alpha,
        **options, MAX=MAX[format], POWER_OF_TWO=power_of_two,
        BLOCK_R=plan.block_r, BLOCK_C=plan.block_c, num_warps=plan.num_warps,
    )  # fmt: skip
