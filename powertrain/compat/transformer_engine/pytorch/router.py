"""transformer_engine.pytorch.router on `powertrain.moe_route`: dense probabilities and maps of mixture-of-experts."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from powertrain.compat.missing import unknown
from powertrain.ops.conversion import unsupported
from powertrain.ops.moe import moe_route
from powertrain.runtime import checks

__all__ = ["fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function"]

_SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
_FORMATS = ("bytemap", "bitmap_u8")
# as there: scores that all underflow give 0, not nan
_TINY = 1e-20


def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
    routing_map_format: str = "bytemap",
    topk_indices: Tensor | None = None,
    qb_histogram: Tensor | None = None,
    qb_bin_bounds: Tensor | None = None,
    qb_histogram_mode: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(probabilities of the chosen experts, 0 elsewhere [..., E] in logits' dtype; where they are).

        logits          [..., E]
        score_function  "softmax", before the choice with use_pre_softmax, else of the chosen; "sigmoid" or
                        "sqrtsoftplus" of each, divided by their sum if topk > 1
        num_groups, group_topk
                        choose from the best group_topk groups, a group's score being the sum of its best
                        topk / group_topk
        expert_bias     [E], added to the scores for the choice alone; not with softmax
    The second result is bool [..., E], for "bitmap_u8" uint8 [..., ceil(E / 8)], the lowest bit first, or
    topk_indices [..., topk], filled with the experts, where that is given. qb_* are refused.
    Without groups softmax and sigmoid are `powertrain.moe_route`, the rest is PyTorch in float32.
    """
    op = "fused_topk_with_score_function"
    for name, value in (
        ("qb_histogram", qb_histogram), ("qb_bin_bounds", qb_bin_bounds), ("qb_histogram_mode", qb_histogram_mode),
    ):  # fmt: skip
        if value is not None:
            unsupported(op, name, "a value", "expert_bias with powertrain.moe_update_bias_")
    checks.one_of(op, "score_function", score_function, _SCORES)
    no_bias = expert_bias is None or score_function != "softmax"
    checks.require(no_bias, op, "expert_bias", "be None with softmax", "a tensor")
    _check(op, logits, topk, routing_map_format)
    rows = logits.reshape(-1, logits.shape[-1])
    groups = (num_groups, group_topk) if group_topk else None
    if groups is not None:
        _check_groups(op, rows.shape[1], topk, num_groups, group_topk)
    scale = 1.0 if not scaling_factor else float(scaling_factor)
    if groups is None and score_function != "sqrtsoftplus":
        normalize = not use_pre_softmax if score_function == "softmax" else topk > 1
        bias = None if expert_bias is None else expert_bias.float()
        weights, experts = moe_route(
            rows, bias, top_k=topk, score=score_function, normalize=normalize, scaling_factor=scale  # type: ignore[arg-type]
        )  # fmt: skip
    else:
        weights, experts = _chosen(rows, topk, use_pre_softmax, groups, score_function, expert_bias)
        weights = weights * scale
    at = experts.long()
    probs = torch.zeros_like(rows).scatter(1, at, weights.to(rows.dtype)).view(logits.shape)
    if topk_indices is not None:
        checks.shape(op, "topk_indices", topk_indices, (*logits.shape[:-1], topk), "[..., topk]")
        return probs, topk_indices.copy_(at.view(topk_indices.shape))
    return probs, _map(at, logits.shape, routing_map_format)


def fused_compute_score_for_moe_aux_loss(
    logits: Tensor, topk: int, score_function: str, routing_map_format: str = "bytemap"
) -> tuple[Tensor, Tensor]:
    """(map of the topk best experts, scores float32 [..., E] that add up to 1), for `fused_moe_aux_loss`."""
    op = "fused_compute_score_for_moe_aux_loss"
    checks.one_of(op, "score_function", score_function, _SCORES)
    _check(op, logits, topk, routing_map_format)
    scores = _scores(logits.reshape(-1, logits.shape[-1]), score_function)
    if score_function != "softmax":
        scores = scores / (scores.sum(-1, keepdim=True) + _TINY)
    best = scores.detach().topk(topk, -1).indices
    return _map(best, logits.shape, routing_map_format), scores.view(logits.shape)


def fused_moe_aux_loss(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: int | Tensor, num_experts: int, topk: int, coeff: float
) -> Tensor:
    """coeff * num_experts / (topk * tokens²) * sum over experts of (sum of probs [T, E]) * tokens_per_expert [E].

    A scalar in probs' dtype, in float32 until then; differentiable in probs. total_num_tokens may be a tensor.
    """
    op = "fused_moe_aux_loss"
    checks.require(probs.dim() == 2, op, "probs", "have shape [T, E]", list(probs.shape))
    checks.shape(op, "tokens_per_expert", tokens_per_expert, probs.shape[1:], "last dim of probs")
    wide = probs if probs.dtype is torch.float64 else probs.float()
    total: Any = total_num_tokens
    together = (wide.sum(0) * tokens_per_expert.to(wide.dtype)).sum()
    return (together * (num_experts * coeff) / topk / total / total).to(probs.dtype)


def _check(op: str, logits: Tensor, topk: int, routing_map_format: str) -> None:
    checks.require(logits.dim() >= 1, op, "logits", "have shape [..., E]", list(logits.shape))
    checks.require(1 <= topk <= logits.shape[-1], op, "topk", f"be 1 to {logits.shape[-1]}", topk)
    checks.one_of(op, "routing_map_format", routing_map_format, _FORMATS)


def _check_groups(op: str, experts: int, topk: int, groups: int | None, best: int | None) -> None:
    fits = groups is not None and groups > 0 and experts % groups == 0
    checks.require(fits, op, "num_groups", f"divide {experts} experts", groups)
    assert groups is not None and best is not None
    size = experts // groups
    good = 1 <= best <= groups and topk % best == 0 and topk // best <= size
    must = f"be at most {groups} and divide topk {topk} into parts of at most {size}"
    checks.require(good, op, "group_topk", must, best)


def _scores(logits: Tensor, kind: str) -> Tensor:
    z = logits if logits.dtype is torch.float64 else logits.float()
    if kind == "softmax":
        return torch.softmax(z, -1)
    return torch.sigmoid(z) if kind == "sigmoid" else F.softplus(z).sqrt()


def _chosen(
    logits: Tensor, topk: int, before: bool, groups: tuple[int | None, int | None] | None, kind: str,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(weights, experts) [T, topk], unscaled."""
    of_chosen = kind == "softmax" and not before
    scores = (logits if logits.dtype is torch.float64 else logits.float()) if of_chosen else _scores(logits, kind)
    choice = scores.detach() if bias is None else scores.detach() + bias
    if groups is not None:
        num_groups, best = groups
        assert num_groups is not None and best is not None
        by_group = choice.unflatten(-1, (num_groups, -1))
        kept = by_group.topk(topk // best, -1).values.sum(-1).topk(best, -1).indices
        seen = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(-1, kept, True)
        choice = by_group.masked_fill(~seen[..., None], -torch.inf).flatten(-2)
    experts = choice.topk(topk, -1).indices
    weights = scores.gather(-1, experts)
    if of_chosen:
        return torch.softmax(weights, -1), experts
    if kind != "softmax" and topk > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    return weights, experts


def _map(experts: Tensor, shape: torch.Size, form: str) -> Tensor:
    taken = torch.zeros(len(experts), shape[-1], dtype=torch.bool, device=experts.device).scatter(1, experts, True)
    if form == "bytemap":
        return taken.view(shape)
    bits = F.pad(taken.to(torch.uint8), (0, -shape[-1] % 8)).unflatten(-1, (-1, 8))
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits * weights).sum(-1, dtype=torch.uint8).view(*shape[:-1], -1)


__getattr__ = unknown(__name__)
