"""Effects of FP8 on the operands of each layer: underflow, saturation, largest magnitude, relative error.

with watch(model) as readings:
    model(x).sum().backward()
print(readings)          # the worst first
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from powertrain.ops.fp8.formulas import MAX, Copies, dequantized, spread
from powertrain.ops.fp8.linear import GRANULARITIES
from powertrain.ops.fp8.quantize import fp8_quantize
from powertrain.ops.shapes import as_rows
from powertrain.quant.gathered_weight import GatheredWeight
from powertrain.quant.kept import KeepsGates
from powertrain.quant.linear import FP8Linear, FP8State, HasFP8State
from powertrain.quant.recipe import grad_format
from powertrain.runtime import checks

ROLES = ("x", "weight", "dy")
_ROWS = 2048  # of an operand that are compared, evenly spaced; all of it is quantized


class Reading(NamedTuple):
    """Errors of one operand of one layer: the largest of all measured calls.

    amax        its largest magnitude, NaN if one is
    underflow   share of its values that are not 0 and became 0
    saturated   share of its values beyond the largest of the format
    error       norm of the changes by rounding over the norm of its values
    repeats     share of its quantizations since the recipe was set that found another scale than the one before, and
                read it twice; None: the recipe keeps no last scale
    """

    layer: str
    role: str
    amax: float
    underflow: float
    saturated: float
    error: float
    repeats: float | None = None

    def __str__(self) -> str:
        shares = f"underflow {self.underflow:.2%}, saturated {self.saturated:.2%}, error {self.error:.2%}"
        if self.repeats is not None:
            shares += f", read twice {self.repeats:.2%}"
        return f"{self.layer} {self.role}: amax {self.amax:.3g}, {shares}"


class Readings:
    """The readings of a `watch`, kept on the device until `list()` reads them."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Tensor] = {}  # [4]: the worst so far
        self._repeats: dict[tuple[str, str], Tensor] = {}  # [1]: -1 without

    def reduce(self, group: dist.ProcessGroup) -> None:
        """Take the worst of all ranks of `group`, which have watched the same layers, and the mean of `repeats`."""
        if self._found:
            rows, repeats = (torch.stack(list(part.values())) for part in (self._found, self._repeats))
            # NaN has no place in a maximum over ranks
            worst = torch.where(rows.isnan(), torch.inf, rows)
            repeats /= group.size()
            dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
            # divided above: the sum is the mean
            dist.all_reduce(repeats, group=group)
            self._found = dict(zip(self._found, worst, strict=True))
            self._repeats = dict(zip(self._found, repeats, strict=True))

    def list(self) -> list[Reading]:
        """All of them, the largest errors first (NaN on top). Waits for the device."""
        if not self._found:
            return []
        worst, repeats_of = (torch.stack(list(part.values())) for part in (self._found, self._repeats))
        rows = torch.cat([worst, repeats_of], 1).tolist()
        readings = []
        for (layer, role), (amax, underflow, saturated, error, repeats) in zip(self._found, rows, strict=True):
            # -1 stands for a layer that counts none, since the row is one tensor
            share = None if repeats < 0 else repeats
            readings.append(Reading(layer, role, amax, underflow, saturated, error, share))
        return sorted(readings, key=lambda r: -r.error if r.error == r.error else -float("inf"))

    def __str__(self) -> str:
        return "\n".join(map(str, self.list()))

    @torch.no_grad()
    def add(self, layer: FP8State, name: str, role: str, values: Tensor) -> None:
        """Measure one operand as the layer's recipe quantizes it for its first product."""
        if values.numel():
            place = ROLES.index(role)
            self._note(name, role, _measured(layer, place, as_rows(values.detach())), layer.repeats(place))

    @torch.no_grad()
    def add_kept(self, name: str, values: Tensor) -> None:
        """Measure the values that a gated MLP keeps in FP8."""
        if values.numel():
            rows = as_rows(values.detach())
            self._note(name, "kept", _compared(rows, fp8_quantize(rows, "group", columns=False, measure=True), "e4m3"))

    def _note(self, name: str, role: str, amax: Tensor, repeats: Tensor | None = None) -> None:
        key = (name, role)
        # the same operations in the first call as in later ones: selective recomputation counts them
        self._found[key] = torch.maximum(self._found.get(key, amax), amax)
        # the share so far, of which the last one counts
        self._repeats[key] = amax.new_full((1,), -1.0) if repeats is None else repeats


def _measured(layer: FP8State, role: int, x: Tensor) -> Tensor:
    recipe = layer.recipe
    format = grad_format(recipe) if role == 2 else "e4m3"
    scale = layer.fp8_scale[role : role + 1] if recipe.is_delayed else None
    copies = fp8_quantize(
        x, GRANULARITIES[recipe.by][role], format, power_of_two=recipe.power_of_two, scale=scale, columns=False,
        measure=True,
    )  # fmt: skip
    return _compared(x, copies, format)


def _compared(x: Tensor, copies: Copies, format: str) -> Tensor:
    """[4]: amax, underflow, saturated, error."""
    # a sample: a reading costs the step time
    some = slice(None, None, max(1, x.shape[0] // _ROWS))
    values = x[some].float()
    rounded = dequantized(copies.rows, x.shape[1])[some]
    limit = MAX[format] * spread(copies.scale_inv, copies.data.shape)[some, : x.shape[1]]
    # zeros stay zeros, which is no underflow
    there = values != 0
    counts = torch.stack([((rounded == 0) & there).sum(), (values.abs() > limit).sum()])
    shares = counts / torch.stack([there.sum().clamp(min=1), torch.full_like(there.sum(), values.numel())])
    error = (rounded - values).norm() / values.norm().clamp(min=torch.finfo(torch.float32).tiny)
    return torch.cat([copies.amax, shares, error[None]])


@contextmanager
def watch(model: nn.Module) -> Iterator[Readings]:
    """Context that measures the operands of every FP8 layer in forward and backward; results keep their bits.

    Yields `Readings`. Meant for single steps, since each operand is quantized once more. Works in eager mode only. The
    host waits for the device in `Readings.list()` only. In a gated MLP that keeps gate and up in FP8
    (`quantize_model(keep="fp8")`) both are measured too, in the role "kept". In a layer with DoRA, dy is the gradient
    before its magnitude. Weights gathered in FP8 are left out.
    Raises ValueError for a model that is no nn.Module.
    """
    checks.require(isinstance(model, nn.Module), "watch", "model", "be an nn.Module", type(model).__name__)
    # hooks, so that the layers' own code measures nothing in other steps
    readings, handles = Readings(), []
    for name, layer in model.named_modules():
        if isinstance(layer, FP8Linear) or (isinstance(layer, HasFP8State) and layer.fp8 is not None):
            handles.append(layer.register_forward_hook(partial(_see, readings, name)))
        if isinstance(layer, KeepsGates) and layer.keeps_fp8:
            for half in ("gate", "up"):
                of_half = partial(_see_kept, readings, f"{name}.{half}".lstrip("."))
                handles.append(layer.get_submodule(half).register_forward_hook(of_half))
    try:
        yield readings
    finally:
        for handle in handles:
            handle.remove()


def _see_kept(readings: Readings, name: str, layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    readings.add_kept(name, output)


def _see(readings: Readings, name: str, layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    state = layer if isinstance(layer, FP8Linear) else layer.fp8
    readings.add(state, name, "x", inputs[0])
    # of a weight gathered in FP8 only the rounded values are here
    if not isinstance(layer.weight, GatheredWeight):
        readings.add(state, name, "weight", layer.weight)
    # in evaluation there is no dy
    if output.requires_grad:
        output.register_hook(lambda dy: readings.add(state, name, "dy", dy))
