"""Calls that stand for scaled_softmax."""

from typing import Any

import torch
from torch import Tensor

from powertrain.ops.cases import Case, randn
from powertrain.ops.softmax import scaled_softmax, scaled_softmax_ref


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    return {"x": randn(*shape, dtype=dtype, device=device)}


def _inputs_mask(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    mask = torch.rand(shape[0], 1, *shape[2:], device=device) < 0.5
    # a row without a key
    mask[0, :, 0] = True
    return {**_inputs(shape, dtype, device), "mask": mask}


def _call(function: Any, **options: Any) -> Any:
    return lambda **tensors: function(**tensors, scale=0.3, **options)


def _case(label: str, inputs: Any, tiny: tuple[int, ...], full: tuple[int, ...], **options: Any) -> Case:
    reference = _call(scaled_softmax_ref, **options)
    return Case("scaled_softmax", label, _call(scaled_softmax, **options), reference, reference, inputs, tiny, full)


CASES = [
    _case("", _inputs, (2, 3, 5, 21), (4, 16, 2048, 2048)),
    _case("masked", _inputs_mask, (2, 2, 3, 21), (4, 16, 2048, 2048)),
    _case("masked-uniform", _inputs_mask, (2, 2, 3, 21), (4, 16, 2048, 2048), fully_masked="uniform"),
    _case("causal", _inputs, (3, 9, 9), (64, 2048, 2048), is_causal=True),
    _case("causal, fewer queries", _inputs, (2, 5, 12), (64, 1024, 2048), is_causal=True),
]
