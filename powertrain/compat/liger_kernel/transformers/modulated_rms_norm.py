"""liger_kernel.transformers.modulated_rms_norm."""

import torch
from torch import Tensor, nn

from powertrain.compat.liger_kernel.transformers.functional import liger_modulated_rms_norm
from powertrain.compat.missing import unknown
from powertrain.runtime import checks

__all__ = ["LigerModulatedRMSNorm"]


class LigerModulatedRMSNorm(nn.Module):
    """`liger_modulated_rms_norm` with its weight; in_place is a hint."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
        init_fn: str = "ones", in_place: bool = True, elementwise_affine: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        checks.one_of("LigerModulatedRMSNorm", "init_fn", init_fn, ("ones", "zeros"))
        self.elementwise_affine = elementwise_affine
        begin = torch.ones if init_fn == "ones" else torch.zeros
        self.weight = nn.Parameter(begin(hidden_size)) if elementwise_affine else None
        self.variance_epsilon, self.offset, self.casting_mode, self.in_place = eps, offset, casting_mode, in_place

    def forward(self, hidden_states: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:
        return liger_modulated_rms_norm(
            hidden_states, self.weight, scale, shift, self.variance_epsilon, self.offset, self.casting_mode
        )


__getattr__ = unknown(__name__)
