"""Losses of fine-tuning, as functions of the log-probabilities that `powertrain.linear_log_probs` computes.

Shapes: N tokens in any leading dims, C sequences (completions). `sequence` gives the completion of each token, and -1
for tokens that do not count (prompts, padding), so padded and packed batches give the same losses:
    sequence [..., N] int64 in [-1, C)
Preference losses take one number for each completion, the sum (`sum_by_sequence`) or mean (`mean_by_sequence`) of its
tokens' log-probabilities, and return one loss for each pair or completion, which the caller averages. Everything is
computed in the dtype of the log-probabilities (float32 or float64) and differentiated by autograd.

Each function names its sources. Where TRL and a paper differ, TRL is followed and the difference is stated.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.runtime import checks
from powertrain.runtime.positional import hinted


@hinted
def sum_by_sequence(values: Tensor, sequence: Tensor, count: int) -> Tensor:
    """Sums [count]: element i is the sum of the values [...] whose sequence [...] is i. Values of -1 are left out.

    Deterministic, also on a GPU: no atomics. Memory: temporarily count times that of values. Raises ValueError if the
    shapes differ, and on a CPU for a sequence that is not below count (on a GPU its values are left out).
    """
    checks.require(count >= 0, "sum_by_sequence", "count", "be at least 0", count)
    checks.shape("sum_by_sequence", "sequence", sequence, values.shape, "shape of values")
    checks.integers("sum_by_sequence", "sequence", sequence)
    checks.same_device("sum_by_sequence", "values", values, sequence=sequence)
    _check_sequence("sum_by_sequence", sequence, count)
    member = sequence.flatten() == torch.arange(count, device=sequence.device)[:, None]  # [count, N]
    return torch.where(member, values.flatten(), 0.0).sum(1)


@hinted
def mean_by_sequence(values: Tensor, sequence: Tensor, count: int) -> Tensor:
    """Means [count] of the values of each sequence, as in `sum_by_sequence`; 0 for a sequence without tokens."""
    tokens = sum_by_sequence(torch.ones_like(values), sequence, count)
    return sum_by_sequence(values, sequence, count) / tokens.clamp(min=1.0)


def _check_sequence(op: str, sequence: Tensor, count: int) -> None:
    """Raise an error for a sequence index of `count` or more; a negative index means that a token has no sequence."""
    if sequence.device.type == "cpu":
        checks.indices(op, "sequence", sequence.clamp(min=-1), count, first=-1)


def _preference(margin: Tensor, label_smoothing: float) -> Tensor:
    """-log P(chosen is preferred), where a fraction `label_smoothing` of the labels is assumed wrong."""
    return -F.logsigmoid(margin) * (1 - label_smoothing) - F.logsigmoid(-margin) * label_smoothing


def _check_alike(op: str, **tensors: Tensor | None) -> None:
    """Check that all tensors are floating-point and have the shape and device of the first one."""
    _check_floats(op, **tensors)
    given = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    first, like = given[0]
    for name, tensor in given[1:]:
        checks.shape(op, name, tensor, like.shape, f"shape of {first}")
        checks.same_device(op, first, like, **{name: tensor})


def _check_floats(op: str, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        checks.tensor(op, name, tensor)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            checks.fail(op, name, "be floating-point, of 16 bits or more", checks.name(tensor.dtype))


def _check_options(op: str, beta: float, label_smoothing: float = 0.0) -> None:
    checks.require(beta > 0, op, "beta", "be above 0", beta)
    checks.require(0 <= label_smoothing < 0.5, op, "label_smoothing", "be in [0, 0.5)", label_smoothing)


def _check_divisor(op: str, divisor: Tensor | float | None) -> None:
    # a tensor on a GPU is not read for a check
    if divisor is not None and not isinstance(divisor, Tensor):
        checks.require(0 < divisor < math.inf, op, "divisor", "be above 0 and finite", divisor)


@hinted
def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    robust: bool = False,
) -> Tensor:
    """Direct preference optimization: -log sigmoid(beta ((chosen - ref_chosen) - (rejected - ref_rejected))), [C].

    chosen, rejected, ref_chosen, ref_rejected  [C] summed log-probabilities of policy and reference
    beta             strength of the pull towards the reference
    label_smoothing  share of labels assumed wrong (conservative DPO)
    robust           subtract the term of wrong labels and rescale instead, which is unbiased (robust DPO)
    Raises ValueError naming the argument.
    Source: Rafailov et al., arXiv:2305.18290; Mitchell, "A note on DPO with noisy preferences" (2023); Chowdhury et
        al., arXiv:2403.00409. TRL's loss types sigmoid (which takes no smoothing) and robust.
    """
    _check_alike("dpo_loss", chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    _check_options("dpo_loss", beta, label_smoothing)
    margin = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
    if not robust:
        return _preference(margin, label_smoothing)
    right, wrong = -F.logsigmoid(margin), -F.logsigmoid(-margin)
    return ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)


@hinted
def ipo_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float = 0.1
) -> Tensor:
    """Identity preference optimization: ((chosen - ref_chosen) - (rejected - ref_rejected) - 1 / (2 beta))², [C].

    All [C] log-probabilities averaged over a completion's tokens, as TRL's; beta is the paper's tau.
    Source: Azar et al., arXiv:2310.12036, equation 17.
    """
    _check_alike("ipo_loss", chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    _check_options("ipo_loss", beta)
    return ((chosen - ref_chosen) - (rejected - ref_rejected) - 1 / (2 * beta)).square()


@hinted
def simpo_loss(
    chosen: Tensor, rejected: Tensor, *, beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0
) -> Tensor:
    """Simple preference optimization, without a reference: -log sigmoid(beta (chosen - rejected) - gamma), [C].

    chosen, rejected [C]: log-probabilities averaged over a completion's tokens; gamma: the margin to reach.
    Source: Meng et al., arXiv:2405.14734, equation 6.
    """
    _check_alike("simpo_loss", chosen=chosen, rejected=rejected)
    _check_options("simpo_loss", beta, label_smoothing)
    return _preference(beta * (chosen - rejected) - gamma, label_smoothing)


@hinted
def cpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """Contrastive preference optimization's preference term: -log sigmoid(beta (chosen - rejected)), [C].

    chosen, rejected [C]: summed log-probabilities. The paper adds the mean negative log-likelihood of the chosen
    completions' tokens, times a weight of 1.
    Source: Xu et al., arXiv:2401.08417, equation 5.
    """
    _check_alike("cpo_loss", chosen=chosen, rejected=rejected)
    _check_options("cpo_loss", beta, label_smoothing)
    return _preference(beta * (chosen - rejected), label_smoothing)


@hinted
def orpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float = 0.1) -> Tensor:
    """Odds ratio preference optimization's term: -beta log sigmoid(log odds(chosen) - log odds(rejected)), [C].

    chosen, rejected [C]: log-probabilities averaged over a completion's tokens; odds(p) = p / (1 - p). The paper adds
    the mean negative log-likelihood of the chosen completions' tokens; beta is its lambda. As in TRL 1 - p is at least
    1e-7, since a log-probability can round to 0. Above 0.01, which no log-probability rounds to, the loss is NaN.
    Source: Hong et al., arXiv:2403.07691, equations 4 and 7.
    """
    _check_alike("orpo_loss", chosen=chosen, rejected=rejected)
    _check_options("orpo_loss", beta)
    log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    return -beta * F.logsigmoid(log_odds)


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)), accurate near 0 and far from it (Mächler, 2012); that of -1e-7 from there to 0.01."""
    x = torch.where(x > 0.01, math.nan, x.clamp(max=-1e-7))
    near = x > -0.6931471805599453
    # the branch that is not taken gets a value whose gradient is finite
    a = torch.log(-torch.expm1(torch.where(near, x, -0.5)))
    return torch.where(near, a, torch.log1p(-torch.exp(torch.where(near, -1.0, x))))


@hinted
def kto_loss(
    log_probs: Tensor,
    ref: Tensor,
    desirable: Tensor,
    kl: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Kahneman-Tversky optimization: weight (1 - sigmoid(±beta (log_probs - ref - kl))), [C].

    log_probs, ref  [C] summed log-probabilities of policy and reference
    desirable       [C] bool: + where a completion is desirable, - where it is not
    kl              [] or [C]: the reference point, of policy from reference; no gradient passes. TRL and NeoX estimate
                    it by max(0, mean(log_probs - ref)) over mismatched or other completions
    Raises ValueError naming the argument.
    Source: Ethayarajh et al., arXiv:2402.01306, equation 8.
    """
    _check_alike("kto_loss", log_probs=log_probs, ref=ref)
    _check_floats("kto_loss", kl=kl)
    _check_options("kto_loss", beta)
    checks.shape("kto_loss", "desirable", desirable, log_probs.shape, "shape of log_probs")
    checks.same_device("kto_loss", "log_probs", log_probs, desirable=desirable)
    if desirable.dtype is not torch.bool:
        checks.fail("kto_loss", "desirable", "be bool", checks.name(desirable.dtype))
    if kl.dim() > 0:
        checks.shape("kto_loss", "kl", kl, log_probs.shape, "one number, or the shape of log_probs")
    gain = beta * (log_probs - ref - kl.detach())
    wanted, unwanted = desirable_weight * torch.sigmoid(-gain), undesirable_weight * torch.sigmoid(gain)
    return torch.where(desirable, wanted, unwanted)


@hinted
def reward_loss(chosen: Tensor, rejected: Tensor, *, margin: Tensor | None = None, center: float = 0.0) -> Tensor:
    """Bradley-Terry loss of rewards: -log sigmoid(chosen - rejected - margin) + center (chosen + rejected)², [C].

    chosen, rejected [C]: rewards of completions; margin [C]: the least difference wanted; center: weight of the second
    term, which pulls the mean reward towards 0; the first term does not determine it.
    Raises ValueError if the shapes differ.
    Source: Ouyang et al., arXiv:2203.02155, equation 1; margin: Touvron et al., arXiv:2307.09288; center: Eisenstein et
        al., arXiv:2312.09244.
    """
    _check_alike("reward_loss", chosen=chosen, rejected=rejected, margin=margin)
    ahead = chosen - rejected if margin is None else chosen - rejected - margin
    return -F.logsigmoid(ahead) + center * (chosen + rejected).square()


# of log p - ref; Schulman's names
_ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d, "k2": lambda d: d.square() / 2, "k3": lambda d: (-d).exp() + d - 1, "abs": torch.abs,
}  # fmt: skip


@hinted
def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    *,
    ratio: Literal["token", "sequence"] = "token",
    average: Literal["sequence", "token"] = "sequence",
    clip: tuple[float, float] = (0.2, 0.2),
    ref_log_probs: Tensor | None = None,
    kl_weight: float = 0.0,
    kl: Literal["k1", "k2", "k3", "abs"] = "k3",
    divisor: Tensor | float | None = None,
) -> Tensor:
    """Clipped policy gradient with given advantages, [].

        r = exp(log_probs - old_log_probs);  loss = -min(r A, clamp(r, 1 - low, 1 + high) A) + kl_weight KL

    log_probs, old_log_probs, ref_log_probs  [..., N] of the sampled tokens: policy, sampler, reference
    advantages  [C], of completions
    sequence    [..., N] int64: the completion of each token, -1 for others
    ratio       "token": r of each token (GRPO, DAPO); "sequence": one r a completion, the geometric mean (GSPO)
    average     "sequence": mean over completions of their means (GRPO, GSPO); "token": mean over all tokens (DAPO)
    clip        (low, high); DAPO's high is 0.28, GSPO's are 3e-4 and 4e-4
    kl_weight   of the estimate `kl`; d = log p - ref
    kl          "k3": exp(-d) + d - 1, never negative; "k1": d; "k2": d^2 / 2; "abs": |d| (GPT-NeoX)
    divisor     instead of the number of completions ("sequence") or tokens ("token"), such as that of all ranks, or of
                the longest completion times their number (Dr. GRPO)
    No gradient passes through anything but log_probs. Raises ValueError naming the argument.
    Sources: Shao et al., arXiv:2402.03300 (GRPO); Zheng et al., arXiv:2507.18071 (GSPO); Yu et al., arXiv:2503.14476
        (DAPO); Schulman, "Approximating KL divergence" (2020).
    """
    op = "policy_loss"
    _check_alike(op, log_probs=log_probs, old_log_probs=old_log_probs, ref_log_probs=ref_log_probs)
    checks.shape(op, "sequence", sequence, log_probs.shape, "shape of log_probs")
    checks.integers(op, "sequence", sequence)
    _check_floats(op, advantages=advantages)
    checks.require(advantages.dim() == 1, op, "advantages", "be [C], of completions", list(advantages.shape))
    checks.same_device(op, "log_probs", log_probs, advantages=advantages, sequence=sequence)
    count = advantages.shape[0]
    _check_sequence(op, sequence, count)
    checks.require(len(clip) == 2, op, "clip", "be (low, high)", clip)
    checks.require(all(bound >= 0 for bound in clip), op, "clip", "be at least 0", clip)
    _check_divisor(op, divisor)
    checks.one_of(op, "ratio", ratio, ("token", "sequence"))
    checks.one_of(op, "average", average, ("sequence", "token"))
    checks.one_of(op, "kl", kl, tuple(_ESTIMATES))
    checks.require(kl_weight == 0 or ref_log_probs is not None, op, "ref_log_probs", "be given with kl_weight", None)
    kept, of = sequence >= 0, sequence.clamp(min=0)
    if count == 0:  # 0 with a gradient of 0: there is no advantage that a token could take
        return torch.where(kept, log_probs, 0.0).sum()
    # what padding holds, NaN too, has no gradient either
    log_ratio = torch.where(kept, log_probs - old_log_probs.detach(), 0.0)
    if ratio == "sequence":
        log_ratio = mean_by_sequence(log_ratio, sequence, count)[of]
    r, A = log_ratio.exp(), advantages.detach()[of]
    loss = -torch.minimum(r * A, r.clamp(1 - clip[0], 1 + clip[1]) * A)
    if kl_weight and ref_log_probs is not None:
        loss = loss + kl_weight * _ESTIMATES[kl](torch.where(kept, log_probs - ref_log_probs.detach(), 0.0))
    if average == "token":
        return torch.where(kept, loss, 0.0).sum() / (kept.sum().clamp(min=1) if divisor is None else divisor)
    return mean_by_sequence(loss, sequence, count).sum() / (count if divisor is None else divisor)


@hinted
def distillation_loss(divergence: Tensor, sequence: Tensor, *, divisor: Tensor | float | None = None) -> Tensor:
    """Divergence of completion tokens from a teacher, averaged over these tokens, [].

    divergence  [..., N] as `linear_log_probs(..., teacher=Teacher(x, weight, beta=beta))` gives it: beta 0 is the
                forward KL divergence, 1 the reverse one, between them the generalized Jensen-Shannon divergence
    sequence    [..., N]: -1 leaves a token out
    divisor     instead of the number of tokens, such as that of all ranks
    Raises ValueError if the shapes differ.
    Source: Agarwal et al., arXiv:2306.13649; TRL's GKD, whose beta this is.
    """
    _check_floats("distillation_loss", divergence=divergence)
    checks.shape("distillation_loss", "sequence", sequence, divergence.shape, "shape of divergence")
    checks.integers("distillation_loss", "sequence", sequence)
    checks.same_device("distillation_loss", "divergence", divergence, sequence=sequence)
    _check_divisor("distillation_loss", divisor)
    kept = sequence >= 0
    return torch.where(kept, divergence, 0.0).sum() / (kept.sum().clamp(min=1) if divisor is None else divisor)
