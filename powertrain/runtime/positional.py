"""Values that a public function cannot take where they stand: the error names the argument that was meant, or the one
that must be a tensor."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from powertrain.runtime.checks import described

F = TypeVar("F", bound=Callable[..., Any])
_OPTIONAL = (Tensor | None, "Tensor | None")


def hinted(function: F) -> F:
    """A public function whose errors for values that do not stand where they should are those of `better_error`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        # ValueError too: it would name the argument of a function that this one calls
        except (TypeError, AttributeError, ValueError):
            error = better_error(function.__name__, function, args, kwargs)
            if error is None:
                raise
            raise error from None

    return cast(F, call)


def better_error(
    op: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Exception | None:
    """For an error of this call: one that names the keyword which was meant, or the argument that
    must be a tensor; None if it is neither."""
    meant = hint(op, function, args)
    if meant is not None:
        return TypeError(meant)
    wrong = no_dense_tensor(op, function, args, kwargs)
    return None if wrong is None else ValueError(wrong)


def hint(op: str, function: Callable[..., Any], args: tuple[Any, ...]) -> str | None:
    """What was meant by the first value that no positional parameter takes; None if every value has one.

    A number or text in the place of a tensor behind the first counts as such a value: `rms_norm(x, weight, 1e-5)` means
    eps.
    """
    parameters = list(inspect.signature(function).parameters.values())
    places = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    for index, value in enumerate(args):
        is_number = isinstance(value, float | int | str) and index > 0
        taken = index < len(places) and not (is_number and _only_tensors(places[index]))
        if taken or not keywords:
            continue
        meant = next((p.name for p in keywords if _suits(p, value)), keywords[0].name)
        given = ", ".join([*(p.name for p in places[:index]), f"{meant}={_shown(value)}"])
        return f"{op}: {meant} is keyword-only; write {op}({given})"
    return None


def no_dense_tensor(op: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Which argument must be a dense tensor and is none; None if all are, or the arguments do not fit the function."""
    signature = inspect.signature(function)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return None
    for argument, value in given.items():
        parameter = signature.parameters[argument]
        may_be_absent = parameter.default is None or parameter.annotation in _OPTIONAL
        if not _only_tensors(parameter) or (value is None and may_be_absent):
            continue
        if not isinstance(value, Tensor):
            return f"{op}: {argument} must be a tensor, got {described(value)}"
        if value.is_nested or value.layout is not torch.strided:
            layout = "nested" if value.is_nested else str(value.layout).removeprefix("torch._").removeprefix("torch.")
            return f"{op}: {argument} must be a dense tensor, got a tensor of layout {layout}"
    return None


def _only_tensors(parameter: inspect.Parameter) -> bool:
    return parameter.annotation in (Tensor, "Tensor", *_OPTIONAL)


def _suits(parameter: inspect.Parameter, value: object) -> bool:
    if parameter.default is None or parameter.default is inspect.Parameter.empty:
        name = "Tensor" if isinstance(value, Tensor) else type(value).__name__
        return name in str(parameter.annotation)
    return type(parameter.default) is type(value)


def _shown(value: object) -> str:
    return "..." if isinstance(value, Tensor) else repr(value)
