"""Repeated eager calls skip the op's Python: their allocations and launches are recorded once and then replayed.

Eager calls of one signature (shapes, strides, dtypes, options) make the same checks, take the same plan, allocate the
same results and launch the same kernels; only addresses differ. The second call of a signature is recorded, and from
the third on a function generated from the recording does the allocations and launches alone:

    Tape    one op's forward, or one call that differentiates nothing: its allocations, its launches and its calls of
            PyTorch's ops (runtime/tape.py)
    Stage   one differentiated op: its tape, and what it keeps for its backward (runtime/stages.py)
    Route   one call of a public function, or one backward: its tape, or the stages and tapes of the ops it consists of

A recording (runtime/call_recorder.py) is used only if it shows the whole effect of the call: nothing that reads values
on the host or leaves the device. Random draws are drawn again. Calls that Dynamo traces, in dispatch modes, functorch
and graph capture, and with arguments that are neither tensors nor plain values go the whole way; in a graph that
torch.compile has made, ops are replayed, and public functions are not there. Where a tensor begins within 16 bytes is
part of the signature.

A call on a CPU without kernels has no launches: its Route is the function of plain PyTorch that computed the first call
of the signature (runtime/plain_calls.py).
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from powertrain.runtime import invalidation, tracing
from powertrain.runtime.call_recorder import OpRun, Recorder, observed_call, recorder
from powertrain.runtime.plain_calls import observed
from powertrain.runtime.signature import PLAIN, Signature, signature_of
from powertrain.runtime.stages import Stage
from powertrain.runtime.steps import OpCall, tensors_in
from powertrain.runtime.tape import NotReplayable, Tape, below_autocast

__all__ = [
    "PLAIN", "Recorder", "Route", "Signature", "Table", "Tape",
    "modes_active", "recorder", "route", "signature_of",
]  # fmt: skip

_RESULT = re.compile(r"\bo\d+\b")  # in the code of `_Code`
_MOST_SIGNATURES = 4096  # of one op; beyond, all are forgotten


def modes_active() -> bool:
    """A dispatch mode, functorch or forward-mode differentiation is active and must see calls as dispatcher ops."""
    c = torch._C
    return bool(
        c._len_torch_dispatch_stack()
        or c._len_torch_function_stack()
        or c._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


class Route(NamedTuple):
    """One public function's call, or one backward, on one signature."""

    function: Callable[..., Any]  # of the call's tensors

    def run(self, tensors: list[Tensor]) -> Any:
        return self.function(*tensors)


def route(recorder: Recorder, result: Any, stream: int) -> Route | None:
    """The way of the recorded function that returned `result`; None, with the recorder's reason, if there is none."""
    made: Route | None = recorder.attempt(lambda: _route(recorder, result, stream))
    return made


def _route(recorder: Recorder, result: Any, stream: int) -> Route:
    if isinstance(result, tuple) and type(result) is not tuple:
        # a tape returns plain tuples
        plain, make = _route(recorder, tuple(result), stream).function, type(result)
        return Route(lambda *tensors: make(*plain(*tensors)))
    undifferentiated = [run.result for run in recorder.runs if not run.is_differentiated]
    if any(x.requires_grad for x in tensors_in(undifferentiated)):
        raise NotReplayable("another autograd.Function than an op's differentiates it")
    if not recorder.differentiates():
        if not recorder.steps:
            raise NotReplayable("it has no steps")
        return Route(recorder.tape_of_all(result, stream).run)
    code, end = _Code(recorder), 0
    for run in recorder.runs:
        for call in recorder.outside(end, run.first):
            code.add_call(call)
        code.add_run(run, recorder.tape_of(run, stream))
        end = run.end
    for call in recorder.outside(end, len(recorder.steps)):
        code.add_call(call)
    return Route(code.function(result))


class _Code:
    """A function that repeats a call which autograd differentiates: its ops of ours, and the views and calls of
    PyTorch's ops between them, through autograd as the first time."""

    def __init__(self, recorder: Recorder) -> None:
        self._views, self._autocasts = recorder.views, recorder.autocasts()
        self._parameters = [f"t{i}" for i in range(len(recorder.inputs))]
        self._names = {id(x): name for x, name in zip(recorder.inputs, self._parameters, strict=True)}
        self._lines: list[str] = []
        self._space: dict[str, Any] = {}

    def add_run(self, run: OpRun, tape: Tape) -> None:
        """An op of ours: its node or, if it differentiates nothing, its tape."""
        given = [self._name(x) for x in tensors_in(run.args)]
        function: Any = tape.run
        if run.is_differentiated:
            function = run.op.apply_replayed
            given.insert(0, self._constant(Stage(run.op, run.args, run.result, tape)))
        self._assign(f"{self._constant(function)}({', '.join(given)})", run.result)

    def add_call(self, call: OpCall) -> None:
        """An op of PyTorch's."""
        given = [self._argument(value) for value in call.args]
        given += [f"{name}={self._argument(value)}" for name, value in call.kwargs.items()]
        result = call.results if call.many else call.results[0]
        self._assign(f"{self._constant(call.op._op)}({', '.join(given)})", result)

    def function(self, result: Any) -> Callable[..., Any]:
        many = isinstance(result, tuple)
        parts = ["None" if part is None else self._name(part) for part in (result if many else (result,))]
        if any(part in self._parameters for part in parts):
            raise NotReplayable("it returns an argument")
        returned = f"({', '.join(parts)},)" if many else parts[0]
        body = _with_ends([*self._lines, f"return {returned}"])
        if self._autocasts:
            body = below_autocast(body, self._space)
        text = "\n    ".join([f"def function({', '.join(self._parameters)}):", *body])
        exec(compile(text, "<replay of several ops>", "exec"), self._space)
        found: Callable[..., Any] = self._space["function"]
        return found

    def _assign(self, text: str, result: Any) -> None:
        name = f"o{len(self._lines)}"
        self._lines.append(f"{name} = {text}")
        if isinstance(result, tuple | list):
            self._names |= {id(x): f"{name}[{i}]" for i, x in enumerate(result) if isinstance(x, Tensor)}
        else:
            self._names[id(result)] = name

    def _name(self, x: Tensor) -> str:
        if id(x) not in self._names:
            if id(x) not in self._views:
                raise NotReplayable("an op takes a tensor that is neither an argument nor made by it")
            self.add_call(self._views[id(x)])
        return self._names[id(x)]

    def _argument(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return self._name(value)
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self._argument, value))}]"
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        name = f"k{len(self._space)}"
        self._space[name] = value
        return name


def _with_ends(lines: list[str]) -> list[str]:
    """The lines, each followed by the end of the results that no later one uses: else all would live to the last."""
    last_use = {name: index for index, line in enumerate(lines) for name in _RESULT.findall(line)}
    ended: dict[int, list[str]] = {}
    for name, index in last_use.items():
        ended.setdefault(index, []).append(name)
    whole = []
    for index, line in enumerate(lines[:-1]):
        whole += [line, f"del {', '.join(ended[index])}"] if index in ended else [line]
    return [*whole, lines[-1]]


class Table:
    """The recordings of one op's forward, or of one public function, by signature."""

    def __init__(self, name: str, finish: Callable[[Recorder, Any, int], Any]) -> None:
        self._name = name
        self._finish = finish  # (recorder, result, stream) -> the recording, or None
        self._known: dict[Any, Any] = {}
        self._calls: dict[Any, int] = {}  # that went the whole way
        self._epoch = invalidation.epoch  # in which the recordings were made

    def bind(self, key: Any, signature: Signature, call: Callable[[], Any]) -> Any:
        """The result of a call that plain PyTorch computes; what computes it is kept as a `Route`."""
        if len(self._known) >= _MOST_SIGNATURES or self._epoch is not invalidation.epoch:
            self._forget()
        result, function = observed(signature.tensors, call)
        if function is not None:
            self._known[key] = Route(function)
        return result

    def _forget(self) -> None:
        self._epoch = invalidation.epoch
        self._known.clear()
        self._calls.clear()

    def find(self, key: Any) -> Any:
        """The recording of a signature, or None."""
        return self._known.get(key)

    def record(self, key: Any, signature: Signature, call: Callable[[], Any]) -> Any:
        """The result of the whole way. It is recorded from the second call on, as the first may compile and self-test
        kernels, and not if two recordings have failed."""
        calls = self._calls.get(key, 0)
        if not 1 <= calls <= 2:
            if not calls and (len(self._calls) >= _MOST_SIGNATURES or self._epoch is not invalidation.epoch):
                self._forget()
            self._calls[key] = max(calls, 1)
            return call()
        with observed_call(signature.tensors) as recorder:
            result = call()
        found = self._finish(recorder, result, signature.stream)
        if found is None:
            self._calls[key] = calls + 1
            reason = f"{self._name}: repeated calls are not replayed: {recorder.failure}"
            if tracing.first(reason):
                tracing.event("replay", reason, op=self._name)
        else:
            self._known[key] = found
        return result
