"""PyTorch's Transformer encoders: in evaluation they pass their layers' weights to one fused function.

What our layers do with a weight (an adapter, FP8, a rank's part) would have no effect there.
"""

from collections.abc import Iterator

from torch import nn

# class -> the attribute without which it calls its layers: an activation that the function knows; padded sequences as
# nested tensors, which that function alone takes
_FUSED_BY = {nn.TransformerEncoderLayer: "activation_relu_or_gelu", nn.TransformerEncoder: "use_nested_tensor"}
_BEFORE = "_fused_before"


def call_layers(model: nn.Module) -> None:
    """Let encoders in `model` that have linear layers of ours call their layers from now on."""
    for encoder, name in _encoders(model):
        if _has_our_layers(encoder):
            encoder.__dict__.setdefault(_BEFORE, getattr(encoder, name))
            setattr(encoder, name, 0)


def fuse_again(model: nn.Module) -> None:
    """Undo `call_layers` where no linear layer is ours any more."""
    for encoder, name in _encoders(model):
        if _BEFORE in encoder.__dict__ and not _has_our_layers(encoder):
            setattr(encoder, name, encoder.__dict__.pop(_BEFORE))


def _encoders(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for module in model.modules():
        yield from ((module, name) for kind, name in _FUSED_BY.items() if isinstance(module, kind))


def _has_our_layers(encoder: nn.Module) -> bool:
    layers = (type(m) for m in encoder.modules() if isinstance(m, nn.Linear))
    # FSDP derives classes of its own
    return any(base.__module__.startswith("powertrain.") for layer in layers for base in layer.__mro__)
