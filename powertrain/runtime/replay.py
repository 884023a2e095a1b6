"""Repeated eager calls skip the op's Python: their allocations and launches are recorded once and then replayed.

Eager calls of one signature (shapes, strides, dtypes, options) make the same checks, take the same plan, allocate the
same results and launch the same kernels; only addresses differ. The second call of a signature is recorded, and from
the third on a function generated from the recording does the allocations and launches alone:

    Tape    one op's forward: allocations, and launches whose arguments are constants, inputs or allocations
    Route   one call of a public function, or of a backward: the op it ends in, the arguments, and the results

A recording is used only if it shows the whole effect of the call. PyTorch's ops inside it may allocate and make views;
after any other one (a copy, a random draw, a product) calls of that signature go the whole way as before.
So do calls under torch.compile, dispatch modes, functorch and graph capture, on misaligned or empty tensors, and with
arguments that are neither tensors nor plain values.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from powertrain.runtime import driver, recording, steering, tracing
from powertrain.runtime.errors import LaunchError
from powertrain.runtime.settings import settings

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
            if not address or value.is_neg() or value.get_device() != device:
                if not address or value.is_neg() or device != -2:
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
        else:
            return None
    # kernels are specialized on 16-byte alignment, which a recording fixes
    if bits & 15 or device == -2 or recording.state.redirected or steering.unsettled:
        return None
    # one tensor twice, or two at one address
    if len(set(addresses)) != len(addresses):
        key.append(tuple(map(addresses.index, addresses)))
        key.append(tuple(_index_of(tensors, x) for x in tensors))
    stream = 0
    if device >= 0:
        if torch._C._cuda_getDevice() != device or torch._C._cuda_isCurrentStreamCapturing():
            return None
        # part of the key: the launches of a recording go to the stream they were recorded on
        stream = torch._C._cuda_getCurrentRawStream(device)
    on = "cuda" if device >= 0 else "cpu"
    key += (
        device, stream, epoch, torch.is_grad_enabled(), torch._C._get_deterministic_algorithms(),
        torch.is_autocast_enabled(on) and torch.get_autocast_dtype(on), torch._C._get_float32_matmul_precision(),
        torch._C._get_cublas_allow_tf32(),
    )  # fmt: skip
    return Signature(tuple(key), tensors, device, stream)


class _Ref(NamedTuple):
    """A tensor of a recorded call: a view of an input or an allocation."""

    base: int  # inputs come first, then allocations
    offset: int  # bytes behind the base's first element
    like: tuple[torch.Size, tuple[int, ...], torch.dtype]  # its shape, strides, dtype


class _Launch(NamedTuple):
    kernel: Any  # runtime/launch.py's Kernel
    loaded: Any  # its Loaded; None: through the interpreter
    grid: tuple[int, ...]
    values: list[Any]  # _Ref, an external tensor, a number or None
    constants: dict[str, Any]


_here = threading.local()  # .recorder: the recording of this thread


def recorder() -> "Recorder | None":
    """The recording that this thread is in."""
    return getattr(_here, "recorder", None)


class Recorder(TorchDispatchMode):
    """Sees the allocations and launches of one call, and whether anything else happens."""

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self.inputs = inputs
        self.allocations: list[Tensor] = []  # kept, so that no address comes twice
        self.launches: list[_Launch] = []
        self.ran: list[tuple[Any, Sequence[Any], Any]] = []  # (op, arguments, result) of forwards outside of others
        self.differentiated = False
        self.depth = 0
        self.failure: str | None = None  # why this call cannot be replayed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.allocations.append(result)
            if result.device != self.inputs[0].device:
                self.failure = f"it allocates on {result.device}"
        elif not any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
            self.failure = f"it calls {func}"
        else:
            self._viewed(args[0], result)
        return result

    def _viewed(self, source: Tensor, result: Any) -> None:
        """A view of one input that begins where another input does would be taken for the other."""
        inputs = {x.data_ptr() for x in self.inputs}
        for view in result if isinstance(result, tuple | list) else (result,):
            if view.data_ptr() != source.data_ptr() and view.data_ptr() in inputs:
                self.failure = "a view of one input begins where another input does"

    def launched(
        self,
        kernel: Any,
        loaded: Any,
        grid: tuple[int, ...],
        values: Iterable[Any],
        constants: dict[str, Any],
    ) -> None:
        """A launch: by the driver, or of a kernel that is not loaded, by the interpreter."""
        if not self.depth:
            self.failure = f"it launches {kernel.name} outside of an op"
        refs = [self.ref(value) if isinstance(value, Tensor) else value for value in values]
        self.launches.append(_Launch(kernel, loaded, grid, refs, constants))

    def call(self, op: Any, args: tuple[Any, ...], differentiated: bool) -> Any:
        """A call of an op, seen from outside."""
        if not self.depth:
            self.differentiated = differentiated
        return op.apply(*args, None) if differentiated else op.run(args)

    def forward(self, op: Any, args: Sequence[Any]) -> Any:
        """An op's forward; ops that it calls belong to it."""
        if not op.replays:
            self.failure = f"{op.name} has effects beside its launches"
        self.depth += 1
        try:
            result = op.forward(*args)
        finally:
            self.depth -= 1
        if not self.depth:
            self.ran.append((op, args, result))
        return result

    def tape(self, stream: int) -> "Tape | None":
        """The forward of the one op that ran, if its recording shows all of its effect."""
        if len(self.ran) != 1:
            self.failure = self.failure or f"it calls {len(self.ran)} ops"
        if self.failure is not None:
            return None
        tape = Tape(*self.ran[0], self, stream)
        return None if self.failure else tape

    def route(self, result: Any, stream: int) -> "Route | None":
        """The way of a public function that returned `result`, if all it does is to call one op on its arguments."""
        tape = self.tape(stream)
        if tape is None:
            return None
        op, args, outcome = self.ran[0]
        arguments, results = self._arguments(args), _selection(outcome, result)
        if arguments is None or results is None:
            self.failure = f"{op.name} takes other tensors than it" if arguments is None else "it returns other tensors"
            return None
        return Route(op, arguments, self.differentiated, tape, results)

    def _arguments(self, args: Sequence[Any]) -> Callable[..., tuple[Any, ...]] | None:
        """The op's arguments as a function of the call's tensors; None if another tensor is among them."""
        names: dict[str, Any] = {}
        parts = []
        for index, arg in enumerate(args):
            if isinstance(arg, Tensor):
                place = _index_of(self.inputs, arg)
                if place is None:
                    return None
                parts.append(f"t{place}")
            else:
                names[f"c{index}"] = arg
                parts.append(f"c{index}")
        source = f"lambda {', '.join(f't{i}' for i in range(len(self.inputs)))}: ({', '.join(parts)},)"
        arguments: Callable[..., tuple[Any, ...]] = eval(source, names)
        return arguments

    def ref(self, x: Tensor) -> Any:
        """Where a tensor comes from. One from outside the call is kept as it is."""
        like = x.shape, x.stride(), x.dtype
        storage = x.untyped_storage()
        for index, base in enumerate(self.allocations):
            if base.untyped_storage()._cdata == storage._cdata:
                return _Ref(len(self.inputs) + index, x.data_ptr() - storage.data_ptr(), like)
        owners = [i for i, base in enumerate(self.inputs) if base.untyped_storage()._cdata == storage._cdata]
        for index in owners:
            if self.inputs[index].data_ptr() == x.data_ptr():
                return _Ref(index, 0, like)
        # the distance between two inputs in one storage is no fact of the signature
        if len(owners) > 1:
            self.failure = "an argument of a kernel lies between two inputs of one storage"
        return _Ref(owners[0], x.data_ptr() - self.inputs[owners[0]].data_ptr(), like) if owners else x


def _selection(outcome: Any, result: Any) -> Callable[[Any], Any] | None:
    """The result as a function of the op's outcome; None if it is made of anything else."""
    # a named one: a tape returns plain tuples
    if isinstance(result, tuple) and type(result) is not tuple:
        return None
    if result is outcome:
        return lambda outcome: outcome
    many = isinstance(outcome, tuple)
    made, given = outcome if many else (outcome,), result if isinstance(result, tuple) else (result,)
    places = [None if part is None else _index_of(made, part) for part in given]
    if any(place is None and part is not None for place, part in zip(places, given, strict=True)):
        return None
    parts = ["None" if place is None else f"outcome[{place}]" if many else "outcome" for place in places]
    source = f"lambda outcome: ({', '.join(parts)},)" if isinstance(result, tuple) else f"lambda outcome: {parts[0]}"
    selection: Callable[[Any], Any] = eval(source)
    return selection


def _index_of(things: Iterable[Any], thing: Any) -> int | None:
    return next((index for index, other in enumerate(things) if other is thing), None)


_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


@contextmanager
def _recording(inputs: list[Tensor]) -> Iterator[Recorder]:
    """Launches of this thread go the slow path, which shows them to the recorder."""
    _here.recorder = active = Recorder(inputs)
    try:
        with recording.state.observed(), active:
            yield active
    finally:
        _here.recorder = None


class Tape:
    """One op's forward on one signature: `run(*arguments)` allocates, launches and returns the results."""

    def __init__(self, op: Any, args: Sequence[Any], result: Any, recorder: Recorder, stream: int) -> None:
        self._forward = op.forward
        self._names = [f"a{i}" for i in range(len(args))]
        self._outputs = result if isinstance(result, tuple) else (result,)
        self._recorder = recorder
        self.external = [v for launch in recorder.launches for v in launch.values if isinstance(v, Tensor)]
        places = {id(arg): name for arg, name in zip(args, self._names, strict=True) if isinstance(arg, Tensor)}
        self._inputs = [places.get(id(x)) for x in recorder.inputs]
        build = self._generate if recorder.inputs[0].is_cuda else self._interpret
        self.run = build(isinstance(result, tuple), stream)
        del self._recorder, self._outputs  # they hold the tensors of the recorded call

    def _allocations(self) -> dict[int, tuple[Any, Any, torch.dtype]]:
        """(shape, strides, dtype) of each allocation that is used: as the output that it becomes, if it does."""
        first = len(self._recorder.inputs)
        used = {v.base - first for launch in self._recorder.launches for v in launch.values if isinstance(v, _Ref)}
        if any(base < 0 and self._inputs[base + first] is None for base in used):
            self._recorder.failure = "a kernel reads a tensor that is no argument of the op"
        kept = enumerate(self._recorder.allocations)
        made = {index: (tuple(x.shape), x.stride(), x.dtype) for index, x in kept if index in used}
        returned = []
        for out in self._outputs:
            base = None if out is None else self._whole_allocation(out)
            if base is not None:
                made[base] = tuple(out.shape), out.stride(), out.dtype
                returned.append(base)
                if out.numel() and base not in used:
                    self._recorder.failure = "no launch shown writes a result"
        if len(set(returned)) != len(returned):
            self._recorder.failure = "two results lie in one allocation"
        return made

    def _whole_allocation(self, out: Tensor) -> int | None:
        """The allocation that this output fills. Only such a one can be returned; else the recording has failed."""
        ref, first = self._recorder.ref(out), len(self._recorder.inputs)
        if isinstance(ref, _Ref) and ref.base >= first and not ref.offset:
            base = self._recorder.allocations[ref.base - first]
            extent = sum((size - 1) * step for size, step in zip(out.shape, out.stride(), strict=True)) + 1
            if out.dtype is base.dtype and out.numel() == base.numel() and (not out.numel() or extent == out.numel()):
                return ref.base - first
        self._recorder.failure = "a result is no whole allocation"
        return None

    def _generate(self, many: bool, stream: int) -> Callable[..., Any]:
        """As Python code, for the driver."""
        launches, first = self._recorder.launches, len(self._recorder.inputs)
        names: dict[str, Any] = {"fail": self._fail, "empty": _empty_cuda, "inf": math.inf, "nan": math.nan}
        lines = [f"def run({', '.join(self._names)}):"]
        for index, (shape, stride, dtype) in self._allocations().items():
            names[f"d{index}"] = dtype
            lines.append(f"    b{index} = empty({shape}, {stride}, d{index})")
        for base in sorted({v.base for launch in launches for v in launch.values if isinstance(v, _Ref)}):
            lines.append(f"    p{base} = {self._inputs[base] if base < first else f'b{base - first}'}.data_ptr()")
        for index, launch in enumerate(launches):
            lines += self._launch_lines(index, launch, names, stream)
        results = ["None" if out is None else f"b{self._whole_allocation(out)}" for out in self._outputs]
        lines.append(f"    return ({', '.join(results)},)" if many else f"    return {results[0]}")
        exec(compile("\n".join(lines), f"<replay of {self._forward.__qualname__}>", "exec"), names)
        run: Callable[..., Any] = names["run"]
        return run

    def _launch_lines(self, index: int, launch: _Launch, names: dict[str, Any], stream: int) -> list[str]:
        loaded = launch.loaded
        values = []
        for value in launch.values:
            if isinstance(value, _Ref):
                values.append(f"p{value.base} + {value.offset}" if value.offset else f"p{value.base}")
            else:
                plain = 0 if value is None else value
                values.append(repr(plain.data_ptr() if isinstance(plain, Tensor) else plain))
        gx, gy, gz = (*launch.grid, 1, 1)[:3]
        lines = []
        if loaded.has_scratch:
            names[f"scratch{index}"] = loaded.scratch
            lines.append(f"    kept{index} = scratch{index}({gx * gy * gz}, {torch._C._cuda_getDevice()})")
            values += [f"kept{index}[0].data_ptr()", f"kept{index}[1].data_ptr()"]
        else:
            values += ["0", "0"]
        config = driver.LaunchConfig((gx, gy, gz), loaded.threads, loaded.shared, stream)
        names |= {
            f"l{index}": loaded, f"s{index}": loaded.slots, f"pack{index}": loaded.pack_into, f"c{index}": config,
            "launch": driver.configured_launcher(),
        }  # fmt: skip
        return [
            *lines,
            f"    slot = s{index}.pop() if s{index} else l{index}.new_slot()",
            f"    pack{index}(slot[0], 0, {', '.join(values)})",
            f"    code = launch({config.address}, {loaded.handle!r}, slot[1], None)",
            f"    s{index}.append(slot)",
            f"    if code: return fail({index}, code, ({', '.join(self._names)},))",
        ]

    def _fail(self, index: int, code: int, args: tuple[Any, ...]) -> Any:
        """The driver refused a launch. The first one may be tried again with this thread's context set."""
        if index:
            raise LaunchError(f"launch {index} of a repeated call: {driver.describe(code)}")
        return self._forward(*args)

    def _interpret(self, many: bool, _stream: int) -> Callable[..., Any]:
        """As a loop over the launches, for Triton's interpreter."""
        made, launches = self._allocations(), self._recorder.launches
        returned = [None if out is None else self._whole_allocation(out) for out in self._outputs]
        inputs = [None if name is None else int(name[1:]) for name in self._inputs]

        def run(*args: Any) -> Any:
            bases = [None if place is None else args[place] for place in inputs]
            own: dict[int, Tensor] = {}
            for base, (shape, stride, dtype) in made.items():
                own[base] = torch.empty_strided(shape, stride, dtype=dtype)
            for launch in launches:
                values = [_view(bases, own, v) if isinstance(v, _Ref) else v for v in launch.values]
                named = dict(zip(launch.kernel.arguments, values, strict=True))
                launch.kernel.jit[launch.grid](**named, **launch.constants)
            results = tuple(None if base is None else own[base] for base in returned)
            return results if many else results[0]

        return run


def _empty_cuda(shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="cuda")


# as Inductor allocates: 1.2 us for torch.empty_strided's 2.3 on the host of one H200
_empty_cuda = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", _empty_cuda)


def _view(inputs: Sequence[Any], own: dict[int, Tensor], ref: _Ref) -> Tensor:
    base = inputs[ref.base] if ref.base < len(inputs) else own[ref.base - len(inputs)]
    shape, stride, dtype = ref.like
    first = base.storage_offset() * base.element_size() + ref.offset
    return torch.empty(0, dtype=dtype).set_(base.untyped_storage(), first // dtype.itemsize, shape, stride)


class Route(NamedTuple):
    """One public function's call, or one backward, on one signature."""

    op: Any
    arguments: Callable[..., tuple[Any, ...]]  # the op's, from the call's tensors
    differentiated: bool
    tape: Tape
    results: Callable[[Any], Any]  # the function's, from the op's

    def run(self, tensors: list[Tensor]) -> Any:
        args = self.arguments(*tensors)
        if self.differentiated:
            outcome = self.op.apply(*args, self.tape)
        else:
            outcome = self.tape.run(*args)
        return self.results(outcome)


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
        with _recording(signature.tensors) as recorder:
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
