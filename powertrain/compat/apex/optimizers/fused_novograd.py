"""apex.optimizers.fused_novograd."""

from powertrain.compat.layerwise_optimizers import FusedNovoGrad
from powertrain.compat.missing import unknown

__all__ = ["FusedNovoGrad"]

__getattr__ = unknown(__name__)
