"""flash_attn.ops.triton.layer_norm on `powertrain.rms_norm`, `layer_norm` and `bias_dropout_add`."""

from typing import Any

import torch
from torch import Tensor, nn

from powertrain.compat.missing import unknown
from powertrain.ops.bias_dropout_add import bias_dropout_add
from powertrain.ops.conversion import unsupported
from powertrain.ops.norm import layer_norm, rms_norm

__all__ = ["RMSNorm", "layer_norm_fn", "rms_norm_fn"]


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Norm of h = dropout(x * rowscale) + dropout(x1) + residual, by weight and bias, and by weight1 and bias1 too.

    Shapes: x, x1, residual [..., n]; weight, bias, weight1, bias1 [n]; rowscale [...].
    h has the residual's dtype, without one float32 for residual_in_fp32, else x's.
    Returns y in out_dtype (None: x's dtype); (y, y1) with weight1; with prenorm also h, last.
    """
    op = "rms_norm_fn" if is_rms_norm else "layer_norm_fn"
    # masks are not stored: dropout is recomputed from a seed
    if return_dropout_mask:
        unsupported(op, "return_dropout_mask", True, "powertrain.ops.bias_dropout_add.dropout_keep of a seed")
    for name, given in (("out", out), ("residual_out", residual_out)):
        if given is not None:
            unsupported(op, name, list(given.shape), "the result, copied")
    # rowscale carries stochastic depth: 0 or 1 / (1 - p) a row
    x = x if rowscale is None else x * rowscale[..., None].to(x.dtype)
    # the residual stream keeps its own dtype from layer to layer
    h_dtype = residual.dtype if residual is not None else torch.float32 if residual_in_fp32 else x.dtype
    dtype = x.dtype if out_dtype is None else out_dtype
    if dropout_p > 0:
        # dropout ahead of the sum, each input with its own draw
        x = bias_dropout_add(x, None, None, dropout_p)
        x1 = None if x1 is None else bias_dropout_add(x1, None, None, dropout_p)
    norm: Any = rms_norm if is_rms_norm else layer_norm
    # the fused kernel has one addition; a second input or another result dtype goes by torch and the plain norm
    if residual is not None and x1 is None and x.dtype is dtype:
        y, h = norm(x, weight, bias, residual=residual, eps=eps, zero_centered=zero_centered_weight)
    else:
        # sums in float32, rounded once to h's dtype
        h = x.to(torch.promote_types(x.dtype, torch.float32)) if x1 is not None or residual is not None else x
        h = sum((part for part in (x1, residual) if part is not None), start=h).to(h_dtype)
        # the wider dtype of both: rounding h to a narrower result first would lose bits
        wide = h.to(torch.promote_types(h_dtype, dtype))
        y = norm(wide, weight, bias, eps=eps, zero_centered=zero_centered_weight).to(dtype)
    results = [y]
    if weight1 is not None:
        wide = h.to(torch.promote_types(h_dtype, dtype))
        # two norms of one sum, as parallel blocks (GPT-J, PaLM) have them
        results.append(norm(wide, weight1, bias1, eps=eps, zero_centered=zero_centered_weight).to(dtype))
    results += [h] if prenorm else []
    return results[0] if len(results) == 1 else tuple(results)


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """`layer_norm_fn` of the root-mean-square norm."""
    return layer_norm_fn(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, residual_in_fp32,
        zero_centered_weight, True, return_dropout_mask, out_dtype, out, residual_out,
    )  # fmt: skip


class RMSNorm(nn.Module):
    """`rms_norm_fn` with its weight."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        zero_centered_weight: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.zero_centered_weight = eps, zero_centered_weight
        # None without dropout, as theirs
        self.drop = nn.Dropout(dropout_p) if dropout_p > 0 else None
        # empty and filled by reset_parameters, which also serves modules made on meta
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_weight else 1.0)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Tensor | tuple[Tensor, ...]:
        return rms_norm_fn(
            x, self.weight, None, residual=residual, eps=self.eps,
            dropout_p=self.drop.p if self.drop is not None and self.training else 0.0, prenorm=prenorm,
            residual_in_fp32=residual_in_fp32, zero_centered_weight=self.zero_centered_weight,
        )  # fmt: skip


__getattr__ = unknown(__name__)
