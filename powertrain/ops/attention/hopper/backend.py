"""The Hopper backend: forward in Gluon (hopper/forward.py), for 16 bits on sm_90.

`why_not` has its limits. Numerics, results for rows that see nothing, and tensors saved for backward are those of the
universal kernels (triton/backend.py). Backward is the one that select.py decides: its own (hopper/backward.py), cuDNN's
(backends/cudnn_backward.py) or that of the universal kernels.

Memory beyond results: 640 to 896 bytes an SM of descriptors, and 4 a stream; where keys are cut into parts, which makes
at most four tiles an SM, or heads do not fill their tiles, B * S * H * (E + 1) * 4 bytes for each part.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from powertrain.ops.attention import autograd
from powertrain.ops.attention.backends import cudnn_backward
from powertrain.ops.attention.hopper.backward import launch_backward, why_not_backward, why_not_of
from powertrain.ops.attention.hopper.backward_plans import Plan as BackwardPlan
from powertrain.ops.attention.hopper.backward_plans import plan_of as backward_plan_of
from powertrain.ops.attention.hopper.backward_plans import width_of
from powertrain.ops.attention.hopper.forward import launch_forward
from powertrain.ops.attention.hopper.plans import Plan, plan_of
from powertrain.ops.attention.operands import BackwardCall, OpArguments, Operands, is_expanded, one_head
from powertrain.ops.attention.problem import AttentionCall, AttentionProblem, Reason
from powertrain.ops.attention.triton import backend as triton_backend
from powertrain.ops.attention.triton.backward import attention_backward
from powertrain.ops.attention.triton.forward import attention_forward
from powertrain.runtime import checks, gluon_compat, recording, self_test, tracing
from powertrain.runtime.settings import settings

_MAX_HEAD_DIM = 256


def why_not(problem: AttentionProblem) -> Iterator[Reason]:
    """Every need of this kernel that the problem does not meet."""
    mask = problem.mask
    if problem.arch != 90:
        yield Reason(f"it is made for sm_90, this is {problem.where}", "use triton")
    # checked before the version of Gluon, which does not matter then
    if settings().interpret:
        yield Reason("Gluon has no interpreter", "unset POWERTRAIN_INTERPRET")
    elif missing := gluon_compat.trouble():
        yield Reason(missing, "use Triton 3.6 or later, or triton")
    if problem.dtype not in (torch.bfloat16, torch.float16):
        yield Reason(f"it takes bfloat16 and float16, not {checks.name(problem.dtype)}", "use triton")
    for name, dim in (("head_dim_qk", problem.head_dim_qk), ("head_dim_v", problem.head_dim_v)):
        if dim > _MAX_HEAD_DIM:
            yield Reason(f"it takes {name} up to {_MAX_HEAD_DIM}, got {dim}", "use triton")
    if problem.head_dim_v % 8:
        yield Reason(f"it takes head_dim_v in multiples of 8, got {problem.head_dim_v}", "use triton, or pad value")
    if not problem.aligned:
        yield Reason("TMA wants addresses and strides of whole 16 bytes", "use triton, or .contiguous()")
    if problem.layout == "bmghk":
        yield Reason("it takes no layout bmghk", "use triton, or bshd")
    if problem.lengths.empty:
        yield Reason("it takes no empty tensors", "use triton")
    for name, wanted in (
        ("bias", mask.bias != "none"),
        ("documents", mask.documents),
        ("prefix", mask.prefix),
        ("chunk", mask.chunk > 0),
        ("dropout", problem.dropout),
    ):
        if wanted:
            other = "use varlen_attention, or triton" if name == "documents" else "use triton"
            yield Reason(f"it has no {name}", other)


# results by device: of each forward plan, and of each backward (padded head dim, deterministic, plan)
_self_tests: dict[Plan, dict[int | None, str | None]] = {}
_backward_self_tests: dict[tuple[int, bool, BackwardPlan], dict[int | None, str | None]] = {}


def fails_here(device: torch.device, plan: Plan) -> str | None:
    """Why the kernel must not be used on this sm_90 device with this plan, or None: it is tried once on a small
    problem."""
    plan = plan._replace(num_splits=min(plan.num_splits, 2))  # how many there are is the same to it
    results, name = _self_tests.setdefault(plan, {}), f"attention at head dims {sum(plan.p_qk)} and {sum(plan.p_v)}"
    return self_test.failure(results, device, lambda on: _forward_self_test(on, plan), f"{name}: triton serves")


def backward_fails_here(device: torch.device, width: int, deterministic: bool, plan: BackwardPlan) -> str | None:
    """The same of the backward, at a padded head dim."""
    results = _backward_self_tests.setdefault((width, deterministic, plan), {})
    name = f"attention's backward{', deterministic,' if deterministic else ''} at head dim {width}"
    return self_test.failure(
        results, device, lambda on: _backward_self_test(on, width, deterministic, plan), f"{name}: triton serves"
    )


class _Small(NamedTuple):
    """A causal problem of 192 keys and at most as many pairs of query and head, and its results in float32."""

    inputs: list[Tensor]  # dout, query, key, value
    args: OpArguments
    out: Tensor
    lse: Tensor
    grads: list[Tensor]


def _small(device: torch.device, d_qk: int, d_v: int, heads: int = 1) -> _Small:
    # the caller's own are left as they are
    draws = torch.Generator(device).manual_seed(0)
    queries, keys = 192 // heads, 192
    shapes = (queries, heads, d_v), (queries, heads, d_qk), (keys, 1, d_qk), (keys, 1, d_v)
    inputs = [torch.randn(1, *shape, device=device, generator=draws).to(torch.bfloat16) for shape in shapes]
    dout, q, k, v = (x.flatten(0, 2).float() for x in inputs)
    scale = d_qk**-0.5
    # heads of one token are neighbours, as packed heads lie in a tile
    row, column = torch.arange(queries * heads, device=device), torch.arange(keys, device=device)
    hidden = column > (row // heads + keys - queries)[:, None]
    scores = (_product(q, k.T) * scale).masked_fill(hidden, -torch.inf)
    p = scores.softmax(1)
    out = _product(p, v)
    ds = p * (_product(dout, v.T) - (dout * out).sum(1, keepdim=True)) * scale
    args = OpArguments(*(None,) * 11, "bshd", scale, 0.0, 0.0, -1, 0, 0, True)
    lse = scores.logsumexp(1).view(queries, heads).T
    return _Small(inputs, args, out, lse, [_product(ds, k), _product(ds.T, q), _product(p.T, dout)])


def _product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` without cuBLAS, which torch.use_deterministic_algorithms lets work only with its own settings."""
    return (a[:, :, None] * b[None]).sum(1)


def _wrong(results: list[Tensor], exact: list[Tensor]) -> str | None:
    pairs = zip(results, exact, strict=True)
    count = sum(int((~((a.view(b.shape) - b).abs() <= 2**-6 * b.abs().max())).sum()) for a, b in pairs)
    return f"its self-test gave {count} wrong results of {sum(x.numel() for x in exact)}" if count else None


def _forward_self_test(device: torch.device, plan: Plan) -> str | None:
    small = _small(device, sum(plan.p_qk), sum(plan.p_v), plan.heads_per_tile - plan.partial)
    _, query, key, value = small.inputs
    operands = Operands.of(query, key, value, small.args)
    return _wrong(list(launch_forward(operands, plan)), [small.out, small.lse])


def _backward_self_test(device: torch.device, width: int, deterministic: bool, plan: BackwardPlan) -> str | None:
    small = _small(device, width, width)
    args = small.args._replace(deterministic=deterministic)
    # the exact results and not the kernel's: the backward is judged alone
    out, lse = small.out.to(torch.bfloat16).view(1, 192, 1, width), small.lse.view(1, 1, 192)
    dout, query, key, value = small.inputs
    call = BackwardCall(dout, None, query, key, value, out, lse, [True] * 3 + [False], args)
    grads = launch_backward(call, call.operands(), plan)
    return _wrong(list(grads[:3]), small.grads)


def _why_not_tensors(operands: Operands) -> str | None:
    """Why TMA cannot read these tensors, or None: an `AttentionProblem` does not say it all."""
    args, heads = operands.args, operands.heads
    # so written, a NaN is refused too
    if not args.scale > 0:
        return f"the scale must be positive, is {args.scale}"
    for index, (x, b, s, h, r) in enumerate((operands.q, operands.k, operands.v)):
        if not x.is_meta and x.data_ptr() % 16:
            return "an address is not a multiple of 16"
        if (b | s | h | r) % (16 // x.element_size()):
            return f"strides must be multiples of 16 bytes, are {tuple(x.stride())}"
        # the copies that the caller expanded are not read
        if index:
            x = one_head(x, args.layout, heads)
        if 0 in x.stride() and is_expanded(x):
            return f"a tensor is expanded, strides {tuple(x.stride())}"
        if not x.numel():
            return "a tensor is empty"
    return None


def _forward(operands: Operands) -> tuple[Tensor, Tensor]:
    plan = plan_of(operands)
    reason = _why_not_tensors(operands)
    if reason is None and _is_real(operands.q.tensor):
        reason = fails_here(operands.q.tensor.device, plan)
    if reason:
        _report_fallback("attention", reason)
        return attention_forward(operands)
    return launch_forward(operands, plan)


def _backward(call: BackwardCall, operands: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    reason, plan = why_not_backward(operands), None
    # a recording, or meta tensors, have no results to test
    if reason is None and _is_real(call.query):
        width, plan = width_of(max(operands.d_qk, operands.d_v)), backward_plan_of(operands)
        reason = backward_fails_here(call.query.device, width, call.args.deterministic, plan)
    if reason:
        _report_fallback("attention's backward", reason)
        return attention_backward(call, operands)
    return launch_backward(call, operands, plan)


def _is_real(x: Tensor) -> bool:
    return recording.state.recording is None and not x.is_meta


def _report_fallback(op: str, reason: str) -> None:
    # once a reason: a step has many calls
    if tracing.first((op, reason)):
        tracing.event("dispatch", f"{op}: triton for hopper: {reason}", op="attention", backend="triton")


backward_op = autograd.backward_op("attention_hopper_bwd", _backward)
_backward_ops = {"hopper": backward_op, "cudnn": cudnn_backward.backward_op, "triton": triton_backend.backward_op}
_forward_op = autograd.forward_op("attention_hopper", _forward, _backward_ops)


def backward_why_not(problem: AttentionProblem) -> Iterator[Reason]:
    """Every need of this backward that the problem does not meet."""
    yield from why_not(problem)
    if reason := why_not_of(problem.head_dim_qk, problem.head_dim_v, problem.has_unordered_keys):
        yield Reason(reason, "use triton")


def run(call: AttentionCall, backward: str = "hopper") -> tuple[Tensor, Tensor]:
    """(out, lse), differentiable by the backward of that name."""
    return autograd.apply(_forward_op, call, backward)
