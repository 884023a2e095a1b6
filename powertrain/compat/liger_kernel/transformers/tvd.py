"""liger_kernel.transformers.tvd."""

from torch import Tensor, nn

from powertrain.compat.liger_kernel.transformers.functional import liger_tvd
from powertrain.compat.missing import unknown

__all__ = ["LigerTVDLoss"]


class LigerTVDLoss(nn.Module):
    """`liger_tvd` with its options."""

    # their default; the function's is "mean"
    def __init__(self, reduction: str = "batchmean", ignore_index: int = -100) -> None:
        super().__init__()
        self.reduction, self.ignore_index = reduction, ignore_index

    def forward(self, p: Tensor, q: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return liger_tvd(p, q, shift_labels, self.reduction, self.ignore_index)


__getattr__ = unknown(__name__)
