"""`fp8_dispatch(model, recipe)`: sends rows to experts on other ranks in FP8 (expert parallelism)."""

from torch import nn

from powertrain.nn.moe import Experts
from powertrain.quant.model import Part, Report
from powertrain.quant.recipe import Block, Recipe, Row
from powertrain.runtime import checks


def fp8_dispatch(model: nn.Module, recipe: Recipe | None) -> Report:
    """Send rows to the ranks of their experts in FP8: about half the bytes of bfloat16. In place.

        model    with experts (powertrain.nn.moe.Experts) that `Experts.shard` or `parallelize` spread over ranks
        recipe   whose scales rows are rounded by: `Row()` or `Block()` of powertrain.quant; None: as they are again
    Returns a Report: experts whose rows are sent in FP8, and why others' are not.

    Experts then compute with rounded rows, as FP8 products would: not the bits of rows sent in 16 bits, but those of
    rounding them where they arrive. Results and gradients are sent in the rows' dtype (`spread_experts`).
    Every rank makes the same call. Raises ValueError for a model without experts.
    """
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, Experts)]
    checks.require(bool(layers), "fp8_dispatch", "model", "have experts (powertrain.nn.moe.Experts)", "none")
    report = Report()
    for name, experts in layers:
        if why := _why_not(experts, recipe):
            report.left.append(Part(name, why=why))
            continue
        assert recipe is None or isinstance(recipe, Row | Block)
        experts.wire = recipe
        if recipe is not None:
            report.quantized.append(Part(name, recipe))
    return report


def _why_not(experts: Experts, recipe: Recipe | None) -> str | None:
    if recipe is not None and not isinstance(recipe, Row | Block):
        return "only recipes by row and by block can send rows: each row then has its own scales"
    return "one rank has all experts: nothing is sent" if experts.overlap is None else None
