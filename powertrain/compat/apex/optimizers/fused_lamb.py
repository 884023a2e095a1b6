"""apex.optimizers.fused_lamb."""

from powertrain.compat.layerwise_optimizers import FusedLAMB
from powertrain.compat.missing import unknown

__all__ = ["FusedLAMB"]

__getattr__ = unknown(__name__)
