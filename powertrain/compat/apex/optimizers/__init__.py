"""apex.optimizers."""

from powertrain.compat.missing import unknown
from powertrain.compat.optimizers import FusedAdam, FusedSGD

__all__ = ["FusedAdam", "FusedSGD"]

__getattr__ = unknown(__name__)
