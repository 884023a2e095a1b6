"""RMSNorm and LayerNorm of any class: a module without children, with one weight [N] and perhaps a bias [N]."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.ops.norm import layer_norm, rms_norm

KIND = "norm"
Candidate = tuple[str, Callable[..., Any]]


def is_norm(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    return (
        # weights beyond these mean another formula
        weight is not None
        and weight.ndim == 1
        and parameters.keys() <= {"weight", "bias"}
        and not list(module.children())
        and _eps(module) is not None
        # GroupNorm has weight [N] too, and normalizes over groups
        and "Group" not in type(module).__name__
        # BatchNorm has running statistics
        and not isinstance(module, nn.modules.batchnorm._NormBase)
    )


def width(module: Any) -> int:
    return module.weight.shape[0]


def _eps(module: nn.Module) -> float | None:
    """The one small number among the module's attributes."""
    # eps has many names (eps, variance_epsilon, norm_eps); its size is what is common
    small = [v for k, v in vars(module).items() if isinstance(v, float) and 0 < v < 1e-2]
    return small[0] if len(small) == 1 else None


def candidates(module: nn.Module) -> list[Candidate]:
    """In the order in which they are preferred where several compute the same bits."""
    eps = _eps(module)
    assert eps is not None
    candidates = []
    # "llama" rounds the normalized value before the weight, "te" after the product: they differ in the last bit of
    # bfloat16
    for casting in ("llama", "te"):
        # Gemma's weight is stored as w - 1
        for zero_centered in (False, True):
            name = f"rms_norm, {casting} casting" + (", weight + 1" if zero_centered else "")
            candidates.append((name, _rms(eps, casting, zero_centered)))
    for zero_centered in (False, True):
        name = "layer_norm" + (", weight + 1" if zero_centered else "")
        candidates.append((name, _layer(eps, zero_centered)))
    return candidates


def _rms(eps: float, casting: Any, zero_centered: bool) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor, *args: Any, **options: Any) -> Any:
        if args or options or not _serves(self, x):
            return type(self).forward(self, x, *args, **options)
        return rms_norm(
            x, self.weight, getattr(self, "bias", None), eps=eps, zero_centered=zero_centered, casting=casting
        )

    return forward


def _layer(eps: float, zero_centered: bool) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor, *args: Any, **options: Any) -> Any:
        if args or options or not _serves(self, x):
            return type(self).forward(self, x, *args, **options)
        return layer_norm(x, self.weight, getattr(self, "bias", None), eps=eps, zero_centered=zero_centered)

    return forward


def _serves(module: Any, x: Tensor) -> bool:
    """Inductor fuses a norm with the additions around it; and a weight of another dtype changes the result's."""
    return not torch.compiler.is_compiling() and x.dtype is module.weight.dtype
