"""Checks of ranks (check_ranks.py): DDP and FSDP2 over patched models."""

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import powertrain as pt
from powertrain.patching import replace
from tests.patching.architectures import causal
from tests.patching.test_patch import batch

NAMES = ("Llama", "Gemma2", "GPTNeoX")
CHECKS: dict[str, Callable[[DeviceMesh], None]] = {}


def _step(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The loss, the gradients and the parameters after one step of SGD; sharded ones whole."""
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD([p for p in parameters.values() if p.requires_grad], lr=0.1)
    loss = model(**inputs).loss
    loss.backward()
    found = {"loss": loss.detach()}
    found |= {f"{name}.grad": _whole(p.grad) for name, p in parameters.items() if p.grad is not None}
    optimizer.step()
    optimizer.zero_grad()
    return found | {name: _whole(p.detach()) for name, p in parameters.items()}


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).float().clone()


def _of_rank(mesh: DeviceMesh) -> dict[str, Tensor]:
    inputs = batch()
    row = mesh.get_local_rank()
    return {name: tensor[row : row + 1] for name, tensor in inputs.items()}


def _same(mesh: DeviceMesh, patched: nn.Module, plain: nn.Module, tolerance: float) -> None:
    inputs = _of_rank(mesh)
    for step in range(2):
        found, right = _step(patched, inputs), _step(plain, inputs)
        assert found.keys() == right.keys(), found.keys() ^ right.keys()
        for name, tensor in right.items():
            error = float((found[name] - tensor).norm() / tensor.norm().clamp_min(1e-6))
            assert error <= tolerance, f"step {step}, {name}: {error:.3g}"


def _patched(model: nn.Module) -> nn.Module:
    report = pt.patch(model)
    assert {part.kind for part in report.replaced} == {"norm", "mlp", "rotary", "attention", "loss"}, report
    return model


def _data_parallel(name: str, mesh: DeviceMesh) -> None:
    models = [_patched(causal(name)), causal(name)]
    options = {"static_graph": name == "Gemma2"}
    _same(mesh, *(DistributedDataParallel(model, **options) for model in models), tolerance=1e-4)


def _sharded(name: str, dtype: torch.dtype, mesh: DeviceMesh, checkpointing: bool = False) -> None:
    """Each block and the rest sharded; with bf16 products FSDP casts its float32 parameters, as it does unpatched."""
    models = [_patched(causal(name)), causal(name)]
    for model in models:
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
        for part in (*layers, model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
    _same(mesh, *models, tolerance=1e-4 if dtype is torch.float32 else 0.1)


def _left_alone_when_sharded(mesh: DeviceMesh) -> None:
    """Patched after `fully_shard`: what would read a sharded weight by itself is left and named, results stay."""
    plain, model = causal("Llama"), causal("Llama")
    for one in (plain, model):
        for part in (*one.model.layers, one):
            fully_shard(part, mesh=mesh)
    report = pt.patch(model)
    assert {"mlp", "norm"} <= {part.kind for part in report.left}, report
    _same(mesh, model, plain, tolerance=1e-4)


def _unpatched_again(mesh: DeviceMesh) -> None:
    plain, model = causal("Llama"), _patched(causal("Llama"))
    wrapped = DistributedDataParallel(model)
    twin = copy.deepcopy(plain)
    _same(mesh, wrapped, DistributedDataParallel(plain), tolerance=1e-4)
    pt.unpatch(wrapped)  # through the wrapper
    assert not any(map(replace.installed, wrapped.modules())) and model.config._attn_implementation == "sdpa"
    model.load_state_dict(twin.state_dict())
    _same(mesh, wrapped, DistributedDataParallel(twin), tolerance=1e-6)


for _name in NAMES:
    CHECKS[f"ddp, {_name}"] = partial(_data_parallel, _name)
    CHECKS[f"fsdp2, {_name}"] = partial(_sharded, _name, torch.float32)
CHECKS["fsdp2, bf16"] = partial(_sharded, "Llama", torch.bfloat16)
CHECKS["fsdp2, checkpointing"] = partial(_sharded, "Llama", torch.float32, checkpointing=True)
CHECKS["fsdp2 first"] = _left_alone_when_sharded
CHECKS["ddp, unpatched again"] = _unpatched_again


def prepare() -> None:
    """Imports of the models' code, ahead of the ranks."""
    for name in NAMES:
        causal(name)
