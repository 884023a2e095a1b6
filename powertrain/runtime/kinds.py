"""Type checks of arguments by their annotations, and the annotations in words for error messages."""

import collections.abc
import inspect
import math
import operator
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, Union

import numpy as np
import torch
from torch import Tensor

# bounds, of which infinity means none; their functions refuse NaN
UNBOUNDED = ("limit", "max_norm", "norm_type")
_SEQUENCES = (collections.abc.Sequence, collections.abc.Iterable, list, tuple)
_WORDS = {
    Tensor: ("a tensor", "tensors"), bool: ("True or False", "flags"), int: ("an integer", "integers"),
    float: ("a number", "numbers"), str: ("a string", "strings"), type(None): ("None", "None"),
}  # fmt: skip


def annotations(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotation of each parameter that takes one value; `Any` for one that cannot be resolved here."""
    try:
        known = typing.get_type_hints(function)
    except Exception:  # names that only type checkers import
        known = {}
    return {
        name: known.get(name, Any)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def scalars(function: Callable[..., Any]) -> dict[str, tuple[type, ...] | None]:
    """For each parameter, in order: the types of numbers, flags and texts that need no further check; None for
    parameters that take other things. (No sets: Dynamo takes none from the closure of a class's `__init__`.)"""
    return {name: _scalar_types(annotation) for name, annotation in annotations(function).items()}


def float_defaults(function: Callable[..., Any]) -> tuple[tuple[int, str, str], ...]:
    """Index, name and text of each parameter whose default is a float."""
    parameters = enumerate(inspect.signature(function).parameters.values())
    return tuple((i, x.name, repr(x.default)) for i, x in parameters if isinstance(x.default, float))


def with_constants(
    defaults: tuple[tuple[int, str, str], ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Inside torch.compile: the keywords of a call with the floats that it leaves out.

    With dynamic=True Dynamo makes a symbol of a float that it reads from a function's defaults, unlike an integer, and
    fails where a second checkpointed region reads the same one. A float read from a text is a constant.
    """
    return {**{name: float(text) for index, name, text in defaults if index >= len(args)}, **kwargs}


def _scalar_types(annotation: Any) -> tuple[type, ...] | None:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        each = [_scalar_types(part) for part in parts]
        return None if None in each else tuple({kind: None for found in each for kind in found or ()})
    if origin is Literal:
        # another text, the function itself refuses
        return tuple({type(part): None for part in parts})
    if annotation is float:
        return float, int
    return (annotation,) if annotation in (bool, int, str, type(None)) else None


def fits(annotation: Any, value: Any) -> bool:
    """Whether a value, also of another library's type, may stand for the annotation; True where nothing is known."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(fits(part, value) for part in parts)
    if origin is Literal:
        return (isinstance(value, str) and value in parts) or any(value is part for part in parts)
    if origin is tuple:
        return _fits_tuple(parts, value)
    if origin in _SEQUENCES:
        return _fits_sequence(parts, value)
    if origin is collections.abc.Callable:
        return callable(value)
    if annotation in (bool, int, float):
        return _fits_number(annotation, value)
    if annotation is type(None):
        return value is None
    if annotation is Tensor or annotation in (str, torch.dtype, torch.device) or _is_ours(annotation):
        return isinstance(value, annotation)
    return True


def words(annotation: Any, many: bool = False) -> str:
    """Describe the values that an annotation allows, in the singular or the plural; None only if nothing else is."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(words(part, many) for part in parts if part is not type(None)))
    if origin is Literal:
        return f"one of {', '.join(map(repr, parts))}"
    if origin in _SEQUENCES:
        first = "tuples" if many else "a tuple"
        if origin is not tuple:
            first = "sequences" if many else "a sequence"
        count = f"{len(parts)} " if origin is tuple and Ellipsis not in parts else ""
        return f"{first} of {count}{words(parts[0], many=True)}"
    if origin is collections.abc.Callable:
        return "functions" if many else "a function"
    if annotation in _WORDS:
        return _WORDS[annotation][many]
    name = getattr(annotation, "__name__", str(annotation))
    return f"{name}s" if many else f"{'an' if name[0] in 'AEIO' else 'a'} {name}"


def _is_ours(annotation: Any) -> bool:
    """A class whose objects nothing else stands for: of Powertrain, or a module."""
    if not isinstance(annotation, type) or getattr(annotation, "_is_protocol", False):
        return False
    return annotation.__module__.startswith("powertrain.") or annotation is torch.nn.Module


def _fits_number(kind: type, value: Any) -> bool:
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return True
    if isinstance(value, Tensor | np.ndarray):
        one = not isinstance(value, Tensor) or not (value.is_nested or value.is_sparse)
        if not one or math.prod(value.shape) != 1 or "complex" in str(value.dtype):
            return False
        if isinstance(value, Tensor):
            # a value on a GPU is not read for a check
            return kind is not int or not value.is_floating_point()
        value = value.item()
    try:
        if kind is float:
            float(value)
            return not isinstance(value, str | bytes)
        number = operator.index(value) if not isinstance(value, float) else value
    except (TypeError, ValueError, OverflowError):
        return kind is bool and isinstance(value, np.bool_)
    if kind is bool:
        return number in (0, 1)
    return number == number // 1 and -(2**63) <= number < 2**63


def _fits_tuple(parts: tuple[Any, ...], value: Any) -> bool:
    if isinstance(value, str | bytes | Tensor) or not isinstance(value, collections.abc.Sequence):
        return False
    if Ellipsis in parts:
        return all(fits(parts[0], item) for item in value)
    return len(value) == len(parts) and all(map(fits, parts, value))


def _fits_sequence(parts: tuple[Any, ...], value: Any) -> bool:
    # a string is one of strings too, of its letters, and is never meant as one
    if isinstance(value, str | bytes) or not isinstance(value, collections.abc.Iterable):
        return False
    if not parts or not isinstance(value, list | tuple):
        return True
    return all(fits(parts[0], item) for item in value)
