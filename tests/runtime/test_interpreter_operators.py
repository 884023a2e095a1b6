"""Operators that the interpreter computes without Triton's front end give what its front end gives."""

import itertools
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from triton.runtime import interpreter

from powertrain.runtime.compile import interpreter_bookkeeping, interpreter_operators
from powertrain.runtime.settings import settings
from tests.runtime.test_interpreter_bookkeeping import REPLACED

pytestmark = pytest.mark.skipif(
    settings().interpret or not triton.__version__.startswith("3.6."),
    reason="compares with Triton's own: 3.6, where it is not installed already",
)

_DTYPES = (
    tl.int1, tl.int8, tl.int32, tl.uint32, tl.int64, tl.uint64, tl.float16, tl.float32, tl.float64,
)  # fmt: skip
# a scalar, rows, columns, both, and one that needs a leading dim
_SHAPES = ((), (4,), (1, 4), (2, 1), (2, 4), (1,))
_OF_ALL_SHAPES = ((tl.int1, tl.int1), (tl.int32, tl.int32), (tl.int64, tl.int32), (tl.float32, tl.float32))
_NUMBERS = (
    0, 1, -3, 7, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32, 2**40, True, 2.5, -0.0, 1e-40, 1e300, math.inf,
    math.nan,
)  # fmt: skip
_OPERATORS = (
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.and_,
    operator.or_, operator.xor, operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne,
)  # fmt: skip


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Installs it until the test ends."""
    for owner, name in REPLACED:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(tl.tuple, "type", None, raising=False)
    monkeypatch.delattr(tl.tuple, "type")
    return interpreter_bookkeeping.install


def _kernel() -> None:
    tl.static_assert(True)


@contextmanager
def _launch() -> Iterator[None]:
    """The functions of `tl` as in a kernel."""
    scope = interpreter._patch_lang(_kernel)
    try:
        yield
    finally:
        scope.restore()


def _tensor(dtype: Any, shape: tuple[int, ...], start: int) -> Any:
    """Small values with both signs, zeros among them, infinity where they start with 1; a pointer's are addresses."""
    count = max(1, math.prod(shape))
    values = np.arange(start, start + count) * 3 % 7 - (0 if "uint" in str(dtype) or dtype.is_ptr() else 2)
    data = values.astype(interpreter._get_np_dtype(dtype)).reshape(shape or (1,))
    if dtype.is_floating() and start == 1:
        data.flat[0] = np.inf
    return tl.tensor(interpreter.TensorHandle(data, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)


def _found(function: Callable[..., Any], *operands: Any) -> Any:
    """Type and bytes of a result, or the kind of error."""
    try:
        with np.errstate(all="ignore"):
            x = function(*operands)
    except Exception as error:
        return type(error).__name__
    data = x.handle.data
    shape = [size.value for size in x.shape]
    return str(x.type), str(x.dtype), shape, x.numel.value, data.dtype.str, data.shape, data.tobytes()


def _of_pairs() -> list[Any]:
    pairs = itertools.product(_DTYPES, _DTYPES, _SHAPES, _SHAPES)
    return [
        _found(function, _tensor(a, left, 1), _tensor(b, right, 2))
        for a, b, left, right in pairs
        if left == right == (4,) or (a, b) in _OF_ALL_SHAPES
        for function in _OPERATORS
    ]


def _of_numbers() -> list[Any]:
    return [
        _found(function, *operands)
        for dtype, shape, number in itertools.product(_DTYPES, ((), (2, 4)), _NUMBERS)
        if shape or number in (-3, 2.5)
        for function in _OPERATORS
        for operands in (
            (_tensor(dtype, shape, 1), number),
            (number, _tensor(dtype, shape, 1)),
            *([(_tensor(dtype, shape, 1), tl.constexpr(number))] if number == 7 else []),
        )
    ]


def _of_addresses() -> list[Any]:
    return [
        _found(operator.add, _tensor(tl.pointer_type(element), left, 5), offset)
        for element, left, right in itertools.product((tl.int1, tl.float16, tl.float32), _SHAPES, _SHAPES)
        for offset in (*(_tensor(d, right, 0) for d in (tl.int32, tl.uint32, tl.int64, tl.float32)), 3, -2, 2**40)
    ]


def _of_casts() -> list[Any]:
    every = (*_DTYPES, tl.bfloat16, tl.float8e5)
    return [
        _found(tl.tensor.to, _tensor(a, shape, 1), b)
        for a, b, shape in itertools.product(_DTYPES, every, ((), (2, 4)))
        if b is not tl.bfloat16 and b is not tl.float8e5  # Triton's own are repaired (triton_interpreter.py)
    ]


def _of_indices() -> list[Any]:
    indices: tuple[Any, ...] = (
        None, slice(None), (None,), (slice(None), None), (None, slice(None)), (slice(None), None, None), 0, (0, None),
        slice(1), tl.constexpr(None),
    )  # fmt: skip
    return [
        _found(lambda x, index=index: x[index], _tensor(dtype, shape, 1))
        for dtype, shape, index in itertools.product((tl.int32, tl.pointer_type(tl.int8)), _SHAPES, indices)
    ]


def _of_rounded_numbers() -> list[Any]:
    """A tensor of 1/3 and a number that float32 does not have."""
    types = ((tl.float32, np.float32), (tl.float64, np.float64))
    thirds = [
        tl.tensor(interpreter.TensorHandle(np.array([1 / 3, 1.0], n), t), tl.block_type(t, [2])) for t, n in types
    ]
    pairs = [pair for x in thirds for pair in ((x, 1 / 3), (1 / 3, x), (x, tl.constexpr(1 / 3)))]
    return [_found(function, *pair) for pair in pairs for function in _OPERATORS]


@pytest.mark.parametrize(
    "results", [_of_pairs, _of_numbers, _of_rounded_numbers, _of_addresses, _of_casts, _of_indices]
)
def test_results_are_the_front_ends(results: Callable[[], list[Any]], install: Callable[[], None]) -> None:
    with _launch():
        expected = results()
    assert any(isinstance(found, tuple) for found in expected)
    install()
    with _launch():
        # the first of each combination goes Triton's way
        for _ in range(2):
            assert results() == expected


def test_what_is_seen_again_does_not_go_through_the_front_end(
    install: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def computed() -> list[Any]:
        i, wide = _tensor(tl.int32, (4,), 0), _tensor(tl.int64, (), 2)
        x, mask, pointer = _tensor(tl.float32, (4,), 1), i < 3, _tensor(tl.pointer_type(tl.float32), (), 8)
        made = (i * wide, i[None, :] + i[:, None], x * 2.0, 1.0 - x, i // 2, mask & mask, pointer + i, x.to(tl.float16))
        return [_found(lambda y=y: y) for y in made]

    install()
    with _launch():
        expected = computed()
        for name in ("binary_op_type_checking_impl", "broadcast_impl_value", "cast", "expand_dims"):
            monkeypatch.setattr(interpreter.TritonSemantic, name, None)
        assert computed() == expected


def test_every_operator_of_tensors_is_named() -> None:
    """One that Triton calls otherwise would go its slow way unseen."""
    for name in (*interpreter_operators._OPERATORS, *interpreter_operators._REFLECTED):
        assert tl.core.is_builtin(getattr(tl.tensor, name))
