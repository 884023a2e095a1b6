"""FP8 in a run: its section of the config as a recipe, applied to the model."""

from collections import Counter
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from powertrain.models import build
from powertrain.nn.fp8_dispatch import fp8_dispatch
from powertrain.nn.moe import Experts
from powertrain.quant.linear import BUFFERS, FP8Linear, TakesRecipe
from powertrain.quant.model import GROUPS, Report, quantize_model
from powertrain.quant.recipe import Block, Recipe, Row, Tensor
from powertrain.quant.wire import fp8_all_gather
from powertrain.runtime.target import Target
from powertrain.train.config.schema import FP8Config, RunConfig


def recipe_of(config: FP8Config) -> Recipe | None:
    """The recipe that a run's section `fp8` states; None: none."""
    formats: dict[str, Any] = {} if config.format is None else {"format": config.format}
    if config.recipe == "none":
        return None
    if config.recipe == "row":
        return Row(**formats)
    if config.recipe == "block":
        return Block(**formats)
    return Tensor(
        scale="delayed" if config.recipe == "tensor-delayed" else "current", history=config.history,
        most_recent=config.most_recent, margin=config.margin, **formats,
    )  # fmt: skip


def quantize(model: nn.Module, config: FP8Config, target: Target | None = None) -> Report | None:
    """`quantize_model` as a run's config states it; None if it states none. ValueErrors name the config's keys."""
    recipe = recipe_of(config)
    if recipe is None:
        return None
    try:
        return quantize_model(model, recipe, keep=config.keep, target=target)
    except ValueError as error:
        raise ValueError(str(error).replace("quantize_model: keep", "fp8.keep")) from None


class Wires(NamedTuple):
    """What is sent in FP8: weights of layers, and rows to experts, None: there are none; tokens of layers sharded over
    tensor ranks, so many."""

    gathered: Report | None = None
    dispatched: Report | None = None
    tensor_parallel: int = 0


def wires(model: nn.Module, config: FP8Config, quantized: Report | None) -> Wires:
    """`fp8_all_gather` and `fp8_dispatch` if a run's config states `fp8.wire`."""
    recipe = recipe_of(config)
    sharded = sum(isinstance(m, TakesRecipe) and m.fp8_recipe is not None for m in model.modules())
    if config.wire != "fp8" or recipe is None:
        return Wires(tensor_parallel=sharded)
    is_spread = any(isinstance(m, Experts) and m.overlap is not None for m in model.modules())
    return Wires(
        fp8_all_gather(model) if quantized is not None and _has_layers(model) else None,
        fp8_dispatch(model, recipe) if is_spread else None,
        sharded,
    )


def _has_layers(model: nn.Module) -> bool:
    return any(isinstance(module, FP8Linear) for module in model.modules())


def quantize_run(model: nn.Module, config: RunConfig, *, staged: bool) -> Report | None:
    """`quantize` of a run's model, or of a rank's pipeline stages."""
    return quantize_stages(model, config) if staged else quantize(model, config.fp8)


def quantize_stages(model: nn.Module, config: RunConfig) -> Report | None:
    """`quantize` of a pipeline's rank, which has some layers of the run's model."""
    names = [name for name, _ in build(config.model).named_modules()]
    known = (entry in GROUPS or any(fnmatchcase(name, entry) for name in names) for entry in config.fp8.keep)
    if unknown := [entry for entry, is_known in zip(config.fp8.keep, known, strict=True) if not is_known]:
        raise ValueError(
            f"fp8.keep must name layers, or be of {', '.join(GROUPS)}, got {', '.join(map(repr, unknown))}"
        )
    return quantize_part(model, config.fp8)


def quantize_part(model: nn.Module, config: FP8Config, target: Target | None = None) -> Report | None:
    """`quantize` of a model built with some of a run's layers only: patterns that name none of these are left out."""
    names = [name for name, _ in model.named_modules()]
    keep = (entry for entry in config.keep if entry in GROUPS or any(fnmatchcase(name, entry) for name in names))
    return quantize(model, config.model_copy(update={"keep": tuple(keep)}), target)


def is_statistic(name: str) -> bool:
    """Whether a tensor of a checkpoint is delayed scaling's, which a run without it has not: it then starts at 0."""
    return name.rpartition(".")[2] in BUFFERS


def summary(report: Report, wires: Wires = Wires()) -> str:  # noqa: B008
    """How many layers compute in FP8, which weights and rows are sent in FP8, and each reason why others are not."""
    recipes = {str(part.recipe) for part in report.quantized}
    lines = [f"fp8: {len(report.quantized)} linear layers by {' and '.join(sorted(recipes)) or 'no recipe'}"]
    if report.kept:
        lines.append(f"fp8.keep: {len(report.kept)} gated MLPs keep gate and up in FP8")
    lines += _reasons(report, "stay")
    if wires.tensor_parallel:
        lines.append(f"fp8: {wires.tensor_parallel} of them are sharded over tensor ranks, which gather tokens in FP8")
    if wires.gathered is not None:
        lines.append(f"fp8.wire: the weights of {len(wires.gathered.quantized)} of them are gathered in FP8")
        lines += _reasons(wires.gathered, "are not")
    if wires.dispatched is not None:
        lines.append(f"fp8.wire: rows are sent in FP8 to the experts of {len(wires.dispatched.quantized)} layers")
        lines += _reasons(wires.dispatched, "do not")
    return "\n".join(lines)


def _reasons(report: Report, verb: str) -> list[str]:
    counts = Counter(part.why for part in report.left)
    return [f"  {count} {verb}: {why}" for why, count in counts.items()]
