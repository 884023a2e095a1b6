"""Liger's GRPO, JSD and cosine losses against formulas in float64 over logits in memory."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from powertrain.compat.liger_kernel import chunked_loss as liger
from powertrain.compat.liger_kernel.transformers import LigerFusedLinearJSD
from powertrain.compat.liger_kernel.transformers.functional import liger_fused_linear_jsd

pytestmark = pytest.mark.usefixtures("on_cpu")
B, T, D, E, V = 4, 5, 6, 7, 9
F64 = {"dtype": torch.float64}
GRPO = [
    {}, {"loss_type": "grpo", "beta": 0.0}, {"loss_type": "bnpo", "delta": 1.3}, {"temperature": 0.7},
    {"loss_type": "dr_grpo", "max_completion_length": 16}, {"loss_type": "luspo", "use_ref_model": False},
    {"loss_type": "cispo", "epsilon_high": 1.1}, {"loss_type": "sapo", "sapo_temperature_neg": 2.0},
    {"loss_type": "vespo"}, {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.01},
    {"loss_type": "dapo", "use_bias_correction_kl": True, "beta": 0.5},
]  # fmt: skip


def batch(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    mask = torch.ones(B, T)
    # sequences of different lengths, one of them empty
    mask[0, 3:], mask[1] = 0, 0
    return {
        "_input": torch.randn(B, T, D, **F64), "lin_weight": torch.randn(V, D, **F64),
        "selected_token_ids": torch.randint(V, (B, T)), "attention_mask": mask,
        "advantages": torch.tensor([1.0, -0.5, -2.0, 0.7], **F64), "bias": torch.randn(V, **F64),
        "old_per_token_logps": -2.2 + torch.randn(B, T, **F64),
        "ref_input": torch.randn(B, T, D, **F64), "ref_weight": torch.randn(V, D, **F64),
    }  # fmt: skip


def log_probs(x: Tensor, w: Tensor, b: Any, ids: Tensor, heat: float) -> Tensor:
    return (F.linear(x, w, b) / heat).log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def token_term(o: dict[str, Any], r: Tensor, log_p: Tensor, a: float, row: dict[str, Tensor], is_ratio: Any) -> Tensor:
    """The policy's term of one sequence, position by position."""
    kind = o.get("loss_type", "dapo")
    high, low = o.get("epsilon_high", 0.2), o.get("epsilon_low", 0.2)
    if kind == "cispo":
        return -torch.minimum(r, torch.tensor(high, **F64)).detach() * a * log_p
    if kind == "sapo":
        t = o.get("sapo_temperature_pos", 1.0) if a > 0 else o.get("sapo_temperature_neg", 1.05)
        return -torch.sigmoid(t * (r - 1)) * 4 / t * a
    if kind == "vespo":
        log_w = ((log_p - row["old"]).clamp(-20, 20) * row["mask"]).sum()
        log_w = log_w if is_ratio is None else log_w + is_ratio.log().sum()
        k, rate = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        log_w = log_w.clamp(math.log(1e-8), 20.0)
        return -(rate + k * log_w - rate * log_w.exp()).exp().detach() * a * log_p
    free = r.clamp(max=o["delta"]) if "delta" in o else r
    return -torch.minimum(free * a, r.clamp(1 - low, 1 + high) * a)


def grpo(o: dict[str, Any], t: dict[str, Any]) -> Tensor:
    heat, kind, beta = o.get("temperature", 1.0), o.get("loss_type", "dapo"), o.get("beta", 0.04)
    log_p = log_probs(t["_input"], t["lin_weight"], t["bias"], t["selected_token_ids"], heat)
    ref = log_probs(t["ref_input"], t["ref_weight"], None, t["selected_token_ids"], heat)
    ref = ref if o.get("use_ref_model", True) else log_p.detach()
    mask, ratio, terms = t["attention_mask"].double(), t.get("vllm_is_ratio"), []
    for i in range(B):
        log_r = log_p[i] - t["old_per_token_logps"][i]
        if o.get("importance_sampling_level") == "sequence":
            log_r = ((log_r * mask[i]).sum() / mask[i].sum().clamp(min=1)).expand(T)
        row = {"old": t["old_per_token_logps"][i], "mask": mask[i]}
        own = None if ratio is None else ratio[i]
        term = token_term(o, log_r.exp(), log_p[i], float(t["advantages"][i]), row, own)
        term = term if own is None or kind == "vespo" else term * own
        kl = torch.exp(ref[i] - log_p[i]) - (ref[i] - log_p[i]) - 1
        terms.append(term + beta * kl * (log_r.exp() if o.get("use_bias_correction_kl") else 1.0))
    loss, lengths = torch.stack(terms), mask.sum(-1)
    if kind in ("grpo", "sapo"):
        return ((loss * mask).sum(-1) / lengths.clamp(min=1)).mean()
    if kind == "luspo":
        return (loss * lengths[:, None]).mean()
    tokens = mask.sum() if kind == "bnpo" else t.get("num_items_in_batch") or mask.sum()
    return (loss * mask).sum() / (B * 16 if kind == "dr_grpo" else tokens)


def compared(found: Any, expected: Any, t: dict[str, Any], names: tuple[str, ...]) -> None:
    leaves = {name: t[name].clone().requires_grad_() for name in names if t[name] is not None}
    one, other = found({**t, **leaves}), expected({**t, **leaves})
    # the log-probabilities of our op are float32
    torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=1e-6)
    ours, plain = (torch.autograd.grad(loss, list(leaves.values())) for loss in (one, other))
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("options", GRPO, ids=str)
@pytest.mark.parametrize("ratio", [None, (B, T), (B, 1)], ids=str)
def test_grpo(options: dict[str, Any], ratio: Any) -> None:
    t = batch()
    if ratio is not None:
        t |= {"vllm_is_ratio": torch.rand(ratio, **F64) + 0.5, "num_items_in_batch": 7.0}
    module = liger.LigerFusedLinearGRPOLoss(**options)
    compared(lambda t: module(**t)[0], lambda t: grpo(options, t), t, ("_input", "lin_weight", "bias"))


def test_grpo_metrics_and_given_references() -> None:
    t = batch()
    ref = log_probs(t["ref_input"], t["ref_weight"], None, t["selected_token_ids"], 1.0)
    log_p = log_probs(t["_input"], t["lin_weight"], t["bias"], t["selected_token_ids"], 1.0)
    given = {**t, "ref_per_token_logps": ref, "ref_input": None, "ref_weight": None}
    loss, (kl, share) = liger.LigerFusedLinearGRPOLoss()(**t)
    again, _ = liger.LigerFusedLinearGRPOLoss()(**given)
    torch.testing.assert_close(loss, again)
    d, r, mask = ref - log_p, (log_p - t["old_per_token_logps"]).exp(), t["attention_mask"].bool()
    torch.testing.assert_close(kl.double(), (d.exp() - d - 1)[mask].mean(), rtol=1e-5, atol=1e-6)
    a = t["advantages"][:, None].expand(B, T)
    clipped = ((r < 0.8) & (a < 0)) | ((r > 1.2) & (a > 0))
    assert 0 < share.item() == pytest.approx(clipped[mask].double().mean().item())
    assert len(liger.LigerFusedLinearGRPOLoss(beta=0.0)(**t)[1]) == 1
    flat = torch.rand(B, **F64) + 0.5
    one, other = (liger.LigerFusedLinearGRPOLoss()(**t, vllm_is_ratio=x)[0] for x in (flat, flat[:, None]))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("options", [o for o in GRPO if o.get("loss_type") != "luspo"], ids=str)
def test_what_grpo_is_given_for_masked_tokens_has_no_part(options: dict[str, Any]) -> None:
    """Log-probabilities of -inf or NaN there made the loss and every gradient NaN."""
    t, results = batch(), []
    hidden = t["attention_mask"] == 0
    for value in (0.0, -torch.inf, torch.nan):
        log_probs = torch.full((B, T), -2.0).masked_fill(hidden, value)
        given = {"old_per_token_logps": log_probs, "ref_per_token_logps": log_probs}
        if options.get("loss_type") != "vespo":  # whose ratio of a sequence is that of all its tokens
            given["vllm_is_ratio"] = log_probs.masked_fill(~hidden, 1.5)
        x = t["_input"].clone().requires_grad_()
        loss, metrics = liger.LigerFusedLinearGRPOLoss(**options)(**{**t, **given, "_input": x})
        results.append((loss, *metrics, *torch.autograd.grad(loss, x)))
    assert results[0][-1].norm() > 0
    torch.testing.assert_close(results[1:], [results[0]] * 2)


def test_grpo_errors() -> None:
    make, t = liger.LigerFusedLinearGRPOLoss, batch()
    for options, text in (
        ({"loss_type": "ppo"}, "loss_type must be"), ({"delta": 0.0}, "delta must be positive, or None, got 0.0"),
        ({"loss_type": "dr_grpo"}, "max_completion_length must be given for dr_grpo"),
        ({"loss_type": "sapo", "importance_sampling_level": "sequence"}, "importance_sampling_level must be"),
        ({"sapo_temperature_pos": 0}, "sapo_temperature_pos must be positive"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            make(**options)
    with pytest.raises(ValueError, match="ref_weight must be given with use_ref_model"):
        make()(**{**t, "ref_weight": None})
    with pytest.raises(ValueError, match=r"vllm_is_ratio must have shape \[4\], \[4, 1\] or \[4, 5\], got \[3\]"):
        make()(**t, vllm_is_ratio=torch.ones(3))
    with pytest.raises(ValueError, match="attention_mask must have shape"):
        make()(**{**t, "attention_mask": torch.ones(B, T + 1)})
    # it was spread over the tokens
    with pytest.raises(ValueError, match=r"ref_per_token_logps must have shape \[4, 5\] .*, got \[4, 1\]"):
        make()(**{**t, "ref_per_token_logps": torch.zeros(B, 1)})


def divergence(ls: Tensor, lt: Tensor, beta: float) -> Tensor:
    p, q = ls.softmax(-1), lt.softmax(-1)
    m = beta * q + (1 - beta) * p
    if beta in (0.0, 1.0):
        return (q * (q / p).log()).sum(-1) if beta == 0.0 else (p * (p / q).log()).sum(-1)
    return beta * (q * (q / m).log()).sum(-1) + (1 - beta) * (p * (p / m).log()).sum(-1)


def distilled(name: str, o: dict[str, Any], t: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(soft, hard) losses."""
    ls, lt = F.linear(t["x"], t["w"], t["b"]), F.linear(t["tx"], t["tw"], t["tb"])
    kept = t["labels"] != o.get("ignore_index", -100)
    count, heat, beta = kept.sum().clamp(min=1), o.get("temperature", 1.0), o.get("beta", 0.5)
    hard = F.cross_entropy(ls[kept], t["labels"][kept], reduction="sum") / count
    wide = F.pad(ls, (0, lt.shape[-1] - ls.shape[-1]))
    if name == "JSD":
        return divergence(wide / heat, lt / heat, beta)[kept].sum() / count, hard
    return beta * (1 - F.cosine_similarity(wide, lt, dim=-1)).sum() / count, hard


def distillation(extra: int, bias: bool) -> dict[str, Any]:
    torch.manual_seed(extra)
    labels = torch.randint(V, (B * T,))
    labels[::4] = -100
    return {
        "x": torch.randn(B * T, D, **F64), "w": torch.randn(V, D, **F64), "labels": labels,
        "tx": torch.randn(B * T, E, **F64), "tw": torch.randn(V + extra, E, **F64),
        "b": torch.randn(V, **F64) if bias else None, "tb": torch.randn(V + extra, **F64) if bias else None,
    }  # fmt: skip


OPTIONS = [
    {}, {"beta": 0.0, "weight_hard_loss": 0.2}, {"beta": 1.0}, {"beta": 0.3, "temperature": 2.0},
    {"chunk_size": 7, "weight_soft_loss": 2.0},
]  # fmt: skip


@pytest.mark.parametrize("extra", [0, 3], ids=["V", "V+3"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["JSD", "CosineSimilarity"])
def test_distillation(name: str, options: dict[str, Any], bias: bool, extra: int) -> None:
    module = getattr(liger, f"LigerFusedLinear{name}Loss")(**options, return_soft_hard_loss=True)
    t = distillation(extra, bias)
    call = lambda t: module(t["x"], t["w"], t["tx"], t["tw"], t["labels"], t["b"], t["tb"])  # noqa: E731
    soft, hard = distilled(name, options, t)
    results = call(t)
    torch.testing.assert_close([r.double() for r in results[1:]], [soft, hard], rtol=2e-5, atol=1e-6)
    weights = options.get("weight_soft_loss", 0.5), options.get("weight_hard_loss", 0.5)

    def expected(t: dict[str, Any]) -> Tensor:
        soft, hard = distilled(name, options, t)
        return weights[0] * soft + weights[1] * hard

    compared(lambda t: call(t)[0], expected, t, ("x", "w", "b"))


def test_distillation_without_labels_and_errors() -> None:
    t = distillation(0, False)
    for make in (liger.LigerFusedLinearJSDLoss, liger.LigerFusedLinearCosineSimilarityLoss):
        none = make()(t["x"], t["w"], t["tx"], t["tw"], torch.full((B * T,), -100))
        assert torch.isfinite(none)
        with pytest.raises(ValueError, match="temperature must be above 0, got 0"):
            make(temperature=0)
        with pytest.raises(ValueError, match="teacher_weight must have at least student_weight's 9 rows, got 8"):
            make()(t["x"], t["w"], t["tx"], t["tw"][:8], t["labels"])
        with pytest.raises(ValueError, match=r"teacher_input must have shape \[20, E\]"):
            make()(t["x"], t["w"], t["tx"][1:], t["tw"], t["labels"])


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_fused_linear_jsd(beta: float) -> None:
    t = distillation(0, False)
    for labels in (None, t["labels"]):
        kept = torch.ones(B * T, dtype=torch.bool) if labels is None else labels != -100

        def expected(t: dict[str, Any], kept: Tensor = kept) -> Tensor:
            return divergence(t["x"] @ t["w"].T / 1.5, t["tx"] @ t["tw"].T / 1.5, beta)[kept].mean()

        def found(t: dict[str, Any], labels: Any = labels) -> Tensor:
            return LigerFusedLinearJSD(beta, temperature=1.5)(t["x"], t["w"], t["tx"], t["tw"], labels)

        compared(found, expected, t, ("x", "w"))
    # without labels no row is left out, whatever ignore_index is; with that of 0 all were, and the loss was 0
    of_all = [liger_fused_linear_jsd(t["x"], t["w"], t["tx"], t["tw"], ignore_index=index) for index in (-100, 0, 1)]
    assert torch.equal(of_all[1], of_all[0]) and torch.equal(of_all[2], of_all[0]) and of_all[0] > 0
