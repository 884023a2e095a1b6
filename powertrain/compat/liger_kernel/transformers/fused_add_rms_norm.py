"""liger_kernel.transformers.fused_add_rms_norm."""

import torch
from torch import Tensor, nn

from powertrain.compat.liger_kernel.transformers.functional import liger_fused_add_rms_norm
from powertrain.compat.missing import unknown
from powertrain.runtime import checks

__all__ = ["LigerFusedAddRMSNorm"]


class LigerFusedAddRMSNorm(nn.Module):
    """`liger_fused_add_rms_norm` with its weight."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = False,
    ) -> None:
        super().__init__()
        # Gemma's zero-centred weights begin at 0
        checks.one_of("LigerFusedAddRMSNorm", "init_fn", init_fn, ("ones", "zeros"))
        self.weight = nn.Parameter((torch.ones if init_fn == "ones" else torch.zeros)(hidden_size))
        self.variance_epsilon, self.offset, self.casting_mode, self.in_place = eps, offset, casting_mode, in_place

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return liger_fused_add_rms_norm(
            hidden_states, residual, self.weight, self.variance_epsilon, self.offset, self.casting_mode
        )


__getattr__ = unknown(__name__)
