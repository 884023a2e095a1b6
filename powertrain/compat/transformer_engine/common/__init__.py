"""transformer_engine.common."""

from powertrain.compat.missing import unknown
from powertrain.compat.transformer_engine.common import recipe

__all__ = ["recipe"]

__getattr__ = unknown(__name__)
