"""`keep_frozen(model, stored)`: frozen weights stay in FP8, the bytes and scales that a checkpoint stores."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.ops.fp8.formulas import GROUP, Quantized, padded
from powertrain.ops.shapes import cdiv
from powertrain.quant.gathered_weight import GatheredWeight
from powertrain.quant.linear import FP8Linear, HasFP8State
from powertrain.quant.model import Part, Report
from powertrain.quant.recipe import Block, Recipe, Row
from powertrain.runtime import checks
from powertrain.runtime.fused_encoders import call_layers
from powertrain.runtime.positional import hinted

_aten = torch.ops.aten
_CASTS = {_aten._to_copy.default, _aten.clone.default}


class FrozenWeight(GatheredWeight):
    """[N, K] of a floating dtype, held as FP8 data and scales: a weight that is never changed.

    Moving it to a device moves these; a cast changes the dtype that its values are given in.
    """

    is_frozen = True
    undoing = "dequantize_model makes it plain"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _CASTS:
            weight, device = args[0], kwargs.get("device")
            parts = [t.to(device) if device is not None else t for t in weight.quantized]
            if func is _aten.clone.default:
                parts = [_clone(part) for part in parts]
            return cls(Quantized(*parts), None, weight.shape, kwargs.get("dtype") or weight.dtype)
        if func is _aten.copy_.default and all(isinstance(t, cls) for t in args[:2]):
            # of a state dict
            return args[0]._replaced(args[1])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _replaced(self, other: "FrozenWeight") -> "FrozenWeight":
        """This weight with another's bytes and scales."""
        for name, ours, theirs in zip(Quantized._fields, self.quantized, other.quantized, strict=True):
            checks.shape("keep_frozen", f"{name} of a state dict's weight", theirs, ours.shape, "the weight's")
        for ours, theirs in zip(self.quantized, other.quantized, strict=True):
            ours.copy_(theirs)
        return self

    # nn.Module.to replaces a parameter of such a class as a whole; of others it would set the memory alone
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_", "scale_inv_"], (self.shape, self.dtype)

    @property
    def data_(self) -> Tensor:
        return self.quantized.data

    @property
    def scale_inv_(self) -> Tensor:
        return self.quantized.scale_inv

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], facts: Any, size: Any, stride: Any) -> "FrozenWeight":
        return cls(Quantized(parts["data_"], parts["scale_inv_"]), None, *facts)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For torch.save, whose files keep the bytes."""
        # torch.save has no FP8 storages on every version, but bytes
        data, scale_inv = self.quantized
        facts = tuple(self.shape), self.dtype, isinstance(self, nn.Parameter)
        return _restored, (data.view(torch.uint8), scale_inv, *facts)

    def __deepcopy__(self, memo: Any) -> "FrozenWeight":
        weight: Any = self.clone()
        if isinstance(self, nn.Parameter):
            weight = nn.Parameter(weight, requires_grad=self.requires_grad)
        memo[id(self)] = weight
        return weight

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"FrozenWeight({list(self.shape)}, {self.dtype}, {self.quantized.data.dtype})"


def _clone(t: Tensor) -> Tensor:
    # scales' rows may be padded in memory, which products read
    return t.view(torch.uint8).clone().view(t.dtype) if t.element_size() == 1 else _block_memory(t)


def _block_memory(scale_inv: Tensor) -> Tensor:
    """A copy of scales in memory whose rows are whole 16 bytes, so that cuBLAS reads them."""
    if scale_inv.dim() == 1:
        return scale_inv.clone()
    rows, groups = scale_inv.shape
    return scale_inv.new_empty((rows, cdiv(groups, 4) * 4))[:, :groups].copy_(scale_inv)


def _restored(
    data: Tensor, scale_inv: Tensor, size: tuple[int, ...], dtype: torch.dtype, is_parameter: bool = False
) -> Tensor:
    weight = FrozenWeight(Quantized(data.view(torch.float8_e4m3fn), scale_inv), None, size, dtype)
    return nn.Parameter(weight, requires_grad=False) if is_parameter else weight


# torch.load takes such files with weights_only too
torch.serialization.add_safe_globals([_restored])


@hinted
def keep_frozen(model: nn.Module, stored: Mapping[str, Quantized]) -> Report:
    """Give a model's frozen linear layers weights that stay in FP8, as they are stored. In place.

        model    any nn.Module, on any device; layers with adapters (powertrain.lora) and plain nn.Linear are known
        stored   a weight's name in the model -> its data [N, K padded to 16] float8_e4m3fn and scale_inv, float32: [N],
                 or [N / 128, K / 128] rounded up
    Returns a Report: layers whose weight is kept so, by `Row()` or `Block()`, and why others are not.

    The three products are FP8 by that recipe, the weight's operand being the stored bytes: nothing is quantized again.
    Whatever else reads the weight gets its values, in the dtype that it had. It takes one byte an element, its
    transposed copy exists in backward only. x and dy are quantized; dW is not needed and not computed.
    `dequantize_model` makes plain weights of the values.
    Raises ValueError naming a weight of another shape or dtype, or that there is not. Not for FSDP and torch.compile.
    """
    op, report = "keep_frozen", Report()
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    unknown = [name for name in stored if name not in names]
    checks.require(not unknown, op, "stored", "name parameters of the model", unknown[:3])
    matches: list[tuple[str, nn.Linear, Quantized, Recipe]] = []
    for name, quantized in stored.items():
        path, _, kind = name.rpartition(".")
        layer = model.get_submodule(path)
        why = _why_not(layer, kind)
        if why:
            report.left.append(Part(path, why=why))
            continue
        assert isinstance(layer, nn.Linear)
        matches.append((path, layer, quantized, _recipe(op, name, quantized, layer)))
    # none is changed unless all can be
    for path, layer, quantized, recipe in matches:
        _hold(layer, quantized, recipe)
        report.quantized.append(Part(path, recipe))
    call_layers(model)
    return report


def _hold(layer: nn.Linear, quantized: Quantized, recipe: Recipe) -> None:
    device, dtype = layer.weight.device, layer.weight.dtype
    data, scale_inv = (t.to(device) for t in quantized)
    held = FrozenWeight(Quantized(data, _block_memory(scale_inv)), None, layer.weight.shape, dtype)
    layer.weight = nn.Parameter(held, requires_grad=False)
    if isinstance(layer, HasFP8State):
        layer.set_fp8(recipe)
    else:
        FP8Linear.convert(layer, recipe)


def _why_not(layer: nn.Module, kind: str) -> str | None:
    if kind != "weight" or not isinstance(layer, nn.Linear):
        return f"it is {'a ' + type(layer).__name__ if kind == 'weight' else kind}, not the weight of an nn.Linear"
    if type(layer) not in (nn.Linear, FP8Linear) and not isinstance(layer, HasFP8State):
        return f"it is a {type(layer).__name__}, not an nn.Linear"
    if type(layer.weight.data) is not Tensor and not isinstance(layer.weight, FrozenWeight):
        return f"its weight is a {type(layer.weight.data).__name__}"
    return "its weight is trained" if layer.weight.requires_grad else None


def _recipe(op: str, name: str, quantized: Quantized, layer: nn.Linear) -> Recipe:
    (N, K), (data, scale_inv) = layer.weight.shape, quantized
    checks.shape(op, name, data, (N, padded(K)), "the layer's, columns padded to 16")
    good = data.dtype is torch.float8_e4m3fn and scale_inv.dtype is torch.float32
    got = f"{checks.name(data.dtype)}, {checks.name(scale_inv.dtype)}"
    checks.require(good, op, name, "be float8_e4m3fn with scales in float32", got)
    by_row = scale_inv.dim() == 1
    shape = (N,) if by_row else (cdiv(N, GROUP), cdiv(K, GROUP))
    checks.shape(op, f"{name}'s scale_inv", scale_inv, shape, "of rows, or of blocks of 128x128")
    # scales of x and dy are ours to choose
    return Row() if by_row else Block()
