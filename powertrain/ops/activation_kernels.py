"""Kernels of activations, plain and gated, their plan and launches; activations.py has the formulas."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from powertrain.ops.column_sums import PartialSums, store_sum
from powertrain.ops.early_start import starts_early_if_small, wait_then_let_next_start
from powertrain.ops.flat_elements import (
    BLOCK,
    REST,
    WARPS,
    flat_places,
    goes_by_eights,
    goes_flat,
    rows_of_eight,
    whole_vectors,
)
from powertrain.ops.shapes import as_rows, cdiv, empty, next_power_of_2
from powertrain.runtime.launch import kernel
from powertrain.runtime.settings import settings
from powertrain.runtime.target import Target
from powertrain.runtime.tuning import tunable

# the interpreter has no inline PTX
_INTERPRETED = tl.constexpr(settings().interpret)


def split_halves(x: Tensor, up: Tensor | None, order: str) -> tuple[Tensor, Tensor]:
    """The gate and the up half, views of a packed x."""
    if up is not None:
        return x, up
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return (first, second) if order == "gate_first" else (second, first)


@triton.jit
def _sigmoid(w):
    """σ(w) and 1 - σ(w), the latter without cancellation (which GELU's slope multiplies by about 10)."""
    e = tl.exp(-w)
    s = 1.0 / (1.0 + e)
    # where e is infinite s is 0, as it must be: a caller multiplies it by numbers as large as w
    return s, tl.where(e == float("inf"), 1.0, e * s)


@triton.jit
def _reciprocal(x):
    """1 / x of normal numbers, by the hardware's approximation (1 ulp); a division tests for others first."""
    if _INTERPRETED:
        y = 1.0 / x
    else:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def _exp2(x):
    """2^x by the hardware's approximation (2 ulp), 0 where it is no normal number, for which `tl.exp2` tests first."""
    if _INTERPRETED:
        y = tl.exp2(x)
    else:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def _normal_cdf(z):
    """Φ(z) by a polynomial for erfc (W. J. Cody's form; Numerical Recipes, 2nd ed., 6.2), whose constants are rewritten
    for Φ and for base 2. Within 1.2e-7 of the value itself on both sides, in float32 within 1e-6 to 3 deviations. The
    erf of libdevice takes twice the instructions, and 1 + erf(z) cancels for negative z."""
    t = _reciprocal(1.0 + 0.3535533906 * tl.abs(z))
    p = -1.1861149451 + t * 0.2465172979
    p = 2.1474744639 + t * p
    p = -1.6377531523 + t * p
    p = 0.4023215817 + t * p
    p = -0.2687568603 + t * p
    p = 0.1396300565 + t * p
    p = 0.5397006155 + t * p
    p = 1.4427292039 + t * p
    p = -2.8257482184 + t * p
    tail = t * _exp2(p - 0.7213475204 * (z * z))
    return tl.where(z < 0.0, tail, 1.0 - tail)


@triton.jit
def activate(z, KIND: tl.constexpr):
    """act(z) and act'(z)."""
    if KIND == "gelu":
        cdf = _normal_cdf(z)
        value = z * cdf
        slope = cdf + z * 0.3989422804014327 * _exp2(-0.7213475204 * (z * z))
    elif KIND == "gelu_tanh":
        # ½(1 + tanh(u)) = σ(2u): one exponential, no cancellation
        s, rest = _sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
        value = z * s
        slope = s + value * rest * (1.5957691216057308 * (1.0 + 0.134145 * z * z))
    elif KIND == "quick_gelu":
        s, rest = _sigmoid(1.702 * z)
        value = z * s
        slope = s + 1.702 * rest * value
    elif KIND == "silu":
        s, rest = _sigmoid(z)
        value = z * s
        slope = s + value * rest
    elif KIND == "relu":
        # max(z, 0) would turn NaN into 0; PyTorch keeps it
        value = tl.where(z <= 0, 0.0, z)
        slope = tl.where(z <= 0, 0.0, 1.0)
    else:
        value = tl.where(z <= 0, 0.0, z * z)
        slope = 2.0 * tl.where(z <= 0, 0.0, z)
    return value, slope


@triton.jit
def activate_gated(gate, up, limit, alpha, KIND: tl.constexpr):
    """y and its derivatives by gate and by up."""
    if KIND == "clamped_swiglu":
        # written so that nan stays nan
        g = tl.where(gate > limit, limit, gate)
        u = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        s, rest = _sigmoid(alpha * g)
        by_up = g * s
        y = by_up * (u + 1.0)
        by_gate = tl.where(gate > limit, 0.0, (s + alpha * by_up * rest) * (u + 1.0))
        by_up = tl.where((up > limit) | (up < -limit), 0.0, by_up)
    else:
        by_up, slope = activate(gate, KIND)
        y = by_up * up
        by_gate = slope * up
    return y, by_gate, by_up


@triton.jit
def _bias_at(bias_ptr, cols, mask):
    """In float32, or None."""
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)  # the shape of cols
    else:
        bias = None
    return bias


@triton.jit
def _load(x_ptr, bias, rows, cols, stride_m, mask):
    x = tl.load(x_ptr + rows * stride_m + cols, mask=mask, other=0.0).to(tl.float32)  # the shape of rows + cols
    if bias is not None:
        x += bias
    return x


@kernel(aligned=("N",), down_to=2)
def _activation_fwd_kernel(
    x_ptr,
    up_ptr,
    bias_ptr,
    up_bias_ptr,
    y_ptr,
    M,
    N,
    stride_xm,
    stride_um,
    limit,
    alpha,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    wait_then_let_next_start(STARTS_EARLY)
    col_blocks = tl.cdiv(N, BLOCK_N)
    rows = (tl.program_id(0) // col_blocks * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    cols = (tl.program_id(0) % col_blocks * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (rows < M) & (cols < N)

    x = _load(x_ptr, _bias_at(bias_ptr, cols, cols < N), rows, cols, stride_xm, mask)
    if up_ptr is not None:
        up = _load(up_ptr, _bias_at(up_bias_ptr, cols, cols < N), rows, cols, stride_um, mask)
        y, _, _ = activate_gated(x, up, limit, alpha, KIND)
    else:
        y, _ = activate(x, KIND)
    tl.store(y_ptr + rows * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)  # [BLOCK_M, BLOCK_N]


@kernel()
def _activation_fwd_flat_kernel(
    x_ptr, up_ptr, bias_ptr, up_bias_ptr, y_ptr, size, N, inverse, stride_xm, stride_um, limit, alpha,
    KIND: tl.constexpr, DENSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows that flat_elements.py says are better taken flat. DENSE: so are those of x, and of up."""
    base = tl.program_id(0).to(tl.int64) * BLOCK
    whole = whole_vectors(size)
    _activate_flat(
        x_ptr, up_ptr, bias_ptr, up_bias_ptr, y_ptr, base, whole, N, inverse, stride_xm, stride_um, limit, alpha,
        KIND, DENSE, BLOCK,
    )  # fmt: skip
    if (base == 0) & (whole < size):
        _activate_flat(
            x_ptr, up_ptr, bias_ptr, up_bias_ptr, y_ptr, base + whole, size, N, inverse, stride_xm, stride_um, limit,
            alpha, KIND, DENSE, REST,
        )  # fmt: skip


@triton.jit
def _activate_flat(
    x_ptr, up_ptr, bias_ptr, up_bias_ptr, y_ptr, base, end, N, inverse, stride_xm, stride_um, limit, alpha,
    KIND: tl.constexpr, DENSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    places, first_row, behind, rows = flat_places(base, N, inverse, BLOCK)
    mask = places < end
    x = _load_flat(x_ptr, bias_ptr, places, first_row, behind, rows, N, stride_xm, mask, DENSE)
    if up_ptr is not None:
        up = _load_flat(up_ptr, up_bias_ptr, places, first_row, behind, rows, N, stride_um, mask, DENSE)
        y, _, _ = activate_gated(x, up, limit, alpha, KIND)
    else:
        y, _ = activate(x, KIND)
    tl.store(y_ptr + places, y.to(y_ptr.dtype.element_ty), mask=mask)  # [BLOCK]


@triton.jit
def _load_flat(x_ptr, bias_ptr, places, first_row, behind, rows, N, stride_m, mask, DENSE: tl.constexpr):
    if DENSE:
        x = tl.load(x_ptr + places, mask=mask, other=0.0)  # [BLOCK]
    else:
        x_ptr += first_row * stride_m
        x = tl.load(x_ptr + (behind + rows * (stride_m - N)), mask=mask, other=0.0)  # [BLOCK]
    x = x.to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + behind - rows * N, mask=mask, other=0.0).to(tl.float32)  # [BLOCK]
    return x


@triton.jit
def _activation_bwd_tile(
    dy_ptr, x_ptr, up_ptr, bias, up_bias, dx_ptr, dup_ptr, rows, cols, M, N,
    stride_dym, stride_xm, stride_um, stride_dm, limit, alpha, KIND: tl.constexpr,
):  # fmt: skip
    mask = (rows < M) & (cols < N)
    dy = tl.load(dy_ptr + rows * stride_dym + cols, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_N]
    x = _load(x_ptr, bias, rows, cols, stride_xm, mask)
    if up_ptr is not None:
        # computed anew from the inputs: saving the activation would cost a tensor as large as the result
        up = _load(up_ptr, up_bias, rows, cols, stride_um, mask)
        _, by_gate, by_up = activate_gated(x, up, limit, alpha, KIND)
        dx = dy * by_gate
        dup = dy * by_up
        if dup_ptr is not None:
            # [BLOCK_M, BLOCK_N]
            tl.store(dup_ptr + rows * stride_dm + cols, dup.to(dup_ptr.dtype.element_ty), mask=mask)
    else:
        _, slope = activate(x, KIND)
        dx = dy * slope
        dup = dx
    if dx_ptr is not None:
        tl.store(dx_ptr + rows * stride_dm + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)  # [BLOCK_M, BLOCK_N]
    return dx, dup


@kernel(aligned=("N",), unaligned=("dbias_partial_ptr", "dup_bias_partial_ptr"), down_to=2)
def _activation_bwd_kernel(
    dy_ptr,
    x_ptr,
    up_ptr,
    bias_ptr,
    up_bias_ptr,
    dx_ptr,
    dup_ptr,
    dbias_partial_ptr,
    dup_bias_partial_ptr,
    M,
    N,
    bias_size,
    stride_dym,
    stride_xm,
    stride_um,
    stride_dm,
    limit,
    alpha,
    KIND: tl.constexpr,
    REPEATS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    """REPEATS: a row stands for several, and the bias is that of each."""
    wait_then_let_next_start(STARTS_EARLY)
    col_blocks = tl.cdiv(N, BLOCK_N)
    first = tl.program_id(0) // col_blocks
    lanes = tl.arange(0, BLOCK_M)[:, None]
    cols = (tl.program_id(0) % col_blocks * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    of_bias = cols
    if REPEATS:
        of_bias = cols % bias_size
    # loaded before the loop: the compiler moves no load past the loop's stores
    bias = _bias_at(bias_ptr, of_bias, cols < N)
    up_bias = _bias_at(up_bias_ptr, of_bias, cols < N)
    if dbias_partial_ptr is not None:
        programs = tl.num_programs(0) // col_blocks
        dbias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        dup_bias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        # a bias's gradient is summed over rows by one program as far as possible: no atomics, the same bits every time
        for block in tl.range(first, tl.cdiv(M, BLOCK_M), programs, num_stages=STAGES):
            dx, dup = _activation_bwd_tile(
                dy_ptr, x_ptr, up_ptr, bias, up_bias, dx_ptr, dup_ptr, (block * BLOCK_M + lanes).to(tl.int64), cols,
                M, N, stride_dym, stride_xm, stride_um, stride_dm, limit, alpha, KIND,
            )  # fmt: skip
            dbias += dx
            dup_bias += dup
        partial = first.to(tl.int64) * N + cols
        store_sum(dbias_partial_ptr + partial, dbias, cols < N)
        if dup_bias_partial_ptr is not None:
            store_sum(dup_bias_partial_ptr + partial, dup_bias, cols < N)
    else:
        _activation_bwd_tile(
            dy_ptr, x_ptr, up_ptr, bias, up_bias, dx_ptr, dup_ptr, (first * BLOCK_M + lanes).to(tl.int64), cols,
            M, N, stride_dym, stride_xm, stride_um, stride_dm, limit, alpha, KIND,
        )  # fmt: skip


class _Plan(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    row_blocks: int  # programs that share the rows
    col_blocks: int


_FEW = 8192  # elements for each SM
_FEW_OF_ODD_ROWS = 1024


@tunable("NVIDIA H200, 2026-11-24")
def _plan(M: int, N: int, per_thread: int, target: Target) -> _Plan:
    """Blocks of 2048 elements. Of two streams one 16-byte vector a thread keeps enough loads in flight: swiglu
    25000x4304 bf16 on an H200 took 0.1517 ms with 8 elements a thread and 0.1523 with 16 (a copy 0.1518), its backward
    0.2550 and 0.2563 (0.2530). The one stream of a plain forward wants four: gelu_tanh 25000x4304 took 0.1071 ms with
    32, 0.1104 with 16 and 0.1239 with 8 (0.1012), its backward 0.1549 with 16 and 0.1685 with 8 (0.1518)."""
    block, of_an_sm = 2048, cdiv(M * N, target.num_sms)
    if of_an_sm <= _FEW:
        # nothing hides the time of a load: one vector a thread. us, one H200, in a graph, gelu bf16, blocks of 512,
        # 1024, and 2048 with 32 a thread: 16384 elements 0.81, 0.86, 2.4; 131072 1.24, 1.20, 2.6; 2^20 2.82, 2.05, 3.4
        block, per_thread = (512 if of_an_sm <= 1024 else 1024), 8
    # little of a block beyond the row: 3072 is 3 x 1024, and of 4304 three blocks of 2048 would leave a third idle
    widths = [width for width in (2048, 1024, 512, 256, 128, 64) if width <= min(block, next_power_of_2(N))]
    widths = widths or [next_power_of_2(N)]
    least = min(cdiv(N, width) * width for width in widths)
    block_n = next(width for width in widths if cdiv(N, width) * width <= max(1.1 * N, least))
    block_m = max(1, min(block // block_n, next_power_of_2(M)))
    warps = max(1, block_m * block_n // (32 * per_thread))
    return _Plan(block_m, block_n, warps, cdiv(M, block_m), cdiv(N, block_n))


# rows of which one program sums a bias's gradient: no partial sums, no second launch
_FEW_SUMMED = 256
_MOST_GATED, _MOST_PLAIN = 1 << 25, 1 << 26  # elements of small tiles


@tunable("NVIDIA H200, 2026-11-28")
def _plan_bwd(M: int, N: int, gated: bool, sums: bool, target: Target) -> _Plan:
    """sums: of a bias's gradient, for which programs go on to later blocks of rows."""
    if not sums:
        return _plan(M, N, 8 if gated else 16, target)
    if M <= _FEW_SUMMED:
        # us, one H200, gelu, in a graph, this, two launches of tiles of 2048 elements; torch.compile: 16x4928 1.7, 3.2;
        # 2.0. 56x768 2.1, 3.2; 2.6. 128x4928 3.6, 5.8; 4.8. 256x768 4.4, 3.6; 5.2. 256x26576 13.9, 17.8; 19.1
        block_m, block_n = min(32, next_power_of_2(M)), min(32, next_power_of_2(N))
        return _Plan(block_m, block_n, max(1, block_m * block_n // 256), 1, cdiv(N, block_n))
    if M * N <= (_MOST_GATED if gated else _MOST_PLAIN) or (N < 2048 and not gated):
        # tall tiles have fewer programs to a column, so fewer partial sums. us, this, tiles of 2048 elements:
        #   gelu 87381x768 112, 165; 8192x768 20.0, 25.2; 2048x11096 48.8, 47.2; 32752x2049, eight rows as one, 137, 201
        #   geglu 4096x3072 40.3, 52.5; 8192x4096 92, 103; 1024x11096 39.8, 49.8; 16384x11096 674, 533
        block_m, block_n, warps, per_sm = 16, min(64, next_power_of_2(N)), 4, 4 if gated else 8
    else:
        plan = _plan(M, N, 8 if gated else 16, target)
        block_m, block_n, warps, per_sm = plan.block_m, plan.block_n, plan.num_warps, 8
    col_blocks = cdiv(N, block_n)
    programs = min(cdiv(M, block_m), max(1, target.num_sms * per_sm // max(1, col_blocks)))
    return _Plan(block_m, block_n, warps, programs, col_blocks)


def _stages(plan: _Plan, gated: bool, repeats: bool) -> int:
    """Pipeline stages of the loop over rows that sums a bias's gradient.

    us, one H200, bf16, 1, 2, 3 stages; torch.compile: gelu 87381x768 169 188 175; 193. 21845x3072 163 123 158; 192.
    6096x11008 155 118 151; 221. gelu_tanh 16384x4096 176 128 132; 153. swiglu 8192x4096 124 127 118; 204. geglu
    4096x3072 86 72 64; 142. Eight rows as one: gelu 422068x159 186 200 181; 232. 32752x2049 165 193 173; 219.
    6096x11007 188 211 184; 251."""
    return 3 if gated or repeats or plan.block_n < 1024 else 2


# beyond it a launch for the last few elements is nothing beside the other one
_MANY = 1 << 22


def _in_rows(*tensors: Tensor | None) -> list[list[Any]]:
    """Tensors of one shape as rows for one launch or two, where the op is element by element.

    Dense memory is one row, whatever its width: rows of 4304 would leave lanes idle at the end of each, and rows of
    3417 would be loaded one by one. A large tensor that is no multiple of 16 elements has a second row, of the rest.
    """
    some = [x for x in tensors if x is not None]
    size = some[0].numel()
    rest = size % 16
    if size and all(x.is_contiguous() for x in some):
        if not rest:
            return [[x if x is None else x.view(1, size) for x in tensors]]
        if size >= _MANY:
            whole = [x if x is None else x.view(-1)[:-rest].view(1, -1) for x in tensors]
            return [whole, [x if x is None else x.view(-1)[-rest:].view(1, rest) for x in tensors]]
    return [[x if x is None else as_rows(x) for x in tensors]]


def _halves(x: Tensor, up: Tensor | None, order: str, gated: bool) -> tuple[Tensor, Tensor | None]:
    """x as rows, or gate and up as rows."""
    if not gated:
        return as_rows(x), None
    if up is not None:
        return as_rows(x), as_rows(up)
    return split_halves(as_rows(x), None, order)


def _bias_halves(bias: Tensor | None, order: str, gated: bool) -> tuple[Tensor | None, Tensor | None]:
    return (bias, None) if bias is None or not gated else split_halves(bias, None, order)


def activation_fwd_outputs(
    x: Tensor, up: Tensor | None, bias: Tensor | None, kind: str, order: str, gated: bool, limit: float, alpha: float
) -> Tensor:
    N = x.shape[-1] // 2 if gated and up is None else x.shape[-1]
    return x.new_empty((*x.shape[:-1], N))


def activation_fwd(
    x: Tensor, up: Tensor | None, bias: Tensor | None, kind: str, order: str, gated: bool, limit: float, alpha: float
) -> Tensor:
    y = activation_fwd_outputs(x, up, bias, kind, order, gated, limit, alpha)
    if bias is None and (not gated or up is not None):
        parts = _in_rows(x, up, y)
    else:
        parts = [[*_halves(x, up, order, gated), y]]
    gate_bias, up_bias = _bias_halves(bias, order, gated)
    target = Target.of(x.device)
    for gate, up_rows, out in parts:
        M, N = gate.shape
        stride_xm, stride_um = gate.stride(0), 0 if up_rows is None else up_rows.stride(0)
        many = M * N > _FEW_OF_ODD_ROWS * target.num_sms
        if many and _goes_flat(N, x.element_size(), gated and bias is not None, stride_xm, stride_um):
            _activation_fwd_flat_kernel[(cdiv(M * N, BLOCK),)](
                gate, up_rows, gate_bias, up_bias, out, M * N, N, 1 / N, stride_xm, stride_um, limit, alpha,
                KIND=kind, DENSE=stride_xm == N and (up_rows is None or stride_um == N), BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip
            continue
        plan = _plan(M, N, 8 if gated else 32, target)
        programs = plan.row_blocks * plan.col_blocks
        _activation_fwd_kernel[(programs,)](
            gate, up_rows, gate_bias, up_bias, out,
            M, N, stride_xm, stride_um, limit, alpha,
            KIND=kind, BLOCK_M=plan.block_m, BLOCK_N=plan.block_n,
            STARTS_EARLY=starts_early_if_small(target, programs, M * N), num_warps=plan.num_warps,
        )  # fmt: skip
    return y


def _goes_flat(N: int, itemsize: int, biased_gates: bool, *strides: int) -> bool:
    """biased_gates: a bias is added to packed gates.

    Flat access loads a bias and packed gates element by element; rows of even widths are loaded in vectors. us, one
    H200, 2^25 elements, by rows, flat: gelu with a bias 300 columns 54, 60; 777 72, 60; 1002 43, 60; 18002 43, 60.
    swiglu, then with a bias 300 33, 35; 33, 42. 770 33, 35; 34, 48. 18002 31, 36; 32, 48. geglu with a bias 777 50, 51;
    3001 41, 51."""
    return N % 2 == 1 and not (biased_gates and N > 1024) and goes_flat(N, itemsize, *strides)


def activation_bwd_outputs(
    dy: Tensor,
    x: Tensor,
    up: Tensor | None,
    bias: Tensor | None,
    kind: str,
    order: str,
    gated: bool,
    limit: float,
    alpha: float,
    *need: bool,  # dx, dup, dbias
) -> tuple[Tensor, Tensor, Tensor]:
    need_dx, need_dup, need_dbias = need
    dx = x.new_empty(x.shape) if need_dx else empty(x)
    dup = up.new_empty(up.shape) if up is not None and need_dup else empty(x)
    dbias = bias.new_empty(bias.shape) if bias is not None and need_dbias else empty(x)
    return dx, dup, dbias


def activation_bwd(
    dy: Tensor,
    x: Tensor,
    up: Tensor | None,
    bias: Tensor | None,
    kind: str,
    order: str,
    gated: bool,
    limit: float,
    alpha: float,
    *need: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    need_dx, need_dup, need_dbias = need
    outputs = activation_bwd_outputs(dy, x, up, bias, kind, order, gated, limit, alpha, *need)
    dx, dup, dbias = outputs
    dgate: Tensor | None = dx if need_dx else None
    dup_half: Tensor | None = dup if up is not None and need_dup else None
    if gated and up is None and need_dx:
        dgate, dup_half = split_halves(as_rows(dx), None, order)
    parts: list[list[Any]]
    if bias is None and (not gated or up is not None):
        parts = _in_rows(dy, x, up, dgate, dup_half)
    else:
        grads = [None if d is None else as_rows(d) for d in (dgate, dup_half)]
        grad_rows = as_rows(dy)
        part: list[Any] = [grad_rows, *_halves(x, up, order, gated), *grads]
        all_dense = all(t.is_contiguous() for t in part if t is not None)
        by_eights = need_dbias and all_dense and goes_by_eights(len(grad_rows), grad_rows.shape[1], x.element_size())
        parts = rows_of_eight(*part) if by_eights else [part]
    gate_bias, up_bias = _bias_halves(bias, order, gated)
    target, bias_size = Target.of(dy.device), 0 if gate_bias is None else len(gate_bias)
    outs = (None, None) if not need_dbias else split_halves(dbias, None, order) if gated else (dbias, None)
    plans = [_plan_bwd(part[1].shape[0], part[1].shape[1], gated, need_dbias, target) for part in parts]
    # a row of a part may stand for several
    rows = [plan.row_blocks * part[1].shape[1] // max(1, bias_size) for plan, part in zip(plans, parts, strict=True)]
    sums = PartialSums(outs, *rows)
    for part, plan, partials in zip(parts, plans, sums.launches, strict=True):
        grad, gate, up_rows, dgate, dup_half = part
        M, N = gate.shape
        grid, repeats = plan.row_blocks * plan.col_blocks, need_dbias and bias_size != N
        stride_dm = next((d.stride(0) for d in (dgate, dup_half) if d is not None), N)
        _activation_bwd_kernel[(grid,)](
            grad, gate, up_rows, gate_bias, up_bias, dgate, dup_half, *partials,
            M, N, bias_size, grad.stride(0), gate.stride(0), 0 if up_rows is None else up_rows.stride(0), stride_dm,
            limit, alpha, KIND=kind, REPEATS=repeats, BLOCK_M=plan.block_m, BLOCK_N=plan.block_n,
            STAGES=_stages(plan, gated, repeats) if need_dbias else 1,
            STARTS_EARLY=starts_early_if_small(target, grid, M * N), num_warps=plan.num_warps,
        )  # fmt: skip
    sums.add_up()
    return outputs
