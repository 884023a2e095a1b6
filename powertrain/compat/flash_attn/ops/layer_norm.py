"""flash_attn.ops.layer_norm on `flash_attn.ops.triton.layer_norm`."""

import torch
from torch import Tensor, nn

from powertrain.compat.flash_attn.ops.triton.layer_norm import layer_norm_fn
from powertrain.compat.missing import unknown

__all__ = ["DropoutAddLayerNorm", "dropout_add_layer_norm", "dropout_add_layer_norm_parallel_residual", "layer_norm"]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """The norm over the last dim, multiplied by weight + bias."""
    y = layer_norm_fn(x, weight, bias, eps=epsilon, is_rms_norm=False)
    assert isinstance(y, Tensor)
    return y


def dropout_add_layer_norm(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: Tensor | None = None,
    layerscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Norm of h = dropout(x0 * rowscale * layerscale) + residual; with prenorm (y, h).

    Shapes: x0, residual [..., n]; weight, bias, layerscale [n]; rowscale [...]. residual_in_fp32 counts without a
    residual only; else h has the residual's dtype.
    """
    x0 = x0 if layerscale is None else x0 * layerscale.to(x0.dtype)
    return layer_norm_fn(
        x0, weight, bias, residual, eps=epsilon, dropout_p=dropout_p, rowscale=rowscale, prenorm=prenorm,
        residual_in_fp32=residual_in_fp32, is_rms_norm=False, return_dropout_mask=return_dropout_mask,
    )  # fmt: skip


def dropout_add_layer_norm_parallel_residual(
    x0: Tensor,
    x1: Tensor | None,
    residual: Tensor | None,
    weight0: Tensor,
    bias0: Tensor | None,
    weight1: Tensor | None,
    bias1: Tensor | None,
    dropout_p: float,
    epsilon: float,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> tuple[Tensor | None, ...]:
    """Two norms of h = dropout(x0) + dropout(x1) + residual: (y0, y1), with prenorm (y0, y1, h).

    y1 is None without weight1.
    """
    results = layer_norm_fn(
        x0, weight0, bias0, residual, x1, weight1, bias1, epsilon, dropout_p, None, prenorm, residual_in_fp32,
        is_rms_norm=False, return_dropout_mask=return_dropout_mask,
    )  # fmt: skip
    results = results if isinstance(results, tuple) else (results,)
    return results if weight1 is not None else (results[0], None, *results[1:])


class DropoutAddLayerNorm(nn.Module):
    """`dropout_add_layer_norm` with its parameters; dropout in training only."""

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
        self.bias = nn.Parameter(torch.zeros(hidden_size, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x0: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
        return dropout_add_layer_norm(
            x0, residual, self.weight, self.bias, self.p if self.training else 0.0, self.eps, prenorm=self.prenorm,
            residual_in_fp32=self.residual_in_fp32,
        )  # fmt: skip


__getattr__ = unknown(__name__)
