"""liger_kernel.transformers.tiled_mlp: MLPs that keep no hidden features for the backward.

The tokens pass in shards along the sequence; the backward computes a shard's hidden features again, one shard after the
other. So [tokens of a shard, intermediate_size] is in memory, instead of that of the sequence.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from powertrain.compat.liger_kernel.transformers.geglu import LigerGEGLUMLP
from powertrain.compat.liger_kernel.transformers.swiglu import LigerSwiGLUMLP
from powertrain.compat.missing import unknown
from powertrain.runtime import checks

__all__ = ["LigerTiledGEGLUMLP", "LigerTiledSwiGLUMLP"]

_GELUS = ("gelu", "gelu_new", "gelu_pytorch_tanh")


class LigerTiledSwiGLUMLP(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP` in `num_shards` parts of the sequence; None: ceil(sequence / hidden_size)."""

    def __init__(self, config: Any, num_shards: int | None = None) -> None:
        super().__init__(config)
        self.num_shards = num_shards

    def _activation(self, config: Any) -> str:
        return getattr(config, "hidden_act", "silu")

    def forward(self, x: Tensor) -> Tensor:
        return _tiled(super().forward, x, self.num_shards)


class LigerTiledGEGLUMLP(LigerGEGLUMLP):
    """`LigerGEGLUMLP` in `num_shards` parts of the sequence; None: ceil(sequence / hidden_size)."""

    def __init__(self, config: Any, num_shards: int | None = None) -> None:
        super().__init__(config)
        self.num_shards = num_shards
        checks.one_of(type(self).__name__, "config.hidden_act", getattr(config, "hidden_act", "gelu"), _GELUS)

    def forward(self, x: Tensor) -> Tensor:
        return _tiled(super().forward, x, self.num_shards)


def _tiled(mlp: Callable[[Tensor], Tensor], x: Tensor, shards: int | None) -> Tensor:
    """mlp(x), recomputed in the backward shard by shard along the last dim but one."""
    count = max(1, math.ceil(x.shape[-2] / x.shape[-1]) if shards is None else shards)
    # no random numbers in an MLP: their state need not be kept
    parts = [checkpoint(mlp, part, use_reentrant=False, preserve_rng_state=False) for part in x.chunk(count, -2)]
    return torch.cat(parts, -2)


__getattr__ = unknown(__name__)
