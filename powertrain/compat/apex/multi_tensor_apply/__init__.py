"""apex.multi_tensor_apply."""

from powertrain.compat.apex.multi_tensor_apply.multi_tensor_apply import MultiTensorApply
from powertrain.compat.missing import unknown

__all__ = ["MultiTensorApply", "multi_tensor_applier"]

# 65536 elements a chunk is Apex's own constant; our functions do not read it
multi_tensor_applier = MultiTensorApply(2048 * 32)

__getattr__ = unknown(__name__)
