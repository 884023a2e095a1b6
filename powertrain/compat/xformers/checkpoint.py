"""xformers.checkpoint: activation checkpointing that keeps the results a policy names, by torch's selective
checkpoint.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from powertrain.compat.missing import unknown
from powertrain.ops.conversion import unsupported

__all__ = ["checkpoint", "list_operators", "selective_checkpoint_context_fn", "selective_checkpoint_wrapper"]

T = TypeVar("T")
Policy = Callable[..., Any] | Sequence[Any]
# torch's names of matrix products
_KEPT = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")


def checkpoint(
    function: Callable[..., T],
    *args: Any,
    preserve_rng_state: bool = True,
    policy_fn: Policy | None = None,
    **kwargs: Any,
) -> T:
    """function(*args, **kwargs), whose results are made again in backward but for those that the policy keeps.

    policy_fn is a function (context, operator, *args, **kwargs) -> keep, or a list of operators to keep; None keeps the
    results of matrix products and of attention.
    """
    context_fn = partial(selective_checkpoint_context_fn, policy_fn)
    result: T = torch_checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, context_fn=context_fn, **kwargs
    )
    return result


def selective_checkpoint_context_fn(policy_fn: Policy | None = None) -> Any:
    """The context_fn of torch.utils.checkpoint for a policy."""
    return create_selective_checkpoint_contexts(_keep_products if policy_fn is None else policy_fn)


def _keep_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
    name = str(operator)
    # any operator with attention in its name, ours included
    return name in _KEPT or "attention" in name


def list_operators(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    """The names of the operators that function(*args, **kwargs) calls, in order."""
    with _Names() as names:
        function(*args, **kwargs)
    return names.operators


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(str(func))
        return func(*args, **(kwargs or {}))


def selective_checkpoint_wrapper(
    module: nn.Module, memory_budget: float | None = None, policy_fn: Policy | None = None
) -> nn.Module:
    """The module with `checkpoint` around its forward.

    Memory_budget is refused but for 0 (nothing is kept) and 1 (all).
    """
    # for a budget between 0 and 1 theirs solves a linear program over measured operators
    if memory_budget is not None and memory_budget not in (0, 1):
        unsupported(
            "selective_checkpoint_wrapper", "memory_budget", memory_budget,
            "policy_fn, or torch.compile with torch._functorch.config.activation_memory_budget",
        )  # fmt: skip
    if memory_budget == 1:
        return _Checkpointed(module, None, keeps_all=True)
    return _Checkpointed(module, _keep_nothing if memory_budget == 0 else policy_fn)


def _keep_nothing(context: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
    return False


class _Checkpointed(nn.Module):
    def __init__(self, module: nn.Module, policy_fn: Policy | None, keeps_all: bool = False) -> None:
        super().__init__()
        self.module, self.policy_fn, self.keeps_all = module, policy_fn, keeps_all

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.keeps_all or not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        return checkpoint(self.module, *args, policy_fn=self.policy_fn, **kwargs)


__getattr__ = unknown(__name__)
