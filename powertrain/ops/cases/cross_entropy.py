"""Calls that stand for cross_entropy."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.ops.cases import Case, randn
from powertrain.ops.cross_entropy import cross_entropy, cross_entropy_ref


def tokens(T: int, V: int, device: torch.device) -> Tensor:
    """Targets in [0, V), every fifth ignored."""
    target = torch.arange(T, device=device) * 7919 % V
    return torch.where(torch.arange(T, device=device) % 5 == 3, -100, target)


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    T, V = shape
    return {"logits": randn(T, V, dtype=dtype, device=device), "target": tokens(T, V, device)}


def plain_loss(
    logits: Tensor, target: Tensor, *, z_loss: float = 0.0, softcap: float | None = None, **options: Any
) -> Any:
    """Cross entropy as one writes it in PyTorch: float32, because in 16 bits the loss itself is too coarse."""
    z = logits.float()
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    loss = F.cross_entropy(z, target, **options)
    kept = target != -100
    return loss + z_loss * (torch.logsumexp(z, -1)[kept] ** 2).mean() if z_loss else loss


def _case(
    label: str, shape: tuple[int, int], run: dict[str, Any], small: tuple[int, int] = (7, 1301), **options: Any
) -> Case:
    return Case(
        "cross_entropy",
        label,
        partial(cross_entropy, **options, **run),
        partial(cross_entropy_ref, **options),
        partial(plain_loss, **options),
        _inputs,
        small,
        shape,
    )


FULL, ODD, SHORT = (8192, 128256), (8192, 50257), (32768, 1000)
CASES = [
    _case("", FULL, {}),
    _case("odd", ODD, {}, reduction="sum"),
    _case("none", FULL, {}, reduction="none"),
    _case("smoothing-z_loss-softcap", FULL, {}, label_smoothing=0.1, z_loss=1e-2, softcap=2.0),
    _case("grad_in_forward", FULL, {"grad_in_forward": True}),
    _case("short rows", SHORT, {}, small=(7, 301)),
    _case("short rows, grad_in_forward-smoothing", SHORT, {"grad_in_forward": True}, (7, 301), label_smoothing=0.1),
]
