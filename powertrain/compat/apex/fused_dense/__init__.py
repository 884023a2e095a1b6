"""apex.fused_dense."""

from powertrain.compat.apex.fused_dense.fused_dense import FusedDense, FusedDenseGeluDense, fused_dense_function
from powertrain.compat.missing import unknown

__all__ = ["FusedDense", "FusedDenseGeluDense", "fused_dense_function"]

__getattr__ = unknown(__name__)
