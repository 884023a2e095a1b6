"""Effects of FP8 on a run: each linear layer's recipe or why it has none, with expected times and memory; the same of
experts' products, and bytes of the rows sent to them. Without a GPU."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from powertrain.models import build
from powertrain.models.parallelize import check_expert
from powertrain.nn.moe import Experts
from powertrain.ops.shapes import cdiv
from powertrain.parallel.fp8_rows import FP8Rows
from powertrain.quant.cost import Expected, expected, expected_grouped
from powertrain.quant.grouped import GroupedProducts, why_not_grouped
from powertrain.quant.model import Part
from powertrain.quant.recipe import Block, Row
from powertrain.quant.wire import why_not_shards, wire_bytes
from powertrain.runtime.target import Target
from powertrain.train.config.schema import RunConfig
from powertrain.train.fp8 import quantize, recipe_of


@dataclass(frozen=True)
class Line:
    """Layers of one role and shape: their name with the block's number as *, how many, and one layer's figures.

    why        they stay in the run's precision; "" if they are FP8
    wire       bytes of one gather of a weight in 16 bits, and in FP8, None where fp8.wire or the sizes rule it out
    expected   None where no rate was measured, and of layers that stay for another reason than these figures
    """

    name: str
    count: int
    shape: tuple[int, int]
    recipe: str
    why: str
    wire: tuple[int, int | None]
    expected: Expected | None


@dataclass(frozen=True)
class SentRows:
    """Rows that a rank sends to experts on other ranks, in one layer's forward of a micro-batch, if tokens choose every
    expert equally often. As many results return, and backward sends and returns as many, all unquantized.

    name, count    the experts' name with the block's number as *, and how many layers have such
    ranks          that share the experts
    rows           on the mean
    plain, fp8     bytes of one row in the run's precision, and in FP8 with its scales and padding; None: by tensor
    is_fp8         they are sent in FP8 (fp8.wire)
    """

    name: str
    count: int
    ranks: int
    rows: int
    plain: int
    fp8: int | None
    is_fp8: bool

    def bytes_(self, is_fp8: bool) -> tuple[int, int]:
        """Bytes sent by all these layers: to the experts, and in all four transfers (to and back, twice)."""
        there = self.count * self.rows * (self.fp8 if is_fp8 and self.fp8 is not None else self.plain)
        return there, there + 3 * self.count * self.rows * self.plain


def explain(config: RunConfig, target: Target) -> tuple[Line, ...]:
    """Every linear layer of a run on `target`, for a micro-batch. Raises ValueError where fp8.recipe is none."""
    model = build(config.model)
    report = quantize(model, config.fp8, target)
    if report is None:
        raise ValueError("fp8.recipe must be tensor, tensor-delayed, row or block to be explained, got none")
    if config.parallel.expert > 1:
        check_expert(config.model, config.parallel.expert, _shard(config), config.parallel.tensor)
    parts = {part.name: part for part in (*report.quantized, *report.left)}
    lines: dict[tuple[object, ...], Line] = {}
    for name, part in _in_order(model, parts):
        for line in _lines(name, part, model.get_submodule(name), config, target):
            # equal layers of all blocks become one line with a count
            key = (line.name, line.shape, line.why)
            before = lines.get(key)
            lines[key] = line if before is None else replace(before, count=before.count + 1)
    return tuple(lines.values())


def _lines(name: str, part: Part, layer: Any, config: RunConfig, target: Target) -> Iterator[Line]:
    """One of a linear layer; of experts one of each weight."""
    tokens = config.train.micro_batch_size * config.train.seq_length
    plain, recipe = config.train.precision, part.recipe
    # the block's number, by which equal layers would differ
    where = re.sub(r"\.\d+\.", ".*.", name)
    if not isinstance(layer, GroupedProducts):
        N, K = layer.out_features, layer.in_features
        figures = expected(tokens, N, K, recipe, target) if recipe else None
        yield Line(where, 1, (N, K), str(recipe or plain), part.why, _wire(N, K, part, config), figures)
        return
    spread, stated, why = config.parallel.expert, recipe_of(config.fp8), part.why
    assert stated is not None  # quantize has returned a report
    # not so of those that fp8.keep names
    is_considered = recipe is not None or why == why_not_grouped(layer, stated, target)
    if is_considered and spread > 1:
        is_considered, why = False, f"experts spread over {spread} ranks compute in 16 bits"
    for weight, (E, N, K) in layer.grouped_weights().items():
        rows = tokens * _experts_per_token(config)
        figures = expected_grouped(rows, E, N, K, stated, target) if is_considered else None
        reason = why if figures is None else "" if figures.wins else f"FP8 by {stated} is expected to be slower"
        wire = _wire(E // spread * N, K, Part(name), config, spread)
        yield Line(f"{where}.{weight}", 1, (N, K), plain if reason else str(recipe), reason, wire, figures)


def _experts_per_token(config: RunConfig) -> int:
    found: int = getattr(config.model, "experts_per_token", 1)
    return found


def sent_rows(config: RunConfig) -> tuple[SentRows, ...]:
    """The rows that a run sends to experts on other ranks (parallel.expert); () for other runs."""
    ranks, recipe = config.parallel.expert, recipe_of(config.fp8)
    if ranks == 1:
        return ()
    rows = config.train.micro_batch_size * config.train.seq_length * _experts_per_token(config)
    itemsize = 4 if config.train.precision == "fp32" else 2
    found: Counter[tuple[str, int]] = Counter()
    for name, module in build(config.model).named_modules():
        if isinstance(module, Experts):
            found[re.sub(r"\.\d+\.", ".*.", name), module.gate_up.shape[2]] += 1
    # only these have scales per row, which can be sent with it
    wire = recipe if isinstance(recipe, Row | Block) else None
    # a rank's own share of the rows stays
    sent, is_fp8 = rows - rows // ranks, config.fp8.wire == "fp8" and wire is not None
    sizes = {K: None if wire is None else FP8Rows(wire, K, torch.bfloat16).row_bytes for _, K in found}
    return tuple(
        SentRows(name, count, ranks, sent, itemsize * K, sizes[K], is_fp8) for (name, K), count in found.items()
    )


def _shard(config: RunConfig) -> int:
    """parallel.shard; where that depends on the number of ranks, 8, or the next multiple of parallel.expert."""
    parallel = config.parallel
    return parallel.shard if parallel.shard > 0 else cdiv(8, parallel.expert) * parallel.expert


def shard_ranks(config: RunConfig) -> int:
    """Ranks that share a weight: parallel.shard times context; 8 where it depends on the number of ranks."""
    return 1 if config.parallel.strategy == "ddp" else _shard(config) * config.parallel.context


def _wire(N: int, K: int, part: Part, config: RunConfig, spread: int = 1) -> tuple[int, int | None]:
    """spread: so many of the ranks divide the experts, and gather none of each other's."""
    ranks, recipe = shard_ranks(config) // spread, part.recipe
    plain = 2 * K * cdiv(N, ranks) * ranks
    if config.fp8.wire != "fp8" or recipe is None or why_not_shards(N, recipe, ranks):
        return plain, None
    return plain, wire_bytes(N, K, recipe, ranks)


def _in_order(model: nn.Module, parts: dict[str, Part]) -> Iterator[tuple[str, Part]]:
    return ((name, parts[name]) for name, _ in model.named_modules() if name in parts)
