"""Repairs of Triton's CPU interpreter, so that it computes the same as the GPU.

Stock Triton 3.6 to 3.9 interprets bfloat16 arithmetic on the raw bits (garbage), truncates float32 -> bfloat16 and
float32 -> fp8 where the GPU rounds to nearest even (fp8 saturating), takes NaN for the maximum and the minimum of two
elements where the GPU takes the other one, computes with subnormal numbers where the GPU's instruction takes them for
0, and 3.6 with NumPy >= 2.4 cannot run a `for` loop over a tensor bound.
`install()` replaces the methods at fault. On one H200 a bf16 `a + b` equals torch bit for bit and
the fp8 cast equals clamp + round to nearest even, as computed here.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter

from powertrain.runtime.compile import interpreter_bookkeeping

_TORCH_DTYPE = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}


def _is_low(dtype: Any) -> bool:
    return dtype.scalar in _TORCH_DTYPE


def _decode(handle: Any) -> np.ndarray:
    """A handle's values; those of bfloat16 and fp8 as float32."""
    dtype = handle.dtype.scalar
    if dtype == tl.bfloat16:
        return (np.ascontiguousarray(handle.data).astype(np.uint32) << 16).view(np.float32)
    if dtype in _TORCH_DTYPE:
        return torch.from_numpy(np.ascontiguousarray(handle.data)).view(_TORCH_DTYPE[dtype]).float().numpy()
    return handle.data


def _encode(values: np.ndarray, dtype: Any) -> np.ndarray:
    """Values in the storage of `dtype`: round to nearest even; fp8 saturates; NaN is positive, as of `cvt`."""
    dtype = dtype.scalar
    if dtype not in _TORCH_DTYPE:
        return values.astype(interpreter._get_np_dtype(dtype))
    # a copy: torch wants writable memory
    x = torch.from_numpy(np.array(values, dtype=np.float32, order="C"))
    if dtype == tl.bfloat16:
        return x.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    limits = torch.finfo(_TORCH_DTYPE[dtype])
    x = torch.where(x.isnan(), torch.nan, x.clamp(limits.min, limits.max))
    return x.to(_TORCH_DTYPE[dtype]).view(torch.uint8).numpy()


def _repair_arithmetic(builder: Any, handle: Any) -> None:
    binary_op, unary_op, cast_impl, fp_to_fp = (
        builder.binary_op,
        builder.unary_op,
        builder.cast_impl,
        builder.create_fp_to_fp,
    )

    def binary(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if not _is_low(lhs.dtype):
            return binary_op(self, lhs, rhs, op)
        out = op(_decode(lhs), _decode(rhs))
        return handle(out if out.dtype == bool else _encode(out, lhs.dtype), lhs.dtype.scalar)

    def unary(self: Any, arg: Any, op: Any) -> Any:
        if _is_low(arg.dtype):
            raise TypeError(f"a kernel computes {op.__name__} in {arg.dtype}: load, then .to(tl.float32) at once")
        return unary_op(self, arg, op)

    def cast(self: Any, source: Any, dtype: Any, *rounding: Any) -> Any:
        if not (_is_low(source.dtype) or _is_low(dtype)):
            return (fp_to_fp if rounding else cast_impl)(self, source, dtype, *rounding)
        return handle(_encode(_decode(source), dtype), dtype.scalar)

    def dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        x, y = _decode(a), _decode(b)
        if x.dtype.kind == "f":
            x, y = x.astype(np.float32), y.astype(np.float32)
        return handle(np.matmul(x, y, dtype=d.data.dtype) + d.data, d.dtype.scalar)

    builder.binary_op, builder.unary_op, builder.cast_impl = binary, unary, cast
    builder.create_fp_to_fp, builder.create_dot = cast, dot


def _flushed(x: np.ndarray) -> np.ndarray:
    """0 in place of float32's subnormal numbers, as instructions with `.ftz` have it."""
    return x * (np.abs(x) >= 2.0**-126) if x.dtype == np.float32 else x


def _repair_functions(builder: Any, propagate_nan: Any) -> None:
    # tl.maximum and tl.minimum with their default, propagate_nan=NONE: of NaN and a number, the number
    builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    clamp = builder.create_clampf

    def clampf(self: Any, x: Any, low: Any, high: Any, propagates: Any) -> Any:
        if propagates == propagate_nan:
            return clamp(self, x, low, high, propagates)
        return self.create_minnumf(self.create_maxnumf(x, low), high)

    builder.create_clampf = clampf
    # ex2.approx.ftz, sqrt.approx.ftz and rsqrt.approx.ftz in PTX; tl.exp, tl.log, tl.log2, a division and tl.sqrt_rn
    # have no .ftz
    builder.create_exp2 = lambda self, x: self.unary_op(x, lambda x: _flushed(np.exp2(_flushed(x))))
    builder.create_sqrt = lambda self, x: self.unary_op(x, lambda x: np.sqrt(_flushed(x)))
    builder.create_rsqrt = lambda self, x: self.unary_op(x, lambda x: 1 / np.sqrt(_flushed(x)))


def _repair_index() -> None:
    """NumPy >= 2.4 refuses int() of a 1-element array, which Triton 3.6 uses for loop bounds."""
    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, *scope: Any) -> None:
        patch_tensor(tensor, *scope)

        def index(self: Any) -> int:
            return int(np.asarray(self.handle.data).reshape(-1)[0])

        if scope:
            scope[0].set_attr(tensor, "__index__", index)
        else:
            tensor.__index__ = index

    interpreter._patch_lang_tensor = patched


def _repair_masks(builder: Any) -> None:
    """Triton 3.9 gives a comparison with a scalar i1 an int64 array, and then refuses it as a mask."""
    masked_load, masked_store = builder.create_masked_load, builder.create_masked_store

    def as_bool(mask: Any) -> Any:
        if isinstance(mask, interpreter.TensorHandle) and mask.data.dtype != bool:
            mask.data = mask.data.astype(bool)
        return mask

    def load(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        return masked_load(self, pointers, as_bool(mask), *rest, **named)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        return masked_store(self, pointers, value, as_bool(mask), *rest, **named)

    builder.create_masked_load, builder.create_masked_store = load, store


def _patch_once() -> None:
    """Triton replaces every function of `tl` at a launch, and again at each call of a device function within it, where
    the second time changes nothing."""
    patch_lang = interpreter._patch_lang
    patched: set[Any] = set()  # modules in force until the launch ends
    modules_of: dict[Any, set[Any]] = {}

    def patch(fn: Any) -> Any:
        modules = modules_of.get(fn)
        if modules is None:
            modules = {value for value in fn.__globals__.values() if value is tl or value is tl.core}
            modules_of[fn] = modules
        if modules and modules <= patched:
            # nothing to restore
            return interpreter._LangPatchScope()
        scope = patch_lang(fn)
        patched.update(modules)
        restore = scope.restore

        def end() -> None:
            patched.clear()
            restore()

        scope.restore = end
        return scope

    interpreter._patch_lang = patch


def install() -> None:
    """Repair the interpreter, once."""
    if getattr(interpreter, "_powertrain_repaired", False):
        return
    _repair_arithmetic(interpreter.InterpreterBuilder, interpreter.TensorHandle)
    _repair_functions(interpreter.InterpreterBuilder, tl.PropagateNan.ALL)
    _repair_index()
    _repair_masks(interpreter.InterpreterBuilder)
    _patch_once()
    if triton.__version__.startswith("3.6."):
        interpreter_bookkeeping.install()
    # The check that no 32-bit sum or product overflows ends in a device_assert, which does nothing without `debug`.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter._powertrain_repaired = True
