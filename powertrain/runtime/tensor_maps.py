"""TMA descriptors (tensor maps) made on the host and passed to kernels as launch arguments.

A kernel's parameter `q_desc` takes `tensor_map(q, shape, strides, block)`. Made on the device, a descriptor costs a
kernel 0.8 us before its first load, one after the other (one H200), and attention's kernels have three to nine.

A map is 128 bytes that begin with the tensor's address. The others depend on sizes alone and are computed once, so a
launch, a replayed one too, packs an address and 120 known bytes. The driver says nothing of that order, so it is
checked once in a process.
"""

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from powertrain.runtime import driver
from powertrain.runtime.errors import LaunchError

# two addresses that differ in many bits
_PROBES = 0x7F00_1234_5600, 0x1000_0000


class TensorMap(NamedTuple):
    """An argument for a kernel's `*_desc` parameter."""

    tensor: Tensor
    offset: int  # bytes from the tensor's first element to the map's
    kind: str  # Triton's name of its type: dtype, block and layout in shared memory
    rest: bytes  # all but the address


class _Shape(NamedTuple):
    kind: str
    box: tuple[int, ...]  # elements that one TMA instruction moves
    swizzle: int  # bytes


@lru_cache(maxsize=256)
def shape_of(dtype: torch.dtype, block: tuple[int, ...]) -> _Shape:
    """The type of a map whose tiles lie in shared memory in the default layout, which TMA and wgmma share."""
    from powertrain.runtime.gluon_compat import gl

    name, language = {
        torch.bfloat16: ("bf16", gl.bfloat16), torch.float16: ("fp16", gl.float16), torch.float32: ("fp32", gl.float32),
    }[dtype]  # fmt: skip
    if len(block) == 1:
        layout: Any = gl.NVMMASharedLayout(0, dtype.itemsize * 8, 1)
    else:
        layout = gl.NVMMASharedLayout.get_default_for(list(block), language)
    swizzle = layout.swizzle_byte_width
    last = min(block[-1], swizzle // dtype.itemsize) if swizzle else block[-1]
    box = (*(min(size, 256) for size in block[:-1]), last)
    return _Shape(f"tensordesc<{name}{list(block)},{layout!r}>", box, swizzle)


def _encode(device: int, *given: Any) -> bytes:
    # the driver wants some context, which a thread of autograd's or of a caller's may not have yet
    if not driver.has_context():
        with torch.cuda.device(device):
            driver.make_context_current(device)
            return driver.tensor_map(*given)
    return driver.tensor_map(*given)


@cache
def _check_order(device: int) -> None:
    """A map begins with the address, and nothing else in it depends on that."""
    maps = [_encode(device, torch.bfloat16, address, (64, 64), (128,), (64, 64), 128) for address in _PROBES]
    if [int.from_bytes(found[:8], "little") for found in maps] != [*_PROBES] or maps[0][8:] != maps[1][8:]:
        raise LaunchError("this driver's tensor maps do not begin with the address")


# kept by sizes: a batch of other lengths has other maps
@lru_cache(maxsize=4096)
def _rest_of(
    device: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...],
    swizzle: int,
) -> bytes:  # fmt: skip
    _check_order(device)
    # a dimension of one element is never stepped over, and its stride may be anything, 0 too
    steps = [16 if size == 1 else stride * dtype.itemsize for size, stride in zip(shape, strides[:-1], strict=False)]
    return _encode(device, dtype, _PROBES[0], shape, steps, box, swizzle)[8:]


@cache
def takes_zero_strides(device: int) -> bool:
    """Whether the driver encodes a map in which all indices of a dimension are the same elements. TMA reads by such a
    map; the driver's manual leaves open whether it makes one."""
    try:
        _encode(device, torch.bfloat16, _PROBES[0], (2, 64, 64), (0, 128), (1, 64, 64), 128)
    except LaunchError:
        return False
    return True


def tensor_map(
    x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...], offset: int = 0,
    filled: tuple[int, ...] | None = None,
) -> TensorMap:  # fmt: skip
    """The tiles `block` of a tensor of `shape` and `strides`, in elements, that begins `offset` elements behind x's
    first. The last stride is 1, the others and the address are multiples of 16 bytes.

    `filled`: the rows, all dims but the last, that are moved. A tile in shared memory has powers of 2; its first
    prod(filled) rows are then those of the tensor, one behind the other, and the others are left as they are."""
    known = shape_of(x.dtype, block)
    box = known.box if filled is None else (*filled, known.box[-1])
    rest = b""
    if x.is_cuda:
        rest = _rest_of(x.get_device(), x.dtype, shape, strides, box, known.swizzle)
    return TensorMap(x, offset * x.element_size(), known.kind, rest)
