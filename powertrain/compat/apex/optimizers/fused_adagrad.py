"""apex.optimizers.fused_adagrad."""

from powertrain.compat.layerwise_optimizers import FusedAdagrad
from powertrain.compat.missing import unknown

__all__ = ["FusedAdagrad"]

__getattr__ = unknown(__name__)
