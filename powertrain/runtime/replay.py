"""Repeated eager calls skip the op's Python: their allocations and launches are recorded once and then replayed.

Eager calls of one signature (shapes, strides, dtypes, options) make the same checks, take the same plan, allocate the
same results and launch the same kernels; only addresses differ. The second call of a signature is recorded, and from
the third on a function generated from the recording does the allocations and launches alone:

    Tape    one op's forward, or one call that differentiates nothing: its allocations, its launches and its calls of
            PyTorch's ops (runtime/tape.py)
    Route   one call of a public function, or one backward: the ops it consists of, their arguments, and the results

A recording (runtime/call_recorder.py) is used only if it shows the whole effect of the call: no random draws, nothing
that reads values on the host or leaves the device. Calls under torch.compile, dispatch modes, functorch and graph
capture, and with arguments that are neither tensors nor plain values go the whole way. Where a tensor begins within
16 bytes is part of the signature.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from powertrain.runtime import recording, steering, tracing
from powertrain.runtime.call_recorder import OpRun, Recorder, index_of, observed_call, recorder, tensors_in
from powertrain.runtime.settings import settings
from powertrain.runtime.tape import NotReplayable, Tape

__all__ = [
    "Recorder", "Route", "Signature", "Table", "Tape",
    "modes_active", "recorder", "route", "signature_of", "tensors_in",
]  # fmt: skip

in_interpreter = False  # tests replay on the CPU too, through the interpreter

_PLAIN_TYPES = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})
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


class Signature(NamedTuple):
    """What the effect of a call depends on, and its tensors in the order of the arguments."""

    key: tuple[Any, ...]
    tensors: list[Tensor]
    device: int  # -1: the CPU, under the interpreter
    stream: int


def signature_of(values: Sequence[Any]) -> Signature | None:
    """The signature of a call with these arguments; None: the call cannot be replayed."""
    # read first: what changes from here on makes the signature one of the past
    epoch = steering.epoch
    key: list[Any] = []
    tensors: list[Tensor] = []
    addresses: list[int] = []
    bits, device = 0, -2
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            try:
                address = value.data_ptr()
            except RuntimeError:  # a wrapper without storage
                return None
            if (not address and value.numel()) or value.is_neg():
                return None
            if value.get_device() != device:
                if device != -2:
                    return None
                device = value.get_device()
                if not (value.is_cuda or (in_interpreter and settings().interpret and value.device.type == "cpu")):
                    return None
            # one test of the low bits at the end instead of one a tensor
            bits |= address
            addresses.append(address)
            tensors.append(value)
            key += (value.shape, value.stride(), value.dtype, value.requires_grad)
        # beside their types, as 0 == 0.0 == False; of floats, 0.0 == -0.0 and NaN is equal to nothing
        elif kind is float:
            key += (float, value if value > 0 or value < 0 else repr(value))
        elif kind in _PLAIN_TYPES:
            key += (kind, value)
        elif (kind is tuple or kind is list) and all(type(element) in _PLAIN_TYPES for element in value):
            key += (kind, *map(type, value), *(repr(e) if type(e) is float else e for e in value))
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            return signature_of(_flat(values))
        else:
            return None
    if device == -2 or recording.state.redirected or steering.unsettled:
        return None
    # kernels are specialized, and ops choose them, by addresses up to 16 bytes, which a recording fixes
    if bits & 15:
        key.append(tuple([address & 15 for address in addresses]))
    # one tensor twice, or two at one address
    if len(set(addresses)) != len(addresses):
        key.append(tuple(map(addresses.index, addresses)))
        key.append(tuple(index_of(tensors, x) for x in tensors))
    stream = 0
    if device >= 0:
        if torch._C._cuda_getDevice() != device or torch._C._cuda_isCurrentStreamCapturing():
            return None
        # part of the key: the launches of a recording go to the stream they were recorded on
        stream = torch._C._cuda_getCurrentRawStream(device)
    on = "cuda" if device >= 0 else "cpu"
    key += (
        device, stream, epoch, torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
        torch._C._get_deterministic_algorithms(), torch.get_default_dtype(),
        torch.is_autocast_enabled(on) and torch.get_autocast_dtype(on), torch._C._get_float32_matmul_precision(),
        torch._C._get_cublas_allow_tf32(),
    )  # fmt: skip
    return Signature(tuple(key), tensors, device, stream)


def _flat(values: Sequence[Any]) -> Sequence[Any]:
    """The values, those of named tuples (`Copies`) in their place behind the type's name."""
    flat: list[Any] = []
    for value in values:
        is_named = isinstance(value, tuple) and hasattr(value, "_fields")
        flat += (type(value).__name__, *value) if is_named else (value,)
    return flat


class _Stage(NamedTuple):
    """An op that a public function calls."""

    op: Any
    arguments: Callable[[list[Tensor], list[Any]], tuple[Any, ...]]  # of the call's tensors and earlier stages' results
    is_differentiated: bool
    tape: Tape


class Route(NamedTuple):
    """One public function's call, or one backward, on one signature."""

    whole: Tape | None  # of a call that differentiates nothing
    stages: tuple[_Stage, ...]
    results: Callable[[list[Any]], Any]  # the function's, from the stages'

    def run(self, tensors: list[Tensor]) -> Any:
        if self.whole is not None:
            return self.whole.run(*tensors)
        outcomes: list[Any] = []
        for stage in self.stages:
            args = stage.arguments(tensors, outcomes)
            outcomes.append(stage.op.apply(*args, stage.tape) if stage.is_differentiated else stage.tape.run(*args))
        return self.results(outcomes)


def route(recorder: Recorder, result: Any, stream: int) -> Route | None:
    """The way of the recorded function that returned `result`; None, with the recorder's reason, if there is none."""
    made: Route | None = recorder.attempt(lambda: _route(recorder, result, stream))
    return made


def _route(recorder: Recorder, result: Any, stream: int) -> Route:
    # a tape returns plain tuples
    if isinstance(result, tuple) and type(result) is not tuple:
        raise NotReplayable("it returns a named tuple")
    if not any(run.is_differentiated for run in recorder.runs):
        if not recorder.steps:
            raise NotReplayable("it has no steps")
        return Route(recorder.tape_of_all(result, stream), (), lambda outcomes: None)
    if sum(run.end - run.first for run in recorder.runs) != len(recorder.steps):
        raise NotReplayable("it computes outside of ops while it differentiates")
    stages = []
    names = {id(x): f"t[{i}]" for i, x in enumerate(recorder.inputs)}
    for index, run in enumerate(recorder.runs):
        stages.append(_Stage(run.op, _arguments(run, names), run.is_differentiated, recorder.tape_of(run, stream)))
        if isinstance(run.result, tuple):
            names |= {id(x): f"o[{index}][{i}]" for i, x in enumerate(run.result) if x is not None}
        else:
            names[id(run.result)] = f"o[{index}]"
    return Route(None, tuple(stages), _results(result, names))


def _arguments(run: OpRun, names: dict[int, str]) -> Callable[[list[Tensor], list[Any]], tuple[Any, ...]]:
    """The op's arguments as a function of the call's tensors and of what earlier ops returned."""
    constants: dict[str, Any] = {}
    parts = []
    for index, arg in enumerate(run.args):
        if isinstance(arg, Tensor):
            if id(arg) not in names:
                raise NotReplayable(f"{run.op.name} takes other tensors than it")
            parts.append(names[id(arg)])
        else:
            constants[f"c{index}"] = arg
            parts.append(f"c{index}")
    arguments: Callable[[list[Tensor], list[Any]], tuple[Any, ...]] = eval(
        f"lambda t, o: ({', '.join(parts)},)", constants
    )
    return arguments


def _results(result: Any, names: dict[int, str]) -> Callable[[list[Any]], Any]:
    """The function's result from what its ops returned."""
    many = isinstance(result, tuple)
    parts = []
    for part in result if many else (result,):
        name = "None" if part is None else names.get(id(part), "")
        if not name or name.startswith("t"):
            raise NotReplayable("it returns other tensors than its ops")
        parts.append(name)
    results: Callable[[list[Any]], Any] = eval(f"lambda o: ({', '.join(parts)},)" if many else f"lambda o: {parts[0]}")
    return results


class Table:
    """The recordings of one op's forward, or of one public function, by signature."""

    def __init__(self, name: str, finish: Callable[[Recorder, Any, int], Any]) -> None:
        self._name = name
        self._finish = finish  # (recorder, result, stream) -> the recording, or None
        self._known: dict[Any, Any] = {}
        self._calls: dict[Any, int] = {}  # that went the whole way
        self._epoch = steering.epoch  # in which the recordings were made

    def find(self, key: Any) -> Any:
        """The recording of a signature, or None."""
        return self._known.get(key)

    def record(self, key: Any, signature: Signature, call: Callable[[], Any]) -> Any:
        """The result of the whole way. It is recorded from the second call on, as the first may compile and self-test
        kernels, and not if two recordings have failed."""
        calls = self._calls.get(key, 0)
        if not 1 <= calls <= 2:
            if not calls and (len(self._calls) >= _MOST_SIGNATURES or self._epoch is not steering.epoch):
                self._epoch = steering.epoch
                self._known.clear()
                self._calls.clear()
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
