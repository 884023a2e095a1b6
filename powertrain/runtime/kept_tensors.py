"""Cache of constant tensors, such as rotary tables: made by the first call, used by all later ones."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import index
from typing import Any, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


class _Compiled:
    """An attribute for each result that a compiled graph uses: Dynamo reads its tensors from there."""


_compiled = _Compiled()
# of each kept function, by its full name: arguments -> the name of the attribute
_names: dict[str, Callable[..., str]] = {}


_readers: list[list[Any]] = []


@contextmanager
def noted() -> Iterator[list[Any]]:
    """The tensors that kept functions return inside, in any thread: a CUDA graph goes on to read them where they are,
    and the cache may forget them."""
    read: list[Any] = []
    _readers.append(read)
    try:
        yield read
    finally:
        # by identity: two lists may be equal
        _readers[:] = [other for other in _readers if other is not read]


class Description:
    """Base of frozen dataclasses that describe tensors, and so are the first argument of a kept function.

    Dynamo of torch 2.11 passes neither dataclasses nor symbolic fields to a constant function, but calls a constant
    method of an object, whatever the object is. Such a call guards nothing of the object, so the graph is guarded by
    the description as text.
    """

    described: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "described", repr(self))

    def _name_of(self, kept_function: str, described: str, *args: Any) -> str:
        return _names[kept_function](self, *args)

    _name_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def kept(count: int) -> Callable[[F], F]:
    """functools.lru_cache of `count` results, for a function of hashable arguments that makes tensors (or a tuple).

    The results are right for every caller, whichever is the first:
        inference mode    is left while they are made: a later backward may save them
        torch.compile     takes them as constants of the graph, where it would trace the function and compute them at
                          each call. Symbolic sizes among the arguments become constants
        FakeTensorMode    gets fake ones, which are not kept
    """

    def decorate(make: F) -> F:
        full_name = f"{make.__module__}.{make.__name__}"

        @functools.lru_cache(maxsize=count)
        def once(*args: Any) -> Any:
            with torch.inference_mode(False):
                return make(*args)

        def name_of(*args: Any) -> str:
            """Name of the attribute that holds the result for these arguments."""
            result = once(*args)
            name = f"{full_name}_{id(result)}".replace(".", "_")
            tensors: tuple[Any, ...] = (result,) if isinstance(result, Tensor) else result
            for x in tensors:
                if x is not None:
                    # as torch._dynamo.mark_static_address(x, guard=True), which would import all of torch._dynamo
                    x._dynamo_static_input_type = "guarded"
            setattr(_compiled, name, result)
            return name

        # as torch.compiler.assume_constant_result: called when Dynamo traces, for its result
        name_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
        _names[full_name] = name_of

        @functools.wraps(make)
        def get(*args: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                constants = [index(x) if isinstance(x, int) else x for x in args]
                if isinstance(args[0], Description):
                    name = args[0]._name_of(full_name, args[0].described, *constants[1:])
                else:
                    name = name_of(*constants)
                return getattr(_compiled, name)
            if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
                return make(*args)
            result = once(*args)
            for read in _readers:
                read.append(result)
            return result

        return get  # type: ignore[return-value]

    return decorate
