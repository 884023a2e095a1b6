"""Repeated calls that plain PyTorch computes skip the checks of the public function.

Where none of our kernels runs, a public function checks its arguments and then calls `plain` with a function of plain
PyTorch and the tensors. The checks depend only on the signature of a call (runtime/signature.py), so later calls with
the same signature need none: `observed` returns the function of the first call, and runtime/replay.py keeps it for
them. All that depends on values (random draws, index errors) happens in that function, in each call.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class _State(threading.local):
    call: "_Call | None" = None  # the innermost public call of this thread that is observed


_state = _State()


class _Call:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.result: Any = None
        self.function: Callable[..., Any] | None = None

    def bind(self, function: Callable[..., Any], tensors: Sequence[Tensor | None], result: Any) -> None:
        places = {id(x): place for place, x in enumerate(self.tensors)}
        taken = tuple(None if x is None else places.get(id(x), -1) for x in tensors)
        # a tensor given twice has two places; one that is none of the call's (cast, copied) has none
        if len(places) == len(self.tensors) and -1 not in taken:
            self.result, self.function = result, _in_places(len(self.tensors), taken)(function)


def plain(function: Callable[..., Any], *tensors: Tensor | None) -> Any:
    """`function(*tensors)`, as the result of the public function that calls this. `function` refers to none of its
    other tensors."""
    result = function(*tensors)
    if not torch.compiler.is_compiling() and (call := _state.call) is not None:
        call.bind(function, tensors, result)
    return result


def observed(tensors: Sequence[Tensor], call: Callable[[], Any]) -> tuple[Any, Callable[..., Any] | None]:
    """call()'s result, and the function of `tensors` that computes it: None if it came from no single `plain`."""
    before = _state.call
    observation = _state.call = _Call(tensors)
    try:
        result = call()
    finally:
        _state.call = before
    return result, observation.function if observation.result is result else None


@functools.cache
def _in_places(count: int, taken: tuple[int | None, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that turns a function of some of `count` tensors (None: absent) into a function of all of them."""
    if taken == tuple(range(count)):
        return lambda function: function
    given = ", ".join("None" if place is None else f"t{place}" for place in taken)
    names = ", ".join(f"t{place}" for place in range(count))
    made: Any = eval(f"lambda function: lambda {names}: function({given})")
    return made
