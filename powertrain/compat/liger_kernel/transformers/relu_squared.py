"""liger_kernel.transformers.relu_squared."""

from torch import Tensor, nn

from powertrain.compat.liger_kernel.transformers.functional import liger_relu_squared
from powertrain.compat.missing import unknown

__all__ = ["LigerReLUSquared"]


class LigerReLUSquared(nn.Module):
    """relu(x)^2."""

    def forward(self, x: Tensor) -> Tensor:
        return liger_relu_squared(x)


__getattr__ = unknown(__name__)
