"""Calls that stand for merge_attentions."""

from typing import Any

import torch
from torch import Tensor

from powertrain.ops.attention.merge import merge_attentions, merge_attentions_ref
from powertrain.ops.cases import Case, randn


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
    B, S, H, D = shape
    made: dict[str, Tensor | None] = {name: randn(B, S, H, D, dtype=dtype, device=device) for name in ("a", "b")}
    return made | {name: randn(B, H, S, dtype=torch.float32, device=device) for name in ("lse_a", "lse_b")}


def _call(function: Any) -> Any:
    return lambda a, b, lse_a, lse_b: function((a, b), (lse_a, lse_b))


CASES = [
    Case(
        "merge_attentions", "", _call(merge_attentions), _call(merge_attentions_ref), _call(merge_attentions_ref),
        _inputs, (2, 3, 2, 21), (4, 4096, 32, 128),
    ),
]  # fmt: skip
