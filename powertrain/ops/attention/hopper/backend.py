"""The Hopper backend: forward in Gluon (hopper/forward.py), for 16 bits on sm_90.

`why_not` has its limits. Numerics, results for rows that see no key, and tensors saved for backward are those of the
universal kernels (triton/backend.py). select.py chooses the backward: its own (hopper/backward.py), cuDNN's
(backends/cudnn_backward.py) or that of the universal kernels.

Memory beyond results: 4 bytes per stream. If keys are split, which makes at most four tiles per SM, or heads do not
fill their tiles, B * S * H * (E + 1) * 4 bytes for each split.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from powertrain.ops.attention import autograd
from powertrain.ops.attention.backends import cudnn_backward
from powertrain.ops.attention.hopper.backward import launch_backward, why_not_backward, why_not_of
from powertrain.ops.attention.hopper.backward_plans import Plan as BackwardPlan
from powertrain.ops.attention.hopper.backward_plans import Schedule, schedule_of, width_of
from powertrain.ops.attention.hopper.backward_plans import plan_of as backward_plan_of
from powertrain.ops.attention.hopper.forward import launch_forward
from powertrain.ops.attention.hopper.forward_d512 import launch_forward_d512
from powertrain.ops.attention.hopper.plans import Plan, plan_of
from powertrain.ops.attention.hopper.self_tests import backward_defect, forward_defect
from powertrain.ops.attention.operands import BackwardCall, Operands, is_expanded, one_head
from powertrain.ops.attention.problem import AttentionCall, AttentionProblem, Reason, use
from powertrain.ops.attention.triton import backend as triton_backend
from powertrain.ops.attention.triton.backward import attention_backward
from powertrain.ops.attention.triton.forward import attention_forward
from powertrain.runtime import checks, gluon_compat, recording, self_test, tracing
from powertrain.runtime.settings import settings

_MAX_HEAD_DIM = 512
_WIDE = 256  # above it both head dims must be: forward_d512.py has tiles of its own


def why_not(problem: AttentionProblem) -> Iterator[Reason]:
    """Every unmet requirement of this kernel."""
    mask = problem.mask
    if problem.arch != 90:
        yield Reason(f"hopper runs on sm_90 only, got {problem.where}", use("triton"))
    # checked before the version of Gluon, which does not matter then
    if settings().interpret:
        yield Reason("Gluon has no interpreter", "unset POWERTRAIN_INTERPRET")
    elif missing := gluon_compat.trouble():
        yield Reason(missing, "use Triton 3.6 or later", use("triton", verb=""))
    if problem.dtype not in (torch.bfloat16, torch.float16):
        yield Reason(f"hopper takes bfloat16 or float16, got {checks.name(problem.dtype)}", use("triton"))
    for name, dim in (("head_dim_qk", problem.head_dim_qk), ("head_dim_v", problem.head_dim_v)):
        if dim > _MAX_HEAD_DIM:
            yield Reason(f"hopper takes {name} up to {_MAX_HEAD_DIM}, got {dim}", use("triton"))
    dims = problem.head_dim_qk, problem.head_dim_v
    if min(dims) <= _WIDE < max(dims) <= _MAX_HEAD_DIM:
        yield Reason(
            f"hopper takes two head dims up to {_WIDE} or two above, got {dims[0]} and {dims[1]}", use("triton")
        )
    if problem.head_dim_v % 8:
        yield Reason(
            f"hopper takes a head_dim_v that is a multiple of 8, got {problem.head_dim_v}", use("triton"), "pad value"
        )
    if not problem.aligned:
        yield Reason(
            "hopper loads by TMA, which needs addresses and strides that are multiples of 16 bytes",
            use("triton"),
            ".contiguous()",
        )
    if problem.layout == "bmghk":
        yield Reason("hopper does not take layout bmghk", use("triton"), "bshd")
    if problem.lengths.empty:
        yield Reason("hopper takes no empty tensors", use("triton"))
    for name, wanted in (
        ("bias", mask.bias != "none"),
        ("documents", mask.documents),
        ("prefix", mask.prefix),
        ("chunk", mask.chunk > 0),
        ("dropout", problem.dropout),
    ):
        if wanted:
            changes = ("use varlen_attention", use("triton", verb="")) if name == "documents" else (use("triton"),)
            yield Reason(f"hopper has no {name}", *changes)


# results by device: of each forward plan, and of each backward (padded head dims, deterministic, plan, query heads of a
# KV head split, packed sequences ordered by length)
_self_tests: dict[Plan, dict[int | None, str | None]] = {}
_backward_self_tests: dict[tuple[int, int, bool, BackwardPlan, bool, bool], dict[int | None, str | None]] = {}


def fails_here(call: Operands, plan: Plan) -> str | None:
    """Why the kernel must not be used on this sm_90 device with this plan, or None. It is tested once on a small
    problem like the call."""
    plan = plan._replace(num_splits=min(plan.num_splits, 2))  # how many there are is the same to it
    results, name = _self_tests.setdefault(plan, {}), f"attention at head dims {sum(plan.p_qk)} and {sum(plan.p_v)}"
    return self_test.failure(
        results, call.q.tensor.device, lambda on: forward_defect(call, plan, _launch), f"{name}: triton serves"
    )


def backward_fails_here(call: Operands, plan: BackwardPlan, schedule: Schedule | None) -> str | None:
    """The same for the backward, at padded head dims."""
    widths, deterministic = (width_of(call.d_qk), width_of(call.d_v)), call.args.deterministic
    kernel = (False, False) if schedule is None else (schedule.num_splits > 1, schedule.longest_first)
    results = _backward_self_tests.setdefault((*widths, deterministic, plan, *kernel), {})
    name = f"attention's backward{', deterministic,' if deterministic else ''} at head dims {widths[0]} and {widths[1]}"
    return self_test.failure(
        results, call.q.tensor.device, lambda on: backward_defect(call, plan, schedule), f"{name}: triton serves"
    )


def _why_not_tensors(operands: Operands) -> str | None:
    """Why TMA cannot read these tensors, or None. An `AttentionProblem` does not contain all of these facts."""
    args, heads = operands.args, operands.heads
    for index, (x, b, s, h, r) in enumerate((operands.q, operands.k, operands.v)):
        if not x.is_meta and x.data_ptr() % 16:
            return "an address is not a multiple of 16 bytes"
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
        reason = fails_here(operands, plan)
    if reason:
        _report_fallback("attention", reason)
        return attention_forward(operands)
    return _launch(operands, plan)


def _launch(operands: Operands, plan: Plan) -> tuple[Tensor, Tensor]:
    return launch_forward_d512(operands, plan) if plan.splits_columns else launch_forward(operands, plan)


def _backward(call: BackwardCall, operands: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    reason, plan, schedule = why_not_backward(operands), None, None
    # a recording, or meta tensors, have no results to test
    if reason is None and _is_real(call.query):
        plan = backward_plan_of(operands)
        schedule = None if plan.stores_weights else schedule_of(operands, plan)
        reason = backward_fails_here(operands, plan, schedule)
    if reason:
        _report_fallback("attention's backward", reason)
        return attention_backward(call, operands)
    return launch_backward(call, operands, plan, schedule)


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
    """Every unmet requirement of this backward."""
    yield from why_not(problem)
    is_plain = not (problem.deterministic or problem.mask.softcap > 0 or problem.mask.alibi)
    if reason := why_not_of(problem.head_dim_qk, problem.head_dim_v, problem.has_unordered_keys, is_plain):
        yield Reason(reason, use("triton"))
    lengths, widest = problem.lengths, max(problem.head_dim_qk, problem.head_dim_v)
    if widest > _WIDE and problem.layout == "thd" and lengths.sequences > 32 and lengths.queries < 128:
        # D512, 117 sequences of 71 rows on average, 64/8 heads: 11.1 ms, the universal kernels 7.0
        yield Reason(
            f"above head dim {_WIDE} it is slow for many packed sequences of fewer than 128 rows", use("triton")
        )


def run(call: AttentionCall, backward: str = "hopper") -> tuple[Tensor, Tensor]:
    """(out, lse), differentiable by the backward of that name."""
    return autograd.apply(_forward_op, call, backward)
