"""Adapters around FP8 products of a frozen weight, emulated: values, gradients, the weight quantized once, undoing."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import powertrain
from powertrain.nn.lora import LoRALinear, lora_layers, merge_lora, without_lora
from powertrain.ops.fp8.linear import fp8_linear
from powertrain.quant import Block, FP8Linear, Row, dequantize_model, quantize_model, update_scales, watch
from powertrain.quant import Tensor as TensorRecipe
from powertrain.quant import linear as quant_linear
from powertrain.quant.recipe import Recipe

DELAYED = TensorRecipe(scale="delayed", history=3)
RECIPES = [TensorRecipe(), DELAYED, Row(), Block()]
KINDS: dict[str, dict[str, Any]] = {"lora": {}, "dora": {"dora": True}}
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=str)


def _layer(recipe: Recipe | None, *, dtype: torch.dtype = torch.float32, **options: Any) -> LoRALinear:
    """33 inputs, 40 outputs, an adapter as if it had been trained."""
    model = powertrain.lora(nn.Sequential(nn.Linear(33, 40)), rank=4, alpha=6, **options).to(dtype)
    layer: Any = model[0]
    nn.init.normal_(layer.lora_B, std=0.3)
    if recipe is not None:
        report = quantize_model(model, recipe)
        assert [part.name for part in report.quantized] == ["0"] and not report.left
    return layer


def _results(call: Any, layer: LoRALinear, x: Tensor) -> list[Tensor]:
    trained = [p for p in layer.parameters() if p.requires_grad]
    y = call(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [x, *trained], dy)]


@every_recipe
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(12, 33), (2, 5, 33), (33,)], ids=str)
def test_it_is_the_frozen_product_and_the_adapter(recipe: Recipe, kind: str, shape: tuple[int, ...]) -> None:
    layer = _layer(recipe, **KINDS[kind])
    x = torch.randn(shape, requires_grad=True)

    def composed(x: Tensor) -> Tensor:
        z = fp8_linear(x, layer.weight, by=recipe.by, power_of_two=recipe.power_of_two)
        z = z + layer.scale * x @ layer.lora_A.T @ layer.lora_B.T
        if layer.lora_magnitude is not None:
            whole = layer.weight + layer.scale * layer.lora_B @ layer.lora_A
            z = z * (layer.lora_magnitude / whole.norm(dim=1).detach())
        return z + layer.bias

    for found, expected in zip(_results(layer, layer, x), _results(composed, layer, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@every_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_near_the_layer_without(recipe: Recipe, dtype: torch.dtype) -> None:
    layer = _layer(recipe, dtype=dtype)
    plain = copy.deepcopy(layer)
    plain.set_fp8(None)
    x = torch.randn(64, 33, dtype=dtype, requires_grad=True)
    for found, expected in zip(_results(layer, layer, x), _results(plain, plain, x), strict=True):
        assert found.dtype is expected.dtype
        assert not torch.equal(found, expected) or found.shape in (layer.lora_A.shape, layer.lora_B.shape)
        # e4m3 has 3 bits of mantissa, e5m2 of dy 2
        assert (found - expected).float().norm() < 0.08 * expected.float().norm()


@every_recipe
def test_the_weight_is_quantized_once(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it changes: by a copy into it, or because it is trained."""
    calls = []
    quantized = quant_linear.quantized_weight
    monkeypatch.setattr(quant_linear, "quantized_weight", lambda *a, **k: calls.append(1) or quantized(*a, **k))
    layer = _layer(recipe)
    x = torch.randn(6, 33)
    for _ in range(3):
        layer(x).sum().backward()
        update_scales(layer)
    assert len(calls) == 1
    before = layer(x).detach()
    with torch.no_grad():
        layer.weight.mul_(2)
    assert not torch.equal(layer(x), before) and len(calls) == 2
    with torch.inference_mode():
        layer(x)
    layer.double().float()
    layer(x)
    assert len(calls) == 3
    # what PyTorch does not count, and how docs/fp8.md says it
    layer.weight.data.mul_(2)
    torch.autograd.graph.increment_version(layer.weight)
    layer(x)
    assert len(calls) == 4
    layer.weight.requires_grad_()
    layer(x).sum().backward()
    assert layer.weight.grad is not None and len(calls) == 4


@every_recipe
def test_a_weight_at_the_address_of_an_earlier_one(recipe: Recipe) -> None:
    """As the allocator gives freed memory again: version and address of both are equal."""
    layer, memory, x = _layer(recipe).eval(), np.ones((40, 33), np.float32), torch.randn(6, 33)

    def result() -> Tensor:
        layer.weight = nn.Parameter(torch.from_numpy(memory), requires_grad=False)
        return layer(x)

    before = result()
    memory *= 3
    after = result()
    assert not torch.equal(after, before)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), after) and torch.equal(copy.deepcopy(layer)(x), after)


def test_delayed_scales_do_not_move_the_frozen_weight() -> None:
    """A resumed run quantizes it anew, with scales that were not there at first: the same bits."""
    layer = _layer(TensorRecipe(scale="delayed", history=2, margin=3))
    x = torch.randn(6, 33)
    for _ in range(3):
        layer(x).sum().backward()
        update_scales(layer)
    again = copy.deepcopy(layer)
    assert again.fp8 is not None and layer.fp8 is not None
    again.fp8.copies = None
    layer.eval(), again.eval()
    assert torch.equal(layer(x), again(x)) and layer.fp8.fp8_scale[0] > 0


@every_recipe
def test_nothing_of_x_is_saved_for_the_frozen_product(recipe: Recipe) -> None:
    """x once, for the adapter; an FP8 copy would be one byte an element more."""
    layer = _layer(recipe)
    x = torch.randn(256, 33, requires_grad=True)
    layer(x)  # the weight's copies are there
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    large = [t for t in saved if t.numel() >= x.numel()]
    assert large and all(t.data_ptr() == x.data_ptr() for t in large)


@every_recipe
def test_without_lora_is_the_fp8_base(recipe: Recipe) -> None:
    layer = _layer(recipe).eval()
    plain = nn.Linear(33, 40)
    plain.load_state_dict({"weight": layer.weight, "bias": layer.bias})
    base = nn.Sequential(plain).eval()
    quantize_model(base, recipe)
    x = torch.randn(7, 33)
    with without_lora(layer):
        found = layer(x)
    assert isinstance(plain, FP8Linear) and torch.equal(found, base(x))


@every_recipe
def test_undone_merged_and_saved(recipe: Recipe) -> None:
    layer = _layer(recipe)
    model, x = nn.Sequential(layer), torch.randn(7, 33)
    plain = copy.deepcopy(model)
    dequantize_model(plain)
    added = model.state_dict().keys() - plain.state_dict().keys()
    assert added == ({f"0.fp8.{n}" for n in quant_linear.BUFFERS} if recipe.is_delayed else set())
    model.load_state_dict(plain.state_dict(), strict=not recipe.is_delayed)
    assert lora_layers(plain)["0"].fp8 is None
    expected = F.linear(x, layer.merged_weight(), layer.bias)
    torch.testing.assert_close(plain(x), expected, rtol=1e-5, atol=1e-5)
    merge_lora(model)
    assert type(model[0]) is nn.Linear and torch.equal(model(x), expected)


def test_dropout_is_the_adapters_alone() -> None:
    layer = _layer(Row(), dropout=0.5)
    x = torch.randn(64, 33)
    assert not torch.equal(layer(x), layer(x))
    nn.init.zeros_(layer.lora_B)
    assert torch.equal(layer(x), layer(x))


def test_transforms_are_refused_by_name() -> None:
    """Their tensors have no address, by which the kept weight is known."""
    layer, x = _layer(Row()), torch.randn(6, 33)
    weights = torch.stack([layer.weight.detach()] * 2)

    def call(weight: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(layer, {"weight": weight}, (x,))
        return found

    with pytest.raises(NotImplementedError, match="fp8_linear: vmap is not implemented"):
        torch.vmap(call)(weights)
    with pytest.raises(NotImplementedError, match="fp8_linear: forward-mode differentiation is not implemented"):
        torch.func.jvp(call, (weights[0],), (weights[1],))


@pytest.mark.slow
def test_compiled() -> None:
    layer = _layer(Row())
    x = torch.randn(6, 33, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for found, expected in zip(_results(compiled, layer, x), _results(layer, layer, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_operands_are_measured() -> None:
    model = nn.Sequential(_layer(Row()))
    with watch(model) as readings:
        model(torch.randn(6, 33)).sum().backward()
    assert {(r.layer, r.role) for r in readings.list()} == {("0", "x"), ("0", "weight"), ("0", "dy")}


def test_keep_and_an_unknown_name() -> None:
    model = powertrain.lora(nn.Sequential(nn.Linear(33, 40), nn.Linear(40, 8)), rank=2)
    with pytest.raises(ValueError, match="keep must name layers"):
        quantize_model(model, Row(), keep=["nowhere"])
    assert all(layer.fp8 is None for layer in lora_layers(model).values())
    report = quantize_model(model, Row(), keep=["1"])
    assert [p.name for p in report.quantized] == ["0"] and "keep has '1'" in report.left[0].why
