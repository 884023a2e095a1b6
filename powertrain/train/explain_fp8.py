"""What FP8 would do to a run: each linear layer's recipe or why it stays, expected times and memory; without a GPU."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from powertrain.models import build
from powertrain.quant.cost import Expected, expected
from powertrain.quant.model import Part
from powertrain.runtime.target import Target
from powertrain.train.config.schema import RunConfig
from powertrain.train.fp8 import quantize


@dataclass(frozen=True)
class Line:
    """Layers of one role and shape: their name with the block's number as *, how many, and one layer's figures.

    why        they stay in the run's precision; "" if they are FP8
    expected   None where that is so, and where no rate was measured
    """

    name: str
    count: int
    shape: tuple[int, int]
    recipe: str
    why: str
    expected: Expected | None


def explain(config: RunConfig, target: Target) -> tuple[Line, ...]:
    """Every linear layer of a run on `target`, for a micro-batch. Raises ValueError where fp8.recipe is none."""
    model = build(config.model)
    report = quantize(model, config.fp8, target)
    if report is None:
        raise ValueError("fp8.recipe must be tensor, tensor-delayed, row or block to be explained, got none")
    tokens = config.train.micro_batch_size * config.train.seq_length
    parts = {part.name: part for part in (*report.quantized, *report.left)}
    found: dict[tuple[object, ...], Line] = {}
    for name, part in _in_order(model, parts):
        layer: Any = model.get_submodule(name)
        N, K = layer.out_features, layer.in_features
        figures = expected(tokens, N, K, part.recipe, target) if part.recipe else None
        recipe = str(part.recipe or config.train.precision)
        line = Line(re.sub(r"\.\d+\.", ".*.", name), 1, (N, K), recipe, part.why, figures)
        key = (line.name, line.shape, line.why)
        before = found.get(key)
        found[key] = line if before is None else replace(before, count=before.count + 1)
    return tuple(found.values())


def _in_order(model: nn.Module, parts: dict[str, Part]) -> Iterator[tuple[str, Part]]:
    return ((name, parts[name]) for name, _ in model.named_modules() if name in parts)
