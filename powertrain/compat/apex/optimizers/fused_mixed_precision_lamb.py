"""apex.optimizers.fused_mixed_precision_lamb."""

from powertrain.compat.layerwise_optimizers import FusedMixedPrecisionLamb
from powertrain.compat.missing import unknown

__all__ = ["FusedMixedPrecisionLamb"]

__getattr__ = unknown(__name__)
