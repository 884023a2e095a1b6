"""liger_kernel.transformers.rms_norm."""

import torch
from torch import Tensor, nn

from powertrain.compat.liger_kernel.transformers.functional import liger_rms_norm
from powertrain.compat.missing import unknown
from powertrain.runtime import checks

__all__ = [
    "LigerRMSNorm",
    "LigerRMSNormForGemma",
    "LigerRMSNormForGemma2",
    "LigerRMSNormForGemma3",
    "LigerRMSNormForGemma4",
    "LigerRMSNormForGlm4",
    "LigerRMSNormForMuseGlimmer",
    "LigerRMSNormForMuseGlimmerTextCentered",
    "LigerRMSNormForOlmo2",
    "LigerRMSNormForQwen3Next",
]


class LigerRMSNorm(nn.Module):
    """`liger_rms_norm` with its weight; row_mode is a hint."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        checks.one_of("LigerRMSNorm", "init_fn", init_fn, ("ones", "zeros"))
        self.elementwise_affine = elementwise_affine
        begin = torch.ones if init_fn == "ones" else torch.zeros
        self.weight = nn.Parameter(begin(hidden_size)) if elementwise_affine else None
        self.variance_epsilon, self.offset, self.casting_mode = eps, offset, casting_mode
        self.in_place, self.row_mode = in_place, row_mode

    def forward(self, hidden_states: Tensor) -> Tensor:
        return liger_rms_norm(hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode)

    def extra_repr(self) -> str:
        return f"eps={self.variance_epsilon}, offset={self.offset}, casting_mode={self.casting_mode}"


class LigerRMSNormForGemma(LigerRMSNorm):
    """`LigerRMSNorm` with Gemma's offset of 1 and casting."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = "gemma",
        init_fn: str = "zeros",
        in_place: bool = True,
        row_mode: bool | None = None,
    ) -> None:
        # offset 1: the stored weight is w - 1
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGemma2(LigerRMSNormForGemma):
    """The same."""


class LigerRMSNormForQwen3Next(LigerRMSNormForGemma):
    """The same."""


class LigerRMSNormForGemma3(LigerRMSNormForGemma):
    """The same, its size named dim."""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = "gemma",
        init_fn: str = "zeros",
        in_place: bool = False,
    ) -> None:
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place)


class LigerRMSNormForGemma4(LigerRMSNorm):
    """`LigerRMSNorm` with Gemma's casting and no offset; with_scale=False: without a weight."""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "gemma",
        init_fn: str = "ones",
        in_place: bool = False,
        with_scale: bool = True,
    ) -> None:
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=with_scale)
        self.with_scale = with_scale


class LigerRMSNormForMuseGlimmer(LigerRMSNormForGemma4):
    """The same; its size may be left out with with_scale=False."""

    def __init__(
        self,
        dim: int | None = None,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "gemma",
        init_fn: str = "ones",
        in_place: bool = False,
        with_scale: bool = True,
    ) -> None:
        checks.require(dim is not None or not with_scale, type(self).__name__, "dim", "be given with with_scale", dim)
        super().__init__(dim or 0, eps, offset, casting_mode, init_fn, in_place, with_scale)


class LigerRMSNormForMuseGlimmerTextCentered(LigerRMSNormForGemma):
    """`LigerRMSNormForGemma`; in_place is a hint."""


class LigerRMSNormForOlmo2(LigerRMSNorm):
    """`LigerRMSNorm`; in_place is a hint."""


class LigerRMSNormForGlm4(LigerRMSNorm):
    """`LigerRMSNorm`; in_place is a hint."""


__getattr__ = unknown(__name__)
