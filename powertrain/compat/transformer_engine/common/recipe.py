"""TransformerEngine's FP8 recipes, and the recipe of powertrain.quant that computes each.

    DelayedScaling         Tensor(scale="delayed", power_of_two=False)
    Float8CurrentScaling   Tensor(power_of_two=False)
    Float8BlockScaling     Block()

`quant_recipe(recipe)` makes it and refuses, by name, a field that would change results and that we cannot honour.
NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES, NVTE_FP8_BLOCK_SCALING_FP32_SCALES and NVTE_BACKWARD_OVERRIDE give fields their
defaults, as there; they are read when a recipe is made. Values of fields are checked when a recipe is used.
Source: the documentation of transformer_engine.common.recipe, and the defaults of its fields.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple

from powertrain.compat.missing import unknown
from powertrain.ops.conversion import unsupported
from powertrain.quant import recipe as quant
from powertrain.runtime import checks

__all__ = [
    "CustomRecipe", "DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "Format", "MMParams",
    "MXFP8BlockScaling", "NVFP4BlockScaling", "QParams", "Recipe",
]  # fmt: skip


class _Largest(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Number formats of a recipe, by the largest values in forward and backward.

    E4M3 and HYBRID (gradients in e5m2) are supported.
    """

    E2M1 = _Largest(6, 6)
    E4M3 = _Largest(448, 448)
    E5M2 = _Largest(57344, 57344)
    HYBRID = _Largest(448, 57344)


@dataclass(frozen=True)
class MMParams:
    """Of one product. use_split_accumulator: sums of the tensor cores are added to float32 ones every 128 of K."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """Of one operand's quantization. power_2_scale is supported; the other fields only with their defaults."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


# questions and not isinstance: user code asks `recipe.delayed()`, on classes too
class Recipe:
    """The class of all recipes, with questions about which one it is."""

    @classmethod
    def nvfp4(cls) -> bool:
        return issubclass(cls, NVFP4BlockScaling)

    @classmethod
    def mxfp8(cls) -> bool:
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def delayed(cls) -> bool:
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        return issubclass(cls, DelayedScaling | Float8CurrentScaling)

    @classmethod
    def float8_block_scaling(cls) -> bool:
        return issubclass(cls, Float8BlockScaling)

    @classmethod
    def custom(cls) -> bool:
        return issubclass(cls, CustomRecipe)


def _switch(name: str) -> Any:
    """A field whose default is another library's environment variable, 0 or 1."""
    # read when a recipe is made, not when this module is imported: tests and notebooks set the variable later
    return field(default_factory=lambda: os.getenv(name, "0") == "1")


def _override() -> Any:
    return field(default_factory=lambda: os.getenv("NVTE_BACKWARD_OVERRIDE"))


@dataclass
class DelayedScaling(Recipe):
    """One scale a tensor, from the largest magnitudes of past steps.

    scale = (max / amax) / 2 ** margin, amax the largest of amax_history_len steps ("max") or the last one
    ("most_recent"). reduce_amax: magnitudes are reduced over autocast's group, or over all ranks.
    Functions in amax_compute_algo and scaling_factor_compute_algo, and FP8 attention, are refused.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    # TransformerEngine's default; a history as long reacts late to shrinking amax
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = _override()


@dataclass
class Float8CurrentScaling(Recipe):
    """One scale a tensor, from its own largest magnitude: max / amax, rounded down to a power of two on request.

    use_power_2_scales sets power_2_scale of the attributes fp8_quant_fwd_inp, fp8_quant_fwd_weight and
    fp8_quant_bwd_grad (there only the environment variable does); all three must agree.
    """

    use_power_2_scales: bool = _switch("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES")
    fp8_format: Format = Format.HYBRID
    # the forward product may accumulate in the tensor core's own precision, backward may not: TransformerEngine's
    # defaults
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = _override()

    # a method and not fields: TransformerEngine sets these three after construction, and user code may overwrite them
    def __post_init__(self) -> None:
        quantization = QParams(power_2_scale=self.use_power_2_scales)
        self.fp8_quant_fwd_inp = self.fp8_quant_fwd_weight = self.fp8_quant_bwd_grad = quantization


@dataclass
class Float8BlockScaling(Recipe):
    """One scale for 1x128 values of inputs and gradients, and for 128x128 of weights; powers of two by default.

    use_f32_scales: scales are not rounded. Other block shapes are refused.
    """

    use_f32_scales: bool = _switch("NVTE_FP8_BLOCK_SCALING_FP32_SCALES")
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams()
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = _override()

    def __post_init__(self) -> None:
        quantization = QParams(power_2_scale=not self.use_f32_scales)
        self.fp8_quant_fwd_inp = self.fp8_quant_fwd_weight = self.fp8_quant_bwd_grad = quantization


@dataclass
# can be constructed, so that code which only defines recipes runs; autocast refuses it where it would be used
class MXFP8BlockScaling(Recipe):
    """1x32 blocks. Can be constructed; `autocast(enabled=True)` refuses it."""

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = _override()
    enable_2d_quantization: bool = False


@dataclass
class NVFP4BlockScaling(Recipe):
    """1x16 blocks of 4-bit values. Can be constructed; `autocast(enabled=True)` refuses it."""

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = _override()


@dataclass
class CustomRecipe(Recipe):
    """Quantizers by role. Can be constructed; `autocast(enabled=True)` refuses it."""

    qfactory: Callable[..., Any]
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = _override()
    quantization_alignment: int = 128


def quant_recipe(recipe: Recipe, where: str) -> quant.Recipe:
    """The recipe of powertrain.quant with the same numerics.

    where   what runs it, for errors: "sm_90", "the CPU"
    Raises NotImplementedError naming the recipe and the field that has no counterpart, ValueError for a bad value.
    """
    name = type(recipe).__name__
    # attention in FP8 would change results and is not computed here
    _require(name, recipe, fp8_dpa=(False, "attention in 16 bits"), fp8_mha=(False, "attention in 16 bits"))
    # backward_override asks for products in high precision in backward
    _require(name, recipe, backward_override=(None, "FP8 products in backward"))
    if isinstance(recipe, DelayedScaling):
        return _delayed(name, recipe)
    if isinstance(recipe, Float8CurrentScaling):
        # use_split_accumulator=False is torch._scaled_mm's use_fast_accum=True
        split = recipe.fp8_gemm_fprop.use_split_accumulator
        return quant.Tensor(format=_format(name, recipe), power_of_two=_power_of_two(name, recipe), fast=not split)
    if isinstance(recipe, Float8BlockScaling):
        # 1x128 and 128x128 blocks are the only ones that DeepSeek-V3's recipe and our kernels have
        _require(name, recipe, x_block_scaling_dim=(1, "1"), grad_block_scaling_dim=(1, "1"))
        _require(name, recipe, w_block_scaling_dim=(2, "2"), fp8_gemm_fprop=(MMParams(), "MMParams()"))
        return quant.Block(format=_format(name, recipe), power_of_two=_power_of_two(name, recipe))
    raise NotImplementedError(
        f"autocast: recipe = {name} is not supported on {where} or any other arch; nearest: Float8BlockScaling"
    )


def _delayed(name: str, recipe: DelayedScaling) -> quant.Recipe:
    # a function of the user's would run on the host in every step
    if callable(recipe.amax_compute_algo):
        unsupported(name, "amax_compute_algo", recipe.amax_compute_algo, "'max' or 'most_recent'")
    checks.one_of(name, "amax_compute_algo", recipe.amax_compute_algo, ("max", "most_recent"))
    _require(name, recipe, scaling_factor_compute_algo=(None, "None, with margin"))
    return quant.Tensor(
        scale="delayed", format=_format(name, recipe), power_of_two=False, history=recipe.amax_history_len,
        most_recent=recipe.amax_compute_algo == "most_recent", margin=recipe.margin,
    )  # fmt: skip


def _format(name: str, recipe: Any) -> quant.Format:
    if recipe.fp8_format not in (Format.E4M3, Format.HYBRID):
        checks.fail(name, "fp8_format", "be Format.E4M3 or Format.HYBRID", recipe.fp8_format)
    return "e4m3" if recipe.fp8_format is Format.E4M3 else "hybrid"


def _power_of_two(name: str, recipe: Any) -> bool:
    """Also: the products and the quantization are those that we have."""
    _require(name, recipe, fp8_gemm_dgrad=(MMParams(), "MMParams()"), fp8_gemm_wgrad=(MMParams(), "MMParams()"))
    power = recipe.fp8_quant_fwd_inp.power_2_scale
    # one power-of-two setting for all three operands, since one quant.Recipe describes the layer
    must = QParams(power_2_scale=power)
    for role in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        _require(name, recipe, **{role: (must, f"{must}, for all three")})
    return bool(power)


def _require(name: str, recipe: Any, **only: tuple[object, str]) -> None:
    # every refused field has the value that would be taken
    for argument, (value, nearest) in only.items():
        if getattr(recipe, argument) != value:
            unsupported(name, argument, getattr(recipe, argument), nearest)


__getattr__ = unknown(__name__)
