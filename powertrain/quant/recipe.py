"""Recipes: which elements of a linear layer's operands share a scale, and in which of the two FP8 formats they are.

    from powertrain.quant import Block, Row, Tensor, quantize_model
    quantize_model(model, Tensor())                    # a scale a tensor, of its own largest magnitude
    quantize_model(model, Tensor(scale="delayed"))     # of the last steps' magnitudes: tensors are read once
    quantize_model(model, Row())                       # a scale a row
    quantize_model(model, Block())                     # 1x128 activations and gradients, 128x128 weights

All are frozen, hashable and compare by value. Inputs and weights are e4m3 (3 mantissa bits, to 448); gradients are e5m2
(2 bits, to 57344) with format "hybrid", e4m3 with "e4m3".
"""

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from powertrain.ops.fp8.linear import By
from powertrain.runtime import checks, kinds

Format = Literal["hybrid", "e4m3"]


def _check_kinds(recipe: "Recipe") -> None:
    """Refuse fields of the wrong kind: `power_of_two="no"` would count as True, `history=2.5` fail in a later call."""
    for field in fields(recipe):
        kind, value = field.type, getattr(recipe, field.name)
        if not kinds.fits(kind, value) or (kind is int and isinstance(value, float)):
            checks.fail(type(recipe).__name__, field.name, f"be {kinds.words(kind)}", checks.described(value))


@dataclass(frozen=True)
class Tensor:
    """One scale a tensor.

    scale         "current": from the tensor's own largest magnitude. A tensor is read once where its scale, a power of
                  two, is that of the last call, else twice. "delayed": from the largest magnitudes of the last steps,
                  kept in buffers of the layer; larger values saturate. The first step uses the tensor's own. Call
                  `update_scales(model)` after each optimizer step
    format        "hybrid": gradients in e5m2; "e4m3"
    power_of_two  scales rounded down to powers of two, which change no mantissa; False: TransformerEngine's
    fast          outputs accumulate in the tensor cores alone (about 14 bits on sm_90); gradients never do
    history       delayed: number of steps whose largest magnitudes are kept
    most_recent   delayed: the last step's magnitude is used, not the largest of the history
    margin        delayed: scales are divided by 2 ** margin
    """

    scale: Literal["current", "delayed"] = "current"
    format: Format = "hybrid"
    power_of_two: bool = True
    fast: bool = True
    history: int = 1024
    most_recent: bool = False
    margin: int = 0

    # of the class and not a field: no argument can change it
    by: ClassVar[By] = "tensor"

    def __post_init__(self) -> None:
        _check_kinds(self)
        checks.require(self.history >= 1, "Tensor", "history", "be at least 1", self.history)
        checks.require(self.margin >= 0, "Tensor", "margin", "be at least 0", self.margin)

    @property
    def is_delayed(self) -> bool:
        return self.scale == "delayed"

    @property
    def keeps_last(self) -> bool:
        """Whether a layer keeps the last call's scales to quantize in one read."""
        return self.scale == "current" and self.power_of_two

    def __str__(self) -> str:
        return "tensor-delayed" if self.is_delayed else "tensor"


@dataclass(frozen=True)
class Row:
    """One scale a row: of x's tokens, W's outputs, dy's tokens; dW sums over groups of 128 tokens.

    format, power_of_two, fast as of `Tensor`.
    """

    format: Format = "e4m3"
    power_of_two: bool = True
    fast: bool = True

    by: ClassVar[By] = "row"
    is_delayed: ClassVar[bool] = False
    keeps_last: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_kinds(self)

    def __str__(self) -> str:
        return "row"


@dataclass(frozen=True)
class Block:
    """One scale for 1x128 elements of x and dy and 128x128 of W (DeepSeek-V3); sums are promoted every 128.

    format, power_of_two as of `Tensor`.
    """

    format: Format = "e4m3"
    power_of_two: bool = True

    by: ClassVar[By] = "block"
    is_delayed: ClassVar[bool] = False
    keeps_last: ClassVar[bool] = False
    # sums are promoted every 128 elements, since scales change there
    fast: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_kinds(self)

    def __str__(self) -> str:
        return "block"


Recipe = Tensor | Row | Block
NAMES = ("tensor", "tensor-delayed", "row", "block")


def named(name: str) -> Recipe:
    """The recipe of a name, with its defaults."""
    # a misspelt name must not become Block, the last case
    checks.one_of("recipe", "name", name, NAMES)
    if name.startswith("tensor"):
        return Tensor(scale="delayed" if name == "tensor-delayed" else "current")
    return Row() if name == "row" else Block()


def grad_format(recipe: Recipe) -> str:
    return "e5m2" if recipe.format == "hybrid" else "e4m3"
