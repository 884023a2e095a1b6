"""Recorder of one eager call's allocations, launches and calls of PyTorch's ops, for runtime/replay.py."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from powertrain.runtime import recording
from powertrain.runtime.steps import Allocation, Launch, OpCall, Step, tensors_in
from powertrain.runtime.tape import NotReplayable, Tape

_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
# ops that return a value to the host, or a tensor whose size depends on values
_REFUSED_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# the seed and offset of their dropout may lie on the CPU
_ATTENTIONS = {
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._flash_attention_forward.default,
    torch.ops.aten._efficient_attention_forward.default,
}
_REFUSED_NAMES = {"resize_", "resize_as_", "set_", "record_stream"}  # they change more than values
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)

_here = threading.local()  # .recorder: the recorder of this thread


def recorder() -> "Recorder | None":
    """The recorder that observes this thread."""
    return getattr(_here, "recorder", None)


@contextmanager
def observed_call(inputs: list[Tensor]) -> Iterator["Recorder"]:
    """Launches of this thread go the slow path, which shows them to the recorder."""
    _here.recorder = active = Recorder(inputs)
    # a weight that autocast has cast before would come without the step that casts it
    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with recording.state.observed(), active:
            yield active
    finally:
        torch.set_autocast_cache_enabled(caches)
        _here.recorder = None


class OpRun(NamedTuple):
    """One forward of a Powertrain op that was not called by another one's forward."""

    op: Any
    args: Sequence[Any]
    result: Any
    first: int  # of its steps
    end: int
    is_differentiated: bool


class Recorder(TorchDispatchMode):
    """Records the steps of one call, and whether it has any other effect."""

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self.inputs = inputs
        self.steps: list[Step] = []  # their tensors are kept, so that no address comes twice
        self.runs: list[OpRun] = []
        self.views: dict[int, OpCall] = {}  # outside of ops of ours, by the result's identity
        self.failure: str | None = None  # why this call cannot be replayed
        self._versions = _versions(inputs)
        self._ungraphed: set[int] = set()  # indices of steps made under no_grad, of inputs that require gradients
        self._seen: list[Tensor] = []  # results of every op of PyTorch's
        self._depth = 0
        self._differentiates = False
        self._is_grad_enabled = torch.is_grad_enabled()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._seen += tensors_in((result,))
        if func in _ALLOCATIONS:
            self.steps.append(Allocation(result))
            if result.device != self.inputs[0].device:
                self.failure = f"it allocates on {result.device}"
        else:
            self._called(func, args, kwargs, result)
        return result

    def _viewed(self, source: Tensor, result: Any) -> None:
        """A view of one input that begins where another input does would be taken for the other."""
        inputs = {x.data_ptr() for x in self.inputs}
        for view in result if isinstance(result, tuple | list) else (result,):
            if view.data_ptr() != source.data_ptr() and view.data_ptr() in inputs:
                self.failure = "a view of one input begins where another input does"

    def _called(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """A call of an op that computes, or makes views.

        Storages decide which, not the schema: in inference mode ops such as aten.to come here whole, whose schema says
        view and whose result may be a copy.
        """
        many = isinstance(result, tuple | list)
        results = tuple(result) if many else () if result is None else (result,)
        given = (*args, *kwargs.values())
        sources = {x.untyped_storage()._cdata: x for x in tensors_in(given)}
        made = list(tensors_in(results))
        views = [x for x in made if x.untyped_storage()._cdata in sources]
        is_mutable = func._schema.is_mutable
        if views and len(views) == len(made) and not is_mutable:
            for view in views:
                source = sources[view.untyped_storage()._cdata]
                self._viewed(source, view)
                # a view made under no_grad is not repeated: a replay calls views through autograd
                if not self._depth and (torch.is_grad_enabled() or not source.requires_grad):
                    self.views[id(view)] = OpCall(func, args, kwargs, results, many)
            return
        reason = _why_not(func, given, results, self.inputs[0].device)
        if reason is None and self._differentiates_apart(tensors_in(given)):
            reason = f"it differentiates {func} by itself"
        if reason is None and (len(views) != len(made) if is_mutable else views):
            reason = f"it calls {func}, some of whose results are its arguments"
        if reason is not None:
            self.failure = reason
        else:
            if not torch.is_grad_enabled() and any(x.requires_grad for x in tensors_in(given)):
                self._ungraphed.add(len(self.steps))
            self.steps.append(OpCall(func, args, kwargs, () if is_mutable else results, many and not is_mutable))

    def _differentiates_apart(self, given: Iterable[Tensor]) -> bool:
        """Gradients of this step stay within the call: in an op of ours, under `enable_grad`, of a leaf made here."""
        graphed = [x for x in given if x.requires_grad] if torch.is_grad_enabled() else []
        inside = self._depth > 0 or not self._is_grad_enabled
        return any(inside or (x.is_leaf and index_of(self.inputs, x) is None) for x in graphed)

    def launched(
        self, kernel: Any, loaded: Any, grid: tuple[int, ...], values: Iterable[Any], constants: dict[str, Any]
    ) -> None:
        """A launch: by the driver, or of a kernel that is not loaded, by the interpreter."""
        self.steps.append(Launch(kernel, loaded, grid, list(values), constants))

    def call(self, op: Any, args: tuple[Any, ...], differentiated: bool) -> Any:
        """A call of an op of ours, seen from outside."""
        if not self._depth:
            self._differentiates = differentiated
        return op.apply(*args) if differentiated else op.run(args)

    def forward(self, op: Any, args: Sequence[Any]) -> Any:
        """An op's forward; ops that it calls belong to it."""
        if not op.replays:
            self.failure = f"{op.name} has effects beside its launches"
        first = len(self.steps)
        self._depth += 1
        try:
            result = op.forward(*args)
        finally:
            self._depth -= 1
        if not self._depth:
            self.runs.append(OpRun(op, args, result, first, len(self.steps), self._differentiates))
        return result

    def tape_of(self, run: OpRun, stream: int) -> Tape:
        """The tape of one op, a function of its tensor arguments. Raises NotReplayable."""
        steps = self.steps[run.first : run.end]
        args = list(tensors_in(run.args))
        if not run.is_differentiated and _are_graphed(steps, args):
            raise NotReplayable("it computes without gradients from tensors that require them")
        # what this op neither got nor made
        hidden = [*self.inputs, *self._seen]
        return Tape(run.op.name, args, run.result, steps, hidden, stream, self.autocasts())

    def outside(self, first: int, end: int) -> list[OpCall]:
        """Steps between ops of ours, which must be calls of PyTorch's ops that make new tensors."""
        steps = self.steps[first:end]
        calls = [step for step in steps if isinstance(step, OpCall) and step.results]
        if len(calls) != len(steps) or not self._ungraphed.isdisjoint(range(first, end)):
            raise NotReplayable(
                "it launches kernels, writes or disables gradients outside of ops while it differentiates"
            )
        return calls

    def differentiates(self) -> bool:
        """A tape does not repeat the call, since autograd may differentiate a part of it."""
        return any(run.is_differentiated for run in self.runs) or _are_graphed(self.steps, self.inputs)

    def tape_of_all(self, result: Any, stream: int) -> Tape:
        """The tape of the whole call, a function of its inputs. Raises NotReplayable."""
        return Tape("call", self.inputs, result, self.steps, self._seen, stream, self.autocasts())

    def op_tape(self, _result: Any, stream: int) -> Tape | None:
        """The tape of a call that consists of one Powertrain op."""
        if self.failure is None and len(self.runs) != 1:
            self.failure = f"it calls {len(self.runs)} ops"
        return self.attempt(lambda: self.tape_of(self.runs[0], stream))

    def attempt(self, make: Callable[[], Any]) -> Any:
        """What `make` returns, or None with the reason in `failure`."""
        writes = any(isinstance(step, OpCall) and not step.results for step in self.steps)
        if self.failure is None and not writes and _versions(self.inputs) != self._versions:
            self.failure = "it counts what its kernels write into an argument as a version of it"
        if self.failure is not None:
            return None
        try:
            return make()
        except NotReplayable as error:
            self.failure = str(error)
            return None

    def autocasts(self) -> bool:
        return torch.is_autocast_enabled(self.inputs[0].device.type)


def _wants_gradients(tensors: Iterable[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _are_graphed(steps: Sequence[Step], inputs: Iterable[Tensor]) -> bool:
    """Autograd would differentiate a tape's calls of PyTorch's ops, also where the call had detached their inputs."""
    return _wants_gradients(inputs) and any(isinstance(step, OpCall) for step in steps)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    # those made in inference mode have none
    return [-1 if x.is_inference() else x._version for x in tensors]


def index_of(things: Iterable[Any], thing: Any) -> int | None:
    """Index of an object, found by identity, because == of tensors compares elements."""
    return next((index for index, other in enumerate(things) if other is thing), None)


def _why_not(func: Any, given: Sequence[Any], results: Sequence[Any], device: torch.device) -> str | None:
    """Why this call of PyTorch's cannot be repeated with other tensors in place of its own."""
    if func.namespace != "aten" or func._schema.name.removeprefix("aten::") in _REFUSED_NAMES:
        return f"it calls {func}"
    if _REFUSED_TAGS & set(func.tags):
        return f"it calls {func}, whose result is no function of its arguments' sizes and values on the device"
    # a number alone may have been read from the device
    if not _are_plain([*given, *results]) or (results and next(tensors_in(results), None) is None):
        return f"it calls {func}, which takes or returns more than tensors and numbers"
    tensors = [*tensors_in(given), *(() if func in _ATTENTIONS else tensors_in(results))]
    if any(x.device != device or type(x) not in (Tensor, Parameter) for x in tensors):
        return f"it calls {func} on other tensors than those of its device"
    return None


def _are_plain(values: Iterable[Any]) -> bool:
    return all(
        _are_plain(value) if isinstance(value, list | tuple) else isinstance(value, (Tensor, *_PLAIN))
        for value in values
    )
