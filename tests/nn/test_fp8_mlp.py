"""GatedMLP with FP8 layers: one op where the layers are plain, else the layers themselves; the same bits both ways."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import powertrain.nn.mlp
from powertrain.nn.mlp import GatedMLP
from powertrain.ops.fp8.operands import GRANULARITIES
from powertrain.ops.fp8.quantize import fp8_quantize
from powertrain.quant import Block, Row, quantize_model, shared_weights, update_scales, watch
from powertrain.quant import Tensor as TensorRecipe
from powertrain.quant.gathered_weight import GatheredWeight

RECIPES = [TensorRecipe(), TensorRecipe(scale="delayed", history=3), Row(), Block(), TensorRecipe(format="e4m3")]


def _mlp(recipe: Any, bias: bool = False) -> GatedMLP:
    torch.manual_seed(1)
    mlp = GatedMLP(33, 40, bias=bias).bfloat16()
    assert len(quantize_model(mlp, recipe).quantized) == 3
    return mlp


def _input(scale: float = 1.0) -> Tensor:
    x = torch.randn(2, 9, 33, generator=torch.Generator().manual_seed(2)) * scale
    return x.bfloat16().requires_grad_()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of the one op."""
    found: list[Any] = []
    op = powertrain.nn.mlp.fp8_mlp
    monkeypatch.setattr(powertrain.nn.mlp, "fp8_mlp", lambda *args, **rest: (found.append(args), op(*args, **rest))[1])
    return found


def _steps(mlp: GatedMLP, run: Callable[[GatedMLP, Tensor], Tensor]) -> list[Tensor]:
    """Results of three steps with magnitudes that grow, and every buffer after them."""
    found = []
    for step in range(3):
        x = _input(2.0**step)
        y = run(mlp, x)
        y.backward(torch.ones_like(y) * 0.01 * 2**step)
        found += [y.detach(), x.grad, *(p.grad.clone() for p in mlp.parameters() if p.grad is not None)]
        mlp.zero_grad()
        update_scales(mlp)
    return found + [buffer.clone() for buffer in mlp.buffers()]


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _again(mlp: GatedMLP, x: Tensor) -> Tensor:
    return checkpoint(mlp, x, use_reentrant=False)


def _shared(mlp: GatedMLP, x: Tensor) -> Tensor:
    with shared_weights(mlp):
        return mlp(x)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r}-{r.format}")
def test_bits_of_the_layers(recipe: Any, calls: list[Any]) -> None:
    """Plain, recomputed and with shared weights, beside layers that a hook looks at; frozen weights too."""
    for frozen in ((), ("gate",), ("up", "down")):
        mlp = _mlp(recipe)
        for name in frozen:
            mlp.get_submodule(name).requires_grad_(False)
        apart = copy.deepcopy(mlp)
        apart.down.register_forward_hook(lambda *_: None)
        exact = _steps(apart, lambda m, x: m(x))
        assert not calls
        for run in (lambda m, x: m(x), _again, _shared):
            assert _same(_steps(copy.deepcopy(mlp), run), exact)
        assert len(calls) >= 9
        calls.clear()


def test_main_grad() -> None:
    mlp = _mlp(TensorRecipe())
    for p in mlp.parameters():
        p.main_grad = torch.ones_like(p, dtype=torch.float32)
    mlp(_input()).sum().backward()
    assert all(p.grad is None and not (p.main_grad == 1).all() for p in mlp.parameters())


@pytest.mark.parametrize("recipe", RECIPES[:4], ids=str)
def test_weights_gathered_in_fp8(recipe: Any, calls: list[Any]) -> None:
    """Whose copies are given without the transposed one, and magnitudes recorded: as the layers apart."""
    mlp = _mlp(recipe)
    for layer in (mlp.gate, mlp.up, mlp.down):
        weight = layer._parameters.pop("weight").detach()
        copies = fp8_quantize(weight, GRANULARITIES[recipe.by][1], columns=False, measure=True)
        layer.weight = GatheredWeight(copies.rows, copies.amax, weight.shape, weight.dtype)
    found = []
    for hooks in (0, 1):
        for _ in range(hooks):
            mlp.up.register_forward_hook(lambda *_: None)
        for buffer in mlp.buffers():
            buffer.zero_()
        x = _input()
        y = mlp(x)
        y.backward(torch.ones_like(y))
        found.append([y.detach(), x.grad, *(buffer.clone() for buffer in mlp.buffers())])
    assert _same(*found) and len(calls) == 1


def _hook(mlp: GatedMLP) -> None:
    mlp.up.register_forward_pre_hook(lambda *_: None)


def _forward(mlp: GatedMLP) -> None:
    mlp.gate.forward = lambda x, layer=mlp.gate: type(layer).forward(layer, x)


def _recipe(mlp: GatedMLP) -> None:
    mlp.down.set_recipe(Row(), torch.device("cpu"))


def _mode(mlp: GatedMLP) -> None:
    mlp.down.eval()


def _nothing(mlp: GatedMLP) -> None:
    pass


# a change, whether the recipe is delayed, and whether the op still serves
@pytest.mark.parametrize(
    "change, delayed, served",
    [(_hook, False, False), (_forward, False, False), (_recipe, False, False), (_mode, True, False),
     (_mode, False, True), (_nothing, True, True)],
)  # fmt: skip
def test_when_it_serves(change: Any, delayed: bool, served: bool, calls: list[Any]) -> None:
    mlp = _mlp(TensorRecipe(scale="delayed" if delayed else "current"))
    change(mlp)
    assert mlp(_input()).shape == (2, 9, 33) and bool(calls) == served


def test_biases_autocast_watching_and_other_layers_go_apart(calls: list[Any]) -> None:
    _mlp(Row(), bias=True)(_input())
    mlp = _mlp(Row())
    with torch.autocast("cpu", torch.bfloat16):
        mlp(_input())
    with watch(mlp):
        mlp(_input())
    quantized = _mlp(Row())
    quantized.up = nn.Linear(33, 40, bias=False, dtype=torch.bfloat16)
    quantized(_input())
    assert not calls
