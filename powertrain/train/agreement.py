"""Functions that give every rank the same result or the same error, so that no rank waits for one that failed.

Work that can raise on one rank before a collective goes through one of these. `group` is None for one process.
"""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def decided_by_first(work: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Call `work` on the group's first rank only; return its result, or raise its error, on all ranks."""
    if group is None:
        return work()
    outcome = [_outcome(work) if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(outcome, dist.get_global_rank(group, 0), group)
    return _taken(outcome[0])


def from_all(work: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """Call `work` on every rank; return all results on all ranks, or raise the lowest failed rank's error on all.

    There must be no collective in `work`: a rank that fails would leave the others waiting inside it.
    """
    if group is None:
        return [work()]
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, _outcome(work), group)
    return [_taken(outcome) for outcome in outcomes]


def done_by_all(work: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """This rank's result of `work`, after success on every rank; errors as in `from_all`. The value is not sent."""
    values: list[T] = []
    from_all(lambda: values.append(work()), group)
    return values[0]


def _outcome(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, _sendable(error)


def _sendable(error: Exception) -> Exception:
    """The error, or a RuntimeError with its text if it cannot be pickled."""
    error = error.with_traceback(None)
    try:
        if str(pickle.loads(pickle.dumps(error))) == str(error):
            return error
    except Exception:  # unpickling runs code of the exception class, which may raise anything
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")


def _taken(outcome: Any) -> Any:
    value, error = outcome
    if error is not None:
        error.is_on_all = True
        raise error
    return value


def is_on_all(error: BaseException) -> bool:
    """Whether every rank has this error: then one of them reports it."""
    return getattr(error, "is_on_all", False)
