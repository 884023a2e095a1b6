"""Current scaling by a power of two: the tensor is read once if its scale equals the last call's, else twice.

    data = e(clamp(x * s, -max, max))       s: the scale of x's own amax (ops/fp8/formulas.py), whatever was used before

Two kernels. The first quantizes with the scale of the last call and takes amax of the same read. The second, always
launched, computes s; its programs return at once where s is the scale that the first one used, and else quantize x once
more, from x itself: values that saturated are lost in FP8. So the results are those of two passes, to the bit, and
never depend on the scale of last time. Nothing is read on the host; a CUDA graph may contain both.

x is read once (twice where the exponent has changed) instead of twice, and both copies are written once (twice).

State, of each tensor int32 [4]: bits of the last scale (0: none yet), 0, calls, calls that had to quantize again. Its
first two elements are copied before the first kernel, and amax is collected in the second: both kernels take the scale
from the copy, so another stream that runs the same layer changes no result. The new state is a result, which a second
op writes in place of the old one, so that the first has no side effects.
"""

from collections import defaultdict
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.fp8.formulas import ALIGN, DTYPES, MAX, Copies, padded, quantize_ref
from powertrain.ops.fp8.quantize import kernels_serve, quantize_op, same_bits, special_values
from powertrain.ops.fp8.quantize_kernels import (
    inverse_of,
    magnitude_of,
    plan_tile,
    raise_amax,
    scale_of_magnitude,
    store_rows,
)
from powertrain.ops.fp8.tested import serves
from powertrain.ops.shapes import as_rows, cdiv
from powertrain.runtime import checks
from powertrain.runtime.dispatch import Op, use_kernel
from powertrain.runtime.launch import kernel
from powertrain.runtime.target import Target

# programs of the second kernel on each SM, which loop over tiles: few, as they mostly have nothing to do. Not timed yet
_PROGRAMS = 4
_SCALE, _AMAX, _CALLS, _REPEATS = range(4)


class Current(NamedTuple):
    """Results of one quantization: `Copies`' of the same names, and the next call's state."""

    data: Tensor
    data_t: Tensor
    scale: Tensor
    scale_inv: Tensor
    state: Tensor  # [4] int32

    @property
    def copies(self) -> Copies:
        none = self.scale.new_empty(0)
        return Copies(self.data, self.data_t, self.scale, self.scale_inv, none, none)


def quantize_current_ref(x: Tensor, state: Tensor, format: str) -> Current:
    """The specification of `fp8_quantize_current`: both copies of x [R, C] (not empty)."""
    data, data_t, scale, scale_inv, *_ = quantize_ref(x, "tensor", format)
    return Current(data, data_t, scale, scale_inv, _next(scale, state))


def _next(scale: Tensor, state: Tensor) -> Tensor:
    """The state after a call of this scale."""
    bits = scale.view(torch.int32)
    repeats = state[_REPEATS:] + (bits != state[:_AMAX])
    return torch.cat([bits, bits * 0, state[_CALLS:_REPEATS] + 1, repeats])


@triton.jit
def _tile(x_ptr, tile, R, C, C16, stride_xm, WHOLE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """The tile's row and column in x, and its values, float32."""
    tiles_c = tl.cdiv(C, BLOCK_C)
    row, col = tile // tiles_c * BLOCK_R, tile % tiles_c * BLOCK_C
    lanes_r, lanes_c = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    # loads of 16 bytes need a limit that is known to be a multiple of 16
    mask = (row + lanes_r < R)[:, None] & (col + lanes_c < (C16 if WHOLE else C))[None, :]
    # 64 bits for the tile's place, 32 within it
    x_ptr += row.to(tl.int64) * stride_xm + col
    x = tl.load(x_ptr + lanes_r[:, None] * stride_xm + lanes_c[None, :], mask=mask, other=0.0)
    return row, col, x.to(tl.float32)


@triton.jit
def _store(data_ptr, data_t_ptr, x, row, col, R, C, R16, C16, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Both copies of a tile that is scaled; the cast saturates, as the formula does."""
    rows, cols = row + tl.arange(0, BLOCK_R), col + tl.arange(0, BLOCK_C)
    if data_ptr is not None:
        store_rows(data_ptr + row.to(tl.int64) * C16 + col, x, rows < R, cols < C16, C16, BLOCK_R, BLOCK_C)
    if data_t_ptr is not None:
        store_rows(data_t_ptr + col.to(tl.int64) * R16 + row, x.T, cols < C, rows < R16, R16, BLOCK_C, BLOCK_R)


@kernel(aligned=("R16", "C16"))
def _quantize_last_kernel(
    x_ptr,
    last_ptr,  # [2]: bits of the last scale; amax is collected in the second
    data_ptr,
    data_t_ptr,
    R,
    C,
    R16,
    C16,
    stride_xm,
    WHOLE: tl.constexpr,  # C is C16
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row, col, x = _tile(x_ptr, tl.program_id(0), R, C, C16, stride_xm, WHOLE, BLOCK_R, BLOCK_C)
    raise_amax(last_ptr + 1, tl.max(tl.max(magnitude_of(x), 1), 0))
    scale = tl.load(last_ptr).to(tl.float32, bitcast=True)
    _store(data_ptr, data_t_ptr, x * scale, row, col, R, C, R16, C16, BLOCK_R, BLOCK_C)


@kernel(aligned=("R16", "C16"))
def _quantize_again_kernel(
    x_ptr,
    last_ptr,
    data_ptr,
    data_t_ptr,
    scale_ptr,
    scale_inv_ptr,
    state_ptr,
    next_ptr,
    R,
    C,
    R16,
    C16,
    stride_xm,
    MAX: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    scale = scale_of_magnitude(tl.load(last_ptr + 1), MAX, True)
    bits = scale.to(tl.int32, bitcast=True)
    is_other = bits != tl.load(last_ptr)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, scale)
        tl.store(scale_inv_ptr, inverse_of(scale, True))
        tl.store(next_ptr, bits)
        tl.store(next_ptr + 1, 0)
        tl.store(next_ptr + 2, tl.load(state_ptr + 2) + 1)
        tl.store(next_ptr + 3, tl.load(state_ptr + 3) + is_other.to(tl.int32))
    tiles = tl.where(is_other, tl.cdiv(R, BLOCK_R) * tl.cdiv(C, BLOCK_C), 0)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, col, x = _tile(x_ptr, tile, R, C, C16, stride_xm, WHOLE, BLOCK_R, BLOCK_C)
        _store(data_ptr, data_t_ptr, x * scale, row, col, R, C, R16, C16, BLOCK_R, BLOCK_C)


def _launch(x: Tensor, state: Tensor, format: str, out: Current) -> None:
    (R, C), target = x.shape, Target.of(x.device)
    data, data_t = (t if t.numel() else None for t in out[:2])
    plan = plan_tile("tensor", data is not None, data_t is not None, target)
    tiles = cdiv(R, plan.block_r) * cdiv(C, plan.block_c)
    last = state[:_CALLS].clone()
    sizes = R, C, padded(R), padded(C), x.stride(0)
    options = {"WHOLE": C % ALIGN == 0, "BLOCK_R": plan.block_r, "BLOCK_C": plan.block_c, "num_warps": plan.num_warps}
    _quantize_last_kernel[(tiles,)](x, last, data, data_t, *sizes, **options)
    _quantize_again_kernel[(min(tiles, _PROGRAMS * target.num_sms),)](
        x, last, data, data_t, out.scale, out.scale_inv, state, out.state, *sizes, MAX=MAX[format], **options
    )


def _outputs(x: Tensor, state: Tensor, format: str, rows: bool, columns: bool, kernel: bool) -> Current:
    R, C = x.shape
    data = x.new_empty((R, padded(C)) if rows else 0, dtype=DTYPES[format])
    data_t = x.new_empty((C, padded(R)) if columns else 0, dtype=DTYPES[format])
    scale, scale_inv = (x.new_empty(1, dtype=torch.float32) for _ in range(2))
    return Current(data, data_t, scale, scale_inv, state.new_empty(4))


def _quantize_current(x: Tensor, state: Tensor, format: str, rows: bool, columns: bool, kernel: bool) -> Current:
    if x.numel() and kernel and kernels_serve(x) and _kernels_serve(x):
        out = _outputs(x, state, format, rows, columns, kernel)
        _launch(as_rows(x), state, format, out)
        return out
    data, data_t, scale, scale_inv, *_ = quantize_op(
        x, None, None, None, "tensor", format, True, rows, columns, False, kernel
    )
    # an empty tensor has no amax, and is no call
    return Current(data, data_t, scale, scale_inv, _next(scale, state) if x.numel() else state.clone())


def _write_state(states: Tensor, new: Tensor, first: int) -> None:
    states[first : first + new.shape[0]].copy_(new)


quantize_current_op = Op(
    "fp8_quantize_current(Tensor x, Tensor state, str format, bool rows, bool columns, bool kernel) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _quantize_current,
    _outputs,
)
# new [n, 4] in place of the states from `first` on
write_state_op = Op(
    "fp8_write_state(Tensor(a!) states, Tensor new, int first) -> ()", _write_state, lambda states, new, first: None
)
_self_tests: dict[torch.dtype, dict[int | None, str | None]] = defaultdict(dict)


def _kernels_serve(x: Tensor) -> bool:
    """Whether the kernels' bytes are right on x's device; elsewhere those of two passes quantize."""
    op = f"fp8_quantize_current of {checks.name(x.dtype)}"
    return serves(_self_tests[x.dtype], x.device, op, partial(_self_test, dtype=x.dtype), "fp8_quantize is used")


def _self_test(device: torch.device, dtype: torch.dtype) -> str | None:
    """Every byte without a last scale, with the right one and with others, which saturate and underflow."""
    special = special_values().to(dtype)
    for format in DTYPES:
        # of special values the scale is 1, as NaN is among them: 127 exponents less is no scale
        for x, lasts in ((special, (-127, 0)), (special[20:120], (9, -9))):
            right = int(quantize_current_ref(x, torch.zeros(4, dtype=torch.int32, device="cpu"), format).state[_SCALE])
            for last in (right + (exponents << 23) for exponents in lasts):
                state = torch.tensor([last, 0, 7, 3], dtype=torch.int32, device="cpu")
                out = _outputs(x.to(device), state.to(device), format, True, True, True)
                _launch(x.to(device), state.to(device), format, out)
                for part, found, exact in zip(
                    Current._fields, out, quantize_current_ref(x, state, format), strict=True
                ):
                    if not _equal(found, exact):
                        return f"{part} in {format} differs from its formula (triton {triton.__version__})"
    return None


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.cpu(), b) if a.dtype is torch.int32 else same_bits(a, b)


def new_states(count: int, device: torch.device) -> Tensor:
    """States of `count` tensors that have not been quantized yet."""
    return torch.zeros((count, 4), dtype=torch.int32, device=device)


def repeated_share(state: Tensor) -> Tensor:
    """[1] float32: the share of calls that had to quantize again; 0 before the first."""
    return state[_REPEATS:].float() / state[_CALLS:_REPEATS].clamp(min=1)


def fp8_quantize_current(
    x: Tensor, state: Tensor, format: str = "e4m3", *, rows: bool = True, columns: bool = True
) -> Copies:
    """x and its transpose in FP8 by x's own scale: `fp8_quantize(x, "tensor", format)`, in one read of x in most calls.

    Shapes: R rows, C columns.
        x         [R, C]  float32, float16 or bfloat16 (float64 on the CPU, taken as float32); any strides
        state     [4]     int32, a row of `new_states`; in place: the last scale, and counts. Results do not
                          depend on it; it should be of a tensor of the same role, whose magnitudes are alike
        format            "e4m3" or "e5m2"
        rows, columns     whether the copy [R, C] and the transposed one [C, R] are wanted
    Returns `Copies` without amax.
    Numerics: the formulas of ops/fp8/formulas.py with scales that are powers of two, to the bit; deterministic.
    Raises ValueError naming the argument, the expected value and the given one. No gradient is defined.
    """
    op = "fp8_quantize_current"
    checks.floating(op, x=x)
    checks.same_device(op, "x", x, state=state)
    checks.require(x.dim() == 2, op, "x", "be [R, C]", list(x.shape))
    checks.one_of(op, "format", format, tuple(DTYPES))
    checks.shape(op, "state", state, (4,), "of one tensor")
    checks.require(state.dtype is torch.int32, op, "state", "be int32", checks.name(state.dtype))
    current = Current(*quantize_current_op(x.detach(), state, format, rows, columns, use_kernel("fp8_linear", x)))
    write_state_op(state[None], current.state[None], 0)
    return current.copies
