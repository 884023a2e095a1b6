"""Fewer Python objects for each operation in the interpreter of Triton 3.6, with the same results.

Triton's front end describes types once for each compile, so it makes them slowly; the interpreter asks for them again
at every operation of every program, and replaces every function of `triton.language` at every launch. That was half of
the interpreter's time. Results that depend on a type alone are computed once.
"""

import builtins
import inspect
import math
from typing import Any

import numpy as np
import triton.language.core as core
import triton.runtime.interpreter as interpreter

from powertrain.runtime.compile.interpreter_operators import quick, tensor_of


def _remember_numpy_dtypes() -> None:
    """Triton makes a table of 18 dtypes at each look."""
    find = interpreter._get_np_dtype
    known: dict[str, np.dtype] = {}  # by the name of a scalar, which is unique

    def np_dtype(dtype: Any) -> np.dtype:
        # a block has its scalar's dtype, whatever its shape
        scalar = dtype.scalar
        if (found := known.get(scalar.name)) is None:
            found = known[scalar.name] = find(scalar)
        return found

    interpreter._get_np_dtype = np_dtype


def _delay_types_of_tuples() -> None:
    """A shape is a tuple, whose type is the types of its values; nothing in the interpreter asks for it."""
    initialize = core.tuple.__init__

    def init(self: Any, args: Any, type: Any = None) -> None:
        if type is None:
            # the type is left to get_type
            self.values = list(args)
        else:
            initialize(self, args, type)

    def get_type(self: Any) -> Any:
        if "_type" not in self.__dict__:
            self._type = core._type_for_tuple_values(self.values)
        return self._type

    def set_type(self: Any, type: Any) -> None:
        self._type = type

    core.tuple.__init__, core.tuple.type = init, property(get_type, set_type)


def _remember_shapes() -> None:
    """Cache, for each block shape, its checked sizes, their product and its text; for tensors, both as constants."""
    initialize = core.block_type.__init__
    of_types: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    of_tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        known = None
        if isinstance(shape, (list, core.tuple)):
            sizes = builtins.tuple(shape)
            # plain ints alone: True would be found as 1
            known = of_types.get(sizes) if all(type(size) is int for size in sizes) else None
        if known is None:
            # the first of each shape is checked by Triton, with its messages
            initialize(self, element_ty, shape)
            of_types[builtins.tuple(self.shape)] = self.shape, self.numel, str(self.shape)
        else:
            self.element_ty = element_ty
            self.shape, self.numel, text = known
            self.name = f"<{text}, {element_ty}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = builtins.tuple(type.shape) if type.is_block() else ()
        if (known := of_tensors.get(sizes)) is None:
            constants = core.tuple([core.constexpr(size) for size in sizes])
            known = of_tensors[sizes] = constants, core.constexpr(math.prod(sizes))
        self.shape, self.numel = known

    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor


def _broadcast_by_view() -> None:
    """Two scalars, and two blocks of one shape, which is one object by `_remember_shapes`, need no broadcast. Of other
    pairs Triton decides once which operand gets which shape; later ones get it as a view."""
    broadcast = interpreter.TritonSemantic.broadcast_impl_value
    # beside the results, for their types, what must live as long as the ids in the key
    decided: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}

    def view(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.shape, rhs.shape
        if left is right:
            return lhs, rhs
        key = (lhs.dtype.name, rhs.dtype.name, id(left), id(right))
        if (found := decided.get(key)) is None:
            results = broadcast(self, lhs, rhs)
            likes = [None if x is y else tensor_of(None, x) for x, y in zip(results, (lhs, rhs), strict=True)]
            decided[key] = likes[0], likes[1], (left, right)
            return results
        return _viewed(lhs, found[0]), _viewed(rhs, found[1])

    interpreter.TritonSemantic.broadcast_impl_value = view


def _viewed(x: Any, like: Any) -> Any:
    return x if like is None else tensor_of(np.broadcast_to(x.handle.data, builtins.tuple(like.type.shape)), like)


def _leave_tensors() -> None:
    """Every assignment in a kernel asks for a tensor, and has one nearly always."""
    convert = interpreter.TritonSemantic.to_tensor

    def to_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
        return x if type(x) is core.tensor else convert(self, x, check_type)

    interpreter.TritonSemantic.to_tensor = to_tensor


def _replace_functions_once() -> None:
    """The functions that a launch replaces, and their replacements, are the same at each."""
    replacements: dict[Any, list[tuple[str, Any]]] = {}

    def replaced(member: Any, semantic: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        return call

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in replacements:
            semantic = interpreter.TritonSemantic(builder)
            # getmembers reads every attribute of the package
            members = [(name, m) for name, m in inspect.getmembers(package) if core.is_builtin(m)]
            calls = [(name, replaced(member, semantic)) for name, member in members]
            replacements[package] = [(n, quick(n, call)) for n, call in calls] if package is core.tensor else calls
        for name, call in replacements[package]:
            scope.set_attr(package, name, call)

    interpreter._patch_builtin = patch_builtin


def install() -> None:
    """Once, while no launch is under way."""
    _remember_numpy_dtypes()
    _delay_types_of_tuples()
    _remember_shapes()
    _broadcast_by_view()
    _leave_tensors()
    _replace_functions_once()
