"""Spread a model over a mesh of processes: tensor parallel by DTensor, then FSDP2, from outside the model.

    tensor     each rank has some heads and some MLP columns of every layer; the residual stream is whole on all of
               them, so a layer's two output projections each end in an all-reduce
    shard      FSDP: a layer's parameters are gathered when it runs;  replicate: copies of that whole arrangement (HSDP)

What stands outside the layers (embeddings, final norm, head) is sharded over shard x tensor together: tensor ranks are
data-parallel there, each takes its part of the tokens through the head. FSDP averages a parameter's gradients over the
ranks that share it; `LossShare` states its loss so that this average is right.
"""

import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from powertrain.models.config import ModelConfig, architecture

# a layer hands on the stream that it was given; nothing here writes into it
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")

# of a layer's module: which dim of its weight is spread; `input`: it makes a DTensor of its input, once for all in it
Spread = Literal["rows", "columns", "heads_norm", "input"]


def parallelize(
    model: Any,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool = True,
) -> None:
    """Spread a model, on the meta device or not, over a mesh replicate x shard x tensor. In place.

    Parameters become DTensors; in a forward they are gathered in `param_dtype`, and gradients summed in `reduce_dtype`.
    Raises ValueError naming the key for sizes that `tensor` does not divide.
    """
    tensor, shard = mesh["tensor"], mesh["replicate", "shard"]
    whole = shard
    if tensor.size() > 1:
        check_tensor(model.config, tensor.size())
        _spread_layers(model, tensor)
        model.loss_share = LossShare(tensor)
        names = ("replicate", "shard")
        whole = init_device_mesh(mesh.device_type, (mesh.shape[0], mesh.shape[1] * mesh.shape[2]), mesh_dim_names=names)
    if mesh["replicate"].size() == 1:
        shard, whole = mesh["shard"], whole["shard"]
    reshard_after_forward = reshard_after_forward and mesh["shard"].size() > 1
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype)
    for block in model.layers:
        fully_shard(block, mesh=shard, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    # the head's backward follows its forward, and the embedding's needs no weights: they stay gathered until then.
    # Apart, as the head's gradients are there first, to be summed while the layers run, and the embedding's last
    outside = [] if model.head is None else [model.embed, model.head]
    for module in (*outside, model):
        fully_shard(module, mesh=whole, mp_policy=policy, reshard_after_forward=False)


def check_tensor(config: ModelConfig, size: int) -> None:
    """Raise ValueError if the layers cannot be spread over `size` ranks (parallel.tensor)."""
    divided: dict[str, int] | None = architecture(config.architecture).divided_by_tensor(config)
    if divided is None:
        raise ValueError(f"parallel.tensor must be 1 for model.architecture {config.architecture}, got {size}")
    for key, value in divided.items():
        if value % size:
            raise ValueError(f"parallel.tensor must divide model.{key} ({value}), got {size}")


def _spread_layers(model: Any, mesh: DeviceMesh) -> None:
    plan: dict[str, Spread] = architecture(model.config.architecture).TENSOR_PLAN
    for block in model.layers:
        there = {name: _style(spread) for name, spread in plan.items() if _has(block, name)}
        parallelize_module(block, mesh, there)
        block.attention.first_head = mesh.get_local_rank() * block.attention.num_heads // mesh.size()


def _has(block: nn.Module, name: str) -> bool:
    parent, _, last = name.rpartition(".")
    return getattr(block.get_submodule(parent), last, None) is not None


def _style(spread: Spread) -> ParallelStyle:
    match spread:
        case "columns":
            return ColwiseParallel()
        case "rows":
            return RowwiseParallel()
        case "input":
            return PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
        case "heads_norm":
            return _HeadsNorm()


class _HeadsNorm(ParallelStyle):
    """A norm over this rank's heads, one weight for all: a DTensor, whose gradient powertrain/nn/norm.py sums."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def replicate(_name: str, part: nn.Module, mesh: DeviceMesh) -> None:
            for name, p in part.named_parameters(recurse=False):
                part.register_parameter(name, nn.Parameter(distribute_tensor(p, mesh, [Replicate()])))

        return distribute_module(module, device_mesh, replicate)


def weighed(labels: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Labels to take a mean loss of, and that mean's weight among others: the share of `total` counted labels.

    Where none counts the mean would be nan and so would be its gradients, times zero too; all count then, for nothing.
    """
    count = (labels != -100).sum()
    return torch.where(count > 0, labels, 0), count / total.clamp(min=1)


class LossShare:
    """Each tensor rank takes its part of the tokens through the head, instead of all of them every one.

    (mean_loss of (states, labels), states [B, S, D], labels [B, S]) -> the mean loss over all, equal on every rank.
    The average over tensor ranks of the gradients that each computes is the gradient of that mean.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.rank, self.size = mesh, mesh.get_local_rank(), mesh.size()

    def __call__(self, mean_loss: Callable[..., Tensor], states: Tensor, labels: Tensor) -> Tensor:
        states, labels = states.flatten(0, -2), labels.flatten()
        missing = -len(labels) % self.size
        if missing:
            states, labels = F.pad(states, (0, 0, 0, missing)), F.pad(labels, (0, missing), value=-100)
        part, weight = weighed(labels.chunk(self.size)[self.rank], (labels != -100).sum())
        loss = mean_loss(_Part.apply(states, self), part)
        return _MeanOfRanks.apply(loss * (weight * self.size), self)


class _Part(torch.autograd.Function):
    """x [N, D], the same on every rank -> its part [N / size, D]; backward gathers, and divides by size (LossShare)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: LossShare) -> Tensor:
        ctx.share = share
        return x.chunk(share.size)[share.rank].clone()

    @staticmethod
    def backward(ctx: Any, dpart: Tensor) -> tuple[Tensor, None]:
        share = ctx.share
        return DTensor.from_local(dpart / share.size, share.mesh, [Shard(0)]).full_tensor(), None


class _MeanOfRanks(torch.autograd.Function):
    """The mean over the ranks of a group; the gradient goes through unchanged."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, share: LossShare) -> Tensor:
        total = loss.clone()
        torch.distributed.all_reduce(total, group=share.mesh.get_group())
        return total / share.size

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None]:
        return dloss, None
