"""Kernel launches: specialization, argument packing, and the call of the driver.

    @kernel(aligned=("N",))
    def _scale_kernel(x_ptr, y_ptr, stride_xm, N, scale, BLOCK_N: tl.constexpr): ...

    _scale_kernel[(rows,)](x, y, x.stride(0), N, 2.0, BLOCK_N=1024, num_warps=4)

The syntax is Triton's; the specialization key is ours, so that nothing recompiles when a batch changes:

- parameters named `*_ptr` take tensors (or None, a constant): dtype, and whether all of them are 16-byte aligned, but
  those named in `unaligned`: lengths, labels, scales, read one by one wherever in a larger tensor they begin;
- those named `*_desc` take a map of a tensor (runtime/tensor_maps.py), or None: dtype, block and layout;
- `stride_*` and those named in `aligned`: whether all of them are multiples of 16; so strides of small arguments, which
  are often 1, are named otherwise, `step_*`;
- both are numbers rather than yes or no: the largest power of two from 16 down to `down_to` of which all addresses (in
  bytes), and all integers, are multiples. 8 unless said otherwise: heads of 72 or 184 bfloat16 lie 16 bytes apart;
- every other integer (sizes, lengths, token counts): nothing, not even that it is 1; all of them are int32 unless one
  needs int64;
- floats are float32; `tl.constexpr` parameters and options (num_warps, num_stages, maxnreg) are constants. A kernel
  with STARTS_EARLY is launched before the one before it has ended (ops/early_start.py); in a graph with a driver of
  CUDA 12.3 or later only.

The device is the tensors' (mixed devices are an error), and so is the stream: that device's current one. A device
guard is taken only when the current device is another one. A grid with a zero in it launches nothing.

The warm path is a function generated for each kernel: it reads pointers and dtypes, looks the specialization up in
the device's table, packs the arguments and calls the driver. Everything else happens once, in `_prepare`.
"""

import ctypes
import inspect
import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from powertrain.runtime import driver, recording, replay, tracing
from powertrain.runtime.errors import LaunchError, WarmUpFirst
from powertrain.runtime.settings import settings
from powertrain.runtime.target import Target, pretended

OPTIONS = {"num_warps": 4, "num_stages": 3, "maxnreg": None}

_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
}
_FORMATS = {"i32": "i", "i64": "q", "fp32": "f"}  # pointers and absent ones: "Q"
_MAP_FORMAT = "Q120s"  # an address and the rest of its tensor map
# Triton's scratch pointers, global and profile, behind the declared ones
_HIDDEN_PARAMETERS = 2
_interpreted = threading.Lock()


class Loaded:
    """A kernel on a device: how to pack its arguments, and the driver's handle.

    Every declared argument has its place in the buffer; the pointer array given to the driver leaves out those that
    are constants here (pointers that are None) and ends with Triton's hidden scratch pointers. Behind a tensor map
    Triton declares its shape and strides, which no kernel reads: they point to a zero at the end.
    """

    def __init__(
        self, types: list[str], facts: dict[str, Any], function: driver.Function, maps: frozenset[int] = frozenset(),
        starts_early: bool = False,
    ) -> None:  # fmt: skip
        """`maps`: the places of tensor maps among the arguments, absent ones too."""
        self.function = function
        self.maps = maps
        self.starts_early = starts_early
        self.handle = function.handle
        self.facts = facts
        self.threads, self.shared = 32 * facts["num_warps"], facts["shared"]
        self.has_scratch = bool(facts["global_scratch"] or facts["profile_scratch"])
        # one buffer for all arguments, packed by one call of struct: a ctypes object for each costs more than the
        # launch
        self._types = [*types, *["*"] * _HIDDEN_PARAMETERS]
        self.formats = [_MAP_FORMAT if i in maps else _FORMATS.get(t, "Q") for i, t in enumerate(self._types)]
        layout = struct.Struct("@" + "".join(self.formats))
        self.pack_into, self._size = layout.pack_into, layout.size + 8
        ends = [struct.calcsize("@" + "".join(self.formats[: i + 1])) for i in range(len(self.formats))]
        places = [end - struct.calcsize("@" + format) for end, format in zip(ends, self.formats, strict=True)]
        self._offsets = self.pointers(places, layout.size)
        # (buffer, address of the pointer array, that array): taken and put back by launches, so threads never share one
        self.slots: list[tuple[Any, int, Any]] = []

    def pointers(self, places: Sequence[int], zero: int) -> list[int]:
        """The pointer array for the driver, from the places of all arguments and of a zero."""
        indices: list[int] = []
        for type_, place in zip(self._types, places, strict=True):
            if type_ == "constexpr":
                continue
            indices.append(place)
            if type_.startswith("tensordesc"):
                rank = type_[: type_.index("]")].count(",") + 1
                indices += [zero] * (2 * rank)
        return indices

    def scratch(self, programs: int, device: int) -> list[Tensor]:
        """Memory for the hidden scratch pointers. Hold it until the launch is queued: the allocator then reuses it
        in stream order."""
        where = torch.device("cuda", device)
        sizes = (self.facts["global_scratch"], self.facts["profile_scratch"])
        return [torch.empty(programs * size, dtype=torch.int8, device=where) for size in sizes]

    def new_slot(self) -> tuple[Any, int, Any]:
        buffer = ctypes.create_string_buffer(self._size)
        base = ctypes.addressof(buffer)
        pointers = (ctypes.c_void_p * len(self._offsets))(*(base + offset for offset in self._offsets))
        return buffer, ctypes.addressof(pointers), pointers


class Kernel:
    """A Triton or Gluon kernel under our launch rules. Made by `@kernel`; Gluon's is made for `archs` alone."""

    def __init__(
        self, fn: Any, aligned: tuple[str, ...], jit: Any = triton.jit, archs: tuple[int, ...] = (),
        unaligned: tuple[str, ...] | frozenset[str] = (), down_to: int = 8,
    ) -> None:  # fmt: skip
        self.fn = fn
        self.jit = jit(fn)
        self.archs = archs
        self.down_to = down_to
        self.name = fn.__name__
        self.module = fn.__module__
        self.parameters = inspect.signature(fn).parameters
        self.constants = tuple(n for n, p in self.parameters.items() if p.annotation is triton.language.constexpr)
        self.arguments = tuple(n for n in self.parameters if n not in self.constants)
        self.pointers = tuple(n for n in self.arguments if n.endswith("_ptr"))
        self.maps = tuple(n for n in self.arguments if n.endswith("_desc"))
        self.aligned = tuple(n for n in self.arguments if n.startswith("stride_") or n in aligned)
        self.aligned_pointers = tuple(n for n in self.pointers if n not in unaligned)
        unknown = set(aligned) - set(self.arguments)
        if isinstance(unaligned, tuple):
            unknown |= set(unaligned) - set(self.pointers)
        if unknown:
            raise TypeError(f"kernel {self.name}: aligned or unaligned names {sorted(unknown)}, which are no arguments")
        self._tables: dict[int, dict[Any, Loaded]] = {}  # device -> warm path's key -> kernel
        self._loaded: dict[Any, Loaded] = {}  # (device, specialization) -> kernel
        self.launch = self._interpret if settings().interpret else _generate(self)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self.launch, grid)

    @cached_property
    def source_hash(self) -> str:
        from powertrain.runtime.compile.triton_compat import source_hash

        return source_hash(self.fn)

    def _check_options(self, constants: dict[str, Any]) -> None:
        """The interpreter takes any number of warps, which a GPU's compiler refuses."""
        warps = constants.get("num_warps")
        if warps is not None and (warps < 1 or warps & (warps - 1)):
            raise ValueError(f"{self.name}: num_warps must be a power of 2, got {warps}")

    def _interpret(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        self._check_options(constants)
        if 0 in grid or any(isinstance(a, Tensor) and a.is_meta for a in (*args, *constants.values())):
            return
        if self.archs:
            raise NotImplementedError(f"{self.name}: Gluon has no interpreter; unset POWERTRAIN_INTERPRET")
        observer = replay.recorder()
        if observer is not None:
            named = dict(zip(self.parameters, args, strict=False)) | constants
            values = [named.pop(name) for name in self.arguments]
            observer.launched(self, None, grid, values, named)
        # the interpreter copies tensors, and keeps the program's place in the grid for the whole process
        with _interpreted, _disable_current_modes():
            self.jit[grid](*args, **constants)

    def _device(self, tensors: dict[str, Tensor]) -> torch.device:
        devices = {tensor.device for tensor in tensors.values()}
        if len(devices) > 1:
            where = ", ".join(f"{name.removesuffix('_ptr')} on {tensor.device}" for name, tensor in tensors.items())
            raise ValueError(f"{self.name}: all tensors must be on one device, got {where}")
        device = devices.pop()
        if device.type not in ("cuda", "meta"):
            raise ValueError(f"{self.name}: tensors must be on a CUDA device, got {device}")
        return device

    def specialize(self, values: dict[str, Any], constants: dict[str, Any], arch: int) -> Any:
        """The Spec of a launch: argument values and constants to types, alignment and options."""
        from powertrain.runtime.compile.service import Spec

        if self.archs and arch not in self.archs:
            known = ", ".join(f"sm_{known}" for known in self.archs)
            raise NotImplementedError(f"{self.name}: written for {known}, asked of sm_{arch}")
        self._check_options(constants)
        options = {name: constants[name] for name in OPTIONS if constants[name] is not None}
        constants = {name: value for name, value in constants.items() if name not in OPTIONS}
        # an absent pointer is a constant: the kernel is compiled without what it would serve
        constants.update({name: None for name in (*self.pointers, *self.maps) if values[name] is None})
        numbers = [v for n, v in values.items() if n not in self.pointers and n not in self.maps]
        integers = [v for v in numbers if not isinstance(v, float)]
        # one width for all, so that sizes near 2^31 make one more specialization, not one each
        integer = "i32" if all(-(2**31) <= v < 2**31 for v in integers) else "i64"
        signature = {}
        for name in self.parameters:
            if name in constants:
                signature[name] = "constexpr"
            elif name in self.pointers:
                signature[name] = _TYPES[values[name].dtype]
            elif name in self.maps:
                signature[name] = values[name].kind
            else:
                signature[name] = "fp32" if isinstance(values[name], float) else integer
        aligned: dict[str, int] = {}
        # all or none: a specialization for each subset would be compiled anew for nothing
        pointers = [n for n in self.aligned_pointers if values[n] is not None]
        for names, multiples in (
            # a meta tensor's is its offset: tensors of their own are aligned
            (pointers, [values[n].data_ptr() for n in pointers]),
            (self.aligned, [values[n] for n in self.aligned]),
        ):
            step = _step(multiples)
            if step >= self.down_to:
                aligned.update(dict.fromkeys(names, step))
        return Spec(self, signature, constants, aligned, options, arch)

    def _prepare(self, grid: tuple[int, ...], warm_key: Any, values: dict[str, Any], constants: dict[str, Any]) -> None:
        """The slow path: describe the specialization, compile, load, launch, and enter it into the table."""
        if 0 in grid:
            return
        tensors = {name: values[name] for name in self.pointers if values[name] is not None}
        tensors |= {name: values[name].tensor for name in self.maps if values[name] is not None}
        device = self._device(tensors)
        target = Target.of(device)
        spec = self.specialize(values, constants, target.arch)
        state = recording.state
        if state.recording is not None and (state.everything or device.type == "meta"):
            state.recording.add(spec)
            return
        if device.type == "meta":
            return
        emulated = pretended.emulated is not None
        key = (device.index, spec.key, emulated)
        loaded = self._loaded.get(key)
        if loaded is None:
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            tracing.event("load", f"{spec.describe()}: wanted on {device}", key=spec.key, shapes=shapes)
            loaded = self._loaded[key] = self._load(spec, device.index, emulated)
        # a launch with int64 sizes, or an int for a float, shares its warm key with the usual one: it stays here
        if warm_key is not None and not emulated and "i64" not in spec.signature.values():
            self._tables.setdefault(device.index, {}).setdefault(warm_key, loaded)
        observer = replay.recorder()
        if observer is not None:
            observer.launched(self, loaded, grid, values.values(), {})
        packed: list[Any] = []
        for name, value in values.items():
            if name in self.maps:
                packed += (0, b"") if value is None else (value.tensor.data_ptr() + value.offset, value.rest)
            else:
                packed.append(value.data_ptr() if isinstance(value, Tensor) else value or 0)
        self._run(loaded, device.index, grid, packed)

    def _load(self, spec: Any, device: int, emulated: bool) -> Loaded:
        from powertrain.runtime.compile.service import entry_for

        # loading a module synchronizes, which a capture forbids
        if torch.cuda.is_current_stream_capturing():
            raise WarmUpFirst(
                f"{self.name} for sm_{spec.arch} is not loaded yet and cannot be while a CUDA graph is captured; "
                "run the same shapes and dtypes once before the capture"
            )
        entry, source = entry_for(spec)
        if emulated:
            image = zlib.decompress(entry.members["ptx"]) + b"\0"
            function = driver.load(image, entry.manifest["launch"]["name"], entry.manifest["launch"]["shared"], device)
        else:
            try:
                if entry.manifest["min_driver"] > driver.version():
                    raise driver.ImageError(f"it needs a driver for CUDA {entry.manifest['min_driver'] / 1000:.1f}")
                function = self._load_cubin(entry, device)
            except driver.ImageError as error:
                # compiled here, for this driver: to compile it again would change nothing
                if source == "compiled":
                    raise
                tracing.warn(f"{spec.describe()} from the {source} does not load ({error}); compiling it here")
                entry, _ = entry_for(spec, again=True)
                function = self._load_cubin(entry, device)
        types = [t for name, t in spec.signature.items() if name in self.arguments]
        maps = frozenset(i for i, name in enumerate(self.arguments) if name in self.maps)
        return Loaded(types, entry.manifest["launch"], function, maps, bool(spec.constants.get("STARTS_EARLY")))

    @staticmethod
    def _load_cubin(entry: Any, device: int) -> driver.Function:
        facts = entry.manifest["launch"]
        return driver.load(entry.members["cubin"], facts["name"], facts["shared"], device)

    def _run(self, loaded: Loaded, device: int, grid: tuple[int, ...], arguments: list[Any]) -> None:
        gx, gy, gz = (*grid, 1, 1)[:3]
        kept = loaded.scratch(gx * gy * gz, device)
        slot = loaded.slots.pop() if loaded.slots else loaded.new_slot()
        buffer, pointers, _ = slot
        loaded.pack_into(buffer, 0, *arguments, *(tensor.data_ptr() for tensor in kept))
        # a thread of autograd may not have this device's context current
        with torch.cuda.device(device):
            driver.make_context_current(device)
            stream = torch._C._cuda_getCurrentRawStream(device)
            launch = driver.launch_early if loaded.starts_early else driver.launcher()
            code = launch(loaded.handle, gx, gy, gz, loaded.threads, 1, 1, loaded.shared, stream, pointers, None)
        loaded.slots.append(slot)
        if code:
            raise LaunchError(f"kernel {self.name} with grid {grid} on cuda:{device}: {driver.describe(code)}")


def _step(values: list[int]) -> int:
    """The largest power of two, 16 at most, of which all are multiples."""
    bits = 16
    for value in values:
        bits |= value
    return bits & -bits


_WARM_PATH = """
def launch(grid, {parameters}):
    _device = -2
{pointers}
    _addresses, _multiples = {addresses} | 16, {multiples} | 16
    _key = ({key},)
    _loaded = None if state.active else tables.get(_device, EMPTY).get(_key)
    if _loaded is None or current_device() != _device or 0 in grid:
        return prepare(grid, _key, {values}, {constants})
    _gx, _gy, _gz = (*grid, 1, 1)[:3]
    _scratch = _profile = 0
    if _loaded.has_scratch:
        _kept = _loaded.scratch(_gx * _gy * _gz, _device)
        _scratch, _profile = _kept[0].data_ptr(), _kept[1].data_ptr()
    _slot = _loaded.slots.pop() if _loaded.slots else _loaded.new_slot()
    _buffer, _pointers, _ = _slot
    try:
        _loaded.pack_into(_buffer, 0, {packed}, _scratch, _profile)
    except StructError:
        return prepare(grid, None, {values}, {constants})
    _code = {launch}(
        _loaded.handle, _gx, _gy, _gz, _loaded.threads, 1, 1, _loaded.shared, current_stream(_device), _pointers, None
    )
    _loaded.slots.append(_slot)
    if _code:  # retry once with this thread's context set; the driver's error is raised if that does not help
        prepare(grid, _key, {values}, {constants})
"""

_READ_MAP = """
    if {name} is None:
        _p{i} = 0
        _t{i} = None
        _m{i} = b""
    else:
        _p{i} = {name}.tensor.data_ptr() + {name}.offset
        _t{i} = {name}.kind
        _m{i} = {name}.rest
        _ordinal = {name}.tensor.get_device()
        if _ordinal != _device:
            _device = _ordinal if _device == -2 else -3
"""

_READ_POINTER = """
    if {name} is None:
        _p{i} = 0
        _t{i} = None
    else:
        _p{i} = {name}.data_ptr()
        _t{i} = {name}.dtype
        _ordinal = {name}.get_device()
        if _ordinal != _device:
            _device = _ordinal if _device == -2 else -3
"""


def _generate(kernel: Kernel) -> Callable[..., None]:
    """The warm path of a kernel, as a function with the kernel's own signature."""
    pointers = {name: i for i, name in enumerate((*kernel.pointers, *kernel.maps))}
    packed = {name: f"_p{i}, _m{i}" if name in kernel.maps else f"_p{i}" for name, i in pointers.items()}
    options = [f"{name}={default!r}" for name, default in OPTIONS.items()]
    dtypes = [f"_t{i}" for i in pointers.values()]
    early = "STARTS_EARLY" in kernel.constants
    source = _WARM_PATH.format(
        parameters=", ".join([*kernel.parameters, *options]),
        pointers="".join(
            (_READ_MAP if name in kernel.maps else _READ_POINTER).format(name=name, i=i) for name, i in pointers.items()
        ),
        key=", ".join([*dtypes, "_addresses & -_addresses", "_multiples & -_multiples", *kernel.constants, *OPTIONS]),
        # of all of them or'ed, the lowest bit set is the alignment that they share
        addresses="|".join(f"_p{pointers[name]}" for name in kernel.aligned_pointers) or "0",
        multiples="|".join(kernel.aligned) or "0",
        values="dict(" + ", ".join(f"{n}={n}" for n in kernel.arguments) + ")",
        constants="dict(" + ", ".join(f"{n}={n}" for n in (*kernel.constants, *OPTIONS)) + ")",
        launch="(launch_early if _loaded.starts_early else launch_kernel())" if early else "launch_kernel()",
        packed=", ".join(packed.get(n, n) for n in kernel.arguments),
    )
    namespace: dict[str, Any] = {
        "tables": kernel._tables,
        "prepare": kernel._prepare,
        "state": recording.state,
        "launch_kernel": driver.launcher,
        "launch_early": driver.launch_early,
        "current_device": getattr(torch._C, "_cuda_getDevice", lambda: None),
        "current_stream": getattr(torch._C, "_cuda_getCurrentRawStream", None),
        "EMPTY": {},
        "StructError": struct.error,
    }
    # locals of the generated code begin with "_"
    taken = [n for n in kernel.parameters if n.startswith("_") or n == "grid" or n in namespace]
    if taken:
        raise TypeError(f"kernel {kernel.name}: parameters may not be named {', '.join(taken)}")
    # generated, since a loop over arguments costs more than the launch: 6.25 us with 13 arguments, Triton's own 12.3
    exec(compile(source, f"<launch of {kernel.name}>", "exec"), namespace)
    return namespace["launch"]


def kernel(
    *, aligned: tuple[str, ...] = (), unaligned: tuple[str, ...] | frozenset[str] = (), down_to: int = 8
) -> Callable[[Callable[..., Any]], Kernel]:
    """Declare a kernel. `aligned` names integers, besides the strides, worth specializing on being multiples of 16 or
    8, or of 4 and 2 as well with `down_to` one of these: rows of 2612 bfloat16 are loaded as vectors of 8 bytes then,
    not element by element. `unaligned` names pointers whose address says nothing about the others' alignment; of a set,
    the names that several kernels share, it is those that this one has."""
    return lambda fn: Kernel(fn, aligned, unaligned=unaligned, down_to=down_to)


def gluon_kernel(
    *, archs: tuple[int, ...], aligned: tuple[str, ...] = (), unaligned: tuple[str, ...] | frozenset[str] = ()
) -> Callable[[Callable[..., Any]], Kernel]:
    """Declare a Gluon kernel written for the instructions of `archs`; asked of another, it is refused by name.
    `aligned` and `unaligned` are those of `kernel`."""
    from powertrain.runtime.gluon_compat import gluon

    return lambda fn: Kernel(fn, aligned, gluon.jit, archs, unaligned)
