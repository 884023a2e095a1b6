"""transformer_engine.pytorch.quantization: autocast, what is available, initialization of quantized parameters."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from powertrain.compat.missing import unknown
from powertrain.compat.transformer_engine.common.recipe import (
    DelayedScaling,
    Float8CurrentScaling,
    Recipe,
    quant_recipe,
)
from powertrain.ops.conversion import unsupported
from powertrain.quant import recipe as quant
from powertrain.quant.linear import FP8State
from powertrain.quant.scales import update_states
from powertrain.runtime import checks, tracing
from powertrain.runtime.target import Target

__all__ = [
    "autocast", "fp8_autocast", "fp8_model_init", "get_default_fp8_recipe", "get_default_recipe", "is_bf16_available",
    "is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available", "is_nvfp4_available",
    "quantized_model_init",
]  # fmt: skip


class Quantizing(NamedTuple):
    """What an enabled autocast asks for. group: over which delayed scales are reduced, None for no reduction."""

    recipe: quant.Recipe
    group: Any


# no attribute of a class, which Dynamo of torch 2.11 does not guard: graphs compiled outside of autocast served inside
_active: Quantizing | None = None


class _State:
    open: int = 0  # enabled autocasts around this point
    # weak: a deleted model must not be updated, nor kept alive
    # layers that ran with delayed scales -> their group; in the order of their first run, the same on all ranks
    delayed: ClassVar[WeakKeyDictionary[FP8State, Any]] = WeakKeyDictionary()


def active() -> Quantizing | None:
    """What the innermost autocast asks for; None: no FP8."""
    return _active


def _activate(quantizing: Quantizing | None) -> Quantizing | None:
    """Make a quantization active. Returns the one that was active before."""
    global _active
    before, _active = _active, quantizing
    return before


@contextmanager
def restored(quantizing: Quantizing | None) -> Iterator[None]:
    """As under the autocast of before, for a recomputed forward; scales are not updated."""
    # restored after an exception too, or later products would be FP8
    before = _activate(quantizing)
    try:
        yield
    finally:
        _activate(before)


def run_with(state: FP8State, quantizing: Quantizing, device: torch.device) -> None:
    """Prepare a layer's state for a product under `quantizing`."""
    recipe, before = quantizing.recipe, getattr(state, "recipe", None)
    # .to() after the first step moves the module, and the buffers must follow
    moved = recipe.is_delayed and "fp8_scale" in state._buffers and state.fp8_scale.device != device
    if before != recipe or moved:
        if recipe.is_delayed and torch.compiler.is_compiling():
            # buffers made inside a graph would be its temporaries
            raise RuntimeError("autocast: a module's first forward with DelayedScaling must be eager, it makes buffers")
        state.set_recipe(recipe, device)
        # a weight that was quantized by another recipe
        state.copies = None
    if not recipe.is_delayed:
        return
    if state not in _State.delayed:
        _State.delayed[state] = quantizing.group
        # the last step of a checkpoint: the update at the beginning of this autocast did not know this layer
        if state.__dict__.pop("is_loaded", False) and state.training and torch.is_grad_enabled():
            update_states([state], quantizing.group)
    elif _State.delayed[state] is not quantizing.group:
        _State.delayed[state] = quantizing.group


def _update_delayed() -> None:
    """Scales of the next step from the magnitudes of the last one: forward and backward of it are over."""
    # process groups are compared by identity
    for group in {id(group): group for group in _State.delayed.values()}.values():
        # in the order of the first run, so all ranks reduce the same layers together
        states = [state for state, own in _State.delayed.items() if own is group and state.training]
        update_states(states, group)


class autocast:
    """Inside, products of this package's modules are FP8 by `recipe`; with enabled=False they are not.

    enabled               False: products in the dtype of the parameters, also inside another autocast
    calibrating           True only with enabled=True, where it changes nothing; magnitudes without FP8 are refused
    recipe                of transformer_engine.common.recipe; None: `get_default_recipe()`
    amax_reduction_group  for DelayedScaling with reduce_amax: ranks whose largest magnitudes are reduced; None: all
    Delayed scales are updated, with gradients enabled, when the next outermost autocast begins (there when one ends
    and in backward): a step sees the same scales, and so does its recomputation. A module's first step uses the scales
    of its own tensors (there 1).
    Raises RuntimeError on a GPU without FP8, NotImplementedError naming a field of the recipe that cannot be honoured.
    On a CPU FP8 is emulated, slowly.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        if calibrating and not enabled:
            unsupported("autocast", "calibrating", True, "enabled=True, or powertrain.quant.watch")
        self._enabled, self._next = enabled, None if not enabled else quantizing_of(recipe, amax_reduction_group)
        self._before: list[Quantizing | None] = []

    def __enter__(self) -> "autocast":
        if self._before:
            raise RuntimeError("autocast: the same object is entered already; make another one")
        # without gradients no new magnitudes were gathered
        if self._enabled and _State.open == 0 and torch.is_grad_enabled():
            _update_delayed()
        self._before.append(_activate(self._next))
        _State.open += self._enabled
        return self

    def __exit__(self, *_: object) -> None:
        _activate(self._before.pop())
        _State.open -= self._enabled


def quantizing_of(recipe: Recipe | None, group: Any) -> Quantizing:
    """What an enabled autocast with this recipe and group asks for; raises as `autocast` does."""
    recipe = get_default_recipe() if recipe is None else recipe
    must = "be an object of a class of transformer_engine.common.recipe"
    checks.require(isinstance(recipe, Recipe), "autocast", "recipe", must, recipe)
    # read here, at construction: a recipe that this GPU cannot compute is refused before the model runs
    target = _target()
    lowered = quant_recipe(recipe, "the CPU" if target is None else f"sm_{target.arch}")
    if target is not None and not target.has_fp8:
        raise RuntimeError(f"autocast: {is_fp8_available(return_reason=True)[1]}")  # type: ignore[index]
    # only delayed scales are reduced: the other recipes look at their own tensor
    reduces = isinstance(recipe, DelayedScaling) and recipe.reduce_amax and dist.is_initialized()
    return Quantizing(lowered, (dist.group.WORLD if group is None else group) if reduces else None)


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> autocast:
    """`autocast` under its older name and keywords."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Accepted: modules made inside keep parameters in params_dtype, which a line says once.

    There they hold FP8 copies only. preserve_high_precision_init_val is not needed then: the parameters are that value.
    """
    if enabled:
        tracing.warn(
            "quantized_model_init: parameters stay in params_dtype and are quantized in each forward; "
            "is_first_microbatch shares a quantized weight between micro-batches"
        )
    yield


def fp8_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Any:
    """`quantized_model_init` under its older name."""
    return quantized_model_init(enabled, recipe, preserve_high_precision_init_val)


def _target() -> Target | None:
    return Target.of(torch.device("cuda")) if torch.cuda.is_available() else None


def get_default_recipe() -> Recipe:
    """DelayedScaling(); Float8CurrentScaling() from sm_100 on, where theirs is MXFP8BlockScaling()."""
    target = _target()
    # MXFP8 is their default from sm_100 on and is not computed here
    return Float8CurrentScaling() if target is not None and target.arch >= 100 else DelayedScaling()


def get_default_fp8_recipe() -> Recipe:
    """`get_default_recipe` under its older name."""
    return get_default_recipe()


def is_bf16_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether products in bfloat16 are there: from sm_80 on, and on the CPU."""
    target = _target()
    reason = "" if target is None or target.arch >= 80 else f"sm_{target.arch} has no bfloat16 products"
    return (not reason, reason) if return_reason else not reason


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether the current GPU has FP8 products; with return_reason (available, why not or "")."""
    target = _target()
    if target is None:
        reason = "there is no GPU; FP8 is emulated on the CPU"
    else:
        reason = "" if target.has_fp8 else f"sm_{target.arch} has no FP8 products; they begin with sm_89"
    return (not reason, reason) if return_reason else not reason


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether Float8BlockScaling can be computed in FP8: wherever FP8 is (there from sm_90 on, with CUDA 12.9)."""
    return is_fp8_available(return_reason)


def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """False: there are no MXFP8 products here."""
    return _absent("MXFP8", return_reason)


def is_nvfp4_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """False: there are no NVFP4 products here."""
    return _absent("NVFP4", return_reason)


def _absent(format: str, return_reason: bool) -> bool | tuple[bool, str]:
    target = _target()
    where = "the CPU" if target is None else f"sm_{target.arch}"
    reason = f"{format} is not supported on {where} or any other arch; nearest: Float8BlockScaling"
    return (False, reason) if return_reason else False


__getattr__ = unknown(__name__)
