"""Which results a checkpoint keeps within a memory budget: each operator's time and memory are measured once."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import SAC_IGNORED_OPS

from powertrain.runtime import checks

# more sets of kept results than these are thinned, and the best may be missed by a little
_MOST_SETS = 4096


@dataclass
class ProfileMetadata:
    """What one call of an operator took; memory_used is of its results, in MiB."""

    name: Any
    time_taken: float
    memory_used: float
    curr_idx: int
    # of the storages: a number for each, the same for the same storage
    output_ids: tuple[int, ...]
    # (this call, the call that made what it writes to, or this one), or ()
    inplace_info: tuple[int, ...]
    is_view_like: bool
    is_rand_op: bool


class ProfileOperatorsTorchDispatchMode(TorchDispatchMode):
    """Measures each operator that is called under it: `data`.

    Operators that write to their arguments or draw random numbers are timed at their only call, others over num_runs.
    """

    def __init__(self, num_runs: int = 10) -> None:
        super().__init__()
        self.data: list[ProfileMetadata] = []
        self.num_runs = num_runs
        # a weak reference keeps the number of a storage from being used again
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        index = len(self.data)
        before = {_number(tensor) for tensor in _tensors((args, kwargs))}
        seconds, out = _timed(lambda: func(*args, **kwargs))
        written = {_number(tensor) for tensor in _tensors(_written(func, args, kwargs))}
        random = _is_random(func, args, kwargs)
        if not func._schema.is_mutable and not random:
            # the first call may have compiled a kernel
            seconds = min(_timed(lambda: func(*args, **kwargs))[0] for _ in range(self.num_runs))
        outputs = {_number(tensor): tensor for tensor in _tensors(out)}
        parents = [self._made[number][1] for number in written if number in self._made]
        new = {number: tensor for number, tensor in outputs.items() if number not in before}
        for number, tensor in new.items():
            self._made[number] = StorageWeakRef(tensor.untyped_storage()), index
        self.data.append(
            ProfileMetadata(
                func,
                seconds,
                sum(tensor.untyped_storage().nbytes() for tensor in new.values()) / 2**20,
                index,
                tuple(outputs),
                (index, min(parents, default=index)) if written else (),
                bool(outputs) and not new and not written,
                random,
            )
        )
        return out


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _named(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    return {**{one.name: value for one, value in zip(func._schema.arguments, args, strict=False)}, **kwargs}


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that the operator writes to."""
    named = _named(func, args, kwargs)
    return [named.get(one.name) for one in func._schema.arguments if one.alias_info and one.alias_info.is_write]


def _number(tensor: torch.Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _is_random(func: Any, args: Any, kwargs: Any) -> bool:
    if "_scaled_dot_product" in str(func):
        # deterministic without dropout
        return bool(_named(func, args, kwargs).get("dropout_p", 0.0))
    return torch.Tag.nondeterministic_seeded in func.tags


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    out = call()
    if any(tensor.is_cuda for tensor in _tensors(out)):
        torch.cuda.synchronize()
    return time.perf_counter() - start, out


class BudgetPolicy:
    """A policy: of each operator, which of its calls are kept.

    A copy counts the calls of one pass, forward or again.
    """

    def __init__(self, kept: dict[str, list[bool]]) -> None:
        self.kept = kept
        self.calls: dict[str, int] = defaultdict(int)

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
        name = str(operator)
        call, kept = self.calls[name], self.kept.get(name, [])
        self.calls[name] += 1
        # more calls than were measured: a branch, made again
        return call < len(kept) and kept[call]


def get_optimal_checkpoint_policy(function: Callable[..., Any], *args: Any, memory_budget: float, **kwargs: Any) -> Any:
    """The policy for `checkpoint` that keeps the results whose making takes longest, within a budget of memory.

    Function(*args, **kwargs) is called once to measure its operators, each of them several times; what it writes to
    (running statistics) is written by that call too. Memory_budget is a fraction of the memory of all results.
    """
    op = "get_optimal_checkpoint_policy"
    checks.require(0 <= memory_budget <= 1, op, "memory_budget", "be from 0 to 1", memory_budget)
    with ProfileOperatorsTorchDispatchMode(num_runs=3) as profile:
        function(*args, **kwargs)
    data = [call for call in profile.data if call.name not in SAC_IGNORED_OPS]
    # without a tensor as argument, checkpoint does not know whose generator to restore
    store_random = not any(True for _ in _tensors((args, kwargs)))
    kept = _kept(data, memory_budget, store_random)
    by_name: dict[str, list[bool]] = defaultdict(list)
    for call in data:
        by_name[str(call.name)].append(call.curr_idx in kept)
    return BudgetPolicy(dict(by_name))


def _kept(data: Sequence[ProfileMetadata], budget: float, store_random: bool) -> set[int]:
    """The calls to keep, by number."""
    # a result that is written to later is made again with what writes to it: kept, it would have the last value where
    # a call that is made again reads one before
    groups: dict[int, list[ProfileMetadata]] = defaultdict(list)
    for call in data:
        groups[call.inplace_info[1] if call.inplace_info else call.curr_idx].append(call)
    last = next((call.curr_idx for call in reversed(data) if not call.is_view_like and not call.inplace_info), None)
    kept: set[int] = set()
    items: list[tuple[float, float, set[int]]] = []
    for group in groups.values():
        members = {call.curr_idx for call in group}
        writes_outside = any(call.inplace_info and call.inplace_info[0] == call.inplace_info[1] for call in group)
        # what lives outside must not be written to twice
        if writes_outside or (store_random and any(call.is_rand_op for call in group)):
            kept |= members
        elif not any(call.is_view_like or call.is_rand_op or call.inplace_info for call in group):
            # the last result leaves the function: it is in memory anyhow
            memory = 0.0 if last in members else sum(call.memory_used for call in group)
            items.append((memory, sum(call.time_taken for call in group), members))
    total = sum(call.memory_used for call in data if call.curr_idx != last)
    return kept.union(*_longest(items, budget * total))


def _longest(items: list[tuple[float, float, set[int]]], most: float) -> list[set[int]]:
    """Of (memory, time, calls), the calls of those that take longest together and fit."""
    free = [item for item in items if not item[0]]
    items = [item for item in items if item[0]]
    if sum(memory for memory, _, _ in items) <= most:
        return [calls for _, _, calls in free + items]
    # sets of which none is at once smaller and longer than another: (memory, time, which)
    sets: list[tuple[float, float, int]] = [(0.0, 0.0, 0)]
    for bit, (memory, seconds, _) in enumerate(items):
        with_it = [(size + memory, total + seconds, which | 1 << bit) for size, total, which in sets]
        longest, better = -1.0, []
        for one in sorted(sets + [new for new in with_it if new[0] <= most], key=lambda one: (one[0], -one[1])):
            if one[1] > longest:
                longest = one[1]
                better.append(one)
        # the longest set of each of many sizes
        sets = better if len(better) <= _MOST_SETS else better[:: -(-len(better) // _MOST_SETS)] + better[-1:]
    which = max(sets, key=lambda one: one[1])[2]
    return [calls for _, _, calls in free] + [calls for bit, (_, _, calls) in enumerate(items) if which >> bit & 1]
