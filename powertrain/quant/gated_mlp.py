"""Three FP8Linear layers that are a gated MLP, in one op."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from powertrain.ops.activations import Gated
from powertrain.ops.fp8.gated_mlp import fp8_gated_mlp
from powertrain.quant.linear import FP8Linear
from powertrain.quant.recipe import grad_format


def fits_one_op(x: Tensor, gate: FP8Linear, up: FP8Linear, down: FP8Linear) -> bool:
    """Whether `fp8_gated_mlp` gives the bits of the layers called one after the other: they share a recipe, have no
    bias, and nothing casts between them."""
    layers = (gate, up, down)
    if any(layer.bias is not None or layer.recipe != gate.recipe for layer in layers):
        return False
    if any(isinstance(layer.weight, DTensor) or layer.weight.dtype is not x.dtype for layer in layers):
        return False
    # delayed scaling records magnitudes of all layers or of none
    if gate.recipe.is_delayed and len({layer.training for layer in layers}) > 1:
        return False
    return x.is_meta or not torch.is_autocast_enabled(x.device.type)


def fp8_mlp(x: Tensor, gate: FP8Linear, up: FP8Linear, down: FP8Linear, kind: Gated) -> Tensor:
    """down(act(gate(x)) * up(x)) of layers that `fits_one_op` accepts. By delayed scaling x is quantized by the gate's
    scale; up's is the same, of the same tensors, if both layers have been FP8 for as long."""
    recipe, layers = gate.recipe, (gate, up, down)
    # of a layer's input `operand` asks dtype and device, and act has x's
    weights = (layer.operand(x, layer.weight, getattr(layer.weight, "main_grad", None)) for layer in layers)
    return fp8_gated_mlp(
        x, next(weights), next(weights), next(weights), kind, by=recipe.by, grad_format=grad_format(recipe),
        power_of_two=recipe.power_of_two, fast=recipe.fast,
    )  # fmt: skip
