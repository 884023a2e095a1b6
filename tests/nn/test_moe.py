"""The layer of experts against every expert on every token, its counts, casts and FLOPs; latent attention."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from powertrain.models.flops import flops_per_token
from powertrain.nn.attention import Context, Rotary, SelfAttention
from powertrain.nn.block import Block
from powertrain.nn.mla import LatentAttention
from powertrain.nn.mlp import MLP
from powertrain.nn.moe import MoE, Router
from powertrain.nn.norm import RMSNorm
from powertrain.nn.token_choice import TokenChoiceRouter
from powertrain.ops.moe import moe_route_ref

H, F, E, K = 32, 24, 8, 3


def _layer(shared_size: int = 16, **options: Any) -> MoE:
    layer = MoE(Router(H, E, K, **options), H, F, shared_size=shared_size)
    for p in layer.parameters():
        nn.init.normal_(p, std=0.3)
    return layer


def _dense(layer: MoE, x: Tensor) -> Tensor:
    """Every expert on every token."""
    weights, chosen = moe_route_ref(
        x.flatten(0, -2) @ layer.router.weight.T, layer.router.correction_bias, **layer.router.options
    )
    gates = torch.zeros(weights.shape[0], E, dtype=weights.dtype).scatter(1, chosen.long(), weights)
    gate, up = torch.einsum("th,efh->tef", x.flatten(0, -2), layer.experts.gate_up).chunk(2, -1)
    every = torch.einsum("tef,ehf->teh", torch.nn.functional.silu(gate) * up, layer.experts.down)
    y = (gates[..., None] * every).sum(1).view_as(x)
    return y if layer.shared is None else y + layer.shared(x)


@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
def test_new_layers_are_drawn_as_linear_layers_are(kind: Any) -> None:
    for router in (Router(H, E, K), TokenChoiceRouter(H, E, K)):
        layer = MoE(router, H, F, kind=kind, bias=True)
        assert layer.bias is not None and not layer.bias.any()
        for p in (p for p in layer.parameters() if p.dim() > 1):
            bound = p.shape[-1] ** -0.5
            assert 0.9 * bound < p.abs().max() <= bound


@pytest.mark.parametrize(
    "options",
    [{"score": "softmax"}, {"num_groups": 4, "top_groups": 2, "scaling_factor": 2.5}],
    ids=["softmax", "groups"],
)
@pytest.mark.parametrize("shared_size", [0, 16])
def test_layer_equals_every_expert_on_every_token(shared_size: int, options: dict[str, Any]) -> None:
    layer = _layer(shared_size, **options)
    layer.router.correction_bias.uniform_(-0.1, 0.1)
    x = torch.randn(2, 9, H, requires_grad=True)
    leaves = (x, *layer.parameters())
    dy = torch.randn_like(x)
    ours, expected = (torch.autograd.grad(f(x), leaves, dy) for f in (layer, lambda x: _dense(layer, x)))
    torch.testing.assert_close(layer(x), _dense(layer, x), rtol=1e-4, atol=1e-4)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_counts_only_while_training() -> None:
    layer, x = _layer(), torch.randn(2, 9, H)
    layer.eval()(x)
    assert not layer.load.any() and layer.balance_loss is None
    layer.train()(x), layer(x)
    assert layer.load.sum() == 2 * 2 * 9 * K
    assert "load" not in layer.state_dict() and "router.correction_bias" in layer.state_dict()


def test_under_autocast_the_router_stays_float32() -> None:
    layer, x = _layer(), torch.randn(2, 9, H)
    expected, _, experts = layer.router(x)
    with torch.autocast("cpu", torch.bfloat16):
        logits, weights, again = layer.router(x)
        y = layer(x)
    assert torch.equal(logits, expected) and torch.equal(again, experts) and weights.dtype is torch.float32
    assert y.dtype is torch.bfloat16 and y.isfinite().all()


def test_flops_count_the_experts_that_a_token_meets() -> None:
    layer = _layer()
    layer.config = type("Config", (), {"tie_embeddings": False})  # type: ignore[assignment]
    assert flops_per_token(layer, 8) == 6 * (E * H + K * 3 * H * F + 3 * H * 16)


def _attention(**options: Any) -> LatentAttention:
    module = LatentAttention(
        H, 4, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, rotary=Rotary(4, 32), **options
    )
    for p in module.parameters():
        nn.init.normal_(p, std=0.3) if p.dim() > 1 else nn.init.uniform_(p, 0.5, 1.5)
    return module


@pytest.mark.parametrize("options", [{}, {"q_lora_rank": 10, "bias": True, "scale": 0.2}], ids=["plain", "q-latent"])
def test_latent_attention_as_the_paper_writes_it(options: dict[str, Any]) -> None:
    module, x = _attention(**options), torch.randn(2, 7, H)
    position = torch.arange(7)
    angle = position[:, None] / 10000.0 ** (torch.arange(0, 4, 2) / 4)
    turn = torch.polar(torch.ones_like(angle), angle)

    def turned(t: Tensor) -> Tensor:  # [B, S, heads, 4], pairs are neighbours
        pairs = torch.view_as_complex(t.contiguous().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turn[:, None]).flatten(-2)

    q = module.q(x) if module.q is not None else module.q_up(module.q_norm(module.q_down(x)))
    q = q.unflatten(-1, (4, 12))
    latent, r = module.kv_down(x).split((12, 4), -1)
    k, v = module.kv_up(module.kv_norm(latent)).unflatten(-1, (4, 14)).split((8, 6), -1)
    q = torch.cat((turned(q[..., :4]), q[..., 4:]), -1)
    k = torch.cat((turned(r[:, :, None]).expand(-1, -1, 4, -1), k), -1)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (options.get("scale") or 12**-0.5)
    scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
    expected = module.out(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(-2))
    torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-5)


def test_positions_move_what_is_turned_only() -> None:
    """Shifting all positions changes nothing; stretching them does."""
    module, x = _attention(), torch.randn(1, 5, H)
    position = torch.arange(5)[None]
    expected = module(x)
    torch.testing.assert_close(module(x, Context(position_ids=position + 9)), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(module(x, Context(position_ids=position * 3)), expected, rtol=1e-2)


def test_copies_after_a_forward_in_training() -> None:
    moe = MoE(Router(16, 4, 2), 16, 8)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(2, 3, 16)
    y = moe(x)
    copies = copy.deepcopy(moe), pickle.loads(pickle.dumps(moe))
    assert moe.balance_loss is not None and moe.balance_loss.requires_grad
    for again in copies:
        assert again.balance_loss is None and torch.equal(again.load, moe.load)
        assert torch.equal(again(x), y)


def test_what_latent_attention_cannot_be() -> None:
    sizes: dict[str, Any] = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
    # two of the four channels were left without positions
    with pytest.raises(ValueError, match="rotary must turn the qk_rope_head_dim 4 channels, got 2"):
        LatentAttention(16, 2, **sizes, rotary=Rotary(2, 8))
    for name in ("kv_lora_rank", "q_lora_rank", "v_head_dim", "num_heads"):
        with pytest.raises(ValueError, match=f"LatentAttention: {name} must be at least 1, got 0"):
            LatentAttention(**{"hidden_size": 16, "num_heads": 2, **sizes, "rotary": Rotary(4, 8), name: 0})


def test_a_block_needs_its_second_norm() -> None:
    attention, mlp = SelfAttention(16, 2), MLP(16, 32)
    with pytest.raises(ValueError, match="Block: mlp_norm must be a module unless parallel, got None"):
        Block(attention, mlp, RMSNorm(16), None)
    assert Block(attention, mlp, RMSNorm(16), None, parallel=True)(torch.randn(1, 3, 16), None, Context())[0].shape


def test_state_in_place_of_the_meta_devices() -> None:
    """The load is in no state dict: it stayed on the meta device, where training counted it, until `balance` failed."""
    with torch.device("meta"):
        layer = MoE(Router(H, E, K), H, F)
    source = _layer(shared_size=0)
    layer.load_state_dict(source.state_dict(), assign=True)
    x = torch.randn(2, 5, H)
    torch.testing.assert_close(layer(x), source(x))
    assert torch.equal(layer.load, source.load) and int(layer.load.sum()) == 2 * 5 * K
    pickle.loads(pickle.dumps(copy.deepcopy(layer))).balance(1e-3)


@pytest.mark.parametrize(
    "options, message",
    [
        # any other word was "topk"
        ({"routing": "sinkhron"}, "routing must be one of 'topk', 'sinkhorn', got 'sinkhron'"),
        ({"top_k": 5, "routing": "sinkhorn"}, "top_k must be 1 to 4, .* got 5"),
        ({"top_k": 0, "routing": "sinkhorn"}, "top_k must be 1 to 4, .* got 0"),
        ({"num_experts": -1}, "num_experts must be at least 0, got -1"),
        ({"jitter": -0.5}, "jitter must be at least 0, got -0.5"),
    ],
)
def test_what_a_router_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"TokenChoiceRouter: {message}"):
        TokenChoiceRouter(**{"hidden_size": H, "num_experts": 4, "top_k": 1, **options})


def test_layers_name_an_input_of_another_width() -> None:
    rotary = Rotary(4, 16)
    latent = LatentAttention(8, 2, kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, rotary=rotary)
    routers = Router(8, 4, 2), TokenChoiceRouter(8, 4, 2)
    for layer in (SelfAttention(8, 2), latent, *routers):
        for x in (torch.ones(1, 3, 7), None):
            with pytest.raises(ValueError, match=rf"{type(layer).__name__}: x must be a tensor \[\.\.\., 8\], got"):
                layer(x)
    with pytest.raises(ValueError, match=r"SelfAttention: x must be \[B, S, 8\], got \[3, 8\]"):
        SelfAttention(8, 2)(torch.ones(3, 8))
    with pytest.raises(ValueError, match=r"Router: x must be a tensor \[\.\.\., 8\], got"):
        MoE(routers[0], 8, 4)(torch.ones(1, 3, 7))


def test_what_a_layer_of_experts_cannot_be() -> None:
    router = Router(H, E, K)
    with pytest.raises(ValueError, match=r"MoE: kind must be one of 'swiglu', 'gelu', .* got 'geglu'"):
        MoE(router, H, F, kind="geglu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"MoE: router must take hidden_size 16, got {H}"):
        MoE(router, 16, F)
    with pytest.raises(ValueError, match="PlainExperts: intermediate_size must be at least 0, got -8"):
        MoE(router, H, -8, kind="gelu")
    with pytest.raises(ValueError, match=r"MoE: x must be \[\.\.\., S, hidden_size\], got \[32\]"):
        MoE(router, H, F)(torch.randn(H))
