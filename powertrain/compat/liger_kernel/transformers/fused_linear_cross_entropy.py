"""liger_kernel.transformers.fused_linear_cross_entropy."""

from typing import Any

import torch
from torch import Tensor, nn

from powertrain.compat.liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
from powertrain.compat.missing import unknown

__all__ = ["LigerFusedLinearCrossEntropyLoss"]


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """`liger_fused_linear_cross_entropy` with its options; forward takes the weight first."""

    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__()
        self.options: dict[str, Any] = {
            "ce_weight": ce_weight,
            "ignore_index": ignore_index,
            "lse_square_scale": lse_square_scale,
            "label_smoothing": label_smoothing,
            "reduction": reduction,
            "softcap": softcap,
            "return_z_loss": return_z_loss,
            "accum_dtype": accum_dtype,
            "use_token_scaling": use_token_scaling,
            "return_token_accuracy": return_token_accuracy,
            "return_predicted_tokens": return_predicted_tokens,
        }

    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
        return liger_fused_linear_cross_entropy(_input, lin_weight, target, bias, **self.options)


__getattr__ = unknown(__name__)
