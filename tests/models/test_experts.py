"""GPT-NeoX models with experts: numbers against plain PyTorch, sinkhorn against its loops, first weights, decoding."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from powertrain.models import configure
from powertrain.models.flops import flops_per_token
from powertrain.models.generate import Sampler, generate
from powertrain.models.huggingface import to_hf_config
from powertrain.models.parallelize import check_context, check_expert, check_pipeline, check_tensor
from powertrain.nn.attention import Context
from powertrain.nn.token_choice import TokenChoiceRouter, sinkhorn_scores
from tests.models.plain import plain_logits
from tests.models.test_gpt_neox import SIZES, check_against_plain, check_bfloat16_against_plain, make_model

VARIANTS: dict[str, dict[str, Any]] = {
    "top1": {"num_experts": 3},
    "top2-interval": {"num_experts": 4, "experts_per_token": 2, "expert_interval": 2, "expert_intermediate_size": 40},
    "megablocks": {"num_experts": 3, "expert_activation": "gelu_tanh", "expert_bias": True, "activation": "swiglu",
                   "parallel_residual": True},
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients(variant: str) -> None:
    check_against_plain(make_model(**VARIANTS[variant]))


def test_bfloat16() -> None:
    # every expert is chosen: rounded router weights would choose others than float64's
    check_bfloat16_against_plain(make_model(num_experts=2, experts_per_token=2))


def _sinkhorn_by_loops(logits: Tensor) -> Tensor:
    """megatron/model/router.py at ea7aefd8 (Apache-2.0), its rule written out: 3 rounds at most, element by element."""
    cost = logits.detach().double().exp()
    T, E = cost.shape
    columns = [1 / (E * float(cost[:, e].sum())) for e in range(E)]
    rows = [1.0] * T
    for _ in range(3):
        before = columns
        rows = [1 / T / (sum(columns[e] * float(cost[t, e]) for e in range(E)) + 1e-8) for t in range(T)]
        columns = [1 / E / (sum(rows[t] * float(cost[t, e]) for t in range(T)) + 1e-8) for e in range(E)]
        if sum(abs(a - b) for a, b in zip(columns, before, strict=True)) / E < 1e-4:
            break
    return torch.tensor([[columns[e] * float(cost[t, e]) * rows[t] for e in range(E)] for t in range(T)])


# even logits end the iterations after the second round, uneven ones take all three
@pytest.mark.parametrize("spread", [1e-4, 2.0])
def test_sinkhorn(spread: float) -> None:
    logits = torch.randn(11, 4) * spread
    found = sinkhorn_scores(logits.double())
    torch.testing.assert_close(found, _sinkhorn_by_loops(logits).double(), rtol=1e-6, atol=0)
    longer = sinkhorn_scores(logits.double(), iterations=9)
    assert torch.equal(found, longer) == (spread < 1)


def test_sinkhorn_of_no_tokens() -> None:
    assert sinkhorn_scores(torch.zeros(0, 4)).shape == (0, 4)


@pytest.mark.parametrize("k", [1, 2])
def test_sinkhorn_router(k: int) -> None:
    """Balanced while training, the best scores else; weights are sigmoid or softmax scores, not those of sinkhorn."""
    router = TokenChoiceRouter(8, 4, k, routing="sinkhorn")
    with torch.no_grad():
        # a common direction: without balancing most tokens would choose one expert
        router.weight.copy_(torch.randn(4, 8) + torch.tensor([[1.0], [0], [0], [0]]))
    x = (torch.randn(2, 32, 8) + 0.5).requires_grad_()
    logits, weights, experts = router(x)
    flat = logits.flatten(0, 1)
    assert torch.equal(experts.long(), _sinkhorn_by_loops(flat).topk(k, 1).indices)
    scores = flat.sigmoid() if k == 1 else flat.softmax(-1)
    torch.testing.assert_close(weights, scores.gather(1, experts.long()))
    dw = torch.randn_like(weights)
    found = torch.autograd.grad(weights, (x, router.weight), dw, retain_graph=True)
    wanted = torch.autograd.grad(scores.gather(1, experts.long()), (x, router.weight), dw)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    counts = experts.flatten().bincount(minlength=4)
    _, weights, chosen = router.eval()(x)
    assert torch.equal(chosen.long(), scores.topk(k, 1).indices)
    assert chosen.flatten().long().bincount(minlength=4).max() > counts.max()


def test_jitter_is_of_the_router_while_training() -> None:
    router = TokenChoiceRouter(8, 4, 1, jitter=0.1)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(64, 8)
    logits = router(x)[0]
    exact = F.linear(x, router.weight)
    most = F.linear(x.abs(), router.weight.abs()) * 0.1
    assert not torch.equal(logits, exact) and ((logits - exact).abs() <= most + 1e-6).all()
    assert torch.equal(router.eval()(x)[0], exact)


def test_sinkhorn_model_evaluates_as_topk() -> None:
    model = make_model(num_experts=3, router="sinkhorn").eval()
    tokens = torch.randint(0, 97, (2, 20))
    exact = plain_logits(model.config, {n: p.double() for n, p in model.state_dict().items()}, tokens)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).double(), exact, rtol=1e-4, atol=1e-4)
        assert not torch.equal(model.train()(tokens), model.eval()(tokens))


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_changes_no_gradient(recompute: str) -> None:
    model = make_model(num_experts=3, router_jitter=0.2, hidden_dropout=0.1)
    tokens = torch.randint(0, 97, (2, 20))

    def gradients(mode: str) -> list[Tensor]:
        for layer in model.layers:
            layer.recompute = mode
        torch.manual_seed(5)
        return list(torch.autograd.grad(model(tokens, tokens), list(model.parameters())))

    for a, b in zip(gradients("none"), gradients(recompute), strict=True):
        assert torch.equal(a, b)


def test_no_dropout_behind_experts_without_a_bias() -> None:
    """GPT-NeoX: experts' results are added as they are; with MegaBlocks' bias they are dropped out."""
    for bias in (False, True):
        model = make_model(num_experts=2, expert_bias=bias, hidden_dropout=0.5, num_layers=1, attention_bias=False)
        layer = model.layers[0]
        with torch.no_grad():
            # attention adds nothing, so that dropout of the experts alone is seen
            layer.attention.out.weight.zero_()
        x = torch.randn(1, 8, 32)
        out, residual = layer(x, None, Context())
        assert (residual is None) == (not bias)
        if not bias:
            torch.testing.assert_close(out, x + layer.mlp(layer.mlp_norm(x)))


def test_balance_loss_is_of_training() -> None:
    plain, model = (make_model(num_experts=4, balance_loss=weight) for weight in (0.0, 0.5))
    plain.load_state_dict(model.state_dict())
    tokens = torch.randint(0, 97, (2, 20))
    added = model(tokens, tokens) - plain(tokens, tokens)
    torch.testing.assert_close(added, 0.5 * sum(m.balance_loss for m in model.moe_layers))
    assert torch.equal(model.eval()(tokens, tokens), plain.eval()(tokens, tokens))


def test_balance_loss_without_gradients_is_refused() -> None:
    """Of a checkpoint that runs layers under no_grad, and whose second run the loss does not come from."""
    model = make_model(num_experts=4, balance_loss=0.5)
    tokens = torch.randint(0, 97, (2, 20))
    plain = torch.autograd.grad(model(tokens, tokens), list(model.parameters()))
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"model.balance_loss must be 0 .* use_reentrant=True .* got 0.5"):
        model(tokens, tokens)
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward.args[0], use_reentrant=False)
    for a, b in zip(torch.autograd.grad(model(tokens, tokens), list(model.parameters())), plain, strict=True):
        assert torch.equal(a, b)
    # a router that is not trained, and a loss that is only read
    for moe in model.moe_layers:
        moe.router.weight.requires_grad_(False)
    model(tokens, tokens).backward()
    with torch.no_grad():
        model(tokens, tokens)


@pytest.mark.parametrize("router", ["topk", "sinkhorn"])
def test_generation_is_the_full_forward(router: str) -> None:
    model = make_model(num_experts=3, router=router, expert_interval=2).eval()
    rows = generate(model, [[3, 5, 7], [11, 2, 9, 4, 1]], max_new_tokens=6, sampler=Sampler(temperature=0))
    with torch.no_grad():
        for prompt, row in zip(([3, 5, 7], [11, 2, 9, 4, 1]), rows, strict=True):
            tokens = list(prompt)
            for _ in range(6):
                tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
            assert row == tokens[len(prompt) :]


def test_first_weights_are_of_one_matrix() -> None:
    """xavier of [experts * inside, hidden], as GPT-NeoX draws w1 and w2."""
    model = make_model(num_experts=4, init_method="xavier_normal", output_init_method="orthogonal", hidden_size=64)
    experts = model.layers[0].mlp.experts
    rows = experts.up.shape[0] * experts.up.shape[1]
    assert experts.up.std().item() == pytest.approx((2 / (rows + 64)) ** 0.5, rel=0.05)
    down = experts.down.transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(down.T @ down, torch.eye(64), rtol=1e-4, atol=1e-4)


def test_flops_count_the_chosen_experts() -> None:
    one, two = (flops_per_token(make_model(num_experts=4, experts_per_token=k), 16) for k in (1, 2))
    assert two - one == 6 * SIZES["num_layers"] * 2 * 32 * 128


def test_what_is_refused() -> None:
    config: Any = configure(**SIZES, num_experts=4, router="sinkhorn")
    with pytest.raises(ValueError, match="num_experts must be 1, got 4 for a GPTNeoXForCausalLM"):
        to_hf_config(config)
    with pytest.raises(ValueError, match=r"model.router must be topk with parallel.tensor above 1.* got sinkhorn"):
        check_tensor(config, 2)
    with pytest.raises(ValueError, match=r"model.router must be topk with parallel.context above 1"):
        check_context(config, 2)
    with pytest.raises(ValueError, match=r"parallel.expert must be 1 for model.architecture gpt_neox, got 2"):
        check_expert(config, 2, 2, 1)
    topk = config.model_copy(update={"router": "topk"})
    check_tensor(topk, 2), check_context(topk, 2), check_pipeline(topk, 2)
    with pytest.raises(NotImplementedError, match=r"parallel.pipeline must be 1 with model.balance_loss"):
        check_pipeline(topk.model_copy(update={"balance_loss": 0.1}), 2)
    with pytest.raises(ValueError, match=r"model.expert_bias must be false with parallel.tensor"):
        check_tensor(topk.model_copy(update={"expert_bias": True}), 2)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"num_experts": 2, "experts_per_token": 3}, r"experts_per_token must be at most num_experts \(2\), got 3"),
        ({"num_experts": 2, "activation": "swiglu"}, r"expert_activation must be given where activation \(swiglu\)"),
        ({"balance_loss": 0.1}, "balance_loss must be 0 without layers of experts"),
        # those that would have experts are gMLP layers
        (
            {"num_experts": 2, "expert_interval": 2, "layer_types": ["gmlp", "attention"], "balance_loss": 0.1},
            "balance_loss must be 0 without layers of experts",
        ),
    ],
)
def test_wrong_fields(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        configure(**SIZES, **fields)
