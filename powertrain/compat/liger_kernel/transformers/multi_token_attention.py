"""liger_kernel.transformers.multi_token_attention."""

import math

import torch
from torch import Tensor, nn

from powertrain.compat.liger_kernel.local_attention import Pair, liger_multi_token_attention
from powertrain.compat.missing import unknown

__all__ = ["LigerMultiTokenAttention"]


class LigerMultiTokenAttention(nn.Module):
    """`liger_multi_token_attention` with its convolution's weight and bias; they begin as nn.Conv2d's and 0."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.groups, self.sparse = in_channels, out_channels, groups, sparse
        self.kernel_size, self.stride, self.padding, self.dilation = map(
            _pair, (kernel_size, stride, padding, dilation)
        )
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, *self.kernel_size))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, scores: Tensor) -> Tensor:
        return liger_multi_token_attention(
            scores, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups, self.sparse
        )


def _pair(value: Pair) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


__getattr__ = unknown(__name__)
