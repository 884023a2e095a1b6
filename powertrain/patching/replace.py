"""Replacement of one module's forward, on the instance: class, parameters, hooks and state dict stay what they are.

A replacement is a plain function of (self, ...) that reads everything from `self`, so a deep copy of a patched module
is a patched module of its own, and children that are exchanged later (LoRA adapters, quantized layers) are seen.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import Parameter

from powertrain.runtime.dispatch import has_kernels
from powertrain.runtime.hooks import has_own_forward

_MARK = "_powertrain_replaces"
_REPLICATE = "_replicate_for_data_parallel"
OTHERS = "its forward was replaced already, by another library; patch the model before that"


@dataclass
class Part:
    """One part of the model that was looked at."""

    kind: str  # "norm", "mlp", "rotary", "attention" or "loss"
    name: str  # of the module in the model
    what: str = ""  # the op that replaces it, with its options; empty: it was left alone
    why: str = ""  # it was left alone
    gain: str = ""  # expected


@dataclass
class Report:
    """Result of `patch`: the parts that were `replaced` and `left`, in the order of the model's modules."""

    model: nn.Module = field(repr=False)
    replaced: list[Part] = field(default_factory=list)
    left: list[Part] = field(default_factory=list)

    def add(self, part: Part) -> None:
        (self.replaced if part.what else self.left).append(part)


def install(module: nn.Module, kind: str, forward: Callable[..., Any]) -> None:
    """Make `forward(module, ...)` the module's forward; its signature is the old one's, which Trainer reads."""
    # the wrapper's signature is the original's: transformers' Trainer reads it to drop unused columns
    replacement = functools.wraps(type(module).forward)(forward)
    setattr(replacement, _MARK, kind)
    # a bound method on the instance: nn.Module.__call__ finds it before the class's, and hooks still run
    module.forward = MethodType(replacement, module)
    setattr(module, _REPLICATE, MethodType(_replicate_for_data_parallel, module))


def _replicate_for_data_parallel(self: nn.Module) -> nn.Module:
    """nn.DataParallel's replica has the attributes of the instance, and with them a forward that ran the original."""
    replica: nn.Module = getattr(type(self), _REPLICATE)(self)
    if installed(self):
        replica.forward = MethodType(self.forward.__func__, replica)  # type: ignore[attr-defined]
    return replica


def where_kernels_run(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, but on devices without our kernels the module's own: there our ops are PyTorch's operators too, of
    which the module's code calls the same, behind more Python. (A Llama of width 128 took 1.7 times as long.)"""

    def run(self: Any, *args: Any, **options: Any) -> Any:
        x = args[0] if args else next(iter(options.values()), None)
        if isinstance(x, Tensor) and not has_kernels(x):
            return type(self).forward(self, *args, **options)
        return forward(self, *args, **options)

    return run


def installed(module: nn.Module) -> str | None:
    """The kind of part whose forward was replaced here, or None."""
    # the instance's own dict: a class attribute would be seen through every instance
    forward = module.__dict__.get("forward")
    # a wrapper may keep the method of the module inside
    is_its = getattr(forward, "__self__", None) is module
    return getattr(forward.__func__, _MARK, None) if is_its and isinstance(forward, MethodType) else None


def left_by_pickle(module: nn.Module) -> bool:
    """Whether pickle has put the class's own method in the place of a replacement: replicas of it run the original."""
    forward = module.__dict__.get("forward")
    is_its = getattr(forward, "__self__", None) is module
    return is_its and getattr(forward, "__func__", None) is type(module).forward


def remove(module: nn.Module) -> None:
    """Put the class's own forward back."""
    del module.__dict__["forward"]
    module.__dict__.pop(_REPLICATE, None)


def hand_on(model: nn.Module) -> None:
    """Wrappers that keep the forward of a module inside, as PEFT's adaption prompts do, get the one it has now."""
    for module in model.modules():
        kept = module.__dict__.get("forward")
        if isinstance(kept, MethodType) and isinstance(kept.__self__, nn.Module) and kept.__self__ is not module:
            inner = kept.__self__
            if kept.__func__ is type(inner).forward or hasattr(kept.__func__, _MARK):
                module.forward = inner.forward


def is_others(module: nn.Module) -> bool:
    """Whether another library, such as accelerate or Liger, has set this module's forward on the instance."""
    forward = module.__dict__.get("forward")
    # pickle leaves the class's own method in place of a replacement of ours
    is_own = getattr(forward, "__func__", None) is type(module).forward
    return forward is not None and not is_own and not installed(module)


def why_not_replaceable(module: nn.Module) -> str | None:
    """Why this module's forward must stay, or None."""
    if is_others(module):
        return OTHERS
    for name, parameter in module.named_parameters():
        # parameters of FSDP2 (DTensor), bitsandbytes and torchao have types of their own
        if type(parameter) is not Parameter:
            return f"{name} is a {type(parameter).__name__}, not a plain parameter"
        if not parameter.is_floating_point():
            return f"{name} is {parameter.dtype}: quantized"
    return None


def is_plain_linear(module: nn.Module | None) -> bool:
    """An nn.Linear without hooks or parametrizations, whose product another function may compute.

    False for LoRA layers, quantized ones, and weights that FSDP or tensor parallelism keeps in parts.
    """
    return (
        # the exact class: LoRA and quantized layers inherit from nn.Linear
        type(module) is nn.Linear
        # asked first, as most have none: this is asked in every call
        and ("forward" not in module.__dict__ or has_own_forward(module))
        # a hook may change inputs or results, and a fused op would bypass it
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        # torch.func.functional_call puts plain tensors in the places of the parameters
        and type(module.weight) in (Parameter, Tensor)
        and type(module.bias) in (Parameter, Tensor, type(None))
    )
