"""Errors of public functions for values of the wrong kind: the error names the argument and says what it must be. For a
value that was given by position and belongs to another parameter, the error names that parameter."""

import functools
import inspect
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from powertrain.runtime import kinds
from powertrain.runtime.checks import described, name

F = TypeVar("F", bound=Callable[..., Any])
_OPTIONAL = (Tensor | None, "Tensor | None")

# what wrong values raise inside of PyTorch and of plain Python
WRONG = (TypeError, AttributeError, ValueError, IndexError, OverflowError, RuntimeError)
# other RuntimeErrors are about the machine, other ranks or libraries: they have classes of their own
_OF_VALUES = (RuntimeError, NotImplementedError)


def hinted(function: F) -> F:
    """The function, or a class's `__init__`, with the errors of `better_error`."""
    op = function.__qualname__.removesuffix(".__init__")
    scalars = kinds.scalars(function)
    defaults = kinds.float_defaults(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            kwargs = kinds.with_constants(defaults, args, kwargs)
        else:
            for option, value in (*zip(scalars, args, strict=False), *kwargs.items()):
                if (types := scalars.get(option)) is None:
                    continue
                # true of NaN and infinity alone: each less itself is NaN
                if type(value) not in types or (type(value) is float and value - value):
                    refuse_wrong_kind(op, function, args, kwargs)
        try:
            return function(*args, **kwargs)
        # ValueError too: it would name the argument of a function that this one calls
        except WRONG as raised:
            error = better_error(op, function, args, kwargs, raised)
            if error is None:
                raise
            raise error from None

    return cast(F, call)


def better_error(
    op: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], raised: Exception
) -> Exception | None:
    """For what this call raised: an error that names the keyword which was meant, or the argument that is of the wrong
    kind; None if it is neither, or the error says already what must be. Inside torch.compile what was raised is the
    error: Dynamo cannot trace signatures and annotations."""
    if torch.compiler.is_compiling():
        return None
    if isinstance(raised, RuntimeError) and type(raised) not in _OF_VALUES:
        return None
    meant = hint(op, function, args)
    if meant is not None:
        return TypeError(meant)
    wrong = no_dense_tensor(op, function, args, kwargs)
    kind: type[Exception] = ValueError
    if wrong is None:
        wrong, kind = wrong_kind(op, function, args, kwargs), TypeError
    if wrong is None:
        return None
    # before its layout, nothing else of a tensor is worth a word: a sparse one has strides of 0
    if isinstance(raised, ValueError) and " must " in str(raised) and " must be a dense tensor" not in wrong:
        # of a tensor that is none a function that this one calls may have said it, by its own name
        argument = wrong.removeprefix(f"{op}: ").partition(" ")[0]
        if kind is TypeError or re.search(rf"\b{argument}\b.* must ", str(raised)):
            return None
    return kind(wrong)


def refuse_wrong_kind(op: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before the call: a string would be true, or a number by float(), without an error. NaN and infinity would be in
    every value of the result."""
    if (wrong := hint(op, function, args) or wrong_kind(op, function, args, kwargs)) is not None:
        raise TypeError(wrong) from None
    scalars = kinds.scalars(function)
    for argument, value in (*zip(scalars, args, strict=False), *kwargs.items()):
        is_number = float in (scalars.get(argument) or ()) and isinstance(value, float | np.floating)
        if is_number and not math.isfinite(value) and argument not in kinds.UNBOUNDED:
            raise ValueError(f"{op}: {argument} must be finite, got {value}") from None


def python_numbers(
    op: str, scalars: dict[str, tuple[type, ...] | None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]] | None:
    """The arguments with numbers and flags of other types (a Fraction, 1 for True) as Python's; None if one is in a
    tensor or is a symbol, which each call reads again. ValueError for a tensor that wants a gradient: numbers get none.
    """
    named = {**dict(zip(scalars, args, strict=False)), **kwargs}
    for argument, value in named.items():
        if (types := scalars.get(argument)) is None or type(value) in types:
            continue
        if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{op}: {argument} must be a number or a tensor that requires no gradient (it gets none), got "
                f"{described(value)} that requires one"
            )
        if isinstance(value, Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
            return None
        named[argument] = next(kind for kind in (float, int, bool, str) if kind in types)(value)
    positions = [named[name] for name, _ in zip(scalars, args, strict=False)]
    return [*positions, *args[len(positions) :]], {name: named[name] for name in kwargs}


def wrong_kind(op: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The error for the first argument whose value does not match its annotation; None if all match."""
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:
        return None
    for argument, annotation in kinds.annotations(function).items():
        if argument in given and not kinds.fits(annotation, given[argument]):
            default = inspect.signature(function).parameters[argument].default
            if given[argument] is not default:
                return f"{op}: {argument} must be {kinds.words(annotation)}, got {described(given[argument])}"
    return None


def hint(op: str, function: Callable[..., Any], args: tuple[Any, ...]) -> str | None:
    """The error for the first positional value that belongs to a keyword-only parameter; None if there is none.

    A number or text in the place of a tensor behind the first counts as such a value: `rms_norm(x, weight, 1e-5)` means
    eps.
    """
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].name == "self":
        parameters, args = parameters[1:], args[1:]
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
        if _only_tensors(parameter) and not (value is None and may_be_absent):
            if not isinstance(value, Tensor):
                return f"{op}: {argument} must be a tensor, got {described(value)}"
            each = [(argument, value)]
        else:
            each = [(f"{argument}[{n}]", x) for n, x in enumerate(value)] if isinstance(value, list | tuple) else []
        for label, x in each:
            if isinstance(x, Tensor) and (not_dense := _not_dense(x)):
                return f"{op}: {label} must be {not_dense}"
    return None


def _not_dense(x: Tensor) -> str | None:
    if x.is_nested or x.layout is not torch.strided:
        layout = "nested" if x.is_nested else str(x.layout).removeprefix("torch._").removeprefix("torch.")
        return f"a dense tensor, got a tensor of layout {layout}"
    return f"a tensor that is not quantized, got {name(x.dtype)}" if x.is_quantized else None


def _only_tensors(parameter: inspect.Parameter) -> bool:
    return parameter.annotation in (Tensor, "Tensor", *_OPTIONAL)


def _suits(parameter: inspect.Parameter, value: object) -> bool:
    if parameter.default is None or parameter.default is inspect.Parameter.empty:
        name = "Tensor" if isinstance(value, Tensor) else type(value).__name__
        return name in str(parameter.annotation)
    return type(parameter.default) is type(value)


def _shown(value: object) -> str:
    return "..." if isinstance(value, Tensor) else repr(value)
