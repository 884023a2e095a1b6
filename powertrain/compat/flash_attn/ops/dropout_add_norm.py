"""Code shared by flash_attn.ops.layer_norm and flash_attn.ops.rms_norm; flash-attn has no such module."""

import torch
from torch import Tensor, nn

from powertrain.compat.flash_attn.ops.triton.layer_norm import layer_norm_fn


def dropout_add_norm(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: Tensor | None,
    layerscale: Tensor | None,
    prenorm: bool,
    residual_in_fp32: bool,
    return_dropout_mask: bool,
    *,
    is_rms_norm: bool,
) -> Tensor | tuple[Tensor, ...]:
    """Norm of h = dropout(x0 * rowscale * layerscale) + residual; with prenorm (y, h).

    Shapes: x0, residual [..., n]; weight, bias, layerscale [n]; rowscale [...]. residual_in_fp32 counts without a
    residual only; else h has the residual's dtype.
    """
    # layerscale has one value per channel: multiplied ahead of dropout, as in their kernel
    x0 = x0 if layerscale is None else x0 * layerscale.to(x0.dtype)
    return layer_norm_fn(
        x0, weight, bias, residual, eps=epsilon, dropout_p=dropout_p, rowscale=rowscale, prenorm=prenorm,
        residual_in_fp32=residual_in_fp32, is_rms_norm=is_rms_norm, return_dropout_mask=return_dropout_mask,
    )  # fmt: skip


def dropout_add_norm_parallel_residual(
    x0: Tensor,
    x1: Tensor | None,
    residual: Tensor | None,
    weight0: Tensor,
    bias0: Tensor | None,
    weight1: Tensor | None,
    bias1: Tensor | None,
    dropout_p: float,
    epsilon: float,
    prenorm: bool,
    residual_in_fp32: bool,
    return_dropout_mask: bool,
    *,
    is_rms_norm: bool,
) -> tuple[Tensor | None, ...]:
    """Two norms of h = dropout(x0) + dropout(x1) + residual: (y0, y1), with prenorm (y0, y1, h).

    y1 is None without weight1.
    """
    results = layer_norm_fn(
        x0, weight0, bias0, residual, x1, weight1, bias1, epsilon, dropout_p, None, prenorm, residual_in_fp32,
        is_rms_norm=is_rms_norm, return_dropout_mask=return_dropout_mask,
    )  # fmt: skip
    # one result comes bare, several as a tuple
    results = results if isinstance(results, tuple) else (results,)
    # the second place stays, None without a second norm
    return results if weight1 is not None else (results[0], None, *results[1:])


class DropoutAddNorm(nn.Module):
    """`dropout_add_norm` with its parameters; dropout in training only."""

    is_rms_norm: bool  # of each subclass; the root-mean-square norm has no bias
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        prenorm: bool = False,
        p: float = 0.0,
        eps: float = 1e-5,
        residual_in_fp32: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.prenorm, self.p, self.eps, self.residual_in_fp32 = prenorm, p, eps, residual_in_fp32
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        # registered as None: state dicts of RMS norms have no bias
        bias = None if self.is_rms_norm else nn.Parameter(torch.zeros(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", bias)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x0: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
        return dropout_add_norm(
            x0, residual, self.weight, self.bias, self.p if self.training else 0.0, self.eps, None, None, self.prenorm,
            self.residual_in_fp32, False, is_rms_norm=self.is_rms_norm,
        )  # fmt: skip
