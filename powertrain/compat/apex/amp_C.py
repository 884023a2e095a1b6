"""Apex's extension module amp_C: scale, axpby and norms by torch's foreach functions, optimizers tensor by tensor."""

from powertrain.compat.missing import unknown
from powertrain.compat.multi_tensor import (
    multi_tensor_adagrad,
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master,
    multi_tensor_axpby,
    multi_tensor_l2norm,
    multi_tensor_l2norm_scale,
    multi_tensor_lamb,
    multi_tensor_lamb_mp,
    multi_tensor_novograd,
    multi_tensor_scale,
    multi_tensor_sgd,
    multi_tensor_unscale_l2norm,
    update_scale_hysteresis,
)

# Apex's variant takes the same arguments (csrc/multi_tensor_l2norm_kernel_mp.cu)
multi_tensor_l2norm_mp = multi_tensor_l2norm

__all__ = [
    "multi_tensor_adagrad",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_lamb",
    "multi_tensor_lamb_mp",
    "multi_tensor_novograd",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
    "update_scale_hysteresis",
]

__getattr__ = unknown(__name__)
