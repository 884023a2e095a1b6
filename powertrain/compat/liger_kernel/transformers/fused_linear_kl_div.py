"""liger_kernel.transformers.fused_linear_kl_div."""

import torch
from torch import Tensor, nn

from powertrain.compat.liger_kernel.transformers.functional import liger_fused_linear_kl_div
from powertrain.compat.missing import unknown
from powertrain.runtime import checks

__all__ = ["LigerFusedLinearKLDivLoss"]


class LigerFusedLinearKLDivLoss(nn.Module):
    """`liger_fused_linear_kl_div` with its options; accum_dtype is a hint."""

    def __init__(
        self, reduction: str = "batchmean", ignore_index: int = -100, temperature: float = 1.0, eps: float = 1e-10,
        accum_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        checks.require(temperature > 0, "LigerFusedLinearKLDivLoss", "temperature", "be above 0", temperature)
        self.reduction, self.ignore_index, self.temperature = reduction, ignore_index, temperature
        self.eps, self.accum_dtype = eps, accum_dtype

    def forward(
        self, student_input: Tensor, student_weight: Tensor, target: Tensor, shift_labels: Tensor | None = None
    ) -> Tensor:
        return liger_fused_linear_kl_div(
            student_input, student_weight, target, shift_labels, self.reduction, self.ignore_index, self.temperature,
            self.eps,
        )  # fmt: skip


__getattr__ = unknown(__name__)
