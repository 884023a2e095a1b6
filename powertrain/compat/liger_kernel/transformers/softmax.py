"""liger_kernel.transformers.softmax."""

from torch import Tensor, nn

from powertrain.compat.liger_kernel.transformers.functional import liger_softmax
from powertrain.compat.missing import unknown

__all__ = ["LigerSoftmax"]


class LigerSoftmax(nn.Module):
    """Softmax over the last dim."""

    def forward(self, x: Tensor) -> Tensor:
        return liger_softmax(x)


__getattr__ = unknown(__name__)
