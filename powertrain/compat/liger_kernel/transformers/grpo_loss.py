"""liger_kernel.transformers.grpo_loss: the losses of chunked_loss.grpo from logits instead of hidden states."""

import torch
from torch import Tensor
from torch.nn import functional as F

from powertrain.compat.liger_kernel.chunked_loss.grpo import LigerFusedLinearGRPOLoss, ratio_of_tokens
from powertrain.compat.liger_kernel.row_blocks import token_log_probs
from powertrain.compat.missing import unknown
from powertrain.runtime import checks

__all__ = ["triton_grpo_loss"]

_OP = "triton_grpo_loss"


def triton_grpo_loss(
    logits: Tensor,
    old_logp: Tensor | None,
    ref_logp: Tensor | None,
    completion_ids: Tensor,
    advantages: Tensor,
    completion_mask: Tensor | None = None,
    temperature: float = 0.9,
    beta: float = 0.04,
    eps_low: float = 0.2,
    eps_high: float = 0.4,
    inplace: bool = True,
    loss_type: str = "dapo",
    max_completion_length: int | None = None,
    importance_sampling_level: str = "token",
    reduce: bool = False,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vllm_is_ratio: Tensor | None = None,
    delta: float | None = None,
    use_bias_correction_kl: bool = False,
    num_items_in_batch: Tensor | float | None = None,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> tuple[Tensor, list[Tensor]] | tuple[Tensor, Tensor | None, Tensor]:
    """The losses of `LigerFusedLinearGRPOLoss` from logits, by PyTorch in blocks of rows.

    Shapes: B completions, L tokens.
        logits                       [B, L + 1, V]  the last position is of no use: its gradient is 0
        completion_ids               [B, L]
        old_logp, ref_logp           [B, L]  None: the new log-probabilities; ref_logp is needed unless beta is 0
        advantages                   [B]
        completion_mask              [B, L]  tokens of 0 have loss and gradient 0, whatever their logits are
        vllm_is_ratio                [B], [B, 1] or [B, L]
    Returns (loss [B, L], KL term [B, L] or None if beta is 0, 1 where clipped [B, L]), masked tokens 0; with `reduce`
        (loss, [mean KL term unless beta is 0, share of clipped tokens]). float32.
    max_completion_length None: L. inplace is a hint there; logits are never overwritten here.
    Raises ValueError naming the argument.
    """
    checks.require(
        logits.dim() == 3 and logits.shape[1] > 1, _OP, "logits", "have shape [B, L + 1, V]", list(logits.shape)
    )
    B, L = logits.shape[0], logits.shape[1] - 1
    given = {
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "old_logp": old_logp,
        "ref_logp": ref_logp,
    }
    for name, value in given.items():
        checks.shape(_OP, name, value, (B, L), "[B, L] of logits [B, L + 1, V]")
    checks.shape(_OP, "advantages", advantages, (B,), "first dim of logits")
    checks.require(not beta or ref_logp is not None, _OP, "ref_logp", "be given with a beta other than 0", None)
    clips = loss_type not in ("cispo", "sapo", "vespo")
    checks.require(delta is None or clips, _OP, "delta", f"be None with loss_type {loss_type!r}", delta)
    loss = LigerFusedLinearGRPOLoss(
        beta=beta, epsilon_low=eps_low, epsilon_high=eps_high, loss_type=loss_type, delta=delta,
        max_completion_length=L if max_completion_length is None else max_completion_length,
        importance_sampling_level=importance_sampling_level, temperature=temperature,
        sapo_temperature_pos=sapo_temperature_pos, sapo_temperature_neg=sapo_temperature_neg,
        use_bias_correction_kl=use_bias_correction_kl, vespo_k_pos=vespo_k_pos, vespo_lambda_pos=vespo_lambda_pos,
        vespo_k_neg=vespo_k_neg, vespo_lambda_neg=vespo_lambda_neg,
    )  # fmt: skip
    is_kept = torch.ones_like(completion_ids, dtype=torch.bool) if completion_mask is None else completion_mask != 0
    log_p = _log_probs(logits, completion_ids, is_kept, temperature)
    # what is read of masked tokens may be anything; 0 in all three is a loss of finite size, which the mask removes
    old, ref = (
        (log_p if value is None else value).detach().to(log_p.dtype).masked_fill(~is_kept, 0.0)
        for value in (old_logp, ref_logp)
    )
    mask = is_kept.to(log_p.dtype) if completion_mask is None else completion_mask.to(log_p.dtype)
    ratio = ratio_of_tokens(_OP, vllm_is_ratio, completion_ids.shape)
    terms, distance, clipped = loss.terms(log_p, old, ref, mask, advantages.to(log_p.dtype)[:, None], ratio)
    terms, clipped, distance = terms * mask, clipped * mask, None if distance is None else distance * mask
    if not reduce:
        return terms, distance, clipped
    tokens = mask.sum().clamp(min=1)
    metrics = [] if distance is None else [distance.sum().detach() / tokens]
    return loss.reduced(terms, mask, num_items_in_batch), [*metrics, clipped.sum() / tokens]


def _log_probs(logits: Tensor, ids: Tensor, kept: Tensor, temperature: float) -> Tensor:
    """[B, L] of logits [B, L + 1, V]."""
    B, rows, V = logits.shape
    # the last position as one more masked token: logits without it would be a copy of all
    ids, kept = F.pad(ids, (0, 1)), F.pad(kept, (0, 1))
    return token_log_probs(logits.reshape(B * rows, V), ids.flatten(), kept.flatten(), temperature).view(B, rows)[
        :, :-1
    ]


__getattr__ = unknown(__name__)
