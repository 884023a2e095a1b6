"""xformers.checkpoint: activation checkpointing that keeps the results a policy names, or those that a memory budget
allows, by torch's selective checkpoint.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, TypeVar

import torch
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from powertrain.compat.missing import unknown
from powertrain.compat.xformers.budget import (
    BudgetPolicy,
    ProfileMetadata,
    ProfileOperatorsTorchDispatchMode,
    get_optimal_checkpoint_policy,
)
from powertrain.runtime import checks

__all__ = [
    "NullTorchDispatchMode", "ProfileMetadata", "ProfileOperatorsTorchDispatchMode", "SelectiveCheckpointWrapper",
    "VerboseTorchDispatchMode", "checkpoint", "get_optimal_checkpoint_policy", "list_operators",
    "selective_checkpoint_context_fn", "selective_checkpoint_wrapper",
]  # fmt: skip

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
    if policy_fn is None:
        return create_selective_checkpoint_contexts(_keep_products)
    if not callable(policy_fn):
        names = {str(operator) for operator in policy_fn}
        return create_selective_checkpoint_contexts(lambda context, operator, *_, **__: str(operator) in names)
    # a policy may count its calls: the forward pass and the one that repeats it have one each
    passes = deepcopy(policy_fn), deepcopy(policy_fn)

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        return passes[bool(context.is_recompute)](context, operator, *args, **kwargs)

    # running statistics are written to outside, and such a write is kept
    return create_selective_checkpoint_contexts(policy, allow_cache_entry_mutation=isinstance(policy_fn, BudgetPolicy))


def _keep_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
    name = str(operator)
    # any operator with attention in its name, ours included
    return name in _KEPT or "attention" in name


def list_operators(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """The operators that function(*args, **kwargs) calls, in order."""
    with VerboseTorchDispatchMode() as names:
        function(*args, **kwargs)
    return names.operators


class NullTorchDispatchMode(TorchDispatchMode):
    """Calls each operator as it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class VerboseTorchDispatchMode(TorchDispatchMode):
    """Notes the operators that are called under it: `operators`."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


def selective_checkpoint_wrapper(
    module: nn.Module, memory_budget: float | None = None, policy_fn: Policy | None = None
) -> nn.Module:
    """The module with `checkpoint` around its forward; the names of its parameters stay.

    Memory_budget is from 0 (nothing is kept) to 1 (all); between them, the first forward measures the operators.
    """
    return SelectiveCheckpointWrapper(module, memory_budget, policy_fn)


class SelectiveCheckpointWrapper(ActivationWrapper):
    """A module with `checkpoint` around its forward, by a policy or a memory budget; neither: the default policy."""

    def __init__(self, mod: nn.Module, memory_budget: float | None = None, policy_fn: Policy | None = None) -> None:
        super().__init__(mod)
        if memory_budget is not None:
            op = "selective_checkpoint_wrapper"
            checks.require(policy_fn is None, op, "memory_budget", "be None beside policy_fn", memory_budget)
            checks.require(0 <= memory_budget <= 1, op, "memory_budget", "be from 0 to 1", memory_budget)
        self.memory_budget, self.policy_fn = memory_budget, policy_fn

    def get_policy_fn(self, *args: Any, **kwargs: Any) -> Policy | None:
        """The policy; the first call with a memory budget measures it, for all ranks at rank 0."""
        if self.policy_fn is None and self.memory_budget is not None:
            self.policy_fn = self._measured(*args, **kwargs) if self.memory_budget else _keep_nothing
        return self.policy_fn

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _measured(self, *args: Any, **kwargs: Any) -> Policy:
        assert self.memory_budget is not None
        with torch.random.fork_rng():
            policy: Policy = get_optimal_checkpoint_policy(
                self._checkpoint_wrapped_module, *args, memory_budget=self.memory_budget, **kwargs
            )
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            # ranks that repeat different collectives would wait for each other
            shared = [policy]
            distributed.broadcast_object_list(shared, src=0)
            (policy,) = shared
        return policy

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module = self._checkpoint_wrapped_module
        if self.memory_budget == 1 or not torch.is_grad_enabled():
            return module(*args, **kwargs)
        return checkpoint(module, *args, policy_fn=self.get_policy_fn(*args, **kwargs), **kwargs)


def _keep_nothing(context: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
    return False


__getattr__ = unknown(__name__)
