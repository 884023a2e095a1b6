"""LoRA adapters of sharded linear layers: `LoRALinear`'s term, computed by the ranks that share the layer.

    columns   y += scale gather(x Aᵀ) Bᵀ: A whole on every rank, applied to the rank's tokens; B sharded by features out
    rows      y += scale scatter(x Aᵀ) Bᵀ: A sharded by features in, parts summed; B whole, applied to the rank's tokens

So between ranks [T, r] numbers move beside the layer's own [T, K]. Names and whole shapes are those of `LoRALinear`:
checkpoints and adapter files do not depend on the number of ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from powertrain.nn.lora import Adapted, LoRALinear
from powertrain.nn.tensor_parallel.linear import (
    ColumnParallelLinear,
    Ranks,
    RowParallelLinear,
    all_reduce_grad,
    local,
    open_overlap,
    shard_parameter,
)
from powertrain.nn.tensor_parallel.token_shards import gather_tokens, scatter_tokens


class ColumnParallelLoRA(ColumnParallelLinear, Adapted):
    """`ColumnParallelLinear` of a rank's own tokens, with an adapter: lora_A [r, K] whole, lora_B [N, r] sharded."""

    @classmethod
    def from_linear(cls, linear: nn.Linear, ranks: Ranks, **options: Any) -> Any:
        """Of a `LoRALinear` without a magnitude, whose adapter is the same on every rank, or on the meta device."""
        layer = super().from_linear(linear, ranks, **options)
        return _take_adapter(layer, linear, ranks)

    def added(self, x: Tensor, rows: Sequence[int] | None) -> Tensor | None:
        if not self.enabled:
            return None
        z = gather_tokens(
            F.linear(_dropped(x, self), all_reduce_grad(self.lora_A)), self.overlap, rows, gradient="parts"
        )
        return self.scale * F.linear(z, local(self.lora_B))


class RowParallelLoRA(RowParallelLinear, Adapted):
    """`RowParallelLinear` to a rank's own tokens, with an adapter: lora_A [r, K] sharded, lora_B [N, r] whole."""

    @classmethod
    def from_linear(cls, linear: nn.Linear, ranks: Ranks, **options: Any) -> Any:
        """As `ColumnParallelLoRA.from_linear`."""
        layer = super().from_linear(linear, ranks, **options)
        return _take_adapter(layer, linear, ranks)

    def added(self, x: Tensor, rows: Sequence[int]) -> Tensor | None:
        if not self.enabled:
            return None
        z = scatter_tokens(F.linear(_dropped(x, self), local(self.lora_A)), self.overlap, rows)
        return self.scale * F.linear(z, all_reduce_grad(self.lora_B))


def _dropped(x: Tensor, layer: Adapted) -> Tensor:
    return F.dropout(x, layer.dropout) if layer.dropout and layer.training else x


def _take_adapter(layer: Any, linear: Any, ranks: Ranks) -> Any:
    assert isinstance(linear, LoRALinear) and linear.lora_magnitude is None
    mesh = open_overlap(ranks)[1]
    of_columns = isinstance(layer, ColumnParallelLoRA)
    layer.scale, layer.dropout, layer.enabled = linear.scale, linear.dropout, linear.enabled
    layer.lora_magnitude = None
    layer.lora_A = shard_parameter(linear.lora_A, mesh, Replicate() if of_columns else Shard(1))
    layer.lora_B = shard_parameter(linear.lora_B, mesh, Shard(0) if of_columns else Replicate())
    return layer
