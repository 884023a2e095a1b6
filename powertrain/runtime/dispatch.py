"""Dispatch of an op's call: directly to the kernel, through torch.library, or to plain PyTorch.

Eager calls on plain tensors go straight to an autograd.Function (or, when no gradient is wanted, to the forward
itself), because `torch.library.custom_op` costs 24 us forward and 74 with backward. The same functions are registered
with torch.library, and that path is taken under torch.compile, dispatch or function modes, tensor subclasses and
functorch.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from powertrain.runtime import flops as flop_counting
from powertrain.runtime import invalidation, kinds, nodes, positional, recording, replay, tracing
from powertrain.runtime import sharding as dtensors
from powertrain.runtime.compile.backward_ahead import backward_ahead
from powertrain.runtime.errors import CompileError
from powertrain.runtime.op_names import op_names
from powertrain.runtime.settings import settings
from powertrain.runtime.target import Target

if TYPE_CHECKING:
    from powertrain.runtime.compile.service import Spec

_PLAIN = (Tensor, Parameter)
_library = torch.library.Library("powertrain", "FRAGMENT")


def is_traced(x: Tensor) -> bool:
    """Values cannot be read on the host here: torch.compile, a tensor subclass (a fake tensor), functorch."""
    return torch.compiler.is_compiling() or type(x) not in _PLAIN or in_functorch()


def in_functorch() -> bool:
    """Inside torch.func.grad, jvp, vmap and similar transforms. They trace PyTorch's functions in eager calls too;
    values that vmap does not batch can be read."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def wants_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd, or a transform of torch.func, may ask for the gradient of one of the tensors. Inside a compiled
    function the stack of transforms is read, since Dynamo gives `requires_grad` the value from outside of them."""
    if not torch.is_grad_enabled():
        return False
    if any(x is not None and x.requires_grad for x in tensors):
        return True
    return torch.compiler.is_compiling() and _is_in_grad()


def _is_in_grad() -> bool:
    """Whether torch.func.grad, vjp or jvp is active. Dynamo enters the transforms that it traces."""
    stack = torch._C._functorch.get_interpreter_stack()
    kinds = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)
    return stack is not None and any(one.key() in kinds for one in stack)


# as torch.compiler.assume_constant_result, which would import all of torch._dynamo: called when Dynamo traces
_is_in_grad._dynamo_marked_constant = True  # type: ignore[attr-defined]


def refuse_vmap(name: str, *tensors: Tensor, instead: str = nodes.PLAIN) -> None:
    """Raise NotImplementedError if torch.vmap batches one of the tensors; it names what to do instead."""
    if in_functorch() and any(map(is_batched, tensors)):
        raise NotImplementedError(_NO_VMAP.format(name=name, instead=instead))


def is_batched(x: Tensor) -> bool:
    """Whether torch.vmap batches it in an eager call: its values cannot be read."""
    functorch = torch._C._functorch
    # of vmap(grad(f)), grad's tensors are around vmap's
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


_NO_VMAP = "{name}: vmap is not implemented; add the batch dimension to the tensors; {instead}"

_NO_FUNC = (
    f"{{name}}: torch.func.grad and similar transforms are not implemented; use torch.autograd.grad; {nodes.PLAIN}"
)


_NO_FORWARD_MODE = f"{{name}}: forward-mode differentiation is not implemented; {nodes.PLAIN}"


def _without_none(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with an empty tensor for each output that is None."""

    def call(*args: Any) -> Any:
        outputs = function(*args)
        if not isinstance(outputs, tuple):
            return outputs
        device = next(arg.device for arg in args if isinstance(arg, Tensor))
        return tuple(torch.empty(0, device=device) if out is None else out for out in outputs)

    return call


def _unchanged(x: Tensor) -> Tensor:
    return x


class _Scalar(torch.autograd.Function):
    """A number on the CPU from which a result on the meta device gets its gradient. A gradient given to `backward`, or
    `ones_like` of a meta tensor, makes PyTorch import sympy: up to 4 s of a first call."""

    @staticmethod
    def forward(ctx: Any, result: Tensor) -> Tensor:
        ctx.shape, ctx.dtype, ctx.device = result.shape, result.dtype, result.device
        return torch.empty((), device="cpu")

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Tensor:
        return torch.empty(ctx.shape, dtype=ctx.dtype, device=ctx.device)


class Op:
    """An op in three forms: direct call, autograd.Function, and torch.library op `powertrain::name`.

    schema         torch.library schema, e.g. "rms_norm_fwd(Tensor x, Tensor? weight, float eps) -> (Tensor, Tensor)"
    forward        allocates the outputs and launches the kernels; outputs never alias inputs; one that is not wanted
                   is None (an empty tensor to torch.library, whose schemas know no absent output)
    fake           allocates the outputs only (same arguments)
    backward       (ctx, *grads) -> a tuple: a gradient or None per argument; a grad is None where its output is unused
    setup_context  (ctx, inputs, output): saves tensors for backward
    num_results    the first so many outputs are results; the others are only saved, and a differentiated eager call
                   does not return them (each output costs autograd about 2 us)
    usual_gradients  the first so many results have gradients in most calls: which backward is compiled ahead
    replays        the forward's whole effect is its steps on the device, so that repeated calls can skip its Python
                   (runtime/replay.py)
    flops          the FLOPs of its matrix products, from its arguments by name (runtime/flops.py)
    sharding       which shards of DTensors it takes and gives, likewise (runtime/sharding.py)
    """

    def __init__(
        self,
        schema: str,
        forward: Callable[..., Any],
        fake: Callable[..., Any],
        *,
        backward: Callable[..., Any] | None = None,
        setup_context: Callable[..., None] | None = None,
        num_results: int | None = None,
        usual_gradients: int | None = None,
        replays: bool = True,
        flops: flop_counting.Formula | None = None,
        sharding: dtensors.Rule | None = None,
    ) -> None:
        self.name = schema.partition("(")[0]
        self.forward = forward
        self.apply: Any = None  # the autograd.Function's, of the arguments
        self.setup_context, self.num_results, self.usual_gradients = setup_context, num_results, usual_gradients
        self.replays = replays
        self._tapes = replay.Table(self.name, replay.Recorder.op_tape)
        self._compiled_backwards: set[Any] = set()
        qualified = f"powertrain::{self.name}"
        try:
            _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        except RuntimeError as error:
            if "multiple times" not in str(error):
                raise
            raise ImportError(
                f"{self.name} is registered with PyTorch already: its module was imported before, and interrupted or "
                "reloaded; start a new process (in a notebook: restart the kernel)"
            ) from None
        _library.impl(self.name, _without_none(self._dispatched), "CompositeExplicitAutograd")
        torch.library.register_fake(qualified, _without_none(self._recorded_or(fake)), lib=_library)
        torch.library.register_vmap(qualified, self._refuse_vmap, lib=_library)
        if backward is not None and setup_context is not None:
            self.apply = nodes.whole(self.name, self.run, backward, setup_context, num_results)
            self.apply_replayed = nodes.replayed(self.name, backward)
            torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=_library)
        self.packet = getattr(torch.ops.powertrain, self.name)
        self.sharding = sharding
        dtensors.register(self.name, self.packet, sharding)
        if flops is not None:
            flop_counting.register(self.packet, flops)

    def __call__(self, *args: Any) -> Any:
        # tracers and modes see dispatcher ops only; a direct call would bypass them
        active = None
        if torch.compiler.is_compiling() or replay.modes_active():
            active = None if torch.compiler.is_compiling() else replay.recorder()
            if active is None:
                if forward_ad._current_level >= 0:
                    self._refuse_forward_mode(args)
                return self.packet(*args)
        differentiate = False
        for arg in args:
            if isinstance(arg, Tensor):
                # a subclass (DTensor) implements its semantics on dispatcher ops
                if type(arg) not in _PLAIN:
                    dtensors.register(self.name, self.packet, self.sharding)
                    return self.packet(*dtensors.as_dtensors(args))
                # a lazy minus (the imaginary part of a conjugate) is in no memory; the dispatcher computes it
                if arg.is_neg():
                    return self.packet(*args)
                differentiate = differentiate or arg.requires_grad
        # without gradients no autograd.Function: it costs 34 us in backward alone, and some in forward
        differentiate = differentiate and self.apply is not None and torch.is_grad_enabled()
        if active is not None:
            return active.call(self, args, differentiate)
        if not differentiate:
            return self.run(args)
        # a failure in backward would be too late: the forward has run with our kernel by then
        if settings().on_compile_failure == "reference":
            self._compile_backward_first(args)
        # the backward's kernels compile beside the forward's
        before, backward_ahead.wanted = backward_ahead.wanted, functools.partial(self._compile_backward_ahead, args)
        try:
            return self.apply(*args)
        finally:
            backward_ahead.wanted = before

    def _refuse_forward_mode(self, args: tuple[Any, ...]) -> None:
        """torch.library drops tangents of tensors that want no gradient, without a word."""
        tensors = [arg for arg in args if type(arg) in _PLAIN]
        if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
            raise NotImplementedError(_NO_FORWARD_MODE.format(name=self.name))

    def run(self, args: tuple[Any, ...]) -> Any:
        """The forward: of a recording of an earlier call with this signature, or the whole."""
        if replay.recorder() is not None or not self.replays:
            return self._whole(args)
        signature = replay.signature_of(args)
        if signature is None or signature.stream == replay.PLAIN:
            return self.forward(*args)
        tape = self._tapes.find(signature.key)
        if tape is not None:
            return tape.run(*signature.tensors)
        return self._tapes.record(signature.key, signature, lambda: self._whole(args))

    def _dispatched(self, *args: Any) -> Any:
        """Called by torch.library, of a compiled graph for instance: its calls are repeated as eager ones are."""
        # a mode sees each allocation, and a call of an op while another one is observed belongs to that one
        if replay.recorder() is not None or replay.modes_active():
            return self.forward(*args)
        return self.run(args)

    def _whole(self, args: tuple[Any, ...]) -> Any:
        active = replay.recorder()
        return self.forward(*args) if active is None else active.forward(self, args)

    def _recorded_or(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Called by torch.library for meta tensors: the forward under `record()`, to note launches, else `fake`.

        Recorded calls come this way when a mode is active, such as a default device.
        """

        def call(*args: Any) -> Any:
            tensors = [arg for arg in args if isinstance(arg, Tensor)]
            if recording.state.recording is not None and all(type(t) in _PLAIN and t.is_meta for t in tensors):
                return self.forward(*args)
            return fake(*args)

        return call

    def _compile_backward_first(self, args: tuple[Any, ...]) -> None:
        """Compile the backward's kernels now, while the whole op can still fall back to plain PyTorch."""
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        key = tuple((t.dtype, t.shape, t.requires_grad) if isinstance(t, Tensor) else t for t in args)
        if key in self._compiled_backwards or tensors[0].device.type != "cuda":
            return
        from powertrain.runtime.compile.service import entry_for

        for spec in self._backward_specs(args):
            entry_for(spec)
        self._compiled_backwards.add(key)

    def _compile_backward_ahead(self, args: tuple[Any, ...]) -> None:
        """Compile the backward's kernels in other threads: called when a kernel of the forward begins to compile."""
        if not all(arg.is_cuda if isinstance(arg, Tensor) else not isinstance(arg, list | tuple) for arg in args):
            return
        state = recording.state
        # another thread's recording may last until this call has ended (a recomputation in autograd's thread); a call
        # that is observed for replay would show these launches as its own
        if state.recording is not None or state.redirected or replay.recorder() is not None:
            return
        from powertrain.runtime.compile.service import compile_ahead

        try:
            specs = self._backward_specs(args)
        except Exception as error:
            # without tensors in memory, some backward cannot say what it launches: that one compiles when it runs
            tracing.event("kernel", f"{self.name}: its backward is not compiled ahead: {error}", op=self.name)
        else:
            compile_ahead(specs)

    def _backward_specs(self, args: tuple[Any, ...]) -> "list[Spec]":
        """The specializations that forward and backward launch for these arguments."""
        metas = [
            torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta").requires_grad_(a.requires_grad)
            if isinstance(a, Tensor)
            else a
            for a in args
        ]
        device = next(arg.device for arg in args if isinstance(arg, Tensor))
        # hooks in force are for the tensors of the call itself: torch.utils.checkpoint counts them, and would compute
        # the whole layer again when this backward reads one
        hooks = saved_tensors_hooks(_unchanged, _unchanged)
        # inside the forward of an autograd.Function gradients are off
        with recording.record(Target.of(device)) as wanted, hooks, torch.enable_grad():
            results = self.apply(*metas)
            # a single one would be iterated over, by row
            results = results if isinstance(results, tuple) else (results,)
            results = results[: self.usual_gradients]
            outputs = [out for out in results if out is not None and out.requires_grad]
            torch.autograd.backward([_Scalar.apply(out) for out in outputs])
        return wanted.specs

    def _refuse_vmap(self, info: Any, in_dims: Any, *args: Any) -> Any:
        raise NotImplementedError(_NO_VMAP.format(name=self.name, instead=nodes.PLAIN))


# sorted and without duplicates, so that it can be part of a cache key
disabled_ops: tuple[str, ...] = ()
_holds: list[tuple[str, ...]] = []  # the names that each `disable` in force keeps off


def is_disabled(name: str) -> bool:
    names = disabled_ops + settings().disable
    return bool(names) and (name in names or "all" in names)


def _changed() -> None:
    """Recompute `disabled_ops`, again if another thread enters or leaves a `disable` meanwhile."""
    global disabled_ops
    seen = None
    while seen != (seen := list(_holds)):
        disabled_ops = tuple(sorted({name for names in seen for name in names}))
    invalidation.changed()


class disable:
    """Compute ops with plain PyTorch: `disable("rope")` from now on, or `with disable("rope"):` inside a block.

    It holds for the whole process, autograd's threads included: for every call made while at least one `disable` of the
    op is in force, in whatever order they end and on whatever thread. A backward goes the way its forward went; ops
    that a backward calls in turn (the products of `grouped_gemm`) are asked again when it runs. The environment
    variable POWERTRAIN_DISABLE=rope,scaled_softmax does the same without editing code; "all" stands for every op.
    ValueError: a name is of no op.
    """

    def __init__(self, *names: str) -> None:
        try:
            names = op_names(names)
        except ValueError as error:
            raise ValueError(f"disable {error}") from None
        self._names = names
        self._kept = True  # from now on, unless a `with` takes it over
        _holds.append(names)
        _changed()

    def __enter__(self) -> None:
        if self._kept:
            self._kept = False
            return
        _holds.append(self._names)
        _changed()

    def __exit__(self, *error: object) -> None:
        _holds.remove(self._names)
        _changed()


F = TypeVar("F", bound=Callable[..., Any])

SPAN = "powertrain."
_spans = False


@contextmanager
def named_spans(wanted: bool = True) -> Iterator[None]:
    """Context in which a profiler records every call of a public op as a span `powertrain.NAME`."""
    global _spans
    before, _spans = _spans, wanted
    try:
        yield
    finally:
        _spans = before


def falls_back(name: str, depends_on: Callable[[], Any] = lambda: None) -> Callable[[F], F]:
    """Let a public op fall back to plain PyTorch if its kernel cannot be compiled and the user allows it.

    With POWERTRAIN_ON_COMPILE_FAILURE=reference a CompileError (a deadline passed, a compiler died) is logged once, the
    op is disabled for the rest of the process, and the call is repeated. Repeated eager calls are replayed
    (runtime/replay.py); `depends_on` returns the values, beside arguments and settings of the process, on which
    their way depends.
    """

    def decorate(function: F) -> F:
        # `name` may be that of the op behind several functions
        op = name if function.__name__.startswith("_") else function.__name__

        def whole(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            try:
                return function(*args, **kwargs)
            except CompileError as error:
                if settings().on_compile_failure != "reference":
                    raise
                tracing.warn(f"{name} is computed by plain PyTorch from now on: {error}")
                disable(name)
                return function(*args, **kwargs)
            except positional.WRONG as raised:
                # torch.func refuses the autograd.Function of torch.library's ops, and forward mode functions
                # without a jvp: neither names the op or a way out
                refusals = {"setup_context": _NO_FUNC, "jvp function": _NO_FORWARD_MODE, "forward AD": _NO_FORWARD_MODE}
                # of a variable that a closure shares, Dynamo traces no `except ... as`
                said = str(raised)
                refusal = next((text for word, text in refusals.items() if word in said), None)
                if refusal is not None:
                    raise NotImplementedError(refusal.format(name=name)) from None
                better = positional.better_error(op, function, args, kwargs, raised)
                if better is None:
                    raise
                raise better from None

        routes = replay.Table(name, replay.route)
        scalars = kinds.scalars(function)
        defaults = kinds.float_defaults(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            compiling = torch.compiler.is_compiling()
            if compiling:
                kwargs = kinds.with_constants(defaults, args, kwargs)
            if _spans:
                with torch.profiler.record_function(SPAN + name):
                    return whole(args, kwargs)
            if compiling or replay.modes_active():
                return whole(args, kwargs)
            signature = replay.signature_of((*args, *kwargs.values()))
            if signature is not None:
                key = signature.key, tuple(kwargs), depends_on()
                route = routes.find(key)
                if route is not None:
                    return route.run(signature.tensors)
            elif not _NUMBERS_OF_NUMPY.isdisjoint(map(type, (*args, *kwargs.values()))):
                return call(*map(_python_number, args), **{key: _python_number(x) for key, x in kwargs.items()})
            # not in a function of its own, whose call would cost more than this
            are_plain = True
            for option, value in (*zip(scalars, args, strict=False), *kwargs.items()):
                if (types := scalars.get(option)) is None:
                    continue
                # true of NaN and infinity alone: each less itself is NaN
                if type(value) not in types or (type(value) is float and value - value):
                    positional.refuse_wrong_kind(op, function, args, kwargs)
                    are_plain = are_plain and type(value) in types
            if not are_plain:
                # a number in a tensor is no part of the signature, by which a later call would be answered
                given = positional.python_numbers(op, scalars, args, kwargs)
                return whole(args, kwargs) if given is None else call(*given[0], **given[1])
            if signature is None:
                return whole(args, kwargs)
            keep = routes.bind if signature.stream == replay.PLAIN else routes.record
            return keep(key, signature, lambda: whole(args, kwargs))

        return call  # type: ignore[return-value]

    return decorate


def repeats(function: F) -> F:
    """Let a public function that falls back to others skip its checks where plain PyTorch computes its first tensor
    (runtime/plain_calls.py)."""
    routes = replay.Table(function.__name__, replay.route)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not args or type(args[0]) not in _PLAIN or not args[0].is_cpu:
            return function(*args, **kwargs)
        signature = None if replay.modes_active() else replay.signature_of((*args, *kwargs.values()))
        if signature is None or signature.stream != replay.PLAIN:
            return function(*args, **kwargs)
        key = signature.key, tuple(kwargs)
        route = routes.find(key)
        if route is None:
            return routes.bind(key, signature, lambda: function(*args, **kwargs))
        return route.run(signature.tensors)

    return call  # type: ignore[return-value]


# NumPy's scalar types, such as that of lengths.max(); kernels and recordings take Python's numbers
_REAL = np.integer | np.floating | np.bool_
_NUMBERS_OF_NUMPY = frozenset(kind for kind in np.sctypeDict.values() if issubclass(kind, _REAL))


def _python_number(value: Any) -> Any:
    if type(value) not in _NUMBERS_OF_NUMPY:
        return value
    # a longdouble's item is itself
    return float(value) if isinstance(value, np.longdouble) else value.item()


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype in which torch.autocast computes matrix products of x; None where it does not cast x."""
    kind = x.device.type
    # autocast never casts float64; the meta device has no autocast
    if kind == "meta" or not torch.is_autocast_enabled(kind) or x.dtype is torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


def cast_by_autocast(x: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """x and the other operands of a matrix product in `autocast_dtype(x)`; unchanged where that is None."""
    dtype = autocast_dtype(x)
    operands = (x, *others)
    return operands if dtype is None else tuple(None if t is None else t.to(dtype) for t in operands)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Plain PyTorch with the dtypes as they are: our ops compute in float32 inside and keep their input's dtype."""
    # the meta device has none to switch off; torch 2.11's Dynamo cannot trace torch.amp.is_autocast_available.
    # Switching autocast off where it is off costs 10 us, as much as the product inside
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def apart_from_autocast(function: F, device: torch.device) -> F:
    """`function`, called as it is where autocast is off now, else `without_autocast`."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return function

    def call(*args: Any) -> Any:
        with without_autocast(device):
            return function(*args)

    return call  # type: ignore[return-value]


def has_kernels(x: Tensor) -> bool:
    """Whether our kernels run where x is: CUDA, meta, or the CPU under the interpreter."""
    # x.device.type takes three times as long
    return settings().interpret if x.is_cpu else x.is_cuda or x.is_meta


def use_kernel(name: str, x: Tensor) -> bool:
    """Whether op `name` on x takes our kernel or plain PyTorch."""
    kind = "disabled"
    # `has_kernels`, whose call would be one more in each call of an op; no kernel takes float64
    if settings().interpret and x.dtype is not torch.float64 if x.is_cpu else x.is_cuda or x.is_meta:
        if not is_disabled(name):
            return True
    else:
        kind = x.device.type
    if not torch.compiler.is_compiling() and tracing.first((name, kind)):
        why = "it is disabled" if kind == "disabled" else f"its tensors are on {kind}"
        tracing.event("dispatch", f"{name}: plain PyTorch, because {why}", op=name)
    return False
