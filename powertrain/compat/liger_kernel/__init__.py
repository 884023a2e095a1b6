"""Liger Kernel."""

__version__ = "0.8.5"
__all__: list[str] = []
