"""The lists of work that calls of `decode_attention` over the same lengths share, as the layers of a model do in one
step; decode_schedule.py and decode_tiles.py have the kernels that make them."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from powertrain.ops.attention.decode_op import Shared, share
from powertrain.runtime import checks, driver, invalidation
from powertrain.runtime.dispatch import is_traced

F = TypeVar("F", bound=Callable[..., Any])
_OP = "decode_attention"


class DecodeSchedule:
    """How the keys are split over the GPU: calls of `decode_attention` in one CUDA graph, such as those of a model's
    layers, share it.

    Without a schedule each call launches a kernel that reads the lengths and lists the splits. With one the first call
    does so, for all calls of equal sizes and options that are captured in the same graph, on the same stream. Each
    replay makes the list anew, so that the graph is valid for any lengths. Results are the same bits. Outside of a
    capture calls are checked, and otherwise ignore the schedule: there the time of the host is the limit.

    cache_seqlens  [B], of the calls: this tensor or a view of all of it. Calls with other lengths, and calls after
                   PyTorch has written to these, raise ValueError: make a schedule for each step. Writes that PyTorch
                   does not count (to `.data`, by kernels of other libraries) are not seen.
    Raises ValueError where the tensor is of torch.inference_mode, which counts no writes.
    Memory: the lists and the tensors that they were made of, as long as the schedule.
    """

    def __init__(self, cache_seqlens: Tensor) -> None:
        checks.tensor("DecodeSchedule", "cache_seqlens", cache_seqlens)
        self._seqlens, self._found = cache_seqlens, _contents("DecodeSchedule", "cache_seqlens", cache_seqlens)
        self._shared: dict[Any, tuple[Shared, Any]] = {}


def check_schedule(schedule: Any, cache_seqlens: Tensor) -> None:
    """Raise ValueError unless it is a DecodeSchedule of these lengths, as they are now."""
    # not `require`: it is given the words for an error in every call, which Dynamo of PyTorch 2.11 cannot trace
    if not isinstance(schedule, DecodeSchedule):
        checks.fail(_OP, "schedule", "be a DecodeSchedule or None", checks.described(schedule))
    # values that are traced are not known, and nothing is shared by them
    if is_traced(cache_seqlens):
        return
    found = _contents(_OP, "cache_seqlens", cache_seqlens)
    # not by the address that it was made with: a copy of the schedule (copy.deepcopy, pickle) has a tensor of its own
    is_same = found == _contents(_OP, "cache_seqlens", schedule._seqlens)
    checks.require(is_same, _OP, "schedule", "be of the call's cache_seqlens", "one of another tensor")
    must = "be made after the last write to cache_seqlens (one for each step)"
    checks.require(found == schedule._found, _OP, "schedule", must, "one from before it")


def shared(schedule: DecodeSchedule, others: dict[str, Tensor | None], arguments: tuple[Any, ...]) -> Shared:
    """What calls of `decode_op` with such arguments share. `others`: tensors besides the lengths of which lists are
    made, as the user gave them, by name."""
    contents = tuple(None if x is None else _contents(_OP, name, x) for name, x in others.items())
    key = _capture(schedule._seqlens), invalidation.epoch, contents, tuple(map(_kind, arguments))
    if key not in schedule._shared:
        # kept with its tensors: at a freed one's address another would look like it
        schedule._shared[key] = share(*arguments), others
    return schedule._shared[key][0]


def _contents(op: str, name: str, x: Tensor) -> tuple[Any, ...]:
    """Which tensor this is, and the number of writes to it."""
    # where values are not known, nothing is shared by them
    if is_traced(x):
        return ()
    if x.is_inference():
        checks.fail(op, name, "be made outside of torch.inference_mode, which counts no writes", "a tensor of it")
    return x.device, x.data_ptr(), x.dtype, x.shape, x.stride(), x._version


def _kind(value: Any) -> Any:
    """All of an argument but a tensor's values: which kernel computes a call, and in which tiles, follows from it."""
    return (x.shape, x.stride(), x.dtype, x.data_ptr() % 16) if isinstance(x := value, Tensor) else value


def _capture(x: Tensor) -> tuple[int, int] | None:
    """The current stream and the capture that it takes part in; None: nothing is captured."""
    if not x.is_cuda or not torch.cuda.is_current_stream_capturing():
        return None
    stream = torch._C._cuda_getCurrentRawStream(x.get_device())
    # 0: what is captured is a stream of another GPU
    number = driver.capture_id(stream)
    return (stream, number) if number else None


def is_captured(x: Tensor) -> bool:
    """Whether calls are captured in a CUDA graph, where they share lists."""
    return _capture(x) is not None


def shares_lists(function: F) -> F:
    """`decode_attention`, which gets the schedule in a capture alone: elsewhere repeated calls are replayed
    (runtime/replay.py), which takes arguments of tensors and plain values."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("schedule") is None:
            return function(*args, **kwargs)
        schedule = kwargs.pop("schedule")
        seqlens = kwargs["cache_seqlens"] if "cache_seqlens" in kwargs else (*args, None, None, None, None)[3]
        # what is no tensor, the function refuses
        if isinstance(seqlens, Tensor):
            check_schedule(schedule, seqlens)
        # a graph of torch.compile has no place for lists
        if not isinstance(seqlens, Tensor) or is_traced(seqlens) or not is_captured(seqlens):
            return function(*args, **kwargs)
        return function(*args, **kwargs, schedule=schedule)

    return call  # type: ignore[return-value]
