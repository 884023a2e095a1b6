"""The code generated for the driver, tested without a GPU: packed arguments, grid, Python calls, refused launches."""

import ctypes
import struct
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.runtime import replay
from powertrain.runtime import tape as tapes
from powertrain.runtime.call_recorder import observed_call
from powertrain.runtime.driver import LaunchConfig
from powertrain.runtime.errors import LaunchError
from powertrain.runtime.launch import Loaded

STREAM = 77


class Driver:
    """In the place of cuLaunchKernelEx: notes each launch, and refuses those of `refused`."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], int, list[Any]]] = []
        self.refused: set[int] = set()
        self.contexts: list[int] = []
        self.formats: dict[int, str] = {}

    def launch(self, config: int, handle: int, params: int, extra: None) -> int:
        if len(self.launches) in self.refused:
            self.launches.append(((), handle, []))
            return 201
        grid = LaunchConfig._LAYOUT.unpack(ctypes.string_at(config, LaunchConfig._LAYOUT.size))
        formats = self.formats[handle]
        addresses = (ctypes.c_void_p * len(formats)).from_address(params)
        values = [
            struct.unpack("@" + kind, ctypes.string_at(address, struct.calcsize(kind)))[0]
            for kind, address in zip(formats, addresses, strict=True)
        ]
        self.launches.append((grid[:8], handle, values))
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(tapes.driver, "configured_launcher", lambda: fake.launch)
    monkeypatch.setattr(tapes.driver, "describe", lambda code: f"CUDA error {code}")
    monkeypatch.setattr(tapes.driver, "make_context_current", fake.contexts.append)
    return fake


def _loaded(driver: Driver, handle: int, types: list[str], scratch: int = 0) -> Loaded:
    facts = {"num_warps": 4, "shared": 1024 * handle, "global_scratch": scratch, "profile_scratch": 0}
    formats = {"i32": "i", "i64": "q", "fp32": "f"}
    driver.formats[handle] = "".join(formats.get(t, "Q") for t in types if t != "constexpr") + "QQ"
    return Loaded(types, facts, SimpleNamespace(handle=handle))


def _tape(forward: Any, args: tuple[Any, ...], inputs: list[Tensor]) -> replay.Tape:
    op = SimpleNamespace(name="op", replays=True, forward=forward)
    with observed_call(inputs) as recorder:
        result = recorder.forward(op, args)
    tape = recorder.op_tape(result, STREAM)
    assert tape is not None, recorder.failure
    return tape


def test_what_is_launched(driver: Driver) -> None:
    """Addresses of inputs, of rows behind them, of allocations, of a tensor from outside; constants; no pointer."""
    kernel, kept = SimpleNamespace(name="kernel"), torch.zeros(1, dtype=torch.int32)
    types = ["*bf16", "*bf16", "*fp32", "*i32", "constexpr", "i32", "i64", "fp32", "fp32", "fp32"]
    first, second = _loaded(driver, 3, types), _loaded(driver, 5, ["*fp32", "*bf16"])

    def forward(x: Tensor, eps: float, weight: Tensor) -> tuple[Tensor, None, Tensor]:
        y, rstd = torch.empty_like(x), x.new_empty(4, dtype=torch.float32)
        scratch = x.new_empty((2, 8), dtype=torch.float32)
        values = [x[1:], weight, scratch[1], kept, None, 7, 2**40, eps, float("-inf"), -0.0]
        replay.recorder().launched(kernel, first, (6,), values, {})  # type: ignore[union-attr]
        replay.recorder().launched(kernel, second, (2, 3, 4), [rstd, y.view(-1)], {})  # type: ignore[union-attr]
        return y, None, rstd

    x, weight = torch.randn(4, 8).bfloat16(), torch.ones(8).bfloat16()
    tape = _tape(forward, (x, 1e-6, weight), [x, weight])
    for _ in range(2):
        x, weight = torch.randn(4, 8).bfloat16(), torch.ones(8).bfloat16()
        driver.launches.clear()
        y, none, rstd = tape.run(x, weight)
        (grid, handle, values), (grid_2, handle_2, values_2) = driver.launches
        assert (handle, handle_2) == (3, 5)
        assert grid == (6, 1, 1, 128, 1, 1, 3072, STREAM) and grid_2 == (2, 3, 4, 128, 1, 1, 5120, STREAM)
        assert values[:2] == [x.data_ptr() + 16, weight.data_ptr()] and values[3] == kept.data_ptr()
        assert values[4:6] == [7, 2**40] and values[6] == pytest.approx(1e-6)
        assert values[7] == float("-inf") and str(values[8]) == "-0.0" and values[9:] == [0, 0]
        assert values_2 == [rstd.data_ptr(), y.data_ptr(), 0, 0]
        assert none is None and y.shape == x.shape and y.dtype is x.dtype and rstd.dtype is torch.float32


def test_python_calls_of_a_replay(driver: Driver) -> None:
    """The host time of a call is its Python calls; their number is what a noisy machine can check."""
    loaded = _loaded(driver, 3, ["*fp32", "*fp32"])

    def forward(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        replay.recorder().launched(SimpleNamespace(name="k"), loaded, (1,), [x, y], {})  # type: ignore[union-attr]
        return y

    x, calls = torch.randn(4, 8), []
    tape = _tape(forward, (x,), [x])
    tape.run(x)
    driver.launch = lambda *arguments: 0  # type: ignore[method-assign]
    tape = _tape(forward, (x,), [x])
    tape.run(x)

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)

    sys.setprofile(note)
    tape.run(x)
    sys.setprofile(None)
    # the tape, and the function of this file that stands for the driver
    assert calls == ["run", "<lambda>"]


def test_scratch_memory_is_made_for_each_call(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = _loaded(driver, 3, ["*fp32"], scratch=64)
    made: list[tuple[int, int]] = []

    def scratch(programs: int, device: int) -> list[Tensor]:
        made.append((programs, device))
        return [torch.empty(programs * 64, dtype=torch.int8), torch.empty(0, dtype=torch.int8)]

    monkeypatch.setattr(loaded, "scratch", scratch)

    def forward(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        replay.recorder().launched(SimpleNamespace(name="k"), loaded, (5, 2), [y], {})  # type: ignore[union-attr]
        return y

    x = torch.randn(4, 8)
    tape = _tape(forward, (x,), [x])
    tape.run(x)
    tape.run(x)
    assert made == [(10, -1), (10, -1)] and all(values[1] != 0 for _, _, values in driver.launches)


def test_a_refused_launch(driver: Driver) -> None:
    """It is tried once more with this thread's context set, wherever in the call it stands; then it is an error."""
    loaded = _loaded(driver, 3, ["*fp32"])

    def forward(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        for _ in range(2):
            replay.recorder().launched(SimpleNamespace(name="k"), loaded, (1,), [y], {})  # type: ignore[union-attr]
        return y

    x = torch.randn(4, 8)
    tape = _tape(forward, (x,), [x])
    for refused in (0, 1):
        driver.launches.clear()
        driver.refused = {refused}
        y = tape.run(x)
        assert [values[0] for _, _, values in driver.launches if values] == [y.data_ptr()] * 2
    assert driver.contexts == [-1, -1]
    driver.launches.clear()
    driver.refused = {1, 2}
    with pytest.raises(LaunchError, match="launch 1 of a repeated op: CUDA error 201"):
        tape.run(x)


def test_ops_of_pytorch_between_launches(driver: Driver) -> None:
    """Their arguments are parts of inputs and of what earlier steps made; results are new, or written in place."""
    loaded = _loaded(driver, 3, ["*fp32", "*fp32"])

    def forward(x: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.new_zeros(2, 8)
        y[1].copy_(x[2])
        product = torch.mm(x, y.T)
        replay.recorder().launched(SimpleNamespace(name="k"), loaded, (1,), [product, x[1:]], {})  # type: ignore
        total[1:2].add_(product.sum())
        values, _ = torch.max(product, 0)
        return product, torch.cat([values, y[0]]), values.view(1, -1)

    make = lambda: (torch.randn(4, 8), torch.zeros(3))  # noqa: E731
    x, total = make()
    with torch.no_grad():
        tape = _tape(forward, (x, total), [x, total])
        for _ in range(3):
            (x, total), (_, other) = make(), make()
            version = total._version
            driver.launches.clear()
            product, both, values = tape.run(x, total)
            with observed_call([x, other]):
                exact = forward(x, other)
            for ours, right in zip((product, both, values), exact, strict=True):
                assert torch.equal(ours, right) and ours.stride() == right.stride() and not ours._is_view()
            assert torch.equal(total, other) and total[1] == product.sum() and total._version > version
            assert driver.launches[0][2][:2] == [product.data_ptr(), x.data_ptr() + 32]


def test_an_address_is_packed_once_and_scratch_allocated_once(driver: Driver) -> None:
    """Scratch of launches alone is one allocation, but what ends before another step takes memory."""
    first = _loaded(driver, 3, ["*fp32", "*fp32", "*fp32", "i32"])
    second = _loaded(driver, 5, ["*fp32", "*fp32", "*fp32"])

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        y, a, b = torch.empty_like(x), x.new_empty(3), x.new_empty((2, 200))
        viewed, early = x.new_empty(4), x.new_empty(5)
        launched = replay.recorder().launched  # type: ignore[union-attr]
        launched(SimpleNamespace(name="k"), first, (1,), [x, a, early, 7], {})
        launched(SimpleNamespace(name="k"), first, (2,), [a, b, viewed, 8], {})
        total = viewed.sum()
        launched(SimpleNamespace(name="k"), second, (3,), [a, b[1], y], {})
        return y, total

    x = torch.randn(4, 8)
    tape = _tape(forward, (x,), [x])
    names = tape.run.__code__.co_varnames
    assert "scratch" in names and {"b1", "b2"}.isdisjoint(names) and {"b3", "b4"} <= set(names)
    for _ in range(2):
        driver.launches.clear()
        x = torch.randn(4, 8)
        y, _ = tape.run(x)
        (_, _, one), (_, _, two), (_, _, three) = driver.launches
        assert one[0] == x.data_ptr() and one[3] == 7 and two[3] == 8
        assert one[1] == two[0] == three[0] and two[1] == one[1] + 512
        assert three[1] == two[1] + 800 and three[2] == y.data_ptr()
        assert one[1] % 16 == 0 and len({*one[:3], *two[:3], three[2]}) == 6
