"""liger_kernel.transformers.mhc."""

import torch
from torch import Tensor, nn

from powertrain.compat.liger_kernel.residual_streams import liger_mhc_forward
from powertrain.compat.missing import unknown
from powertrain.runtime import checks

__all__ = ["LigerMHC"]


class LigerMHC(nn.Module):
    """`layer` between `hc` residual streams of `c` features: `liger_mhc_forward` with its parameters and options.

    x [..., hc, c] -> the same. Parameters phi [hc c, hc hc + 2 hc] in phi_dtype, b in float32, three scalars.
    """

    def __init__(
        self,
        layer: nn.Module,
        *,
        hc: int,
        c: int,
        tmax: int = 20,
        rms_eps: float = 1e-6,
        pre_eps: float = 0.0,
        sinkhorn_eps: float = 1e-6,
        post_mult: float = 2.0,
        phi_dtype: torch.dtype = torch.float16,
        allow_fp32: bool = False,
    ) -> None:
        super().__init__()
        for name, value in (("hc", hc), ("c", c)):
            checks.require(value >= 1, "LigerMHC", name, "be 1 or more", value)
        self.layer, self.hc, self.c = layer, hc, c
        self.tmax, self.rms_eps, self.pre_eps = tmax, rms_eps, pre_eps
        self.sinkhorn_eps, self.post_mult, self.allow_fp32 = sinkhorn_eps, post_mult, allow_fp32
        first = next(iter(layer.parameters()), None)
        device = torch.device("cpu") if first is None else first.device
        columns = hc * hc + 2 * hc
        # 0.02: Liger's scale
        self.phi = nn.Parameter(torch.randn(hc * c, columns, dtype=phi_dtype, device=device) * 0.02)
        self.b = nn.Parameter(torch.zeros(columns, device=device, dtype=torch.float32))
        one = torch.ones((), device=device, dtype=torch.float32)
        self.alpha_pre, self.alpha_post, self.alpha_res = (nn.Parameter(one.clone()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        checks.require(x.shape[-2:] == (self.hc, self.c), "LigerMHC", "x", f"have shape [..., {self.hc}, {self.c}]",
                       list(x.shape))  # fmt: skip
        y = liger_mhc_forward(
            x, self.layer, self.phi, self.b, self.alpha_pre, self.alpha_post, self.alpha_res,
            allow_fp32=self.allow_fp32, tmax=self.tmax, rms_eps=self.rms_eps, pre_eps=self.pre_eps,
            sinkhorn_eps=self.sinkhorn_eps, post_mult=self.post_mult,
        )  # fmt: skip
        assert isinstance(y, Tensor)
        return y

    def extra_repr(self) -> str:
        return f"hc={self.hc}, c={self.c}, tmax={self.tmax}"


__getattr__ = unknown(__name__)
