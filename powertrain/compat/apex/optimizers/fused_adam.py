"""apex.optimizers.fused_adam."""

from powertrain.compat.missing import unknown
from powertrain.compat.optimizers import FusedAdam

__all__ = ["FusedAdam"]

__getattr__ = unknown(__name__)
