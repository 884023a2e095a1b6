"""DTensor arguments of our ops: which shards of the arguments give which shards of the results.

Each Op brings its rule (`sharding=`). A rule gets the op's arguments by name, DTensors as their specs, and yields for
one mesh axis every pair (placements of the results, placements of tensor arguments by name) that needs no
communication; a tensor argument that is not named is replicated. PyTorch redistributes arguments that come otherwise.
Plain tensors beside DTensors (tables, seeds) are taken as replicated.

A rule is registered with PyTorch when the op first meets a DTensor, because importing torch.distributed.tensor is slow.

Tokens may be sharded along any leading dim, features where an op is elementwise. A mean over tokens, and dropout, whose
elements are counted from the first row, need the whole tensor. Attention takes plain tensors.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

Rule = Callable[..., Iterator[tuple[list[Any], dict[str, Any]]]]
_registered: set[str] = set()


def is_dtensor(x: Any) -> bool:
    """Whether x is a DTensor, without importing what makes them: that takes 0.5 to 1 s."""
    module = sys.modules.get("torch.distributed.tensor")
    return hasattr(module, "DTensor") and isinstance(x, module.DTensor)  # type: ignore[union-attr]


def placements() -> tuple[Any, Any, Any]:
    """(Replicate(), Partial(), Shard), which a rule may import only when it runs."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    return Replicate(), Partial(), Shard


def leading_dims(spec: Any, *, last: bool = False) -> Iterator[int]:
    """The dims of an argument that may be sharded: all but the last one, or that too.

    Statistics for each row have one dim: only rows sharded along the first dim keep their order in it, and PyTorch's
    rules express that for a mesh of one axis only.
    """
    yield from range(min(spec.ndim - (not last), spec.ndim if spec.mesh.ndim == 1 else 1))


def saved_dims(spec: Any) -> list[int]:
    """For backward: the dims, but the first, along which a saved tensor is sharded; it must stay there."""
    return [p.dim for p in spec.placements if p.is_shard() and 0 < p.dim < spec.ndim - 1]


def register(name: str, packet: Any, rule: Rule | None) -> None:
    """Register an op's rule with PyTorch, once, if DTensors are in use at all."""
    if rule is None or name in _registered or "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    _registered.add(name)
    op = packet.default
    arguments = op._schema.arguments
    is_tensor = [str(argument.type).endswith(("Tensor", "Tensor]")) for argument in arguments]

    def strategies(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        given = {argument.name: value for argument, value in zip(arguments, args, strict=True)}
        return [
            (
                results,
                [
                    named.get(argument.name, Replicate()) if tensor and given[argument.name] is not None else None
                    for argument, tensor in zip(arguments, is_tensor, strict=True)
                ],
            )
            for results, named in rule(**given)
        ]

    register_sharding(op)(strategies)
    # PyTorch's cache key must include every argument that is not a tensor: by default it includes numbers only
    info = RuntimeSchemaInfo(is_tensor.index(False) if False in is_tensor else len(is_tensor), needs_pytree=True)
    DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op] = info


def as_dtensors(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with plain tensors replicated over the mesh of those that are DTensors, if there are any."""
    if "torch.distributed.tensor" not in sys.modules:
        return args
    from torch.distributed.tensor import DTensor, Replicate

    mesh = next((arg.device_mesh for arg in args if isinstance(arg, DTensor)), None)
    if mesh is None:
        return args
    same = [Replicate()] * mesh.ndim
    return tuple(
        DTensor.from_local(arg, mesh, same, run_check=False)
        if isinstance(arg, Tensor) and not isinstance(arg, DTensor)
        else arg
        for arg in args
    )
