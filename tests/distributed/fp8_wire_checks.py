"""Checks of fp8_worker: weights gathered in FP8 give the bits of weights gathered in bfloat16."""

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.utils.checkpoint import checkpoint

from powertrain.quant import (
    Block,
    FP8Linear,
    Row,
    dequantize_model,
    fp8_all_gather,
    quantize_model,
    update_scales,
    watch,
)
from powertrain.quant import Tensor as TensorRecipe
from powertrain.quant.gathered_weight import GatheredWeight
from powertrain.quant.linear import LAST
from powertrain.quant.recipe import Recipe
from powertrain.quant.wire import wire_bytes

CHECKS: dict[str, Callable[[DeviceMesh], None]] = {}
RECIPES = {
    "tensor": TensorRecipe(),
    "tensor_of_any_scale": TensorRecipe(power_of_two=False),
    "delayed": TensorRecipe(scale="delayed", history=3),
    "row": Row(),
    "block": Block(),
}
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
# K of no whole 16 elements; N: whole blocks, blocks of which the second rank's is partial, fewer rows than ranks want
K, N = 35, (256, 255, 45)


class _Counting(DefaultAllGather):
    """FSDP's all-gather, with the bytes of its results."""

    bytes_ = 0

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.bytes_ += output_tensor.nbytes
        return super().__call__(output_tensor, input_tensor, group, async_op)


def _check(function: Callable[[DeviceMesh], None]) -> Callable[[DeviceMesh], None]:
    CHECKS["wire_" + function.__name__] = function
    return function


class _Layers(nn.Module):
    """x + every layer's mean over columns: layers of any N one after the other."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(K, n, bias=n != 255)) for n in N)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
            x = x + y.tanh().mean(-1, keepdim=True)
        return x


def _made(
    mesh: DeviceMesh, recipe: Recipe, wire: bool, *, policy: MixedPrecisionPolicy = BF16, recompute: bool = False,
    change: Callable[[nn.Module], None] = lambda model: None,
) -> nn.Module:  # fmt: skip
    model = _Layers(recompute)
    change(model)
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    quantize_model(model, recipe)
    if wire:
        report = fp8_all_gather(model)
        assert len(report.quantized) == (2 if recipe.by == "block" else 3), str(report)
        assert recipe.by != "block" or "23 of its 45 rows, which must be a multiple of 128" in str(report)
    return model


def _input(seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(10, K, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _steps(model: Any, mesh: DeviceMesh, first: int = 0, count: int = 3, optimizer: Any = None) -> list[Tensor]:
    """Outputs, gradients, weights and amaxes of steps of two micro-batches each, of other data on each rank."""
    optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    seen = []
    for step in range(first, first + count):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            y = model(_input(100 * step + 10 * micro + mesh.get_rank()))
            y.float().square().mean().backward()
            seen.append(y.detach())
        seen += [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        update_scales(model, dist.group.WORLD)
        seen += [p.full_tensor().detach() for p in model.parameters()]
        # last scales count quantizations of weights, which are made before the gather here
        seen += [b.clone() for name, b in model.named_buffers() if not name.endswith(LAST)]
    return seen


def _same(found: list[Tensor], right: list[Tensor]) -> None:
    assert len(found) == len(right)
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


def _steps_are_equal(recipe: Recipe) -> Callable[[DeviceMesh], None]:
    def check(mesh: DeviceMesh) -> None:
        """Three steps of two micro-batches; one with recomputed layers, of which some weights want no gradient."""
        frozen = {"recompute": True, "change": _freeze}
        for count, options in ((3, {}), (1, frozen)):
            one, other = (_made(mesh, recipe, wire, **options) for wire in (False, True))
            _same(_steps(other, mesh, count=count), _steps(one, mesh, count=count))

    return check


def _freeze(model: Any) -> None:
    model.layers[0][0].weight.requires_grad_(False)
    model.layers[2].requires_grad_(False)


CHECKS |= {f"wire_{name}": _steps_are_equal(recipe) for name, recipe in RECIPES.items()}


@_check
def bytes_are_halved(mesh: DeviceMesh) -> None:
    """Of each layer alone: its weight in FP8 with scales, its bias in bfloat16."""
    for recipe in RECIPES.values():
        gathered = {}
        for wire in (False, True):
            model, counts = _made(mesh, recipe, wire), []
            for layer in model.layers:
                counts.append(_Counting())
                layer.set_custom_all_gather(counts[-1])
            model(_input(1))
            gathered[wire] = [count.bytes_ for count in counts]
        rest = [0 if n == 255 else 2 * (n + n % 2) for n in N]
        before = [2 * (n + n % 2) * K + more for n, more in zip(N, rest, strict=True)]
        after = [wire_bytes(n, K, recipe, 2) + more for n, more in zip(N, rest, strict=True)]
        if recipe.by == "block":
            after[2] = before[2]
        assert gathered == {False: before, True: after}, gathered


@_check
def other_meshes_and_dtypes(mesh: DeviceMesh) -> None:
    """HSDP; float32 weights without a policy; weights that stay gathered; magnitudes of bfloat16's subnormals, NaN."""
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    _same(*(_steps(_made(grid, Row(), wire), mesh) for wire in (True, False)))
    x = _input(3 + mesh.get_rank(), torch.float32)
    for change in (_tiny, _not_a_number):
        for recipe in (TensorRecipe(), TensorRecipe(power_of_two=False), Row(), Block()):
            models = [_made(mesh, recipe, wire, policy=MixedPrecisionPolicy(), change=change) for wire in (True, False)]
            found = [[bits(t) for t in _grads(model, x)] for model in models]
            _same(*found)


def bits(x: Tensor) -> Tensor:
    """NaN equals NaN."""
    return torch.where(x.isnan(), 12345.0, x)


def _tiny(model: Any) -> None:
    with torch.no_grad():
        for layer in model.layers:
            layer[0].weight.mul_(1e-38)


def _not_a_number(model: Any) -> None:
    with torch.no_grad():
        model.layers[0][0].weight[-1, 3] = torch.nan
        model.layers[1][0].weight[0, 0] = -torch.inf


def _grads(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    y = model(x)
    y.square().mean().backward()
    return [y.detach(), *(p.grad.full_tensor() for p in model.parameters())]


@_check
def checkpoints_have_plain_tensors(mesh: DeviceMesh) -> None:
    """A run saved after two steps goes on with the same bits, with the wire and without, and loads in one process."""
    for recipe in (TensorRecipe(scale="delayed", history=3), Row()):
        model = _made(mesh, recipe, True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        _steps(model, mesh, 0, 2, optimizer)
        file = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict()), file)
        state, _ = copy.deepcopy((model.state_dict(), 0))
        assert all(type(t) is Tensor or not t._local_tensor.__dict__ for t in state.values())
        whole = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}
        right = _steps(model, mesh, 2, 1, optimizer)
        for wire in (True, False):
            again = _made(mesh, recipe, wire)
            if wire:
                # another forward before: FSDP keeps memory of the first gather
                again(_input(0))
            file.seek(0)
            weights, moments = torch.load(file, weights_only=False)
            again.load_state_dict(weights)
            fresh = torch.optim.AdamW(again.parameters(), lr=0.01)
            fresh.load_state_dict(moments)
            _same(_steps(again, mesh, 2, 1, fresh), right)
        alone = _Layers()
        quantize_model(alone, recipe)
        alone.load_state_dict(whole)
        assert all(torch.equal(p, whole[name]) for name, p in alone.named_parameters())


@_check
def parameters_that_are_replaced(mesh: DeviceMesh) -> None:
    """Made on meta and materialized after; assigned from a state dict; of fewer rows on the last rank."""
    right = _made(mesh, Row(), True)
    with torch.device("meta"):
        model = _Layers()
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=BF16)
    quantize_model(model, Row())
    assert len(fp8_all_gather(model).quantized) == 3
    model.to_empty(device="cpu")
    model.load_state_dict(right.state_dict())
    x = _input(5)
    _same(_grads(model, x), _grads(right, x))
    assert _gathers(model) == 3
    model.load_state_dict({name: t.clone() for name, t in right.state_dict().items()}, assign=True)
    _same(_grads(model, x), _grads(right, x))
    assert _gathers(model) == 3


def _gathers(model: Any) -> int:
    """Layers whose weight was gathered in FP8, seen from inside a forward."""
    found = []
    handles = [
        layer[0].register_forward_hook(lambda layer, *_: found.append(isinstance(layer.weight, GatheredWeight)))
        for layer in model.layers
    ]
    model(_input(0))
    for handle in handles:
        handle.remove()
    for layer in model.layers:
        layer.reshard()
    return sum(found)


@_check
def it_is_undone(mesh: DeviceMesh) -> None:
    """dequantize_model gathers as before; a model that has run in bfloat16 may change to FP8, and back, and again."""
    plain, model = _Layers(), _Layers()
    for each in (plain, model):
        for part in (*each.layers, each):
            fully_shard(part, mesh=mesh, mp_policy=BF16, reshard_after_forward=False)
    x, exact = _input(6), _grads(plain, _input(6))
    _same(_grads(model, x), exact)
    for _ in range(2):
        quantize_model(model, TensorRecipe())
        right = _grads(model, x)
        assert len(fp8_all_gather(model).quantized) == len(fp8_all_gather(model).quantized) == 3
        _same(_grads(model, x), right)
        assert _gathers(model) == 3
        dequantize_model(model)
        assert _gathers(model) == 0 and not any(isinstance(m, FP8Linear) for m in model.modules())
        _same(_grads(model, x), exact)


@_check
def weights_inside_a_forward(mesh: DeviceMesh) -> None:
    """Reading gives the rounded values, writing is refused, and so is autocast; a watch leaves weights out."""
    model: Any = _made(mesh, Row(), True)
    layer = model.layers[0]
    full = layer[0].weight.full_tensor().bfloat16()
    layer.unshard()
    weight = layer[0].weight
    assert isinstance(weight, GatheredWeight) and weight.dtype is torch.bfloat16 and weight.shape == (256, K)
    assert (weight.float() - full.float()).norm() < 0.04 * full.float().norm() and "GatheredWeight" in repr(weight)
    try:
        weight.data.zero_()
        raise AssertionError("a gathered weight was changed")
    except NotImplementedError as error:
        assert "cannot be changed" in str(error)
    layer.reshard()
    try:
        with torch.autocast("cpu", torch.bfloat16):
            model(_input(0))
        raise AssertionError("autocast was not refused")
    except ValueError as error:
        assert "fp8_linear: x must have the dtype of weights gathered in FP8, bfloat16, without autocast" in str(error)
    model = _made(mesh, Row(), True)
    with watch(model) as readings:
        model(_input(0)).float().sum().backward()
    assert {reading.role for reading in readings.list()} == {"x", "dy"}


@_check
def layers_that_stay(mesh: DeviceMesh) -> None:
    """Each with its reason; their bits are those of a gather in bfloat16, as nothing changes."""
    model: Any = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8))
    one = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(model[0], mesh=one["shard"])
    quantize_model(model, Row())
    assert str(fp8_all_gather(model)).splitlines() == [
        "0.0: stays, one rank has all of it: nothing is gathered",
        "1: stays, FSDP2 does not shard its weight",
    ]
    tied: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    tied[1].weight = tied[0].weight
    fully_shard(tied, mesh=mesh)
    quantize_model(tied, Row())
    assert "0: stays, its weight is another module's too" in str(fp8_all_gather(tied))
    columns: Any = fully_shard(nn.Sequential(nn.Linear(8, 8, bias=False)), mesh=mesh, shard_placement_fn=_by_columns)
    quantize_model(columns, Row())
    assert "0: stays, its weight is not sharded by rows alone" in str(fp8_all_gather(columns))
    try:
        fp8_all_gather(nn.Linear(2, 2))
        raise AssertionError("a model without FP8 layers was taken")
    except ValueError as error:
        assert "fp8_all_gather: model must have FP8 layers, see quantize_model, got none" in str(error)


def _by_columns(parameter: nn.Parameter) -> Any:
    from torch.distributed.tensor import Shard

    return Shard(1)
