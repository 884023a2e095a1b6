"""megatron.core.fusions.fused_pad_routing_map. `powertrain.grouped_gemm` needs no padding."""

import torch
from torch import Tensor

from powertrain.compat.missing import unknown
from powertrain.runtime import checks

__all__ = ["fused_pad_routing_map"]


def fused_pad_routing_map(routing_map: Tensor, pad_multiple: int) -> Tensor:
    """[tokens, experts] int32: the map, with each expert's first tokens of no entry set until pad_multiple divides.

    An expert with too few tokens left takes them all. Of no tokens the map itself.
    """
    op = "fused_pad_routing_map"
    checks.require(routing_map.dim() == 2, op, "routing_map", "have shape [tokens, experts]", list(routing_map.shape))
    checks.require(pad_multiple > 0, op, "pad_multiple", "be positive", pad_multiple)
    if routing_map.shape[0] == 0:
        return routing_map
    taken = routing_map.int()
    more = (pad_multiple - taken.sum(0) % pad_multiple) % pad_multiple
    free = taken == 0
    rank = free.cumsum(0)
    return torch.where(free & (rank <= more), 1, taken).to(torch.int32)


__getattr__ = unknown(__name__)
