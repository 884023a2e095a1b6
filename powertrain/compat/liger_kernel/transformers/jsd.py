"""liger_kernel.transformers.jsd."""

from torch import Tensor, nn

from powertrain.compat.liger_kernel.transformers.functional import liger_jsd
from powertrain.compat.missing import unknown

__all__ = ["LigerJSD"]


class LigerJSD(nn.Module):
    """`liger_jsd` with its options."""

    def __init__(self, beta: float = 0.5, ignore_index: int = -100) -> None:
        super().__init__()
        self.beta, self.ignore_index = beta, ignore_index

    def forward(self, log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return liger_jsd(log_q, log_p, shift_labels, self.beta, self.ignore_index)


__getattr__ = unknown(__name__)
