"""apex.optimizers.fused_sgd."""

from powertrain.compat.missing import unknown
from powertrain.compat.optimizers import FusedSGD

__all__ = ["FusedSGD"]

__getattr__ = unknown(__name__)
