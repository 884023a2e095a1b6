"""moe_route, moe_permute, moe_unpermute, the balancing loss and the bias update: options, ties, sizes, errors."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.ops import moe_kernels
from powertrain.ops.grouped_gemm import grouped_gemm
from powertrain.ops.moe import (
    moe_load_balancing_loss,
    moe_permute,
    moe_permute_ref,
    moe_route,
    moe_route_ref,
    moe_unpermute,
    moe_update_bias_,
)
from powertrain.testing.numerics import check


def _logits(device: torch.device, T: int, E: int) -> Tensor:
    return torch.randn(T, E, device=device, requires_grad=True)


# 1 of 1; all of 3; 160 in 8 groups of 20 (DeepSeek-V2), 2 groups kept; as many groups kept as there are
@pytest.mark.parametrize(
    "E, options",
    [
        (1, {"top_k": 1}),
        (3, {"top_k": 3, "normalize": True}),
        (160, {"top_k": 6, "num_groups": 8, "top_groups": 2, "score": "sigmoid"}),
        (12, {"top_k": 5, "num_groups": 3, "top_groups": 3, "normalize": True}),
    ],
    ids=["1", "all", "deepseek_v2", "groups"],
)
@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
def test_route(E: int, options: dict[str, Any], biased: bool, device: torch.device) -> None:
    logits = _logits(device, 9, E)
    bias = torch.randn(E, device=device) if biased else None
    experts, expected = (f(logits, bias, **options)[1] for f in (moe_route, moe_route_ref))
    assert torch.equal(experts, expected)
    run, reference = (lambda logits, f=f: f(logits, bias, **options)[0] for f in (moe_route, moe_route_ref))
    check(run, reference, reference, {"logits": logits})


def test_route_takes_the_lower_index_of_equals(device: torch.device) -> None:
    logits = torch.zeros(2, 8, device=device)
    assert moe_route(logits, top_k=3)[1].tolist() == [[0, 1, 2]] * 2
    assert moe_route(logits, top_k=3, num_groups=4, top_groups=2)[1].tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("lowest", [float("-inf"), torch.finfo(torch.float32).min], ids=["inf", "lowest"])
@pytest.mark.parametrize("groups", [1, 3])
def test_route_chooses_experts_of_no_bias_last_and_once(groups: int, lowest: float, device: torch.device) -> None:
    bias = torch.full((6,), lowest, device=device)
    bias[5] = 0.0
    logits = torch.zeros(2, 6, device=device)
    _, experts = moe_route(logits, bias, top_k=4, num_groups=groups, top_groups=min(groups, 2))
    # of groups the third, with expert 5, and the first of the others
    expected = [5, 0, 1, 2] if groups == 1 else [5, 0, 1, 4]
    assert experts.tolist() == [expected] * 2


def test_route_bias_chooses_and_does_not_weigh(device: torch.device) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], device=device)
    bias = torch.tensor([0.0, 0.0, 5.0, 4.0], device=device)
    weights, experts = moe_route(logits, bias, top_k=2, score="sigmoid")
    assert experts.tolist() == [[2, 3]]
    torch.testing.assert_close(weights, logits[:, 2:].sigmoid())


def test_route_of_nan_and_of_sigmoids_that_are_zero(device: torch.device) -> None:
    logits = torch.full((2, 4), float("nan"), device=device)
    logits[0] = -200.0
    weights, experts = moe_route(logits, top_k=2, score="sigmoid", normalize=True)
    assert ((experts >= 0) & (experts < 4)).all()
    assert not weights[0].any() and weights[1].isnan().all()


@pytest.mark.parametrize("groups", [1, 2])
def test_route_chooses_nan_last(groups: int, device: torch.device) -> None:
    nan = float("nan")
    logits = torch.tensor([[0.0, nan, 1.0, 2.0], [3.0, nan, nan, nan]], device=device)
    weights, experts = moe_route(logits, top_k=2, score="sigmoid", num_groups=groups, top_groups=groups)
    assert experts.tolist() == [[3, 2], [0, 1]]
    torch.testing.assert_close(weights[0], logits[0, [3, 2]].sigmoid())
    assert weights[1, 0].isfinite() and weights[1, 1].isnan()
    assert moe_route(logits, top_k=2)[0].isnan().all()


def test_nan_that_is_not_chosen_is_in_no_gradient_of_the_chosen(device: torch.device) -> None:
    logits = torch.tensor([[0.0, float("nan"), 1.0, 2.0]], device=device, requires_grad=True)
    weights, _ = moe_route(logits, top_k=2, score="sigmoid", normalize=True)
    (grad,) = torch.autograd.grad(weights[0, 0], logits)
    s, t = logits.detach()[0, 3].sigmoid(), logits.detach()[0, 2].sigmoid()
    by_s, by_t = t / (s + t) ** 2 * s * (1 - s), -s / (s + t) ** 2 * t * (1 - t)
    torch.testing.assert_close(grad[0, [0, 2, 3]], torch.stack([0 * s, by_t, by_s]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["i32", "i64"])
# few assignments are sorted in one launch, many in three
@pytest.mark.parametrize("few", [0, 4096])
# 300 assignments: three programs of 128, the last block ragged; 5 experts: one gets none
@pytest.mark.parametrize("T, E, k", [(1, 1, 1), (150, 5, 2), (9, 70, 8)])
def test_permute_sorts_stably(
    T: int, E: int, k: int, few: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe_kernels, "_FEW", few)
    experts = torch.rand(T, max(1, E - 1), device=device).argsort(-1)[:, :k].to(dtype)
    x = torch.randn(T, 8, device=device)
    for ours, reference in zip(moe_permute(x, experts, E), moe_permute_ref(x, experts, E), strict=True):
        assert ours.dtype == reference.dtype and torch.equal(ours, reference)


# of few rows a program copies a part of each, and loads several rows at once to add them
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("H", [1, 1100])
def test_unpermute_undoes_permute(H: int, few: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if not few:
        monkeypatch.setattr(moe_kernels, "_FEW_COPIES", 0)
        monkeypatch.setattr(moe_kernels, "_FEW_ROWS", 0)
    x = torch.randn(7, H, device=device)
    experts = torch.tensor([[0, 3], [1, 0], [3, 1], [0, 1], [2, 3], [2, 0], [3, 2]], device=device)
    rows, offsets, positions = moe_permute(x, experts, 4)
    assert offsets.tolist() == [4, 7, 10, 14]
    torch.testing.assert_close(moe_unpermute(rows, positions), 2 * x)
    weights = torch.tensor([[0.25, 0.75]], device=device).expand(7, 2)
    torch.testing.assert_close(moe_unpermute(rows, positions, weights), x)


def test_half_precision_weights_and_frozen_rows(device: torch.device) -> None:
    rows = torch.randn(6, 16, device=device)
    positions = torch.tensor([[4, 1], [0, 5], [3, 2]], device=device)
    weights = torch.randn(3, 2, device=device).bfloat16().requires_grad_()
    y = moe_unpermute(rows, positions, weights)
    dy = torch.randn_like(y)
    y.backward(dy)
    expected = (rows[positions] * dy[:, None]).sum(-1)
    torch.testing.assert_close(weights.grad, expected.bfloat16())


def test_no_tokens(device: torch.device) -> None:
    x = torch.randn(0, 8, device=device, requires_grad=True)
    logits = torch.randn(0, 4, device=device, requires_grad=True)
    weights, experts = moe_route(logits, top_k=2)
    rows, offsets, positions = moe_permute(x, experts, 4)
    y = moe_unpermute(rows, positions, weights)
    y.sum().backward()
    assert rows.shape == (0, 8) and offsets.tolist() == [0] * 4 and y.shape == x.grad.shape == (0, 8)
    assert logits.grad.shape == (0, 4)


def test_a_layer_of_experts_equals_every_expert_on_every_token(device: torch.device) -> None:
    """Route, permute, grouped GEMM, unpermute; gradients of the input, the experts and the router's logits."""
    T, E, H, F_ = 13, 5, 16, 12
    made = {"x": (T, H), "logits": (T, E), "up": (E, F_, H), "down": (E, H, F_)}
    tensors = {name: (torch.randn(shape, device=device) * 0.5).requires_grad_() for name, shape in made.items()}

    def sparse(x: Tensor, logits: Tensor, up: Tensor, down: Tensor) -> Tensor:
        weights, experts = moe_route(logits, top_k=2, normalize=True)
        rows, offsets, positions = moe_permute(x, experts, E)
        hidden = grouped_gemm(rows, up, offsets).relu()
        return moe_unpermute(grouped_gemm(hidden, down, offsets), positions, weights)

    def dense(x: Tensor, logits: Tensor, up: Tensor, down: Tensor) -> Tensor:
        weights, experts = moe_route_ref(logits, top_k=2, normalize=True)
        every = torch.einsum("tef,ehf->teh", torch.einsum("th,efh->tef", x, up).relu(), down)
        gates = torch.zeros_like(logits).scatter(1, experts.long(), weights)
        return (gates[..., None] * every).sum(1)

    check(sparse, dense, dense, tensors)


def test_balancing_loss_is_one_when_even_and_differentiable(device: torch.device) -> None:
    logits = torch.zeros(2, 6, 4, device=device, requires_grad=True)
    even = torch.tensor([[0, 1], [2, 3]], device=device).repeat(3, 1).expand(2, 6, 2)
    for score in ("softmax", "sigmoid"):
        torch.testing.assert_close(moe_load_balancing_loss(logits, even, score=score).item(), 1.0)
    logits = torch.tensor([9.0, 0, 0, 0], device=device).repeat(6, 1).requires_grad_()
    loss = moe_load_balancing_loss(logits, torch.zeros(6, 1, dtype=torch.int32, device=device))
    loss.backward()
    assert loss > 3.9 and (logits.grad[:, 0] > 0).all()


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4), (0, 3, 4)])
def test_balancing_loss_of_no_tokens_is_zero(shape: tuple[int, ...], device: torch.device) -> None:
    logits = torch.zeros(shape, device=device, requires_grad=True)
    experts = torch.zeros((*shape[:-1], 2), device=device, dtype=torch.int32)
    loss = moe_load_balancing_loss(logits, experts)
    loss.backward()
    assert loss.item() == 0 and logits.grad is not None and logits.grad.shape == shape


def test_balancing_loss_of_sequences_is_the_mean_of_each(device: torch.device) -> None:
    logits = torch.randn(3, 10, 6, device=device)
    experts = torch.randint(0, 6, (3, 10, 2), device=device)
    each = torch.stack([moe_load_balancing_loss(z, e) for z, e in zip(logits, experts, strict=True)])
    torch.testing.assert_close(moe_load_balancing_loss(logits, experts), each.mean())


def test_update_bias(device: torch.device) -> None:
    bias = torch.zeros(4, device=device)
    assert moe_update_bias_(bias, torch.tensor([1, 5, 3, 3], device=device), 0.5) is bias
    assert bias.tolist() == [0.5, -0.5, 0.0, 0.0]
    # counts that are no float16; a module's half() converts the bias
    bias = torch.zeros(3, device=device, dtype=torch.float16)
    assert moe_update_bias_(bias, torch.tensor([1, 10**6, 1], device=device), 0.5).tolist() == [0.5, -0.5, 0.5]


def test_errors(device: torch.device) -> None:
    logits, x = torch.zeros(3, 8, device=device), torch.zeros(3, 4, device=device)
    with pytest.raises(ValueError, match="moe_route: top_k must be 1 to 4, the experts of 2 groups, got 5"):
        moe_route(logits, top_k=5, num_groups=4, top_groups=2)
    with pytest.raises(ValueError, match="num_groups must divide 8 experts into groups of two or more, got 8"):
        moe_route(logits, top_k=1, num_groups=8)
    with pytest.raises(ValueError, match="top_groups must be 1 to num_groups=2, got 3"):
        moe_route(logits, top_k=1, num_groups=2, top_groups=3)
    with pytest.raises(ValueError, match=r"correction_bias must have shape \[8\] \(last dim of logits\), got \[4\]"):
        moe_route(logits, torch.zeros(4, device=device), top_k=1)
    with pytest.raises(ValueError, match="score must be one of 'softmax', 'sigmoid', got 'relu'"):
        moe_route(logits, top_k=1, score="relu")
    with pytest.raises(ValueError, match=r"moe_permute: experts must have shape \[3, 2\]"):
        moe_permute(x, torch.zeros(2, 2, dtype=torch.int32, device=device), 4)
    with pytest.raises(ValueError, match="experts must be int32 or int64, got float32"):
        moe_permute(x, torch.zeros(3, 2, device=device), 4)
    with pytest.raises(ValueError, match=r"moe_unpermute: positions must be \[T, k\] with T\*k = 3 \(rows\), got"):
        moe_unpermute(x, torch.zeros(2, 2, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match=r"moe_load_balancing_loss: logits must be \[\.\.\., S, E\], got \[8\]"):
        moe_load_balancing_loss(logits[0], torch.zeros(2, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match=r"experts must have at least one expert a token, got \[3, 0\]"):
        moe_load_balancing_loss(logits, torch.zeros(3, 0, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match="tokens_per_expert must have shape"):
        moe_update_bias_(torch.zeros(4), torch.zeros(3))


def test_experts_out_of_range_are_refused_where_they_can_be_read() -> None:
    experts = torch.tensor([[0, 4]])
    with pytest.raises(ValueError, match=r"moe_permute: experts must be in \[0, 4\), got 4"):
        moe_permute(torch.zeros(1, 2, dtype=torch.float64), experts, 4)
    with pytest.raises(ValueError, match=r"moe_load_balancing_loss: experts must be in \[0, 4\), got 4"):
        moe_load_balancing_loss(torch.zeros(1, 4, dtype=torch.float64), experts)
    rows = torch.zeros(2, 2, dtype=torch.float64)
    # later calls of one signature skip the checks of arguments (runtime/plain_calls.py), not those of values
    for positions, got in (([[0, 1]], None), ([[0, 2]], 2), ([[-1, 0]], -1)):
        with nullcontext() if got is None else pytest.raises(ValueError, match=rf"be in \[0, 2\), got {got}"):
            moe_unpermute(rows, torch.tensor(positions))


def test_route_compiles_with_dynamic_numbers(device: torch.device) -> None:
    logits, options = torch.randn(5, 16, device=device), dict(top_k=4, num_groups=4, top_groups=2)

    def route(logits: Tensor, options: dict[str, int]) -> tuple[Tensor, Tensor]:
        return moe_route(logits, **options)

    expected = route(logits, options)
    actual = torch.compile(route, fullgraph=True, backend="aot_eager", dynamic=True)(logits, options)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
