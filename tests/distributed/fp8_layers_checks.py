"""Checks of layers_worker: FP8 products of layers sharded over tensor ranks, whose rows travel in FP8."""

import contextlib
import io
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from powertrain.nn.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, columns
from powertrain.parallel.overlap import Overlap
from powertrain.quant import Block, Row, dequantize_model, quantize_model
from powertrain.quant import Tensor as TensorRecipe
from powertrain.quant.recipe import Recipe
from tests.parallel.fp8_products import check as check_products

CHECKS: dict[str, Callable[[DeviceMesh], None]] = {}


def _check(function: Callable[[DeviceMesh], None]) -> Callable[[DeviceMesh], None]:
    CHECKS["fp8_" + function.__name__] = function
    return function


@_check
def products_over_processes(mesh: DeviceMesh) -> None:
    """With the transports' own choice afterwards: the planner is this process's."""
    overlap = Overlap(mesh)
    chosen = overlap.planner._chosen
    check_products(overlap)
    overlap.planner.choices.clear()
    overlap.planner._chosen = chosen  # type: ignore[method-assign]


def _spread(mesh: DeviceMesh, recipe: Recipe) -> tuple[list[nn.Linear], nn.ModuleList]:
    """gate, up and down, whole and spread, with the same weights of whole numbers."""
    g = torch.Generator().manual_seed(3)
    whole = [nn.Linear(128, 256, dtype=torch.bfloat16), nn.Linear(128, 256, bias=False, dtype=torch.bfloat16)]
    whole.append(nn.Linear(256, 128, dtype=torch.bfloat16))
    for layer in whole:
        for p in layer.parameters():
            p.data.copy_(torch.randint(-20, 21, p.shape, generator=g))
    kinds = (ColumnParallelLinear, ColumnParallelLinear, RowParallelLinear)
    spread = nn.ModuleList(kind.from_linear(layer, mesh) for kind, layer in zip(kinds, whole, strict=True))
    for model in (nn.ModuleList(whole), spread):
        report = quantize_model(model, recipe, keep=())
        assert len(report.quantized) == 3 and not report.left, report
    return whole, spread


@_check
def layers(mesh: DeviceMesh) -> None:
    """Column-parallel outputs and gradients of weights have the bits of one rank's layer; a row-parallel layer's are
    sums of two parts. Undone, the layers compute as before."""
    rank, size = mesh.get_local_rank(), mesh.size()
    for recipe in (TensorRecipe(), Row(), Block()):
        whole, spread = _spread(mesh, recipe)
        g = torch.Generator().manual_seed(4)
        x = torch.randint(-40, 41, (128 * size, 128), generator=g).bfloat16()
        mine = x.chunk(size)[rank].clone().requires_grad_()
        found = columns(mine, *spread[:2])
        features = slice(rank * 256 // size, (rank + 1) * 256 // size)
        wanted = [layer(x) for layer in whole[:2]]
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other[:, features]), str(recipe)
        dy = torch.randint(-9, 10, wanted[0].shape, generator=g).bfloat16()
        torch.autograd.backward(wanted, [dy, dy])
        torch.autograd.backward(found, [dy[:, features]] * 2)
        for one, other in zip(spread[:2], whole[:2], strict=True):
            for p, q in zip(one.parameters(), other.parameters(), strict=True):
                assert isinstance(p.grad, DTensor) and q.grad is not None
                assert torch.equal(p.grad.full_tensor(), q.grad), str(recipe)
        hidden = torch.randint(-40, 41, (128 * size, 256), generator=g).bfloat16()
        y = spread[2](hidden[:, features])
        expected = whole[2](hidden).chunk(size)[rank]
        assert (y - expected).norm() <= 0.02 * expected.norm(), str(recipe)
        assert f"fp8={recipe}" in repr(spread[0])
        dequantize_model(spread)
        plain = [nn.functional.linear(x, layer.weight)[:, features] for layer in whole[1:2]]
        assert torch.equal(columns(mine, spread[1])[0], plain[0]) and "fp8" not in repr(spread[1])


@_check
def layers_that_stay_and_that_differ(mesh: DeviceMesh) -> None:
    whole, spread = _spread(mesh, Row())
    dequantize_model(spread)
    report = quantize_model(spread, Row(), keep=["1"])
    assert [part.name for part in report.quantized] == ["0", "2"]
    x = torch.randint(-40, 41, (6, 128)).bfloat16()
    mixed = columns(x, *spread[:2])
    alone = [columns(x, layer)[0] for layer in spread[:2]]
    assert all(torch.equal(a, b) for a, b in zip(mixed, alone, strict=True))
    dequantize_model(spread)
    for recipe, layers, why in (
        (TensorRecipe(scale="delayed"), spread, "no delayed scaling"),
        (Row(), nn.ModuleList([_without_sequences(layer, mesh) for layer in whole[:1]]), "without sequence"),
    ):
        left = quantize_model(layers, recipe, keep=()).left
        assert len(left) == len(layers) and all(why in part.why for part in left)


def _without_sequences(layer: nn.Linear, mesh: DeviceMesh) -> nn.Module:
    plain = nn.Linear(layer.in_features, layer.out_features, dtype=torch.bfloat16)
    made: nn.Module = ColumnParallelLinear.from_linear(plain, mesh, sequence_parallel=False)
    return made


@_check
def compiled(mesh: DeviceMesh) -> None:
    _compiled(mesh, Row())


def compiled_by_other_recipes(mesh: DeviceMesh) -> None:
    _compiled(mesh, TensorRecipe(), Block())


SLOW = {"fp8_compiled_by_other_recipes": compiled_by_other_recipes}


def _compiled(mesh: DeviceMesh, *recipes: Recipe) -> None:
    """fullgraph, the same bits; and so with recomputation."""
    for recipe in recipes:
        _, spread = _spread(mesh, recipe)

        def both(x: Tensor, up: nn.Module = spread[1], down: nn.Module = spread[2]) -> Tensor:
            y: Tensor = down(up(x))
            return y

        x = torch.randint(-9, 10, (128, 128)).bfloat16()
        found = []
        with contextlib.redirect_stderr(io.StringIO()):
            compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
        for call in (both, compiled, partial(checkpoint, both, use_reentrant=False)):
            leaf = x.clone().requires_grad_()
            y = call(leaf)
            y.float().square().mean().backward()
            found.append([y, leaf.grad, *(p.grad.to_local().clone() for p in spread[1:].parameters())])
            spread.zero_grad()
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True)), str(recipe)
