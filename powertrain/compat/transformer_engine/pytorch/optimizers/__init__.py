"""transformer_engine.pytorch.optimizers: derived from Apex's; FusedAdam has further arguments."""

from powertrain.compat.apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier
from powertrain.compat.missing import unknown
from powertrain.compat.multi_tensor import (
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
    multi_tensor_sgd,
    multi_tensor_unscale_l2norm,
)
from powertrain.compat.optimizers import FusedSGD
from powertrain.compat.transformer_engine.pytorch.optimizers.fused_adam import FusedAdam

__all__ = [
    "FusedAdam",
    "FusedSGD",
    "MultiTensorApply",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_applier",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
]


__getattr__ = unknown(__name__)
