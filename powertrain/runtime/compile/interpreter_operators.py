"""Operators of tensors in Triton 3.6's interpreter, which skip its front end for combinations of operands seen before.

For every `a + b` Triton promotes dtypes, describes and broadcasts both operands and checks them: ten times the time of
NumPy's addition. What it decides depends on dtypes and shapes alone. The first operation of each combination goes its
way, with its checks and messages; later ones are NumPy's function on the same values, which broadcasts alike. Operands
of two dtypes, small integers and 16-bit or 8-bit floats go Triton's way always.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language.core as core
import triton.runtime.interpreter as interpreter

_NUMPY = {
    core.int1: np.dtype(bool),
    core.int32: np.dtype(np.int32),
    core.uint32: np.dtype(np.uint32),
    core.int64: np.dtype(np.int64),
    core.uint64: np.dtype(np.uint64),
    core.float32: np.dtype(np.float32),
    core.float64: np.dtype(np.float64),
}
# of integers that get the tensor's dtype, in arithmetic and comparisons; a float has more, which kernels do not use
_NUMBERS = {
    core.int32: (-(2**31), 2**31 - 1),
    core.uint32: (0, 2**32 - 1),
    core.int64: (-(2**31), 2**63 - 1),
    core.uint64: (0, 2**63 - 1),
    core.float32: (-(2**31), 2**31 - 1),
    core.float64: (-(2**31), 2**31 - 1),
}
_FLOATS = (core.float32, core.float64)
_SIGNED = (core.int32, core.int64)
_INTEGERS = (*_SIGNED, core.uint32, core.uint64)
# other Python floats become float64 when they are compared
_SMALLEST, _LARGEST = 2.0**-126, (2 - 2**-23) * 2.0**127
_ADDRESSES = 2**64 - 1
_WHOLE = slice(None)
_NUMPY_BY_ID = {id(dtype): of_numpy for dtype, of_numpy in _NUMPY.items()}
# one conversion each; of others Triton makes two, or looks for a rounding
_CASTS = {
    (id(source), id(target))
    for sources, targets in (
        ((core.float32,), (core.float32, core.float16, core.bfloat16)),
        ((core.float16, core.bfloat16), (core.float32,)),
        ((core.int1, core.int32, core.int64), (core.float32,)),
        ((core.int32, core.int64), (core.int32, core.int64)),
        ((core.int1,), (core.int32,)),
    )
    for source in sources
    for target in targets
}


def _quotient(a: Any, b: Any) -> Any:
    """Rounded towards zero."""
    return (a - np.fmod(a, b)) // b


# name of the method -> NumPy's function, and the dtypes for which it is the same
_ARITHMETIC = (*_INTEGERS, *_FLOATS)
_BITS = (core.int1, *_INTEGERS)
_OPERATORS: dict[str, tuple[Callable[[Any, Any], Any], tuple[Any, ...]]] = {
    "__add__": (np.add, _ARITHMETIC),
    "__sub__": (np.subtract, _ARITHMETIC),
    "__mul__": (np.multiply, _ARITHMETIC),
    "__truediv__": (np.divide, _FLOATS),
    "__floordiv__": (_quotient, _SIGNED),
    "__mod__": (np.fmod, _SIGNED),
    "__and__": (np.bitwise_and, _BITS),
    "__or__": (np.bitwise_or, _BITS),
    "__xor__": (np.bitwise_xor, _BITS),
    "__lt__": (np.less, _ARITHMETIC),
    "__le__": (np.less_equal, _ARITHMETIC),
    "__gt__": (np.greater, _ARITHMETIC),
    "__ge__": (np.greater_equal, _ARITHMETIC),
    "__eq__": (np.equal, _ARITHMETIC),
    "__ne__": (np.not_equal, _ARITHMETIC),
}
_COMPARISONS = frozenset(list(_OPERATORS)[9:])
_REFLECTED = {f"__r{name[2:]}": name for name in list(_OPERATORS)[:9]}


def tensor_of(data: Any, like: Any) -> Any:
    """A tensor of these values with the type of another, without the constructors' checks of it."""
    handle = object.__new__(interpreter.TensorHandle)
    handle.data, handle.dtype, handle.attr = data, like.dtype, {}
    made = object.__new__(core.tensor)
    made.handle, made.type, made.dtype, made.shape, made.numel = handle, like.type, like.dtype, like.shape, like.numel
    return made


def quick(name: str, way: Callable[..., Any]) -> Callable[..., Any]:
    """A tensor's method that asks Triton's, `way`, once for each combination; `way` itself for other methods."""
    if name in _OPERATORS or name in _REFLECTED:
        operate = _operator(name, way)
        return _address(operate) if name == "__add__" else operate
    return {"__getitem__": _expand, "to": _cast}.get(name, lambda way: way)(way)


def _operator(name: str, way: Callable[..., Any]) -> Callable[..., Any]:
    function, dtypes = _OPERATORS[_REFLECTED.get(name, name)]
    # compared with float64, a Python float is rounded to float32 first
    floats = (core.float32,) if name in _COMPARISONS else _FLOATS
    # by id: a dtype's own hash and equality are Python code that reads its name
    facts_of = {id(dtype): (_NUMPY[dtype], *_NUMBERS.get(dtype, (1, 0)), dtype in floats) for dtype in dtypes}
    # of two, NumPy makes int64 as Triton does
    mixed = {id(core.int32): core.int64, id(core.int64): core.int32} if set(_SIGNED) <= set(dtypes) else {}
    reflected = name in _REFLECTED
    # a result of each combination, for its type; beside it what must live as long as the ids in the key
    results: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def operate(self: Any, other: Any) -> Any:
        dtype = self.dtype
        facts = facts_of.get(id(dtype))
        if facts is None:
            return way(self, other)
        expected, least, most, floating = facts
        kind = type(other)
        if kind is core.constexpr:
            other = other.value
            kind = type(other)
        values = self.handle.data
        if values.dtype is not expected:
            return way(self, other)
        if kind is core.tensor:
            second, shape, of_second = other.handle.data, other.shape, other.dtype
            if of_second is not dtype and of_second is not mixed.get(id(dtype)):
                return way(self, other)
            if second.dtype is not _NUMPY_BY_ID[id(of_second)]:
                return way(self, other)
        else:
            # Triton's constant of -0.0 is 0
            second, shape, of_second = other or 0, None, None
            if kind is float:
                size = abs(other)
                if not floating or not (size == 0 or _SMALLEST <= size <= _LARGEST or size == np.inf):
                    return way(self, other)
            elif kind is not int or not least <= other <= most:
                return way(self, other)
        key = (id(dtype), id(of_second), id(self.shape), id(shape))
        found = results.get(key)
        if found is None:
            result = way(self, other)
            results[key] = tensor_of(None, result), (self.shape, shape)
            return result
        return tensor_of(function(second, values) if reflected else function(values, second), found[0])

    return operate


def _address(way: Callable[..., Any]) -> Callable[..., Any]:
    """`pointer + offset` before `way`, the sum of other operands."""
    results: dict[tuple[Any, ...], tuple[Any, int, Any]] = {}

    def add(self: Any, other: Any) -> Any:
        pointer = self.dtype
        if type(pointer) is not core.pointer_type:
            return way(self, other)
        if type(other) is core.constexpr:
            other = other.value
        if type(other) is core.tensor and (other.dtype is core.int32 or other.dtype is core.int64):
            offset, shape = other.handle.data, other.shape
        elif type(other) is int and -(2**31) <= other < 2**31:
            offset, shape = None, None
        else:
            return way(self, other)
        # pointers to one type are made anew at each launch, with one name
        key = (pointer.name, id(self.shape), id(shape))
        found = results.get(key)
        if found is None:
            result = way(self, other)
            width = max(1, self.handle.get_element_ty().primitive_bitwidth // 8)
            results[key] = tensor_of(None, result), width, (self.shape, shape)
            return result
        like, width, _ = found
        step = width * other & _ADDRESSES if offset is None else width * offset.astype(np.uint64)
        return tensor_of(self.handle.data + step, like)

    return add


def _expand(way: Callable[..., Any]) -> Callable[..., Any]:
    """`x[:, None]`."""
    results: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def getitem(self: Any, slices: Any) -> Any:
        index = slices if type(slices) is tuple else (slices,)
        # a scalar's array has a dim, its type none
        if self.type is self.dtype or not all(part is None or part == _WHOLE for part in index):
            return way(self, slices)
        key = (self.dtype.name, id(self.shape), tuple(part is None for part in index))
        found = results.get(key)
        if found is None:
            result = way(self, slices)
            results[key] = tensor_of(None, result), self.shape
            return result
        return tensor_of(self.handle.data[index], found[0])

    return getitem


def _cast(way: Callable[..., Any]) -> Callable[..., Any]:
    """`x.to(dtype)`."""
    results: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def to(self: Any, dtype: Any, *how: Any, **named: Any) -> Any:
        if type(dtype) is core.constexpr:
            dtype = dtype.value
        if how or named or (id(self.dtype), id(dtype)) not in _CASTS:
            return way(self, dtype, *how, **named)
        if self.dtype is dtype:
            return self
        key = (id(self.dtype), id(dtype), id(self.shape))
        found = results.get(key)
        if found is None:
            result = way(self, dtype)
            results[key] = tensor_of(None, result), self.shape
            return result
        return tensor_of(interpreter.interpreter_builder.cast_impl(self.handle, dtype).data, found[0])

    return to
