"""A recorded call as a function: its allocations, launches and calls of PyTorch's ops, generated from the recording.

A tensor of the recorded call is found again by its storage: it is (a part of) an argument, or (a part of) what an
earlier step made. A tensor of neither, such as a table that the op keeps, is used as it is.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from powertrain.runtime import driver
from powertrain.runtime.errors import LaunchError
from powertrain.runtime.packed_launches import Address, PackedLaunches
from powertrain.runtime.steps import Allocation, Launch, OpCall, Step, shared_scratch


class NotReplayable(Exception):
    """A recording that does not show the whole effect of its call; the text says why."""


class _Layout(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(x: Tensor) -> "_Layout":
        return _Layout(tuple(x.shape), x.stride(), x.dtype)

    def holds_elements(self) -> bool:
        return 0 not in self.shape


class _Base(NamedTuple):
    """An argument or a step's result, which tensors of later steps are parts of."""

    name: str  # in the generated code: a0, a1, ... or b0, b1, ...
    first: int  # address of its first element
    layout: _Layout
    is_made: bool  # by a step, not an argument


class _Part(NamedTuple):
    base: _Base
    offset: int  # in bytes behind the base's first element
    layout: _Layout


class _Queued(NamedTuple):
    """A launch whose arguments are packed with those of the next ones."""

    loaded: Any
    arguments: list[Address | int | float]
    config: driver.LaunchConfig
    used: list[str]  # bases


class Tape:
    """`run(*arguments)` repeats a recorded call on other tensors of the same signature.

    name         in messages
    args         the recorded call's arguments, in the order `run` takes them
    result       a tensor, None, or a tuple of these
    steps        the call's, in order
    hidden       other tensors whose addresses belong to that call alone: no step may use one
    autocasts    autocast was on: PyTorch's ops are called below it, as they were recorded
    """

    def __init__(
        self, name: str, args: Sequence[Any], result: Any, steps: Sequence[Step], hidden: Sequence[Tensor],
        stream: int, autocasts: bool,
    ) -> None:  # fmt: skip
        self.name = name
        self.external: list[Tensor] = []  # their addresses are in the code
        source = _Source(args, result, steps, hidden)
        lines, names = source.generate(stream, autocasts)
        self.external = source.external
        names |= {"empty": _empty["cuda" if source.is_cuda else "cpu"], "again": self._again}
        exec(compile("\n".join(lines), f"<replay of {name}>", "exec"), names)
        self.run: Callable[..., Any] = names["run"]

    def _again(self, index: int, device: int, launch: Callable[[], int]) -> None:
        """The driver refused a launch. A thread of autograd may not have this device's context current."""
        driver.make_context_current(device)
        code = launch()
        if code:
            raise LaunchError(f"launch {index} of a repeated {self.name}: {driver.describe(code)}")


class _Source:
    """Python code of a tape."""

    def __init__(self, args: Sequence[Any], result: Any, steps: Sequence[Step], hidden: Sequence[Tensor]) -> None:
        self._parameters = [f"a{i}" for i in range(len(args))]
        self._arguments = {id(arg): name for name, arg in zip(self._parameters, args, strict=True)}
        self._bases: dict[int, list[_Base]] = {}  # by storage
        for name, arg in zip(self._parameters, args, strict=True):
            if isinstance(arg, Tensor):
                self._add(name, arg, is_made=False)
        self._hidden = {x.untyped_storage()._cdata for x in hidden}
        self._steps, self._result = steps, result
        self.external: list[Tensor] = []
        made = [step.tensor for step in steps if isinstance(step, Allocation)]
        self.is_cuda = next(arg for arg in (*args, *made) if isinstance(arg, Tensor)).is_cuda
        self._device = torch._C._cuda_getDevice() if self.is_cuda else -1
        self._outputs = result if isinstance(result, tuple) else (result,)
        self._names: dict[str, Any] = {"inf": math.inf, "nan": math.nan, "part": _part}
        self._lines: list[str] = []
        self._launches = 0
        self._queued: list[_Queued] = []
        self._addressed: set[str] = set()  # bases whose address is in a local variable
        self._last_use: dict[str, int] = {}  # base -> line
        self._made_at: dict[str, int] = {}

    def _add(self, name: str, x: Tensor, is_made: bool) -> _Base:
        base = _Base(name, x.data_ptr(), _Layout.of(x), is_made)
        self._bases.setdefault(x.untyped_storage()._cdata, []).append(base)
        return base

    def generate(self, stream: int, autocasts: bool) -> tuple[list[str], dict[str, Any]]:
        """The lines of `run`, and the names they use."""
        written = self._layouts_of_outputs()
        self._offsets, self._scratch_bytes = shared_scratch(self._steps, written)
        calls = False
        for index, step in enumerate(self._steps):
            if not isinstance(step, Launch):
                self._launch_queued()
            if isinstance(step, Allocation):
                self._allocate(f"b{index}", step.tensor, written)
            elif isinstance(step, Launch):
                self._launch(index, step, stream)
            else:
                calls = True
                self._call(index, step)
        self._launch_queued()
        results = [self._output(out) for out in self._outputs]
        body = self._with_ends(set(results))
        body.append(f"return ({', '.join(results)},)" if isinstance(self._result, tuple) else f"return {results[0]}")
        if calls and autocasts:
            body = below_autocast(body, self._names)
        return [f"def run({', '.join(self._parameters)}):", *(f"    {line}" for line in body)], self._names

    def _layouts_of_outputs(self) -> dict[int, _Layout]:
        """storage -> the layout in which it is returned: an allocation is made in that one."""
        tensors: dict[int, Tensor] = {}
        for out in self._outputs:
            if out is None:
                continue
            if not isinstance(out, Tensor):
                raise NotReplayable("it returns more than tensors")
            # the gradient of x + residual is one tensor for both
            if tensors.setdefault(out.untyped_storage()._cdata, out) is not out:
                raise NotReplayable("two results lie in one allocation")
        return {storage: _Layout.of(out) for storage, out in tensors.items()}

    def _allocate(self, name: str, x: Tensor, outputs: dict[int, _Layout]) -> None:
        storage, layout = x.untyped_storage()._cdata, _Layout.of(x)
        offset = self._offsets.get(storage)
        if offset is not None:
            # `_find` knows the part by its distance from where the one allocation would begin
            whole = _Layout((self._scratch_bytes,), (1,), torch.uint8)
            self._bases[storage] = [_Base("scratch", x.data_ptr() - offset, whole, True)]
            if "scratch" not in self._made_at:
                self._make("scratch", whole)
            return
        wanted = outputs.get(storage)
        if wanted is not None and _fills(wanted, layout):
            layout = wanted
        self._bases.setdefault(storage, []).append(_Base(name, x.data_ptr(), layout, True))
        self._make(name, layout)

    def _make(self, name: str, layout: _Layout) -> None:
        self._names[f"d{name}"] = layout.dtype
        self._made_at[name] = len(self._lines)
        self._lines.append(f"{name} = empty({layout.shape}, {layout.stride}, d{name})")

    def _launch(self, index: int, launch: Launch, stream: int) -> None:
        if launch.loaded is None:
            self._launch_interpreted(index, launch)
            return
        used: list[str] = []
        loaded = launch.loaded
        arguments = [self._argument(value, used) for value in launch.values]
        gx, gy, gz = (*launch.grid, 1, 1)[:3]
        if loaded.has_scratch:
            self._names[f"scratch{index}"] = loaded.scratch
            self._lines.append(f"kept{index} = scratch{index}({gx * gy * gz}, {self._device})")
            arguments += [Address(f"kept{index}[0].data_ptr()"), Address(f"kept{index}[1].data_ptr()")]
        else:
            arguments += [0, 0]
        config = driver.LaunchConfig((gx, gy, gz), loaded.threads, loaded.shared, stream, loaded.starts_early)
        self._names[f"c{index}"] = config
        self._queued.append(_Queued(loaded, arguments, config, used))

    def _launch_queued(self) -> None:
        """The launches since the last step of another kind: their arguments are packed at once."""
        queued, number = self._queued, len(self._lines)
        if not queued:
            return
        self._queued = []
        packed = PackedLaunches([(launch.loaded, launch.arguments) for launch in queued])
        self._names |= {
            f"s{number}": packed.slots, f"new{number}": packed.new_slot, f"pack{number}": packed.pack_into,
            "launch": driver.configured_launcher(),
        }  # fmt: skip
        changing = [
            address.expression if address.rest is None else f"{address.expression}, {self._constant(address.rest)}"
            for address in packed.changing
        ]
        self._lines += [
            f"slot = s{number}.pop() if s{number} else new{number}()",
            f"pack{number}({', '.join(['slot[0]', '0', *changing])})",
        ]
        for place, launch in enumerate(queued, 1):
            call = f"launch({launch.config.address}, {launch.loaded.handle!r}, slot[{place}], None)"
            self._last_use |= dict.fromkeys(launch.used, len(self._lines))
            self._lines.append(f"if {call}: again({self._launches}, {self._device}, lambda: {call})")
            self._launches += 1
        self._lines.append(f"s{number}.append(slot)")

    def _launch_interpreted(self, index: int, launch: Launch) -> None:
        named = dict(zip(launch.kernel.arguments, launch.values, strict=True))
        values = [f"{name}={self._memory(value, len(self._lines))}" for name, value in named.items()]
        self._names |= {f"kernel{index}": launch.kernel.jit[launch.grid], f"constants{index}": launch.constants}
        self._lines.append(f"kernel{index}({', '.join(values)}, **constants{index})")

    def _memory(self, value: Any, line: int) -> str:
        """An argument of a launch through the interpreter, which takes tensors."""
        part = self._find(value) if isinstance(value, Tensor) else None
        if part is None or (not part.offset and part.layout == part.base.layout):
            return self._expression(value, line)
        self._last_use[part.base.name] = line
        self._names["memory"] = _memory
        return f"memory({part.base.name}, {part.offset}, *{self._constant(part.layout)})"

    def _argument(self, value: Any, used: list[str]) -> Address | int | float:
        """An argument of a launch, as its buffer takes it; `used` notes the base."""
        if value is None or isinstance(value, int | float):
            return 0 if value is None else value
        if isinstance(value, Tensor):
            return self._address(value, 0, None, used)
        return self._address(value.tensor, value.offset, value.rest, used)

    def _address(self, x: Tensor, offset: int, rest: bytes | None, used: list[str]) -> Address | int:
        part = self._find(x)
        if part is None:
            address = x.data_ptr() + offset
            return address if rest is None else Address(repr(address), rest)
        name, offset = part.base.name, part.offset + offset
        if name not in self._addressed:
            self._addressed.add(name)
            self._lines.append(f"p{name} = {name}.data_ptr()")
        used.append(name)
        return Address(f"p{name} + {offset}" if offset else f"p{name}", rest)

    def _call(self, index: int, call: OpCall) -> None:
        line = len(self._lines)
        writes = {
            arg.name for arg in call.op._schema.arguments if arg.alias_info is not None and arg.alias_info.is_write
        }
        declared = [arg.name for arg in call.op._schema.arguments]
        given = [self._expression(arg, line, name in writes) for name, arg in zip(declared, call.args, strict=False)]
        given += [f"{name}={self._expression(arg, line, name in writes)}" for name, arg in call.kwargs.items()]
        self._names[f"f{index}"] = call.op._op
        text = f"f{index}({', '.join(given)})"
        targets = []
        for place, result in enumerate(call.results):
            name = f"b{index}_{place}" if isinstance(result, Tensor) else "_"
            targets.append(name)
            if isinstance(result, Tensor):
                self._add(name, result, is_made=True)
                self._made_at[name] = self._last_use[name] = line
        self._lines.append(f"{', '.join(targets)}{',' if call.many else ''} = {text}" if targets else text)

    def _expression(self, value: Any, line: int, is_written: bool = False) -> str:
        """An argument of a call in `line`."""
        if isinstance(value, Tensor):
            part = self._find(value)
            if part is None:
                return self._constant(value)
            self._last_use[part.base.name] = line
            return _view_expression(part, is_written)
        if isinstance(value, list | tuple):
            inside = [self._expression(element, line, is_written) for element in value]
            return f"[{', '.join(inside)}]"
        # numbers are part of the signature or constants of the op
        if value is None or type(value) in (bool, int, float, str):
            return repr(value)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        name = f"k{len(self._names)}"
        self._names[name] = value
        return name

    def _find(self, x: Tensor) -> _Part | None:
        """The base and layout of which x is a view; None if x comes from outside the call."""
        storage, layout = x.untyped_storage()._cdata, _Layout.of(x)
        bases = self._bases.get(storage)
        if bases is None:
            if storage in self._hidden:
                raise NotReplayable("it uses a tensor that is neither an argument nor made by it")
            self.external.append(x)
            return None
        for base in bases:
            if base.first == x.data_ptr():
                return _Part(base, 0, layout)
        # an empty tensor's address is 0, wherever it begins
        if not x.numel():
            return _Part(bases[0], 0, layout)
        # the distance between two arguments in one storage is no fact of the signature, nor that to an empty one
        if len(bases) > 1 or not bases[0].layout.holds_elements():
            raise NotReplayable("it uses memory between two arguments of one storage")
        return _Part(bases[0], x.data_ptr() - bases[0].first, layout)

    def _output(self, out: Tensor | None) -> str:
        """A result: an argument, or one allocation or one op's result, whole or its first elements."""
        if out is None:
            return "None"
        if id(out) in self._arguments:
            return self._arguments[id(out)]
        part = self._find(out)
        if part is None or not part.base.is_made or part.offset or not _begins(part.layout, part.base.layout):
            raise NotReplayable("a result is no allocation and not the first elements of one")
        name = part.base.name
        if out.numel() and name not in self._last_use:
            raise NotReplayable("no step shown writes a result")
        if part.layout == part.base.layout:
            return name
        self._lines.append(f"{name} = {_view_expression(part, False)}")
        return name

    def _with_ends(self, returned: set[str]) -> list[str]:
        """The lines, without allocations that nothing uses, and with the end of each other that is not returned.

        Memory is freed in stream order, so what a later step allocates may be what a launch still uses.
        """
        ends: dict[int, list[str]] = {}
        unused = set()
        for name, made_at in self._made_at.items():
            if name in returned:
                continue
            if name in self._last_use:
                ends.setdefault(self._last_use[name], []).append(name)
            else:
                unused.add(made_at)
        lines = []
        for index, line in enumerate(self._lines):
            if index not in unused:
                lines.append(line)
            if index in ends:
                lines.append(f"del {', '.join(ends[index])}")
        return lines


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCPU
)


def below_autocast(body: list[str], names: dict[str, Any]) -> list[str]:
    """Lines that call PyTorch's ops as they were recorded, below autocast, which would cast their arguments again."""
    names |= {"below": torch._C._ExcludeDispatchKeyGuard, "autocast": _AUTOCAST}
    return ["with below(autocast):", *(f"    {line}" for line in body)]


def _fills(part: _Layout, whole: _Layout) -> bool:
    """Both have the same elements without gaps."""
    return _begins(part, whole) and math.prod(part.shape) == math.prod(whole.shape)


def _begins(part: _Layout, whole: _Layout) -> bool:
    """The part, which begins where the whole does, has elements of it without gaps: rows that were not padding."""
    extent = sum((size - 1) * step for size, step in zip(part.shape, part.stride, strict=True)) + 1
    count = math.prod(part.shape)
    return part.dtype is whole.dtype and count <= math.prod(whole.shape) and (not count or extent == count)


def _view_expression(part: _Part, is_written: bool) -> str:
    base, layout = part.base, part.layout
    if not part.offset and layout == base.layout:
        return base.name
    if layout.dtype is not base.layout.dtype or part.offset % layout.dtype.itemsize:
        raise NotReplayable("an op reads memory as another dtype")
    step = part.offset // layout.dtype.itemsize
    if is_written and not base.is_made:
        # a view, which shares the argument's version counter
        return f"{base.name}.as_strided({layout.shape}, {layout.stride}, {base.name}.storage_offset() + {step})"
    return f"part({base.name}, {layout.shape}, {layout.stride}, {step})"


def _memory(x: Tensor, offset: int, shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    first = x.storage_offset() * x.element_size() + offset
    return torch.empty(0, dtype=dtype, device=x.device).set_(
        x.untyped_storage(), first // dtype.itemsize, shape, stride
    )


def _as_strided(x: Tensor, shape: Any, stride: Any, step: int) -> Tensor:
    return x.as_strided(shape, stride, x.storage_offset() + step)


# as Inductor takes parts of a buffer, without autograd's views
_part = getattr(torch._C._dynamo.guards, "_reinterpret_tensor", _as_strided)


def _empty_on(device: str) -> Callable[..., Tensor]:
    """(shape, stride, dtype) -> an uninitialized tensor."""

    def empty(shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    # as Inductor allocates: 1.2 us for torch.empty_strided's 2.3 on the host of one H200
    found: Callable[..., Tensor] = getattr(torch._C._dynamo.guards, f"_empty_strided_{device}", empty)
    return found


_empty = {device: _empty_on(device) for device in ("cuda", "cpu")}
