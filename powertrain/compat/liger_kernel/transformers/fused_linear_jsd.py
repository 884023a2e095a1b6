"""liger_kernel.transformers.fused_linear_jsd."""

import torch
from torch import Tensor, nn

from powertrain.compat.liger_kernel.transformers.functional import liger_fused_linear_jsd
from powertrain.compat.missing import unknown
from powertrain.runtime import checks

__all__ = ["LigerFusedLinearJSD"]


class LigerFusedLinearJSD(nn.Module):
    """`liger_fused_linear_jsd` with its options; accum_dtype is a hint."""

    def __init__(
        self, jsd_beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        checks.require(temperature > 0, "LigerFusedLinearJSD", "temperature", "be above 0", temperature)
        self.jsd_beta, self.ignore_index = jsd_beta, ignore_index
        self.temperature, self.accum_dtype = temperature, accum_dtype

    def forward(
        self, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
        shift_labels: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return liger_fused_linear_jsd(
            student_input, student_weight, teacher_input, teacher_weight, shift_labels, self.jsd_beta,
            self.ignore_index, self.temperature,
        )  # fmt: skip


__getattr__ = unknown(__name__)
