"""Tensor maps as arguments: their types, how a launch and a replayed launch pack them, and what the compiler makes."""

import ctypes
import re
import struct
import zlib
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.runtime import driver, replay, tape, tensor_maps
from powertrain.runtime.call_recorder import observed_call
from powertrain.runtime.errors import LaunchError
from powertrain.runtime.gluon_compat import gl, mbarrier, tma_load
from powertrain.runtime.launch import Kernel, Loaded, gluon_kernel
from powertrain.runtime.recording import record
from powertrain.runtime.settings import settings
from powertrain.runtime.tensor_maps import TensorMap, shape_of, tensor_map

REST = bytes(range(120))
native = pytest.mark.skipif(settings().interpret, reason="Gluon has no interpreter")


@gluon_kernel(archs=(90,))
def _map_kernel(x_desc, absent_desc, y_ptr, rows):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], x_desc.dtype)
    tile = gl.allocate_shared_memory(x_desc.dtype, [64, 64], layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, 64 * 64 * 2)
    tma_load(x_desc, [rows, 0], bar, tile)
    mbarrier.wait(bar, 0)
    gl.static_assert(absent_desc is None)
    order: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    r = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, order)), 1)
    gl.store(y_ptr + r * 64 + gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, order)), 0), tile.load(order))


@pytest.mark.parametrize(
    ("dtype", "block", "box", "swizzle"),
    [
        (torch.bfloat16, (1, 1, 128, 128), (1, 1, 128, 64), 128),  # rows of 256 bytes are two panels
        (torch.bfloat16, (1, 1, 1, 64, 32), (1, 1, 1, 64, 32), 64),
        (torch.float16, (1, 64, 16), (1, 64, 16), 32),
        (torch.float32, (128,), (128,), 0),
    ],
)
def test_types(dtype: torch.dtype, block: tuple[int, ...], box: tuple[int, ...], swizzle: int) -> None:
    found = shape_of(dtype, block)
    assert (found.box, found.swizzle) == (box, swizzle)
    name = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    assert found.kind.startswith(f"tensordesc<{name}{list(block)},NVMMASharedLayout(swizzle_byte_width={swizzle},")


@pytest.fixture(autouse=True)
def current(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[int]:
    """The devices whose context was made current, without a GPU."""
    devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(driver, "make_context_current", devices.append)
    # a thread that never used CUDA has none
    monkeypatch.setattr(driver, "has_context", lambda: bool(devices))
    for kept in (tensor_maps._rest_of, tensor_maps._check_order, tensor_maps.takes_zero_strides):
        kept.cache_clear()
        request.addfinalizer(kept.cache_clear)
    return devices


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch, current: list[int]) -> list[tuple[Any, ...]]:
    """The arguments of each encoding; the driver is replaced by one that returns the address and known bytes."""
    asked: list[tuple[Any, ...]] = []

    def encode(dtype: torch.dtype, address: int, *rest: Any) -> bytes:
        assert current == [3]
        asked.append((dtype, *map(tuple, rest[:3]), rest[3]))
        return struct.pack("<Q", address) + REST

    monkeypatch.setattr(driver, "tensor_map", encode)
    return asked


def test_what_is_asked_of_the_driver(encoded: list[tuple[Any, ...]]) -> None:
    """Bytes, the order of a map once in a process, one encoding for all addresses, and a stride of one element's
    dimension that may be anything."""
    shape, strides, box = (1, 3, 100, 72), (0, 8192, 80, 1), (1, 1, 64, 64)
    for _ in range(2):
        assert tensor_maps._rest_of(3, torch.bfloat16, shape, strides, box, 128) == REST
    order = (torch.bfloat16, (64, 64), (128,), (64, 64), 128)
    assert encoded == [order, order, (torch.bfloat16, shape, (16, 16384, 160), box, 128)]


def test_a_driver_with_another_order_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "tensor_map", lambda dtype, address, *rest: REST + struct.pack("<Q", address))
    with pytest.raises(LaunchError, match="do not begin with the address"):
        tensor_maps._rest_of(3, torch.bfloat16, (64, 64), (64, 1), (64, 64), 128)


def test_drivers_without_zero_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> bytes:
        raise LaunchError("invalid argument")

    monkeypatch.setattr(driver, "tensor_map", refuse)
    assert not tensor_maps.takes_zero_strides(3)


def _map(x: Tensor, offset: int = 0) -> TensorMap:
    return tensor_map(x, (64, 64), (64, 1), (64, 64), offset)._replace(rest=REST)


def _specialized(launched: Kernel, x: TensorMap, y: Tensor) -> Any:
    return launched.specialize({"x_desc": x, "absent_desc": None, "y_ptr": y, "rows": 5}, dict.fromkeys(
        ("num_warps", "num_stages", "maxnreg")), 90)  # fmt: skip


def _loaded(spec: Any) -> Loaded:
    types = [spec.signature[name] for name in _map_kernel.arguments]
    facts = {"num_warps": 4, "shared": 0, "global_scratch": 0, "profile_scratch": 0}
    return Loaded(types, facts, SimpleNamespace(handle=1), frozenset({0, 1}))  # type: ignore[arg-type]


def _read(params: int) -> list[Any]:
    """The map, its two sizes and two strides, y, rows, two scratch pointers: absent ones are no parameters."""
    kinds = ["128s", "i", "i", "q", "q", "Q", "i", "Q", "Q"]
    pointers = (ctypes.c_void_p * len(kinds)).from_address(params)
    return [
        struct.unpack(f"@{kind}", ctypes.string_at(place, struct.calcsize(kind)))[0]
        for kind, place in zip(kinds, pointers, strict=True)
    ]


@native
def test_a_launch_packs_an_address_and_the_rest() -> None:
    x, y = torch.zeros(8192).bfloat16(), torch.zeros(4096).bfloat16()
    loaded = _loaded(_specialized(_map_kernel, _map(x), y))
    seen: list[list[Any]] = []
    namespace = _map_kernel.launch.__globals__
    before = dict(namespace)
    namespace["launch_kernel"] = lambda: lambda *given: seen.append(_read(given[-2])) or 0
    namespace["current_device"] = lambda: -1
    namespace["current_stream"] = lambda device: 0
    key = []
    namespace["prepare"] = lambda grid, warm, values, constants: key.append(warm)
    try:
        _map_kernel[(3,)](_map(x, 4096), None, y, 5)
        _map_kernel._tables.setdefault(-1, {})[key[0]] = loaded
        _map_kernel[(3,)](_map(x, 4096), None, y, 5)
    finally:
        namespace.update(before)
        _map_kernel._tables.pop(-1, None)
    assert seen == [[struct.pack("<Q", x.data_ptr() + 8192) + REST, 0, 0, 0, 0, y.data_ptr(), 5, 0, 0]]


def test_a_replay_packs_the_address_of_its_own_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Any]] = []
    monkeypatch.setattr(
        tape.driver,
        "configured_launcher",
        lambda: lambda config, handle, params, extra: seen.append(_read(params)) or 0,
    )
    kernel = SimpleNamespace(name="k")

    def forward(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        loaded = _loaded(_specialized(_map_kernel, _map(x), y))
        replay.recorder().launched(kernel, loaded, (1,), [_map(x, 64), None, y, 7], {})  # type: ignore[union-attr]
        return y

    x = torch.zeros(8192).bfloat16()
    with observed_call([x]) as recorder:
        result = recorder.forward(SimpleNamespace(name="op", replays=True, forward=forward), (x,))
    made = recorder.op_tape(result, 0)
    assert made is not None, recorder.failure
    other = torch.ones(8192).bfloat16()
    y = made.run(other)
    assert seen == [[struct.pack("<Q", other.data_ptr() + 128) + REST, 0, 0, 0, 0, y.data_ptr(), 7, 0, 0]]


@native
def test_the_compiler_agrees() -> None:
    """The kernel takes 128 bytes at its first parameter, and boxes and swizzles are those that the host encodes."""
    from powertrain.runtime.compile.service import entry_for

    x = torch.empty(4096, dtype=torch.bfloat16, device="meta")
    with record("sm_90") as wanted:
        _map_kernel[(1,)](tensor_map(x, (64, 64), (64, 1), (64, 64)), None, x, 0)
    [spec] = wanted.specs
    entry, _ = entry_for(spec)
    text = zlib.decompress(entry.members["ptx"]).decode()
    assert ".param .align 64 .b8 _map_kernel_param_0[128]" in text and "tensormap.replace" not in text
    # of each a pointer is passed, those to the map's sizes and strides too
    declared = set(re.findall(r"_map_kernel_param_(\d+)", text))
    assert len(declared) == len(_loaded(spec)._offsets)
    [known] = entry.manifest["launch"]["tensor_maps"]
    expected = shape_of(torch.bfloat16, (64, 64))
    assert (tuple(known["block_size"]), known["swizzle"]) == (expected.box, {128: 3}[expected.swizzle])


def test_devices_are_compared() -> None:
    x, y = torch.empty(4096, dtype=torch.bfloat16, device="meta"), torch.zeros(4).bfloat16()
    with pytest.raises(ValueError, match="all tensors must be on one device, got y on cpu, x_desc on meta"):
        _map_kernel._prepare((1,), None, {"x_desc": _map(x), "absent_desc": None, "y_ptr": y, "rows": 1}, {})
