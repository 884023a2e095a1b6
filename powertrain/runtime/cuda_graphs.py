"""Captures Python code in CUDA graphs, one at a time, and says why a model cannot be captured (hooks, modes)."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache as remembered
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from powertrain.runtime import invalidation
from powertrain.runtime.hooks import has_own_forward
from powertrain.runtime.kept_tensors import noted

# PyTorch captures one graph at a time in a process
_capturing = threading.Lock()
_GLOBAL_HOOKS = (
    module._global_forward_hooks, module._global_forward_pre_hooks, module._global_backward_hooks,
    module._global_backward_pre_hooks,
)  # fmt: skip


@remembered
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Where graphs are captured: one for each device, as cuBLAS keeps memory for each stream that it has run on."""
    return torch.cuda.Stream(device)


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, device: torch.device, **options: Any) -> Iterator[None]:
    """The block's work on the device becomes `graph` and is not run. Options: of torch.cuda.graph."""
    # the outer stream: torch.cuda.graph leaves its own the current one where the capture fails
    outer = torch.cuda.stream(torch.cuda.current_stream(device))
    # other threads may go on with their own work on the GPU
    options = {"stream": _stream(device), "capture_error_mode": "thread_local", **options}
    with _capturing, outer, noted() as read:
        # alive as long as the graph
        graph.read_tensors = read  # type: ignore[attr-defined]
        try:
            with torch.cuda.graph(graph, **options):
                yield
        except BaseException:
            _end_draws(device)
            raise


def _end_draws(device: torch.device) -> None:
    """Behind a capture that failed: until another one ends well, PyTorch's generator refuses to draw outside of one."""
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=_stream(device), capture_error_mode="thread_local"):
        # a graph of nothing is a warning
        torch.zeros(1, device=device)


class Conditions:
    """What replays of a model's calls rely on: no hooks, modes or settings such as `disable` have come since."""

    def __init__(self, model: nn.Module) -> None:
        self._hooks = [*_GLOBAL_HOOKS, *(hooks for part in model.modules() for hooks in _hooks(part))]
        self._epoch = invalidation.epoch

    def hold(self) -> bool:
        return self._epoch is invalidation.epoch and not (any(self._hooks) or _why_not_now())


def _hooks(part: nn.Module) -> tuple[Any, ...]:
    return part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks


def _why_not_now() -> str | None:
    """Why a graph must not replace Python code under the modes that are active now, or None."""
    if torch.is_autocast_enabled("cuda"):
        return "autocast's copies of parameters end with its context"
    # a default device is a mode, too
    others = [mode for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]
    if others or torch._C._len_torch_dispatch_stack():
        return "a mode of PyTorch's is active, which sees no operators of a graph"
    return None


def why_not(model: nn.Module) -> str | None:
    """Why calls of the model are not captured, as far as it is known beforehand, or None."""
    if any(_GLOBAL_HOOKS):
        return "modules have global hooks, which a graph does not call"
    for name, part in model.named_modules():
        if any(_hooks(part)):
            return f"{name or 'the model'} has hooks, which a graph does not call"
        if part._compiled_call_impl is not None:
            return f"{name or 'the model'} is compiled by torch.compile"
        if not has_own_forward(part):
            return f"{name or 'the model'} has a forward of its own, set on the instance, which a graph does not call"
    return _why_not_now()


def reason_of(error: BaseException) -> str:
    """Why a capture failed: code that waits for the GPU, as a user's module may."""
    # of two errors the second is that the capture has failed
    first = error.__context__ or error
    return (str(first).splitlines() or [type(first).__name__])[0]
