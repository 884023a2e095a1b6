"""flash_attn.ops.layer_norm on `flash_attn.ops.triton.layer_norm`."""

from torch import Tensor

from powertrain.compat.flash_attn.ops.dropout_add_norm import (
    DropoutAddNorm,
    dropout_add_norm,
    dropout_add_norm_parallel_residual,
)
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
    return dropout_add_norm(
        x0, residual, weight, bias, dropout_p, epsilon, rowscale, layerscale, prenorm, residual_in_fp32,
        return_dropout_mask, is_rms_norm=False,
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
    return dropout_add_norm_parallel_residual(
        x0, x1, residual, weight0, bias0, weight1, bias1, dropout_p, epsilon, prenorm, residual_in_fp32,
        return_dropout_mask, is_rms_norm=False,
    )  # fmt: skip


class DropoutAddLayerNorm(DropoutAddNorm):
    """`dropout_add_layer_norm` with its parameters; dropout in training only."""

    is_rms_norm = False


__getattr__ = unknown(__name__)
