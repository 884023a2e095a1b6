"""transformer_engine.pytorch.router token by token, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from powertrain.compat.transformer_engine.pytorch.router import (
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)
from tests.compat.plain import same, tensors

pytestmark = pytest.mark.usefixtures("on_cpu")
T, E, K = 6, 12, 4
SCORE = {"softmax": lambda z: z.softmax(-1), "sigmoid": torch.sigmoid, "sqrtsoftplus": lambda z: F.softplus(z).sqrt()}


def chosen(z: Tensor, o: dict[str, Any]) -> tuple[Tensor, list[int]]:
    """One token's probabilities and experts."""
    after = o["score_function"] == "softmax" and not o["use_pre_softmax"]
    scores = z if after else SCORE[o["score_function"]](z)
    choice = scores.detach() + (0 if o["expert_bias"] is None else o["expert_bias"])
    candidates = list(range(E))
    if o["group_topk"]:
        size = E // o["num_groups"]
        parts = [choice[g * size : (g + 1) * size] for g in range(o["num_groups"])]
        score = [p.sort(descending=True).values[: K // o["group_topk"]].sum().item() for p in parts]
        best = sorted(range(o["num_groups"]), key=lambda g: -score[g])[: o["group_topk"]]
        candidates = [e for e in candidates if e // size in best]
    experts = sorted(candidates, key=lambda e: -choice[e].item())[:K]
    weights = scores[experts].softmax(0) if after else scores[experts]
    weights = weights / weights.sum() if o["score_function"] != "softmax" else weights
    return torch.zeros_like(z).index_put((torch.tensor(experts),), weights * (o["scaling_factor"] or 1)), experts


@pytest.mark.parametrize("groups", [(None, None), (4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    "score, before", [("softmax", True), ("softmax", False), ("sigmoid", False), ("sqrtsoftplus", False)]
)
def test_choice(score: str, before: bool, bias: bool, groups: tuple[int | None, int | None]) -> None:
    (z,) = tensors((T, E))
    o = {
        "use_pre_softmax": before, "num_groups": groups[0], "group_topk": groups[1], "score_function": score,
        "scaling_factor": 2.5 if bias else None,
        "expert_bias": torch.randn(E).double() if bias and score != "softmax" else None,
    }  # fmt: skip
    # moe_route is float32
    ours = fused_topk_with_score_function(z.float(), K, **o)
    expected, experts = zip(*(chosen(row, o) for row in z), strict=True)
    torch.testing.assert_close(ours[0].double(), torch.stack(expected), rtol=1e-5, atol=1e-6)
    rows = [set(row.nonzero().flatten().tolist()) for row in ours[1]]
    assert rows == [set(row) for row in experts] and ours[1].dtype is torch.bool
    weights = torch.randn(T, E).double()
    grads = [
        torch.autograd.grad((p.double() * weights).sum(), z)[0]
        for p in (fused_topk_with_score_function(z.float(), K, **o)[0], torch.stack(expected))
    ]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_forms_of_the_map() -> None:
    z, o = torch.randn(2, 3, E), (False, None, None, None, "sigmoid", None)
    probs, seen = fused_topk_with_score_function(z, K, *o)
    assert probs.shape == seen.shape == z.shape
    _, bits = fused_topk_with_score_function(z, K, *o, "bitmap_u8")
    assert bits.shape == (2, 3, 2) and bits.dtype is torch.uint8
    for e in range(E):
        assert torch.equal((bits[..., e // 8] >> (e % 8)) & 1 == 1, seen[..., e])
    buffer = torch.empty(2, 3, K, dtype=torch.int16)
    _, indices = fused_topk_with_score_function(z, K, *o, topk_indices=buffer)
    assert indices is buffer and torch.equal(torch.zeros_like(seen).scatter(-1, buffer.long(), True), seen)


@pytest.mark.parametrize("score", SCORE)
def test_auxiliary_loss(score: str) -> None:
    (z,) = tensors((T, E))
    seen, scores = fused_compute_score_for_moe_aux_loss(z, K, score)
    expected = SCORE[score](z)
    expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(scores, expected)
    assert torch.equal(seen, scores >= scores.topk(K, -1).values[:, -1:])
    counts = seen.sum(0)

    def plain(z: Tensor) -> Tensor:
        p = SCORE[score](z)
        p = p / p.sum(-1, keepdim=True)
        return sum(p[:, e].sum() * counts[e] for e in range(E)) * E * 0.01 / (K * T * T)  # type: ignore[return-value]

    def ours(z: Tensor) -> Tensor:
        return fused_moe_aux_loss(fused_compute_score_for_moe_aux_loss(z, K, score)[1], counts, T, E, K, 0.01)

    same(ours, plain, [z])
    again = fused_moe_aux_loss(scores, counts, torch.tensor(T), E, K, 0.01)
    torch.testing.assert_close(again, ours(z))
    assert fused_moe_aux_loss(scores.half(), counts, T, E, K, 0.01).dtype is torch.half


def test_errors() -> None:
    z = torch.randn(T, E)
    call = fused_topk_with_score_function
    for given, text in (
        ((K, False, None, None, None, "relu", None), "score_function must be"),
        ((K, False, None, None, None, "softmax", torch.zeros(E)), "expert_bias must be None with softmax"),
        ((13, False, None, None, None, "softmax", None), "topk must be 1 to 12, got 13"),
        ((K, False, 5, 2, None, "softmax", None), "num_groups must divide 12 experts, got 5"),
        ((K, False, 4, 3, None, "softmax", None), "group_topk must be at most 4 and divide topk 4"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            call(z, *given)
    with pytest.raises(NotImplementedError, match="qb_histogram"):
        call(z, K, False, None, None, None, "sigmoid", None, qb_histogram=z)
    with pytest.raises(ValueError, match="tokens_per_expert must have shape"):
        fused_moe_aux_loss(z, torch.ones(3), T, E, K, 0.1)
