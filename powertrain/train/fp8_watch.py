"""Monitor of a run's FP8 layers: measures their operands, logs the worst, and moves a layer whose errors stay too
large to the next safer recipe.

    tensor, tensor-delayed -> row -> block -> 16 bits

A reading is bad if more than half of an operand's values become 0, more than 1 % saturate, or rounding changes more
than 10 % of its norm (e4m3; 20 % for e5m2, which has one mantissa bit less). Rounding alone changes 2.6 % in e4m3 and
5.2 % in e5m2. Largest magnitudes that are not finite are no fault of a recipe: the run names their step and module.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from powertrain.quant.linear import FP8Linear, HasFP8State
from powertrain.quant.readings import Reading, watch
from powertrain.quant.recipe import Recipe, grad_format
from powertrain.runtime import invalidation
from powertrain.train.config.schema import FP8Config
from powertrain.train.fp8 import recipe_of

WORST = 3  # readings in a note
PATIENCE = 3  # bad readings in a row that move a layer
MOST_UNDERFLOW, MOST_SATURATED = 0.5, 0.01
MOST_ERROR = {"e4m3": 0.1, "e5m2": 0.2}
SAFER = {"tensor": "row", "tensor-delayed": "row", "row": "block", "block": "none"}
_SAFETY = ["tensor-delayed", "tensor", "row", "block", "none"]


class FP8Watch:
    """The monitor of one run's model.

    note     takes a line for the log
    group    ranks whose readings count together, so that all move the same layers; None: this process alone
    moved    name of a layer -> the recipe it was moved to; saved with the run, and applied again by `restore`
    bad      name of a layer -> its bad readings in a row; likewise
    is_measuring   within a step whose operands are measured, by hooks
    """

    def __init__(
        self, model: nn.Module, config: FP8Config, note: Callable[[str], None], group: dist.ProcessGroup | None = None
    ) -> None:
        self.model, self.config, self.note, self.group = model, config, note, group
        self.moved: dict[str, str] = {}
        self.bad: dict[str, int] = {}
        self.is_measuring = False

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Inside, operands are measured where `step` is due; then the worst are noted and bad layers are moved.

        Reading them waits for the device. The step itself computes with the recipes it began with.
        """
        config = self.config
        if config.recipe == "none" or not config.watch or step % config.watch:
            yield
            return
        self.is_measuring = True
        try:
            with watch(self.model) as readings:
                yield
        finally:
            self.is_measuring = False
        # every rank must move the same layers, so all judge by the same numbers
        if self.group is not None:
            readings.reduce(self.group)
        found = readings.list()
        # the largest of those that gated MLPs keep too, though operands of products may have larger ones
        kept = [reading for reading in found[WORST:] if reading.role == "kept"][:1]
        repeats = [reading.repeats for reading in found if reading.repeats is not None]
        read = f"; {sum(repeats) / len(repeats):.2%} of quantizations so far read twice" if repeats else ""
        lines = [f"fp8 at step {step}, the largest errors of {len(found)} operands{read}:"]
        lines += map(str, found[:WORST] + kept)
        self.note("\n  ".join(lines))
        if config.rescue:
            self._judge(found, step)

    def _judge(self, readings: list[Reading], step: int) -> None:
        """Count bad readings of each layer, and move those that have too many."""
        worst: dict[str, Reading] = {}
        for reading in readings:
            # another recipe of the layer would not change the values that its module keeps
            if reading.role != "kept" and self._is_bad(reading):
                worst.setdefault(reading.layer, reading)
        # a layer without a bad reading leaves the dictionary: only readings in a row count
        self.bad = {layer: self.bad.get(layer, 0) + 1 for layer in worst}
        for layer in [layer for layer, count in self.bad.items() if count >= PATIENCE]:
            before = self.moved.get(layer, self.config.recipe)
            # the safer recipe begins with no bad readings
            del self.bad[layer]
            self._move(layer, SAFER[before])
            to = "16 bits" if SAFER[before] == "none" else SAFER[before]
            self.note(
                f"fp8: {layer} goes from {before} to {to} after step {step}, its {PATIENCE} last readings were bad: "
                f"{worst[layer]} (fp8.rescue: false keeps recipes as they are)"
            )

    def _is_bad(self, reading: Reading) -> bool:
        # no recipe mends values that are not finite before they are rounded
        if not math.isfinite(reading.amax):
            return False
        recipe = recipe_of(self._config_of(self.moved.get(reading.layer, self.config.recipe)))
        format = grad_format(recipe) if recipe is not None and reading.role == "dy" else "e4m3"
        return (
            reading.underflow > MOST_UNDERFLOW
            or reading.saturated > MOST_SATURATED
            # so that a NaN is bad
            or not reading.error <= MOST_ERROR[format]
        )

    def _config_of(self, recipe: str) -> FP8Config:
        # with the run's own options; another recipe has its defaults
        if recipe == self.config.recipe:
            return self.config
        return FP8Config(recipe=recipe, format=self.config.format)  # type: ignore[arg-type]

    def _move(self, name: str, recipe: str) -> None:
        layer = self.model.get_submodule(name)
        made: Recipe | None = recipe_of(self._config_of(recipe))
        if isinstance(layer, HasFP8State):  # with an adapter
            layer.set_fp8(made)
        elif not isinstance(layer, FP8Linear):
            raise TypeError(f"{name} is no FP8 layer but a {type(layer).__name__}")
        elif made is None:
            layer.revert()
        else:
            layer.set_recipe(made, layer.weight.device)
        self.moved[name] = recipe
        # CUDA graphs of the model compute by the recipe before
        invalidation.changed()

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"moved": dict(self.moved), "bad": dict(self.bad)} if self.moved or self.bad else {}

    def restore(self, moved: dict[str, str] | None = None, bad: dict[str, int] | None = None) -> None:
        """Move the layers that a resumed run had moved, before tensors are loaded. Where the run's recipe is another
        now and as safe, they keep that one."""
        layers = {name for name, m in self.model.named_modules() if isinstance(m, FP8Linear | HasFP8State)}
        for name, recipe in (moved or {}).items():
            # never to a recipe less safe than the one that the run asks for now
            if name in layers and _SAFETY.index(recipe) > _SAFETY.index(self.config.recipe):
                self._move(name, recipe)
        self.bad = {name: count for name, count in (bad or {}).items() if name in layers}
