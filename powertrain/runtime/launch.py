"""The one way a kernel is launched.

    @kernel(aligned=("N",))
    def _scale_kernel(x_ptr, y_ptr, stride_xm, N, scale, BLOCK_N: tl.constexpr): ...

    _scale_kernel[(rows,)](x, y, x.stride(0), N, 2.0, BLOCK_N=1024, num_warps=4)

The syntax is Triton's; what it specializes on is ours, so that nothing recompiles when a batch changes:

- parameters named `*_ptr` take tensors (or None, a constant): dtype, and whether all of them are 16-byte aligned;
- `stride_*` and those named in `aligned`: whether all of them are multiples of 16;
- every other integer (sizes, lengths, token counts): nothing, not even that it is 1; all of them are int32 unless one
  needs int64;
- floats are float32; `tl.constexpr` parameters and options (num_warps, num_stages, maxnreg) are constants.

The device is the tensors' (mixed devices are an error), and so is the stream: that device's current one. A device
guard is taken only when the current device is another one.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton

from powertrain.runtime.settings import settings

OPTIONS = {"num_warps": 4, "num_stages": 3, "maxnreg": None}


class Kernel:
    """A Triton kernel under our launch rules. Made by `@kernel`."""

    def __init__(self, fn: Callable[..., Any], aligned: tuple[str, ...]) -> None:
        self.jit = triton.jit(fn)
        self.name = fn.__name__
        self.module = fn.__module__
        parameters = inspect.signature(fn).parameters
        self.constants = tuple(n for n, p in parameters.items() if p.annotation is triton.language.constexpr)
        self.arguments = tuple(n for n in parameters if n not in self.constants)
        self.aligned = tuple(n for n in self.arguments if n.startswith("stride_") or n in aligned)
        self.launch = self._interpret if settings().interpret else self._native

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self.launch, grid)

    def _interpret(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if any(isinstance(a, torch.Tensor) and a.is_meta for a in args) or 0 in grid:
            return
        self.jit[grid](*args, **constants)

    def _native(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if any(isinstance(a, torch.Tensor) and a.is_meta for a in args) or 0 in grid:
            return
        self.jit[grid](*args, **constants)


def kernel(*, aligned: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Kernel]:
    """Declare a kernel. `aligned` names integers, besides the strides, worth specializing on being multiples of 16."""
    return lambda fn: Kernel(fn, aligned)
