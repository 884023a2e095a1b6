"""The CUDA driver through ctypes: load a cubin or PTX, launch a kernel. No compiler, no toolkit, no torch extension.

Triton 3.6's own launcher is compiled with gcc at first use, per signature (130 to 200 ms each on one H200), and a warm
launch takes 12.3 us where this takes 6.25; this needs only libcuda, which every machine with a GPU has.
"""

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch

from powertrain.runtime.errors import LaunchError

# CUresult codes that mean "this image does not suit this driver or GPU": the store rebuilds once
IMAGE_ERRORS = {
    200: "invalid image",
    209: "no binary for this GPU",
    218: "invalid PTX",
    222: "PTX newer than the driver",
}
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_EARLY_START = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class ImageError(LaunchError):
    """The driver refused the image itself; a rebuild may help."""


@cache
def _cuda() -> Any:
    # with the number: libcuda.so alone is a link that only the toolkit's packages bring, often to a stub
    library = ctypes.CDLL("libcuda.so.1")
    # without argument types ctypes passes an integer as a C int and cuts addresses to 32 bits
    pointer, uint = ctypes.c_void_p, ctypes.c_uint
    library.cuLaunchKernel.argtypes = [pointer, uint, uint, uint, uint, uint, uint, uint, pointer, pointer, pointer]
    library.cuModuleLoadData.argtypes = [pointer, ctypes.c_char_p]
    library.cuModuleGetFunction.argtypes = [pointer, pointer, ctypes.c_char_p]
    library.cuFuncSetAttribute.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
    library.cuDevicePrimaryCtxRetain.argtypes = [pointer, ctypes.c_int]
    library.cuCtxSetCurrent.argtypes = [pointer]
    library.cuCtxGetCurrent.argtypes = [pointer]
    library.cuStreamBatchMemOp_v2.argtypes = [pointer, uint, pointer, uint]
    library.cuStreamWriteValue32_v2.argtypes = [pointer, ctypes.c_uint64, ctypes.c_uint32, uint]
    library.cuMemcpyAsync.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, pointer]
    library.cuStreamGetCaptureInfo_v2.argtypes = [pointer] * 6
    library.cuTensorMapEncodeTiled.argtypes = [pointer, uint, uint, pointer, *[pointer] * 4, uint, uint, uint, uint]
    return library


def describe(code: int) -> str:
    text = ctypes.c_char_p()
    _cuda().cuGetErrorString(code, ctypes.byref(text))
    return f"{text.value.decode() if text.value else 'unknown error'} (CUDA error {code})"


def version() -> int:
    """The CUDA version the driver supports, as 13000 for 13.0."""
    number = ctypes.c_int()
    _cuda().cuDriverGetVersion(ctypes.byref(number))
    return number.value


@cache
def _context(device: int) -> int:
    context = ctypes.c_void_p()
    # never released, so that the kernels' modules live as long as the process
    code = _cuda().cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    if code or context.value is None:
        raise LaunchError(f"cannot use the context of cuda:{device}: {describe(code)}")
    return context.value


def make_context_current(device: int) -> None:
    """Make the device's primary context (torch's) current in this thread, which may never have touched CUDA."""
    code = _cuda().cuCtxSetCurrent(_context(device))
    if code:
        raise LaunchError(f"cannot use the context of cuda:{device}: {describe(code)}")


def has_context() -> bool:
    """Whether any device's context is current in this thread."""
    context = ctypes.c_void_p()
    code = _cuda().cuCtxGetCurrent(ctypes.byref(context))
    return not code and context.value is not None


@dataclass(frozen=True)
class Function:
    """A loaded kernel. `module` keeps the handle that owns it; modules live as long as the process."""

    handle: int
    module: int


def load(image: bytes, name: str, shared: int, device: int) -> Function:
    """Load a cubin, or zero-terminated PTX for the driver to compile, on a device."""
    cuda = _cuda()
    with torch.cuda.device(device):
        make_context_current(device)
        module, handle = ctypes.c_void_p(), ctypes.c_void_p()
        code = cuda.cuModuleLoadData(ctypes.byref(module), image)
        if code:
            error = ImageError if code in IMAGE_ERRORS else LaunchError
            raise error(f"kernel {name}: cuda:{device} cannot load it: {describe(code)}")
        code = cuda.cuModuleGetFunction(ctypes.byref(handle), module, name.encode())
        # CUDA's default limit of dynamic shared memory is 48 KiB; more is opt-in per kernel
        if not code and shared > 48 * 1024:
            code = cuda.cuFuncSetAttribute(handle, _MAX_DYNAMIC_SHARED, shared)
        if code:
            raise LaunchError(f"kernel {name} with {shared} bytes of shared memory on cuda:{device}: {describe(code)}")
    assert handle.value is not None and module.value is not None
    return Function(handle.value, module.value)


@cache
def launcher() -> Any:
    """cuLaunchKernel itself: (function, gx, gy, gz, bx, by, bz, shared, stream, params, extra) -> CUresult."""
    return _cuda().cuLaunchKernel


# CUtensorMapDataType
_MAP_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_MAP_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # bytes -> CUtensorMapSwizzle
_MAP_PROMOTION = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B: a miss fetches 128 bytes
_MAP_BYTES = 128


def tensor_map(
    dtype: torch.dtype, address: int, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int
) -> bytes:
    """A CUtensorMap, by which TMA finds a box of a tensor. `strides` in bytes, of all dimensions but the last; elements
    outside the tensor are read as zeros."""
    rank = len(shape)
    # CUDA counts dimensions from the innermost
    dims = (ctypes.c_uint64 * rank)(*reversed(shape))
    steps = (ctypes.c_uint64 * (rank - 1))(*reversed(strides))
    boxes, ones = (ctypes.c_uint32 * rank)(*reversed(box)), (ctypes.c_uint32 * rank)(*[1] * rank)
    memory = ctypes.create_string_buffer(_MAP_BYTES + 64)
    place = -ctypes.addressof(memory) % 64  # the driver wants 64 bytes of alignment
    code = _cuda().cuTensorMapEncodeTiled(
        ctypes.addressof(memory) + place, _MAP_TYPES[dtype], rank, address, dims, steps, boxes, ones, 0,
        _MAP_SWIZZLES[swizzle], _MAP_PROMOTION, 0,
    )  # fmt: skip
    if code:
        raise LaunchError(
            f"no tensor map of {dtype}, shape {tuple(shape)}, strides {tuple(strides)} bytes, box {tuple(box)}, "
            f"swizzle {swizzle}: {describe(code)}"
        )
    return memory.raw[place : place + _MAP_BYTES]


# CUlaunchAttribute: its id, and as its value that it is on
_EARLY_START_ATTRIBUTE = ctypes.create_string_buffer(struct.pack("@I4xi60x", _EARLY_START, 1))


class LaunchConfig:
    """A CUlaunchConfig: grid, threads of a block, shared bytes, stream. Valid as long as this object is."""

    _LAYOUT = struct.Struct("@7IQQI4x")  # sizes, stream, attributes, their number

    def __init__(
        self, grid: tuple[int, int, int], threads: int, shared: int, stream: int, starts_early: bool = False
    ) -> None:
        attributes = (ctypes.addressof(_EARLY_START_ATTRIBUTE), 1) if starts_early else (0, 0)
        self._buffer = ctypes.create_string_buffer(self._LAYOUT.pack(*grid, threads, 1, 1, shared, stream, *attributes))
        self.address = ctypes.addressof(self._buffer)


# one costs as much as a launch's other arguments
@lru_cache(maxsize=4096)
def _config_of(
    gx: int, gy: int, gz: int, threads: int, shared: int, stream: int, starts_early: bool
) -> LaunchConfig:  # fmt: skip
    return LaunchConfig((gx, gy, gz), threads, shared, stream, starts_early)


@cache
def configured_launcher() -> Any:
    """cuLaunchKernelEx: (address of a config, function, params, extra) -> CUresult."""
    pointer = ctypes.c_void_p
    launch = _cuda().cuLaunchKernelEx
    launch.argtypes = [pointer, pointer, pointer, pointer]
    return launch


@cache
def graphs_hold_early_starts() -> bool:
    """Whether a captured launch may be one that starts early: an edge of the graph says so, from CUDA 12.3 on."""
    version = ctypes.c_int()
    return bool(_cuda().cuDriverGetVersion(ctypes.byref(version)) == 0 and version.value >= 12030)


def capture_id(stream: int) -> int:
    """The number, in this process, of the capture into a CUDA graph that the stream takes part in; 0: in none."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    code = _cuda().cuStreamGetCaptureInfo_v2(stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
    if code:
        raise LaunchError(f"cannot tell which CUDA graph stream {stream:#x} is captured into: {describe(code)}")
    # 1: active; the number of another state is not written
    return number.value if status.value == 1 else 0


def launch_early(
    handle: int,
    gx: int,
    gy: int,
    gz: int,
    bx: int,
    by: int,
    bz: int,
    shared: int,
    stream: int,
    params: int,
    extra: None,
) -> int:
    """`launcher()`'s function, for a kernel that starts before the one before it has ended; `by` and `bz` are 1."""
    early = not torch.cuda.is_current_stream_capturing() or graphs_hold_early_starts()
    config = _config_of(gx, gy, gz, bx, shared, stream, early)
    code: int = configured_launcher()(config.address, handle, params, extra)
    return code


class MemoryOps:
    """Waits and writes of 32-bit words in device memory, executed by a stream in order: no kernel, so no SM is needed.

    Packed once for words that are reused; `enqueue` is then one driver call, also in a captured graph. A write happens
    after everything before it on the stream is visible to every device.
    """

    _WAIT, _WRITE, _EQUAL = 1, 2, 1
    _MOST = 128  # operations in one call of the driver, which takes at most 256
    _LAYOUT = struct.Struct("@IxxxxQQIxxxxQQ")  # CUstreamBatchMemOpParams: operation, address, value, flags, alias, -

    def __init__(self, *, wait: Sequence[tuple[int, int]] = (), write: Sequence[tuple[int, int]] = ()) -> None:
        """(address, value) pairs: first every wait until a word equals the value, then every write."""
        ops = [(self._WAIT, a, v, self._EQUAL) for a, v in wait] + [(self._WRITE, a, v, 0) for a, v in write]
        self._params = ctypes.create_string_buffer(b"".join(self._LAYOUT.pack(*op, 0, 0) for op in ops))
        first, size = ctypes.addressof(self._params), self._LAYOUT.size
        self._batches = [(min(self._MOST, len(ops) - i), first + size * i) for i in range(0, len(ops), self._MOST)]
        self._call = _cuda().cuStreamBatchMemOp_v2

    def enqueue(self, stream: int) -> None:
        for count, address in self._batches:
            code = self._call(stream, count, address, 0)
            if code:
                raise LaunchError(f"cannot wait for or write words in device memory: {describe(code)}")


def write_word(address: int, value: int, stream: int) -> None:
    """Write a 32-bit word in device or pinned host memory, in stream order."""
    code = _cuda().cuStreamWriteValue32_v2(stream, address, value, 0)
    if code:
        raise LaunchError(f"cannot write a word in device memory: {describe(code)}")


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Copy device memory, a peer's too, by a copy engine: addresses and bytes."""
    code = _cuda().cuMemcpyAsync(target, source, nbytes, stream)
    if code:
        raise LaunchError(f"cannot copy {nbytes} bytes between devices: {describe(code)}")
