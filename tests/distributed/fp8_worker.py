"""Checks of ranks (check_ranks.py): FP8 layers sharded by FSDP2, against one process."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from powertrain.compat.transformer_engine import pytorch as te
from powertrain.compat.transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling
from powertrain.quant import Block, Row, quantize_model, shared_weights, update_scales
from powertrain.quant import Tensor as TensorRecipe
from powertrain.quant.recipe import Recipe
from tests.distributed import fp8_wire_checks

CHECKS: dict[str, Callable[[DeviceMesh], None]] = {}
RECIPES = {
    "tensor": TensorRecipe(),
    "delayed": TensorRecipe(scale="delayed", history=3),
    "row": Row(),
    "block": Block(),
}


def _model() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(*(nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24)) for _ in range(2)))


def _grads(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    y = model(x)
    y.float().square().mean().backward()
    grads = [p.grad for p in model.parameters()]
    return [y.detach(), *(g.full_tensor() if isinstance(g, DTensor) else g for g in grads)]


def _sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for part in (*model, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return model


def _check(name: str, recipe: Recipe) -> None:
    def check(mesh: DeviceMesh) -> None:
        """Both ranks read the same rows: their mean gradient is one process's. Before `fully_shard` and after it."""
        x = torch.randn(10, 24, generator=torch.Generator().manual_seed(4)).bfloat16()
        one = _model().bfloat16()
        quantize_model(one, recipe)
        first = _model()
        quantize_model(first, recipe)
        for model in (_sharded(first, mesh), _quantized(_sharded(_model(), mesh), recipe)):
            ours, right = copy.deepcopy(one), None
            for _ in range(2):
                right, found = _grads(ours, x), _grads(model, x)
                with shared_weights(model):  # quantizes them each time: they are sharded
                    again = _grads(model, x)
                for a, b, c in zip(found, right, again, strict=True):
                    assert torch.equal(a.float(), b.float()) and torch.equal(a, c)
                update_scales(ours)
                update_scales(model, mesh.get_group())

    CHECKS[name] = check


def _quantized(model: nn.Module, recipe: Recipe) -> nn.Module:
    report = quantize_model(model, recipe)
    assert len(report.quantized) == 4, str(report)
    return model


for _name, _recipe in RECIPES.items():
    _check(_name, _recipe)


def scales_agree(mesh: DeviceMesh) -> None:
    """Ranks that see other data have the same delayed scales, of the largest values of both."""
    layer = nn.Sequential(nn.Linear(24, 24))
    quantize_model(layer, RECIPES["delayed"])
    layer(torch.full((2, 24), 1.0 + 6 * mesh.get_rank())).sum().backward()
    update_scales(layer, mesh.get_group())
    assert layer[0].fp8_amax_history[0, 0] == 7.0 and layer[0].fp8_scale[0] == 64.0


CHECKS["scales_agree"] = scales_agree


def te_scales_agree(mesh: DeviceMesh) -> None:
    """TransformerEngine's reduce_amax: scales of the largest values of both ranks, or of this one; it may change."""
    layer = te.Linear(8, 6, device="cpu")
    for reduce, expected in ((True, 2.0), (False, 1.0 + mesh.get_rank())):
        for _ in range(3):
            with te.autocast(recipe=DelayedScaling(reduce_amax=reduce, amax_history_len=2)):
                layer(torch.full((2, 8), 1.0 + mesh.get_rank())).sum().backward()
        assert layer.fp8.fp8_amax_history[0, 0] == expected, (reduce, layer.fp8.fp8_amax_history)
        assert layer.fp8.fp8_scale[0] == 448 / expected


def te_modules_sharded(mesh: DeviceMesh) -> None:
    """Both ranks read the same rows: the mean gradient of TransformerEngine's modules is one process's."""
    x = torch.randn(10, 24, generator=torch.Generator().manual_seed(4)).bfloat16()

    def made(dtype: torch.dtype) -> nn.Sequential:
        torch.manual_seed(3)
        options = {"device": "cpu", "params_dtype": dtype}
        return nn.Sequential(te.LayerNormMLP(24, 40, activation="swiglu", **options), te.Linear(24, 24, **options))

    for recipe in (DelayedScaling(amax_history_len=2), Float8BlockScaling()):
        one, model = made(torch.bfloat16), _sharded(made(torch.float32), mesh)
        for _ in range(3):
            with te.autocast(recipe=recipe):
                right, found = _grads(one, x), _grads(model, x)
            assert all(torch.equal(a.float(), b.float()) for a, b in zip(found, right, strict=True))


CHECKS |= {"te_scales_agree": te_scales_agree, "te_modules_sharded": te_modules_sharded, **fp8_wire_checks.CHECKS}
