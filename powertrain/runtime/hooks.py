"""Transfer of hooks to a module's replacement, and detection of a `forward` set on the instance."""

from torch import nn

# of nn.Module, those that a call runs
_TABLES = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook",
)  # fmt: skip


def has_own_forward(module: nn.Module, *before: type[nn.Module]) -> bool:
    """Whether no other forward is set on the instance than that of its class, or of one that it was `before`.

    Hooks of accelerate leave these there when they are taken off.
    """
    forward = module.__dict__.get("forward")
    known = [getattr(kind, "forward", None) for kind in (type(module), *before)]
    is_its = getattr(forward, "__self__", None) is module
    return forward is None or (is_its and getattr(forward, "__func__", None) in known)


def take_hooks(module: nn.Module, before: nn.Module) -> None:
    """Give `module` the hooks of the one whose place it takes: the same tables, so that their handles still work."""
    module.__dict__.update({name: before.__dict__[name] for name in _TABLES})
