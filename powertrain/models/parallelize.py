"""Shard a model over a mesh of processes: overlapped tensor parallelism, then FSDP2, without changes in the model.

    tensor     each rank has some heads and some MLP columns of every layer
               (powertrain/nn/tensor_parallel/linear.py); the residual stream between them, its norms and dropout are
               sharded by tokens
    expert     number of shard ranks among which each layer's experts are divided (powertrain/parallel/experts.py)
    shard      FSDP: a layer's parameters are gathered when it runs;  replicate: copies of that whole arrangement (HSDP)

Modules outside the layers (embeddings, final norm, head) are sharded over shard x tensor together: tensor ranks are
data-parallel there, each computes embedding and head of its own tokens, without communication. FSDP averages a
parameter's gradients over the ranks that share it; `TokenSharding` scales gradients so that this average is correct.
"""

import warnings
import zlib
from collections.abc import Callable
from itertools import zip_longest
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from powertrain.models import gpt_neox
from powertrain.models.causal_lm import CausalLM, Unsharded
from powertrain.models.config import ModelConfig
from powertrain.models.registry import architecture
from powertrain.models.sequence_sharding import ContextSharding, mean_of_ranks, normalize_labels
from powertrain.nn.attention import Context
from powertrain.nn.lora import LoRALinear
from powertrain.nn.tensor_parallel.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    name_layers,
    replicate,
)
from powertrain.nn.tensor_parallel.lora import ColumnParallelLoRA, RowParallelLoRA
from powertrain.nn.tensor_parallel.token_shards import even_rows, gather_tokens
from powertrain.parallel.context.api import context_parallel
from powertrain.parallel.overlap import Overlap
from powertrain.parallel.transport.heartbeat import CollectiveMismatch, compare_calls, first_call
from powertrain.runtime import checks
from powertrain.runtime.positional import hinted

# a layer may return its input's residual stream as a view; nothing here writes into it in place
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")

# outermost first: ranks of the innermost axis, tensor, are consecutive, and so mostly on one node
AXES = ("pipeline", "replicate", "shard", "context", "tensor")

# of a layer's module. columns, rows: its weight is sharded; replicated: whole on every rank, applied to the rank's
# tokens or heads; data: tensor ranks are data-parallel in it, and its parameters are sharded over them too
Style = Literal["columns", "rows", "replicated", "data"]


@hinted
def parallelize(
    model: CausalLM,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool = True,
    transport: str = "auto",
    expert: int = 1,
) -> Overlap | None:
    """Shard a model, on the meta device or not, over a mesh replicate x shard x context x tensor. In place.

    Of a mesh pipeline x ... it is sharded over the ranks of this one's stage: each has its part of the model
    (powertrain/models/pipeline.py), and all call this equally often.

    Parameters become DTensors; in a forward they are gathered in `param_dtype`, and gradients summed in `reduce_dtype`.
    mesh        over all ranks; a missing axis has size one
    transport   of tensor ranks and of ranks that share experts; see Overlap
    expert      number of consecutive `shard` ranks that divide each layer's experts; FSDP shards them over the others
    Returns the tensor ranks' overlap, None if there is one rank.
    Raises ValueError naming the key for sizes that `tensor` does not divide, and for another mesh or a model that is
    sharded already; CollectiveMismatch where ranks give different arguments, or models whose parameters differ.
    """
    sizes = _sizes(mesh)
    _check_unsharded(model)
    for name, dtype in (("param_dtype", param_dtype), ("reduce_dtype", reduce_dtype)):
        checks.require(isinstance(dtype, torch.dtype), "parallelize", name, "be a torch.dtype", repr(dtype))
    _compare_ranks(
        f"parallelize({' x '.join(f'{axis} {size}' for axis, size in sizes.items())}, param_dtype={param_dtype}, "
        f"reduce_dtype={reduce_dtype}, reshard_after_forward={reshard_after_forward}, transport={transport!r}, "
        f"expert={expert})"
    )
    # stages have other layers than each other
    if sizes.get("pipeline", 1) == 1:
        _compare_models(model)
    mesh = _with_all_axes(mesh, sizes)
    context = mesh["context"]
    # context ranks need the same parameters for parts of one sequence, so FSDP shards over shard x context
    if context.size() > 1:
        _, replicas, shards, sequences, tensors = mesh.shape
        mesh = _rearranged(mesh, (replicas, shards * sequences, tensors), ("replicate", "shard", "tensor"))
    tensor, shard = mesh["tensor"], mesh["replicate", "shard"]
    whole, overlap, apart = shard, None, []
    if tensor.size() > 1:
        check_tensor(model.config, tensor.size())
        overlap = Overlap(tensor, transport=transport)
        apart = _shard_layers(model, tensor)
        name_layers(model)
        model.sharding = TokenSharding(overlap)
        shape = (mesh["replicate"].size(), mesh["shard"].size() * tensor.size())
        whole = _rearranged(mesh, shape, ("replicate", "shard"))["replicate", "shard"]
    if context.size() > 1:
        check_context(model.config, context.size())
        model.sharding = ContextSharding(context_parallel(context), model.sharding)
    if mesh["replicate"].size() == 1:
        shard, whole = mesh["shard"], whole["shard"]
    reshard_after_forward = reshard_after_forward and mesh["shard"].size() > 1
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype)
    if expert > 1:
        check_expert(model.config, expert, mesh["shard"].size(), tensor.size())
        _shard_experts(model, mesh, expert, transport, policy, reshard_after_forward)
    # innermost first, as fully_shard asks: an outer unit collects the parameters that no inner one has
    for module in apart:
        fully_shard(module, mesh=whole, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    for block in model.layers:
        fully_shard(block, mesh=shard, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    # not resharded: the head's backward directly follows its forward, and the embedding's needs no weights. Units of
    # their own, so that the head's gradients are summed while the layers' backward runs (93.0% instead of 92.4% on two
    # GPUs, docs/log/training.md)
    root_modules = [] if model.config.tie_embeddings else [m for m in (model.embed, model.head) if m is not None]
    for module in (*root_modules, model):
        fully_shard(module, mesh=whole, mp_policy=policy, reshard_after_forward=False)
    return overlap


def _sizes(mesh: DeviceMesh) -> dict[str, int]:
    names = (mesh.mesh_dim_names or ()) if isinstance(mesh, DeviceMesh) else ()
    if not names or list(names) != [axis for axis in AXES if axis in names]:
        raise ValueError(f"parallelize: mesh must have axes among {', '.join(AXES)}, in this order, got {mesh}")
    # the meshes that are made of it below have all ranks in this order
    world_size = dist.get_world_size()
    if mesh.mesh.flatten().tolist() != list(range(world_size)):
        raise ValueError(f"parallelize: mesh must have all {world_size} ranks, in their order, got {mesh}")
    return dict(zip(names, mesh.shape, strict=True))


def _check_unsharded(model: nn.Module) -> None:
    sharded = next((name for name, p in model.named_parameters() if isinstance(p, DTensor)), None)
    if sharded is not None:
        raise ValueError(f"parallelize: model must not be sharded already, got one whose {sharded} is a DTensor")


def _compare_ranks(call: str) -> None:
    """Raise CollectiveMismatch unless all ranks make this call: with meshes that differ gloo ends the process."""
    assert dist.group.WORLD is not None
    with first_call("parallelize"):
        compare_calls(call, dist.group.WORLD)


def _compare_models(model: nn.Module) -> None:
    """Raise CollectiveMismatch, naming the parameter, unless all ranks have the same ones and train the same: their
    collectives would differ in size, and gloo ends the process."""
    described = [
        f"{name} {list(p.shape)} {p.dtype}, {'trained' if p.requires_grad else 'frozen'}"
        for name, p in model.named_parameters()
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    # the lists themselves are sent only where they differ
    dist.all_gather_object(everyone, zlib.crc32("\n".join(described).encode()))
    if len(set(everyone)) == 1:
        return
    dist.all_gather_object(everyone, described)
    other = next(rank for rank, found in enumerate(everyone) if found != everyone[0])
    pairs = zip_longest(everyone[0], everyone[other], fillvalue="no further parameter")
    first, second = next((first, second) for first, second in pairs if first != second)
    raise CollectiveMismatch(
        f"parallelize: model must be the same on all ranks, got {first} on rank 0 and {second} on rank {other}"
    )


def _with_all_axes(mesh: DeviceMesh, sizes: dict[str, int]) -> DeviceMesh:
    if len(sizes) == len(AXES):
        return mesh
    # a missing axis has size one, so the code below has one form
    return init_device_mesh(mesh.device_type, tuple(sizes.get(axis, 1) for axis in AXES), mesh_dim_names=AXES)


def _rearranged(mesh: DeviceMesh, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh over all ranks whose stages' ranks have this shape."""
    stages = mesh["pipeline"].size()
    return init_device_mesh(mesh.device_type, (stages, *shape), mesh_dim_names=("pipeline", *names))


def check_tensor(config: ModelConfig, size: int) -> None:
    """Raise ValueError if the layers cannot be sharded over `size` ranks (parallel.tensor)."""
    # a gMLP layer mixes positions, which tensor ranks share
    if getattr(config, "has_gmlp", False) and size > 1:
        raise ValueError(f"parallel.tensor must be 1 with gmlp layers (model.layer_types), got {size}")
    divided: dict[str, int] = architecture(config.architecture).divided_by_tensor(config)
    for key, value in divided.items():
        if value % size:
            raise ValueError(f"parallel.tensor must divide model.{key} ({value}), got {size}")


def check_context(config: ModelConfig, size: int) -> None:
    """Raise ValueError if sequences cannot be sharded over `size` ranks (parallel.context)."""
    if config.architecture not in ("gpt_neox", "llama"):
        # latent attention and experts have no form for parts of a sequence
        raise ValueError(f"parallel.context must be 1 for model.architecture {config.architecture}, got {size}")
    if isinstance(config, gpt_neox.Config):
        gpt_neox.check_whole_sequences(config, "parallel.context")
        if config.has_gmlp:
            # each rank would mix the positions of its own part alone
            raise ValueError(f"parallel.context must be 1 with gmlp layers (model.layer_types), got {size}")
        if config.sparsity is not None:
            # attention over context ranks has windows, and no masks of blocks
            raise ValueError(f"parallel.context must be 1 with sparse layers (model.layer_types), got {size}")
    # attention over context ranks has no dropout
    if getattr(config, "attention_dropout", 0.0):
        raise ValueError(f"parallel.context must be 1 with model.attention_dropout, got {size}")


def check_pipeline(config: ModelConfig, size: int) -> None:
    """Raise NotImplementedError if a model cannot be cut into `size` stages (parallel.pipeline)."""
    if config.architecture not in ("gpt_neox", "llama"):
        # embeddings and heads of other architectures have not been cut into stages
        raise NotImplementedError(
            f"parallel.pipeline must be 1 for model.architecture {config.architecture}, got {size}"
        )
    balance_loss = getattr(config, "balance_loss", 0.0)
    if balance_loss:
        # the loss is made in the last stage, from its own layers
        raise NotImplementedError(f"parallel.pipeline must be 1 with model.balance_loss {balance_loss}, got {size}")


def check_expert(config: ModelConfig, size: int, shard: int, tensor: int) -> None:
    """Raise ValueError if experts cannot be sharded over `size` of the `shard` ranks (parallel.expert)."""
    count = getattr(config, "num_experts", None)
    # experts without a gate have no form that is spread over ranks
    if count is None or config.architecture != "deepseek":
        raise ValueError(f"parallel.expert must be 1 for model.architecture {config.architecture}, got {size}")
    for key, value in (("model.num_experts", count), ("the ranks of parallel.shard", shard)):
        if value % size:
            raise ValueError(f"parallel.expert must divide {key} ({value}), got {size}")
    if tensor > 1:
        raise ValueError(f"parallel.expert must be 1 with parallel.tensor {tensor}, got {size}")


def _shard_experts(
    model: Any, mesh: DeviceMesh, size: int, transport: str, policy: MixedPrecisionPolicy, reshard: bool
) -> None:
    replicas, shards = mesh["replicate"].size(), mesh["shard"].size() // size
    names = ("replicate", "shard", "expert")
    mesh = init_device_mesh(mesh.device_type, (replicas, shards, size), mesh_dim_names=names)
    across = mesh["shard"] if replicas == 1 else mesh["replicate", "shard"]
    for block in model.layers:
        experts = getattr(block.mlp, "experts", None)
        if experts is None:
            continue
        experts.shard(mesh["expert"], transport=transport)
        # an expert's gradient is already summed over the ranks that sent it tokens; FSDP averages all others over them
        _scale_gradients(experts, 1.0 / size)
        fully_shard(experts, mesh=across, mp_policy=policy, reshard_after_forward=reshard and shards > 1)


def _shard_layers(model: Any, mesh: DeviceMesh) -> list[nn.Module]:
    """Shard every layer's modules over the tensor ranks; returns those in which these are data-parallel."""
    apart = []
    plan: dict[str, Style] = architecture(model.config.architecture).TENSOR_PLAN
    for block in model.layers:
        for name, style in plan.items():
            module = _shard_module(block, name, style, mesh)
            apart += [module] if style == "data" and module is not None else []
        # ALiBi slopes and dropout count heads of the whole model
        block.attention.first_head = mesh.get_local_rank() * block.attention.num_heads // mesh.size()
    return apart


_PARALLEL: dict[tuple[Style, bool], Any] = {
    ("columns", False): ColumnParallelLinear, ("columns", True): ColumnParallelLoRA,
    ("rows", False): RowParallelLinear, ("rows", True): RowParallelLoRA,
}  # fmt: skip


def _shard_module(block: nn.Module, name: str, style: Style, mesh: DeviceMesh) -> nn.Module | None:
    """Replace the module of that name, if the block has it, by its parallel form; returns that."""
    parent, _, last = name.rpartition(".")
    owner = block
    for part in filter(None, parent.split(".")):
        owner = getattr(owner, part, None)  # type: ignore[assignment]
    module = getattr(owner, last, None)
    if module is None:
        return None
    match style:
        case "columns" | "rows":
            # a LoRA layer shards its adapter like its weight
            setattr(owner, last, _PARALLEL[style, isinstance(module, LoRALinear)].from_linear(module, mesh))
        case "replicated" if isinstance(module, nn.Linear):
            setattr(owner, last, ReplicatedLinear.from_linear(module, mesh))
        case "replicated":
            replicate(module, mesh)
        case "data":
            _scale_gradients(module, float(mesh.size()))
    return getattr(owner, last)


class TokenSharding(Unsharded):
    """Each tensor rank has consecutive tokens of the batch, one sequence behind the other, in and outside the layers.

    The loss is equal on every rank; each differentiates its own part of it, times the number of ranks. So the average
    over tensor ranks of the gradients outside the layers is the gradient of that loss. In the layers gradients are
    summed over the ranks: there they are divided, behind the last layer, and multiplied again before the first.
    """

    def __init__(self, overlap: Overlap) -> None:
        self.overlap = overlap

    def context(self, tokens: Tensor, context: Context) -> Context:
        if context.cache is not None:
            # a KV cache belongs to whole sequences
            raise NotImplementedError("CausalLM: cache must be None under tensor parallelism, got a KVCache")
        # each rank needs a token, or its products would be empty
        if tokens.numel() < self.overlap.size:
            raise ValueError(
                f"CausalLM: tokens must be at least as many as tensor-parallel ranks ({self.overlap.size}), "
                f"got {list(tokens.shape)}"
            )
        return context._replace(shape=(tokens.shape[0], tokens.shape[1]))

    def local_part(self, x: Tensor, tokens: Tensor) -> Tensor:
        # one sequence behind the other: shares differ by at most one token, wherever sequences end
        return x.expand_as(tokens).flatten().split(self._rows(tokens))[self.overlap.rank]

    def before_layers(self, x: Tensor) -> Tensor:
        # FSDP averages over tensor ranks outside of the layers and not inside: the two factors restore the sum
        return _ScaledGradient.apply(x, float(self.overlap.size))

    def after_layers(self, x: Tensor) -> Tensor:
        return _ScaledGradient.apply(x, 1.0 / self.overlap.size)

    def gather_states(self, states: Tensor, tokens: Tensor) -> Tensor:
        # every rank repeats all later operations, so the gradient here is a full one, not a share: see `after_layers`
        whole = gather_tokens(_ScaledGradient.apply(states, float(self.overlap.size)), self.overlap, self._rows(tokens))
        return whole.unflatten(0, tokens.shape)

    def loss(self, mean_loss: Callable[..., Tensor], states: Tensor, labels: Tensor) -> Tensor:
        part, weight = normalize_labels(self.local_part(labels, labels), (labels != -100).sum())
        # the weight is this rank's share of the counted labels, times the ranks over which the mean is taken
        return mean_of_ranks(mean_loss(states, part) * (weight * self.overlap.size), self.overlap.group)

    def _rows(self, tokens: Tensor) -> list[int]:
        return list(even_rows(tokens.numel(), self.overlap.size))


def _scale_gradients(module: nn.Module, factor: float) -> None:
    """In a module gradients are `factor` times those around it, because FSDP averages the tensor ranks' gradients."""

    def each(tensors: Any, by: float) -> tuple[Any, ...]:
        # integer inputs (indices) have no gradient to scale
        return tuple(_ScaledGradient.apply(t, by) if t.requires_grad else t for t in tensors)

    def left(module: nn.Module, args: Any, y: Any) -> Any:
        return each(y, factor) if isinstance(y, tuple) else each((y,), factor)[0]

    module.register_forward_pre_hook(lambda module, args: each(args, 1.0 / factor))
    module.register_forward_hook(left)


class _ScaledGradient(torch.autograd.Function):
    """x as it is; its gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        # a view, so that the hook does not return its input itself
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx * ctx.factor, None
