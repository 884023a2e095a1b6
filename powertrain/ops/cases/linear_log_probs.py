"""Calls that stand for linear_log_probs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.ops.cases import Case, randn
from powertrain.ops.cases.linear_cross_entropy import linear_inputs, linear_inputs_bias
from powertrain.ops.linear_log_probs import LogProbs, Teacher, linear_log_probs, linear_log_probs_ref


def _inputs_teacher(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    T, D, V = shape
    # a teacher of another width
    wide = D + 8
    teacher_weight = (randn(V, wide, dtype=torch.float32, device=device, grad=False) * wide**-0.5).to(dtype)
    teacher_x = randn(T, wide, dtype=dtype, device=device, grad=False)
    return {**linear_inputs(shape, dtype, device), "teacher_x": teacher_x, "teacher_weight": teacher_weight}


def plain(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, teacher: Teacher | None = None,
    temperature: float = 1.0, softcap: float | None = None, entropy: bool = False, top_k: int = 0,
) -> LogProbs:  # fmt: skip
    """As trainers write it."""

    def log_softmax(logits: Tensor, cap: float | None) -> Tensor:
        z = logits.float() if logits.dtype is not torch.float64 else logits
        z = cap * torch.tanh(z / cap) if cap else z
        return F.log_softmax(z / temperature, dim=-1)

    log_p = log_softmax(F.linear(x, weight, bias), softcap)
    kept = target != -100
    picked = log_p.gather(-1, target.clamp(min=0).long()[..., None])[..., 0] * kept
    entropies = torch.distributions.Categorical(logits=log_p).entropy() * kept if entropy else None
    divergence = None
    if teacher is not None:
        log_q = log_softmax(F.linear(teacher.x, teacher.weight, teacher.bias), teacher.softcap)
        divergence = _divergence(log_p, log_q, teacher.beta) * kept
    return LogProbs(picked, entropies, divergence, *(log_p.detach().topk(top_k) if top_k else ()))


def _divergence(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    if beta == 0:
        return F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)
    if beta == 1:
        return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    log_m = torch.log(beta * log_q.exp() + (1 - beta) * log_p.exp())
    parts = [F.kl_div(log_m, log_r, reduction="none", log_target=True) for log_r in (log_q, log_p)]
    return (beta * parts[0] + (1 - beta) * parts[1]).sum(-1)


def as_tuple(function: Any, beta: float | None = None, **options: Any) -> Any:
    """`function` with the teacher's tensors by name, and no None among its results."""

    def call(
        x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, teacher_x: Tensor | None = None,
        teacher_weight: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        teacher = None
        if teacher_x is not None and teacher_weight is not None and beta is not None:
            teacher = Teacher(teacher_x, teacher_weight, beta=beta)
        found = function(x, weight, target, bias=bias, teacher=teacher, **options)
        return tuple(t for t in found if t is not None and t.is_floating_point())

    return call


def _case(label: str, inputs: Any, slack: int = 0, T: int = 7, **options: Any) -> Case:
    ours = {name: options.pop(name, False) for name in ("batch_invariant", "keep_logits")}
    run = as_tuple(linear_log_probs, **ours, **options)
    reference, usual = (as_tuple(f, **options) for f in (linear_log_probs_ref, plain))
    return Case("linear_log_probs", label, run, reference, usual, inputs, (T, 40, 301), (8192, 4096, 128256), slack)


CASES = [
    # one more: some CPUs sum the products of so few rows in another order than plain PyTorch's
    _case("", linear_inputs, slack=1),
    _case("invariant", linear_inputs_bias, batch_invariant=True),
    _case("kept", linear_inputs_bias, keep_logits=True),
    # of few tokens one library's rounding of 16-bit logits can be twice as lucky as the other's
    _case("entropy-bias", linear_inputs_bias, T=19, entropy=True, temperature=0.7, softcap=3.0),
    # the lse of both, near 6, are rounded at that size, and a divergence below 1 is their difference
    _case("forward-kl", _inputs_teacher, slack=8, beta=0.0),
    _case("js", _inputs_teacher, slack=8, beta=0.3, entropy=True),
]
