"""Stage: a differentiated op of a replayed call, its forward and the tensors that it saves for its backward.

The op's `setup_context` is asked once, about the recorded call: the tensors that it keeps are arguments or results, its
other attributes constants of the signature. From then on a generated function keeps the same of other tensors, and the
autograd node has the tensors as its only arguments (attention has 25, most of them numbers or absent).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from powertrain.runtime.steps import tensors_in
from powertrain.runtime.tape import NotReplayable, Tape

_CONSTANTS = (type(None), bool, int, float, str, torch.Size, torch.dtype, torch.device)


class _Kept:
    """A context that notes what `setup_context` keeps; its other attributes are the op's."""

    def __init__(self, args: Sequence[Any]) -> None:
        # the signature says which tensors require gradients
        self.needs_input_grad = tuple(isinstance(x, Tensor) and x.requires_grad for x in args)
        self._saved: tuple[Tensor | None, ...] = ()
        self._marked: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self._saved = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self._marked = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Autograd's node never materializes gradients (runtime/nodes.py)."""

    def attributes(self) -> dict[str, Any]:
        own = ("needs_input_grad", "_saved", "_marked")
        return {name: value for name, value in vars(self).items() if name not in own}


class Stage:
    """The differentiated op.

    forward(ctx, *tensors)   repeats it on other tensors, and keeps for backward what it keeps
    tape                     of the forward, a function of the tensors among the op's arguments
    """

    def __init__(self, op: Any, args: Sequence[Any], result: Any, tape: Tape) -> None:
        """Raises NotReplayable."""
        self.tape = tape
        self._num_args = len(args)
        self._places = [place for place, arg in enumerate(args) if isinstance(arg, Tensor)]
        tensors = list(tensors_in(args))
        if len(tensors) != len(self._places):
            raise NotReplayable(f"{op.name} takes lists of tensors")
        results = result if isinstance(result, tuple) else (result,)
        names = {id(x): f"t{i}" for i, x in enumerate(tensors)}
        names |= {id(x): f"o{i}" for i, x in enumerate(results) if x is not None}
        kept = _Kept(args)
        op.setup_context(kept, tuple(args), result)
        self._are_saved = [x is not None for x in kept._saved]
        # attributes hold tensors that are no part of the graph and may change in place until backward
        held: dict[str, str] = {}  # name in forward -> name in backward
        constants: dict[str, Any] = {}
        attributes = [
            f"{name!r}: {_source(value, names, held, constants)}" for name, value in kept.attributes().items()
        ]
        self.attributes = eval(f"lambda h: {{{', '.join(attributes)}}}", constants)  # of ctx.held
        returned = results[: op.num_results]
        lines = [
            f"o = run({_listed(names[id(x)] for x in tensors)})",
            f"{_listed(f'o{i}' for i in range(len(results)))} = {'o' if isinstance(result, tuple) else '(o,)'}",
            f"ctx.save_for_backward({_listed(_name(x, names) for x in kept._saved if x is not None)})",
            f"ctx.held = ({_listed(held)})",
        ]
        marked = [names[id(x)] for x in kept._marked if any(x is out for out in returned)]
        if marked:
            lines.append(f"ctx.mark_non_differentiable({_listed(marked)})")
        out = _listed("None" if x is None else names[id(x)] for x in returned)
        lines.append(f"return ({out})" if isinstance(result, tuple) else "return o")
        head = f"def forward(ctx, {_listed(f't{i}' for i in range(len(tensors)))}):"
        space: dict[str, Any] = {"run": tape.run}
        text = "\n    ".join([head, *lines])
        exec(compile(text, f"<replay of {op.name}, differentiated>", "exec"), space)
        self.forward = space["forward"]

    def saved(self, tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """The op's `ctx.saved_tensors`, from the node's."""
        left = iter(tensors)
        return tuple(next(left) if is_saved else None for is_saved in self._are_saved)

    def needs(self, of_node: Sequence[bool]) -> tuple[bool, ...]:
        """The op's `ctx.needs_input_grad`, from the node's, whose first argument is the stage."""
        needs = [False] * self._num_args
        for place, need in zip(self._places, of_node[1:], strict=True):
            needs[place] = need
        return tuple(needs)

    def gradients(self, of_op: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """The gradients of the node's arguments, taken from those of the op's arguments."""
        return (None, *(of_op[place] for place in self._places))


def _listed(names: Iterable[str]) -> str:
    return "".join(f"{name}, " for name in names)


def _name(x: Tensor, names: dict[int, str]) -> str:
    if id(x) not in names:
        raise NotReplayable("it keeps other tensors than arguments and results for its backward")
    return names[id(x)]


def _source(value: Any, names: dict[int, str], held: dict[str, str], constants: dict[str, Any]) -> str:
    """An attribute as an expression of `h`, the tensors held."""
    if isinstance(value, Tensor):
        return held.setdefault(_name(value, names), f"h[{len(held)}]")
    if type(value) in (list, tuple):
        inside = _listed(_source(element, names, held, constants) for element in value)
        return f"[{inside}]" if type(value) is list else f"({inside})"
    # ops and functions are the same for every call, other objects may be the call's own
    if not isinstance(value, _CONSTANTS) and not callable(value):
        raise NotReplayable(f"it keeps a {type(value).__name__} for its backward")
    name = f"k{len(constants)}"
    constants[name] = value
    return name
