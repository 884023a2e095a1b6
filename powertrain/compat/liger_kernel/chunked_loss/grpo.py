"""Losses of group-relative policy optimization from hidden states, with Liger's names and TRL's numbers.

r = exp(log π - log π_old), token by token or, at level "sequence", of a sequence's mean. A is a sequence's advantage,
m the mask. The term of a token, then its mean over:
    grpo               -min(min(r, delta) A, clip(r, 1 ± ε) A)      m of each sequence, then sequences
    bnpo               the same                                     all of m
    dr_grpo            the same                                     sequences * max_completion_length
    dapo               the same                                     num_items_in_batch, or m of all ranks, per rank
    luspo              the same, times the sequence's sum of m      all positions
    cispo              -min(r, ε_high) A log π, r without gradient  as dapo
    sapo               -4/τ sigmoid(τ (r - 1)) A, τ by A's sign     as grpo
    vespo              -φ A log π, φ without gradient               as dapo
A term beta * (exp(d) - d - 1), d = log π_ref - log π, is added.
Source: Shao et al., arXiv:2402.03300; Yu et al., arXiv:2503.14476; arXiv:2511.20347 (sapo).
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from powertrain.compat.missing import unknown
from powertrain.ops.linear_log_probs import linear_log_probs
from powertrain.runtime import checks

__all__ = ["LigerFusedLinearGRPOLoss"]

_OP = "LigerFusedLinearGRPOLoss"
_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


class LigerFusedLinearGRPOLoss(nn.Module):
    """The module's losses; forward gives (loss, metrics).

    metrics: the mean of the KL term unless beta is 0, and the share of clipped tokens. use_ref_model: log π_ref is
    ref_per_token_logps, or made of ref_input and ref_weight; without it log π itself. compiled and chunk_size are
    hints. Raises ValueError naming the argument.
    """

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
    ) -> None:
        super().__init__()
        checks.one_of(_OP, "loss_type", loss_type, _TYPES)
        levels = ("token",) if loss_type in ("cispo", "sapo", "vespo") else ("token", "sequence")
        checks.one_of(_OP, "importance_sampling_level", importance_sampling_level, levels)
        for name, value in (("pos", sapo_temperature_pos), ("neg", sapo_temperature_neg)):
            checks.require(value > 0, _OP, f"sapo_temperature_{name}", "be positive", value)
        checks.require(delta is None or delta > 0, _OP, "delta", "be positive, or None", delta)
        has_length = loss_type != "dr_grpo" or max_completion_length is not None
        checks.require(has_length, _OP, "max_completion_length", "be given for dr_grpo", None)
        self.beta, self.use_ref_model, self.temperature = beta, use_ref_model, temperature
        self.compiled, self.chunk_size = compiled, chunk_size
        self.epsilon_low, self.epsilon_high, self.delta = epsilon_low, epsilon_high, delta
        self.loss_type, self.max_completion_length = loss_type, max_completion_length
        self.importance_sampling_level = importance_sampling_level
        self.sapo_temperature_pos, self.sapo_temperature_neg = sapo_temperature_pos, sapo_temperature_neg
        self.use_bias_correction_kl = use_bias_correction_kl
        self.vespo_k_pos, self.vespo_lambda_pos = vespo_k_pos, vespo_lambda_pos
        self.vespo_k_neg, self.vespo_lambda_neg = vespo_k_neg, vespo_lambda_neg

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """_input [B, T, D], lin_weight [V, D], ids, mask and log-probabilities [B, T], advantages [B].

        vllm_is_ratio [B], [B, 1] or [B, T] multiplies the policy's term (vespo: is part of φ).
        """
        shape = selected_token_ids.shape
        checks.require(_input.dim() == 3, _OP, "_input", "have shape [B, T, D]", list(_input.shape))
        checks.shape(_OP, "selected_token_ids", selected_token_ids, _input.shape[:2], "[B, T] of _input")
        of_tokens = {
            "attention_mask": attention_mask, "old_per_token_logps": old_per_token_logps,
            "ref_per_token_logps": ref_per_token_logps,
        }  # fmt: skip
        for name, value in of_tokens.items():
            checks.shape(_OP, name, value, shape, "[B, T] of _input")
        checks.shape(_OP, "advantages", advantages, shape[:1], "first dim of _input")
        ratio = ratio_of_tokens(_OP, vllm_is_ratio, shape)
        log_p = self._log_probs(_input, lin_weight, selected_token_ids, bias)
        ref = ref_per_token_logps if self.use_ref_model else None
        if self.use_ref_model and ref is None:
            for name, given in (("ref_input", ref_input), ("ref_weight", ref_weight)):
                checks.require(given is not None, _OP, name, "be given with use_ref_model", None)
            assert ref_input is not None and ref_weight is not None
            with torch.no_grad():
                ref = self._log_probs(ref_input, ref_weight, selected_token_ids, ref_bias)
        ref = (log_p if ref is None else ref).detach().to(log_p.dtype)
        old = (log_p if old_per_token_logps is None else old_per_token_logps).detach().to(log_p.dtype)
        mask = attention_mask.to(log_p.dtype)
        # luspo's mean has the terms of masked tokens too
        if self.loss_type != "luspo":
            # what is given for those may be anything; 0 in all three is a term of finite size, which the mask removes
            log_p, old, ref = (values.masked_fill(mask == 0, 0.0) for values in (log_p, old, ref))
        return self._loss(log_p, old, ref, mask, advantages.to(log_p.dtype)[:, None], ratio, num_items_in_batch)

    def _log_probs(self, x: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None) -> Tensor:
        return linear_log_probs(x, weight, ids, bias=bias, temperature=self.temperature).log_probs

    def _loss(
        self, log_p: Tensor, old: Tensor, ref: Tensor, mask: Tensor, advantage: Tensor, ratio: Tensor | None,
        items: Tensor | float | None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        terms, distance, clipped = self.terms(log_p, old, ref, mask, advantage, ratio)
        tokens = mask.sum().clamp(min=1)
        metrics = () if distance is None else ((distance * mask).sum().detach() / tokens,)
        return self.reduced(terms, mask, items), (*metrics, (clipped * mask).sum() / tokens)

    def terms(
        self, log_p: Tensor, old: Tensor, ref: Tensor, mask: Tensor, advantage: Tensor, ratio: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """(loss, KL term unless beta is 0, 1 where clipped) of every token, all [B, T].

        log_p, old, ref and mask [B, T], advantage [B, 1], ratio [B, 1] or [B, T].
        """
        log_r = log_p - old
        weights = log_r
        if self.importance_sampling_level == "sequence":
            weights = ((log_r * mask).sum(-1) / mask.sum(-1).clamp(min=1))[:, None]
        r = weights.exp()
        terms, clipped = self._policy(log_p, r, log_r, mask, advantage, ratio)
        if ratio is not None and self.loss_type != "vespo":
            # of masked tokens it may be anything too; luspo's mean has their terms
            terms = terms * (ratio if self.loss_type == "luspo" else ratio.masked_fill(mask == 0, 0.0))
        share = clipped.expand_as(mask).to(mask.dtype)
        if not self.beta:
            return terms.expand_as(mask), None, share
        distance = (ref - log_p).exp() - (ref - log_p) - 1
        distance = distance * r if self.use_bias_correction_kl else distance
        return terms + self.beta * distance, distance, share

    def _policy(
        self, log_p: Tensor, r: Tensor, log_r: Tensor, mask: Tensor, advantage: Tensor, ratio: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(terms of the tokens, bool: which are clipped)."""
        low, high = 1 - self.epsilon_low, 1 + self.epsilon_high
        if self.loss_type == "cispo":
            low, high = -math.inf, self.epsilon_high
        clipped = ((r < low) & (advantage < 0)) | ((r > high) & (advantage > 0))
        if self.loss_type == "cispo":
            return -r.clamp(max=high).detach() * advantage * log_p, clipped
        if self.loss_type == "sapo":
            heat = torch.where(advantage > 0, self.sapo_temperature_pos, self.sapo_temperature_neg).to(r.dtype)
            return -4 / heat * torch.sigmoid(heat * (r - 1)) * advantage, torch.zeros_like(clipped)
        if self.loss_type == "vespo":
            return -self._phi(log_r, mask, advantage, ratio) * advantage * log_p, torch.zeros_like(clipped)
        free = r if self.delta is None else r.clamp(max=self.delta)
        return -torch.min(free * advantage, r.clamp(low, high) * advantage), clipped

    @torch.no_grad()
    def _phi(self, log_r: Tensor, mask: Tensor, advantage: Tensor, ratio: Tensor | None) -> Tensor:
        """w^k exp(λ (1 - w)), [B, 1], of the sequence's ratio w; k and λ by the advantage's sign."""
        lowest = math.log(1e-8)
        log_w = (log_r.clamp(-20, 20) * mask).sum(-1, keepdim=True)
        if ratio is not None:
            log_w = log_w + ratio.log().clamp(lowest, 20).sum(-1, keepdim=True)
        log_w = log_w.clamp(lowest, 20)
        k = torch.where(advantage >= 0, self.vespo_k_pos, self.vespo_k_neg)
        rate = torch.where(advantage >= 0, self.vespo_lambda_pos, self.vespo_lambda_neg).clamp(min=1e-4)
        return (rate + k * log_w - rate * log_w.exp()).exp().nan_to_num(0.0, 0.0, 0.0).to(log_r.dtype)

    def reduced(self, terms: Tensor, mask: Tensor, items: Tensor | float | None) -> Tensor:
        """The mean of `terms`, over what loss_type says."""
        total, rows = (terms * mask).sum(), mask.shape[0]
        if self.loss_type in ("grpo", "sapo"):
            return ((terms * mask).sum(-1) / mask.sum(-1).clamp(min=1)).sum() / rows
        if self.loss_type == "bnpo":
            return total / mask.sum().clamp(min=1)
        if self.loss_type == "dr_grpo":
            assert self.max_completion_length is not None
            return total / (rows * self.max_completion_length)
        if self.loss_type == "luspo":
            weighted = terms * mask.sum(-1, keepdim=True)
            return weighted.sum() / (rows * weighted.shape[1])
        return total / _tokens_per_rank(mask, items)


def ratio_of_tokens(op: str, ratio: Tensor | None, shape: torch.Size) -> Tensor | None:
    """vllm_is_ratio [B], [B, 1] or [B, T] as [B, 1] or [B, T]; ValueError for other shapes."""
    if ratio is None:
        return None
    B, T = shape
    fits = tuple(ratio.shape) in ((B,), (B, 1), (B, T))
    checks.require(fits, op, "vllm_is_ratio", f"have shape [{B}], [{B}, 1] or [{B}, {T}]", list(ratio.shape))
    return ratio[:, None] if ratio.dim() == 1 else ratio


def _tokens_per_rank(mask: Tensor, items: Tensor | float | None) -> Tensor:
    """Tokens of the whole batch over the number of ranks, at least 1."""
    is_spread = dist.is_available() and dist.is_initialized()
    if items is None:
        tokens = mask.sum().detach()
        if is_spread:
            dist.all_reduce(tokens)
    else:
        tokens = torch.as_tensor(items, device=mask.device).to(mask.dtype)
    return (tokens / (dist.get_world_size() if is_spread else 1)).clamp(min=1)


__getattr__ = unknown(__name__)
