"""apex.mlp."""

from powertrain.compat.apex.mlp.mlp import MLP
from powertrain.compat.missing import unknown

__all__ = ["MLP"]

__getattr__ = unknown(__name__)
