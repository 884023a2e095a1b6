"""Calls that stand for moe_route, moe_permute and moe_unpermute."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from powertrain.ops.cases import Case, randn
from powertrain.ops.moe import (
    moe_permute,
    moe_permute_ref,
    moe_route,
    moe_route_ref,
    moe_unpermute,
    moe_unpermute_ref,
)


def _logits(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """No two equal in a row, in any dtype: which experts are chosen is then no matter of rounding."""
    T, E = shape
    ranks = torch.rand(T, E, device=device).argsort(-1).to(torch.float32)
    return (ranks * (4 / E) - 2).to(dtype).requires_grad_()


def _route_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    return {"logits": _logits(shape, dtype, device)}


def _bias_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    bias = torch.linspace(-0.3, 0.3, shape[1], device=device).roll(5)
    return {**_route_inputs(shape, dtype, device), "correction_bias": bias}


def _route(label: str, inputs: Any, tiny: tuple[int, ...], full: tuple[int, ...], **options: Any) -> Case:
    def weights(function: Any) -> Any:
        return lambda **tensors: function(**tensors, **options)[0]

    run, reference = weights(moe_route), weights(moe_route_ref)
    return Case("moe_route", label, run, reference, reference, inputs, tiny, full)


def _experts(T: int, E: int, k: int, device: torch.device) -> Tensor:
    """k different experts a token, the last expert left out."""
    return ((torch.arange(T, device=device)[:, None] * 7 + torch.arange(k, device=device) * 3) % (E - 1)).to(
        torch.int32
    )


def _permute_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    T, E, k, H = shape
    return {"x": randn(T, H, dtype=dtype, device=device), "experts": _experts(T, E, k, device)}


def _permuted(function: Any, num_experts: int) -> Any:
    return lambda x, experts: function(x, experts, num_experts)[0]


def _permute(E: int, tiny: tuple[int, ...], full: tuple[int, ...]) -> Case:
    run, reference = _permuted(moe_permute, E), _permuted(moe_permute_ref, E)
    return Case("moe_permute", "", run, reference, reference, _permute_inputs, tiny, full)


def _unpermute_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    T, k, H = shape
    positions = (torch.arange(T * k, device=device) * 7919 % (T * k)).to(torch.int32).view(T, k)
    return {"rows": randn(T * k, H, dtype=dtype, device=device), "positions": positions}


def _weighted_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    weights = randn(*shape[:2], dtype=torch.float32, device=device)
    return {**_unpermute_inputs(shape, dtype, device), "weights": weights}


_unpermute = partial(Case, "moe_unpermute")
UNPERMUTE = (moe_unpermute, moe_unpermute_ref, moe_unpermute_ref)
# full: DeepSeek-V2-Lite's 6 of 64 and DeepSeek-V3's 8 of 256, 16384 tokens
CASES = [
    _route("", _route_inputs, (7, 20), (16384, 64), top_k=6),
    _route("normalized", _route_inputs, (7, 20), (16384, 64), top_k=3, normalize=True, scaling_factor=2.0),
    _route("deepseek_v3", _bias_inputs, (7, 24), (16384, 256), top_k=4, score="sigmoid", normalize=True,
           scaling_factor=2.5, num_groups=4, top_groups=2),
    _permute(64, (11, 64, 3, 40), (16384, 64, 6, 2048)),
    _unpermute("", *UNPERMUTE, _unpermute_inputs, (11, 3, 40), (16384, 6, 2048)),
    _unpermute("weighted", *UNPERMUTE, _weighted_inputs, (11, 3, 40), (16384, 6, 2048)),
]  # fmt: skip
