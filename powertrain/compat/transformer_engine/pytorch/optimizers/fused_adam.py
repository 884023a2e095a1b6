"""transformer_engine.pytorch.optimizers.fused_adam on `powertrain.AdamW`."""

from typing import Any

import torch
from torch import Tensor

from powertrain.compat import optimizers
from powertrain.compat.missing import unknown
from powertrain.ops.conversion import unsupported
from powertrain.runtime import checks

__all__ = ["FusedAdam"]

_OP = "FusedAdam"


class FusedAdam(optimizers.FusedAdam):
    """`powertrain.AdamW` with TransformerEngine's arguments, whose order is not that of Apex's FusedAdam.

    exp_avg_dtype and exp_avg_sq_dtype   one dtype, float32 or bfloat16, whatever the parameter's; float64 for float64
                                         parameters
    store_param_remainders   a hint: master weights are whole
    Refused, besides what Apex' FusedAdam refuses: states of float16 and FP8, which have scales there, master weights of
    another dtype than float32, and use_decoupled_grad.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        for name, dtype in (("exp_avg_dtype", exp_avg_dtype), ("exp_avg_sq_dtype", exp_avg_sq_dtype)):
            if dtype in (torch.float16, torch.uint8):
                unsupported(_OP, name, dtype, "torch.bfloat16")
            checks.one_of(_OP, name, dtype, (torch.float32, torch.bfloat16))
        if exp_avg_dtype is not exp_avg_sq_dtype:
            unsupported(_OP, "exp_avg_sq_dtype", exp_avg_sq_dtype, f"{exp_avg_dtype}, as exp_avg_dtype")
        if master_weights and master_weight_dtype is not torch.float32:
            unsupported(_OP, "master_weight_dtype", master_weight_dtype, "torch.float32")
        if use_decoupled_grad:
            unsupported(_OP, "use_decoupled_grad", True, "gradients in .grad")
        # None: float32, but float64 for float64 parameters, which theirs does not take
        states = None if exp_avg_dtype is torch.float32 else exp_avg_dtype
        super().__init__(
            params, lr, bias_correction, betas, eps, adam_w_mode, weight_decay, amsgrad,
            set_grad_none is None or set_grad_none, capturable, master_weights, state_dtype=states,
        )  # fmt: skip


__getattr__ = unknown(__name__)
