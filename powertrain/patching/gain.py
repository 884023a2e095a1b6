"""Expected gain of a replacement: memory traffic of the old operators beside the new ones."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from powertrain.patching.verify import copy_with

# both odd, so that an activation is told from a weight by its first dim
_BATCH = 3, 37  # sizes that no weight has


def of(module: nn.Module, width: int, forward: Callable[..., Any] | None) -> str:
    """ "3.5x less memory traffic than its operators one by one"; empty where it is not less."""
    if forward is None:
        return ""
    old, new = (_bytes(module, width, run) for run in (type(module).forward, forward))
    # less than 5 % is not worth the word
    return f"{old / new:.1f}x less memory traffic than its operators one by one" if old > 1.05 * new > 0 else ""


def _bytes(module: nn.Module, width: int, forward: Callable[..., Any]) -> int:
    meta = copy_with(module, _on_meta)
    x = torch.empty((*_BATCH, width), dtype=next(module.parameters()).dtype, device="meta")
    with torch.no_grad(), _Traffic() as traffic:
        try:
            forward(meta, x)
        except Exception:  # it asks for values
            return 0
    return traffic.bytes


def _on_meta(tensor: Tensor) -> Tensor:
    like = torch.empty_like(tensor, device="meta")
    return nn.Parameter(like, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else like


class _Traffic(TorchDispatchMode):
    """Bytes of activations that operators read and write; weights are left out, views are free."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # names beside the flag: some views are declared without it
        if not func.is_view and "view" not in func.name():
            moved = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor) and t.ndim]
            tokens = _BATCH[0], _BATCH[0] * _BATCH[1]
            self.bytes += sum(t.numel() * t.element_size() for t in moved if t.shape[0] in tokens)
        return result
