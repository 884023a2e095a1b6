"""Delayed scaling's update: largest magnitudes of the last step into the history, scales from the history.

    history = [amax, history without its oldest];  largest = max(history), or history[0] with most_recent
    scale   = max / largest / 2^margin       kept where largest is 0; FLT_MAX where it overflows; maybe a power of two
    amax    = 0

A magnitude that is not finite enters the history as 0: one bad step changes no scale.
Source: TransformerEngine's DelayedScaling, which keeps a scale while the history holds such a magnitude.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor as Values
from torch import nn
from torch.distributed import ProcessGroup

from powertrain.ops.fp8.formulas import scale_of
from powertrain.quant.linear import FP8State
from powertrain.quant.recipe import Recipe, Tensor, grad_format
from powertrain.runtime.positional import hinted


@hinted
def update_scales(model: nn.Module, group: ProcessGroup | None = None) -> None:
    """Update every delayed scale of a model from the magnitudes of the last step. Call once after each optimizer step.

    group   a process group over which magnitudes are reduced to their maximum, one all-reduce: ranks that compute on
            different data then have the same scales. None: no reduction
    Nothing is read on the host, and the work is in a CUDA graph that captures it. Other recipes have nothing to update.
    """
    update_states([module for module in model.modules() if isinstance(module, FP8State)], group)


@torch.no_grad()
def update_states(states: Iterable[FP8State], group: ProcessGroup | None = None) -> None:
    """`update_scales` for the layers of a list, whose order is the same on all ranks of the group."""
    layers: dict[Recipe, list[FP8State]] = defaultdict(list)
    for state in states:
        recipe = getattr(state, "recipe", None)  # a layer that has not run in FP8 has none
        if recipe is not None and recipe.is_delayed:
            layers[recipe].append(state)
    for recipe, same in layers.items():
        amaxes = torch.stack([layer.fp8_amax for layer in same])  # [layers, 3]
        if group is not None:
            dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
        histories = torch.stack([layer.fp8_amax_history for layer in same])
        scales = torch.stack([layer.fp8_scale for layer in same])
        histories, scales = updated(amaxes, histories, scales, recipe)  # type: ignore[arg-type]
        torch._foreach_copy_([layer.fp8_amax_history for layer in same], list(histories))
        torch._foreach_copy_([layer.fp8_scale for layer in same], list(scales))
        torch._foreach_zero_([layer.fp8_amax for layer in same])


def updated(amaxes: Values, histories: Values, scales: Values, recipe: Tensor) -> tuple[Values, Values]:
    """The formulas, for layers stacked: amaxes [L, 3], histories [L, 3, steps], scales [L, 3] -> the new ones."""
    amaxes = torch.where(amaxes.isfinite(), amaxes, 0.0)
    histories = torch.cat([amaxes[..., None], histories[..., :-1]], -1)
    largest = histories[..., 0] if recipe.most_recent else histories.amax(-1)
    formats = ("e4m3", "e4m3", grad_format(recipe))
    new_scales = torch.stack([scale_of(largest[:, role], f, recipe.power_of_two) for role, f in enumerate(formats)], 1)
    # 0 would say that none is known, and the next step would take its tensors' own
    new_scales = (new_scales * 2.0**-recipe.margin).clamp(min=torch.finfo(new_scales.dtype).tiny)
    return histories, torch.where(largest > 0, new_scales, scales)
