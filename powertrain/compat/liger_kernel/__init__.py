"""Liger Kernel under its own names: `liger_kernel.transformers`."""

from powertrain.compat.missing import unknown

__all__ = []

# packages compare it with the release that brought a class
__version__ = "0.8.5"


__getattr__ = unknown(__name__)
