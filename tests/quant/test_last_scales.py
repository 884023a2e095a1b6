"""Current scaling's last scales in layers: the bits of two passes whatever is done to them, not saved, counted."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from powertrain.ops.fp8.linear import fp8_linear
from powertrain.quant import FP8Linear, Row, dequantize_model, quantize_model, shared_weights
from powertrain.quant import Tensor as TensorRecipe


class TwoPasses(nn.Module):
    """The layers of a model by calls without last scales."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = copy.deepcopy(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(fp8_linear(x, layer.weight, layer.bias))
        return x


class Layers(nn.Module):
    def __init__(self, layers: nn.Sequential, recompute: bool = False) -> None:
        super().__init__()
        self.layers, self.recompute = layers, recompute

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(self._one, layer, x, use_reentrant=False) if self.recompute else self._one(layer, x)
        return x

    @staticmethod
    def _one(layer: nn.Module, x: Tensor) -> Tensor:
        return F.gelu(layer(x))


def _models(recompute: bool = False) -> tuple[Layers, TwoPasses]:
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 24, bias=False))
    exact = TwoPasses(layers)
    quantize_model(layers, TensorRecipe())
    return Layers(layers, recompute), exact


def _step(model: nn.Module, sizes: tuple[float, ...], together: bool = False) -> list[Tensor]:
    """One step of a micro-batch for each size; together: all forwards before all backwards."""
    model.zero_grad()
    x = torch.linspace(-1, 1, 6 * 24).view(6, 24).requires_grad_()
    losses = []
    for size in sizes:
        loss = model(x * size).square().sum()
        losses.append(loss)
        if not together:
            loss.backward()
    if together:
        for loss in losses:
            loss.backward()
    return [*(loss.detach() for loss in losses), x.grad, *(p.grad.clone() for p in model.parameters())]


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_micro_batches_of_any_magnitude(recompute: bool, together: bool) -> None:
    model, exact = _models(recompute)
    for sizes in ((1.0, 1.0), (2.0**20, 2.0**-20), (0.0, 1e30, 1.0)):
        found, right = _step(model, sizes, together), _step(exact, sizes, together)
        assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(found, right, strict=True))
        for p, q in zip(model.parameters(), exact.parameters(), strict=True):
            p.data *= 3
            q.data *= 3
    # 7 micro-batches; x is quantized again where its forward is
    last = model.layers[0].fp8_last
    assert last[:, 2].tolist() == [14 if recompute else 7, 14 if recompute else 7, 7]
    assert 0 < last[0, 3] < last[0, 2] and 3 <= last[1, 3] < last[1, 2]


@pytest.mark.parametrize("together", [False, True])
def test_compiled(together: bool) -> None:
    """Forward keeps last scales, backward writes none: autograd would refuse one whose buffer has changed since."""
    model, exact = _models()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for sizes in ((1.0, 4.0), (2.0**20, 1.0)):
        assert _same(_step(compiled, sizes, together), _step(exact, sizes, together))
    assert model.layers[0].fp8_last[:, 2].tolist() == [4, 4, 0]


def test_shared_and_frozen_weights() -> None:
    model, exact = _models()
    with shared_weights(model):
        assert _same(_step(model, (1.0, 64.0)), _step(exact, (1.0, 64.0)))
    assert model.layers[0].fp8_last[:, 2].tolist() == [2, 1, 2]
    model.requires_grad_(False)
    exact.requires_grad_(False)
    for layer in model.layers:
        layer.keeps = True
    for size in (1.0, 3.0):
        assert torch.equal(model(torch.ones(2, 24) * size), exact(torch.ones(2, 24) * size))
    assert model.layers[0].fp8_last[:, 2].tolist() == [4, 2, 2]


def test_evaluation_and_inference_mode() -> None:
    model, exact = _models()
    model.eval()
    x = torch.randn(3, 24)
    with torch.inference_mode():
        assert torch.equal(model(x), exact(x)) and torch.equal(model(x * 32), exact(x * 32))
    with torch.no_grad():
        assert torch.equal(model(x), exact(x))
    layers = nn.Sequential(nn.Linear(24, 8))
    with torch.inference_mode():
        quantize_model(layers, TensorRecipe())
    # memory made in inference mode could not be written here
    layers(x).sum().backward()
    assert layers[0].fp8_last[:, 2].tolist() == [1, 1, 1]


def test_they_are_not_saved_and_move_with_the_layer() -> None:
    model, _ = _models()
    layer, names = model.layers[0], {"weight", "bias"}
    _step(model, (1.0,))
    assert set(layer.state_dict()) == names and set(dict(layer.named_buffers())) == {"fp8_last"}
    before = layer.fp8_last.clone()
    assert torch.equal(copy.deepcopy(model).layers[0].fp8_last, before)
    model.bfloat16()
    assert layer.fp8_last.dtype is torch.int32 and torch.equal(layer.fp8_last, before)
    model.to_empty(device="cpu")
    assert torch.equal(layer.fp8_last, before)
    with torch.device("meta"):
        other = nn.Sequential(nn.Linear(24, 8))
    quantize_model(other, TensorRecipe())
    other.to_empty(device="cpu")
    assert other[0].fp8_last.dtype is torch.int32 and not other[0].fp8_last.any()
    other[0].set_recipe(Row(), torch.device("cpu"))
    assert not dict(other[0].named_buffers())
    dequantize_model(model)
    assert type(layer) is nn.Linear and not dict(layer.named_buffers()) and not layer._non_persistent_buffers_set


def test_recipes_without_them() -> None:
    for recipe in (TensorRecipe(power_of_two=False), TensorRecipe(scale="delayed"), Row()):
        layers = nn.Sequential(nn.Linear(8, 8))
        quantize_model(layers, recipe)
        assert isinstance(layers[0], FP8Linear) and "fp8_last" not in dict(layers[0].named_buffers())
        assert layers[0].repeats(0) is None
