"""NVIDIA Apex under its own names: normalization, optimizers, fused_dense, mlp, multi_tensor_apply, amp_C."""

from powertrain.compat.apex import fused_dense, mlp, multi_tensor_apply, normalization, optimizers
from powertrain.compat.missing import unknown

# the version in Apex's setup.py
__version__ = "0.1"

__all__ = ["fused_dense", "mlp", "multi_tensor_apply", "normalization", "optimizers"]

__getattr__ = unknown(__name__)
