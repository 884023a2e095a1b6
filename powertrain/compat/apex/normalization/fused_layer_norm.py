"""apex.normalization.fused_layer_norm on `powertrain.layer_norm` and `rms_norm`.

The Mixed classes and functions give the weight's dtype, the others the input's; under autocast both take its dtype
first. memory_efficient is a hint: backward saves the input either way.
"""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from powertrain.compat.missing import unknown
from powertrain.ops.norm import layer_norm, rms_norm
from powertrain.runtime import checks

__all__ = [
    "FusedLayerNorm",
    "FusedRMSNorm",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]

Shape = int | Sequence[int]


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    normalized_shape: Shape,
    # 1e-6 in the functions and 1e-5 in the modules, as in Apex
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Layer norm over the last dims, normalized_shape, with weight and bias of that shape; in the input's dtype."""
    return _norm("fused_layer_norm_affine", input, weight, bias, normalized_shape, eps, False, False)


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """`fused_layer_norm_affine` without weight and bias."""
    return _norm("fused_layer_norm", input, None, None, normalized_shape, eps, False, False)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """`fused_layer_norm_affine` in the weight's dtype."""
    return _norm("mixed_dtype_fused_layer_norm_affine", input, weight, bias, normalized_shape, eps, False, True)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Root-mean-square norm over the last dims, normalized_shape, in the input's dtype."""
    return _norm("fused_rms_norm_affine", input, weight, None, normalized_shape, eps, True, False)


def fused_rms_norm(input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    """`fused_rms_norm_affine` without weight."""
    return _norm("fused_rms_norm", input, None, None, normalized_shape, eps, True, False)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """`fused_rms_norm_affine` in the weight's dtype."""
    return _norm("mixed_dtype_fused_rms_norm_affine", input, weight, None, normalized_shape, eps, True, True)


def manual_rms_norm(input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float) -> Tensor:
    """The same; their path in PyTorch."""
    return _norm("manual_rms_norm", input, weight, None, normalized_shape, eps, True, False)


class _Norm(nn.Module):
    rms: bool
    mixed = False
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__()
        self.normalized_shape = _shape(normalized_shape)
        self.eps, self.elementwise_affine, self.memory_efficient = eps, elementwise_affine, memory_efficient
        self.weight = nn.Parameter(torch.ones(self.normalized_shape)) if elementwise_affine else None
        # RMSNorm has no bias attribute there either, so state dicts agree
        if not self.rms:
            self.bias = nn.Parameter(torch.zeros(self.normalized_shape)) if elementwise_affine else None

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if not self.rms and self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.rms else self.bias
        name = type(self).__name__
        return _norm(name, input, self.weight, bias, self.normalized_shape, self.eps, self.rms, self.mixed)

    def extra_repr(self) -> str:
        return f"{tuple(self.normalized_shape)}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class FusedLayerNorm(_Norm):
    """Layer norm over the last dims with Apex's arguments; in the input's dtype."""

    rms = False


class FusedRMSNorm(_Norm):
    """Root-mean-square norm over the last dims with Apex's arguments; in the input's dtype."""

    rms = True


class MixedFusedLayerNorm(FusedLayerNorm):
    """`FusedLayerNorm` in the weight's dtype."""

    mixed = True

    def __init__(
        self, normalized_shape: Shape, eps: float = 1e-5, *, memory_efficient: bool = False, **kwargs: bool
    ) -> None:
        # a keyword that Apex warns about and ignores
        _always_affine(type(self).__name__, kwargs)
        super().__init__(normalized_shape, eps, True, memory_efficient)


class MixedFusedRMSNorm(FusedRMSNorm):
    """`FusedRMSNorm` in the weight's dtype."""

    mixed = True

    def __init__(
        self, normalized_shape: Shape, eps: float = 1e-5, *, memory_efficient: bool = False, **kwargs: bool
    ) -> None:
        _always_affine(type(self).__name__, kwargs)
        super().__init__(normalized_shape, eps, True, memory_efficient)


def _always_affine(name: str, kwargs: dict[str, bool]) -> None:
    if "elementwise_affine" in kwargs:
        warnings.warn(f"{name} does not support `elementwise_affine` argument", stacklevel=3)
        if not kwargs.pop("elementwise_affine"):
            raise RuntimeError(f"{name} does not support `elementwise_affine = False`")
    if kwargs:
        raise TypeError(f"{name} got an unexpected keyword argument {next(iter(kwargs))!r}")


def _shape(normalized_shape: Shape) -> torch.Size:
    return torch.Size((normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape)


def _norm(
    op: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: Shape,
    eps: float,
    rms: bool,
    mixed: bool,
) -> Tensor:
    shape = _shape(normalized_shape)
    checks.require(
        x.shape[x.dim() - len(shape) :] == shape, op, "input", f"end in the dims {list(shape)}", list(x.shape)
    )
    # Apex casts all arguments under autocast, weights too; the meta device has none
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        # autocast never casts float64
        weight, bias = (t if t is None or t.dtype is torch.float64 else t.to(dtype) for t in (weight, bias))
        x = x if x.dtype is torch.float64 else x.to(dtype)
    result = weight.dtype if mixed and weight is not None else x.dtype
    # computed in the wider of both dtypes and rounded once
    rows = x.to(torch.promote_types(x.dtype, result)).flatten(x.dim() - len(shape))
    flat = [None if t is None else t.flatten() for t in (weight, bias)]
    # one flat row per normalized shape: our kernels take the last dim
    y = rms_norm(rows, *flat, eps=eps) if rms else layer_norm(rows, *flat, eps=eps)
    assert isinstance(y, Tensor)
    return y.view(x.shape).to(result)


__getattr__ = unknown(__name__)
