"""megatron.core.fusions.fused_indices_converter."""

import torch
from torch import Tensor

from powertrain.compat.missing import unknown
from powertrain.runtime import checks

__all__ = ["fused_indices_to_multihot"]


def fused_indices_to_multihot(
    indices: Tensor, probs_indices: Tensor, num_of_local_experts: int
) -> tuple[Tensor, Tensor]:
    """(bool map, probabilities), both [tokens, num_of_local_experts], of indices and probabilities [tokens, K].

    An index of -1 is no expert of this rank. Differentiable in the probabilities.
    """
    op = "fused_indices_to_multihot"
    checks.require(indices.dim() == 2, op, "indices", "have shape [tokens, K]", list(indices.shape))
    checks.shape(op, "probs_indices", probs_indices, indices.shape, "shape of indices")
    # indices of other ranks' experts are scattered into one extra column, which is dropped
    column = torch.where(indices < 0, num_of_local_experts, indices).long()
    shape = indices.shape[0], num_of_local_experts + 1
    multihot = torch.zeros(shape, dtype=torch.bool, device=indices.device).scatter(1, column, True)
    probs = torch.zeros(shape, dtype=probs_indices.dtype, device=indices.device)
    probs = probs.scatter_add(1, column, probs_indices)
    return multihot[:, :-1], probs[:, :-1]


__getattr__ = unknown(__name__)
