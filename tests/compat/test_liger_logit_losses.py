"""Liger's losses over logits and given distributions against formulas in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from powertrain.compat.liger_kernel import row_blocks
from powertrain.compat.liger_kernel.transformers import LigerFusedCETVDLoss, LigerFusedLinearKLDivLoss
from powertrain.compat.liger_kernel.transformers.functional import liger_fused_linear_kl_div
from powertrain.compat.liger_kernel.transformers.grpo_loss import triton_grpo_loss
from tests.compat.plain import same, tensors
from tests.compat.test_liger_policy_and_distillation import F64, GRPO, B, T, V, batch, grpo, log_probs

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture(params=[1 << 24, 20], ids=["one block", "blocks"], autouse=True)
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 elements are two rows of 9: an odd number of rows ends with half a block."""
    monkeypatch.setattr(row_blocks, "_BLOCK", request.param)


def _inputs(seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of triton_grpo_loss, and those of the formula: logits as hidden states before an identity."""
    t = batch(seed)
    logits = torch.randn(B, T + 1, V, **F64)
    ref = log_probs(t["ref_input"], t["ref_weight"], None, t["selected_token_ids"], 1.0)
    ours = {
        "logits": logits, "old_logp": t["old_per_token_logps"], "ref_logp": ref,
        "completion_ids": t["selected_token_ids"], "advantages": t["advantages"],
        "completion_mask": t["attention_mask"],
    }  # fmt: skip
    return ours, {**t, "lin_weight": torch.eye(V, **F64), "bias": None}


@pytest.mark.parametrize("options", [o for o in GRPO if "use_ref_model" not in o] + [{"loss_type": "luspo"}], ids=str)
@pytest.mark.parametrize("ratio", [None, (B, T)], ids=str)
def test_grpo(options: dict[str, Any], ratio: Any) -> None:
    ours, plain = _inputs()
    if options.get("loss_type") == "luspo":
        # the formula's luspo counts masked tokens, this one does not
        ours["completion_mask"], plain["attention_mask"] = None, torch.ones(B, T)
    if ratio is not None:
        extra = {"vllm_is_ratio": torch.rand(ratio, **F64) + 0.5, "num_items_in_batch": 7.0}
        ours, plain = ours | extra, plain | extra
    names = {"epsilon_low": "eps_low", "epsilon_high": "eps_high"}
    given = {"temperature": 1.0, "eps_high": 0.2} | {names.get(k, k): v for k, v in options.items()}
    # the reference's log-probabilities are given: they were made at the new ones' temperature
    heat = given["temperature"]
    ours["ref_logp"] = log_probs(plain["ref_input"], plain["ref_weight"], None, plain["selected_token_ids"], heat)
    rest = {k: v for k, v in ours.items() if k != "logits"}
    same(
        lambda x: triton_grpo_loss(x, **rest, **given, reduce=True)[0],
        lambda x: grpo(options, {**plain, "_input": x[:, :-1]}),
        [ours["logits"].requires_grad_()],
    )


def test_grpo_of_every_token() -> None:
    ours, plain = _inputs()
    logits = ours["logits"].requires_grad_()
    loss, kl, clipped = triton_grpo_loss(**ours, temperature=1.0)
    assert kl is not None
    log_p = log_probs(logits[:, :-1], plain["lin_weight"], None, ours["completion_ids"], 1.0)
    a, mask, d = ours["advantages"][:, None], ours["completion_mask"].double(), ours["ref_logp"] - log_p
    r = (log_p - ours["old_logp"]).exp()
    distance = d.exp() - d - 1
    expected = (-torch.minimum(r * a, r.clamp(0.8, 1.4) * a) + 0.04 * distance) * mask
    for one, other in ((loss, expected), (kl, distance * mask)):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    share = (((r < 0.8) & (a < 0)) | ((r > 1.4) & (a > 0))) * mask
    assert torch.equal(clipped, share) and share.any()
    weights = torch.randn(B, T, **F64)
    one, other = (torch.autograd.grad((x * weights).sum(), logits, retain_graph=True)[0] for x in (loss, expected))
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert not one[:, -1].any()
    _, (mean, part) = triton_grpo_loss(**ours, temperature=1.0, reduce=True)
    torch.testing.assert_close(mean, (distance * mask).sum() / mask.sum())
    torch.testing.assert_close(part, share.sum() / mask.sum())
    assert triton_grpo_loss(**{**ours, "ref_logp": None}, beta=0.0)[1] is None


def test_grpo_reads_no_masked_token() -> None:
    ours, _ = _inputs()
    broken = {name: value.clone() for name, value in ours.items()}
    hidden = ours["completion_mask"] == 0
    for name in ("old_logp", "ref_logp"):
        broken[name][hidden] = torch.inf
    broken["logits"][:, :-1][hidden], broken["logits"][:, -1] = torch.nan, torch.nan
    broken["completion_ids"][hidden] = -100
    results = []
    for given in (ours, broken):
        logits = given["logits"].requires_grad_()
        loss = triton_grpo_loss(**given, reduce=True, loss_type="grpo", importance_sampling_level="sequence")[0]
        results.append((loss, torch.autograd.grad(loss, logits)[0]))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"logits": torch.ones(B, V)}, r"logits must have shape \[B, L \+ 1, V\]"),
        ({"completion_ids": torch.ones(B, T + 1)}, "completion_ids must have shape"),
        ({"ref_logp": None}, "ref_logp must be given with a beta other than 0"),
        ({"delta": 2.0, "loss_type": "cispo"}, "delta must be None with loss_type 'cispo'"),
        ({"vllm_is_ratio": torch.ones(3)}, r"triton_grpo_loss: vllm_is_ratio must have shape \[4\]"),
        ({"advantages": torch.ones(2)}, "advantages must have shape"),
        ({"loss_type": "ppo"}, "loss_type must be one of"),
    ],
    ids=str,
)
def test_grpo_errors(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        triton_grpo_loss(**(_inputs()[0] | changes))


@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum"])
@pytest.mark.parametrize("labels", [None, [1, -7, 0, 3, -7]], ids=["all", "some"])
def test_linear_kl_div(reduction: str, labels: list[int] | None) -> None:
    x, w = tensors((5, 6), (9, 6))
    (t,) = tensors((5, 9), grad=False)
    # one entry of 0: its term is 0
    t = t.softmax(-1) * (torch.arange(9) != 4)
    kept = torch.ones(5, dtype=torch.bool) if labels is None else torch.tensor(labels) != -7
    given = None if labels is None else torch.tensor(labels)

    def plain(x: Tensor, w: Tensor) -> Tensor:
        log_p = F.log_softmax(x @ w.T / 0.7, -1)
        return F.kl_div(log_p[kept], t[kept], reduction=reduction)

    module = LigerFusedLinearKLDivLoss(reduction, -7, temperature=0.7)
    same(lambda x, w: module(x, w, t, given), plain, [x, w])
    # a frozen head
    same(lambda x: module(x, w.detach(), t, given), lambda x: plain(x, w.detach()), [x])


def test_linear_kl_div_numbers_and_errors() -> None:
    x, w, t = torch.randn(5, 6), torch.randn(9, 6), torch.randn(5, 9).softmax(-1)
    none = torch.full((5,), -100)
    assert liger_fused_linear_kl_div(x, w, t, none) == 0
    x[2] = torch.nan
    labels = torch.tensor([0, 0, -100, 0, 0])
    x.requires_grad_()
    loss = liger_fused_linear_kl_div(x, w.requires_grad_(), t, labels)
    loss.backward()
    assert loss.isfinite()
    half = x.detach()[[0, 1, 3, 4]].bfloat16().requires_grad_()
    head = w.detach().bfloat16().requires_grad_()
    other = liger_fused_linear_kl_div(half, head, t[[0, 1, 3, 4]].bfloat16())
    other.backward()
    assert other.dtype is torch.float32 and half.grad is not None and head.grad is not None
    assert half.grad.dtype is head.grad.dtype is torch.bfloat16
    torch.testing.assert_close(other, loss.detach(), rtol=0.05, atol=0.01)
    with pytest.raises(ValueError, match="reduction must be one of 'batchmean', 'mean', 'sum', got 'none'"):
        liger_fused_linear_kl_div(x, w, t, reduction="none")
    with pytest.raises(ValueError, match="target must have shape"):
        liger_fused_linear_kl_div(x, w, t[:4])
    with pytest.raises(ValueError, match="shift_labels must have shape"):
        liger_fused_linear_kl_div(x, w, t, labels[:4])
    with pytest.raises(ValueError, match="temperature must be above 0"):
        LigerFusedLinearKLDivLoss(temperature=0.0)


def test_cross_entropy_and_total_variation() -> None:
    student, teacher = tensors((5, 9), (5, 9))
    target = torch.tensor([0, 8, -7, 3, 3])
    module = LigerFusedCETVDLoss(ignore_index=-7)

    def plain(s: Tensor) -> Tensor:
        distance = (s.softmax(-1) - teacher.softmax(-1)).abs().sum(-1) / 2
        return torch.stack((F.cross_entropy(s, target, ignore_index=-7, reduction="none"), distance * (target != -7)))

    same(lambda s: torch.stack(module(s, teacher, target)), lambda s: plain(s), [student])
    loss, distance = module(student, teacher, target)
    assert torch.autograd.grad(distance.sum() + loss.sum(), teacher, allow_unused=True) == (None,)
    with pytest.raises(ValueError, match="teacher_logits must have shape"):
        module(student, teacher[:, :3], target)
    with pytest.raises(ValueError, match=r"student_logits must have shape \[N, V\]"):
        module(student[0], teacher, target)
    with pytest.raises(ValueError, match="target must have shape"):
        module(student, teacher, target[:2])


def test_nothing_wide_is_saved() -> None:
    saved: list[Tensor] = []
    student, teacher = torch.randn(8, 64, requires_grad=True), torch.randn(8, 64)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        row_blocks.total_variation(student, teacher, torch.ones(8, dtype=torch.bool))
    given = {student.untyped_storage().data_ptr(), teacher.untyped_storage().data_ptr()}
    assert all(t.numel() < 64 or t.untyped_storage().data_ptr() in given for t in saved)


def test_the_graph_of_linear_kl_div_is_refused() -> None:
    """Its gradients are made in forward: a Hessian would be zero."""
    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(5, 8)
    loss = liger_fused_linear_kl_div(x, w, torch.randn(3, 5).softmax(-1), torch.arange(3))
    with pytest.raises(NotImplementedError, match="liger_fused_linear_kl_div: create_graph=True and double backward"):
        torch.autograd.functional.hessian(
            lambda x: liger_fused_linear_kl_div(x, w, torch.ones(3, 5) / 5, torch.arange(3)), x
        )
    loss.backward()
