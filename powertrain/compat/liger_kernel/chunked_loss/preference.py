"""Losses of preference fine-tuning from hidden states.

Log-probabilities are those of `linear_log_probs`, the losses those of `powertrain.losses`. Hidden states and targets of
chosen completions are the first half of the batch, those of rejected ones the second; both are shifted already.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from powertrain import losses
from powertrain.compat.missing import unknown
from powertrain.ops.conversion import unsupported
from powertrain.ops.linear_log_probs import linear_log_probs
from powertrain.ops.shapes import acc_dtype
from powertrain.runtime import checks
from powertrain.runtime.dispatch import without_autocast

__all__ = [
    "LigerFusedLinearCPOLoss",
    "LigerFusedLinearDPOLoss",
    "LigerFusedLinearKTOLoss",
    "LigerFusedLinearORPOLoss",
    "LigerFusedLinearSimPOLoss",
]
Metrics = tuple[Tensor | float, ...]


class _Head:
    """Hidden states [B, T, D] through a linear layer [V, D] to the log-probabilities of targets [B, T]."""

    def __init__(
        self, op: str, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore_index: int
    ) -> None:
        checks.require(x.dim() == 3, op, "_input", "have shape [B, T, D]", list(x.shape))
        checks.shape(op, "target", target, x.shape[:2], "shape of _input without its last dim")
        # log-probabilities and not losses: every preference loss here starts from them
        self.x, self.weight, self.bias, self.kept = x, weight, bias, target != ignore_index
        self.tokens = linear_log_probs(x, weight, target, bias=bias, ignore_index=ignore_index).log_probs

    def sequences(self, average: bool) -> Tensor:
        """[B]: sums over a sequence's targets, or their means."""
        sums = self.tokens.sum(-1)
        # a sequence whose targets are all ignored divides by 0 and gives nan, as theirs
        return sums / self.kept.sum(-1) if average else sums

    def logits_sum(self, of: Tensor | slice) -> Tensor:
        """Sum of all logits of these sequences, for metrics: the sum of the products is a product of sums."""
        with torch.no_grad(), without_autocast(self.x.device):
            # float32 or float64: sums over all logits of a batch, which autocast's dtype cannot hold
            x = self.x[of].to(acc_dtype(self.x.dtype))
            total = x.sum((0, 1)) @ self.weight.to(x.dtype).sum(0)
            return total if self.bias is None else total + x.shape[0] * x.shape[1] * self.bias.to(x.dtype).sum()


class _PairedLoss(nn.Module):
    """Forward of the losses of pairs; `preference` takes (chosen, rejected [C]) and gives (loss, further metrics)."""

    average = False
    alpha = 1.0

    def __init__(self, ignore_index: int, beta: float, compute_nll_loss: bool) -> None:
        super().__init__()
        self.ignore_index, self.beta, self.compute_nll_loss = ignore_index, beta, compute_nll_loss

    def _loss(
        self, weight: Tensor, x: Tensor, target: Tensor, bias: Tensor | None, nll_target: Tensor | None,
        preference: Callable[[Tensor, Tensor], tuple[Tensor, Metrics]],
    ) -> tuple[Tensor, Metrics]:  # fmt: skip
        op, pairs = type(self).__name__, target.shape[0] // 2
        # chosen and rejected rows are paired by their place in the two halves
        checks.require(target.shape[0] % 2 == 0, op, "target", "hold as many rejected as chosen rows", len(target))
        head = _Head(op, x, weight, target, bias, self.ignore_index)
        # one pass over the head for both halves
        by_sequence = head.sequences(self.average)
        chosen, rejected = by_sequence[:pairs], by_sequence[pairs:]
        nll: Tensor | float = 0.0
        if self.compute_nll_loss:
            nll = self._nll(head, pairs) if nll_target is None else self._nll_of(x, weight, nll_target, bias, pairs)
        loss, more = preference(chosen, rejected)
        # logits per half, for the means that are reported as metrics
        size = pairs * x.shape[1] * weight.shape[0]
        means = head.logits_sum(slice(pairs)) / size, head.logits_sum(slice(pairs, None)) / size
        # Liger's order of metrics, which trainers index by position
        return self.alpha * nll + loss, (chosen, rejected, *means, nll, *more)

    @staticmethod
    def _nll(head: _Head, pairs: int) -> Tensor:
        # the mean over targets of chosen completions only, as in CPO and ORPO
        return -head.tokens[:pairs].sum() / head.kept[:pairs].sum()

    def _nll_of(self, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, pairs: int) -> Tensor:
        head = _Head(type(self).__name__, x[:pairs], weight, target[:pairs], bias, self.ignore_index)
        return self._nll(head, pairs)

    def _rewards(self, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
        return self.beta * chosen, self.beta * rejected


class LigerFusedLinearDPOLoss(_PairedLoss):
    """`dpo_loss` (loss_type "sigmoid" or "robust") from hidden states; "hinge" after Zhao et al., arXiv:2305.10425."""

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, alpha: float = 1.0, compute_nll_loss: bool = False,
        compiled: bool = True, use_ref_model: bool = True, average_log_prob: bool = False, chunk_size: int = 1,
        loss_type: str = "sigmoid", label_smoothing: float = 0.0, discopop_tau: float = 0.05,
    ) -> None:  # fmt: skip
        super().__init__(ignore_index, beta, compute_nll_loss)
        if loss_type not in ("sigmoid", "robust", "hinge"):
            # their other types have no function in powertrain.losses
            unsupported("LigerFusedLinearDPOLoss", "loss_type", loss_type, "sigmoid, robust, hinge")
        self.alpha, self.average, self.use_ref_model = alpha, average_log_prob, use_ref_model
        self.loss_type, self.label_smoothing = loss_type, label_smoothing

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None,
        ref_input: Tensor | None = None, ref_weight: Tensor | None = None, ref_bias: Tensor | None = None,
    ) -> tuple[Tensor, Metrics]:  # fmt: skip
        pairs = target.shape[0] // 2
        # a missing reference model counts as log-probability 0
        ref = torch.zeros(target.shape[0], device=_input.device)
        if self.use_ref_model:
            checks.require(ref_input is not None, type(self).__name__, "ref_input", "be given with use_ref_model", None)
            assert ref_input is not None
            # the reference model is frozen
            with torch.no_grad():
                weight = lin_weight if ref_weight is None else ref_weight
                ref = _Head(type(self).__name__, ref_input, weight, target, ref_bias, self.ignore_index).sequences(
                    self.average
                )

        def preference(chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Metrics]:
            # rewards are relative to the reference, as DPO defines them
            rewards = self._rewards(chosen - ref[:pairs], rejected - ref[pairs:])
            if self.loss_type == "hinge":
                return torch.relu(1 - (rewards[0] - rewards[1])).sum() / pairs, rewards
            robust = self.loss_type == "robust"
            loss = losses.dpo_loss(
                chosen, rejected, ref[:pairs], ref[pairs:], beta=self.beta, robust=robust,
                # label_smoothing means the flip probability in the robust loss, and nothing in the other two
                label_smoothing=self.label_smoothing if robust else 0.0,
            )  # fmt: skip
            # sum over pairs by their number: ignored pairs count
            return loss.sum() / pairs, rewards

        return self._loss(lin_weight, _input, target, bias, None, preference)


class LigerFusedLinearCPOLoss(_PairedLoss):
    """`cpo_loss` from hidden states, plus alpha times the cross entropy of chosen completions."""

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0,
        compute_nll_loss: bool = True, compiled: bool = True, average_log_prob: bool = False, chunk_size: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(ignore_index, beta, compute_nll_loss)
        self.alpha, self.average, self.label_smoothing = alpha, average_log_prob, label_smoothing

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Metrics]:
        def preference(chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Metrics]:
            loss = losses.cpo_loss(chosen, rejected, beta=self.beta, label_smoothing=self.label_smoothing)
            return loss.mean(), self._rewards(chosen, rejected)

        return self._loss(lin_weight, _input, target, bias, None, preference)


class LigerFusedLinearSimPOLoss(_PairedLoss):
    """`simpo_loss` from hidden states, plus alpha times the cross entropy of chosen completions."""

    # SimPO and ORPO take mean log-probabilities, without an argument
    average = True

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0,
        compute_nll_loss: bool = True, compiled: bool = True, gamma: float = 0.5, chunk_size: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(ignore_index, beta, compute_nll_loss)
        self.alpha, self.gamma, self.label_smoothing = alpha, gamma, label_smoothing

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Metrics]:
        def preference(chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Metrics]:
            options = {"beta": self.beta, "gamma": self.gamma, "label_smoothing": self.label_smoothing}
            return losses.simpo_loss(chosen, rejected, **options).mean(), self._rewards(chosen, rejected)

        return self._loss(lin_weight, _input, target, bias, None, preference)


class LigerFusedLinearORPOLoss(_PairedLoss):
    """`orpo_loss` from hidden states, plus the cross entropy of chosen completions or of `nll_target`."""

    average = True

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, compute_nll_loss: bool = True, compiled: bool = True,
        chunk_size: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(ignore_index, beta, compute_nll_loss)

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None,
        nll_target: Tensor | None = None,
    ) -> tuple[Tensor, Metrics]:  # fmt: skip
        def preference(chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Metrics]:
            # beta multiplies outside, since the ratio itself is a metric
            ratio = -losses.orpo_loss(chosen, rejected, beta=1.0)  # log sigmoid of the log odds
            odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
            more = ratio.detach().mean(), odds.detach().mean()
            return -self.beta * ratio.mean(), (*self._rewards(chosen, rejected), *more)

        return self._loss(lin_weight, _input, target, bias, nll_target, preference)


class LigerFusedLinearKTOLoss(nn.Module):
    """`kto_loss` from hidden states; preference_labels [B] bool: whether a completion is desirable."""

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, compiled: bool = True, use_ref_model: bool = False,
        average_log_prob: bool = False, chunk_size: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ignore_index, self.beta = ignore_index, beta
        self.use_ref_model, self.average = use_ref_model, average_log_prob

    def forward(
        # KTO's arguments begin with the input, the paired losses' with the weight, as in Liger
        self, _input: Tensor, lin_weight: Tensor, target: Tensor, bias: Tensor | None = None,
        preference_labels: Tensor | None = None, ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, kl: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Any, ...]]:  # fmt: skip
        """(loss, sums over desirable and undesirable completions of log-probabilities, logits and rewards)."""
        op = type(self).__name__
        checks.require(preference_labels is not None, op, "preference_labels", "be given", None)
        assert preference_labels is not None
        # labels may come as ints or floats
        wanted = preference_labels.bool()
        head = _Head(op, _input, lin_weight, target, bias, self.ignore_index)
        log_probs = head.sequences(self.average)
        ref = torch.zeros_like(log_probs)
        if self.use_ref_model:
            checks.require(ref_input is not None, op, "ref_input", "be given with use_ref_model", None)
            assert ref_input is not None
            with torch.no_grad():
                weight = lin_weight if ref_weight is None else ref_weight
                ref = _Head(op, ref_input, weight, target, ref_bias, self.ignore_index).sequences(self.average)
        # kl is estimated by the caller on mismatched pairs; None: no reference point
        offset = log_probs.new_zeros(()) if kl is None else kl
        # divided by the batch, not by the number of desirable rows
        loss = losses.kto_loss(log_probs, ref, wanted, offset, beta=self.beta).sum() / target.shape[0]
        rewards = self.beta * (log_probs - ref)
        # masked by where and not multiplied: 0 * nan would spread
        sums = [torch.where(of, values, 0.0).sum() for values in (log_probs, rewards) for of in (wanted, ~wanted)]
        return loss, (*sums[:2], head.logits_sum(wanted), head.logits_sum(~wanted), *sums[2:])


__getattr__ = unknown(__name__)
