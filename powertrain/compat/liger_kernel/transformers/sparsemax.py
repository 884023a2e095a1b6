"""liger_kernel.transformers.sparsemax."""

from torch import Tensor, nn

from powertrain.compat.liger_kernel.transformers.functional import liger_sparsemax
from powertrain.compat.missing import unknown

__all__ = ["LigerSparsemax"]


class LigerSparsemax(nn.Module):
    """`liger_sparsemax` along a dim."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return liger_sparsemax(x, self.dim)


__getattr__ = unknown(__name__)
