"""Routers of GPT-NeoX's experts: each token's best by score, or by a balanced score while training."""

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powertrain.nn.weights import drawn
from powertrain.ops.moe import Score, check_choice, moe_route
from powertrain.runtime import checks
from powertrain.runtime.dispatch import without_autocast
from powertrain.runtime.positional import hinted

Routing = Literal["topk", "sinkhorn"]


def sinkhorn_scores(logits: Tensor, *, tolerance: float = 1e-4, iterations: int = 3) -> Tensor:
    """Scores under which the experts' loads are more even: column * exp(logits) * row, by Sinkhorn's iterations.

    Shapes: T tokens, E experts.
        logits      [T, E]  float32 or float64
        iterations  at most so many; they end when the columns' factors change by less than `tolerance` on average
    Returns [T, E] in the dtype of `logits`: rows add up to about 1/T, columns to about 1/E.
    Numerics: exp without subtraction of a maximum, as in GPT-NeoX: logits above 88 overflow in float32. Nothing is read
        by the host: an ended iteration keeps its factors.
    Source: Sinkhorn, 1967; GPT-NeoX's megatron/model/router.py at ea7aefd8 (Apache-2.0; facts, no code).
    """
    cost = logits.exp()
    T, E = cost.shape
    eps = 1e-8
    columns = 1 / (E * cost.sum(0))
    rows = cost.new_ones(T)
    share = 1 / max(T, 1)  # of no tokens there is none
    # where and not break: to leave the loop the host would have to wait for the device
    ended = torch.zeros((), dtype=torch.bool, device=cost.device)
    for _ in range(iterations):
        next_rows = share / ((columns * cost).sum(1) + eps)
        next_columns = 1 / E / ((next_rows[:, None] * cost).sum(0) + eps)
        change = (columns - next_columns).abs().mean()
        rows, columns = torch.where(ended, rows, next_rows), torch.where(ended, columns, next_columns)
        ended = ended | (change < tolerance)
    return columns * cost * rows[:, None]


class TokenChoiceRouter(nn.Module):
    """x [..., hidden_size] -> (logits [..., E] float32, weights [T, k] float32, experts [T, k] int32), T tokens in all.

        routing   topk: the k best softmax scores;  sinkhorn: while training the k best of `sinkhorn_scores` over the
                  tokens of the call, else the k best scores; the score is the sigmoid where k is 1, else the softmax
        jitter    while training the router's input is multiplied by random numbers from 1 - jitter to 1 + jitter
    Weights are the scores of the chosen experts, not normalized. The product is float32 whatever the weights are.
    """

    @hinted
    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, *, routing: Routing = "topk", jitter: float = 0.0
    ) -> None:
        super().__init__()
        op = "TokenChoiceRouter"
        checks.sizes(op, hidden_size=hidden_size, num_experts=num_experts)
        checks.one_of(op, "routing", routing, get_args(Routing))
        score: Score = "sigmoid" if routing == "sinkhorn" and top_k == 1 else "softmax"
        check_choice(op, num_experts, top_k, score, 1.0, 1, 1)
        checks.require(jitter >= 0, op, "jitter", "be at least 0", jitter)
        self.weight = drawn(num_experts, hidden_size)
        self.routing, self.jitter = routing, jitter
        self.options: dict[str, Any] = {"top_k": top_k, "score": score, "normalize": False}
        self.expert_weights_per_token = num_experts * hidden_size

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        checks.last_dim("TokenChoiceRouter", "x", x, self.weight.shape[1])
        if self.training and self.jitter:
            x = x * torch.empty_like(x).uniform_(1.0 - self.jitter, 1.0 + self.jitter)
        # autocast would compute the product in 16 bits, and close scores would choose other experts
        with without_autocast(x.device):
            logits = F.linear(x.float(), self.weight.float())
        rows = logits.flatten(0, -2)
        if self.training and self.routing == "sinkhorn":
            weights, experts = self._balanced(rows)
        else:
            weights, experts = moe_route(rows, **self.options)
        return logits, weights, experts

    def _balanced(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            experts = sinkhorn_scores(logits).topk(self.options["top_k"], dim=1).indices
        scores = logits.sigmoid() if self.options["score"] == "sigmoid" else logits.softmax(-1)
        # a sum over all experts and not gather, whose backward adds in any order
        chosen = experts[..., None] == torch.arange(logits.shape[1], device=logits.device)
        return torch.where(chosen, scores[:, None], 0.0).sum(-1), experts.int()
