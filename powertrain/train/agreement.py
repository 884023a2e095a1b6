"""One outcome on every rank: a value, or the same error at once, so that nobody waits for a rank that has given up.

Whatever can raise on one rank ahead of a collective goes through one of these. `group` is None for one process.
"""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def decided_by_first(work: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """What `work` returns on the group's first rank, which alone calls it; what it raises there, raised on all."""
    if group is None:
        return work()
    outcome = [_outcome(work) if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(outcome, dist.get_global_rank(group, 0), group)
    return _taken(outcome[0])


def from_all(work: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """What `work` returns on each rank, on all of them; what it raised on the lowest rank that failed, raised on all.

    There must be no collective in `work`: a rank that fails would leave the others waiting inside it.
    """
    if group is None:
        return [work()]
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, _outcome(work), group)
    return [_taken(outcome) for outcome in outcomes]


def done_by_all(work: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """What `work` returns here, once it returned on every rank; errors as `from_all`'s. The value does not travel."""
    values: list[T] = []
    from_all(lambda: values.append(work()), group)
    return values[0]


def _outcome(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, _sendable(error)


def _sendable(error: Exception) -> Exception:
    """The error, or one that says the same where it does not survive pickle."""
    error = error.with_traceback(None)
    try:
        if str(pickle.loads(pickle.dumps(error))) == str(error):
            return error
    except Exception:  # an exception class decides itself what its pickle raises
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")


def _taken(outcome: Any) -> Any:
    value, error = outcome
    if error is not None:
        error.is_on_all = True
        raise error
    return value


def is_on_all(error: BaseException) -> bool:
    """Whether every rank has this error: one of them is enough to say it."""
    return getattr(error, "is_on_all", False)
