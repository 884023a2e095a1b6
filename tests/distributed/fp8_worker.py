"""`python -m tests.distributed.fp8_worker OUT`, one rank: FP8 layers sharded by FSDP2, against one process."""

import copy
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from powertrain.quant import Block, Row, quantize_model, shared_weights, update_scales
from powertrain.quant import Tensor as TensorRecipe
from powertrain.quant.recipe import Recipe
from tests.distributed.layers_worker import run_checks

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

if __name__ == "__main__":
    run_checks(CHECKS, sys.argv[1])
