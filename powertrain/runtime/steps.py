"""The steps of a recorded call.

Allocation    memory that the call makes
Launch        of a kernel of ours: arguments are tensors, maps of tensors, numbers or None
OpCall        an op of PyTorch that computes: its results are new tensors, and numbers that follow from sizes, or it
              writes into its arguments
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

_ALIGNMENT = 512  # bytes, as PyTorch's allocator aligns


class Allocation(NamedTuple):
    tensor: Tensor


class Launch(NamedTuple):
    kernel: Any  # runtime/launch.py's Kernel
    loaded: Any  # its Loaded; None: through the interpreter
    grid: tuple[int, ...]
    values: list[Any]  # tensors, maps of tensors, numbers or None
    constants: dict[str, Any]


class OpCall(NamedTuple):
    op: Any  # a torch._ops.OpOverload
    args: Sequence[Any]
    kwargs: dict[str, Any]
    results: tuple[Tensor | int | float | None, ...]  # the tensors are new
    many: bool  # they come as a tuple or list


Step = Allocation | Launch | OpCall


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an op's arguments, in lists too."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def shared_scratch(steps: Sequence[Step], returned: Container[int]) -> tuple[dict[int, int], int]:
    """(storage -> offset, bytes of all) of allocations that may be one: each costs the host as much as a launch.

    They are made ahead of all other steps, and nothing takes memory after the last use of any, so that together they
    never take more than apart. Launches by the driver alone use them, by address; `returned` storages leave the call.
    """
    first = next((index for index, step in enumerate(steps) if not isinstance(step, Allocation)), len(steps))
    last_use: dict[int, int] = {}
    used_as_tensors: set[int] = set()
    last_taken = -1
    for index, step in enumerate(steps[first:]):
        used = {x.untyped_storage()._cdata for x in _used(step)}
        last_use |= dict.fromkeys(used, index)
        loaded = step.loaded if isinstance(step, Launch) else None
        if loaded is None:
            used_as_tensors |= used
        if loaded is None or loaded.has_scratch:
            last_taken = index
    offsets: dict[int, int] = {}
    end = 0
    for storage in (x.untyped_storage() for step in steps[:first] for x in tensors_in(step)):
        name = storage._cdata
        if last_use.get(name, -1) > last_taken and name not in used_as_tensors and name not in returned:
            offsets[name] = end
            end += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
    return (offsets, end) if len(offsets) > 1 else ({}, 0)


def _used(step: Step) -> Iterator[Tensor]:
    if isinstance(step, OpCall):
        yield from tensors_in((*step.args, *step.kwargs.values()))
    elif isinstance(step, Launch):
        # a map of a tensor has it as an attribute
        yield from tensors_in(getattr(value, "tensor", value) for value in step.values)
