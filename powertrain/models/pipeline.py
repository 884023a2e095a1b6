"""Pipeline stages of a model: consecutive layers, the embedding with the first ones, final norm and head with the last.

A stage is a `CausalLM` that has some of the model's modules under the model's names, so checkpoints, first weights and
optimizer state do not depend on the number of stages.
"""

import copy
from collections.abc import Iterator, Sequence
from itertools import pairwise

from torch import nn

from powertrain.models.causal_lm import CausalLM
from powertrain.models.config import ModelConfig
from powertrain.ops.shapes import cdiv


class NumberedLayers(nn.ModuleDict):
    """Some of a model's layers under their numbers in the whole model; iterates over the layers."""

    # ModuleDict iterates over names; the models iterate over layers
    def __iter__(self) -> Iterator[nn.Module]:  # type: ignore[override]
        return iter(self._modules.values())


def layers_of_stages(config: ModelConfig, layer_parameters: int, stages: int) -> list[range]:
    """The layers of each stage, so that the slowest stage is as fast as it can be.

    The head costs as many layers as its weight has layers' weights (both are read once per token and product). The
    last stage has so many fewer, rounded, and at least one.
    Raises ValueError naming parallel.pipeline if there are more stages than layers.
    """
    count = config.num_layers
    if stages > count:
        raise ValueError(
            f"parallel.pipeline * parallel.virtual_stages must be at most model.num_layers ({count}), got {stages}"
        )
    if stages == 1:
        return [range(count)]
    # the head's product reads vocabulary x hidden weights per token, a layer its own
    head = config.vocab_size * config.hidden_size / layer_parameters

    def slowest(last: int) -> tuple[float, int]:
        return max(cdiv(count - last, stages - 1), last + head), -last  # the more even one of equals

    # every count for the last stage is tried: there are as many as layers
    last = min(range(1, count - stages + 2), key=slowest)
    each, more = divmod(count - last, stages - 1)
    starts = [stage * each + min(stage, more) for stage in range(stages)] + [count]
    return [range(*ends) for ends in pairwise(starts)]


def largest_share(model: CausalLM, ranks: int, virtual_stages: int = 1) -> float:
    """The part of a model's parameters that the rank with the most of them has."""
    if ranks == 1:
        return 1.0
    layer = sum(p.numel() for p in model.layers[0].parameters())
    stages = stages_of(model, layers_of_stages(model.config, layer, ranks * virtual_stages))
    # interleaved stages: rank r has stages r, r + ranks, ...
    return max(sum(s.num_parameters() for s in stages[r::ranks]) for r in range(ranks)) / model.num_parameters()


def keep_layers(model: CausalLM, layers: Sequence[int]) -> None:
    """Leave a model these layers alone; embedding with the first of all layers, norm and head with the last. In place.

    A tied embedding stays with both.
    """
    model.is_first, model.is_last = 0 in layers, model.config.num_layers - 1 in layers
    # under their numbers in the whole model, so that checkpoints do not depend on stages
    model.layers = NumberedLayers({str(n): model.layers[n] for n in layers})
    if not model.is_first:
        model.positions = None
        # a tied embedding is the last stage's head
        if model.head is not None or not model.is_last:
            model.embed = None
    if not model.is_last:
        model.norm = model.head = None


def stages_of(model: CausalLM, layers: Sequence[range]) -> list[CausalLM]:
    """A stage for each range of layers; they share the model's modules."""
    stages = []
    for part in layers:
        # a shallow copy: stages share the modules and own only the dictionaries
        stage = copy.copy(model)
        stage._modules, stage._parameters = dict(model._modules), dict(model._parameters)
        # each stage is sharded by itself: FSDP registers hooks on it
        stage._forward_hooks, stage._forward_pre_hooks = (
            type(model._forward_hooks)(),
            type(model._forward_pre_hooks)(),
        )
        keep_layers(stage, part)
        stages.append(stage)
    return stages
