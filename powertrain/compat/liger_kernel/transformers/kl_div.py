"""liger_kernel.transformers.kl_div."""

from typing import Any

from torch import Tensor, nn

from powertrain.compat.liger_kernel.transformers.functional import liger_kl_div
from powertrain.compat.missing import unknown

__all__ = ["LigerKLDIVLoss"]


class LigerKLDIVLoss(nn.KLDivLoss):
    """`liger_kl_div` with torch.nn.KLDivLoss's options."""

    # eps comes first in their signature, ahead of torch's options
    def __init__(self, eps: float = 1e-10, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.eps = eps

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        return liger_kl_div(y_pred, y_true, reduction=self.reduction, log_target=self.log_target, eps=self.eps)


__getattr__ = unknown(__name__)
