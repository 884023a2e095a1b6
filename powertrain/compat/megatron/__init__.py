"""Megatron-LM's fused functions under the paths that they have there: `powertrain.compat.megatron.core.fusions`."""

from powertrain.compat.megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax, NeoXFusedScaleMaskSoftmax
from powertrain.compat.missing import unknown

__all__ = ["FusedScaleMaskSoftmax", "NeoXFusedScaleMaskSoftmax"]

__getattr__ = unknown(__name__)
