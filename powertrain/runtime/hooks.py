"""Hooks of a module that another one replaces."""

from torch import nn

# of nn.Module, those that a call runs
_TABLES = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook",
)  # fmt: skip


def take_hooks(module: nn.Module, before: nn.Module) -> None:
    """Give `module` the hooks of the one whose place it takes: the same tables, so that their handles still work."""
    module.__dict__.update({name: before.__dict__[name] for name in _TABLES})
