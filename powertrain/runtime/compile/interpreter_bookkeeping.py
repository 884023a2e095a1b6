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
    """Of each shape of a block: its checked sizes, their product and its text; for tensors, both as constants."""
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


def _leave_equal_shapes() -> None:
    """Two scalars, and two blocks of one shape, which is one object by `_remember_shapes`, need no broadcast."""
    broadcast = interpreter.TritonSemantic.broadcast_impl_value

    def leave(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block():
            if right.is_block() and left.shape is right.shape:
                return lhs, rhs
        elif not right.is_block():
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    interpreter.TritonSemantic.broadcast_impl_value = leave


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
            replacements[package] = [(name, replaced(member, semantic)) for name, member in members]
        for name, call in replacements[package]:
            scope.set_attr(package, name, call)

    interpreter._patch_builtin = patch_builtin


def install() -> None:
    """Once, while no launch is under way."""
    _remember_numpy_dtypes()
    _delay_types_of_tuples()
    _remember_shapes()
    _leave_equal_shapes()
    _replace_functions_once()
