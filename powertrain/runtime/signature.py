"""The signature of an eager call: all that its effect depends on, except its tensors' values and addresses.

It is made at every call, so the code that makes it is generated for the types of a call's arguments: 1.6 us for two
tensors, where a loop took 2.6; 2.7 for attention's backward, where it took 10. In the key one object stands for types,
shapes, strides and dtypes of all tensors.
"""

import sys
from collections.abc import Callable, Sequence
from textwrap import indent
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from powertrain.runtime import invalidation, recording
from powertrain.runtime.call_recorder import index_of
from powertrain.runtime.float32_products import fp32_precision
from powertrain.runtime.settings import settings

in_interpreter = False  # tests replay on the CPU too, through the interpreter

_PLAIN_TYPES = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})
_TENSORS = frozenset({Tensor, Parameter})
_READABLE = _PLAIN_TYPES | _TENSORS | {tuple, list}
_RECENT = 4  # layouts that are tried before a key is made
_CHECKS = 4  # of a layout
_MOST = 4096  # lists of types, and layouts of one; beyond, all are forgotten


PLAIN = -1  # in the place of a stream


class Signature(NamedTuple):
    key: tuple[Any, ...]
    tensors: list[Tensor]  # in the order of the arguments
    stream: int  # PLAIN: the tensors are on a CPU, where plain PyTorch computes public functions


def signature_of(values: Sequence[Any]) -> Signature | None:
    """The signature of a call with these arguments; None: the call cannot be replayed."""
    types = tuple(map(type, values))
    read = _readers.get(types)
    if read is None:
        read = _reader(types)
    return read(*values)


_readers: dict[tuple[type, ...], Callable[..., Signature | None]] = {}


def _reader(types: tuple[type, ...]) -> Callable[..., Signature | None]:
    read: Callable[..., Signature | None]
    if any(issubclass(kind, tuple) and hasattr(kind, "_fields") for kind in types):
        read = _flattening(types)
    elif not _READABLE.issuperset(types):
        return lambda *values: None
    elif _TENSORS.isdisjoint(types):
        read = lambda *values: _of_nested(values)  # noqa: E731
    else:
        read = _generated(types)
    if len(_readers) >= _MOST:
        _readers.clear()
    _readers[types] = read
    return read


# PyTorch's own, and no public name: without it layouts are found by their sizes, one by one. Its stub has other types
# than Dynamo gives
_TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)


class _Layout:
    """Types, shapes, strides, dtypes and device of a call's tensors: a key by its identity."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda, self.device = device.type == "cuda", device.index
        self.checks: list[Callable[..., bool]] = []


class _Layouts:
    """The layouts met with one list of types."""

    def __init__(self) -> None:
        self.recent: tuple[tuple[Callable[..., bool], _Layout], ...] = ()  # the last ones first
        self._known: dict[Any, _Layout] = {}

    def of(self, *tensors: Tensor) -> _Layout | None:
        """None: the tensors are on several devices, or negated lazily (an imaginary part)."""
        device = tensors[0].device
        if any(x.is_neg() or x.device != device for x in tensors):
            return None
        key = device, *((x.shape, x.stride(), x.dtype) for x in tensors)
        layout = self._known.get(key)
        if layout is None:
            if len(self._known) >= _MOST:
                self._known.clear()
            layout = self._known[key] = _Layout(device)
        # the check of one tensor given twice fails
        if _TensorGuards is not None and len(set(map(id, tensors))) == len(tensors):
            self._remember(_check_of(layout, tensors), layout)
        return layout

    def _remember(self, check: Callable[..., bool], layout: _Layout) -> None:
        others = [pair for pair in self.recent if pair[0] is not check]
        self.recent = (check, layout), *others[: _RECENT - 1]


def _check_of(layout: _Layout, tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Whether tensors have this layout, in one call of C++: two calls for each would take as long as all the rest.

    Dynamo's guard compares types, dtypes, device, sizes and strides, and also what keys have elsewhere: requires_grad,
    dispatch keys (of inference mode, of autocast). So a layout has several.
    """
    found = next((check for check in layout.checks if check(*tensors)), None)
    if found is None:
        sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
        found = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        layout.checks = [found, *layout.checks[: _CHECKS - 1]]
    return found


_FIND_LAYOUT = """\
for check, layout in layouts.recent:
    if check({tensors}):
        break
else:
    layout = layouts.of({tensors})
    if layout is None:
        return None
"""

_SOURCE = (
    """
def read({names}):
    if not ({first}.is_cuda or here.in_interpreter):
        return read_plain({names}) if {first}.is_cpu else None
    # read first: what changes from here on makes the signature one of the past
    epoch = invalidation.epoch
    try:
        {addresses}
        if state.redirected or invalidation.unsettled:
            return None
        # a check ends the process at a nested tensor, whose strides are an error of C++
        if {any_nested}:
            return None
"""
    + indent(_FIND_LAYOUT, " " * 8)
    + """    except RuntimeError:  # a tensor without storage
        return None
    if layout.is_cuda:
        if current_device() != layout.device or is_capturing():
            return None
        # part of the key: the launches of a recording go to the stream they were recorded on
        stream = current_stream(layout.device)
        autocast = is_autocast_enabled("cuda") and get_autocast_dtype("cuda")
    elif are_interpreted({tensors}):
        stream, autocast = 0, is_autocast_enabled("cpu") and get_autocast_dtype("cpu")
    else:
        return None
    if not ({all_have_addresses}) and not are_empty({tensors}):
        return None
{sequences}
    key = (
        layout, {values}
        stream, autocast, epoch, is_grad_enabled(), is_inference_mode_enabled(), is_deterministic(), default_dtype(),
        fp32_precision("cuda", "matmul"),
    )
    # kernels are specialized, and ops choose them, by addresses up to 16 bytes, which a recording fixes
    if ({bits}) & 15:
        key += (({low_bits}),)
{sharing}
    return make(Signature, (key, [{tensors}], stream))
"""
)

# of tensors on the CPU. Addresses, what they share and settings that only kernels depend on are of no concern
_PLAIN_SOURCE = (
    """
def read_plain({names}):
    epoch = invalidation.epoch
    if {any_irregular} or settings().interpret:
        return None
"""
    + indent(_FIND_LAYOUT, " " * 4)
    + """{sequences}
    key = (
        layout, {values}
        is_autocast_enabled("cpu") and get_autocast_dtype("cpu"), epoch, is_grad_enabled(),
        is_inference_mode_enabled(), is_deterministic(),
    )
    return make(Signature, (key, [{tensors}], PLAIN))
"""
)

_SEQUENCE = """
    q{i} = of_sequence(v{i})
    if q{i} is None:
        return of_nested(({all_names},))
"""

# one tensor twice, or two at one address
_SHARING = """
    if len({{{addresses}}}) < {count}:
        key += sharing(({tensors}), ({addresses}))
"""


def _generated(types: tuple[type, ...]) -> Callable[..., Signature | None]:
    tensors = [i for i, kind in enumerate(types) if kind in _TENSORS]
    sequences = [i for i, kind in enumerate(types) if kind in (tuple, list)]
    listed = ", ".join(f"v{i}" for i in tensors)
    addresses = ", ".join(f"p{i}" for i in tensors)
    all_names = ", ".join(f"v{i}" for i in range(len(types)))
    source = (_PLAIN_SOURCE + _SOURCE).format(
        names=all_names,
        addresses="; ".join(f"p{i} = v{i}.data_ptr()" for i in tensors),
        any_nested=" or ".join(f"v{i}.is_nested" for i in tensors),
        any_irregular=" or ".join(f"v{i}.is_nested or v{i}.layout is not strided" for i in tensors),
        bits=" | ".join(f"p{i}" for i in tensors),
        low_bits=" ".join(f"p{i} & 15," for i in tensors),
        all_have_addresses=" and ".join(f"p{i}" for i in tensors),
        first=f"v{tensors[0]}",
        tensors=listed,
        sequences="".join(_SEQUENCE.format(i=i, all_names=all_names) for i in sequences),
        values=" ".join(f"{_key_of(kind, i)}," for i, kind in enumerate(types) if kind is not type(None)),
        sharing=_SHARING.format(addresses=addresses, tensors=listed, count=len(tensors)) if len(tensors) > 1 else "",
    )
    space = {"layouts": _Layouts(), **_NAMES}
    exec(compile(source, "<signature>", "exec"), space)
    read: Callable[..., Signature | None] = space["read"]
    return read


def _key_of(kind: type, i: int) -> str:
    """Values beside their types, as 0 == 0.0 == False; of floats, 0.0 == -0.0 and NaN is equal to nothing."""
    if kind in _TENSORS:
        return f"v{i}.requires_grad"
    if kind is float:
        return f"v{i} if v{i} > 0 or v{i} < 0 else repr(v{i})"
    return f"q{i}" if kind in (tuple, list) else f"v{i}"


def _of_sequence(values: Sequence[Any]) -> tuple[Any, ...] | None:
    types = tuple(map(type, values))
    if not _PLAIN_TYPES.issuperset(types):
        return None
    return types, *(repr(value) if type(value) is float else value for value in values)


def _of_nested(values: Sequence[Any]) -> Signature | None:
    """The signature of values of which lists or tuples hold tensors, as their elements behind their type and length.
    None: none does, or one holds something else."""
    flat: list[Any] = []
    for value in values:
        if type(value) in (tuple, list) and not _TENSORS.isdisjoint(map(type, value)):
            if not (_PLAIN_TYPES | _TENSORS).issuperset(map(type, value)):
                return None
            # no argument's text begins so
            flat += [f"\0{type(value).__name__} {len(value)}", *value]
        else:
            flat.append(value)
    return signature_of(flat) if len(flat) > len(values) else None


def _are_empty(*tensors: Tensor) -> bool:
    """Those without an address: others have no memory that a kernel could read."""
    return all(x.data_ptr() or not x.numel() for x in tensors)


def _are_interpreted(*tensors: Tensor) -> bool:
    return settings().interpret and all(x.device.type == "cpu" for x in tensors)


def _sharing(tensors: Sequence[Tensor], addresses: Sequence[int]) -> tuple[Any, ...]:
    return tuple(map(addresses.index, addresses)), tuple(index_of(tensors, x) for x in tensors)


_NAMES: dict[str, Any] = {
    "here": sys.modules[__name__],
    "Signature": Signature,
    "make": tuple.__new__,
    "of_sequence": _of_sequence,
    "of_nested": _of_nested,
    "are_empty": _are_empty,
    "are_interpreted": _are_interpreted,
    "sharing": _sharing,
    "invalidation": invalidation,
    "state": recording.state,
    "settings": settings,
    "strided": torch.strided,
    "PLAIN": PLAIN,
    "current_device": getattr(torch._C, "_cuda_getDevice", None),
    "current_stream": getattr(torch._C, "_cuda_getCurrentRawStream", None),
    "is_capturing": getattr(torch._C, "_cuda_isCurrentStreamCapturing", None),
    "is_autocast_enabled": torch.is_autocast_enabled,
    "get_autocast_dtype": torch.get_autocast_dtype,
    "is_grad_enabled": torch.is_grad_enabled,
    "is_inference_mode_enabled": torch.is_inference_mode_enabled,
    "is_deterministic": torch._C._get_deterministic_algorithms,
    "default_dtype": torch.get_default_dtype,
    "fp32_precision": fp32_precision,
}


def _flattening(types: Sequence[type]) -> Callable[..., Signature | None]:
    """The reader of values some of which are named tuples (`Copies`): theirs stand in their place, behind the type."""
    names = [f"v{i}" for i in range(len(types))]
    is_named = [issubclass(kind, tuple) and hasattr(kind, "_fields") for kind in types]
    flat = [
        f"{kind.__name__!r}, *{name}" if named else name
        for kind, name, named in zip(types, names, is_named, strict=True)
    ]
    source = f"lambda {', '.join(names)}: signature_of(({', '.join(flat)},))"
    read: Callable[..., Signature | None] = eval(source, {"signature_of": signature_of})
    return read
