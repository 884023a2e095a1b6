"""powertrain.losses: TRL's numbers, finite differences, packed as padded, errors."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain import losses
from powertrain.losses import mean_by_sequence, sum_by_sequence
from powertrain.ops.linear_log_probs import Teacher, linear_log_probs
from scripts.trl_losses import batch, log_probs

FIXTURES = json.loads((Path(__file__).parent / "trl.json").read_text())["losses"]
KL = torch.tensor(0.4, dtype=torch.float64)  # mean of the two differences that scripts/trl_losses.py states
LABELS = torch.tensor([True, True, False, False, True, False])


def _sequence(found: dict[str, Tensor]) -> Tensor:
    mask = found["mask"][:, 1:].bool()
    return torch.where(mask, torch.arange(len(mask))[:, None], -1)


def _pairs(found: dict[str, Tensor], logits: Tensor, *, average: bool = False) -> tuple[Tensor, ...]:
    by_sequence = mean_by_sequence if average else sum_by_sequence
    return by_sequence(log_probs(logits, found["tokens"]), _sequence(found), len(logits)).chunk(2)


def _of_logits(loss: Callable[..., Tensor], *, average: bool = False, ref: bool = True, **options: Any) -> Any:
    """A loss of pairs, from logits."""

    def call(found: dict[str, Tensor], logits: Tensor) -> Tensor:
        pairs = _pairs(found, logits, average=average)
        return loss(*pairs, *(_pairs(found, found["ref_logits"], average=average) if ref else ()), **options).mean()

    return call


def _kto(found: dict[str, Tensor], logits: Tensor) -> Tensor:
    given, ref = (torch.cat(_pairs(found, each)) for each in (logits, found["ref_logits"]))
    return losses.kto_loss(given, ref, LABELS, KL, beta=0.3, desirable_weight=1.5, undesirable_weight=0.7).mean()


def _distillation(found: dict[str, Tensor], logits: Tensor, beta: float) -> Tensor:
    # the logits themselves are the states, and the head is the identity
    head = torch.eye(logits.shape[-1], dtype=logits.dtype)
    target = torch.where(found["mask"].bool(), found["tokens"], -100)
    teacher = Teacher(found["ref_logits"], head, beta=beta)
    divergence = linear_log_probs(logits, head, target, temperature=1.5, teacher=teacher).divergence
    return losses.distillation_loss(divergence, torch.where(target >= 0, 0, -1))


LOGITS: dict[str, Callable[[dict[str, Tensor], Tensor], Tensor]] = {
    "dpo": _of_logits(losses.dpo_loss, beta=0.3),
    "dpo-robust": _of_logits(losses.dpo_loss, beta=0.3, label_smoothing=0.1, robust=True),
    "kto": _kto,
    **{f"distillation-{b}": lambda found, logits, b=b: _distillation(found, logits, b) for b in (0.0, 0.3, 1.0)},
}
# given each completion's log-probability, or reward: chosen, then rejected
SEQUENCES: dict[str, tuple[bool, Callable[[Tensor], Tensor]]] = {
    "cpo": (False, lambda x: losses.cpo_loss(*x.chunk(2), beta=0.3)),
    "cpo-smoothed": (False, lambda x: losses.cpo_loss(*x.chunk(2), beta=0.3, label_smoothing=0.1)),
    "simpo": (True, lambda x: losses.simpo_loss(*x.chunk(2), beta=0.3, gamma=0.4)),
    "orpo": (True, lambda x: losses.orpo_loss(*x.chunk(2), beta=0.3)),
}
POLICY: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo-kl": {"kl_weight": 0.04},
    "gspo": {"ratio": "sequence", "clip": (0.03, 0.2)},
    "dapo": {"average": "token", "clip": (0.2, 0.28)},
    "dr-grpo": {"average": "token", "divisor": 6 * 6},
}


def _same(name: str, loss: Callable[[Tensor], Tensor], given: Tensor, rtol: float = 1e-12) -> None:
    """Value and gradient are TRL's, and the gradient is that of finite differences."""
    leaf = given.clone().requires_grad_()
    value = loss(leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    expected = FIXTURES[name]
    assert value.item() == pytest.approx(expected["loss"], rel=rtol)
    wanted = torch.tensor(expected["gradient"], dtype=torch.float64).view_as(gradient)
    torch.testing.assert_close(gradient, wanted, rtol=rtol, atol=rtol)
    assert torch.autograd.gradcheck(loss, leaf)


@pytest.mark.parametrize("name", LOGITS)
def test_trl_from_logits(name: str) -> None:
    found = batch()
    _same(name, lambda logits: LOGITS[name](found, logits), found["logits"])


def test_trl_ipo() -> None:
    """TRL divides by all tokens of the completion; none of these completions begins at the first token."""
    found = batch()
    assert not found["mask"][:, 0].any()
    _same("ipo", lambda x: _of_logits(losses.ipo_loss, average=True, beta=0.3)(found, x), found["logits"])


@pytest.mark.parametrize("name", SEQUENCES)
def test_trl_from_completions(name: str) -> None:
    found = batch()
    average, loss = SEQUENCES[name]
    given = torch.cat(_pairs(found, found["logits"], average=average))
    # TRL computes the odds in float32
    _same(name, lambda x: loss(x).mean(), given, rtol=1e-6 if name == "orpo" else 1e-12)


@pytest.mark.parametrize("with_margin", [False, True])
def test_trl_reward(with_margin: bool) -> None:
    found = batch()
    options = {"margin": found["advantages"][:3], "center": 0.01} if with_margin else {}
    name = "reward-margin-center" if with_margin else "reward"
    _same(name, lambda x: losses.reward_loss(*x.chunk(2), **options).mean(), found["logits"][:, 0, 0])


@pytest.mark.parametrize("name", POLICY)
def test_trl_policy(name: str) -> None:
    found = batch()
    given = log_probs(found["logits"], found["tokens"])
    ref = log_probs(found["ref_logits"], found["tokens"])

    def loss(x: Tensor) -> Tensor:
        old = given + found["old_noise"]
        options = {"ref_log_probs": ref, **POLICY[name]}
        return losses.policy_loss(x, old, found["advantages"], _sequence(found), **options)

    _same(name, loss, given)


def test_packed_is_padded() -> None:
    """The same completions, in one row without padding and in another order."""
    found = batch()
    sequence, given = _sequence(found), log_probs(found["logits"], found["tokens"])
    kept = sequence >= 0
    order = torch.randperm(int(kept.sum()))
    packed = [t[kept][order] for t in (given, given + found["old_noise"], sequence)]
    for options in POLICY.values():
        options = {key: value for key, value in options.items() if key != "kl_weight"}
        padded = losses.policy_loss(given, given + found["old_noise"], found["advantages"], sequence, **options)
        found_packed = losses.policy_loss(packed[0], packed[1], found["advantages"], packed[2], **options)
        torch.testing.assert_close(found_packed, padded)


def test_smoothing_and_limits() -> None:
    chosen, rejected, zero = torch.tensor([2.0]), torch.tensor([-1.0]), torch.zeros(1)
    plain = losses.dpo_loss(chosen, rejected, zero, zero, beta=1.0)
    assert plain.item() == pytest.approx(math.log1p(math.exp(-3)), rel=1e-6)
    smoothed = losses.dpo_loss(chosen, rejected, zero, zero, beta=1.0, label_smoothing=0.25)
    assert smoothed.item() == pytest.approx(0.75 * plain.item() + 0.25 * (3 + plain.item()), rel=1e-6)
    # far from 0 and near it, where 1 - exp(x) would be 1 or 0
    x = torch.tensor([-1e-7, -1e-3, -0.69, -0.7, -30.0, -100.0], requires_grad=True)
    exact = torch.log(-torch.expm1(x.detach().double()))
    torch.testing.assert_close(losses._log1mexp(x).double(), exact, rtol=1e-6, atol=1e-16)
    losses.orpo_loss(x, x.flip(0)).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_orpo_of_a_certain_completion(dtype: torch.dtype) -> None:
    """A log-probability that rounds to 0, or a little above, has TRL's odds and gradient."""
    certain = torch.tensor([0.0, 1e-3, -1.0, 0.0], dtype=dtype, requires_grad=True)
    other = torch.tensor([-1.0, -1.0, 1e-3, 0.0], dtype=dtype, requires_grad=True)
    loss = losses.orpo_loss(certain, other, beta=1.0)
    loss.sum().backward()
    if dtype in (torch.float32, torch.float64):
        p, q = (x.detach().double().exp().clamp(max=1 - 1e-7) for x in (certain, other))
        odds = (certain - other).detach().double() - torch.log1p(-p) + torch.log1p(-q)
        torch.testing.assert_close(loss.detach().double(), -torch.nn.functional.logsigmoid(odds), rtol=1e-4, atol=1e-9)
    for x in (certain, other):
        assert x.grad is not None and x.grad.isfinite().all()
    # no log-probabilities: losses, say
    assert losses.orpo_loss(torch.ones(1, dtype=dtype), -torch.ones(1, dtype=dtype)).isnan()


def test_policy_gradient_is_clipped_and_stops_elsewhere() -> None:
    old = torch.zeros(4)
    new = torch.tensor([0.5, -0.5, 0.5, -0.5], requires_grad=True)
    sequence = torch.tensor([0, 0, 1, 1])
    losses.policy_loss(new, old, torch.tensor([1.0, -1.0]), sequence).backward()
    # above the clip with a positive advantage, and below it with a negative one: no gradient
    assert (new.grad != 0).tolist() == [False, True, True, False]


@pytest.mark.parametrize("kl", ["k1", "k2", "abs"])
def test_reinforce_of_gpt_neox(kl: str) -> None:
    """Its gradient by the formula of megatron/training.py, times the rows of the micro-batch: -(log p A) + beta KL."""
    rows, length, beta = 3, 7, 0.3
    given, ref = torch.randn(2, rows, length, dtype=torch.float64).requires_grad_()
    mask = torch.arange(length) < torch.tensor([[7], [2], [4]])
    advantages = torch.randn(rows, dtype=torch.float64)
    divergence = {"k1": given - ref, "k2": 0.5 * (given - ref).square(), "abs": (given - ref).abs()}[kl]
    each = (-given * advantages[:, None] + beta * divergence) * mask
    (expected,) = torch.autograd.grad((each.sum(-1) / mask.sum()).mean() * rows, given)
    sequence = torch.where(mask, torch.arange(rows)[:, None], -1)
    loss = losses.policy_loss(
        given, given.detach(), advantages, sequence, average="token", ref_log_probs=ref.detach(), kl_weight=beta,
        kl=kl,  # type: ignore[arg-type]
    )  # fmt: skip
    torch.testing.assert_close(torch.autograd.grad(loss, given)[0], expected, rtol=1e-12, atol=1e-12)


def test_tokens_left_out_have_no_part() -> None:
    values = torch.tensor([1.0, float("nan"), 3.0, 4.0], requires_grad=True)
    sequence = torch.tensor([0, -1, 2, 0])
    total = sum_by_sequence(values, sequence, 3)
    assert total.tolist() == [5.0, 0.0, 3.0]
    total.sum().backward()
    assert values.grad.tolist() == [1.0, 0.0, 1.0, 1.0]
    assert mean_by_sequence(values, sequence, 3).tolist() == [2.5, 0.0, 3.0]
    for call in (sum_by_sequence, mean_by_sequence):
        with pytest.raises(ValueError, match=r"sequence must be in \[-1, 2\), got 2"):
            call(values, sequence, 2)
    with pytest.raises(ValueError, match=r"policy_loss: sequence must be in \[-1, 2\), got 2"):
        losses.policy_loss(values, values, torch.ones(2), sequence)
    assert losses.policy_loss(values, values, torch.ones(0), sequence.clamp(max=-1)) == 0


def test_errors_name_the_argument() -> None:
    a, b = torch.zeros(3), torch.zeros(4)
    with pytest.raises(ValueError, match=r"dpo_loss: ref_chosen must have shape \[3\]"):
        losses.dpo_loss(a, a, b, a)
    with pytest.raises(ValueError, match="simpo_loss: beta must be above 0, got 0"):
        losses.simpo_loss(a, a, beta=0)
    with pytest.raises(ValueError, match="label_smoothing must be in"):
        losses.cpo_loss(a, a, label_smoothing=0.5)
    with pytest.raises(ValueError, match="policy_loss: ratio must be one of"):
        losses.policy_loss(a, a, a, torch.zeros(3, dtype=torch.int64), ratio="word")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="policy_loss: kl must be one of"):
        losses.policy_loss(a, a, a, torch.zeros(3, dtype=torch.int64), kl="full")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ref_log_probs must be given with kl_weight"):
        losses.policy_loss(a, a, a, torch.zeros(3, dtype=torch.int64), kl_weight=0.1)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_what_padding_holds_has_no_gradient(ratio: str) -> None:
    for padding in (float("nan"), -float("inf"), 1e3):
        log_probs = torch.tensor([[-1.0, -2.0, 0.0]], requires_grad=True)
        others, sequence = torch.tensor([[-1.1, -1.9, padding]]), torch.tensor([[0, 0, -1]])
        options = {"ref_log_probs": others, "kl_weight": 0.1, "ratio": ratio}
        losses.policy_loss(log_probs, others, torch.tensor([1.0]), sequence, **options).backward()
        assert log_probs.grad is not None and log_probs.grad.isfinite().all() and log_probs.grad[0, 2] == 0
