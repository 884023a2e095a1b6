"""The model of a run: built, sharded and initialized on its device, and cast to the precision of the run."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from powertrain.models import build
from powertrain.models.parallelize import parallelize
from powertrain.models.reward import add_value_head
from powertrain.nn.lora import LoRALinear, lora, lora_layers
from powertrain.parallel.overlap import Overlap
from powertrain.parallel.transport.select import TransportUnavailable
from powertrain.train.config.schema import RunConfig
from powertrain.train.optim import DTYPES, Optimizer
from powertrain.train.pipeline import Pipeline, my_stages
from powertrain.train.ranks import Ranks


def build_model(config: RunConfig, ranks: Ranks) -> tuple[nn.Module, Overlap | None, Pipeline | None]:
    """(model, overlap, pipeline): on the device, in float32, initialized, sharded if there are several ranks.

    model      of a pipeline's rank the modules of its stages
    overlap    of the tensor ranks; None if there is one
    """
    # on the meta device until it is sharded: no rank allocates the whole model
    model: Any = build(config.model)
    overlap, pipeline = None, None
    add_trained_parts(model, config)
    for block in model.layers:
        block.recompute = config.train.activation_checkpointing
    parts, mesh = [model], ranks.mesh
    if mesh is not None and config.parallel.pipeline > 1:
        parts = my_stages(model, config, mesh["pipeline"].get_local_rank())
    for part in parts:
        if mesh is None:
            break
        overlap = _parallelize(part, mesh, config)
    if mesh is not None and config.parallel.pipeline > 1:
        pipeline = Pipeline(parts, config, ranks.device, mesh)
    for part in parts:
        part.to_empty(device=ranks.device)
    model.init_weights(config.train.seed)
    return model.train(), overlap, pipeline


def _parallelize(part: Any, mesh: DeviceMesh, config: RunConfig) -> Overlap | None:
    """`parallelize` as config.parallel says. Raises ValueError, on every rank, for a transport that they lack."""
    parallel, train = config.parallel, config.train
    try:
        return parallelize(
            part, mesh, param_dtype=DTYPES[train.precision], reduce_dtype=DTYPES[train.reduce_dtype],
            reshard_after_forward=parallel.reshard_after_forward, transport=parallel.transport, expert=parallel.expert,
        )  # fmt: skip
    except TransportUnavailable as error:
        raise ValueError(
            f"parallel.transport must be auto, or a transport that these ranks have, got {parallel.transport} ({error})"
        ) from None


def to_low_precision(model: nn.Module, optimizer: Optimizer, config: RunConfig, ranks: Ranks) -> None:
    """Compute in 16 bits if configured and not done by FSDP; the float32 weights become masters."""
    dtype = DTYPES[config.train.precision]
    if dtype is torch.float32 or ranks.mesh is not None:
        return
    # the float32 values before rounding: masters made from 16-bit weights would lose them
    full = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.to(dtype)
    masters = optimizer.tensors()
    for name, values in full.items():
        masters[f"model.{name}"].copy_(values)
    if config.train.gradient_accumulation_steps > 1:
        for p in model.parameters():
            if p.requires_grad:
                p.grad_dtype = torch.float32


def add_trained_parts(model: nn.Module, config: RunConfig) -> None:
    """The adapters of train.lora, which freeze the rest, and the value head of objective reward; on the meta device."""
    if config.train.lora is not None:
        adapters = config.train.lora
        lora(
            model, rank=adapters.rank, alpha=adapters.alpha, targets=adapters.targets or "all-linear",
            dropout=adapters.dropout, rslora=adapters.rslora, dora=adapters.dora,
        )  # fmt: skip
    # after the adapters: this layer is trained whole
    if config.train.objective == "reward":
        add_value_head(model)


@torch.no_grad()
def reset_magnitudes(model: nn.Module, optimizer: Optimizer) -> None:
    """DoRA's magnitudes of the weights that are there now."""
    masters = optimizer.tensors()
    for name, layer in lora_layers(model).items():
        if isinstance(layer, LoRALinear) and layer.lora_magnitude is not None:
            layer.reset_magnitude()
            masters[f"model.{name}.lora_magnitude"].copy_(layer.lora_magnitude)


def is_base(name: str) -> bool:
    """Whether a parameter of this name is one of the model itself: no adapter's, not the value head."""
    return ".lora_" not in name and not name.startswith("value.")


def set_gradient_sync(model: Any, last: bool) -> None:
    """FSDP reduces gradients with the last micro-batch only."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)


def balance_experts(model: Any, ranks: Ranks) -> None:
    """A model with experts moves its routers' biases after every step, by the loads that all ranks saw."""
    if hasattr(model, "balance"):
        model.balance(torch.distributed.group.WORLD if ranks.world_size > 1 else None)
