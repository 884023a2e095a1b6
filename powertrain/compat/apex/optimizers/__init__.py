"""apex.optimizers."""

from powertrain.compat.layerwise_optimizers import FusedAdagrad, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad
from powertrain.compat.missing import unknown
from powertrain.compat.optimizers import FusedAdam, FusedSGD

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad", "FusedSGD"]

__getattr__ = unknown(__name__)
