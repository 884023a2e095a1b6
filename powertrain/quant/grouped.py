"""GroupedProducts: layers of grouped GEMMs (experts), computed in FP8 if that is expected to be faster."""

from torch import Tensor, nn

from powertrain.ops.fp8.grouped import fp8_grouped_gemm
from powertrain.ops.grouped_gemm import grouped_gemm
from powertrain.quant.cost import expected_grouped
from powertrain.quant.recipe import Recipe, Row, grad_format
from powertrain.runtime import tracing
from powertrain.runtime.target import Target


class GroupedProducts(nn.Module):
    """A module that multiplies groups of rows with `grouped`. `quantize_model` gives it a recipe, as it does layers."""

    fp8_recipe: Recipe | None = None

    def grouped_weights(self) -> dict[str, tuple[int, int, int]]:
        """Name -> [E, N, K] of each of its weights."""
        raise NotImplementedError

    def why_not_fp8(self) -> str | None:
        """Why its products cannot be FP8 as it is now, or None."""
        return None

    def grouped(self, rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        """`grouped_gemm`, or `fp8_grouped_gemm` by the recipe where it is not expected to be slower.

        The expectation is of sizes alone (quant/cost.py): the same call takes the same products each time, and its
        recomputation too. On the CPU FP8 is emulated whatever the sizes are, for tests.
        """
        recipe = self.fp8_recipe
        if recipe is None:
            return grouped_gemm(rows, weight, offsets)
        if rows.device.type == "cuda":
            T, (E, N, K) = rows.shape[0], weight.shape
            expected = expected_grouped(T, E, N, K, recipe, Target.of(rows.device))
            if expected is None or not expected.wins:
                if tracing.first(("fp8_grouped", T, E, N, K, str(recipe))):
                    words = f"experts {[E, N, K]}, {T} rows: 16 bits, expected to be faster than FP8 by {recipe}"
                    tracing.event("dispatch", words, op="fp8_grouped_gemm")
                return grouped_gemm(rows, weight, offsets)
        return fp8_grouped_gemm(
            rows, weight, offsets, by="row" if isinstance(recipe, Row) else "block",
            grad_format=grad_format(recipe), power_of_two=recipe.power_of_two,
        )  # fmt: skip


def why_not_grouped(module: GroupedProducts, recipe: Recipe, target: Target | None) -> str | None:
    """Why the products of a module stay as they are with a recipe, or None."""
    if recipe.by == "tensor":
        return "grouped products of experts have scales by row and by block only"
    if why := module.why_not_fp8():
        return why
    if target is None:
        return None
    if not target.has_fp8:
        return f"sm_{target.arch} has no FP8 products"
    # so many rows that a weight's quantization does not count
    many = [expected_grouped(1 << 30, *sizes, recipe, target) for sizes in module.grouped_weights().values()]
    if any(figures is None for figures in many):
        return f"no rate of grouped FP8 products is known on sm_{target.arch}"
    if not any(figures is not None and figures.wins for figures in many):
        sizes = ", ".join("x".join(map(str, size)) for size in module.grouped_weights().values())
        return f"FP8 by {recipe} is not expected to be faster for grouped weights of {sizes}, with any number of rows"
    return None
