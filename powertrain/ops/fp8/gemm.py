"""FP8 GEMM, both operands contiguous along K: out = (a * its scales) (b * its scales)ᵀ + bias.

    out[m, n] = bias[n] + Σ_g sa[m, g] sb[n, g] Σ_{k in g} a[m, k] b[n, k]      groups g of 128 along K
    sa, sb: [1] (tensor), [rows] (row), [rows, K / 128] (group) or [rows / 128, K / 128] (block) values

With scales of tensors and rows they leave the sum over g. An FP8 product keeps about 14 bits of its sum on sm_90
(DeepGEMM#37, CUTLASS#3149), so the sum of each group is added to a float32 one; `fast` leaves that out.

Backends: `hopper`, our kernel for sm_90 (ops/fp8/hopper_gemm.py), where it was measured faster than `torch`,
torch._scaled_mm (cuBLASLt, CUTLASS), or serves a kind of scales or a size that torch does not: a small test product
shows what this build and device support; `triton`, our kernel for the other GPUs with FP8; `emulated` elsewhere: the
formula in PyTorch, as slow as float32.
2 M N K operations; M K + N K bytes read, those of out written.
"""

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from powertrain.ops.fp8 import hopper_gemm
from powertrain.ops.fp8.formulas import DTYPES, GROUP, Quantized, fp8_gemm_ref, granularity, scale_strides, spread
from powertrain.ops.fp8.quantize import kernels_serve
from powertrain.ops.shapes import cdiv
from powertrain.runtime import checks, recording, tracing
from powertrain.runtime.dispatch import Op, use_kernel, without_autocast
from powertrain.runtime.flops import Shape
from powertrain.runtime.launch import kernel
from powertrain.runtime.target import Target
from powertrain.runtime.tuning import tunable

BACKENDS = ("hopper", "torch", "triton", "emulated")


@kernel(aligned=("K",), unaligned=("sa_ptr", "sb_ptr"))
def _fp8_gemm_kernel(
    a_ptr,
    b_ptr,
    sa_ptr,
    sb_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    stride_am,
    stride_bn,
    stride_om,
    step_am,  # of scales; as strides they would be among those that must all be multiples of 16
    step_ag,
    step_bn,
    step_bg,
    A_ROWS: tl.constexpr,  # rows of a that share a scale: 1 or 128
    B_ROWS: tl.constexpr,
    BY_GROUP: tl.constexpr,  # scales differ along K
    ACCUMULATE: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    # GROUP_M tiles of rows by all columns, rows first: their operands stay in L2
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    first_m = tile // (GROUP_M * tiles_n) * GROUP_M
    height = tl.minimum(tiles_m - first_m, GROUP_M)
    tile -= first_m * tiles_n
    row, col = (first_m + tile % height) * BLOCK_M, tile // height * BLOCK_N
    lanes_m, lanes_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    rows, cols = row + lanes_m, col + lanes_n
    sa_ptr += (rows // A_ROWS).to(tl.int64) * step_am
    sb_ptr += (cols // B_ROWS).to(tl.int64) * step_bn
    # 64 bits for a tile's place, 32 within it
    a_ptr += row.to(tl.int64) * stride_am
    b_ptr += col.to(tl.int64) * stride_bn
    if TMA:
        # beyond the last row they give zeros
        a_desc = tl.make_tensor_descriptor(a_ptr, [M - row, K], [stride_am, 1], [BLOCK_M, BLOCK_K])
        b_desc = tl.make_tensor_descriptor(b_ptr, [N - col, K], [stride_bn, 1], [BLOCK_N, BLOCK_K])

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    sa = tl.load(sa_ptr, mask=rows < M, other=0.0)  # [BLOCK_M]
    sb = tl.load(sb_ptr, mask=cols < N, other=0.0)  # [BLOCK_N]
    for k in range(0, K, BLOCK_K):
        if TMA:
            a = a_desc.load([0, k])  # [BLOCK_M, BLOCK_K]
            b = b_desc.load([0, k])  # [BLOCK_N, BLOCK_K]
        else:
            ks = k + tl.arange(0, BLOCK_K)
            in_k = (ks < K)[None, :]
            # [BLOCK_M, BLOCK_K], [BLOCK_N, BLOCK_K]
            a = tl.load(a_ptr + lanes_m[:, None] * stride_am + ks[None, :], mask=(rows < M)[:, None] & in_k, other=0.0)
            b = tl.load(b_ptr + lanes_n[:, None] * stride_bn + ks[None, :], mask=(cols < N)[:, None] & in_k, other=0.0)
        if BY_GROUP:
            # the next group's, so that the product hides their way from memory
            sa_ptr += step_ag
            sb_ptr += step_bg
            more = k + BLOCK_K < K
            next_sa = tl.load(sa_ptr, mask=(rows < M) & more, other=0.0)  # [BLOCK_M]
            next_sb = tl.load(sb_ptr, mask=(cols < N) & more, other=0.0)  # [BLOCK_N]
        # a sum of its own for each block of K: the products' own one keeps too few bits
        part = tl.dot(a, b.T)
        if BY_GROUP:
            acc += part * (sa[:, None] * sb[None, :])
            sa, sb = next_sa, next_sb
        else:
            acc += part
    if not BY_GROUP:
        acc *= sa[:, None] * sb[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    where = out_ptr + row.to(tl.int64) * stride_om + col + lanes_m[:, None] * stride_om + lanes_n[None, :]
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    if ACCUMULATE:
        acc += tl.load(where, mask=mask, other=0.0)
    tl.store(where, acc.to(out_ptr.dtype.element_ty), mask=mask)  # [BLOCK_M, BLOCK_N]


class _Plan(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False


@tunable("NVIDIA H200, 2026-11-23", ("num_stages",))
def _plan(M: int, N: int, by_group: bool, target: Target) -> _Plan:
    """Tiles of out; a block of K is 128, the groups' length."""
    if target.arch == 90:
        # 8192^3 on one H200, TFLOP/s, tensor, group x block, group x group; cuBLAS has 1277, 1162
        # tiles, warps, stages: 128x128 8 4  854, 634, 483     128x256 8 3  879, 638, 638     256x128 8 3  882, 352, 257
        #                       128x128 4 4  788, 420, 388     64x256 4 3   705, 522, 487     64x128 4 5   716, 503, 391
        # 128x256 spills 112 to 672 bytes since scales are asked for one group ahead
        return _Plan(128, 128, 8, 4, True)
    if target.arch in (100, 103):
        return _Plan(128, 64, 8, 4, True)
    # 128x128 takes 255 registers
    return _Plan(64, 128, 8, 2)


def _form(a: Quantized, b: Quantized) -> tuple[str, str]:
    form = granularity(a), granularity(b)
    # the scale of the only row looks like one of a tensor
    return ("row", "row") if form == ("tensor", "row") and len(a.data) == 1 else form


# form -> those that torch._scaled_mm takes; a product of the others is ours
_TORCH_FORMS = {("tensor", "tensor"), ("row", "row"), ("group", "block"), ("group", "group")}
_probes: dict[Any, str | None] = {}


def why_not_torch(a: Quantized, b: Quantized, out_dtype: torch.dtype, fast: bool) -> str | None:
    """Why torch._scaled_mm cannot compute this product on a GPU with FP8, or None."""
    form, (N, K) = _form(a, b), b.data.shape
    if form not in _TORCH_FORMS:
        return f"it has no product of scales by {form[0]} and by {form[1]}"
    if N % 16:
        return f"N must be a multiple of 16, is {N}"
    if "group" in form and (K % GROUP or a.data.shape[0] % 4 or N % GROUP):
        return f"by groups K and N must be multiples of {GROUP} and M of 4, are {K}, {N} and {a.data.shape[0]}"
    if "block" in form and K % (4 * GROUP):
        # PyTorch's versions differ in whether rows of scales are padded to 4: here both agree
        return f"by blocks K must be a multiple of {4 * GROUP}, is {K}"
    if a.data.is_meta or recording.state.recording is not None:
        return _unsupported_without_device(form, out_dtype, Target.of(a.data.device))
    key = (a.data.device.index, form, a.data.dtype, b.data.dtype, out_dtype, fast)
    if key not in _probes:
        if torch.cuda.is_current_stream_capturing():
            return "it has not been tried on this device, and cannot while a CUDA graph is captured"
        _probes[key] = _probe(form, a.data.dtype, b.data.dtype, out_dtype, fast, a.data.device)
    return _probes[key]


def _unsupported_without_device(form: tuple[str, str], out_dtype: torch.dtype, target: Target) -> str | None:
    """Without the device: forms that PyTorch 2.11 has."""
    if form[0] == "tensor" or (form[0] == "row" and out_dtype is torch.bfloat16):
        return None
    return None if target.arch == 90 and form[0] == "group" else f"sm_{target.arch} is not known to have this form"


def _probe(
    form: tuple[str, str], a_dtype: torch.dtype, b_dtype: torch.dtype, out_dtype: torch.dtype, fast: bool,
    device: torch.device,
) -> str | None:  # fmt: skip
    """Try one product of 128 x 256 x 512, whose values and scales are exact."""
    at = torch.arange(256 * 512, device=device, dtype=torch.int32).view(256, 512)
    operands: list[Quantized] = []
    for by, rows, dtype, period in ((form[0], 128, a_dtype, 7), (form[1], 256, b_dtype, 5)):
        shape = {"tensor": (1,), "row": (rows,), "group": (4, rows), "block": (cdiv(rows, GROUP), 4)}[by]
        scale = torch.exp2((torch.arange(torch.Size(shape).numel(), device=device) % 3).float()).view(shape)
        scale = scale.T if by == "group" else scale
        operands.append(Quantized((at[:rows] % period - period // 2).float().to(dtype), scale))
    try:
        result = _torch(operands[0], operands[1], None, out_dtype, fast)
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error).partition("\n")[0]
    right = fp8_gemm_ref(operands[0], operands[1]).to(out_dtype)
    return None if torch.equal(result, right) else "its result of a small product is wrong"


def _torch(
    a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype, fast: bool, into: Tensor | None = None
) -> Tensor:
    form = _form(a, b)
    sa, sb = a.scale_inv, b.scale_inv
    if form == ("row", "row"):
        sa, sb = sa[:, None], sb[None, :]
    elif form != ("tensor", "tensor"):
        sb = sb.T
    # the one form whose kernels add a bias, of 16 bits
    inside = bias if form[0] == "tensor" and out_dtype is not torch.float32 else None
    fast = fast and form[0] in ("tensor", "row")  # sums of a group are promoted in any case, and `fast` is an error
    given = {} if into is None else {"out": into}
    out: Tensor = torch._scaled_mm(
        a.data, b.data.T, sa, sb, bias=inside, out_dtype=out_dtype, use_fast_accum=fast, **given
    )
    return out if bias is None or bias is inside else out.add_(bias)


def _triton(a: Quantized, b: Quantized, bias: Tensor | None, out: Tensor, accumulate: bool) -> None:
    (M, K), N = a.data.shape, b.data.shape[0]
    form, target = _form(a, b), Target.of(a.data.device)
    by_group = bool({"group", "block"} & set(form))
    if by_group:
        a, b = (q if q.scale_inv.dim() == 2 else _along_groups(q) for q in (a, b))
    plan = _plan(M, N, by_group, target)
    strides = [stride for q in (a, b) for stride in scale_strides(q)]
    _fp8_gemm_kernel[(cdiv(M, plan.block_m) * cdiv(N, plan.block_n),)](
        a.data, b.data, a.scale_inv, b.scale_inv, bias, out, M, N, K, a.data.stride(0), b.data.stride(0),
        out.stride(0), *strides, A_ROWS=GROUP if form[0] == "block" else 1, B_ROWS=GROUP if form[1] == "block" else 1,
        BY_GROUP=by_group, ACCUMULATE=accumulate, TMA=plan.tma and a.data.device.type != "cpu",
        BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, BLOCK_K=GROUP, GROUP_M=8,
        num_warps=plan.num_warps, num_stages=plan.num_stages,
    )  # fmt: skip


def _along_groups(q: Quantized) -> Quantized:
    """Scales of a tensor or of rows beside groups: the same one for each group of a row."""
    scale = q.scale_inv[:, None]
    return Quantized(q.data, scale.expand(q.data.shape[0], cdiv(q.data.shape[1], GROUP)))


def _emulated(a: Quantized, b: Quantized, bias: Tensor | None, out: Tensor, accumulate: bool) -> None:
    """The formula. Products of FP8 values are exact in float32, and TF32 too, before the scales."""
    if {"group", "block"} & set(_form(a, b)):
        total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
        scales = [spread(q.scale_inv, q.data.shape) for q in (a, b)]
        for k in range(0, a.data.shape[1], GROUP):
            part = a.data[:, k : k + GROUP].float() @ b.data[:, k : k + GROUP].float().T
            total += part * (scales[0][:, k : k + 1] * scales[1][:, k][None, :])
    else:
        sa, sb = (q.scale_inv.reshape(-1) for q in (a, b))
        total = (a.data.float() @ b.data.float().T) * (sa[:, None] * sb[None, :])
    total = total if bias is None else total + bias.float()
    out.add_(total) if accumulate else out.copy_(total)


def _into(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor, accumulate: bool,
    fast: bool, backend: str | None, kernel: bool,
) -> None:  # fmt: skip
    if not out.numel():
        return
    x, y = Quantized(a, a_scale), Quantized(b, b_scale)
    # kernels read bias without a stride
    bias = None if bias is None else bias.contiguous()
    if not a.numel():
        total = torch.zeros_like(out) if bias is None else bias.expand_as(out)
        out.add_(total) if accumulate else out.copy_(total)
        return
    backend = backend or _backend_for(x, y, out.dtype, fast, accumulate, kernel, out)
    with without_autocast(out.device):
        if backend == "torch":
            if accumulate:
                out.add_(_torch(x, y, bias, out.dtype, fast))
            elif out.is_contiguous():
                _torch(x, y, bias, out.dtype, fast, out)
            else:
                out.copy_(_torch(x, y, bias, out.dtype, fast))
        elif backend == "hopper":
            hopper_gemm.hopper_fp8_gemm(x, y, out, bias=bias, accumulate=accumulate)
        elif backend == "triton":
            _triton(x, y, bias, out, accumulate)
        else:
            _emulated(x, y, bias, out, accumulate)


def _backend_for(
    a: Quantized, b: Quantized, out_dtype: torch.dtype, fast: bool, accumulate: bool, kernel: bool,
    out: Tensor | None = None,
) -> str:  # fmt: skip
    if not kernel or not kernels_serve(a.data):
        return "emulated"
    (M, K), N, form = a.data.shape, b.data.shape[0], _form(a, b)
    backend, why_not = _choose(a, b, out_dtype, fast, accumulate, out)
    if tracing.first(("fp8_gemm", M, N, K, form, backend)):
        why = "".join(f"; not {name}: {reason}" for name, reason in why_not.items() if reason)
        sizes = f"M{M} N{N} K{K} by {form[0]} and {form[1]}"
        tracing.event("dispatch", f"fp8_gemm {sizes}: {backend}{why}", op="fp8_gemm", backend=backend)
    return backend


def _choose(
    a: Quantized, b: Quantized, out_dtype: torch.dtype, fast: bool, accumulate: bool, out: Tensor | None
) -> tuple[str, dict[str, str | None]]:
    """The backend where our kernels run, and why not those before it."""
    if a.data.device.type == "cpu":
        return "triton", {"torch": "the interpreter runs our kernels"}
    (M, _), N, form = a.data.shape, b.data.shape[0], _form(a, b)
    ours = hopper_gemm.why_not(a, b, out_dtype, out)
    if ours is None and recording.state.recording is None and not a.data.is_meta:
        ours = hopper_gemm.fails_here(a.data.device)
    slower = ours
    if slower is None and fast and form[0] in ("tensor", "row"):
        slower = "with fast accumulation torch is faster"
    slower = slower or hopper_gemm.why_not_faster(M, N, form, accumulate, Target.of(a.data.device))
    if slower is None:
        return "hopper", {}
    theirs = why_not_torch(a, b, out_dtype, fast)
    if theirs is None:
        return "torch", {"hopper": slower}
    return ("triton", {"hopper": ours, "torch": theirs}) if ours else ("hopper", {"torch": theirs})


def _outputs(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype, fast: bool,
    backend: str | None, kernel: bool,
) -> Tensor:  # fmt: skip
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def _fwd(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype, fast: bool,
    backend: str | None, kernel: bool,
) -> Tensor:  # fmt: skip
    x, y = Quantized(a, a_scale), Quantized(b, b_scale)
    if a.numel() and b.numel():
        backend = backend or _backend_for(x, y, out_dtype, fast, False, kernel)
        if backend == "torch":
            with without_autocast(a.device):
                return _torch(x, y, None if bias is None else bias.contiguous(), out_dtype, fast)
    out = _outputs(a, a_scale, b, b_scale, bias, out_dtype, fast, backend, kernel)
    _into(a, a_scale, b, b_scale, bias, out, False, fast, backend, kernel)
    return out


def _flops(a: Shape, b: Shape, **_: Any) -> int:
    return 2 * a[0] * a[1] * b[0]


_OPERANDS = "Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias"
fp8_gemm_op = Op(
    f"fp8_gemm({_OPERANDS}, ScalarType out_dtype, bool fast, str? backend, bool kernel) -> Tensor",
    _fwd,
    _outputs,
    flops=_flops,
)
fp8_gemm_into_op = Op(
    f"fp8_gemm_into({_OPERANDS}, Tensor(a!) out, bool accumulate, bool fast, str? backend, bool kernel) -> ()",
    _into,
    lambda *args: None,
    flops=_flops,
)


def fp8_gemm(
    a: Quantized,
    b: Quantized,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
    fast: bool = False,
    backend: str | None = None,
) -> Tensor:
    """`a bᵀ + bias` of two FP8 operands with their scales, or `out += a bᵀ`; without gradients.

    Shapes: a data [M, K], b data [N, K] as `fp8_quantize` makes them: the columns' copy is b for products over rows.
        out_dtype   bfloat16, float16 or float32, of the result that is made if `out` is not given
        bias  [N]   not with accumulate
        out   [M, N], rows contiguous; with accumulate float32, Megatron's main_grad
        fast        accumulation within the tensor cores alone, about 14 bits on sm_90, where a backend has it
        backend     "hopper", "torch", "triton" or "emulated" instead of the chosen one
    Returns out.
    Numerics: sums of 128 products are added in float32; rounded once to out's dtype, and once more after a bias by
        backend "torch", but by tensor (with accumulate its product and the sum are float32 each). Deterministic. On
        devices without FP8 the same formula in float32.
    Raises ValueError naming the argument, the expected value and the given one.
    """
    _check(a, b, bias, out, accumulate)
    if backend is not None:
        checks.one_of("fp8_gemm", "backend", backend, BACKENDS)
    if backend == "hopper" and a.data.numel() and b.data.numel():
        # its kernel would read scales of other forms, and rows at other addresses, wrongly
        reason = hopper_gemm.why_not(a, b, out_dtype if out is None else out.dtype, out)
        must = "be one that supports these operands"
        checks.require(reason is None, "fp8_gemm", "backend", must, f"hopper: {reason}")
    served = use_kernel("fp8_linear", a.data)
    operands = (a.data, a.scale_inv, b.data, b.scale_inv, bias)
    if out is None:
        result: Tensor = fp8_gemm_op(*operands, out_dtype, fast, backend, served)
        return result
    fp8_gemm_into_op(*operands, out, accumulate, fast, backend, served)
    return out


def _check(a: Quantized, b: Quantized, bias: Tensor | None, out: Tensor | None, accumulate: bool) -> None:
    op = "fp8_gemm"
    checks.same_device(
        op, "a", a.data, b=b.data, bias=bias, out=out, **{"a's scale_inv": a.scale_inv, "b's scale_inv": b.scale_inv}
    )
    for name, q in (("a", a), ("b", b)):
        checks.require(q.data.dtype in DTYPES.values(), op, name, "be FP8", checks.name(q.data.dtype))
        checks.require(q.data.dim() == 2, op, name, "have two dims", list(q.data.shape))
        (rows, cols), shape = q.data.shape, tuple(q.scale_inv.shape)
        groups = cdiv(cols, GROUP)
        known = ((1,), (rows,), (rows, groups), (cdiv(rows, GROUP), groups))
        checks.require(shape in known, op, f"{name}'s scale_inv", f"have a shape among {known}", shape)
    both = a.data.dtype is b.data.dtype is torch.float8_e5m2
    checks.require(not both, op, "b", "be float8_e4m3fn beside a in float8_e5m2", checks.name(b.data.dtype))
    if a.data.shape[1] != b.data.shape[1]:
        checks.fail(op, "b", f"have {a.data.shape[1]} columns", b.data.shape[1])
    M, N = a.data.shape[0], b.data.shape[0]
    checks.shape(op, "bias", bias, (N,), "rows of b")
    checks.shape(op, "out", out, (M, N), "rows of a and of b")
    if out is not None:
        checks.require(out.stride(-1) == 1 or N == 1, op, "out", "have contiguous rows", out.stride())
    if accumulate:
        checks.require(out is not None, op, "out", "be given with accumulate", None)
        is_float32 = out is not None and out.dtype is torch.float32
        checks.require(is_float32, op, "out", "be float32 with accumulate", out is not None and checks.name(out.dtype))
        checks.require(bias is None, op, "bias", "be None with accumulate", "a tensor")
