"""Experts by quantize_model: their products, which calls take them, reasons, undoing, and what is expected of them."""

import pytest
import torch
from torch import Tensor

from powertrain.models import build, configure
from powertrain.nn.moe import Experts, MoE, Router
from powertrain.ops.fp8.grouped import fp8_grouped_gemm
from powertrain.quant import Block, Row, dequantize_model, quantize_model
from powertrain.quant import Tensor as TensorRecipe
from powertrain.quant.cost import expected_grouped
from powertrain.quant.grouped import why_not_grouped
from powertrain.runtime.target import Target

H200 = Target.parse("H200")


def _moe() -> MoE:
    torch.manual_seed(1)
    moe = MoE(Router(24, 4, 2), 24, 20)
    for p in moe.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return moe


def _grads(moe: MoE, x: Tensor) -> list[Tensor]:
    moe.zero_grad()
    y = moe(x)
    y.square().mean().backward()
    return [y.detach(), *(p.grad.clone() for p in moe.parameters())]


@pytest.mark.parametrize("recipe", [Row(), Block(), Row("hybrid"), Block(power_of_two=False)], ids=str)
def test_experts_are_quantized_and_back(recipe: Row | Block) -> None:
    moe, x = _moe(), torch.randn(3, 10, 24)
    exact = _grads(moe, x)
    assert str(quantize_model(moe, recipe)) == f"experts: {recipe}"
    found = _grads(moe, x)
    for a, b in zip(found, exact, strict=True):
        assert 0 < (a - b).norm() < 0.15 * b.norm()
    assert all(torch.equal(a, b) for a, b in zip(_grads(moe, x), found, strict=True))
    assert list(moe.state_dict()) == list(_moe().state_dict())
    again = "experts: stays, it is in FP8 already (dequantize_model makes it plain)"
    assert str(quantize_model(moe, recipe)) == again
    dequantize_model(moe)
    assert all(torch.equal(a, b) for a, b in zip(_grads(moe, x), exact, strict=True))


def test_the_recipe_reaches_the_products() -> None:
    experts = Experts(24, 20, 2, 1)
    rows, weight = torch.randn(9, 24), torch.randn(2, 40, 24)
    offsets = torch.tensor([4, 9], dtype=torch.int32)
    for recipe, options in (
        (Row("hybrid", False), {"by": "row", "grad_format": "e5m2", "power_of_two": False}),
        (Block(power_of_two=False), {"by": "block", "power_of_two": False}),
    ):
        found = []
        experts.fp8_recipe = recipe
        for product in (experts.grouped, lambda *args, o=options: fp8_grouped_gemm(*args, **o)):
            w = weight.clone().requires_grad_()
            x = rows.clone().requires_grad_()
            product(x, w, offsets).square().sum().backward()
            found.append((x.grad, w.grad))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_reasons() -> None:
    moe = _moe()
    for recipe, target, why in (
        (TensorRecipe(), None, "grouped products of experts have scales by row and by block only"),
        (Row(), Target.parse("A100"), "sm_80 has no FP8 products"),
        (Row(), Target.parse("RTX 4090"), "no rate of grouped FP8 products is known on sm_89"),
        (Row(), H200, r"FP8 by row is not expected to be faster for grouped weights of 4x40x24, 4x24x20, with any"),
    ):
        report = quantize_model(moe, recipe, target=target)
        assert not report.quantized and why in str(report)
    assert "keep has 'expert*'" in str(quantize_model(moe, Row(), keep=["expert*"]))
    moe.experts.overlap = object()  # type: ignore[assignment]
    assert "experts spread over ranks compute in 16 bits" in str(quantize_model(moe, Row()))
    with pytest.raises(ValueError, match="keep must name layers"):
        quantize_model(_moe(), Row(), keep=["nothing"])


def test_expected_times() -> None:
    """By the measured rates never FP8, as dW is slower; y and dx alone would win with many rows, with few the weights'
    quantization costs more."""
    with torch.device("meta"):
        narrow, wide = Experts(2048, 1408, 64, 6), Experts(7168, 2048, 32, 8)
    for recipe in (Row(), Block()):
        for experts in (narrow, wide):
            assert "not expected to be faster" in str(why_not_grouped(experts, recipe, H200))
    few, many = (expected_grouped(T, 32, 4096, 7168, Row(), H200) for T in (8192, 1 << 20))
    assert few is not None and many is not None and few.quantize > few.bf16 / 8 > 0
    assert many.fprop + many.dgrad + many.quantize < many.bf16 * 2 / 3 < many.bf16 < many.wgrad * 1.1
    assert expected_grouped(8192, 32, 4096, 7168, TensorRecipe(), H200) is None


def test_a_model_with_experts_learns() -> None:
    sizes = {
        "vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 16,
        "intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": 6, "experts_per_token": 2,
        "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    }  # fmt: skip
    tokens = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(3))
    losses = {}
    for recipe in (None, Row(), Block()):
        model = build(configure(architecture="deepseek", **sizes))
        model.to_empty(device="cpu")
        model.init_weights(0)
        if recipe is not None:
            parts = {part.name for part in quantize_model(model, recipe).quantized}
            assert "layers.1.mlp.experts" in parts
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(4):
            loss = model(tokens, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[str(recipe)] = loss.item()
    # scales that are powers of two leave the same mantissas, whoever shares them
    assert losses["None"] not in (losses["row"], losses["block"])
    assert all(abs(loss - losses["None"]) < 0.03 * losses["None"] for loss in losses.values())
