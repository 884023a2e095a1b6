"""Calls that stand for lora_linear."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.ops.cases import Case, randn
from powertrain.ops.lora_linear import lora_linear, lora_linear_ref


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    T, K, N, r = shape
    made = {"x": (T, K), "weight": (N, K), "A": (r, K), "B": (N, r)}
    sizes = {"x": 1.0, "weight": K**-0.5, "A": K**-0.5, "B": r**-0.5}
    tensors: dict[str, Tensor | None] = {}
    for name, dims in made.items():
        values = randn(*dims, dtype=torch.float32, device=device, grad=False) * sizes[name]
        tensors[name] = values.to(dtype).requires_grad_(name != "weight")
    return tensors


def _inputs_dora(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    magnitude, bias = (randn(shape[2], dtype=dtype, device=device) for _ in range(2))
    return {**_inputs(shape, dtype, device), "magnitude": magnitude, "bias": bias}


def _inputs_all(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    """A layer that is trained too, and dropout before the adapter."""
    tensors = _inputs(shape, dtype, device)
    assert tensors["weight"] is not None
    tensors["weight"].requires_grad_()
    x_adapter = randn(*shape[:2], dtype=dtype, device=device)
    return {**tensors, "bias": randn(shape[2], dtype=dtype, device=device), "x_adapter": x_adapter}


def plain(
    x: Tensor, weight: Tensor, A: Tensor, B: Tensor, bias: Tensor | None = None, magnitude: Tensor | None = None,
    x_adapter: Tensor | None = None, scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """As PEFT computes it."""
    z = F.linear(x, weight) + F.linear(F.linear(x if x_adapter is None else x_adapter, A), B) * scale
    if magnitude is not None:
        norm = (weight + scale * B @ A).float().norm(dim=1).detach()
        z = z * (magnitude / norm).to(z.dtype)
    return z if bias is None else z + bias


def _case(label: str, inputs: Any, **options: Any) -> Case:
    run, reference, usual = (partial(f, **options) for f in (lora_linear, lora_linear_ref, plain))
    return Case("lora_linear", label, run, reference, usual, inputs, (13, 40, 56, 8), (8192, 4096, 4096, 16))


CASES = [
    _case("", _inputs, scale=2.0),
    _case("dora", _inputs_dora, scale=0.5),
    _case("all", _inputs_all),
]
