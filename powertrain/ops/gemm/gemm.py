"""GEMM: the products of a linear layer, into existing memory too; our Hopper kernel where it was measured faster.

    nt  c = a bᵀ + bias     a [M, K], b [N, K]     y = x Wᵀ
    nn  c = a b + bias      a [M, K], b [K, N]     dx = dy W
    tn  c = aᵀ b + bias     a [K, M], b [K, N]     dW = dyᵀ x
    accumulate: out += c    float32 out beside 16-bit a and b: Megatron's main_grad

2 M N K operations; (M K + N K + M N) elements moved. Saves nothing: `gemm` is a part of functions with
gradients, and has none itself.

Backends, of which `choose` picks one and says why: `hopper` (ops/gemm/hopper.py, sm_90) and `cublas` (as PyTorch
calls; on the CPU, PyTorch's own).
"""

from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from powertrain.ops.gemm import hopper
from powertrain.ops.shapes import acc_dtype, cdiv
from powertrain.runtime import checks, gluon_compat, recording, self_test, tracing
from powertrain.runtime.dispatch import Op, use_kernel, without_autocast
from powertrain.runtime.flops import Shape
from powertrain.runtime.target import Target

LAYOUTS = hopper.LAYOUTS
BACKENDS = ("hopper", "cublas")


def gemm_ref(a: Tensor, b: Tensor, *, layout: str = "nt", bias: Tensor | None = None) -> Tensor:
    """The specification of `gemm`, in plain PyTorch: the result in float32, or in float64 for float64."""
    acc = acc_dtype(a.dtype)
    a, b = a.to(acc), b.to(acc)
    c = {"nt": lambda: a @ b.T, "nn": lambda: a @ b, "tn": lambda: a.T @ b}[layout]()
    return c if bias is None else c + bias.to(acc)


# M, N, K that pass the rules of `choose` and were measured slower: benchmarks/results/2026-11-21_h200_gemm.md
_SLOWER = {(8192, 4096, 4096), (16384, 6144, 4096), (28672, 4096, 16384), (57344, 8192, 8192)}


class Choice(NamedTuple):
    """The backend that serves a GEMM, and why not the ones before it."""

    backend: str
    why_not: dict[str, str]

    def __str__(self) -> str:
        return "\n".join([self.backend, *(f"  not {name}: {reason}" for name, reason in self.why_not.items())])


@cache
def choose(
    M: int,
    N: int,
    K: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype | None = None,
    accumulate: bool = False,
    target: Target | None = None,
) -> Choice:
    """Which backend `gemm` takes for these sizes on `target` (None: the current GPU), aligned memory assumed.

    out_dtype is dtype or float32; None stands for dtype.
    """
    target = target or Target.of(torch.device("cuda"))
    reason = why_not_hopper(M, N, K, dtype, target)
    if reason is None and N < 4096:
        reason = f"N must be at least 4096, is {N}: it was measured slower"
    if reason is None and (M, N, K) in _SLOWER:
        reason = f"at {M} x {N} x {K} it was measured at 0.98 to 0.996 of cuBLAS's speed"
    if reason is None and accumulate and out_dtype is not torch.float32:
        reason = "it adds to float32 only: in 16 bits the product would be rounded before it is added"
    return Choice("cublas", {"hopper": reason}) if reason else Choice("hopper", {})


def why_not_hopper(M: int, N: int, K: int, dtype: torch.dtype, target: Target, least_k: int = 2048) -> str | None:
    if target.arch != 90:
        return f"it runs on sm_90 only, got sm_{target.arch}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {checks.name(dtype)}"
    if missing := gluon_compat.trouble():
        return missing
    # bf16, one H200, TFLOP/s ours / cuBLAS, benchmarks/results/2026-11-21_h200_gemm.md; M, N, K:
    #   8192 8192 8192    815 / 798     8192 8192 2048    788 / 772     2048 14336 8192   824 / 816
    #   16384 28672 4096  827 / 812     16384 4096 14336  821 / 809     tn 8192^3         815 / 799
    # and where it is not chosen:
    #   16384 2560 8192   815 / 822 (N)                 2048 8192 2048    710 / 720 (4 waves)
    #   2048 2560 8192    519 / 787 (1.2 waves in 2)    8192 4096 1024    710 / 730 (K)
    tiles = cdiv(M, 128) * cdiv(N, 256)
    waves = cdiv(tiles, target.num_sms)
    if K < least_k:
        return f"K must be at least {least_k} to make up for a tile's beginning and end, is {K}"
    if waves < 6:
        return f"its tiles are {waves} waves of {target.num_sms} SMs; it was measured faster from 6 waves on"
    if tiles < 0.95 * waves * target.num_sms:
        return f"its {tiles} tiles fill less than 95% of {waves} waves of {target.num_sms} SMs"
    return None


_self_tests: dict[int | None, str | None] = {}


def fails_here(device: torch.device) -> str | None:
    """Why the Hopper kernel must not be used on this sm_90 device, or None: once per device it multiplies one tile."""
    return self_test.failure(_self_tests, device, _self_test, "gemm: cuBLAS serves")


def _self_test(device: torch.device) -> str | None:
    a, b = exact_operand(128, 192, 7, device), exact_operand(256, 192, 5, device)
    out = torch.full((128, 256), float("nan"), dtype=torch.float32, device=device)
    hopper.hopper_gemm(a, b, out)
    wrong = int((out != exact_product(a, b)).sum())
    return f"its self-test gave {wrong} wrong results of {out.numel()}" if wrong else None


def exact_operand(rows: int, cols: int, period: int, device: torch.device) -> Tensor:
    """Small multiples of 1/8, whose products and their sums are exact in float32."""
    at = torch.arange(rows * cols, device=device, dtype=torch.int32)
    return ((at % period - period // 2) / 8).to(torch.bfloat16).view(rows, cols)


def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """a bᵀ of such, in float32."""
    return a.float() @ b.float().T


def _backend_for(a: Tensor, b: Tensor, out: Tensor, layout: str, accumulate: bool) -> str:
    """The backend for these tensors on a GPU."""
    M, N, K = hopper.sizes(a, b, layout)
    target = Target.of(a.device)
    choice = choose(M, N, K, dtype=a.dtype, out_dtype=out.dtype, accumulate=accumulate, target=target)
    if choice.backend == "hopper":
        reason = hopper.why_not(a, b, out)
        if reason is None and recording.state.recording is None and not a.is_meta:
            reason = fails_here(a.device)
        if reason:
            choice = Choice("cublas", {"hopper": reason})
    if tracing.first(("gemm", M, N, K, layout, a.dtype, choice.backend)):
        why = "".join(f"; not {name}: {reason}" for name, reason in choice.why_not.items())
        sizes = f"{layout} M{M} N{N} K{K} {checks.name(a.dtype)}"
        tracing.event("dispatch", f"gemm {sizes}: {choice.backend}{why}", op="gemm", backend=choice.backend)
    return choice.backend


def _into(
    a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, layout: str, accumulate: bool, backend: str | None
) -> None:
    if not out.numel():
        return
    if a.device.type != "cpu" and use_kernel("gemm", a):
        backend = backend or _backend_for(a, b, out, layout, accumulate)
        if backend == "hopper":
            hopper.hopper_gemm(a, b, out, layout=layout, bias=bias, accumulate=accumulate)
            return
    with without_autocast(a.device):
        _torch(a, b, out, bias, layout, accumulate)


def _torch(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, layout: str, accumulate: bool) -> None:
    a, b = a.T if layout == "tn" else a, b.T if layout == "nt" else b
    if out.dtype == a.dtype:
        if accumulate:
            out.addmm_(a, b)
        elif bias is not None:
            torch.addmm(bias, a, b, out=out)
        else:
            torch.mm(a, b, out=out)
        return
    # PyTorch has no products of 16 bits in 32 there
    if a.device.type == "cpu":
        product = a.float() @ b.float()
        out.add_(product) if accumulate else out.copy_(product)
    elif accumulate:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    if bias is not None:
        out.add_(bias)


def _fwd_outputs(a: Tensor, b: Tensor, bias: Tensor | None, layout: str, backend: str | None) -> Tensor:
    M, N, _ = hopper.sizes(a, b, layout)
    return a.new_empty((M, N))


def _fwd(a: Tensor, b: Tensor, bias: Tensor | None, layout: str, backend: str | None) -> Tensor:
    out = _fwd_outputs(a, b, bias, layout, backend)
    _into(a, b, out, bias, layout, False, backend)
    return out


def _flops(a: Shape, b: Shape, layout: str, **_: Any) -> int:
    return 2 * prod(a) * b[0 if layout == "nt" else 1]


_gemm_op = Op(
    "gemm(Tensor a, Tensor b, Tensor? bias, str layout, str? backend) -> Tensor", _fwd, _fwd_outputs, flops=_flops
)
_gemm_into_op = Op(
    "gemm_into(Tensor a, Tensor b, Tensor(a!) out, Tensor? bias, str layout, bool accumulate, str? backend) -> ()",
    _into,
    lambda a, b, out, bias, layout, accumulate, backend: None,
    flops=_flops,
)


def gemm(
    a: Tensor,
    b: Tensor,
    *,
    layout: str = "nt",
    out: Tensor | None = None,
    accumulate: bool = False,
    bias: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """`op(a) @ op(b) + bias`, or `out += op(a) @ op(b)`; without gradients, which callers define by its layouts.

    Shapes: nt a [M, K], b [N, K]; nn a [M, K], b [K, N]; tn a [K, M], b [K, N].
        a, b  bfloat16, float16 or float32 (float64 on the CPU), the same; any strides, fastest with rows of whole
              16 bytes
        out   [M, N] in a's dtype, or float32 (for 16-bit a); made if not given
        bias  [N] in a's dtype; not with accumulate
    Returns out.
    Numerics: products accumulate in float32 and are rounded once to out's dtype. With accumulate into float32 nothing
        is rounded to 16 bits: each element gets one float32 addition. Deterministic.
    Memory: nothing beside out.
    backend: "hopper" or "cublas" instead of the chosen one (`choose` says which and why).
    Raises ValueError with the argument's name, requirement and value; NotImplementedError if a gradient is wanted.
    """
    op = "gemm"
    _check(a, b, layout, out, accumulate, bias)
    if backend is not None:
        checks.one_of(op, "backend", backend, BACKENDS)
        if backend == "hopper":
            _require_hopper(a, b, out, accumulate)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (a, b, out, bias)):
        raise NotImplementedError(
            f"{op}: no gradient is defined; call it inside an autograd.Function or torch.no_grad(), or use "
            "torch.nn.functional.linear"
        )
    if out is None:
        c: Tensor = _gemm_op(a, b, bias, layout, backend)
        return c
    _gemm_into_op(a, b, out, bias, layout, accumulate, backend)
    return out


def _check(a: Tensor, b: Tensor, layout: str, out: Tensor | None, accumulate: bool, bias: Tensor | None) -> None:
    op = "gemm"
    checks.one_of(op, "layout", layout, LAYOUTS)
    checks.tensor(op, "a", a)
    checks.tensor(op, "b", b)
    checks.floating(op, a=a, b=b)
    checks.same_device(op, "a", a, b=b, out=out, bias=bias)
    for name, tensor in (("a", a), ("b", b)):
        checks.require(tensor.dim() == 2, op, name, "have two dims", list(tensor.shape))
    checks.same_dtype(op, "a", a, b=b)
    M, N, K = hopper.sizes(a, b, layout)
    checks.shape(op, "b", b, (N, K) if layout == "nt" else (K, N), f"layout {layout} beside a {list(a.shape)}")
    checks.shape(op, "bias", bias, (N,), "columns of the result")
    checks.shape(op, "out", out, (M, N), "rows and columns of the result")
    checks.same_dtype(op, "a", a, bias=bias)
    if out is not None:
        must = f"be {checks.name(a.dtype)} or float32"
        checks.require(out.dtype in (a.dtype, torch.float32), op, "out", must, checks.name(out.dtype))
    if accumulate:
        checks.require(out is not None, op, "out", "be given with accumulate", None)
        checks.require(bias is None, op, "bias", "be None with accumulate", "a tensor")


def _require_hopper(a: Tensor, b: Tensor, out: Tensor | None, accumulate: bool) -> None:
    arch = "cpu" if a.device.type == "cpu" else f"sm_{Target.of(a.device).arch}"
    checks.require(arch == "sm_90", "gemm", "backend", "be another than 'hopper' off sm_90", arch)
    reason = gluon_compat.trouble() or hopper.why_not(a, b, out)
    must = "be another than 'hopper' for these operands or this Triton"
    checks.require(reason is None, "gemm", "backend", must, reason)
    if accumulate and out is not None:
        must = "be float32 for backend 'hopper' to add to"
        checks.require(out.dtype is torch.float32, "gemm", "out", must, checks.name(out.dtype))
