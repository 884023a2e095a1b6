"""Readings of FP8 layers: each number by its definition, the same bits inside, where NaN and outliers are."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from powertrain.models import build, configure
from powertrain.quant import Block, Row, quantize_model, watch
from powertrain.quant import Tensor as TensorRecipe

RECIPES = [TensorRecipe(), TensorRecipe(scale="delayed", history=2), Row(), Block()]


def _layer(recipe: object) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(160, 64, bias=False))
    quantize_model(model, recipe)
    return model


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_nothing_is_changed_and_every_operand_is_read(recipe: object) -> None:
    model, x = _layer(recipe), torch.randn(5, 160)
    plain = model(x)
    with watch(model) as readings:
        y = model(x)
        y.square().sum().backward()
    assert torch.equal(y, plain)
    found = {reading.role: reading for reading in readings.list()}
    assert found.keys() == {"x", "weight", "dy"} and all(r.layer == "0" for r in found.values())
    assert found["x"].amax == x.abs().max() and found["weight"].amax == model[0].weight.abs().max()
    assert found["dy"].amax == 2 * y.detach().abs().max()
    assert all(0 < r.error < 0.06 and r.saturated == 0 for r in found.values())
    assert "0 x: amax" in str(readings) and not model[0]._forward_hooks


def test_underflow_and_saturation_by_hand() -> None:
    """448 keeps scale 1: values below 2^-10 underflow. A scale that grew too large saturates."""
    model = _layer(TensorRecipe(scale="delayed", history=1))
    x = torch.zeros(2, 160)
    x[0, 0], x[0, 1:9], x[1, :10] = 448.0, 2.0**-11, 1.0
    with watch(model) as readings:
        model(x)
    reading = next(r for r in readings.list() if r.role == "x")
    assert reading.underflow == pytest.approx(8 / 19) and reading.saturated == 0 and reading.amax == 448
    model[0].fp8_scale[0] = 2.0
    with watch(model) as readings:
        model(x)
    reading = next(r for r in readings.list() if r.role == "x")
    assert reading.saturated == pytest.approx(1 / 320) and reading.error == pytest.approx(0.5, abs=1e-3)


def test_the_share_of_tensors_that_were_read_twice() -> None:
    """Of each operand: the first has no scale before it, a larger one has another."""
    model, x = _layer(TensorRecipe()), torch.randn(5, 160)
    for size in (1.0, 1.0, 16.0):
        model(x * size).sum().backward()
    with watch(model) as readings:
        model(x * 16.0).sum().backward()
    # of this call's dy too: its hook is called before it is quantized
    assert {r.role: r.repeats for r in readings.list()} == {"x": 2 / 4, "weight": 1 / 4, "dy": pytest.approx(1 / 3)}
    assert "read twice 50.00%" in str(readings)
    for recipe in (TensorRecipe(power_of_two=False), Row()):
        model = _layer(recipe)
        with watch(model) as readings:
            model(x)
        assert all(r.repeats is None for r in readings.list()) and "read twice" not in str(readings)


@pytest.mark.parametrize("recipe", [TensorRecipe(), Row()], ids=str)
def test_a_layer_whose_forward_is_repeated(recipe: object) -> None:
    """Selective recomputation takes the operations of a forward by their number: the first reading has as many."""
    sizes = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "intermediate_size": 32, "vocab_size": 32}
    model = build(configure(architecture="llama", **sizes), "cpu")
    model.init_weights(0)
    quantize_model(model, recipe)
    model.layers[0].recompute = "selective"
    tokens, weight = torch.arange(16)[None], model.layers[0].mlp.down.weight
    model(tokens, tokens).backward()
    plain, weight.grad = weight.grad, None
    with watch(model) as readings:
        model(tokens, tokens).backward()
    assert torch.equal(weight.grad, plain) and {r.role for r in readings.list()} == {"x", "weight", "dy"}


def test_nan_is_on_top_and_names_its_layer() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    quantize_model(model, Row())
    model[1].weight.data[3, 4] = torch.nan
    with watch(model) as readings:
        model(torch.ones(2, 16))
    assert readings.list()[0][:2] == ("1", "weight") and readings.list()[0].amax != readings.list()[0].amax


def test_readings_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst of two ranks, the other one's read of values 4 times as large; of shares the mean."""
    model, x = _layer(TensorRecipe()), torch.randn(5, 160)
    model(x)
    ranks = []
    for size in (1.0, 4.0):
        with watch(model) as readings:
            model(x * size)
        ranks.append(readings)
    worst, shares = (torch.stack(list(part.values())) for part in (ranks[1]._found, ranks[1]._repeats))

    def all_reduce(rows: torch.Tensor, op: object = dist.ReduceOp.SUM, group: object = None) -> None:
        is_worst = op == dist.ReduceOp.MAX
        rows.copy_(torch.maximum(rows, worst) if is_worst else rows + shares / 2)

    alone = {r.role: r for r in ranks[0].list()}
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    ranks[0].reduce(SimpleNamespace(size=lambda: 2))
    both = {r.role: r for r in ranks[0].list()}
    assert both["x"].amax == 4 * alone["x"].amax and both["weight"].amax == alone["weight"].amax
    # x: once in 2 calls, then twice in 3
    assert both["x"].repeats == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert both["weight"].repeats == pytest.approx((1 / 2 + 1 / 3) / 2)
