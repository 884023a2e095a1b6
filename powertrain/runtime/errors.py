"""Errors about kernels and machines. Wrong arguments raise ValueError instead."""


class PowertrainError(RuntimeError):
    """Base of every error that Powertrain itself raises about kernels and machines."""


class CompileError(PowertrainError):
    """A kernel could not be compiled; the message names the kernel, the arch and the compiler's words."""


class CompileTimeout(CompileError):
    """A compile passed its deadline and was stopped; the message names the kernel, the arch and the deadline."""


class WarmUpFirst(PowertrainError):
    """A kernel would have to be compiled inside a CUDA graph capture."""


class LaunchError(PowertrainError):
    """The CUDA driver refused to load or to launch a kernel."""


class StoreError(PowertrainError):
    """A kernel store or pack cannot be used as asked; the message names the file and the next step."""
