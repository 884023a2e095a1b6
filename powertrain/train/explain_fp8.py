"""What FP8 would do to a run: each linear layer's recipe or why it stays, expected times and memory; without a GPU."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from powertrain.models import build
from powertrain.ops.shapes import cdiv
from powertrain.quant.cost import Expected, expected, expected_grouped
from powertrain.quant.grouped import GroupedProducts
from powertrain.quant.model import Part
from powertrain.quant.wire import why_not_shards, wire_bytes
from powertrain.runtime.target import Target
from powertrain.train.config.schema import RunConfig
from powertrain.train.fp8 import quantize


@dataclass(frozen=True)
class Line:
    """Layers of one role and shape: their name with the block's number as *, how many, and one layer's figures.

    why        they stay in the run's precision; "" if they are FP8
    wire       bytes of one gather of a weight in 16 bits, and in FP8, None where fp8.wire or the sizes rule it out
    expected   None where that is so, and where no rate was measured
    """

    name: str
    count: int
    shape: tuple[int, int]
    recipe: str
    why: str
    wire: tuple[int, int | None]
    expected: Expected | None


def explain(config: RunConfig, target: Target) -> tuple[Line, ...]:
    """Every linear layer of a run on `target`, for a micro-batch. Raises ValueError where fp8.recipe is none."""
    model = build(config.model)
    report = quantize(model, config.fp8, target)
    if report is None:
        raise ValueError("fp8.recipe must be tensor, tensor-delayed, row or block to be explained, got none")
    parts = {part.name: part for part in (*report.quantized, *report.left)}
    found: dict[tuple[object, ...], Line] = {}
    for name, part in _in_order(model, parts):
        for line in _lines(name, part, model.get_submodule(name), config, target):
            key = (line.name, line.shape, line.why)
            before = found.get(key)
            found[key] = line if before is None else replace(before, count=before.count + 1)
    return tuple(found.values())


def _lines(name: str, part: Part, layer: Any, config: RunConfig, target: Target) -> Iterator[Line]:
    """One of a linear layer; of experts one of each weight."""
    tokens = config.train.micro_batch_size * config.train.seq_length
    plain, recipe = config.train.precision, part.recipe
    where = re.sub(r"\.\d+\.", ".*.", name)
    if not isinstance(layer, GroupedProducts):
        N, K = layer.out_features, layer.in_features
        figures = expected(tokens, N, K, recipe, target) if recipe else None
        yield Line(where, 1, (N, K), str(recipe or plain), part.why, _wire(N, K, part, config), figures)
        return
    rows = tokens * getattr(config.model, "experts_per_token", 1)
    for weight, (E, N, K) in layer.grouped_weights().items():
        figures = expected_grouped(rows, E, N, K, recipe, target) if recipe else None
        why = part.why
        if figures is not None and not figures.wins:
            why, figures = f"FP8 by {recipe} would take {figures.total:.2f} ms, bf16 {figures.bf16:.2f}", None
        wire = _wire(E * N, K, Part(name), config)
        yield Line(f"{where}.{weight}", 1, (N, K), plain if why else str(recipe), why, wire, figures)


def shard_ranks(config: RunConfig) -> int:
    """Ranks that share a weight: parallel.shard times context; 8 where it depends on the number of ranks."""
    parallel = config.parallel
    if parallel.strategy == "ddp":
        return 1
    return (8 if parallel.shard < 1 else parallel.shard) * parallel.context


def _wire(N: int, K: int, part: Part, config: RunConfig) -> tuple[int, int | None]:
    ranks, recipe = shard_ranks(config), part.recipe
    plain = 2 * K * cdiv(N, ranks) * ranks
    if config.fp8.wire != "fp8" or recipe is None or why_not_shards(N, recipe, ranks):
        return plain, None
    return plain, wire_bytes(N, K, recipe, ranks)


def _in_order(model: nn.Module, parts: dict[str, Part]) -> Iterator[tuple[str, Part]]:
    return ((name, parts[name]) for name, _ in model.named_modules() if name in parts)
