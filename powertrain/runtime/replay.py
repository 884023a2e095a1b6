"""Repeated eager calls skip the op's Python: their allocations and launches are recorded once and then replayed.

Eager calls of one signature (shapes, strides, dtypes, options) make the same checks, take the same plan, allocate the
same results and launch the same kernels; only addresses differ. The second call of a signature is recorded, and from
the third on a function generated from the recording does the allocations and launches alone:

    Tape    one op's forward, or one call that differentiates nothing: its allocations, its launches and its calls of
            PyTorch's ops (runtime/tape.py)
    Stage   one differentiated op: its tape, and what it keeps for its backward (runtime/stages.py)
    Route   one call of a public function, or one backward: its tape, or the stages and tapes of the ops it consists of

A recording (runtime/call_recorder.py) is used only if it shows the whole effect of the call: no random draws, nothing
that reads values on the host or leaves the device. Calls under torch.compile, dispatch modes, functorch and graph
capture, and with arguments that are neither tensors nor plain values go the whole way. Where a tensor begins within
16 bytes is part of the signature.

A call on a CPU without kernels has no launches: its Route is the function of plain PyTorch that computed the first call
of the signature (runtime/plain_calls.py).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from powertrain.runtime import steering, tracing
from powertrain.runtime.call_recorder import OpRun, Recorder, observed_call, recorder
from powertrain.runtime.plain_calls import observed
from powertrain.runtime.signature import PLAIN, Signature, signature_of
from powertrain.runtime.stages import Stage
from powertrain.runtime.steps import tensors_in
from powertrain.runtime.tape import NotReplayable, Tape

__all__ = [
    "PLAIN", "Recorder", "Route", "Signature", "Table", "Tape",
    "modes_active", "recorder", "route", "signature_of",
]  # fmt: skip

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
    # a tape returns plain tuples
    if isinstance(result, tuple) and type(result) is not tuple:
        raise NotReplayable("it returns a named tuple")
    undifferentiated = [run.result for run in recorder.runs if not run.is_differentiated]
    if any(x.requires_grad for x in tensors_in(undifferentiated)):
        raise NotReplayable("another autograd.Function than an op's differentiates it")
    if not any(run.is_differentiated for run in recorder.runs):
        if not recorder.steps:
            raise NotReplayable("it has no steps")
        return Route(recorder.tape_of_all(result, stream).run)
    if sum(run.end - run.first for run in recorder.runs) != len(recorder.steps):
        raise NotReplayable("it computes outside of ops while it differentiates")
    parameters = [f"t{i}" for i in range(len(recorder.inputs))]
    names = {id(x): name for x, name in zip(recorder.inputs, parameters, strict=True)}
    space: dict[str, Any] = {}
    lines = [f"def function({', '.join(parameters)}):"]
    for index, run in enumerate(recorder.runs):
        lines.append(f"    o{index} = {_call(index, run, names, space, recorder.tape_of(run, stream))}")
        if isinstance(run.result, tuple):
            names |= {id(x): f"o{index}[{i}]" for i, x in enumerate(run.result) if x is not None}
        else:
            names[id(run.result)] = f"o{index}"
    lines.append(f"    return {_results(result, names)}")
    exec(compile("\n".join(lines), "<replay of several ops>", "exec"), space)
    return Route(space["function"])


def _call(index: int, run: OpRun, names: dict[int, str], space: dict[str, Any], tape: Tape) -> str:
    """Code that repeats an op: its node or, if it differentiates nothing, its tape, of tensors by their names."""
    tensors = list(tensors_in(run.args))
    if any(id(x) not in names for x in tensors):
        raise NotReplayable(f"{run.op.name} takes other tensors than it")
    given = [names[id(x)] for x in tensors]
    space[f"run{index}"] = tape.run
    if run.is_differentiated:
        space[f"run{index}"], space[f"s{index}"] = run.op.apply_replayed, Stage(run.op, run.args, run.result, tape)
        given.insert(0, f"s{index}")
    return f"run{index}({', '.join(given)})"


def _results(result: Any, names: dict[int, str]) -> str:
    """Code of the function's result, from what its ops returned."""
    many = isinstance(result, tuple)
    parts = []
    for part in result if many else (result,):
        name = "None" if part is None else names.get(id(part), "")
        if not name or name.startswith("t"):
            raise NotReplayable("it returns other tensors than its ops")
        parts.append(name)
    return f"({', '.join(parts)},)" if many else parts[0]


class Table:
    """The recordings of one op's forward, or of one public function, by signature."""

    def __init__(self, name: str, finish: Callable[[Recorder, Any, int], Any]) -> None:
        self._name = name
        self._finish = finish  # (recorder, result, stream) -> the recording, or None
        self._known: dict[Any, Any] = {}
        self._calls: dict[Any, int] = {}  # that went the whole way
        self._epoch = steering.epoch  # in which the recordings were made

    def bind(self, key: Any, signature: Signature, call: Callable[[], Any]) -> Any:
        """The result of a call that plain PyTorch computes; what computes it is kept as a `Route`."""
        if len(self._known) >= _MOST_SIGNATURES or self._epoch is not steering.epoch:
            self._forget()
        result, function = observed(signature.tensors, call)
        if function is not None:
            self._known[key] = Route(function)
        return result

    def _forget(self) -> None:
        self._epoch = steering.epoch
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
            if not calls and (len(self._calls) >= _MOST_SIGNATURES or self._epoch is not steering.epoch):
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
