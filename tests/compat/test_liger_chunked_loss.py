"""Liger's losses of preference fine-tuning against their formulas in float64, over logits in memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from powertrain.compat.liger_kernel import chunked_loss as liger

pytestmark = pytest.mark.usefixtures("on_cpu")
B, T, D, V = 6, 5, 8, 11
CASES = [
    ("DPO", {}), ("DPO", {"average_log_prob": True, "beta": 0.3}), ("DPO", {"loss_type": "hinge"}),
    ("DPO", {"loss_type": "robust", "label_smoothing": 0.2, "use_ref_model": False}),
    ("DPO", {"compute_nll_loss": True, "alpha": 0.5, "ignore_index": 3}), ("CPO", {}),
    ("CPO", {"label_smoothing": 0.1, "alpha": 2.0, "average_log_prob": True}), ("CPO", {"compute_nll_loss": False}),
    ("SimPO", {}), ("SimPO", {"gamma": 1.2, "beta": 2.0, "compute_nll_loss": False}), ("ORPO", {}),
    ("ORPO", {"compute_nll_loss": False, "beta": 0.7}), ("KTO", {}), ("KTO", {"use_ref_model": True, "beta": 0.4}),
    ("KTO", {"average_log_prob": True}),
]  # fmt: skip


def log_probs(x: Tensor, w: Tensor, b: Tensor | None, target: Tensor, ignore: int, average: bool) -> tuple[Tensor, ...]:
    logits = F.linear(x, w, b)
    kept = target != ignore
    tokens = logits.log_softmax(-1).gather(-1, target.where(kept, 0)[..., None])[..., 0] * kept
    return tokens.sum(-1) / (kept.sum(-1) if average else 1), tokens, kept, logits


def formula(name: str, o: dict[str, Any], t: dict[str, Any]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(loss, log-probabilities of sequences, logits), as the papers that the losses name."""
    ignore, average = o.get("ignore_index", -100), o.get("average_log_prob", name in ("SimPO", "ORPO"))
    seq, tokens, kept, logits = log_probs(t["x"], t["w"], t["b"], t["target"], ignore, average)
    ref = torch.zeros_like(seq)
    if o.get("use_ref_model", name == "DPO"):
        ref = log_probs(t["ref_x"], t["ref_w"], None, t["target"], ignore, average)[0]
    beta, half = o.get("beta", 0.1), B // 2
    if name == "KTO":
        sign = torch.where(t["labels"], 1.0, -1.0)
        return (1 - torch.sigmoid(beta * (seq - ref - t["kl"]) * sign)).mean(), (seq, logits)
    c, r = seq[:half], seq[half:]
    smooth = o.get("label_smoothing", 0.0)
    margin = beta * ((c - ref[:half]) - (r - ref[half:])) - (o.get("gamma", 0.5) if name == "SimPO" else 0.0)
    if name == "ORPO":
        loss = -beta * F.logsigmoid(c - r - torch.log((1 - c.exp()) / (1 - r.exp())))
    elif o.get("loss_type") == "hinge":
        loss = (1 - margin).clamp(min=0)
    elif o.get("loss_type") == "robust":
        loss = ((smooth - 1) * F.logsigmoid(margin) + smooth * F.logsigmoid(-margin)) / (1 - 2 * smooth)
    else:
        loss = (smooth - 1) * F.logsigmoid(margin) - smooth * F.logsigmoid(-margin)
    nll = o.get("compute_nll_loss", name != "DPO") * -tokens[:half].sum() / kept[:half].sum()
    return loss.mean() + o.get("alpha", 1.0) * nll, (seq, logits)


def made(seed: int, ignore: int, bias: bool) -> dict[str, Any]:
    torch.manual_seed(seed)
    f64 = {"dtype": torch.float64}
    target = torch.randint(V, (B, T))
    target[0, 3:], target[4, :2] = ignore, ignore
    target[:, 2] = 1  # every sequence keeps a token
    return {
        "x": torch.randn(B, T, D, **f64), "w": torch.randn(V, D, **f64) / 2, "target": target,
        "b": torch.randn(V, **f64) if bias else None, "ref_x": torch.randn(B, T, D, **f64),
        "ref_w": torch.randn(V, D, **f64) / 2, "labels": torch.rand(B) < 0.5, "kl": torch.rand(B, **f64),
    }  # fmt: skip


def call(name: str, options: dict[str, Any], t: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...]]:
    module = getattr(liger, f"LigerFusedLinear{name}Loss")(**options)
    ref = {"ref_input": t["ref_x"], "ref_weight": t["ref_w"]} if getattr(module, "use_ref_model", False) else {}
    if name == "KTO":
        return module(t["x"], t["w"], t["target"], t["b"], preference_labels=t["labels"], kl=t["kl"], **ref)
    return module(t["w"], t["x"], t["target"], t["b"], **ref)


def gradients(function: Callable[..., Any], t: dict[str, Any]) -> tuple[Any, list[Tensor]]:
    leaves = {key: t[key].clone().requires_grad_() for key in ("x", "w", "b") if t[key] is not None}
    result = function({**t, **leaves})
    return result, list(torch.autograd.grad(result[0], list(leaves.values())))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name, options", CASES, ids=[f"{name}-{index}" for index, (name, _) in enumerate(CASES)])
def test_value_and_gradients(name: str, options: dict[str, Any], bias: bool) -> None:
    t = made(len(options), options.get("ignore_index", -100), bias)
    (right, (seq, logits)), grads = gradients(lambda t: formula(name, options, t), t)
    (found, metrics), ours = gradients(lambda t: call(name, options, t), t)
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-6)
    for a, b in zip(ours, grads, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-6)
    close = {"rtol": 1e-4, "atol": 1e-4, "check_dtype": False}
    if name == "KTO":
        for of, logp, scores in ((t["labels"], metrics[0], metrics[2]), (~t["labels"], metrics[1], metrics[3])):
            torch.testing.assert_close(logp, seq[of].sum(), **close)
            torch.testing.assert_close(scores, logits[of].sum(), **close)
    else:
        torch.testing.assert_close(torch.cat(metrics[:2]), seq, **close)
        torch.testing.assert_close(metrics[2], logits[: B // 2].mean(), **close)
        torch.testing.assert_close(metrics[3], logits[B // 2 :].mean(), **close)
        assert len(metrics) == (9 if name == "ORPO" else 7)


def test_orpo_with_other_labels_for_its_cross_entropy() -> None:
    t = made(1, -100, False)
    other = t["target"].roll(1, -1)
    loss, metrics = liger.LigerFusedLinearORPOLoss()(t["w"], t["x"], t["target"], nll_target=other)
    _, tokens, kept, _ = log_probs(t["x"], t["w"], None, other, -100, True)
    torch.testing.assert_close(
        metrics[4].double(), -tokens[: B // 2].sum() / kept[: B // 2].sum(), rtol=1e-5, atol=1e-6
    )
    assert torch.isfinite(loss)


def test_errors() -> None:
    t = made(1, -100, False)
    with pytest.raises(ValueError, match="target must hold as many rejected as chosen rows, got 5"):
        liger.LigerFusedLinearCPOLoss()(t["w"], t["x"][:5], t["target"][:5])
    with pytest.raises(ValueError, match="ref_input must be given with use_ref_model"):
        liger.LigerFusedLinearDPOLoss()(t["w"], t["x"], t["target"])
    with pytest.raises(ValueError, match="preference_labels must be given"):
        liger.LigerFusedLinearKTOLoss()(t["x"], t["w"], t["target"])
    with pytest.raises(ValueError, match=r"_input must have shape \[B, T, D\]"):
        liger.LigerFusedLinearORPOLoss()(t["w"], t["x"][0], t["target"])
    with pytest.raises(NotImplementedError, match="loss_type"):
        liger.LigerFusedLinearDPOLoss(loss_type="exo_pair")


@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["DPO", "KTO"])
def test_means_of_logits_under_autocast(name: str, autocast: torch.dtype) -> None:
    # their sum is above what float16 has
    t = made(0, -100, True)
    x, w, b = t["x"].detach().float() + 30, t["w"].detach().float() + 30, t["b"].detach().float()
    loss = getattr(liger, f"LigerFusedLinear{name}Loss")(use_ref_model=False)
    first = {"preference_labels": torch.arange(B) < B // 2} if name == "KTO" else {}
    with torch.autocast("cpu", autocast):
        metrics = loss(*((x, w) if name == "KTO" else (w, x)), t["target"], b, **first)[1]
    logits = F.linear(x.double(), w.double(), b.double()).unflatten(0, (2, B // 2)).flatten(1)
    expected = logits.sum(1) if name == "KTO" else logits.mean(1)
    assert float(logits.sum()) > 65504
    torch.testing.assert_close(torch.stack(metrics[2:4]).double(), expected, rtol=1e-5, atol=0)
