"""megatron.core.fusions.fused_layer_norm on `powertrain.layer_norm`."""

from typing import Any

import torch
from torch import Tensor, nn

from powertrain.compat.missing import unknown
from powertrain.ops.norm import layer_norm
from powertrain.runtime import checks

__all__ = ["FusedLayerNorm"]


class FusedLayerNorm(nn.Module):
    """Layer norm with Megatron's config: layernorm_zero_centered_gamma, sequence_parallel.

    persist_layer_norm is a hint.
    """

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = True,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
    ) -> None:
        super().__init__()
        # Megatron's class asserts the same
        checks.one_of(
            "FusedLayerNorm", "config.normalization", getattr(config, "normalization", normalization), ("LayerNorm",)
        )
        self.config, self.eps = config, eps
        self.zero_centered_gamma = getattr(config, "layernorm_zero_centered_gamma", zero_centered_gamma)
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()
        for parameter in (self.weight, self.bias):
            # Megatron's gradient all-reduce for sequence parallelism finds parameters by this attribute
            setattr(parameter, "sequence_parallel", getattr(config, "sequence_parallel", False))

    def reset_parameters(self) -> None:
        # a zero-centred weight is stored as w - 1
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        y = layer_norm(input, self.weight, self.bias, eps=self.eps, zero_centered=self.zero_centered_gamma)
        assert isinstance(y, Tensor)
        return y


__getattr__ = unknown(__name__)
